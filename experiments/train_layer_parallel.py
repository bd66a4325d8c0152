"""Trains model.GPT layer-parallel (layer_parallel.py), counts the critical path of a step, and times one.

    python experiments/train_layer_parallel.py train --preset tiny --n_layer 48 --solver serial       # the reference
    python experiments/train_layer_parallel.py train --preset tiny --n_layer 48 --control switch      # MGRIT, serial when too rough
    torchrun --nproc_per_node=4 experiments/train_layer_parallel.py train --preset tiny --n_layer 48  # a slab of layers a process
    python experiments/train_layer_parallel.py count                                                  # by counting
    torchrun --nproc_per_node=2 experiments/train_layer_parallel.py bench --preset tiny --n_layer 64  # by the clock

Data, schedule and optimizer are train.py's, so serial runs repeat its single-level runs. It runs on the CPU unless told --device
cuda (a GPU a process), in float32, not compiled, and keeps no checkpoints.
"""

import argparse
import csv
import inspect
import json
import math
import os
import queue
import re
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from experiments.layer_parallel import LayerParallel, Threads, convergence_factor  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from train import FINE, HELD_OUT, RANK, WORLD, Tokens, make_optimizer, parse_settings, rate  # noqa: E402
from train import read_meta, say, settle, write_whole  # noqa: E402


@dataclass
class LayerSettings:
    """Each field is a flag, and so are the settings of train.py in `USED`."""
    solver: str = "mgrit"         # mgrit, or serial: the layers one after the other, as usual
    coarsen: int = 4              # c, the layers in an interval
    opening: int = 2              # buffer layers before the intervals, run serially: they differ most from their neighbours
    closing: int = 2              # buffer layers behind the intervals
    relax: str = "F"              # relaxation: F or FCF
    iterations: int = 1           # of MGRIT in the forward pass
    adjoint_iterations: int = 1   # and in the backward pass
    control: str = "off"          # of the inexactness: off, watch (log the factor), switch (to serial) or refine (iterate more)
    check_interval: int = 50      # steps between checks, each a step with twice the iterations
    threshold: float = 0.5        # a convergence factor at or above it is too high
    threads: int = 0              # of each process; 0: as PyTorch finds it
    timeout: float = 120.0        # seconds of silence after which a process gives another one up


OPTIONS = {"solver": ("mgrit", "serial"), "relax": ("F", "FCF"), "control": ("off", "watch", "switch", "refine")}
USED = {"preset", "data", "out", "overwrite", "n_layer", "n_head", "n_embd", "block_size", "steps", "batch_size", "schedule", "decay",
        "lr", "min_lr", "warmup", "optimizer", "momentum", "weight_decay", "grad_clip", "eval_interval", "eval_sequences",
        "log_interval", "seed", "device"}
COLUMNS = ["level", "step", "tokens", "lr", "train_loss", "val_loss", "seconds", "forward_iterations", "adjoint_iterations",
           "forward_factor", "adjoint_factor", "evaluations"]  # level: the solver; read it with train.read_log


# Training -----------------------------------------------------------------------------------------------------------------

def add_over_ranks(x):
    if WORLD > 1:
        dist.all_reduce(x)
    return x


def make_engine(s, ls, vocab_size):
    torch.manual_seed(s.seed)  # every rank draws all the weights, so they are those of train.py, and keeps its own
    model = GPT(GPTConfig(vocab_size, s.block_size, s.n_layer, s.n_head, s.n_embd))
    engine = LayerParallel(model, ls.coarsen, ls.opening, ls.closing, ls.relax, RANK, WORLD)
    for block in set(model.blocks) - set(engine.mine):
        block.to("meta")  # a shape without data
    engine.mine.to(s.device)
    return engine


def take_step(s, engine, optimizer, batch, iterations):
    """One optimizer step on batch (B, T + 1). Returns what engine.step does."""
    result = engine.step(batch[:, :-1], batch[:, 1:], iterations)
    if s.grad_clip:  # torch.nn.utils.clip_grad_norm_ over the parameters of all ranks, the tied weight of both ends only once
        parameters = list(engine.mine.parameters())
        twice = engine.model.head.weight if engine.last and not engine.first else None
        total = add_over_ranks(sum(p.grad.square().sum() for p in parameters if p is not twice))
        torch._foreach_mul_([p.grad for p in parameters], (s.grad_clip / (total.sqrt() + 1e-6)).clamp(max=1))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result


