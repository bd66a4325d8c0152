"""Layer-parallel propagation against autograd, against MGRIT's theory in numpy matrices, and over several processes."""

import copy
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import train as core  # noqa: E402
from experiments import train_layer_parallel as script  # noqa: E402
from experiments.layer_parallel import LayerParallel, convergence_factor  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

torch.set_num_threads(1)
TOKENS = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(1))
IDX, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def make_model(n_layer):
    """In float64, with weights large enough for the coarse propagator to be a rough guess."""
    torch.manual_seed(n_layer)
    model = GPT(GPTConfig(vocab_size=11, block_size=6, n_layer=n_layer, n_head=2, n_embd=8)).double()
    with torch.no_grad():
        for p in model.parameters():
            p *= 8
    return model


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


class Watched(LayerParallel):
    """Keeps the states x[0], ..., x[N] and adjoint values v[1], ..., v[N] (lambda) that a step of one rank ends up with."""

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


# Exactness ----------------------------------------------------------------------------------------------------------------

CASES = [(12, 2, 0, 0), (12, 2, 1, 1), (12, 3, 0, 0), (12, 3, 1, 2), (12, 4, 0, 0), (12, 4, 2, 2),
         (24, 2, 0, 0), (24, 2, 3, 1), (24, 3, 0, 0), (24, 3, 2, 1), (24, 4, 0, 0), (24, 4, 2, 2)]


@pytest.mark.parametrize("relax", ["F", "FCF"])
@pytest.mark.parametrize("n_layer, c, opening, closing", CASES)
def test_converged_is_serial(n_layer, c, opening, closing, relax):
    model = make_model(n_layer)
    loss = model(IDX, TARGETS)[1]
    loss.backward()
    want = copy.deepcopy(grads(model))
    with torch.no_grad():
        states = [model.wte(IDX) + model.wpe.weight]
        for block in model.blocks:
            states.append(block(states[-1]))
    engine = Watched(model, c, opening, closing, relax)
    assert engine.exact_after == math.ceil((n_layer - opening - closing) / c / (1 if relax == "F" else 2))
    for iterations in (None, (engine.exact_after,) * 2):
        model.zero_grad()
        got, _ = engine.step(IDX, TARGETS, iterations)
        assert close(got, loss) and close(engine.loss(IDX, TARGETS), loss)
        assert all(close(x, y) for x, y in zip(engine.x, states[opening:len(states) - closing]))
        assert all(close(g, want[name]) for name, g in grads(model).items())


@pytest.mark.parametrize("relax", ["F", "FCF"])
@pytest.mark.parametrize("n_layer, c, opening, closing", CASES)
def test_each_iteration_makes_one_or_two_more_intervals_exact_and_no_more(n_layer, c, opening, closing, relax):
    model = make_model(n_layer)
    layers = model.blocks[opening:n_layer - closing]
    engine, J = Watched(model, c, opening, closing, relax), len(layers) // c
    for k in range(engine.exact_after + 1):
        model.zero_grad()
        engine.step(IDX, TARGETS, (k, k))
        exact = min(k if relax == "F" else 2 * k, J)  # C-points 0 to `exact`, and the F-points of the interval behind
        with torch.no_grad():
            x = [engine.x[0]]
            for block in layers:
                x.append(block(x[-1]))
        right = [close(a, b) for a, b in zip(engine.x, x)]
        assert all(right[:(exact + 1) * c])
        assert not any(right[(exact + 1) * c::c]) and right[-1] == (exact == J)
        # The adjoint along the states that were stored, exact or not, and with it the gradients, from the other end
        v, gradients = [engine.v[-1]], []
        for block, x in zip(reversed(layers), reversed(engine.x[:-1])):
            x = x.clone().requires_grad_()
            gradient, *parameters = torch.autograd.grad(block(x), [x, *block.parameters()], v[0])
            v.insert(0, gradient)
            gradients.insert(0, parameters)
        begin = max(0, J - exact - 1) * c  # the first layer of the last `exact` + 1 intervals
        right = [all(map(close, (p.grad for p in block.parameters()), g)) for block, g in zip(layers, gradients)]
        assert all(right[begin:]) and not any(right[:begin])
        assert all(map(close, engine.v[begin + 1:], v[begin + 1:]))


