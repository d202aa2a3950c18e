"""The checker of compressed gradients: what rounding takes from a sum over ranks is kept, all of it, for the next step.

Numbers are tested in float64, where rounding is nothing, so it is here that a difference that is not kept, kept twice,
or never added again is refused. What is proved of REDUCE: it rounds gradients alone, as the plan's lines say; a rounded
gradient had added what the last step left of it; and it returns what each of its roundings left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..layout.collectives import COLLECTIVES, WAIT
from ..ops.rules import facts
from ..program.actions import REDUCE
from ..program.binding import UNSCALE, Binding
from ..program.program import Fault, Line, Program, Ref
from ..program.step_values import residual, residual_of

Sent = frozenset[tuple[str, str]]
"""The formats in which a plan's lines let gradients travel, each with an axis, or the part of one across nodes."""
_ROUND, _SCATTER, _GATHER = "parc.round_int8", "parc.reduce_scatter_int8", "parc.all_gather_int8"
_MOVES = frozenset(
    {"parc.all_reduce", "parc.reduce_scatter", "parc.all_gather", "parc.shard", "parc.grow_pad.default", WAIT}
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A value of REDUCE that is a gradient, with or without what the last step ``left`` of it and less what the
    ``roundings`` took; or what is left of it, which is what the roundings took."""

    name: str
    what: str
    roundings: frozenset[str] = frozenset()
    given: bool = False
    """True where what the last step left is added."""


class _Wrong(ValueError):
    """The fault of a line."""


def check_compressed(programs: Mapping[str, Program], sent: Sent) -> Iterator[Fault]:
    """Find roundings that the plan does not ask for, and differences that are not kept for the next step."""
    for action, program in programs.items():
        for function in program.functions if action != REDUCE else ():
            for line in function.lines:
                if line.op in (_ROUND, _SCATTER, _GATHER):
                    yield Fault("types", f"{action} {function.name}", f"has `{line.op}`, which is for REDUCE")
    yield from _Reduce(programs[REDUCE], sent).faults()


class _Reduce:
    """The values of REDUCE that are parts of gradients, followed line by line."""

    def __init__(self, program: Program, sent: Sent) -> None:
        self.program, self.sent = program, sent
        self.types = {name: value.type for name, value in program.main.values().items()}
        self.bindings = {value.name: value.binding for value in program.main.parameters}
        self.made: dict[str, Line] = {}
        self.parts: dict[str, _Part] = {}

    def faults(self) -> Iterator[Fault]:
        """Find the faults of its lines and of its results."""
        main = self.program.main
        for value in main.parameters:
            if value.kind == "gradient" and value.binding is not None:
                self.parts[value.name] = _Part(value.binding.name, "gradient")
            elif of := residual_of(value.binding):
                self.parts[value.name] = _Part(of, "residual")
        for line in main.lines:
            names = [item.name for item in line.args if isinstance(item, Ref)]
            try:
                part = self._part(line, names)
            except _Wrong as wrong:
                yield Fault("types", f"REDUCE {', '.join(value.name for value in line.made)}", str(wrong))
                continue
            for value in line.made:
                self.made[value.name] = line
                if part is not None:
                    self.parts[value.name] = part
        returned = dict(main.returns)
        for key, name in returned.items():
            if key.kind == "gradient":
                yield from self._kept(key.name, self.parts.get(name), returned)
            if (of := residual_of(key)) and Binding("gradient", of) not in returned:
                yield Fault("types", f"REDUCE {key}", "is left of no gradient")

    def _kept(self, name: str, gradient: _Part | None, returned: Mapping[Binding, str]) -> Iterator[Fault]:
        """Find the faults of one gradient and of what is left of it."""
        key = residual(name)
        read = key in self.program.main.bindings
        rounded = gradient.roundings if gradient is not None else frozenset()
        left = self.parts.get(returned.get(key, ""))
        if read != (key in returned) or read != bool(rounded):
            yield Fault("types", f"REDUCE {key}", "is not both read and returned, or nothing is rounded")
        elif read and (gradient is None or not gradient.given):
            yield Fault("types", f"REDUCE {key}", "is not added to the gradient before it is rounded")
        elif read and (left is None or (left.name, left.what, left.roundings) != (name, "left", rounded)):
            yield Fault("types", f"REDUCE {key}", "is not what all roundings of the gradient took from it")

    def _part(self, line: Line, names: Sequence[str]) -> _Part | None:
        """Return what a line's result is, if it is a part of a gradient.

        Raises:
            _Wrong: the line rounds what it may not.
        """
        parts = [self.parts.get(name) for name in names]
        first = parts[0] if parts else None
        if line.op in (_ROUND, _SCATTER, _GATHER) or self._narrows(line, names):
            return self._rounded(line, names[0], first)
        if line.op in COLLECTIVES and names and names[0] in self.made and self.made[names[0]].op == _ROUND:
            raise _Wrong(f"{line.op} sends what is rounded to int8 as it is")
        if first is not None and first.roundings and line.op in COLLECTIVES:
            row = COLLECTIVES[line.op]
            if row.communicates and not row.keeps and not self._sent(row.axes(line.args[1:]), "fp16"):
                raise _Wrong(f"{line.op} adds up what is rounded, over ranks that sum exactly")
        if line.op in COLLECTIVES or line.op in _MOVES or facts(line.op).casts:
            moves = line.op in _MOVES or line.op == "parc.pad" or facts(line.op).casts
            return first if moves else None
        if line.op == "aten.mul.Tensor" and self.bindings.get(names[-1]) == UNSCALE:
            return first
        if line.op == "aten.add.Tensor" and not line.kwargs and len(parts) == len(line.args) == 2:
            return _added(*parts)
        if line.op == "aten.sub.Tensor" and not line.kwargs and len(parts) == len(line.args) == 2:
            return self._difference(names, *parts)
        return None

    def _sent(self, axes: Collection[str], format_: str) -> bool:
        """Return whether the plan lets gradients travel so over axes; it may name others."""
        return {*axes} <= (over := {axis for name, axis in self.sent if name == format_}) and bool(over)

    def _narrows(self, line: Line, names: Sequence[str]) -> bool:
        if line.op in COLLECTIVES or not facts(line.op).casts or not names:
            return False
        return line.made[0].type.dtype.itemsize < self.types[names[0]].dtype.itemsize

    def _rounded(self, line: Line, operand: str, part: _Part | None) -> _Part:
        axes = str(line.args[1]).split(",") if line.op in COLLECTIVES and line.args[1] else []
        if not self._sent(axes, "int8" if line.op in COLLECTIVES else "fp16"):
            raise _Wrong(f"{line.op} rounds, which no line of the plan asks for")
        if part is None or part.what != "gradient":
            raise _Wrong(f"{line.op} rounds what is no gradient")
        if line.op in (_SCATTER, _GATHER):
            before = self.made.get(operand)
            wanted = line.args[1:] if line.op == _SCATTER else ("", line.args[2], 1)
            if before is None or before.op != _ROUND or tuple(before.args[1:]) != tuple(wanted):
                raise _Wrong(f"{line.op} rounds again, and what this takes is not kept")
            return part
        return replace(part, roundings=part.roundings | {line.made[0].name})

    def _difference(self, names: Sequence[str], whole: _Part | None, rounded: _Part | None) -> _Part | None:
        """Return what one rounding takes, if that is what a subtraction makes."""
        if whole is None or rounded is None or (whole.name, whole.what, whole.given) != (
            rounded.name, "gradient", rounded.given
        ):  # fmt: skip
            return None
        (last, *more) = rounded.roundings - whole.roundings or [""]
        source = self.made[last].uses[0] if last in self.made else ""
        near = names[1] == last or next(iter(self.made[names[1]].uses), "") == last
        exact = source == names[0] and near and not more and whole.roundings < rounded.roundings
        return _Part(whole.name, "left", frozenset({last})) if exact else None


def _added(one: _Part | None, other: _Part | None) -> _Part | None:
    """Return the sum of a gradient and of what the last step left of it, or of two parts of what is left now."""
    if one is None or other is None or one.name != other.name:
        return None
    kinds = {one.what, other.what}
    if kinds == {"gradient", "residual"} and not (one.roundings or other.roundings or one.given or other.given):
        return _Part(one.name, "gradient", given=True)
    if kinds == {"left"} and not one.roundings & other.roundings:
        return _Part(one.name, "left", one.roundings | other.roundings)
    return None
