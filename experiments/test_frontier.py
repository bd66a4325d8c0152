"""The depth frontier on logs whose answers can be worked out by hand; the growths against naive
code, in runs of milliseconds."""

import json
import os
import re
import sys

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import train  # noqa: E402
from experiments import frontier, growth, runs, study  # noqa: E402
from experiments.test_study import TINY, data, machine, row, write  # noqa: E402, F401
from model import GPT, GPTConfig  # noqa: E402
from multilevel import flops_per_token  # noqa: E402

NARROW = GPTConfig(vocab_size=257, block_size=64, n_layer=12, n_head=8, n_embd=64)
NESTED = [*TINY, "--mode", "nested", "--n_layer", "4", "--start_layers", "2", "--start_steps", "3",
          "--optimizer", "adamw", "--cycles", "0"]


# Arms ---------------------------------------------------------------------------------------------

def settings_of(arm):
    """train.py's settings of an arm, and (via, via_steps) if it has two stages."""
    scale = next(scale for scale, arms in frontier.FRONTIERS.items() if arm in arms)
    command, own = study.command_of(scale, arm)[2:], {}
    for flag in ("--growth", "--via", "--via_steps", "--rewarm"):
        if flag in command:
            at = command.index(flag)
            own[flag] = command[at + 1]
            del command[at:at + 2]
    s = train.parse_settings(command)[0]
    return s, tuple(int(own[flag]) for flag in ("--via", "--via_steps") if flag in own)


def test_arms_cost_their_budget():
    settings, stages = {}, {}
    for arm in frontier.FRONTIER:
        settings[arm], stages[arm] = settings_of(arm)
    for arm, s in settings.items():
        kind, depth, budget, what = re.fullmatch(r"(\D+)(\d+)-(\d+)-?(.*)", arm).groups()
        narrow = arm in frontier.FRONTIERS["narrow"]
        first = 2500 if narrow else 800
        if int(budget) != first:  # as many times the steps: planning them all takes half a minute
            small, times = settings[arm.replace(budget, str(first))], int(budget) / first
            assert s.steps == pytest.approx(small.steps * times, rel=1e-3)
            if kind == "nested":
                assert s.start_steps == pytest.approx(small.start_steps * times, 2e-3)
            continue
        config = GPTConfig(257, 64, s.n_layer, 8, 64) if narrow else GPTConfig(n_layer=s.n_layer)
        step = flops_per_token(config, 12)
        assert (s.batch_size, s.block_size, s.n_embd) == ((8, 64, 64) if narrow else (4, 256, 256))
        plan, sets_of = train.plan, train.sets_of
        if stages[arm]:
            plan, sets_of = growth.staged(s, *stages[arm], plan, sets_of)
        depths = [s.n_layer, *map(len, sets_of(s))]
        spent = [flops_per_token(config, depths[u.level]) for u in plan(s, config)]
        start, spent = sum(spent[:s.start_steps]), sum(spent)
        if kind == "equal-data":
            batches = settings[f"nested3-{budget}"]
            assert s.steps == batches.start_steps + batches.steps and s.n_layer == 12
        else:
            assert spent / step == pytest.approx(int(budget), rel=2e-3)
        if kind == "nested":
            assert (s.mode, s.n_layer, s.start_layers) == ("nested", 12, int(depth))
            share = {"late": 0.6, "early": 0.15, "early-zero": 0.15, "via6": 0.35,
                     "via6-early": 0.2, "via6-earlier": 0.1}.get(what, 1 / 3)
            assert start / spent == pytest.approx(share, rel=4e-3)
            if what.startswith("via6"):
                last = stages[arm][1] * flops_per_token(config, 6)
                wanted = {"via6-early": 0.15, "via6-earlier": 0.075}.get(what, 0.25)
                assert last / spent == pytest.approx(wanted, rel=2e-3)
        else:
            assert (s.mode, s.n_layer) == ("single", int(depth))
        lr = float(what[2:]) if what.startswith("lr") else 0.003 if narrow else 0.001
        assert (s.lr, s.min_lr) == (lr, pytest.approx(lr / 10))
        assert s.schedule == ("cosine" if what == "cosine" else "wsd") and s.optimizer == "adamw"
        assert s.decay == (0.15 if what == "decay0.15" else 0.3)
        if s.mode == "nested":
            assert s.cycles == (10 if what in ("cycles", "cycles3") else 0)
    assert len({str(study.command_of("narrow", arm)) for arm in settings}) == len(settings)
    assert not frontier.FRONTIER.keys() & study.ARMS.keys()
    for scale, arm in (("paper", "scratch1-2500"), ("paper-b4", "scratch12-2500"),
                       ("narrow", "scratch12-800"), ("paper", "nested")):
        with pytest.raises(SystemExit):  # those budgets are not another scale's
            study.main(["run", "--scale", scale, "--arms", arm])


