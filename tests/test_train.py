"""The machinery of train.py: kills, resumes, faults, bad input. Its method: test_multilevel.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from test_multilevel import CONFIG, RUN, data, log_of, make_data, run, settings  # noqa: F401
from multilevel import flops_per_token, flops_to_reach

TRAIN = [sys.executable, train.__file__]
NESTED = "--mode nested --start_layers 2 --start_steps 30 --cycles 2".split()
ADAMW = "--optimizer adamw --lr 0.01".split()


def one_line(capfd, *args):
    """Runs train.main, which must exit with one line on stderr; returns that line."""
    with pytest.raises(SystemExit) as e:
        train.main([*RUN, *map(str, args)])
    line = str(e.value.code)
    assert line.startswith("error: ") and "\n" not in line
    assert "Traceback" not in capfd.readouterr().err
    return line


def weights(out):
    return train.read_checkpoint(out)["model"]


def test_micro_batches_change_nothing_but_rounding(data, tmp_path):
    run(data, tmp_path / "a")
    run(data, tmp_path / "b", "--micro_batch", "3")
    a, b = (train.evaluations(train.read_log(tmp_path / x))[1] for x in "ab")
    assert a == pytest.approx(b, rel=1e-5) and len(a) > 10


# Stopped and resumed ------------------------------------------------------------------------------

@pytest.mark.parametrize("more", [["--keep_coarse_state"], [*NESTED, *ADAMW]])
def test_resuming_after_kill_9_and_sigterm_equals_the_run_never_stopped(data, tmp_path, more):
    run(data, tmp_path / "whole", *more)
    command = [*TRAIN, *RUN, "--data", data, "--out", str(tmp_path / "cut"), *more]
    for number, rows in ((signal.SIGKILL, 8), (signal.SIGTERM, 16)):
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)
        log = tmp_path / "cut/log.csv"
        while process.poll() is None:  # once so many rows are there
            if log.exists() and len(log_of(tmp_path / "cut")) >= rows:
                process.send_signal(number)
                break
            time.sleep(0.002)
        out = process.communicate(timeout=60)[0]
        assert process.returncode == (130 if number == signal.SIGTERM else -number), out
        assert number == signal.SIGKILL or "--resume goes on" in out and "Traceback" not in out
        position = train.read_checkpoint(tmp_path / "cut")["count"]["position"]
        assert 0 < position < (74 if "nested" in more else 54)
        command += ["--resume"] * ("--resume" not in command)
    run(data, tmp_path / "cut", *more, "--resume")
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    a, b = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in b)


@pytest.mark.parametrize("more, positions", [([], (9, 46)), ([*NESTED, *ADAMW], (28, 30, 41))])
def test_resuming_cuts_off_the_rows_after_the_checkpoint(data, tmp_path, more, positions):
    """Stopped right after a checkpoint: within a cycle, and of a nested run before, at and after
    its growth."""
    run(data, tmp_path / "whole", *more)
    for position in positions:
        with pytest.MonkeyPatch.context() as patch:
            write = train.write_whole

            def stop(path, content):
                write(path, content)
                if path.endswith("ckpt.pt"):
                    if train.read_checkpoint(tmp_path / "cut")["count"]["position"] >= position:
                        raise InterruptedError
            patch.setattr(train, "write_whole", stop)
            with pytest.raises(SystemExit):
                run(data, tmp_path / "cut", *more, "--overwrite")
        assert train.read_checkpoint(tmp_path / "cut")["count"]["position"] == position
        with open(tmp_path / "cut/log.csv", "a") as f:
            f.write("fine,99,1,1,1,0.1,1.0,,0.5\nfine,1")  # after it; the second one cut short
        run(data, tmp_path / "cut", *more, "--resume")
        assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


@pytest.mark.parametrize("more", [[], NESTED])
def test_a_run_that_stopped_at_its_target_goes_on_to_its_end_without_one(data, tmp_path, more):
    run(data, tmp_path / "whole", *more)
    losses = train.evaluations(train.read_log(tmp_path / "whole"))[1]
    target, positions = next(loss for loss in losses if loss < losses[0]), set()
    for _ in range(2):  # told the same target once more, it has nothing left to do
        run(data, tmp_path / "cut", *more, "--target_loss", str(target), "--resume")
        losses = train.evaluations(train.read_log(tmp_path / "cut"))[1]
        assert losses[-1] <= target < min(losses[:-1])
        positions.add(train.read_checkpoint(tmp_path / "cut")["count"]["position"])
    assert len(positions) == 1 and positions < set(range(74 if more else 54))
    run(data, tmp_path / "cut", *more, "--resume")
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def test_a_run_resumes_by_its_folder_alone_and_refuses_other_settings(data, tmp_path, capfd):
    run(data, tmp_path / "run", *NESTED)
    before, out = log_of(tmp_path / "run"), ["--data", data, "--out", str(tmp_path / "run")]
    train.main(["--resume", *out])  # recorded settings are the run
    assert log_of(tmp_path / "run") == before and "0 updates to go" in capfd.readouterr().out
    assert "--lr 0.1, not 0.2" in one_line(capfd, *out, *NESTED, "--resume", "--lr", 0.2)
    other_mode = [*out, *NESTED, "--resume", "--mode", "single"]
    assert "--mode nested, not single" in one_line(capfd, *other_mode)
    make_data(tmp_path / "data", tokenizer="gpt2")
    assert "tokenizer bytes, not gpt2" in one_line(capfd, *out, *NESTED, "--resume")


def test_folders_of_an_earlier_version_resume_or_are_refused_in_one_line(data, tmp_path, capfd):
    run(data, tmp_path / "run", "--target_loss", "5.4")
    about = json.loads((tmp_path / "run/config.json").read_text())
    state = torch.load(tmp_path / "run/ckpt.pt")
    state["losses"] = [1.0, 2.0]  # it also saved between two rows
    for k in ("start_layers", "start_steps", "decay"):
        del about["settings"][k]
    torch.save(state, tmp_path / "run/ckpt.pt")
    (tmp_path / "run/config.json").write_text(json.dumps(about))
    run(data, tmp_path / "run", "--resume")
    assert log_of(tmp_path / "run")[-1][:2] == ["fine", "24"]
    about["settings"]["gone"] = 5
    (tmp_path / "run/config.json").write_text(json.dumps(about))
    out = ["--data", data, "--out", tmp_path / "run"]
    assert "another version" in one_line(capfd, *out, "--resume")
    del about["settings"]["gone"], state["log"]  # it kept the number of log.csv's bytes instead
    (tmp_path / "run/config.json").write_text(json.dumps(about))
    torch.save(state, tmp_path / "run/ckpt.pt")
    rows = log_of(tmp_path / "run")
    assert "another version (KeyError: 'log')" in one_line(capfd, *out, "--resume")
    assert log_of(tmp_path / "run") == rows


def test_a_target_is_the_fine_models_not_the_starts(data, tmp_path):
    run(data, tmp_path / "whole", *NESTED)
    first = next(r["val_loss"] for r in train.read_log(tmp_path / "whole")
                 if r["level"] == "coarse1" and r["val_loss"])
    run(data, tmp_path / "run", *NESTED, "--target_loss", str(first))
    rows = train.read_log(tmp_path / "run")
    assert not rows[-1]["level"].startswith("coarse") and rows[-1]["val_loss"] <= first


# A run folder is never lost -----------------------------------------------------------------------

def test_a_run_folder_is_never_overwritten_unasked(data, tmp_path, capfd):
    run(data, tmp_path / "run")
    before, out = log_of(tmp_path / "run"), ["--data", data, "--out", tmp_path / "run"]
    line = one_line(capfd, *out)
    assert "--resume" in line and "--overwrite" in line and log_of(tmp_path / "run") == before
    assert "choose one" in one_line(capfd, *out, "--resume", "--overwrite")
    run(data, tmp_path / "run", "--overwrite")
    assert log_of(tmp_path / "run") == before


def test_a_full_disk_keeps_the_last_checkpoint(data, tmp_path, capfd, monkeypatch):
    run(data, tmp_path / "run", "--target_loss", "5.4")
    good, out = (tmp_path / "run/ckpt.pt").read_bytes(), ["--data", data, "--out", tmp_path / "run"]

    def full(*_):  # a disk that fills up while the checkpoint is written
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        line = one_line(capfd, *out, "--resume")
        assert "No space left on device" in line and "--resume" in line
    assert (tmp_path / "run/ckpt.pt").read_bytes() == good
    assert sorted(os.listdir(tmp_path / "run")) == ["ckpt.pt", "config.json", "log.csv"]
    run(data, tmp_path / "whole")
    run(data, tmp_path / "run", "--resume")
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")


def test_damaged_files_are_named_in_one_line(data, tmp_path, capfd):
    run(data, tmp_path / "run")
    before, out = log_of(tmp_path / "run"), ["--data", data, "--out", tmp_path / "run"]
    checkpoint, config = tmp_path / "run/ckpt.pt", tmp_path / "run/config.json"
    good, about = checkpoint.read_bytes(), config.read_bytes()
    for damaged in (good[:len(good) // 2], b"", b"junk"):
        checkpoint.write_bytes(damaged)
        assert "ckpt.pt is damaged" in one_line(capfd, *out, "--resume")
        assert "ckpt.pt is damaged" in one_line(capfd, "--mode", "sample", *out)
    checkpoint.write_bytes(good)
    state = train.read_checkpoint(tmp_path / "run")
    for change in ({"optimizers": []}, {"model": {}}):
        torch.save({**state, **change}, checkpoint)
        assert "ckpt.pt is damaged" in one_line(capfd, *out, "--resume")
    checkpoint.write_bytes(good)
    for damaged in (b"", b"{}", b"null", b'{"settings": 5, "data": {}}'):
        config.write_bytes(damaged)
        assert "config.json is damaged" in one_line(capfd, *out, "--resume")
        assert "config.json is damaged" in one_line(capfd, "--mode", "sample", *out)
    config.unlink()  # nor does a run go on with other settings, since its own are gone
    assert "config.json is damaged" in one_line(capfd, *out, "--resume", "--lr", "0.9")
    config.write_bytes(about)
    (tmp_path / "run/log.csv").unlink()  # the checkpoint holds it
    run(data, tmp_path / "run", "--resume")
    assert log_of(tmp_path / "run") == before
    assert "no checkpoint" in one_line(capfd, "--mode", "sample", "--out", tmp_path)
    run(data, tmp_path / "run", "--overwrite")
    assert log_of(tmp_path / "run") == before


@pytest.mark.skipif(os.name == "nt", reason="no advisory locks there")
def test_one_process_at_a_time_and_nothing_to_clean_up_after_a_kill(data, tmp_path, capfd):
    out = ["--data", data, "--out", str(tmp_path / "run")]
    process = subprocess.Popen([*TRAIN, *RUN, *out, "--steps", "100000"], stdout=subprocess.DEVNULL)
    while not (tmp_path / "run/ckpt.pt").exists():
        assert process.poll() is None
        time.sleep(0.01)
    for more in (["--resume", "--steps", 100000], ["--overwrite"]):
        line = one_line(capfd, *out, *more, "--target_loss", 9)  # or it would be done at once
        assert f"{tmp_path / 'run'} is in use by another process" in line
    assert (tmp_path / "run/ckpt.pt").exists() and process.poll() is None
    process.kill()
    process.wait()
    run(data, tmp_path / "run", "--overwrite")
    run(data, tmp_path / "whole")
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(data, tmp_path, capfd):
    line = one_line(capfd, "--data", data, "--out", tmp_path / "run", "--lr", "1e18")
    assert re.search(r"the loss is (nan|inf) at (fine|coarse\d) step \d", line)
    assert "checkpoint" in line and "--grad_clip 1" in line
    assert all(p.isfinite().all() for p in weights(tmp_path / "run").values())
    many = ["--mode", "single", "--warmup", "0", "--log_interval", "20", "--eval_interval", "20"]
    line = one_line(capfd, "--data", data, "--out", tmp_path / "2", "--lr", "1e18", *many)
    assert re.search(r"the loss is (nan|inf) at fine step 2:", line)  # the first of those
    # A held-out loss, too: after the one step that ruins the weights there is no other loss.
    line = one_line(capfd, "--data", data, "--out", tmp_path / "3", "--lr", "1e18", *many,
                    "--steps", "1", "--momentum", "0")
    assert re.search(r"the loss is (nan|inf) at fine step 1:", line)
    assert not (tmp_path / "3/ckpt.pt").exists() and "was not made yet" in line


def test_weights_that_are_not_finite_are_not_saved(data, tmp_path, capfd, monkeypatch):
    step, lines = train.Level.step, []

    def broken(level, *args):
        loss = step(level, *args)  # was finite
        lines.append(loss)
        if len(lines) == 12:
            next(level.net.parameters()).data[0] = float("inf")
        return loss
    monkeypatch.setattr(train.Level, "step", broken)
    line = one_line(capfd, "--data", data, "--out", tmp_path / "run", "--log_interval", "1")
    assert "the weights are not finite" in line and "checkpoint" in line
    assert all(p.isfinite().all() for p in weights(tmp_path / "run").values())


# Bad input ----------------------------------------------------------------------------------------

def test_bad_settings_end_in_one_clear_line(data, tmp_path, capfd):
    out = ["--data", data, "--out", tmp_path / "new"]
    for args, named in [
            (["--data", tmp_path / "none", "--out", tmp_path / "new"], "prepare_data.py"),
            ([*out, "--n_layer", 5], "odd"), ([*out, "--n_embd", 17], "n_embd = 17"),
            ([*out, "--delta", 2], "delta = 2"), ([*out, "--steps", 0], "--steps"),
            ([*out, "--lr", "nan"], "--lr"), ([*out, "--lr", "inf"], "--lr"),
            ([*out, "--flop_factor", 0], "--flop_factor 0.0"), ([*out, "--seed", 2**63], "--seed"),
            ([*out, "--optimizer", "adamw", "--momentum", 1], "momentum = 1"),
            ([*out, "--kind", "stride", "--stride", 9], "stride = 9"),
            ([*out, "--block_size", 5000], "shorter than one sequence"),
            ([*out, "--mode", "nested", "--start_layers", 3], "start_layers = 3"),
            ([*out, "--mode", "nested", "--start_layers", 4], "start_layers = 4"),
            ([*out, "--mode", "nested", "--start_steps", 0], "--start_steps"),
            ([*out, "--mode", "compare", "--start_layers", 3], "start_layers = 3"),
            ([*out, "--mode", "compare", "--start_layers", 2, "--start_steps", 99],
             "--start_steps 99")]:
        assert named in one_line(capfd, *args)
        assert not (tmp_path / "new").exists()
    assert "zigzag" in one_line(capfd, "--kind", "zigzag")
    assert "--prompt" in one_line(capfd, "--prompt")
    if not torch.cuda.is_available():
        assert "no cuda" in one_line(capfd, *out, "--device", "cuda")
    (tmp_path / "file").write_text("")
    assert "file" in one_line(capfd, "--data", data, "--out", tmp_path / "file" / "run")


def test_out_of_memory_names_the_flag_and_smaller_pieces_go_on(data, tmp_path, capfd, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with monkeypatch.context() as m:
        m.setattr(train.Level, "step", full)
        line = one_line(capfd, "--data", data, "--out", tmp_path / "run")
        assert "--resume --micro_batch 2" in line
    run(data, tmp_path / "run", "--resume", "--micro_batch", "2")
    assert train.read_log(tmp_path / "run")[-1]["step"] == 24


# What is printed ----------------------------------------------------------------------------------

def test_help_holds_every_setting(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    out = capsys.readouterr().out
    for f in train.fields(train.Settings):
        assert f"--{f.name} " in out or f"--{f.name}\n" in out


def test_compare_ends_with_one_table_and_then_the_samples(data, tmp_path, capfd):
    start = ["--start_layers", "2", "--start_steps", "10"]
    run(data, tmp_path / "r", "--mode", "compare", "--max_new_tokens", "20", *start)
    out = capfd.readouterr().out
    modes = ("single", "multilevel", "nested")
    logs = {mode: train.read_log(tmp_path / "r" / mode) for mode in modes}
    flops, losses = train.evaluations(logs["single"])
    for mode, rows in logs.items():
        line = next(line for line in out.splitlines() if re.match(f"{mode} +[0-9]", line)).split()
        assert line[1] == f"{min(train.evaluations(rows)[1]):.4f}"
        reached = flops_to_reach(*train.evaluations(rows), min(losses))
        saved = 1 - reached / flops[losses.index(min(losses))] if reached is not None else None
        assert line[4] == ("not" if saved is None else f"{saved:.1%}")
    start = 10 * flops_per_token(CONFIG, 2) / flops_per_token(CONFIG)  # comes off the fine steps
    assert logs["nested"][-1]["step"] == 24 - round(start) < 24
    assert out.index("lowest loss") < out.index("--kind full") < out.index("a sample of the nested")
    alone = round(24 * flops_per_token(CONFIG) / flops_per_token(CONFIG, 2))
    assert f"--n_layer 2 --steps {alone}\n" in out
    train.main(["--resume", "--mode", "compare", "--data", data, "--out", str(tmp_path / "r")])
    assert f"--n_layer 2 --steps {alone}\n" in capfd.readouterr().out  # what was begun decides
    train.main(["--mode", "sample", "--out", str(tmp_path / "r/nested"), "--prompt", "ab",
                "--max_new_tokens", "5", "--device", "cpu"])
    assert capfd.readouterr().out.startswith("ab")


def test_compare_races_the_dtypes_once_for_all_its_runs(data, tmp_path, monkeypatch):
    times = iter([1.0, 9.0] + [9.0, 1.0] * 9)  # bfloat16, float32: another winner in any other race
    monkeypatch.setattr(train.timeit, "repeat", lambda *_, **__: [next(times)])
    run(data, tmp_path / "r", "--mode", "compare", "--dtype", "auto", "--max_new_tokens", "2",
        "--start_layers", "2", "--start_steps", "10")
    for mode in ("single", "multilevel", "nested"):
        assert train.read_config(tmp_path / "r" / mode)["settings"]["dtype"] == "bfloat16"


def test_what_the_terminal_cannot_print_is_escaped(data, tmp_path):
    run(data, tmp_path / "run", "--target_loss", "9")
    done = subprocess.run(
        [*TRAIN, "--mode", "sample", "--out", str(tmp_path / "run"), "--prompt", "漢字",
         "--device", "cpu", "--max_new_tokens", "20"], capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.startswith(rb"\u6f22\u5b57") and not done.stderr


def test_nobody_reading_the_progress_does_not_end_a_run(data, tmp_path):
    process = subprocess.Popen([*TRAIN, *RUN, "--data", data, "--out", str(tmp_path / "run")],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait() == 0 and not error
    assert log_of(tmp_path / "run")[-1][:2] == ["fine", "24"]
