"""The checker of SCALE, LOSS and REDUCE: the scale is one over the count of targets, times the loss scale if there is
one; the loss is summed and scaled, each gradient summed, and the norm computed from all gradients.

Types say that a sum is complete and whole on every rank; here it is what is summed, and that nothing else is done to
it: a count or a loss that is cut off at some size, and a norm that binds no clipping, show in no test of small numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isnan

from ..analysis.dataflow import Question, follow, line_call
from ..layout.collectives import COLLECTIVES, WAIT
from ..layout.mesh import Mesh
from ..layout.placement import Placement
from ..ops.factors import OpCall
from ..ops.infer import rule_or_opaque
from ..ops.rules import facts
from ..program.actions import ACTIONS, AVERAGING, LOADS, REDUCE, RESCALE, SCALING
from ..program.binding import COUNT, GRAD_NORM, LOSS, SCALE, UNSCALE, Binding
from ..program.program import Fault, Line, Program, Ref, Value
from ..program.step_values import (
    BACKOFF,
    GROWTH,
    INTERVAL,
    LOAD,
    LOSS_SCALE,
    NEXT_SCALE,
    SCALER,
    Bias,
    residual,
    residual_of,
    term_count,
)

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


# ---- the checker of the loss's scales
# A step divides by the number of targets once, at its end, and multiplies by the loss scale between SCALE and REDUCE,
# if there is one. Each value has two degrees: how often it was multiplied by each of these. They are followed one after
# the other. Whatever is linear keeps the degree, a product adds degrees, and what the table does not know has none.


Degree = float | None
"""The power of a scale in a value: 1.0 if it is multiplied by it once. None is not known."""
_ZERO = float("inf")
"""The degree of zeros, which count as any degree."""
_MIXED = float("nan")
"""The degree of a sum whose parts have different degrees."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """A scale of the loss: its words, and its degrees in a program's parameters by kind, where they are not 0: what is
    left of a gradient has a kind of its own, ``residual``."""

    words: str
    given: Mapping[str, float]

    def in_parameter(self, binding: Binding | None) -> float:
        """Return the degree in a program's parameter."""
        kind = "residual" if residual_of(binding) else binding.kind if binding is not None else ""
        return self.given.get(kind, 0.0)

    def wanted(self, program: Program, key: Binding) -> float:
        """Return the degree that a result must have."""
        if self is _COUNT_SCALE:
            divides = COUNT in program.main.bindings or program.action != SCALING
            return 1.0 if divides and key != UNSCALE else 0.0
        return -1.0 if key == UNSCALE else 0.0 if program.action in (AVERAGING, REDUCE) else 1.0


_COUNT_SCALE = _Scale(
    "the loss's scale", {"count": -1.0, "scale": 1.0, "gradient": 1.0, "residual": 1.0, "received": 1.0}
)
_LOSS_SCALE = _Scale("the loss scale", {"state": 1.0, "scale": 1.0, "unscale": -1.0, "gradient": 1.0, "received": 1.0})


def check_scaling(programs: Mapping[str, Program]) -> list[Fault]:
    """Find a scale that is not one over the count times the loss scale, and a loss or gradients that do not have each
    exactly as often as they should."""
    scaled = [SCALING, *(action for action in programs if action == AVERAGING or "gradient" in ACTIONS[action].returns)]
    loss_scaled = LOSS_SCALE in programs[SCALING].main.bindings
    return [fault for action in scaled for fault in scaled_once(programs[action], action, loss_scaled)]


def scaled_once(program: Program, where: str, loss_scaled: bool) -> list[Fault]:
    """Find returned values that do not have one of the scales as often as they should; gradients that B receives from
    another stage have both already."""
    faults = []
    for scale in (_COUNT_SCALE, _LOSS_SCALE) if loss_scaled else (_COUNT_SCALE,):
        parameters = [scale.in_parameter(value.binding) for value in program.main.parameters]
        for (key, _), degree in zip(program.main.returns, degrees(program, parameters), strict=True):
            wanted = scale.wanted(program, key)
            if degree not in (wanted, None, _ZERO) and key.kind != "term":  # `reduce` proves the weight of a term whole
                has = f"has {scale.words} {_times(degree)}, not {'once' if wanted == 1 else f'{wanted:g} times'}"
                faults.append(Fault("types", f"{where} {key.key_in(program.action)}", has))
    return faults


def _times(degree: float) -> str:
    return "more often in some parts than in others" if isnan(degree) else f"{degree:g} times"


