"""Planted bugs that are not about a collective: the loss's scale, gradients, randomness, sizes, the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from parc.compiler.program.binding import SCALE, Binding
from parc.compiler.program.program import Line, LocalSize, Ref, Value
from parc.compiler.program.roles import SINGLE
from tests.planted_builds import GoodBuild
from tests.planted_schedules import wrong_at
from tests.planted_sites import Mutant, Programs, reading, sites, with_argument, with_function, with_lines, with_main


def unscaled(build: GoodBuild) -> Iterator[Mutant]:
    """Scale the loss or the gradients never, twice, or by something else."""
    kind, programs = "un-scale the loss", build.case.programs
    scaling = ("aten.reciprocal.default", "aten.mul.Tensor")
    for site in sites(programs, lambda line: line.op in scaling, "SCALE", "LOSS"):
        yield Mutant(kind, site.named("leave out"), site.replaced(read=site.source.name))
        again = replace(site.result, name="again")
        if site.action == "LOSS":
            twice = replace(site.line, results=(again,), args=(Ref(site.result.name), *site.line.args[1:]))
        else:
            twice = Line((again,), "aten.mul.Tensor", (Ref(site.result.name), Ref(site.result.name)))
        yield Mutant(kind, site.named("square"), site.replaced(site.line, twice, read="again"))
        more = Line((again,), "aten.mul.Scalar", (Ref(site.result.name), 2.0))
        yield Mutant(kind, site.named("double"), site.replaced(site.line, more, read="again"))
    for site in sites(programs, "aten.full.default", "SCALE"):
        for factor in (2.0, 0.5, 0.0):
            line = replace(site.line, args=([], site.line.args[1] * factor))
            yield Mutant(kind, site.named(f"times {factor}"), site.replaced(line))
    yield from _backward_scale(build, kind)


def _backward_scale(build: GoodBuild, kind: str) -> Iterator[Mutant]:
    programs, main = build.case.programs, build.case.programs["B"].main
    scale = next((value for value in main.parameters if value.binding == SCALE), None)
    if scale is None:  # an evaluation has no backward
        return
    made = Value("another_scale", scale.type)
    squared = Line((made,), "aten.mul.Tensor", (Ref(scale.name), Ref(scale.name)))
    one = Line((made,), "aten.full.default", ([], 1.0), (("dtype", scale.type.dtype),))
    for what, line in (("B squares the scale", squared), ("B scales by one", one)):
        lines = reading(main, scale.name, made.name).lines
        yield Mutant(kind, what, with_main(programs, "B", lines=(line, *lines)))
    name, value = next((n, v) for n, v in main.returns if main.values()[v].type.dtype == scale.type.dtype)
    again = replace(main.values()[value], name="scaled_again", binding=None)
    line = Line((again,), "aten.mul.Tensor", (Ref(value), Ref(scale.name)))
    returns = tuple((n, again.name if n == name else v) for n, v in main.returns)
    yield Mutant(kind, f"{name} is scaled twice", with_main(programs, "B", lines=(*main.lines, line), returns=returns))


def split_sums(build: GoodBuild) -> Iterator[Mutant]:
    """Give a gradient that is the sum of several uses' only one of them."""
    programs = build.case.programs
    for site in sites(programs, lambda line: line.op == "aten.add.Tensor" and len(line.uses) == 2, "B"):
        whole = site.function.name == programs["B"].main.name
        kind = "split a tied weight's gradient" if whole else "forget a part of a sum in backward"
        for name in site.line.uses:
            yield Mutant(kind, site.named(f"keep {name} of"), site.replaced(read=name))
        if whole:
            first, second = site.line.uses
            main = programs["B"].main
            apart = with_main(
                site.replaced(read=first),
                "B",
                lines=tuple(line for line in main.lines if line is not site.line),
                returns=(
                    *((k, first if v == site.result.name else v) for k, v in main.returns),
                    (Binding("gradient", "head.weight"), second),
                ),
            )
            yield Mutant(kind, site.named("return both parts of"), apart)


def wrong_gradients(build: GoodBuild) -> Iterator[Mutant]:
    """Leave out a gradient, or return another parameter's of equal type."""
    programs, main = build.case.programs, build.case.programs["B"].main
    values = main.values()
    for position, (name, value) in enumerate(main.returns):
        without = with_main(programs, "B", returns=tuple(pair for pair in main.returns if pair[0] != name))
        yield Mutant("leave out a gradient", f"B: {name}", without)
        yield Mutant("leave out a gradient", f"B, REDUCE: {name}", unreduced(without, name))
        alike = [(n, v) for n, v in main.returns if n > name and values[v].type == values[value].type]
        for other, theirs in alike[: position % 3 == 0]:
            swap = {name: theirs, other: value}
            returns = tuple((n, swap.get(n, v)) for n, v in main.returns)
            yield Mutant("give a gradient to another", f"{name} and {other}", with_main(programs, "B", returns=returns))
        for other, _ in alike[: position % 3 == 0]:
            returns = tuple((n, value if n == other else v) for n, v in main.returns)
            yield Mutant(
                "give a gradient to another", f"{name}'s to {other} too", with_main(programs, "B", returns=returns)
            )


def unreduced(programs: Programs, gradient: Binding) -> Programs:
    """Run REDUCE without one gradient, its sum and its part of the norm."""
    main = programs["REDUCE"].main
    gone = {value.name for value in main.parameters if value.binding == gradient}
    lines = []
    for line in main.lines:
        (result,) = line.results
        assert result is not None
        if line.op == "aten.stack.default" and gone & set(line.uses):
            items = [item for item in line.args[0] if item.name not in gone]
            shape = replace(result, type=replace(result.type, shape=(len(items),)))
            lines.append(replace(line, args=(items,), results=(shape,)))
        elif gone & set(line.uses):
            gone.add(result.name)
        else:
            lines.append(line)
    parameters = tuple(value for value in main.parameters if value.binding != gradient)
    returns = tuple(pair for pair in main.returns if pair[0] != gradient)
    return with_main(programs, "REDUCE", parameters=parameters, lines=tuple(lines), returns=returns)


