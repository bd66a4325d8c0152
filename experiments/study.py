"""The evidence: every arm that the paper's claim needs beside it, run and reported by one command each.

    python experiments/study.py run --scale narrow --arms single multilevel full constant --seeds 1 2 3
    python experiments/study.py keep --scale narrow         # thinned logs into experiments/results/, to be committed
    python experiments/study.py report --scale narrow       # tables and figures from what is there (figures want matplotlib)

`run` starts several runs at once, skips what is finished and resumes what is not. `report` reads log.csv and config.json only.
All scales follow the paper's schedule verbatim: 16,000 fine steps, 715 of warm-up, 35 cycles of 2 x 100 coarse steps, plain SGD.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "experiments", "results")
sys.path.insert(0, ROOT)
from multilevel import flops_to_reach  # noqa: E402
from train import COLUMNS, evaluations, read_log  # noqa: E402

# What a scale changes of the paper's run. The data of all but narrow may be any of GPT-2 tokens: --data.
SCALES = {
    "paper": "--data data/fineweb-edu --eval_interval 100",
    "paper-b1": "--data data/fineweb-edu --batch_size 1 --eval_interval 200 --eval_sequences 32",
    "narrow": "--data data/stdlib --n_embd 64 --block_size 64 --batch_size 8 --eval_interval 100 --eval_sequences 128",
}
MAIN = ["single", "multilevel", "full", "constant"]
ADAMW = "--optimizer adamw --lr 3e-3 --min_lr 3e-4"
MOMENTUM = "--momentum 0.9"
ARMS = {  # name -> flags of train.py
    # 1. headline: the claim and its two controls
    "single": "--mode single",
    "multilevel": "",
    "full": "--kind full",
    "constant": "--mode single --schedule constant",
    # 2. which blocks, and whether they are averaged
    "random": "--kind random",
    "permuted": "--kind permuted",
    "delta-0": "--delta 0",
    "in-turn": "--in_turn",
    "stride-3": "--kind stride --stride 3",
    "delta-0.5": "--delta 0.5",
    "delta-1": "--delta 1",
    # 4. the control that is matched by the blocks' FLOPs only: 65 steps a set are 100 without the head
    "full-blocks": "--kind full --coarse_steps 65",
    # 5. momentum, and the optimizer of today
    "single-momentum": f"--mode single {MOMENTUM}",
    "multilevel-momentum": MOMENTUM,
    "multilevel-momentum-kept": f"{MOMENTUM} --keep_coarse_state",
    "single-adamw": f"--mode single {ADAMW}",
    "multilevel-adamw": ADAMW,
    "multilevel-adamw-kept": f"{ADAMW} --keep_coarse_state",
    # 6. how many cycles, how long
    **{f"cycles-{n}": f"--cycles {n}" for n in (5, 15, 70)},
    **{f"coarse-{n}": f"--coarse_steps {n}" for n in (20, 300)},
}


def baseline_of(arm):
    """The single-level run that an arm is compared with: of the same optimizer."""
    return next((f"single-{o}" for o in ("momentum", "adamw") if o in arm), "single")


# Running ------------------------------------------------------------------------------------------------------------------

def folder_of(root, scale, arm, seed):
    return os.path.join(root, scale, f"{arm}-seed{seed}")


def finished(folder):
    """Whether the log of a run has come to its last fine step, or to the target that it was told to stop at."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
            settings = json.load(f)["settings"]
        rows = read_log(folder)
    except FileNotFoundError:
        return False
    last = [row for row in rows if row["level"] == "fine"][-1:]
    return bool(last) and (last[0]["step"] == settings["steps"] or min(evaluations(rows)[1]) <= settings["target_loss"])


def run(args):
    wanted = [(arm, seed) for arm in args.arms for seed in args.seeds]
    wanted.sort(key=lambda pair: pair[0] != baseline_of(pair[0]))  # baselines first: --stop_early wants their lowest loss
    import torch
    places = Queue()  # a GPU each, or a share of the cores
    for i in range(args.jobs):
        places.put(i)

    def one(arm, seed):
        folder = folder_of(args.out, args.scale, arm, seed)
        if finished(folder):
            return print(f"{folder}: finished before", flush=True)
        command = [sys.executable, os.path.join(ROOT, "train.py"), *SCALES[args.scale].split(), *ARMS[arm].split(),
                   "--seed", str(seed), "--out", folder, *args.more]
        if args.stop_early and arm != baseline_of(arm):
            base = folder_of(args.out, args.scale, baseline_of(arm), seed)
            while not finished(base):
                time.sleep(10)
            command += ["--target_loss", f"{min(evaluations(read_log(base))[1]) - 0.02:.4f}"]
        if os.path.exists(os.path.join(folder, "config.json")):
            command.append("--resume")
        place, env = places.get(), dict(os.environ)
        if torch.cuda.is_available():
            env["CUDA_VISIBLE_DEVICES"] = str(place % torch.cuda.device_count())
        else:
            env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // args.jobs))
        os.makedirs(folder, exist_ok=True)
        began = time.time()
        with open(folder + ".txt", "a") as out:
            code = subprocess.run(command, env=env, stdout=out, stderr=out, cwd=ROOT).returncode
        places.put(place)
        print(f"{folder}: {'done' if code == 0 else f'exit {code}, see {folder}.txt'} after {time.time() - began:.0f} s", flush=True)
        return code

    with ThreadPoolExecutor(args.jobs) as pool:
        sys.exit(any(list(pool.map(one, *zip(*wanted)))))


