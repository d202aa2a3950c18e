"""Bytes across nodes: where the ranks of a group lie, and what the NIC of a rank sends for a collective, by the
algorithms of the library that runs it.

A flat ring would be the wrong picture of a library on several nodes: NCCL builds one ring, or one tree, for each NIC of
a node, and each carries its share of the bytes. So of a group with ``inside`` ranks in each node, all of their NICs
share what enters and leaves the node. A rank has one NIC, or its equal part of the node's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class NodeSpread:
    """The place of a group of ranks: their number, the number of nodes, and the most that share one."""

    ranks: int
    nodes: int
    inside: int

    @property
    def words(self) -> str:
        """The place in words."""
        if self.nodes == 1:
            return "inside a node"
        return "across nodes" if self.inside == 1 else f"across {self.nodes} nodes, {self.inside} ranks in each"

    def of(self, members: int) -> NodeSpread:
        """Return the place of some members of the group, spread over its nodes."""
        if members == self.ranks:
            return self
        return NodeSpread(members, min(members, self.nodes), max(1, self.inside * members // self.ranks))


def _strides(mesh: Mesh, order: Sequence[str]) -> dict[str, int]:
    """Return by how many ranks neighbours along each axis are apart."""
    strides, stride = dict[str, int](), 1
    for axis in reversed(order or mesh.names):
        strides[axis], stride = stride, stride * mesh.size(axis)
    return strides


def offsets_of(mesh: Mesh, axes: Iterable[str], order: Sequence[str] = ()) -> list[int]:
    """Return the ranks of the group of rank 0 over some axes, in their order. ``order`` is that of all axes on ranks,
    the innermost last; that of the mesh if it is left out.

    >>> offsets_of(Mesh.parse("pp=2, dp=2, tp=2"), ["pp", "tp"])
    [0, 1, 4, 5]
    """
    strides = _strides(mesh, order)
    offsets = np.zeros(1, np.int64)
    for part in mesh.spread(axes):
        offsets = np.add.outer(offsets, strides[part] * np.arange(mesh.size(part))).reshape(-1)
    return offsets.tolist()


def place_of(mesh: Mesh, axes: Iterable[str], node: int, order: Sequence[str] = ()) -> NodeSpread:
    """Return the place of a group over some axes, with ``node`` ranks in a node.

    >>> place_of(Mesh.parse("pp=2, dp=4, tp=2"), ["dp"], 4), place_of(Mesh.parse("dp=4, tp=2"), ["tp"], 4)
    (NodeSpread(ranks=4, nodes=2, inside=2), NodeSpread(ranks=2, nodes=1, inside=2))
    """
    strides, parts = _strides(mesh, order), mesh.spread(axes)
    ranks = math.prod(mesh.size(part) for part in parts)
    spans = [(strides[part], strides[part] * mesh.size(part)) for part in parts]
    if all(
        node % end == 0 or (end % node == 0 and (node % stride == 0 or stride % node == 0)) for stride, end in spans
    ):
        inside = math.prod(min(end, max(stride, node)) // stride for stride, end in spans)  # no axis is cut unevenly
        return NodeSpread(ranks, ranks // inside, inside)
    _, members = np.unique(np.array(offsets_of(mesh, axes, order)) // node, return_counts=True)
    return NodeSpread(ranks, len(members), int(members.max()))


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The way of a library to make a collective across nodes. ``sent`` returns the bytes that the busiest NIC of a
    group sends, for the bytes that a rank puts in and the group's place in several nodes."""

    words: str
    sent: Callable[[int, NodeSpread], int]
    source: str


