"""The checker of padding: entries that the model does not have reach nothing that it has, followed line by line.

Parameters and their gradients hold zeros in their padding, which the update keeps. From there every line is followed by
its rule; what is reduced must hold there what ``neutral`` proves to add nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from .collectives import COLLECTIVES
from .factors import OpCall
from .neutral import REDUCTIONS, is_neutral
from .op_rules import TABLE, Row
from .pad_flow import Extra, Extras, PaddingFault, follow
from .padding import Pad, Pads
from .placement import TensorType
from .program import Function, Line, Program
from .verify import Fault, call_of

_ROW_MAX = "parc.row_max"


def check_padding(programs: Mapping[str, Program], pads: Pads, stored: Mapping[str, TensorType]) -> list[Fault]:
    """What pads changes no number of the model's, and gradients have zeros in it."""
    if not pads:
        return []
    faults = list(_stored_faults(pads, stored))
    known: dict[str, Extras] = {}
    for action in ("F", "B", "REDUCE") if not faults else ():
        program = programs[action]
        given = [_role(value.role, pads, known) for value in program.main.parameters]
        try:
            made = _walk(program, program.main, given, {})
        except _LineFault as fault:
            faults.append(Fault("padding", f"{program.role}.{action} {fault.where}", str(fault)))
            break
        for (key, _), extras in zip(program.main.returns, made, strict=True):
            name = f"gradient {key}" if action == "B" else key
            known[name] = extras
            kind, _, value = name.partition(" ")
            if kind != "saved" and not _same(extras, pads.get(value, ()) if kind == "gradient" else ()):
                faults.append(
                    Fault("padding", f"{action} {key}", "does not have zeros for padding, where its value is padded")
                )
    return faults


def tail_fault(reference: Program, ignored: Mapping[str, int]) -> str:
    """Why samples at the end of a batch that are no samples would change its loss, "" if they do not.

    ``ignored`` are inputs whose every entry is a target to ignore in such a sample; other inputs may hold anything
    there. The loss is then the same function of the parameters as without them, and so are its gradients.
    """
    if not any(function.name == "count" for function in reference.functions):
        return "its loss is no mean over targets, of which some can be left out"
    for function in reference.functions:
        given = []
        for value in function.parameters:
            kind, _, name = value.role.partition(" ")
            held = float(ignored[name]) if name in ignored else None
            tail = value.type.shape[:1] if kind == "input" else ()
            given.append(tuple(Extra(0, 1, 1, size, held) for size in tail if size > 1))
        try:
            made = _walk(reference, function, given, {})
        except _LineFault as fault:
            return f"samples are not apart in its {fault.where}: {fault}"
        if any(extra.real is not None for extras in made for extra in extras):
            return "what it keeps of a batch has a row for each sample"
    return ""


def _stored_faults(pads: Pads, stored: Mapping[str, TensorType]) -> Iterator[Fault]:
    for name, rows in pads.items():
        if name not in stored:  # nothing reads it
            continue
        shape = stored[name].shape
        fits = all(0 <= pad.dim < len(shape) and shape[pad.dim] == pad.outer * pad.padded for pad in rows)
        if not fits or any(not 0 < pad.real < pad.padded for pad in rows) or len({p.dim for p in rows}) != len(rows):
            yield Fault("padding", name, "is not padded as its type says")


def _role(role: str, pads: Pads, known: Mapping[str, Extras]) -> Extras:
    """The padding of what a program's parameter is bound to."""
    kind, _, name = role.partition(" ")
    if kind in ("parameter", "frozen"):
        return tuple(Extra(pad.dim, pad.outer, pad.real, pad.padded) for pad in pads.get(name, ()))
    return known.get(role, ())


def _same(extras: Extras, pads: Sequence[Pad]) -> bool:
    """Whether a value has zeros in just this padding."""
    zeros = {extra.dim: extra for extra in extras if extra.held == 0.0}
    fits = all(pad.dim in zeros and zeros[pad.dim].is_at(pad.outer, pad.real, pad.padded) for pad in pads)
    dims = {pad.dim for pad in pads}
    return fits and all(extra.real is None or extra.dim in dims for extra in extras)


class _LineFault(ValueError):
    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


_Memory = dict[tuple[str, tuple[Extras, ...]], list[Extras]]


def _walk(program: Program, function: Function, given: Sequence[Extras], memory: _Memory) -> list[Extras]:
    """The padding of what a function returns, from that of its parameters."""
    key = (function.name, tuple(given))
    if key not in memory:
        known = dict(zip((value.name for value in function.parameters), given, strict=True))
        values = function.values()
        for line in function.lines:
            operands = tuple(known[name] for name in line.uses())
            if line.calls_function:
                made = _walk(program, program.function(line.op), operands, memory)
            else:
                types = tuple(values[name].type for name in line.uses())
                results = tuple(value.type for value in line.results if value is not None)
                try:
                    made = _line(_Question(line, TABLE.get(line.op), types, results), operands)
                except PaddingFault as fault:
                    names = ", ".join(value.name for value in line.results if value is not None)
                    raise _LineFault(f"{function.name}: {names}", str(fault)) from None
            found = iter(made)
            known.update((value.name, next(found)) for value in line.results if value is not None)
        memory[key] = [known[name] for _, name in function.returns]
    return memory[key]


class _Question:
    """A line and its types; equal lines are followed once."""

    __slots__ = ("key", "line", "results", "types")

    def __init__(
        self, line: Line, row: Row | None, types: tuple[TensorType, ...], results: tuple[TensorType, ...]
    ) -> None:
        self.line, self.types, self.results = line, types, results
        self.key = (line.op, repr(line.args[1:]), repr(line.kwargs), row, types, results)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=8192)
def _line(question: _Question, operands: tuple[Extras, ...]) -> list[Extras]:
    """The padding of a line's results; a collective moves what a value holds, padding and all."""
    line = question.line
    if line.op == _ROW_MAX:
        return [_largest(question.types[0], operands[0])]
    if line.op in COLLECTIVES:
        return [operands[0]]
    call: OpCall = call_of(line, question.types, question.results, lambda item: item.size)
    return follow(call, operands, [type_.dtype for type_ in question.types])


def _largest(type_: TensorType, extras: Extras) -> Extras:
    last = len(type_.shape) - 1
    for extra in extras:
        if extra.dim == last and not is_neutral(_ROW_MAX, extra.held):
            wanted = REDUCTIONS[_ROW_MAX].value
            raise PaddingFault(f"{_ROW_MAX} reduces padding that holds {extra.held}, not {wanted}")
    return tuple(Extra(e.dim, e.outer, e.real, e.padded, None) for e in extras if e.dim != last)
