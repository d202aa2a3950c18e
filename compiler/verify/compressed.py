"""The check of compressed gradients (error feedback): all that rounding takes from a gradient is kept as its residual,
which the next step adds.

Numbers are tested in float64, where rounding changes nothing, so no test sees a residual that is dropped, added twice,
or another gradient's. Proved of REDUCE: it rounds gradients alone, in the formats and over the axes of the plan's
``compress`` lines; the residual of the step before is added before the first rounding; the residual that it returns is
the sum of what each of its roundings took.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..layout.collectives import COLLECTIVES, WAIT
from ..ops.rules import facts
from ..program.actions import REDUCE
from ..program.binding import UNSCALE, Binding
from ..program.program import Fault, Line, Program, Ref
from ..program.step_values import residual, residual_of

Sent = frozenset[tuple[str, str]]
"""The formats in which the plan lets gradients travel, each with an axis, or with the sub-axis across nodes."""
_ROUND, _SCATTER, _GATHER = "parc.round_int8", "parc.reduce_scatter_int8", "parc.all_gather_int8"
_MOVES = frozenset(
    {"parc.all_reduce", "parc.reduce_scatter", "parc.all_gather", "parc.shard", "parc.pad", "parc.grow_pad.default",
     WAIT}
)  # fmt: skip
"""The operators that leave a gradient what it is."""


@dataclass(frozen=True, slots=True)
class _GradPart:
    """A value of REDUCE, by its meaning for the gradient of one parameter."""

    name: str
    """The parameter."""
    what: Literal["gradient", "residual", "taken"]
    """The gradient; the residual of the step before; or what ``roundings`` took from the gradient."""
    roundings: frozenset[str] = frozenset()
    """The results of the lines that rounded the gradient."""
    fed_back: bool = False
    """True for a gradient to which the residual of the step before is added."""


class _RoundingFault(ValueError):
    """The error of a line that rounds what it may not."""


def check_compressed(programs: Mapping[str, Program], sent: Sent) -> Iterator[Fault]:
    """Find roundings that the plan does not ask for, and residuals that are not kept for the next step."""
    for action, program in programs.items():
        for function in program.functions if action != REDUCE else ():
            for line in function.lines:
                if line.op in (_ROUND, _SCATTER, _GATHER):
                    yield Fault("types", f"{action} {function.name}", f"has `{line.op}`, which is for REDUCE")
    yield from _Reduce(programs[REDUCE], sent).faults()


class _Reduce:
    """The parts of gradients among the values of REDUCE, followed line by line."""

    def __init__(self, program: Program, sent: Sent) -> None:
        self.program, self.sent = program, sent
        self.types = {name: value.type for name, value in program.main.values().items()}
        self.bindings = {value.name: value.binding for value in program.main.parameters}
        self.makers = program.main.makers
        self.parts: dict[str, _GradPart] = {}

    def faults(self) -> Iterator[Fault]:
        """Find the faults of its lines and of its results."""
        main = self.program.main
        for value in main.parameters:
            if value.kind == "gradient" and value.binding is not None:
                self.parts[value.name] = _GradPart(value.binding.name, "gradient")
            elif of := residual_of(value.binding):
                self.parts[value.name] = _GradPart(of, "residual")
        for line in main.lines:
            names = [item.name for item in line.args if isinstance(item, Ref)]
            try:
                part = self._meaning(line, names)
            except _RoundingFault as fault:
                yield Fault("types", f"REDUCE {line.names}", str(fault))
                continue
            if part is not None:
                self.parts.update((value.name, part) for value in line.made)
        returned = dict(main.returns)
        for key, name in returned.items():
            if key.kind == "gradient":
                yield from self._residual_faults(key.name, self.parts.get(name), returned)
            if (of := residual_of(key)) and Binding("gradient", of) not in returned:
                yield Fault("types", f"REDUCE {key}", "is left of no gradient")

    def _residual_faults(
        self, name: str, gradient: _GradPart | None, returned: Mapping[Binding, str]
    ) -> Iterator[Fault]:
        """Find the faults of one gradient and of its residual."""
        key = residual(name)
        read = key in self.program.main.bindings
        rounded = gradient.roundings if gradient is not None else frozenset()
        taken = self.parts.get(returned.get(key, ""))
        if read != (key in returned) or read != bool(rounded):
            yield Fault("types", f"REDUCE {key}", "is not both read and returned, or nothing is rounded")
        elif read and (gradient is None or not gradient.fed_back):
            yield Fault("types", f"REDUCE {key}", "is not added to the gradient before it is rounded")
        elif read and (taken is None or (taken.name, taken.what, taken.roundings) != (name, "taken", rounded)):
            yield Fault("types", f"REDUCE {key}", "is not what all roundings of the gradient took from it")

    def _meaning(self, line: Line, names: Sequence[str]) -> _GradPart | None:
        """Return what a line's result is for a gradient, None for nothing.

        Raises:
            _RoundingFault: the line rounds what it may not.
        """
        parts = [self.parts.get(name) for name in names]
        first = parts[0] if parts else None
        if line.op in (_ROUND, _SCATTER, _GATHER) or self._narrows(line, names):
            return self._rounded(line, names[0], first)
        if line.op in COLLECTIVES and names and names[0] in self.makers and self.makers[names[0]].op == _ROUND:
            raise _RoundingFault(f"{line.op} sends what is rounded to int8 as it is")
        if first is not None and first.roundings and line.op in COLLECTIVES:
            row = COLLECTIVES[line.op]
            if row.communicates and not row.keeps and not self._allowed(row.axes(line.args[1:]), "fp16"):
                raise _RoundingFault(f"{line.op} adds up what is rounded, over ranks that sum exactly")
        if line.op in _MOVES or facts(line.op).casts:
            return first
        if line.op == "aten.mul.Tensor" and self.bindings.get(names[-1]) == UNSCALE:
            return first
        if line.op == "aten.add.Tensor" and not line.kwargs and len(parts) == len(line.args) == 2:
            return _sum_of_parts(*parts)
        if line.op == "aten.sub.Tensor" and not line.kwargs and len(parts) == len(line.args) == 2:
            return self._difference(names, *parts)
        return None

    def _allowed(self, axes: Collection[str], format_: str) -> bool:
        """Return whether the plan lets gradients travel in a format over all of these axes."""
        return {*axes} <= (over := {axis for name, axis in self.sent if name == format_}) and bool(over)

    def _narrows(self, line: Line, names: Sequence[str]) -> bool:
        if line.op in COLLECTIVES or not facts(line.op).casts or not names:
            return False
        return line.made[0].type.dtype.itemsize < self.types[names[0]].dtype.itemsize

    def _rounded(self, line: Line, operand: str, part: _GradPart | None) -> _GradPart:
        axes = str(line.args[1]).split(",") if line.op in COLLECTIVES and line.args[1] else []
        if not self._allowed(axes, "int8" if line.op in COLLECTIVES else "fp16"):
            raise _RoundingFault(f"{line.op} rounds, which no line of the plan asks for")
        if part is None or part.what != "gradient":
            raise _RoundingFault(f"{line.op} rounds what is no gradient")
        if line.op in (_SCATTER, _GATHER):
            before = self.makers.get(operand)
            wanted = line.args[1:] if line.op == _SCATTER else ("", line.args[2], 1)
            if before is None or before.op != _ROUND or tuple(before.args[1:]) != tuple(wanted):
                raise _RoundingFault(f"{line.op} rounds again, and what this takes is not kept")
            return part
        return replace(part, roundings=part.roundings | {line.made[0].name})

    def _difference(self, names: Sequence[str], whole: _GradPart | None, rounded: _GradPart | None) -> _GradPart | None:
        """Return what one rounding took, if a subtraction is of its operand and its result."""
        if whole is None or rounded is None or whole.what != "gradient":
            return None
        if replace(whole, roundings=rounded.roundings) != rounded or not whole.roundings < rounded.roundings:
            return None
        last, *more = rounded.roundings - whole.roundings
        direct = names[1] == last or next(iter(self.makers[names[1]].uses), "") == last
        exact = self.makers[last].uses[0] == names[0] and direct and not more
        return _GradPart(whole.name, "taken", frozenset({last})) if exact else None


def _sum_of_parts(one: _GradPart | None, other: _GradPart | None) -> _GradPart | None:
    """Return the sum of a gradient and its residual, or of what two sets of roundings took."""
    if one is None or other is None or one.name != other.name:
        return None
    kinds = {one.what, other.what}
    if kinds == {"gradient", "residual"} and not (one.roundings or other.roundings or one.fed_back or other.fed_back):
        return _GradPart(one.name, "gradient", fed_back=True)
    if kinds == {"taken"} and not one.roundings & other.roundings:
        return _GradPart(one.name, "taken", one.roundings | other.roundings)
    return None