TREES = Algorithm(
    "trees over nodes",
    lambda size, at: 2 * size * (at.nodes - 1) // at.ranks,
    "NCCL 2.4 and later: double binary trees over nodes, chains or the switch inside; each byte goes up and down once",
)
_GATHER = Algorithm(
    "rings",
    lambda size, at: size * (at.ranks - 1) // at.inside,
    "NCCL, AllGather: a ring for each NIC, which enters and leaves each node once; of n parts all but one pass",
)
_SCATTER = Algorithm(
    "rings",
    lambda size, at: size * (at.ranks - 1) // at.ranks // at.inside,
    "NCCL, ReduceScatter: a ring for each NIC, which enters and leaves each node once; of n parts all but one pass",
)
EACH_TO_EACH = Algorithm(
    "each to each",
    lambda size, at: size * (at.ranks - at.inside) // at.ranks,
    "torch's all_to_all_single: a send of NCCL to each other rank, those of other nodes by the rank's own NIC",
)
_HOPS = Algorithm(
    "hops to the next rank",
    lambda size, at: size * (at.ranks - 1),
    "parc's ring attention: sends to the next rank of the axis; the last one in a node sends all of them to another",
)
_SEND = Algorithm("one send", lambda size, at: size, "a send of NCCL to the stage beside, by the rank's own NIC")

ALGORITHMS: Mapping[str, Algorithm] = {
    "all_reduce": TREES, "all_reduce_among": TREES, "row_max": TREES,
    "all_gather": _GATHER, "all_gather_int8": _GATHER, "reduce_scatter": _SCATTER,
    "all_to_all": EACH_TO_EACH, "exchange": EACH_TO_EACH, "reduce_scatter_int8": EACH_TO_EACH,
    "ring_attention": _HOPS, "ring_attention_backward": _HOPS, "send": _SEND,
}  # fmt: skip
"""The algorithm across nodes of each collective of a report. Inside a node a rank sends its ``wire_bytes``, in rings
or through the switch, and no NIC."""


def nic_bytes(op: str, size: int, place: NodeSpread) -> int:
    """Return the bytes that the busiest NIC of a group sends for a collective into which each rank puts ``size`` bytes;
    0 where the group lies in one node."""
    return 0 if place.nodes == 1 else ALGORITHMS[op].sent(size, place)


def row_place(row: Mapping[str, Any], place: NodeSpread) -> NodeSpread:
    """Return the place of the ranks that run a row of the report's communication, in a group at ``place``."""
    return place if row["op"] == "send" else place.of(row["ranks"])


def sent_across(
    rows: Iterable[Mapping[str, Any]], mesh: Mesh, node: int, order: Sequence[str] = ()
) -> dict[tuple[str, str, bool], int]:
    """Return the bytes that the NIC of a rank sends in a step, by role, by axis and by whether work hides them; of axes
    that lie in one node none."""
    places = dict[str, NodeSpread]()
    sent = dict[tuple[str, str, bool], int]()
    for row in rows:
        axis = row["axis"]
        if axis not in places:
            places[axis] = place_of(mesh, axis.split(","), node, order)
        if size := row["count_per_step"] * nic_bytes(row["op"], row["bytes"], row_place(row, places[axis])):
            key = row["role"], axis, row["hidden"]
            sent[key] = sent.get(key, 0) + size
    return sent


def across_rows(rows: Iterable[Mapping[str, Any]], mesh: Mesh, node: int) -> list[dict[str, Any]]:
    """Return, for each axis that crosses nodes, the place of its groups, the bytes that a NIC sends in a step and how
    many of these work hides; of several roles that of the role that sends most."""
    rows = [*rows]
    of_axes = dict[str, dict[str, list[int]]]()
    for (role, axis, hidden), size in sent_across(rows, mesh, node).items():
        sums = of_axes.setdefault(axis, {}).setdefault(role, [0, 0])
        sums[0] += size
        sums[1] += size if hidden else 0
    result = []
    for axis, roles in of_axes.items():
        place, (most, beside) = place_of(mesh, axis.split(","), node), max(roles.values())
        ways = dict.fromkeys(ALGORITHMS[row["op"]].words for row in rows if row["axis"] == axis)
        result.append({"axis": axis, "ranks": place.ranks, "nodes": place.nodes, "bytes": most, "hidden_bytes": beside,
                       "algorithms": list(ways)})  # fmt: skip
    return sorted(result, key=lambda row: -row["bytes"])
