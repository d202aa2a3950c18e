"""Planted bugs of values that are kept away from memory: read where they lie, brought from another's place, or left in
memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parc.compiler.ops.rules import facts
from parc.compiler.program.program import Ref
from tests.planted_builds import GoodBuild
from tests.planted_sites import Mutant, Site, sites, with_argument, with_function


def _carrying(build: GoodBuild) -> list[Site]:
    """Return the lines that store and load, a few of each program."""
    found: dict[tuple[str, str], list[Site]] = {}
    for site in sites(build.case.programs, lambda line: bool(facts(line.op).carries)):
        found.setdefault((site.action, site.line.op), []).append(site)
    return [site for same in found.values() for site in (same[0], same[len(same) // 2], same[-1])]


def dropped(build: GoodBuild) -> Iterator[Mutant]:
    """Read a value where it is kept, and return one that lies in memory."""
    for site in _carrying(build):
        kind = "drop a store" if facts(site.line.op).carries == "away" else "drop a load"
        yield Mutant(kind, site.named("drop"), site.replaced(read=site.source.name))


def doubled(build: GoodBuild) -> Iterator[Mutant]:
    """Store what is stored already, and load what was loaded."""
    for site in _carrying(build):
        again = replace(site.result, name="again")
        lines = site.line, replace(site.line, results=(again,), args=(Ref(site.result.name), *site.line.args[1:]))
        yield Mutant("carry a value twice", site.named("double"), site.replaced(*lines, read="again"))


def elsewhere(build: GoodBuild) -> Iterator[Mutant]:
    """Carry a value under another word of the plan, or another value of the same type."""
    for site in _carrying(build):
        other = "parameters" if site.line.args[1] == "activations" else "activations"
        line = replace(site.line, args=(site.source, other))
        yield Mutant("keep a value in the wrong place", site.named(f"as {other}"), site.replaced(line))
        values = [line.args[0] for line in site.function.lines if line.op == site.line.op]
        types = site.function.values()
        alike = [ref for ref in values if ref != site.source and types[ref.name].type == site.operand]
        if alike:
            lines = list(site.function.lines)
            lines[site.index] = with_argument(site.line, 0, alike[0])
            changed = with_function(site.programs, site.action, replace(site.function, lines=tuple(lines)))
            yield Mutant("carry another value", site.named(f"carry {alike[0].name} by"), changed)


PLACES = (dropped, doubled, elsewhere)
