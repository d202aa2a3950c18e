"""The checker of padding, line by line: entries that the model does not have change none that it has.

Parameters and their gradients hold zeros in their padding, which the update keeps. From there every line is followed by
its rule; what is reduced must hold there what ``neutral`` proves to add nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
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
"""The words of faults of padding, and those to say where the padding is samples behind a batch's own."""


def check_padding(programs: Mapping[str, Program], pads: Pads, stored: Mapping[str, TensorType]) -> list[Fault]:
    """Return the faults of padded values: the padding must change none of the model's numbers, and the padded entries
    of gradients must be zero."""
    if not pads:
        return []
    faults = list(_stored_faults(pads, stored))
    known: dict[Binding | None, Extras] = {}
    rows = (row for row in step_kinds() if row.kind in programs)
    for action, program in ((row.kind, programs[row.kind]) for row in (rows if not faults else ())):
        parameters = [_given(value.binding, pads, known) for value in program.main.parameters]
        try:
            results = follow(program, program.main, parameters, _made)
        except PaddingFault as fault:
            faults.append(Fault("padding", f"{program.role}.{action} {fault.where}", str(fault)))
            break
        values = program.main.values()
        for (key, name), extras in zip(program.main.returns, results, strict=True):
            known[key] = extras
            of = key.name if key.kind == "gradient" else residual_of(key)
            longer = of in stored and values[name].type.shape == stored[of].shape
            if key.kind == "output":
                if any(extra.real is not None and extra.outer > 1 for extra in extras):
                    faults.append(Fault("padding", f"{action} {key}", "has padding between the model's own entries"))
            elif key.kind not in ("saved", "weight") and not _same(extras, pads.get(of, ()) if longer else ()):
                where = f"{action} {key.key_in(action)}"
                faults.append(Fault("padding", where, "does not have zeros for padding, where its value is padded"))
    return faults


def tail_fault(reference: Program, ignored: Mapping[str, int], unbatched: Collection[str] = ()) -> str:
    """Return the reason why extra samples at the end of a batch would change its loss, or "" if they do not.

    ``ignored`` are inputs whose every entry is a target to ignore in such a sample; other inputs may hold anything
    there; ``unbatched`` are those whose first dim is not the batch. The loss is then the same function of the
    parameters as without the samples, and so are its gradients.
    """
    if not any(function.name == "count" for function in reference.functions):
        return f"its loss is not divided by a count, {_COUNTS}"
    counted = reference.function("count").returned("count")
    for number, term in weighted_terms(reference.main).items():
        if number not in counted and term.bound("input"):
            return f"term {number} of its loss is not divided by a count, {_COUNTS}: its mean is over added samples too"
    for function in map(_of_the_loss, reference.functions):
        inputs = {value.name: name for name, value in function.bound("input").items() if name not in unbatched}
        held = {name: float(ignored[of]) for name, of in inputs.items() if of in ignored}
        sizes = {value.name: value.type.shape[0] for value in function.parameters
                 if value.name in inputs and value.type.shape}  # fmt: skip
        try:
            if 1 in sizes.values():  # a microbatch is one sample, so an extra one is a microbatch of its own
                if fault := _fault_alone(reference, function, held, counted):
                    return fault
                continue
            parameters: list[Extras] = [
                (Extra(0, 1, 1, sizes[value.name], held.get(value.name)),) if value.name in sizes else ()
                for value in function.parameters
            ]
            results = follow(reference, function, parameters, _with_slopes(function, _made, _held_in_rows))
        except PaddingFault as fault:
            return where_samples_meet(fault, "the model's own code or the loss")
        if any(extra.real is not None for extras in results for extra in extras):
            return "what it keeps of a batch has a row for each sample"
    return ""


