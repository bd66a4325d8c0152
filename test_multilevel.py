"""The method's specification. Each test holds the code against an authority that is not this code:
the paper's formulas written out naively on named tensors, PyTorch's FLOP counter, autograd.

    python -m pytest -q    # with tests/ (files, kills, bad input) and experiments/: 90 seconds
"""

import csv
import json
import math
import os
import re
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

import train
from model import GPT, GPTConfig
from multilevel import coarse_sets, flops_per_token, flops_to_reach, prolong, restrict
from prepare_data import Tokens

torch.set_num_threads(1)  # models this small gain nothing from more
HERE = os.path.dirname(os.path.abspath(__file__))
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


# The decoder --------------------------------------------------------------------------------------

def test_parameter_count():
    n = sum(p.numel() for p in GPT(GPTConfig()).parameters())
    assert n == 50257 * 256 + 256 * 256 + 12 * 12 * 256**2 == 22368512


def test_forward_is_causal_and_its_loss_the_mean_cross_entropy():
    model, (x, y) = small_gpt(), batch()
    logits, none = model(x)
    assert none is None and logits.shape == (3, 8, 31)
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 31
    assert torch.equal(model(changed)[0][:, :5], logits[:, :5])
    assert not torch.equal(model(changed)[0][:, 5], logits[:, 5])
    picked = logits.double().softmax(-1).gather(-1, y[..., None])
    torch.testing.assert_close(model(x, y)[1].double(), -picked.log().mean())


# Restriction and prolongation ---------------------------------------------------------------------

def test_coarse_sets():
    assert coarse_sets(12) == [[1, 3, 5, 7, 9, 11], [0, 2, 4, 6, 8, 10]]  # 2, 4, ... and 1, 3, ...
    assert coarse_sets(12, "stride", 3) == [[2, 5, 8, 11], [1, 4, 7, 10], [0, 3, 6, 9]]
    assert coarse_sets(12, "stride", 2) == coarse_sets(12)
    assert coarse_sets(5, "full") == [[0, 1, 2, 3, 4]]
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
    # The authority: a model with just those blocks, into which all weights are copied.
    built = GPT(GPTConfig(**{**asdict(SMALL), "n_layer": len(keep)}))
    shared = {k: v for k, v in fine.state_dict().items() if "blocks" not in k}
    built.load_state_dict({**shared, **{f"blocks.{i}.{k}": v for i, j in enumerate(keep)
                                        for k, v in fine.blocks[j].state_dict().items()}})
    assert torch.equal(coarse(x)[0], built(x)[0])
    assert torch.equal(fine(x)[0], before) and len(fine.blocks) == 4
    assert {id(p) for p in coarse.parameters()} <= {id(p) for p in fine.parameters()}
    # Gradients land on the fine model's parameters, and nowhere else.
    coarse(x, y)[1].backward()
    built(x, y)[1].backward()
    expected = {f"blocks.{j}.{k}": p.grad for i, j in enumerate(keep)
                for k, p in built.blocks[i].named_parameters()}
    expected |= {"wte.weight": built.wte.weight.grad, "wpe.weight": built.wpe.weight.grad}
    got = {name: p.grad for name, p in fine.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys() and all(torch.equal(got[k], expected[k]) for k in got)


@pytest.mark.parametrize("N", [2, 4, 12])
@pytest.mark.parametrize("model_1", [True, False])
def test_prolongation_is_equation_4_and_its_mirror(N, model_1):
    delta, model = 0.25, small_gpt(N)
    theta = {t: {k: p.detach().clone() for k, p in model.blocks[t - 1].named_parameters()}
             for t in range(1, N + 1)}  # layers counted from 1, as in the paper
    prolong(model, coarse_sets(N)[0 if model_1 else 1], delta)
    new = {t: dict(model.blocks[t - 1].named_parameters()) for t in range(1, N + 1)}
    for name in theta[1]:
        for i in range(1, N // 2 + 1):
            if model_1:  # theta_2i <- theta^H_i
                assert torch.equal(new[2 * i][name], theta[2 * i][name])
                if 2 * i + 1 <= N:  # theta_{2i+1} <- (1 - delta) theta_{2i+1} + delta theta^H_i
                    want = (1 - delta) * theta[2 * i + 1][name] + delta * theta[2 * i][name]
                    torch.testing.assert_close(new[2 * i + 1][name], want)
            else:        # theta_{2i-1} <- theta^H_i, theta_2i <- (1 - delta) theta_2i + ...
                assert torch.equal(new[2 * i - 1][name], theta[2 * i - 1][name])
                want = (1 - delta) * theta[2 * i][name] + delta * theta[2 * i - 1][name]
                torch.testing.assert_close(new[2 * i][name], want)
        assert torch.equal(new[1][name], theta[1][name])  # layer 1 has no kept layer before it


@pytest.mark.parametrize("delta", [0.0, 0.3, 1.0])
def test_prolongation_of_any_set_and_the_ends_of_delta(delta):
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(7))
    value = [10.0**i for i in range(7)]
    for layer, x in zip(model.blocks, value):
        nn.init.constant_(layer.weight, x)
    prolong(model, [5, 2], delta)
    want = [value[0], value[1], value[2], (1 - delta) * value[3] + delta * value[2],
            (1 - delta) * value[4] + delta * value[2], value[5],
            (1 - delta) * value[6] + delta * value[5]]
    got = [layer.weight.item() for layer in model.blocks]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want))


