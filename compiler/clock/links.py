"""Messages on links: where the ranks of a group lie, and the time of a collective among them.

The time is `start + steps * hop + bytes / rate` (alpha-beta), of the library's algorithms the least. All groups of an
axis talk at once, so the devices of a node share its way to the network: a rank counts with its own part of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from ..layout.mesh import Mesh
from .cluster import Cluster, Link

_ALL_REDUCES = ("all_reduce", "all_reduce_among", "row_max")
_OF_SHARE = {
    "all_reduce": "all_reduce", "all_reduce_among": "all_reduce", "row_max": "all_reduce", "all_gather": "all_gather",
    "all_gather_int8": "all_gather", "reduce_scatter": "reduce_scatter", "reduce_scatter_int8": "reduce_scatter",
}  # fmt: skip
_NVLS_RANKS, _NVLS_BYTES = 5, 1 << 21
"""The fewest ranks, and bytes, with which NCCL lets the switches of a node add (NCCL 2.18's release notes)."""


@dataclass(frozen=True, slots=True)
class RankPlace:
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


@dataclass
class Links:
    """The links between the ranks of a mesh on a cluster. ``order`` is that of the mesh's axes on the ranks, the last
    one innermost; ``node`` the ranks of a node."""

    mesh: Mesh
    cluster: Cluster
    node: int
    order: Sequence[str] = ()
    _places: dict[tuple[str, ...], RankPlace] = field(default_factory=dict, init=False)

    @property
    def groups(self) -> int:
        """The number of groups of several ranks that messages were priced for."""
        return sum(place.ranks > 1 for place in self._places.values())

    def place(self, axes: Sequence[str]) -> RankPlace:
        """Return where the group of the first rank over some axes lies."""
        key = tuple(axes)
        if key not in self._places:
            strides, stride = dict[str, int](), 1
            for axis in reversed(self.order or self.mesh.names):
                strides[axis] = stride
                stride *= self.mesh.size(axis)
            parts = self.mesh.spread(axes)
            ranks = math.prod(map(self.mesh.size, parts))
            if all(strides[part] >= self.node for part in parts):
                nodes, most = ranks, 1
            else:
                at = product(*(range(0, self.mesh.size(part) * strides[part], strides[part]) for part in parts))
                counts: dict[int, int] = {}
                for offsets in at:
                    counts[sum(offsets) // self.node] = counts.get(sum(offsets) // self.node, 0) + 1
                nodes, most = len(counts), max(counts.values())
            self._places[key] = RankPlace(ranks, nodes, most)
        return self._places[key]

    def neighbours(self, axis: str) -> RankPlace:
        """Return where two neighbours along an axis lie, of which most pairs are alike."""
        place = self.place((axis,))
        return RankPlace(2, 1, 2) if place.inside > 1 else RankPlace(2, 2, 1)

    def seconds(self, op: str, axes: Sequence[str], wire_bytes: float, members: int = 0) -> float:
        """Return the time of a collective in which a rank sends ``wire_bytes``; ``members`` are the ranks that take
        part, where that is not the whole group."""
        place = self.place(axes)
        if op == "send":
            return self.send(wire_bytes, self.neighbours(axes[0]))
        if op.startswith("ring_"):
            hops = max(1, place.ranks - 1)
            return hops * self.send(wire_bytes / hops, self.neighbours(axes[0]))
        if members and members != place.ranks:
            place = RankPlace(members, min(members, place.nodes), max(1, place.inside * members // place.ranks))
        if place.ranks == 1:
            return 0.0
        if op in _ALL_REDUCES:
            return min(self._sum(place, wire_bytes, algorithm) for algorithm in self.cluster.algorithms)
        if op in _OF_SHARE:
            return self._ring(place, wire_bytes, _OF_SHARE[op], place.ranks - 1, place.nodes)
        return self._exchange(place, wire_bytes)

    def send(self, size: float, place: RankPlace) -> float:
        """Return the time of a message from one rank to another."""
        link = self.cluster.node if place.nodes == 1 else self.cluster.network
        return link.start + link.hop + size / (link.bandwidth * link.send)

    def _rate(self, place: RankPlace, share: str) -> float:
        """Return the bytes a second at which each rank of a ring sends. A ring enters a node once, by all of the NICs
        of its ranks."""
        node, network = self.cluster.node, self.cluster.network
        rates = [network.bandwidth * getattr(network, share) * place.inside] if place.nodes > 1 else []
        if place.inside > 1:
            rates.append(node.bandwidth * getattr(node, share))
        return float(min(rates))

    def _ring(self, place: RankPlace, size: float, share: str, steps: int, crossings: int) -> float:
        node, network = self.cluster.node, self.cluster.network
        across = 0 if place.nodes == 1 else min(steps, crossings)
        start = node.start if place.nodes == 1 else network.start
        hops = (steps - across) * node.hop + across * network.hop
        return start + hops + size / self._rate(place, share)

    def _sum(self, place: RankPlace, size: float, algorithm: str) -> float:
        """Return the time of an all-reduce by one algorithm."""
        node, network = self.cluster.node, self.cluster.network
        if algorithm == "ring":
            return self._ring(place, size, "all_reduce", 2 * (place.ranks - 1), 2 * place.nodes)
        if algorithm == "tree":
            if place.nodes == 1:
                return math.inf
            hops = 2 * ((place.inside - 1) * node.hop + math.log2(place.nodes) * network.hop)
            return network.start + hops + size / self._rate(place, "all_reduce")
        if place.nodes > 1 or place.ranks < _NVLS_RANKS or size < _NVLS_BYTES:
            return math.inf
        return node.start + 2 * node.hop + size / (node.bandwidth * self.cluster.nvls)

    def _exchange(self, place: RankPlace, size: float) -> float:
        """Return the time of an all-to-all: each rank sends its parts to others by its own NIC, or inside the node."""
        node, network = self.cluster.node, self.cluster.network
        others = place.ranks - 1
        inside = size * (place.inside - 1) / others / (node.bandwidth * node.all_to_all)
        if place.nodes == 1:
            return node.start + others * node.hop + inside
        across = size * (place.ranks - place.inside) / others / (network.bandwidth * network.all_to_all)
        return network.start + (place.nodes - 1) * network.hop + max(inside, across)


def link_of(cluster: Cluster, place: RankPlace) -> Link:
    """Return the level of links that a group talks over."""
    return cluster.node if place.nodes == 1 else cluster.network
