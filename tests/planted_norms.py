"""Planted bugs of REDUCE's own work: the norm of the gradients, and gradients returned under another's name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from parc.compiler.program.program import Line, Ref
from tests.planted_builds import GoodBuild
from tests.planted_sites import Mutant, sites, stacked, with_main


def wrong_norms(build: GoodBuild) -> Iterator[Mutant]:
    """Count a gradient twice in the norm, or never, or in another's place; or leave out the norm's root, or scale
    it."""
    kind, programs = "count a gradient wrongly in the norm", build.case.programs
    main = programs["REDUCE"].main
    for site in sites(programs, "aten.stack.default", "REDUCE"):
        items = site.line.args[0]
        for place, item in enumerate(items):
            changes = {
                "twice": [*items, item], "never": [*items[:place], *items[place + 1 :]],
                "as the one before it": [*items[:place], items[place - 1], *items[place + 1 :]],
            }  # fmt: skip
            for what, changed in changes.items():
                if changed and changed != items:
                    yield Mutant(kind, site.named(f"{item} {what}"), site.replaced(stacked(site, changed)))
    squares = list(sites(programs, "parc.square_sum.default"))
    for one, two in pairwise(squares):
        if one.operand == two.operand:
            yield Mutant(kind, one.named(f"of {two.source}"), one.replaced(replace(one.line, args=two.line.args)))
    for site in sites(programs, "aten.sqrt.default", "REDUCE"):
        yield Mutant(kind, site.named("leave out"), site.replaced(read=site.source.name))
        for factor in (2.0, 0.999999):
            scaled = replace(site.result, name="scaled")
            more = Line((scaled,), "aten.mul.Scalar", (Ref(site.result.name), factor))
            yield Mutant(kind, site.named(f"{factor} times"), site.replaced(site.line, more, read="scaled"))
    gradients = [(key, name) for key, name in main.returns if key.kind == "gradient"]
    values = main.values()
    for (key, name), (_, other) in pairwise(gradients):
        if values[name].type == values[other].type:
            swap = {name: other, other: name}
            swapped = tuple((k, swap.get(n, n)) for k, n in main.returns)
            once = tuple((k, other if k == key else n) for k, n in main.returns)
            for what, returns in (("swapped with the next", swapped), ("the next", once)):
                mutant = with_main(programs, "REDUCE", returns=returns)
                yield Mutant("return another gradient", f"REDUCE: {key} is {what}", mutant)
