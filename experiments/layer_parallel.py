"""Layer-parallel training (arXiv 2601.09026): the blocks of model.GPT are time steps, which MGRIT
propagates over several processes.

`multilevel.py` trains coarse models, to spend less work. Here the coarse level only predicts
states: more work in all, but most of it at once. A block is a step of size h = 1,
x_{n+1} = x_n + F(x_n, theta_n). Every c-th state is a C-point, those between are F-points, and the
c layers from one C-point to the next are an interval, the unit that processes share out:

    fine propagator    Phi_j   the c layers of interval j, one after the other
    coarse propagator  Psi_j   x + c F(x, theta of the interval's first layer): one step of size c

MGRIT iterates between the two. The backward pass is the same recursion from the other end, along
the stored states: lambda_n = lambda_{n+1} + (dF/dx)^T lambda_{n+1}. The gradient of a layer's
parameters follows from its x_n and lambda_{n+1}. So, instead of model(idx, targets)[1].backward(),

    engine = LayerParallel(model, coarsen=4, rank=dist.get_rank(), world=dist.get_world_size())
    loss, squares = engine.step(idx, targets, iterations=(1, 1))

puts into .grad what serial backpropagation would, but for an error that shrinks with the
iterations; `train_layer_parallel.py` trains with it. Of the paper we have the abstract only. Where
it leaves something open we take the simplest: two levels, the coarse propagator above, one tape of
the fine layers for all of the adjoint.
"""

import math
import time
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn as nn


# Messages -----------------------------------------------------------------------------------------

class Messages:
    """Point-to-point messages over torch.distributed, and this rank's clock: the layer evaluations
    it has done."""

    def __init__(self):
        self.clock, self.sent = 0, []

    def spend(self, evaluations):
        self.clock += evaluations

    def send(self, x, to):  # not waited for: a rank goes on while its neighbour is still busy
        x = x.contiguous()
        self.sent.append((dist.isend(x, to), x))

    def receive(self, like, source):
        x = torch.empty_like(like)
        dist.recv(x, source)
        return x

    def finish(self):
        while self.sent:
            self.sent.pop(0)[0].wait()


class Threads(Messages):
    """The same between threads of one process, of which one runs at a time: the others wait for a
    message, or for `turn`, a lock. A message carries its sender's clock, so clocks run as those of
    real ranks would; with timed=True they show seconds, those that a thread itself computed for."""

    def __init__(self, rank, queues, turn, timed=False):
        super().__init__()
        self.rank, self.queues, self.turn, self.timed = rank, queues, turn, timed

    def take_turns(self, work):
        with self.turn:
            self.mark = time.thread_time()
            work()
            self.spend(0)
        return self.clock

    def spend(self, evaluations):
        before, self.mark = self.mark, time.thread_time()
        self.clock += self.mark - before if self.timed else evaluations

    def send(self, x, to):
        self.spend(0)
        self.queues[self.rank, to].put((x, self.clock))

    def receive(self, like, source):
        self.spend(0)
        self.turn.release()
        x, sent_at = self.queues[source, self.rank].get(timeout=600)
        self.turn.acquire()
        self.mark, self.clock = time.thread_time(), max(self.clock, sent_at)
        return x


# MGRIT --------------------------------------------------------------------------------------------

class Way(NamedTuple):
    """A direction of propagation through this rank's slab."""
    order: range            # its intervals, counted from 0
    before: Optional[int]   # the rank that its first value comes from; None: it is the initial one
    after: Optional[int]    # the rank that its last value goes to; None: nobody


