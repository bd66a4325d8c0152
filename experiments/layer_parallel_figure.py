"""Table and figure of layer-parallel runs, from the logs of train_layer_parallel.py. The figure wants matplotlib.

    python experiments/layer_parallel_figure.py out/layer_parallel experiments/results/layer_parallel

reads ARM-SEED/log.csv in the first folder, and writes into the second one the rows that carry an evaluation or a convergence factor
(under the same names, so that it can read them again), table.md, loss.svg and the table once more to the screen.
"""

import csv
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from experiments.train_layer_parallel import COLUMNS  # noqa: E402
from train import read_log  # noqa: E402


def figure(arms, path):
    try:
        import matplotlib
    except ImportError:
        return print("no figure: pip install matplotlib", file=sys.stderr)
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "layer-parallel", "font.size": 9})
    import matplotlib.pyplot as plt
    panels = {"val_loss": "validation loss (nats)", "forward_factor": "convergence factor, forward", "adjoint_factor": "adjoint"}
    fig, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    for i, (arm, runs) in enumerate(arms.items()):
        for j, rows in enumerate(runs.values()):
            for ax, column in zip(axes, panels):
                points = [(row["step"], row[column]) for row in rows if row[column] is not None and row["step"]]
                ax.plot(*(zip(*points) if points else ([], [])), color=f"C{i}", lw=1, alpha=0.8, label=None if j else arm)
    for ax, label in zip(axes, panels.values()):
        ax.set(xlabel="step", ylabel=label)
        ax.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def main(source, target):
    arms = {}
    for name in sorted(os.listdir(source)):
        if os.path.exists(os.path.join(source, name, "log.csv")):
            rows = [r for r in read_log(os.path.join(source, name)) if r["val_loss"] is not None or r["forward_factor"] is not None]
            arms.setdefault(name.rpartition("-")[0], {})[name.rpartition("-")[2]] = rows
            os.makedirs(os.path.join(target, name), exist_ok=True)
            with open(os.path.join(target, name, "log.csv"), "w", newline="", encoding="utf-8") as f:
                writer = csv.DictWriter(f, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
    if not arms:
        sys.exit(f"error: no ARM-SEED/log.csv in {source}: name the folder of the runs")
    lines = ["| arm | seeds | last validation loss | lowest | switch at step | last iterations | largest factors | evaluations |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for arm, runs in arms.items():
        last = [[r["val_loss"] for r in rows if r["val_loss"] is not None][-1] for rows in runs.values()]
        lowest = [min(r["val_loss"] for r in rows if r["val_loss"] is not None) for rows in runs.values()]
        mgrit = [[r for r in rows if r["level"] == "mgrit"] for rows in runs.values()]  # a check runs twice the iterations
        end = ["{:.0f} + {:.0f}".format(*((m[-1][k] / (1 if m[-1]["forward_factor"] is None else 2) if m else 0)
                                          for k in ("forward_iterations", "adjoint_iterations"))) for m in mgrit]
        switch = [f"{m[-1]['step']:.0f}" if m and rows[-1]["level"] == "serial" else "-" for m, rows in zip(mgrit, runs.values())]
        worst = ["{:.2f}, {:.2f}".format(*(max([r[k] for r in rows if r[k] is not None] or [0])
                                           for k in ("forward_factor", "adjoint_factor"))) for rows in runs.values()]
        work = f"{statistics.mean(rows[-1]['evaluations'] for rows in runs.values()):,.0f}"
        numbers = [" / ".join(f"{x:.4f}" for x in xs) for xs in (last, lowest)]
        lines.append("| " + " | ".join([arm, " / ".join(runs), *numbers, *(" / ".join(x) for x in (switch, end, worst)), work]) + " |")
    with open(os.path.join(target, "table.md"), "w", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    figure(arms, os.path.join(target, "loss.svg"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
