"""Packed values in types: the operators that may read them, and whether their results are packed too."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout.collectives import TypeFault
from ..layout.placement import Packed
from .factors import OpCall
from .infer import rule_or_opaque
from .rules import facts


def packed_result(call: OpCall, operands: Sequence[Packed]) -> Packed:
    """Return the rows of a call's results that are there, from those of its operands.

    Raises:
        TypeFault: the operator would compute with rows that are not there.
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
    """Return whether an operator computes every row of its results from the same row of its packed operands, and reads
    nothing else that has a row for each."""
    rule = rule_or_opaque(call)
    rows = {dims[0] for dims, packed in zip(rule.operands, operands, strict=True) if packed is not None}
    if len(rows) != 1 or any(dims[:1] != (*rows,) for dims in rule.results):
        return False
    (names,) = rows
    others = [dims for dims, packed in zip(rule.operands, operands, strict=True) if packed is None]
    whole = any(name in rule.whole for name in names)
    return not whole and not any(name in names for dims in others for dim in dims for name in dim)
