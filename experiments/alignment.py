"""Do the coarse models point where the fine model should go? Gradients and losses of both, along one run of train.py.

    python experiments/alignment.py --into experiments/results/paper-b1/alignment --data data/fineweb-edu --batch_size 1 \\
        --eval_interval 200 --eval_sequences 32 --out out/alignment        # trains and measures; unknown flags go to train.py
    python experiments/alignment.py --into experiments/results/paper-b1/alignment    # only the tables and the figure, in seconds

Measuring does not disturb the run: its log.csv is the one of train.py with the same flags. Three questions, all on held-out text:

1. gradients.csv: the cosine between the gradients of the fine and of each coarse model on the same batch, over the parameters they
   share: by block, all shared blocks together, token and position embeddings apart; and the norm of the coarse gradient over the
   fine one's. The yardstick is the fine gradient on another batch of the same size.
2. the loss of each coarse model beside the fine one's on that batch (same file).
3. prolongation.csv: the fine model's loss right before and right after every prolongation, and that of the coarse model trained last.
"""

import argparse
import csv
import os
import statistics
import sys

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import train  # noqa: E402
from experiments.study import markdown  # noqa: E402
from multilevel import restrict  # noqa: E402

GRADIENTS = ["level", "step", "net", "part", "cosine", "norm_ratio", "loss", "fine_loss"]
PROLONGATIONS = ["level", "step", "fine_before", "fine_after", "coarse"]


def gradients(s, net, batch):
    """(mean loss, {parameter: gradient}) of net over batch, int64 (n, T + 1), in chunks of the run's batch size: no new shapes to
    compile for. Leaves every .grad as it found it after a step: None."""
    loss = 0.0
    for chunk in batch.split(s.batch_size):
        with torch.autocast(s.device, torch.bfloat16, enabled=s.dtype == "bfloat16"):
            part = net(chunk[:, :-1], chunk[:, 1:])[1] * (len(chunk) / len(batch))
        part.backward()
        loss += part.item()
    found = {p: p.grad for p in net.parameters()}
    net.zero_grad(set_to_none=True)
    return loss, found


def compare(model, keep, ours, theirs):
    """[(part, cosine, ratio of norms theirs / ours)] of two {parameter: gradient}, over the blocks in keep and the embeddings."""
    parts = {f"block {i + 1}": list(model.blocks[i].parameters()) for i in sorted(keep)}
    parts["blocks"] = [p for ps in list(parts.values()) for p in ps]
    parts.update(tokens=[model.wte.weight], positions=[model.wpe.weight])
    rows = []
    for name, ps in parts.items():
        a, b = (torch.cat([g[p].flatten() for p in ps]).double() for g in (ours, theirs))
        rows.append((name, (a @ b / (a.norm() * b.norm())).item(), (b.norm() / a.norm()).item()))
    return rows


def measure(argv, into, sequences=16, every=10):
    """Runs train.py's main(argv) with two of its functions watched: prolong, and evaluate, which it calls at the start, after every
    prolongation and every eval_interval fine steps. Gradients are measured at the first of these, then at the first len(sets) of
    every `every`."""
    evaluate, prolong = train.evaluate, train.prolong
    seen = {}  # held_out and s of the last evaluation, the row of a prolongation that is under way

    def append(name, columns, rows):
        path = os.path.join(into, name)
        new = not os.path.exists(path)
        with open(path, "a", newline="", encoding="utf-8") as f:
            csv.writer(f).writerows(([columns] if new else []) + rows)

    def watched_prolong(model, keep, delta):
        s, last = seen["s"], train.read_log(seen["s"].out)[-1]
        coarse = evaluate(s, restrict(model, keep), seen["held_out"])
        seen["row"] = [last["level"], int(last["step"]), evaluate(s, model, seen["held_out"]), coarse]
        prolong(model, keep, delta)

    def watched_evaluate(s, model, held_out):
        loss = evaluate(s, model, held_out)
        seen.update(s=s, held_out=held_out)
        rows = [row for row in train.read_log(s.out) if row["val_loss"] is not None]
        level, step = "fine", min(s.steps, s.eval_interval * sum(row["level"] == "fine" for row in rows))
        if row := seen.pop("row", None):
            level, step = row[0].replace("coarse", "prolong"), row[1]
            append("prolongation.csv", PROLONGATIONS, [[level, step, row[2], loss, row[3]]])
        sets = train.sets_of(s)
        if not rows or (len(rows) - 1) % every < len(sets):
            batch, other = held_out[:sequences], held_out[sequences:2 * sequences]
            fine_loss, ours = gradients(s, model, batch)
            nets = [(f"coarse{i + 1}", keep, *gradients(s, restrict(model, keep), batch)) for i, keep in enumerate(sets)]
            nets.append(("other batch", range(s.n_layer), *gradients(s, model, other)))
            append("gradients.csv", GRADIENTS, [[level, step, net, *row, net_loss, fine_loss]
                                                for net, keep, net_loss, theirs in nets for row in compare(model, keep, ours, theirs)])
        return loss

    os.makedirs(into, exist_ok=True)
    train.evaluate, train.prolong = watched_evaluate, watched_prolong
    try:
        train.main(argv)
    finally:
        train.evaluate, train.prolong = evaluate, prolong


