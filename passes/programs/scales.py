"""SCALE and RESCALE: the work of a step, before and after all else, with the numbers that multiply its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ...compiler.program.actions import RESCALE, SCALING
from ...compiler.program.binding import COUNT, GRAD_NORM, SCALE, UNSCALE, Binding
from ...compiler.program.program import Line, Program, Ref, Value
from ...compiler.program.rewriter import ORIGIN
from ...compiler.program.step_values import BACKOFF, GROWTH, INTERVAL, LOSS_SCALE, NEXT_SCALE, SCALER, term_count
from .writer import Writer, whole_type


def scale_program(
    counts: Mapping[Binding, TensorType],
    terms: Sequence[Binding],
    microbatches: int,
    dtype: torch.dtype,
    parts: int,
    mesh: Mesh,
    role: str,
    scaled: bool,
) -> Program:
    """Write SCALE: one over the step's whole denominator; without a count, one over the number of ``parts`` averaged.
    If the loss is ``scaled``, it is this times the loss scale, and one over the loss scale is a second result.

    ``terms`` are the weights of the loss's other terms: the denominator over a term's own, or over the number of
    ``microbatches``, of which it is averaged.
    """
    write, whole = Writer(mesh), whole_type(mesh, dtype)
    totals = {}
    for key, type_ in counts.items():
        total = write.total(write.take(f"count_{key.name}".rstrip("_"), type_, key))
        totals[key] = write.emit("aten._to_copy.default", (Ref(total.name),), whole, dtype=dtype)
    if not totals:
        scale = write.emit("aten.full.default", ([], 1.0 / parts), whole, name="scale", dtype=dtype)
    else:
        scale = write.emit("aten.reciprocal.default", (Ref(totals[COUNT].name),), whole)
    results = []
    for key in terms:
        own = totals.get(term_count(key.name))
        by = microbatches if own is None else Ref(own.name)
        name = f"term_{key.name}"
        results.append((key, write.emit("aten.div.Tensor", (Ref(totals[COUNT].name), by), whole, name=name).name))
    if not scaled:
        return write.program(role, SCALING, [(SCALE, scale.name), *results])
    loss_scale = write.take(LOSS_SCALE.name, whole_type(mesh, torch.float32), LOSS_SCALE)
    unscale = write.emit("aten.reciprocal.default", (Ref(loss_scale.name),), loss_scale.type, name="unscale")
    scale = write.emit("aten.mul.Tensor", (Ref(scale.name), Ref(loss_scale.name)), whole)
    return write.program(role, SCALING, [(SCALE, scale.name), (UNSCALE, unscale.name), *results])


def rescale_program(norm: torch.dtype, mesh: Mesh, role: str) -> Program:
    """Write RESCALE: the state of a dynamic loss scale after the step. Every rank has the same norm and the same state,
    so all come to the same scale, and skip the same steps."""
    write = Writer(mesh)
    given = [write.take(GRAD_NORM.kind, whole_type(mesh, norm), GRAD_NORM)]
    given += [write.take(key.name, whole_type(mesh, getattr(torch, row.dtype)), key) for key, row in SCALER.items()]
    made = tuple(Value(write.names.fresh(f"next_{value.name}"), value.type) for value in given[1:])
    args = (*(Ref(value.name) for value in given), GROWTH, BACKOFF, INTERVAL)
    write.add(Line(made, NEXT_SCALE, args, (), ORIGIN))
    return write.program(role, RESCALE, [(key, value.name) for key, value in zip(SCALER, made, strict=True)])
