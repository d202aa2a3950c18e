"""Floating-point operations of a build's model in a step, from its products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..layout.mesh import Mesh
from ..layout.placement import TensorType
from ..ops.rules import facts
from ..program.program import Line, Value
from ..verify.lines import line_call
from .build import Build

_BACKWARD = 2
"""The most gradients of operands that the backward of a product makes, each by as many multiply-adds as the product.
Attention has two products, and four in its backward."""


def multiply_adds(line: Line, values: Mapping[str, Value], mesh: Mesh) -> int:
    """Count the multiply-adds of a line on a rank; 0 for one that is no product."""
    count = None if line.calls_function else facts(line.op).flops
    if count is None:
        return 0
    read, made = [values[name].type for name in line.uses], [value.type for value in line.made]
    call = line_call(line, read, made, lambda size: size.local(mesh))
    operands, results = (tuple(type_.local(mesh) for type_ in types) for types in (read, made))
    return count(replace(call, operands=operands, results=results))


def step_flops(build: Build) -> int:
    """Count the floating-point operations of a step's products on its whole batch, two for each multiply-add: those of
    the model's forward, and of a backward that makes the gradients of what is trained. What ranks compute twice, or
    make again in backward, counts once."""
    reference, total = build.reference, 0
    for function in reference.functions:
        values = function.values()
        trained = {value.name for value in function.parameters if _is_trained(value)}
        for line in function.lines:
            with_gradient = [name for name in line.uses if name in trained]
            if with_gradient and not facts(line.op).stops_gradient:
                trained.update(value.name for value in line.made if value.type.dtype.is_floating_point)
            total += multiply_adds(line, values, reference.mesh) * (1 + min(_BACKWARD, len(with_gradient)))
    return 2 * total * build.microbatches


def _is_trained(value: Value) -> bool:
    return value.binding is not None and value.binding.kind == "parameter"


def product_type(build: Build) -> TensorType | None:
    """Return the type of the result of the largest product of a rank's forward; None where it has no product."""
    found = [
        (multiply_adds(line, function.values(), program.mesh), line.made[0].type)
        for program in build.programs.values()
        for function in program.functions
        for line in function.lines
        if not line.calls_function and facts(line.op).flops is not None
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None
