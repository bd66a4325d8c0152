"""What a training step costs: as train.py runs it, against the plain loop that a user would write.

    python experiments/bench.py                  # the paper's model: minutes on two CPU cores
    python experiments/bench.py --preset tiny    # any of train.py's flags

Prints one Markdown table. The paper's batch is 64 sequences on CUDA, 8 elsewhere; tokens are
random, in a shard that is written first. Every variant runs in a process of its own, with its own
peak memory, and they take turns: what disturbs the machine disturbs all of them. Each figure is a
median over the turns.
"""

import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

USERS_THP = os.environ.get("THP_MEM_ALLOC_ENABLE")  # train.py sets it, a plain loop does not
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train  # noqa: E402
from model import GPTConfig  # noqa: E402
from multilevel import flops_per_token, prolong, restrict  # noqa: E402
from train import FINE, Tokens, Update, batch, make_levels, sets_of, settle  # noqa: E402

SQUARE = {"cpu": 2048}  # rows of the matrices that show what a machine can do; else 8192


def plain_step(model, optimizer, x, y):
    """The plain loop's: float32, eager, the loss from all logits by F.cross_entropy."""
    logits = model(x)[0]
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def clock(device):
    """The time, once the device has done what it was given."""
    if device != "cpu":
        getattr(torch, device).synchronize()
    return time.perf_counter()


def work(name, s, config, folder, seconds, users_thp, pipe):
    """One variant, in its own process. Sends what its first steps cost, then a measurement for each
    True that it receives. users_thp: USERS_THP of the process that began it, before train.py."""
    if name == "plain" and users_thp is None:
        os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
    begin = time.perf_counter()
    s = settle(s, config)
    first = time.perf_counter() - begin
    levels = make_levels(s, config)
    model, steps, sets = levels[0].net, [level.step for level in levels], sets_of(s)
    tokens = Tokens(folder, "train", s.block_size, config.vocab_size)
    if name == "plain":
        steps = [lambda x, y, _: plain_step(model, levels[0].optimizer, x, y)]

    def timed(step, n):
        """Seconds a step, and those it waits for its batch."""
        waited, begin = 0.0, clock(s.device)
        for i in range(n):
            asked = time.perf_counter()
            x, y = batch(s, tokens, Update(0, i, FINE, i, s.lr, False))
            waited += time.perf_counter() - asked
            step(x, y, s.lr)
        return (clock(s.device) - begin) / n, waited / n

    first += sum(timed(step, 1)[0] for step in steps)
    begin = clock(s.device)
    held_out = torch.from_numpy(tokens.batch(0, train.HELD_OUT, 0, s.batch_size)).to(s.device)
    train.evaluate(s, model, held_out)  # its forward pass compiles by itself
    first += clock(s.device) - begin
    usual = [min(timed(step, 1)[0] for _ in range(3)) for step in steps]
    pipe.send(first - sum(usual))
    while pipe.recv():
        times = [timed(step, max(2, round(seconds / u))) for step, u in zip(steps, usual)]
        begin = clock(s.device)
        for keep in sets:
            restrict(model, keep)
            prolong(model, keep, s.delta)
        between = clock(s.device) - begin
        if s.device == "cuda":
            memory = torch.cuda.max_memory_allocated()
        else:  # in bytes on macOS, in KiB elsewhere
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            memory *= 1 if sys.platform == "darwin" else 1024
        pipe.send(dict(fine=times[0][0], coarse=[t for t, _ in times[1:]], waited=times[0][1],
                       between=between, memory=memory))


def matrix_rate(device, dtype, seconds):
    """FLOP/s of products of square matrices."""
    d, n = SQUARE.get(device, 8192), 0
    a = torch.randn(d, d, device=device).to(getattr(torch, dtype))
    a @ a
    begin = clock(device)
    while clock(device) < begin + seconds:
        for _ in range(4):
            a @ a
        n += 4
    return 2 * d**3 * n / (clock(device) - begin)


