"""Trains the decoder of model.py, alone or with the coarse models of multilevel.py.

    python train.py --mode single                        # the paper's baseline, on one GPU
    python train.py                                      # the paper's multilevel run
    python train.py --mode nested                        # nested iteration: shallow, then deep
    python train.py --preset tiny --mode compare         # all three at a laptop's size, one table
    python train.py --mode sample --out out/tiny/nested  # text from a trained model
    torchrun --nproc_per_node=4 train.py                 # any of them on several GPUs

The method comes first: settings, the plan of updates, a level and its step, the loop. Below it is
what the loop calls: batches, the run folder, ranks, flags, and what is printed at the end.
"""

import argparse, contextlib, csv, inspect, io, json, math, os, re, signal, sys, time, timeit
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from typing import NamedTuple

# For the CPU, before torch reads them; what you set yourself stays. Large pages for large tensors:
# page faults take up to a fifth of a step otherwise. Threads that wait sleep instead of spinning:
# with another program on one of two cores, 11,000 tokens/s instead of 200 in the tiny preset.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from model import GPT, GPTConfig
from multilevel import coarse_sets, flops_per_token, flops_to_reach, prolong, restrict
from prepare_data import Tokens, claim, get_tokenizer, read_meta, write_whole

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # by torchrun


@dataclass
class Settings:
    """Each field is a flag, its comment the flag's help. The defaults are the paper's run."""
    mode: str = "multilevel"    # single, multilevel, nested, compare (all three) or sample (text)
    preset: str = "paper"       # paper, or tiny for a laptop; flags that you give change either
    data: str = "data/fineweb-edu"  # folder made by prepare_data.py
    out: str = ""               # run folder; by default out/PRESET/MODE
    resume: bool = False        # go on with the run in --out where its last checkpoint is
    overwrite: bool = False     # start afresh although --out holds a run
    # the model
    n_layer: int = 12           # N, number of blocks
    n_head: int = 8             # attention heads
    n_embd: int = 256           # d, width
    block_size: int = 256       # T, context in tokens
    # the fine level
    steps: int = 16000          # fine steps
    batch_size: int = 64        # sequences a step, over all micro-batches and ranks
    micro_batch: int = 0        # sequences a forward pass, gradients accumulate; 0: the whole batch
    schedule: str = "cosine"    # after warm-up: cosine, wsd (constant, then linear decay), constant
    lr: float = 1.2e-3          # highest rate
    min_lr: float = 1.2e-4      # rate that cosine and wsd end with
    decay: float = 0.3          # share of the run, its last, over which wsd decays
    warmup: int = 715           # steps of linear warm-up
    optimizer: str = "sgd"      # sgd or adamw, at every level
    momentum: float = 0.0       # sgd's, or adamw's beta1 (which is 0.9 if this is 0)
    weight_decay: float = 0.0   # at every level
    grad_clip: float = 0.0      # largest norm of a gradient, at every level; 0: no clipping
    # nested iteration
    start_layers: int = 3       # so many blocks, each the first of a group, are trained first
    start_steps: int = 8000     # steps of the start; compare takes its FLOPs off the fine steps
    # the paper's cycles
    cycles: int = 35            # one after each of the first so many fine steps (nested: 0)
    coarse_steps: int = 100     # steps of a coarse model in a cycle
    coarse_lr: float = 0.0      # rate of the coarse models, constant; 0: lr
    delta: float = 0.25         # weight of the kept block when a skipped one is averaged with it
    kind: str = "alternate"     # coarse sets: alternate, stride, random, permuted, full (a control)
    stride: int = 2             # for --kind stride
    in_turn: bool = False       # one coarse model a cycle, in turn, instead of all of them
    keep_coarse_state: bool = False  # keep the coarse optimizers' state from cycle to cycle
    # counting and logging
    flop_factor: float = 3.0    # forward passes that a training step counts as
    eval_interval: int = 100    # steps between evaluations
    eval_sequences: int = 128   # held-out sequences, always the same ones
    log_interval: int = 10      # steps between rows of log.csv
    save_seconds: float = 60.0  # seconds between checkpoints
    target_loss: float = 0.0    # stop once the fine model's held-out loss is there; 0: never
    seed: int = 1               # of the weights, the batches and random coarse sets
    # the machine
    device: str = "auto"        # cuda, mps or cpu; auto: the first that is there
    dtype: str = "auto"         # float32 or bfloat16 (mixed precision); auto: the faster one
    compile: str = "auto"       # on or off; auto: on where a run is long enough to earn it back
    # for --mode sample, and at the end of --mode compare
    prompt: str = ""            # text to continue; by default the model starts a document
    max_new_tokens: int = 200   # length of a sample
    temperature: float = 0.8    # 0 takes the likeliest token
    top_k: int = 50             # sample from so many likeliest tokens; 0: from all