def train(s, ls):
    meta = read_meta(s.data)
    s = replace(s, out=s.out or f"out/layer_parallel/{ls.solver}")
    if os.path.isdir(s.out) and os.listdir(s.out) and not s.overwrite:
        raise ValueError(f"{s.out} exists: replace it by --overwrite, or choose another --out")
    engine = make_engine(s, ls, meta["vocab_size"])
    optimizer = make_optimizer(s, engine.mine)
    tokens = Tokens(s.data, "train", s.block_size, meta["vocab_size"])
    held_out = Tokens(s.data, "val", s.block_size, meta["vocab_size"])
    held_out = torch.from_numpy(held_out.batch(0, HELD_OUT, 0, s.eval_sequences)).to(s.device)
    add_over_ranks(torch.zeros(1, device=s.device))  # rank 0 makes the folder when all have found it free
    if RANK == 0:
        os.makedirs(s.out, exist_ok=True)
        about = dict(settings=asdict(s), layer_parallel=asdict(ls), ranks=WORLD, torch=torch.__version__)
        write_whole(os.path.join(s.out, "config.json"), json.dumps(about, indent=1).encode())
        log = open(os.path.join(s.out, "log.csv"), "w", newline="", encoding="utf-8")
        csv.writer(log).writerow(COLUMNS)
    begin, losses = time.perf_counter(), []
    iterations = None if ls.solver == "serial" else (ls.iterations, ls.adjoint_iterations)

    def write_row(step, lr=None, train_loss=None, val_loss=None, ran=None, factors=(None, None)):
        seconds, solver = time.perf_counter() - begin, "mgrit" if ran else "serial"
        if RANK == 0:
            row = [solver, step, step * s.batch_size * s.block_size, lr, train_loss, val_loss, f"{seconds:.3f}"]
            csv.writer(log).writerow([*row, *(ran or (None, None)), *factors, engine.messages.clock])
            log.flush()
        if val_loss is not None:
            say(f"{solver:>6} step {step:5} | " + (f"train {train_loss:.4f}" if step else " " * 12) + f" | val {val_loss:.4f} | "
                f"iterations {ran or '-'} | {seconds:.0f} s")

    def validate():
        clock = engine.messages.clock  # evaluating is not training
        total = sum(engine.loss(chunk[:, :-1], chunk[:, 1:]) * len(chunk) for chunk in held_out.split(s.batch_size))
        engine.messages.clock = clock
        return add_over_ranks(total).item() / len(held_out)

    write_row(0, val_loss=validate())
    for step in range(s.steps):
        lr, done = rate(s, step), step + 1
        for group in optimizer.param_groups:
            group["lr"] = lr
        check = iterations and ls.control != "off" and done % ls.check_interval == 0
        ran = tuple(2 * k for k in iterations) if check else iterations
        batch = torch.from_numpy(tokens.batch(s.seed, FINE, step, s.batch_size)).to(s.device)
        loss, squares = take_step(s, engine, optimizer, batch, ran)
        losses.append(loss)
        factors = (None, None)
        if check:
            factors = tuple(convergence_factor(add_over_ranks(q), k) for q, k in zip(squares, iterations))
            rough = [not f < ls.threshold and k < engine.exact_after for f, k in zip(factors, iterations)]
            if any(rough) and ls.control == "switch":
                iterations = None
            elif any(rough) and ls.control == "refine":  # keep what the check has just tried, where one iteration was too rough
                iterations = tuple(2 * k if r else k for k, r in zip(iterations, rough))
            if any(rough) and ls.control != "watch":
                say(f"step {done}: convergence factors {factors[0]:.3f} forward and {factors[1]:.3f} adjoint, from here on "
                    + (f"{iterations} iterations" if iterations else "serial"))
        evaluate = done % s.eval_interval == 0 or done == s.steps
        if check or evaluate or done % s.log_interval == 0:
            train_loss = add_over_ranks(torch.stack(losses).mean()).item()
            if not math.isfinite(train_loss):
                raise ValueError(f"the loss is {train_loss} before step {done}: try a smaller --lr, or more --iterations")
            write_row(done, lr, train_loss, validate() if evaluate else None, ran, factors)
            losses.clear()
    return engine


# Counting and timing ------------------------------------------------------------------------------------------------------

def critical_path(ls, depth, ranks, iterations):
    """Layer evaluations from the start of a training step to the end of the last rank, by running it on a model of width 1 with a
    thread a rank. A layer's evaluation counts 1, its transpose 1, with the parameters' gradients 2; messages, embedding, head 0."""
    model = GPT(GPTConfig(vocab_size=1, block_size=1, n_layer=depth, n_head=1, n_embd=1))
    queues = {(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)}
    engines = [LayerParallel(model, ls.coarsen, ls.opening, ls.closing, ls.relax, rank, ranks, Threads(rank, queues))
               for rank in range(ranks)]
    token = torch.zeros(1, 1, dtype=torch.int64)
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(lambda engine: engine.step(token, token, iterations), engines))
    return max(engine.messages.clock for engine in engines)


