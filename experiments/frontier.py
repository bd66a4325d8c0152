"""The depth frontier, and nested iteration on it: its arms, tables and figure (study.py runs them).

The lowest final loss over FLOPs of networks of 12, 6, 3 and 1 layers, each run to its end on its
own schedule, and of 12 layers that began as 6, 3 or 1. Only the last loss of a complete run counts.
"""

import math
import os
import re
import statistics
import sys
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from experiments.plot import COLOURS, LABELS, publish, pyplot, save  # noqa: E402
from experiments.runs import check_alike, load, markdown, spread  # noqa: E402
from model import GPTConfig  # noqa: E402
from multilevel import flops_per_token, flops_to_reach  # noqa: E402

# Budgets are counted in fine steps of 12 layers; no two scales share one, so it tells the scale.
# An arm's name says it all: depth, or blocks of the start, then the budget, and what differs from
# wsd at 0.003 (paper-b4: 0.001), and from a start of a third of the FLOPs.
DEPTHS, STARTS = (12, 6, 3, 1), (3, 6, 1)
BUDGETS_OF = {"narrow": (2500, 5000, 10000, 20000, 40000, 60000), "paper-b4": (800, 1600)}
BUDGETS = [b for budgets in BUDGETS_OF.values() for b in budgets]
CONFIGS = {"narrow": GPTConfig(vocab_size=257, block_size=64, n_head=1, n_embd=64),
           "paper-b4": GPTConfig()}


def rate(lr):
    return f"--lr {lr:g} --min_lr {lr / 10:g}"


ADAMW = {"narrow": f"{rate(0.003)} --warmup 300 --eval_interval 250",
         "paper-b4": f"{rate(0.001)} --warmup 80 --eval_interval 100"}


def scale_of(budget):
    return next(scale for scale, budgets in BUDGETS_OF.items() if budget in budgets)


def adamw(budget):
    return f"--optimizer adamw --momentum 0.9 --schedule wsd {ADAMW[scale_of(budget)]}"


def steps_for_one(n_layer, budget):
    """So many steps of n_layer layers have the FLOPs of one of 12, at the scale of a budget."""
    config = CONFIGS[scale_of(budget)]
    return flops_per_token(config) / flops_per_token(config, n_layer)


def scratch(depth, budget, more=""):
    steps = round(budget * steps_for_one(depth, budget))
    return f"{adamw(budget)} --mode single --n_layer {depth} --steps {steps} {more}".strip()


