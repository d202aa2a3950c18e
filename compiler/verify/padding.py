"""The check of padding, line by line: entries that the model does not have change none that it has.

Parameters and their gradients hold zeros in their padding, which the update keeps. From there the padding of each
line's results follows by its rule; a reduction may only read padding of numbers that are proved neutral to it. The same
walk proves that samples which fill up a batch change neither the loss nor the tensors that a model returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from ..analysis.dataflow import Question, follow, line_call
from ..analysis.samples import dependences, weighted_terms
from ..layout.collectives import COLLECTIVES
from ..layout.placement import Split, TensorType
from ..ops.rules import facts
from ..padding.flow import Extra, Extras, Held, PaddingFault, follow_number, follow_padding, is_neutral, point
from ..padding.pads import Pad, Pads
from ..program.actions import step_kinds
from ..program.binding import PARAMETERS, Binding
from ..program.program import Fault, Function, Program
from ..program.step_values import residual_of

_Known = TypeVar("_Known", Extras, Held)
_Follows = Callable[[str, Question, tuple[_Known, ...]], Sequence[_Known]]
_ROW_MAX = "parc.row_max"
_COUNTS = "as `cross_entropy` is, or `(losses * mask).sum() / mask.sum()` for a mask that is made of inputs"
_IN_SAMPLES = (
    ("padding that holds", "added samples, which hold"),
    ("its padding", "added samples"),
    ("padding changes", "added samples change"),
    ("the padding", "added samples"),
)
"""Words of faults of padding, with those that replace them where the padding is samples that fill up a batch."""


def check_padding(programs: Mapping[str, Program], pads: Pads, stored: Mapping[str, TensorType]) -> list[Fault]:
    """Return the faults of padded values: padding that changes the model's numbers, and gradients whose padding is not
    zero."""
    if not pads:
        return []
    if faults := [*_stored_faults(pads, stored)]:
        return faults
    known: dict[Binding | None, Extras] = {}
    for action in (row.kind for row in step_kinds() if row.kind in programs):
        program = programs[action]
        parameters = [_parameter_padding(value.binding, pads, known) for value in program.main.parameters]
        try:
            results = follow(program, program.main, parameters, _line_padding)
        except PaddingFault as fault:
            faults.append(Fault("padding", f"{program.role}.{action} {fault.where}", str(fault)))
            break
        values = program.main.values()
        for (key, name), extras in zip(program.main.returns, results, strict=True):
            known[key] = extras
            of = key.name if key.kind == "gradient" else residual_of(key)
            shape = values[name].type.shape  # a gradient may have the plan's padding, and not yet that of a `zero` line
            longer = [pad for pad in pads.get(of, ()) if shape[pad.dim : pad.dim + 1] == (pad.outer * pad.padded,)]
            if key.kind == "output":
                if any(extra.real is not None and extra.outer > 1 for extra in extras):
                    faults.append(Fault("padding", f"{action} {key}", "has padding between the model's own entries"))
            elif key.kind not in ("saved", "weight") and not _has_zero_pads(extras, longer):
                where = f"{action} {key.key_in(action)}"
                faults.append(Fault("padding", where, "does not have zeros for padding, where its value is padded"))
    return faults


def _stored_faults(pads: Pads, stored: Mapping[str, TensorType]) -> Iterator[Fault]:
    for name, rows in pads.items():
        if name not in stored:  # nothing reads it
            continue
        shape = stored[name].shape
        fits = all(0 <= pad.dim < len(shape) and shape[pad.dim] == pad.outer * pad.padded for pad in rows)
        if not fits or any(not 0 < pad.real < pad.padded for pad in rows) or len({p.dim for p in rows}) != len(rows):
            yield Fault("padding", name, "is not padded as its type says")


def _parameter_padding(binding: Binding | None, pads: Pads, known: Mapping[Binding | None, Extras]) -> Extras:
    """Return the padding of a program's parameter, by its binding."""
    of = binding.name if binding is not None and binding.kind in PARAMETERS else residual_of(binding)
    if of:
        return tuple(Extra(pad.dim, pad.outer, pad.real, pad.padded) for pad in pads.get(of, ()))
    return known.get(binding, ())


def _has_zero_pads(extras: Extras, pads: Sequence[Pad]) -> bool:
    """Return whether a value's padding is where ``pads`` says, and holds zeros."""
    zeros = {extra.dim: extra for extra in extras if extra.held == 0.0}
    fits = all(pad.dim in zeros and zeros[pad.dim].is_at(pad.outer, pad.real, pad.padded) for pad in pads)
    dims = {pad.dim for pad in pads}
    return fits and all(extra.real is None or extra.dim in dims for extra in extras)


