"""Checks of the programs that run once a step: SCALE, LOSS, REDUCE, RESCALE and LOADS.

Types prove that a sum is complete and whole on every rank. These checks prove of what it is, and that nothing else is
done to it: no test of small numbers sees a count or a loss that is clamped at some size, a wrong norm that clips
nothing, or a bias that another layer's load moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from ..program.program import Fault, Line, Program, Ref
from ..program.step_values import (
    BACKOFF,
    GROWTH,
    INTERVAL,
    LOAD,
    LOSS_SCALE,
    NEXT_SCALE,
    SCALER,
    Bias,
    Division,
    base_term,
    residual,
    residual_of,
    term_count,
    term_weight,
    terms_with_weights,
)

_MEAN, _COUNTED = Binding("loss", "mean"), Binding("scale", "of the count")
"""The scaled loss, and one over the count without the loss scale. No program has bindings of these names."""
_PLAIN = Division("count")
"""The division by a count as it is."""
_KEEPS = frozenset(
    {"parc.all_reduce", "parc.reduce_scatter", "parc.all_gather", "parc.shard", "parc.pad", "parc.round_int8",
     "parc.reduce_scatter_int8", "parc.all_gather_int8", "parc.grow_pad.default", WAIT}
)  # fmt: skip
"""The operators whose result has the meaning of their operand."""


# ---- SCALE, LOSS and REDUCE, by the meaning of each value


@dataclass(frozen=True, slots=True)
class _SumMeaning:
    """The meaning of a value of SCALE, LOSS or REDUCE: that of a binding, or a sum of squares."""

    binding: Binding | None = None
    floor: Division = _PLAIN
    """The floor under a count."""
    over: Binding | float | None = None
    """The divisor of a count; of one over the count, the number that stands for it."""
    floor_of_over: Division = _PLAIN
    """The floor under that divisor."""
    squares: tuple[str, ...] = ()
    """The names of the values whose squares are summed."""
    root: bool = False
    """True for the root of that sum."""


def check_reduce(
    programs: Mapping[str, Program], reference: Program, microbatches: int, divisions: Sequence[Division]
) -> Iterator[Fault]:
    """Find faults in the scale of the loss and the weights of its terms, whose ``divisions`` they follow, in the loss,
    and in the gradients and their norm."""
    yield from _scale_faults(programs[SCALING], reference, microbatches, divisions)
    loss, reduce = programs[AVERAGING].main, programs[REDUCE].main
    known = _sum_meanings(programs[AVERAGING])
    for key, name in loss.returns:
        if known[name] != _SumMeaning(_MEAN if key == LOSS else key):
            yield Fault("types", f"LOSS {key}", "is not proved to be its own sum")
    known = _sum_meanings(programs[REDUCE])
    for key, name in reduce.returns:
        if key != GRAD_NORM and known[name] != _SumMeaning(key):
            yield Fault("types", f"REDUCE {key}", "is not proved to be its own sum")
    gradients = {name: key for key, name in reduce.returns if key.kind == "gradient"}
    yield from _norm_faults(known.get(dict(reduce.returns).get(GRAD_NORM, "")), gradients)


def _scale_faults(
    scale: Program, reference: Program, microbatches: int, divisions: Sequence[Division]
) -> Iterator[Fault]:
    """Find a scale that is not one over the divisor of the loss's base times the loss scale, and weights of terms that
    are not that divisor over the term's own."""
    if LOSS not in dict(reference.main.returns):
        return
    counts = {key for function in reference.functions[:-1] for key, _ in function.returns if key.kind == "count"}
    weights = {str(number): number for number in terms_with_weights(divisions)}
    base = base_term(divisions)
    counted = {COUNT if number == base else term_count(number)
               for number, division in enumerate(divisions, 1) if division.by == "count"}  # fmt: skip
    if counted != counts or weights.keys() != {*reference.main.bound("term")}:
        yield Fault("types", SCALING, "the divisors of the loss are not those of the captured graph")
        return
    known, of_base = _sum_meanings(scale), divisions[base - 1]
    whole = SCALE if LOSS_SCALE in scale.main.bindings else _COUNTED
    numbers = {"count": None, "mean": float(microbatches), "sum": 1.0}
    one = numbers[of_base.by]
    wanted = {SCALE: _SumMeaning(whole, of_base) if one is None else _SumMeaning(whole, over=1.0 / one)}
    for text, number in weights.items():
        of_term, alone = divisions[number - 1], numbers[divisions[number - 1].by]
        divisor = term_count(text) if alone is None else alone
        wanted[term_weight(number)] = (
            _SumMeaning(COUNT, of_base, divisor, of_term if alone is None else _PLAIN)
            if one is None else _SumMeaning(_COUNTED, over=one / (alone or 1.0))
        )  # fmt: skip
    for key, name in scale.main.returns:
        if known[name] == wanted.get(key, _SumMeaning(key)):
            continue
        if key == SCALE and one is not None:
            yield Fault("types", f"SCALE {key}", f"the loss is to be scaled by {1.0 / one}")
        elif key.kind == "term":
            by = divisions[weights.get(key.name, 1) - 1].by
            text = {"count": f"`{term_count(key.name)}`", "mean": "the number of microbatches", "sum": "1"}[by]
            yield Fault("types", f"SCALE {key}", f"is not proved to be the count of targets over {text}")
        else:
            what = "one over the loss scale" if key == UNSCALE else "one over the count of targets"
            also = " times the loss scale" if key == whole else ""
            yield Fault("types", f"SCALE {key}", f"is not proved to be {what}{also}")


