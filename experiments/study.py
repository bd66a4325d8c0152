"""The evidence: every arm that the paper's claim needs beside it, run and reported by one command each.

    python experiments/study.py run --scale narrow --arms headline --seeds 1 2 3     # a study, or arms by name, or all
    python experiments/study.py keep --scale narrow          # thinned logs into experiments/results/, to be committed
    python experiments/study.py report --scale narrow        # tables and a figure from those (the figure wants matplotlib)
    python experiments/study.py rates --scale paper          # what the sum of the rates alone would save; needs no run

`run` starts several runs at once, skips what is finished and resumes what is not, or what stopped early where --stop_early is not
asked for; flags it does not know go to train.py.
`report` reads log.csv and config.json only. All scales follow the paper's schedule verbatim: 16,000 fine steps, 715 of warm-up,
35 cycles of 2 x 100 coarse steps, 1.2e-3, plain SGD, 12 layers. On a GPU, the paper's own scale:

    python prepare_data.py fineweb-edu --tokens 400M
    python experiments/study.py run --scale paper --arms headline --jobs 4                     # one seed of the four main arms
    python experiments/study.py run --scale paper --arms all --seeds 1 2 3 4 5 6 --jobs 4      # six seeds of everything

Nobody has run these two yet. `alignment.py` and `depth.py` beside this file are the studies that are not arms.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import NamedTuple

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "experiments", "results")
sys.path.insert(0, ROOT)
from model import GPTConfig  # noqa: E402
from multilevel import flops_per_token, flops_to_reach  # noqa: E402
from train import COLUMNS, evaluations, fine_lr, parse_settings, plan, read_log, sets_of  # noqa: E402

# What a scale changes of the paper's run. Data of GPT-2 tokens may be any: --data.
SCALES = {
    "paper": "--data data/fineweb-edu",
    "paper-b1": "--data data/fineweb-edu --batch_size 1 --eval_interval 200 --eval_sequences 32",
    "narrow": "--data data/stdlib --n_embd 64 --block_size 64 --batch_size 8",
}
# The best of the single-level rates tried at narrow, half a decade apart and at full length (results/narrow/rates.md); other scales
# want their own. Momentum's breaks coarse models, which start it without a warm-up: so it is there with clipping, too, and both with
# the next lower rate.
OPTIMIZERS = {
    "momentum": "--momentum 0.9 --lr 0.1 --min_lr 0.01",
    "momentum-0.03": "--momentum 0.9 --lr 0.03 --min_lr 0.003",
    "momentum-clip": "--momentum 0.9 --lr 0.3 --min_lr 0.03 --grad_clip 1",
    "momentum-clip-0.1": "--momentum 0.9 --lr 0.1 --min_lr 0.01 --grad_clip 1",
    "adamw": "--optimizer adamw --momentum 0.9 --lr 0.003 --min_lr 0.0003",
}
MAIN = {"single": "--mode single", "multilevel": "", "full": "--kind full", "constant": "--mode single --schedule constant"}
STUDIES = {  # study -> arm -> flags of train.py
    "headline": MAIN,
    "blocks": {
        "random": "--kind random",
        "permuted": "--kind permuted",
        "delta-0": "--delta 0",
        "in-turn": "--in_turn",
        "stride-3": "--kind stride --stride 3",
        "delta-0.5": "--delta 0.5",
        "delta-1": "--delta 1",
    },
    # `full` once more, matched by the blocks' FLOPs only: as many FLOPs with the head as 65 coarse steps are 100 without it. At
    # narrow, where the head is 2% of the FLOPs, `full` itself is that control.
    "counting": {"full-blocks": "--kind full --coarse_steps 65"},
    "momentum": {
        **{f"{arm}-{name}": f"{flags} {optimizer}" for name, optimizer in OPTIMIZERS.items() for arm, flags in MAIN.items()},
        **{f"multilevel-{name}-kept": f"{optimizer} --keep_coarse_state" for name, optimizer in OPTIMIZERS.items()},
    },
    "cycles": {f"{flag.split('_')[0]}-{n}": f"--{flag} {n}" for flag, n in (
        ("cycles", 5), ("cycles", 15), ("cycles", 70), ("coarse_steps", 20), ("coarse_steps", 300))},
}
ARMS = {arm: flags for arms in STUDIES.values() for arm, flags in arms.items()}
# The depth frontier and nested iteration on it (narrow, AdamW): every run to its end on its own schedule, at budgets counted in
# fine steps of 12 layers. An arm's name says it all: depth or start -> depth, budget, and what differs from wsd at 0.003.
BUDGETS = (2500, 5000, 10000, 20000, 40000)
ADAMW = "--optimizer adamw --momentum 0.9 --schedule wsd --lr 0.003 --min_lr 0.0003 --warmup 300 --eval_interval 250"


def fine_steps(budget, depth, vocab_size=257, n_embd=64, block_size=64):
    """So many steps of `depth` layers have the FLOPs of `budget` steps of 12."""
    config = GPTConfig(vocab_size, block_size, 12, 1, n_embd)
    return round(budget * flops_per_token(config) / flops_per_token(config, depth))


def rate(lr):
    return f"--lr {lr:g} --min_lr {lr / 10:g}"


def nested(k, budget, share, more=""):
    """A start of k layers that takes `share` of the budget's FLOPs, then 12 layers for the rest."""
    return f"{ADAMW} --mode nested --start_layers {k} --start_steps {fine_steps(share * budget, k)} " \
           f"--steps {round((1 - share) * budget)} {more}".strip()


