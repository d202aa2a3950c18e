"""Samples: the placed values of a graph at one choice of sizes, for the proof of shapes over ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx

from ..compiler.capture import Captured
from ..compiler.mesh import Mesh
from ..compiler.padding import Pads
from ..compiler.placement import Placement, Split
from ..compiler.program import Origin
from ..compiler.ranges import PlacedValue, Sample
from .calls import computes, tensors_of
from .canonicalize import canonicalize
from .loss import split_loss
from .pad import pad
from .propagate import Claim, Placed, propagate


def sample(
    captured: Captured,
    mesh: Mesh,
    claims: Sequence[tuple[str, str, Split | None, int]],
    sizes: Mapping[str, int],
    pads: Pads = MappingProxyType({}),
) -> Sample:
    """A model captured at ``sizes``, placed by ``claims`` and ``pads`` (as a ``Request`` has them)."""
    graph = split_loss(canonicalize(captured.graph)).graph
    pad(graph, pads)
    nodes = {node.meta["role"]: (node, 0) for node in graph.nodes if node.op == "placeholder"}
    placed = propagate(
        graph, mesh, [Claim(nodes[role], axis, split, line) for role, axis, split, line in claims if role in nodes]
    )
    return Sample(dict(sizes), placed_values(graph, mesh, placed))


def placed_values(graph: fx.Graph, mesh: Mesh, placed: Placed) -> tuple[PlacedValue, ...]:
    """Every tensor of a placed graph, in order."""
    found = []
    for node in graph.nodes:
        if node.op != "placeholder" and not computes(node):
            continue
        origin = node.meta.get("origin", Origin())
        name = node.meta["role"].split(" ", 1)[1] if node.op == "placeholder" else node.name
        for index, value in enumerate(tensors_of(node)):
            if isinstance(value, torch.Tensor):
                placement = Placement.of(mesh, dict(placed.splits[node, index]))
                op = node.op if node.op == "placeholder" else str(node.target)
                line = placed.lines.get(node, 0)
                found.append(PlacedValue(name, op, origin.module, line, tuple(value.shape), placement))
    return tuple(found)
