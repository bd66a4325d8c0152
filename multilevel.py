"""Multilevel training of residual networks (arXiv 2504.18590): coarse models, prolongation, FLOPs.

N residual blocks are N Euler steps of an ODE; a coarse model takes fewer, longer ones. A cycle is

    for keep in coarse_sets(N):          # the even blocks, then the odd ones
        coarse = restrict(model, keep)   # a view: it shares the fine model's parameters
        ...train coarse for some steps with an optimizer of its own...
        prolong(model, keep)             # skipped blocks follow the trained ones

It works on any nn.Module with its residual blocks in an nn.ModuleList; copy it into your project.
"""

import copy
import random

import torch
import torch.nn as nn


def coarse_sets(n_layer, kind="alternate", stride=2, seed=0):
    """The blocks (counted from 0) that each coarse model keeps, in the order they run: int lists.

    alternate  the paper's: blocks 2, 4, ..., N, then 1, 3, ..., N-1 (counted from 1; Eqs. 3 and 5)
    stride     `stride` sets of every stride-th block, that with the last block first
    random     a random split into halves, blocks in depth order
    permuted   the even, then the odd positions of a random permutation, blocks in permuted order
    full       one set of all blocks: no coarsening, the control for the schedule
    Raises ValueError for an unknown kind, an odd n_layer to be halved, a stride beyond 2..n_layer.
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
        raise ValueError(f"n_layer = {n_layer} is odd: {kind} halves an even number of blocks")
    if kind != "alternate":
        random.Random(seed).shuffle(layers)
    halves = [layers[1::2], layers[0::2]]
    return [sorted(half) for half in halves] if kind == "random" else halves


def restrict(model, keep, blocks="blocks"):
    """Restriction (Eqs. 3 and 5): a coarse model that runs only the blocks in keep, in that order.

    keep: a list or range of int. The result is a view: its blocks, embedding and head are model's
    own, and so are gradients and hooks. Only the modules on the way to the list are copied, without
    their tensors, and their configs, in which each block keeps its own kind (keep_kinds). All else
    that goes by a block's place cannot be known and stays: other modules, parameters, dicts, rules
    such as i % 6, reads from other blocks, and its own number. That is its slot in a key-value
    cache: use none. Raises ValueError (find_blocks).
    """
    layers = find_blocks(model, keep, blocks)
    *path, last = blocks.split(".")
    way = [copy.copy(model)]
    for name in path:
        way[-1]._modules = {**way[-1]._modules, name: copy.copy(way[-1]._modules[name])}
        way.append(way[-1]._modules[name])
    way[-1]._modules = {**way[-1]._modules, last: nn.ModuleList(layers[i] for i in keep)}
    keep_kinds(way, keep, len(layers))
    return way[0]


@torch.no_grad()
def prolong(model, keep, delta=0.25, blocks="blocks"):
    """Prolongation (Eq. 4 and its mirror), in place, for each skipped block:

        theta_skipped <- (1 - delta) theta_skipped + delta theta_kept

    theta_kept: the nearest kept block before it. With none before it, a block stays as it is; so do
    buffers, and the kept blocks, which are the view's own. delta = 0 changes nothing, 1 copies.
    Blocks of two kinds are averaged if their parameters agree. Raises ValueError (find_blocks), for
    delta outside [0, 1], for parameters that differ in names, shapes, types or devices, and for a
    module in several places; model is then unchanged.
    """
    layers = find_blocks(model, keep, blocks)
    if not 0 <= delta <= 1:
        raise ValueError(f"delta = {delta} is not between 0 and 1")
    if len({id(layer) for layer in layers}) < len(layers):
        raise ValueError(f"blocks = {blocks!r} holds a module more than once")
    pairs = []
    for skipped in sorted(set(range(min(keep), len(layers))) - set(keep)):
        kept = max(i for i in keep if i < skipped)
        ours, theirs = (sorted(layers[i].named_parameters()) for i in (skipped, kept))
        if len({str([(n, p.shape, p.dtype, p.device) for n, p in b]) for b in (ours, theirs)}) > 1:
            raise ValueError(f"blocks {kept} and {skipped} cannot be averaged: "
                             "their parameters differ in names, shapes, types or devices")
        pairs += [(p, q) for (_, p), (_, q) in zip(ours, theirs)]
    for p, q in pairs:
        p.lerp_(q, delta)


def flops_per_token(config, n_layer=None, head=True):
    """Forward FLOPs a token of a decoder: 2 (12 n_layer d^2 + V d) + 4 n_layer T d.

    config: has n_layer (unless given), n_embd (d), vocab_size (V) and block_size (T), or is a model
    or view with such a .config. A multiply-add counts as 2; the terms are the blocks' matrices, the
    head's (unless head=False) and attention's two products. A training step counts as 3 forwards.
    """
    c = getattr(config, "config", config)
    n, d = c.n_layer if n_layer is None else n_layer, c.n_embd
    return 2 * (12 * n * d**2 + head * c.vocab_size * d) + 4 * n * c.block_size * d


def flops_to_reach(flops, losses, target):
    """The FLOPs at which a logged run first reached target, linear in between; or None.

    flops, losses: equally long sequences, in the order they were logged; flops do not decrease."""
    before = None
    for now in zip(flops, losses):
        if now[1] <= target:
            if before is None or now[1] == target or not before[1] < float("inf"):
                return now[0]
            return before[0] + (now[0] - before[0]) * (before[1] - target) / (before[1] - now[1])
        before = now
    return None


# What restrict and prolong call: other people's models --------------------------------------------

def find_blocks(model, keep, blocks):
    """The nn.ModuleList at the dotted path `blocks`; ValueError unless keep is a choice from it."""
    lists = {name: module for name, module in model.named_modules(remove_duplicate=False)
             if name and isinstance(module, nn.ModuleList)}
    if blocks not in lists:
        raise ValueError(f"blocks = {blocks!r} is not an nn.ModuleList of this "
                         f"{type(model).__name__}, which has: {', '.join(lists) or 'none'}")
    n_layer = len(lists[blocks])
    if not keep or len(set(keep)) < len(keep) or not set(keep) <= set(range(n_layer)):
        raise ValueError(f"keep = {keep} is not one or more different blocks of 0 to {n_layer - 1}")
    return lists[blocks]


def keep_kinds(way, keep, n_layer):
    """Cuts what the modules of a view, and their configs (copied first), say of blocks by place: a
    list or tuple as long as there are blocks (such as layer_types, a kind for each) keeps keep's,
    n_layer, n_layers, num_layers and num_hidden_layers become len(keep), and use_cache False."""
    configs = {id(value): copy.copy(value) for module in way for name, value in vars(module).items()
               if name.endswith("config") and isinstance(getattr(value, "__dict__", None), dict)}
    for values in map(vars, [*way, *configs.values()]):
        for name, value in values.items():
            if id(value) in configs:  # one config may stand in several modules, or in another one
                values[name] = configs[id(value)]
            elif type(value) in (list, tuple) and len(value) == n_layer:
                values[name] = type(value)(value[i] for i in keep)
            elif name in ("n_layer", "n_layers", "num_layers", "num_hidden_layers"):
                values[name] = len(keep) if value == n_layer else value
            elif name == "use_cache":
                values[name] = False