def test_nested_stands_for_all_small_budgets_first(machine, tmp_path, monkeypatch):
    arms = {arm: flags for arm, flags in frontier.FRONTIERS["narrow"].items() if "3-" in arm}
    monkeypatch.setitem(frontier.FRONTIERS, "narrow", arms)
    study.main(["run", "--arms", "nested", "--out", str(tmp_path), "--jobs", "1", "--stop_early"])
    names = [name.removesuffix("-seed1") for name, *_ in machine.calls]
    budgets = [int(name.split("-")[1]) for name in names]
    assert sorted(names) == sorted(arms) and budgets == sorted(budgets)
    assert not any("--target_loss" in flags for _, flags, _ in machine.calls)
    for name, (_, flags, _) in zip(names, machine.calls):
        variant = name.split("-", 2)[-1].removeprefix("early-")
        assert ("--growth" in flags) == (
            variant in (*growth.GROWTHS, "rewarm") or variant.startswith("via6"))
        script = study.command_of("narrow", name)[1]
        assert script.endswith("growth.py" if "--growth" in flags else "train.py")
        if "--growth" in flags:
            how = flags[flags.index("--growth") + 1]
            assert how == (variant if variant in growth.GROWTHS else "copy")


# Tables -------------------------------------------------------------------------------------------

def keep_run(root, arm, losses, flops, seed=1, steps=4, blocks=0.5, **settings):
    """A kept run with these evaluations, the last one after all its FLOPs."""
    folder = root / "narrow" / f"{arm}-seed{seed}"
    n = len(losses) - 1
    shares = [(i / n, v) for i, v in enumerate(losses)]
    write(folder, [row(step=steps * x, flops=flops * x, val=v, blocks=blocks * flops * x)
                   for x, v in shares], steps=4)
    about = json.loads((folder / "config.json").read_text())
    about["settings"].update(dict(schedule="wsd", lr=0.003), **settings)
    (folder / "config.json").write_text(json.dumps(about))


@pytest.fixture
def kept(tmp_path):
    """12 layers: 3, 2 and 1.5 nats after 100, 200 and 400 FLOPs; 3 layers: 2.2 after 100."""
    keep_run(tmp_path, "scratch12-2500", [5, 2.5, 3.2], 100)
    keep_run(tmp_path, "scratch12-2500-cosine", [5, 3.0], 100, schedule="cosine")
    keep_run(tmp_path, "scratch12-2500-lr0.012", [5, 1.0], 100, steps=3)  # not complete
    keep_run(tmp_path, "scratch12-5000", [5, 1.9], 200)
    keep_run(tmp_path, "scratch12-5000", [5, 2.1], 200, seed=2)
    keep_run(tmp_path, "scratch12-10000", [5, 1.5], 400)
    keep_run(tmp_path, "scratch3-2500", [5, 2.2], 100)
    keep_run(tmp_path, "scratch3-5000", [5, 1.8], 200)
    keep_run(tmp_path, "nested3-2500", [5, 2.5], 100, blocks=0.4)
    keep_run(tmp_path, "nested3-2500-lr0.006", [5, 2.6], 100, lr=0.006)
    keep_run(tmp_path, "nested3-2500-late", [5, 2.4], 100)
    keep_run(tmp_path, "nested3-2500-divide", [5, 2.0], 150)
    keep_run(tmp_path, "nested3-5000", [5, 1.4], 200)
    keep_run(tmp_path, "nested3-5000-early", [5, 1.7], 200)
    keep_run(tmp_path, "nested3-5000-early", [5, 1.8], 200, seed=2)
    keep_run(tmp_path, "nested3-5000-via6", [5, 1.85], 200)
    keep_run(tmp_path, "nested3-5000-via6-early", [5, 1.95], 200)
    keep_run(tmp_path, "nested6-2500", [5, 3.5], 90)
    keep_run(tmp_path, "equal-data12-2500", [5, 1.75], 250)
    keep_run(tmp_path, "multilevel", [5, 1.0], 100)  # no arm of the frontier
    return tmp_path


