"""Samples: the dependence of a model's values on the samples of a batch, from which follows how the losses of
microbatches combine to the whole batch's loss, by a sum or by a mean.

The sharding rules follow samples as if each rank of an axis held one: a split value keeps samples apart, a partial one
is a sum over samples, and an operator that would need communication mixes them. Lookups, and operators without a rule,
may keep samples apart, and are taken to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
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
from ..program.binding import COUNT, LOSS, PARAMETERS, Binding
from ..program.program import Function, Line, Program, Ref, operator
from ..program.step_values import Division
from .dataflow import Question, follow, line_call

Combination = Literal["sum", "mean"] | None
"""The operation by which the values of a batch's parts combine to the whole batch's value; None where that is not
sure."""


@dataclass(frozen=True, slots=True)
class Dependence:
    """The dependence of a value on samples: ``I`` (the same for all of them), split (some for each), ``P`` (a sum over
    them), or ``R`` (samples are mixed in a number)."""

    kind: AxisType = "I"
    statistic: bool = False
    """True where the value reads a sum over all samples, as a BatchNorm does."""
    adds: Combination = None
    """The combination of the values of a batch's parts, for ``P``."""
    terms: int = 0
    """The count of samples' numbers that a ``P`` adds up; 0 where it is not known."""
    shifted: bool = False
    """True where a number that depends on no sample was added to a ``P``."""


_INDEPENDENT, _MIXED = Dependence(), Dependence("R")
_WEIGHT, _WEIGHED = Dependence("I", adds="mean"), Dependence("P", adds="sum")
"""The factor of a term of the loss, and the term times its factor, whose parts add up: the certificate proves that
the factor is the right one."""
_UNKNOWN_DIM = Split(-1)
"""A split along an unknown dim: only sums over dim 0 are still seen."""
_AXIS = "samples"
_POWERS = ("exponent", "ord", "p")
"""The arguments that name a power."""
_MAY_KEEP_APART = ("shape", "dims", "index", "scatter")
"""The kinds of moves that may keep samples apart although the rules lose track of them."""


def combination(term: Program, unbatched: Collection[str] = ()) -> Combination:
    """Return ``"sum"`` if the values of a term of the loss add up over microbatches to the whole batch's, ``"mean"`` if
    they average to it, and None where that is not sure. ``term`` returns the term as ``LOSS``.

    ``unbatched`` are inputs whose first dim is not the batch. Statistics of a microbatch, as of a BatchNorm, are taken
    to be meant in a mean. In microbatches of one sample only sums over samples are seen. Numbers of the code are taken
    for numbers, though they may come from the size of the batch: only the code tells, which
    ``parc/compiling/microbatches.py`` runs.
    """
    loss = dependences(term, unbatched)[LOSS]
    if loss == _INDEPENDENT:
        return "mean"
    if loss.kind != "P" or (loss.adds == "sum" and loss.statistic):
        return None
    return loss.adds


def weighted_terms(function: Function) -> dict[str, Function]:
    """Return, for each term of the loss that is multiplied by a number of its own, the function that returns that term
    as the loss, by the terms' numbers."""
    terms = {}
    for number, weight in function.bound("term").items():
        (term,) = (name for line in function.readers[weight.name] for name in line.uses if name != weight.name)
        terms[number] = function.returning({LOSS: term})
    return terms


def is_one_fraction(
    program: Program, unbatched: Collection[str] = (), token_losses: bool = False, floored: bool = False
) -> bool:
    """Return whether the whole batch's fraction is the sum of the microbatches' numerators over the sum of their
    denominators. ``program`` returns both, as ``LOSS`` and ``COUNT``. A numerator that is a sum of ``token_losses`` is
    taken to add up, and is not looked at. A ``floored`` denominator must be a sum, since a floor under a mean is none
    under the sum of means.

    Statistics of a microbatch are taken to be meant in a numerator, but not in a denominator: the greatest weight of a
    microbatch is not the batch's. Two means make such a fraction too, unless a number that depends on no sample is
    added to one: it would count for more in a smaller batch.
    """
    count = replace(program, functions=(program.main.returning({COUNT: program.main.returned("count")[""]}),))
    above = _WEIGHED if token_losses else dependences(program, unbatched)[LOSS]
    below = dependences(count, unbatched, strict=not token_losses)[COUNT]
    if below.statistic or above.shifted or below.shifted:
        return False
    same = above.adds == below.adds == "sum" if floored else above.adds == below.adds is not None
    return above.kind == below.kind == "P" and same


