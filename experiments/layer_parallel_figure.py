"""Tables and figures of layer-parallel runs, from what train_layer_parallel.py left. Figures want
matplotlib.

    R=experiments/results/layer_parallel
    python experiments/layer_parallel_figure.py out/layer_parallel $R
    python experiments/layer_parallel_figure.py $R $R      # once more

reads ARM-SEED/ in the first folder, complete runs only, and writes into the second one, under the
same names, settings, checks and the rows with an evaluation (so that it can read them again), and
table.md and loss.svg. Differences are from the arm `serial` of the same seed. If the second folder
holds a gradients*.md, a table of `gradients`, detectors.svg shows what forecasts the error in it.
"""

import csv
import glob
import os
import shutil
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from experiments.plot import pyplot, save  # noqa: E402
from experiments.runs import keep_run, markdown, read_run  # noqa: E402


def read_runs(source):
    """{arm: {seed: (Run, checks)}}: checks as dicts of float, None where a cell is empty."""
    arms = {}
    for name in sorted(os.listdir(source)) if os.path.isdir(source) else ():
        if not (run := read_run(os.path.join(source, name))):
            continue
        path = os.path.join(source, name, "checks.csv")
        if not run.complete or not os.path.exists(path):
            print(f"{name} is not finished, or has no checks.csv: left out", file=sys.stderr)
            continue
        with open(path, encoding="utf-8") as f:
            checks = [{k: float(v) if v else None for k, v in row.items()}
                      for row in csv.DictReader(f)]
        arm, _, seed = name.rpartition("-")
        arms.setdefault(arm, {})[seed] = run, checks
    return arms


def values(rows, column):
    return {r["step"]: r[column] for r in rows if r[column] is not None and r["step"]}


def inexact(checks):
    return [row for row in checks if row["forward_iterations"]]


def switch_of(checks):
    """The step of the check after which the run went on serially, or None."""
    before = inexact(checks)
    return int(before[-1]["step"]) if 0 < len(before) < len(checks) else None


def table(arms):
    rows = [["arm", "seeds", "last validation loss", "less serial's", "switch at step",
             "last iterations", "largest factors", "evaluations"]]
    for arm, runs in arms.items():
        cells = []
        for seed, (run, checks) in runs.items():
            loss, serial = run.last["val_loss"], arms.get("serial", {}).get(seed)
            last = inexact(checks)[-1:]
            factors = [max(values(checks, f"{way}_factor").values(), default=None)
                       for way in ("forward", "adjoint")]
            cells.append((
                f"{loss:.4f}",
                f"{loss - serial[0].last['val_loss']:+.4f}" if serial and arm != "serial" else "-",
                str(switch_of(checks) or "-"),
                *([f"{row['forward_iterations']:.0f} + {row['adjoint_iterations']:.0f}"
                   for row in last] or "-"),
                "-" if None in factors else "{:.3f}, {:.3f}".format(*factors)))
        work = statistics.mean(checks[-1]["evaluations"] for _, checks in runs.values())
        rows.append([arm, " / ".join(runs), *map(" / ".join, zip(*cells)), f"{work:,.0f}"])
    return "\n".join(markdown(*rows))


def figure(arms, plt):
    fig, (loss, difference, factor) = plt.subplots(1, 3, figsize=(12, 3.6))
    for i, (arm, runs) in enumerate(arms.items()):
        for j, (seed, (run, checks)) in enumerate(runs.items()):
            style, losses = dict(color=f"C{i}", lw=1, alpha=0.8), values(run.rows, "val_loss")
            loss.plot(*zip(*losses.items()), **style, label=None if j else arm)
            serial = arms.get("serial", {}).get(seed)
            serial = values(serial[0].rows, "val_loss") if serial else {}
            less = {step: x - serial[step] for step, x in losses.items() if step in serial}
            difference.plot(list(less), list(less.values()), **style)
            seen = [values(checks, f"{way}_factor") for way in ("forward", "adjoint")]
            for factors, line in zip(seen, ("-", "--")):
                factor.plot(list(factors), list(factors.values()), line, **style)
            if step := switch_of(checks):
                difference.plot(step, less.get(step, 0), "o", color=f"C{i}", ms=4)
                factor.plot(step, max(f[step] for f in seen), "o", color=f"C{i}", ms=4)
            s = run.about["settings"]
            if s["control"] in ("switch", "refine") and s["detector"] == "factor":
                factor.axhline(s["threshold"], color="0.5", lw=0.8, ls=":")
    loss.set(xlabel="step", ylabel="validation loss (nats)")
    loss.legend(frameon=False)
    difference.set(xlabel="step", ylabel="less the serial run of the same seed")
    factor.set(xlabel="step", ylabel="convergence factor: forward, adjoint (dashed)")
    return fig


