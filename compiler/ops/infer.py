"""Type inference: the placements of an operator's results from those of its operands, by its rule. Every line of a
program must obey it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..layout.collectives import TypeFault
from ..layout.mesh import Mesh
from ..layout.placement import AxisType, Packed, Placement, Split
from ..layout.stretches import Outer, nest
from .factors import OpCall, OpRule, RuleError, opaque
from .rules import TABLE, facts, rule_for
from .splits import from_factor, to_factor, to_factors

Part = tuple[str, Outer]
_CACHED_CALLS = 1 << 13
"""The most inferred calls that are remembered, a few kilobytes each."""


def rule_or_opaque(call: OpCall) -> OpRule:
    """Return a call's rule; without one, the rule that needs every dim whole."""
    try:
        call_rule = rule_for(call)
    except RuleError:
        call_rule = None
    return opaque(call) if call_rule is None else call_rule


def infer(
    call: OpCall, operands: Sequence[Placement], mesh: Mesh, expected: Sequence[Placement] | None = None
) -> list[Placement]:
    """Return the placement of each result of a call on *global* shapes.

    ``R`` and ``I`` hold the same bytes and both read ``I``. ``expected`` settles what operands cannot: the split of a
    factor that only results have (a rank that makes its own part of a mask), which is free.

    Raises:
        TypeFault: the operator, applied to these types, would need communication that is not there.
    """
    row = TABLE.get(call.op)
    return list(_inferred(call, tuple(operands), mesh, None if expected is None else tuple(expected), row and row.rule))


@lru_cache(maxsize=_CACHED_CALLS)
def _inferred(
    call: OpCall, operands: tuple[Placement, ...], mesh: Mesh, expected: tuple[Placement, ...] | None, _: Any
) -> tuple[Placement, ...]:
    """Infer placements once for equal calls on equal types, which layers and plans repeat, as long as the operator has
    the same rule."""
    rule = rule_or_opaque(call)
    results: list[dict[str, AxisType]] = [{} for _ in rule.results]
    for axis in mesh.names:
        kinds = [_data(placement[axis]) for placement in operands]
        part = _split_part(call, rule, axis, kinds, mesh)
        if part is None and expected is not None and not any(kind == "P" for kind in kinds):
            part = _free_part(rule, axis, expected, mesh)
        partial = frozenset(index for index, kind in enumerate(kinds) if kind == "P")
        if part is None:
            if partial and partial not in rule.linear:
                raise TypeFault(f"{call.op} is not linear in operands that are still to be summed over `{axis}`")
            for result in results:
                result[axis] = "P" if partial else "I"
            continue
        if partial:
            raise TypeFault(f"{call.op} mixes a value split over `{axis}` with one still to be summed over it")
        _require_split(call, rule, axis, part, kinds, mesh)
        for dims, result in zip(rule.results, results, strict=True):
            at = from_factor(rule, dims, *part)
            result[axis] = Split(*at) if at else "P"
    placements = [Placement.of(mesh, result) for result in results]
    _require_disjoint(call, placements, mesh)
    return tuple(placements)


def place_created(
    call: OpCall, operands: Sequence[Placement | None], zeros: frozenset[int], mesh: Mesh
) -> list[Placement]:
    """Return the placements of a call's operands. An operand that is None is created at its reader, in the placement
    that the other operands ask for. ``zeros`` are operands of zeros alone, which may be a partial of any sum."""
    rule = rule_or_opaque(call)
    created: list[dict[str, AxisType]] = [{} for _ in operands]
    for axis in mesh.names:
        kinds: list[AxisType] = ["I" if placement is None else _data(placement[axis]) for placement in operands]
        part = _split_part(call, rule, axis, kinds, mesh)
        partial = frozenset(index for index, kind in enumerate(kinds) if kind == "P")
        summed = next((together for together in rule.linear if partial and partial <= together), frozenset())
        for index, (dims, types) in enumerate(zip(rule.operands, created, strict=True)):
            at = from_factor(rule, dims, *part) if part is not None else None
            if at is not None:
                types[axis] = Split(*at)
            elif index in zeros and index in summed:
                types[axis] = "P"
    return [
        Placement.of(mesh, types) if placement is None else placement
        for placement, types in zip(operands, created, strict=True)
    ]