def test_frontier_by_hand(kept, capsys):
    pytest.importorskip("matplotlib")
    study.main(["frontier", "--results", str(kept)])
    text = (kept / "narrow" / "frontier.md").read_text()
    assert text in capsys.readouterr().out and (kept / "narrow" / "frontier.svg").exists()
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    depths, savings, worth, listed = (part.splitlines() for part in tables)

    found, lines = ({cells[0]: cells[1:] for cells in
                     ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)}
                    for table in (depths, savings))
    assert found[""] == ["2,500 (1e+02 FLOPs)", "5,000 (2e+02 FLOPs)", "10,000 (4e+02 FLOPs)"]
    assert found["12 layers"] == ["3.000 (cosine 0.003, 2 tried)",
                                  "2.000 ± 0.141 (wsd 0.003, 1 tried)",
                                  "1.500 (wsd 0.003, 1 tried)"]
    assert found["3 layers"] == ["2.200 (wsd 0.003, 1 tried)", "1.800 (wsd 0.003, 1 tried)", ""]
    assert found["1 layer"] == ["", "", ""]
    assert found["3 → 12, start 1/3"][0] == "2.500 (wsd 0.003, 2 tried)"
    assert found["3 → 12, start 0.6"][0] == "2.400 (wsd 0.003, 1 tried)"
    assert found["3 → 6 → 12"][1] == "1.850 (wsd 0.003, 2 tried)"

    # 2.5 nats: half way from 3 to 2 in log FLOPs, 100 to 200; a fifth fewer of them in blocks.
    half = 1 - 100 / 200**0.5 / 100**0.5
    assert lines["nested3-2500"] == [
        "copies, wsd 0.003", "1", "2.500", f"{half:.1%}", f"{1 - 0.8 * (1 - half):.1%}",
        "beyond (< 0.0%), 3 layers", "beyond (< 20.0%), 3 layers", "-0.500",
        "+0.300"]
    # 2.0: 12 layers after 200, 3 layers half way from 100 to 200.
    assert lines["nested3-2500-divide"] == [
        "output matrices divided by 4", "1", "2.000", "25.0%", "25.0%",
        f"{1 - 150 / 20000**0.5:.1%}, 3 layers", f"{1 - 150 / 20000**0.5:.1%}, 3 layers", "-1.000",
        "-0.200"]
    assert lines["nested3-5000"][2:] == [
        "1.400", "beyond (> 50.0%)", "beyond (> 50.0%)", "beyond", "beyond", "-0.500",
        "-0.400"]  # of seed 1, the one that both ran with: 1.4 - 1.9
    assert lines["nested3-5000-early"][1:3] == ["2", "1.750 ± 0.071"]
    assert lines["nested3-5000-early"][-2:] == ["-0.250 ± 0.071", "-0.100"]  # -0.2 and -0.3
    assert lines["nested6-2500"][3] == "beyond (< 10.0%)"
    # 1.75, half way from 2 to 1.5: 12 layers have that after 283; 3 layers never do, up to 200.
    assert lines["equal-data12-2500"][3] == f"{1 - 250 / 80000**0.5:.1%}"
    assert lines["equal-data12-2500"][5] == f"{1 - 250 / 80000**0.5:.1%}, 12 layers"

    # So 2.5 nats after 1.41 x 2,500 steps; 4 of the nested run's were of 12 layers.
    assert worth[2] == ("| 3 layers | nested3-2500 | copies, wsd 0.003 | 2,496 | "
                        f"{2500 * 2**0.5 - 4:,.0f} |")
    assert len(worth) == 2 + 7 and "nested3-5000 |" not in "".join(worth)  # beyond the frontier

    assert len(listed) == 2 + 18 and "| scratch12-2500 | 1 | 100 | 50 | 3.2000 | 2.5000 |" in listed
    with pytest.raises(SystemExit, match="no complete run of the frontier"):
        study.main(["frontier", "--scale", "paper", "--results", str(kept)])
    keep_run(kept, "scratch1-2500", [5, 2], 100, dtype="bfloat16")
    with pytest.raises(SystemExit, match="differ in dtype"):
        study.main(["frontier", "--results", str(kept)])


