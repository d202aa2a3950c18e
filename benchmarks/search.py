"""The search beside what it chooses: how many plans, how long, and how near its estimates are to compiled plans.

Of each model: the choices that fit, the plans that differ in more than microbatches, the seconds of the estimates and
of the best plans' compilation, the memory of the processes, and the best plans, each as estimated and as compiled. The
layout that was published for a model is priced beside them, with its rank. Words choose the models.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.command import Table, command
from benchmarks.turns import ROOT
from parc.compiler.clock.cluster import find_cluster
from parc.compiler.plan.include import read_source
from parc.compiler.plan.open_plan import read_open
from parc.grammar.syntax import size_text
from parc.searching.pricing import ExactPrices, PricedPlan
from parc.searching.search import SearchResult, choice_text, search
from parc.step_time import seconds_text


@dataclass(frozen=True)
class Space:
    """A search: an open plan, its ranks, the names that are closed, and the layout that was published for it."""

    plan: str
    ranks: int
    closed: dict[str, str] = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)
    source: str = ""


_HERD = "arXiv:2407.21783, table 4: tensor 8, pipeline 16, data 128, sequences of 8,192; the best `zero`"
SPACES = {
    "405b": Space("llama3-405b-open", 16_384, {}, {"dp": "128", "pp": "16", "cp": "1", "tp": "8",
                  "again": "none", "schedule": "interleaved", "chunks": "2", "microbatches": "16"}, _HERD),
    "405b-512": Space("llama3-405b-open", 512, {"batch": "512"}),
    "8b": Space("llama3-8b-open", 64),
}  # fmt: skip


def main(*words: str, cluster: str = "h100-sxm", top: int = 5) -> int:
    """Print the searches; fail if an estimate is more than 2 % from the plan that it chose."""
    apart = 0.0
    for name, space in SPACES.items():
        if words and name not in words:
            continue
        path = ROOT / "examples" / f"{space.plan}.parc"
        plan = read_open(read_source(path), space.closed)
        prices = ExactPrices(path.parent, find_cluster(cluster, Path()))
        with TemporaryDirectory() as empty:
            os.environ["PARC_CACHE"] = empty
            result = search(plan, prices, space.ranks, top)
            again = search(plan, prices, space.ranks, 1)
        print(f"\n## {name}: {space.plan} on {space.ranks:,} {cluster}\n\n{_summary(result)}"
              f" A second search has its estimates in {again.seconds['estimates']:.1f} s.\n")  # fmt: skip
        table = Table("plan", "estimated", "compiled", "apart", "memory", "compiled", "apart", names=100)
        for one in [*result.best, *_published(space, result, prices)]:
            assert one.estimate is not None
            sides = [
                (one.estimate.seconds, one.figures.seconds),
                *[tuple(float(figures.memory - figures.framework) for figures in (one.estimate, one.figures))],
            ]
            apart = max(apart, abs(sides[0][0] / sides[0][1] - 1))
            table.row(f"{choice_text(one.choice)} in order {' '.join(one.order)}",
                      *map(seconds_text, sides[0]), f"{sides[0][0] / sides[0][1] - 1:+.1%}",
                      *map(size_text, sides[1]), f"{sides[1][0] / sides[1][1] - 1:+.1%}")  # fmt: skip
        if space.published:
            print(f"\nThe last is the published layout ({space.source}): {_rank(space, result)}")
    return int(apart > 0.02)


def _summary(result: SearchResult) -> str:
    """Return what a search looked at, and what it took."""
    apart = {tuple((name, value) for name, value in one.choice.items() if name != "microbatches")
             for one in result.estimates}  # fmt: skip
    choices = {tuple(one.choice.items()) for one in result.estimates}
    most = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20
    return (
        f"{result.priced:,} plans fit, {len(choices):,} but for the order of the mesh, and {len(apart):,} "
        f"of these more than microbatches apart; {result.cut.total():,} choices were cut. {result.structures} "
        f"structures; estimates {result.seconds['estimates']:.1f} s, the best {result.seconds['compiling']:.1f} s; "
        f"the largest process and the largest of its children: {most:.1f} GiB."
    )


def _published(space: Space, result: SearchResult, prices: ExactPrices) -> Iterator[PricedPlan]:
    """Yield the published layout with its price, if it is one of the choices that fit."""
    for one in result.estimates if space.published else ():
        if space.published.items() <= one.choice.items():
            assert result.estimator is not None
            plan = result.plan.read(result.estimator.closed(one))
            priced = prices.price(one.choice, plan, True, one.figures)
            if isinstance(priced, PricedPlan):
                yield priced
            return


def _rank(space: Space, result: SearchResult) -> str:
    """Return in words which the published layout is of all estimates."""
    choices = list(dict.fromkeys(tuple(one.choice.items()) for one in result.estimates))
    at = next((at for at, choice in enumerate(choices) if space.published.items() <= dict(choice).items()), None)
    return "it is none of those that fit" if at is None else f"no. {at + 1} of {len(choices):,}"


if __name__ == "__main__":
    command(main)
