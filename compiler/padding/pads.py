"""Padding of parameters: a dim that axes do not divide is longer in programs than in the model, by zeros."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Pads = Mapping[str, tuple["Pad", ...]]
"""Paddings of values by name; at most one a dim."""


@dataclass(frozen=True, slots=True, order=True)
class Pad:
    """A dim of ``outer * real`` entries made one of ``outer * padded``: see it as ``(outer, padded)``; the first
    ``real`` entries of the second part are the model's, the others padding."""

    dim: int
    outer: int
    real: int
    padded: int


def pads_by_value(found: Iterable[tuple[tuple[str, int], Pad]]) -> dict[str, tuple[Pad, ...]]:
    """Return paddings by value and dim as the paddings of each value."""
    result: dict[str, tuple[Pad, ...]] = {}
    for (name, _), pad in sorted(found):
        result[name] = (*result.get(name, ()), pad)
    return result


def padded_shape(shape: Sequence[int], pads: Iterable[Pad]) -> tuple[int, ...]:
    """The shape in programs of a tensor that has ``shape`` in the model."""
    sizes = {pad.dim: pad.outer * pad.padded for pad in pads}
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def real_shape(shape: Sequence[int], pads: Iterable[Pad]) -> tuple[int, ...]:
    """The shape in the model of a tensor that has ``shape`` in programs."""
    sizes = {pad.dim: pad.outer * pad.real for pad in pads}
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def pads_from(facts: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, tuple[Pad, ...]]:
    """Read paddings from a manifest: by name, lists of dim, outer, real and padded."""
    return {name: tuple(Pad(*(int(number) for number in row)) for row in rows) for name, rows in facts.items()}


def facts_of(pads: Pads) -> dict[str, list[list[int]]]:
    """The inverse of ``pads_from``."""
    return {name: [[pad.dim, pad.outer, pad.real, pad.padded] for pad in rows] for name, rows in sorted(pads.items())}