def counts_a_share(reference: Program, unbatched: Collection[str] = ()) -> bool:
    """Return whether the count that divides the loss is a mean over samples, as ``mask.mean()`` is, which does not grow
    with the batch."""
    count = replace(reference, functions=(reference.function("count"),))
    return dependences(count, unbatched)[COUNT].adds == "mean"


def dependences(reference: Program, unbatched: Collection[str] = (), strict: bool = False) -> dict[Binding, Dependence]:
    """Return the dependence on samples of each value that the captured graph returns. If ``strict``, whole numbers and
    operators without a rule mix samples too."""
    function = reference.functions[-1]
    starts, size = _starts(function, unbatched)
    returned = follow(reference, function, starts, lambda _, line, read: _line_dependences(line, read, size, strict))
    return dict(zip((key for key, _ in function.returns), returned, strict=True))


def _starts(function: Function, unbatched: Collection[str]) -> tuple[list[Dependence], int]:
    """Return the dependence of a function's parameters on samples, and the number of these."""
    inputs = function.bound("input").items()
    batched = {value.name for name, value in inputs if name not in unbatched and value.type.shape}
    size = min((value.type.shape[0] for value in function.parameters if value.name in batched), default=1)
    start = Dependence(Split(0) if size > 1 else _UNKNOWN_DIM)  # dims of size 1 belong to no factor
    return [
        start if value.name in batched else _WEIGHT if value.kind == "term" else _INDEPENDENT
        for value in function.parameters
    ], size


@lru_cache(maxsize=8192)
def _line_dependences(q: Question, read: Sequence[Dependence], size: int, strict: bool) -> tuple[Dependence, ...]:
    """Return the dependence of a line's results on samples, from those of the values that it reads."""
    if _WEIGHT in read:
        return (_WEIGHED,) * len(q.results)
    if _MIXED in read or all(operand == _INDEPENDENT for operand in read):
        return (_MIXED if _MIXED in read else _INDEPENDENT,) * len(q.results)
    call = line_call(q.line, q.operands, q.results, lambda item: item.size)
    sums = [operand for operand in read if operand.kind == "P"]
    if facts(q.line.op).computes in ("total", "difference") and sums and (len(read) == 1 or _INDEPENDENT in read):
        # a number that depends on no sample is in every part of the batch, so it averages
        return (replace(sums[0], adds="mean" if sums[0].adds == "mean" else None, shifted=True),)
    try:
        kinds = _result_kinds(call, read, size)
    except ValueError:
        sums, read = [], [Dependence("I", statistic=True) if operand.kind == "P" else operand for operand in read]
        try:
            kinds = _result_kinds(call, read, size)
        except ValueError:
            may_keep_apart = facts(call.op).moves in _MAY_KEEP_APART or not (strict or has_rule(call.op))
            if not may_keep_apart and (strict or any(t.dtype.is_floating_point for t in q.results)):
                return (_MIXED,) * len(q.results)
            kinds = [_UNKNOWN_DIM] * len(q.results)
    adds, terms = _combination_of_sums(q, call, sums, size)
    statistic = any(operand.statistic for operand in read)
    shifted = any(operand.shifted for operand in read)
    return tuple(Dependence(kind, statistic, *((adds, terms, shifted) if kind == "P" else ())) for kind in kinds)


