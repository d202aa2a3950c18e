"""Attention on a rank that holds some of the queries and meets the keys block by block.

The scores of a block are computed and forgotten. Its output and the logarithm of the sum of its exponentials are left,
and two blocks are joined by these (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). What a
query may see, and what dropout keeps, depends on global positions, so it does not matter which rank computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...compiler.initial.counter import keep_mask
from ...compiler.layout.collectives import SEQUENCE, travelling_dtype
from ...compiler.layout.pieces import Interval, row_major
from ...compiler.layout.placement import TensorType
from ..ranks.communication import RingPart
from .flash import Flash, additive, flash_for, fold_heads, repeat_heads
from .site import Site, runs

Pair = tuple[torch.Tensor, torch.Tensor]
"""The output of some keys [b, h, s, d], and the logarithm of the sum of the exponentials of their scores [b, h, s]."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Scores of consecutive queries with consecutive keys. ``queries`` and ``keys`` are places on the rank, ``at`` the
    global positions of the first of each. ``seen`` says which keys a query sees: all, those up to its own place in a
    square (``diagonal``), or those that do not come later (``compared``)."""

    queries: Interval
    keys: Interval
    at: tuple[int, int]
    seen: str = "all"


def tiles(rows: Sequence[Interval], columns: Sequence[Interval], causal: bool) -> Iterator[Tile]:
    """Yield the tiles of scores in which a query sees some key, for the global positions of queries and of keys."""
    row = 0
    for first, many in rows:
        column = 0
        for start, length in columns:
            if not causal:
                yield Tile((row, many), (column, length), (first, start))
            else:
                earlier = min(max(first - start, 0), length)
                among = min(max(first + many - start, 0), length) - earlier
                if earlier:
                    yield Tile((row, many), (column, earlier), (first, start))
                if among:
                    square = among == many and start + earlier == first
                    seen = "diagonal" if square else "compared"
                    yield Tile((row, many), (column + earlier, among), (first, start + earlier), seen)
            column += length
        row += many


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one call of attention: ``mask`` is [b, h, s, t], its queries those of the rank, its keys all that
    there are; weights are dropped with the chance ``p`` by the stream of ``key``."""

    site: Site
    queries: TensorType
    keys: TensorType
    mask: torch.Tensor | None
    key: torch.Tensor | None
    causal: bool
    scale: float
    p: float

    def tiles(self, rows: Sequence[Interval], columns: Sequence[Interval]) -> list[Tile]:
        """Return the tiles of scores to compute."""
        if self.site.traced and self.causal and max(len(rows), len(columns)) + (rows != columns) > 1:
            # one tile on every rank, so that all ranks are traced alike
            queries, keys = ((0, sum(length for _, length in some)) for some in (rows, columns))
            return [Tile(queries, keys, (rows[0][0], columns[0][0]), "compared")]
        return list(tiles(rows, columns, self.causal))

    def _positions(self, tile: Tile, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self.site.traced:
            return self.site.index(self.queries, 2), self.site.index(self.keys, 2)
        starts = zip(tile.at, (tile.queries, tile.keys), strict=True)
        first, second = (torch.arange(at, at + length, device=device) for at, (_, length) in starts)
        return first, second

    def hidden(self, tile: Tile, q: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a tile, of bools or of numbers to add; None where it hides nothing."""
        mask = self.mask
        if mask is not None:
            (row, many), start, length = tile.queries, tile.at[1], tile.keys[1]
            mask = mask if mask.shape[-2] == 1 else mask.narrow(-2, row, many)
            mask = mask if mask.shape[-1] == 1 else mask.narrow(-1, start, length)
        if tile.seen != "compared":
            return mask
        rows, columns = self._positions(tile, q.device)
        earlier = columns <= rows[:, None]
        if mask is None:
            return earlier
        return mask & earlier if mask.dtype == torch.bool else mask.masked_fill(~earlier, float("-inf"))

    def flash(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> Flash | None:
        """Return torch's kernel that keeps no scores, if it has one for a tile; none of them drops weights."""
        return None if self.p else flash_for(q, k, v, mask, causal, self.site.traced)

    def kept(self, tile: Tile, q: torch.Tensor) -> torch.Tensor:
        """Return the factors by which dropout multiplies the weights of a tile: 0 or 1 / (1 - p)."""
        if self.key is None:
            raise ValueError("attention drops weights by no stream")
        shape = (*self.queries.shape[:3], self.keys.shape[2])
        outer = (self.site.index(self.queries, dim) for dim in (0, 1))
        numbers = row_major(shape, (*outer, *self._positions(tile, q.device)), q.device)
        return keep_mask(self.site.key(self.key), numbers, self.p) / (1 - self.p)


def _part(x: torch.Tensor, run: Interval) -> torch.Tensor:
    return x if run == (0, x.shape[2]) else x.narrow(2, *run)


def _raw_scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> Any:
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """Return the factor of the scores: one over the root of a head's size, where none is given."""
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the softmax of scores. A query that may see no key gets zeros, as in torch."""
    return torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])


def _wide(q: torch.Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _of_tile(how: Scores, tile: Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    q, k, v = _part(q, tile.queries), _part(k, tile.keys), _part(v, tile.keys)
    mask, causal = how.hidden(tile, q), tile.seen == "diagonal"
    if flash := how.flash(q, k, v, mask, causal):
        bias = additive(mask, q.dtype)
        out, lse = flash.forward(q, k, v, bias, causal, how.scale)
        if bias is not None:  # of a query without a key the kernel says 0
            lse = lse.masked_fill(bias.isneginf().all(-1), float("-inf"))
        return out, lse
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = _raw_scores(q.to(_wide(q)), k.to(_wide(q)), mask, causal, how.scale)
    lse = torch.logsumexp(scores, -1)
    weights = _weights(scores, lse)
    if how.p:
        weights = weights * how.kept(tile, q)
    return torch.matmul(weights, v.to(weights.dtype)).to(q.dtype), lse


def _joined(first: Pair, second: Pair) -> Pair:
    """Return the attention of the keys of both."""
    lse = torch.logaddexp(first[1], second[1])
    shares = (_weights(own[..., None], lse) for _, own in (first, second))
    out = sum(out.to(lse.dtype) * share for (out, _), share in zip((first, second), shares, strict=True))
    return out, lse  # type: ignore[return-value]


class Attention:
    """The attention of a rank's queries, of which ``rows`` are the positions, over keys that are added block by
    block."""

    def __init__(self, how: Scores, q: torch.Tensor, rows: Sequence[Interval]) -> None:
        self.how, self.q, self.rows = how, q, rows
        self._made: dict[Interval, Pair] = {}

    def add(self, k: torch.Tensor, v: torch.Tensor, columns: Sequence[Interval]) -> None:
        """Add keys and values with these positions."""
        self._like = v
        for tile in self.how.tiles(self.rows, columns):
            pair = _of_tile(self.how, tile, self.q, k, v)
            before = self._made.get(tile.queries)
            self._made[tile.queries] = pair if before is None else _joined(before, pair)

    def result(self) -> Pair:
        """Return the output and the logarithms of the sums, of all keys that were added."""
        pairs = [self._made[queries] for queries in sorted(self._made)]
        if sum(length for _, length in self._made) < self.q.shape[2]:
            raise ValueError("attention of a query without any key")
        outs, sums = zip(*pairs, strict=True)
        out, lse = (x[0] if len(x) == 1 else torch.cat(x, 2) for x in (outs, sums))
        # the kernel of backward takes 0 for a query without a key
        return out.to(self.q.dtype), lse if self.how.mask is None else lse.masked_fill(lse.isneginf(), 0.0)


class AttentionBackward:
    """The gradients of the attention of a rank's queries, over keys that are added block by block. ``out`` and ``lse``
    are those of all keys."""

    def __init__(self, how: Scores, given: Sequence[torch.Tensor], rows: Sequence[Interval]) -> None:
        self.how, self.rows = how, rows
        self.grad, self.q, self.out, self.lse = given
        self.in_order = how.site.repeated(how.site.operands[0])
        self._made: torch.Tensor | None = None

    def add(self, k: torch.Tensor, v: torch.Tensor, columns: Sequence[Interval]) -> list[torch.Tensor]:
        """Add keys and values with these positions. Return the parts of their gradients, in their own dtype if one
        tile makes them, else in a wider one."""
        todo = self.how.tiles(self.rows, columns)
        parts = [(tile, self._of_tile(tile, k, v)) for tile in todo]
        whole = [tile for tile in todo if (tile.queries, tile.keys) == ((0, self.q.shape[2]), (0, k.shape[2]))]
        if whole and len(todo) == 1:
            (_, (gq, gk, gv)), before = parts[0], self._made
            self._made = gq if before is None else before.to(self.lse.dtype) + gq
            return [gk, gv]
        wide = self.lse.dtype
        gk, gv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        self._made = torch.zeros_like(self.q, dtype=wide) if self._made is None else self._made.to(wide)
        for tile, (q_part, k_part, v_part) in parts:
            _part(self._made, tile.queries).add_(q_part)
            _part(gk, tile.keys).add_(k_part)
            _part(gv, tile.keys).add_(v_part)
        return [gk, gv]

    def result(self) -> torch.Tensor:
        """Return the gradient of the queries."""
        assert self._made is not None
        return self._made.to(self.q.dtype)

    def _of_tile(self, tile: Tile, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
        how, heads, groups = self.how, self.q.shape[1], k.shape[1]
        grad, q, out = (_part(x, tile.queries) for x in (self.grad, self.q, self.out))
        lse, k, v = self.lse.narrow(2, *tile.queries), _part(k, tile.keys), _part(v, tile.keys)
        mask, causal = how.hidden(tile, q), tile.seen == "diagonal"
        if flash := how.flash(q, k, v, mask, causal):
            backward = flash.in_order if self.in_order else flash.backward
            return backward(grad, out, lse, q, k, v, additive(mask, q.dtype), causal, how.scale)
        k, v = repeat_heads(k, heads), repeat_heads(v, heads)
        wide = _wide(q)
        weights = _weights(_raw_scores(q.to(wide), k.to(wide), mask, causal, how.scale), lse)
        grad, q_, k_, v_ = (x.to(wide) for x in (grad, q, k, v))
        kept = how.kept(tile, q).to(wide) if how.p else None
        dropped = weights if kept is None else weights * kept
        grad_weights = torch.matmul(grad, v_.transpose(-2, -1))
        if kept is not None:
            grad_weights = grad_weights * kept
        delta = (grad * out.to(wide)).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta) * how.scale
        gk = fold_heads(torch.matmul(grad_scores.transpose(-2, -1), q_), groups)
        gv = fold_heads(torch.matmul(dropped.transpose(-2, -1), grad), groups)
        return [torch.matmul(grad_scores, k_).to(q.dtype), gk.to(k.dtype), gv.to(v.dtype)]


@runs("parc.attention.default")
def _attention(site: Site, q: Any, k: Any, v: Any, mask: Any, key: Any, causal: bool, scale: Any, p: float) -> Any:
    queries, keys = site.operands[:2]
    attention = Attention(
        Scores(site, queries, keys, mask, key, causal, scale_of(q, scale), p), q, site.runs(queries, 2)
    )
    attention.add(k, v, site.runs(keys, 2))
    return attention.result()


@runs("parc.attention_backward.default")
def _attention_backward(
    site: Site,
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    key: Any,
    out: Any,
    lse: Any,
    causal: bool,
    scale: Any,
    p: float,
) -> Any:
    queries, keys = site.operands[1:3]
    how = Scores(site, queries, keys, mask, key, causal, scale_of(q, scale), p)
    attention = AttentionBackward(how, (grad, q, out, lse), site.runs(queries, 2))
    gk, gv = attention.add(k, v, site.runs(keys, 2))
    return attention.result(), gk.to(k.dtype), gv.to(v.dtype)


def _kept(site: Site, key: torch.Tensor, p: float) -> torch.Tensor:
    """Return the factors by which dropout multiplies all weights."""
    queries, keys = site.operands[:2]
    scores = TensorType(queries.dtype, (*queries.shape[:3], keys.shape[2]), queries.placement)
    return keep_mask(site.key(key), site.numbers(scores), p) / (1 - p)


@runs("parc.attention.default", "reference")
def _plain_attention(
    site: Site, q: Any, k: Any, v: Any, mask: Any, key: Any, causal: bool, scale: Any, p: float
) -> Any:
    """Compute attention as the textbook has it, which autograd can follow; the other kernel is checked against it."""
    heads = q.shape[1]
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    scores = _raw_scores(q, k, mask, causal, scale_of(q, scale))
    hidden = scores.isneginf().all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
    if p:
        weights = weights * _kept(site, key, p)
    return torch.matmul(weights, v), q.new_zeros(q.shape[:-1])


# ---- one rank's part of a ring: it computes with the keys of one rank after the other, while these travel on.


def _positions(site: Site, axes: str, keys: TensorType) -> list[list[Interval]]:
    """Return the positions of the keys that a rank computes with: its own, those of the rank before it, and so on."""
    rank, mesh = site.mesh.rank(site.coordinates), site.mesh
    group = next(group for group in mesh.groups(axes.split(",")) if rank in group)
    place = group.index(rank)
    others = (mesh.coordinates(group[(place - hop) % len(group)]) for hop in range(len(group)))
    return [Site(mesh, coordinates, (), (), site.device).runs(keys, SEQUENCE) for coordinates in others]


@runs("parc.ring_attention")
def _ring(
    site: Site, q: Any, axes: str, k: Any, v: Any, mask: Any, key: Any, causal: bool, scale: Any, p: float
) -> RingPart:
    queries, keys = site.operands[:2]
    how = Scores(site, queries, keys, mask, key, causal, scale_of(q, scale), p)
    made = Attention(how, q, site.runs(queries, SEQUENCE))
    (own, *others), block = _positions(site, axes, keys), [k, v]
    take = (yield block) if others else None
    made.add(block[0], block[1], own)
    for left, columns in zip(reversed(range(len(others))), others, strict=True):
        assert take is not None
        block = take()
        take = (yield block) if left else None
        made.add(block[0], block[1], columns)
    return list(made.result())


@runs("parc.ring_attention_backward")
def _ring_backward(
    site: Site,
    grad: Any,
    axes: str,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    key: Any,
    out: Any,
    lse: Any,
    causal: bool,
    scale: Any,
    p: float,
) -> RingPart:
    """Gradients follow their keys one hop behind: each rank adds its own to those that come, and the last sends them
    home."""
    queries, keys = site.operands[1:3]
    how = Scores(site, queries, keys, mask, key, causal, scale_of(q, scale), p)
    made = AttentionBackward(how, (grad, q, out, lse), site.runs(queries, SEQUENCE))
    (own, *others), block = _positions(site, axes, keys), [k, v]

    def gradients(columns: Sequence[Interval]) -> list[torch.Tensor]:
        return [part.to(travelling_dtype(part.dtype)) for part in made.add(block[0], block[1], columns)]

    take = (yield block) if others else None
    home, coming = gradients(own), None
    for left, columns in zip(reversed(range(len(others))), others, strict=True):
        assert take is not None
        block = take()
        take = (yield block) if left else None
        parts = gradients(columns)
        if coming is not None:
            parts = [part.add_(before) for part, before in zip(parts, coming(), strict=True)]
        coming = yield parts
    if coming is not None:
        home = [part.add_(rest) for part, rest in zip(home, coming(), strict=True)]
    return [made.result(), *(part.to(k.dtype) for part in home)]
