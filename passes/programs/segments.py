"""Segments: the typed graph cut where the model's repeated blocks begin and end, equal ones found by structure."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ..calls import substitute_nodes

_BLOCK = re.compile(r"((?:[^.]+\.)*?\d+)(?:\.|$)")


def block_of(module: str) -> str | None:
    """The outermost numbered module on a path: ``layers.3`` of ``layers.3.mlp.up``."""
    match = _BLOCK.match(module)
    return match[1] if match else None


def node_type(node: fx.Node) -> TensorType:
    """Type of a typed node with one tensor."""
    return node.meta["types"][0]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of nodes, what they read from before, and what later nodes read of them. Equal signatures are equal
    work."""

    block: str | None
    stage: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    signature: str


def cut_segments(graph: fx.Graph, mesh: Mesh) -> list[Segment]:
    """The graph as segments in order, each in one stage; every operator is in exactly one."""
    runs: list[tuple[tuple[str | None, int], list[fx.Node]]] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        place = node.meta["block"], node.meta.get("stage", 0)
        if node.target is operator.getitem or (runs and runs[-1][0] == place):
            runs[-1][1].append(node)
        else:
            runs.append((place, [node]))
    final = set(graph.output_node().all_input_nodes)
    return [_segment(*place, nodes, final, mesh) for place, nodes in runs]


def _segment(block: str | None, stage: int, nodes: Sequence[fx.Node], final: set[fx.Node], mesh: Mesh) -> Segment:
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand not in inside:
                inputs[operand] = None
    outputs = [
        node
        for node in nodes
        if isinstance(node.meta["types"], list) and len(node.meta["types"]) == 1
        and (node in final or any(user not in inside for user in node.users))
    ]  # fmt: skip
    return Segment(block, stage, tuple(nodes), tuple(inputs), tuple(outputs), _signature(nodes, inputs, outputs, mesh))


def _signature(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node] | dict[fx.Node, None],
               outputs: Sequence[fx.Node], mesh: Mesh) -> str:  # fmt: skip
    names = {node: f"i{index}" for index, node in enumerate(inputs)}
    names.update((node, f"n{index}") for index, node in enumerate(nodes))
    rows = [f"{names[n]}:{typed_text(n, mesh)}:{gradient_flows(n)}" for n in inputs]
    for node in nodes:
        args = substitute_nodes((node.args, dict(node.kwargs)), names.__getitem__)
        rows.append(f"{names[node]}={node.target}{args}:{typed_text(node, mesh)}")
    return "\n".join([*rows, ",".join(names[node] for node in outputs)])


def typed_text(node: fx.Node, mesh: Mesh) -> str:
    """Types of a node's results with the difference between R and I."""
    return ";".join(f"{t.text(mesh)}{[axis for axis, kind in t.placement.items() if kind == 'R']}"
                    for t in node.meta["types"])  # fmt: skip


def gradient_flows(node: fx.Node) -> bool:
    """Whether a gradient flows into the node's value."""
    cached = node.meta.get("flows")
    if cached is None:
        if node.op == "placeholder":
            cached = node.meta["binding"].kind == "parameter"
        else:
            stops = node.target in (torch.ops.aten.detach.default, torch.ops.parc.row_max.default)
            cached = not stops and any(gradient_flows(operand) for operand in node.all_input_nodes)
        cached = cached and any(t.dtype.is_floating_point for t in node.meta["types"])
        node.meta["flows"] = cached
    return bool(cached)