def read_gradients(paths):
    """The rows of `gradients` tables as dicts of strings."""
    for path in paths:
        with open(path, encoding="utf-8") as f:
            lines = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in f]
        yield from (dict(zip(lines[0], line)) for line in lines if line[0] not in ("run", "---"))


def detector(rows, what):
    """What a detector (factor or residual) saw, the larger of both directions, and the relative
    error of the gradient, where the factor is more than rounding: two lists."""
    rows = [{k: v if k == "run" else float(v) for k, v in row.items()} for row in rows]
    rows = [r for r in rows if max(r["forward factor"], r["adjoint factor"]) > 0]
    return ([max(r[f"forward {what}"], r[f"adjoint {what}"]) for r in rows],
            [r["relative error"] for r in rows])


def verdict(rows, what, threshold, rough=0.5):
    """Of the rows with a relative error of `rough` or more, and of the others, how many a detector
    that is too high at or above a threshold picks out: a line of text."""
    picked = {True: [], False: []}
    for r in rows:
        high = max(float(r[f"{way} {what}"]) for way in ("forward", "adjoint")) >= threshold
        picked[float(r["relative error"]) >= rough].append(high)
    return (f"{what} at {threshold}: sees {sum(picked[True])} of {len(picked[True])} errors of "
            f"{rough} or more, and {sum(picked[False])} of {len(picked[False])} smaller ones")


def rank_correlation(xs, ys):
    return statistics.correlation(*([sorted(v).index(x) for x in v] for v in (xs, ys)))


def detectors(rows, plt):
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True)
    for ax, what, name in zip(axes, ("factor", "residual"),
                              ("convergence factor", "relative residual")):
        for i, c in enumerate(sorted({row["c"] for row in rows})):
            for k, marker in (("1", "o"), ("2", "s"), ("4", "^")):
                seen = detector([r for r in rows if (r["c"], r["k"]) == (c, k)], what)
                ax.loglog(*seen, marker, color=f"C{i}", ms=4, label=f"c = {c}, k = {k}")
        ax.set(xlabel=f"{name}, the larger of forward and adjoint", title="rank correlation "
               f"{rank_correlation(*detector(rows, what)):.2f}")
    axes[0].set(ylabel="relative error of the gradient")
    axes[1].legend(frameon=False, fontsize=7)
    return fig


def main(source, target):
    arms = read_runs(source)
    paths = sorted(glob.glob(os.path.join(target, "gradients*.md")))
    rows = list(read_gradients(paths))
    if not arms and not rows:
        sys.exit(f"error: no finished ARM-SEED in {source}: name the folder of the runs")
    for arm, runs in arms.items():
        for seed, (run, _) in runs.items():
            name = f"{arm}-{seed}"
            if os.path.realpath(source) != os.path.realpath(target):
                keep_run(run.about, [r for r in run.rows if r["val_loss"] is not None],
                         os.path.join(target, name))
                shutil.copy(os.path.join(source, name, "checks.csv"), os.path.join(target, name))
    if arms:
        with open(os.path.join(target, "table.md"), "w", encoding="utf-8") as f:
            print(table(arms), file=f)
        print(table(arms))
    for path in paths:
        part = list(read_gradients([path]))
        for what, threshold in (("factor", 0.5), ("residual", 0.2)):  # --control's
            print(f"{os.path.basename(path)}: {verdict(part, what, threshold)}; rank correlation "
                  f"{rank_correlation(*detector(part, what)):.3f} with the error")
    try:
        plt = pyplot()
    except ImportError:
        return print("no figure: pip install matplotlib", file=sys.stderr)
    plt.rcParams.update({"svg.hashsalt": "layer-parallel", "axes.grid": True, "grid.alpha": 0.3})
    for name, draw, what in (("loss", figure, arms), ("detectors", detectors, rows)):
        if what:
            save(draw(what, plt), os.path.join(target, f"{name}.svg"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
