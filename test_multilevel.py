"""python -m pytest -q    (under two minutes on two cores)

Each test holds the code against an authority outside it: the paper's formulas written out naively, PyTorch's FLOP counter and
autograd, a run that was never stopped, the bytes of the text, a server that misbehaves.
"""

import contextlib
import csv
import email.utils
import glob
import gzip
import http.server
import json
import lzma
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import MagicMock
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import prepare_data
import train
from model import GPT, GPTConfig
from multilevel import coarse_sets, flops_per_token, flops_to_reach, prolong, restrict

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)  # models this small gain nothing from more, and so the tests pass in time on a busy machine too
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that they start
SMALL = GPTConfig(vocab_size=31, block_size=8, n_layer=4, n_head=2, n_embd=16)


def small_gpt(n_layer=4, seed=0):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**asdict(SMALL), "n_layer": n_layer}))
    for p in model.parameters():
        p.data.mul_(10)  # far enough from zero that every block matters
    return model


def batch(seed=1):
    both = torch.randint(SMALL.vocab_size, (3, 9), generator=torch.Generator().manual_seed(seed))
    return both[:, :-1], both[:, 1:]


# model.py -----------------------------------------------------------------------------------------------------------------

def test_parameter_count():
    assert sum(p.numel() for p in GPT(GPTConfig()).parameters()) == 50257 * 256 + 256 * 256 + 12 * 12 * 256**2 == 22368512


def test_forward_is_causal_and_its_loss_the_mean_cross_entropy():
    model, (x, y) = small_gpt(), batch()
    logits, none = model(x)
    assert none is None and logits.shape == (3, 8, 31)
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 31
    assert torch.equal(model(changed)[0][:, :5], logits[:, :5]) and not torch.equal(model(changed)[0][:, 5], logits[:, 5])
    picked = logits.double().softmax(-1).gather(-1, y[..., None])
    torch.testing.assert_close(model(x, y)[1].double(), -picked.log().mean())


def test_attention_written_out_for_the_cpu_equals_the_fused_kernel():
    q, k, v = torch.randn(3, 2, 4, 64, 32, dtype=torch.float64).bfloat16()
    from model import attend
    exact = nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(attend(q, k, v).double(), exact, atol=0.02, rtol=0.02)


def test_generate():
    model, (x, _) = small_gpt(), batch()
    out = model.generate(x, 12, temperature=0)  # longer than the context
    assert out.shape == (3, 20) and torch.equal(out[:, :8], x)
    assert torch.equal(out[:, 8], model(x)[0][:, -1].argmax(-1)) and torch.equal(model.generate(x, 12, top_k=1), out)


# multilevel.py ------------------------------------------------------------------------------------------------------------

def test_coarse_sets():
    assert coarse_sets(12) == [[1, 3, 5, 7, 9, 11], [0, 2, 4, 6, 8, 10]]  # the paper's 2, 4, ..., 12 and 1, 3, ..., 11
    assert coarse_sets(12, "stride", 3) == [[2, 5, 8, 11], [1, 4, 7, 10], [0, 3, 6, 9]]
    assert coarse_sets(12, "stride", 2) == coarse_sets(12) and coarse_sets(5, "full") == [[0, 1, 2, 3, 4]]
    for kind in ("random", "permuted"):
        sets = coarse_sets(12, kind, seed=3)
        assert sorted(sum(sets, [])) == list(range(12)) and [len(s) for s in sets] == [6, 6]
        assert sets == coarse_sets(12, kind, seed=3) != coarse_sets(12, kind, seed=4)
        assert (sets == [sorted(s) for s in sets]) == (kind == "random")


