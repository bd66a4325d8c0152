"""Nested iteration with another growth than train.py's: what does it?

    python experiments/growth.py --growth divide -- --preset tiny --mode nested

Every other flag is one of train.py. The growth is the prolongation after the start, from k blocks
to N; each trained block begins a group of N / k.

copy    train.py's own: all blocks of a group are copies of the trained one, the optimizer is fresh
divide  ... with the two output matrices of every block divided by N / k: Euler steps of the size
        that the finer time step asks for
zero    ... with the two output matrices of the new blocks zero: the network computes what it did
init    the new blocks stay as they were initialised (delta = 0)
carry   copies, and the fine optimizer starts from the moments of the start's, those of new blocks
        copied too
"""

import argparse
import gc
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train  # noqa: E402
from multilevel import prolong, restrict  # noqa: E402

GROWTHS = ("copy", "divide", "zero", "init", "carry")


@torch.no_grad()
def grow(model, keep, how):
    """Prolongs model, in place, from the view of the blocks keep, the first of each group."""
    prolong(model, keep, 0.0 if how == "init" else 1.0)
    for i, block in enumerate(model.blocks):
        for out in (block.attn_out, block.mlp_out):
            if how == "divide":
                out.weight /= len(model.blocks) // len(keep)
            elif how == "zero" and i not in keep:
                out.weight.zero_()
    if how == "carry":
        carry(model, keep)


def carry(model, keep):
    """Gives the fine optimizer the state of the start's: copies, each block that of its source."""
    ours, theirs = set(model.parameters()), set(restrict(model, keep).parameters())
    found = {}
    for o in gc.get_objects():  # train.py gives prolong the model only
        if issubclass(type(o), torch.optim.Optimizer):
            held = {p for group in o.param_groups for p in group["params"]}
            if held == ours or held == theirs and o.state:
                found[held == ours] = o
    source = {p: p for p in theirs}
    for i, block in enumerate(model.blocks):
        kept = model.blocks[max(j for j in keep if j <= i)]
        source.update(zip(block.parameters(), kept.parameters()))
    for p, q in source.items():
        found[True].state[p] = {k: v.clone() if torch.is_tensor(v) else v
                                for k, v in found[False].state[q].items()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", choices=GROWTHS, required=True)
    args, flags = parser.parse_known_args(argv)
    flags = [flag for flag in flags if flag != "--"]
    s, _ = train.parse_settings(flags)
    if s.mode != "nested" or s.cycles and s.delta == 1:  # a cycle would look like the growth
        sys.exit("error: --growth wants --mode nested, and with --cycles a --delta below 1")

    def prolong_or_grow(model, keep, delta=0.25, **more):
        return grow(model, keep, args.growth) if delta == 1 else prolong(model, keep, delta, **more)

    before, train.prolong = train.prolong, prolong_or_grow
    try:
        return train.main(flags)
    finally:
        train.prolong = before


if __name__ == "__main__":
    main()