def _line_padding(function: str, question: Question, operands: tuple[Extras, ...]) -> list[Extras]:
    """Return the padding of a line's results; a fault gets the place of the line."""
    try:
        return _result_padding(question, operands)
    except PaddingFault as fault:
        fault.where, fault.origin = f"{function}: {question.line.names}", question.line.origin
        raise


@lru_cache(maxsize=8192)
def _result_padding(question: Question, operands: tuple[Extras, ...]) -> list[Extras]:
    """Return the padding of a line's results. A collective moves a value with its padding."""
    line = question.line
    if line.op == _ROW_MAX:
        return [_row_max_padding(question.operands[0], operands[0])]
    if line.op in COLLECTIVES:
        return [operands[0]]
    call = line_call(line, question.operands, question.results, lambda item: item.size)
    return follow_padding(call, operands, [type_.dtype for type_ in question.operands])


def _row_max_padding(type_: TensorType, extras: Extras) -> Extras:
    last = len(type_.shape) - 1
    for extra in extras:
        if extra.dim == last and not is_neutral(_ROW_MAX, extra.held):
            raise PaddingFault(f"{_ROW_MAX} reduces padding that holds {extra.held}, not -inf")
    return tuple(Extra(e.dim, e.outer, e.real, e.padded, None) for e in extras if e.dim != last)


# ---- samples that fill up a batch, in the loss


def tail_fault(reference: Program, ignored: Mapping[str, int], unbatched: Collection[str] = ()) -> str:
    """Return the reason why extra samples at the end of a batch would change its loss, or "" if they do not: the loss
    is then the same function of the parameters as without them, and so are its gradients.

    ``ignored`` are inputs with the index of a target to ignore, which all their entries in extra samples are; other
    inputs may hold anything there. ``unbatched`` are inputs whose first dim is not the batch.
    """
    if not any(function.name == "count" for function in reference.functions):
        return f"its loss is not divided by a count, {_COUNTS}"
    counted = reference.function("count").returned("count")
    for number, term in weighted_terms(reference.main).items():
        if number not in counted and term.bound("input"):
            return f"term {number} of its loss is not divided by a count, {_COUNTS}: its mean is over added samples too"
    for function in (_of_the_loss(each) for each in reference.functions if each.name != "scale"):
        inputs = {name: value.name for name, value in function.bound("input").items() if name not in unbatched}
        held = {inputs[name]: float(index) for name, index in ignored.items() if name in inputs}
        sizes = _batch_sizes(function, unbatched)
        try:
            if 1 in sizes.values():  # a microbatch is one sample, so an extra one is a microbatch of its own
                if fault := _fault_alone(reference, function, held, counted):
                    return fault
                continue
            parameters = _with_extra_samples(function, sizes, held)
            results = follow(reference, function, parameters, _with_slopes(function, _line_padding, _held_in_rows))
        except PaddingFault as fault:
            return _where_samples_meet(fault, "the model's own code or the loss")
        if any(extra.real is not None for extras in results for extra in extras):
            return "what it keeps of a batch has a row for each sample"
    return ""


def _of_the_loss(function: Function) -> Function:
    """Return a function without the loads of experts, which count extra samples too and change no other number, and
    without the tensors that the model returns."""
    loads = set(function.returned("load").values())
    returns = {key: name for key, name in function.returns if name not in loads and key.kind != "output"}
    return function.returning(returns)


def _batch_sizes(function: Function, unbatched: Collection[str]) -> dict[str, int]:
    """Return the samples of the inputs whose first dim is the batch, by the names of their values."""
    inputs = function.bound("input").items()
    return {v.name: v.type.shape[0] for name, v in inputs if name not in unbatched and v.type.shape}


def _with_extra_samples(
    function: Function, sizes: Mapping[str, int], held: Mapping[str, float] = MappingProxyType({})
) -> list[Extras]:
    """Return the padding of parameters of which those in ``sizes`` have one sample of their own and extra ones."""
    names = [value.name for value in function.parameters]
    return [(Extra(0, 1, 1, sizes[name], held.get(name)),) if name in sizes else () for name in names]


def _fault_alone(reference: Program, function: Function, held: Mapping[str, float], counted: Collection[str]) -> str:
    """Return the reason why a microbatch of one extra sample would change the loss, or "" if it does not: all that the
    function returns is zero. ``held`` are the numbers that parameters hold. A term of the loss that is not ``counted``
    reads no input, so its weight counts as 0.

    Raises:
        PaddingFault: a row is looked up that there is not.
    """
    weights = {value.name: 0.0 for number, value in function.bound("term").items() if number not in counted}
    numbers = [{**held, **weights}.get(value.name) for value in function.parameters]
    results = follow(reference, function, numbers, _with_slopes(function, _line_numbers, lambda held: held))
    for (key, _), number in zip(function.returns, results, strict=True):
        if number != 0.0 and key.kind not in ("loss", "count"):
            return f"`{key.name}` moves with every sample"
        if number != 0.0:
            return f"the {key} of an added sample is not 0"
    return ""