def test_report_leaves_the_frontier_alone(kept, capsys):
    keep_run(kept, "single", [5, 2.0], 100, dtype="bfloat16")
    os.rename(kept / "narrow" / "multilevel-seed1", kept / "elsewhere")
    study.main(["report", "--results", str(kept)])
    assert not re.search("scratch|nested", capsys.readouterr().out)


def test_keep_thins_a_nested_run(tmp_path):
    """The cycles after its start count their steps anew; few evaluations stay, the ends do."""
    rows, flops = [row(val=9.0)], 0
    for name, n, every in (("coarse1", 2000, 20), ("fine", 1, 1), ("coarse2", 30, 10),
                           ("coarse3", 60, 10), ("fine", 3000, 20)):
        for step in range(31 if name == "coarse3" else 2 if n == 3000 else 1, n + 1):
            flops += 1
            if step == n or step % every == 0:
                evaluate = name in ("coarse1", "fine") and (step == n or step % 40 == 0)
                rows.append(row(name, step, flops, 5 - step / 1e3 if evaluate else None, step / 7))
        if name.startswith("coarse"):
            rows.append(row(f"prolong{name[-1]}", n, flops, 4.0))
    write(tmp_path / "runs" / "narrow" / "nested3-2500-seed1", rows, steps=3000)
    study.main(["keep", "--out", str(tmp_path / "runs"), "--results", str(tmp_path / "kept")])
    (before,), (after,) = (runs.load(tmp_path / place, "narrow", frontier.FRONTIER).values()
                           for place in ("runs", "kept"))
    before, after = before[1], after[1]
    assert after.complete and after.last["val_loss"] == before.last["val_loss"] == 2.0
    for level, most in (("coarse1", 50), ("fine", 52), ("coarse2", 1), ("coarse3", 1)):
        whole, kept = ([r for r in run.rows if r["level"] == level] for run in (before, after))
        assert len(kept) <= most and kept[-1]["step"] == whole[-1]["step"]
        steps = [r["step"] for r in kept if r["train_loss"] is not None]
        first = 30 if level == "coarse3" else 0
        sizes = np.diff([first, *steps])
        total = sum(n * r["train_loss"] for n, r in
                    zip(sizes, (r for r in kept if r["train_loss"] is not None)))
        ends = [first, *(r["step"] for r in whole if r["train_loss"] is not None)]
        wanted = sum(n * r["train_loss"] for n, r in
                     zip(np.diff(ends), (r for r in whole if r["train_loss"] is not None)))
        assert total == pytest.approx(wanted, rel=1e-6)
    assert [r["level"] for r in after.rows if r["level"].startswith("prolong")] == [
        "prolong1", "prolong2", "prolong3"]


# Growth -------------------------------------------------------------------------------------------

def weights(block):
    return {name: p.detach().clone() for name, p in block.named_parameters()}