def _fault_alone(reference: Program, function: Function, held: Mapping[str, float], counted: Collection[str]) -> str:
    """Return the reason why a microbatch of one extra sample would change the loss, or "" if it does not: all that the
    function returns must be zero. ``held`` are the numbers that parameters hold; a term of the loss that is not
    ``counted`` reads no input, so its weight need not be seen.

    Raises:
        PaddingFault: a row is looked up that there is not.
    """
    weights = {value.name: 0.0 for number, value in function.bound("term").items() if number not in counted}
    given = [{**held, **weights}.get(value.name) for value in function.parameters]
    results = follow(reference, function, given, _with_slopes(function, _number, lambda held: held))
    for (key, _), number in zip(function.returns, results, strict=True):
        if number != 0.0 and key.kind not in ("loss", "count"):
            return f"`{key.name}` moves with every sample"
        if number != 0.0:
            return f"the {key} of an added sample is not 0"
    return ""


def _with_slopes(function: Function, made: _Follows[_Known], held: Callable[[_Known], Held]) -> _Follows[_Known]:
    """Return ``made``, which also refuses a point without a finite slope where gradients flow: a gradient of zero times
    an infinite one is no number. ``held`` tells what an operand holds in added samples."""
    trained = {value.name for value in function.parameters if value.kind == "parameter"}
    for line in function.lines:
        if not trained.isdisjoint(line.uses):
            trained.update(value.name for value in line.made)

    def follows(name: str, question: Question, operands: tuple[_Known, ...]) -> Sequence[_Known]:
        results, line, at = made(name, question, operands), question.line, [*map(held, operands)]
        if facts(line.op).elementwise and at and None not in at and not trained.isdisjoint(line.uses):
            call = line_call(line, question.operands, question.results, lambda item: item.size)
            if not point(call, at, [type_.dtype for type_ in question.operands])[1]:
                fault = PaddingFault(f"{line.op} has no finite slope at the numbers of the padding")
                fault.origin = line.origin
                raise fault
        return results

    return follows


def _held_in_rows(extras: Extras) -> Held:
    """Return the number that a value holds in added samples, or everywhere."""
    rows = [extra.held for extra in extras if extra.real is not None]
    return rows[0] if rows else next((e.held for e in extras if e.outer == 0 and e.held is not None), None)


def where_samples_meet(fault: PaddingFault, unnamed: str) -> str:
    """Return the words for a fault in which the padding is samples behind a batch's own; ``unnamed`` is the place of a
    line outside all modules."""
    module, source, words = fault.origin.module, fault.origin.source, str(fault)
    for padding, samples in _IN_SAMPLES:
        words = words.replace(padding, samples)
    return f"samples meet in {f'`{module}`' if module else unnamed}{f' at {source}' if source else ''}, where {words}"


def follow_rows(program: Program, function: Function, parameters: Sequence[Extras]) -> Sequence[Extras]:
    """Return the further entries of what a function returns, given those of its parameters.

    Raises:
        PaddingFault: they change other entries.
    """
    return follow(program, function, parameters, _made)


def _of_the_loss(function: Function) -> Function:
    """Return a function that does not count the tokens of experts, which are counted for extra samples too and change
    no other number, and that does not return what the model returns."""
    loads = set(function.returned("load").values())
    returns = {key: name for key, name in function.returns if name not in loads and key.kind != "output"}
    return function.returning(returns)


def _stored_faults(pads: Pads, stored: Mapping[str, TensorType]) -> Iterator[Fault]:
    for name, rows in pads.items():
        if name not in stored:  # nothing reads it
            continue
        shape = stored[name].shape
        fits = all(0 <= pad.dim < len(shape) and shape[pad.dim] == pad.outer * pad.padded for pad in rows)
        if not fits or any(not 0 < pad.real < pad.padded for pad in rows) or len({p.dim for p in rows}) != len(rows):
            yield Fault("padding", name, "is not padded as its type says")


def _given(binding: Binding | None, pads: Pads, known: Mapping[Binding | None, Extras]) -> Extras:
    """Return the padding of a program's parameter, by its binding."""
    of = binding.name if binding is not None and binding.kind in PARAMETERS else residual_of(binding)
    if of:
        return tuple(Extra(pad.dim, pad.outer, pad.real, pad.padded) for pad in pads.get(of, ()))
    return known.get(binding, ())


