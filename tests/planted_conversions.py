"""Planted bugs of placement: collectives dropped, doubled, retyped or re-grouped, shards and sums mistaken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from parc.compiler.layout.collectives import COLLECTIVES, WAIT
from parc.compiler.layout.placement import Split, TensorType
from parc.compiler.layout.stretches import nest
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Ref
from tests.planted_builds import GoodBuild
from tests.planted_sites import Mutant, Programs, Site, sites, with_main
from tests.planted_types import carried


def collectives(programs: Programs) -> Iterator[Site]:
    """Yield every collective line, and those that only look where the rank stands."""
    return sites(programs, lambda line: line.op in COLLECTIVES and line.op != WAIT)


def both(kind: str, what: str, programs: Programs, good: Programs) -> Iterator[Mutant]:
    """Yield the change with all later types left as declared, and with all later types derived anew from it."""
    yield Mutant(kind, what, programs)
    derived = carried(programs, good)
    if derived != programs:
        yield Mutant(kind, f"{what}, later types to match", derived)


def honest(site: Site, op: str, options: Sequence[Any]) -> TensorType | None:
    """Return the type that a collective makes of the site's operand; None where it takes no such operand."""
    try:
        made = COLLECTIVES[op].result(site.operand, site.programs[site.action].mesh, options)
        made.local(site.programs[site.action].mesh)
    except (ValueError, KeyError, IndexError):
        return None
    return made


def swapped_in(kind: str, what: str, site: Site, op: str, options: Sequence[Any]) -> Iterator[Mutant]:
    """Yield another collective in place of this one: with the type that it makes, or with the type that was there."""
    made = honest(site, op, options)
    value = replace(site.result, type=made or site.result.type)
    programs = site.replaced(replace(site.line, results=(value,), op=op, args=(site.source, *options)))
    yield from both(kind, site.named(f"{what} {op}{tuple(options)} for"), programs, site.programs)


def dropped(build: GoodBuild) -> Iterator[Mutant]:
    """Forget a collective: its result is its operand, under its old type or the right one."""
    for site in collectives(build.case.programs):
        yield from both("drop a collective", site.named("drop"), site.replaced(read=site.source.name), site.programs)
        alias = replace(site.line, op="aten.alias.default", args=(site.source,), kwargs=())
        yield Mutant("drop a collective", site.named("pass through"), site.replaced(alias))


def doubled(build: GoodBuild) -> Iterator[Mutant]:
    """Run a collective twice: on its own result, or once more for nobody."""
    for site in collectives(build.case.programs):
        again = replace(site.result, name=f"{site.result.name}_again")
        on_result = replace(site.line, results=(again,), args=(Ref(site.result.name), *site.line.args[1:]))
        yield from both(
            "double a collective",
            site.named("twice"),
            site.replaced(site.line, on_result, read=again.name),
            site.programs,
        )
        for_nobody = replace(site.line, results=(again,))
        yield Mutant("double a collective", site.named("for nobody"), site.replaced(site.line, for_nobody))


def retyped(build: GoodBuild) -> Iterator[Mutant]:
    """Give a collective another type."""
    for site in collectives(build.case.programs):
        axes = str(site.line.args[1]) or build.case.mesh.names[-1]
        axis = axes.split(",")[0]
        rank = len(site.operand.shape)
        dims = sorted({0, rank - 1}) if rank else []
        choices: list[tuple[str, tuple[Any, ...]]] = [("parc.all_reduce", (axes,))]
        names = ("all_gather", "reduce_scatter", "shard", "pad")
        choices += [(f"parc.{name}", (axis, dim, 1)) for name in names for dim in dims]
        for op, options in choices:
            if op != site.line.op:
                yield from swapped_in("retype a collective", "put", site, op, options)


def regrouped(build: GoodBuild) -> Iterator[Mutant]:
    """Run a collective over other axes: another one, fewer, more."""
    names = build.case.mesh.names
    subsets = [",".join(group) for count in range(1, len(names) + 1) for group in combinations(names, count)]
    for site in collectives(build.case.programs):
        for axes in subsets:
            if axes != site.line.args[1]:
                yield from swapped_in("re-group a collective", "put", site, site.line.op, (axes, *site.line.args[2:]))


def _moved(type_: TensorType, build: GoodBuild) -> Iterator[TensorType]:
    """Return the same type with one split at another dim, or after other entries."""
    for axis, kind in type_.placement.items():
        if not isinstance(kind, Split):
            continue
        others = [Split(dim) for dim in range(len(type_.shape)) if dim != kind.dim]
        for other in (*others, Split(kind.dim, 1 if kind.outer != 1 else 2)):
            moved = replace(type_, placement=type_.placement.replace({axis: other}))
            try:
                moved.local(build.case.mesh)
                assert nest(type_.shape[other.dim], [(other.outer, build.case.mesh.size(axis))])
            except (ValueError, AssertionError):
                continue
            yield moved


def misplaced(build: GoodBuild) -> Iterator[Mutant]:
    """Take a shard of the wrong dim, or of the wrong part of a fused dim: in a collective, a parameter or an input."""
    kind, programs = "swap a shard's dim", build.case.programs
    for site in collectives(programs):
        for place, number in enumerate(site.line.args[2:], 2):
            is_dim = place in (2, 4)
            choices = range(len(site.operand.shape)) if is_dim else (1, 2)
            for other in (choice for choice in choices if choice != number):
                options = [*site.line.args[1:]]
                options[place - 1] = other
                yield from swapped_in(kind, "put", site, site.line.op, options)
    for value in programs["F"].main.parameters:
        if value.kind not in ("parameter", "input"):
            continue
        for moved in _moved(value.type, build):
            here = with_binding(programs, ("F",), value.binding, moved)
            yield from both(kind, f"F takes {value.binding} as {moved.text(build.case.mesh)}", here, programs)
            everywhere = carried(with_binding(programs, tuple(programs), value.binding, moved), programs)
            yield Mutant(kind, f"all take {value.binding} as {moved.text(build.case.mesh)}", everywhere)


def with_binding(programs: Programs, actions: Sequence[str], binding: Binding | None, type_: TensorType) -> Programs:
    for action in actions:
        known = programs[action].main.parameters
        parameters = tuple(replace(v, type=type_) if v.binding == binding else v for v in known)
        programs = with_main(programs, action, parameters=parameters)
    return programs


def taken_as_whole(build: GoodBuild) -> Iterator[Mutant]:
    """Take a value that is still to be summed for a whole one, or the other way round."""
    axis = build.case.mesh.names[-1]
    for site in sites(build.case.programs, lambda line: "." in line.op and line.op not in COLLECTIVES):
        value = site.line.results[0]
        if value is None or not value.type.dtype.is_floating_point:
            continue
        placement = value.type.placement
        if placement.partial:
            other = placement.replace(dict.fromkeys(placement.partial, "I"))
        elif placement[axis] == "I" and site.index % 4 == 0:
            other = placement.replace({axis: "P"})
        else:
            continue
        results = (replace(value, type=replace(value.type, placement=other)), *site.line.results[1:])
        what = f"{site.action} {site.function.name}: {value.name} = {site.line.op} is {other}"
        yield Mutant("take a partial sum as whole", what, site.replaced(replace(site.line, results=results)))


CONVERSIONS = (dropped, doubled, retyped, regrouped, misplaced, taken_as_whole)