def _data(kind: AxisType) -> AxisType:
    return "I" if kind == "R" else kind


def _split_part(call: OpCall, rule: OpRule, axis: str, kinds: Sequence[AxisType], mesh: Mesh) -> Part | None:
    """Return the part of a factor that all split operands split over the axis; None where no operand is split."""
    split = [(index, kind) for index, kind in enumerate(kinds) if isinstance(kind, Split)]
    for index, kind in split:
        if kind.dim >= len(rule.operands[index]):
            raise TypeFault(f"operand {index} of {call.op} has no dim {kind.dim}")
    splits = [(rule.operands[index], kind.dim, kind.outer) for index, kind in split]
    common: Part | None = None
    for (index, kind), part in zip(split, to_factors(rule, splits, mesh.size(axis)), strict=True):
        if part is None or part[0] in rule.whole:
            raise TypeFault(f"{call.op} needs dim {kind.dim} of operand {index} whole on `{axis}`")
        if common is not None and common != part:
            raise TypeFault(f"{call.op} has operands split differently over `{axis}`")
        common = part
    return common


def _free_part(rule: OpRule, axis: str, expected: Sequence[Placement], mesh: Mesh) -> Part | None:
    """Return a part of a factor that no operand has, as the declared results split it."""
    owned = {name for dims in rule.operands for names in dims for name in names}
    for placement, dims in zip(expected, rule.results, strict=True):
        kind = placement[axis]
        if isinstance(kind, Split):
            part = to_factor(rule, dims, kind.dim, kind.outer, mesh.size(axis))
            if part is not None and part[0] not in owned and part[0] not in rule.whole:
                return part
    return None


def _require_split(call: OpCall, rule: OpRule, axis: str, part: Part, kinds: Sequence[AxisType], mesh: Mesh) -> None:
    for index, (kind, dims) in enumerate(zip(kinds, rule.operands, strict=True)):
        at = from_factor(rule, dims, *part)
        if at is not None and kind != Split(*at):
            raise TypeFault(f"operand {index} of {call.op} is whole on `{axis}`, where another is split")


def _require_disjoint(call: OpCall, placements: Sequence[Placement], mesh: Mesh) -> None:
    for placement, shape in zip(placements, call.results, strict=True):
        for dim, size in enumerate(shape):
            splits = placement.splits(dim)
            if not nest(size, [(outer, mesh.size(axis)) for outer, axis in splits]):
                axes = ", ".join(f"`{axis}`" for _, axis in splits)
                raise TypeFault(f"dim {dim} of the result of {call.op}, of size {size}, is not split over {axes} so")


# ---- packed values


def packed_result(call: OpCall, operands: Sequence[Packed]) -> Packed:
    """Return which rows of a call's results are present, from those of its operands.

    Raises:
        TypeFault: the operator would compute with rows that are not present.
    """
    row = facts(call.op)
    packs = row.packs
    kinds = {packed for packed in operands if packed is not None}
    if not kinds:
        return (int(call.args[2]), call.operands[1][0]) if packs == "rows" and not row.reroutes else None
    if len(kinds) > 1:
        raise TypeFault(f"{call.op} has operands that are packed differently")
    if packs and not row.reroutes and call.args[-1] != next(iter(kinds))[0]:
        raise TypeFault(
            f"{call.op} counts {call.args[-1]} experts for a token, but its rows are those of another number"
        )
    if packs != "sums":
        if not packs and not _by_rows(call, operands):
            raise TypeFault(f"{call.op} does not compute row by row, but its operand is packed")
        return kinds.pop()
    return None


def _by_rows(call: OpCall, operands: Sequence[Packed]) -> bool:
    """Return whether an operator computes every row of its results from the same row of its packed operands, and has no
    other operand with these rows."""
    rule = rule_or_opaque(call)
    rows = {dims[0] for dims, packed in zip(rule.operands, operands, strict=True) if packed is not None}
    if len(rows) != 1 or any(dims[:1] != (*rows,) for dims in rule.results):
        return False
    (names,) = rows
    others = [dims for dims, packed in zip(rule.operands, operands, strict=True) if packed is None]
    whole = any(name in rule.whole for name in names)
    return not whole and not any(name in names for dims in others for dim in dims for name in dim)