def measure(variants, config, turns, seconds):
    """All variants, in turn: ({name: what its first steps cost}, {name: its measurements},
    {dtype: FLOP/s of matrix products})."""
    context, s = multiprocessing.get_context("spawn"), variants["single"]
    pipes, first, turn_of, rates = {}, {}, {name: [] for name in variants}, {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(config.vocab_size, size=1_000_000)
        tokens.astype("<u2").tofile(f"{folder}/train_000000.bin")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
        try:
            for name, settings in variants.items():
                pipes[name], theirs = context.Pipe()
                context.Process(target=work, daemon=True,
                                args=(name, settings, config, folder, seconds, USERS_THP,
                                      theirs)).start()
                theirs.close()
                first[name] = pipes[name].recv()
            for _ in range(turns):
                for dtype in ("float32", s.dtype):
                    rate = matrix_rate(s.device, dtype, seconds / 4)
                    rates.setdefault(dtype, []).append(rate)
                for name in variants:
                    pipes[name].send(True)
                    turn_of[name].append(pipes[name].recv())
        except EOFError:
            sys.exit(f"error: the variant {name} ended by itself (its message is above)")
        for pipe in pipes.values():
            pipe.send(False)
        for process in multiprocessing.active_children():
            process.join()
    return first, turn_of, rates


def table(s, config, first, turn_of, rates):
    """The rows of the table, from what measure returns. s: the settings of `single`."""
    def median(name, value):
        return statistics.median(map(value, turn_of[name]))

    ms = {name: 1e3 * median(name, lambda turn: turn["fine"]) for name in turn_of}
    gb = {name: median(name, lambda turn: turn["memory"]) / 1e9 for name in turn_of}
    both = ms["plain"], ms["single"]
    tokens = s.batch_size * s.block_size
    gflop = s.flop_factor * tokens * flops_per_token(config) / 1e9
    peak = [statistics.median(rates[dtype]) / 1e12 for dtype in ("float32", s.dtype)]
    ratio = median("multilevel", lambda turn: statistics.mean(turn["coarse"]) / turn["fine"])
    coarse = len(sets_of(replace(s, mode="multilevel"))[0])
    less = flops_per_token(config, coarse) / flops_per_token(config)
    cycle = median("multilevel", lambda turn: (
        turn["fine"] + s.coarse_steps * sum(turn["coarse"]) + turn["between"]))
    between = median("multilevel", lambda turn: turn["between"])
    waits = median("single", lambda turn: turn["waited"] / turn["fine"])
    rows = [
        (f"{s.device}, {torch.get_num_threads()} threads, {s.batch_size} x {s.block_size} tokens",
         "plain: float32, eager",
         f"ours: {s.dtype}, {'compiled' if s.compile == 'on' else 'eager'}", ""),
        ("---", "---:", "---:", "---"),
        ("a step, ms", *(f"{t:,.1f}" for t in both), f"{both[0] / both[1]:.2f} times as fast"),
        ("tokens/s", *(f"{1e3 * tokens / t:,.0f}" for t in both), f"{gflop:,.4g} GFLOP a step"),
        ("TFLOP/s", *(f"{gflop / t:.3g}" for t in both), ""),
        ("... of matrix products in that type", *(f"{p:.3g}" for p in peak),
         "measured in turn with the steps"),
        ("... share of that", *(f"{gflop / t / p:.0%}" for t, p in zip(both, peak)), ""),
        ("peak memory, GB", f"{gb['plain']:.2f}", f"{gb['single']:.2f}",
         "on the device" if s.device == "cuda" else "of the process"),
        ("... of a multilevel run", "", f"{gb['multilevel']:.2f}",
         f"{gb['multilevel'] / gb['single']:.2f} times single-level"),
        ("coarse over fine step, time", "", f"{ratio:.3f}", f"FLOPs: {less:.3f}"),
        ("restrict and prolong, share of a cycle", "", f"{between / cycle:.3%}",
         f"{s.coarse_steps} steps a coarse model"),
        ("waiting for data, share of a step", "", f"{waits:.3%}", ""),
    ]
    if "eager" in ms:
        saved = (ms["eager"] - ms["single"]) / 1e3
        earned = "never earned back"
        if saved > 0:
            earned = f"earned back after {first['multilevel'] / saved:,.0f} steps"
        rows += [("ours, but eager: a step, ms", "", f"{ms['eager']:,.1f}",
                  f"compiled {ms['eager'] / ms['single']:.2f} times as fast"),
                 ("compiling all levels, s", "", f"{first['multilevel']:.0f}", earned)]
    return rows


def main(argv, turns=5, seconds=1.0):
    """Measures for so many turns of about so many seconds a variant. Prints the table and returns
    its rows."""
    began = time.perf_counter()
    train.__doc__ = __doc__  # what --help says
    s, given = train.parse_settings(argv)
    V = 257 if s.preset == "tiny" else 50257
    if "data" in given:
        V = train.read_meta(s.data)["vocab_size"]
    config = GPTConfig(V, s.block_size, s.n_layer, s.n_head, s.n_embd)
    s = settle(s, config)
    if s.preset == "paper" and "batch_size" not in given:
        s = replace(s, batch_size=64 if s.device == "cuda" else 8)
    single = replace(s, mode="single")
    # The multilevel variant compiles first, into an empty cache, which `single` then finds full.
    variants = dict(plain=replace(single, dtype="float32", compile="off"),
                    multilevel=replace(s, mode="multilevel"), single=single)
    if s.compile == "on":
        variants["eager"] = replace(single, compile="off")
    rows = table(single, config, *measure(variants, config, turns, seconds))
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(f"\nMedians of {turns} turns; {time.perf_counter() - began:.0f} seconds in all; "
          f"PyTorch {torch.__version__}.")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
