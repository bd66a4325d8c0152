"""Trains the decoder of model.py, alone or with the coarse models of multilevel.py (arXiv 2504.18590).

    python train.py --mode single                        # the paper's baseline, on one GPU
    python train.py                                      # the paper's multilevel run
    python train.py --preset tiny --mode both            # both at a laptop's size, and the FLOPs saved
    python train.py --mode sample --out out/tiny/single  # text from a trained model
    torchrun --nproc_per_node=4 train.py                 # any of them on several GPUs

Read it from top to bottom: settings, data, schedule, the run folder, the loop, what is printed at the end.
"""

import argparse
import contextlib
import csv
import glob
import inspect
import itertools
import json
import math
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import NamedTuple

# For the CPU, and before torch is there to read them; what you set yourself is left alone. Large pages for large tensors: a step spends up
# to a fifth of its time on page faults otherwise. And threads that wait for each other soon sleep instead of spinning: if another
# program takes one core of two, that is the difference between 11,000 tokens/s and 200 in the tiny preset.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
import torch.distributed as dist

from model import GPT, GPTConfig
from multilevel import coarse_sets, flops_per_token, flops_to_reach, prolong, restrict
from prepare_data import check_shards, get_tokenizer


@dataclass
class Settings:
    """Each field is a flag of the same name, and its comment the flag's help. The defaults are the paper's run."""
    mode: str = "multilevel"         # single, multilevel, nested, both (single, then multilevel, and the FLOPs saved) or sample (text)
    preset: str = "paper"            # paper, or tiny: a run of a minute or two on a laptop; flags you give change either
    data: str = "data/fineweb-edu"   # folder made by prepare_data.py
    out: str = ""                    # run folder; by default out/PRESET/MODE
    resume: bool = False             # go on with the run in --out where its last checkpoint is
    overwrite: bool = False          # start afresh although --out holds a run
    # the model
    n_layer: int = 12                # number of blocks
    n_head: int = 8                  # attention heads
    n_embd: int = 256                # width
    block_size: int = 256            # context, in tokens
    # the fine level
    steps: int = 16000               # fine steps
    batch_size: int = 64             # sequences a step, over all micro-batches and ranks
    micro_batch: int = 0             # sequences a forward pass, the rest by accumulating gradients; 0: the whole batch
    schedule: str = "cosine"         # of the fine rate after warm-up: cosine (to min_lr), wsd (constant, then linear to it) or constant
    lr: float = 1.2e-3               # highest fine rate
    min_lr: float = 1.2e-4           # fine rate at the end of the run
    decay: float = 0.3               # share of the run over which wsd decays, its last
    warmup: int = 715                # steps of linear warm-up
    optimizer: str = "sgd"           # sgd or adamw, at every level
    momentum: float = 0.0            # sgd's momentum, or adamw's beta1 (which is 0.9 if this is 0)
    weight_decay: float = 0.0        # at every level
    grad_clip: float = 0.0           # largest norm of a gradient, at every level; 0: no clipping
    # nested iteration: a shallow start, prolonged once with delta = 1
    start_layers: int = 3            # blocks of the start: the first of each group of n_layer / start_layers
    start_steps: int = 16000         # its steps
    # the coarse levels
    cycles: int = 35                 # so many fine steps, the first, are each followed by a cycle over the coarse models (nested: 0)
    coarse_steps: int = 100          # steps of a coarse model in one cycle
    coarse_lr: float = 0.0           # constant coarse rate; 0: the same as lr
    delta: float = 0.25              # weight of the kept block when a skipped one is averaged with it
    kind: str = "alternate"          # coarse sets: alternate, stride, random, permuted or full (the control: no coarsening)
    stride: int = 2                  # for --kind stride
    in_turn: bool = False            # one coarse model a cycle, in turn, instead of all of them
    keep_coarse_state: bool = False  # keep the coarse optimizers' momentum from cycle to cycle instead of resetting it
    # counting and logging
    flop_factor: float = 3.0         # forward passes that a training step counts as
    eval_interval: int = 100         # fine steps between evaluations
    eval_sequences: int = 128        # held-out sequences, always the same ones
    log_interval: int = 10           # steps between rows of log.csv
    save_seconds: float = 60.0       # seconds between checkpoints
    target_loss: float = 0.0         # stop once the validation loss is at or below this; 0: train to the end
    seed: int = 1                    # of the weights, the batches and random coarse sets
    # the machine
    device: str = "auto"             # cuda, mps or cpu; auto: the first of them that is there
    dtype: str = "auto"              # float32 or bfloat16 (mixed precision); auto: bfloat16 where it is the faster one
    compile: str = "auto"            # on, off, or graph (on, and one CUDA graph a step); auto: on where a run is long enough for it
    # for --mode sample, and at the end of --mode both
    prompt: str = ""                 # text to continue; by default the model starts a document
    max_new_tokens: int = 200        # length of a sample
    temperature: float = 0.8         # 0 takes the likeliest token
    top_k: int = 50                  # sample from so many likeliest tokens; 0: from all


