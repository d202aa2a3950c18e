"""The reason why a term of a loss has no count, where its last lines tell it."""

from __future__ import annotations

from ..ops.rules import facts
from ..program.binding import LOSS, Binding
from ..program.parts import making, weighted_terms
from ..program.program import Line, Program, Ref


def averaging_reason(reference: Program, number: int) -> str:
    """Return the reason why a term of the loss (numbered from 1) is averaged over microbatches and not divided once a
    step: it is a sum of terms, or a fraction whose denominator is no sum of inputs. "" if it is neither."""
    main = weighted_terms(reference.main).get(str(number), reference.main)
    line = main.makers.get(dict(main.returns)[LOSS])
    while line is not None and facts(line.op).computes in ("multiple", "ratio") and len(line.uses) == 1:
        line = main.makers.get(line.uses[0])
    if line is None:
        return ""
    if facts(line.op).computes == "total" and all(isinstance(item, Ref) for item in line.args[:2]):
        return (
            f"it is a sum of terms{_place(line)}: return each by itself, and add them in the plan, as"
            " `output.a + 0.5 output.b`; each is then divided by a count of its own"
        )
    below = line.args[1] if facts(line.op).computes == "ratio" else None
    if not isinstance(below, Ref):
        return ""
    denominator = making(main, ((Binding("value", below.name), below.name),))
    if any(value.kind != "input" for value in denominator.parameters):
        return f"its denominator{_place(line)} depends on the model, not on inputs alone"
    last = main.makers.get(below.name)
    while last is not None and facts(last.op).casts:
        last = main.makers.get(last.uses[0])
    if last is not None and facts(last.op).elementwise:
        name = last.op.split(".")[1]
        floor = f"its denominator is `{name}` of a sum{_place(last)}"
        return f"{floor}: divide by the sum itself, since a batch in which nothing counts is refused"
    return ""


def _place(line: Line) -> str:
    return f" at {line.origin.source}" if line.origin.source else ""
