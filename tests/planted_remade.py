"""Planted bugs in what backward makes again: a line that differs from F's, reads another value, or draws anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from parc.compiler.program.actions import BACKWARD, FORWARD
from parc.compiler.program.program import Line, Ref, map_references
from parc.compiler.verify.rounding import forward_lines
from tests.planted_builds import GoodBuild
from tests.planted_sites import Mutant, Site, sites, with_argument, with_main

_OTHER = {"aten.mul.Tensor": "aten.add.Tensor", "aten.add.Tensor": "aten.mul.Tensor", "aten.silu.default":
          "aten.relu.default", "aten.gelu.default": "aten.silu.default"}  # fmt: skip


def wrong_lines(build: GoodBuild) -> Iterator[Mutant]:
    """Make a value of F again by another operator, of another value, with another number, or under another name's
    line."""
    kind, programs = "make something else again", build.case.programs
    for site in sites(programs, lambda line: not line.calls_function and None not in line.results, BACKWARD):
        if site.line.made[0].name not in forward_lines(programs[FORWARD], site.function):
            continue
        if site.line.op in _OTHER:
            line = replace(site.line, op=_OTHER[site.line.op])
            yield Mutant(kind, _named(site, f"{line.op} for"), site.replaced(line))
        yield from _other_operands(site, kind)
        for at, item in enumerate(site.line.args):
            if isinstance(item, float):
                line = with_argument(site.line, at, item * 2 + 1)
                yield Mutant(kind, _named(site, f"argument {at} of"), site.replaced(line))


def _named(site: Site, change: str) -> str:
    return f"{change} {site.function.name}: {site.line.made[0].name} = {site.line.op}"


def _other_operands(site: Site, kind: str) -> Iterator[Mutant]:
    """Yield the line with another value of the same type in the place of each operand."""
    values = site.function.values()
    there = [value.name for value in site.function.parameters]
    there += [value.name for line in site.function.lines[: site.index] for value in line.made]
    for at, item in enumerate(site.line.args):
        if isinstance(item, Ref):
            alike = (name for name in there if name != item.name and values[name].type == values[item.name].type)
            for name in list(alike)[:2]:
                line = with_argument(site.line, at, Ref(name))
                yield Mutant(kind, _named(site, f"{name} in place of {item.name}:"), site.replaced(line))


def wrong_keys(build: GoodBuild) -> Iterator[Mutant]:
    """Exchange the keys of two streams: in one call of B, and between two calls."""
    kind, programs = "replay another stream", build.case.programs
    main = programs[BACKWARD].main
    keys = [name for name, value in main.values().items() if value.kind == "saved" and name.startswith("key_")]
    for one, other in combinations(keys, 2):
        swapped = {one: other, other: one}
        lines = tuple(_renamed(line, swapped) if line.calls_function else line for line in main.lines)
        yield Mutant(kind, f"{one} and {other}", with_main(programs, BACKWARD, lines=lines))


def _renamed(line: Line, names: Mapping[str, str]) -> Line:
    return replace(line, args=map_references(line.args, lambda name: Ref(names.get(name, name))))
