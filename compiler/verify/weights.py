"""The checker of weights: each block computes with the model's own parameters of its place, and backward with those
that its forward had.

Types say that a gather is complete and of one value. Here it is of which parameter: what UNSHARD makes is one
parameter by conversions alone, and what a call of F reads is, by name, what the captured graph reads at that place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..analysis.dataflow import stored_sources, weight_sources
from ..ops.rules import facts
from ..program.actions import BACKWARD, FORWARD, UNSHARD
from ..program.program import Fault, Program
from ..twin.structure import repetition_fault
from ..twin.wiring import Forward, Kinds


def check_stored(programs: Mapping[str, Program], reference: Program) -> Iterator[Fault]:
    """Find weights that are not their own parameter's, and calls of F and B that read another block's.

    In builds without conversions of parameters, and without values that are kept away, numbers alone are tested.
    """
    weights = weight_sources(programs)
    for key in programs[UNSHARD].main.returned("weight") if UNSHARD in programs else ():
        made = next((parameter for weight, parameter in weights.items() if weight.name == key), None)
        if made is None or made.name != key.partition(":")[0]:
            yield Fault("types", f"UNSHARD {key}", "is not proved to be its own parameter")
    converted = stored_sources(programs[FORWARD], weights).keys() - {v.name for v in programs[FORWARD].main.parameters}
    kept = any(facts(line.op).carries for line in programs[FORWARD].main.lines)
    if not weights and not converted and not kept:
        return
    if (fault := repetition_fault(programs, reference)) is not None:
        yield fault
        return
    kinds = Kinds.alone(reference)
    graph = kinds.graph(reference.main, programs[FORWARD])
    yield from _read_faults(Forward(programs[FORWARD], programs[BACKWARD], graph, kinds, weights))


def _read_faults(forward: Forward) -> Iterator[Fault]:
    """Find parameters that a call reads and that its place in the captured graph does not."""
    for call in forward.calls:
        known = {source for source, *_ in call.piece.reads} if call.piece is not None else set()
        for source, name in zip(call.reads, call.line.uses, strict=True):
            if known and source[0] == "bound" and source[1].kind in ("parameter", "frozen") and source not in known:
                yield Fault(
                    "types", f"F {call.place}", f"reads `{name}`, of {source[1].words}, which is not read there"
                )
