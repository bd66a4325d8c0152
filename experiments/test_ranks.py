"""train.py on two processes against one: the same losses, whoever resumes whom, and what happens when one of them dies."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import train  # noqa: E402

torch.set_num_threads(1)
SCRIPT = os.path.join(ROOT, "train.py")
RUN = ("--steps 16 --warmup 4 --lr 0.1 --min_lr 0.01 --cycles 2 --coarse_steps 5 --n_layer 4 --n_head 2 --n_embd 16 --block_size 16 "
       "--batch_size 4 --eval_interval 6 --eval_sequences 6 --log_interval 4 --save_seconds 0 --device cpu --dtype float32 "
       "--compile off").split()
MORE = "--mode multilevel --momentum 0.9 --grad_clip 0.5 --micro_batch 1 --keep_coarse_state".split()  # two micro-batches a rank
WITHIN = 60  # seconds in which any of these runs must have ended


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split, n in (("train", 5000), ("val", 500)):
        steps = np.random.default_rng(0).integers(0, 3, n)  # something that can be learned
        (np.cumsum(steps) % 257).astype("<u2").tofile(folder / f"{split}_000000.bin")
    (folder / "meta.json").write_text(json.dumps(dict(tokenizer="bytes", vocab_size=257, eot=256, train_tokens=5000, val_tokens=500)))
    return str(folder)


def one(data, out, *more):
    """A run in this process."""
    train.main([*RUN, "--data", data, "--out", str(out), *more])


class Two:
    """A run of two processes, as torchrun starts them on one host; with outs, each of them has its own idea of --out."""

    def __init__(self, data, outs, *more):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            where = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]), WORLD_SIZE="2", OMP_NUM_THREADS="1")
        self.ranks = [subprocess.Popen([sys.executable, SCRIPT, *RUN, "--data", data, "--out", str(out), *more], text=True,
                                       env=dict(where, RANK=str(i), LOCAL_RANK=str(i)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                      for i, out in enumerate(outs)]

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


def rows(out):
    with open(f"{out}/log.csv", newline="") as f:
        return [row[:-1] for row in csv.reader(f)]  # all columns but the seconds


def same_to_rounding(got, want):
    assert len(got) == len(want) and [row[:6] for row in got] == [row[:6] for row in want]  # all but the losses
    losses = [[float(x or 0) for row in log[1:] for x in row[6:]] for log in (got, want)]
    np.testing.assert_allclose(*losses, rtol=2e-5)
    assert len({row[6] for row in want}) > 5  # and they do change


class Interrupted(Exception):
    pass


def test_both_modes_equal_one_process_and_rank_0_alone_writes(data, tmp_path):
    with Two(data, [tmp_path / "two", tmp_path / "rank1"], "--mode", "both") as two:
        one(data, tmp_path / "one", "--mode", "both")
        (code0, said, _), (code1, nothing, _) = two.ends()
    assert code0 == code1 == 0 and "2 rank(s)" in said and nothing == "" and not (tmp_path / "rank1").exists()
    for mode in ("single", "multilevel"):
        same_to_rounding(rows(tmp_path / "two" / mode), rows(tmp_path / "one" / mode))
    weights = [train.read_checkpoint(tmp_path / n / "multilevel")["model"] for n in ("one", "two")]
    for name, p in weights[0].items():
        torch.testing.assert_close(weights[1][name], p, rtol=1e-4, atol=1e-6)


def test_two_ranks_resume_one_with_clipping_momentum_and_micro_batches(data, tmp_path, monkeypatch):
    one(data, tmp_path / "one", *MORE)
    take_step, updates = train.take_step, []

    def interrupted(*args):
        updates.append(args)
        if len(updates) == 10:  # within the first cycle
            raise Interrupted
        return take_step(*args)
    with monkeypatch.context() as patched:
        patched.setattr(train, "take_step", interrupted)
        with pytest.raises(Interrupted):
            one(data, tmp_path / "two", *MORE)
    assert 0 < train.read_checkpoint(tmp_path / "two")["count"]["position"] < 10
    with Two(data, [tmp_path / "two"] * 2, *MORE, "--resume") as two:
        (code0, said, _), (code1, _, _) = two.ends()
    assert code0 == code1 == 0 and "2 rank(s)" in said and "resumed after" in said
    same_to_rounding(rows(tmp_path / "two"), rows(tmp_path / "one"))


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
    assert 0 < train.read_checkpoint(tmp_path / "two")["count"]["position"] < 220
    one(data, tmp_path / "two", *long, "--save_seconds", "60", "--resume")
    one(data, tmp_path / "one", *long, "--save_seconds", "60")
    same_to_rounding(rows(tmp_path / "two"), rows(tmp_path / "one"))


def test_a_batch_that_the_ranks_cannot_share_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "WORLD", 2)
    with pytest.raises(SystemExit, match="^error: --batch_size 3 is not divisible by 2 ranks$"):
        train.train(*train.parse_settings([*RUN, "--data", data, "--out", str(tmp_path / "out"), "--batch_size", "3"]))
    assert not (tmp_path / "out").exists()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    for where, name, value in ((train, "WORLD", 2), (train, "RANK", 1), (torch.cuda, "is_available", lambda: True),
                               (torch.cuda, "device_count", lambda: 1)):
        monkeypatch.setattr(where, name, value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="^error: no GPU for rank 1: this host has 1, so start it with --nproc_per_node=1$"):
        train.run(*train.parse_settings([]))
