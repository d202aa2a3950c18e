"""Offload: lines that store values in host memory or in a file, and load them ahead of their first reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from ...compiler.layout.collectives import COLLECTIVES
from ...compiler.layout.mesh import Mesh
from ...compiler.program.binding import Binding
from ...compiler.program.program import CARRIERS, Function, Line, Origin, Program, Ref, Value, kept_away
from ...compiler.program.rewriter import FreshNames, Rewriter
from ...compiler.program.roles import Programs


def offload(roles: Mapping[str, Programs], lines: Mapping[str, int]) -> dict[str, Programs]:
    """The pass of offload. It takes the programs of all roles, and returns them with lines in main functions that store
    and load what a plan's ``offload`` lines name; ``lines`` has the number of the line for each of their words.

    What a program reads is loaded one call ahead of its first reader, so that the load runs beside that call. What it
    returns is stored at once.
    """
    if not lines:
        return dict(roles)
    mains = [program.main for programs in roles.values() for program in programs.values()]
    names = FreshNames({name: 1 for main in mains for name in main.values()})
    stored = cache(lambda name: names.fresh(f"{name}_stored"))  # alike in F, which saves a value, and in B

    def with_lines(program: Program) -> Program:
        mains = (_offloaded(main, program.mesh, lines, stored) for main in program.mains)
        return program.with_mains(*mains)

    return {role: {key: with_lines(one) for key, one in programs.items()} for role, programs in roles.items()}


def _offloaded(main: Function, mesh: Mesh, lines: Mapping[str, int], stored: Callable[[str], str]) -> Function:
    """Return a main function that loads what it reads and stores what it returns. ``stored`` returns the name of a
    value in its offloaded form."""
    rewriter, values = Rewriter(mesh, main), main.values()
    calls = [at for at, line in enumerate(main.lines) if line.calls_function]
    for value in main.parameters:
        if word := kept_away(value.binding, value, lines):
            away = rewriter.parameters[value.name] = _away(value, stored)
            first = min(map(main.at, main.readers[value.name]), default=len(main.lines))
            place = max((at for at in calls if at < first), default=_whole_message(main.lines, first, -1))
            rewriter.insert_at(place)
            rewriter.add(_carrying("back", away, replace(value, binding=None), word, lines))
    rewriter.returns = {}
    for key, name in main.returns:
        if word := kept_away(key, values[name], lines):
            away = _away(replace(values[name], binding=key), stored)
            place = main.at(main.makers[name]) + 1 if name in main.makers else 0
            rewriter.insert_at(_whole_message(main.lines, place, 1))
            rewriter.add(_carrying("away", values[name], replace(away, binding=None), word, lines))
            key, name = away.binding or key, away.name
        rewriter.returns[key] = name
    return rewriter.function()


def _whole_message(lines: Sequence[Line], at: int, way: int) -> int:
    """Return the nearest place in a direction (-1 or 1) that is not between two lines which may travel in one
    message."""
    while 0 < at < len(lines) and lines[at - 1].op in COLLECTIVES and lines[at].op in COLLECTIVES:
        at += way
    return at


def _carrying(way: str, source: Value, result: Value, word: str, lines: Mapping[str, int]) -> Line:
    return Line((result,), CARRIERS[way], (Ref(source.name), word), (), Origin(plan=lines[word]))


def _away(value: Value, stored: Callable[[str], str]) -> Value:
    """Return a value in its offloaded form. A value that F saves is bound under that name."""
    name, binding = stored(value.name), value.binding
    saved = binding is not None and binding.kind == "saved"
    return replace(value, name=name, binding=Binding("saved", name) if saved else binding)