def read(into, name, keys):
    """The rows of a file as dicts, the last one of each key: a run that was resumed measures some points again."""
    with open(os.path.join(into, name), newline="", encoding="utf-8") as f:
        rows = [{k: v if k in ("level", "net", "part") else float(v) for k, v in row.items()} for row in csv.DictReader(f)]
    return list({tuple(row[k] for k in keys): row for row in rows}.values())


def report(into):
    rows, folds = read(into, "gradients.csv", GRADIENTS[:4]), read(into, "prolongation.csv", PROLONGATIONS[:2])
    points, nets = (list(dict.fromkeys(pick(row) for row in rows)) for pick in (lambda r: (r["level"], r["step"]), lambda r: r["net"]))
    at = {(row["level"], row["step"], row["net"], row["part"]): row for row in rows}
    cosines = [["after", "step", "fine loss", "net", "its loss", "cosine, shared blocks", "lowest, highest block", "token embedding",
                "positions", "norm ratio, blocks"]]
    for point, net in ((point, net) for point in points for net in nets):
        parts = {key[3]: row for key, row in at.items() if key[:3] == (*point, net)}
        whole, blocks = parts["blocks"], [row["cosine"] for part, row in parts.items() if part.startswith("block ")]
        cosines.append([point[0], f"{point[1]:.0f}", f"{whole['fine_loss']:.3f}", net, f"{whole['loss']:.3f}", f"{whole['cosine']:.3f}",
                        f"{min(blocks):.3f}, {max(blocks):.3f}", f"{parts['tokens']['cosine']:.3f}",
                        f"{parts['positions']['cosine']:.3f}", f"{whole['norm_ratio']:.2f}"])
    brief = [["cosine with the fine gradient", "points", "shared blocks: lowest, median, highest", "token embedding"]]
    for when, chosen in (("during the cycles", [p for p in points if p[0] != "fine"]), ("after them", [p for p in points if p[0] == "fine" and p[1]])):
        for net in nets if chosen else ():
            its = [sorted(at[*point, net, part]["cosine"] for point in chosen) for part in ("blocks", "tokens")]
            brief.append([f"{net}, {when}", str(len(chosen)), *(f"{c[0]:.2f}, {statistics.median(c):.2f}, {c[-1]:.2f}" for c in its)])
    change, lead = ([row[k] - row["fine_before"] for row in folds] for k in ("fine_after", "coarse"))
    losses = [["", "prolongations", "coarse model, trained", "fine model before", "after", "it rose in"]]
    for level in sorted({row["level"] for row in folds}):
        its = [row for row in folds if row["level"] == level]
        losses.append([level, str(len(its)), *(f"{sum(row[k] for row in its) / len(its):.4f}" for k in ("coarse", "fine_before", "fine_after")),
                       str(sum(row["fine_after"] > row["fine_before"] for row in its))])
    text = "\n".join([*markdown(*brief), "", "Held-out loss around a prolongation, the mean over the run:", "", *markdown(*losses), "",
                      f"Of {len(change)} prolongations {sum(c > 0 for c in change)} raised the fine model's loss; the first changed it by "
                      f"{change[0]:+.3f}, the others by {sum(change[1:]):+.3f} in all. Before {sum(x < 0 for x in lead)} of them the coarse "
                      f"model had the lower loss; the coarse minus the fine loss: from {min(lead):+.3f} to {max(lead):+.3f}, {lead[-1]:+.3f} "
                      "before the last one.",
                      "", "Cosine between the fine gradient and another one, and both losses, on the same held-out batch:", "",
                      *markdown(*cosines)])
    print(text)
    with open(os.path.join(into, "report.md"), "w", encoding="utf-8") as f:
        f.write(text + "\n")
    try:
        figure(at, points, nets, folds, os.path.join(into, "alignment.svg"))
    except ImportError:
        print("no figure: pip install matplotlib", file=sys.stderr)


def figure(at, points, nets, folds, path):
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "multilevel", "font.size": 9})
    import matplotlib.pyplot as plt
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for net, colour in zip(nets, ("#d55e00", "#0072b2", "0.5") if len(nets) == 3 else plt.cm.tab10.colors):
        for part, style in (("blocks", "-"), ("tokens", ":")):
            left.plot(range(len(points)), [at[*point, net, part]["cosine"] for point in points], color=colour, ls=style, marker=".",
                      label=f"{net}, {'shared blocks' if part == 'blocks' else 'token embedding'}")
    left.set_xticks(range(len(points)), [f"{level} {step:.0f}" for level, step in points], rotation=90, fontsize=7)
    left.set_ylim(-1, 1.05)
    left.set_ylabel("cosine with the fine gradient")
    left.legend(frameon=False, fontsize=7, loc="lower left")
    for key, style, label in (("fine_after", "x", "fine model, after prolongation"), ("coarse", ".", "coarse model just trained")):
        right.plot(range(1, len(folds) + 1), [row[key] - row["fine_before"] for row in folds], style, ms=4, label=label)
    right.axhline(0, color="0.6", lw=0.7, ls=":")
    right.set_xlabel("prolongation")
    right.set_ylabel("held-out loss minus that of the\nfine model before (nats a token)")
    right.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--into", required=True, help="folder of the measurements, tables and figure")
    parser.add_argument("--sequences", type=int, default=16, help="held-out sequences a gradient is of [16]")
    parser.add_argument("--every", type=int, default=10, help="measure gradients at one of so many evaluations [10]")
    args, flags = parser.parse_known_args(argv)
    if flags:
        measure(flags, args.into, args.sequences, args.every)
    report(args.into)


if __name__ == "__main__":
    main()
