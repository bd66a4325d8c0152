"""Multilevel training of residual networks: coarse models in depth, what they fold back, and what a step costs.

*A multilevel approach to accelerate the training of Transformers* (arXiv 2504.18590). A stack of N residual blocks is N Euler
steps of an ODE; a coarse model takes fewer, longer steps by keeping some of the blocks. One cycle of training is

    for keep in coarse_sets(N):          # the even blocks, then the odd ones
        coarse = restrict(model, keep)   # a view: it shares the fine model's parameters
        ...train coarse for some steps with an optimizer of its own...
        prolong(model, keep)             # skipped blocks follow the trained ones

This file works on any nn.Module that keeps its residual blocks in an nn.ModuleList; copy it into your project.
"""

import copy
import random

import torch
import torch.nn as nn


def coarse_sets(n_layer, kind="alternate", stride=2, seed=0):
    """The blocks (counted from 0) that each coarse model keeps, in the order they run: a list of lists of int.

    alternate  the paper's: blocks 2, 4, ..., N, then blocks 1, 3, ..., N-1 (counted from 1; Eqs. 3 and 5)
    stride     `stride` sets of every stride-th block, the one with the last block first; stride 2 is `alternate`
    random     a random split into halves, blocks in depth order
    permuted   the even, then the odd positions of a random permutation, blocks in permuted order
    full       one set of all blocks: no coarsening, the control for the schedule
    Raises ValueError for an unknown kind, an odd n_layer that would have to be halved, or a stride that leaves a set empty.
    """
    if n_layer < 1:
        raise ValueError(f"n_layer = {n_layer} must be at least 1")
    layers = list(range(n_layer))
    if kind == "full":
        return [layers]
    if kind == "stride":
        if not 2 <= stride <= n_layer:
            raise ValueError(f"stride = {stride} is not between 2 and n_layer = {n_layer}")
        return [layers[first::stride] for first in reversed(range(stride))]
    if kind not in ("alternate", "random", "permuted"):
        raise ValueError(f"kind = {kind!r} is none of alternate, stride, random, permuted, full")
    if n_layer % 2:
        raise ValueError(f"n_layer = {n_layer} is odd: {kind} needs an even number of blocks to halve")
    if kind != "alternate":
        random.Random(seed).shuffle(layers)
    halves = [layers[1::2], layers[0::2]]
    return [sorted(half) for half in halves] if kind == "random" else halves


def find_blocks(model, keep, blocks):
    """The nn.ModuleList at the dotted path `blocks` of model. Raises ValueError unless keep is a valid choice from it."""
    found = model
    for name in blocks.split("."):
        found = getattr(found, "_modules", {}).get(name)
    if not isinstance(found, nn.ModuleList):
        raise ValueError(f"blocks = {blocks!r} is not an nn.ModuleList of this {type(model).__name__}")
    if not keep:
        raise ValueError(f"keep = {keep} is empty: a coarse model needs at least one block")
    for i in keep:
        if not 0 <= i < len(found):
            raise ValueError(f"keep holds block {i}, but there are only blocks 0 to {len(found) - 1}")
    if len(set(keep)) != len(keep):
        raise ValueError(f"keep = {keep} repeats a block")
    return found


def restrict(model, keep, blocks="blocks"):
    """Restriction (Eqs. 3 and 5): a coarse model that runs only the blocks in keep, in that order.

    It is a view. It shares every parameter with model, so restricting copies nothing, and a step of an optimizer over its
    parameters is a step of those blocks, the embedding and the head of model. Only the modules on the way to the list are
    copied, and those without their tensors, so model itself goes on running all of its blocks. What is registered on the view
    later (parameters, buffers, hooks) is registered on model too. Raises ValueError (find_blocks).
    """
    layers = find_blocks(model, keep, blocks)
    coarse = module = copy.copy(model)
    *path, last = blocks.split(".")
    for name in path:
        module._modules = {**module._modules, name: copy.copy(module._modules[name])}
        module = module._modules[name]
    module._modules = {**module._modules, last: nn.ModuleList(layers[i] for i in keep)}
    return coarse


@torch.no_grad()
def prolong(model, keep, delta=0.25, blocks="blocks"):
    """Prolongation (Eq. 4 and its mirror), in place: every skipped block moves towards the nearest kept block before it in depth,

        theta_skipped <- (1 - delta) theta_skipped + delta theta_kept.

    A skipped block with no kept block before it stays as it is, and so do buffers. The kept blocks are the view's own, so their half
    of the prolongation, theta_kept <- theta_coarse, is done. delta = 0 changes nothing, delta = 1 copies.
    Raises ValueError (find_blocks), for delta outside [0, 1], for blocks that differ in the names, shapes, types or devices of their
    parameters, and for a module that stands in several places; model is then unchanged.
    """
    layers = find_blocks(model, keep, blocks)
    if not 0 <= delta <= 1:
        raise ValueError(f"delta = {delta} is not between 0 and 1")
    if len({id(layer) for layer in layers}) < len(layers):
        raise ValueError(f"blocks = {blocks!r} holds a module more than once: it cannot be kept in one place and averaged in another")
    pairs = []
    for skipped in sorted(set(range(min(keep), len(layers))) - set(keep)):
        kept = max(i for i in keep if i < skipped)
        ours, theirs = dict(layers[skipped].named_parameters()), dict(layers[kept].named_parameters())
        if len({str([(n, p.shape, p.dtype, p.device) for n, p in sorted(block.items())]) for block in (ours, theirs)}) > 1:
            raise ValueError(f"blocks {kept} and {skipped} cannot be averaged: their parameters have different names, shapes or types")
        pairs += [(p, theirs[name]) for name, p in ours.items()]
    for p, q in pairs:
        p.lerp_(q, delta)


def flops_per_token(config, n_layer=None, head=True):
    """Forward FLOPs a token of a decoder that keeps n_layer blocks (default: all): 2 (12 n_layer d^2 + V d) + 4 n_layer T d.

    config: anything with n_layer, n_embd (d), vocab_size (V) and block_size (T), or a model that has such a .config. A view has
    that of the fine model: give n_layer = len(keep) for it.
    A multiply-add counts as 2; the terms are the blocks' matrices, the head's (left out with head=False), and attention's two
    products over the whole context. A training step counts as 3 forwards, one and two for the backward pass.
    """
    c = getattr(config, "config", config)
    n = c.n_layer if n_layer is None else n_layer
    return 2 * (12 * n * c.n_embd**2 + head * c.vocab_size * c.n_embd) + 4 * n * c.block_size * c.n_embd


def flops_to_reach(flops, losses, target):
    """The FLOPs at which a logged run first reached target, linear between two evaluations; None if it never did.

    flops, losses: equally long sequences of numbers in the order they were logged; flops do not decrease.
    """
    before = None
    for now in zip(flops, losses):
        if now[1] <= target:
            if before is None or now[1] == target or not before[1] < float("inf"):
                return now[0]
            return before[0] + (now[0] - before[0]) * (before[1] - target) / (before[1] - now[1])
        before = now
    return None