# Theory -------------------------------------------------------------------------------------------------------------------

class Linear(nn.Module):
    """x + A x"""

    def __init__(self, d):
        super().__init__()
        self.A = nn.Parameter(torch.randn(d, d, dtype=torch.float64) * 0.3 / math.sqrt(d))

    def forward(self, x):
        return x + x @ self.A.T


def two_level_theory(fine, coarse, c, start, relax, iterations):
    """All iterates of MGRIT on u_0 = start, u_{n+1} = fine[n] u_n with the coarse propagators coarse[j], from the matrices alone:

        u = u* + E^k e_0, E_F = P (I - B^-1 S) R and E_FCF = P (I - B^-1 S) (I - S) R

    with injection R, ideal interpolation P = -A_ff^-1 A_fc on the F-points, the Schur complement S = R A P, and the coarse operator B
    (Dobrev, Kolev, Petersson and Schroder, *Two-level convergence theory for multigrid reduction in time*, 2017).
    Yields (u: a list of vectors, the sum of squares of the residual at the C-points) after 0, 1, ... iterations.
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
    E = P @ (eye - np.linalg.solve(B, S)) @ (eye - S if relax == "FCF" else eye)  # without R, which picks the rows C
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
        np.testing.assert_allclose(squares[:-1], [residual for _, residual in forward[:k + 1]], rtol=1e-8, atol=1e-20)
        # The adjoint is the same problem with the transposed matrices in reverse
        adjoint = list(two_level_theory([M.T for M in fine[::-1]], [M.T for M in coarse[::-1]], c, rows(engine.v[12]), relax, k))
        want = adjoint[k][0][::-1]
        for n in range(1, 13):
            np.testing.assert_allclose(rows(engine.v[n]), want[n], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(engine.model.wpe.weight.grad.T, want[0].reshape(8, 2, 6).sum(1), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(adjoint_squares[:-1], [residual for _, residual in adjoint], rtol=1e-8, atol=1e-24)
        for n, block in enumerate(model.blocks):  # the gradient of x + A x is lambda_{n+1} x_n^T
            np.testing.assert_allclose(block.A.grad, want[n + 1] @ rows(engine.x[n]).T, rtol=1e-9, atol=1e-12)
        if k == 2:  # what a check after 1 iteration sees
            assert math.isclose(convergence_factor(squares, 1), math.sqrt(squares[2] / squares[1]), abs_tol=1e-12)


def test_convergence_factor():
    assert convergence_factor(torch.tensor([1.0, 0.5, 0.04, 0.3, 0.0064, 9.0]), 2) == pytest.approx(math.sqrt(0.4))
    assert convergence_factor(torch.tensor([1.0, 1e-20, 1e-20, 1.0]), 1) == 0  # rounding against rounding
    assert convergence_factor(torch.tensor([1.0, 1e-4, 1e-11, 1e-13, 1e-13, 1.0]), 2) == 0  # something against rounding


# Processes ----------------------------------------------------------------------------------------------------------------

RUNS = [("F", None), ("F", (1, 1)), ("F", (2, 3)), ("FCF", (1, 2))]


def two_steps(rank, world, folder):
    """Two optimizer steps for each of RUNS on this rank; saves its losses, gradients and parameters."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet{world}", rank=rank, world_size=world)
    kept = []
    for relax, iterations in RUNS:
        model = make_model(12)
        engine = LayerParallel(model, 2, 1, 1, relax, rank, world)
        optimizer = torch.optim.SGD(engine.mine.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss, squares = engine.step(IDX, TARGETS, iterations)
            optimizer.step()
        mine = set(engine.mine.parameters())
        assert all((p.grad is not None) == (p in mine) for p in model.parameters())  # nothing is kept for other ranks' layers
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
        torch.multiprocessing.start_processes(two_steps, (world, tmp_path), nprocs=world, start_method="fork")
        seen = [set() for _ in RUNS]
        for rank in range(world):
            for run, (one, many) in enumerate(zip(alone, torch.load(tmp_path / f"{rank}of{world}.pt"))):
                for name, (grad, p) in many[0].items():
                    assert torch.equal(grad, one[0][name][0]) and torch.equal(p, one[0][name][1]), name
                seen[run] |= set(many[0])
                assert many[1] in (None, one[1])
                assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(many[2], one[2]))  # added up in another order
        assert seen == [set(one[0]) for one in alone]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "val"):
        np.random.default_rng(0).integers(11, size=2000).astype("<u2").tofile(folder / f"{split}_000000.bin")
    (folder / "meta.json").write_text(json.dumps(dict(tokenizer="bytes", vocab_size=11, train_tokens=2000, val_tokens=2000)))
    return folder