def _line_numbers(function: str, question: Question, operands: tuple[Held, ...]) -> list[Held]:
    """Return the numbers that all entries of a line's results hold."""
    try:
        call = line_call(question.line, question.operands, question.results, lambda item: item.size)
        return follow_number(call, operands, [type_.dtype for type_ in question.operands])
    except PaddingFault as fault:
        fault.origin = question.line.origin
        raise


def _with_slopes(function: Function, rule: _Follows[_Known], held: Callable[[_Known], Held]) -> _Follows[_Known]:
    """Return ``rule``, which then also refuses an operator without a finite slope at the numbers of added samples where
    gradients flow: zero times an infinite slope is NaN. ``held`` tells what an operand holds in added samples."""
    trained = {value.name for value in function.parameters if value.kind == "parameter"}
    for line in function.lines:
        if not trained.isdisjoint(line.uses):
            trained.update(value.name for value in line.made)

    def follows(name: str, question: Question, operands: tuple[_Known, ...]) -> Sequence[_Known]:
        results, line, at = rule(name, question, operands), question.line, [*map(held, operands)]
        if facts(line.op).elementwise and at and None not in at and not trained.isdisjoint(line.uses):
            call = line_call(line, question.operands, question.results, lambda item: item.size)
            if not point(call, at, [type_.dtype for type_ in question.operands])[1]:
                fault = PaddingFault(f"{line.op} has no finite slope at the numbers of the padding")
                fault.origin = line.origin
                raise fault
        return results

    return follows


def _held_in_rows(extras: Extras) -> Held:
    """Return the number that a value holds in added samples, or everywhere; None where there is no single one."""
    rows = [extra.held for extra in extras if extra.real is not None]
    return rows[0] if rows else next((e.held for e in extras if e.outer == 0 and e.held is not None), None)


def _where_samples_meet(fault: PaddingFault, unnamed: str) -> str:
    """Return the words for a fault of padding that is added samples; ``unnamed`` is the place of a line outside all
    modules."""
    module, source, words = fault.origin.module, fault.origin.source, str(fault)
    for padding, samples in _IN_SAMPLES:
        words = words.replace(padding, samples)
    return f"samples meet in {f'`{module}`' if module else unnamed}{f' at {source}' if source else ''}, where {words}"


# ---- samples that fill up a batch, in the tensors that a model returns


def of_returned(function: Function, names: Collection[str] | None = None) -> Function:
    """Return a function with only the lines of what the model returns, or of the tensors of these ``names``."""
    returns = {key: name for key, name in function.returns
               if key.kind == "output" and (names is None or key.name in names)}  # fmt: skip
    return function.returning(returns)


def sample_dims(reference: Program, unbatched: Collection[str]) -> dict[str, int | None]:
    """Return, for each returned tensor, its batch dim, with as many rows for each sample; None where the tensor is the
    same for all samples. Tensors are left out in which samples are mixed, as in a mean over them, or a sample's rows
    are not adjacent, as in a batch that is repeated.

    ``unbatched`` are inputs whose first dim is not the batch.
    """
    main = of_returned(reference.main)
    size, values = min(_batch_sizes(main, unbatched).values(), default=0), main.values()
    dims = dict[str, int | None]()
    for key, samples in dependences(replace(reference, functions=(main,)), unbatched).items():
        shape = values[main.returned("output")[key.name]].type.shape
        if samples.kind == "I":
            dims[key.name] = None
        elif isinstance(samples.kind, Split) and samples.kind.dim >= 0:
            if samples.kind.outer == 1:
                dims[key.name] = samples.kind.dim
        elif isinstance(samples.kind, Split) and shape[:1] == (size,):
            dims[key.name] = 0  # the rules lost track of samples, or there is one
    return dims


def mixed_samples(reference: Program, dims: Mapping[str, int | None], unbatched: Collection[str]) -> str:
    """Return the reason why extra samples at the end of a batch would change what the model returns for the others, or
    "" if they do not. ``dims`` are the batch dims of the returned tensors."""
    main = of_returned(reference.main, dims)
    sizes = {name: size for name, size in _batch_sizes(main, unbatched).items() if size > 1}
    parameters = _with_extra_samples(main, sizes)
    try:
        results = follow(replace(reference, functions=(main,)), main, parameters, _line_padding)
    except PaddingFault as fault:
        return _where_samples_meet(fault, "the model's own code")
    for (key, _), extras in zip(main.returns, results, strict=True):
        at = [(extra.dim, extra.outer) for extra in extras if extra.real is not None]
        if at not in ([], [(dims[key.name], 1)]):
            return f"`{key.name}` does not have its samples one after the other"
    return ""
