"""Two levels: a sum or a gather over an axis that crosses nodes as one inside nodes and one across them.

Ranks of a node sum among each other first, so that each has a part to sum with its like on other nodes; then the node's
ranks gather the parts. A gather goes across first, while parts are small. Each line is replaced alone by lines that
make the same value, so a backward stays that of its forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...compiler.layout.collectives import axes_of, global_outer, lower
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, Split, TensorType, along
from ...compiler.program.program import Function, Program, Ref
from ...compiler.program.rewriter import Rewriter
from ...compiler.program.roles import Programs
from ...compiler.resolve.requests import Choices, Levels, ShardDims

Step = tuple[str, tuple[Any, ...], TensorType]
"""A line without its names: operator, arguments behind the operand, and the result's type."""
Choose = Callable[[Sequence[int], str], int | None]
"""A function that chooses, of the dims that divide over the axes inside, the one to cut; None leaves the sum whole."""


def steps_of(op: str, args: Sequence[Any], before: TensorType, after: TensorType, mesh: Mesh, levels: Levels,
             choose: Choose) -> list[Step]:  # fmt: skip
    """Return the steps of a collective in two levels; none where it stays one."""
    axes = axes_of(args) if op in _WAYS and args[0] else ()
    whole = [axis for axis in levels if set(mesh.parts(axis)) <= set(axes)]
    inside = [part for axis in whole for part in mesh.parts(axis)[levels[axis] :]]
    if not inside or (op != "parc.all_reduce" and len(inside) + sum(levels[axis] for axis in whole) < len(axes)):
        return []
    across = [axis for axis in axes if axis not in inside]
    steps = []
    at = before
    for moved, placement in _WAYS[op](before, after, inside, across, mesh, choose):
        text = ",".join(moved)
        lowered = lower(text, at.placement, placement, mesh)
        assert lowered is not None, (op, text)
        at = replace(at, placement=placement)
        steps.append((*lowered, at))
    return steps


_Way = Iterator[tuple[Sequence[str], Placement]]
"""The axes over which each step moves, and the placement after it."""


def _all_reduce(before: TensorType, after: TensorType, inside: Sequence[str], across: Sequence[str], mesh: Mesh,
                choose: Choose) -> _Way:  # fmt: skip
    cuts = dict(cuts_over(before, inside, mesh))
    dim = choose([*cuts], ",".join(inside))
    if dim is None or dim not in cuts:
        return
    yield inside, cuts[dim]
    yield across, cuts[dim].replace(dict.fromkeys(across, "I"))
    yield inside, after.placement


def _reduce_scatter(before: TensorType, after: TensorType, inside: Sequence[str], across: Sequence[str], mesh: Mesh,
                    choose: Choose) -> _Way:  # fmt: skip
    yield inside, before.placement.replace({axis: after.placement[axis] for axis in inside})
    yield across, after.placement


def _all_gather(before: TensorType, after: TensorType, inside: Sequence[str], across: Sequence[str], mesh: Mesh,
                choose: Choose) -> _Way:  # fmt: skip
    yield across, before.placement.replace({axis: after.placement[axis] for axis in across})
    yield inside, after.placement


_WAYS = {
    "parc.all_reduce": _all_reduce, "parc.reduce_scatter": _reduce_scatter, "parc.all_gather": _all_gather,
}  # fmt: skip


def cuts_over(type_: TensorType, axes: Sequence[str], mesh: Mesh) -> Iterator[tuple[int, Placement]]:
    """Yield the dims of a value that can be cut over more axes, with the placement after the cut."""
    for dim, size in enumerate(type_.shape):
        try:
            cut = Split(dim, global_outer(type_.placement, mesh, dim, 1))
        except ValueError:  # across parts that lie there split otherwise
            continue
        placement = type_.placement.replace(along(axes, cut, mesh))
        if size and placement.nests(type_.shape, mesh):
            yield dim, placement


@dataclass
class TwoLevels:
    """The rewriter of a step's programs. ``larger`` are the choices made for a larger model, whose twin this is."""

    mesh: Mesh
    levels: Levels
    larger: ShardDims | None = None
    choices: Choices | None = None
    dims: dict[tuple[str, str], tuple[int, bool] | None] = field(default_factory=dict)
    before: dict[str, Programs] = field(default_factory=dict)
    """The programs of the roles with every collective in one level."""

    def roles(self, roles: Mapping[str, Programs]) -> dict[str, Programs]:
        """Return the programs of all roles, with collectives in two levels."""
        if not self.levels:
            return dict(roles)
        self.before = dict(roles)
        made: dict[int, Program] = {}  # programs that roles share stay shared
        for programs in roles.values():
            for program in programs.values():
                made[id(program)] = made.get(id(program)) or self._program(program)
        return {name: {key: made[id(one)] for key, one in programs.items()} for name, programs in roles.items()}

    def _program(self, program: Program) -> Program:
        places: Counter[str] = Counter()
        return replace(program, functions=tuple(self._function(one, program, places) for one in program.functions))

    def _function(self, function: Function, program: Program, places: Counter[str]) -> Function:
        values, rewriter = function.values(), Rewriter(self.mesh, function)
        for line in (line for line in function.lines if line.op in _WAYS and isinstance(line.args[0], Ref)):
            place = f"{program.action} {line.origin.module} {line.origin.source}"
            places[place] += 1
            operand, made = line.args[0], line.made[0]
            types, choose = (values[operand.name].type, made.type), self._chooser(f"{place} {places[place]}")
            steps = steps_of(line.op, line.args[1:], *types, self.mesh, self.levels, choose)
            rewriter.insert_before(line)
            for op, args, type_ in steps[:-1]:
                name = f"{op.removeprefix('parc.')}_{made.name}"
                operand = Ref(rewriter.emit(op, (operand, *args), type_, line.origin, name).name)
            for op, args, _ in steps[-1:]:
                rewriter.replace(line, replace(line, op=op, args=(operand, *args)))
        return rewriter.function()

    def _chooser(self, place: str) -> Choose:
        def choose(dims: Sequence[int], axes: str) -> int | None:
            dim = next(iter(dims), None)
            if self.larger is not None:
                dim, _ = self.larger.get((place, axes)) or (None, False)
            elif self.choices is not None:
                dim = self.choices.make((place, axes), dim)
            self.dims[place, axes] = None if dim is None else (dim, False)
            return dim

        return choose
