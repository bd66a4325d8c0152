"""Trains model.GPT layer-parallel (layer_parallel.py), measures how wrong the gradients are, counts
and simulates the critical path of a step, and times one.

    T="python experiments/train_layer_parallel.py"
    $T train --preset tiny --n_layer 48 --solver serial    # the reference
    $T train --preset tiny --n_layer 48 --control switch   # MGRIT, serial when too rough
    $T train --preset tiny --n_layer 48 --init_from out/a  # on from another run's checkpoint
    $T gradients --folders out/a out/b                     # against backpropagation's, a table
    $T count                                               # the critical path in layer evaluations,
    $T simulate --preset tiny --n_layer 48                 # and in seconds, on one core
    torchrun --nproc_per_node=2 experiments/train_layer_parallel.py bench --preset tiny

`train` under torchrun gives each process a slab of layers. Data, schedule, optimizer and the run
folder are train.py's: a serial run repeats its single-level run, --resume goes on after a kill, and
the FLOPs in log.csv are serial propagation's. What MGRIT did is in checks.csv. It runs on the CPU
unless told --device cuda (a GPU a process), in float32, not compiled; several processes keep no
checkpoint.
"""

import argparse
import csv
import inspect
import io
import os
import queue
import re
import statistics
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from experiments.layer_parallel import LayerParallel, Threads, convergence_factor  # noqa: E402
from experiments.layer_parallel import relative_residual  # noqa: E402
from experiments.runs import markdown  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from train import FINE, HELD_OUT, RANK, WORLD, Level, RunFolder, Settings, Tokens  # noqa: E402
from train import checked, due, parse_settings, plan, read_checkpoint, read_config  # noqa: E402
from train import read_meta, recorded, say, settle, write_whole  # noqa: E402


@dataclass
class LayerSettings(Settings):
    """Each field is a flag, and so are the settings of train.py in `USED`."""
    solver: str = "mgrit"         # mgrit, or serial: the layers one after the other, as usual
    coarsen: int = 4              # c, the layers in an interval
    opening: int = 2              # buffer layers before the intervals, run serially
    closing: int = 2              # buffer layers behind the intervals
    relax: str = "F"              # relaxation: F or FCF
    iterations: int = 1           # of MGRIT in the forward pass
    adjoint_iterations: int = 1   # and in the backward pass
    control: str = "off"          # off, watch (log), switch (to serial) or refine (iterate more)
    detector: str = "residual"    # what tells that it is too rough: residual or factor
    threshold: float = 0.2        # the detector is too high at or above it (factor: try 0.5)
    check_interval: int = 50      # steps between checks, each a step with twice the iterations
    init_from: str = ""           # run folder to take the weights from
    init: str = "all"             # with the optimizer's state: all; without: weights
    batches: int = 16             # gradients: their number; batch_size is their size
    threads: int = 0              # of each process; 0: as PyTorch finds it
    timeout: float = 120.0        # seconds of silence after which a process gives another one up


OWN = [f for f in fields(LayerSettings) if f.name not in Settings.__dataclass_fields__]
OPTIONS = {"solver": ("mgrit", "serial"), "relax": ("F", "FCF"), "init": ("all", "weights"),
           "control": ("off", "watch", "switch", "refine"), "detector": ("factor", "residual")}
AT_LEAST = {"coarsen": 2, "opening": 0, "closing": 0, "iterations": 1, "adjoint_iterations": 1,
            "check_interval": 1, "batches": 2, "threads": 0}
USED = {"preset", "data", "out", "resume", "overwrite", "n_layer", "n_head", "n_embd", "block_size",
        "steps", "batch_size", "schedule", "lr", "min_lr", "decay", "warmup", "optimizer",
        "momentum", "weight_decay", "grad_clip", "eval_interval", "eval_sequences", "log_interval",
        "save_seconds", "seed", "device"}
CHECKS = ["step", "forward_iterations", "adjoint_iterations", "forward_factor", "adjoint_factor",
          "forward_residual", "adjoint_residual", "evaluations"]  # the columns of checks.csv


# Training -----------------------------------------------------------------------------------------

