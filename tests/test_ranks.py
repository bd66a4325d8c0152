"""train.py on two processes against one: the same losses, whoever resumes whom, and what happens
when one of them dies."""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import train
from test_multilevel import RUN, data, log_of, run  # noqa: F401

MORE = "--grad_clip 0.5 --micro_batch 1 --keep_coarse_state".split()  # two micro-batches a rank
NESTED = "--mode nested --start_layers 2 --start_steps 12 --optimizer adamw --lr 0.01".split()
WITHIN = 60  # seconds in which any of these runs must have ended


class Two:
    """A run of two processes, as torchrun starts them on one host, each with its own --out."""

    def __init__(self, data, outs, *more):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            where = dict(os.environ, MASTER_ADDR="127.0.0.1", WORLD_SIZE="2",
                         MASTER_PORT=str(s.getsockname()[1]), OMP_NUM_THREADS="1")
        self.ranks = [subprocess.Popen(
            [sys.executable, train.__file__, *RUN, "--data", data, "--out", str(out), *more],
            text=True, env=dict(where, RANK=str(i), LOCAL_RANK=str(i)), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE) for i, out in enumerate(outs)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def ends(self):
        """[(exit status, stdout, stderr)] of the ranks."""
        said = [rank.communicate(timeout=WITHIN) for rank in self.ranks]
        return [(rank.returncode, *words) for rank, words in zip(self.ranks, said)]


def same_to_rounding(got, want):
    assert len(got) == len(want)
    assert [row[:6] for row in got] == [row[:6] for row in want]  # all but the losses
    losses = [[float(x or 0) for row in log[1:] for x in row[6:]] for log in (got, want)]
    np.testing.assert_allclose(*losses, rtol=2e-5)
    assert len({row[6] for row in want}) > 5  # and they do change


def test_all_modes_equal_one_process_and_rank_0_alone_writes(data, tmp_path):
    compare = ["--mode", "compare", "--start_layers", "2", "--start_steps", "12"]
    with Two(data, [tmp_path / "two", tmp_path / "rank1"], *compare) as two:
        run(data, tmp_path / "one", *compare)
        (code0, said, _), (code1, nothing, _) = two.ends()
    assert code0 == code1 == 0 and "2 rank(s)" in said and nothing == ""
    assert not (tmp_path / "rank1").exists()
    for mode in ("single", "multilevel", "nested"):
        same_to_rounding(log_of(tmp_path / "two" / mode), log_of(tmp_path / "one" / mode))
    weights = [train.read_checkpoint(tmp_path / n / "nested")["model"] for n in ("one", "two")]
    for name, p in weights[0].items():
        torch.testing.assert_close(weights[1][name], p, rtol=1e-4, atol=1e-6)


def test_two_ranks_resume_one_before_its_growth(data, tmp_path, monkeypatch):
    more, stop = [*NESTED, *MORE], 8
    run(data, tmp_path / "one", *more)
    step, updates = train.Level.step, []

    def interrupted(*args):
        updates.append(args)
        if len(updates) == stop:
            raise KeyboardInterrupt
        return step(*args)
    with monkeypatch.context() as patched:
        patched.setattr(train.Level, "step", interrupted)
        with pytest.raises(SystemExit):
            run(data, tmp_path / "two", *more)
    assert 0 < train.read_checkpoint(tmp_path / "two")["count"]["position"] < stop
    # Rank 1 sees none of the run folder: what it goes on with comes from rank 0.
    with Two(data, [tmp_path / "two", tmp_path / "rank1"], *more, "--resume") as two:
        (code0, said, _), (code1, _, _) = two.ends()
    assert code0 == code1 == 0 and "2 rank(s)" in said and not (tmp_path / "rank1").exists()
    same_to_rounding(log_of(tmp_path / "two"), log_of(tmp_path / "one"))


def test_a_rank_that_dies_takes_the_run_down_and_one_process_resumes_it(data, tmp_path):
    long, checkpoint = [*MORE, "--steps", "200"], tmp_path / "two" / "ckpt.pt"
    with Two(data, [tmp_path / "two"] * 2, *long) as two:
        begin = time.time()
        while not checkpoint.exists():
            assert two.ranks[0].poll() is None and time.time() < begin + WITHIN
            time.sleep(0.01)
        two.ranks[1].send_signal(signal.SIGKILL)
        killed = time.time()
        (code, _, said), (_, _, _) = two.ends()
    assert code == 1 and time.time() < killed + 15
    assert said.splitlines()[-1].startswith("error: rank 0 of 2 stops") and "Traceback" not in said
    assert 0 < train.read_checkpoint(tmp_path / "two")["count"]["position"] < 230
    run(data, tmp_path / "two", *long, "--save_seconds", "60", "--resume")
    run(data, tmp_path / "one", *long, "--save_seconds", "60")
    same_to_rounding(log_of(tmp_path / "two"), log_of(tmp_path / "one"))


def test_a_batch_that_the_ranks_cannot_share_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "WORLD", 2)
    s, _ = train.parse_settings([*RUN, "--data", data, "--out", str(tmp_path / "out"),
                                 "--batch_size", "3"])
    with pytest.raises(SystemExit, match="^error: --batch_size 3 is not divisible by 2 ranks$"):
        train.train(s)
    assert not (tmp_path / "out").exists()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    for where, name, value in ((train, "WORLD", 2), (train, "RANK", 1),
                               (torch.cuda, "is_available", lambda: True),
                               (torch.cuda, "device_count", lambda: 1)):
        monkeypatch.setattr(where, name, value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="^error: no GPU for rank 1: .* --nproc_per_node=1$"):
        train.join_ranks(train.parse_settings([])[0])
