"""Planted bugs of split sequences: gradients of norms not summed, gathers left out, parts of other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parc.compiler.layout.placement import Split
from parc.compiler.program.program import Line, Ref, Value
from tests.planted_builds import GoodBuild, good_build, judge
from tests.planted_conversions import both, honest, swapped_in
from tests.planted_rows import Row
from tests.planted_sites import Mutant, Site, sites

SEQUENCE_BUILD = "llama dp=2, tp=2, split sequences"
_AXIS, _RANKS, _LENGTH, _SEQUENCE = "tp", 2, 8, 1
_PART = _LENGTH // _RANKS


def _of_activations(build: GoodBuild, op: str) -> Iterator[Site]:
    """Yield the collectives of an operator over the axis in which values of whole sequences are made or read."""
    for site in sites(build.case.programs, op, "F", "B"):
        shape = site.result.type.shape
        if site.line.args[1] == _AXIS and len(shape) == 3 and shape[_SEQUENCE] == _LENGTH:
            yield site


def unsummed(build: GoodBuild) -> Iterator[Mutant]:
    """Leave a gradient as each rank has it, or sum it over the other axes alone."""
    kind = "leave a norm's gradient unsummed"
    for site in sites(build.case.programs, "parc.all_reduce", "REDUCE"):
        axes = [axis for axis in str(site.line.args[1]).split(",") if axis != _AXIS]
        if "norm" in site.source.name and _AXIS in str(site.line.args[1]):
            if axes:
                yield from swapped_in(kind, "without the axis:", site, site.line.op, (",".join(axes),))
            else:
                yield from both(kind, site.named("no"), site.replaced(read=site.source.name), site.programs)


def ungathered(build: GoodBuild) -> Iterator[Mutant]:
    """Take a rank's own part again and again in place of the other ranks' parts."""
    for site in _of_activations(build, "parc.all_gather"):
        repeated = replace(site.line, op="aten.cat.default", args=([site.source] * _RANKS, _SEQUENCE), kwargs=())
        yield from both("repeat the own part", site.named("no"), site.replaced(repeated), site.programs)


def other_parts(build: GoodBuild) -> Iterator[Mutant]:
    """Scatter another dim, or every second entry, under the old type or the right one."""
    for site in _of_activations(build, "parc.reduce_scatter"):
        for options in ((_AXIS, 0, 1), (_AXIS, 2, 1), (_AXIS, _SEQUENCE, 2)):
            yield from swapped_in("scatter other parts", "put", site, site.line.op, options)


def other_ranks(build: GoodBuild) -> Iterator[Mutant]:
    """Give every rank the part of the next one, with types that are right."""
    for site in _of_activations(build, "parc.reduce_scatter"):
        whole = honest(site, "parc.all_reduce", (_AXIS,))
        assert whole is not None and isinstance(site.result.type.placement[_AXIS], Split)
        summed, turned = Value("summed", whole), Value("turned", whole)
        lines = (
            replace(site.line, results=(summed,), op="parc.all_reduce", args=(site.source, _AXIS)),
            Line((turned,), "aten.roll.default", (Ref("summed"), [_PART], [_SEQUENCE]), (), site.line.origin),
            replace(site.line, op="parc.shard", args=(Ref("turned"), *site.line.args[1:])),
        )
        yield Mutant("take the next rank's part", site.named("no"), site.replaced(*lines))


def sequence_rows() -> dict[str, Row]:
    """Judge all mutants of these classes."""
    rows: dict[str, Row] = {}
    build = good_build(SEQUENCE_BUILD)
    for make in (unsummed, ungathered, other_parts, other_ranks):
        for mutant in make(build):
            verdict = judge(build, mutant.programs)
            rows.setdefault(mutant.kind, Row()).note(mutant.what, verdict.check, verdict.by_types)
    return rows