def test_a_whole_cycle_by_hand():
    """A fine step, then both coarse models for two steps each, against tensors that are copied out
    and back as the paper writes it."""
    fine, hand, lr, delta = small_gpt(), small_gpt(), 0.05, 0.25

    def sgd(model, data):
        model.zero_grad()
        model(*data)[1].backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad

    sgd(hand, batch(0))
    for k, keep in enumerate([[1, 3], [0, 2]]):
        coarse = GPT(GPTConfig(**{**asdict(SMALL), "n_layer": 2}))
        parts = [(coarse.wte, hand.wte), (coarse.wpe, hand.wpe),
                 *zip(coarse.blocks, [hand.blocks[j] for j in keep])]
        for ours, theirs in parts:
            ours.load_state_dict(theirs.state_dict())
        sgd(coarse, batch(2 * k + 1))
        sgd(coarse, batch(2 * k + 2))
        for ours, theirs in parts:
            theirs.load_state_dict(ours.state_dict())
        with torch.no_grad():
            for odd, even in {0: [(2, 1)], 1: [(1, 0), (3, 2)]}[k]:
                for p, q in zip(hand.blocks[odd].parameters(), hand.blocks[even].parameters()):
                    p.copy_((1 - delta) * p + delta * q)

    for keep, seeds in ((None, [0]), ([1, 3], [1, 2]), ([0, 2], [3, 4])):
        net = restrict(fine, keep) if keep else fine
        optimizer = torch.optim.SGD(net.parameters(), lr)
        for seed in seeds:
            optimizer.zero_grad()
            net(*batch(seed))[1].backward()
            optimizer.step()
        if keep:
            prolong(fine, keep, delta)
    for p, q in zip(fine.parameters(), hand.parameters()):
        torch.testing.assert_close(p, q)


def test_the_examples_in_the_readme_run_and_learn(capsys):
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as f:
        exec(re.search(r"```python\n(.*?)```", f.read(), re.S)[1], {})
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) >= 10 and losses[-1] < losses[0]


# FLOPs --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n_layer", [1, 6, 12])
def test_flops_against_pytorchs_counter(n_layer):
    config = GPTConfig(vocab_size=101, block_size=32, n_layer=n_layer, n_head=4, n_embd=64)
    model, idx = GPT(config), torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(idx)
    # PyTorch does not count the CPU's fused attention: its two products, 4 N T d, are added
    attention = 4 * n_layer * 32 * 64 * 64
    assert counter.get_total_flops() + attention == 64 * flops_per_token(config)
    assert flops_per_token(model) == flops_per_token(config)
    assert flops_per_token(config) - flops_per_token(config, head=False) == 2 * 101 * 64
    assert flops_per_token(GPTConfig(), n_layer) == flops_per_token(GPTConfig(n_layer=n_layer))
    view = restrict(model, range(0, n_layer, 2))
    assert flops_per_token(view) == flops_per_token(config, len(view.blocks))
    with FlopCounterMode(display=False) as counter:  # a training step is three forwards
        model(idx, idx)[1].backward()
    assert counter.get_total_flops() + 3 * attention == 3 * 64 * flops_per_token(config)