MODEL = ("--n_layer=12 --n_embd=8 --n_head=2 --block_size=8 --batch_size=4 --steps=12 --warmup=2 --lr=0.5 --momentum=0.9 "
         "--grad_clip=0.1 --eval_interval=4 --eval_sequences=8 --log_interval=1").split()
LAYERS = "--coarsen=2 --opening=1 --closing=1".split()


def run(data, out, *flags):
    script.main(["train", f"--data={data}", f"--out={out}", *MODEL, *LAYERS, *flags])
    return core.read_log(out)


def column(rows, name):
    return [row[name] for row in rows]


@pytest.mark.parametrize("flags", [["--solver=serial"], ["--iterations=5", "--adjoint_iterations=5"]])
def test_serial_and_converged_training_are_train_py(data, tmp_path, flags):
    core.main(["--mode=single", f"--data={data}", f"--out={tmp_path}/single", *MODEL, "--device=cpu", "--dtype=float32"])
    want, got = core.read_log(f"{tmp_path}/single"), run(data, f"{tmp_path}/layers", *flags)
    for name in ("step", "tokens", "lr"):
        assert column(got, name) == column(want, name)
    for name in ("train_loss", "val_loss"):
        assert column(got, name) == [x and pytest.approx(x, abs=2e-6) for x in column(want, name)]


def test_control_switches_refines_or_watches(data, tmp_path):
    watch, switch, refine, off = (run(data, f"{tmp_path}/{control}", "--check_interval=3", "--threshold=1e-9", f"--control={control}")
                                  for control in ("watch", "switch", "refine", "off"))
    assert column(watch, "level")[1:] == column(off, "level")[1:] == ["mgrit"] * 12
    assert column(watch, "forward_iterations")[1:] == [1, 1, 2] * 4 and column(off, "adjoint_iterations")[1:] == [1] * 12
    assert [f is not None and f > 0 for f in column(watch, "forward_factor")[1:]] == [False, False, True] * 4
    assert column(off, "forward_factor") == [None] * 13
    assert column(switch, "level")[1:] == ["mgrit"] * 3 + ["serial"] * 9
    assert column(refine, "adjoint_iterations")[1:] == [1, 1, 2, 2, 2, 4, 2, 2, 4, 2, 2, 4]  # 4 leave nothing but rounding
    assert column(switch, "train_loss")[1:4] == column(watch, "train_loss")[1:4] == column(refine, "train_loss")[1:4]