def _norm_faults(norm: _SumMeaning | None, gradients: Mapping[str, Binding]) -> Iterator[Fault]:
    """Find a norm that is not the root of the squares of all ``gradients``, which are named by their values."""
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
    """Return the meaning of each value of a program with one function; None where it is not known."""
    bindings, meaning = program.main.bindings, None
    known: dict[str, _SumMeaning | None] = {value.name: _SumMeaning(value.binding) for value in program.main.parameters}
    if UNSCALE not in bindings:
        known.update((value.name, _SumMeaning(_COUNTED)) for value in program.main.parameters if value.binding == SCALE)
    for line in program.main.lines:
        if program.action == SCALING and line.op == "aten.full.default":
            meaning = _SumMeaning(_COUNTED, over=float(line.args[1])) if line.args[:1] == ([],) else None
        else:
            meaning = _sum_meaning(line, [known[name] for name in line.uses])
        known.update((value.name, meaning) for value in line.made)
    return known


def _sum_meaning(line: Line, operands: list[_SumMeaning | None]) -> _SumMeaning | None:
    known = [operand for operand in operands if operand is not None]
    if len(known) != len(operands):
        return None
    row = facts(line.op)
    if row.makes_zeros(line.args):  # a role without gradients adds them
        return _SumMeaning()
    to_float = row.casts and line.made[0].type.dtype.is_floating_point
    if row.computes == "ratio" and len(line.args) == 2 and known[0] == _SumMeaning(COUNT, known[0].floor):
        by = line.args[1]
        if len(known) == 1:
            return replace(known[0], over=float(by)) if isinstance(by, int | float) else None
        counted = known[1] == _SumMeaning(known[1].binding, known[1].floor)
        return replace(known[0], over=known[1].binding, floor_of_over=known[1].floor) if counted else None
    if len(known) == 1 and (floored := _floored(line, known[0])) is not None:
        return floored
    if line.op in _KEEPS or to_float:
        return known[0]
    bindings = [operand.binding for operand in known]
    if (of := _residual_meaning(line.op, bindings)) is not None:
        return _SumMeaning(of)
    if row.power == -1.0 and bindings in ([COUNT], [LOSS_SCALE]):
        return replace(known[0], binding=_COUNTED if bindings == [COUNT] else UNSCALE)
    if row.computes == "multiple" and (product := _product_meaning(bindings)) is not None:
        return replace(known[0], binding=product)
    if row.reduces == "squares" and bindings[0] is not None and bindings[0].kind == "gradient":
        return _SumMeaning(squares=line.uses)
    root = row.power == 0.5
    summed = (row.moves == "join" or row.reduces == "sum" or root) and len(line.args) == 1
    if row.computes == "total" and not line.kwargs:
        summed = all(isinstance(item, Ref) for item in line.args)
    if not summed or any(operand.binding or operand.root for operand in known):
        return None
    return _SumMeaning(squares=tuple(name for operand in known for name in operand.squares), root=root)


def _floored(line: Line, known: _SumMeaning) -> _SumMeaning | None:
    """Return the meaning of a count with a floor under it, or with a number beside it; None for any other line."""
    number, floor = line.args[1] if len(line.args) == 2 else None, known.floor
    of_count = known.binding is not None and known.binding.kind == "count" and known.over is None
    if not of_count or line.kwargs or not isinstance(number, int | float):
        return None
    if line.op == "aten.clamp_min.default" and floor == _PLAIN:
        return replace(known, floor=floor._replace(least=float(number)))
    if line.op == "aten.add.Tensor" and not floor.plus:
        return replace(known, floor=floor._replace(plus=float(number)))
    return None