def test_the_papers_flops():
    paper = GPTConfig()
    assert 3 * flops_per_token(paper) / 1e6 == pytest.approx(143.3, abs=0.05)
    assert flops_per_token(paper, 6) / flops_per_token(paper) == pytest.approx(0.769, abs=5e-4)
    assert flops_per_token(paper, 6, head=False) / flops_per_token(paper, head=False) == 0.5


def test_flops_to_reach():
    flops, losses = [0, 10, 20], [4, 3, 2]
    for target, reached in ((3, 10), (2.5, 15), (5, 0), (1, None)):
        assert flops_to_reach(flops, losses, target) == reached
    assert flops_to_reach([0, 10, 20, 30], [4, 2, 5, 1], 2) == 10  # the first time
    assert flops_to_reach([], [], 1) is None


# The plan of a run --------------------------------------------------------------------------------

def settings(*args):
    return train.parse_settings(list(args))[0]


def test_schedule():
    s = settings()
    middle = 0.5 * (1 + math.cos(math.pi * (8000 - 715) / (16000 - 715)))
    for step, lr in [(0, 1.2e-3 / 715), (714, 1.2e-3), (715, 1.2e-3), (15999, 1.2e-4),
                     (8000, 1.2e-4 + 1.08e-3 * middle)]:
        assert train.rate(s, step) == pytest.approx(lr, rel=1e-6)
    assert sum(train.rate(s, k) for k in range(16000)) == pytest.approx(10.5, abs=0.05)
    for flags, lr in (([], 1.2e-3), (["--lr", "0.5"], 0.5), (["--coarse_lr", "0.5"], 0.5)):
        coarse = {u.lr for u in train.plan(settings(*flags), GPTConfig()) if u.level}
        assert coarse == {lr}  # constant, without a warm-up
    constant = settings("--schedule", "constant")
    assert [train.rate(constant, k) for k in (714, 8000, 15999)] == [1.2e-3] * 3
    wsd = settings("--schedule", "wsd", "--decay", "0.25")  # constant for 12,000, linear for 4,000
    assert [train.rate(wsd, k) for k in (714, 11999, 12000)] == [1.2e-3] * 3
    assert train.rate(wsd, 14000) == pytest.approx((1.2e-3 + 1.2e-4) / 2)
    assert train.rate(wsd, 15999) == pytest.approx(1.2e-4 + 1.08e-3 / 4000)


def test_plan_is_the_papers_schedule():
    updates = train.plan(settings(), GPTConfig())
    fine, coarse = ([u for u in updates if bool(u.level) == which] for which in (False, True))
    assert [u.step for u in fine] == [u.batch for u in fine] == list(range(16000))
    assert sum(u.level == 1 for u in coarse) == sum(u.level == 2 for u in coarse) == 3500
    assert [u.level for u in updates[:202]] == [0] + [1] * 100 + [2] * 100 + [0]
    assert all(u.level == 0 for u in updates[35 * 201:])
    assert [u.step for u in coarse] == list(range(7000)) and sum(u.last for u in coarse) == 70
    assert {(u.lr, u.delta) for u in coarse} == {(1.2e-3, 0.25)}
    turns = [u for u in train.plan(settings("--in_turn"), GPTConfig()) if u.level]
    assert [u.level for u in turns if u.last] == [1, 2] * 17 + [1] and len(turns) == 3500
    assert train.plan(settings("--mode", "single"), GPTConfig()) == [
        u._replace(last=u.step == 15999) for u in fine]  # the same batches at the same rates
    odd = settings("--mode", "single", "--n_layer", "5", "--steps", "9")
    assert len(train.plan(odd, GPTConfig(n_layer=5))) == 9


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_plan_of_nested_iteration_is_that_of_as_many_single_level_steps(schedule):
    s = settings("--mode", "nested", "--start_layers", "3", "--start_steps", "700",
                 "--steps", "900", "--schedule", schedule)
    updates = train.plan(s, GPTConfig())
    assert train.sets_of(s) == [[0, 4, 8]] and [(u.level, u.step) for u in updates] == [
        *((1, j) for j in range(700)), *((0, j) for j in range(900))]
    single = settings("--mode", "single", "--steps", "1600", "--schedule", schedule)
    assert [(u.lr, u.stream, u.batch) for u in updates] == [
        (u.lr, u.stream, u.batch) for u in train.plan(single, GPTConfig())]
    assert [i for i, u in enumerate(updates) if u.last] == [699, 1599] and updates[699].delta == 1
    s = train.replace(s, cycles=2)  # full multigrid: the paper's cycles after it
    assert train.sets_of(s) == [[0, 4, 8], *coarse_sets(12)]
    assert [u.level for u in train.plan(s, GPTConfig())[700:1103]] == [
        0, *[2] * 100, *[3] * 100, 0, *[2] * 100, *[3] * 100, 0]


