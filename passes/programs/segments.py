"""Segments: the typed graph cut at the beginnings and ends of the model's repeated blocks; equal ones are found by
structure."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import GradientFlow
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ..calls import substitute_nodes


def node_type(node: fx.Node) -> TensorType:
    """Return the type of a typed node with one tensor."""
    type_ = noted(node).types[0]
    assert type_ is not None
    return type_


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of nodes, with the values that it reads from before, and those that later nodes read of it. Equal
    signatures are equal work."""

    block: str | None
    stage: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    shared: frozenset[fx.Node]
    """The inputs that other segments read too: kept, they lie in memory once for all."""
    signature: str
    flow: GradientFlow
    """The flow of gradients in the graph that the segment is a run of."""


def cut_segments(graph: fx.Graph, mesh: Mesh) -> list[Segment]:
    """Return the graph as segments in order, each in one stage; every operator is in exactly one."""
    runs: list[tuple[tuple[str | None, int], list[fx.Node]]] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        place = noted(node).block, noted(node).stage
        if node.target is operator.getitem or (runs and runs[-1][0] == place):
            runs[-1][1].append(node)
        else:
            runs.append((place, [node]))
    final, flow = set(graph.output_node().all_input_nodes), GradientFlow()
    read = [_read_before(nodes) for _, nodes in runs]
    readers = Counter(node for inputs in read for node in inputs)
    shared = frozenset(node for node, count in readers.items() if count > 1)
    return [
        _segment(*place, nodes, inputs, shared, final, flow, mesh)
        for (place, nodes), inputs in zip(runs, read, strict=True)
    ]


def _read_before(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return the values that a run of nodes reads from before it, in order."""
    inside = set(nodes)
    return dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside)


def _segment(
    block: str | None, stage: int, nodes: Sequence[fx.Node], inputs: dict[fx.Node, None], shared: frozenset[fx.Node],
    final: set[fx.Node], flow: GradientFlow, mesh: Mesh,
) -> Segment:  # fmt: skip
    inside, shared = set(nodes), shared & inputs.keys()
    outputs = [
        node
        for node in nodes
        if len(noted(node).types) == 1
        and (node in final or any(user not in inside for user in node.users))
    ]  # fmt: skip
    signature = _signature(nodes, inputs, shared, outputs, flow, mesh)
    return Segment(block, stage, tuple(nodes), tuple(inputs), tuple(outputs), shared, signature, flow)


def _signature(nodes: Sequence[fx.Node], inputs: Collection[fx.Node], shared: Collection[fx.Node],
               outputs: Sequence[fx.Node], flow: GradientFlow, mesh: Mesh) -> str:  # fmt: skip
    names = {node: f"i{index}" for index, node in enumerate(inputs)}
    names.update((node, f"n{index}") for index, node in enumerate(nodes))
    rows = [f"{names[n]}:{typed_text(n, mesh)}:{n in flow}:{n in shared}" for n in inputs]
    for node in nodes:
        args = substitute_nodes((node.args, dict(node.kwargs)), names.__getitem__)
        line = noted(node).recompute
        again = f":{sorted(line.keep)}" if line is not None else ""
        rows.append(f"{names[node]}={node.target}{args}:{typed_text(node, mesh)}{again}{noted(node).again}")
    return "\n".join([*rows, ",".join(names[node] for node in outputs)])


def typed_text(node: fx.Node, mesh: Mesh) -> str:
    """Return the types of a node's results as text, with the difference between R and I."""
    return ";".join(f"{t.text(mesh)}{[axis for axis, kind in t.placement.items() if kind == 'R']}"
                    for t in noted(node).types if t is not None)  # fmt: skip
