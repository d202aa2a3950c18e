"""The comparison that carries a result from a small twin to its build: programs equal up to sizes and repetition."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch

from .collectives import COLLECTIVES
from .program import Cut, Function, Line, Program, Ref, operator, references
from .verify import Fault

_NUMBER = re.compile(r"(?<![A-Za-z_])\d+")
_LAYER = re.compile(r"\d+")


def compare_structure(full: Mapping[str, Program], twin: Mapping[str, Program]) -> list[Fault]:
    """Where the programs differ in more than sizes and in how often equal blocks repeat: the first place of each."""
    differences = {action: _difference(program, twin.get(action)) for action, program in full.items()}
    return [Fault("numbers", action, found) for action, found in differences.items() if found is not None]


def _difference(full: Program, twin: Program | None) -> str | None:
    """The first place where two programs are not the same work."""
    if twin is None:
        return "the twin has no such program"
    theirs = {function.name: function for function in twin.functions}
    for function in full.functions[:-1]:
        if function.name not in theirs:
            return f"only the build has a function `{function.name}`"
        pairs = zip_longest(_function_rows(function, full), _function_rows(theirs[function.name], twin))
        for ours, other in pairs:
            if ours != other:
                return f"`{function.name}` has `{ours}` in the build and `{other}` in its twin"
    if len(theirs) > len(full.functions):
        return f"only the twin has {', '.join(sorted(theirs.keys() - {function.name for function in full.functions}))}"
    order, other_order = (list(dict.fromkeys(line.op for line in made.main.lines)) for made in (full, twin))
    if order != other_order:
        at = next((pair for pair in zip_longest(order, other_order) if pair[0] != pair[1]), None)
        return f"the order of work differs: `{at and at[0]}` in the build where its twin has `{at and at[1]}`"
    ours, others = dict.fromkeys(_edges(full.main, full)), dict.fromkeys(_edges(twin.main, twin))
    for mine, rest, whose in ((ours, others, "the build"), (others, ours, "its twin")):
        missing = next((row for row in mine if row not in rest), None)
        if missing is not None:
            return f"only {whose} has `{missing}`"
    return None


def _edges(function: Function, program: Program) -> Iterator[str]:
    makers = {value.name: _LAYER.sub("*", value.role or value.name) for value in function.parameters}
    for value in function.parameters:
        yield f"{makers[value.name]}: {_sizeless(value.type.text(program.mesh))}"
    for line in function.lines:
        for position, made in enumerate(line.results):
            if made is not None:
                makers[made.name] = f"{line.op}.{position}"
                yield f"{makers[made.name]}: {_sizeless(made.type.text(program.mesh))}"
        for position, item in enumerate(line.args):
            for name in references(item):
                yield f"{makers[name]} -> {line.op}({position})"
    for key, name in function.returns:
        yield f"{makers[name]} -> return {_LAYER.sub('*', key)}"


def _function_rows(function: Function, program: Program) -> Iterator[str]:
    names = {value.name: f"x{index}" for index, value in enumerate(function.parameters)}
    for value in function.parameters:
        yield f"{names[value.name]}: {_sizeless(value.type.text(program.mesh))}"
    for index, line in enumerate(function.lines):
        for position, made in enumerate(line.results):
            if made is not None:
                names[made.name] = f"{index}.{position}"
        yield _line_row(line, names, program)
    yield f"return {', '.join(names[name] for _, name in function.returns)}"


def _line_row(line: Line, names: Mapping[str, str], program: Program) -> str:
    kept = _exact_arguments(line)
    args = [_argument(item, names, index in kept) for index, item in enumerate(line.args)]
    args += [f"{key}={_argument(item, names, False)}" for key, item in line.kwargs]
    results = ", ".join("_" if v is None else names[v.name] for v in line.results)
    types = "; ".join("-" if v is None else _sizeless(v.type.text(program.mesh)) for v in line.results)
    return f"{results} = {line.op}({', '.join(args)}): {types}"


def _exact_arguments(line: Line) -> frozenset[int]:
    """Positions of arguments that name dims: these are no sizes and must be equal."""
    if line.op in COLLECTIVES or line.calls_function:
        return frozenset(range(2))
    arguments = operator(line.op)._schema.arguments
    return frozenset(i for i, a in enumerate(arguments) if a.name in ("dim", "dims", "dim0", "dim1", "dim2", "axis"))


def _argument(item: Any, names: Mapping[str, str], exact: bool) -> str:
    if isinstance(item, Ref):
        return names[item.name]
    if isinstance(item, Cut):
        return "/".join(["#", *item.axes])
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(_argument(inner, names, exact) for inner in item)}]"
    if isinstance(item, bool) or item is None or isinstance(item, torch.dtype) or exact:
        return str(item)
    if isinstance(item, str):
        return _LAYER.sub("*", item)
    return "#"


def _sizeless(text: str) -> str:
    return _NUMBER.sub("#", text)