def count(ls):
    ranks, iterations = (1, 2, 4, 8, 16, 32), (ls.iterations, ls.adjoint_iterations)
    say(f"Critical path of a training step in layer evaluations, and the speed-up over serial: c = {ls.coarsen}, "
          f"{ls.relax}-relaxation, {iterations[0]} + {iterations[1]} iterations, {ls.opening} + {ls.closing} buffer layers\n")
    say("| layers | serial |" + "".join(f" {r} rank{'s' * (r > 1)} |" for r in ranks) + "\n|" + " ---: |" * (len(ranks) + 2))
    for depth in (12, 24, 48, 64, 96, 128):
        serial, cells = 3 * depth, []
        for r in ranks:
            try:
                path = critical_path(ls, depth, r, iterations)
                cells.append(f"{path} ({serial / path:.2f})")
            except ValueError:  # this depth is not divisible, or it has fewer intervals than that
                cells.append("-")
        say(f"| {depth} | {serial} | " + " | ".join(cells) + " |")


def bench(s, ls, steps=7):
    """Seconds of a training step: in one process serial with 1 thread and with 2, and MGRIT; under torchrun serial and MGRIT."""
    engine = make_engine(s, ls, 256)
    optimizer = make_optimizer(s, engine.mine)
    batch = torch.randint(256, (s.batch_size, s.block_size + 1), device=s.device)
    iterations, threads = (ls.iterations, ls.adjoint_iterations), ls.threads or 1
    seconds = {way: [] for way in ([(None, 1), (None, 2), (iterations, 1)] if WORLD == 1 else [(None, threads), (iterations, threads)])}
    for _ in range(2 + steps):
        for solver, n in seconds:  # in turn, so that they see the same machine
            torch.set_num_threads(n)
            add_over_ranks(torch.zeros(1, device=s.device))  # all ranks start together
            begin = time.perf_counter()
            add_over_ranks(take_step(s, engine, optimizer, batch, solver)[0])  # and end together
            seconds[solver, n].append(time.perf_counter() - begin)
    for (solver, n), taken in seconds.items():
        say(f"{s.n_layer} layers, width {s.n_embd}, {s.batch_size} x {s.block_size} tokens | {WORLD} process(es) of {n} thread(s) | "
            f"{f'MGRIT {solver}' if solver else 'serial':>12} | median {statistics.median(taken[2:]):.3f} s a step, fastest "
            f"{min(taken[2:]):.3f} s")


def parse(argv):
    """The command, train.py's settings and ours. Exits with one line for a flag that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     epilog=f"and of train.py: --{', --'.join(sorted(USED))}")
    parser.add_argument("command", choices=("train", "count", "bench"))
    help_of = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(LayerSettings), re.M))
    for f in fields(LayerSettings):
        parser.add_argument(f"--{f.name}", type=f.type, default=f.default, choices=OPTIONS.get(f.name), metavar=f.name.upper(),
                            help=f"{help_of[f.name]} [{f.default}]")
    own, rest = parser.parse_known_args(argv)
    ls = LayerSettings(**{f.name: getattr(own, f.name) for f in fields(LayerSettings)})
    s, given = parse_settings(rest)
    for name in sorted(given - (USED if own.command != "count" else set())):
        sys.exit(f"error: --{name} is a flag of train.py that `train_layer_parallel.py {own.command}` has no use for: leave it out")
    bounds = dict(coarsen=2, opening=0, closing=0, iterations=1, adjoint_iterations=1, check_interval=1, threads=0)
    for name, least in bounds.items():
        if getattr(ls, name) < least:
            sys.exit(f"error: --{name} {getattr(ls, name)} must be at least {least}")
    if ls.solver == "serial" and ls.control != "off":
        sys.exit(f"error: --control {ls.control} needs --solver mgrit: serial propagation is exact")
    s = replace(s, device="cpu" if s.device == "auto" else s.device, dtype="float32", compile="off")
    return own.command, settle(s, None), ls


def main(argv=None):
    command, s, ls = parse(argv)
    if ls.threads:
        torch.set_num_threads(ls.threads)
    work = {"train": lambda: train(s, ls), "count": lambda: count(ls), "bench": lambda: bench(s, ls)}[command]
    if WORLD == 1:
        try:
            return work()
        except ValueError as e:
            sys.exit(f"error: {e}")
    if s.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        dist.init_process_group("nccl" if s.device == "cuda" else "gloo", timeout=timedelta(seconds=ls.timeout))
        work()
        dist.barrier()
        return dist.destroy_process_group()
    except ValueError as e:  # all ranks have found the same; the others wait until the first has said it
        if RANK == 0:
            print(f"error: {e}", file=sys.stderr, flush=True)
        dist.barrier()
    except SystemExit as e:
        print(e.code, file=sys.stderr)
    except Exception as e:
        if isinstance(e, dist.DistError) or "gloo" in str(e):
            what = f"has not answered for {ls.timeout:g} s" if "imed out" in str(e) else "has died"
            print(f"error: rank {RANK} of {WORLD} stops because a rank it waits for {what}", file=sys.stderr)
        else:
            traceback.print_exc()
    finally:
        if dist.is_initialized():  # skip Python's clean-up: a thread of gloo that lets go of its last tensor during it aborts
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    sys.exit(1)


if __name__ == "__main__":
    main()
