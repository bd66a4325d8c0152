"""The evidence: every arm that the paper's claim needs beside it, run and reported by one command.

    python experiments/study.py run --arms headline --seeds 1 2 3  # a study, arms by name, or all
    python experiments/study.py keep      # thinned logs into experiments/results/, to be committed
    python experiments/study.py report    # tables and a figure from those (wants matplotlib)
    python experiments/study.py rates --scale paper  # what the sum of the rates alone would save
    python experiments/study.py run --arms nested    # nested iteration and the depth frontier,
    python experiments/study.py frontier             # and what came of it (keep comes between)

`run` starts several runs at once, skips what is finished and resumes what is not, or what stopped
early where --stop_early is not asked for; flags it does not know go to train.py. `report` reads
log.csv and config.json only. All scales follow the paper's schedule verbatim: 16,000 fine steps,
715 of warm-up, 35 cycles of 2 x 100 coarse steps, 1.2e-3, plain SGD, 12 layers; `nested` has its
own (frontier.py). On a GPU, the paper's own scale, one seed of the four main arms, then six of all:

    python prepare_data.py fineweb-edu --tokens 400M
    python experiments/study.py run --scale paper --arms headline --jobs 4
    python experiments/study.py run --scale paper --arms all --seeds 1 2 3 4 5 6 --jobs 4

Nobody has run these two yet. `alignment.py` and `depth.py` are the studies that are not arms.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "experiments", "results")
sys.path.insert(0, ROOT)
from experiments import frontier  # noqa: E402
from experiments.frontier import FRONTIER  # noqa: E402
from experiments.plot import figure, publish  # noqa: E402
from experiments.runs import check_alike, keep_run, load, markdown, mean  # noqa: E402
from experiments.runs import read_run, sparse, spread, thin  # noqa: E402
from model import GPTConfig  # noqa: E402
from multilevel import flops_per_token, flops_to_reach  # noqa: E402
from train import evaluations, parse_settings, plan, sets_of  # noqa: E402

# What a scale changes of the paper's run. Data of GPT-2 tokens may be any: --data.
SCALES = {
    "paper": "--data data/fineweb-edu",
    "paper-b1": "--data data/fineweb-edu --batch_size 1 --eval_interval 200 --eval_sequences 32",
    "paper-b4": "--data data/fineweb-edu --batch_size 4 --eval_sequences 64",  # of nested alone
    "narrow": "--data data/stdlib --n_embd 64 --block_size 64 --batch_size 8",
}
# The best of the single-level rates tried at narrow, half a decade apart and at full length
# (results/narrow/rates.md); other scales want their own. Momentum's breaks coarse models, which
# start it without a warm-up: so it is there with clipping, too, and both with the next lower rate.
OPTIMIZERS = {
    "momentum": "--momentum 0.9 --lr 0.1 --min_lr 0.01",
    "momentum-0.03": "--momentum 0.9 --lr 0.03 --min_lr 0.003",
    "momentum-clip": "--momentum 0.9 --lr 0.3 --min_lr 0.03 --grad_clip 1",
    "momentum-clip-0.1": "--momentum 0.9 --lr 0.1 --min_lr 0.01 --grad_clip 1",
    "adamw": "--optimizer adamw --momentum 0.9 --lr 0.003 --min_lr 0.0003",
}
MAIN = {"single": "--mode single", "multilevel": "", "full": "--kind full",
        "constant": "--mode single --schedule constant"}
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
    # `full` once more, matched by the blocks' FLOPs only: as many FLOPs with the head as 65 coarse
    # steps are 100 without it. At narrow the head is 2% of the FLOPs: `full` is that control.
    "counting": {"full-blocks": "--kind full --coarse_steps 65"},
    "momentum": {
        **{f"{arm}-{name}": f"{flags} {optimizer}"
           for name, optimizer in OPTIMIZERS.items() for arm, flags in MAIN.items()},
        **{f"multilevel-{name}-kept": f"{optimizer} --keep_coarse_state"
           for name, optimizer in OPTIMIZERS.items()},
    },
    "cycles": {
        "cycles-5": "--cycles 5",
        "cycles-15": "--cycles 15",
        "cycles-70": "--cycles 70",
        "coarse-20": "--coarse_steps 20",
        "coarse-300": "--coarse_steps 300",
    },
}
ARMS = {arm: flags for arms in STUDIES.values() for arm, flags in arms.items()}
EARLY = 0.02  # nats below its baseline's lowest loss at which an arm may stop with --stop_early
WINDOW = 1000  # fine steps of a mean training loss: 500 of one sequence each leave a noise of 0.02


def baseline_of(arm):
    """The single-level run that an arm is compared with: of the same optimizer, at its best rate.
    None for arms of the frontier."""
    if arm in FRONTIER:
        return None
    return next((f"single-{o}" for o in ("momentum-clip", "momentum", "adamw") if o in arm),
                "single")


# Running ------------------------------------------------------------------------------------------

def command_of(scale, arm):
    """The command of an arm. One whose flags have a --growth is run by growth.py."""
    flags = {**ARMS, **FRONTIER}[arm].split()
    script = ("experiments", "growth.py") if "--growth" in flags else ("train.py",)
    return [sys.executable, os.path.join(ROOT, *script), *SCALES[scale].split(), *flags]


def run(args):
    """Runs args.arms x args.seeds, a seed's baselines before its other arms, args.jobs at once.
    Exits with what failed, if any did."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    gpus = torch.cuda.device_count()  # those of cards that are there
    cores = len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0))
    jobs = args.jobs or gpus or max(1, cores // 2)
    places, started = Queue(), {}
    for place in range(jobs):
        places.put(place)

    def one(arm, seed, baseline):
        stop_early = args.stop_early and baseline_of(arm) not in (arm, None)
        folder, base = (os.path.join(args.out, args.scale, f"{name}-seed{seed}")
                        for name in (arm, baseline_of(arm)))
        before = read_run(folder)
        if before and (before.complete or args.stop_early and before.finished):
            return print(f"{folder}: finished before", flush=True)
        command = [*command_of(args.scale, arm), "--seed", str(seed), "--out", folder, *args.more]
        if stop_early:
            if baseline:
                baseline.result()
            if not (single := read_run(base)) or not single.complete:
                return f"{folder}: --stop_early needs the complete run {base}"
            command += ["--target_loss", f"{min(evaluations(single.rows)[1]) - EARLY:.4f}"]
        if before:
            command.append("--resume")
        place, env = places.get(), dict(os.environ)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = cards[place % gpus]
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
                baseline = started.get((baseline_of(arm), seed))
                started[arm, seed] = pool.submit(one, arm, seed, baseline)
    failed = [future.result() for future in started.values() if future.result()]
    if failed:
        sys.exit("error: " + "\n".join(failed))


def keep(args):
    """Copies finished runs into args.results, their logs thinned: those of the frontier, of which
    the end is what counts, to some 50 evaluations."""
    folder = os.path.join(args.out, args.scale)
    if not os.path.isdir(folder):
        sys.exit(f"error: no runs in {folder}: study.py run --scale {args.scale} makes them")
    for name in sorted(os.listdir(folder)):
        found = read_run(os.path.join(folder, name))
        if found and found.finished:
            few = name.rpartition("-seed")[0] in FRONTIER
            rows = thin(sparse(found.rows), every=float("inf")) if few else thin(found.rows)
            keep_run(found.about, rows, os.path.join(args.results, args.scale, name))


# Reporting: arithmetic on logs --------------------------------------------------------------------

def smooth(rows, column="flops", window=WINDOW):
    """(flops, training losses) at the fine level's evaluations: each the mean over the last
    `window` fine steps, from the first evaluation that has so many behind it. A row's loss is the
    mean over the steps since the row before."""
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
    """1 - FLOPs of rows / FLOPs of base_rows, each to first reach the lowest loss of target_rows
    (default: of base_rows), or one that is `above` nats higher. None if either never does, or if
    base_rows starts there."""
    target = min(curve(target_rows or base_rows, column)[1], default=0) + above
    reached, spent = (flops_to_reach(*curve(r, column), target) for r in (rows, base_rows))
    return 1 - reached / spent if reached is not None and spent else None


def paired(runs, *arms):
    """The seeds that all the arms have, and per seed the logs of each."""
    seeds = sorted(set.intersection(*(set(runs.get(arm, {})) for arm in arms)))
    return seeds, [[runs[arm][seed].rows for arm in arms] for seed in seeds]


def savings(runs, arm, **how):
    """{seed: saving} of an arm, for the seeds that it and its baseline have. A run that was stopped
    early and before it got there is left out: it might have."""
    found = {seed: saving(*pair, **how)
             for seed, pair in zip(*paired(runs, arm, baseline_of(arm)))}
    return {seed: value for seed, value in found.items()
            if value is not None or runs[arm][seed].complete}


COUNTED = ((evaluations, "flops"), (evaluations, "flops_blocks"), (smooth, "flops"))


def arms_table(runs):
    """Every arm against the single-level run of the same seed and optimizer."""
    table = [["study", "arm", "seeds", "lowest held-out loss", "training loss",
              "saving, all FLOPs", "blocks only", "by training loss"]]
    for study, arm in ((study, arm) for study, arms in STUDIES.items() for arm in arms):
        seeds = paired(runs, arm, baseline_of(arm))[0]
        if seeds:
            whole = [s for s in seeds if runs[arm][s].complete]
            lowest = [[min(curve(runs[arm][s].rows)[1], default=None) for s in whole]
                      for curve in (evaluations, smooth)]
            saved = ["" if arm == baseline_of(arm) else
                     spread(savings(runs, arm, curve=curve, column=column).values(), True)
                     for curve, column in COUNTED]
            table.append([study, arm, " ".join(f"{s}" if s in whole else f"{s}\\*" for s in seeds),
                          *map(spread, lowest), *saved])
    return markdown(*table)


def seeds_table(runs):
    """Every arm's lowest held-out loss, where it came to its end, and its saving, all FLOPs
    counted, seed by seed."""
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
    table = [["baseline", "seeds", "saving, all FLOPs", "blocks only",
              "to the baseline's own lowest loss", "lowest loss, difference"]]
    for control in ("single", "constant", "full", "full-blocks"):
        seeds, logs = paired(runs, "multilevel", control, "single")
        if seeds:
            whole = [log[:2] for seed, log in zip(seeds, logs)
                     if runs["multilevel"][seed].complete and runs[control][seed].complete]
            table.append([control, " ".join(map(str, seeds)),
                          *(spread([saving(*log, evaluations, column) for log in logs], True)
                            for column in ("flops", "flops_blocks")),
                          spread([saving(*log) for log in whole], True),
                          spread([min(evaluations(ours)[1]) - min(evaluations(theirs)[1])
                                  for ours, theirs in whole])])
    return markdown(*table)


def targets_table(runs):
    """The main arms' savings to losses above the single-level run's lowest one."""
    arms, table = [arm for arm in MAIN if arm != "single" and arm in runs], []
    for above in (0.6, 0.4, 0.2, 0.1, 0.05, 0.0):
        saved = [spread(savings(runs, arm, above=above).values(), True) for arm in arms]
        table.append([f"{above}", *saved])
    return markdown(["nats above the lowest single-level loss", *arms], *table)


def counting_table(runs):
    """The headline figure where a training step counts as 2, 3 or 4 forward passes: all FLOPs of
    all logs scaled alike."""
    table = [["forward passes a training step", "FLOPs of multilevel", "of single",
              "saving, all FLOPs", "blocks only"]]
    columns = ("flops", "flops_blocks")
    for factor in (2, 3, 4):
        logs = [[[{**row, **{c: row[c] * factor / 3 for c in columns}} for row in rows]
                 for rows in pair] for pair in paired(runs, "multilevel", "single")[1]]
        spent = [[flops_to_reach(*evaluations(pair[i]), min(evaluations(pair[1])[1]))
                  for pair in logs] for i in (0, 1)]
        saved = [spread([saving(*pair, column=column) for pair in logs], True)
                 for column in columns]
        table.append([str(factor), *("not reached" if None in x or not x else
                                     f"{statistics.mean(x):.4g}" for x in spent), *saved])
    return markdown(*table)


def rates_table(scale):
    """What an arm would save if a weight cared for nothing but the sum of the rates it is trained
    with: the FLOPs at which that sum is what the single-level run's is at its end, for the mean
    block and for the embeddings. It takes no run."""
    table = [["arm", "saving, were the sum of a block's rates all that counts", "the embeddings'"]]
    for arm in (*MAIN, *STUDIES["counting"], *STUDIES["cycles"]):
        s, _ = parse_settings([*SCALES[scale].split(), *ARMS[arm].split()])
        vocab_size = 257 if scale == "narrow" else 50257
        config = GPTConfig(vocab_size, s.block_size, s.n_layer, s.n_head, s.n_embd)
        depth = [s.n_layer, *map(len, sets_of(s))]
        flops, blocks, embeddings = [0.0], [0.0], [0.0]
        for u in plan(s, config):
            flops.append(flops[-1] + flops_per_token(config, depth[u.level]))
            blocks.append(blocks[-1] - u.lr * depth[u.level] / s.n_layer)  # falling, as a loss does
            embeddings.append(embeddings[-1] - u.lr)
        if arm == "single":
            spent, target = flops[-1], blocks[-1]
        table.append([arm, *(f"{1 - flops_to_reach(flops, sums, target) / spent:.1%}"
                             for sums in (blocks, embeddings))])
    return markdown(*table)


def report(args):
    runs, folder = load(args.results, args.scale, ARMS), os.path.join(args.results, args.scale)
    if "single" not in runs:
        sys.exit(f"error: no single-level run below {folder}: "
                 f"python experiments/study.py run --scale {args.scale} --arms single")
    check_alike(runs, folder)
    about = next(iter(next(iter(runs.values())).values())).about
    s, d = about["settings"], about["data"]
    text = "\n".join([
        f"Scale `{args.scale}`: {about['parameters']:,} parameters, batches of {s['batch_size']} x "
        f"{s['block_size']} tokens, {s['data']} ({d['train_tokens']:,} {d['tokenizer']} tokens), "
        f"{s['device']}, {s['dtype']}, PyTorch {about['torch']}. Losses in nats a token, ± is the "
        "standard deviation over seeds, savings are paired by seed. Held-out: "
        f"{s['eval_sequences']} sequences, always the same; training loss: the mean of the last "
        f"{WINDOW} fine steps. \\*: not run to the end, so without lowest losses.",
        "", *arms_table(runs), "",
        "The lowest held-out loss, and the saving to that of the single-level run, all FLOPs "
        "counted, seed by seed:",
        "", *seeds_table(runs), "",
        "What the multilevel run saves, to the single-level run's lowest held-out loss, with each "
        "control as the baseline. A negative difference: the multilevel run's loss is lower.",
        "", *controls_table(runs), "",
        "Savings to higher losses than the single-level run's lowest one, that is to those of "
        "shorter runs, all FLOPs counted:",
        "", *targets_table(runs), "",
        "A training step is a number of forward passes, the same at every level. Another number "
        "scales all FLOPs alike and cancels:",
        "", *counting_table(runs), "",
        "A null model, without a network: what an arm would save if only the sum of the rates "
        "counted that a weight is trained with.",
        "", *rates_table(args.scale)])
    logs = {arm: [run.rows for _, run in sorted(runs[arm].items())] for arm in MAIN if arm in runs}
    panels = [(evaluations, "held-out loss (nats a token)", ("flops", "step")),
              (smooth, f"training loss, mean of {WINDOW} steps", ("flops", "step"))]
    lowest = [min((v for rows in logs["single"] for v in curve(rows)[1]), default=1)
              for curve, *_ in panels]
    publish(os.path.join(folder, "report"), text, lambda: figure(
        os.path.join(folder, "loss.svg"), logs, panels, [(low - 0.3, low + 1.2) for low in lowest],
        f"scale {args.scale}: thin lines are seeds, thick ones a mean over complete ones"))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "keep", "report", "rates", "frontier"))
    parser.add_argument("--scale", choices=SCALES, default="narrow")
    parser.add_argument("--arms", nargs="+", choices=(*STUDIES, "all", "nested", *ARMS, *FRONTIER),
                        default=["headline"], metavar="ARM",
                        help=f"of {', '.join(ARMS)}; or a study: {', '.join(STUDIES)}; or all "
                             "(of these); or nested, or its arms by name, which frontier.py has")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--jobs", type=int, default=0,
                        help="runs at once [one a GPU, or one for two cores]")
    parser.add_argument("--stop_early", action="store_true",
                        help=f"stop an arm {EARLY} nats below its baseline's lowest loss")
    parser.add_argument("--out", default="out/study", help="where the runs go")
    parser.add_argument("--results", default=RESULTS,
                        help="where keep writes and report reads; out/study: the runs themselves")
    args, args.more = parser.parse_known_args(argv)  # the rest goes to train.py
    if args.what != "run" and args.more:
        parser.error(f"unknown: {' '.join(args.more)}")
    own = frontier.FRONTIERS.get(args.scale, {})
    studies = {**STUDIES, "all": ARMS, "nested": own}
    args.arms = list(dict.fromkeys(a for name in args.arms for a in studies.get(name, [name])))
    if args.what == "run" and not args.arms or (FRONTIER.keys() - own.keys()) & set(args.arms):
        parser.error(f"the arms of nested are those of --scale {' or '.join(frontier.FRONTIERS)}, "
                     "each with budgets of its own")
    {"run": run, "keep": keep, "report": report, "frontier": frontier.report,
     "rates": lambda args: print("\n".join(rates_table(args.scale)))}[args.what](args)


if __name__ == "__main__":
    main()
