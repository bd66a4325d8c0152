"""Do the coarse models point where the fine model should go? Measured along a run of train.py.

    python experiments/alignment.py --into experiments/results/paper-b1/alignment \\
        --data data/fineweb-edu --batch_size 1 --eval_interval 200 --eval_sequences 32 \\
        --out out/alignment    # trains and measures; flags it does not know go to train.py
    python experiments/alignment.py --into experiments/results/paper-b1/alignment  # only reports

Measuring does not disturb the run: its log.csv is that of train.py with the same flags. All of it
is on held-out text:

gradients.csv     the cosine between the gradients of the fine and of each coarse model on the same
                  batch, over what they share (each block, all shared blocks, token and position
                  embeddings), the norm of the coarse one over that of the fine one, both losses.
                  The yardstick is the fine gradient on another batch of the same size.
prolongation.csv  the fine model's loss right before and right after every prolongation, and that
                  of the coarse model trained last.
report.md         tables of both, beside a figure, alignment.svg (wants matplotlib).
"""

import argparse
import csv
import os
import statistics
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train  # noqa: E402
from experiments.plot import publish, pyplot, save  # noqa: E402
from experiments.runs import markdown  # noqa: E402
from multilevel import restrict  # noqa: E402

GRADIENTS = ["level", "step", "net", "part", "cosine", "norm_ratio", "loss", "fine_loss"]
PROLONGATIONS = ["level", "step", "fine_before", "fine_after", "coarse"]


# Measuring ----------------------------------------------------------------------------------------

def gradients(s, net, batch):
    """(mean loss, {parameter: gradient}) of net over batch, int64 (n, T + 1), in chunks of the
    run's batch size: no new shapes to compile for. Leaves every .grad as a step does: None."""
    loss = 0.0
    for chunk in batch.split(s.batch_size):
        with train.autocast(s):
            part = net(chunk[:, :-1], chunk[:, 1:])[1] * (len(chunk) / len(batch))
        part.backward()
        loss += part.item()
    found = {p: p.grad for p in net.parameters()}
    net.zero_grad(set_to_none=True)
    return loss, found


def compare(model, keep, ours, theirs):
    """[(part, cosine, norm of theirs / norm of ours)] of two {parameter: gradient}: for each block
    in keep, for all of them, and for the embeddings."""
    parts = {f"block {i + 1}": list(model.blocks[i].parameters()) for i in sorted(keep)}
    parts["blocks"] = sum(parts.values(), [])
    parts.update(tokens=[model.wte.weight], positions=[model.wpe.weight])
    rows = []
    for name, ps in parts.items():
        a, b = (torch.cat([g[p].flatten() for p in ps]).double() for g in (ours, theirs))
        rows.append((name, (a @ b / (a.norm() * b.norm())).item(), (b.norm() / a.norm()).item()))
    return rows


def measure(argv, into, sequences=16, every=10):
    """train.main(argv) with two of its functions watched: prolong, and evaluate, which it calls at
    the start, after every prolongation and every eval_interval fine steps. Gradients are measured
    at the first of these calls, then, of every `every`, at the first few: one a coarse model."""
    evaluate, prolong = train.evaluate, train.prolong
    seen = {}  # s and held_out of the last evaluation, and the prolongation that is under way

    def append(name, columns, rows):
        with open(os.path.join(into, name), "a", newline="", encoding="utf-8") as f:
            csv.writer(f).writerows(rows if f.tell() else [columns, *rows])

    def watched_prolong(model, keep, delta):
        s, held_out = seen["s"], seen["held_out"]
        last = train.read_log(s.out)[-1]  # of the visit that ends here
        seen["fold"] = (last["level"].replace("coarse", "prolong"), int(last["step"]),
                        *(evaluate(s, net, held_out) for net in (model, restrict(model, keep))))
        prolong(model, keep, delta)

    def watched_evaluate(s, model, held_out):
        loss, sets = evaluate(s, model, held_out), train.sets_of(s)
        rows = [row for row in train.read_log(s.out) if row["val_loss"] is not None]
        if "fold" in seen:
            level, step, before, coarse = seen.pop("fold")
            append("prolongation.csv", PROLONGATIONS, [[level, step, before, loss, coarse]])
        else:  # its row is not in the log yet
            fine = sum(row["level"] == "fine" for row in rows)
            level, step = "fine", min(s.steps, s.eval_interval * fine)
        seen.update(s=s, held_out=held_out)
        if not rows or (len(rows) - 1) % every < len(sets):
            batch, other = held_out[:sequences], held_out[sequences:2 * sequences]
            fine_loss, ours = gradients(s, model, batch)
            nets = [(f"coarse{i}", keep, *gradients(s, restrict(model, keep), batch))
                    for i, keep in enumerate(sets, 1)]
            nets.append(("other batch", range(s.n_layer), *gradients(s, model, other)))
            append("gradients.csv", GRADIENTS,
                   [[level, step, net, *part, net_loss, fine_loss]
                    for net, keep, net_loss, theirs in nets
                    for part in compare(model, keep, ours, theirs)])
        return loss

    os.makedirs(into, exist_ok=True)
    train.evaluate, train.prolong = watched_evaluate, watched_prolong
    try:
        train.main(argv)
    finally:
        train.evaluate, train.prolong = evaluate, prolong


# Reporting ----------------------------------------------------------------------------------------

