"""Layer-parallel propagation against autograd, against MGRIT's theory in numpy matrices, and over
several processes; runs, tables and figures of it."""

import csv
import json
import math
import multiprocessing
import os
import queue
import socket
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import train as core  # noqa: E402
from experiments import layer_parallel_figure as figure  # noqa: E402
from experiments import train_layer_parallel as script  # noqa: E402
from experiments.layer_parallel import LayerParallel, Threads, convergence_factor  # noqa: E402
from experiments.layer_parallel import relative_residual  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

torch.set_num_threads(1)
TOKENS = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(1))
IDX, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def make_model(n_layer):
    """In float64, with weights large enough for the coarse propagator to be a rough guess."""
    torch.manual_seed(n_layer)
    model = GPT(GPTConfig(11, block_size=6, n_layer=n_layer, n_head=2, n_embd=8)).double()
    with torch.no_grad():
        for p in model.parameters():
            p *= 8
    return model


class Watched(LayerParallel):
    """Keeps the states x[0], ..., x[N] and adjoint values v[1], ..., v[N] (lambda) that a step of
    one rank ends up with."""

    def record(self, j, x):
        end = super().record(j, x)
        self.x[j * self.c:(j + 1) * self.c] = [x.detach() for x, _ in self.tape[j]]
        return end

    def end(self, x, targets):
        self.x[-1] = x.detach()
        return super().end(x, targets)

    def backward(self, j, v):
        self.v[(j + 1) * self.c], tape = v, self.tape[j]
        end = super().backward(j, v)
        self.v[j * self.c + 1:(j + 1) * self.c] = [x.grad for x, _ in tape[1:]]
        return end

    def step(self, *args):
        n = sum(map(len, self.intervals))
        self.x, self.v = [None] * (n + 1), [None] * (n + 1)
        return super().step(*args)


def close(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-11 * max(1, b.abs().max().item()))


# Exactness ----------------------------------------------------------------------------------------

CASES = [(8, 2, 0, 0), (8, 2, 1, 1), (9, 3, 0, 0), (9, 3, 1, 2), (12, 4, 0, 0), (12, 4, 2, 2),
         (12, 2, 0, 0), (14, 2, 3, 1), (15, 3, 0, 0), (15, 3, 2, 1), (16, 4, 0, 0), (16, 4, 2, 2)]


@pytest.mark.parametrize("relax", ["F", "FCF"])
@pytest.mark.parametrize("n_layer, c, opening, closing", CASES)
def test_each_iteration_makes_one_or_two_more_intervals_exact_until_all_are(
        n_layer, c, opening, closing, relax):
    model = make_model(n_layer)
    layers = model.blocks[opening:n_layer - closing]
    engine, J = Watched(model, c, opening, closing, relax), len(layers) // c
    assert engine.exact_after == math.ceil(J / (1 if relax == "F" else 2))
    loss = model(IDX, TARGETS)[1]
    loss.backward()
    want = [p.grad for p in model.parameters()]
    with torch.no_grad():
        states = [model.wte(IDX) + model.wpe.weight]
        for block in model.blocks:
            states.append(block(states[-1]))
    states = states[opening:len(states) - closing]
    for k in (None, *range(engine.exact_after + 1)):
        model.zero_grad()
        got, _ = engine.step(IDX, TARGETS, None if k is None else (k, k))
        # C-points 0 to `exact` are, and the F-points behind each
        exact = J if k is None else min(k if relax == "F" else 2 * k, J)
        right = [close(x, y) for x, y in zip(engine.x, states)]
        assert all(right[:(exact + 1) * c])
        assert not any(right[(exact + 1) * c::c]) and right[-1] == (exact == J)
        # From the other end the adjoint along the states that were stored, exact or not, and with
        # it the gradients
        v, gradients = [engine.v[-1]], []
        for block, x in zip(reversed(layers), reversed(engine.x[:-1])):
            x = x.clone().requires_grad_()
            gradient, *parameters = torch.autograd.grad(block(x), [x, *block.parameters()], v[0])
            v.insert(0, gradient)
            gradients.insert(0, parameters)
        begin = max(0, J - exact - 1) * c  # the first layer of the last `exact` + 1 intervals
        right = [all(map(close, (p.grad for p in block.parameters()), g))
                 for block, g in zip(layers, gradients)]
        assert all(right[begin:]) and not any(right[:begin])
        assert all(map(close, engine.v[begin + 1:], v[begin + 1:]))
        if exact == J:
            assert close(got, loss) and close(engine.loss(IDX, TARGETS), loss)
            assert all(close(p.grad, g) for p, g in zip(model.parameters(), want))


