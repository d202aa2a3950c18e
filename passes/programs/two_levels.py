"""Two levels: hierarchical collectives, a sum or a gather over an axis that crosses nodes as one inside nodes and one
across them.

A sum is a reduce-scatter inside each node, an all-reduce of the parts across nodes, and an all-gather inside. A gather
goes across first, while parts are small. Each line is replaced by lines with the same result, so a backward stays that
of its forward.
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
"""A line without its names: operator, arguments after the operand, and the result's type."""
Choose = Callable[[Sequence[int], str], int | None]
"""A function that chooses the dim to cut, of those that divide over the axes inside; None leaves the sum whole."""


def steps_of(op: str, args: Sequence[Any], before: TensorType, after: TensorType, mesh: Mesh, levels: Levels,
             choose: Choose) -> list[Step]:  # fmt: skip
    """Return the steps of a collective in two levels; none where it stays in one."""
    axes = axes_of(args) if op in _HIERARCHICAL and args[0] else ()
    whole = [axis for axis in levels if set(mesh.parts(axis)) <= set(axes)]
    inside = [part for axis in whole for part in mesh.parts(axis)[levels[axis] :]]
    if not inside or (op != "parc.all_reduce" and len(inside) + sum(levels[axis] for axis in whole) < len(axes)):
        return []
    across = [axis for axis in axes if axis not in inside]
    steps = []
    at = before
    for step_axes, placement in _placements(op, before, after, inside, across, mesh, choose):
        text = ",".join(step_axes)
        lowered = lower(text, at.placement, placement, mesh)
        assert lowered is not None, (op, text)
        at = replace(at, placement=placement)
        steps.append((*lowered, at))
    return steps


_HIERARCHICAL = ("parc.all_reduce", "parc.reduce_scatter", "parc.all_gather")
"""The collectives that can be in two levels."""


def _placements(
    op: str, before: TensorType, after: TensorType, inside: Sequence[str], across: Sequence[str], mesh: Mesh,
    choose: Choose,
) -> Iterator[tuple[Sequence[str], Placement]]:  # fmt: skip
    """Yield the axes of each step of a collective, and the placement after it."""
    if op == "parc.all_reduce":
        cuts = dict(cuts_over(before, inside, mesh))
        dim = choose([*cuts], ",".join(inside))
        if dim is not None and dim in cuts:
            yield inside, cuts[dim]
            yield across, cuts[dim].replace(dict.fromkeys(across, "I"))
            yield inside, after.placement
        return
    first, second = (inside, across) if op == "parc.reduce_scatter" else (across, inside)
    yield first, before.placement.replace({axis: after.placement[axis] for axis in first})
    yield second, after.placement


def cuts_over(type_: TensorType, axes: Sequence[str], mesh: Mesh) -> Iterator[tuple[int, Placement]]:
    """Yield the dims of a value that can be cut over more axes, with the placement after the cut."""
    for dim, size in enumerate(type_.shape):
        try:
            cut = Split(dim, global_outer(type_.placement, mesh, dim, 1))
        except ValueError:  # it would cut across the parts of another split
            continue
        placement = type_.placement.replace(along(axes, cut, mesh))
        if size and placement.nests(type_.shape, mesh):
            yield dim, placement


@dataclass
class TwoLevels:
    """The pass of two levels. It takes the programs of all roles, and returns them with hierarchical collectives over
    the axes of ``levels``. ``larger`` are the choices for a larger model, whose twin this is; ``dims`` are its own."""

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
        rewritten: dict[int, Program] = {}  # programs that roles share stay shared
        for programs in roles.values():
            for program in programs.values():
                rewritten[id(program)] = rewritten.get(id(program)) or self._program(program)
        return {name: {key: rewritten[id(one)] for key, one in programs.items()} for name, programs in roles.items()}

    def _program(self, program: Program) -> Program:
        places: Counter[str] = Counter()
        return replace(program, functions=tuple(self._function(one, program, places) for one in program.functions))

    def _function(self, function: Function, program: Program, places: Counter[str]) -> Function:
        values, rewriter = function.values(), Rewriter(self.mesh, function)
        for line in (line for line in function.lines if line.op in _HIERARCHICAL and isinstance(line.args[0], Ref)):
            place = f"{program.action} {line.origin.module} {line.origin.source}"
            places[place] += 1
            operand, result = line.args[0], line.made[0]
            types, choose = (values[operand.name].type, result.type), self._chooser(f"{place} {places[place]}")
            steps = steps_of(line.op, line.args[1:], *types, self.mesh, self.levels, choose)
            rewriter.insert_before(line)
            for op, args, type_ in steps[:-1]:
                name = f"{op.removeprefix('parc.')}_{result.name}"
                operand = Ref(rewriter.emit(op, (operand, *args), type_, line.origin, name).name)
            for op, args, _ in steps[-1:]:
                rewriter.replace(line, replace(line, op=op, args=(operand, *args)))
        return rewriter.function()

    def _chooser(self, place: str) -> Choose:
        """Return the choice for the sum at a place of a program, which is noted."""

        def choose(dims: Sequence[int], axes: str) -> int | None:
            dim = next(iter(dims), None)
            if self.larger is not None:
                dim, _ = self.larger.get((place, axes)) or (None, False)
            elif self.choices is not None:
                dim = self.choices.make((place, axes), dim)
            self.dims[place, axes] = None if dim is None else (dim, False)
            return dim

        return choose