@pytest.mark.parametrize("more", [[], ["--in_turn"], ["--coarse_steps", "7", "--cycles", "5"]])
def test_the_control_without_coarsening_spends_the_coarse_phases_flops(more):
    config = GPTConfig()
    fine, coarse = flops_per_token(config), flops_per_token(config, 6)
    paper = sum(coarse for u in train.plan(settings(*more), config) if u.level)
    full = [u for u in train.plan(settings("--kind", "full", *more), config) if u.level]
    assert abs(len(full) * fine - paper) <= fine
    assert [u.step for u in full] == list(range(len(full)))


# Whole runs of train.py, by hand ------------------------------------------------------------------

RUN = ("--steps 24 --warmup 4 --lr 0.1 --min_lr 0.01 --momentum 0.9 --cycles 3 --coarse_steps 5 "
       "--n_layer 4 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --eval_interval 6 "
       "--eval_sequences 6 --log_interval 4 --save_seconds 0 --device cpu --dtype float32 "
       "--compile off").split()
CONFIG = GPTConfig(257, 16, 4, 2, 16)


def make_data(folder, train_tokens=5000, val_tokens=500, tokenizer="bytes"):
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(0)
    for split, n in (("train", train_tokens), ("val", val_tokens)):
        ids = np.cumsum(rng.integers(0, 3, n)) % 257  # something that can be learned
        ids[:n // 2].astype("<u2").tofile(f"{folder}/{split}_000000.bin")
        ids[n // 2:].astype("<u2").tofile(f"{folder}/{split}_000001.bin")
    with open(f"{folder}/meta.json", "w") as f:
        json.dump(dict(tokenizer=tokenizer, vocab_size=257, eot=256, train_tokens=train_tokens,
                       val_tokens=val_tokens), f)
    return str(folder)


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path / "data")


def run(data, out, *more):
    return train.main([*RUN, "--data", data, "--out", str(out), *more])


def log_of(out):
    with open(f"{out}/log.csv", newline="") as f:
        return [row[:-1] for row in csv.reader(f)]  # all columns but the seconds


class Hand:
    """The weights, batches and held-out losses of a run that the test does itself."""

    def __init__(self, data):
        torch.manual_seed(1)
        self.model, self.val = GPT(CONFIG), []
        self.tokens = Tokens(data, "train", 16, 257)
        self.held_out = torch.from_numpy(Tokens(data, "val", 16, 257).batch(0, 2, 0, 6))

    def step(self, net, optimizer, lr, stream, k):
        both = torch.from_numpy(self.tokens.batch(1, stream, k, 4))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = net(both[:, :-1], both[:, 1:])[1]
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate(self, net):
        with torch.no_grad():
            self.val.append(net(self.held_out[:, :-1], self.held_out[:, 1:])[1].item())


def momentum(net):
    return torch.optim.SGD(net.parameters(), momentum=0.9)


def test_a_multilevel_run_by_hand(data, tmp_path):
    """Both levels, momentum reset with each visit, FLOPs, the loss after each prolongation."""
    run(data, tmp_path / "run")
    s, hand = settings(*RUN), Hand(data)
    fine, coarse_step, trained = momentum(hand.model), 0, []
    hand.evaluate(hand.model)
    for k in range(24):
        trained.append(hand.step(hand.model, fine, train.rate(s, k), 0, k))
        if (k + 1) % 6 == 0:
            hand.evaluate(hand.model)
        for keep in ([1, 3], [0, 2]) if k < 3 else ():
            view = restrict(hand.model, keep)
            optimizer = momentum(view)
            for _ in range(5):
                hand.step(view, optimizer, 0.1, 1, coarse_step)
                coarse_step += 1
            prolong(hand.model, keep, 0.25)
            hand.evaluate(hand.model)
    rows = train.read_log(tmp_path / "run")
    assert [r["val_loss"] for r in rows if r["val_loss"]] == pytest.approx(hand.val, rel=1e-6)
    fine_rows = [r for r in rows if r["level"] == "fine" and r["train_loss"]]
    ends = [int(r["step"]) for r in fine_rows]
    assert ends == [1, 2, 3, 4, 6, 8, 12, 16, 18, 20, 24]
    means = [sum(trained[a:b]) / (b - a) for a, b in zip([0, *ends], ends)]
    assert [r["train_loss"] for r in fine_rows] == pytest.approx(means)
    step = 3 * 64 * flops_per_token(CONFIG)
    assert rows[-1]["flops"] == 24 * step + 30 * 3 * 64 * flops_per_token(CONFIG, 2)
    assert rows[-1]["flops_blocks"] == 3 * 64 * 39 * flops_per_token(CONFIG, head=False)
    assert rows[-1]["tokens"] == 64 * 54 and rows[-1]["step"] == 24


def test_a_nested_run_by_hand(data, tmp_path):
    """A start on layers 1 and 3, copied into 2 and 4, then all four with a fresh optimizer. Step j
    of the run sees batch j, at the rate of step j of a single-level run of as many steps."""
    run(data, tmp_path / "run", "--mode", "nested", "--start_layers", "2", "--start_steps", "8",
        "--schedule", "wsd", "--cycles", "0")
    s, hand = settings(*RUN, "--mode", "single", "--steps", "32", "--schedule", "wsd"), Hand(data)
    hand.evaluate(hand.model)
    view = restrict(hand.model, [0, 2])
    optimizer = momentum(view)
    for j in range(8):
        hand.step(view, optimizer, train.rate(s, j), 0, j)
        if j in (5, 7):
            hand.evaluate(view)
    for copy, of in ((1, 0), (3, 2)):
        hand.model.blocks[copy].load_state_dict(hand.model.blocks[of].state_dict())
    hand.evaluate(hand.model)
    optimizer = momentum(hand.model)
    for j in range(8, 32):
        hand.step(hand.model, optimizer, train.rate(s, j), 0, j)
        if (j - 7) % 6 == 0:
            hand.evaluate(hand.model)
    rows = train.read_log(tmp_path / "run")
    assert [r["val_loss"] for r in rows if r["val_loss"]] == pytest.approx(hand.val, rel=1e-6)
    assert [r["level"] for r in rows if r["val_loss"]] == [
        "fine", "coarse1", "coarse1", "prolong1", *["fine"] * 4]
    step = 3 * 64 * flops_per_token(CONFIG)
    assert rows[-1]["flops"] == 24 * step + 8 * 3 * 64 * flops_per_token(CONFIG, 2)
    assert len(train.evaluations(rows)[0]) == 6  # of the fine model: the start is another network


def test_saving_is_the_papers_figure():
    """1 - FLOPs to first reach the single-level run's lowest loss / the FLOPs that it took."""
    def log(*pairs, level="fine"):
        return [dict(level=level, flops=f, val_loss=v) for f, v in pairs]
    single = log((0, 5.0), (10, 4.0), (20, 3.0), (30, 3.5))
    assert train.saving(log((0, 5.0), (8, 4.0), (12, 2.0)), single) == 1 - 10 / 20
    assert train.saving(log((0, 5.0), (40, 3.0)), single) == 1 - 40 / 20
    assert train.saving(log((0, 5.0), (40, 3.1)), single) is None
    start = log((2, 1.0), level="coarse1")  # another network's loss
    assert train.saving(start + log((8, 3.0), level="prolong1"), single) == 1 - 8 / 20
