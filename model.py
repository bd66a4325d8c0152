"""The decoder that is trained: a pre-norm GPT with learned positions, a tied head, no biases and
norms without parameters.

It knows nothing of levels. A block is one Euler step x <- x + F(x, theta) of an ordinary
differential equation in depth (arXiv 2504.18590, Eqs. 1 and 2), which is what lets `multilevel.py`
run the same blocks with a coarser discretization.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    """The sizes of a decoder; the defaults are the paper's 22,368,512 parameters. Raises ValueError
    for sizes that cannot be."""
    vocab_size: int = 50257  # V, GPT-2's tokens
    block_size: int = 256    # T, the longest context
    n_layer: int = 12        # N, the number of blocks (time steps of the ODE)
    n_head: int = 8
    n_embd: int = 256        # d, the width

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd = {self.n_embd} is not divisible by n_head = {self.n_head}")


def norm(x):
    return F.layer_norm(x, x.shape[-1:])  # no gain, no bias


def attend(q, k, v):
    """Causal attention; q, k, v and the result are (B, n_head, T, head width).

    On the CPU in bfloat16 PyTorch's fused kernel is slower than the product written out as long as
    the (T, T) scores fit in the caches, so there it is written out.
    """
    T = q.shape[-2]
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and T <= 512:
        future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        return scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """x + F(x, theta) with F = pre-norm attention, then a pre-norm MLP: (B, T, d) -> (B, T, d)."""

    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.n_head = config.n_head
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.mlp_in = nn.Linear(d, 4 * d, bias=False)
        self.mlp_out = nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = (z.view(B, T, self.n_head, -1).transpose(1, 2)
                   for z in self.qkv(norm(x)).chunk(3, dim=-1))
        x = x + self.attn_out(attend(q, k, v).transpose(1, 2).reshape(B, T, d))
        return x + self.mlp_out(F.gelu(self.mlp_in(norm(x))))


class Head(nn.Module):
    """Final norm, then logits (B, T, V), or with targets (B, T) their mean cross-entropy in nats.
    Its weight is the embedding's.

    With targets the logits, by far the largest tensor of a step, get no name: what the backward
    pass needs is all that stays. `F.linear_cross_entropy` would keep even less, but takes several
    times as long on a CPU (PyTorch 2.13) and rounds the loss of bfloat16 inputs to bfloat16; a
    smaller `--micro_batch` saves the same.
    """

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x, targets=None):
        x = norm(x)
        if targets is None:
            return F.linear(x, self.weight)
        return F.cross_entropy(F.linear(x, self.weight).flatten(0, -2).float(), targets.flatten())


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = Head(self.wte.weight)
        for name, p in self.named_parameters():  # GPT-2's: branches that add to the stream: smaller
            branches = 2 * config.n_layer if name.endswith("_out.weight") else 1
            nn.init.normal_(p, std=0.02 / math.sqrt(branches))

    def forward(self, idx, targets=None):
        """idx: int64 (B, T), T <= block_size. Returns (logits (B, T, V), None), or with targets
        (B, T) (None, mean loss in nats)."""
        T = idx.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size = "
                             f"{self.config.block_size}")
        x = self.wte(idx) + self.wpe.weight[:T]
        for block in self.blocks:
            x = block(x)
        return (self.head(x), None) if targets is None else (None, self.head(x, targets))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Appends max_new_tokens sampled tokens to idx: int64 (B, T) -> (B, T + max_new_tokens).
        Temperature 0 takes the likeliest, top_k (0: all) samples from so many likeliest."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:])[0][:, -1].float()
            if temperature < 1e-6:  # 0, or so little that dividing by it overflows
                new = logits.argmax(-1, keepdim=True)
            else:
                if top_k:
                    least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits[logits < least] = float("-inf")
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), num_samples=1)
            idx = torch.cat((idx, new), dim=1)
        return idx