def keep(args):
    """Writes logs thinned for committing: all evaluations, and training losses averaged over about 100 steps of a level."""
    for name in sorted(os.listdir(os.path.join(args.out, args.scale))):
        source = os.path.join(args.out, args.scale, name)
        if os.path.isdir(source) and finished(source):
            target = os.path.join(RESULTS, args.scale, name)
            os.makedirs(target, exist_ok=True)
            with open(os.path.join(source, "config.json"), encoding="utf-8") as f, \
                    open(os.path.join(target, "config.json"), "w", encoding="utf-8") as g:
                g.write(f.read())
            with open(os.path.join(target, "log.csv"), "w", newline="", encoding="utf-8") as f:
                writer = csv.DictWriter(f, COLUMNS)
                writer.writeheader()
                for row in thin(read_log(source), 100):
                    writer.writerow({k: v if isinstance(v, str) else "" if v is None else f"{v:.6g}" if "l" == k[0] or "loss" in k
                                     else f"{v:.0f}" for k, v in row.items()})


def thin(rows, every):
    """Drops rows without an evaluation, their training losses averaged (weighted by steps) into the next row that stays."""
    kept, last, waiting = [], {}, {}
    for i, row in enumerate(rows):
        level = row["level"]
        if row["train_loss"] is not None:
            n = row["step"] - last.get(level, 0)
            last[level] = row["step"]
            waiting.setdefault(level, []).append((n, row["train_loss"]))
        leaving = i + 1 == len(rows) or rows[i + 1]["level"] != level
        if row["val_loss"] is not None or leaving or sum(n for n, _ in waiting[level]) >= every:
            parts = waiting.pop(level, None)
            kept.append({**row, "train_loss": parts and sum(n * x for n, x in parts) / sum(n for n, _ in parts)})
    return kept


# Reporting: arithmetic on logs --------------------------------------------------------------------------------------------

def smooth(rows, window=500, column="flops"):
    """(flops, training losses) of the fine level: at each row the mean over the fine steps of the last `window`, once there are
    so many. A row's loss is already the mean over the steps since the row before."""
    found, recent = ([], []), []
    before = 0
    for row in rows:
        if row["level"] == "fine" and row["train_loss"] is not None:
            recent.append((row["step"] - before, row["train_loss"]))
            before = row["step"]
            while sum(n for n, _ in recent[1:]) >= window:
                recent.pop(0)
            if before >= window:
                found[0].append(row[column])
                found[1].append(sum(n * x for n, x in recent) / sum(n for n, _ in recent))
    return found


def saving(rows, base_rows, target_rows=None, curve=evaluations, column="flops"):
    """1 - FLOPs of rows / FLOPs of base_rows, each to first reach the lowest loss of target_rows (default: of base_rows).
    None if rows never reach it, and the same if base_rows do not."""
    _, target_losses = curve(base_rows if target_rows is None else target_rows, column=column)
    reached = flops_to_reach(*curve(rows, column=column), min(target_losses))
    spent = flops_to_reach(*curve(base_rows, column=column), min(target_losses))
    return None if reached is None or spent is None else 1 - reached / spent


def load(root, scale):
    """{arm: {seed: rows}} of the runs below root/scale, finished or not."""
    runs = {}
    folder = os.path.join(root, scale)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        arm, _, seed = name.rpartition("-seed")
        if arm in ARMS and os.path.exists(os.path.join(folder, name, "log.csv")):
            runs.setdefault(arm, {})[int(seed)] = read_log(os.path.join(folder, name))
    return runs


def spread(values, percent=False):
    """"mean ± standard deviation (n)" of the values that are there, and how many runs never reached the target."""
    there, scale = [v for v in values if v is not None], 100 if percent else 1
    unit = "%" if percent else ""
    text = ""
    if there:
        digits = 1 if percent else 4
        text = f"{scale * statistics.mean(there):.{digits}f}{unit}"
        if len(there) > 1:
            text += f" ± {scale * statistics.stdev(there):.{digits}f}"
    if len(there) < len(values):
        text += (", " if text else "") + f"not reached ({len(values) - len(there)} of {len(values)})"
    return text