PRESETS = {
    "paper": {},
    "tiny": dict(data="data/stdlib", n_embd=64, n_head=4, block_size=64, batch_size=8, steps=1200,
                 warmup=100, optimizer="adamw", schedule="wsd", lr=0.002, min_lr=0.0002,
                 start_steps=1350, cycles=10, coarse_steps=20, eval_interval=50,
                 eval_sequences=64, save_seconds=10.0),
}


# The plan of updates ------------------------------------------------------------------------------

# Streams of batches. Start and fine steps, counted together, take batch 0, 1, 2, ... of FINE: so
# step j sees the same batch in any mode. The steps of cycles have a stream of their own, and the
# held-out sequences are one batch, the same for any seed.
FINE, COARSE, HELD_OUT = range(3)


class Update(NamedTuple):
    """One optimizer step of a run."""
    level: int          # whose step: 0 the fine model's, i coarse model i's
    step: int           # from 0 (in the log from 1): of the start, the fine steps, or all cycles
    stream: int         # which stream of batches
    batch: int          # the number of the batch in it
    lr: float           # rate
    last: bool          # the last of a visit to this level: if it is a coarse one, prolong
    delta: float = 0.0  # with this weight of the kept block


def rate(s, j):
    """The rate of step j (of start and fine steps, as one): warm-up to lr, then down to min_lr."""
    steps, high = s.steps + (s.start_steps if s.mode == "nested" else 0), 1.0
    if j < s.warmup:
        return s.lr * (j + 1) / s.warmup
    if s.schedule == "cosine":
        high = (1 + math.cos(math.pi * (j - s.warmup) / (steps - s.warmup))) / 2
    elif s.schedule == "wsd" and s.decay:
        high = min(1.0, (steps - j) / (s.decay * steps))
    return s.min_lr + (s.lr - s.min_lr) * high