def _product_meaning(bindings: list[Binding | None]) -> Binding | None:
    """Return the meaning of a product of two values: the scale with or without the loss scale, the scaled loss, or a
    gradient without the loss scale (``check_scaling`` proves how often each was multiplied by it)."""
    known = {
        (_COUNTED, LOSS_SCALE): SCALE, (SCALE, UNSCALE): _COUNTED, (LOSS, _COUNTED): _MEAN,
    }  # fmt: skip
    first, second = bindings if len(bindings) == 2 else (None, None)
    if first is not None and first.kind == "gradient" and second == UNSCALE:
        return first
    return known.get((first, second)) if first is not None and second is not None else None


def _residual_meaning(op: str, bindings: list[Binding | None]) -> Binding | None:
    """Return the meaning of the sum or the difference of a gradient and its residual, or of two parts of a residual;
    ``check_compressed`` proves which parts."""
    first, second = bindings if len(bindings) == 2 else (None, None)
    if first is None or second is None:
        return None
    of = residual_of(first) or residual_of(second)
    if op == "aten.sub.Tensor" and first == second and first.kind == "gradient":
        return residual(first.name)
    summed = op == "aten.add.Tensor" and second == residual(of) and first in (second, Binding("gradient", of))
    return first if of and summed else None


# ---- the scales of the loss
# A step divides by the count of targets once, at its end, and multiplies by the loss scale between SCALE and REDUCE, if
# there is one. Each value has a degree in each of these scales: how often it was multiplied by it. A linear operator
# keeps the degree, a product adds degrees, and the degree of anything else is not known.


Degree = float | None
"""The power of a scale in a value: 1.0 for a value that is multiplied by it once. None is not known."""
_ZERO = float("inf")
"""The degree of zeros, which count as any degree."""
_MIXED = float("nan")
"""The degree of a sum whose parts have different degrees."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """A scale of the loss: its words in messages, and its degrees in a program's parameters, by kind (``residual`` for
    that of a gradient) where they are not 0."""

    words: str
    in_kinds: Mapping[str, float]

    def in_parameter(self, binding: Binding | None) -> float:
        """Return the degree in a program's parameter."""
        kind = "residual" if residual_of(binding) else binding.kind if binding is not None else ""
        return self.in_kinds.get(kind, 0.0)

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
    """Find a scale, a loss or gradients that were not multiplied by each of the two scales exactly as often as they
    should be."""
    scaled = [SCALING, *(action for action in programs if action == AVERAGING or "gradient" in ACTIONS[action].returns)]
    loss_scaled = LOSS_SCALE in programs[SCALING].main.bindings
    return [fault for action in scaled for fault in scaled_once(programs[action], action, loss_scaled)]


def scaled_once(program: Program, where: str, loss_scaled: bool) -> list[Fault]:
    """Find returned values that were not multiplied by each scale as often as they should be; gradients that B receives
    from another stage have both already."""
    faults = []
    for scale in (_COUNT_SCALE, _LOSS_SCALE) if loss_scaled else (_COUNT_SCALE,):
        parameters = [scale.in_parameter(value.binding) for value in program.main.parameters]
        for (key, _), degree in zip(program.main.returns, degrees(program, parameters), strict=True):
            wanted = scale.wanted(program, key)
            if degree not in (wanted, None, _ZERO) and key.kind != "term":  # `check_reduce` proves the weight of a term
                has = f"has {scale.words} {_times_text(degree)}, not {'once' if wanted == 1 else f'{wanted:g} times'}"
                faults.append(Fault("types", f"{where} {key.key_in(program.action)}", has))
    return faults


def _times_text(degree: float) -> str:
    return "more often in some parts than in others" if isnan(degree) else f"{degree:g} times"


def degrees(program: Program, parameters: Sequence[Degree]) -> list[Degree]:
    """Return the degrees of a program's results, from those of its parameters."""

    def of_results(_: str, question: Question, operands: tuple[Degree, ...]) -> list[Degree]:
        return [_degree(question, operands)] * len(question.results)

    return follow(program, program.main, parameters, of_results)


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
    """Return the degree of a result by the operator's rule: that of its scaled operands if it is linear in them
    together, the sum of their degrees if it is linear in each."""
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


# ---- RESCALE: tests in float64 compare nothing that depends on it, and its rule matters only when a step is skipped


def check_rescale(programs: Mapping[str, Program], mesh: Mesh) -> Iterator[Fault]:
    """Find state of steps that is not the loss scaler's, and a RESCALE that does not update that as it should."""
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


# ---- LOADS: each slot of the loads holds its own layer's, and the load of its own layer alone moves a bias


_LoadMeaning = tuple[object, ...]
"""The meaning of a value: ``("load", layers)`` for the joined loads of layers, each with its name and size; ``mean``,
``below``, ``above``, ``lacks``, ``step`` and ``moved``, with a layer, on the way to a bias; () for any other."""