def degrees(program: Program, given: Sequence[Degree]) -> list[Degree]:
    """Return the degrees of a program's results, from those of its parameters."""
    return follow(program, program.main, given, lambda _, line, operands: [_degree(line, operands)] * len(line.results))


@lru_cache(maxsize=8192)
def _degree(question: Question, operands: tuple[Degree, ...]) -> Degree:
    line, row = question.line, facts(question.line.op)
    known = [degree for degree in operands if degree is not None]
    if len(known) != len(operands):
        return None
    if row.makes_zeros(line.args):
        return _ZERO
    if all(degree == 0.0 for degree in known):
        return 0.0
    if line.op in COLLECTIVES:
        return known[0]
    if row.power is not None:
        return known[0] * row.power
    if line.op == "aten.pow.Tensor_Scalar":
        return known[0] * float(line.args[1])
    if row.computes == "ratio" and isinstance(line.args[1], Ref):
        return known[0] - known[1]
    return _by_rule(line_call(line, question.operands, question.results, lambda item: item.size), known)


def _by_rule(call: OpCall, known: Sequence[float]) -> Degree:
    """Return the degree of a result by the rule. If the operator is linear in its scaled operands together, it is their
    degree; if it is linear in each of them, it is the sum of their degrees."""
    scaled = {index for index, degree in enumerate(known) if degree != 0.0}
    linear = rule_or_opaque(call).linear
    for joint in linear:
        degrees = {known[index] for index in joint} - {_ZERO}
        if scaled <= joint and len(degrees) <= 1:
            return next(iter(degrees), _ZERO)
        if scaled <= joint and 0.0 not in degrees:
            return _MIXED
    if all(frozenset({index}) in linear for index in scaled):
        return sum(known[index] for index in scaled)  # of zeros and anything else: zeros
    return None


# ---- the checker of RESCALE
# No number of float64 that is compared elsewhere depends on it, and a wrong rule shows only when a step is skipped.


def check_rescale(programs: Mapping[str, Program], mesh: Mesh) -> Iterator[Fault]:
    """Find state of steps that is no loss scale's, and that RESCALE makes otherwise than it should."""
    whole = Placement.whole(mesh)
    for action, program in programs.items():
        for name, value in program.main.bound("state").items():
            row = SCALER.get(value.binding) if value.binding is not None else None
            dtype = str(value.type.dtype).removeprefix("torch.")
            if residual_of(value.binding) and action == REDUCE:
                continue  # `check_compressed`
            if row is None or (dtype, value.type.shape, value.type.placement) != (row.dtype, (), whole):
                yield Fault("types", f"{action} {name}", "is no state of a loss scale, whole on every rank")
            elif action not in (SCALING, RESCALE):
                yield Fault("types", f"{action} {name}", "reads the state of steps")
    if RESCALE not in programs:
        return
    main = programs[RESCALE].main
    bound = {value.name: value.binding for value in main.parameters}
    lines = [line for line in main.lines if line.op == NEXT_SCALE]
    if len(lines) != 1 or len(main.lines) != 1:
        yield Fault("types", RESCALE, f"is not one `{NEXT_SCALE}`")
        return
    operands, numbers = lines[0].args[:4], lines[0].args[4:]
    read = [bound.get(item.name) for item in operands if isinstance(item, Ref)]
    if read != [GRAD_NORM, *SCALER] or numbers != (GROWTH, BACKOFF, INTERVAL):
        yield Fault("types", RESCALE, "is not made of the norm and the state by the numbers of a loss scale")
    if dict(main.returns) != {key: value.name for key, value in zip(SCALER, lines[0].made, strict=False)}:
        yield Fault("types", RESCALE, "does not return the state that it makes, each number in its place")
    if LOSS_SCALE not in programs[SCALING].main.bindings:
        yield Fault("types", RESCALE, "changes a loss scale that nothing reads")


# ---- the checker of LOADS: it tells the tokens of each expert as F counts them, and moves a bias by them alone.
# Types say that loads are whole sums. Here it is which loads they are, each in its place, and that nothing else is done
# to them: a number cut off at some size, or a bias moved by another layer's load, shows in no test of few tokens.


_LoadMeaning = tuple[object, ...]
"""The meaning of a value: ``("load", layers)`` for the loads of layers, one behind the other; ``mean``, ``below``,
``above``, ``lacks``, ``step`` and ``moved``, with a layer, on the way to a bias; () where it is not known."""