def nested(k, budget, share=1 / 3, more="", cycles=0, sets=2):
    """A start of k layers that takes `share` of the budget's FLOPs, then 12 layers for the rest;
    with cycles, of budget / 100 steps of each coarse set, those come out of the rest."""
    start, fine = round(share * budget * steps_for_one(k, budget)), (1 - share) * budget
    if cycles:
        fine -= cycles * sets * (budget // 100) / steps_for_one(12 // sets, budget)
        more = f"--cycles {cycles} --coarse_steps {budget // 100} --keep_coarse_state {more}"
    return (f"{adamw(budget)} --mode nested --start_layers {k} --start_steps {start} "
            f"--steps {round(fine)} {more}").strip()


def in_stages(k, via, budget, shares=(0.1, 0.25)):
    """A start of k, then via layers, which take such shares of the budget's FLOPs (growth.py)."""
    first, then = (round(share * budget * steps_for_one(n, budget))
                   for share, n in zip(shares, (k, via)))
    return (f"--growth copy --via {via} --via_steps {then} {adamw(budget)} --mode nested "
            f"--start_layers {k} --start_steps {first + then} "
            f"--steps {round((1 - sum(shares)) * budget)}")


def arms_of(b):
    arms = {}
    if scale_of(b) == "paper-b4":
        for more, flags in (("", ""), ("-lr0.002", rate(0.002)), ("-lr0.0005", rate(0.0005))):
            arms |= {f"scratch{d}-{b}{more}": scratch(d, b, flags) for d in (12, 6, 3)}
            arms[f"nested3-{b}{more}"] = nested(3, b, more=flags)
        arms[f"nested3-{b}-late"] = nested(3, b, 0.6)
        return arms
    for k in STARTS:
        arms[f"nested{k}-{b}"] = nested(k, b)
        arms[f"nested{k}-{b}-late"] = nested(k, b, 0.6)
        arms[f"nested{k}-{b}-early"] = nested(k, b, 0.15)
    arms[f"nested3-{b}-via6"] = in_stages(3, 6, b)
    arms[f"nested3-{b}-via6-early"] = in_stages(3, 6, b, (0.05, 0.15))
    arms[f"nested3-{b}-via6-earlier"] = in_stages(3, 6, b, (0.025, 0.075))
    arms[f"nested3-{b}-early-zero"] = f"--growth zero {nested(3, b, 0.15)}"
    for d in DEPTHS:
        arms[f"scratch{d}-{b}"] = scratch(d, b)
    for d in DEPTHS:
        arms[f"scratch{d}-{b}-cosine"] = scratch(d, b, "--schedule cosine")
        for lr in (0.0015, 0.006, 0.012):
            arms[f"scratch{d}-{b}-lr{lr:g}"] = scratch(d, b, rate(lr))
    for k in STARTS:
        for lr in (0.0015, 0.006):
            arms[f"nested{k}-{b}-lr{lr:g}"] = nested(k, b, more=rate(lr))
    if b <= 5000:  # what does it? (growth.py)
        for growth in ("divide", "zero", "init", "carry"):
            arms[f"nested3-{b}-{growth}"] = f"--growth {growth} {nested(3, b)}"
        arms[f"nested3-{b}-cosine"] = nested(3, b, more="--schedule cosine")
        arms[f"nested3-{b}-cycles"] = nested(3, b, cycles=10)
        arms[f"nested3-{b}-cycles3"] = nested(3, b, 1 / 3, "--kind stride --stride 4", 10, sets=4)
        arms[f"nested3-{b}-rewarm"] = f"--growth copy --rewarm 100 {nested(3, b)}"
        arms[f"nested3-{b}-decay0.15"] = nested(3, b, more="--decay 0.15")
        arms |= {f"scratch{d}-{b}-decay0.15": scratch(d, b, "--decay 0.15") for d in (12, 3)}
        steps = round(b / 3 * steps_for_one(3, b)) + round(2 / 3 * b)  # batches that nested3 sees
        arms[f"equal-data12-{b}"] = f"{adamw(b)} --mode single --n_layer 12 --steps {steps}"
    return arms


FRONTIERS = {scale: {arm: flags for budget in budgets for arm, flags in arms_of(budget).items()}
             for scale, budgets in BUDGETS_OF.items()}
FRONTIER = {arm: flags for arms in FRONTIERS.values() for arm, flags in arms.items()}
VARIANTS = {"divide": "output matrices divided by 4", "zero": "new blocks' outputs zero",
            "init": "new blocks as initialised", "carry": "moments carried", "cosine": "cosine",
            "cycles": "10 cycles of 6 layers afterwards", "rewarm": "a second warm-up, 100 steps",
            "cycles3": "10 cycles of 3 layers afterwards",
            "via6": "in two stages, 0.1 on 3, 0.25 on 6",
            "via6-early": "in two stages, 0.05 on 3, 0.15 on 6",
            "via6-earlier": "in two stages, 0.025 on 3, 0.075 on 6",
            "early-zero": "new blocks' outputs zero, start 0.15"}


class Arm(NamedTuple):
    """What the runs of an arm came to, as means over its seeds."""
    name: str
    kind: str    # scratch, nested or equal-data
    depth: int   # of the network, or of the start
    budget: int
    what: str    # what its name says beyond that: "", cosine, lr0.006, late, divide, ...
    losses: dict  # {seed: final held-out loss}
    flops: dict  # {"flops": all, "flops_blocks": of blocks only}
    how: str     # schedule and rate
    steps: int   # of the whole network

    @property
    def start(self):
        """The share of the FLOPs that goes into the start of the arms tuned for the frontier."""
        tuned = self.kind == "nested" and self.what not in VARIANTS.keys() - {"cosine"}
        return {"late": "0.6", "early": "0.15"}.get(self.what, "1/3") if tuned else None

    @property
    def path(self):
        """The depths that such an arm, or one grown in two stages, goes through."""
        via = self.what.startswith("via6")
        return f"{self.depth} →{' 6 →' * via} 12" if via or self.start else None

    @property
    def about(self):
        if self.kind == "equal-data":
            return "12 layers on as many batches"
        other = f", start {self.start}" * (self.what in ("late", "early"))
        return VARIANTS.get(self.what) or f"copies, {self.how}{other}"

    @property
    def loss(self):
        return statistics.mean(self.losses.values())

    def cell(self, tried):
        return f"{spread(self.losses.values())} ({self.how}, {tried} tried)"

    def less(self, other):
        """Its loss less that of the same seeds of another arm, whose batches it saw."""
        seeds = sorted(self.losses.keys() & other.losses.keys())
        return spread([self.losses[i] - other.losses[i] for i in seeds], sign="+")


def read_arms(runs):
    """The arms of {arm: {seed: Run}}, of complete runs only."""
    found = []
    for name in FRONTIER:
        ends = {seed: run for seed, run in sorted(runs.get(name, {}).items()) if run.complete}
        if ends:
            kind, depth, budget, what = re.fullmatch(r"(\D+)(\d+)-(\d+)-?(.*)", name).groups()
            first = next(iter(ends.values()))
            s = first.about["settings"]
            found.append(Arm(
                name, kind, int(depth), int(budget), what,
                {seed: run.last["val_loss"] for seed, run in ends.items()},
                {c: first.last[c] for c in ("flops", "flops_blocks")},
                f"{s['schedule']} {s['lr']:g}{', decay 0.15' * (s.get('decay') == 0.15)}",
                s["steps"]))
    return found


def best_of(arms, **which):
    """The arm of the lowest loss among those with such fields, and how many there are."""
    tried = [arm for arm in arms if all(getattr(arm, k) == v for k, v in which.items())]
    return min(tried, key=lambda arm: arm.loss, default=None), len(tried)


def frontier_of(arms, depth, column="flops"):
    """[(FLOPs, loss)] of a depth, a point a budget, budgets ascending."""
    best = [best_of(arms, kind="scratch", depth=depth, budget=budget)[0] for budget in BUDGETS]
    return sorted((arm.flops[column], arm.loss) for arm in best if arm)


def place(points, loss):
    """(FLOPs, how) at which a frontier first has that loss, linear in log FLOPs between its points:
    how is "=", or "<" or ">" with the first or last FLOPs where it lies outside of them."""
    if loss > points[0][1]:
        return points[0][0], "<"
    reached = flops_to_reach([math.log(f) for f, _ in points], [v for _, v in points], loss)
    return (points[-1][0], ">") if reached is None else (math.exp(reached), "=")


def saving(arm, frontiers, column):
    """1 - FLOPs of arm / FLOPs of the frontier that has its loss first, as a cell; frontiers:
    {depth: points}. Where that lies beyond the budgets only the side on which it does is said."""
    places = {d: place(points, arm.loss) for d, points in frontiers.items() if points}
    reached = {d: p for d, p in places.items() if p[1] != ">"} or places
    if not reached:
        return ""
    depth, (flops, how) = min(reached.items(), key=lambda item: item[1][0])
    saved = round(1 - arm.flops[column] / flops, 3) + 0.0  # no -0.0
    bound = "" if how == ">" and saved <= 0 else f" ({how} {saved:.1%})"
    text = f"{saved:.1%}" if how == "=" else "beyond" + bound
    return text + (f", {layers(depth)}" if len(frontiers) > 1 and how != ">" else "")


def layers(n):
    return f"{n} layer{'s' * (n > 1)}"


def depth_table(arms):
    """Depths and places of the switch by budgets: the lowest final losses."""
    there = [b for b in BUDGETS if any(arm.budget == b for arm in arms)]
    cost = {arm.budget: arm.flops["flops"] for arm in arms if arm.kind == "scratch"}
    table = [["", *(f"{b:,} ({cost[b]:.2g} FLOPs)" if b in cost else f"{b:,}" for b in there)]]
    lines = [(layers(d), dict(kind="scratch", depth=d)) for d in DEPTHS]
    for k in STARTS:
        for start in ("0.15", "1/3", "0.6"):
            lines.append((f"{k} → 12, start {start}", dict(kind="nested", depth=k, start=start)))
    lines.append(("3 → 6 → 12", dict(path="3 → 6 → 12")))
    for label, which in lines:
        found = [best_of(arms, budget=b, **which) for b in there]
        table.append([label, *(arm.cell(tried) if arm else "" for arm, tried in found)])
    return markdown(*table)


def savings_table(arms):
    """Every nested run against the frontiers."""
    table = [["arm", "", "seeds", "final loss", "saving to 12 layers", "blocks only",
              "to the best depth", "blocks only", "less 12 layers' loss",
              "less the best shallow network's"]]
    fronts = {column: {d: frontier_of(arms, d, column) for d in DEPTHS}
              for column in ("flops", "flops_blocks")}
    for arm in arms:
        if arm.kind != "scratch":
            deep, *shallow = (best_of(arms, kind="scratch", depth=d, budget=arm.budget)[0]
                              for d in DEPTHS)
            best = min(filter(None, shallow), key=lambda other: other.loss, default=None)
            table.append([
                arm.name, arm.about, str(len(arm.losses)), spread(arm.losses.values()),
                *(saving(arm, some(front), c) for some in (lambda f: {12: f[12]}, dict)
                  for c, front in fronts.items()),
                *(arm.less(other) if other else "" for other in (deep, best))])
    return markdown(*table)


def worth_table(arms):
    """What a start of k layers costs, and what it spares: steps of 12 layers from scratch that lead
    to the same loss, less those that the nested run took. Rising by cost."""
    front, rows = frontier_of(arms, 12), []
    for arm in arms:
        if arm.kind == "nested" and front:
            reached, how = place(front, arm.loss)
            unit = arm.flops["flops"] / arm.budget  # FLOPs of a step of 12 layers
            cost, worth = arm.budget - arm.steps, reached / unit - arm.steps
            if how == "=" and "cycles" not in arm.what:
                rows.append((arm.depth, cost, arm.name, arm.about, f"{worth:,.0f}"))
    return markdown(["start", "arm", "", "costs, in steps of 12 layers", "is worth"],
                    *([layers(k), name, about, f"{cost:,}", worth]
                      for k, cost, name, about, worth in sorted(rows)))


def runs_table(runs):
    table = [["arm", "seed", "FLOPs", "of blocks", "final loss", "lowest loss"]]
    for name in (name for name in FRONTIER if name in runs):
        for seed, run in sorted(runs[name].items()):
            if run.complete:
                lowest = min(r["val_loss"] for r in run.rows
                             if r["level"] == "fine" and r["val_loss"] is not None)
                table.append([name, str(seed), f"{run.last['flops']:.4g}",
                              f"{run.last['flops_blocks']:.4g}", f"{run.last['val_loss']:.4f}",
                              f"{lowest:.4f}"])
    return markdown(*table)


def figure(arms, path):
    """Final losses over FLOPs: a line for each depth's frontier, a point for each nested run."""
    fig, ax = pyplot().subplots(figsize=(7, 4.2))
    for depth, colour in zip(DEPTHS, COLOURS):
        if points := frontier_of(arms, depth):
            ax.plot(*zip(*points), "o-", ms=3, lw=1.2, color=colour, label=layers(depth))
        for depths, marker in ((f"{depth} → 12", "^"), (f"{depth} → 6 → 12", "v")):
            if shown := [arm for arm in arms if arm.path == depths]:
                ax.plot([arm.flops["flops"] for arm in shown], [arm.loss for arm in shown], marker,
                        ms=5, color=colour, mfc="white", label=f"{depths} layers")
    ax.set(xscale="log", xlabel=LABELS["flops"], ylabel="final held-out loss (nats a token)")
    ax.legend(frameon=False)
    save(fig, path)


def report(args):
    """Writes frontier.md and frontier.svg from the kept runs, and prints the first."""
    folder = os.path.join(args.results, args.scale)
    runs = load(args.results, args.scale, FRONTIER)
    arms = read_arms(runs)
    if not arms:
        scale = args.scale if args.scale in FRONTIERS else " or ".join(FRONTIERS)
        sys.exit(f"error: no complete run of the frontier below {folder}: python "
                 f"experiments/study.py run --scale {scale} --arms nested, then keep")
    check_alike(runs, folder)
    s = next(iter(next(iter(runs.values())).values())).about["settings"]
    text = "\n".join([
        f"Scale `{args.scale}`, AdamW, {s['data']}, {s['dtype']}: final held-out losses in nats a "
        "token (± is the standard deviation over seeds) of runs that came to the end of their own "
        "schedule. Budgets are counted in steps of 12 layers; in parentheses which schedule and "
        "rate of how many did best. No spread: seed 1 alone.",
        "", *depth_table(arms), "",
        "Saving: 1 - FLOPs of the run / FLOPs at which the frontier has its loss, linear in the "
        "logarithm of FLOPs between budgets. Beyond: that lies outside of the budgets that were "
        "run, and the saving is less (<) or more (>) than what their end gives. The best depth is "
        "that of the frontier which has the loss first. Savings compare means over the seeds that "
        "there are, not always the same ones. Last: at the same budget, the mean over the seeds "
        "that both arms ran with.",
        "", *savings_table(arms), "",
        "What a start is worth: the steps of 12 layers from scratch that lead to the same loss, "
        "less those that the nested run took after its start.",
        "", *worth_table(arms), "",
        "Every run:",
        "", *runs_table(runs)])
    publish(os.path.join(folder, "frontier"), text,
            lambda: figure(arms, os.path.join(folder, "frontier.svg")))
