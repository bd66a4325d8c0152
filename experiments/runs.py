"""Run folders as the studies want them (read, thinned, by arm and seed), and numbers as cells."""

import csv
import json
import math
import os
import statistics
import sys
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from train import COLUMNS, evaluations, read_log  # noqa: E402


class Run(NamedTuple):
    about: dict  # config.json
    rows: list   # of log.csv

    @property
    def last(self):
        """The row of its last fine step; None while it has not come to that."""
        return next((row for row in reversed(self.rows) if row["level"] == "fine"
                     and row["step"] == self.about["settings"]["steps"]), None)

    @property
    def complete(self):
        """Whether it came to its last fine step."""
        return self.last is not None

    @property
    def finished(self):
        """Whether it is complete or has reached the loss that it was told to stop at."""
        lowest = min(evaluations(self.rows)[1], default=math.inf)
        return self.complete or lowest <= self.about["settings"]["target_loss"]


def read_run(folder):
    """The run in a folder, finished or not; None where there is none, or none that can be read."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
            run = Run(json.load(f), read_log(folder))
        run.finished  # needs what all else needs of it
        return run
    except (OSError, ValueError, LookupError, TypeError):
        return None


def load(root, scale, arms):
    """{arm: {seed: Run}} of the finished runs of arms below root/scale: one that is still under way
    has no lowest loss yet. Says which are left out."""
    runs, folder = {}, os.path.join(root, scale)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        arm, _, seed = name.rpartition("-seed")
        if arm not in arms or not seed.isdigit():
            continue
        if (found := read_run(os.path.join(folder, name))) and found.finished:
            runs.setdefault(arm, {})[int(seed)] = found
        else:
            print(f"{folder}/{name}: left out, not finished or damaged", file=sys.stderr)
    return runs


def check_alike(runs, folder):
    """Exits if the runs (as load gives them) differ in what losses cannot be compared across."""
    settings = [run.about["settings"] for seeds in runs.values() for run in seeds.values()]
    keys = ("data", "batch_size", "block_size", "eval_sequences", "device", "dtype")
    if differ := [k for k in keys if len({s[k] for s in settings}) > 1]:
        sys.exit(f"error: the runs below {folder} differ in {', '.join(differ)}: "
                 "they cannot be compared")


# Thinning -----------------------------------------------------------------------------------------

def keep_run(about, rows, folder):
    """Writes config.json and log.csv of a run for results/. Of a path from the root, that is of the
    machine that it ran on, only the last folder."""
    os.makedirs(folder, exist_ok=True)
    settings = {k: os.path.basename(v) if isinstance(v, str) and os.path.isabs(v) else v
                for k, v in about["settings"].items()}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(dict(about, settings=settings), f, indent=1)
    write_log(os.path.join(folder, "log.csv"), rows)


def write_log(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS)
        writer.writeheader()
        writer.writerows({k: f"{v:.7g}" if isinstance(v, float) else v for k, v in row.items()}
                         for row in rows)


def thin(rows, every=100):
    """Drops rows without an evaluation, their training losses averaged (weighted by steps) into the
    next row of the level that stays: one with an evaluation, the last of a visit to a coarse level,
    or one after `every` steps."""
    kept, waiting = [], []
    counted = {True: 0, False: 0}  # steps of the fine level, and of all coarse ones together
    for row, after in zip(rows, [*rows[1:], None]):
        fine = row["level"] == "fine"
        if row["train_loss"] is not None:
            if row["step"] <= counted[fine]:  # cycles count anew after a nested iteration's start
                counted[fine] = 0
            waiting.append((row["step"] - counted[fine], row["train_loss"]))
            counted[fine] = row["step"]
        if (row["val_loss"] is not None or after is None or after["level"] != row["level"]
                or sum(n for n, _ in waiting) >= every):
            kept.append({**row, "train_loss": mean(waiting)})
            waiting = []
    return kept


def sparse(rows, number=50):
    """The rows with only about `number` of each level's evaluations left, first and last among
    them; those after prolongations stay."""
    stay = set()
    for level in {row["level"] for row in rows}:
        at = [i for i, r in enumerate(rows) if r["level"] == level and r["val_loss"] is not None]
        every = 1 if level.startswith("prolong") else math.ceil(len(at) / number) or 1
        stay.update(at[:1], at[::-every])
    return [row if i in stay else {**row, "val_loss": None} for i, row in enumerate(rows)]


# Cells --------------------------------------------------------------------------------------------

def mean(parts):
    """The mean of x over [(weight, x), ...], None if there are none."""
    return sum(n * x for n, x in parts) / sum(n for n, _ in parts) if parts else None


def spread(values, percent=False, sign=""):
    """"mean ± standard deviation" of the values that are there (None: never reached), and how many
    are not."""
    there = [100 * v if percent else v for v in values if v is not None]
    digits, missing = 1 if percent else 3, len(values) - len(there)
    text = f"{statistics.mean(there):{sign}.{digits}f}{'%' * percent}" if there else ""
    if len(there) > 1:
        text += f" ± {statistics.stdev(there):.{digits}f}"
    missed = f"not reached ({missing} of {len(values)})" if missing else ""
    return ", ".join(filter(None, [text, missed]))


def markdown(*rows):
    """Rows of cells, the first one the header, as lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
