# mypy: ignore-errors
# as people write them
"""Models that do something beside returning numbers, each by the name of what it does: see ``observed.py``."""

from __future__ import annotations

import copy
import functools
import random

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

SEEN: list[Tensor] = []
COUNTS = {"calls": 0}


class Bounded(torch.autograd.Function):
    """The identity, whose gradient is bounded."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, grad):
        return grad.clamp(-1.0, 1.0)


class Swish(torch.autograd.Function):
    """``x * sigmoid(x)``, with the derivative of that."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(context, grad):
        (x,) = context.saved_tensors
        gate = torch.sigmoid(x)
        return grad * gate * (1 + x * (1 - gate))


class Again(torch.autograd.Function):
    """A checkpoint of one's own, as diffusion models have it: the backward runs the forward again."""

    @staticmethod
    def forward(context, run, h, *parameters):
        context.run, context.h, context.parameters = run, h, parameters
        with torch.no_grad():
            return run(h)

    @staticmethod
    def backward(context, grad):
        h = context.h.detach().requires_grad_()
        with torch.enable_grad():
            y = context.run(h.view_as(h))
        return (None, *torch.autograd.grad(y, (h, *context.parameters), grad))


@functools.cache
def scale(width):
    """Return a number that is computed once."""
    return 1 / width


@functools.lru_cache(maxsize=4)
def waves(width):
    """Return a table that is computed once for all models."""
    return torch.linspace(0, 3, width).sin()


ramp: Tensor | None = None


class Table:
    """A table for all who use it, made at its first use."""

    shared: Tensor | None = None

    def __init__(self):
        self.own = None

    @classmethod
    def of_all(cls, width):
        if cls.shared is None:
            cls.shared = torch.linspace(1, 2, width)
        return cls.shared

    def of_one(self, width):
        if self.own is None or len(self.own) < width:
            self.own = torch.linspace(2, 3, width)
        return self.own[:width]


def keeping():
    """Return a function that keeps its table."""
    kept = None

    def table(width):
        nonlocal kept
        if kept is None:
            kept = torch.linspace(3, 4, width)
        return kept

    return table


TABLE, kept_table = Table(), keeping()


