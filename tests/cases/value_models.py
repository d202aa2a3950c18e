"""Small models whose code asks for the numbers of constants, draws in ways of its own, or loops over experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Between(nn.Module):
    """Two layers, with what ``kind`` names between them. ``[b, 16]`` to ``[b, 4]``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        make, self._compute = KINDS[kind]
        make(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self._compute(self, torch.tanh(self.a(x))))


def _flags(m: Any) -> None:
    m.register_buffer("begun", torch.tensor(True))
    m.register_buffer("scale", torch.linspace(1, 2, WIDTH))


def _flag(m: Any, h: Tensor) -> Tensor:
    if not m.begun:
        m.scale.data.copy_(h.std(0))
        m.begun.data.copy_(torch.tensor(True))
    return h * m.scale


def _unset(m: Any) -> None:
    _flags(m)
    m.begun.fill_(False)


def _checks(m: Any, h: Tensor) -> Tensor:
    assert not torch.isnan(h).any() and (h.abs() <= 1).all(), f"{h.shape}"
    if torch.isnan(h).any() or (h > 9).all():
        raise ValueError("too large")
    if not bool(torch.isfinite(h).all()):
        raise ValueError("infinite")
    return h


def _checked_numbers(m: Any, h: Tensor) -> Tensor:
    assert h.max().item() <= h.size(1) + 1, "too large"
    assert -h.size(1) < h.min().item()
    if h.abs().max().item() > m.a.weight.shape[0]:
        raise ValueError("too large")
    return h


def _compared_number(m: Any, h: Tensor) -> Tensor:
    return h * 2 if h.max().item() > 0.5 else h


def _branch(m: Any, h: Tensor) -> Tensor:
    return h * 2 if h.sum() > 0 else h


def _mask(m: Any) -> None:
    m.register_buffer("keep", torch.arange(WIDTH) % 3 == 0)
    m.c = nn.Linear(6, WIDTH)