@pytest.mark.parametrize("keep", [*coarse_sets(4), [3, 0], [2]])
def test_restriction_is_a_view_that_equals_the_model_built_from_those_blocks(keep):
    fine, (x, y) = small_gpt(), batch()
    before = fine(x)[0]
    coarse = restrict(fine, keep)
    built = GPT(GPTConfig(**{**asdict(SMALL), "n_layer": len(keep)}))  # authority: a model with just those blocks, copied
    built.load_state_dict({**{k: v for k, v in fine.state_dict().items() if "blocks" not in k},
                           **{f"blocks.{i}.{k}": v for i, j in enumerate(keep) for k, v in fine.blocks[j].state_dict().items()}})
    assert torch.equal(coarse(x)[0], built(x)[0]) and torch.equal(fine(x)[0], before) and len(fine.blocks) == 4
    assert {id(p) for p in coarse.parameters()} <= {id(p) for p in fine.parameters()}
    coarse(x, y)[1].backward()  # gradients land on the fine model's parameters, and nowhere else
    built(x, y)[1].backward()
    expected = {**{f"blocks.{j}.{k}": p.grad for i, j in enumerate(keep) for k, p in built.blocks[i].named_parameters()},
                "wte.weight": built.wte.weight.grad, "wpe.weight": built.wpe.weight.grad}
    got = {name: p.grad for name, p in fine.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys() and all(torch.equal(got[k], expected[k]) for k in got)


@pytest.mark.parametrize("N", [2, 4, 12])
def test_prolongation_is_equation_4_and_its_mirror(N):
    delta = 0.25
    for even_first in (True, False):
        model = small_gpt(N)
        theta = {t: {k: p.detach().clone() for k, p in model.blocks[t - 1].named_parameters()} for t in range(1, N + 1)}  # 1-based
        prolong(model, coarse_sets(N)[0 if even_first else 1], delta)
        new = {t: dict(model.blocks[t - 1].named_parameters()) for t in range(1, N + 1)}
        for name in theta[1]:
            for i in range(1, N // 2 + 1):
                if even_first:  # theta_2i <- theta^H_i, theta_{2i+1} <- (1 - delta) theta_{2i+1} + delta theta^H_i
                    assert torch.equal(new[2 * i][name], theta[2 * i][name])
                    if 2 * i + 1 <= N:
                        want = (1 - delta) * theta[2 * i + 1][name] + delta * theta[2 * i][name]
                        torch.testing.assert_close(new[2 * i + 1][name], want)
                else:           # theta_{2i-1} <- theta^H_i, theta_2i <- (1 - delta) theta_2i + delta theta^H_i
                    assert torch.equal(new[2 * i - 1][name], theta[2 * i - 1][name])
                    want = (1 - delta) * theta[2 * i][name] + delta * theta[2 * i - 1][name]
                    torch.testing.assert_close(new[2 * i][name], want)
            assert torch.equal(new[1][name], theta[1][name])  # layer 1 has no kept layer before it


def test_prolongation_of_any_set_and_the_ends_of_delta():
    for delta in (0.0, 0.3, 1.0):
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(7))
        for i, layer in enumerate(model.blocks):
            nn.init.constant_(layer.weight, 10.0**i)
        prolong(model, [5, 2], delta)
        value = [10.0**i for i in range(7)]
        want = [value[0], value[1], value[2], *((1 - delta) * value[i] + delta * value[2] for i in (3, 4)), value[5],
                (1 - delta) * value[6] + delta * value[5]]
        torch.testing.assert_close(torch.tensor([layer.weight.item() for layer in model.blocks]), torch.tensor(want))


def test_a_whole_cycle_by_hand():
    """One fine step, then both coarse models two steps each, against tensors copied out and back as the paper writes it."""
    fine, lr, delta = small_gpt(), 0.05, 0.25
    hand = small_gpt()

    def sgd(model, data):
        model.zero_grad()
        model(*data)[1].backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad

    sgd(hand, batch(0))
    for k, keep in enumerate([[1, 3], [0, 2]]):
        coarse = GPT(GPTConfig(**{**asdict(SMALL), "n_layer": 2}))
        for ours, theirs in [(coarse.wte, hand.wte), (coarse.wpe, hand.wpe), *zip(coarse.blocks, [hand.blocks[j] for j in keep])]:
            ours.load_state_dict(theirs.state_dict())
        sgd(coarse, batch(2 * k + 1))
        sgd(coarse, batch(2 * k + 2))
        for ours, theirs in [(coarse.wte, hand.wte), (coarse.wpe, hand.wpe), *zip(coarse.blocks, [hand.blocks[j] for j in keep])]:
            theirs.load_state_dict(ours.state_dict())
        with torch.no_grad():
            for odd, even in {0: [(2, 1)], 1: [(1, 0), (3, 2)]}[k]:
                for p, q in zip(hand.blocks[odd].parameters(), hand.blocks[even].parameters()):
                    p.copy_((1 - delta) * p + delta * q)

    levels = [(fine, [0]), (restrict(fine, [1, 3]), [1, 2]), (restrict(fine, [0, 2]), [3, 4])]
    for (net, seeds), keep in zip(levels, [None, [1, 3], [0, 2]]):
        optimizer = torch.optim.SGD(net.parameters(), lr)
        for seed in seeds:
            optimizer.zero_grad()
            net(*batch(seed))[1].backward()
            optimizer.step()
        if keep:
            prolong(fine, keep, delta)
    for p, q in zip(fine.parameters(), hand.parameters()):
        torch.testing.assert_close(p, q)


class Foreign(nn.Module):
    """Somebody else's network: blocks at a dotted path, a buffer, batch norm."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4))})
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.body["layers"]:
            x = x + layer(x).tanh()
        return self.out(x)


def test_a_foreign_model_at_a_dotted_path():
    torch.manual_seed(0)
    model, x = Foreign(), torch.randn(5, 6)
    model.layers_of_body = model.body  # a second name for the same module changes nothing
    coarse = restrict(model, [1, 3], "body.layers")
    h = x
    for i in (1, 3):
        h = h + model.body["layers"][i](h).tanh()
    torch.testing.assert_close(coarse(x), model.out(h))
    coarse(x).sum().backward()
    assert model.body["layers"][0][0].weight.grad is None and model.body["layers"][1][0].weight.grad.abs().sum() > 0
    want = 0.5 * (model.body["layers"][2][0].bias + model.body["layers"][1][0].bias).detach()
    prolong(model, [1, 3], 0.5, "body.layers")
    torch.testing.assert_close(model.body["layers"][2][0].bias.detach(), want)


@pytest.mark.parametrize("call, named", [
    (lambda m: coarse_sets(5), "5"), (lambda m: coarse_sets(5, "random"), "5"), (lambda m: coarse_sets(0), "0"),
    (lambda m: coarse_sets(4, "zigzag"), "zigzag"), (lambda m: coarse_sets(4, "stride", 5), "5"),
    (lambda m: restrict(m, [4]), "4"), (lambda m: restrict(m, [-1]), "-1"), (lambda m: prolong(m, [1, 1]), "[1, 1]"),
    (lambda m: restrict(m, []), "[]"), (lambda m: restrict(m, [0], "wte"), "wte"), (lambda m: restrict(m, [0], "no.such"), "no.such"),
    (lambda m: prolong(m, [0], 1.5), "1.5"), (lambda m: prolong(m, [0], math.nan), "nan"), (lambda m: prolong(m, [0], -0.1), "-0.1"),
    (lambda m: GPTConfig(n_embd=100), "100"), (lambda m: m(torch.zeros(1, 9, dtype=torch.int64)), "9")])
def test_wrong_input_is_a_value_error_that_names_it(call, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        call(small_gpt())


@pytest.mark.parametrize("last", [nn.Linear(2, 3), nn.Linear(2, 2, bias=False), nn.Linear(2, 2).double(), None])
def test_blocks_that_cannot_be_averaged_are_refused_and_nothing_changes(last):
    model, first = nn.Module(), nn.Linear(2, 2)
    model.blocks = nn.ModuleList([first, nn.Linear(2, 2), last or first])
    before = model.blocks[1].weight.clone()
    with pytest.raises(ValueError, match="0 and 2" if last else "more than once"):
        prolong(model, [0])
    assert torch.equal(model.blocks[1].weight, before)


@pytest.mark.parametrize("n_layer", [1, 6, 12])
def test_flops_against_pytorchs_counter(n_layer):
    config = GPTConfig(vocab_size=101, block_size=32, n_layer=n_layer, n_head=4, n_embd=64)
    model, idx = GPT(config), torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(idx)
    # PyTorch does not count the CPU's fused attention: its two products are the 4 N T d of the formula
    assert counter.get_total_flops() + 4 * n_layer * 32 * 64 * 64 == 64 * flops_per_token(model) == 64 * flops_per_token(config)
    assert flops_per_token(config) - flops_per_token(config, head=False) == 2 * 101 * 64
    assert flops_per_token(GPTConfig(n_layer=12), n_layer) == flops_per_token(GPTConfig(n_layer=n_layer))
    with FlopCounterMode(display=False) as counter:  # a training step is three forwards: products are transposed twice
        model(idx, idx)[1].backward()
    assert counter.get_total_flops() == 3 * (64 * flops_per_token(config) - 4 * n_layer * 32 * 64 * 64)


def test_the_papers_flops():
    assert 3 * flops_per_token(GPTConfig()) / 1e6 == pytest.approx(143.3, abs=0.05)
    assert flops_per_token(GPTConfig(), 6) / flops_per_token(GPTConfig()) == pytest.approx(0.769, abs=5e-4)
    assert flops_per_token(GPTConfig(), 6, head=False) / flops_per_token(GPTConfig(), head=False) == 0.5


def test_flops_to_reach():
    assert flops_to_reach([0, 10, 20], [4, 3, 2], 3) == 10 and flops_to_reach([0, 10, 20], [4, 3, 2], 2.5) == 15
    assert flops_to_reach([0, 10, 20], [4, 3, 2], 5) == 0 and flops_to_reach([0, 10], [4, 3], 1) is None
    assert flops_to_reach([0, 10, 20, 30], [4, 2, 5, 1], 2) == 10 and flops_to_reach([], [], 1) is None


def test_the_example_in_the_readme_runs_and_learns(capsys):
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as f:
        exec(re.search(r"```python\n(.*?)```", f.read(), re.S)[1], {})
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0]


# train.py -----------------------------------------------------------------------------------------------------------------

TRAIN = [sys.executable, os.path.join(HERE, "train.py")]
RUN = ("--steps 24 --warmup 4 --lr 0.1 --min_lr 0.01 --momentum 0.9 --cycles 3 --coarse_steps 5 --n_layer 4 --n_head 2 --n_embd 16 "
       "--block_size 16 --batch_size 4 --eval_interval 6 --eval_sequences 6 --log_interval 4 --save_seconds 0 "
       "--device cpu --dtype float32 --compile off").split()


def make_data(folder, train_tokens=5000, val_tokens=500, tokenizer="bytes", seed=0):
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(seed)
    for split, n in (("train", train_tokens), ("val", val_tokens)):
        ids = np.cumsum(rng.integers(0, 3, n)) % 257  # something that can be learned
        ids[:n // 2].astype("<u2").tofile(f"{folder}/{split}_000000.bin")
        ids[n // 2:].astype("<u2").tofile(f"{folder}/{split}_000001.bin")
    meta = dict(tokenizer=tokenizer, vocab_size=257, eot=256, train_tokens=train_tokens, val_tokens=val_tokens)
    with open(f"{folder}/meta.json", "w") as f:
        json.dump(meta, f)
    return str(folder)


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path / "data")


def run(data, out, *more):
    return train.main([*RUN, "--data", data, "--out", str(out), *more])


def log_of(out):
    with open(f"{out}/log.csv", newline="") as f:
        return [row[:-1] for row in csv.reader(f)]  # all columns but the seconds


def one_line(capfd, code, *args):
    """Runs train.main, which must exit with one line on stderr; returns that line."""
    with pytest.raises(SystemExit) as e:
        train.main([*RUN, *map(str, args)])
    line = str(e.value.code)
    assert line.startswith("error: ") and "\n" not in line and "Traceback" not in capfd.readouterr().err
    return line


def settings(*args):
    return train.parse_settings(list(args))[0]


def test_schedule():
    s, pi = settings(), math.pi
    for step, lr in [(0, 1.2e-3 / 715), (714, 1.2e-3), (715, 1.2e-3), (15999, 1.2e-4),
                     (8000, 1.2e-4 + 1.08e-3 * 0.5 * (1 + math.cos(pi * (8000 - 715) / (16000 - 715))))]:
        assert train.fine_lr(s, step) == pytest.approx(lr, rel=1e-6)
    assert sum(train.fine_lr(s, k) for k in range(16000)) == pytest.approx(10.5, abs=0.05)
    assert s.coarse_lr == 1.2e-3 and settings("--lr", "0.5").coarse_lr == 0.5 and settings("--coarse_lr", "0.5").lr == 1.2e-3
    constant = settings("--schedule", "constant")
    assert [train.fine_lr(constant, k) for k in (714, 8000, 15999)] == [1.2e-3] * 3
    wsd = settings("--schedule", "wsd", "--decay", "0.25")  # constant for 12,000 steps, then linear to min_lr
    assert [train.fine_lr(wsd, k) for k in (714, 11999, 12000)] == [1.2e-3] * 3
    assert train.fine_lr(wsd, 14000) == pytest.approx((1.2e-3 + 1.2e-4) / 2)
    assert train.fine_lr(wsd, 15999) == pytest.approx(1.2e-4 + 1.08e-3 / 4000)


def test_plan_is_the_papers_schedule():
    updates = list(train.plan(settings(), GPTConfig()))
    assert sum(u.level == 0 for u in updates) == 16000 and [u.step for u in updates if u.level == 0] == list(range(16000))
    assert sum(u.level == 1 for u in updates) == sum(u.level == 2 for u in updates) == 3500
    assert [u.level for u in updates[:202]] == [0] + [1] * 100 + [2] * 100 + [0] and all(u.level == 0 for u in updates[35 * 201:])
    assert [u.step for u in updates if u.level] == list(range(7000)) and sum(u.last for u in updates if u.level) == 70
    in_turn = list(train.plan(settings("--in_turn"), GPTConfig()))
    assert [u.level for u in in_turn if u.level and u.last] == [1, 2] * 17 + [1] and sum(u.level > 0 for u in in_turn) == 3500
    assert all(u.level == 0 for u in train.plan(settings("--mode", "single"), GPTConfig()))
    assert len(list(train.plan(settings("--mode", "single", "--n_layer", "5", "--steps", "9"), GPTConfig(n_layer=5)))) == 9  # odd is fine


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_plan_of_nested_iteration_is_that_of_as_many_single_level_steps(schedule):
    s = settings("--mode", "nested", "--start_layers", "3", "--start_steps", "700", "--steps", "900", "--schedule", schedule)
    updates = list(train.plan(s, GPTConfig()))
    assert train.sets_of(s) == [[0, 4, 8]] and [(u.level, u.step) for u in updates] == [
        *((1, j) for j in range(700)), *((0, j) for j in range(900))]
    single = list(train.plan(settings("--mode", "single", "--steps", "1600", "--schedule", schedule), GPTConfig()))
    assert [(u.lr, u.stream, u.batch) for u in updates] == [(u.lr, u.stream, u.batch) for u in single]
    assert [i for i, u in enumerate(updates) if u.last] == [699, 1599] and updates[699].delta == 1
    cycled = list(train.plan(train.replace(s, cycles=2), GPTConfig()))  # full multigrid: the paper's cycles after it
    assert train.sets_of(train.replace(s, cycles=2)) == [[0, 4, 8], *coarse_sets(12)]
    assert [u.level for u in cycled[700:1103]] == [0] + [2] * 100 + [3] * 100 + [0] + [2] * 100 + [3] * 100 + [0]


@pytest.mark.parametrize("more", [[], ["--in_turn"], ["--coarse_steps", "7", "--cycles", "5"]])
def test_the_control_without_coarsening_spends_the_coarse_phases_flops(more):
    config = GPTConfig()
    fine, coarse = flops_per_token(config), flops_per_token(config, 6)
    paper = sum(coarse for u in train.plan(settings(*more), config) if u.level)
    full = [u for u in train.plan(settings("--kind", "full", *more), config) if u.level]
    assert abs(len(full) * fine - paper) <= fine and [u.step for u in full] == list(range(len(full)))


def test_batches_are_a_function_of_seed_stream_and_number_only(data):
    tokens = train.Tokens(data, "train", 16, 257)
    shards = [np.fromfile(name, "<u2").astype(np.int64) for name in sorted(glob.glob(f"{data}/train*"))]
    everywhere = {tuple(shard[i:i + 17]) for shard in shards for i in range(len(shard) - 16)}
    again = train.Tokens(data, "train", 16, 257)
    again.batch(1, 0, 99, 4)
    seen = [tokens.batch(seed, stream, k, 64) for seed in (1, 2) for stream in (0, 1) for k in (0, 1)]
    assert torch.equal(tokens.batch(1, 0, 0, 64), again.batch(1, 0, 0, 64)) and seen[0].dtype == torch.int64
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert all(tuple(row) in everywhere for b in seen for row in b.tolist())
    s = settings(*RUN, "--mode", "multilevel")
    config = GPTConfig(257, 16, 4, 2, 16)
    batches = {}
    for mode in ("single", "multilevel"):  # fine step k sees the same batch in both modes
        updates = list(train.plan(train.replace(s, mode=mode), config))
        made = train.make_batches(train.replace(s, mode=mode), tokens, updates)
        batches[mode] = [(x, y) for u, (x, y) in zip(updates, made) if u.level == 0]
    assert len(batches["single"]) == len(batches["multilevel"]) == 24
    for (x, y), (x2, y2) in zip(*batches.values()):
        assert torch.equal(x, x2) and torch.equal(y, y2) and torch.equal(x[:, 1:], y[:, :-1])


def test_a_run_by_hand(data, tmp_path):
    """log.csv against the method written out once more: both levels, momentum reset, FLOPs, the loss after each prolongation."""
    run(data, tmp_path / "run")
    s = settings(*RUN)
    torch.manual_seed(s.seed)
    hand = GPT(GPTConfig(257, 16, 4, 2, 16))
    tokens, held = train.Tokens(data, "train", 16, 257), train.Tokens(data, "val", 16, 257).batch(0, 2, 0, 6)
    fine = torch.optim.SGD(hand.parameters(), momentum=0.9)
    coarse_step, val, trained = 0, [], []

    def step(net, optimizer, lr, stream, k):
        both = tokens.batch(1, stream, k, 4)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = net(both[:, :-1], both[:, 1:])[1]
        loss.backward()
        optimizer.step()
        return loss.item()

    def held_out():
        with torch.no_grad():
            val.append(hand(held[:, :-1], held[:, 1:])[1].item())

    held_out()
    for k in range(24):
        trained.append(step(hand, fine, train.fine_lr(s, k), 0, k))
        if (k + 1) % 6 == 0:
            held_out()
        if k < 3:
            for keep in ([1, 3], [0, 2]):
                view = restrict(hand, keep)
                optimizer = torch.optim.SGD(view.parameters(), momentum=0.9)
                for _ in range(5):
                    step(view, optimizer, 0.1, 1, coarse_step)
                    coarse_step += 1
                prolong(hand, keep, 0.25)
                held_out()
    rows = train.read_log(tmp_path / "run")
    assert [r["val_loss"] for r in rows if r["val_loss"]] == pytest.approx(val, rel=1e-6)
    fine_rows = [r for r in rows if r["level"] == "fine" and r["train_loss"]]
    assert [r["step"] for r in fine_rows] == [1, 2, 3, 4, 6, 8, 12, 16, 18, 20, 24]
    starts = [0, *(int(r["step"]) for r in fine_rows)]
    assert [r["train_loss"] for r in fine_rows] == pytest.approx([sum(trained[a:b]) / (b - a) for a, b in zip(starts, starts[1:])])
    config = GPTConfig(257, 16, 4, 2, 16)
    assert rows[-1]["flops"] == 3 * 64 * (24 * flops_per_token(config) + 30 * flops_per_token(config, 2))
    assert rows[-1]["tokens"] == 64 * 54 and rows[-1]["step"] == 24
    assert rows[-1]["flops_blocks"] == 3 * 64 * 39 * flops_per_token(config, head=False)


def test_a_nested_run_by_hand(data, tmp_path):
    """The start on blocks 1 and 3, copied into 2 and 4, then all four with a fresh optimizer: batch and rate of step j are step j's."""
    run(data, tmp_path / "run", "--mode", "nested", "--start_layers", "2", "--start_steps", "8", "--schedule", "wsd", "--cycles", "0")
    s = settings(*RUN, "--mode", "single", "--steps", "32", "--schedule", "wsd")
    torch.manual_seed(s.seed)
    hand = GPT(GPTConfig(257, 16, 4, 2, 16))
    tokens, held = train.Tokens(data, "train", 16, 257), train.Tokens(data, "val", 16, 257).batch(0, 2, 0, 6)
    val = []

    def train_on(net, steps):
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        for j in steps:
            both = tokens.batch(1, 0, j, 4)
            optimizer.param_groups[0]["lr"] = train.fine_lr(s, j)
            optimizer.zero_grad()
            net(both[:, :-1], both[:, 1:])[1].backward()
            optimizer.step()
            if (done := j + 1 if j < 8 else j - 7) % 6 == 0 or j == 7:
                held_out(net)

    def held_out(net):
        with torch.no_grad():
            val.append(net(held[:, :-1], held[:, 1:])[1].item())

    held_out(hand)
    train_on(restrict(hand, [0, 2]), range(8))
    for copy, of in ((1, 0), (3, 2)):
        hand.blocks[copy].load_state_dict(hand.blocks[of].state_dict())
    held_out(hand)
    train_on(hand, range(8, 32))
    rows = train.read_log(tmp_path / "run")
    assert [r["val_loss"] for r in rows if r["val_loss"]] == pytest.approx(val, rel=1e-6)
    assert [r["level"] for r in rows if r["val_loss"]] == ["fine", "coarse1", "coarse1", "prolong1", *["fine"] * 4]
    config = GPTConfig(257, 16, 4, 2, 16)
    assert rows[-1]["flops"] == 3 * 64 * (24 * flops_per_token(config) + 8 * flops_per_token(config, 2))
    assert len(train.evaluations(rows)[0]) == 6  # of the fine model: the start's losses are another network's


def test_micro_batches_change_nothing_but_rounding(data, tmp_path):
    run(data, tmp_path / "a")
    run(data, tmp_path / "b", "--micro_batch", "3")
    a, b = (train.read_log(tmp_path / x) for x in "ab")
    assert [r["val_loss"] for r in a if r["val_loss"]] == pytest.approx([r["val_loss"] for r in b if r["val_loss"]], rel=1e-5)


class Recording(TorchDispatchMode):
    """What a CUDA graph is, on the CPU: a list of operations on fixed tensors, whatever is a number in them fixed as well. Capturing
    leaves all tensors as they were; asking for a value on the host fails."""

    def __init__(self):
        super().__init__()
        self.operations, self.before = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a value"
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info and argument.alias_info.is_write:
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    self.before.setdefault(id(tensor), (tensor, tensor.clone()))
        self.operations.append((func, args, kwargs or {}, func(*args, **kwargs or {})))
        return self.operations[-1][-1]

    @contextlib.contextmanager
    def capture(self, capture_error_mode):
        with self:
            yield
        with torch.no_grad():
            for tensor, value in self.before.values():
                tensor.copy_(value)

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, old in self.operations:
            for tensor, value in zip(*(pytree.tree_leaves(out) for out in (old, func(*args, **kwargs)))):
                if torch.is_tensor(tensor) and tensor.data_ptr() != value.data_ptr():
                    tensor.copy_(value)


@pytest.mark.parametrize("more", [["--lr", "0.125"], ["--optimizer", "adamw", "--lr", "0.01", "--micro_batch", "3", "--grad_clip", "0.5"],
                                  ["--optimizer", "adamw", "--lr", "0.01", "--keep_coarse_state", "--save_seconds", "60"]])
def test_a_step_replayed_as_a_graph_is_the_same_step(data, tmp_path, monkeypatch, more):
    make_optimizer, prolong, graphs = train.make_optimizer, train.prolong, []
    monkeypatch.setattr(train, "settle", lambda s, config: train.replace(s, device="cpu", dtype="float32"))
    monkeypatch.setattr(train, "make_optimizer", lambda s, net: make_optimizer(train.replace(s, device="cuda"), net))  # the fused one
    for name, stand_in in dict(CUDAGraph=lambda: graphs.append(Recording()) or graphs[-1], graph=Recording.capture,
                               **dict.fromkeys(("Stream", "stream", "current_stream"), lambda *_: MagicMock())).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    run(data, tmp_path / "steps", *more)
    assert not graphs
    with torch.compiler.set_stance("force_eager"):
        with monkeypatch.context() as patched:
            left = iter(range(4))
            patched.setattr(train, "prolong", lambda *args: [next(left), prolong(*args)])
            with pytest.raises(StopIteration):
                run(data, tmp_path / "graph", *more, "--compile", "graph")
        run(data, tmp_path / "graph", *more, "--compile", "graph", "--resume")
    assert len(graphs) == (6 if "60" in more else 5)  # three a run, but for coarse1 with a single step left where it was saved
    logs = [[[float(cell or 0) for cell in row[1:]] for row in log_of(tmp_path / name)[1:]] for name in ("graph", "steps")]
    assert len(logs[0]) == len(logs[1]) > 20
    assert all(a == pytest.approx(b, rel=1e-6) for a, b in zip(*logs))  # the rate on the device is a float32


@pytest.mark.parametrize("optimizer", [[], ["--optimizer", "adamw", "--lr", "0.01", "--keep_coarse_state"],
                                       ["--mode", "nested", "--start_layers", "2", "--start_steps", "30", "--optimizer", "adamw"]])
def test_resuming_after_sigterm_and_kill_9_equals_the_run_that_was_never_stopped(data, tmp_path, optimizer):
    run(data, tmp_path / "whole", *optimizer)
    command = [*TRAIN, *RUN, "--data", data, "--out", str(tmp_path / "cut"), *optimizer]
    for number, rows in ((signal.SIGKILL, 8), (signal.SIGTERM, 16)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while process.poll() is None:  # once so many rows are there
            if os.path.exists(f"{tmp_path}/cut/log.csv") and len(log_of(tmp_path / "cut")) >= rows:
                process.send_signal(number)
                break
            time.sleep(0.002)
        out = process.communicate(timeout=60)[0]
        assert process.returncode == (128 + number if number == signal.SIGTERM else -number), out
        assert number == signal.SIGKILL or "--resume goes on" in out
        assert train.read_checkpoint(tmp_path / "cut")["count"]["position"] < 54
        if "--resume" not in command:
            command.append("--resume")
    run(data, tmp_path / "cut", *optimizer, "--resume")
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    a, b = (train.read_checkpoint(tmp_path / x) for x in ("cut", "whole"))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in b["model"])


def test_resuming_with_rows_beyond_the_checkpoint_and_between_two_rows(data, tmp_path):
    run(data, tmp_path / "whole")
    for position in (9, 45):  # save_seconds is 0, so stopping at any update is a copy of the checkpoint made there
        with pytest.MonkeyPatch.context() as patch:
            save, taken = train.write_whole, []

            def stop(path, write):
                save(path, write)
                if path.endswith("ckpt.pt") and train.read_checkpoint(tmp_path / "cut")["count"]["position"] == position:
                    taken.append(path)
                    raise InterruptedError
            patch.setattr(train, "write_whole", stop)
            with pytest.raises(InterruptedError):
                run(data, tmp_path / "cut", "--overwrite")
        with open(tmp_path / "cut/log.csv", "a") as f:
            f.write("fine,99,1,1,1,0.1,1.0,,0.5\nfine,1")  # written after the checkpoint, the second one cut short
        run(data, tmp_path / "cut", "--resume")
        assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def test_a_run_that_stopped_at_its_target_goes_on_to_its_end_without_one(data, tmp_path):
    run(data, tmp_path / "whole")
    losses = train.evaluations(train.read_log(tmp_path / "whole"))[1]
    target, positions = next(loss for loss in losses if loss < losses[0]), set()
    for _ in range(2):  # told the same target once more, it has nothing left to do
        run(data, tmp_path / "cut", "--target_loss", str(target), "--resume")
        losses = train.evaluations(train.read_log(tmp_path / "cut"))[1]
        assert losses[-1] <= target < min(losses[:-1])
        positions.add(train.read_checkpoint(tmp_path / "cut")["count"]["position"])
    assert len(positions) == 1 and positions < set(range(54))
    run(data, tmp_path / "cut", "--resume")
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def test_both_modes_end_with_samples_and_the_headline(data, tmp_path, capfd):
    run(data, tmp_path / "r", "--mode", "both", "--max_new_tokens", "20")
    out = capfd.readouterr().out
    single, multi = train.read_log(tmp_path / "r/single"), train.read_log(tmp_path / "r/multilevel")
    flops, losses = train.evaluations(single)
    assert f"lowest validation loss {min(losses):.4f}" in out and "a sample of the multilevel run" in out
    reached = flops_to_reach(*train.evaluations(multi), min(losses))
    assert f"a saving of {1 - reached / flops[losses.index(min(losses))]:.1%}" in out
    assert "did not reach" in "\n".join(train.headline(multi, single))
    train.main(["--mode", "sample", "--out", str(tmp_path / "r/single"), "--prompt", "ab", "--max_new_tokens", "5", "--device", "cpu"])
    assert capfd.readouterr().out.startswith("ab")


def test_bad_settings_and_data_end_in_one_clear_line(data, tmp_path, capfd):
    out = ["--data", data, "--out", tmp_path / "new"]
    for args, named in [(["--data", tmp_path / "none"], "prepare_data.py"), ([*out, "--n_layer", 5], "odd"),
                        ([*out, "--n_embd", 17], "n_embd = 17"), ([*out, "--delta", 2], "delta = 2"), ([*out, "--steps", 0], "--steps"),
                        ([*out, "--kind", "stride", "--stride", 9], "stride = 9"),
                        ([*out, "--mode", "nested", "--start_layers", 3], "start_layers = 3"),
                        ([*out, "--mode", "nested", "--start_layers", 4], "start_layers = 4"), ([*out, "--lr", "nan"], "--lr"),
                        ([*out, "--block_size", 5000], "shorter than one sequence"), (["--mode", "sample", "--out", tmp_path], "no checkpoint")]:
        assert named in one_line(capfd, 1, *args)
        assert not (tmp_path / "new").exists()
    assert "zigzag" in one_line(capfd, 1, "--kind", "zigzag") and "--prompt" in one_line(capfd, 1, "--prompt")
    bad = make_data(tmp_path / "odd")
    with open(f"{bad}/train_000001.bin", "ab") as f:
        f.write(b"x")
    assert "train_000001.bin has an odd number" in one_line(capfd, 1, "--data", bad, "--out", tmp_path / "new")
    np.array([300] * 2500, "<u2").tofile(f"{bad}/train_000001.bin")
    assert "train_000001.bin holds the token 300" in one_line(capfd, 1, "--data", bad, "--out", tmp_path / "new")
    os.truncate(f"{bad}/train_000001.bin", 4000)
    assert "holds 4,500 of 5,000 train tokens" in one_line(capfd, 1, "--data", bad, "--out", tmp_path / "new")
    for damaged in (b"", b"[]", b"{}", b"\xff"):
        Path(bad, "meta.json").write_bytes(damaged)
        assert "meta.json is damaged" in one_line(capfd, 1, "--data", bad, "--out", tmp_path / "new")
    assert "the val split" in one_line(capfd, 1, "--data", make_data(tmp_path / "short", val_tokens=20), "--out", tmp_path / "new")
    assert "one process on CUDA, not 1 on cpu" in one_line(capfd, 1, *out, "--compile", "graph")
    if not torch.cuda.is_available():
        assert "no cuda" in one_line(capfd, 1, *out, "--device", "cuda")


def test_a_run_folder_is_never_lost(data, tmp_path, capfd, monkeypatch):
    out = ["--data", data, "--out", tmp_path / "run"]
    run(data, tmp_path / "run")
    before = log_of(tmp_path / "run")
    assert "--resume" in one_line(capfd, 1, *out) and "--overwrite" in one_line(capfd, 1, *out)
    assert "--lr 0.1 (now 0.2)" in one_line(capfd, 1, *out, "--resume", "--lr", 0.2)
    other = make_data(tmp_path / "data", tokenizer="gpt2")
    assert "tokenizer bytes (now gpt2)" in one_line(capfd, 1, "--data", other, "--out", tmp_path / "run", "--resume")
    make_data(tmp_path / "data")

    def full(*_):  # a disk that fills up while the checkpoint is written
        raise OSError(28, "No space left on device")
    good = (tmp_path / "run/ckpt.pt").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(train.os, "fsync", full)
        with pytest.raises(SystemExit, match="No space left on device.*ckpt.pt|ckpt.pt.*No space left"):
            train.write_whole(str(tmp_path / "run/ckpt.pt"), lambda f: f.write(b"half"))
    assert (tmp_path / "run/ckpt.pt").read_bytes() == good and log_of(tmp_path / "run") == before
    assert sorted(os.listdir(tmp_path / "run")) == ["ckpt.pt", "config.json", "log.csv"]

    for damaged in (good[:len(good) // 2], b"", b"junk"):
        (tmp_path / "run/ckpt.pt").write_bytes(damaged)
        assert "ckpt.pt is damaged" in one_line(capfd, 1, *out, "--resume")
    (tmp_path / "run/ckpt.pt").write_bytes(good)
    state = train.read_checkpoint(tmp_path / "run")
    for change, said in (({"config": {"n_embd": 8}}, "holds a model of"), ({"optimizers": []}, "ckpt.pt is damaged"),
                         ({"model": {}}, "ckpt.pt is damaged")):
        torch.save({**state, **change}, tmp_path / "run/ckpt.pt")
        assert said in one_line(capfd, 1, *out, "--resume")
    (tmp_path / "run/ckpt.pt").write_bytes(good)
    about = (tmp_path / "run/config.json").read_bytes()
    for damaged in (b"", b"{}", b"null", b'{"settings": 5, "data": {}}'):
        (tmp_path / "run/config.json").write_bytes(damaged)
        assert "config.json is damaged" in one_line(capfd, 1, *out, "--resume")
        assert "config.json is damaged" in one_line(capfd, 1, "--mode", "sample", "--out", tmp_path / "run")
    (tmp_path / "run/config.json").write_bytes(about)
    assert log_of(tmp_path / "run") == before
    run(data, tmp_path / "run", "--overwrite")
    assert log_of(tmp_path / "run") == before


def test_out_of_memory_names_the_flag_and_smaller_pieces_go_on(data, tmp_path, capfd, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with monkeypatch.context() as m:
        m.setattr(train, "take_step", full)
        assert "--resume --micro_batch 2" in one_line(capfd, 1, "--data", data, "--out", tmp_path / "run")
    run(data, tmp_path / "run", "--resume", "--micro_batch", "2")
    assert train.read_log(tmp_path / "run")[-1]["step"] == 24


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(data, tmp_path, capfd):
    line = one_line(capfd, 1, "--data", data, "--out", tmp_path / "run", "--lr", "1e20")
    assert re.search(r"fine step \d|coarse\d step \d", line) and "the last good checkpoint is" in line
    assert all(p.isfinite().all() for p in train.read_checkpoint(tmp_path / "run")["model"].values())


def test_help_holds_every_setting(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    out = capsys.readouterr().out
    for f in train.fields(train.Settings):
        assert f"--{f.name} " in out or f"--{f.name}\n" in out


# prepare_data.py ------------------------------------------------------------------------------------------------------

def prepare(out, *source, tokenizer="bytes"):
    prepare_data.main([*map(str, source), "--out", str(out), "--tokenizer", tokenizer])


def refused(out, *source, said):
    """The command ends in one line, an error that says all of these."""
    with pytest.raises(SystemExit) as stop:
        prepare(out, *source)
    line = str(stop.value)
    assert line.startswith("error: ") and "\n" not in line and all(word in line for word in said), line


def tokens_in(folder):
    return {split: np.concatenate([np.fromfile(f, "<u2") for f in sorted(folder.glob(split + "_*.bin"))]).tolist()
            for split in ("train", "val")}


def by_hand(texts):
    """The rule written out: bytes, each document after a 256, documents 0, 50, 100, ... to validation."""
    splits = {"train": [], "val": []}
    for i, text in enumerate(texts):
        splits["val" if i % 50 == 0 else "train"] += [256, *text.encode("utf-8")]
    return splits


def text_of(i):
    return f"row {i}: <|endoftext|> gr\u00fc\u00dfe \U0001f600\r\n" + "words and words " * (i % 7)


def jsonl(texts):
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def test_data_tokens_are_the_documents_in_their_splits_and_shards(tmp_path):
    texts = [text_of(i) for i in range(120)]
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl.xz", "c.jsonl.gz")]
    files[0].write_bytes(jsonl(texts[:30]))
    files[1].write_bytes(lzma.compress(jsonl(texts[30:70] + [""])))
    files[2].write_bytes(gzip.compress(jsonl(texts[70:])))
    prepare(tmp_path, *files, "--name", "mine", "--shard_tokens", "1k")
    wanted, meta = by_hand(texts), json.loads((tmp_path / "mine" / "meta.json").read_text())
    assert tokens_in(tmp_path / "mine") == wanted
    for split in wanted:
        n, sizes = len(wanted[split]), [f.stat().st_size for f in sorted((tmp_path / "mine").glob(split + "_*.bin"))]
        assert sizes == [2000] * (n // 1000) + [n % 1000 * 2] and meta[split + "_tokens"] == n
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot"], meta["documents"]) == ("bytes", 257, 256, 120)
    assert [f.name for f in (tmp_path / "mine").iterdir() if f.suffix != ".bin"] == ["meta.json"]
    # Of fewer tokens, the first documents, none cut, each in the split where it was.
    prepare(tmp_path, *files, "--name", "few", "--tokens", "4k")
    n = json.loads((tmp_path / "few" / "meta.json").read_text())["documents"]
    assert tokens_in(tmp_path / "few") == by_hand(texts[:n])
    assert sum(1 + len(t.encode()) for t in texts[:n]) >= 4000 > sum(1 + len(t.encode()) for t in texts[:n - 1])


def test_data_a_long_text_is_cut_after_line_ends(tmp_path):
    text = "".join(f"line {i} \u00e9\r\n" for i in range(20_000)) + "\U0001f600" * 70_000 + "\nend"
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "b.txt").write_bytes(text.encode())
    (tmp_path / "in" / "a.md").write_text("first")
    prepare(tmp_path, tmp_path / "in", "--name", "d")
    splits = tokens_in(tmp_path / "d")
    pieces = bytes(min(token, 255) for token in splits["train"]).split(b"\xff")[1:]  # 255 is in no UTF-8 text
    assert splits["val"] == [256, *b"first"] and b"".join(pieces) == text.encode()
    assert max(len(piece.decode()) for piece in pieces[:4]) <= 65536 and all(p.endswith(b"\n") for p in pieces[:4])
    assert 60_000 < len(pieces[0]) and splits["train"].count(256) == len(pieces) < 12


def test_data_stdlib(tmp_path):
    prepare(tmp_path, "stdlib", "--tokens", "2M")
    first = Path(sysconfig.get_paths()["stdlib"], "__future__.py").read_bytes()
    assert bytes(tokens_in(tmp_path / "stdlib")["val"][1:len(first) + 1]) == first


def test_data_gpt2_tokens_are_tiktokens(tmp_path):
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("needs a TIKTOKEN_CACHE_DIR with gpt2")
    enc = prepare_data.get_tokenizer("gpt2")
    texts = [text_of(i) for i in range(60)] + ["half a pair: \ud83d", " " * 100_000]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    prepare(tmp_path, tmp_path / "a.jsonl", "--name", "d", tokenizer="gpt2")
    val = [0, 50]
    assert tokens_in(tmp_path / "d") == {
        "train": [token for i in range(62) if i not in val for token in [50256, *enc.encode_ordinary(texts[i])]],
        "val": [token for i in val for token in [50256, *enc.encode_ordinary(texts[i])]]}


def test_data_gpt2_without_network_says_what_to_do(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    closed = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    env = {**os.environ, **closed, "TIKTOKEN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, os.path.join(HERE, "prepare_data.py"), "a.txt", "--name", "d"], cwd=tmp_path,
                          env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in ("stdlib", "TIKTOKEN_CACHE_DIR", "--tokenizer bytes"))


class Rows(http.server.BaseHTTPRequestHandler):
    """The rows API. server.faults: what the first answers are instead of good ones, by offset."""
    def do_GET(self):
        query, server = parse_qs(urlparse(self.path).query), self.server
        first, length = int(query["offset"][0]), int(query["length"][0])
        server.asked.append((first, time.monotonic()))
        assert self.headers["Authorization"] == server.token and length <= 100 and query["config"] == ["sample-10BT"]
        fault = server.faults[first].pop(0) if server.faults.get(first) else None
        time.sleep(2 if fault == "slow" else server.delay)
        rows = [{"row_idx": i, "row": {"text": text_of(i)}, "truncated_cells": ["text"] * (i in server.truncated)}
                for i in range(first + (fault == "other rows"), min(first + length, server.total))]
        body = json.dumps({"rows": rows, "num_rows_total": server.total, "partial": False}).encode()
        body = {"malformed": body[:-9], "other shape": b"[1]"}.get(fault, body)
        self.send_response(429 if "wait" in str(fault) else fault if isinstance(fault, int) else 200)
        self.send_header("Content-Length", str(len(body)))
        if fault in ("wait", "wait until"):
            self.send_header("Retry-After", "1" if fault == "wait" else email.utils.formatdate(time.time() + 2, usegmt=True))
        self.end_headers()
        self.wfile.write(body[:40] if fault == "cut short" else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(prepare_data, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(prepare_data, "LONGEST_WAIT", 0.02)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Rows)
    server.handle_error = lambda *_: None  # a client that hangs up is part of the tests
    server.faults, server.asked, server.truncated, server.delay, server.total, server.token = {}, [], (), 0, 1234, None
    server.source = ["fineweb-edu", "--url", f"http://127.0.0.1:{server.server_port}/rows", "--timeout", "0.5"]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_data_rows_api_on_a_bad_day(tmp_path, api, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    api.token = "Bearer secret"
    api.faults = {0: [500, "malformed"], 100: ["wait"], 200: ["wait until"], 300: ["slow"], 400: ["cut short", 503], 600: ["other rows"],
                  700: ["other shape"], 1200: ["cut short"]}
    api.truncated = (50, 777)  # these two are not whole, and so not documents
    prepare(tmp_path, *api.source, "--shard_tokens", "5k")
    assert not any(api.faults.values())
    assert tokens_in(tmp_path / "fineweb-edu") == by_hand(text_of(i) for i in range(1234) if i not in api.truncated)
    for offset in (100, 200):
        refused_at, asked_again = [when for first, when in api.asked if first == offset]
        assert asked_again - refused_at >= 1  # as Retry-After said, in seconds or, with no fractions of them, as a date
    assert len([first for first, _ in api.asked if first == 300]) == 2  # nobody waited for the slow answer


def test_data_rows_api_that_fails_for_good(tmp_path, api):
    for status in (401, 403, 404):
        api.faults = {0: [status]}
        refused(tmp_path, *api.source, said=[str(status), "HF_TOKEN"])
    assert len(api.asked) == 3  # asking again would not help
    api.faults = {300: [500] * prepare_data.TRIES}
    refused(tmp_path, *api.source, said=["row 300", "500", "same command"])
    assert not any(api.faults.values())
    api.asked.clear()
    prepare(tmp_path, *api.source)
    assert min(first for first, _ in api.asked) == 300  # what came before the failure is kept
    assert tokens_in(tmp_path / "fineweb-edu") == by_hand(map(text_of, range(1234)))
    refused(tmp_path / "new", "fineweb-edu", "--url", "http://127.0.0.1:9/rows", said=["stdlib", "TIKTOKEN_CACHE_DIR"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_data_stopped_and_resumed_is_as_never_stopped(tmp_path, api, number):
    api.total, api.delay, folder = 12_000, 0.4, tmp_path / "fineweb-edu"  # 6 seconds, with a save every 2
    more = ["--shard_tokens", "20k"]
    process = subprocess.Popen([sys.executable, os.path.join(HERE, "prepare_data.py"), *api.source, *more, "--out",
                                str(tmp_path), "--tokenizer", "bytes"], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (folder / "train_000001.bin").exists():
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate()[1]
    if number == signal.SIGTERM:
        assert process.returncode == 130 and "resumes" in said and "Traceback" not in said
    finished = {f: f.stat().st_mtime_ns for f in folder.glob("*.bin")}
    rows_in_them = sum(np.fromfile(f, "<u2").tolist().count(256) for f in finished)
    refused(tmp_path, *api.source, *more, "--tokens", "1M", said=["tokens", "1000000", "--overwrite"])
    api.delay, api.asked = 0, []
    prepare(tmp_path, *api.source, *more)
    assert min(first for first, _ in api.asked) >= rows_in_them - 1 > 100 and not list(folder.glob("*.part"))
    assert all(f.stat().st_mtime_ns == then for f, then in finished.items())
    assert tokens_in(folder) == by_hand(map(text_of, range(12_000)))
    prepare(tmp_path / "undisturbed", *api.source, *more)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == {
        f.name: f.read_bytes() for f in (tmp_path / "undisturbed" / "fineweb-edu").iterdir()}


def test_data_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl(map(text_of, range(200))))
    monkeypatch.setattr(prepare_data, "SAVE_EVERY", -1)  # after each document
    room, write = [0], prepare_data.write

    def write_while_there_is_room(path, data, at=0):
        room[0] -= 1
        write(path, data if room[0] else data[:len(data) // 2], at)
        if not room[0]:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_data, "write", write_while_there_is_room)
    command = [tmp_path, tmp_path / "a.jsonl", "--name", "d", "--shard_tokens", "1k"]
    for room[0] in (100, 101, 102):  # full while writing tokens, and while writing progress.json
        refused(*command, said=["No space left", "same command"])
    room[0] = -1
    prepare(*command)
    assert tokens_in(tmp_path / "d") == by_hand(map(text_of, range(200)))


@pytest.mark.parametrize("name, content, said", [
    ("a.txt", b"x" * 70_000 + b"\xff" + b"y" * 9, ["a.txt", "UTF-8", "70000"]),
    ("a.txt", b"caf\xc3", ["UTF-8", "3"]),
    ("a.jsonl", jsonl("a") + b'{"text": "\xe9"}', ["UTF-8", "33"]),
    ("a.jsonl", jsonl("abc") + b"{bad\n", ["a.jsonl", "line 4"]),
    ("a.jsonl", jsonl("a") + b'{"txt": 1}', ["line 2", "text"]),
    ("a.jsonl", jsonl("a") + b'{"text": null}', ["line 2", "text"]),
    ("a.txt.xz", lzma.compress(b"text" * 999)[:-20], ["a.txt.xz"]),
    ("a.txt.gz", b"not gzip", ["a.txt.gz"]),
    ("a.txt", b"", ["0 documents"]),
    ("a.txt", b"one", ["1 documents", "validation"]),
    ("none.txt", None, ["none.txt", "No such file"])])
def test_data_bad_input_is_one_clear_line(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused(tmp_path, tmp_path / name, "--name", "d", said=said)
    assert not (tmp_path / "d" / "meta.json").exists()


def test_data_that_is_there_is_never_lost(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(map(text_of, range(99))))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("not of prepare_data")
    command, state = [tmp_path, tmp_path / "a.jsonl", "--name", "d"], lambda: {
        f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in (tmp_path / "d").iterdir()}
    prepare(*command)
    before = state()
    prepare(*command)  # the same: nothing to do
    refused(*command, "--shard_tokens", "1000", said=["shard_tokens", "1000", "--overwrite"])
    assert state() == before
    (tmp_path / "d" / "meta.json").unlink()
    refused(*command, said=["--overwrite"])
    prepare(*command, "--shard_tokens", "1000", "--overwrite")
    assert tokens_in(tmp_path / "d") == by_hand(map(text_of, range(99))) and "notes.txt" in state()
    refused(tmp_path, tmp_path / "a.jsonl", said=["--name"])
    refused(tmp_path, "stdlib", "--tokens", "many", said=["many"])


def test_data_that_is_not_whole_is_said_so(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" + b"\n \n".join(jsonl([text_of(i)]) for i in range(99)))  # blank lines are none
    command = [tmp_path, tmp_path / "a.jsonl", "--name", "d", "--shard_tokens", "1000"]
    prepare(*command)
    assert tokens_in(tmp_path / "d") == by_hand(map(text_of, range(99)))
    meta, shard = tmp_path / "d" / "meta.json", tmp_path / "d" / "train_000001.bin"
    tokens, about = shard.read_bytes(), meta.read_bytes()
    shard.unlink()
    refused(*command, said=["train tokens", "--overwrite"])
    meta.rename(tmp_path / "d" / "progress.json")  # nor does a run go on where a shard is gone
    refused(*command, said=["train tokens", "--overwrite"])
    (tmp_path / "d" / "progress.json").rename(meta)
    shard.write_bytes(tokens)
    prepare(*command)
    for damaged in (b"", b"[]", b"null", about.replace(b'"position"', b'"other"')):
        meta.write_bytes(damaged)
        refused(*command, said=["meta.json is damaged", "--overwrite"])


def test_data_a_failed_first_try_is_no_obstacle(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{bad")
    refused(tmp_path, tmp_path / "a.jsonl", "--name", "d", said=["line 1"])
    (tmp_path / "a.jsonl").write_bytes(jsonl(map(text_of, range(99))))
    prepare(tmp_path, tmp_path / "a.jsonl", "--name", "d")
    assert tokens_in(tmp_path / "d") == by_hand(map(text_of, range(99)))
    refused(tmp_path, tmp_path / "a.jsonl", "--name", "../d", said=["--name"])
    (tmp_path / "empty").mkdir()
    refused(tmp_path, tmp_path / "empty", "--name", "e", said=["empty", ".txt"])
