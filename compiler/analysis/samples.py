"""The way in which the losses of microbatches combine to the whole batch's loss. The rules follow the samples from the
inputs to the loss.

It is as if each rank of an axis held one sample: what lies split over it keeps samples apart, what is still to be
summed over it is a sum over samples, and an operator that would need communication lets them meet. Lookups, and
operators without a rule, may keep them apart, and are taken to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ..layout.collectives import TypeFault
from ..layout.mesh import Mesh
from ..layout.placement import AxisType, Placement, Split
from ..ops.factors import OpCall
from ..ops.infer import infer, place_created
from ..ops.op_row import normal_dims
from ..ops.rules import facts, has_rule
from ..program.binding import COUNT, LOSS, Binding
from ..program.plain import making, weighted_terms
from ..program.program import Line, Program, Ref
from .dataflow import Question, follow, line_call

Adds = Literal["sum", "mean"] | None


@dataclass(frozen=True, slots=True)
class Samples:
    """The dependence of a value on samples: ``I`` (alike for all of them), split, ``P`` (a sum over them), or ``R``
    where samples have met in one number."""

    kind: AxisType = "I"
    statistic: bool = False
    """True where the value reads a sum over all samples, as a BatchNorm does."""
    adds: Adds = None
    """The operation that combines the values of a batch's parts to the whole batch's value, where the value is surely
    ``P``."""
    terms: int = 0
    """The count of the samples' numbers that the ``P`` is the sum of; 0 where it is not known."""
    shifted: bool = False
    """True where a number that no sample reaches was added to a ``P``."""


_FREE, _MET = Samples(), Samples("R")
_WEIGHT, _WEIGHED = Samples("I", adds="mean"), Samples("P", adds="sum")
"""The number that multiplies a term of the loss, and what it multiplies, of which the parts add up: whether it is the
right number, ``check_reduce`` proves."""
_SOMEWHERE = Split(-1)
"""A split along an unknown dim: only sums over dim 0 are still seen."""
_AXIS = "samples"
_MAY_KEEP_APART = ("shape", "dims", "index", "scatter")
"""The kinds of moves that may still keep samples apart where the rules lose track of them."""


def combination(reference: Program, unbatched: Collection[str] = ()) -> Adds:
    """Return ``"sum"`` if the losses of microbatches add up to the whole batch's loss, ``"mean"`` if they average to
    it, and None where that is not sure. A loss that is divided by a count of targets is judged by its numerator, which
    can only add up; a term with a weight of its own is for ``averaged_terms``.

    ``unbatched`` are inputs whose first dim is not the batch. Statistics of a microbatch, as of a BatchNorm, are taken
    to be meant in a mean, and in what a count divides. In microbatches of one sample only sums over samples are seen.
    """
    loss = dependences(reference, unbatched).get(LOSS, _FREE)
    if loss == _FREE:
        return "mean"
    if loss.kind != "P":
        return None
    if len(reference.functions) > 1:
        return "sum"
    return None if loss.adds == "sum" and loss.statistic else loss.adds


def averaged_terms(reference: Program, unbatched: Collection[str] = ()) -> tuple[int, ...]:
    """Return the numbers of those terms of the loss that microbatches may not make as the whole batch does: they are
    averaged, and may be no means over samples, or their samples meet. Terms are numbered from 1."""
    terms = weighted_terms(reference.main)
    counts = reference.functions[0].returned("count")
    found = [] if combination(reference, unbatched) else [min({*range(1, len(terms) + 2)} - {*map(int, terms)})]
    for number, term in terms.items():
        made = dependences(replace(reference, functions=(term,)), unbatched)[LOSS]
        right = made.kind == "P" if number in counts else made == _FREE or (made.kind, made.adds) == ("P", "mean")
        found += [] if right else [int(number)]
    return tuple(sorted(found))


def is_one_fraction(program: Program, unbatched: Collection[str] = (), token_losses: bool = False) -> bool:
    """Return whether microbatches and the whole batch have one fraction: the numerators of microbatches, divided by
    their denominators, all added up before. ``program`` returns both, as ``LOSS`` and ``COUNT``. A numerator that is a
    sum of ``token_losses`` is taken to add up, and is not looked at.

    Statistics of a microbatch are taken to be meant in the numerator, and are in no denominator: the greatest weight of
    a microbatch is not the batch's. Two means are one fraction if nothing is added to them that no sample reaches,
    which would count for more in a smaller batch.
    """
    count = replace(program, functions=(making(program.main, ((COUNT, program.main.returned("count")[""]),)),))
    above = _WEIGHED if token_losses else dependences(program, unbatched)[LOSS]
    below = dependences(count, unbatched, strict=not token_losses)[COUNT]
    if below.statistic or above.shifted or below.shifted:
        return False
    return above.kind == below.kind == "P" and above.adds == below.adds is not None


def counts_a_share(reference: Program, unbatched: Collection[str] = ()) -> bool:
    """Return whether the count that divides the loss is a mean over samples, as ``mask.mean()`` is: of a larger batch
    it is no larger."""
    count = replace(reference, functions=(reference.function("count"),))
    return dependences(count, unbatched)[COUNT].adds == "mean"


