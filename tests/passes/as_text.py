"""Graphs as text, before and behind a pass: the text of a function is read into a graph, and written again."""

from __future__ import annotations

import operator
import textwrap
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from parc.compiler.capture.node_facts import noted
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import TensorType
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Function, Line, Ref, Value, map_references
from parc.compiler.program.program import operator as torch_operator
from parc.compiler.program.text import parse_program
from parc.passes.calls import outputs, substitute_nodes
from parc.passes.pipeline import mark_blocks
from parc.passes.programs.reference import reference_program

_HEAD = '"""parc program: role model, action reference"""\n\nmesh()\n\n\n'
_KEY = "parc.stream_key.default"


def graph_of(text: str) -> fx.Graph:
    """Return the graph of a function on global shapes, as a canonical graph is, with the facts that its text tells."""
    function = parse_program(f"{_HEAD}{textwrap.dedent(text).strip()}\n").main
    graph, mode, nodes = fx.Graph(), FakeTensorMode(), dict[str, fx.Node]()

    def placeholder(name: str, type_: TensorType, binding: Binding) -> None:
        node = nodes[name] = graph.placeholder(name)
        with mode:
            noted(node).binding, noted(node).value = binding, torch.empty(type_.shape, dtype=type_.dtype)

    for value in (value for value in function.parameters if value.kind != "rng"):
        placeholder(value.name, value.type, value.binding or Binding("value"))
    for line in (line for line in function.lines if line.op == _KEY):
        placeholder(line.made[0].name, line.made[0].type, Binding("key", line.args[1]))
    for line in (line for line in function.lines if line.op != _KEY):
        _add(graph, line, nodes, mode)
    end = graph.output(tuple(nodes[name] for _, name in function.returns))
    noted(end).results = tuple(key for key, _ in function.returns)
    mark_blocks(graph)
    return graph


def _add(graph: fx.Graph, line: Line, nodes: dict[str, fx.Node], mode: FakeTensorMode) -> None:
    args, kwargs = map_references((line.args, [list(pair) for pair in line.kwargs]), nodes.__getitem__)
    node = graph.call_function(torch_operator(line.op), tuple(args), dict(kwargs))
    noted(node).origin = line.origin
    fakes: Any = substitute_nodes((node.args, dict(node.kwargs)), lambda operand: noted(operand).value)
    with mode:
        noted(node).value = torch_operator(line.op)(*fakes[0], **fakes[1])
    if not isinstance(noted(node).value, (tuple, list)):
        nodes[line.made[0].name] = node
        return
    for at, value in enumerate(line.results):
        if value is not None:
            part = nodes[value.name] = graph.call_function(operator.getitem, (node, at))
            noted(part).value, noted(part).origin = noted(node).value[at], line.origin


def text_of(graph: fx.Graph) -> str:
    """Return the text of a graph's function. Results are named after their nodes where a pass left them no bindings."""
    end = graph.output_node()
    if len(noted(end).results) != len(outputs(graph)):
        noted(end).results = tuple(Binding("value", node.name) for node in outputs(graph))
    return reference_program(graph, None, (), 0, (), 1).main.text(Mesh(), "reference")


def typed_text(graph: fx.Graph, mesh: Mesh) -> str:
    """Return the text of a typed graph: global shapes, and conversions between types that are no lines yet."""

    def results(node: fx.Node) -> tuple[Value | None, ...]:
        return tuple(None if type_ is None else Value(node.name, type_) for type_ in noted(node).types)

    lines, parameters = list[Line](), list[Value]()
    for node in graph.nodes:
        if node.op == "placeholder":
            parameters += [Value(value.name, value.type, noted(node).binding) for value in results(node) if value]
        elif node.op == "call_function":
            args: Any = substitute_nodes((node.args, dict(node.kwargs)), lambda operand: Ref(operand.name))
            lines.append(Line(results(node), str(node.target), args[0], tuple(args[1].items()), noted(node).origin))
    returns = tuple((Binding("value", node.name), node.name) for node in outputs(graph))
    return Function("typed", tuple(parameters), tuple(lines), returns).text(mesh, "F")