def read(into, name, keys):
    """The rows of a file as dicts, the last one of each key: a run that was resumed measures some
    points again."""
    with open(os.path.join(into, name), newline="", encoding="utf-8") as f:
        rows = [{k: v if k in ("level", "net", "part") else float(v) for k, v in row.items()}
                for row in csv.DictReader(f)]
    return list({tuple(row[k] for k in keys): row for row in rows}.values())


def phases_table(at, points, nets):
    """Cosines right after prolongations, and at the fine model's own evaluations but the first."""
    table = [["cosine with the fine gradient", "points", "shared blocks: lowest, median, highest",
              "token embedding"]]
    phases = {"during the cycles": [p for p in points if p[0] != "fine"],
              "after them": [p for p in points if p[0] == "fine" and p[1]]}
    for when, chosen in phases.items():
        for net in nets if chosen else ():
            its = [sorted(at[*point, net][part]["cosine"] for point in chosen)
                   for part in ("blocks", "tokens")]
            table.append([f"{net}, {when}", str(len(chosen)), *(
                f"{c[0]:.2f}, {statistics.median(c):.2f}, {c[-1]:.2f}" for c in its)])
    return markdown(*table)


def losses_table(folds):
    table = [["", "prolongations", "coarse model, trained", "fine model before", "after",
              "it rose in"]]
    for level in sorted({row["level"] for row in folds}):
        its = [row for row in folds if row["level"] == level]
        means = [statistics.mean(row[k] for row in its)
                 for k in ("coarse", "fine_before", "fine_after")]
        rose = sum(row["fine_after"] > row["fine_before"] for row in its)
        table.append([level, str(len(its)), *(f"{x:.4f}" for x in means), str(rose)])
    return markdown(*table)


def points_table(at):
    table = [["after", "step", "fine loss", "net", "its loss", "cosine, shared blocks",
              "lowest, highest block", "token embedding", "positions", "norm ratio, blocks"]]
    for (level, step, net), parts in at.items():
        whole, cosine = parts["blocks"], {part: row["cosine"] for part, row in parts.items()}
        each = [c for part, c in cosine.items() if part.startswith("block ")]
        table.append([
            level, f"{step:.0f}", f"{whole['fine_loss']:.3f}", net, f"{whole['loss']:.3f}",
            f"{cosine['blocks']:.3f}", f"{min(each):.3f}, {max(each):.3f}",
            f"{cosine['tokens']:.3f}", f"{cosine['positions']:.3f}", f"{whole['norm_ratio']:.2f}"])
    return markdown(*table)


def report(into):
    at = {}  # (level, step, net) -> part -> row
    for row in read(into, "gradients.csv", GRADIENTS[:4]):
        at.setdefault((row["level"], row["step"], row["net"]), {})[row["part"]] = row
    points = list(dict.fromkeys(key[:2] for key in at))
    nets = list(dict.fromkeys(key[2] for key in at))
    folds = read(into, "prolongation.csv", PROLONGATIONS[:2])
    change, lead = ([row[k] - row["fine_before"] for row in folds]
                    for k in ("fine_after", "coarse"))
    text = "\n".join([
        *phases_table(at, points, nets), "",
        "Held-out loss around a prolongation, the mean over the run:",
        "", *losses_table(folds), "",
        f"Of {len(change)} prolongations {sum(c > 0 for c in change)} raised the fine model's "
        f"loss; the first changed it by {change[0]:+.3f}, the others by {sum(change[1:]):+.3f} in "
        f"all. Before {sum(x < 0 for x in lead)} of them the coarse model had the lower loss; the "
        f"coarse minus the fine loss: from {min(lead):+.3f} to {max(lead):+.3f}, {lead[-1]:+.3f} "
        "before the last one.", "",
        "Cosine between the fine gradient and another one, and both losses, on the same held-out "
        "batch:",
        "", *points_table(at)])
    publish(os.path.join(into, "report"), text, lambda: figure(
        os.path.join(into, "alignment.svg"), at, points, nets, change, lead))


def figure(path, at, points, nets, change, lead):
    plt = pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    colours = ("#d55e00", "#0072b2", "0.5") if len(nets) == 3 else plt.cm.tab10.colors
    styles = {"blocks": ("-", "shared blocks"), "tokens": (":", "token embedding")}
    for net, colour in zip(nets, colours):
        for part, (style, label) in styles.items():
            left.plot([at[*point, net][part]["cosine"] for point in points], color=colour,
                      ls=style, marker=".", label=f"{net}, {label}")
    left.set_xticks(range(len(points)), [f"{level} {step:.0f}" for level, step in points],
                    rotation=90, fontsize=7)
    left.set(ylim=(-1, 1.05), ylabel="cosine with the fine gradient")
    left.legend(frameon=False, fontsize=7, loc="lower left")
    numbers = range(1, len(change) + 1)
    right.plot(numbers, change, "x", ms=4, label="fine model, after prolongation")
    right.plot(numbers, lead, ".", ms=4, label="coarse model just trained")
    right.axhline(0, color="0.6", lw=0.7, ls=":")
    right.set(xlabel="prolongation",
              ylabel="held-out loss minus that of the\nfine model before (nats a token)")
    right.legend(frameon=False)
    save(fig, path)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", required=True, help="folder of measurements, tables and figure")
    parser.add_argument("--sequences", type=int, default=16,
                        help="held-out sequences a gradient is of [16]")
    parser.add_argument("--every", type=int, default=10,
                        help="measure gradients at one of so many evaluations [10]")
    args, flags = parser.parse_known_args(argv)
    if flags:
        measure(flags, args.into, args.sequences, args.every)
    report(args.into)


if __name__ == "__main__":
    main()