def sets_of(s):
    """The kept blocks of coarse models 1, 2, ...: nested iteration's start, then a cycle's. Each is
    restricted from the fine model and prolongs to it. To add one, append its blocks."""
    start = []
    if s.mode == "nested":
        if not 1 <= s.start_layers < s.n_layer or s.n_layer % s.start_layers:
            raise ValueError(f"start_layers = {s.start_layers} must divide n_layer = {s.n_layer}, "
                             "and be less")
        start = [list(range(0, s.n_layer, s.n_layer // s.start_layers))]
    if s.mode == "multilevel" or (s.mode == "nested" and s.cycles):
        return start + coarse_sets(s.n_layer, s.kind, s.stride, s.seed)
    return start


def plan(s, config):
    """The run, as a list of updates. All that a checkpoint knows of it is a place in this list."""
    coarse_step, nested = 0, s.mode == "nested"
    start = s.start_steps if nested else 0  # solve on the coarse grid, then copy (delta = 1)
    updates = [Update(1, j, FINE, j, rate(s, j), last=j + 1 == start, delta=1.0)
               for j in range(start)]
    coarse_models = list(range(1 + nested, 1 + len(sets_of(s))))  # a cycle's: 1 may be the start's
    for k in range(s.steps):
        visits = coarse_models if k < s.cycles else []
        if visits and s.in_turn:
            visits = [visits[k % len(visits)]]
        end = bool(visits) or k + 1 == s.steps
        updates.append(Update(0, k, FINE, start + k, rate(s, start + k), end))
        for level in visits:
            first, coarse_step = coarse_step, coarse_step + visit_length(s, config, k)
            updates += [Update(level, j, COARSE, j, s.coarse_lr or s.lr, j + 1 == coarse_step,
                               s.delta) for j in range(first, coarse_step)]
    return updates


def visit_length(s, config, cycle):
    """Steps of a coarse model in a cycle. The control without coarsening (full) takes the FLOPs,
    not the steps, of the paper's two halves, rounded so that the sum over all cycles is right."""
    if s.kind != "full":
        return s.coarse_steps
    halves = 1 if s.in_turn else 2
    cost_of_half = flops_per_token(config, s.n_layer // 2) / flops_per_token(config)
    steps = halves * s.coarse_steps * cost_of_half
    return round((cycle + 1) * steps) - round(cycle * steps)


def due(s, u):
    """Whether an update is followed by an evaluation of its level: every eval_interval start or
    fine steps, and at their end. After a prolongation the loop evaluates the fine model, too."""
    end = s.start_steps if u.level else s.steps
    return u.stream == FINE and ((u.step + 1) % s.eval_interval == 0 or u.step + 1 == end)


# A level, and its step ----------------------------------------------------------------------------

class Level:
    """The fine model, or a coarse one, which runs the blocks keep of it; and its optimizer."""

    def __init__(self, s, name, net, keep=None):
        self.s, self.name, self.net, self.keep = s, name, net, keep
        self.forget()

    def forget(self):
        """Starts the optimizer afresh: moments zero. The weights, the fine model's own, stay."""
        s, more = self.s, dict(weight_decay=self.s.weight_decay, fused=self.s.device == "cuda")
        if s.optimizer == "adamw":
            betas = s.momentum or 0.9, 0.95
            self.optimizer = torch.optim.AdamW(self.net.parameters(), s.lr, betas, **more)
        else:
            self.optimizer = torch.optim.SGD(self.net.parameters(), s.lr, s.momentum, **more)

    def step(self, x, y, lr):
        """One optimizer step with rate lr on x, y: int64 (B, T). Returns this rank's mean loss,
        as a tensor: nobody waits for the device."""
        s, total = self.s, 0
        for xs, ys in zip(x.split(s.micro_batch or len(x)), y.split(s.micro_batch or len(y))):
            with autocast(s):
                loss = self.net(xs, ys)[1] * (len(xs) / len(x))
            loss.backward()
            total = total + loss.detach()
        average_over_ranks(self.net.parameters())
        if s.grad_clip:
            clip_grad_norm_(self.net.parameters(), s.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def make_levels(s, config):
    """The levels of a run: the fine model's, then those of its coarse models, which are views."""
    torch.manual_seed(s.seed)  # the weights are drawn on the CPU: the same on any device
    model = GPT(config).to(s.device)
    if s.compile == "on":  # part by part: all levels run the same compiled blocks
        for part in (*model.blocks, model.head):
            part.compile(dynamic=False)
    return [Level(s, "fine", model)] + [Level(s, f"coarse{i}", restrict(model, keep), keep)
                                        for i, keep in enumerate(sets_of(s), 1)]


@torch.no_grad()
def evaluate(s, net, held_out):
    """Mean loss in nats a token over the held-out sequences (n, T + 1), dealt out to the ranks."""
    total = torch.zeros((), device=s.device)
    for chunk in held_out.split(s.micro_batch or max(1, s.batch_size // WORLD))[RANK::WORLD]:
        with autocast(s):
            total += net(chunk[:, :-1], chunk[:, 1:])[1] * len(chunk)
    if WORLD > 1:
        dist.all_reduce(total)
    return total.item() / len(held_out)


# The loop -----------------------------------------------------------------------------------------

def train(s):
    """One run, from its start or its last checkpoint to its end."""
    data, config = checked(s)
    s = from_rank_0(settle(s, config))
    tokens = Tokens(s.data, "train", s.block_size, data["vocab_size"])
    held_out = Tokens(s.data, "val", s.block_size, data["vocab_size"])
    held_out = torch.from_numpy(held_out.batch(0, HELD_OUT, 0, s.eval_sequences)).to(s.device)
    updates, levels = plan(s, config), make_levels(s, config)
    model = levels[0].net

    run = RunFolder(s, data, levels, updates)  # where we were, if resumed
    if run.is_new:
        run.row("fine", 0, val_loss=evaluate(s, model, held_out))
    for u in run.todo:
        level = levels[u.level]
        run.count(level.step(*batch(s, tokens, u), u.lr))
        val_loss = evaluate(s, level.net, held_out) if due(s, u) else None
        if val_loss is not None or u.last or (u.step + 1) % s.log_interval == 0:
            run.row(level.name, u.step + 1, u.lr, val_loss)
        if u.level and u.last:  # the end of a visit to a coarse model
            prolong(model, level.keep, u.delta)  # Eq. 4: the skipped blocks follow
            if not s.keep_coarse_state:
                level.forget()
            run.row(f"prolong{u.level}", u.step + 1, val_loss=evaluate(s, model, held_out))
        if run.save_or_stop():
            break
    say(f"{s.out}: {run.at['position']:,} updates, {run.at['seconds']:.0f} seconds of training")


# What the loop calls: a batch ---------------------------------------------------------------------

def batch(s, tokens, u):
    """x, y of this rank for an update: int64 (B, T) each, y one token further on."""
    both = torch.from_numpy(tokens.batch(s.seed, u.stream, u.batch, s.batch_size))
    both = both.chunk(WORLD)[RANK]
    if s.device == "cuda":  # the copy overlaps with the step before, which is still computed
        both = both.pin_memory().to(s.device, non_blocking=True)
    both = both.to(s.device)
    return both[:, :-1], both[:, 1:]


# ... the run folder: config.json, log.csv, ckpt.pt ------------------------------------------------

COLUMNS = ["level", "step", "tokens", "flops", "flops_blocks", "lr", "train_loss", "val_loss",
           "seconds"]


class RunFolder:
    """What a run leaves behind, and how far it is (`at`). Rank 0 writes.

    A checkpoint is made right after a row of the log: the weights (and sizes, for a sample), the
    optimizer of each level, the log, and `at`. The plan follows from config.json, batches, rates
    and FLOPs from the place in it, and nothing else is random: that is enough to go on to the same
    log, bit for bit but for the seconds.
    """

    def __init__(self, s, data, levels, updates):
        self.s, self.levels, self.model, self.path = s, levels, levels[0].net, f"{s.out}/ckpt.pt"
        self.at, self.losses = dict(position=0, seconds=0.0, val_loss=math.inf), []
        self.end, self.tokens, self.flops = len(updates), s.batch_size * s.block_size, {}
        for column, head in (("flops", True), ("flops_blocks", False)):  # up to each place
            cost = [s.flop_factor * self.tokens *
                    flops_per_token(self.model, len(level.net.blocks), head) for level in levels]
            self.flops[column] = list(accumulate((cost[u.level] for u in updates), initial=0.0))
        if RANK == 0:
            os.makedirs(s.out, exist_ok=True)
            self.log = open(f"{s.out}/log.csv", "a+", newline="", encoding="utf-8")
            claim(self.log, s.out)  # no other process may write here until this one is done
        state = from_rank_0(read_checkpoint(s.out) if s.resume and RANK == 0 else None)
        self.is_new = not state
        if state:
            with reading(self.path):
                self.at.update(state["count"])
                self.model.load_state_dict(state["model"])
                for level, saved in zip(levels, state["optimizers"], strict=True):
                    level.optimizer.load_state_dict(saved)
        parameters = sum(p.numel() for p in self.model.parameters())
        if RANK == 0:
            if self.is_new:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(self.path)
                about = dict(settings=asdict(s), data={k: data.get(k) for k in DATA_KEYS},
                             parameters=parameters, torch=torch.__version__)
                write_whole(f"{s.out}/config.json", json.dumps(about, indent=1).encode())
            self.log.truncate(0)  # rows after the checkpoint come again
            self.log.write(state["log"] if state else ",".join(COLUMNS) + "\r\n")
            self.log.flush()
        self.todo = [] if self.at_target() else updates[self.at["position"]:]
        self.saved = self.said = time.perf_counter()
        self.began, self.said_at = self.saved - self.at["seconds"], self.at["position"]
        say(f"{s.out}: {s.mode}, {parameters:,} parameters, {s.device}, {s.dtype}, compile "
            f"{s.compile}, {WORLD} rank(s) of {torch.get_num_threads()} thread(s)\n{self.end:,} "
            f"updates, {self.flops['flops'][-1]:.3g} FLOPs, {len(self.todo):,} updates to go")

    def at_target(self):
        return self.at["val_loss"] <= self.s.target_loss

    def count(self, loss):
        """Takes note of an update and its loss, which may still be on its way."""
        self.losses.append(loss)
        self.at["position"] += 1

    def row(self, name, step, lr=None, val_loss=None):
        """Adds a row to log.csv. Its training loss is the mean since the row before: here losses
        are fetched, averaged over the ranks and checked."""
        at, losses, self.losses = self.at, self.losses, []
        if losses:
            losses = torch.stack(losses)
            if WORLD > 1:
                dist.all_reduce(losses)
            losses = (losses / WORLD).tolist()
        for i, loss in [*enumerate(losses, step - len(losses) + 1), (step, val_loss or 0.0)]:
            if not math.isfinite(loss):
                self.broken(f"the loss is {loss} at {name} step {i}")
        train_loss = sum(losses) / len(losses) if losses else None
        at["seconds"] = time.perf_counter() - self.began
        if val_loss is not None and not name.startswith("coarse"):
            at["val_loss"] = val_loss  # the fine model's
        if RANK == 0:
            flops = [f"{flops[at['position']]:.0f}" for flops in self.flops.values()]
            csv.writer(self.log).writerow([name, step, at["position"] * self.tokens, *flops, lr,
                                           train_loss, val_loss, f"{at['seconds']:.3f}"])
            self.log.flush()
        if val_loss is not None or time.perf_counter() - self.said > 5:
            self.say(f"{name:>8} step {step:5}", lr, train_loss, val_loss)

    def say(self, where, *numbers):
        """A line of progress; its speed is that since the line before."""
        now, place, flops = time.perf_counter(), self.at["position"], self.flops["flops"]
        speed = (place - self.said_at) * self.tokens / (now - self.said)
        left = int(self.at["seconds"] * (flops[-1] / flops[place] - 1)) if place else 0
        lr, train_loss, val_loss = ("" if x is None else f"{x:.4g}" for x in numbers)
        say(f"{where} | lr {lr:9} | train {train_loss:5} | val {val_loss:5} | {speed:7,.0f} "
            f"tokens/s | {flops[place] / flops[-1]:4.0%}, {left // 60}:{left % 60:02} left")
        self.said, self.said_at = now, place

    def save_or_stop(self):
        """Saves when it is time and a row has just been written. True at the end of the run."""
        end = self.at["position"] == self.end or self.at_target()
        due = end or time.perf_counter() - self.saved > self.s.save_seconds
        if due and not self.losses and RANK == 0:
            if not all(p.isfinite().all() for p in self.model.parameters()):
                self.broken("the weights are not finite")
            self.log.seek(0)
            state = dict(count=self.at, log=self.log.read(), model=self.model.state_dict(),
                         config=asdict(self.model.config),
                         optimizers=[level.optimizer.state_dict() for level in self.levels])
            torch.save(state, buffer := io.BytesIO())
            write_whole(self.path, buffer.getbuffer())
            self.saved = time.perf_counter()
        return end

    def broken(self, what):
        last = f"is {self.path}" if os.path.exists(self.path) else "was not made yet"
        sys.exit(f"error: {what}: start anew with a smaller --lr, or --grad_clip 1 (the last "
                 f"checkpoint {last})")


@contextlib.contextmanager
def reading(path):
    try:
        yield
    except Exception as e:  # what a damaged file raises can be anything
        sys.exit(f"error: {path} is damaged, or of another version ({reason(e)}): put back a good "
                 "copy, or start again with --overwrite")


def reason(e):
    return f"{type(e).__name__}: {e}".strip(": \n").splitlines()[0][:120]


def read_checkpoint(folder):
    """The checkpoint of a run as a dict, on the CPU; None where there is none."""
    if not os.path.exists(path := f"{folder}/ckpt.pt"):
        return None
    with reading(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {k: state[k] for k in ("count", "log", "config", "model", "optimizers")}


def read_config(folder):
    """config.json of a run: its settings, what its data were, and more about it."""
    with reading(path := f"{folder}/config.json"), open(path, encoding="utf-8") as f:
        about = json.load(f)
        return dict(about, settings=dict(about["settings"]), data=dict(about["data"]))


def read_log(folder):
    """The rows of log.csv as dicts: level a string, the rest floats, None where a cell is empty. A
    line that was cut short is left out."""
    with open(f"{folder}/log.csv", newline="", encoding="utf-8") as f:
        rows = [row for row in csv.DictReader(f) if None not in row.values()]
    return [{k: v if k == "level" else float(v) if v else None for k, v in row.items()}
            for row in rows]


# ... ranks and the machine ------------------------------------------------------------------------

def say(*words):
    """Prints, on rank 0. A reader that has gone (a closed pipe) does not end a run."""
    if RANK == 0:
        try:
            print(*words, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")


def join_ranks(s):
    if WORLD > 1:
        if s.device in ("auto", "cuda") and torch.cuda.is_available():
            local, cards = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local >= cards:
                sys.exit(f"error: no GPU for rank {RANK}: start with --nproc_per_node={cards}")
            torch.cuda.set_device(local)
        dist.init_process_group()


def from_rank_0(what):
    """What rank 0 gives, on every rank."""
    box = [what]
    if WORLD > 1:
        dist.broadcast_object_list(box)
    return box[0]


def average_over_ranks(parameters):
    """Data parallelism: each gradient becomes its mean over the ranks."""
    if WORLD > 1:
        gradients = [p.grad for p in parameters]
        flat = parameters_to_vector(gradients)  # one message, not dozens
        dist.all_reduce(flat)
        vector_to_parameters(flat / WORLD, gradients)


def autocast(s):
    return torch.autocast(s.device, torch.bfloat16, enabled=s.dtype == "bfloat16")


def settle(s, config):
    """Decides what is left to `auto`: the first line that a run prints says how."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": 1}
    device = next(d for d in there if there[d]) if s.device == "auto" else s.device
    if not there[device]:
        sys.exit(f"error: this PyTorch ({torch.__version__}) sees no {device}: use --device auto")
    dtype, compiled, a = s.dtype, s.compile, torch.ones(256, 256)
    if dtype == "auto":  # few CPUs multiply bfloat16 faster than float32: a race decides
        time_of = lambda dtype: min(timeit.repeat(lambda a=a.to(dtype): a @ a, number=1))
        fast = (1.5 * time_of(torch.bfloat16) < time_of(torch.float32) if device == "cpu" else
                device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False))
        dtype = "bfloat16" if fast else "float32"
    if compiled == "auto":  # earned back after so many FLOPs, if ever (experiments/bench.py)
        work = s.flop_factor * s.steps * s.batch_size * s.block_size * flops_per_token(config)
        gains = device == "cuda" or device == "cpu" and dtype == "bfloat16"
        compiled = "on" if gains and work > 1.5e13 else "off"
    if compiled == "on":
        try:
            torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
        except Exception as e:
            sys.exit(f"error: torch.compile fails here ({reason(e)}): use --compile off")
    return replace(s, device=device, dtype=dtype, compile=compiled)


# ... flags ----------------------------------------------------------------------------------------

CHOICES = {"mode": ["single", "multilevel", "nested", "compare", "sample"], "preset": list(PRESETS),
           "schedule": ["cosine", "wsd", "constant"], "optimizer": ["sgd", "adamw"],
           "kind": ["alternate", "stride", "random", "permuted", "full"],
           "device": ["auto", "cuda", "mps", "cpu"], "dtype": ["auto", "float32", "bfloat16"],
           "compile": ["auto", "on", "off"]}
AT_LEAST_1 = {"steps", "start_steps", "batch_size", "eval_interval", "eval_sequences",
              "log_interval", "max_new_tokens", "flop_factor"}
# What may change when a run is resumed:
FREE = {"preset", "out", "resume", "overwrite", "save_seconds", "target_loss", "prompt",
        "max_new_tokens", "temperature", "top_k"}
DATA_KEYS = ["tokenizer", "vocab_size", "train_tokens", "val_tokens"]


def parse_settings(argv):
    """Settings from flags, and the names of the flags that were given."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(f"error: {message} (--help lists all flags)")
    help_of = dict(re.findall(r"^    (\w+): .*?# (.*)$", inspect.getsource(Settings), re.M))
    for f in fields(Settings):
        kind = (dict(action="store_true") if f.type is bool else
                dict(type=f.type, choices=CHOICES.get(f.name), metavar=f.name.upper()))
        parser.add_argument(f"--{f.name}", default=argparse.SUPPRESS,
                            help=f"{help_of[f.name]} [{f.default}]", **kind)
    given = vars(parser.parse_args(argv))
    s = Settings(**{**PRESETS[given.get("preset", "paper")], **given})
    for f in fields(s):
        value, least = getattr(s, f.name), int(f.name in AT_LEAST_1)
        if f.type in (int, float) and not least <= value < 2**63:
            sys.exit(f"error: --{f.name} {value} is not between {least} and 2^63")
    if s.resume and s.overwrite:
        sys.exit("error: --resume and --overwrite: choose one")
    if s.mode == "nested" and "cycles" not in given:
        s.cycles = 0
    return s, set(given)


def recorded(s, given):
    """The settings of the run in s.out: s if it is new, what it was begun with if it is resumed."""
    begun = any(os.path.exists(f"{s.out}/{name}") for name in ("config.json", "ckpt.pt"))
    if RANK == 0 and s.resume and begun:
        free = FREE | {"micro_batch"} & given  # which may have to change when memory runs out
        about = read_config(s.out)
        old = {k: v for k, v in about["settings"].items() if k not in free}
        for k in sorted(given & set(old)):
            if getattr(s, k) not in (old[k], "auto"):
                sys.exit(f"error: the run in {s.out} has --{k} {old[k]}, not {getattr(s, k)}: "
                         "resume it without that flag, or choose another --out")
        with reading(f"{s.out}/config.json"):
            s = replace(s, **old)
        data = read_meta(s.data)
        for k, v in about["data"].items():
            if data.get(k) != v:
                sys.exit(f"error: {s.out} was trained on data with {k} {v}, not {data.get(k)}")
    elif RANK == 0 and os.path.isdir(s.out) and os.listdir(s.out) and not (s.resume or s.overwrite):
        sys.exit(f"error: {s.out} exists: go on with it by --resume, replace it by --overwrite, or "
                 "choose another --out")
    return from_rank_0(s)


def checked(s):
    """(meta.json of the data, config of the model), if a run can have these settings."""
    data = read_meta(s.data)
    try:
        config = GPTConfig(data["vocab_size"], s.block_size, s.n_layer, s.n_head, s.n_embd)
        sets_of(s)
        if not 0 <= s.delta <= 1:
            raise ValueError(f"delta = {s.delta} is not between 0 and 1")
        if s.momentum >= 1:
            raise ValueError(f"momentum = {s.momentum} must be less than 1")
        if s.batch_size % WORLD:
            raise ValueError(f"--batch_size {s.batch_size} is not divisible by {WORLD} ranks")
    except ValueError as e:
        sys.exit(f"error: {e}")
    return data, config


# What is printed at the end -----------------------------------------------------------------------

def evaluations(rows, column="flops"):
    """(flops, held-out losses) of the fine model, prolongations included, from rows of a log."""
    found = [(row[column], row["val_loss"]) for row in rows
             if row["val_loss"] is not None and not row["level"].startswith("coarse")]
    return [f for f, _ in found], [v for _, v in found]


def saving(rows, single, column="flops"):
    """1 - what rows took to first reach single's lowest held-out loss / what single took; None if
    they never did."""
    target = min(evaluations(single)[1])
    ours, theirs = (flops_to_reach(*evaluations(log, column), target) for log in (rows, single))
    return 1 - ours / theirs if ours is not None and theirs else None


def table(logs):
    """{mode: rows of its log} as lines of text, each run against the single-level one."""
    lines = ["run          lowest loss      FLOPs  seconds   saved to single's lowest loss:",
             "              (held out)     in all   in all          FLOPs    of blocks     seconds"]
    for mode, rows in logs.items():
        saved = [saving(rows, logs["single"], c) for c in ("flops", "flops_blocks", "seconds")]
        saved = ["not reached" if x is None else f"{x:.1%}" for x in saved]
        lines.append(f"{mode:<10} {min(evaluations(rows)[1]):13.4f} {rows[-1]['flops']:10.3g} "
                     f"{rows[-1]['seconds']:8.0f} {saved[0]:>14} {saved[1]:>12} {saved[2]:>11}")
    return lines


def compare(s, given):
    """The three modes one after the other, from the same weights, on the same batches. The nested
    run has the single-level run's FLOPs: what its start takes comes off its fine steps."""
    config = checked(replace(s, mode="multilevel"))[1]
    s = from_rank_0(settle(s, config))  # once: the same arithmetic in all three
    start = s.start_steps * flops_per_token(config, s.start_layers) / flops_per_token(config)
    nested = replace(s, mode="nested", steps=s.steps - round(start),
                     cycles=s.cycles if "cycles" in given else 0)
    checked(nested)
    if nested.steps < 1:
        sys.exit(f"error: --start_steps {s.start_steps} take the FLOPs of {start:.0f} fine "
                 f"steps, and there are {s.steps}")
    runs = [recorded(replace(run, out=f"{s.out or f'out/{s.preset}'}/{run.mode}"), given)
            for run in (replace(s, mode="single"), replace(s, mode="multilevel"), nested)]
    for run in runs:
        train(run)
    if RANK == 0:
        single, _, nested = runs  # as they were begun
        config, k = checked(single)[1], nested.start_layers
        alone = round(single.steps * flops_per_token(config) / flops_per_token(config, k))
        say("\n" + "\n".join(table({run.mode: read_log(run.out) for run in runs})))
        say("One seed, one length. Not shown: what the schedule does without coarse models (--kind "
            f"full), and what {k} layers\nalone do with the FLOPs: --mode single --n_layer {k} "
            f"--steps {alone}")
        for run in runs:
            say(f"\n--- a sample of the {run.mode} run\n{sample(run)}")


def sample(s):
    """Text by the model in s.out that continues s.prompt at the start of a document; the same for
    the same seed."""
    if not (state := read_checkpoint(s.out)):
        sys.exit(f"error: no checkpoint in {s.out or '--out'}: name the folder of a run with --out")
    with reading(f"{s.out}/ckpt.pt"):
        model = GPT(GPTConfig(**state["config"]))
        model.load_state_dict(state["model"])
    tokenizer = get_tokenizer(read_config(s.out)["data"]["tokenizer"])
    s = settle(replace(s, compile="off"), model.config)
    torch.manual_seed(s.seed)
    ids = torch.tensor([[tokenizer.eot_token, *tokenizer.encode_ordinary(s.prompt)]])
    model, ids = model.to(s.device), ids.to(s.device)
    out = model.generate(ids, s.max_new_tokens, s.temperature, s.top_k)
    return tokenizer.decode(out[0, 1:].tolist())


AGAIN = "--resume goes on from the last checkpoint"


def main(argv=None):
    s, given = parse_settings(argv)
    if hasattr(sys.stdout, "reconfigure"):  # whatever a model writes can be printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if s.mode == "sample":
            return say(sample(s))
        join_ranks(s)
        if s.mode == "compare":
            compare(s, given)
        else:
            train(recorded(replace(s, out=s.out or f"out/{s.preset}/{s.mode}"), given))
        if WORLD > 1:
            dist.barrier()  # a rank that leaves while another still talks to it can abort at exit
            dist.destroy_process_group()
        return
    except KeyboardInterrupt:
        say(f"stopped: the same command with {AGAIN}")
        what = 130
    except (Exception, SystemExit) as e:
        what = explained(s, e)
    if WORLD == 1:
        sys.exit(what)
    if isinstance(what, str):
        sys.stderr.write(what + "\n")  # in one piece, beside the lines of other ranks
    os._exit(1 if isinstance(what, str) else what)  # the threads of gloo can abort an orderly exit


def explained(s, e):
    """What is wrong and what to type, of an exception that a user can cause; raises any other."""
    if isinstance(e, SystemExit):
        return e.code
    if isinstance(e, OSError):
        return f"error: {e.filename or s.out or 'out'}: {e.strerror or e}: once mended, {AGAIN}"
    if not isinstance(e, (RuntimeError, MemoryError)):
        raise e
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(e):
        size = max(1, (s.micro_batch or s.batch_size // WORLD) // 2)
        return f"error: out of memory: --resume --micro_batch {size} goes on in smaller pieces"
    if WORLD > 1 and (isinstance(e, dist.DistError) or "gloo" in str(e).lower()):
        return f"error: rank {RANK} of {WORLD} stops, since another one has: {AGAIN}"
    raise e


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    main()