FRONTIER = {
    **{f"scratch{d}-{b}": f"{ADAMW} --mode single --n_layer {d} --steps {fine_steps(b, d)}" for b in BUDGETS for d in (12, 6, 3, 1)},
    **{f"scratch{d}-{b}-lr{lr:g}": f"{ADAMW} --mode single --n_layer {d} --steps {fine_steps(b, d)} {rate(lr)}"
       for b in BUDGETS for d in (12, 6, 3, 1) for lr in (0.0015, 0.006, 0.012)},
    **{f"scratch{d}-{b}-cosine": f"{ADAMW} --mode single --n_layer {d} --steps {fine_steps(b, d)} --schedule cosine"
       for b in BUDGETS for d in (12, 6, 3, 1)},
    **{f"nested{k}-{b}": nested(k, b, 1 / 3) for b in BUDGETS for k in (3, 6, 1)},
    **{f"nested{k}-{b}-late": nested(k, b, 0.6) for b in BUDGETS for k in (3, 6, 1)},
    **{f"nested{k}-{b}-lr{lr:g}": nested(k, b, 1 / 3, rate(lr)) for b in BUDGETS for k in (3, 6, 1) for lr in (0.0015, 0.006)},
}
ARMS.update(FRONTIER)
EARLY = 0.02  # nats below its baseline's lowest loss at which an arm may stop with --stop_early
WINDOW = 1000  # fine steps that a training loss is averaged over: at batches of one sequence 500 still leave a noise of 0.02


def baseline_of(arm):
    """The single-level run that an arm is compared with: of the same optimizer, at its best rate."""
    return next((f"single-{o}" for o in ("momentum-clip", "momentum", "adamw") if o in arm), "single")


# Running ------------------------------------------------------------------------------------------------------------------

class Run(NamedTuple):
    about: dict  # config.json
    rows: list   # of log.csv

    @property
    def complete(self):
        """Whether it came to its last fine step."""
        return any(row["level"] == "fine" and row["step"] == self.about["settings"]["steps"] for row in self.rows)

    @property
    def finished(self):
        """Whether it is complete or has reached the loss that it was told to stop at."""
        return self.complete or min(evaluations(self.rows)[1], default=1e9) <= self.about["settings"]["target_loss"]


