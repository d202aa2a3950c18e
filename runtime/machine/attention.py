"""Attention on a rank that holds some of the queries and meets the keys block by block.

The scores of a block are dropped once its output and the log-sum-exp of its scores are computed; two blocks are merged
by these (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Masks and dropout depend on global
positions alone, so any rank may compute a block. In ring attention (context parallelism) blocks of keys travel around a
ring of ranks while each computes with the block that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...compiler.initial.counter import keep_mask
from ...compiler.layout.collectives import SEQUENCE, travelling_dtype
from ...compiler.layout.pieces import Interval, row_major
from ...compiler.layout.placement import TensorType
from ...compiler.ops.rules.attention import tile_of_scores
from ..ranks.communication import RingPart
from .flash import Flash, additive, flash_for, repeat_heads
from .registry import KernelContext, runs

Pair = tuple[Tensor, Tensor]
"""The attention over some keys: the output [b, h, s, d], and the log-sum-exp of the scores [b, h, s]."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The scores of consecutive queries with consecutive keys. ``queries`` and ``keys`` are local intervals, ``at`` has
    the global positions of the first query and the first key. ``seen`` is the causal mask: none (``all``), one under
    which the last query sees just all keys (``diagonal``), or one that compares positions (``compared``)."""

    queries: Interval
    keys: Interval
    at: tuple[int, int]
    seen: str = "all"


def tiles(rows: Sequence[Interval], columns: Sequence[Interval], causal: bool) -> Iterator[Tile]:
    """Yield the tiles of scores that are not fully masked, given the global positions of queries and of keys."""
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
class ScorePart:
    """The part of a tile for some samples and some groups of heads, each with one head of keys. Of queries and what has
    their shape it takes [b, g, h / g * s, d]: heads that read the same keys are one matrix."""

    samples: slice
    groups: slice
    heads: slice
    tile: Tile

    def of_queries(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the part of a tensor [b, h, s, d], folded."""
        part = _narrow(x[self.samples, self.heads], self.tile.queries).to(dtype)
        folded: Tensor = part.unflatten(1, (self.groups.stop - self.groups.start, -1)).flatten(2, 3)
        return folded

    def of_keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the part of a tensor [b, g, t, d]."""
        return _narrow(x[self.samples, self.groups], self.tile.keys).to(dtype)

    def unfolded(self, x: Tensor) -> Tensor:
        """Return a folded tensor as [b, h, s, d]."""
        heads: Tensor = x.unflatten(2, (-1, self.tile.queries[1])).flatten(1, 2)
        return heads


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The options of one call of attention: ``mask`` is [b, h, s, t] with the rank's queries and all keys; weights are
    dropped with the probability ``p`` by the random stream of ``key``."""

    context: KernelContext
    queries: TensorType
    keys: TensorType
    mask: Tensor | None
    key: Tensor | None
    causal: bool
    scale: float
    p: float

    def tiles(self, rows: Sequence[Interval], columns: Sequence[Interval]) -> list[Tile]:
        """Return the tiles of scores to compute."""
        if self.context.traced and self.causal and max(len(rows), len(columns)) + (rows != columns) > 1:
            # one tile on every rank, so that all ranks compile the same region
            queries, keys = ((0, sum(length for _, length in intervals)) for intervals in (rows, columns))
            return [Tile(queries, keys, (rows[0][0], columns[0][0]), "compared")]
        return list(tiles(rows, columns, self.causal))

    def _positions(self, tile: Tile, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.context.traced:
            return self.context.index(self.queries, 2), self.context.index(self.keys, 2)
        starts = zip(tile.at, (tile.queries, tile.keys), strict=True)
        first, second = (torch.arange(at, at + length, device=device) for at, (_, length) in starts)
        return first, second

    def hidden(self, tile: Tile, q: Tensor) -> Tensor | None:
        """Return the mask of a tile, of bools or additive; None where it masks nothing."""
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

    def flash(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Flash | None:
        """Return the flash kernel for a tile, if there is one; none has parc's dropout."""
        return None if self.p else flash_for(q, k, v, mask, causal, self.context.traced)

    @property
    def kept_factor(self) -> float:
        """The factor of weights that dropout keeps."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def kept(self, part: ScorePart, device: torch.device) -> Tensor:
        """Return which weights of a part dropout keeps, of bools."""
        if self.key is None:
            raise ValueError("attention drops weights by no stream")
        shape = (*self.queries.shape[:3], self.keys.shape[2])
        outer = (self.context.index(self.queries, dim)[at] for dim, at in enumerate((part.samples, part.heads)))
        numbers = row_major(shape, (*outer, *self._positions(part.tile, device)), device)
        return keep_mask(self.context.key(self.key), numbers, self.p)

    def parts(self, tile: Tile, q: Tensor, groups: int) -> Iterator[ScorePart]:
        """Yield a tile in parts whose scores are computed at once, given all queries and the number of groups of heads.
        What nobody sees behind the last query of a part is left out."""
        batch, heads = q.shape[:2]
        (row, many), (column, length), (first, start) = tile.queries, tile.keys, tile.at
        scores = batch, heads, many, length
        samples, some, queries = tile_of_scores(scores, groups, self.context.tile)
        for sample, group, after in product(range(0, batch, samples), range(0, groups, some), range(0, many, queries)):
            rows = min(queries, many - after)
            seen = length - many + after + rows if tile.seen == "diagonal" else length
            at = slice(group, min(group + some, groups))
            yield ScorePart(
                slice(sample, min(sample + samples, batch)), at,
                slice(at.start * heads // groups, at.stop * heads // groups),
                Tile((row + after, rows), (column, seen), (first + after, start), tile.seen),
            )  # fmt: skip


def _narrow(x: Tensor, run: Interval) -> Tensor:
    return x if run == (0, x.shape[2]) else x.narrow(2, *run)


def _raw_scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Any:
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return the factor of the scores, by default one over the root of a head's size."""
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax of scores, given their log-sum-exp. A query with no key gets zeros, as in torch."""
    return torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _part_scores(call: AttentionCall, part: ScorePart, q: Tensor, k: Tensor) -> Tensor:
    """Return the folded scores of a part, in a new tensor. Queries and keys are folded."""
    scores = torch.matmul(q, k.mT).mul_(call.scale)
    of_heads = part.unfolded(scores)  # a view
    tile, mask = part.tile, call.hidden(part.tile, q)
    if tile.seen == "diagonal":
        above = torch.ones(of_heads.shape[-2:], dtype=torch.bool, device=q.device)
        of_heads.masked_fill_(above.triu_(1 + tile.keys[1] - tile.queries[1]), float("-inf"))
    if mask is not None:
        mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
        mask = mask if mask.shape[0] == 1 else mask[part.samples]
        mask = mask if mask.shape[1] == 1 else mask[:, part.heads]
        of_heads = of_heads.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else of_heads.add_(mask)
    return scores


def _attend_part(call: AttentionCall, part: ScorePart, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Compute the attention of a part, and write output and log-sum-exp into ``results``."""
    (q, k, v), wide = operands, _wide(operands[0])
    weights = _part_scores(call, part, part.of_queries(q, wide), part.of_keys(k, wide))
    peak = weights.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    total = weights.sub_(peak).exp_().sum(-1, keepdim=True)
    weights.div_(total.masked_fill(total == 0, 1.0))  # a query with no key gets zeros, as in torch
    if call.p:
        part.unfolded(weights).mul_(call.kept(part, q.device)).mul_(call.kept_factor)
    results[0].copy_(part.unfolded(torch.matmul(weights, part.of_keys(v, wide))))
    results[1].copy_(part.unfolded(total.log_().add_(peak)).squeeze(-1))


def _tile_attention(call: AttentionCall, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> Pair:
    mask, causal = None if call.p else call.hidden(tile, q), tile.seen == "diagonal"
    own_q, own_k, own_v = _narrow(q, tile.queries), _narrow(k, tile.keys), _narrow(v, tile.keys)
    if flash := call.flash(own_q, own_k, own_v, mask, causal):
        bias = additive(mask, q.dtype)
        out, lse = flash.forward(own_q, own_k, own_v, bias, causal, call.scale)
        if bias is not None:  # for a query without a key the kernel returns 0
            lse = lse.masked_fill(bias.isneginf().all(-1), float("-inf"))
        return out, lse
    shape = (*q.shape[:2], tile.queries[1])
    out, lse = q.new_empty(*shape, v.shape[-1]), q.new_empty(shape, dtype=_wide(q))
    for part in call.parts(tile, q, k.shape[1]):
        at = part.samples, part.heads, slice(part.tile.queries[0] - tile.queries[0], None)
        _attend_part(call, part, (q, k, v), [whole[at][:, :, : part.tile.queries[1]] for whole in (out, lse)])
    return out, lse


def _merge(first: Pair, second: Pair) -> Pair:
    """Return the attention over the keys of both."""
    lse = torch.logaddexp(first[1], second[1])
    shares = (_weights(part[..., None], lse) for _, part in (first, second))
    out = sum(out.to(lse.dtype) * share for (out, _), share in zip((first, second), shares, strict=True))
    return out, lse  # type: ignore[return-value]


class Attention:
    """The attention of a rank's queries, at the global positions ``rows``, over keys that are added block by block."""

    def __init__(self, call: AttentionCall, q: Tensor, rows: Sequence[Interval]) -> None:
        self.call, self.q, self.rows = call, q, rows
        self._pairs: dict[Interval, Pair] = {}

    def add(self, k: Tensor, v: Tensor, columns: Sequence[Interval]) -> None:
        """Add keys and values with these positions."""
        for tile in self.call.tiles(self.rows, columns):
            pair = _tile_attention(self.call, tile, self.q, k, v)
            before = self._pairs.get(tile.queries)
            self._pairs[tile.queries] = pair if before is None else _merge(before, pair)

    def result(self) -> Pair:
        """Return the output and the log-sum-exp over all keys that were added."""
        pairs = [self._pairs[queries] for queries in sorted(self._pairs)]
        if sum(length for _, length in self._pairs) < self.q.shape[2]:
            raise ValueError("attention of a query without any key")
        outs, sums = zip(*pairs, strict=True)
        out, lse = (x[0] if len(x) == 1 else torch.cat(x, 2) for x in (outs, sums))
        # the backward kernel expects 0 for a query without a key
        return out.to(self.q.dtype), lse if self.call.mask is None else lse.masked_fill(lse.isneginf(), 0.0)


class AttentionBackward:
    """The gradients of the attention of a rank's queries, over keys that are added block by block. ``saved`` are the
    output's gradient, the queries, the output and the log-sum-exp, the latter two over all keys."""

    def __init__(self, call: AttentionCall, saved: Sequence[Tensor], rows: Sequence[Interval]) -> None:
        self.call, self.rows = call, rows
        self.grad, self.q, self.out, self.lse = saved
        self.in_order = call.context.repeated(call.context.operands[0])
        self._q_grad: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, columns: Sequence[Interval]) -> list[Tensor]:
        """Add keys and values with these positions. Return the parts of their gradients from these queries, in their
        own dtype if a single tile computes them, else in a wider one."""
        todo = self.call.tiles(self.rows, columns)
        parts = [(tile, self._tile_gradients(tile, k, v)) for tile in todo]
        if [(tile.queries, tile.keys) for tile in todo] == [((0, self.q.shape[2]), (0, k.shape[2]))]:
            (_, (gq, gk, gv)), before = parts[0], self._q_grad
            self._q_grad = gq if before is None else before.to(self.lse.dtype) + gq
            return [gk, gv]
        wide = self.lse.dtype
        gk, gv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        self._q_grad = torch.zeros_like(self.q, dtype=wide) if self._q_grad is None else self._q_grad.to(wide)
        for tile, (q_part, k_part, v_part) in parts:
            _narrow(self._q_grad, tile.queries).add_(q_part)
            _narrow(gk, tile.keys).add_(k_part)
            _narrow(gv, tile.keys).add_(v_part)
        return [gk, gv]

    def result(self) -> Tensor:
        """Return the gradient of the queries."""
        assert self._q_grad is not None
        return self._q_grad.to(self.q.dtype)

    def _tile_gradients(self, tile: Tile, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        call, queries = self.call, tile.queries
        mask, causal = None if call.p else call.hidden(tile, self.q), tile.seen == "diagonal"
        grad, q, out, lse = (_narrow(x, queries) for x in (self.grad, self.q, self.out, self.lse))
        own_k, own_v = _narrow(k, tile.keys), _narrow(v, tile.keys)
        if flash := call.flash(q, own_k, own_v, mask, causal):
            backward = flash.in_order if self.in_order else flash.backward
            return backward(grad, out, lse, q, own_k, own_v, additive(mask, q.dtype), causal, call.scale)
        parts = [*call.parts(tile, self.q, k.shape[1])]
        summed = any(part.tile.queries[1] < queries[1] for part in parts)  # several parts add to one key
        gq = torch.empty_like(q, memory_format=torch.contiguous_format)
        gk, gv = (x.new_zeros(x.shape, dtype=_wide(q) if summed else x.dtype) for x in (own_k, own_v))
        for part in parts:
            self._add_part(part, queries[0], k, v, (gq, gk, gv))
        return [gq, gk.to(k.dtype), gv.to(v.dtype)]

    def _add_part(self, part: ScorePart, first: int, k: Tensor, v: Tensor, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of a part to those of its tile, whose queries begin at ``first``."""
        call, wide, (gq, gk, gv) = self.call, _wide(self.q), gradients
        q, keys = part.of_queries(self.q, wide), part.of_keys(k, wide)
        lse = part.of_queries(self.lse[..., None], wide)
        weights = _part_scores(call, part, q, keys).sub_(lse.masked_fill(lse.isneginf(), 0.0)).exp_()
        kept = call.kept(part, q.device) if call.p else None
        grad, (row, many), seen = part.of_queries(self.grad, wide), part.tile.queries, part.tile.keys[1]
        dropped = weights if kept is None else weights.mul(call.kept_factor)
        if kept is not None:
            part.unfolded(dropped).mul_(kept)
        gv[part.samples, part.groups, :seen].add_(torch.matmul(dropped.mT, grad))
        del dropped
        grad_scores = torch.matmul(grad, part.of_keys(v, wide).mT)
        if kept is not None:
            part.unfolded(grad_scores).mul_(kept).mul_(call.kept_factor)
        delta = (grad * part.of_queries(self.out, wide)).sum(-1, keepdim=True)
        grad_scores.sub_(delta).mul_(weights).mul_(call.scale)
        del weights
        gk[part.samples, part.groups, :seen].add_(torch.matmul(grad_scores.mT, q))
        q_part = part.unfolded(torch.matmul(grad_scores, keys))
        gq[part.samples, part.heads, row - first :][:, :, :many].copy_(q_part)


def _call_of(ctx: KernelContext, queries: int, q: Tensor, *options: Any) -> AttentionCall:
    """Return the call of a line whose operand number ``queries`` is q and whose next one is k. ``options`` are its
    mask, key, causal, scale and p."""
    mask, key, causal, scale, p = options
    q_type, k_type = ctx.operands[queries : queries + 2]
    return AttentionCall(ctx, q_type, k_type, mask, key, causal, scale_of(q, scale), p)


@runs("parc.attention.default")
def _attend(ctx: KernelContext, q: Any, k: Any, v: Any, *options: Any) -> Any:
    call = _call_of(ctx, 0, q, *options)
    attention = Attention(call, q, ctx.runs(call.queries, SEQUENCE))
    attention.add(k, v, ctx.runs(call.keys, SEQUENCE))
    return attention.result()


@runs("parc.attention_backward.default")
def _attend_backward(
    ctx: KernelContext, grad: Any, q: Any, k: Any, v: Any, mask: Any, key: Any, out: Any, lse: Any, *options: Any
) -> Any:
    call = _call_of(ctx, 1, q, mask, key, *options)
    attention = AttentionBackward(call, (grad, q, out, lse), ctx.runs(call.queries, SEQUENCE))
    gk, gv = attention.add(k, v, ctx.runs(call.keys, SEQUENCE))
    return attention.result(), gk.to(k.dtype), gv.to(v.dtype)


@runs("parc.attention.default", "reference")
def _plain_attention(
    ctx: KernelContext, q: Any, k: Any, v: Any, mask: Any, key: Any, causal: bool, scale: Any, p: float
) -> Any:
    """Compute textbook attention, which autograd can differentiate; the kernel is checked against it."""
    heads = q.shape[1]
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    scores = _raw_scores(q, k, mask, causal, scale_of(q, scale))
    hidden = scores.isneginf().all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
    if p:
        queries, keys = ctx.operands[:2]
        type_ = TensorType(queries.dtype, (*queries.shape[:3], keys.shape[2]), queries.placement)
        weights = weights * keep_mask(ctx.key(key), ctx.numbers(type_), p) * (1 / (1 - p) if p < 1 else 0.0)
    return torch.matmul(weights, v), q.new_zeros(q.shape[:-1])


# ---- ring attention: one rank's part of a ring


def _positions(ctx: KernelContext, axes: str, keys: TensorType) -> list[list[Interval]]:
    """Return the global positions of the blocks of keys that a rank gets: its own, that of the rank before it, and so
    on."""
    rank, mesh = ctx.mesh.rank(ctx.coordinates), ctx.mesh
    group = next(group for group in mesh.groups(axes.split(",")) if rank in group)
    place = group.index(rank)
    others = (mesh.coordinates(group[(place - hop) % len(group)]) for hop in range(len(group)))
    return [KernelContext(mesh, coordinates, (), (), ctx.device).runs(keys, SEQUENCE) for coordinates in others]


@runs("parc.ring_attention")
def _ring_attention(ctx: KernelContext, q: Any, axes: str, k: Any, v: Any, *options: Any) -> RingPart:
    call = _call_of(ctx, 0, q, *options)
    attention = Attention(call, q, ctx.runs(call.queries, SEQUENCE))
    (first, *others), block = _positions(ctx, axes, call.keys), [k, v]
    take = (yield block) if others else None
    attention.add(block[0], block[1], first)
    for left, columns in zip(reversed(range(len(others))), others, strict=True):
        assert take is not None
        block = take()
        take = (yield block) if left else None
        attention.add(block[0], block[1], columns)
    return list(attention.result())


@runs("parc.ring_attention_backward")
def _ring_attention_backward(
    ctx: KernelContext, grad: Any, axes: str, q: Any, k: Any, v: Any, mask: Any, key: Any, out: Any, lse: Any,
    *options: Any,
) -> RingPart:  # fmt: skip
    """Compute gradients in a ring. Those of keys follow their keys one hop behind: each rank adds its part, and the
    last sends them home."""
    call = _call_of(ctx, 1, q, mask, key, *options)
    attention = AttentionBackward(call, (grad, q, out, lse), ctx.runs(call.queries, SEQUENCE))
    (first, *others), block = _positions(ctx, axes, call.keys), [k, v]

    def gradients(columns: Sequence[Interval]) -> list[Tensor]:
        return [part.to(travelling_dtype(part.dtype)) for part in attention.add(block[0], block[1], columns)]

    take = (yield block) if others else None
    home, coming = gradients(first), None
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
    return [attention.result(), *(part.to(k.dtype) for part in home)]