PRESETS = {
    "paper": {},
    "tiny": dict(data="data/stdlib", n_embd=64, n_head=4, block_size=64, batch_size=16, steps=1500, warmup=100, lr=0.2, min_lr=0.01,
                 momentum=0.9, grad_clip=1.0, cycles=10, coarse_steps=20, eval_interval=50, eval_sequences=64, save_seconds=10.0),
}
# What may differ between a run and its resumption; with any other setting changed it would be another run.
FREE = {"mode", "preset", "out", "resume", "overwrite", "save_seconds", "target_loss", "prompt", "max_new_tokens", "temperature",
        "top_k"}
CHOICES = {"mode": ("single", "multilevel", "nested", "both", "sample"), "preset": tuple(PRESETS), "schedule": ("cosine", "wsd", "constant"),
           "optimizer": ("sgd", "adamw"), "kind": ("alternate", "stride", "random", "permuted", "full"),
           "device": ("auto", "cuda", "mps", "cpu"), "dtype": ("auto", "float32", "bfloat16"), "compile": ("auto", "on", "off", "graph")}


def parse_settings(argv):
    """Settings from flags, and the names of the flags that were given. Exits with one line for a flag that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_of = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(Settings), re.M))
    for f in fields(Settings):
        kind = dict(action="store_true") if f.type is bool else dict(type=f.type, choices=CHOICES.get(f.name), metavar=f.name.upper())
        parser.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=f"{help_of[f.name]} [{f.default}]", **kind)
    parser.error = lambda message: sys.exit(f"error: {message} (--help lists all flags)")
    given = vars(parser.parse_args(argv))
    s = Settings(**{**PRESETS[given.get("preset", "paper")], **given})
    least = dict(steps=1, batch_size=1, eval_interval=1, eval_sequences=1, log_interval=1, max_new_tokens=1)
    for f in fields(s):
        value = getattr(s, f.name)
        if f.type in (int, float) and not (math.isfinite(value) and value >= least.get(f.name, 0)):
            sys.exit(f"error: --{f.name} {value} must be at least {least.get(f.name, 0)}")
    if s.mode == "nested" and "cycles" not in given:
        s = replace(s, cycles=0)
    return replace(s, coarse_lr=s.coarse_lr or s.lr), set(given)


COMPILED = {"off": "eager", "on": "compiled", "graph": "compiled, one CUDA graph a step"}


def settle(s, config):
    """Decides device, dtype and compile where they are `auto`, says what was decided, and never changes it later."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = next(d for d in there if there[d]) if s.device == "auto" else s.device
    if not there[device]:
        sys.exit(f"error: this PyTorch ({torch.__version__}) sees no {device} device: use --device auto, or install another build")
    dtype = s.dtype
    if dtype == "auto":
        fast = {"cuda": lambda: torch.cuda.is_bf16_supported(including_emulation=False),
                "mps": lambda: False, "cpu": bfloat16_is_faster}[device]()
        dtype = "bfloat16" if fast else "float32"
    compiled = s.compile
    if compiled == "auto":  # two CPU cores take 20 seconds, earned back after 1.4e13 FLOPs at width 64 as at 256 (experiments/bench.py)
        work = s.flop_factor * s.steps * s.batch_size * s.block_size * flops_per_token(config)
        compiled = "on" if device != "mps" and work > (1e15 if device == "cuda" else 1.5e13) else "off"  # for CUDA a guess
    if compiled == "graph" and (device != "cuda" or WORLD > 1):
        sys.exit(f"error: --compile graph is for one process on CUDA, not {WORLD} on {device}: use --compile on")
    if compiled != "off":
        try:
            torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
        except Exception as e:
            if s.compile != "auto":
                sys.exit(f"error: --compile {compiled}: torch.compile fails here ({reason(e)}): use --compile off")
            say("torch.compile fails here (is there a C++ compiler?): running eagerly")
            compiled = "off"
    return replace(s, device=device, dtype=dtype, compile=compiled)


def bfloat16_is_faster():
    """Whether this CPU multiplies bfloat16 matrices at least 1.5 times as fast as float32: most do not, some do at 4 times."""
    best = {}
    for dtype in (torch.float32, torch.bfloat16) * 4:  # in turn, so that both see the same machine
        a = torch.ones(1024, 1024, dtype=dtype)
        begin = time.perf_counter()
        a @ a
        best[dtype] = min(best.get(dtype, math.inf), time.perf_counter() - begin)
    return best[torch.float32] > 1.5 * best[torch.bfloat16]


# Data ---------------------------------------------------------------------------------------------------------------------

FINE, COARSE, HELD_OUT = range(3)  # streams of batches


