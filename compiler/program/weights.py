"""Weights: the values that the programs of a step make of stored parameters by conversions alone."""

from __future__ import annotations

from collections.abc import Mapping

from ..layout.collectives import COLLECTIVES, WAIT, axes_of
from ..ops.rules import facts
from .actions import UNSHARD
from .binding import PARAMETERS, Binding
from .program import Line, Program

WeightSources = Mapping[Binding, Binding]
"""The stored parameter behind each weight that UNSHARD makes."""
_CUT = "parc.cut_pad.default"


def converts(line: Line) -> bool:
    """Return whether a line's result is its operand, apart from dtype, placement and padding."""
    return (
        COLLECTIVES[line.op].keeps
        if line.op in COLLECTIVES
        else bool(facts(line.op).casts or facts(line.op).carries) or line.op == _CUT
    )


def weight_sources(programs: Mapping[str, Program]) -> dict[Binding, Binding]:
    """Return the stored parameter of each weight that UNSHARD makes of one parameter by conversions alone."""
    if UNSHARD not in programs:
        return {}
    known = stored_sources(programs[UNSHARD], {})
    return {key: known[name] for key, name in programs[UNSHARD].main.returns if name in known}


def parts_in_weights(program: Program) -> dict[Binding, tuple[str, tuple[str, ...]]]:
    """Return the weights of UNSHARD in which a stored parameter lies as some of their rows, by their bindings: the
    parameter's name, and the axes over which its rows are gathered, by one line. It needs no memory of its own."""
    main = program.main
    stored = {value.name: value for value in main.parameters if value.kind == "parameter"}
    parts: dict[Binding, tuple[str, tuple[str, ...]]] = {}
    for key, name in main.returns:
        line = main.makers.get(name)
        if line is not None and line.op == WAIT:
            line = main.makers.get(line.uses[0])
        if line is None or line.op != "parc.all_gather" or line.args[2:] != (0, 1):
            continue
        source = stored.get(line.uses[0])
        if source is not None and source.binding is not None:
            parts[key] = source.binding.name, axes_of(line.args[1:])
    return parts


def stored_sources(program: Program, weights: WeightSources) -> dict[str, Binding]:
    """Return the stored parameter of each value of a main function that is one, or is made of one by conversions."""
    known = {value.name: weights.get(value.binding, value.binding) for value in program.main.parameters
             if value.binding is not None and (value.kind in PARAMETERS or value.binding in weights)}  # fmt: skip
    for line in program.main.lines:
        if not line.calls_function and converts(line) and (source := known.get(line.uses[0])) is not None:
            known.update((value.name, source) for value in line.made)
    return known
