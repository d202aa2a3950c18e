"""Kernels of parc's own operators, which may ask for the place of the rank that computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...compiler.initial.counter import keep_mask, random, stream
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType, dim_index, row_major
from ...compiler.layout.stretches import atoms, terms
from ...compiler.ops.torch_ops import aten
from .ways import Kernel, code_for, runs

ADD_PRODUCT = "parc.add_product.default"
"""``x + a @ b`` in the shape of ``x``: an operator that the machine makes of two lines."""


@dataclass(frozen=True, slots=True)
class Site:
    """One line on one rank: the mesh, the rank's coordinates, the types of tensor operands and results, the device."""

    mesh: Mesh
    coordinates: Mapping[str, int]
    operands: Sequence[TensorType]
    results: Sequence[TensorType]
    device: torch.device

    @property
    def traced(self) -> bool:
        """True where a compiler traces the kernel: it fuses several passes into one by itself."""
        return False

    def index(self, type_: TensorType, dim: int) -> torch.Tensor:
        """Return the global coordinates of the rank's entries along a dim."""
        return dim_index(type_.shape[dim], dim, type_.placement, self.mesh, self.coordinates, self.device)

    def numbers(self, type_: TensorType) -> torch.Tensor:
        """Return the row-major global numbers of the piece's elements."""
        return row_major(type_.shape, (self.index(type_, dim) for dim in range(len(type_.shape))), self.device)

    def consecutive(self, type_: TensorType, dim: int) -> bool:
        """Return whether the rank's entries along a dim are consecutive: above the part that is split, no part of the
        dim is whole."""
        (size, splits), *more = terms(type_.shape[dim], type_.placement.splits(dim))
        whole = [atom.axis is None for atom in atoms(size, splits, self.mesh.size) if atom.size > 1]
        return not more and whole == sorted(whole)

    def key(self, key: torch.Tensor) -> Any:
        """Return a stream's key, for ``keep_mask``."""
        return int(key)


