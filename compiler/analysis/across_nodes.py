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

from ..layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class NodeSpread:
    """The place of a group of ranks: their number, and how many of them share each of its nodes."""

    ranks: int
    inside: int

    @property
    def nodes(self) -> int:
        """The number of nodes with ranks of the group."""
        return self.ranks // self.inside

    def of(self, members: int) -> NodeSpread:
        """Return the place of some members of the group, spread over its nodes."""
        return self if members == self.ranks else NodeSpread(members, max(1, self.inside * members // self.ranks))


def place_of(mesh: Mesh, axes: Iterable[str], node: int, order: Sequence[str] = ()) -> NodeSpread:
    """Return the place of a group over some axes, with ``node`` ranks in a node. ``order`` is that of all axes, the
    innermost last; that of the mesh if it is left out.

    >>> place_of(Mesh.parse("pp=2, dp=4, tp=2"), ["dp"], 4), place_of(Mesh.parse("dp=4, tp=2"), ["tp"], 4)
    (NodeSpread(ranks=4, inside=2), NodeSpread(ranks=2, inside=2))
    """
    strides, stride = dict[str, int](), 1
    for axis in reversed(order or mesh.names):
        strides[axis], stride = stride, stride * mesh.size(axis)
    sizes = {axis: mesh.size(axis) for axis in mesh.spread(axes)}
    inside = math.prod(min(size, max(1, node // strides[axis])) for axis, size in sizes.items())
    return NodeSpread(math.prod(sizes.values()), inside)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The way of a library to make a collective across nodes. ``sent`` returns the bytes that the busiest NIC of a
    group sends, for the bytes that a rank puts in and the group's place in several nodes."""

    words: str
    sent: Callable[[int, NodeSpread], int]
    source: str


_TREE = Algorithm(
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
_PAIRS = Algorithm(
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
    "all_reduce": _TREE, "all_reduce_among": _TREE, "row_max": _TREE, "all_gather": _GATHER, "reduce_scatter": _SCATTER,
    "all_to_all": _PAIRS, "exchange": _PAIRS, "reduce_scatter_int8": _PAIRS, "all_gather_int8": _GATHER,
    "ring_attention": _HOPS, "ring_attention_backward": _HOPS, "send": _SEND,
}  # fmt: skip
"""The algorithm across nodes of each collective of a report. Inside a node a rank sends its ``wire_bytes``, in rings
or through the switch, and no NIC."""


def nic_bytes(row: Mapping[str, Any], place: NodeSpread) -> int:
    """Return the bytes that the busiest NIC of a group sends for a row of the report's communication, once; 0 where the
    group lies in one node."""
    place = place.of(row["ranks"]) if row["op"] != "send" else place
    return 0 if place.nodes == 1 else ALGORITHMS[row["op"]].sent(row["bytes"], place)


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
        if size := row["count_per_step"] * nic_bytes(row, places[axis]):
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
