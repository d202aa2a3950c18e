"""The checker of places: a value that an ``offload`` line keeps away is loaded before it is read, and one that is to be
kept away is stored before it is returned."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..ops.rules import facts
from ..program.binding import KINDS, Binding
from ..program.program import Fault, Function, Line, Program, Value


def check_places(programs: Mapping[str, Program], offload: Collection[str]) -> Iterator[Fault]:
    """Find values that are read in the wrong place. ``offload`` are the words of the plan's ``offload`` lines."""
    for program in programs.values():
        for function in program.functions:
            where = f"{program.role}.{program.action} {function.name}"
            faults = _main_faults(function, offload) if function is program.main else _inner_faults(function)
            yield from (Fault("types", f"{where}: {name}", message) for name, message in faults)


def _inner_faults(function: Function) -> Iterator[tuple[str, str]]:
    for line in function.lines:
        if facts(line.op).carries:
            yield line.made[0].name, "is stored or loaded within a block: that stands in main functions alone"


def _main_faults(main: Function, offload: Collection[str]) -> Iterator[tuple[str, str]]:
    values = main.values()
    away = {v.name: _word(v.binding, v, offload) for v in main.parameters if _word(v.binding, v, offload)}
    for line in main.lines:
        way = "" if line.calls_function else facts(line.op).carries
        for name in line.uses:
            if name in away and way != "back":
                yield name, f"is kept away, and `{line.op}` reads it: it lacks a `load`"
            elif name not in away and way == "back":
                yield name, "is loaded, though it lies in memory"
            elif way and name in away and _said(line) != away[name]:
                yield name, f"is loaded as `{_said(line)}`, and kept as `{away[name]}`"
        if way == "away":
            away[line.made[0].name] = _said(line)
    for key, name in main.returns:
        word = _word(key, values[name], offload)
        if away.get(name, "") != word:
            wanted = f"is to be kept as `{word}`" if word else "is to lie in memory"
            have = f"as `{away[name]}`" if name in away else "in memory"
            yield name, f"is returned as {key.words}, which {wanted}; it lies {have}"


def _said(line: Line) -> str:
    """Return the word under which a line stores or loads."""
    return str(line.args[1]) if len(line.args) > 1 else ""


def _word(binding: Binding | None, value: Value, offload: Collection[str]) -> str:
    """Return the word under which the plan keeps a bound value away; "" for one in memory, as single numbers are."""
    word = KINDS[binding.kind].offloaded if binding is not None and value.type.shape else ""
    return word if word in offload else ""