def _same(extras: Extras, pads: Sequence[Pad]) -> bool:
    """Return whether a value's padding is where ``pads`` says, and holds zeros."""
    zeros = {extra.dim: extra for extra in extras if extra.held == 0.0}
    fits = all(pad.dim in zeros and zeros[pad.dim].is_at(pad.outer, pad.real, pad.padded) for pad in pads)
    dims = {pad.dim for pad in pads}
    return fits and all(extra.real is None or extra.dim in dims for extra in extras)


def _made(function: str, question: Question, operands: tuple[Extras, ...]) -> list[Extras]:
    try:
        return _line(question, operands)
    except PaddingFault as fault:
        names = ", ".join(value.name for value in question.line.made)
        fault.where, fault.origin = f"{function}: {names}", question.line.origin
        raise


def _number(function: str, question: Question, operands: tuple[Held, ...]) -> list[Held]:
    """Return the numbers that all entries of a line's results hold."""
    try:
        call = line_call(question.line, question.operands, question.results, lambda item: item.size)
        return follow_number(call, operands, [type_.dtype for type_ in question.operands])
    except PaddingFault as fault:
        fault.origin = question.line.origin
        raise


@lru_cache(maxsize=8192)
def _line(question: Question, operands: tuple[Extras, ...]) -> list[Extras]:
    """Return the padding of a line's results. A collective moves a value with its padding."""
    line = question.line
    if line.op == _ROW_MAX:
        return [_largest(question.operands[0], operands[0])]
    if line.op in COLLECTIVES:
        return [operands[0]]
    call = line_call(line, question.operands, question.results, lambda item: item.size)
    return follow_padding(call, operands, [type_.dtype for type_ in question.operands])


def _largest(type_: TensorType, extras: Extras) -> Extras:
    last = len(type_.shape) - 1
    for extra in extras:
        if extra.dim == last and not is_neutral(_ROW_MAX, extra.held):
            raise PaddingFault(f"{_ROW_MAX} reduces padding that holds {extra.held}, not -inf")
    return tuple(Extra(e.dim, e.outer, e.real, e.padded, None) for e in extras if e.dim != last)


# ---- the tensors that a model returns


def of_returned(function: Function, names: Collection[str] | None = None) -> Function:
    """Return a function with the lines alone that make what the model returns, or those of these ``names``."""
    returns = {key: name for key, name in function.returns
               if key.kind == "output" and (names is None or key.name in names)}  # fmt: skip
    return function.returning(returns)


def sample_dims(reference: Program, unbatched: Collection[str]) -> dict[str, int | None]:
    """Return, for each returned tensor, the dim along which it has its samples, each in a row or in as many rows as any
    other; None where it is alike for all. Those in which samples have met, as in a mean over them, are left out, and
    those that do not have a sample's rows together, as a batch that is repeated.

    ``unbatched`` are inputs whose first dim is not the batch.
    """
    main = of_returned(reference.main)
    batched = [v.type.shape[0] for name, v in main.bound("input").items() if name not in unbatched and v.type.shape]
    size, values, dims = min(batched, default=0), main.values(), dict[str, int | None]()
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
    """Return the reason why further samples behind a batch's own would change what the model returns for these, or ""
    if they do not."""
    main = of_returned(reference.main, dims)
    tails = {value.name: value.type.shape[0] for name, value in main.bound("input").items()
             if name not in unbatched and value.type.shape}  # fmt: skip
    given = [
        (Extra(0, 1, 1, tails[value.name], None),) if tails.get(value.name, 0) > 1 else () for value in main.parameters
    ]
    try:
        results = follow_rows(replace(reference, functions=(main,)), main, given)
    except PaddingFault as fault:
        return where_samples_meet(fault, "the model's own code")
    for (key, _), extras in zip(main.returns, results, strict=True):
        at = [(extra.dim, extra.outer) for extra in extras if extra.real is not None]
        if at not in ([], [(dims[key.name], 1)]):
            return f"`{key.name}` does not have its samples one after the other"
    return ""
