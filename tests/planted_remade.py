"""Planted bugs in what backward makes again: a line that differs from F's, reads another value, or draws anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parc.compiler.program.actions import BACKWARD, FORWARD
from parc.compiler.program.program import Ref
from parc.compiler.verify.remade import forward_lines
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
    """Give a call of B the key of another stream than its call of F had."""
    kind, programs = "replay another stream", build.case.programs
    main = programs[BACKWARD].main
    values = main.values()
    keys = [name for name, value in values.items() if value.kind == "saved" and name.startswith("key_")]
    for index, line in enumerate(main.lines):
        for name in line.uses() if line.calls_function else ():
            if name in keys:
                other = keys[keys.index(name) - 1]
                if other != name:
                    args = tuple(Ref(other) if item == Ref(name) else item for item in line.args)
                    lines = (*main.lines[:index], replace(line, args=args), *main.lines[index + 1 :])
                    yield Mutant(kind, f"{line.op}: {other} for {name}", with_main(programs, BACKWARD, lines=lines))
