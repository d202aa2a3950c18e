"""Planted bugs of sequences that ranks share: rings with other operands, keys, masks or axes, and sums left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parc.compiler.layout.collectives import RINGS
from parc.compiler.layout.placement import AxisType, Split
from parc.compiler.program.program import Ref, Value
from tests.planted_builds import CONTEXT_BUILDS, GoodBuild, good_build, judge
from tests.planted_rows import Row
from tests.planted_sites import Mutant, Site, sites, with_argument


def _rings(build: GoodBuild) -> Iterator[Site]:
    yield from sites(build.case.programs, lambda line: line.op in RINGS, "F", "B")


def _named(site: Site, change: str) -> str:
    return f"{change} {site.action} {site.function.name}: {site.line.made[0].name} = {site.line.op}"


def other_keys(build: GoodBuild) -> Iterator[Mutant]:
    """Send other tensors around, or none."""
    kind = "send other keys around a ring"
    for site in _rings(build):
        line, at = site.line, RINGS[site.line.op].keys + 1
        k, v = line.args[at : at + 2]
        queries = line.args[0 if at == 2 else 2]
        for what, pair in {
            "values as keys": (v, v),
            "keys as values": (k, k),
            "swap": (v, k),
            "queries": (queries, v),
        }.items():
            args = (*line.args[:at], *pair, *line.args[at + 2 :])
            yield Mutant(kind, _named(site, what), site.replaced(replace(line, args=args)))
        alone = replace(line, op=RINGS[line.op].attention, args=tuple(RINGS[line.op].inner(line.args)))
        yield Mutant(kind, _named(site, "no hop at all:"), site.replaced(alone))


def other_masks(build: GoodBuild) -> Iterator[Mutant]:
    """See other keys: without a mask, or without the rule of causal; scale scores otherwise."""
    kind = "let a ring's queries see other keys"
    for site in _rings(build):
        line = site.line
        causal, scale, p = line.args[-3:]
        if causal:
            yield Mutant(kind, _named(site, "all"), site.replaced(with_argument(line, len(line.args) - 3, False)))
        yield Mutant(
            kind,
            _named(site, "twice the scale"),
            site.replaced(with_argument(line, len(line.args) - 2, 2 * (scale or 0.5))),
        )
        mask = RINGS[line.op].keys + 3
        if isinstance(line.args[mask], Ref):
            yield Mutant(kind, _named(site, "no mask"), site.replaced(with_argument(line, mask, None)))
        if not isinstance(line.args[mask + 1], Ref):
            yield Mutant(kind, _named(site, "dropout"), site.replaced(with_argument(line, len(line.args) - 1, p + 0.5)))


def other_axes(build: GoodBuild) -> Iterator[Mutant]:
    """Send keys around other ranks."""
    kind, axes = "send keys around another axis", [*build.case.mesh.names, "dp,cp", "cp,dp"]
    for site in _rings(build):
        for axis in axes:
            if axis != site.line.args[1]:
                yield Mutant(kind, _named(site, f"over {axis}"), site.replaced(with_argument(site.line, 1, axis)))


def other_gradients(build: GoodBuild) -> Iterator[Mutant]:
    """Exchange the gradients that come home, or the results of forward that backward reads."""
    kind = "return other gradients from a ring"
    for site in _rings(build):
        if not RINGS[site.line.op].carries_gradients:
            continue
        first, second, third = site.line.results
        swapped = replace(site.line, results=(first, third, second))
        yield Mutant(kind, _named(site, "gradients of keys and values exchanged"), site.replaced(swapped))
        grad, out = site.line.args[0], site.line.args[7]
        for what, place, item in (("out as the gradient", 0, out), ("the gradient as out", 7, grad)):
            yield Mutant(kind, _named(site, what), site.replaced(with_argument(site.line, place, item)))


def other_order(build: GoodBuild) -> Iterator[Mutant]:
    """Take one value for split in order where it is in zigzag."""
    kind = "take parts of a sequence in another order"
    for site in sites(build.case.programs, lambda line: any(map(_in_order, line.made)), "F", "B"):
        results = tuple(value and (_in_order(value) or value) for value in site.line.results)
        yield Mutant(kind, _named(site, "retype"), site.replaced(replace(site.line, results=results)))


def _in_order(value: Value) -> Value | None:
    """Return a value that is in zigzag as one whose parts are in order; None for another value."""
    placement = value.type.placement
    turned: dict[str, AxisType] = {
        axis: Split(kind.dim, -kind.outer)
        for axis, kind in placement.items()
        if isinstance(kind, Split) and isinstance(kind.outer, int) and kind.outer < 0
    }
    return replace(value, type=replace(value.type, placement=placement.replace(turned))) if turned else None


def left_out_sums(build: GoodBuild) -> Iterator[Mutant]:
    """Sum a gradient over fewer ranks than have parts of its sequence."""
    kind = "leave a sum over a sequence's ranks out"
    for site in sites(build.case.programs, "parc.all_reduce"):
        axes = str(site.line.args[1]).split(",")
        if "cp" in axes:
            rest = ",".join(axis for axis in axes if axis != "cp")
            made = site.replaced(with_argument(site.line, 1, rest)) if rest else site.replaced(read=site.source.name)
            yield Mutant(kind, site.named("without cp:"), made)


CLASSES = (other_keys, other_masks, other_axes, other_gradients, other_order, left_out_sums)


def context_rows(share: int = 1) -> dict[str, Row]:
    """Judge the mutants of builds whose sequences ranks share, or one of ``share`` in each class."""
    rows: dict[str, Row] = {}
    for name in CONTEXT_BUILDS:
        build = good_build(name, early=True)
        for make in CLASSES:
            for at, mutant in enumerate(make(build)):
                if at % share == 0:
                    verdict = judge(build, mutant.programs)
                    rows.setdefault(mutant.kind, Row()).note(f"{name}: {mutant.what}", verdict.check, verdict.by_types)
    return rows
