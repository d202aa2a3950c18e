"""The checker of LOADS: it tells the tokens of each expert as F counts them, and moves a bias by them alone.

Types say that loads are whole sums. Here it is which loads they are, each in its place, and that nothing else is done
to them: a number cut off at some size, or a bias moved by another layer's load, shows in no test of few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..layout.collectives import COLLECTIVES, WAIT
from ..ops.rules import facts
from ..program.actions import LOADS
from ..program.binding import Binding
from ..program.program import Fault, Line, Program, Ref, Value
from ..program.step_values import LOAD, Bias

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