def read_run(folder):
    """The run in a folder, finished or not; None where there is none, or not yet a whole config.json."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
            return Run(json.load(f), read_log(folder))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def run(args):
    """Runs args.arms x args.seeds, a seed's baselines before its other arms, args.jobs at once. Exits with what failed, if any did."""
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = args.jobs or gpus or max(1, cores // 2)
    places, started = Queue(), {}
    for place in range(jobs):
        places.put(place)

    def one(arm, seed, baseline):
        folder, base = (os.path.join(args.out, args.scale, f"{name}-seed{seed}") for name in (arm, baseline_of(arm)))
        if (before := read_run(folder)) and (before.complete or args.stop_early and before.finished):
            return print(f"{folder}: finished before", flush=True)
        command = [sys.executable, os.path.join(ROOT, "train.py"), *SCALES[args.scale].split(), *ARMS[arm].split(),
                   "--seed", str(seed), "--out", folder, *args.more]
        if args.stop_early and folder != base:
            if baseline:
                baseline.result()
            if not (single := read_run(base)) or not single.complete:
                return f"{folder}: --stop_early needs the complete run {base}"
            command += ["--target_loss", f"{min(evaluations(single.rows)[1]) - EARLY:.4f}"]
        if before:
            command.append("--resume")
        place, env = places.get(), dict(os.environ)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = str(place % gpus)
        else:
            env.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))
        os.makedirs(folder, exist_ok=True)
        began = time.time()
        with open(folder + ".txt", "a") as out:
            code = subprocess.run(command, env=env, stdout=out, stderr=out).returncode
        places.put(place)
        if code:
            return f"{folder}: exit {code}, see {folder}.txt"
        print(f"{folder}: finished after {time.time() - began:.0f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for seed in args.seeds:
            for arm in sorted(args.arms, key=lambda arm: arm != baseline_of(arm)):
                started[arm, seed] = pool.submit(one, arm, seed, started.get((baseline_of(arm), seed)))
    failed = [future.result() for future in started.values() if future.result()]
    if failed:
        sys.exit("error: " + "\n".join(failed))


def keep(args):
    """Copies finished runs into args.results, their logs thinned."""
    folder = os.path.join(args.out, args.scale)
    for name in sorted(os.listdir(folder)):
        found, target = read_run(os.path.join(folder, name)), os.path.join(args.results, args.scale, name)
        if found and found.finished:
            os.makedirs(target, exist_ok=True)
            shutil.copy(os.path.join(folder, name, "config.json"), target)
            with open(os.path.join(target, "log.csv"), "w", newline="", encoding="utf-8") as f:
                writer = csv.DictWriter(f, COLUMNS)
                writer.writeheader()
                writer.writerows({k: f"{v:.7g}" if isinstance(v, float) else v for k, v in row.items()} for row in thin(found.rows))


def thin(rows, every=100):
    """Drops rows without an evaluation, their training losses averaged (weighted by steps) into the next row of the level that
    stays: one with an evaluation, the last of a visit to a coarse level, or one after `every` steps."""
    kept, waiting = [], []
    counted = {True: 0, False: 0}  # steps of the fine level, and of all coarse ones, which are counted together
    for row, after in zip(rows, [*rows[1:], None]):
        fine = row["level"] == "fine"
        if row["train_loss"] is not None:
            waiting.append((row["step"] - counted[fine], row["train_loss"]))
            counted[fine] = row["step"]
        if row["val_loss"] is not None or after is None or after["level"] != row["level"] or sum(n for n, _ in waiting) >= every:
            kept.append({**row, "train_loss": mean(waiting)})
            waiting = []
    return kept


# Reporting: arithmetic on logs --------------------------------------------------------------------------------------------

def mean(parts):
    """The mean of x over [(weight, x), ...], None if there are none."""
    return sum(n * x for n, x in parts) / sum(n for n, _ in parts) if parts else None


def smooth(rows, column="flops", window=WINDOW):
    """(flops, training losses) at the fine level's evaluations: each the mean over the last `window` fine steps, from the first
    evaluation that has so many behind it. A row's loss is the mean over the steps since the row before."""
    found, recent, before = ([], []), [], 0
    for row in rows:
        if row["level"] == "fine" and row["train_loss"] is not None:
            recent.append((row["step"] - before, row["train_loss"]))
            before = row["step"]
            while sum(n for n, _ in recent[1:]) >= window:
                recent.pop(0)
            if before >= window and row["val_loss"] is not None:
                found[0].append(row[column])
                found[1].append(mean(recent))
    return found


def saving(rows, base_rows, target_rows=None, curve=evaluations, column="flops", above=0.0):
    """1 - FLOPs of rows / FLOPs of base_rows, each to first reach the lowest loss of target_rows (default: of base_rows), or one
    that is `above` nats higher. None if either never does, or if base_rows starts there."""
    target = min(curve(target_rows or base_rows, column)[1], default=0) + above
    reached, spent = (flops_to_reach(*curve(r, column), target) for r in (rows, base_rows))
    return 1 - reached / spent if reached is not None and spent else None


def load(root, scale):
    """{arm: {seed: Run}} of the finished runs below root/scale: one that is still under way has no lowest loss yet."""
    runs, folder = {}, os.path.join(root, scale)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        arm, _, seed = name.rpartition("-seed")
        if arm in ARMS and (found := read_run(os.path.join(folder, name))) and found.finished:
            runs.setdefault(arm, {})[int(seed)] = found
    return runs


def spread(values, percent=False):
    """"mean ± standard deviation" of the values that are there (None: never reached), and how many are not."""
    there = [100 * v if percent else v for v in values if v is not None]
    digits, missing = 1 if percent else 3, len(values) - len(there)
    text = f"{statistics.mean(there):.{digits}f}{'%' * percent}" if there else ""
    if len(there) > 1:
        text += f" ± {statistics.stdev(there):.{digits}f}"
    return ", ".join(filter(None, [text, f"not reached ({missing} of {len(values)})" if missing else ""]))


def paired(runs, *arms):
    """The seeds that all the arms have, and per seed the logs of each."""
    seeds = sorted(set.intersection(*(set(runs.get(arm, {})) for arm in arms)))
    return seeds, [[runs[arm][seed].rows for arm in arms] for seed in seeds]


def savings(runs, arm, **how):
    """{seed: saving} of an arm, for the seeds that it and its baseline have. A run that was stopped early and before it got there is left
    out: it might have."""
    found = {seed: saving(*pair, **how) for seed, pair in zip(*paired(runs, arm, baseline_of(arm)))}
    return {seed: value for seed, value in found.items() if value is not None or runs[arm][seed].complete}


def markdown(*rows):
    """Rows of cells, the first one the header, as lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


def arms_table(runs):
    """Every arm against the single-level run of the same seed and optimizer."""
    table = [["study", "arm", "seeds", "lowest held-out loss", "training loss", "saving, all FLOPs", "blocks only", "by training loss"]]
    for study, arm in ((study, arm) for study, arms in STUDIES.items() for arm in arms):
        seeds = paired(runs, arm, baseline_of(arm))[0]
        if seeds:
            whole = [runs[arm][s].rows for s in seeds if runs[arm][s].complete]
            table.append([study, arm, " ".join(f"{s}" if runs[arm][s].complete else f"{s}\\*" for s in seeds),
                          *(spread([min(curve(rows)[1], default=None) for rows in whole]) for curve in (evaluations, smooth)),
                          *(spread(savings(runs, arm, curve=curve, column=column).values(), True) if arm != baseline_of(arm) else ""
                            for curve, column in ((evaluations, "flops"), (evaluations, "flops_blocks"), (smooth, "flops")))])
    return markdown(*table)


def seeds_table(runs):
    """Every arm's lowest held-out loss, where it came to its end, and its saving, all FLOPs counted, seed by seed."""
    seeds = sorted({seed for arm in runs.values() for seed in arm})
    table = [["arm", *(f"seed {seed}" for seed in seeds)]]
    for arm in (arm for arms in STUDIES.values() for arm in arms if arm in runs):
        table.append([arm])
        saved = savings(runs, arm) if arm != baseline_of(arm) else {}
        for seed in seeds:
            cell, found = [], runs[arm].get(seed)
            if found and found.complete:
                cell.append(f"{min(evaluations(found.rows)[1]):.3f}")
            if seed in saved:
                cell.append("not reached" if saved[seed] is None else f"{saved[seed]:.1%}")
            table[-1].append(", ".join(cell))
    return markdown(*table)


def controls_table(runs):
    """What the multilevel run saves once a control is the baseline."""
    table = [["baseline", "seeds", "saving, all FLOPs", "blocks only", "to the baseline's own lowest loss", "lowest loss, difference"]]
    for control in ("single", "constant", "full", "full-blocks"):
        seeds, logs = paired(runs, "multilevel", control, "single")
        if seeds:
            whole = [log[:2] for s, log in zip(seeds, logs) if runs["multilevel"][s].complete and runs[control][s].complete]
            table.append([control, " ".join(map(str, seeds)),
                          *(spread([saving(*log, evaluations, column) for log in logs], True) for column in ("flops", "flops_blocks")),
                          spread([saving(*log) for log in whole], True),
                          spread([min(evaluations(ours)[1]) - min(evaluations(theirs)[1]) for ours, theirs in whole])])
    return markdown(*table)


def targets_table(runs):
    """The main arms' savings to losses above the single-level run's lowest one."""
    arms, table = [arm for arm in STUDIES["headline"] if arm != "single" and arm in runs], []
    for above in (0.6, 0.4, 0.2, 0.1, 0.05, 0.0):
        table.append([f"{above}", *(spread(savings(runs, arm, above=above).values(), True) for arm in arms)])
    return markdown(["nats above the lowest single-level loss", *arms], *table)


def counting_table(runs):
    """The headline figure where a training step counts as 2, 3 or 4 forward passes: all FLOPs of all logs scaled alike."""
    table = [["forward passes a training step", "FLOPs of multilevel", "of single", "saving, all FLOPs", "blocks only"]]
    for factor in (2, 3, 4):
        logs = [[[{**row, **{c: row[c] * factor / 3 for c in ("flops", "flops_blocks")}} for row in rows] for rows in pair]
                for pair in paired(runs, "multilevel", "single")[1]]
        spent = [[flops_to_reach(*evaluations(pair[i]), min(evaluations(pair[1])[1])) for pair in logs] for i in (0, 1)]
        table.append([str(factor), *("not reached" if None in x or not x else f"{statistics.mean(x):.4g}" for x in spent),
                      *(spread([saving(*pair, column=column) for pair in logs], True) for column in ("flops", "flops_blocks"))])
    return markdown(*table)


def rates_table(scale):
    """What an arm would save if a weight cared for nothing but the sum of the rates it is trained with: the FLOPs at which that sum
    is what the single-level run's is at its end, for the mean block and for the embeddings. It takes no run."""
    table = [["arm", "saving, were the sum of a block's rates all that counts", "the embeddings'"]]
    for arm in (*STUDIES["headline"], *STUDIES["counting"], *STUDIES["cycles"]):
        s, _ = parse_settings([*SCALES[scale].split(), *ARMS[arm].split()])
        config = GPTConfig(257 if scale == "narrow" else 50257, s.block_size, s.n_layer, s.n_head, s.n_embd)
        depth = [s.n_layer] + [len(keep) for keep in sets_of(s)]
        flops, blocks, embeddings = [0.0], [0.0], [0.0]
        for u in plan(s, config):
            lr = s.coarse_lr if u.level else fine_lr(s, u.step)
            flops.append(flops[-1] + flops_per_token(config, depth[u.level]))
            blocks.append(blocks[-1] - lr * depth[u.level] / s.n_layer)  # falling, as a loss does
            embeddings.append(embeddings[-1] - lr)
        if arm == "single":
            spent, target = flops[-1], blocks[-1]
        table.append([arm, *(f"{1 - flops_to_reach(flops, sums, target) / spent:.1%}" for sums in (blocks, embeddings))])
    return markdown(*table)


def figure(runs, scale, path):
    """Held-out and smoothed training loss over FLOPs and over fine steps: a thin line a seed, a thick one the complete runs' mean."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "multilevel", "font.size": 9})
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(2, 2, figsize=(9, 6.4), sharey="row", sharex="col")
    for line, curve in zip(axes, (evaluations, smooth)):
        lowest = min(min(curve(r.rows)[1], default=1e9) for r in runs["single"].values())
        for arm, colour in zip(STUDIES["headline"], ("black", "#d55e00", "#0072b2", "#009e73")):
            for ax, column in zip(line, ("flops", "step")):
                fine = [[row for row in r.rows if column == "flops" or row["level"] == "fine"] for r in runs.get(arm, {}).values()]
                curves = [curve(rows, column) for rows in fine]
                for x, y in curves:
                    ax.plot(x, y, color=colour, lw=0.5, alpha=0.6)
                whole = [c for c, r in zip(curves, runs.get(arm, {}).values()) if r.complete] or curves[:1]
                if whole:
                    ax.plot(whole[0][0], [statistics.mean(y) for y in zip(*(c[1] for c in whole))], color=colour, lw=1.4,
                            label=f"{arm} ({len(curves)})")
        for ax in line:
            ax.axhline(lowest, color="0.6", lw=0.7, ls=":")
        line[0].set_ylim(lowest - 0.3, lowest + 1.2)
    for ax, label in zip(axes[1], ("training FLOPs", "fine steps")):
        ax.set_xlabel(label)
    for ax, label in zip(axes[:, 0], ("held-out loss (nats a token)", f"training loss, mean of {WINDOW} steps")):
        ax.set_ylabel(label)
    axes[0, 1].legend(frameon=False, title="arm (seeds)")
    fig.suptitle(f"scale {scale}: thin lines are seeds, thick ones the mean of the complete ones; dotted: the lowest single-level loss",
                 fontsize=9)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def report(args):
    runs, folder = load(args.results, args.scale), os.path.join(args.results, args.scale)
    if "single" not in runs:
        sys.exit(f"error: no single-level run below {folder}: python experiments/study.py run --scale {args.scale} --arms single")
    abouts = [found.about for seeds in runs.values() for found in seeds.values()]
    about, s, d = abouts[0], abouts[0]["settings"], abouts[0]["data"]
    same = ("data", "batch_size", "block_size", "eval_sequences", "device", "dtype")
    if differ := [k for k in same if {a["settings"][k] for a in abouts} != {s[k]}]:
        sys.exit(f"error: the runs below {folder} differ in {', '.join(differ)}: they cannot be compared")
    text = "\n".join([
        f"Scale `{args.scale}`: {about['parameters']:,} parameters, batches of {s['batch_size']} x {s['block_size']} tokens, "
        f"{s['data']} ({d['train_tokens']:,} {d['tokenizer']} tokens), {s['device']}, {s['dtype']}, PyTorch {about['torch']}. Losses in "
        f"nats a token, ± is the standard deviation over seeds, savings are paired by seed. Held-out: {s['eval_sequences']} sequences, "
        f"always the same; training loss: the mean of the last {WINDOW} fine steps. \\*: not run to the end, so without lowest losses.",
        "", *arms_table(runs), "",
        "The lowest held-out loss, and the saving to that of the single-level run, all FLOPs counted, seed by seed:",
        "", *seeds_table(runs), "",
        "What the multilevel run saves, to the single-level run's lowest held-out loss, with each control as the baseline. A negative "
        "difference: the multilevel run's loss is lower.",
        "", *controls_table(runs), "",
        "Savings to higher losses than the single-level run's lowest one, that is to those of shorter runs, all FLOPs counted:",
        "", *targets_table(runs), "",
        "A training step is a number of forward passes, the same at every level. Another number scales all FLOPs alike and cancels:",
        "", *counting_table(runs), "",
        "A null model, without a network: what an arm would save if only the sum of the rates counted that a weight is trained with.",
        "", *rates_table(args.scale)])
    print(text)
    with open(os.path.join(folder, "report.md"), "w", encoding="utf-8") as f:
        f.write(text + "\n")
    try:
        figure(runs, args.scale, os.path.join(folder, "loss.svg"))
    except ImportError:
        print("no figure: pip install matplotlib", file=sys.stderr)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("what", choices=("run", "keep", "report", "rates"))
    parser.add_argument("--scale", choices=SCALES, default="narrow")
    parser.add_argument("--arms", nargs="+", choices=("all", *STUDIES, *ARMS), default=["headline"], metavar="ARM", help="of "
                        + ", ".join(ARMS) + f"; or a study: {', '.join(STUDIES)}, all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--jobs", type=int, default=0, help="runs at once [one a GPU, or one for two cores]")
    parser.add_argument("--stop_early", action="store_true", help=f"stop an arm {EARLY} nats below its baseline's lowest loss")
    parser.add_argument("--out", default="out/study", help="where the runs go")
    parser.add_argument("--results", default=RESULTS, help="where keep writes and report reads; out/study: the runs themselves")
    args, args.more = parser.parse_known_args(argv)  # the rest goes to train.py
    if args.what != "run" and args.more:
        parser.error(f"unknown: {' '.join(args.more)}")
    args.arms = list(dict.fromkeys(a for name in args.arms for a in (ARMS if name == "all" else STUDIES.get(name, [name]))))
    {"run": run, "keep": keep, "report": report, "rates": lambda args: print("\n".join(rates_table(args.scale)))}[args.what](args)


if __name__ == "__main__":
    main()
