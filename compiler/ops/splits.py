"""Splits of dims as splits of an operator's factors, and back: so the split of one tensor tells those of the others."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..layout.stretches import nest, outer_of, sizes_of, within
from .factors import Dims, OpRule, quotient


def to_factor(rule: OpRule, dims: Dims, dim: int, outer: Any, ranks: int) -> tuple[str, Any] | None:
    """Return the factor that `S(dim, outer)` over `ranks` splits, and the outer part within it.

    `S(dim, outer)` sees the dim as (outer, D / outer) and splits the second part. None where that part begins inside
    no factor, reaches beyond the factor's end before it is divided among the ranks, or does not divide at all. What
    splits one of the factors of a sum is taken to split the others alike; `to_factors` knows better.
    """
    return to_factors(rule, [(dims, dim, outer)], ranks)[0]


def to_factors(
    rule: OpRule, splits: Sequence[tuple[Dims, int, Any]], ranks: int, *, guess: bool = True
) -> list[tuple[str, Any] | None]:
    """Return `to_factor` for several tensors of a call, each split at `(dims, dim, outer)` over the same ranks.

    Without `guess` a sum is not split because some of its factors are.
    """
    parts = [_own_factor(rule, dims, dim, outer, ranks) for dims, dim, outer in splits]
    for total, members in rule.sums.items():
        outers = {part[0]: part[1] for part in parts if part is not None and part[0] in members}
        if outers:
            together = _sum_outer(rule, members, outers) if guess or len(outers) == len(members) else 0
            parts = [(total, together) if part is not None and part[0] in members else part for part in parts]
        parts = [None if part is not None and part[0] == total and not _sum_divides(rule, *part, ranks) else part
                 for part in parts]  # fmt: skip
    return parts


def _own_factor(rule: OpRule, dims: Dims, dim: int, outer: Any, ranks: int) -> tuple[str, Any] | None:
    before = 1
    for name in dims[dim]:
        size = rule.sizes[name]
        if isinstance(outer, tuple):
            each = quotient(len(outer), before)
            if each is None or outer[:each] * before != outer:
                return None
            if _divides(size, outer[:each], 1):
                return (name, outer[:each]) if _divides(size, outer[:each], ranks) else None
        else:
            within = quotient(outer, before)
            if within is None:
                return None
            part = quotient(size, within)
            if part is not None and part != 1:
                whole = any(name == total for total in rule.sums)  # its members say whether it divides
                return (name, within) if whole or quotient(part, ranks) is not None else None
        before *= size
    return None


def _divides(size: int, outer: tuple[int, ...], ranks: int) -> bool:
    """Return whether a factor consists of parts in these proportions, each a multiple of the ranks."""
    return size % sum(outer) == 0 and all(part * (size // sum(outer)) % ranks == 0 for part in outer)


def _sum_outer(rule: OpRule, members: Sequence[str], outers: Mapping[str, Any]) -> Any:
    """Return the parts of a sum whose factors are split into ``outers``; a factor without one is split as the first."""
    first = next(iter(outers.values()))
    sizes: list[int] = []
    try:
        for name in members:
            sizes += sizes_of(outers.get(name, first), rule.sizes[name])
    except ValueError:
        return 0
    return outer_of(sizes)


def _sum_divides(rule: OpRule, total: str, outer: Any, ranks: int) -> bool:
    """Return whether each part of a sum lies in one of its factors, and divides there by the ranks."""
    members = rule.sums[total]
    sizes = tuple(rule.sizes[name] for name in members)
    if outer == 0:
        return False
    try:
        inner = within(outer, sizes)
    except ValueError:
        return False
    return all(nest(size, [(parts, ranks)]) for size, parts in zip(sizes, inner, strict=True))


def from_factor(rule: OpRule, dims: Dims, factor: str, outer_in_factor: Any) -> tuple[int, Any] | None:
    """Return the position `(dim, outer)` of a factor's part in a tensor of these dims; None if absent."""
    members = rule.sums.get(factor, ())
    for dim, names in enumerate(dims):
        for at, name in enumerate(names):
            if name in members:
                sizes = tuple(rule.sizes[member] for member in members)
                outer_in_factor = within(outer_in_factor, sizes)[members.index(name)]
            if name == factor or name in members:
                return dim, outer_in_factor * math.prod(rule.sizes[other] for other in names[:at])
    return None
