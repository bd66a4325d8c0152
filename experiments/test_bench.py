"""The benchmark at a size of milliseconds: its figures agree with each other, and what it compares
does the same work."""

import multiprocessing
import os
import sys

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import train  # noqa: E402
from experiments import bench  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from multilevel import flops_per_token  # noqa: E402

torch.set_num_threads(1)  # more of them, and a forked process waits for them for ever
SMALL = ("--preset tiny --n_layer 4 --n_head 2 --n_embd 16 --block_size 8 --batch_size 4 "
         "--device cpu --dtype float32 --compile off").split()


def test_the_table(capsys, monkeypatch):
    if sys.platform == "linux":  # spares each process its import of PyTorch
        fork = multiprocessing.get_context("fork")
        monkeypatch.setattr(bench.multiprocessing, "get_context", lambda _: fork)
    monkeypatch.setitem(bench.SQUARE, "cpu", 128)
    rows = bench.main(SMALL, turns=2, seconds=0.02)
    assert " | ".join(rows[0]) in capsys.readouterr().out
    shown = {row[0]: row[1:] for row in rows}
    flops = 3 * flops_per_token(GPTConfig(257, 8, 4, 2, 16))
    for column in (0, 1):
        ms, tokens, tflops = (float(shown[name][column].replace(",", ""))
                              for name in ("a step, ms", "tokens/s", "TFLOP/s"))
        assert tokens == pytest.approx(4 * 8 / ms * 1e3, rel=0.2)  # ms is rounded to 0.1
        assert tflops == pytest.approx(tokens * flops / 1e12, rel=0.02)
    _, ratio, less = shown["coarse over fine step, time"]
    assert float(ratio) > 0 and less == "FLOPs: 0.618"
    assert "compiling all levels, s" not in shown  # it runs eagerly


def test_the_plain_step_is_the_same_step():
    s, config = train.parse_settings(SMALL)[0], GPTConfig(257, 8, 4, 2, 16)
    x, y = torch.randint(257, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    losses, models = [], []
    for plain in (True, False):
        torch.manual_seed(0)
        models.append(model := GPT(config))
        sgd = torch.optim.SGD(model.parameters(), s.lr)
        level = train.Level(train.replace(s, optimizer="sgd", momentum=0.0), "fine", model)
        losses.append([bench.plain_step(model, sgd, x, y) if plain else level.step(x, y, s.lr)
                       for _ in range(2)])
    torch.testing.assert_close(*losses)
    for p, q in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
