"""Placements over tp: the lines of `parc init` beside those of the integer program, for small models.

Of each model: the bytes that a rank sends over tp in a step and the messages, the shares of the work and of the weights
that a rank has, and the predicted time of a step on a cluster. A model of ``examples/`` is named by its plan; others
are convolutions, mixers and U-Nets. Words choose the models whose names hold one of them. ``--cluster`` is the one of
the predicted times; with ``--by seconds`` placements are chosen for it, and else by bytes.
"""

from __future__ import annotations

import time
from pathlib import Path

import benchmarks.placement_models
from benchmarks.command import Table, command
from benchmarks.turns import ROOT
from parc.compiler.clock.cluster import find_cluster
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.syntax import size_text
from parc.proposing.axis_price import AxisPrice
from parc.proposing.cheapest import cheapest_placements
from parc.proposing.guesses import Guess
from parc.proposing.lines import ModelLine
from parc.proposing.proposal import Wish, propose
from parc.step_time import price, seconds_text

PLANS = ("gpt", "llama", "moe")
NETS = ("Mlp", "Vgg", "ResNet", "Mixer", "UNet", "ConvNext", "MobileNet")
PICTURES = {"x": Guess("float32", ("B", 3, 32, 32))}


def compiled_model(name: str, ranks: int) -> Compiled:
    """Compile a model's plan over dp=2 and so many ranks of tp."""
    if name in PLANS:
        path = ROOT / "examples" / f"{name}.parc"
        return compile_plan(read_plan(path, {"tp": str(ranks)}), path.parent)
    model = ModelLine(f"{benchmarks.placement_models.__name__}:{name}")
    return propose(Wish(model, {"dp": 2, "tp": ranks}, {} if name == "Mlp" else PICTURES), ROOT, "net.parc").compiled


def main(*words: str, tp: str = "2,4", cluster: str = "h100-sxm", by: str = "bytes") -> int:
    """Print the table; fail if the lines of the integer program are dearer than those of `parc init` for a model."""
    links, dearer = find_cluster(cluster, Path()), 0
    table = Table("model", "tp", "bytes", "found", "messages", "found", "work", "found", "weights", "found",
                  "step", "found", "search", names=10, least=6)  # fmt: skip
    for name in (name for name in (*PLANS, *NETS) if not words or any(word in name for word in words)):
        for ranks in map(int, tp.split(",")):
            compiled = compiled_model(name, ranks)
            start = time.perf_counter()
            result = cheapest_placements(compiled.plan, compiled.folder, compiled, "tp",
                                         links if by == "seconds" else None)  # fmt: skip
            seconds = time.perf_counter() - start
            sides: list[tuple[str, ...]] = [
                _cells(found, price(each.build, each.plan, links).time.seconds)
                for found, each in ((result.before, result.initial), (result.after, result.compiled))
            ]
            cells = [cell for pair in zip(*sides, strict=True) for cell in pair]
            table.row(name, ranks, *cells, f"{seconds:.1f} s")
            dearer += bool(result.after.excess(result.before)) or result.after.total > result.before.total
    return int(dearer > 0)


def _cells(found: AxisPrice, seconds: float) -> tuple[str, ...]:
    return (
        size_text(found.wire_bytes), str(found.messages), f"{found.work:.0%}", f"{found.weights:.0%}",
        seconds_text(seconds),
    )  # fmt: skip


if __name__ == "__main__":
    command(main)
