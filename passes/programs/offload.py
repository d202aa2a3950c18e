"""Offload: lines that store values where a plan keeps them, and load them ahead of their first reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...compiler.layout.collectives import COLLECTIVES
from ...compiler.program.binding import Binding
from ...compiler.program.places import CARRIERS, kept_away
from ...compiler.program.program import Function, Line, Origin, Ref, Value
from ...compiler.program.roles import Programs


def offload(roles: Mapping[str, Programs], lines: Mapping[str, int]) -> dict[str, Programs]:
    """Return the programs of all roles with lines that store and load what the ``offload`` lines of a plan name;
    ``lines`` has the number of the line for each of their words.

    What a program reads is loaded before the call ahead of its first reader, so that it is on its way while that call
    works; what it returns is stored as soon as it is made.
    """
    if not lines:
        return dict(roles)
    taken = {name for programs in roles.values() for program in programs.values() for name in program.main.values()}
    return {
        role: {key: replace(program, functions=(*program.blocks,
                                                *(_carried(main, lines, taken) for main in program.mains)))
               for key, program in programs.items()}
        for role, programs in roles.items()
    }  # fmt: skip


def _carried(main: Function, lines: Mapping[str, int], taken: set[str]) -> Function:
    """Return a main function that loads what it reads and stores what it returns."""
    values, last = main.values(), len(main.lines)
    first_use = {name: at for at, line in reversed([*enumerate(main.lines)]) for name in line.uses}
    made_at = {value.name: at + 1 for at, line in enumerate(main.lines) for value in line.made}
    calls = [at for at, line in enumerate(main.lines) if line.calls_function]
    added: dict[int, list[Line]] = {}
    parameters: list[Value] = []
    for value in main.parameters:
        word = kept_away(value.binding, value, lines)
        if not word:
            parameters.append(value)
            continue
        away, use = _away(value, taken), first_use.get(value.name, last)
        ahead = max((at for at in calls if at < use), default=_whole_message(main.lines, use, -1))
        added.setdefault(ahead, []).append(_carrying("back", away, replace(value, binding=None), word, lines))
        parameters.append(away)
    returns: list[tuple[Binding, str]] = []
    for key, name in main.returns:
        if word := kept_away(key, values[name], lines):
            away = _away(replace(values[name], binding=key), taken)
            stored = replace(away, binding=None)
            behind = _whole_message(main.lines, made_at.get(name, 0), 1)
            added.setdefault(behind, []).append(_carrying("away", values[name], stored, word, lines))
            key, name = away.binding or key, away.name
        returns.append((key, name))
    woven = [line for at in range(last + 1) for line in (*added.get(at, ()), *main.lines[at : at + 1])]
    return replace(main, parameters=tuple(parameters), lines=tuple(woven), returns=tuple(returns))


def _whole_message(lines: Sequence[Line], at: int, way: int) -> int:
    """Return the nearest place, from one on in one direction, that does not lie between two lines that may be of one
    message."""
    while 0 < at < len(lines) and lines[at - 1].op in COLLECTIVES and lines[at].op in COLLECTIVES:
        at += way
    return at


def _carrying(way: str, source: Value, result: Value, word: str, lines: Mapping[str, int]) -> Line:
    return Line((result,), CARRIERS[way], (Ref(source.name), word), (), Origin(plan=lines[word]))


def _away(value: Value, taken: set[str]) -> Value:
    """Return a value as it is kept away, under a name that no program has. What F saves is bound by that name."""
    name = f"{value.name}_stored"
    while name in taken:
        name += "_"
    binding = value.binding
    saved = binding is not None and binding.kind == "saved"
    return replace(value, name=name, binding=Binding("saved", name) if saved else binding)
