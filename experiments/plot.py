"""Held-out loss over FLOPs and over seconds of any runs, in one figure (pip install matplotlib).

    python experiments/plot.py out/tiny/single out/tiny/multilevel -o loss.svg

Of a nested iteration the start is dashed, which is the loss of the shallow network, and a ring is
the growth. Ticks at the foot are the prolongations of a run's cycles.
"""

import argparse
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from train import evaluations, read_log  # noqa: E402

COLOURS = ("black", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "0.5")
LABELS = {"flops": "training FLOPs", "seconds": "seconds of training", "step": "fine steps"}


def pyplot():
    """matplotlib.pyplot, set so that the same numbers give the same file. Raises ImportError."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "multilevel", "font.size": 9})
    import matplotlib.pyplot as plt
    return plt


def save(fig, path):
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def publish(stem, text, draw):
    """Prints a report, writes it to stem.md and, where matplotlib is, draws its figure."""
    print(text)
    with open(f"{stem}.md", "w", encoding="utf-8") as f:
        f.write(text + "\n")
    try:
        draw()
    except ImportError:
        print("no figure: pip install matplotlib", file=sys.stderr)


def draw(ax, rows, column="flops", curve=evaluations, foot=0, **style):
    """A run's curve on ax, with its growth and cycles (ticks in line `foot`). Returns (x, y)."""
    rows = [row for row in rows if column != "step" or row["level"] == "fine"]
    evaluated = [i for i, row in enumerate(rows) if row["val_loss"] is not None]
    start = [i for i in evaluated if rows[i]["level"] == "coarse1"]
    folds = [i for i, row in enumerate(rows) if row["level"].startswith("prolong")]
    if start:  # only a nested iteration's start is evaluated
        dashed = [rows[i] for i in (0, *start, *folds[:1])]
        if curve is evaluations:
            ax.plot([r[column] for r in dashed], [r["val_loss"] for r in dashed], ls="--", **style)
        rows = rows[folds[0]:] if folds else []
        folds = [i - folds[0] for i in folds[1:]]
        if rows and curve is evaluations:
            ax.plot(rows[0][column], rows[0]["val_loss"], "o", mfc="white", zorder=3, **style)
    x, y = curve(rows, column)
    ax.plot(x, y, **style)
    ax.plot([rows[i][column] for i in folds], [0.02 * (foot + 1)] * len(folds), "|", ms=4, mew=0.6,
            color=style.get("color"), transform=ax.get_xaxis_transform())
    return x, y


def figure(path, runs, panels, ylim=None, title=None):
    """runs: {label: logs}, one a seed: a thin line each, a thick one the mean of the longest ones.
    panels: lines of (curve, y label, columns), a panel a column. ylim: one for each line."""
    plt = pyplot()
    fig, axes = plt.subplots(len(panels), len(panels[0][2]), squeeze=False, sharex="col",
                             sharey="row", figsize=(9, 0.8 + 2.8 * len(panels)))
    for line, (curve, label, columns), limits in zip(axes, panels, ylim or [None] * len(panels)):
        for ax, column in zip(line, columns):
            for i, (name, logs) in enumerate(runs.items()):
                style = dict(color=COLOURS[i % len(COLOURS)], lw=0.5 if len(logs) > 1 else 1.4)
                curves = [draw(ax, rows, column, curve, i, **style) for rows in logs]
                longest = [c for c in curves if len(c[0]) == max(len(x) for x, _ in curves)]
                means = [statistics.mean(values) for values in zip(*(y for _, y in longest))]
                ax.plot(longest[0][0], means, color=style["color"], lw=1.4,
                        label=f"{name} ({len(logs)})" if len(logs) > 1 else name)
        line[0].set(ylabel=label, ylim=limits)
    for ax, column in zip(axes[-1], panels[-1][2]):
        ax.set_xlabel(LABELS[column])
    axes[0, -1].legend(frameon=False)
    fig.suptitle(title, fontsize=9)
    save(fig, path)


def read_rows(folder):
    """The rows of a run's log; exits with one line where there are none to draw."""
    try:
        rows = read_log(folder)
        if not any(row["val_loss"] is not None for row in rows):
            sys.exit(f"error: {folder}/log.csv has no evaluation yet: let the run go on")
        return rows
    except FileNotFoundError:
        sys.exit(f"error: {folder} is no run (no log.csv): name a folder that train.py has made")
    except (OSError, ValueError, LookupError, AttributeError) as e:
        sys.exit(f"error: {folder}/log.csv is no log of train.py ({type(e).__name__})")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("-o", "--out", default="loss.svg", help="the figure: .svg, .png or .pdf")
    args = parser.parse_args(argv)
    folders = list(dict.fromkeys(map(os.path.normpath, args.runs)))
    names = [os.path.basename(folder) for folder in folders]
    runs = {name if names.count(name) == 1 else folder: [read_rows(folder)]
            for folder, name in zip(folders, names)}
    # The first losses would flatten all others: the height is what is left after 5% of a run.
    losses = [v for (rows,) in runs.values() for f, v in zip(*evaluations(rows))
              if f >= 0.05 * rows[-1]["flops"]]
    low, high = min(losses, default=0), max(losses, default=1)
    margin = 0.05 * (high - low) or 0.1
    try:
        panels = [(evaluations, "held-out loss (nats a token)", ("flops", "seconds"))]
        figure(args.out, runs, panels, [(low - margin, high + margin)])
    except ImportError:
        sys.exit("error: the figure wants matplotlib: pip install matplotlib")
    except (OSError, ValueError) as e:
        sys.exit(f"error: cannot write {args.out}: {e}")
    print(args.out)


if __name__ == "__main__":
    main()
