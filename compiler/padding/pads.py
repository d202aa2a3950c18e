"""Pads: a dim that axes do not divide is longer in programs than in the model, by entries of zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Pads = Mapping[str, tuple["Pad", ...]]
"""Paddings of values by name; at most one a dim."""


@dataclass(frozen=True, slots=True, order=True)
class Pad:
    """The padding of a dim of ``outer * real`` entries to ``outer * padded``: in the dim seen as ``(outer, padded)``,
    the first ``real`` of each ``padded`` entries are the model's, the others padding."""

    dim: int
    outer: int
    real: int
    padded: int


def pads_by_value(by_dim: Iterable[tuple[tuple[str, int], Pad]]) -> dict[str, tuple[Pad, ...]]:
    """Return paddings by value and dim as the paddings of each value."""
    pads: dict[str, tuple[Pad, ...]] = {}
    for (name, _), pad in sorted(by_dim):
        pads[name] = (*pads.get(name, ()), pad)
    return pads


def padded_shape(shape: Sequence[int], pads: Iterable[Pad]) -> tuple[int, ...]:
    """Return the shape in programs of a tensor that has ``shape`` in the model."""
    sizes = {pad.dim: pad.outer * pad.padded for pad in pads}
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def real_shape(shape: Sequence[int], pads: Iterable[Pad]) -> tuple[int, ...]:
    """Return the shape in the model of a tensor that has ``shape`` in programs."""
    sizes = {pad.dim: pad.outer * pad.real for pad in pads}
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def pads_from(facts: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, tuple[Pad, ...]]:
    """Read paddings from a manifest: by name, lists of dim, outer, real and padded."""
    return {name: tuple(Pad(*(int(number) for number in row)) for row in rows) for name, rows in facts.items()}


def facts_of(pads: Pads) -> dict[str, list[list[int]]]:
    """Return the form of paddings in a manifest; ``pads_from`` reads it."""
    return {name: [[pad.dim, pad.outer, pad.real, pad.padded] for pad in rows] for name, rows in sorted(pads.items())}
