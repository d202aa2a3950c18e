"""LOSS and REDUCE: the work of a role once a step, after all microbatches, with the loss and with its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement
from ...compiler.program.actions import AVERAGING, REDUCE
from ...compiler.program.binding import GRAD_NORM, LOSS, SCALE, UNSCALE, Binding
from ...compiler.program.program import Origin, Program, Ref, Value
from ...compiler.program.roles import SINGLE
from ...compiler.program.step_values import residual
from .assemble import Assembled
from .compress import Compressor
from .cut import Pipeline
from .weights import stored_type
from .writer import Across, Writer, whole_type


def reductions(
    graph: fx.Graph, mesh: Mesh, made: Assembled, pipeline: Pipeline | None, scaled: bool, compressor: Compressor
) -> Iterator[Program]:
    """Write REDUCE of every role: it sums partial gradients, and converts them to the placements in which the
    parameters are stored. It divides them by the loss scale, if the loss is ``scaled``."""
    if pipeline is None:
        gradients = {name: value for _, name, value in made.gradients}
        yield _reduce(graph, mesh, gradients, SINGLE, scaled, compressor)
        return
    ranks, everyone = pipeline.ranks, range(mesh.size(pipeline.axis))
    trained = sorted({name for _, name, _ in made.gradients})
    owners = {name: sorted({ranks[stage] for stage, names in enumerate(made.reads) if name in names})
              for name in trained}  # fmt: skip
    counts = {name: min(ranks[stage] for stage, other, _ in made.gradients if other == name) for name in trained}
    for rank in everyone:
        own = {name: value for stage, name, value in made.gradients if ranks[stage] == rank}
        # those of several roles first and in one order: their ranks meet in them
        tied = {name: at for name, at in owners.items() if len(at) > 1 and rank in at}
        across = Across(pipeline.axis, everyone, tied, {name for name in tied if counts[name] != rank})
        first = {name: own.get(name) for name in tied}
        yield _reduce(graph, mesh, {**first, **own}, f"{pipeline.axis}{rank}", scaled, compressor, across)


def losses(mesh: Mesh, made: Assembled, pipeline: Pipeline | None, scaled: bool) -> Iterator[Program]:
    """Write LOSS of every role: the sum of the loss's numerators over the axes on which they are partial, and over the
    roles, times one over the count. Where gradients are ``scaled``, the loss scale is taken out of that first, since
    the loss times its scale may be infinite."""
    assert made.loss is not None
    for rank in range(mesh.size(pipeline.axis)) if pipeline is not None else (0,):
        across = Across(pipeline.axis, range(mesh.size(pipeline.axis)), {}, ()) if pipeline is not None else None
        write = Writer(mesh, across)
        if pipeline is None or pipeline.ranks[made.last] == rank:
            numerator = write.take("loss", made.loss.type, LOSS)
            scale = write.take("scale", whole_type(mesh, made.loss.type.dtype), SCALE)
            if scaled:
                unscale = write.take("unscale", whole_type(mesh, torch.float32), UNSCALE)
                scale = write.emit("aten.mul.Tensor", (Ref(scale.name), Ref(unscale.name)), scale.type)
            summed = write.total(numerator)
            mean = write.emit("aten.mul.Tensor", (Ref(summed.name), Ref(scale.name)), summed.type)
        else:
            mean = write.zeros(whole_type(mesh, made.loss.type.dtype))
        role = f"{pipeline.axis}{rank}" if pipeline is not None else SINGLE
        yield write.program(role, AVERAGING, [(LOSS, write.among(mean, across.ranks if across else ()).name)])


def norm_dtype(graph: fx.Graph) -> torch.dtype:
    """Return the type of the gradients' norm, alike in all roles."""
    parameters = (n for n in graph.find_nodes(op="placeholder") if noted(n).binding.kind == "parameter")
    return reduce(torch.promote_types, (stored_type(node).dtype for node in parameters), torch.float32)


def _squared(write: Writer, value: Value, dtype: torch.dtype, origin: Origin) -> Value:
    """Add the sum of a gradient's squares on this rank, in the type of the norm."""
    squared = torch.promote_types(value.type.dtype, torch.float32)
    placement = Placement.of(write.mesh, dict.fromkeys(value.type.placement.split_axes(), "P"))
    partial = replace(whole_type(write.mesh, squared), placement=placement)
    square = write.emit("parc.square_sum.default", (Ref(value.name),), partial, origin)
    if squared == dtype:
        return square
    wide = replace(partial, dtype=dtype)
    return write.emit("aten._to_copy.default", (Ref(square.name),), wide, origin, "widen", dtype=dtype)


def _reduce(
    graph: fx.Graph, mesh: Mesh, gradients: Mapping[str, Value | None], role: str, scaled: bool,
    compressor: Compressor, across: Across | None = None,
) -> Program:  # fmt: skip
    """Write the sums of gradients over the axes on which they are partial, and over the roles that have a part of
    them; and the global norm. A gradient that this role's stages do not make is None."""
    write, returns = Writer(mesh, across), []
    stored = {noted(node).binding.name: node for node in graph.find_nodes(op="placeholder")
              if noted(node).binding.kind == "parameter"}  # fmt: skip
    squares: dict[tuple[str, ...], list[Value]] = {}
    types = {name: stored_type(node) for name, node in stored.items()}
    dtype = norm_dtype(graph)
    divides = scaled and any(value is not None for value in gradients.values())
    unscale = write.take("unscale", whole_type(mesh, torch.float32), UNSCALE) if divides else None
    # all sums first: on a real network they run side by side
    reduced = []
    for name, gradient in gradients.items():
        origin = Origin(name, "", noted(stored[name]).line)
        tied = gradient is None or (across is not None and name in across.tied)
        value, *left = compressor.sums(write, name, None if tied else gradient, types[name], unscale, origin) or [
            write.gradient(name, gradient, types[name], origin)
        ]
        reduced.append((name, value, origin))
        returns += [(residual(name), one.name) for one in left]
    kept = {key for key, _ in returns}
    for at, (name, value, origin) in enumerate(reduced):
        if unscale is not None and gradients[name] is not None and residual(name) not in kept:
            value = write.times(value, unscale, origin)
            reduced[at] = name, value, origin
        if across is not None and name in across.tied:
            reduced[at] = name, write.among(value, across.tied[name], origin), origin
    returns += [(Binding("gradient", name), value.name) for name, value, _ in reduced]
    for name, value, origin in reduced:
        if across is not None and name in across.elsewhere:
            continue
        squares.setdefault(value.type.placement.split_axes(), []).append(_squared(write, value, dtype, origin))
    everyone = across.ranks if across is not None else ()
    if squares or across is not None:
        # each group of equally split gradients is summed over its axes once
        sums = [write.total(write.stacked_sum(group)) for group in squares.values()]
        square = write.among(write.stacked_sum(sums) if sums else write.zeros(whole_type(mesh, dtype)), everyone)
        root = write.emit("aten.sqrt.default", (Ref(square.name),), square.type)
        returns.append((GRAD_NORM, root.name))
    return write.program(role, REDUCE, returns)