def check_loads(role: Mapping[str, Program], reference: Program, biases: Mapping[str, Bias]) -> Iterator[Fault]:
    """Find loads that are not those that F counts, each in its slot, and biases that their own load does not move."""
    if LOADS not in role:
        return
    program = role[LOADS]
    known = _load_meanings(program)
    of_role = program.main.bound("load")
    sizes = {layer: value.type.shape[0] for layer, value in of_role.items()}
    for key, name in program.main.returns:
        if key == LOAD:
            values = reference.main.values()
            total = {layer: values[n].type.shape[0] for layer, n in reference.main.returned("load").items()}
            wanted = tuple((layer, size) if layer in of_role else ("", size) for layer, size in total.items())
            if _loads_in(known[name]) != wanted or any(total.get(layer) != size for layer, size in sizes.items()):
                yield Fault("types", f"LOADS {key}", "is not proved to be the loads of all layers in their order")
        elif key.kind == "buffer":
            by = [(layer, bias.rate) for layer, bias in biases.items() if bias.buffer == key.name]
            if len(by) != 1 or known[name] != ("moved", key.name, *by[0]):
                yield Fault("types", f"LOADS {key}", "is not proved to be moved by the load of its own layer")
    moved = {key.name for key, _ in program.main.returns if key.kind == "buffer"}
    for layer, bias in biases.items():
        if layer in of_role and bias.buffer not in moved:
            yield Fault("types", f"LOADS {layer}", f"the bias `{bias.buffer}` is not moved")


def _load_meanings(program: Program) -> dict[str, _LoadMeaning]:
    """Return the meaning of each value of LOADS."""
    known: dict[str, _LoadMeaning] = {}
    for value in program.main.parameters:
        binding = value.binding or Binding("value")
        size = value.type.shape[0] if value.type.shape else 0
        known[value.name] = (
            ("load", ((binding.name, size),)) if binding.kind == "load" else (binding.kind, binding.name)
        )
    for line in program.main.lines:
        known.update((value.name, _load_meaning(line, [known[name] for name in line.uses])) for value in line.made)
    return known


def _load_meaning(line: Line, operands: list[_LoadMeaning]) -> _LoadMeaning:
    row, first = facts(line.op), operands[0] if operands else ()
    if row.makes_zeros(line.args):
        return "load", (("", line.made[0].type.shape[0]),)
    if (line.op in COLLECTIVES or line.op == WAIT) and len(operands) == 1 and first[:1] == ("load",):
        return first
    if line.op == "aten.cat.default" and all(one[:1] == ("load",) for one in operands) and len(line.args) == 1:
        return "load", tuple(load for one in operands for load in _loads_in(one))
    if line.op == "aten.slice.Tensor" and first[:1] == ("load",):
        return _sliced(_loads_in(first), line.args[1:])
    return _bias_meaning(line, operands, first)


def _bias_meaning(line: Line, operands: list[_LoadMeaning], first: _LoadMeaning) -> _LoadMeaning:
    """Return the meaning of a value on the way to a bias."""
    layers, row, plain = _loads_in(first), facts(line.op), not line.kwargs
    if row.casts:
        wide = line.made[0].type.dtype.itemsize >= 8
        return first if (layers and wide) or first[:1] in (("below",), ("above",)) else ()
    if line.op == "aten.mean.default" and len(layers) == 1 and plain:
        return "mean", layers[0][0]
    if row.computes in ("below", "above") and len(layers) == 1 and operands[1:] == [("mean", layers[0][0])]:
        return row.computes, layers[0][0]
    if row.computes == "difference" and plain and first and operands == [("below", first[-1]), ("above", first[-1])]:
        return "lacks", first[-1]
    if row.computes == "multiple" and first[:1] == ("lacks",) and not isinstance(line.args[1], Ref):
        return "step", first[1], line.args[1]
    adds_step = row.computes == "total" and plain and [one[:1] for one in operands] == [("buffer",), ("step",)]
    return ("moved", first[1], *operands[1][1:]) if adds_step else ()


def _loads_in(meaning: _LoadMeaning) -> tuple[tuple[str, int], ...]:
    """Return the loads in a value with their sizes; none if it is something else."""
    return meaning[1] if meaning[:1] == ("load",) else ()  # type: ignore[return-value]


def _sliced(layers: tuple[tuple[str, int], ...], args: tuple[object, ...]) -> _LoadMeaning:
    """Return the layer whose whole load a slice cuts out."""
    start = 0
    for layer, size in layers:
        if args == (0, start, start + size, 1):
            return "load", ((layer, size),)
        start += size
    return ()