def add_over_ranks(x):
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class Slab(Level):
    """This rank's part of the model, as a level of train.py; `first`: its first batch's number."""

    def __init__(self, s, config):
        torch.manual_seed(s.seed)  # every rank draws all the weights, and keeps its own
        self.name, self.net, self.first, state = "fine", GPT(config), 0, None
        if s.init_from and not (s.resume and os.path.exists(f"{s.out}/ckpt.pt")):
            if not (state := read_checkpoint(s.init_from)):
                sys.exit(f"error: no checkpoint in --init_from {s.init_from}")
            if state["config"] != asdict(config):
                sys.exit(f"error: the model in {s.init_from} has the sizes {state['config']}: "
                         "give the same")
            self.net.load_state_dict(state["model"])
            self.first = trained(state)
        self.engine = LayerParallel(self.net, s.coarsen, s.opening, s.closing, s.relax, RANK, WORLD)
        for block in set(self.net.blocks) - set(self.engine.mine):
            block.to("meta")  # a shape without data
        self.engine.mine.to(s.device)
        self.s, self.optimizer = s, Level(s, "fine", self.engine.mine).optimizer
        if state and s.init == "all":
            if WORLD > 1 or read_config(s.init_from)["settings"]["optimizer"] != s.optimizer:
                sys.exit(f"error: {s.init_from} has the state of another optimizer, or that of one "
                         "process: use --init weights")
            groups = self.optimizer.state_dict()["param_groups"]  # our settings, not that run's
            self.optimizer.load_state_dict(dict(state["optimizers"][0], param_groups=groups))

    def step(self, batch, lr, iterations):
        """One optimizer step on batch: int64 (B, T + 1). Returns what engine.step does."""
        result = self.engine.step(batch[:, :-1], batch[:, 1:], iterations)
        if self.s.grad_clip:  # clip_grad_norm_ over all ranks, the tied weight of both ends once
            parameters, engine = list(self.engine.mine.parameters()), self.engine
            twice = self.net.head.weight if engine.last and not engine.first else None
            total = sum(p.grad.square().sum() for p in parameters if p is not twice)
            scale = self.s.grad_clip / (add_over_ranks(total).sqrt() + 1e-6)
            torch._foreach_mul_([p.grad for p in parameters], scale.clamp(max=1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def evaluate(self, held_out):
        clock = self.engine.messages.clock  # evaluating is not training
        total = sum(self.engine.loss(chunk[:, :-1], chunk[:, 1:]) * len(chunk)
                    for chunk in held_out.split(self.s.batch_size))
        self.engine.messages.clock = clock
        return add_over_ranks(total).item() / len(held_out)


def trained(state):
    """The steps that led to a checkpoint, those of the runs that it was continued from included."""
    return state["count"].get("first", 0) + state["count"]["position"]


def train(s, given):
    """One run, from its start, --init_from or its last checkpoint to its end. Returns its Slab."""
    s = recorded(replace(s, out=s.out or f"out/layer_parallel/{s.solver}"), given)
    data, config = checked(replace(s, batch_size=WORLD))  # each rank sees the whole batch
    slab = Slab(s, config)
    tokens = Tokens(s.data, "train", s.block_size, data["vocab_size"])
    held_out = Tokens(s.data, "val", s.block_size, data["vocab_size"])
    held_out = torch.from_numpy(held_out.batch(0, HELD_OUT, 0, s.eval_sequences)).to(s.device)
    run = RunFolder(s, data, [slab], plan(s, config))
    at, messages = run.at, slab.engine.messages
    if run.is_new:
        first = None if s.solver == "serial" else [s.iterations, s.adjoint_iterations]
        at.update(first=slab.first, iterations=first, evaluations=0, checks=[])
        run.row("fine", 0, val_loss=slab.evaluate(held_out))
    messages.clock = at["evaluations"]
    for u in run.todo:
        k, end = at["iterations"], u.step + 1 == s.steps
        check = k and s.control != "off" and (u.step + 1) % s.check_interval == 0
        batch = tokens.batch(s.seed, FINE, at["first"] + u.batch, s.batch_size)
        loss, squares = slab.step(torch.from_numpy(batch).to(s.device), u.lr,
                                  [2 * n for n in k] if check else k)
        run.count(loss * WORLD)  # of which train.py takes the mean
        at["evaluations"] = messages.clock
        if check or end:
            note_check(s, slab, at, u.step + 1, squares if check else None)
        val_loss = slab.evaluate(held_out) if due(s, u) else None
        if val_loss is not None or (u.step + 1) % s.log_interval == 0:
            run.row("fine", u.step + 1, u.lr, val_loss)
        if WORLD == 1:
            run.save_or_stop()
    return slab


def note_check(s, slab, at, step, squares):
    """Adds a row to checks.csv, for which all of them are in the checkpoint, and decides on the
    iterations from here on, which `at` holds: (forward, adjoint), None for serial."""
    k, values = at["iterations"], [None] * 4
    if squares:
        squares = [add_over_ranks(q) for q in squares]
        values = [f(q, n) for f in (convergence_factor, relative_residual)
                  for q, n in zip(squares, k)]
    at["checks"].append([step, *(k or (0, 0)), *values, at["evaluations"]])
    if RANK == 0:
        csv.writer(text := io.StringIO()).writerows([CHECKS, *at["checks"]])
        write_whole(f"{s.out}/checks.csv", text.getvalue().encode())
    if squares and s.control in ("switch", "refine"):
        seen = values[:2] if s.detector == "factor" else values[2:]
        rough = [not x < s.threshold and n < slab.engine.exact_after for x, n in zip(seen, k)]
        if any(rough):
            doubled = [2 * n if r else n for n, r in zip(k, rough)]  # what the check has just tried
            at["iterations"] = None if s.control == "switch" else doubled
            say(f"step {step}: {s.detector} {seen[0]:.3g} forward and {seen[1]:.3g} adjoint, from "
                f"here on {at['iterations'] or 'serial'}")


# How wrong the gradients are ----------------------------------------------------------------------

GRADIENTS = ["run", "step", "loss", "c", "k", "relative error", "cosine", "forward factor",
             "adjoint factor", "forward residual", "adjoint residual", "batch gradient", "gradient",
             "spread", "batch error", "bias", "bias / gradient", "batch where noise is bias"]


def moments(vectors):
    """Of independent draws, the rows of (M, P): the root mean square of their norms, the norm of
    their expectation and the root mean square distance from it (of these two the squares have no
    bias: noise is not taken for an expectation, whose norm can come out as 0)."""
    M, square = len(vectors), vectors.square().sum(1).double().mean()
    spread = (square - vectors.mean(0).square().sum()) * M / (M - 1)
    return [x.clamp(min=0).sqrt().item() for x in (square, square - spread, spread)]


def gradients(s, folders):
    """Prints how far MGRIT's gradient is from backpropagation's, a markdown table with a row for
    each checkpoint, coarsening c and number of iterations k. A gradient is one vector of all
    weights, of a batch of batch_size training sequences that the run would come to next. The rows
    of g are backpropagation's, those of e what MGRIT's differ by, each from M = --batches batches:

        relative error     root mean square of the norms of e over that of g's (batch error over
                           batch gradient); cosine: the mean over the batches
        gradient, spread   norm of the expectation of g, and root mean square distance from it: the
                           noise of a batch of that size, which falls with its root
        bias               norm of the expectation of e, which no batch size averages out
        factor, residual   what `train` sees after k iterations, from all batches together
        the last column    sequences in a batch whose gradient has as much noise as bias
    """
    states = {folder: read_checkpoint(folder) for folder in folders}
    if not all(states.values()) or not folders:
        missing = [folder for folder, state in states.items() if not state] or "--folders"
        sys.exit(f"error: no checkpoint in {missing}: name folders of runs")
    runs = {folder: read_config(folder)["settings"] for folder in folders}
    for run in runs.values():
        read_meta(run["data"])  # or it says what is wrong with the data
    say("\n".join(markdown(GRADIENTS)))
    for folder, state in states.items():
        model, run = GPT(GPTConfig(**state["config"])), runs[folder]
        model.load_state_dict(state["model"])
        engines = [LayerParallel(model, c, s.opening, s.closing, s.relax) for c in (2, 4, 8)]
        tokens = Tokens(run["data"], "train", run["block_size"], model.config.vocab_size)
        batches = [tokens.batch(run["seed"], FINE, trained(state) + m, s.batch_size)
                   for m in range(s.batches)]

        def gradient_by(engine, k, batch):
            """The gradient, the loss and mgrit's sums of squares."""
            model.zero_grad()
            batch = torch.from_numpy(batch)
            loss, squares = engine.step(batch[:, :-1], batch[:, 1:], k and (k, k))
            return torch.cat([p.grad.flatten() for p in model.parameters()]), loss, squares

        g, losses, _ = zip(*(gradient_by(engines[0], None, batch) for batch in batches))
        g, loss = torch.stack(g), torch.stack(losses).mean().item()
        norm, gradient, spread = moments(g)
        for engine in engines:
            sums, rows = {}, {}
            for k in (1, 2, 4, 8):
                e, _, squares = zip(*(gradient_by(engine, k, batch) for batch in batches))
                sums[k] = [torch.stack(q).sum(0) for q in zip(*squares)]  # forward, adjoint
                e = torch.stack(e)
                cosine = statistics.mean(torch.cosine_similarity(a.double(), b.double(), 0).item()
                                         for a, b in zip(e, g))
                error, bias, _ = moments(e.sub_(g))
                enough = s.batch_size * (spread / bias) ** 2 if bias else float("inf")
                rows[k] = (error / norm, cosine, norm, gradient, spread, error, bias,
                           bias / gradient if gradient else float("inf"), enough)
            for k in (1, 2, 4):
                seen = [f(q, k) for f, n in ((convergence_factor, 2 * k), (relative_residual, k))
                        for q in sums[n]]
                cells = [loss, engine.c, k, *rows[k][:2], *seen, *rows[k][2:]]
                say(f"| {os.path.basename(os.path.normpath(folder))} | {trained(state)} | "
                    + " | ".join(f"{x:.4g}" for x in cells) + " |")


# Counting, simulating and timing ------------------------------------------------------------------

def critical_path(s, model, batch, ranks, iterations, timed=False):
    """When the last of so many ranks is done with a training step on batch, int64 (B, T + 1): in
    layer evaluations, or with timed=True in seconds. A thread is a rank; one computes at a time.

    An evaluation of a layer counts 1, its transpose 1, with the parameters' gradients 2; messages,
    embedding and head 0. Seconds are all that a rank's thread computes; messages take none."""
    queues = {(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)}
    turn = threading.Lock()
    engines = [LayerParallel(model, s.coarsen, s.opening, s.closing, s.relax, rank, ranks,
                             Threads(rank, queues, turn, timed)) for rank in range(ranks)]
    model.zero_grad()
    with ThreadPoolExecutor(ranks) as pool:
        return max(pool.map(lambda engine: engine.messages.take_turns(
            lambda: engine.step(batch[:, :-1], batch[:, 1:], iterations)), engines))


def counted(s, depth, ranks, iterations):
    """critical_path in layer evaluations, of layers that cost next to nothing."""
    model = GPT(GPTConfig(vocab_size=1, block_size=1, n_layer=1, n_head=1, n_embd=1))
    model.blocks = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(depth))
    return critical_path(s, model, torch.zeros(1, 2, dtype=torch.int64), ranks, iterations)


def title(s):
    return (f"c = {s.coarsen}, {s.relax}-relaxation, {s.iterations} + {s.adjoint_iterations} "
            f"iterations, {s.opening} + {s.closing} buffer layers\n")


def size(s):
    return f"{s.n_layer} layers, width {s.n_embd}, {s.batch_size} x {s.block_size} tokens"


def count(s):
    ranks, iterations = (1, 2, 4, 8, 16, 32), (s.iterations, s.adjoint_iterations)
    say(f"Critical path of a training step in layer evaluations, and the speed-up over serial: "
        f"{title(s)}")
    say("| layers | serial |" + "".join(f" {r} rank{'s' * (r > 1)} |" for r in ranks)
        + "\n|" + " ---: |" * (len(ranks) + 2))
    for depth in (12, 24, 48, 64, 96, 128):
        serial, cells = 3 * depth, []
        for r in ranks:
            try:
                path = counted(s, depth, r, iterations)
                cells.append(f"{path} ({serial / path:.2f})")
            except ValueError:  # not divisible, or fewer intervals than that
                cells.append("-")
        say(f"| {depth} | {serial} | " + " | ".join(cells) + " |")


def simulate(s, repeats=5):
    """The count against seconds: processes taking turns on one core, and the path that their own
    busy times would make if each had a core. The median of some repeats."""
    torch.set_num_threads(1)
    model = GPT(GPTConfig(256, s.block_size, s.n_layer, s.n_head, s.n_embd))
    batch = torch.randint(256, (s.batch_size, s.block_size + 1))
    intervals = (s.n_layer - s.opening - s.closing) // s.coarsen
    ways = [(1, None)] + [(r, (s.iterations, s.adjoint_iterations)) for r in (1, 2, 4, 8)
                          if r <= intervals]
    seconds = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way in ways:  # in turn, so that they see the same machine
            seconds[way].append(critical_path(s, model, batch, *way, timed=True))
    say(f"{size(s)}: {title(s)}")
    rows = [["processes", "evaluations", "counted speed-up", "busy seconds", "simulated speed-up"]]
    for way in ways:
        path, time_of = counted(s, s.n_layer, *way), statistics.median(seconds[way][1:])
        if way[1] is None:
            serial, serial_time = path, time_of
        rows.append([str(way[0]) if way[1] else "serial", str(path), f"{serial / path:.2f}",
                     f"{time_of:.3f}", f"{serial_time / time_of:.2f}"])
    say("\n".join(markdown(*rows)))


def bench(s, repeats=7):
    """Seconds of a training step: in one process serial with 1 thread and with 2, and MGRIT; under
    torchrun serial and MGRIT."""
    slab = Slab(s, GPTConfig(256, s.block_size, s.n_layer, s.n_head, s.n_embd))
    batch = torch.randint(256, (s.batch_size, s.block_size + 1), device=s.device)
    iterations, n = (s.iterations, s.adjoint_iterations), s.threads or 1
    ways = [(None, 1), (None, 2), (iterations, 1)] if WORLD == 1 else [(None, n), (iterations, n)]
    seconds = {way: [] for way in ways}
    for _ in range(2 + repeats):
        for solver, n in ways:  # in turn, so that they see the same machine
            torch.set_num_threads(n)
            add_over_ranks(torch.zeros(1, device=s.device))  # all ranks start together
            begin = time.perf_counter()
            add_over_ranks(slab.step(batch, s.lr, solver)[0])  # and end together
            seconds[solver, n].append(time.perf_counter() - begin)
    for (solver, n), taken in seconds.items():
        name = f"MGRIT {solver}" if solver else "serial"
        say(f"{size(s)} | {WORLD} process(es) of {n} thread(s) | {name:>12} | median "
            f"{statistics.median(taken[2:]):.3f} s a step, fastest {min(taken[2:]):.3f} s")


# The command --------------------------------------------------------------------------------------

def parse(argv):
    """(command, settings, names of the flags given, folders). Exits with one line for a flag that
    cannot be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False, epilog=f"and of train.py: --{', --'.join(sorted(USED))}")
    parser.add_argument("command", choices=("train", "gradients", "count", "simulate", "bench"))
    parser.add_argument("--folders", nargs="+", default=[], help="gradients: runs with checkpoints")
    help_of = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(LayerSettings), re.M))
    for f in OWN:
        parser.add_argument(f"--{f.name}", type=f.type, choices=OPTIONS.get(f.name),
                            default=argparse.SUPPRESS, metavar=f.name.upper(),
                            help=f"{help_of[f.name]} [{f.default}]")
    own, rest = parser.parse_known_args(argv)
    own = vars(own)
    command, folders = own.pop("command"), own.pop("folders")
    s, given = parse_settings(rest)
    for name in sorted(given - {"count": set(), "gradients": {"batch_size"}}.get(command, USED)):
        sys.exit(f"error: --{name} is a flag of train.py that `train_layer_parallel.py {command}` "
                 "has no use for: leave it out")
    device = "cpu" if s.device == "auto" else s.device
    s = LayerSettings(**{**asdict(s), **own, "mode": "single", "device": device,
                         "dtype": "float32", "compile": "off"})
    for name, least in AT_LEAST.items():
        if getattr(s, name) < least:
            sys.exit(f"error: --{name} {getattr(s, name)} must be at least {least}")
    if s.solver == "serial" and s.control != "off":
        sys.exit(f"error: --control {s.control} needs --solver mgrit: serial propagation is exact")
    if WORLD > 1 and s.resume:
        sys.exit("error: several processes keep no checkpoint: start again with --overwrite")
    return command, settle(s, None), given | set(own), folders


def main(argv=None):
    command, s, given, folders = parse(argv)
    if s.threads:
        torch.set_num_threads(s.threads)
    work = {"train": lambda: train(s, given), "gradients": lambda: gradients(s, folders),
            "count": lambda: count(s), "simulate": lambda: simulate(s), "bench": lambda: bench(s)}
    try:
        if WORLD > 1:
            if s.device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if s.device == "cuda" else "gloo",
                                    timeout=timedelta(seconds=s.timeout))
        result = work[command]()
        if WORLD > 1:
            dist.barrier()
            dist.destroy_process_group()
        return result
    except KeyboardInterrupt:
        what = "stopped: the same command with --resume goes on from the last checkpoint"
        if WORLD == 1:
            say(what)
            sys.exit(130)
    except (SystemExit, ValueError) as e:  # all ranks have found the same
        what = e.code if isinstance(e, SystemExit) else f"error: {e}"
        if WORLD == 1:
            sys.exit(what)
    except Exception as e:
        if WORLD == 1:
            raise
        what = traceback.format_exc()
        if isinstance(e, dist.DistError) or "gloo" in str(e):
            why = f"has not answered for {s.timeout:g} s" if "imed out" in str(e) else "has died"
            what = f"error: rank {RANK} of {WORLD} stops because a rank it waits for {why}"
    sys.stderr.write(f"{what}\n")  # in one piece, beside the lines of other ranks
    sys.stdout.flush()
    os._exit(1)  # a thread of gloo that lets go of its last tensor during an orderly exit aborts


if __name__ == "__main__":
    main()