def _scores_keep(site: Site, q: torch.Tensor, k: torch.Tensor, key: torch.Tensor, p: float, at: int) -> torch.Tensor:
    """Return the mask of the attention weights that dropout keeps, [b, h, s, t], drawn by their global position."""
    type_, keys = site.operands[at], site.operands[at + 1]
    scores = TensorType(type_.dtype, (*type_.shape[:3], keys.shape[2]), type_.placement)
    return keep_mask(site.key(key), site.numbers(scores), p)


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _fold_heads(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum the gradients of repeated heads."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _flash(q: torch.Tensor, v: torch.Tensor, p: float) -> bool:
    """Return whether torch's own CPU kernel, which keeps no scores, can do the work."""
    return q.device.type == "cpu" and p == 0 and q.shape[-1] == v.shape[-1] > 0


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return heads whose entries lie side by side in memory: the flash kernel relies on it without a check."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


@runs("parc.attention.default")
def _attention(site: Site, q: Any, k: Any, v: Any, mask: Any, key: Any, causal: bool, scale: Any, p: float) -> Any:
    heads = q.shape[1]
    k, v = _repeat_heads(k, heads), _repeat_heads(v, heads)
    if _flash(q, v, p):
        bias = _additive(mask, q.dtype)
        q, k, v = _rows(q, k, v)
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    scores = _scores(q.to(_wide(q)), k.to(_wide(q)), mask, causal, _scale(q, scale))
    lse = torch.logsumexp(scores, -1)
    weights = _weights(scores, lse)
    if p:
        weights = weights * _scores_keep(site, q, k, key, p, 0) / (1 - p)
    return torch.matmul(weights, v.to(weights.dtype)).to(q.dtype), lse


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the softmax of scores. A query that may see no key gets zeros, as in torch."""
    return torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])


def _wide(q: torch.Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


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
    heads, groups = q.shape[1], k.shape[1]
    k, v = _repeat_heads(k, heads), _repeat_heads(v, heads)
    if _flash(q, v, p):
        bias = _additive(mask, q.dtype)
        grad, q, k, v, out = _rows(grad, q, k, v, out)
        gq, gk, gv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        return gq, _fold_heads(gk, groups), _fold_heads(gv, groups)
    wide = _wide(q)
    factor = _scale(q, scale)
    weights = _weights(_scores(q.to(wide), k.to(wide), mask, causal, factor), lse)
    grad, q_, k_, v_ = (x.to(wide) for x in (grad, q, k, v))
    kept = _scores_keep(site, q, k, key, p, 1).to(wide) / (1 - p) if p else None
    dropped = weights if kept is None else weights * kept
    grad_weights = torch.matmul(grad, v_.transpose(-2, -1))
    if kept is not None:
        grad_weights = grad_weights * kept
    delta = (grad * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta) * factor
    gk = _fold_heads(torch.matmul(grad_scores.transpose(-2, -1), q_), groups)
    gv = _fold_heads(torch.matmul(dropped.transpose(-2, -1), grad), groups)
    return torch.matmul(grad_scores, k_).to(q.dtype), gk.to(k.dtype), gv.to(v.dtype)


@runs("parc.stream_key.default")
def _stream_key(site: Site, rng: torch.Tensor, name: str, seed: int) -> torch.Tensor:
    step, microbatch = rng.tolist()
    return torch.tensor(stream(seed, name, step, microbatch), dtype=torch.int64)


@runs("parc.dropout_mask.default")
def _dropout_mask(site: Site, key: torch.Tensor, size: Any, p: float, dtype: torch.dtype) -> torch.Tensor:
    (result,) = site.results
    return keep_mask(site.key(key), site.numbers(result), p).to(dtype).mul_(1 / (1 - p))


@runs("parc.random.default")
def _random(site: Site, key: torch.Tensor, size: Any, law: str, dtype: torch.dtype) -> torch.Tensor:
    (result,) = site.results
    return random(site.key(key), site.numbers(result), law, dtype)


@runs("parc.iota.default")
def _iota(site: Site, size: int, start: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return (site.index(site.results[0], 0) * step + start).to(dtype)


def _owned(site: Site, table: TensorType, dim: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return local positions of global indices along a dim (0 for those of other ranks), and which of them are this
    rank's."""
    entries = site.index(table, dim)
    count = entries.shape[0]
    if site.consecutive(table, dim):
        local = index - entries[0]
        mine = (local >= 0) & (local < count)
    else:  # parts of sub-dims, in increasing order
        local = torch.searchsorted(entries, index.contiguous()).clamp_(max=count - 1)
        mine = entries[local] == index
    return torch.where(mine, local, 0), mine


@runs("parc.lookup.default")
def _lookup(site: Site, table: torch.Tensor, index: torch.Tensor, padding: int) -> torch.Tensor:
    local, mine = _owned(site, site.operands[0], 0, index)
    return torch.nn.functional.embedding(local, table) * mine[..., None]


@runs("parc.lookup_backward.default")
def _lookup_backward(site: Site, grad: torch.Tensor, index: torch.Tensor, rows: int, padding: int) -> torch.Tensor:
    local, mine = _owned(site, site.results[0], 0, index)
    if padding >= 0:
        mine = mine & (index != padding)
    gradient: torch.Tensor = aten.embedding_dense_backward(grad * mine[..., None], local, rows, -1, False)
    return gradient


def _in_cache(site: Site, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield rows of all tensors together. On a CPU they are so few at a time that several passes over them stay in its
    cache."""
    first = tensors[0]
    few = first.device.type == "cpu" and not site.traced
    rows = max(1, (1 << 18) // max(1, first.shape[-1])) if few else max(1, first.shape[0])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


@runs("parc.loss_parts.default")
def _loss_parts(site: Site, logits: torch.Tensor, peak: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    local, mine = _owned(site, site.operands[0], 1, targets)
    total = torch.cat([(rows - top).exp_().sum(-1) for rows, top in _in_cache(site, logits, peak)])
    picked = torch.where(mine, (logits.gather(-1, local[:, None]) - peak).squeeze(-1), 0.0)  # padding is infinite
    return torch.stack([total, picked])


@runs("parc.loss_parts_backward.default")
def _loss_parts_backward(
    site: Site, grad: torch.Tensor, logits: torch.Tensor, peak: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    local, mine = _owned(site, site.operands[1], 1, targets)
    result = torch.empty_like(logits)
    for part, rows, top, factor in _in_cache(site, result, logits, peak, grad[0][:, None]):
        torch.sub(rows, top, out=part).exp_().mul_(factor)
    return result.scatter_add_(-1, local[:, None], (grad[1] * mine)[:, None])


def _within(site: Site, type_: TensorType, dim: int, padded: int) -> torch.Tensor:
    """Return the positions of a rank's entries along a padded dim, each counted from the start of its part of
    ``padded`` entries."""
    return site.index(type_, dim) % padded


@runs("parc.fill_pad.default")
def _fill_pad(site: Site, x: torch.Tensor, dim: int, outer: int, real: int, padded: int, value: float) -> torch.Tensor:
    filled = _within(site, site.operands[0], dim, padded) >= real
    if not site.traced and not bool(filled.any()):  # equal regions of all ranks are one when compiled
        return x
    return x.masked_fill(filled.reshape(-1, *[1] * (x.dim() - dim - 1)), value)


@runs("parc.cut_pad.default")
def _cut_pad(site: Site, x: torch.Tensor, dim: int, outer: int, real: int, padded: int) -> torch.Tensor:
    kept = _within(site, site.operands[0], dim, padded) < real
    return x.index_select(dim, kept.nonzero()[:, 0])


@runs("parc.grow_pad.default")
def _grow_pad(site: Site, x: torch.Tensor, dim: int, outer: int, real: int, padded: int) -> torch.Tensor:
    kept = _within(site, site.results[0], dim, padded) < real
    grown = x.new_zeros(*x.shape[:dim], kept.shape[0], *x.shape[dim + 1 :])
    return grown.index_copy_(dim, kept.nonzero()[:, 0], x)


@runs("parc.store.default")
@runs("parc.load.default")
def _carry(site: Site, x: torch.Tensor, what: str) -> torch.Tensor:
    return x  # in one memory a value is where it was


@runs("parc.square_sum.default")
def _square_sum(site: Site, x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32))
    return torch.dot(flat, flat)


@runs("parc.next_loss_scale.default")
def _next_loss_scale(site: Site, norm: Any, scale: Any, good: Any, skipped: Any, *numbers: Any) -> Any:
    growth, backoff, interval = numbers
    finite, grown = norm.isfinite(), scale * growth
    due = finite & (good + 1 == interval)
    kept = torch.where(due & grown.isfinite(), grown, scale)
    return torch.where(finite, kept, scale * backoff), torch.where(finite & ~due, good + 1, 0), skipped + ~finite


@runs(ADD_PRODUCT)
def _add_product(site: Site, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.addmm(x.reshape(a.shape[0], b.shape[1]), a, b).view(x.shape)


@runs(ADD_PRODUCT, "over")
def _add_product_over(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x.view(a.shape[0], b.shape[1]).addmm_(a, b)
    return x


def _dense(function: Any) -> Kernel:
    """Return a kernel for an operator that reads its tensors' storage in order. The module made them contiguous, but a
    trace of contiguous tensors does not show that."""

    def kernel(site: Site, *args: Any) -> Any:
        return function(*(item.contiguous() if isinstance(item, torch.Tensor) else item for item in args))

    return kernel


runs("aten.native_group_norm.default")(_dense(aten.native_group_norm.default))
runs("aten.native_group_norm_backward.default")(_dense(aten.native_group_norm_backward.default))
KERNELS = code_for("kernel")


@runs("parc.attention.default", "reference")
def _plain_attention(
    site: Site, q: Any, k: Any, v: Any, mask: Any, key: Any, causal: bool, scale: Any, p: float
) -> Any:
    """Compute attention as the textbook has it, which autograd can follow; the other kernel is checked against it."""
    heads = q.shape[1]
    k, v = _repeat_heads(k, heads), _repeat_heads(v, heads)
    scores = _scores(q, k, mask, causal, _scale(q, scale))
    hidden = scores.isneginf().all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
    if p:
        weights = weights * _scores_keep(site, q, k, key, p, 0) / (1 - p)
    return torch.matmul(weights, v), q.new_zeros(q.shape[:-1])


@runs("parc.token_loss.default", "reference")
def _plain_token_loss(site: Site, logits: torch.Tensor, targets: torch.Tensor, ignore: int) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=ignore, reduction="none")


REFERENCE_KERNELS: Mapping[str, Kernel] = {**KERNELS, **code_for("reference")}
"""The kernels for the captured graph, which autograd differentiates. They are written apart from those that they
check."""