def table(runs):
    """The Markdown table of arms: lowest losses and savings against the single-level run of the same seed and optimizer."""
    lines = ["| arm | seeds | lowest held-out loss | lowest training loss | saving, all FLOPs | saving, blocks only | saving, training loss |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for arm in (a for a in ARMS if a in runs):
        base = runs.get(baseline_of(arm), {})
        seeds = sorted(set(runs[arm]) & set(base))
        if not seeds:
            continue
        cells = [arm, str(len(seeds)), spread([min(evaluations(runs[arm][s])[1]) for s in seeds]),
                 spread([min(smooth(runs[arm][s])[1], default=None) for s in seeds])]
        for curve, column in ((evaluations, "flops"), (evaluations, "flops_blocks"), (smooth, "flops")):
            cells.append("baseline" if arm == baseline_of(arm) else
                         spread([saving(runs[arm][s], base[s], curve=curve, column=column) for s in seeds], percent=True))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def what_is_left(runs):
    """What the multilevel run saves once a control is the baseline: FLOPs of both to the single-level run's lowest loss."""
    lines = []
    for control in ("full", "constant", "full-blocks"):
        seeds = sorted(set(runs.get("multilevel", {})) & set(runs.get(control, {})) & set(runs.get("single", {})))
        column, counted = ("flops_blocks", "blocks only") if control == "full-blocks" else ("flops", "all FLOPs")
        if seeds:
            values = [saving(runs["multilevel"][s], runs[control][s], runs["single"][s], column=column) for s in seeds]
            lines.append(f"multilevel against {control}, to the single-level run's lowest held-out loss ({counted}): "
                         f"{spread(values, percent=True)} saved, {len(seeds)} seed(s)")
    return lines


def figure(runs, scale, path):
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "multilevel", "font.size": 9})
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    lowest = min(min(evaluations(rows)[1]) for rows in runs["single"].values())
    for arm, colour in zip(MAIN, ("#000000", "#d62728", "#1f77b4", "#2ca02c")):
        for i, rows in enumerate(runs.get(arm, {}).values()):
            flops, losses = evaluations(rows)
            axes[0].plot(flops, losses, color=colour, lw=1, alpha=0.8, label=None if i else arm)
            steps = [(row["step"], row["val_loss"]) for row in rows if row["level"] == "fine" and row["val_loss"]]
            axes[1].plot(*zip(*steps), color=colour, lw=1, alpha=0.8)
    for ax, label in zip(axes, ("training FLOPs", "fine steps")):
        ax.axhline(lowest, color="0.6", lw=0.7, ls=":")
        ax.set_xlabel(label)
        ax.set_ylim(lowest - 0.3, lowest + 1.2)
    axes[0].set_ylabel("held-out loss (nats a token)")
    axes[0].legend(frameon=False)
    fig.suptitle(f"scale {scale}: a line a seed; dotted: the single-level runs' lowest loss", fontsize=9)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def report(args):
    runs = load(args.results, args.scale)
    if "single" not in runs:
        sys.exit(f"error: no single-level run below {os.path.join(args.results, args.scale)}: "
                 f"python experiments/study.py run --scale {args.scale} --arms single")
    text = "\n".join([*table(runs), "", *what_is_left(runs)])
    print(text)
    with open(os.path.join(args.results, f"{args.scale}.md"), "w", encoding="utf-8") as f:
        f.write(text + "\n")
    try:
        figure(runs, args.scale, os.path.join(args.results, f"{args.scale}.svg"))
    except ImportError:
        print("no figure: pip install matplotlib", file=sys.stderr)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "keep", "report"))
    parser.add_argument("--scale", choices=SCALES, default="narrow")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=MAIN)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--jobs", type=int, default=0, help="runs at once [a GPU each, or two cores each]")
    parser.add_argument("--stop_early", action="store_true", help="stop an arm 0.02 nats below its baseline's lowest loss")
    parser.add_argument("--out", default="out/study", help="where the runs go")
    parser.add_argument("--results", default=RESULTS, help="what report reads: kept results, or the runs themselves")
    args, args.more = parser.parse_known_args(argv)  # the rest goes to train.py
    if not args.jobs:
        import torch
        args.jobs = torch.cuda.device_count() or max(1, (os.cpu_count() or 1) // 2)
    {"run": run, "keep": keep, "report": report}[args.what](args)


if __name__ == "__main__":
    main()