def read_meta(folder):
    """meta.json of the data in folder, whose shards hold what it says."""
    try:
        with open(os.path.join(folder, "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        check_shards(folder, meta)
        return meta
    except FileNotFoundError:
        how = os.path.basename(folder) if os.path.basename(folder) in ("stdlib", "fineweb-edu") else "--help"
        sys.exit(f"error: no data in {folder} (no meta.json): run python prepare_data.py {how}")
    except (ValueError, LookupError, TypeError) as e:
        sys.exit(f"error: {folder}/meta.json is damaged ({reason(e)}): make the data again with prepare_data.py --overwrite")


class Tokens:
    """The shards of a split. Batch k of a stream is a pure function of (seed, stream, k): runs that differ in anything else see
    the same batches, whatever they did before, and so does a run that is resumed or spread over ranks."""

    def __init__(self, folder, split, T, vocab_size):
        self.shards, self.T = [], T
        for name in sorted(glob.glob(os.path.join(folder, f"{split}_*.bin"))):
            if os.path.getsize(name) % 2:
                sys.exit(f"error: {name} has an odd number of bytes, so it is not whole: make it again, prepare_data.py --overwrite")
            if os.path.getsize(name):
                self.shards.append(np.memmap(name, dtype="<u2", mode="r"))
                if (largest := int(self.shards[-1].max())) >= vocab_size:
                    sys.exit(f"error: {name} holds the token {largest}, outside the vocabulary of {vocab_size}: "
                             "make it again, prepare_data.py --overwrite")
        self.ends = np.cumsum([max(0, len(shard) - T) for shard in self.shards])  # places where a sequence can start
        if not self.shards or self.ends[-1] == 0:
            sys.exit(f"error: the {split} split of {folder} is shorter than one sequence of {T + 1} tokens: use more text or a "
                     "smaller --block_size")

    def batch(self, seed, stream, k, n):
        """int64 (n, T + 1): inputs are [:, :-1], targets [:, 1:]."""
        out = np.empty((n, self.T + 1), dtype=np.int64)
        for row, start in enumerate(np.random.default_rng((seed, stream, k)).integers(self.ends[-1], size=n)):
            i = int(np.searchsorted(self.ends, start, side="right"))
            start -= self.ends[i - 1] if i else 0
            out[row] = self.shards[i][start:start + self.T + 1]
        return torch.from_numpy(out)


# Schedule -----------------------------------------------------------------------------------------------------------------

def fine_lr(s, step):
    """The rate at a step counted from 0, over a nested iteration's start and fine steps as one: linear warm-up to lr, then a cosine
    to min_lr, or constant until a linear decay to it (wsd), or constant."""
    steps = s.steps + s.start_steps * (s.mode == "nested")
    if step < s.warmup:
        return s.lr * (step + 1) / s.warmup
    if s.schedule == "cosine":
        return s.min_lr + (s.lr - s.min_lr) * (1 + math.cos(math.pi * (step - s.warmup) / (steps - s.warmup))) / 2
    if s.schedule == "wsd" and s.decay:
        return s.min_lr + (s.lr - s.min_lr) * min(1, (steps - step) / (s.decay * steps))
    return s.lr


class Update(NamedTuple):
    level: int    # 0: the fine model, i: coarse model i
    step: int     # counted from 0 over the run: fine steps, those of a nested iteration's start, and those of cycles, each on their own
    last: bool    # the last update of a visit to this level; after a coarse model's comes its prolongation
    lr: float     # rate
    stream: int   # of batches
    batch: int    # number of the batch in its stream
    delta: float  # of the prolongation


def sets_of(s):
    """The kept blocks of each coarse model of the run: that of a nested iteration's start, then those of the cycles."""
    if s.mode == "nested" and not (1 <= s.start_layers < s.n_layer and s.n_layer % s.start_layers == 0):
        raise ValueError(f"start_layers = {s.start_layers} must divide n_layer = {s.n_layer} and be less")
    start = [list(range(0, s.n_layer, s.n_layer // s.start_layers))] if s.mode == "nested" else []
    return start + (coarse_sets(s.n_layer, s.kind, s.stride, s.seed) if s.mode == "multilevel" or start and s.cycles else [])


def plan(s, config):
    """The run as one sequence of updates. A place in it is all that a checkpoint needs to know of the schedule."""
    start = s.start_steps if s.mode == "nested" else 0
    sets = sets_of(s)[s.mode == "nested":]
    cycles = min(s.cycles, s.steps) if sets else 0
    # The control without coarsening (full) takes as many FLOPs, not steps, as the paper's two halves: rounded as a running sum, so that
    # the whole coarse phase agrees to within half a step.
    halves = s.coarse_steps * (1 if s.in_turn else 2) * flops_per_token(config, s.n_layer // 2) / flops_per_token(config)
    coarse = 0
    for j in range(start):
        yield Update(1, j, j + 1 == start, fine_lr(s, j), FINE, j, 1.0)
    for step in range(s.steps):
        j = start + step
        yield Update(0, step, step < cycles or step + 1 == s.steps, fine_lr(s, j), FINE, j, 0.0)
        for i in range(len(sets)) if step < cycles else ():
            if s.in_turn and i != step % len(sets):
                continue
            n = round((step + 1) * halves) - round(step * halves) if s.kind == "full" else s.coarse_steps
            level = i + 1 + (s.mode == "nested")
            yield from (Update(level, coarse + j, j + 1 == n, s.coarse_lr, COARSE, coarse + j, s.delta) for j in range(n))
            coarse += n


# Run folder: config.json, log.csv, ckpt.pt --------------------------------------------------------------------------------

COLUMNS = ["level", "step", "tokens", "flops", "flops_blocks", "lr", "train_loss", "val_loss", "seconds"]


def reason(e):
    """An exception in one line."""
    return f"{type(e).__name__}: {e}".strip(": \n").splitlines()[0][:120]


def read_log(folder):
    """The rows of log.csv as dicts: level a string, the rest float, None where a cell is empty; a line cut short is left out."""
    with open(os.path.join(folder, "log.csv"), newline="", encoding="utf-8") as f:
        rows = [row for row in csv.DictReader(f) if None not in row.values()]
    return [{k: v if k == "level" else float(v) if v else None for k, v in row.items()} for row in rows]


def write_whole(path, write):
    """Calls write(file) on a file beside path and then renames it, so that path is the old or the new one, never half of it."""
    try:
        with open(path + ".tmp", "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except (OSError, RuntimeError) as e:  # torch.save reports a full disk as a RuntimeError
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        sys.exit(f"error: cannot write {path} (is the disk full? {reason(e)}); "
                 + ("the checkpoint before it is kept: make room and go on with --resume" if os.path.exists(path) else "make room"))


def read_checkpoint(folder):
    """The checkpoint of a run as a dict, on the CPU; None where there is none."""
    path = os.path.join(folder, "ckpt.pt")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not {"count", "losses", "log_bytes", "config", "model", "optimizers"} <= state.keys():
            raise ValueError("some of it is missing")
        return state
    except FileNotFoundError:
        return None
    except Exception as e:
        sys.exit(f"error: {path} is damaged, or not a checkpoint of train.py ({type(e).__name__}): put back a good copy, or start again "
                 "with --overwrite")


def read_config(folder):
    """config.json of a run: its settings, what its data were, the number of parameters and PyTorch's version."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as f:
            about = json.load(f)
        return dict(about, settings=dict(about["settings"]), data=dict(about["data"]))
    except (OSError, ValueError, LookupError, TypeError) as e:
        sys.exit(f"error: {path} is damaged or missing ({type(e).__name__}): put back a good copy, or start again with --overwrite")


def open_run(s, given, meta):
    """The settings of the run in s.out: those of s in a new folder, those recorded there when it is resumed."""
    path = os.path.join(s.out, "config.json")
    if not (s.resume and os.path.exists(path)):
        if os.path.isdir(s.out) and os.listdir(s.out) and not s.overwrite and not s.resume:
            sys.exit(f"error: {s.out} exists: go on with it by --resume, replace it by --overwrite, or choose another --out")
        return s
    old = read_config(s.out)
    free = FREE | {"micro_batch"} & given  # which changes rounding only, and may have to when memory runs out
    try:
        recorded = replace(s, **{k: v for k, v in old["settings"].items() if k not in free})
    except TypeError as e:
        sys.exit(f"error: {path} is of another version of train.py ({reason(e)}): resume it with that, or start again with --overwrite")
    mode, data = old["settings"].get("mode"), old["data"]
    wanted = set(PRESETS[s.preset]) | given if "preset" in given else given
    differ = [f"--mode {mode} (now {s.mode})"] * (mode != s.mode)
    differ += [f"--{k} {getattr(recorded, k)} (now {getattr(s, k)})" for k in sorted(wanted - FREE)
               if getattr(s, k) not in (getattr(recorded, k), "auto")]
    differ += [f"data with {k} {v} (now {meta.get(k)})" for k, v in data.items() if meta.get(k) != v]
    if differ:
        sys.exit(f"error: the run in {s.out} was made with {', '.join(differ)}: resume it with the same, or choose another --out")
    return recorded


class Recorder:
    """What a run leaves behind, log.csv and ckpt.pt, and its progress line. Rank 0 writes; all ranks take part in the averages.

    It goes on where `state`, a checkpoint, was written: rows that the log got after that are cut off, since they come again.
    """

    def __init__(self, s, state, updates, whole):
        self.s, self.updates, self.whole = s, updates, whole  # of how many updates and FLOPs the run consists
        fresh = dict(position=0, tokens=0, flops=0.0, flops_blocks=0.0, seconds=0.0, val_loss=math.inf)
        self.count = state["count"] if state else fresh
        self.losses = state["losses"] if state else []  # of the steps since the last row: floats, or tensors still on the device
        self.path, self.log_path = os.path.join(s.out, "ckpt.pt"), os.path.join(s.out, "log.csv")
        if RANK == 0:
            try:
                self.log = open(self.log_path, "a" if state else "w", newline="", encoding="utf-8")
                if state and self.log.tell() < state["log_bytes"]:
                    sys.exit(f"error: {self.log_path} is shorter than when {self.path} was written: put it back, or --overwrite")
                self.log.truncate(state["log_bytes"] if state else 0)
            except OSError as e:
                sys.exit(f"error: cannot write {self.log_path} ({e.strerror})")
            if not state:
                csv.writer(self.log).writerow(COLUMNS)
        self.saved_at = self.printed_at = now = time.perf_counter()
        self.begin, self.printed_tokens = now - self.count["seconds"], self.count["tokens"]

    def collect(self, level, step):
        """Fetches the losses of the last steps, averaged over the ranks. Stops the run at one that is not finite."""
        on_device = [x for x in self.losses if torch.is_tensor(x)]
        if on_device:
            values = torch.stack(on_device)
            if WORLD > 1:
                dist.all_reduce(values)
            self.losses[-len(values):] = (values / WORLD).tolist()
        for back, value in enumerate(reversed(self.losses)):
            if not math.isfinite(value):
                self.broken(f"the loss is {value} at {level} step {step - back}")

    def broken(self, what):
        last = read_checkpoint(self.s.out)
        kept = (f"the last good checkpoint is {self.path}, after {last['count']['position']:,} of {self.updates:,} updates" if last
                else "no checkpoint was written yet")
        sys.exit(f"error: {what}; {kept}. Try a smaller --lr, or --grad_clip 1")

    def row(self, level, step, lr=None, val_loss=None):
        """Adds a row to log.csv, its training loss the mean since the level's row before. Prints it now and then."""
        self.collect(level, step)
        train_loss = sum(self.losses) / len(self.losses) if self.losses else None
        self.losses.clear()
        now, count = time.perf_counter(), self.count
        count["seconds"] = now - self.begin
        if val_loss is not None and not level.startswith("coarse"):
            count["val_loss"] = val_loss
        if RANK == 0:
            try:
                csv.writer(self.log).writerow([level, step, count["tokens"], f"{count['flops']:.0f}", f"{count['flops_blocks']:.0f}",
                                               lr, train_loss, val_loss, f"{count['seconds']:.3f}"])
                self.log.flush()
            except OSError as e:
                sys.exit(f"error: cannot write {self.log_path} ({e.strerror}); {self.path} is kept: make room and go on with --resume")
        if val_loss is None and now - self.printed_at < 5:
            return
        speed, share = (count["tokens"] - self.printed_tokens) / (now - self.printed_at), count["flops"] / self.whole
        left = count["seconds"] * (1 / share - 1) if share else 0
        cells = [f"{text} {value:{form}}" if value is not None else " " * width for text, value, form, width in
                 (("train", train_loss, ".4f", 12), ("val", val_loss, ".4f", 10), ("lr", lr, ".2e", 11))]
        say(f"{level:>8} step {step:5}", *cells, f"{speed:7,.0f} tok/s", f"{count['flops']:.3g} FLOPs", f"{share:4.0%}",
            f"{int(left) // 60}:{int(left) % 60:02} left", sep=" | ")
        self.printed_at, self.printed_tokens = now, count["tokens"]

    def save(self, level, step, model, optimizers):
        """Replaces the checkpoint, unless the weights are no good."""
        self.saved_at = time.perf_counter()
        self.collect(level, step)
        if not all(p.isfinite().all() for p in model.parameters()):
            self.broken(f"the weights are not finite after {level} step {step}")
        if RANK == 0:
            os.fsync(self.log.fileno())
            state = dict(count=self.count, losses=self.losses, log_bytes=self.log.tell(), config=asdict(model.config),
                         model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers])
            write_whole(self.path, lambda f: torch.save(state, f))


# Ranks --------------------------------------------------------------------------------------------------------------------

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


def say(*words, sep=" "):
    if RANK == 0:
        print(*words, sep=sep, flush=True)


def over_ranks(operation, numbers, device):
    """The whole numbers of this rank, reduced over all ranks."""
    x = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(x, operation)
    return x.tolist()


class AverageGradients:
    """Data parallelism: averages each gradient over the ranks as soon as backward has completed it, while it goes on with the rest.

    The hook sits on the parameter, which all levels share. So whichever model ran, each of its gradients is averaged exactly once,
    and those of blocks that it skipped are left alone.
    """

    def __init__(self, model):
        self.last_micro_batch, self.pending = True, []
        if WORLD > 1:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(self.start)

    def start(self, p):
        if self.last_micro_batch:
            p.grad /= WORLD
            self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        while self.pending:
            self.pending.pop().wait()


# The loop -----------------------------------------------------------------------------------------------------------------

def make_optimizer(s, net):
    fused = s.device == "cuda"  # one kernel for all parameters
    if s.optimizer == "adamw":
        return torch.optim.AdamW(net.parameters(), s.lr, betas=(s.momentum or 0.9, 0.95), weight_decay=s.weight_decay, fused=fused,
                                 capturable=s.compile == "graph")
    return torch.optim.SGD(net.parameters(), s.lr, momentum=s.momentum, weight_decay=s.weight_decay, fused=fused)


def make_levels(s, config, sets):
    """The levels, the fine model and then its coarse models, which are views of it. Returns three lists: the models, each one's own
    optimizer, and its step, which is take_step for that level."""
    torch.manual_seed(s.seed)  # the weights are drawn on the CPU, so that they are the same on any device
    model = GPT(config).to(s.device)
    nets = [model] + [restrict(model, keep) for keep in sets]
    if s.compile != "off":  # part by part: all blocks of all levels run the same compiled code, so three networks compile as one
        for part in (*model.blocks, model.head):
            part.compile(dynamic=False)
    optimizers, average = [make_optimizer(s, net) for net in nets], AverageGradients(model)
    steps = [partial(take_step, s, net, optimizer, average) for net, optimizer in zip(nets, optimizers)]
    return nets, optimizers, [as_cuda_graph(step) for step in steps] if s.compile == "graph" else steps


def as_cuda_graph(step):
    """The fast path for a narrow model on a fast GPU, where launching a step's hundreds of kernels can take longer than running them:
    the first call runs step(lr, x, y) as ever, the second captures it as one CUDA graph, and from then on that is replayed.

    A graph reads and writes the same memory each time. So the rate and the batch are copied to where it reads them, the loss from where
    it leaves it, and nothing that it uses may be made anew: weights and optimizer states only ever change in place.
    """
    graph = places = loss = None

    def call(lr, x, y):
        nonlocal graph, places, loss
        if places is None:  # compiling, and making the optimizer's state; on another stream, as capturing wants it
            places, side = (torch.tensor(lr, device=x.device), x.clone(), y.clone()), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = step(*places)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        places[0].fill_(lr)
        places[1].copy_(x)
        places[2].copy_(y)
        if graph is None:  # capturing records the kernels and runs none; meanwhile another thread may prepare the next batch
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = step(*places)
        graph.replay()
        return loss.clone()
    return call


def make_batches(s, tokens, updates):
    """Yields (x, y) of this rank for each update, made and sent to the device one step ahead of their use."""
    n = s.batch_size // WORLD

    def make(update):
        both = tokens.batch(s.seed, update.stream, update.batch, s.batch_size)[RANK * n:(RANK + 1) * n]
        return both.pin_memory() if s.device == "cuda" else both

    with ThreadPoolExecutor(1) as pool:
        ahead = None
        for update in itertools.chain(updates, [None]):
            ready, ahead = ahead, update and pool.submit(make, update)
            if ready:
                both = ready.result().to(s.device, non_blocking=True)
                yield both[:, :-1], both[:, 1:]


def autocast(s):
    return torch.autocast(s.device, torch.bfloat16, enabled=s.dtype == "bfloat16")


def take_step(s, net, optimizer, average, lr, x, y):
    """One optimizer step with rate lr on the batch x, y: int64 (B, T). Returns this rank's mean loss as a tensor, without waiting for
    it."""
    total, size = 0, s.micro_batch or len(x)
    for begin in range(0, len(x), size):
        xs, ys = x[begin:begin + size], y[begin:begin + size]
        average.last_micro_batch = begin + size >= len(x)
        with autocast(s):
            loss = net(xs, ys)[1] * (len(xs) / len(x))
        loss.backward()
        total = total + loss.detach()
    average.finish()
    if s.grad_clip:
        torch.nn.utils.clip_grad_norm_(net.parameters(), s.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


@torch.no_grad()
def evaluate(s, model, held_out):
    """Mean loss in nats over the held-out sequences (n, T + 1), their chunks dealt out to the ranks."""
    total = torch.zeros((), device=s.device)
    for chunk in held_out.split(s.micro_batch or max(1, s.batch_size // WORLD))[RANK::WORLD]:
        with autocast(s):
            total += model(chunk[:, :-1], chunk[:, 1:])[1] * len(chunk)
    if WORLD > 1:
        dist.all_reduce(total)
    return total.item() / len(held_out)


def train(s, given):
    """One run, single-level or multilevel, from its start or its last checkpoint to its end. Returns (model, settings)."""
    meta = read_meta(s.data)
    s = open_run(s, given, meta)
    try:
        config = GPTConfig(meta["vocab_size"], s.block_size, s.n_layer, s.n_head, s.n_embd)
        sets = sets_of(s)
        if not 0 <= s.delta <= 1:
            raise ValueError(f"delta = {s.delta} is not between 0 and 1")
        if s.batch_size % WORLD:
            raise ValueError(f"--batch_size {s.batch_size} is not divisible by {WORLD} ranks")
    except ValueError as e:
        sys.exit(f"error: {e}")
    tokens = Tokens(s.data, "train", s.block_size, meta["vocab_size"])
    held_out = Tokens(s.data, "val", s.block_size, meta["vocab_size"]).batch(0, HELD_OUT, 0, s.eval_sequences)
    s = settle(s, config)
    state = read_checkpoint(s.out) if s.resume else None
    if WORLD > 1:  # what one rank does not do well none does; and all have looked at the run folder before rank 0 writes to it
        position = state["count"]["position"] if state else 0
        fast, compiled, first, last = over_ranks(
            dist.ReduceOp.MIN, [s.dtype == "bfloat16", s.compile == "on", position, -position], s.device)
        s = replace(s, dtype="bfloat16" if fast else "float32", compile="on" if compiled else "off")
        if first + last:
            sys.exit(f"error: the ranks see different checkpoints in {s.out}: all hosts must see the same folder")
    held_out = held_out.to(s.device)

    nets, optimizers, steps = make_levels(s, config, sets)
    model = nets[0]
    updates = list(plan(s, config))
    batch_tokens = s.batch_size * s.block_size
    cost, cost_blocks = ([s.flop_factor * batch_tokens * flops_per_token(config, len(net.blocks), head) for net in nets]
                         for head in (True, False))
    whole = sum(cost[u.level] for u in updates)

    # The run folder: new, or as its last checkpoint left it.
    if state:
        if state["config"] != asdict(config):
            sys.exit(f"error: {s.out}/ckpt.pt holds a model of {state['config']}, not {asdict(config)}: resume it in its own folder")
        try:
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except Exception as e:
            sys.exit(f"error: {s.out}/ckpt.pt is damaged ({reason(e)}): put back a good copy, or start again with --overwrite")
    parameters = sum(p.numel() for p in model.parameters())
    if RANK == 0 and not state:
        os.makedirs(s.out, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(s.out, "ckpt.pt"))
        about = dict(settings=asdict(s), data={k: meta.get(k) for k in ("tokenizer", "vocab_size", "train_tokens", "val_tokens")},
                     parameters=parameters, torch=torch.__version__)
        write_whole(os.path.join(s.out, "config.json"), lambda f: f.write(json.dumps(about, indent=1).encode()))
    record = Recorder(s, state, len(updates), whole)
    count = record.count
    say(f"{s.out}: {s.mode}, {parameters:,} parameters, {len(tokens.shards)} shard(s) of {meta['tokenizer']} tokens, {s.device}, "
        f"{s.dtype}, {COMPILED[s.compile]}, {WORLD} rank(s) of {torch.get_num_threads()} thread(s)\n"
        f"{len(updates):,} updates, {whole:.3g} FLOPs"
        + (f", resumed after {count['position']:,} updates" if state else ", from the start: no checkpoint yet" * s.resume))

    stopped_by = []

    def stop_soon(number, _):  # a first SIGINT or SIGTERM lets the step end and saves; a second one kills
        stopped_by.append(number)
        signal.signal(number, signal.SIG_DFL)
        say("stopping after this step (once more: at once)")
    handlers = {n: signal.signal(n, stop_soon) for n in (signal.SIGINT, signal.SIGTERM)}
    if not state:
        record.row("fine", 0, val_loss=evaluate(s, model, held_out))
    todo = [] if count["val_loss"] <= s.target_loss else updates[count["position"]:]
    for u, (x, y) in zip(todo, make_batches(s, tokens, todo)):
        level, step = f"coarse{u.level}" if u.level else "fine", u.step + 1
        lr = u.lr
        record.losses.append(steps[u.level](lr, x, y))
        for key, more in dict(position=1, tokens=batch_tokens, flops=cost[u.level], flops_blocks=cost_blocks[u.level]).items():
            count[key] += more

        val_loss = None
        if u.stream == FINE and (step % s.eval_interval == 0 or u.last and (u.level or step == s.steps)):
            val_loss = evaluate(s, nets[u.level], held_out)
        if u.last or val_loss is not None or step % s.log_interval == 0:
            record.row(level, step, lr, val_loss)
        if u.level and u.last:
            prolong(model, sets[u.level - 1], u.delta)
            if not s.keep_coarse_state:
                for values in optimizers[u.level].state.values():  # to what a new optimizer starts from, in place (as_cuda_graph)
                    for value in values.values():
                        value.zero_()
            val_loss = evaluate(s, model, held_out)
            record.row(f"prolong{u.level}", step, val_loss=val_loss)

        finished = u is updates[-1] or count["val_loss"] <= s.target_loss
        stop, save = max(stopped_by, default=0), finished or time.perf_counter() - record.saved_at > s.save_seconds
        if WORLD > 1:  # clocks and signals differ between ranks: at the steps that write a row they agree, at others no one acts
            stop, save = [0, 0] if record.losses else over_ranks(dist.ReduceOp.MAX, [stop, save], s.device)
        if stop or save:
            record.save(level, step, model, optimizers)
        if stop and not finished:
            say(f"stopped after {count['position']:,} of {len(updates):,} updates: the same command with --resume goes on")
            if WORLD > 1:
                dist.barrier()  # torchrun ends all ranks as soon as one has ended: not before rank 0 has saved
            sys.exit(128 + stop)
        if finished:
            break
    for n, handler in handlers.items():
        signal.signal(n, handler)
    say(f"{s.out}: finished, {count['seconds']:.0f} seconds of training")
    return model, s


# What is printed at the end -----------------------------------------------------------------------------------------------

def evaluations(rows, column="flops"):
    """(flops, validation losses) of the fine model, prolongations included, from the rows of a log."""
    found = [(row[column], row["val_loss"]) for row in rows if row["val_loss"] is not None and not row["level"].startswith("coarse")]
    return [f for f, _ in found], [v for _, v in found]


def headline(single, multilevel):
    """The paper's figure from two logs: the FLOPs to reach the single-level run's lowest validation loss. Returns lines of text."""
    lines = []
    for name, rows in (("single-level", single), ("multilevel", multilevel)):
        flops, losses = evaluations(rows)
        lines.append(f"{name:>12}: lowest validation loss {min(losses):.4f} at {flops[losses.index(min(losses))]:.4g} FLOPs, "
                     f"{flops[-1]:.4g} FLOPs in all")
    for column, counted in (("flops", "all FLOPs"), ("flops_blocks", "FLOPs of the blocks only")):
        flops, losses = evaluations(single, column)
        target, spent = min(losses), flops_to_reach(flops, losses, min(losses))
        reached = flops_to_reach(*evaluations(multilevel, column), target)
        if reached is None:
            lines.append(f"multilevel did not reach the single-level minimum of {target:.4f} ({counted})")
        else:
            lines.append(f"multilevel reached the single-level minimum of {target:.4f} at {reached:.4g} {counted} instead of "
                         f"{spent:.4g}: a saving of {1 - reached / spent:.1%}")
    return lines


def sample(model, s, tokenizer):
    """Text that continues s.prompt at the start of a document; the same for the same seed."""
    torch.manual_seed(s.seed)
    ids = [tokenizer.eot_token, *tokenizer.encode_ordinary(s.prompt)]
    with torch.compiler.set_stance("force_eager"):  # its lengths vary, so compiled code would be made anew for each
        out = model.generate(torch.tensor([ids], device=s.device), s.max_new_tokens, s.temperature, s.top_k)
    return tokenizer.decode(out[0, 1:].tolist())


def sample_from_folder(s):
    state = read_checkpoint(s.out)
    if state is None:
        sys.exit(f"error: no checkpoint in {s.out or '--out'}: name the folder of a run with --out")
    about = read_config(s.out)
    model = GPT(GPTConfig(**state["config"]))
    model.load_state_dict(state["model"])
    s = settle(replace(s, compile="off"), model.config)
    print(sample(model.to(s.device), s, get_tokenizer(about["data"]["tokenizer"])))


def run(s, given):
    """The run or the two runs of s.mode, and what there is to say after both."""
    if WORLD > 1:
        if s.device in ("auto", "cuda") and torch.cuda.is_available():
            if (local := int(os.environ["LOCAL_RANK"])) >= (cards := torch.cuda.device_count()):
                sys.exit(f"error: no GPU for rank {RANK}: this host has {cards}, so start it with --nproc_per_node={cards}")
            torch.cuda.set_device(local)
        dist.init_process_group()
    out, done = s.out or f"out/{s.preset}", []
    for mode in ("single", "multilevel") if s.mode == "both" else (s.mode,):
        done.append(train(replace(s, mode=mode, out=s.out if s.out and s.mode != "both" else f"{out}/{mode}"), given))
        s = replace(s, **{k: getattr(done[0][1], k) for k in ("device", "dtype", "compile")})  # the second settles as the first
    if RANK == 0 and s.mode == "both":
        tokenizer = get_tokenizer(read_meta(done[0][1].data)["tokenizer"])
        for model, settings in done:
            say(f"\n--- a sample of the {settings.mode} run\n{sample(model, settings, tokenizer)}")
        say("\n" + "\n".join(headline(*(read_log(settings.out) for _, settings in done))))
    if WORLD > 1:
        dist.barrier()  # a rank that leaves while another still talks to it can abort at exit
        dist.destroy_process_group()


def main(argv=None):
    s, given = parse_settings(argv)
    try:
        return sample_from_folder(s) if s.mode == "sample" else run(s, given)
    except SystemExit as e:
        what = e.code
    except KeyboardInterrupt:  # outside of the loop, where there is nothing to save
        what = 130
    except (RuntimeError, MemoryError) as e:
        if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(e):  # the last is a CPU's
            size = max(1, (s.micro_batch or s.batch_size // WORLD) // 2)
            what = f"error: out of memory: --resume --micro_batch {size} goes on with the same batches in smaller pieces"
        elif WORLD > 1 and (isinstance(e, dist.DistError) or "gloo" in str(e).lower()):
            what = (f"error: rank {RANK} of {WORLD} stops, since another has died or does not answer: go on from the last checkpoint "
                    "with --resume")
        else:
            raise
    if WORLD == 1:
        sys.exit(what)
    if isinstance(what, str):
        sys.stderr.write(what + "\n")  # at once, or the lines of several ranks run into each other
    os._exit(1 if isinstance(what, str) else what)  # at once: the threads that talk to other ranks can abort an orderly exit


if __name__ == "__main__":
    main()