class LayerParallel:
    """This rank's slab of a model.GPT: a contiguous run of intervals, on the first rank also the
    embedding and the opening buffer layers, on the last one the closing ones and the head. `mine`
    (nn.ModuleList) holds them; other blocks are never touched.

    model: the same weights on every rank. opening, closing: buffer layers. relax: "F" or "FCF".
    Raises ValueError for layers, intervals and ranks that do not fit together.
    """

    def __init__(self, model, coarsen=4, opening=0, closing=0, relax="F", rank=0, world=1,
                 messages=None):
        layers, c = list(model.blocks), coarsen
        inner = len(layers) - opening - closing
        if c < 2:
            raise ValueError(f"coarsen = {c} must be at least 2")
        if min(opening, closing) < 0 or inner < c or inner % c:
            raise ValueError(f"{len(layers)} layers less {opening} opening and {closing} closing "
                             f"ones leave {inner}, not a positive multiple of coarsen = {c}")
        if world > inner // c:
            raise ValueError(f"{world} ranks are more than the {inner // c} intervals of {c} "
                             "layers")
        if relax not in ("F", "FCF"):
            raise ValueError(f"relax = {relax!r} is neither F nor FCF")
        self.model, self.c, self.relax, self.rank, self.world = model, c, relax, rank, world
        self.exact_after = -(-inner // c // (1 if relax == "F" else 2))  # iterations, then serial's
        mine = range(inner // c * rank // world, inner // c * (rank + 1) // world)
        self.intervals = [layers[opening + j * c:opening + (j + 1) * c] for j in mine]
        self.first, self.last = rank == 0, rank == world - 1
        self.opening = layers[:opening] if self.first else []
        self.closing = layers[len(layers) - closing:] if self.last else []
        self.mine = nn.ModuleList([
            *([model.wte, model.wpe] if self.first else []), *self.opening,
            *sum(self.intervals, []), *self.closing, *([model.head] if self.last else [])])
        n = len(mine)
        left, right = None if self.first else rank - 1, None if self.last else rank + 1
        self.forward_way = Way(range(n), left, right)
        self.adjoint_way = Way(range(n)[::-1], right, left)
        self.messages = messages or Messages()
        self.tape = [None] * n  # (input, output) of each layer of an interval, with their graph

    # The iteration, for both directions: fine(j, x) and coarse(j, x) propagate through interval j.

    def coarse_solve(self, way, start, coarse, tau=None):
        """C_{j+1} = Psi_j(C_j) + tau_{j+1}, one interval and one rank after the other: the serial
        part of MGRIT. With the fine propagator for the coarse one and no tau: serial propagation.

        Returns the values at the C-points of the slab, one more than it has intervals."""
        C = [start if way.before is None else self.messages.receive(self.like, way.before)]
        for i, j in enumerate(way.order):
            C.append(coarse(j, C[i]) if tau is None else coarse(j, C[i]) + tau[i])
        if way.after is not None:
            self.messages.send(C[-1], way.after)
        return C

    def f_relax(self, way, C, fine):
        """From each C-point through the F-points to the end of its interval, all intervals at once:
        the list of Phi_j(C_j)."""
        return [fine(j, x) for j, x in zip(way.order, C)]

    def c_relax(self, way, C, ends):
        """Each C-point becomes the end of the interval before it."""
        if way.after is not None:
            self.messages.send(ends[-1], way.after)
        first = C[0] if way.before is None else self.messages.receive(self.like, way.before)
        return [first] + ends

    def fas_residual(self, way, C, ends, coarse):
        """The right-hand side of the coarse equation in the full approximation scheme: its operator
        on the current C-points, C_{j+1} - Psi_j(C_j), plus the fine equation's residual,
        Phi_j(C_j) - C_{j+1}: what is left is Phi_j(C_j) - Psi_j(C_j)."""
        return [end - coarse(j, x) for j, x, end in zip(way.order, C, ends)]

    def mgrit(self, way, start, fine, coarse, last, iterations):
        """So many two-level iterations, from the solution of the coarse equation (nested
        iteration), and then an F-relaxation by `last`, a fine propagator that also keeps what is
        needed later. iterations = None propagates serially, by `last` alone.

        Returns the C-points, and sums of squares over the slab: of the residual Phi_j(C_j) -
        C_{j+1} after 0, 1, ..., iterations iterations, then of the C-points (None if serial). After
        k iterations the C-points 0 to k are exact, with FCF-relaxation those from 0 to 2k, and with
        them the F-points behind each.
        """
        if iterations is None:
            return self.coarse_solve(way, start, last), None
        C, squares = self.coarse_solve(way, start, coarse), []
        for _ in range(iterations):
            ends = self.f_relax(way, C, fine)
            squares.append(squared(ends, C[1:]))
            if self.relax == "FCF":
                C = self.c_relax(way, C, ends)
                ends = self.f_relax(way, C, fine)
            C = self.coarse_solve(way, start, coarse, self.fas_residual(way, C, ends, coarse))
        squares.append(squared(self.f_relax(way, C, last), C[1:]))
        return C, torch.stack([*squares, squared(C[1:])])

    # Forward: x is (B, T, d)

    def fine(self, j, x):
        for block in self.intervals[j]:
            x = block(x)
        self.messages.spend(self.c)
        return x

    def coarse(self, j, x):
        self.messages.spend(1)
        return x + self.c * (self.intervals[j][0](x) - x)

    def record(self, j, x):
        """`fine` that keeps each layer's graph, cut from the next layer's: for the adjoint."""
        self.tape[j] = []
        for block in self.intervals[j]:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = block(x)
            self.tape[j].append((x, y))
            x = y
        self.messages.spend(self.c)
        return x.detach()

    # Adjoint: v stands for lambda, (B, T, d)

    def adjoint_fine(self, j, v):
        for x, y in reversed(self.tape[j]):
            v, = torch.autograd.grad(y, x, v, retain_graph=True)
        self.messages.spend(self.c)
        return v

    def adjoint_coarse(self, j, v):
        """The coarse propagator's transposed derivative at the stored C-point: the tape's first
        entry is that layer, there."""
        x, y = self.tape[j][0]
        self.messages.spend(1)
        return v + self.c * (torch.autograd.grad(y, x, v, retain_graph=True)[0] - v)

    def backward(self, j, v):
        """`adjoint_fine` that also adds the parameters' gradients to .grad: twice the work."""
        for x, y in reversed(self.tape[j]):
            y.backward(v)
            v = x.grad
        self.messages.spend(2 * self.c)
        self.tape[j] = None
        return v

    # The two ends, differentiated as usual

    def begin(self, idx):
        """On the first rank: the state at the first C-point."""
        d = self.model.wte.embedding_dim
        self.like = next(self.mine.parameters()).new_empty(*idx.shape, d)
        if not self.first:
            return None
        x = self.model.wte(idx) + self.model.wpe.weight[:idx.shape[1]]
        for block in self.opening:
            x = block(x)
        self.messages.spend(len(self.opening))
        return x

    def end(self, x, targets):
        """On the last rank: the mean loss, from the state at the last C-point."""
        for block in self.closing:
            x = block(x)
        self.messages.spend(len(self.closing))
        return self.model.head(x, targets)

    @torch.no_grad()
    def loss(self, idx, targets):
        """The mean loss on the last rank, 0 on the others; serially, for it is the network itself
        that is trained."""
        C = self.coarse_solve(self.forward_way, self.begin(idx), self.fine)
        loss = self.end(C[-1], targets) if self.last else self.like.new_zeros(())
        self.messages.finish()
        return loss

    def step(self, idx, targets, iterations=(1, 1)):
        """Forward, backward: puts the gradients of this rank's parameters into their .grad, which
        must be empty before.

        idx, targets: int64 (B, T), the same on every rank. iterations: (forward, adjoint), or None
        for serial propagation. Returns the mean loss (on the last rank, 0 on the others) and the
        pair of mgrit's sums of squares.
        """
        forward, adjoint = iterations or (None, None)
        opened = self.begin(idx)
        start = opened.detach() if self.first else None
        with torch.no_grad():
            C, squares = self.mgrit(self.forward_way, start, self.fine, self.coarse, self.record,
                                    forward)
        loss = self.like.new_zeros(())
        if self.last:
            x = C[-1].detach().requires_grad_()
            loss = self.end(x, targets)
            loss.backward()
            start = x.grad
            self.messages.spend(2 * len(self.closing))
        with torch.no_grad():
            C, adjoint_squares = self.mgrit(self.adjoint_way, start, self.adjoint_fine,
                                            self.adjoint_coarse, self.backward, adjoint)
        if self.first:
            opened.backward(C[-1])
            self.messages.spend(2 * len(self.opening))
        if self.first != self.last:  # the embedding is the head's weight: each end adds the other's
            tied, other = self.model.wte.weight, self.world - 1 if self.first else 0
            self.messages.send(tied.grad, other)
            tied.grad = tied.grad + self.messages.receive(tied.grad, other)
        self.messages.finish()
        return loss.detach(), (squares, adjoint_squares)


def squared(xs, ys=None):
    return sum((x if ys is None else x - y).square().sum() for x, y in zip(xs, ys or xs))


def convergence_factor(squares, k):
    """The mean factor by which iterations k+1 to 2k reduced the residual, from mgrit's sums of
    squares added over the ranks. 0 where 2k iterations leave nothing but rounding, which says no
    more of how fast they went."""
    before, after = math.sqrt(squares[k]), math.sqrt(squares[2 * k])
    if after <= 10 * torch.finfo(squares.dtype).eps * math.sqrt(squares[-1]):
        return 0.0
    return (after / before) ** (1 / k)


def relative_residual(squares, k):
    """The residual after k iterations relative to the C-points, from the same sums: what a training
    step with k iterations knows for nothing."""
    return math.sqrt(squares[k] / squares[-1])