@pytest.mark.parametrize("how", growth.GROWTHS)
def test_growth_against_naive_code(how, data, tmp_path, monkeypatch):
    """A run of two blocks grown to four, watched before and after the growth."""
    seen = []
    grow = growth.grow

    def watched(model, keep, how):
        seen.extend([keep, [weights(block) for block in model.blocks]])
        grow(model, keep, how)
        seen.append([weights(block) for block in model.blocks])
    monkeypatch.setattr(growth, "grow", watched)
    prolong = train.prolong
    growth.main(["--growth", how, "--", *NESTED, "--data", data, "--out", str(tmp_path / "run")])
    keep, before, after = seen
    assert keep == [0, 2] and train.prolong is prolong
    for i, block in enumerate(after):
        source = before[i] if how == "init" else before[i // 2 * 2]
        for name, p in block.items():
            is_out = name.split(".")[0] in ("attn_out", "mlp_out")
            wanted = source[name]
            if how == "divide" and is_out:
                wanted = wanted / 2
            if how == "zero" and is_out and i % 2:
                wanted = 0 * wanted
            assert torch.equal(p, wanted), (i, name)
    assert not torch.equal(before[0]["mlp_out.weight"], before[1]["mlp_out.weight"])
    assert runs.read_run(tmp_path / "run").complete


@pytest.mark.parametrize("rewarm", (0, 2))
def test_two_stages_by_hand(rewarm, data, tmp_path):
    """One block, then two, then four, each a model of its own into which weights are copied; and
    the rate of the first of two fine steps halved, or not."""
    flags = [*NESTED, "--start_layers", "1", "--data", data, "--out", str(tmp_path / "run")]
    growth.main(["--growth", "copy", "--via", "2", "--via_steps", "2", "--rewarm", str(rewarm),
                 *flags])
    s, _ = train.parse_settings(flags)
    config = GPTConfig(train.read_meta(data)["vocab_size"], s.block_size, 4, s.n_head, s.n_embd)
    torch.manual_seed(s.seed)
    model = GPT(config)
    tokens = train.Tokens(data, "train", s.block_size, config.vocab_size)
    for sources, steps in (([0], [0]), ([0, 2], [1, 2]), ([0, 1, 2, 3], [3, 4])):
        net = GPT(train.replace(config, n_layer=len(sources)))
        net.wte, net.wpe, net.head = model.wte, model.wpe, model.head
        for block, i in zip(net.blocks, sources):
            block.load_state_dict(model.blocks[i].state_dict())
        adam = torch.optim.AdamW(net.parameters(), 1.0, (0.9, 0.95), weight_decay=0.0)
        for j in steps:
            adam.param_groups[0]["lr"] = train.rate(s, j) / (2 if rewarm and j == 3 else 1)
            both = torch.from_numpy(tokens.batch(s.seed, train.FINE, j, s.batch_size))
            net(both[:, :-1], both[:, 1:])[1].backward()
            adam.step()
            adam.zero_grad()
        for i, block in enumerate(model.blocks):
            block.load_state_dict(net.blocks[i * len(sources) // 4].state_dict())
    trained = train.read_checkpoint(tmp_path / "run")["model"]
    assert all(torch.equal(trained[name], p) for name, p in model.state_dict().items())
    levels = [r["level"] for r in train.read_log(tmp_path / "run")]
    assert levels.index("prolong1") < levels.index("coarse2") < levels.index("prolong2")
    for wrong in (["--via", "3"], ["--via", "4"], ["--via_steps", "3"], ["--cycles", "1"]):
        with pytest.raises(SystemExit, match="^error: --via"):
            growth.main(["--growth", "copy", "--via", "2", "--via_steps", "2", *flags, *wrong])
    assert train.prolong.__module__ == "multilevel" and train.plan.__module__ == "train"


def test_growths_that_say_what_the_network_computes_then(data):
    torch.manual_seed(1)
    config = GPTConfig(vocab_size=17, block_size=4, n_layer=4, n_head=2, n_embd=8)
    model, x = GPT(config), torch.randint(17, (3, 4))
    start = train.restrict(model, [0, 2])
    wanted = start(x)[0]
    growth.grow(model, [0, 2], "zero")
    assert torch.equal(model(x)[0], wanted)
    growth.grow(model, [0, 2], "copy")
    assert not torch.allclose(model(x)[0], wanted, atol=1e-4)


def test_copies_are_train_pys_own(data, tmp_path):
    flags = [*NESTED, "--data", data, "--out"]
    train.main([*flags, str(tmp_path / "plain")])
    for how in growth.GROWTHS:
        growth.main(["--growth", how, *flags, str(tmp_path / how)])
    plain, *others = ([{**r, "seconds": 0} for r in train.read_log(tmp_path / name)]
                      for name in ("plain", *growth.GROWTHS))
    assert [log == plain for log in others] == [how == "copy" for how in growth.GROWTHS]
    at = [r["level"] for r in plain].index("prolong1")
    assert all(log[:at] == plain[:at] for log in others)  # the same until the growth
    assert others[-1][at] == plain[at]  # carry: the same network, another optimizer


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_moments_are_carried(optimizer, data, tmp_path, monkeypatch):
    """Right after the growth the fine optimizer holds the moments of the start's."""
    seen = []

    def copies(optimizer):
        return {p: {k: torch.clone(v) for k, v in s.items()} for p, s in optimizer.state.items()}

    def watched(model, keep):
        states = [o for o in growth.gc.get_objects() if issubclass(type(o), Optimizer)]
        ours = set(model.parameters())
        owned = [o for o in states if {p for g in o.param_groups for p in g["params"]} <= ours]
        start, = (o for o in owned if o.state)
        before = copies(start)
        carry(model, keep)
        fine, = (o for o in owned if o is not start)
        seen.extend([before, copies(fine), model])
    carry = growth.carry
    monkeypatch.setattr(growth, "carry", watched)
    growth.main(["--growth", "carry", *NESTED, "--optimizer", optimizer, "--momentum", "0.9",
                 "--data", data, "--out", str(tmp_path / "run")])
    before, after, model = seen
    assert len(after) == len(list(model.parameters())) > len(before) > 0
    for i, block in enumerate(model.blocks):
        for p, q in zip(block.parameters(), model.blocks[i // 2 * 2].parameters()):
            assert before[q].keys() == after[p].keys() and before[q]
            assert all(torch.equal(after[p][k], before[q][k]) for k in before[q])
    for p in (model.wte.weight, model.wpe.weight):
        assert all(torch.equal(after[p][k], before[p][k]) for k in before[p])


def test_cycles_prolong_as_ever_and_other_modes_are_refused(data, tmp_path):
    flags = [*NESTED, "--cycles", "1", "--data", data, "--out"]
    growth.main(["--growth", "copy", *flags, str(tmp_path / "a")])
    train.main([*flags, str(tmp_path / "b")])
    a, b = ([{**r, "seconds": 0} for r in train.read_log(tmp_path / name)] for name in "ab")
    assert a == b and {"prolong1", "prolong2", "prolong3"} <= {r["level"] for r in a}
    for wrong in (["--mode", "single"], ["--delta", "1"]):
        with pytest.raises(SystemExit, match="--growth wants --mode nested"):
            growth.main(["--growth", "zero", *flags, str(tmp_path / "c"), *wrong])


@pytest.mark.parametrize("arm", [
    arm for arm in frontier.FRONTIER if re.match("(nested3|equal-data12|scratch1)-2500", arm)])
def test_two_steps_of_every_arm(arm, data, tmp_path):
    script, *flags = study.command_of("narrow", arm)[1:]
    main = growth.main if script.endswith("growth.py") else train.main
    cycles = ["--cycles", "1" if arm.endswith("cycles") else "0"]
    main([*flags, "--data", data, "--out", str(tmp_path / "run"), *TINY, *cycles,
          "--start_steps", "2", *(["--via_steps", "1"] if "--via" in flags else [])])
    found = runs.read_run(tmp_path / "run")
    assert found.complete and np.isfinite(found.last["val_loss"])


def test_a_growth_is_recorded_and_resumed_as_it_was_begun(data, tmp_path):
    out = [*NESTED, "--data", data, "--out", str(tmp_path / "run")]
    growth.main(["--growth", "init", *out, "--target_loss", "9"])
    settings = train.read_config(tmp_path / "run")["settings"]
    assert settings["growth"] == "init" and settings["rewarm"] == settings["via"] == 0
    with pytest.raises(SystemExit, match="--growth init, not zero"):
        growth.main(["--growth", "zero", *out, "--resume"])
    with pytest.raises(SystemExit, match="of another version .*growth"):
        train.main([*out, "--resume"])
    growth.main(["--growth", "init", *out, "--resume"])
    assert runs.read_run(tmp_path / "run").complete
    for wrong in (["--rewarm", "-3"], ["--via_steps", "4"]):
        with pytest.raises(SystemExit, match="--rewarm must be"):
            growth.main(["--growth", "copy", *wrong, *out, "--overwrite"])


def test_a_kept_run_that_cannot_be_read_is_named(kept, capsys):
    folder = kept / "narrow/scratch3-2500-seed1"
    whole, about = ((folder / name).read_text() for name in ("log.csv", "config.json"))
    for name, text, damaged in (
            ("log.csv", whole, whole.replace("val_loss", "other")),
            ("log.csv", whole, "x,y\n1,2,3\n"), ("config.json", about, "[]"),
            ("config.json", about, "{}"), ("config.json", about, about[:-9])):
        (folder / name).write_text(damaged)
        (kept / "narrow/scratch3-2500-seedx").mkdir(exist_ok=True)
        found = runs.load(kept, "narrow", frontier.FRONTIER)
        assert "scratch3-2500" not in found and "scratch3-5000" in found
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 2 and "scratch12-2500-lr0.012-seed1: left out" in said[0]
        assert "scratch3-2500-seed1: left out" in said[1]
        (folder / name).write_text(text)
    assert "scratch3-2500" in runs.load(kept, "narrow", frontier.FRONTIER)