def check_loads(role: Mapping[str, Program], reference: Program, biases: Mapping[str, Bias]) -> Iterator[Fault]:
    """Find loads that a role does not tell as they are counted, and biases that it does not move by them."""
    if LOADS not in role:
        return
    program = role[LOADS]
    known = _load_meanings(program)
    own = program.main.bound("load")
    sizes = {value.binding.name: value.type.shape[0] for value in program.main.parameters
             if value.binding is not None and value.kind == "load"}  # fmt: skip
    for key, name in program.main.returns:
        if key == LOAD:
            total = {n: v.type.shape[0] for n, v in _returned(reference).items()}
            wanted = tuple((layer, size) if layer in own else ("", size) for layer, size in total.items())
            if _flat(known[name]) != wanted or any(total.get(layer) != size for layer, size in sizes.items()):
                yield Fault("types", f"LOADS {key}", "is not proved to be the loads of all layers in their order")
        elif key.kind == "buffer":
            by = [(layer, bias.rate) for layer, bias in biases.items() if bias.buffer == key.name]
            if len(by) != 1 or known[name] != ("moved", key.name, *by[0]):
                yield Fault("types", f"LOADS {key}", "is not proved to be moved by the load of its own layer")
    moved = {key.name for key, _ in program.main.returns if key.kind == "buffer"}
    for layer, bias in biases.items():
        if layer in own and bias.buffer not in moved:
            yield Fault("types", f"LOADS {layer}", f"the bias `{bias.buffer}` is not moved")


def _returned(reference: Program) -> dict[str, Value]:
    values = reference.main.values()
    return {layer: values[name] for layer, name in reference.main.returned("load").items()}


def _load_meanings(program: Program) -> dict[str, _LoadMeaning]:
    """Return what each value of LOADS is."""
    known: dict[str, _LoadMeaning] = {}
    for value in program.main.parameters:
        binding = value.binding or Binding("value")
        size = value.type.shape[0] if value.type.shape else 0
        known[value.name] = (
            ("load", ((binding.name, size),)) if binding.kind == "load" else (binding.kind, binding.name)
        )
    for line in program.main.lines:
        for made in line.made:
            known[made.name] = _load_meaning(line, [known[name] for name in line.uses])
    return known


def _load_meaning(line: Line, given: list[_LoadMeaning]) -> _LoadMeaning:
    row, first = facts(line.op), given[0] if given else ()
    if row.makes_zeros(line.args):
        return "load", (("", line.made[0].type.shape[0]),)
    if (line.op in COLLECTIVES or line.op == WAIT) and len(given) == 1 and first[:1] == ("load",):
        return first
    if line.op == "aten.cat.default" and all(one[:1] == ("load",) for one in given) and len(line.args) == 1:
        return "load", tuple(part for one in given for part in _flat(one))
    if line.op == "aten.slice.Tensor" and first[:1] == ("load",):
        return _sliced(_flat(first), line.args[1:])
    return _moving(line, given, first)


def _moving(line: Line, given: list[_LoadMeaning], first: _LoadMeaning) -> _LoadMeaning:
    """Return the meaning of a value on the way to a bias."""
    layers, row, plain = _flat(first), facts(line.op), not line.kwargs
    if row.casts:
        wide = line.made[0].type.dtype.itemsize >= 8
        return first if (layers and wide) or first[:1] in (("below",), ("above",)) else ()
    if line.op == "aten.mean.default" and len(layers) == 1 and plain:
        return "mean", layers[0][0]
    if row.computes in ("below", "above") and len(layers) == 1 and given[1:] == [("mean", layers[0][0])]:
        return row.computes, layers[0][0]
    if row.computes == "difference" and plain and first and given == [("below", first[-1]), ("above", first[-1])]:
        return "lacks", first[-1]
    if row.computes == "multiple" and first[:1] == ("lacks",) and not isinstance(line.args[1], Ref):
        return "step", first[1], line.args[1]
    if row.computes == "total" and plain and first[:1] == ("buffer",) and [one[:1] for one in given[1:]] == [("step",)]:
        return "moved", first[1], *given[1][1:]
    return ()


def _flat(made: _LoadMeaning) -> tuple[tuple[str, int], ...]:
    """Return the loads in a value with their sizes; none if it is something else."""
    return made[1] if made[:1] == ("load",) else ()  # type: ignore[return-value]


def _sliced(layers: tuple[tuple[str, int], ...], args: tuple[object, ...]) -> _LoadMeaning:
    """Return the layer whose whole load a slice cuts out."""
    start = 0
    for layer, size in layers:
        if args == (0, start, start + size, 1):
            return "load", ((layer, size),)
        start += size
    return ()