def dependences(reference: Program, unbatched: Collection[str] = (), strict: bool = False) -> dict[Binding, Samples]:
    """Return the dependence on samples of each value that the captured graph returns. If ``strict``, samples meet also
    in whole numbers, and in operators without a rule."""
    function = reference.functions[-1]
    inputs = function.bound("input").items()
    batched = {value.name for name, value in inputs if name not in unbatched and value.type.shape}
    size = min((value.type.shape[0] for value in function.parameters if value.name in batched), default=1)
    start = Samples(Split(0) if size > 1 else _SOMEWHERE)  # dims of size 1 belong to no factor
    starts = [start if value.name in batched else _WEIGHT if value.kind == "term" else _FREE
              for value in function.parameters]  # fmt: skip
    found = follow(reference, function, starts, lambda _, line, read: _made(line, read, size, strict))
    return dict(zip((key for key, _ in function.returns), found, strict=True))


@lru_cache(maxsize=8192)
def _made(q: Question, given: tuple[Samples, ...], size: int, strict: bool) -> tuple[Samples, ...]:
    """Return the dependence of a line's results on samples."""
    read: Sequence[Samples] = given
    if _WEIGHT in read:
        return (_WEIGHED,) * len(q.results)
    if _MET in read or all(samples == _FREE for samples in read):
        return (_MET if _MET in read else _FREE,) * len(q.results)
    call = line_call(q.line, q.operands, q.results, lambda item: item.size)
    sums = [samples for samples in read if samples.kind == "P"]
    if facts(q.line.op).computes in ("total", "difference") and sums and (len(read) == 1 or _FREE in read):
        # what no sample reaches is in every part of the batch, so it averages
        return (replace(sums[0], adds="mean" if sums[0].adds == "mean" else None, shifted=True),)
    try:
        kinds = _placed(call, read, size)
    except ValueError:
        sums, read = [], [Samples("I", statistic=True) if samples.kind == "P" else samples for samples in read]
        try:
            kinds = _placed(call, read, size)
        except ValueError:
            moves = facts(call.op).moves in _MAY_KEEP_APART or not (strict or has_rule(call.op))
            if not moves and (strict or any(t.dtype.is_floating_point for t in q.results)):
                return (_MET,) * len(q.results)
            kinds = [_SOMEWHERE] * len(q.results)
    adds, terms = _added(q, call, sums, size)
    statistic = any(samples.statistic for samples in read)
    shifted = any(samples.shifted for samples in read)
    return tuple(Samples(kind, statistic, *((adds, terms, shifted) if kind == "P" else ())) for kind in kinds)


def _placed(call: OpCall, read: Sequence[Samples], size: int) -> list[AxisType]:
    """Return the dependence of each result on samples.

    Raises:
        ValueError: samples meet, or a sum over them is read.
    """
    kinds = [samples.kind for samples in read]
    if _SOMEWHERE in kinds:
        if "P" in kinds:
            raise TypeFault(f"{call.op} reads a sum over samples")
        summed = facts(call.op).reduces == "sum" and 0 in normal_dims(call.argument(1, "dim"), len(call.operands[0]))
        return ["P" if summed else _SOMEWHERE] * len(call.results)
    mesh = Mesh(((_AXIS, size),))
    # of what is alike for all samples each may read its own part
    asked = [None if samples == _FREE else Placement.of(mesh, {_AXIS: samples.kind}) for samples in read]
    return [placement[_AXIS] for placement in infer(call, place_created(call, asked, frozenset(), mesh), mesh)]


def _added(q: Question, call: OpCall, sums: Sequence[Samples], size: int) -> tuple[Adds, int]:
    """Return ``adds`` and ``terms`` of an operator's results that are sums over samples, or linear in such ``sums``."""
    ratio = math.prod(call.operands[0]) // max(math.prod(call.results[0]), 1) if facts(call.op).reduces == "sum" else 0
    if not sums:
        return "sum", ratio
    adds, terms = sums[0].adds, sums[0].terms * (ratio or 1)
    if any((other.adds, other.terms) != (adds, sums[0].terms) for other in sums):
        adds, terms = adds if all(other.adds == adds for other in sums) else None, 0
    if facts(call.op).computes == "multiple" and adds == "sum" and terms and 1 / terms in call.args:
        return "mean", 0
    if (
        facts(call.op).computes == "multiple"
        and adds == "sum"
        and any(_may_count(item, size, terms) for item in call.args)
    ):
        return None, 0  # one over the number of samples, which a captured number does not tell
    if facts(call.op).computes == "ratio" and adds == "sum":
        # a sum over as many as it is divided by is a mean; any other number may come from the size of the batch
        return ("mean" if terms and call.args[1] == terms else None), 0
    rounded = q.operands[0].dtype.is_floating_point or not q.results[0].dtype.is_floating_point
    narrows = rounded and q.results[0].dtype.itemsize < q.operands[0].dtype.itemsize
    return (None if narrows else adds), terms


def _may_count(factor: object, size: int, terms: int) -> bool:
    """Return whether a factor of a sum of ``terms`` may be one over the ``size`` samples of a microbatch, or over
    several numbers of each. A half is taken for a half."""
    if not isinstance(factor, float) or size <= 2 or not 0 < factor < 1:
        return False
    number = round(1 / factor)
    return 1 / number == factor and number % size == 0 and terms % number == 0


# ---- the reason why a term of a loss has no count, where its last lines tell it.


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
