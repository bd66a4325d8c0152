"""The studies' arithmetic on logs whose answers can be worked out by hand, and their runs at a size
of milliseconds."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import train  # noqa: E402
from experiments import alignment, depth, study  # noqa: E402
from experiments.runs import Run  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from multilevel import restrict  # noqa: E402

torch.set_num_threads(1)
TINY = ("--n_embd 8 --n_head 2 --block_size 4 --batch_size 2 --steps 2 --warmup 1 --cycles 1 "
        "--coarse_steps 2 --eval_interval 1 --eval_sequences 4 --device cpu --dtype float32 "
        "--compile off").split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "val"):
        tokens = np.random.default_rng(1).integers(17, size=200)
        tokens.astype("<u2").tofile(folder / f"{split}_000000.bin")
    meta = dict(tokenizer="bytes", vocab_size=17, eot=16, train_tokens=200, val_tokens=200)
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


def row(level="fine", step=0, flops=0.0, val=None, train_loss=None, blocks=None):
    blocks = flops / 2 if blocks is None else blocks
    return dict(level=level, step=float(step), tokens=0.0, flops=float(flops), seconds=0.0, lr=None,
                flops_blocks=float(blocks), train_loss=train_loss, val_loss=val)


def evals(*pairs, blocks=0.5):
    """A log of evaluations (flops, loss), a fine step each."""
    return [row(step=i, flops=f, val=v, blocks=f * blocks) for i, (f, v) in enumerate(pairs)]


def write(folder, rows, target_loss=0.0, steps=4):
    """A run folder, as train.py leaves it."""
    os.makedirs(folder)
    settings = dict(steps=steps, target_loss=target_loss, batch_size=1, block_size=4, data="data/x",
                    device="cpu", dtype="float32", eval_sequences=4)
    about = dict(settings=settings, data=dict(tokenizer="bytes", train_tokens=200), parameters=100,
                 torch="2")
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(about, f)
    with open(os.path.join(folder, "log.csv"), "w") as f:
        f.write(",".join(train.COLUMNS) + "\n")
        for r in rows:
            f.write(",".join("" if r[c] is None else str(r[c]) for c in train.COLUMNS) + "\n")


def cells(lines, arm):
    """{header: cell} of the line of a table that is about arm."""
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return next(dict(zip(split[0], line)) for line in split[2:] if arm in line)


SINGLE = evals((0, 5), (10, 4), (20, 3), (30, 2), (40, 2.5))  # lowest 2 at 30, not at the end
MULTI = evals((0, 5), (5, 3), (12, 2.5), (20, 1.5), (30, 1.0), blocks=0.4)  # 2 at 16, halfway


# Arithmetic ---------------------------------------------------------------------------------------

def test_saving_interpolates_between_evaluations():
    assert study.saving(MULTI, SINGLE) == pytest.approx(1 - 16 / 30)
    assert study.saving(MULTI, SINGLE, column="flops_blocks") == pytest.approx(1 - 16 * 0.4 / 15)
    assert study.saving(SINGLE, SINGLE) == 0
    assert study.saving(SINGLE, MULTI) is None                       # 1.0 is never reached
    slower = evals((0, 5), (50, 3), (60, 2))
    assert study.saving(slower, SINGLE) == pytest.approx(1 - 60 / 30)  # costs more: negative
    # Another baseline, still to the single run's lowest:
    assert study.saving(MULTI, slower, SINGLE) == pytest.approx(1 - 16 / 60)
    assert study.saving(MULTI, evals((0, 5), (50, 3)), SINGLE) is None
    assert study.saving([], SINGLE) is None
    assert study.saving(MULTI, SINGLE, above=3) is None  # 5, where both start
    # 2.75 lies between 5 and 12, and between 20 and 30:
    assert study.saving(MULTI, SINGLE, above=0.75) == pytest.approx(1 - 8.5 / 22.5)


def test_saving_counts_an_evaluation_after_a_prolongation():
    rows = [row(flops=0, val=5), row("coarse1", 2, 4, train_loss=3.0),
            row("prolong1", 2, 4, val=1.0), row(step=4, flops=9, val=0.5)]
    assert study.saving(rows, SINGLE) == pytest.approx(1 - 3 / 30)  # 5 to 1 in 4 FLOPs


def test_smoothing_is_a_mean_over_steps_at_evaluations():
    rows = [row(step=1, flops=1, train_loss=10.0), row("coarse1", 8, 5, train_loss=99.0),
            row("prolong1", 8, 5, val=7.0), row(step=4, flops=8, train_loss=6.0, val=7.0),
            row(step=6, flops=10, train_loss=4.0), row(step=8, flops=12, train_loss=2.0, val=6.0),
            row(step=9, flops=13, train_loss=1.0, val=6.0)]
    means = [(1 * 10 + 3 * 6) / 4, (2 * 4 + 2 * 2) / 4, (2 * 4 + 2 * 2 + 1) / 5]
    assert study.smooth(rows, window=4) == ([8, 12, 13], means)
    means = [(10 + 18 + 8 + 4) / 8, (18 + 8 + 4 + 1) / 8]
    assert study.smooth(rows, "step", window=8) == ([8, 9], means)
    assert study.smooth(rows, window=10) == ([], [])
    assert study.saving(rows, rows, curve=study.smooth) is None  # shorter than the window of 1,000


def test_arms_are_paired_by_seed(tmp_path):
    shifted = [{**r, "flops": 2 * r["flops"]} for r in SINGLE]
    logs = {"single-seed1": SINGLE, "single-seed2": shifted, "single-seed4": SINGLE,
            "full-seed1": evals((0, 5), (99, 2.1)), "multilevel-seed1": MULTI,
            "multilevel-seed2": MULTI, "multilevel-seed3": MULTI, "unknown-seed1": MULTI}
    for name, rows in logs.items():
        write(tmp_path / "narrow" / name, rows, steps=len(rows) - 1)
    runs = study.load(tmp_path, "narrow", study.ARMS)
    seeds = {arm: sorted(found) for arm, found in runs.items()}
    assert seeds == {"single": [1, 2, 4], "multilevel": [1, 2, 3], "full": [1]}
    found = cells(study.arms_table(runs), "multilevel")
    a, b = 100 * (1 - 16 / 30), 100 * (1 - 16 / 60)
    assert found["seeds"] == "1 2"
    assert found["saving, all FLOPs"] == f"{(a + b) / 2:.1f}% ± {abs(a - b) / 2**0.5:.1f}"
    assert found["lowest held-out loss"] == "1.000 ± 0.000"
    by_seed = list(cells(study.seeds_table(runs), "multilevel").values())[1:]
    assert by_seed == [f"1.000, {a:.1f}%", f"1.000, {b:.1f}%", "1.000", ""]
    assert cells(study.seeds_table(runs), "full")["seed 1"].endswith(", not reached")
    assert cells(study.arms_table(runs), "full")["saving, all FLOPs"] == "not reached (1 of 1)"
    assert cells(study.arms_table(runs), "single")["saving, all FLOPs"] == ""


def test_controls_as_the_baseline():
    def run(rows):
        return Run(dict(settings=dict(steps=len(rows) - 1, target_loss=0)), rows)
    # 2 at 20, its own lowest 1.5 at 40; the multilevel run is there at 16 and 20.
    constant = evals((0, 5), (20, 2), (40, 1.5))
    runs = {"single": {1: run(SINGLE)}, "multilevel": {1: run(MULTI)},
            "constant": {1: run(constant), 2: run(constant)}}
    found = cells(study.controls_table(runs), "constant")
    assert found["saving, all FLOPs"] == f"{100 * (1 - 16 / 20):.1f}%"
    assert found["blocks only"] == f"{100 * (1 - 16 * 0.4 / 10):.1f}%"
    assert found["to the baseline's own lowest loss"] == "50.0%"
    assert found["lowest loss, difference"] == "-0.500"
    saved = 100 * (1 - (12 + 8 * 0.1) / 26)  # to 2.4
    assert cells(study.targets_table(runs), "0.4")["multilevel"] == f"{saved:.1f}%"
    # A step of 2, 3 or 4 forward passes: other FLOPs, the same saving.
    table = [cells(study.counting_table(runs), factor) for factor in "234"]
    assert [t["of single"] for t in table] == ["20", "30", "40"]
    assert [t["FLOPs of multilevel"] for t in table] == ["10.67", "16", "21.33"]
    assert {(t["saving, all FLOPs"], t["blocks only"]) for t in table} == {("46.7%", "57.3%")}
    runs["multilevel"] = {1: run(evals((0, 5), (9, 4)))}
    assert cells(study.counting_table(runs), "3")["FLOPs of multilevel"] == "not reached"


def test_savings_of_the_sum_of_rates():
    """By hand: the single-level run sums to 1.2e-3 (716/2 + 15,285 (1 + 0.1) / 2); constant it
    takes 358 + 15,285 x 0.55 + 358 steps."""
    lines = study.rates_table("paper")
    arms = ("single", "constant", "multilevel", "full", "full-blocks", "cycles-15")
    table = {arm: [float(v.strip("%")) / 100 for k, v in cells(lines, arm).items() if k != "arm"]
             for arm in arms}
    assert table["single"] == [0, 0]
    constant = 1 - (358 + 15285 * 0.55 + 357) / 16000
    assert table["constant"] == pytest.approx([constant] * 2, abs=1e-3)
    s = train.parse_settings(["--mode", "single"])[0]
    rates = [u.lr for u in train.plan(s, GPTConfig())]
    coarse = 7000 * 0.76943  # in fine steps
    wanted = sum(rates)
    less, few = 0.65 * coarse, 15 / 35 * coarse
    for arm, spent, steps in (("multilevel", coarse, (3500, 7000)),
                              ("full", coarse, (coarse, coarse)),
                              ("full-blocks", less, (less, less)),
                              ("cycles-15", few, (1500, 3000))):
        for found, n in zip(table[arm], steps):
            # What the coarse phase gives, then fine steps until the sum is the single-level run's.
            total, fine = 1.2e-3 * n, 0
            while total < wanted:
                total, fine = total + rates[fine], fine + 1
            assert found == pytest.approx(1 - (spent + fine) / 16000, abs=2e-3)


def test_a_run_that_did_not_come_to_its_end(tmp_path):
    write(tmp_path / "narrow" / "single-seed1", SINGLE)
    write(tmp_path / "narrow" / "constant-seed1", MULTI[:4], target_loss=1.6)  # as it was told
    write(tmp_path / "narrow" / "full-seed1", SINGLE[:3])  # killed ...
    with open(tmp_path / "narrow" / "full-seed1" / "log.csv", "a") as f:
        f.write("fine,3,0,12")  # ... in the middle of a line
    (tmp_path / "narrow" / "multilevel-seed1").mkdir()
    (tmp_path / "narrow" / "multilevel-seed1" / "config.json").write_text('{"settings": {"st')
    runs = {arm: study.read_run(tmp_path / "narrow" / f"{arm}-seed1")
            for arm in ("single", "constant", "full", "multilevel")}
    states = [(run.complete, run.finished) for run in runs.values() if run]
    assert states == [(True, True), (False, True), (False, False)]
    assert runs["full"].rows == SINGLE[:3] and runs["multilevel"] is None
    runs = study.load(tmp_path, "narrow", study.ARMS)
    assert list(runs) == ["constant", "single"]  # what is not finished is nowhere in a report
    found = cells(study.arms_table(runs), "constant")
    assert (found["seeds"], found["lowest held-out loss"]) == ("1\\*", "")
    assert found["saving, all FLOPs"] == f"{100 * (1 - 16 / 30):.1f}%"
    assert study.savings(runs, "constant", above=-1) == {}  # 1.0: it might have reached that
    assert study.savings(runs, "constant", above=1)
    assert study.read_run(tmp_path / "nowhere") is None


def test_keep_thins_and_preserves_every_number(tmp_path, capsys):
    """A log of 3,000 fine steps and a cycle, a row every 10: thinned to its evaluations, with the
    same savings and means."""
    def log(slope):
        random, rows, flops = np.random.default_rng(1), [row(val=9.0)], 0.0
        for step in range(1, 3001):
            flops += 2
            if step % 10 == 0 or step == 1:
                val, loss = 9 - slope * step, 9 - slope * step + random.normal()
                rows.append(row("fine", step, flops, val if step % 100 == 0 else None, loss))
            for i in (1, 2) if step == 1 else ():
                for j in range(10, 101, 10):
                    flops += 10
                    step_of = j + 100 * (i - 1)
                    rows.append(row(f"coarse{i}", step_of, flops, None, 8.0 + i + j / 1000))
                rows.append(row(f"prolong{i}", 100 * i, flops, 8.9))
        return rows
    logs = {"single-seed1": log(1e-3), "multilevel-seed1": log(1.7e-3),
            "full-seed1": log(1e-3)[:90]}
    for name, rows in logs.items():
        write(tmp_path / "runs" / "narrow" / name, rows, steps=3000)
    study.main(["keep", "--out", str(tmp_path / "runs"), "--results", str(tmp_path / "kept")])
    before, after = (study.load(tmp_path / place, "narrow", study.ARMS)
                     for place in ("runs", "kept"))
    assert not (tmp_path / "kept" / "narrow" / "full-seed1").exists()  # not finished
    for curve in (study.evaluations, study.smooth):
        whole, thinned = ([found[arm][1].rows for arm in ("multilevel", "single")]
                          for found in (before, after))
        saved = study.saving(*whole, curve=curve)
        assert saved > 0.3 and study.saving(*thinned, curve=curve) == pytest.approx(saved, abs=1e-4)
        assert np.array(curve(thinned[0])) == pytest.approx(np.array(curve(whole[0])), abs=1e-4)
    kept = after["single"][1].rows
    assert len(kept) == 1 + 1 + 2 * 2 + 30
    assert [r["train_loss"] for r in kept if r["level"] == "coarse2"] == [pytest.approx(10.055)]
    study.main(["report", "--results", str(tmp_path / "kept")])
    text = (tmp_path / "kept" / "narrow" / "report.md").read_text()
    assert text.strip() in capsys.readouterr().out
    if "matplotlib" in sys.modules:  # the same figure to the byte
        drawn = (tmp_path / "kept" / "narrow" / "loss.svg").read_bytes()
        study.main(["report", "--results", str(tmp_path / "kept")])
        assert drawn == (tmp_path / "kept" / "narrow" / "loss.svg").read_bytes()
    path = tmp_path / "kept" / "narrow" / "single-seed1" / "config.json"
    path.write_text(path.read_text().replace("data/x", "data/y"))
    with pytest.raises(SystemExit, match="differ in data: they cannot be compared"):
        study.main(["report", "--results", str(tmp_path / "kept")])
    with pytest.raises(SystemExit, match="no single-level run"):
        study.main(["report", "--scale", "paper", "--results", str(tmp_path / "kept")])


# Arms ---------------------------------------------------------------------------------------------

def test_arms_use_flags_of_train_and_differ():
    names = {f.name for f in train.fields(train.Settings)}
    settings = {}
    for scale, arm in [*(("paper", arm) for arm in study.ARMS), ("paper-b1", "multilevel"),
                       ("narrow", "multilevel")]:
        flags = [*study.SCALES[scale].split(), *study.ARMS[arm].split()]
        # In full: argparse takes prefixes too.
        assert {w[2:] for w in flags if w.startswith("--")} <= names
        s = settings[scale, arm] = train.parse_settings(flags)[0]
        assert (s.steps, s.warmup, s.n_layer) == (16000, 715, 12) and not s.coarse_lr
    assert len({repr(s) for s in settings.values()}) == len(settings)
    for arm in study.ARMS:
        arms = [settings["paper", a] for a in (arm, study.baseline_of(arm))]
        assert arms[1].mode == "single"
        assert len({(s.optimizer, s.momentum, s.grad_clip) for s in arms}) == 1
        rate = next((float(r) for r in ("0.03", "0.1") if arm.removesuffix("-kept").endswith(r)),
                    arms[1].lr)
        assert arms[0].lr == rate
        assert arms[0].min_lr == pytest.approx(arms[1].min_lr / arms[1].lr * rate)
    s = settings["paper", "multilevel"]
    assert (s.mode, s.kind, s.cycles, s.coarse_steps) == ("multilevel", "alternate", 35, 100)
    assert (s.lr, s.delta) == (1.2e-3, 0.25)


def test_full_blocks_is_matched_without_the_head():
    s, _ = train.parse_settings(study.ARMS["full-blocks"].split())
    steps = sum(u.level > 0 for u in train.plan(s, GPTConfig()))
    assert steps == pytest.approx(35 * 100, abs=35)  # 100 whole steps are 200 of half the blocks


@pytest.mark.parametrize("arm", study.ARMS)
def test_two_steps_of_every_arm(arm, data, tmp_path):
    train.main([*study.SCALES["narrow"].split(), *study.ARMS[arm].split(), "--data", data,
                "--out", str(tmp_path / "run"), *TINY])
    found = study.read_run(tmp_path / "run")
    assert found.complete and all(np.isfinite(v) for v in study.evaluations(found.rows)[1])
    levels = {r["level"] for r in found.rows} - {"fine"}
    if found.about["settings"]["mode"] == "single":
        sets = 0
    else:
        sets = 1 if arm.startswith("full") else {"in-turn": 1, "stride-3": 3}.get(arm, 2)
    assert levels == {f"{name}{i + 1}" for i in range(sets) for name in ("coarse", "prolong")}


# The runner ---------------------------------------------------------------------------------------

@pytest.fixture
def machine(monkeypatch):
    """Replaces the processes that the runner starts: each writes the log that machine.logs has for
    its folder, and returns its code."""
    class Machine:
        logs, codes, calls = {}, {}, []

        def run(self, command, env, **_):
            name = os.path.basename(command[command.index("--out") + 1])
            self.calls.append((name, command[2:], env))
            folder = command[command.index("--out") + 1]
            if name in self.logs:
                for old in os.listdir(folder):
                    os.remove(os.path.join(folder, old))
                os.rmdir(folder)
                write(folder, self.logs[name])
            return subprocess.CompletedProcess(command, self.codes.get(name, 0))
    it = Machine()
    it.calls = []
    monkeypatch.setattr(study.subprocess, "run", it.run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return it


def test_runner_skips_finished_and_resumes_unfinished(machine, tmp_path, capsys):
    write(tmp_path / "narrow" / "single-seed1", SINGLE)
    write(tmp_path / "narrow" / "full-seed1", SINGLE[:2])
    machine.logs = {"single-seed2": SINGLE, "full-seed1": SINGLE, "full-seed2": SINGLE}
    study.main(["run", "--arms", "full", "single", "--seeds", "1", "2", "--out", str(tmp_path),
                "--jobs", "1", "--seed_of_mine", "3"])
    names = [name for name, *_ in machine.calls]
    assert names == ["full-seed1", "single-seed2", "full-seed2"]  # baselines first, seed by seed
    assert ["--resume" in flags for _, flags, _ in machine.calls] == [True, False, False]
    assert all(flags[-3 if "--resume" in flags else -2:][:2] == ["--seed_of_mine", "3"]
               for _, flags, _ in machine.calls)
    assert all(set(study.SCALES["narrow"].split()) <= set(flags) for _, flags, _ in machine.calls)
    assert not any("--target_loss" in flags for _, flags, _ in machine.calls)
    assert "single-seed1: finished before" in capsys.readouterr().out
    study.main(["run", "--arms", "full", "single", "--seeds", "1", "2", "--out", str(tmp_path)])
    assert len(machine.calls) == 3  # nothing left to do


def test_runner_stops_early_at_the_baselines_lowest_loss(machine, tmp_path):
    machine.logs = {"single-seed1": SINGLE, "constant-seed1": SINGLE}
    study.main(["run", "--arms", "constant", "single", "--out", str(tmp_path), "--jobs", "2",
                "--stop_early"])
    assert [name for name, *_ in machine.calls] == ["single-seed1", "constant-seed1"]
    flags = machine.calls[1][1]
    assert flags[flags.index("--target_loss") + 1] == "1.9800"
    assert "--target_loss" not in machine.calls[0][1]
    with pytest.raises(SystemExit, match="single-seed2"):
        study.main(["run", "--arms", "constant", "--seeds", "2", "--out", str(tmp_path),
                    "--stop_early"])
    assert len(machine.calls) == 2


def test_runner_takes_a_run_that_stopped_early_to_its_end(machine, tmp_path):
    write(tmp_path / "narrow" / "single-seed1", SINGLE)
    write(tmp_path / "narrow" / "constant-seed1", MULTI[:4], target_loss=1.6)
    study.main(["run", "--arms", "constant", "--out", str(tmp_path), "--stop_early"])
    assert machine.calls == []
    study.main(["run", "--arms", "constant", "--out", str(tmp_path)])
    (_, flags, _), = machine.calls
    assert "--resume" in flags and "--target_loss" not in flags


def test_runner_says_what_failed_and_goes_on(machine, tmp_path):
    machine.codes = {"single-seed1": 3}
    machine.logs = {"full-seed1": SINGLE}
    with pytest.raises(SystemExit, match=r"single-seed1: exit 3, see .*single-seed1\.txt"):
        study.main(["run", "--arms", "single", "full", "--out", str(tmp_path)])
    assert [name for name, *_ in machine.calls] == ["single-seed1", "full-seed1"]


def test_runner_shares_out_cores_and_gpus(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    for given, wanted in ((None, "4"), ("1", "1")):  # a number of threads that is asked for stays
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        study.main(["run", "--arms", "single", "--out", str(tmp_path / "a"), "--jobs", "2"])
        assert machine.calls[-1][2]["OMP_NUM_THREADS"] == wanted
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    study.main(["run", "--arms", "headline", "--out", str(tmp_path / "b")])
    assert {env["CUDA_VISIBLE_DEVICES"] for *_, env in machine.calls[2:]} <= {"0", "1"}
    assert len(machine.calls) == 6
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # of a machine that is shared
    study.main(["run", "--arms", "headline", "--out", str(tmp_path / "c")])
    assert {env["CUDA_VISIBLE_DEVICES"] for *_, env in machine.calls[6:]} <= {"5", "7"}


def test_names_of_studies_and_unknown_flags(machine, tmp_path, capsys):
    study.main(["run", "--arms", "counting", "momentum", "single-adamw", "--out", str(tmp_path),
                "--jobs", "1"])
    wanted = [*study.STUDIES["counting"], *study.STUDIES["momentum"]]
    assert sorted(name[:-6] for name, *_ in machine.calls) == sorted(wanted)
    for wrong in (["report", "--seeds", "1", "--stop"], ["run", "--arms", "nothing"]):
        with pytest.raises(SystemExit):
            study.main(wrong)
    assert "unknown: --stop" in capsys.readouterr().err


def test_run_keep_report_for_real(data, tmp_path, capfd):
    study.main(["run", "--arms", "single", "multilevel", "--out", str(tmp_path / "out"),
                "--jobs", "2", "--data", data, *TINY])
    study.main(["keep", "--out", str(tmp_path / "out"), "--results", str(tmp_path / "kept")])
    study.main(["report", "--results", str(tmp_path / "kept")])
    out = capfd.readouterr().out
    assert re.search(r"\| headline \| multilevel \| 1 \| 2\.8\d\d \|", out)
    assert re.search(r"single-seed1: finished after", out)
    about = (tmp_path / "kept" / "narrow" / "single-seed1" / "config.json").read_text()
    assert json.loads(about)["settings"]["out"] == "single-seed1" and str(tmp_path) not in about


# Alignment and depth ------------------------------------------------------------------------------

def tiny_model():
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=17, block_size=4, n_layer=4, n_head=2, n_embd=8))
    for p in model.parameters():
        p.data.mul_(10)
    return model, torch.randint(17, (6, 5))


def settings(**more):
    return train.replace(train.Settings(batch_size=4, device="cpu", dtype="float32"), **more)


def test_cosines_against_a_naive_computation():
    model, batch = tiny_model()
    keep, s = [1, 3], settings()
    coarse = restrict(model, keep)
    (fine_loss, ours), (coarse_loss, theirs) = (alignment.gradients(s, net, batch)
                                                for net in (model, coarse))
    assert all(p.grad is None for p in model.parameters())
    found = {part: rest for part, *rest in alignment.compare(model, keep, ours, theirs)}
    # In one piece: 6 sequences, not 4 and 2.
    losses = [net(batch[:, :-1], batch[:, 1:])[1] for net in (model, coarse)]
    assert [fine_loss, coarse_loss] == pytest.approx([x.item() for x in losses])
    wanted = {f"block {i + 1}": list(model.blocks[i].parameters()) for i in keep}
    wanted.update(blocks=[p for i in keep for p in model.blocks[i].parameters()],
                  tokens=[model.wte.weight], positions=[model.wpe.weight])
    assert set(found) == set(wanted)
    for part, ps in wanted.items():
        a, b = (torch.cat([g.ravel() for g in torch.autograd.grad(loss, ps, retain_graph=True)])
                for loss in losses)
        a, b = a.numpy(), b.numpy()
        cosine = np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)
        assert found[part] == [pytest.approx(cosine, abs=1e-5),
                               pytest.approx(np.linalg.norm(b) / np.linalg.norm(a), rel=1e-4)]
        assert abs(found[part][0]) < 0.999


def test_the_full_set_is_aligned_with_itself():
    model, batch = tiny_model()
    (loss, ours), (same, theirs) = (alignment.gradients(settings(), net, batch)
                                    for net in (model, restrict(model, range(4))))
    assert loss == same
    assert all(rest == pytest.approx([1, 1])
               for _, *rest in alignment.compare(model, range(4), ours, theirs))


def test_alignment_measures_a_run_and_leaves_it_alone(data, tmp_path, capsys):
    flags = [*TINY, "--data", data, "--steps", "5", "--cycles", "2", "--eval_interval", "2",
             "--lr", "0.5"]
    train.main([*flags, "--out", str(tmp_path / "plain")])
    alignment.main(["--into", str(tmp_path / "a"), "--sequences", "2", "--every", "1", *flags,
                    "--out", str(tmp_path / "run")])
    plain, watched = ([{**r, "seconds": 0} for r in train.read_log(tmp_path / name)]
                      for name in ("plain", "run"))
    assert plain == watched
    assert train.evaluate.__module__ == "train" and train.prolong.__module__ == "multilevel"
    rows = alignment.read(tmp_path / "a", "gradients.csv", alignment.GRADIENTS[:4])
    points = list(dict.fromkeys((r["level"], r["step"]) for r in rows))
    assert points == [(r["level"], r["step"]) for r in plain if r["val_loss"] is not None]
    assert len(rows) == len(points) * (2 * (6 + 3) + 12 + 3)
    folds = alignment.read(tmp_path / "a", "prolongation.csv", alignment.PROLONGATIONS[:2])
    after = {(r["level"], r["step"]): r["val_loss"] for r in plain}
    assert len(folds) == 4
    assert all(f["fine_after"] == after[f["level"], f["step"]] != f["fine_before"] for f in folds)
    with open(tmp_path / "a" / "prolongation.csv", "a") as f:  # as a resumed run measures it again
        f.write("prolong2,8,3.0,2.0,1.0\n")
    again = alignment.read(tmp_path / "a", "prolongation.csv", alignment.PROLONGATIONS[:2])
    last = dict(level="prolong2", step=8, fine_before=3, fine_after=2, coarse=1)
    assert again[:3] == folds[:3] and again[3:] == [last]
    text = (tmp_path / "a" / "report.md").read_text()
    assert text.strip() in capsys.readouterr().out and "| prolong2 | 2 |" in text


def test_loss_before_a_prolongation(data, tmp_path):
    """With delta = 0 a prolongation changes nothing: before is after."""
    flags = [*TINY, "--data", data, "--delta", "0", "--lr", "0.5"]
    alignment.measure([*flags, "--out", str(tmp_path / "run")], str(tmp_path / "a"), sequences=2)
    folds = alignment.read(tmp_path / "a", "prolongation.csv", alignment.PROLONGATIONS[:2])
    assert len(folds) == 2
    assert all(f["fine_before"] == f["fine_after"] != f["coarse"] for f in folds)


def test_depth():
    assert depth.ratios(GPTConfig()) == [pytest.approx(0.769, abs=5e-4), 0.5]
    assert [round(depth.ratios(GPTConfig(n_layer=n))[0], 2) for n in (6, 24, 48)] == \
        [0.85, 0.68, 0.61]
    config = GPTConfig(vocab_size=17, block_size=4, n_layer=4, n_head=2, n_embd=8)
    fine, coarse = depth.times(config, "cpu", "float32", 2, False, 3)
    assert len(fine) == len(coarse) == 3 and min(fine + coarse) > 0