def _result_kinds(call: OpCall, read: Sequence[Dependence], size: int) -> list[AxisType]:
    """Return the kind of dependence of each result, by the operator's sharding rule over an axis of samples.

    Raises:
        ValueError: the operator mixes samples, or is not linear in a sum over them.
    """
    kinds = [operand.kind for operand in read]
    if _UNKNOWN_DIM in kinds:
        if "P" in kinds:
            raise TypeFault(f"{call.op} reads a sum over samples")
        summed = facts(call.op).reduces == "sum" and 0 in normal_dims(call.argument(1, "dim"), len(call.operands[0]))
        return ["P" if summed else _UNKNOWN_DIM] * len(call.results)
    mesh = Mesh(((_AXIS, size),))
    # each sample may read its own part of a value that is the same for all
    asked = [None if operand == _INDEPENDENT else Placement.of(mesh, {_AXIS: operand.kind}) for operand in read]
    return [placement[_AXIS] for placement in infer(call, place_created(call, asked, frozenset(), mesh), mesh)]


def _combination_of_sums(
    q: Question, call: OpCall, sums: Sequence[Dependence], size: int
) -> tuple[Combination, int]:  # fmt: skip
    """Return ``adds`` and ``terms`` of an operator's results that are sums over samples, or linear in such ``sums``."""
    ratio = math.prod(call.operands[0]) // max(math.prod(call.results[0]), 1) if facts(call.op).reduces == "sum" else 0
    if not sums:
        return "sum", ratio
    adds, terms = sums[0].adds, sums[0].terms * (ratio or 1)
    if any((other.adds, other.terms) != (adds, sums[0].terms) for other in sums):
        adds, terms = adds if all(other.adds == adds for other in sums) else None, 0
    if facts(call.op).computes == "multiple" and adds == "sum":
        if terms and 1 / terms in call.args:
            return "mean", 0
        if any(_may_count(item, size, terms) for item in call.args):
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


# ---- numbers that may come from the size of a batch


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers behind a value."""

    samples: Dependence
    of_weights: bool = False
    """True where it is made of parameters alone."""
    sized: bool = False
    """True where a number since the last layer may come from the size of the batch."""
    entries: int = 1
    """The most entries of a value behind it, since the last layer."""


def may_read_size(reference: Program, number: int, division: Division, unbatched: Collection[str] = ()) -> bool:
    """Return whether a term of the loss (numbered from 1), taken to have a ``division``, may compute with the size of a
    microbatch, or with a statistic of it: then the whole batch may make another number of it.

    In a graph a size is a number like others: the count of some entries, its root, or one over these; or a tensor of
    the code. What stands in front of a layer, which reads parameters, is the model's, and is not looked at. A sum over
    one sample may be any other. Samples that meet in a microbatch of one sample are not seen.
    """
    main = weighted_terms(reference.main).get(str(number), reference.main)
    main = main.returning({LOSS: dict(main.returns)[LOSS]})
    samples, size = _starts(main, unbatched)
    starts = [
        _Numbers(start, value.kind in PARAMETERS, value.kind == "constant" and value.type.dtype.is_floating_point)
        for value, start in zip(main.parameters, samples, strict=True)
    ]
    term = replace(reference, functions=(main,))
    (of_loss,) = follow(term, main, starts, lambda _, line, read: _line_numbers(line, tuple(read), size))
    return of_loss.sized or of_loss.samples.statistic or (size == 1 and division.by == "sum")


@lru_cache(maxsize=8192)
def _line_numbers(q: Question, read: tuple[_Numbers, ...], size: int) -> tuple[_Numbers, ...]:
    """Return the numbers behind a line's results, from those behind the values that it reads."""
    results = _line_dependences(q, tuple(operand.samples for operand in read), size, False)
    if read and all(operand.of_weights for operand in read):
        return tuple(_Numbers(samples, of_weights=True) for samples in results)
    pairs = list(zip(q.operands, read, strict=True))
    if any(operand.of_weights and type_.shape for type_, operand in pairs):
        return tuple(
            _Numbers(replace(samples, statistic=False), entries=math.prod(type_.shape))
            for samples, type_ in zip(results, q.results, strict=True)
        )
    entries = max([1, *(math.prod(type_.shape) for type_ in (*q.operands, *q.results)), *(x.entries for x in read)])
    is_mean = any(operand.samples.adds == "sum" for operand in read) and results[0].adds == "mean"
    counts = not is_mean and any(_may_count_some(abs(number), size, entries) for number in _numbers_of(q.line))
    sized = counts or any(operand.sized for operand in read)
    return tuple(_Numbers(samples, sized=sized, entries=entries) for samples in results)


