"""The checker of SCALE, LOSS and REDUCE: the scale is one over the count of targets, times the loss scale if there is
one; the loss is summed and scaled, each gradient summed, and the norm computed from all gradients.

Types say that a sum is complete and whole on every rank; here it is what is summed, and that nothing else is done to
it: a count or a loss that is cut off at some size, and a norm that binds no clipping, show in no test of small numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..layout.collectives import WAIT
from ..ops.rules import facts
from ..program.actions import AVERAGING, REDUCE, SCALING
from ..program.binding import COUNT, GRAD_NORM, LOSS, SCALE, UNSCALE, Binding
from ..program.program import Fault, Line, Program, Ref
from ..program.step_values import LOSS_SCALE, residual, residual_of, term_count

_MEAN, _COUNTED = Binding("loss", "mean"), Binding("scale", "of the count")
"""The scaled loss, and one over the count without the loss scale. No program has bindings of these names."""
_KEEPS = frozenset(
    {"parc.all_reduce", "parc.reduce_scatter", "parc.all_gather", "parc.shard", "parc.pad", "parc.round_int8",
     "parc.reduce_scatter_int8", "parc.all_gather_int8", "parc.grow_pad.default", WAIT}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _SumMeaning:
    """A value of SCALE, LOSS or REDUCE: a binding's value, or the ``squares`` of the values with these names, or their
    ``root``. A count may be divided, ``over`` another one or a number."""

    binding: Binding | None = None
    over: Binding | float | None = None
    squares: tuple[str, ...] = ()
    root: bool = False


def check_reduce(programs: Mapping[str, Program], reference: Program, microbatches: int) -> Iterator[Fault]:
    """Find faults in the scale of the loss and the weights of its terms that SCALE returns, in the loss that LOSS
    returns, and in the gradients and the norm that REDUCE returns."""
    scale, reduce = programs[SCALING], programs[REDUCE]
    known = _sum_meanings(scale)
    whole = SCALE if LOSS_SCALE in scale.main.bindings else _COUNTED
    counts = {key for function in reference.functions[:-1] for key, _ in function.returns}
    for key, name in scale.main.returns:
        if key.kind == "term":
            own = term_count(key.name)
            if known[name] != _SumMeaning(COUNT, over=own if own in counts else float(microbatches)):
                by = f"`{own}`" if own in counts else "the number of microbatches"
                yield Fault("types", f"SCALE {key}", f"is not proved to be the count of targets over {by}")
            continue
        if known[name] != _SumMeaning(whole if key == SCALE else key):
            what = "one over the loss scale" if key == UNSCALE else "one over the count of targets"
            also = " times the loss scale" if key == whole else ""
            yield Fault("types", f"SCALE {key}", f"is not proved to be {what}{also}")
    known = _sum_meanings(programs[AVERAGING])
    for key, name in programs[AVERAGING].main.returns:
        if known[name] != _SumMeaning(_MEAN if key == LOSS else key):
            yield Fault("types", f"LOSS {key}", "is not proved to be its own sum")
    main, known = reduce.main, _sum_meanings(reduce)
    gradients = {}
    for key, name in main.returns:
        if key.kind == "gradient":
            gradients[name] = key
        if key != GRAD_NORM and known[name] != _SumMeaning(key):
            yield Fault("types", f"REDUCE {key}", "is not proved to be its own sum")
    norm = known.get(dict(main.returns).get(GRAD_NORM, ""))
    if norm is None or not norm.root:
        if gradients:
            yield Fault("types", "REDUCE grad_norm", "is not proved to be the root of the gradients' squares")
        return
    times = Counter(norm.squares)
    for name in {**gradients, **times}:
        if times[name] != (name in gradients):
            what = gradients[name].words if name in gradients else f"value `{name}`"
            yield Fault("types", "REDUCE grad_norm", f"counts the {what} {times[name]} times")


def _sum_meanings(program: Program) -> dict[str, _SumMeaning | None]:
    """Return, for each value of a program with one function, what it holds; None where that is none of the known
    things."""
    bindings = program.main.bindings
    known: dict[str, _SumMeaning | None] = {value.name: _SumMeaning(value.binding) for value in program.main.parameters}
    if UNSCALE not in bindings:
        known.update((value.name, _SumMeaning(_COUNTED)) for value in program.main.parameters if value.binding == SCALE)
    for line in program.main.lines:
        if program.action == SCALING and COUNT not in bindings and facts(line.op).creates:
            meaning: _SumMeaning | None = _SumMeaning(_COUNTED)  # a number, which the captured graph gives
        else:
            meaning = _sum_meaning(line, [known[name] for name in line.uses])
        known.update((value.name, meaning) for value in line.made)
    return known


def _sum_meaning(line: Line, given: list[_SumMeaning | None]) -> _SumMeaning | None:
    known = [operand for operand in given if operand is not None]
    if len(known) != len(given):
        return None
    row = facts(line.op)
    if row.makes_zeros(line.args):  # what a role adds that has no gradients
        return _SumMeaning()
    to_float = row.casts and line.made[0].type.dtype.is_floating_point
    if row.computes == "ratio" and len(line.args) == 2 and known[0] == _SumMeaning(COUNT):
        by = line.args[1]
        whole = known[1].binding if len(known) == 2 else float(by) if isinstance(by, int | float) else None
        counted = whole is None or isinstance(whole, float) or known[1] == _SumMeaning(whole)
        return _SumMeaning(COUNT, over=whole) if whole is not None and counted else None
    if line.op in _KEEPS or to_float:
        return known[0]
    bindings = [operand.binding for operand in known]
    if (of := _compressed(line.op, bindings)) is not None:
        return _SumMeaning(of)
    if row.power == -1.0 and bindings in ([COUNT], [LOSS_SCALE]):
        return _SumMeaning(_COUNTED if bindings == [COUNT] else UNSCALE)
    if row.computes == "multiple" and (product := _product(bindings)) is not None:
        return _SumMeaning(product)
    if row.reduces == "squares" and bindings[0] is not None and bindings[0].kind == "gradient":
        return _SumMeaning(squares=line.uses)
    root = row.power == 0.5
    summed = (row.moves == "join" or row.reduces == "sum" or root) and len(line.args) == 1
    if row.computes == "total" and not line.kwargs:
        summed = all(isinstance(item, Ref) for item in line.args)
    if not summed or any(operand.binding or operand.root for operand in known):
        return None
    return _SumMeaning(squares=tuple(name for operand in known for name in operand.squares), root=root)


def _product(bindings: list[Binding | None]) -> Binding | None:
    """Return what the product of two values is: the scale with or without the loss scale, the scaled loss, or a
    gradient without the loss scale; how often it was divided by that is for ``scaling``."""
    known = {
        (_COUNTED, LOSS_SCALE): SCALE, (SCALE, UNSCALE): _COUNTED, (LOSS, _COUNTED): _MEAN,
    }  # fmt: skip
    first, second = bindings if len(bindings) == 2 else (None, None)
    if first is not None and first.kind == "gradient" and second == UNSCALE:
        return first
    return known.get((first, second)) if first is not None and second is not None else None


def _compressed(op: str, bindings: list[Binding | None]) -> Binding | None:
    """Return what the sum or the difference of two parts of one gradient is; ``check_compressed`` proves which
    parts."""
    first, second = bindings if len(bindings) == 2 else (None, None)
    if first is None or second is None:
        return None
    left = residual_of(first) or residual_of(second)
    if op == "aten.sub.Tensor" and first == second and first.kind == "gradient":
        return residual(first.name)
    summed = op == "aten.add.Tensor" and second == residual(left) and first in (second, Binding("gradient", left))
    return first if left and summed else None