def wrong_values(build: GoodBuild) -> Iterator[Mutant]:
    """Let F hand B another value of equal type, one too few, or one too many."""
    kind, programs, main = "save another value", build.case.programs, build.case.programs["F"].main
    values = main.values()
    saved = [(key, name) for key, name in main.returns if key.kind == "saved"]
    for key, name in saved:
        returns = tuple(pair for pair in main.returns if pair[0] != key)
        yield Mutant(kind, f"not {name}", with_main(programs, "F", returns=returns))
        other = next((n for n in values if n != name and values[n].type == values[name].type), None)
        if other is not None:
            returns = tuple((k, other if k == key else v) for k, v in main.returns)
            yield Mutant(kind, f"{other} as {name}", with_main(programs, "F", returns=returns))
    kept = {name for _, name in main.returns}
    for name in [name for name in values if name not in kept and values[name].binding is None][:3]:
        yield Mutant(
            kind, f"{name} too", with_main(programs, "F", returns=(*main.returns, (Binding("saved", name), name)))
        )
    for position, line in enumerate(main.lines):
        names = [value for value in line.results if value is not None]
        pair = next(((a, b) for a in names for b in names if a.name < b.name and a.type == b.type), None)
        if line.calls_function and pair is not None:
            swap = {pair[0].name: pair[1], pair[1].name: pair[0]}
            results = tuple(v and swap.get(v.name, v) for v in line.results)
            what = f"{pair[0].name} and {pair[1].name} change names"
            yield Mutant(kind, what, with_lines(programs, "F", {position: replace(line, results=results)}))


def wrong_streams(build: GoodBuild) -> Iterator[Mutant]:
    """Let a dropout draw from another stream than its own."""
    kind = "draw from another random stream"
    found = list(sites(build.case.programs, "parc.stream_key.default"))
    for position, site in enumerate(found):
        rng, name, seed = site.line.args
        changes = [(f"{name}x", seed), (name, seed + 1), (found[position - 1].line.args[1], seed)]
        for other, number in changes:
            line = replace(site.line, args=(rng, other, number))
            yield Mutant(kind, site.named(f"{other} {number} for"), site.replaced(line))
    for site, other in pairwise(found):
        lines = list(site.function.lines)
        lines[site.index] = replace(site.line, args=other.line.args)
        lines[other.index] = replace(other.line, args=site.line.args)
        swapped = with_function(site.programs, site.action, replace(site.function, lines=tuple(lines)))
        yield Mutant(kind, site.named("swap with the next"), swapped)


_POSITIONS = frozenset({"aten.slice.Tensor", "aten.select.int", "parc.iota.default", "aten.split.Tensor",
                        "aten.split_with_sizes.default"})  # fmt: skip


def off_by_one(build: GoodBuild) -> Iterator[Mutant]:
    """Make a size or a position too large or too small by one entry of a rank."""
    for site in sites(build.case.programs, lambda line: "." in line.op):
        for place, item in enumerate(site.line.args):
            for what, changed in _near(item, site.line.op in _POSITIONS):
                line = with_argument(site.line, place, changed)
                value = next(v for v in line.results if v is not None)
                named = f"{what} in {site.action} {site.function.name}: {value.name} = {line.op}, argument {place}"
                yield Mutant("be off by one", named, site.replaced(line))


def _near(item: Any, position: bool) -> Iterator[tuple[str, Any]]:
    """Yield the argument with one of its numbers changed."""
    if isinstance(item, LocalSize):
        yield f"{item.size} + {2 ** len(item.axes)}", replace(item, size=item.size + 2 ** len(item.axes))
    elif position and isinstance(item, int) and not isinstance(item, bool):
        yield f"{item} + 1", item + 1
        yield f"{item} - 1", item - 1
    elif isinstance(item, list):
        for place, inner in enumerate(item):
            for what, changed in _near(inner, position):
                yield what, [*item[:place], changed, *item[place + 1 :]]


def wrong_schedules(build: GoodBuild) -> Iterator[Mutant]:
    """Leave out an action, do it twice, do another, or change the order."""
    timelines, draw = {SINGLE: build.case.actions}, Random(0)
    for at, action in enumerate(build.case.actions):
        for what, changed in wrong_at(timelines, SINGLE, at, draw):
            yield Mutant("change the schedule", f"{what} {action}", build.case.programs, changed[SINGLE])


def wrong_padding(build: GoodBuild) -> Iterator[Mutant]:
    """Leave out an operator that keeps padding out of a sum, or make it write another number or stop at another
    entry."""
    kind = "let padding through"
    for site in sites(build.case.programs, "parc.fill_pad.default"):
        x, dim, outer, real, padded, value = site.line.args
        if site.action == "F":  # in backward, what is filled may be zero already
            yield Mutant(kind, site.named("leave out"), site.replaced(read=site.source.name))
        changed = [(real, 1.0), (real, 0.0 if value else float("-inf")), (real - 1, value), (real + 1, value)]
        for entries, other in changed:
            line = replace(site.line, args=(x, dim, outer, entries, padded, other))
            yield Mutant(kind, site.named(f"write {other} from {entries} in"), site.replaced(line))


SLIPS: Sequence[Callable[[GoodBuild], Iterator[Mutant]]] = (
    unscaled, split_sums, wrong_gradients, wrong_values, wrong_streams, off_by_one, wrong_schedules,
    wrong_padding,
)  # fmt: skip
