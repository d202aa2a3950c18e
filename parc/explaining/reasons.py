"""Reasons of messages: why the program needs each, and which changes of the plan would remove it or make it smaller.

A reason follows from the two types of a message's line: how its operand lies over the axis, and how its result does.
Changes follow from the line of the plan that causes it, by its verb.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parc.compiler.analysis.communication import PlacedMessage
from parc.compiler.layout.collectives import RINGS, axes_of
from parc.compiler.layout.placement import AxisType, Split
from parc.compiler.program.actions import ACTIONS, FORWARD, UNSHARD
from parc.compiler.program.program import Line
from parc.explaining.flights import line_words, maker, readers

_READERS = 3
"""The number of readers that a reason names."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason of a message: a sentence, and the modules whose lines make and read what it carries."""

    text: str
    modules: tuple[str, ...] = ()


def message_reason(placed: PlacedMessage, stage: str) -> Reason:
    """Return why the program has a message. ``stage`` is the name of the pipeline's axis."""
    message = placed.message
    if message.op == "send":
        other = "after" if placed.program.action == FORWARD else "before"
        what = "what it made" if other == "after" else "the gradient of what it received"
        return Reason(f"the stages lie on different ranks of `{stage}`: a stage hands {what} to the one {other} it")
    line = placed.function.lines[placed.index]
    axis, ranks = ",".join(message.axes), message.ranks
    if message.carries == "numbers":
        return Reason(f"a single number, such as the count of targets, the loss or the gradients' norm, is that of all "
                      f"{ranks} ranks of `{axis}`")  # fmt: skip
    if line.op in RINGS:
        text = f"each of {ranks} `{axis}` ranks has a part of the sequence, and its queries need all keys and values"
        return Reason(f"{text}: they go round in a ring, and no rank holds all of them", (message.origin.module,))
    if line.op == "parc.row_max":
        return Reason(
            f"the row of a softmax is split over {ranks} `{axis}` ranks: its largest entry is that of all parts"
        )
    if message.op == "all_reduce_among":
        return Reason(f"`{message.origin.module}` belongs to stages of {ranks} roles: each has a part of its gradient")
    return _moved(placed, line, axis, ranks)


def _moved(placed: PlacedMessage, line: Line, axis: str, ranks: int) -> Reason:
    """Return why a value is summed, gathered, cut or exchanged."""
    program, function, module = placed.program, placed.function, placed.message.origin.module
    type_ = function.values()[line.uses[0]].type
    before, after = type_.placement[axes_of(line.args[1:])[0]], line.made[0].type.placement[axes_of(line.args[1:])[0]]
    if placed.message.carries == "weights":
        where = f"the work of {module or 'the model'}" if program.action == UNSHARD else f"{program.action} of it"
        return Reason(
            f"each of {ranks} `{axis}` ranks stores a part of this weight, and {where} reads all of it", (module,)
        )
    if placed.message.carries == "gradients" or (ACTIONS[program.action].accumulates and function in program.mains):
        kept = f"it keeps {_part(after)} of the sum" if isinstance(after, Split) else "all need the sum"
        return Reason(
            f"each of {ranks} `{axis}` ranks has the gradient of its own samples or tokens; {kept}", (module,)
        )
    made, readers_ = maker(function, line.uses[0]), [*readers(function, line.made[0].name)]
    lines = [*([made] if isinstance(made, Line) else []), *readers_]
    modules = tuple(dict.fromkeys(one.origin.module for one in lines if one.origin.module))
    origin = f"what comes into `{function.name}`" if isinstance(made, str) else line_words(program, made, module)
    value = f"{origin}, {type_.text(program.mesh)},"
    reads = _listed([line_words(program, one, module) for one in readers_]) or "what comes after"
    if before == "P":
        need = f"{_part(after)} of the sum" if isinstance(after, Split) else "the whole sum"
        return Reason(f"of {value} each of {ranks} `{axis}` ranks has a part of a sum; {need} goes to {reads}", modules)
    whole = f"split in dim {after.dim}" if isinstance(after, Split) else "whole"
    return Reason(f"{value} is split over {ranks} `{axis}` ranks; {whole} it goes to {reads}", modules)


def _listed(words: Sequence[str]) -> str:
    """Return words for lines, with the operator once where several modules have it.

    >>> _listed(["`mm` in a.q", "`mm` in a.k", "`add` in b"])
    '`mm` in a.q, a.k, `add` in b'
    """
    result: list[str] = []
    before = ""
    for word in dict.fromkeys(words):
        op, _, module = word.partition(" in ")
        result.append(module if op == before and module else word)
        before = op
    return ", ".join(result[:_READERS]) + (f" and {len(result) - _READERS} more" if len(result) > _READERS else "")


def _part(kind: AxisType) -> str:
    return f"a part in dim {kind.dim}" if isinstance(kind, Split) else "a part"


# ---- changes


def changes(row: Mapping[str, Any], plan: Mapping[str, str], cause: str) -> Iterator[str]:
    """Yield changes of the plan that would remove a message of the report's row, or make it cheaper. ``plan`` has a
    line's text for each verb of the plan, ``cause`` is the text of the line that causes it, "" for none."""
    axis, carries, verb = row["axis"], row["carries"], cause.partition(" ")[0]
    if carries == "numbers":
        yield "nothing: it is a few bytes, which every plan over these ranks sends"
    elif row["op"] in ("send", "all_reduce_among"):
        yield "fewer stages"
    elif carries == "gradients":
        yield f"nothing, as long as the ranks of `{axis}` have different samples or tokens"
        if verb == "zero":
            yield f"without `{cause}` it is an all_reduce, which sends as much as this and one gather of the weights"
        if verb in ("zero", "shard") and "compress" not in plan:
            yield f"`compress gradients over {axis} using fp16` sends half of it, and rounds"
    elif carries == "weights":
        yield from _of_weights(row, axis, verb, cause)
    else:
        yield from _of_activations(row, axis, plan, verb)


def _of_weights(row: Mapping[str, Any], axis: str, verb: str, cause: str) -> Iterator[str]:
    if verb != "zero":
        yield "lines that place the weight as its readers want it"
        return
    if cause.startswith("zero 3"):
        yield f"`zero 2 over {axis}` gathers each weight once a step, and every rank holds the whole until the next"
    yield f"without `{cause}` every rank stores and updates whole weights: no gather, and more memory"
    if not row["hidden"]:
        yield "it can hide only behind work that comes before it, and the first weights have none"


def _of_activations(row: Mapping[str, Any], axis: str, plan: Mapping[str, str], verb: str) -> Iterator[str]:
    sequence, context = (
        (line if axis in line.split() else "") for line in (plan.get("sequence", ""), plan.get("context", ""))
    )
    if context:
        yield f"fewer ranks of `{axis}`; other words after `using` in `{context}` send other bytes"
        return
    if row["op"] in ("exchange", "all_to_all"):
        yield f"fewer ranks of `{axis}`: more of what is exchanged then stays on its rank"
        return
    if sequence:
        yield f"without `{sequence}` these become all_reduces of as many bytes, and values between layers are whole"
        if row["phase"] == "backward" and row["op"] == "all_gather" and "keep gathered" not in sequence:
            yield f"`{sequence} keep gathered` does not gather it again for backward, and keeps it whole until then"
    elif verb != "vocab":
        yield f"`sequence` over `{axis}` sends as much, but splits the values between these layers"
    yield f"fewer ranks of `{axis}`: each then holds more of the weights, and multiplies more"