def _rows(m: Any) -> None:
    m.w, m.rows = nn.Parameter(torch.randn(WIDTH // 2, WIDTH)), torch.arange(WIDTH) % 2 == 0


def _put(m: Any, h: Tensor) -> Tensor:
    full = m.w.new_zeros(len(m.rows), h.shape[1])
    full[m.rows] = m.w
    return F.linear(h, full)


def _frequencies(m: Any) -> None:
    inverse = 1.0 / 500 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    scaled = [f / 8 if 6.28 / f > 50 else f for f in inverse]
    m.register_buffer("freqs", torch.tensor(scaled, dtype=inverse.dtype).repeat(2))


def _lengths(m: Any) -> None:
    m.register_buffer("lengths", torch.tensor([3, 5, 8]))


def _written(m: Any, h: Tensor) -> Tensor:
    grid = torch.zeros(4, 4)
    grid[0, 1] = 3
    before = grid.clone()
    grid.fill_diagonal_(1)
    if int(before.sum()) != 3 or int(grid.sum()) != 7:
        raise ValueError(int(grid.sum()))
    return torch.cat(h.split(m.lengths.tolist(), 1)[::-1], 1) * int(torch.arange(4).max())


def _cell(m: Any) -> None:
    m.cell = nn.LSTMCell(WIDTH, WIDTH)


def _nothing(m: Any) -> None:
    """Make nothing more."""


def _beside_ones(equation: str, h: Tensor) -> Tensor:
    return torch.einsum(equation, torch.ones(*h.shape, 1), h.unsqueeze(-1))


def _windows(m: Any, h: Tensor) -> Tensor:
    """Windows of four places that overlap by two, read from a transposed view as it lies in memory."""
    places = h.unflatten(-1, (8, 2)).transpose(0, 1)
    windows = places.as_strided((3, 4, h.shape[0], 2), (4, 2, WIDTH, 1))
    return h + windows.mean((0, 1)).repeat(1, 8)


Make = Callable[[Any], None]
Compute = Callable[[Any, Tensor], Tensor]
KINDS: dict[str, tuple[Make, Compute]] = {
    "flag": (_flags, _flag),
    "flag that a step sets": (_unset, _flag),
    "checks": (_nothing, _checks),
    "checks of numbers": (_nothing, _checked_numbers),
    "branch": (_nothing, _branch),
    "branch on a number": (_nothing, _compared_number),
    "mask": (_mask, lambda m, h: m.c(h[:, m.keep])),
    "mask that is written": (_rows, _put),
    "frequencies": (_frequencies, lambda m, h: h * m.freqs),
    "lengths": (_lengths, _written),
    "list of numbers": (_lengths, lambda m, h: h * torch.tensor([*m.lengths, 1]).repeat(4)),
    "places": (_mask, lambda m, h: m.c(h.index_select(1, m.keep.nonzero().squeeze(1)))),
    "positions": (_nothing, lambda m, h: h * torch.arange(0.5, 8.5, 0.5) * torch.arange(1.0, 17.0)),
    "repeated": (_nothing, lambda m, h: h * torch.arange(8.0).cos().repeat_interleave(2, -1)),
    "ones in a product": (_nothing, lambda m, h: h + _beside_ones("bid,bjd->bij", h).mean(1)),
    "ones in a product of one sum": (_nothing, lambda m, h: h + _beside_ones("bid,bjd->bj", h)),
    "windows by strides": (_nothing, _windows),
    "gaps by strides": (_nothing, lambda m, h: h + h[:, ::2].as_strided((h.shape[0], 3), (WIDTH, 4)).mean(1, True)),
    "outside by strides": (_nothing, lambda m, h: h + h[:, :2].as_strided((h.shape[0], 1), (WIDTH, 1), 3)),
    # draws
    "randint": (_nothing, lambda m, h: h * torch.randint(1, 10, (h.shape[0], 1))),
    "randint_like": (_nothing, lambda m, h: h + torch.randint_like(h, 3)),
    "random_": (_nothing, lambda m, h: h + torch.empty_like(h).random_(0, 3)),
    "randperm": (_nothing, lambda m, h: h + h[torch.randperm(h.shape[0])]),
    "multinomial": (_nothing, lambda m, h: h * torch.multinomial(h.softmax(-1), 1)),
    "several classes": (_nothing, lambda m, h: h.gather(1, torch.multinomial(h.softmax(-1), WIDTH))),
    "gumbel": (_nothing, lambda m, h: F.gumbel_softmax(h, hard=True)),
    "exponential_": (_nothing, lambda m, h: h - torch.empty_like(h).exponential_()),
    "geometric_": (_nothing, lambda m, h: h + 0.1 * torch.empty_like(h).geometric_(0.5)),
    "log_normal_": (_nothing, lambda m, h: h + 0.1 * torch.empty_like(h).log_normal_()),
    "poisson": (_nothing, lambda m, h: h + torch.poisson(h.abs())),
    "gamma": (_nothing, lambda m, h: h + torch.distributions.Gamma(h.abs() + 1, 1.0).rsample()),
    "generator": (_nothing, lambda m, h: h + torch.rand(h.shape, generator=torch.Generator())),
}
"""The kinds of what stands between the layers, by name: what a model makes for it, and what it computes."""


class Attending(nn.Module):
    """Torch's encoder, and a decoder, with a mask that is made as ``kind`` says. ``[b, 8]`` to ``[b, 8, 32]``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.out = kind, nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 32, 0.0, batch_first=True), 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = MASKS[self.kind](self, tokens)
        return self.out(self.decoder(x, self.encoder(x, mask=mask), tgt_mask=mask))


MASKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "made": lambda m, tokens: nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]),
    "buffer": lambda m, tokens: m.mask,
    "truth values": lambda m, tokens: torch.triu(torch.ones(8, 8, dtype=torch.bool), 1),
    "logarithm": lambda m, tokens: torch.log(torch.tril(torch.ones(8, 8))),
    "of an input": lambda m, tokens: m.mask * (tokens[0] >= 0),
}
"""The masks of an encoder, by how they are made."""


class Experts(nn.Module):
    """Two of four experts for each token, by a loop of ``form``. ``[b, 16]`` to ``[b, 16]``."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.gate = form, nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, index = torch.topk(self.gate(x).softmax(-1), 2)
        if self.form == "unpacked":
            return self.unpacked(x, weights, index)
        return self.counted(x, weights, index)

    def unpacked(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Go over masks and experts together."""
        masks = (index.unsqueeze(-1) == torch.arange(4)).permute(2, 0, 1)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks, self.experts, strict=True):
            tokens, slots = torch.where(mask)
            y[tokens] += weights[tokens, slots, None] * expert(x[tokens])
        return y

    def counted(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Leave out experts without tokens."""
        counts = torch.bincount(index.flatten(), minlength=4).tolist()
        y = torch.zeros_like(x)
        for number in range(4):
            if counts[number] == 0:
                continue
            expert = self.experts[number]
            tokens, slots = torch.where(index == number)
            y[tokens] += expert(x[tokens]) * weights[tokens, slots, None]
        return y


class Routed(nn.Module):
    """Experts between two layers. ``[b, 16]`` to ``[b, 4]``."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.a, self.moe, self.b = nn.Linear(WIDTH, WIDTH), Experts(form), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.moe(self.a(x)))


class Classes(nn.Module):
    """Logits ``[b, 8, vocab]`` of tokens ``[b, 8]``."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, WIDTH), nn.Linear(WIDTH, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def _mean(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def _gathered(logits: Tensor, targets: Tensor) -> Tensor:
    return -F.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).mean()


def _selected(logits: Tensor, targets: Tensor) -> Tensor:
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (logits.logsumexp(-1) - chosen).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smooth": partial(_mean, label_smoothing=0.1),
    "z_loss": lambda o, t: _mean(o, t) + 1e-2 * torch.logsumexp(o, -1).square().mean(),
    "entropy": lambda o, t: _mean(o, t) + 0.1 * (o.softmax(-1) * F.log_softmax(o, -1)).sum(-1).mean(),
    "gathered": _gathered,
    "selected": _selected,
}
"""Losses of rows of logits, by name."""


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of rows of logits."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


globals().update(LOSSES)  # plans name them