def test_rank_that_dies_ends_the_run_with_a_message(data, tmp_path):
    """Two processes of the script, one of them killed; and what they logged until then is what one process logs."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    where = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2")
    command = [sys.executable, script.__file__, "train", f"--data={data}", f"--out={tmp_path}/two", *MODEL, *LAYERS, "--threads=1",
               "--schedule=constant", "--timeout=300"]
    ranks = [subprocess.Popen([*command, "--steps=1000000"], env=dict(where, RANK=rank), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) for rank in "01"]
    try:
        begin = time.time()
        while not (os.path.exists(f"{tmp_path}/two/log.csv") and len(core.read_log(f"{tmp_path}/two")) > 13):
            assert ranks[0].poll() is None and time.time() < begin + 300
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGKILL)
        said, _ = ranks[0].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 1
    assert said.splitlines()[-1] == "error: rank 0 of 2 stops because a rank it waits for has died" and "Traceback" not in said
    one, two = run(data, f"{tmp_path}/one", "--schedule=constant"), core.read_log(f"{tmp_path}/two")
    for name in ("train_loss", "val_loss"):
        assert column(two, name)[:13] == [x and pytest.approx(x, abs=2e-6) for x in column(one, name)]


# Settings and counting ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, error", [
    ("--n_layer=12 --coarsen=4 --opening=1 --closing=2", "12 layers less 1 opening and 2 closing ones leave 9, not a positive multiple"),
    ("--n_layer=4 --opening=2 --closing=2", "4 layers less 2 opening and 2 closing ones leave 0, not a positive multiple"),
    ("--coarsen=1", "--coarsen 1 must be at least 2"),
    ("--iterations=0", "--iterations 0 must be at least 1"),
    ("--adjoint_iterations=0", "--adjoint_iterations 0 must be at least 1"),
    ("--check_interval=0", "--check_interval 0 must be at least 1"),
    ("--opening=-1", "--opening -1 must be at least 0"),
    ("--solver=serial --control=switch", "--control switch needs --solver mgrit"),
    ("--cycles=3", "--cycles is a flag of train.py that `train_layer_parallel.py train` has no use for"),
])
def test_bad_settings_give_one_line(data, tmp_path, flags, error):
    with pytest.raises(SystemExit, match=f"^error: {error}.*$") as exit:  # with which Python prints it and returns 1
        script.main(["train", f"--data={data}", f"--out={tmp_path}/run", *MODEL, *flags.split()])
    assert "\n" not in exit.value.code and not os.path.exists(f"{tmp_path}/run")


def test_runs_are_not_overwritten_unless_asked_to(data, tmp_path):
    run(data, tmp_path / "run", "--steps=1", "--schedule=constant")
    with pytest.raises(SystemExit, match="^error: .*/run exists: replace it by --overwrite, or choose another --out$"):
        run(data, tmp_path / "run", "--steps=2")
    assert len(run(data, tmp_path / "run", "--steps=2", "--schedule=constant", "--overwrite")) == 3


def test_engine_rejects_what_does_not_fit():
    model = make_model(12)
    for flags, error in ((dict(coarsen=1), "coarsen = 1 must be at least 2"),
                         (dict(coarsen=4, world=4), "4 ranks are more than the 3 intervals of 4 layers"),
                         (dict(coarsen=4, opening=-4), "not a positive multiple"),
                         (dict(coarsen=5), "leave 12, not a positive multiple of coarsen = 5"),
                         (dict(relax="FC"), "relax = 'FC' is neither F nor FCF")):
        with pytest.raises(ValueError, match=error):
            LayerParallel(model, **flags)


def test_critical_path_by_hand(capsys):
    def path(depth, ranks, iterations=(1, 1), **flags):
        return script.critical_path(script.LayerSettings(**{**dict(opening=0, closing=0, coarsen=4), **flags}), depth, ranks, iterations)

    J, c = 8, 4
    assert path(J * c, 1, None) == path(J * c, 8, None) == 3 * J * c
    # One rank does all the work: in each direction two coarse solves, an F-relaxation, the FAS residual, and the last F-relaxation,
    # with 1 evaluation a layer forward and 2 backward
    assert path(J * c, 1) == J * (1 + (c + 1) + 1 + c) + J * (1 + (c + 1) + 1 + 2 * c)
    # A rank for each interval: the last one has its guess after J evaluations and relaxes. The ranks before it have by then done
    # theirs and half of the coarse solve, which therefore costs it 2 more: one waiting, one working
    assert path(J * c, J) == (J + (c + 1) + 1 + c) + (J + (c + 1) + 1 + 2 * c)
    assert path(J * c + 3, 1, None, opening=1, closing=2) == 3 * (J * c + 3)
    script.main(["count"])
    table = capsys.readouterr().out
    assert f"| 128 | 384 | {path(128, 1, opening=2, closing=2)} (" in table and table.count("\n") == 10
