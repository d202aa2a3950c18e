"""Lines that write their result over an operand: what torch has for that. Machines run it where nobody reads the
operand again, and estimates of memory count on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch

from ..layout.mesh import Mesh
from ..ops.rules import facts
from .aliases import Aliases, StorageGroups
from .program import Function, Line, Ref, operator
from .totals import lasting


@cache
def form_over(op: str) -> Callable[..., torch.Tensor] | None:
    """Return torch's form of an operator that writes the result over the first operand, of the same shape and dtype:
    the operator in place, or the one that is given a place for its result. None if torch has neither."""
    row = facts(op)
    if not op.startswith("aten.") or not row.elementwise or row.storage == "view":
        return None
    target = operator(op)
    inside = getattr(getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None), target._overloadname, None)
    if inside is not None and _taken(inside) == _taken(target):
        return inside  # type: ignore[no-any-return]
    for name in target.overloadpacket.overloads() if len(target._schema.returns) == 1 else ():
        overload = getattr(target.overloadpacket, name)
        places = [argument.name for argument in overload._schema.arguments if argument.is_out]
        # a generated form computes the result elsewhere and copies it
        if len(places) == 1 and _taken(overload) == _taken(target) and torch.Tag.generated not in overload.tags:
            return _into_first(overload, places[0])
    return None


def _taken(target: Any) -> list[tuple[str, str]]:
    """Return the names and types of an operator's arguments, without a place for its result."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments if not argument.is_out]


def _into_first(overload: Any, place: str) -> Callable[..., torch.Tensor]:
    """Return the call of an operator whose first operand is the place for its result."""

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return overload(first, *args, **kwargs, **{place: first})  # type: ignore[no-any-return]

    return call


def spare_operands(function: Function, known: Aliases, delayed: frozenset[str]) -> Sequence[frozenset[str]]:
    """Return, for each line, the operands whose storage only its results need after it: lines may write over it.
    Parameters belong to the caller, except what a program takes to give it back as another. What ``delayed`` values
    are made of may be read after the last line. ``known`` has the function's aliases."""
    key = "spare", known, delayed
    if key not in function.derived:
        owned = {value.name for value in function.bound("gradient").values() if function.returned("gradient")}
        last: dict[str, float] = {name: at for at, line in enumerate(function.lines) for name in line.uses}
        kept = {value.name for value in function.parameters} - owned | lasting(function, delayed)
        last.update(dict.fromkeys(kept | {name for _, name in function.returns}, float("inf")))
        groups, spare = StorageGroups(last), list[frozenset[str]]()
        for index, line in enumerate(function.lines):
            roots = [groups.root(name) for name in line.uses]
            spare.append(frozenset(
                name for name, root in zip(line.uses, roots, strict=True)
                if groups.last[root] == index and roots.count(root) == 1
            ))  # fmt: skip
            for names in known.of(line):
                groups.join(names)
        function.derived[key] = spare
    stored: Sequence[frozenset[str]] = function.derived[key]
    return stored


def operand_over(line: Line, function: Function, spare: Collection[str], mesh: Mesh) -> int | None:
    """Return the position of the spare operand over which a line can write its one result; None if there is none."""
    (result, *more) = line.results
    if not spare or more or result is None:
        return None
    values = function.values()
    commutes = facts(line.op).computes in ("total", "multiple") and not line.kwargs
    for at, operand in enumerate(line.args[: 2 if commutes else 1]):
        if isinstance(operand, Ref) and operand.name in spare:
            type_ = values[operand.name].type
            if (type_.dtype, type_.local(mesh)) == (result.type.dtype, result.type.local(mesh)):
                return at
    return None
