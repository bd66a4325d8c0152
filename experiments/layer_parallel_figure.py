"""Table and figure of layer-parallel runs, from the logs of train_layer_parallel.py. The figure wants matplotlib.

    python experiments/layer_parallel_figure.py out/layer_parallel experiments/results/layer_parallel
    python experiments/layer_parallel_figure.py experiments/results/layer_parallel experiments/results/layer_parallel  # once more

reads ARM-SEED/config.json and log.csv in the first folder, finished runs only, and writes into the second one the settings and the
rows with an evaluation or a convergence factor (under the same names, so that it can read them again), table.md, loss.svg and the
table once more to the screen. Differences are from the arm `serial` of the same seed.
"""

import csv
import json
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from experiments.train_layer_parallel import COLUMNS  # noqa: E402
from train import read_log  # noqa: E402


def read_runs(source):
    """{arm: {seed: (settings, rows)}}"""
    arms = {}
    for name in sorted(os.listdir(source)):
        if os.path.exists(os.path.join(source, name, "log.csv")):
            with open(os.path.join(source, name, "config.json"), encoding="utf-8") as f:
                config = json.load(f)
            rows = [r for r in read_log(os.path.join(source, name)) if r["val_loss"] is not None or r["forward_factor"] is not None]
            if rows and rows[-1]["step"] == config["settings"]["steps"]:
                arm, _, seed = name.rpartition("-")
                arms.setdefault(arm, {})[seed] = config, rows
            else:
                print(f"{name} is not finished: left out", file=sys.stderr)
    return arms


def write_run(folder, config, rows):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)
    with open(os.path.join(folder, "log.csv"), "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def values(rows, column):
    return {r["step"]: r[column] for r in rows if r[column] is not None and r["step"]}


def switch_of(rows):
    """The step of the check after which the run went on serially, or None."""
    mgrit = [r["step"] for r in rows if r["level"] == "mgrit"]
    return int(mgrit[-1]) if mgrit and rows[-1]["level"] == "serial" else None


def table(arms):
    yield "| arm | seeds | last validation loss | less serial's | switch at step | last iterations | largest factors | evaluations |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for arm, runs in arms.items():
        cells = []
        for seed, (_, rows) in runs.items():
            loss, serial = rows[-1]["val_loss"], arms.get("serial", {}).get(seed)
            last = ([r for r in rows if r["level"] == "mgrit"] or [None])[-1]
            check = 1 if last is None or last["forward_factor"] is None else 2  # which runs twice the iterations
            factors = [max(values(rows, c).values(), default=None) for c in ("forward_factor", "adjoint_factor")]
            cells.append((f"{loss:.4f}", f"{loss - serial[1][-1]['val_loss']:+.4f}" if serial and arm != "serial" else "-",
                          str(switch_of(rows) or "-"),
                          f"{last['forward_iterations'] / check:.0f} + {last['adjoint_iterations'] / check:.0f}" if last else "-",
                          "-" if None in factors else "{:.3f}, {:.3f}".format(*factors)))
        work = statistics.mean(rows[-1]["evaluations"] for _, rows in runs.values())
        yield "| " + " | ".join([arm, " / ".join(runs), *(" / ".join(x) for x in zip(*cells)), f"{work:,.0f}"]) + " |"


def figure(arms, path):
    try:
        import matplotlib
    except ImportError:
        return print("no figure: pip install matplotlib", file=sys.stderr)
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "layer-parallel", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    import matplotlib.pyplot as plt
    fig, (loss, difference, factor) = plt.subplots(1, 3, figsize=(12, 3.6))
    for i, (arm, runs) in enumerate(arms.items()):
        for j, (seed, (config, rows)) in enumerate(runs.items()):
            style, losses = dict(color=f"C{i}", lw=1, alpha=0.8), values(rows, "val_loss")
            loss.plot(*zip(*losses.items()), **style, label=None if j else arm)
            serial = values(arms["serial"][seed][1], "val_loss") if seed in arms.get("serial", {}) else {}
            differences = {step: x - serial[step] for step, x in losses.items() if step in serial}
            difference.plot(list(differences), list(differences.values()), **style)
            for column, line in (("forward_factor", "-"), ("adjoint_factor", "--")):
                factor.plot(*(zip(*values(rows, column).items()) if values(rows, column) else ([], [])), line, **style)
            if step := switch_of(rows):
                difference.plot(step, differences.get(step, 0), "o", color=f"C{i}", ms=4)
                factor.plot(step, max(values(rows, "forward_factor")[step], values(rows, "adjoint_factor")[step]), "o", color=f"C{i}", ms=4)
            if config["layer_parallel"]["control"] in ("switch", "refine"):
                factor.axhline(config["layer_parallel"]["threshold"], color="0.5", lw=0.8, ls=":")
    loss.set(xlabel="step", ylabel="validation loss (nats)")
    loss.legend(frameon=False)
    difference.set(xlabel="step", ylabel="less the serial run of the same seed")
    factor.set(xlabel="step", ylabel="convergence factor: forward, adjoint (dashed)")
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def main(source, target):
    arms = read_runs(source)
    if not arms:
        sys.exit(f"error: no finished ARM-SEED with config.json and log.csv in {source}: name the folder of the runs")
    for arm, runs in arms.items():
        for seed, run in runs.items():
            write_run(os.path.join(target, f"{arm}-{seed}"), *run)
    lines = "\n".join(table(arms))
    with open(os.path.join(target, "table.md"), "w", encoding="utf-8") as f:
        f.write(lines + "\n")
    print(lines)
    figure(arms, os.path.join(target, "loss.svg"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
