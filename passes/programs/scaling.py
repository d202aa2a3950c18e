"""Values that a step makes of all its microbatches: the scale of its loss, and the new biases that balance experts.

Both are written twice by the functions here: on the ranks of a mesh, in ``SCALE`` and ``LOADS``, and for one device, in
the functions ``scale`` and ``update`` of ``programs/model.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from ...compiler.layout.placement import TensorType
from ...compiler.program.binding import Binding
from ...compiler.program.program import Ref, Value
from ...compiler.program.step_values import Bias, Division, base_term, term_weight, terms_with_weights
from ..calls import outputs
from .emit import identifier
from .segments import node_type
from .writer import Writer, whole_type


def write_scale(
    write: Writer,
    graph: fx.Graph,
    count: fx.Graph | None,
    counts: Sequence[Binding],
    divisions: Sequence[Division],
    microbatches: int,
) -> tuple[Value, list[tuple[Binding, str]]]:
    """Write one over the divisor of the loss's base, which is the step's whole count, the number of microbatches or 1.
    Return it, and the weights of the terms with other divisors: the divisor of the base over their own."""
    dtype: torch.dtype = node_type(outputs(graph)[0]).dtype
    whole = whole_type(write.mesh, dtype)
    base, divisors = base_term(divisions), dict[int, Value | float]()
    for key, node in zip(counts, outputs(count) if count is not None else (), strict=True):
        total = write.total(write.take(f"count_{key.name}".rstrip("_"), node_type(node), key))
        divisor = write.emit("aten._to_copy.default", (Ref(total.name),), whole, dtype=dtype)
        division = divisions[int(key.name or base) - 1]
        if division.least is not None:
            divisor = write.emit("aten.clamp_min.default", (Ref(divisor.name), division.least), whole)
        if division.plus:
            divisor = write.emit("aten.add.Tensor", (Ref(divisor.name), division.plus), whole)
        divisors[int(key.name or base)] = divisor
    for number, division in enumerate(divisions, 1):
        divisors.setdefault(number, microbatches if division.by == "mean" else 1)
    below = divisors.get(base, 1)
    if isinstance(below, Value):
        scale = write.emit("aten.reciprocal.default", (Ref(below.name),), whole)
    else:
        scale = write.emit("aten.full.default", ([], 1.0 / below), whole, name="scale", dtype=dtype)
    returns = []
    for number in terms_with_weights(divisions):
        other, name = divisors[number], f"term_{number}"
        if isinstance(below, Value):
            by = Ref(other.name) if isinstance(other, Value) else other
            weight = write.emit("aten.div.Tensor", (Ref(below.name), by), whole, name=name)
        else:  # no term has a count
            assert not isinstance(other, Value)
            weight = write.emit("aten.full.default", ([], below / other), whole, name=name, dtype=dtype)
        returns.append((term_weight(number), weight.name))
    return scale, returns


def write_moved_bias(write: Writer, bias: Bias, load: Value, stored: TensorType) -> tuple[Binding, str]:
    """Write the new value of a bias: ``rate`` more for experts with fewer tokens than the mean, and less for those with
    more (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024). ``load`` are the
    tokens of each expert in the whole step; float64 holds any number of them exactly."""
    key, wide = Binding("buffer", bias.buffer), torch.float64
    old, row = write.take(identifier(bias.buffer), stored, key), whole_type(write.mesh, wide, load.type.shape)
    tokens = write.emit("aten._to_copy.default", (Ref(load.name),), row, dtype=wide)
    mean = write.emit("aten.mean.default", (Ref(tokens.name),), whole_type(write.mesh, wide))
    flags, moves = replace(row, dtype=torch.bool), []
    for op in ("lt", "gt"):  # what is compared is rounded to no other type
        flag = write.emit(f"aten.{op}.Tensor", (Ref(tokens.name), Ref(mean.name)), flags)
        moves.append(write.emit("aten._to_copy.default", (Ref(flag.name),), stored, dtype=stored.dtype))
    step = write.emit("aten.sub.Tensor", tuple(Ref(move.name) for move in moves), stored)
    step = write.emit("aten.mul.Tensor", (Ref(step.name), bias.rate), stored)
    return key, write.emit("aten.add.Tensor", (Ref(old.name), Ref(step.name)), stored, name="moved").name
