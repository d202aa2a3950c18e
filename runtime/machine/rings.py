"""One rank's part of a ring: it computes with the keys of one rank after the other, while these travel on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...compiler.layout.collectives import SEQUENCE, travelling_dtype
from ...compiler.layout.pieces import Interval
from ...compiler.layout.placement import TensorType
from ..communication import RingPart
from .attention import Attention, AttentionBackward, Scores, scale_of
from .site import Site
from .ways import runs


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
