"""The scale of a step's loss: by which number its microbatches' losses, added up, are multiplied.

``SCALE`` and the function ``scale`` of ``programs/model.py`` are written here, the one on the ranks of a mesh and the
other for one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...compiler.program.binding import Binding
from ...compiler.program.program import Ref, Value
from ...compiler.program.step_values import Division, base_term, term_weight, terms_with_weights
from ..calls import outputs
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
