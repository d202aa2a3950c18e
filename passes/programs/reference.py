"""The reference: ``programs/model.py``, the unsharded model that every check compares a build with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.program.actions import REFERENCE
from ...compiler.program.binding import LOSS, SCALE, Binding
from ...compiler.program.program import Function, Program, Value
from ...compiler.program.step_values import Division
from ...compiler.resolve.experts import RoutedLayer
from ..calls import outputs
from .emit import graph_function, identifier
from .scaling import write_moved_bias, write_scale
from .segments import node_type
from .writer import Writer


def reference_program(
    graph: fx.Graph,
    count: fx.Graph | None,
    counts: tuple[Binding, ...],
    seed: int,
    divisions: Sequence[Division],
    microbatches: int,
    experts: Mapping[str, RoutedLayer] = MappingProxyType({}),
) -> Program:
    """The pass that writes the reference. It takes the canonical graph and that of the denominators, notes global types
    on their nodes, and returns ``model.py``. Its functions are ``count`` (where the loss has a denominator); ``scale``
    (where there is a loss): by what the losses of all microbatches, added up, are multiplied; ``update`` (where biases
    balance experts): what a step makes of them; and ``forward``."""
    functions = [graph_function("count", count, counts, seed)] if count is not None else []
    keys = noted(graph.output_node()).results
    forward = graph_function("forward", graph, keys, seed)
    if LOSS in keys:
        write = Writer(Mesh())
        scale, weights = write_scale(write, graph, count, counts, divisions, microbatches)
        write.returns = {SCALE: scale.name, **dict(weights)}
        functions.append(write.function("scale"))
    if (update := _update(graph, experts)) is not None:
        functions.append(update)
    return Program("model", REFERENCE, Mesh(), (*functions, forward))


def _update(graph: fx.Graph, experts: Mapping[str, RoutedLayer]) -> Function | None:
    """Return the function that moves the biases of experts by the tokens of a whole step; None where there are none."""
    write, returns = Writer(Mesh()), {}
    buffers = {noted(node).binding: node_type(node) for node in graph.find_nodes(op="placeholder")}
    for key, node in zip(noted(graph.output_node()).results, outputs(graph), strict=True):
        if key.kind == "load" and key.name in experts and (bias := experts[key.name].bias) is not None:
            load = write.take(f"load_{identifier(key.name)}", node_type(node), key)
            moved, name = write_moved_bias(write, bias, load, buffers[Binding("buffer", bias.buffer)])
            returns[moved] = name
    write.returns = returns
    return write.function("update") if returns else None


def program_of(graph: fx.Graph, *keys: Binding) -> Program:
    """Return the program of a graph alone, which returns the graph's results under these keys."""
    return Program("model", REFERENCE, Mesh(), (graph_function("forward", graph, keys, 0),))


def without_training(reference: Program) -> Program:
    """The pass that takes the reference of a training step, and returns that of an evaluation: parameters are
    frozen."""

    def frozen(value: Value) -> Value:
        return replace(value, binding=Binding("frozen", value.binding.name)) if value.binding else value

    functions = (
        replace(one, parameters=tuple(frozen(v) if v.kind == "parameter" else v for v in one.parameters))
        for one in reference.functions
    )
    return replace(reference, functions=tuple(functions))