# Theory -------------------------------------------------------------------------------------------

class Linear(nn.Module):
    """x + A x"""

    def __init__(self, d):
        super().__init__()
        self.A = nn.Parameter(torch.randn(d, d, dtype=torch.float64) * 0.3 / math.sqrt(d))

    def forward(self, x):
        return x + x @ self.A.T


def two_level_theory(fine, coarse, c, start, relax, iterations):
    """All iterates of MGRIT on u_0 = start, u_{n+1} = fine[n] u_n with the coarse propagators
    coarse[j], from the matrices alone:

        u = u* + E^k e_0, E_F = P (I - B^-1 S) R and E_FCF = P (I - B^-1 S) (I - S) R

    with injection R, ideal interpolation P = -A_ff^-1 A_fc on the F-points, the Schur complement
    S = R A P, and the coarse operator B (Dobrev, Kolev, Petersson and Schroder, *Two-level
    convergence theory for multigrid reduction in time*, 2017). Yields (u: a list of vectors, the
    sum of squares of the residual at the C-points) after 0, 1, ... iterations.
    """
    N, d = len(fine), len(start)
    A = np.eye((N + 1) * d)
    for n, M in enumerate(fine):
        A[(n + 1) * d:(n + 2) * d, n * d:(n + 1) * d] = -M
    B = np.eye((N // c + 1) * d)
    for j, M in enumerate(coarse):
        B[(j + 1) * d:(j + 2) * d, j * d:(j + 1) * d] = -M
    C = np.concatenate([np.arange(d) + n * d for n in range(0, N + 1, c)])
    f = np.setdiff1d(np.arange((N + 1) * d), C)
    P = np.zeros((len(A), len(C)))
    P[C, np.arange(len(C))] = 1
    P[f] = -np.linalg.solve(A[np.ix_(f, f)], A[np.ix_(f, C)])
    S = A[C] @ P
    rhs = np.zeros((len(A), start.shape[1]))
    rhs[:d] = start
    exact = np.linalg.solve(A, rhs)
    error = P @ (np.linalg.solve(B, rhs[C]) - exact[C])
    eye = np.eye(len(C))
    E = P @ (eye - np.linalg.solve(B, S)) @ (eye - S if relax == "FCF" else eye)  # R: the rows C
    for _ in range(iterations + 1):
        yield (exact + error).reshape(N + 1, d, -1), np.square(S @ error[C]).sum()
        error = E @ error[C]


@pytest.mark.parametrize("relax", ["F", "FCF"])
@pytest.mark.parametrize("c", [2, 3, 4])
def test_iterates_are_those_of_the_two_level_theory(c, relax):
    model = make_model(12)
    model.blocks = nn.ModuleList(Linear(8) for _ in range(12))
    engine = Watched(model, c, relax=relax)
    A = [block.A.detach().numpy() for block in model.blocks]
    fine, coarse = [np.eye(8) + a for a in A], [np.eye(8) + c * a for a in A[::c]]
    rows = lambda x: x.reshape(-1, 8).T.numpy()  # noqa: E731  one column a token
    start = rows(model.wte(IDX).detach() + model.wpe.weight.detach())
    forward = list(two_level_theory(fine, coarse, c, start, relax, 12 // c))
    for k, (want, _) in enumerate(forward):
        model.zero_grad()
        _, (squares, adjoint_squares) = engine.step(IDX, TARGETS, (k, k))
        for n in range(13):
            np.testing.assert_allclose(rows(engine.x[n]), want[n], rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(squares[:-1], [r for _, r in forward[:k + 1]], rtol=1e-8,
                                   atol=1e-20)
        # The adjoint is the same problem with the transposed matrices in reverse
        adjoint = list(two_level_theory([M.T for M in fine[::-1]], [M.T for M in coarse[::-1]], c,
                                        rows(engine.v[12]), relax, k))
        want = adjoint[k][0][::-1]
        for n in range(1, 13):
            np.testing.assert_allclose(rows(engine.v[n]), want[n], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(engine.model.wpe.weight.grad.T,
                                   want[0].reshape(8, 2, 6).sum(1), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(adjoint_squares[:-1], [r for _, r in adjoint], rtol=1e-8,
                                   atol=1e-24)
        for n, block in enumerate(model.blocks):  # the gradient of x + A x is lambda_{n+1} x_n^T
            np.testing.assert_allclose(block.A.grad, want[n + 1] @ rows(engine.x[n]).T, rtol=1e-9,
                                       atol=1e-12)
        if k == 2:  # what a check after 1 iteration sees
            factor = convergence_factor(squares, 1)
            assert math.isclose(factor, math.sqrt(squares[2] / squares[1]), abs_tol=1e-12)


def test_convergence_factor():
    squares = torch.tensor([1.0, 0.5, 0.04, 0.3, 0.0064, 9.0])
    assert convergence_factor(squares, 2) == pytest.approx(math.sqrt(0.4))
    assert relative_residual(squares, 2) == pytest.approx(0.2 / 3)
    for squares, k in ((torch.tensor([1.0, 1e-20, 1e-20, 1.0]), 1),  # rounding against rounding,
                       (torch.tensor([1.0, 1e-4, 1e-11, 1e-13, 1e-13, 1.0]), 2)):  # and something
        assert convergence_factor(squares, k) == 0


# Processes ----------------------------------------------------------------------------------------

RUNS = [("F", None), ("F", (1, 1)), ("F", (2, 3)), ("FCF", (1, 2))]


def two_steps(rank, world, folder):
    """Two optimizer steps for each of RUNS on this rank; saves losses, gradients and parameters."""
    torch.set_num_threads(1)
    if world > 1:
        meet = f"file://{folder}/meet{world}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    kept = []
    for relax, iterations in RUNS:
        model = make_model(8)
        engine = LayerParallel(model, 2, 1, 1, relax, rank, world)
        optimizer = torch.optim.SGD(engine.mine.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss, squares = engine.step(IDX, TARGETS, iterations)
            optimizer.step()
        mine = set(engine.mine.parameters())  # nothing is kept for other ranks' layers
        assert all((p.grad is not None) == (p in mine) for p in model.parameters())
        assert len(optimizer.state) == len(mine)
        squares = [q.detach() for q in squares] if iterations else []
        for q in squares if world > 1 else ():
            dist.all_reduce(q)
        held_out = engine.loss(IDX, TARGETS)
        named = {n: (p.grad, p.detach()) for n, p in model.named_parameters() if p in mine}
        kept.append((named, (loss, held_out) if rank == world - 1 else None, squares))
    torch.save(kept, f"{folder}/{rank}of{world}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def test_two_and_three_processes_give_what_one_gives(tmp_path):
    two_steps(0, 1, tmp_path)
    alone = torch.load(tmp_path / "0of1.pt")
    for world in (2, 3):
        torch.multiprocessing.start_processes(two_steps, (world, tmp_path), world,
                                              start_method="fork")
        seen = [set() for _ in RUNS]
        for rank in range(world):
            kept = torch.load(tmp_path / f"{rank}of{world}.pt")
            for names, (one, *loss_of_one), (many, losses, squares) in zip(seen, alone, kept):
                for name, both in many.items():
                    assert all(map(torch.equal, both, one[name])), name
                names |= set(many)
                assert losses in (None, loss_of_one[0])
                assert all(torch.allclose(a, b, rtol=1e-9)  # added up in another order
                           for a, b in zip(squares, loss_of_one[1]))
        assert seen == [set(one[0]) for one in alone]


# Training -----------------------------------------------------------------------------------------

MODEL = ("--n_layer=8 --n_embd=8 --n_head=2 --block_size=8 --batch_size=4 --steps=12 --warmup=2 "
         "--lr=0.5 --momentum=0.9 --grad_clip=0.1 --eval_interval=4 --eval_sequences=8 "
         "--log_interval=1").split()
LAYERS = "--coarsen=2 --opening=1 --closing=1".split()
ROUGH = "--check_interval=3 --detector=factor --threshold=1e-9".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "val"):
        tokens = np.random.default_rng(0).integers(11, size=2000).astype("<u2")
        tokens.tofile(folder / f"{split}_000000.bin")
    meta = dict(tokenizer="bytes", vocab_size=11, train_tokens=2000, val_tokens=2000)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def run(data, out, *flags):
    script.main(["train", f"--data={data}", f"--out={out}", *MODEL, *LAYERS, *flags])
    return core.read_log(out)


def column(rows, name):
    return [row[name] for row in rows]


def checks(out):
    with open(f"{out}/checks.csv", encoding="utf-8") as f:
        return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(f)]


def losses_are_close(got, want):
    for name in ("train_loss", "val_loss"):
        assert column(got, name) == [x and pytest.approx(x, abs=2e-6) for x in column(want, name)]


@pytest.fixture(scope="module")
def single(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "single"
    core.main(["--mode=single", f"--data={data}", f"--out={out}", *MODEL, "--device=cpu",
               "--dtype=float32", "--compile=off"])
    return out


@pytest.mark.parametrize("flags", [["--solver=serial"],
                                   ["--iterations=3", "--adjoint_iterations=3"]])
def test_serial_and_converged_training_are_train_py(data, tmp_path, single, flags):
    want, got = core.read_log(single), run(data, f"{tmp_path}/layers", *flags)
    for name in ("level", "step", "tokens", "flops", "lr"):
        assert column(got, name) == column(want, name)
    losses_are_close(got, want)


@pytest.fixture(scope="module")
def controlled(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("controlled")
    for control in ("watch", "switch", "refine", "off"):
        run(data, folder / f"{control}-1", *ROUGH, f"--control={control}")
    run(data, folder / "serial-1", "--solver=serial")
    return folder


def test_control_switches_refines_or_watches(data, tmp_path, controlled):
    watch, switch, refine, off, serial = (
        checks(controlled / f"{arm}-1") for arm in ("watch", "switch", "refine", "off", "serial"))
    works = {k: script.counted(settings(coarsen=2, opening=1, closing=1), 8, 1, k and (k, k))
             for k in (None, 1, 2, 4)}
    for rows, k, steps in (  # what every step ran is in the sum of its evaluations
            (watch, [1, 1, 1, 1], [1, 1, 2] * 4), (off, [1], [1] * 12),
            (serial, [0], [None] * 12), (switch, [1, 0], [1, 1, 2] + [None] * 9),
            (refine, [1, 2, 2, 2], [1, 1, 2, 2, 2, 4, 2, 2, 4, 2, 2, 4])):  # 4: rounding is left
        assert column(rows, "adjoint_iterations") == column(rows, "forward_iterations") == k
        assert rows[-1]["step"] == 12 and rows[-1]["evaluations"] == sum(works[n] for n in steps)
    assert all(row["forward_factor"] > 0 and row["adjoint_residual"] > 0 for row in watch)
    assert off[0]["forward_factor"] is None and watch[0] == switch[0] == refine[0]
    losses = [column(core.read_log(controlled / f"{arm}-1"), "train_loss")
              for arm in ("watch", "switch", "refine")]
    assert losses[0][1:4] == losses[1][1:4] == losses[2][1:4] and losses[0] != losses[1]
    highest = max(max(r["forward_residual"], r["adjoint_residual"]) for r in watch)
    for factor, same in ((1.01, True), (0.99, False)):
        run(data, tmp_path / f"{same}", "--check_interval=3", "--control=switch",
            "--detector=residual", f"--threshold={factor * highest}")
        assert (checks(tmp_path / f"{same}")[-1] == watch[-1]) == same


def test_killed_run_goes_on_to_the_same_log(data, tmp_path, controlled, monkeypatch, capsys):
    step = script.Slab.step

    def killed(slab, batch, lr, iterations):
        if iterations == [4, 4]:  # at the second check
            raise KeyboardInterrupt
        return step(slab, batch, lr, iterations)

    flags = [*ROUGH, "--control=refine", "--save_seconds=0"]
    monkeypatch.setattr(script.Slab, "step", killed)
    with pytest.raises(SystemExit) as stop:
        run(data, tmp_path / "a", *flags)
    assert stop.value.code == 130 and "--resume goes on" in capsys.readouterr().out
    del stop  # and with it the open log
    monkeypatch.setattr(script.Slab, "step", step)
    (tmp_path / "a" / "checks.csv").write_text("a check that the checkpoint knows nothing of")
    got = run(data, tmp_path / "a", *flags, "--resume")
    want = core.read_log(controlled / "refine-1")
    for name in ("step", "train_loss", "val_loss"):
        assert column(got, name) == column(want, name)
    assert checks(tmp_path / "a") == checks(controlled / "refine-1")
    with pytest.raises(SystemExit, match="has --threshold 1e-09, not 0.5"):
        run(data, tmp_path / "a", "--resume", "--threshold=0.5")


def test_runs_from_checkpoints_are_one_long_run(data, tmp_path, single):
    flags = "--solver=serial --schedule=constant --optimizer=adamw --lr=0.01".split()
    want = run(data, tmp_path / "whole", *flags)
    run(data, tmp_path / "a", *flags, "--steps=5")
    more = [*flags, f"--init_from={tmp_path}/a", "--warmup=0"]
    run(data, tmp_path / "b", *more, "--steps=3")
    got = run(data, tmp_path / "c", *more, f"--init_from={tmp_path}/b", "--steps=4")
    assert column(got, "train_loss")[1:] == column(want, "train_loss")[9:]
    assert got[-1]["val_loss"] == want[-1]["val_loss"] and got[-1]["step"] == 4
    (tmp_path / "b" / "ckpt.pt").rename(tmp_path / "b" / "gone")  # not wanted to go on
    assert run(data, tmp_path / "c", *more, f"--init_from={tmp_path}/b", "--steps=4",
               "--resume") == got
    got = run(data, tmp_path / "d", *more, "--steps=7", "--init=weights")  # moments are lost
    assert got[1]["train_loss"] == want[6]["train_loss"] and got[2] != want[7]
    assert got[-1]["train_loss"] != want[-1]["train_loss"]
    got = run(data, tmp_path / "e", "--solver=serial", f"--init_from={single}", "--steps=1")
    assert got[0]["val_loss"] == pytest.approx(core.read_log(single)[-1]["val_loss"], abs=2e-6)
    for flag, error in (("--optimizer=sgd", "another optimizer"), ("--n_layer=4", "has the sizes"),
                        (f"--init_from={data}", "no checkpoint in --init_from")):
        with pytest.raises(SystemExit, match=error):
            run(data, tmp_path / "f", *more, flag)


def as_rank(rank, port, said, argv):
    """The script as this rank of two, its output in a file."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    for module in (core, script):
        module.RANK, module.WORLD = rank, 2
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
    script.main(argv)


def test_rank_that_dies_ends_the_run_with_a_message(data, tmp_path):
    """Two processes, one of them killed; what they logged until then is what one process logs."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    flags = ["--schedule=constant", "--timeout=300"]
    argv = ["train", f"--data={data}", f"--out={tmp_path}/two", *MODEL, *LAYERS, *flags,
            "--steps=10000"]
    ranks = [multiprocessing.get_context("fork").Process(
        target=as_rank, args=(r, port, f"{tmp_path}/{r}", argv)) for r in range(2)]
    try:
        for rank in ranks:
            rank.start()
        begin, log = time.time(), f"{tmp_path}/two/log.csv"
        while not (os.path.exists(log) and len(core.read_log(f"{tmp_path}/two")) > 13):
            assert ranks[0].is_alive() and time.time() < begin + 300
            time.sleep(0.05)
        ranks[1].kill()
        ranks[0].join(120)
    finally:
        for rank in ranks:
            rank.kill()
    said = (tmp_path / "0").read_text()
    assert ranks[0].exitcode == 1 and "Traceback" not in said
    assert said.splitlines()[-1] == ("error: rank 0 of 2 stops because a rank it waits for has "
                                     "died")
    one = run(data, f"{tmp_path}/one", *flags)
    losses_are_close(core.read_log(f"{tmp_path}/two")[:13], one)


# How wrong the gradients are ----------------------------------------------------------------------

def test_moments_have_no_bias():
    assert script.moments(torch.tensor([[3.0, 0], [1, 0]])) == pytest.approx(
        [math.sqrt(5), math.sqrt(3), math.sqrt(2)])  # by hand: 2 ** 2 - 2 / 2 = 3
    draws = torch.randn(200, 4, 1000, generator=torch.Generator().manual_seed(1)) + 0.3
    _, mean, spread = np.square([script.moments(x) for x in draws]).mean(0)  # the mean's: 90 + 250
    assert mean == pytest.approx(90, rel=0.03) and spread == pytest.approx(1000, rel=0.01)


def test_gradients_are_compared_with_autograd(single, tmp_path, capsys):
    script.main(["gradients", f"--folders={single}", "--batch_size=2", "--batches=2", "--opening=0",
                 "--closing=0"])
    text = capsys.readouterr().out
    (tmp_path / "gradients.md").write_text(text)
    rows = list(figure.read_gradients([tmp_path / "gradients.md"]))
    assert [(row["c"], row["k"]) for row in rows] == [(c, k) for c in "248" for k in "124"]
    state = core.read_checkpoint(single)
    model = GPT(GPTConfig(**state["config"]))
    model.load_state_dict(state["model"])
    tokens, g, e, squares, losses = core.Tokens(core.read_config(single)["settings"]["data"],
                                                "train", 8, 11), [], [], [], []
    for m in range(12, 14):  # the batches behind those of the run
        both = torch.from_numpy(tokens.batch(1, core.FINE, m, 2))
        x, y, vectors = both[:, :-1], both[:, 1:], []
        for k in (None, (1, 1), (2, 2)):
            model.zero_grad()
            if k:
                squares.append(LayerParallel(model, 2).step(x, y, k)[1][0])
            else:
                losses.append(model(x, y)[1])
                losses[-1].backward()
            vectors.append(np.concatenate([p.grad.numpy().ravel() for p in model.parameters()]))
        g.append(vectors[0].astype(float))
        e.append(vectors[1] - g[-1])
    size = lambda v: math.sqrt(sum(x @ x for x in v) / len(v))  # noqa: E731
    spread = math.sqrt((g[0] - g[1]) @ (g[0] - g[1]) / 2)
    cosine = sum((a + b) @ a / math.sqrt((a + b) @ (a + b) * (a @ a)) for a, b in zip(g, e)) / 2
    one, two = squares[::2], sum(squares[1::2])  # of 1 and 2 iterations
    for name, want in (
            ("step", 12), ("loss", sum(losses).item() / 2), ("relative error", size(e) / size(g)),
            ("cosine", cosine), ("batch gradient", size(g)), ("spread", spread),
            ("batch error", size(e)), ("forward factor", math.sqrt(two[2] / two[1])),
            ("forward residual", math.sqrt(sum(q[1] for q in one) / sum(q[2] for q in one)))):
        assert float(rows[0][name]) == pytest.approx(want, rel=2e-3), name
    assert all(float(row["relative error"]) < 1e-5 for row in rows if row["c"] == "8")  # 1 interval
    for flags, error in (([], "in --folders"), (["--folders", str(tmp_path)], "in ")):
        with pytest.raises(SystemExit, match=f"error: no checkpoint {error}"):
            script.main(["gradients", *flags])
    assert not capsys.readouterr().out  # no header of a table that would go over a good one


def test_figure_and_table(controlled, tmp_path, capsys):
    header, rule = script.markdown(script.GRADIENTS)
    lines = [f"| a | 1 | 2 | {c} | {k} | {error} | 1 | {f} | 0 | {r} | 0 |" + " 1 |" * 7 for
             c, k, error, f, r in ((2, 1, .1, .3, .1), (2, 2, .2, .2, .2), (4, 1, .3, .1, .3))]
    (tmp_path / "gradients.md").write_text("\n".join([header, rule, *lines]) + "\n")
    figure.main(str(controlled), str(tmp_path))
    said = capsys.readouterr().out
    assert "factor at 0.5: sees 0 of 0 errors of 0.5 or more, and 0 of 3 smaller ones" in said
    assert "correlation -1.000" in said and "2 of 3 smaller ones; rank correlation 1.000" in said
    picked = [dict(zip(script.GRADIENTS, line.strip("| ").split(" | "))) for line in lines]
    for rough, want in ((0.2, "1 of 2 errors of 0.2 or more, and 1 of 1"),
                        (0.3, "0 of 1 errors of 0.3 or more, and 2 of 2")):
        assert want in figure.verdict(picked, "factor", 0.2, rough)
    rows = {line.split(" | ")[0]: line.split(" | ") for line in said.splitlines() if " | " in line}
    losses = {arm: core.read_log(controlled / f"{arm}-1")[-1]["val_loss"]
              for arm in ("serial", "switch")}
    assert rows["| switch"][2:6] == [f"{losses['switch']:.4f}",
                                     f"{losses['switch'] - losses['serial']:+.4f}", "3", "1 + 1"]
    assert rows["| watch"][4:6] == ["-", "1 + 1"] and rows["| serial"][3:7] == ["-"] * 4
    kept = (tmp_path / "table.md").read_text()
    assert figure.table(figure.read_runs(tmp_path)) + "\n" == kept and kept in said
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    figure.main(f"{tmp_path}/", str(tmp_path))  # the same folder in other words
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*/*")}


# Settings, counting and simulating ----------------------------------------------------------------

@pytest.mark.parametrize("flags, error", [
    ("--n_layer=12 --coarsen=4 --opening=1 --closing=2",
     "12 layers less 1 opening and 2 closing ones leave 9, not a positive multiple"),
    ("--n_layer=4 --opening=2 --closing=2",
     "4 layers less 2 opening and 2 closing ones leave 0, not a positive multiple"),
    ("--coarsen=1", "--coarsen 1 must be at least 2"),
    ("--iterations=0", "--iterations 0 must be at least 1"),
    ("--adjoint_iterations=0", "--adjoint_iterations 0 must be at least 1"),
    ("--check_interval=0", "--check_interval 0 must be at least 1"),
    ("--opening=-1", "--opening -1 must be at least 0"),
    ("--solver=serial --control=switch", "--control switch needs --solver mgrit"),
    ("--cycles=3", "--cycles is a flag of train.py that `train_layer_parallel.py train` has"),
])
def test_bad_settings_give_one_line(data, tmp_path, flags, error):
    with pytest.raises(SystemExit, match=f"^error: {error}.*$") as exit:  # printed, and returns 1
        script.main(["train", f"--data={data}", f"--out={tmp_path}/run", *MODEL, *flags.split()])
    assert "\n" not in exit.value.code and not os.path.exists(f"{tmp_path}/run")


def test_runs_are_not_overwritten_unless_asked_to(data, tmp_path):
    flags = ["--schedule=constant", "--steps=2"]
    run(data, tmp_path / "run", "--steps=1", "--schedule=constant")
    with pytest.raises(SystemExit, match="^error: .*/run exists: go on with it by --resume, "):
        run(data, tmp_path / "run", *flags)
    assert len(run(data, tmp_path / "run", *flags, "--overwrite")) == 3


def test_engine_rejects_what_does_not_fit():
    model = make_model(12)
    for flags, error in ((dict(coarsen=1), "coarsen = 1 must be at least 2"),
                         (dict(coarsen=4, world=4), "4 ranks are more than the 3 intervals of 4"),
                         (dict(coarsen=4, opening=-4), "not a positive multiple"),
                         (dict(coarsen=5), "leave 12, not a positive multiple of coarsen = 5"),
                         (dict(relax="FC"), "relax = 'FC' is neither F nor FCF")):
        with pytest.raises(ValueError, match=error):
            LayerParallel(model, **flags)


def settings(**flags):
    return script.LayerSettings(**{**dict(opening=0, closing=0, coarsen=4), **flags})


def test_critical_path_by_hand(capsys):
    def path(depth, ranks, iterations=(1, 1), **flags):
        return script.counted(settings(**flags), depth, ranks, iterations)

    J, c = 8, 4
    assert path(J * c, 1, None) == path(J * c, 8, None) == 3 * J * c
    # One rank does all the work: in each direction two coarse solves, an F-relaxation, the FAS
    # residual, and the last F-relaxation, with 1 evaluation a layer forward and 2 backward
    assert path(J * c, 1) == J * (1 + (c + 1) + 1 + c) + J * (1 + (c + 1) + 1 + 2 * c)
    # A rank for each interval: the last one has its guess after J evaluations and relaxes. The
    # ranks before it have by then done theirs and half of the coarse solve, which therefore costs
    # it 2 more: one waiting, one working
    assert path(J * c, J) == (J + (c + 1) + 1 + c) + (J + (c + 1) + 1 + 2 * c)
    assert path(J * c + 3, 1, None, opening=1, closing=2) == 3 * (J * c + 3)
    script.main(["count"])
    table = capsys.readouterr().out
    assert f"| 128 | 384 | {path(128, 1, opening=2, closing=2)} (" in table
    assert table.count("\n") == 10


class Ticking(nn.Module):
    """x * w, on a clock of the thread's own that moves by 1 for an evaluation, a transposed one,
    and the gradient of w."""
    clock = threading.local()

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.w.register_hook(self.tick)

    def tick(self, _=None):
        self.clock.seconds = Ticking.now() + 1

    def now():
        return getattr(Ticking.clock, "seconds", 0)

    def forward(self, x):
        self.tick()
        y = x * self.w
        if y.requires_grad:
            y.register_hook(self.tick)
        return y


@pytest.mark.parametrize("ranks, path", [(1, 208), (8, 40)])  # as by hand
def test_simulated_seconds_are_the_count_if_an_evaluation_takes_one(ranks, path, monkeypatch):
    monkeypatch.setattr("time.thread_time", Ticking.now)
    model = make_model(1).float()
    model.blocks = nn.ModuleList(Ticking() for _ in range(32))
    for iterations, want in ((None, 96), ((1, 1), path)):
        assert script.critical_path(settings(), model, TOKENS, ranks, iterations, True) == want


@pytest.mark.parametrize("sent_at, end", [(0, 3), (7, 8)])
def test_a_clock_is_busy_or_waits_for_a_message(sent_at, end, monkeypatch):
    monkeypatch.setattr("time.thread_time", Ticking.now)
    work, queues = Ticking(), {(1, 0): queue.Queue()}
    queues[1, 0].put((None, sent_at))
    rank = Threads(0, queues, threading.Lock(), timed=True)
    assert rank.take_turns(lambda: [work.tick(), work.tick(), rank.receive(None, 1),
                                    work.tick()]) == end


def test_simulate_prints_count_beside_seconds(capsys):
    script.main(["simulate", *MODEL, *LAYERS])
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["| processes", "| ---", "| serial", "| 1", "| 2"]
    assert all(float(line[3]) > 0 for line in lines[2:]) and lines[2][1:3] == ["24", "1.00"]
