"""The reference: the canonical captured graph as a program of one rank, with which all checks compare."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, TensorType
from ...compiler.program.actions import REFERENCE
from ...compiler.program.binding import COUNT, LOSS, RNG, Binding
from ...compiler.program.program import Function, Line, Origin, Program, Ref, Value
from ...compiler.program.rewriter import LineWriter
from ..calls import outputs, tensors_of
from .emit import Emitter, identifier, name_of


def reference_program(graph: fx.Graph, count: fx.Graph | None, counts: tuple[Binding, ...], seed: int) -> Program:
    """Return ``model.py`` with the functions ``count`` (where the loss has one) and ``forward``, on global shapes."""
    functions = [_function("count", count, counts, seed)] if count is not None else []
    keys = noted(graph.output_node()).results
    return Program("model", REFERENCE, Mesh(), (*functions, _function("forward", graph, keys, seed)))


def fraction_program(graph: fx.Graph) -> Program:
    """Return the program of a graph with two results: the numerator of a loss and its denominator."""
    return Program("model", REFERENCE, Mesh(), (_function("forward", graph, (LOSS, COUNT), 0),))


def without_training(reference: Program) -> Program:
    """Return the reference of an evaluation, in which no parameter is trained."""

    def frozen(value: Value) -> Value:
        return replace(value, binding=Binding("frozen", value.binding.name)) if value.binding else value

    functions = (
        replace(one, parameters=tuple(frozen(v) if v.kind == "parameter" else v for v in one.parameters))
        for one in reference.functions
    )
    return replace(reference, functions=tuple(functions))


def _function(name: str, graph: fx.Graph, keys: tuple[Binding, ...], seed: int) -> Function:
    emitter = Emitter(Mesh(), differentiated=True)
    writer, nodes = LineWriter(emitter.mesh, emitter.names), []
    rng: Value | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function"):
            noted(node).types = [
                None
                if value is None
                else TensorType(value.dtype, tuple(value.shape), Placement(()), noted(node).packed)
                for value in tensors_of(node)
            ]
        if node.op == "call_function":
            nodes.append(node)
        elif node.op == "placeholder" and (node.users or noted(node).binding in keys):
            binding: Binding = noted(node).binding
            path = binding.name
            if binding.kind != "key":
                value = emitter.define(node, name_of(binding), binding)
                writer.parameters[value.name] = value
                continue
            if rng is None:
                rng = writer.take("rng", TensorType(noted(node).value.dtype, (2,), Placement(())), RNG)
            key = emitter.define(node, f"key_{identifier(path)}")
            args = (Ref(rng.name), path, seed)
            writer.add(Line((key,), "parc.stream_key.default", args, (), Origin(path.rsplit(".", 1)[0])))
    writer.lines += emitter.lines(nodes)
    writer.returns = {key: emitter.value_of[node].name for key, node in zip(keys, outputs(graph), strict=True)}
    return writer.function(name)