class Net(nn.Module):
    """Two layers; ``mid`` is what one kind of model does between them."""

    def __init__(self, kind: str, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 5)
        self.kind, self.width, self.calls = kind, width, 0
        self.log: list[Tensor] = []
        self.cache: dict[int, Tensor] = {}
        if (make := getattr(self, f"make_{kind}", None)) is not None:
            make()

    def forward(self, x):
        return self.last(getattr(self, self.kind, lambda h: h)(torch.tanh(self.first(x))))

    # ---- hooks

    def make_parameter_hook(self):
        self.first.weight.register_hook(lambda grad: grad.clamp(-3.0, 3.0))

    def make_accumulated_hook(self):
        self.first.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-3.0, 3.0))

    def make_backward_hook(self):
        self.last.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.1,))

    def make_forward_hook(self):
        self.first.register_forward_hook(lambda module, inputs, output: output * 2.0)

    def tensor_hook(self, h):
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-3.0, 3.0))
        return h

    def own_backward(self, h):
        return Bounded.apply(h)

    def right_backward(self, h):
        return Swish.apply(h)

    def make_checkpointed(self):
        self.inner = nn.Linear(self.width, self.width)

    def checkpointed(self, h):
        return Again.apply(lambda x: torch.relu(self.inner(x)), h, *self.inner.parameters())

    # ---- parameters

    def make_momentum(self):
        self.slow = nn.Linear(self.width, self.width).requires_grad_(False)
        self.fast = nn.Linear(self.width, self.width)

    def momentum(self, h):
        with torch.no_grad():
            for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.fast(h) + self.slow(h)

    make_momentum_data = make_momentum

    def momentum_data(self, h):
        for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.fast(h) + self.slow(h)

    def make_normalized(self):
        weight = torch.randn(self.width, self.width)
        self.weight = nn.Parameter(weight / weight.norm(dim=1, keepdim=True))

    def normalized(self, h):
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return F.linear(h, self.weight)

    make_renormed = make_normalized

    def renormed(self, h):
        return F.linear(h, self.weight / self.weight.norm(dim=1, keepdim=True))

    def make_clamped(self):
        self.weight, self.least = nn.Parameter(torch.randn(self.width, self.width)), nn.Parameter(torch.rand(1))

    def clamped(self, h):
        if self.training:
            self.weight.data.clamp_(-0.5, 0.5)
            with torch.no_grad():
                self.least.clip_(min=0.25)
        return F.linear(h, self.weight) / self.least

    make_clamped_late = make_clamped_part = make_clamped_twice = make_clamped_added = make_clamped
    make_clamped_again = make_clamped_at_first = make_clamped_by_tensors = make_clamped_between = make_clamped

    def clamped_again(self, h):
        for _ in range(2):
            self.weight.data.clamp_(-0.5, 0.5)
            h = F.linear(h, self.weight)
        return h / self.least

    def clamped_added(self, h):
        h = h + 0
        h += self.weight[0]
        self.weight.data.clamp_(-0.5, 0.5)
        return F.linear(h, self.weight) / self.least

    def clamped_by_tensors(self, h):
        h = F.linear(h, self.weight)
        self.weight.data.clamp_(torch.full((), -9.0), torch.full((), 9.0))
        return h / self.least

    def clamped_at_first(self, h):
        if not hasattr(self, "done"):
            self.weight.data.clamp_(-9, 9)
        self.done = True
        return F.linear(h, self.weight) / self.least

    def clamped_late(self, h):
        h = F.linear(h, self.weight)
        self.weight.data.clamp_(-0.5, 0.5)
        return h / self.least

    def clamped_part(self, h):
        self.weight.data[:2].clamp_(-0.5, 0.5)
        return F.linear(h, self.weight) / self.least

    def clamped_twice(self, h):
        self.weight.data.clamp_min_(-0.5)
        for most in (0.5, 0.25):
            self.weight.data.clamp_(max=most)
        return F.linear(h, self.weight) / self.least

    def clamped_between(self, h):
        for most in (0.5, 0.25):
            self.weight.data.clamp_(max=most)
            h = F.linear(h, self.weight)
        return h / self.least

    def make_clamped_by_turns(self):
        self.make_clamped()
        self.turns = iter([True, False])

    def clamped_by_turns(self, h):
        if next(self.turns, True):
            self.weight.data.clamp_(-0.5, 0.5)
        return F.linear(h, self.weight) / self.least

    def make_momentum_buffer(self):
        self.fast = nn.Linear(self.width, self.width)
        self.register_buffer("moved", self.fast.weight.detach().clone())

    def momentum_buffer(self, h):
        with torch.no_grad():
            self.moved.mul_(0.9).add_(self.fast.weight, alpha=0.1)
        return self.fast(h) + F.linear(h, self.moved)

    def make_one_memory(self):
        self.other = nn.Linear(self.width, 6)
        self.other.weight.data = self.first.weight.data.view(6, self.width)

    def one_memory(self, h):
        return self.first(self.other(h))

    def make_two_halves(self):
        whole = torch.randn(2, self.width)
        self.low, self.high = nn.Parameter(whole[0]), nn.Parameter(whole[1])

    def two_halves(self, h):
        return h * self.low + self.high

    def make_tied(self):
        self.other = nn.Linear(6, self.width)
        self.other.weight = self.first.weight

    def tied(self, h):
        return h + self.other(h[:, :6])

    def make_pruned(self):
        prune.l1_unstructured(self.first, "weight", 0.5)

    def make_spectral(self):
        self.last = parametrizations.spectral_norm(self.last)

    def make_data_buffer(self):
        self.register_buffer("average", torch.zeros(self.width))

    def data_buffer(self, h):
        self.average.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.average

    make_data_assigned = make_data_buffer

    def data_assigned(self, h):
        self.average.data = 0.9 * self.average.data + 0.1 * h.detach().mean(0)
        return h - self.average

    def make_spectral_hook(self):
        self.last = nn.utils.spectral_norm(self.last)

    def make_copied(self):
        norm = nn.BatchNorm1d(self.width)
        self.norms = nn.Sequential(norm, copy.deepcopy(norm))

    def copied(self, h):
        return self.norms(h)

    # ---- random numbers

    def gumbel(self, h):
        return F.gumbel_softmax(h, hard=True)

    def log_normal(self, h):
        return h + 0.1 * torch.empty_like(h).log_normal_()

    def layer_drop(self, h):
        return h if random.random() < 1e-4 else torch.relu(h)

    def layer_drop_numpy(self, h):
        return h if numpy.random.uniform() < 1e-4 else torch.relu(h)

    def layer_drop_off(self, h):
        return h if random.uniform(0, 1) < 0.0 else torch.relu(h)

    def seeded(self, h):
        torch.manual_seed(0)
        return h + torch.rand(h.shape)

    def generator(self, h):
        return h + torch.rand(h.shape, generator=torch.Generator().manual_seed(3))

    # ---- state in Python

    def first_of_log(self, h):
        self.log.append(h.detach().mean(0))
        return h - self.log[0]

    def first_of_global(self, h):
        SEEN.append(h.detach().mean(0))
        return h - SEEN[0]

    def make_tables(self):
        self.register_buffer("waves", waves(self.width), persistent=False)

    def tables(self, h):
        global ramp
        if ramp is None:
            ramp = torch.linspace(0, 1, self.width)
        shared = Table.of_all(self.width) + TABLE.of_one(self.width) + kept_table(self.width)
        return h * (self.waves + ramp + shared + waves(self.width + 1)[1:])

    def only_logs(self, h):
        self.log.append(h.detach().mean())
        return h

    def counter(self, h):
        self.calls += 1
        return h

    def counter_read(self, h):
        self.calls += 1
        return h * self.calls

    def counter_ramp(self, h):
        self.calls += 1
        return h * (1 + 1e-7 * self.calls)

    def make_own_random(self):
        self.random = random.Random(1)

    def own_random(self, h):
        return h * 0 if self.random.random() < 0.001 else h

    def global_counter(self, h):
        COUNTS["calls"] += 1
        return h

    def memoised(self, h):
        if self.width not in self.cache:
            self.cache[self.width] = torch.arange(self.width) * scale(self.width)
        return h * self.cache[self.width]

    def side_loss(self, h):
        self.aux = h.square().mean()
        return h

    def tracing(self, h):
        return h if torch.compiler.is_compiling() else torch.relu(h)

    # ---- what backward reads

    def packed(self, h):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.to(torch.float8_e5m2), lambda x: x.float()):
            return h.tanh().square()

    def moved_away(self, h):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            return h.tanh().square()

    # ---- training

    def make_frozen_tower(self):
        width = self.width
        self.tower = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5))
        self.tower.requires_grad_(False).eval()

    def frozen_tower(self, h):
        return self.tower(h)

    def make_all_eval(self):
        self.drop = nn.Dropout(0.5)
        self.eval()

    def all_eval(self, h):
        return self.drop(h)


def squares(output, y):
    """Return the mean square of the differences."""
    return F.mse_loss(output, y)