def _numbers_of(line: Line) -> Iterator[float]:
    """Return the numbers with which a line computes in the place of tensors, but for those that name a power."""
    for at, argument in enumerate(operator(line.op)._schema.arguments):
        item = line.args[at] if at < len(line.args) else dict(line.kwargs).get(argument.name)
        computed = any(word in str(argument.type) for word in ("Tensor", "number"))
        if computed and argument.name not in _POWERS and isinstance(item, int | float) and not isinstance(item, bool):
            yield item


def _may_count_some(number: float, size: int, entries: int) -> bool:
    """Return whether a number is the count of some entries of each of ``size`` samples, its root, or one over these."""
    bases = (number, 1 / number) if number else ()
    counts = (power for base in bases for power in (base, base**2) if 0.5 < power <= entries + 0.5)
    return any(
        round(count) % size == 0 and entries % round(count) == 0 and abs(count - round(count)) <= 1e-9 * count
        for count in counts
        if size > 1
    )


# ---- the reason why a term of a loss is averaged


_NO_SUM = (
    "it is no mean and no sum over samples, as a contrastive loss is none, whose samples meet: it is exact in one"
    " microbatch, with more ranks of data, or with `recompute` if memory is short"
)


def averaging_reason(reference: Program, number: int, unbatched: Collection[str] = ()) -> str:
    """Return the reason why a term of the loss (numbered from 1) is averaged over microbatches and not divided once a
    step: it is a sum of terms, a fraction whose denominator is no sum of inputs, or no mean and no sum over samples. ""
    if it is none of these."""
    main = weighted_terms(reference.main).get(str(number), reference.main)
    return _reason(reference, main, dict(main.returns)[LOSS], unbatched)


def _reason(reference: Program, main: Function, name: str, unbatched: Collection[str]) -> str:
    """Return the reason for one value."""
    line = main.makers.get(name)
    while line is not None and facts(line.op).computes in ("multiple", "ratio") and len(line.uses) == 1:
        line = main.makers.get(line.uses[0])
    if line is None:
        return ""
    if facts(line.op).computes == "total" and all(isinstance(item, Ref) for item in line.args[:2]):
        if _NO_SUM in (_reason(reference, main, part, unbatched) for part in line.uses):
            return _NO_SUM
        return (
            f"it is a sum of terms{_at_source(line)}: return each by itself, and add them in the plan, as"
            " `output.a + 0.5 output.b`; each is then divided by a count of its own"
        )
    below = line.args[1] if facts(line.op).computes == "ratio" else None
    denominator = main.returning({Binding("value", below.name): below.name}) if isinstance(below, Ref) else None
    if not isinstance(below, Ref) or denominator is None or not denominator.parameters:
        value = replace(reference, functions=(main.returning({LOSS: name}),))
        return "" if combination(value, unbatched) is not None else _NO_SUM
    if any(value.kind != "input" for value in denominator.parameters):
        return f"its denominator{_at_source(line)} depends on the model, not on inputs alone"
    last = main.makers.get(below.name)
    while last is not None and facts(last.op).casts:
        last = main.makers.get(last.uses[0])
    if last is not None and facts(last.op).elementwise:
        name = last.op.split(".")[1]
        floor = f"its denominator is `{name}` of a sum{_at_source(last)}"
        return f"{floor}: divide by the sum itself, since a batch in which nothing counts is refused"
    return ""


def _at_source(line: Line) -> str:
    return f" at {line.origin.source}" if line.origin.source else ""
