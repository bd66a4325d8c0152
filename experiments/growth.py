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

--via K --via_steps S grows in two stages, from k blocks to K to N: of the start's steps the last S
are on the view of K blocks, each group of which the first growth has filled with copies.
--rewarm S warms the rate up once more, over the first S fine steps.
These four are in config.json too: a run resumes with the same ones, by growth.py.
"""

import argparse
import gc
import os
import sys
from dataclasses import asdict, dataclass

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train  # noqa: E402
from multilevel import prolong, restrict  # noqa: E402

GROWTHS = ("copy", "divide", "zero", "init", "carry")


@dataclass
class GrowthSettings(train.Settings):
    growth: str = "copy"
    via: int = 0
    via_steps: int = 0
    rewarm: int = 0


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


def staged(s, via, via_steps, plan, sets_of):
    """train.py's plan and sets_of with a stage of via blocks in the start's last via_steps."""
    if not s.start_layers < via < s.n_layer or via % s.start_layers or s.n_layer % via or s.cycles:
        sys.exit(f"error: --via {via} wants a multiple of --start_layers {s.start_layers} that "
                 f"divides --n_layer {s.n_layer}, and no --cycles")
    at = s.start_steps - via_steps
    if not 0 < at < s.start_steps:
        sys.exit(f"error: --via_steps {via_steps} must be some of --start_steps {s.start_steps}")

    def plan_by_stages(s, config):
        first = plan(s, config)
        first[at - 1] = first[at - 1]._replace(last=True)  # so that it is followed by a growth
        return [u._replace(level=2) if at <= j < s.start_steps else u for j, u in enumerate(first)]

    return plan_by_stages, lambda s: [*sets_of(s), list(range(0, s.n_layer, s.n_layer // via))]


def rewarmed(steps, plan):
    """train.py's plan with a second, linear warm-up over so many fine steps."""
    return lambda s, config: [u if u.level or u.step >= steps else
                              u._replace(lr=u.lr * (u.step + 1) / steps) for u in plan(s, config)]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", choices=GROWTHS, required=True)
    parser.add_argument("--via", type=int, default=0)
    parser.add_argument("--via_steps", type=int, default=0)
    parser.add_argument("--rewarm", type=int, default=0)
    args, flags = parser.parse_known_args(argv)
    flags = [flag for flag in flags if flag != "--"]
    s, _ = train.parse_settings(flags)
    if s.mode != "nested" or s.cycles and s.delta == 1:  # a cycle would look like the growth
        sys.exit("error: --growth wants --mode nested, and with --cycles a --delta below 1")
    if args.rewarm < 0 or args.via_steps and not args.via:
        sys.exit("error: --rewarm must be at least 0, and --via_steps wants a --via")

    def prolong_or_grow(model, keep, delta=0.25, **more):
        return grow(model, keep, args.growth) if delta == 1 else prolong(model, keep, delta, **more)

    def recorded_with_growth(s, given):
        return recorded(GrowthSettings(**asdict(s), **vars(args)), given | set(vars(args)))

    before = train.prolong, train.plan, train.sets_of, train.recorded
    plan, sets_of, recorded = before[1:]
    if args.via:
        plan, sets_of = staged(s, args.via, args.via_steps, plan, sets_of)
    if args.rewarm:
        plan = rewarmed(args.rewarm, plan)
    train.prolong, train.plan, train.sets_of = prolong_or_grow, plan, sets_of
    train.recorded = recorded_with_growth
    try:
        return train.main(flags)
    finally:
        train.prolong, train.plan, train.sets_of, train.recorded = before


if __name__ == "__main__":
    main()
