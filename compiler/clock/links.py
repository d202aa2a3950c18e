"""Messages on links: the time of a collective among ranks of a cluster.

The time is `start + steps * hop + bytes / rate` (alpha-beta), of the library's algorithms the least. All groups of an
axis talk at once, so the devices of a node share its way to the network: a rank counts with its own part of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..analysis.across_nodes import ALGORITHMS, EACH_TO_EACH, TREES, NodeSpread, nic_bytes, offsets_of, place_of
from ..layout.collectives import COLLECTIVES
from ..layout.mesh import Mesh
from .cluster import Cluster

_OF_SHARE = {"all_gather": "all_gather", "all_gather_int8": "all_gather", "reduce_scatter": "reduce_scatter"}
_NVLS_RANKS, _NVLS_BYTES = 5, 1 << 21
"""The fewest ranks, and bytes, with which NCCL lets the switches of a node add (NCCL 2.18's release notes)."""


@dataclass
class Links:
    """The links between the ranks of a mesh on a cluster. ``order`` is that of the mesh's axes on the ranks, the last
    one innermost; ``node`` the ranks of a node."""

    mesh: Mesh
    cluster: Cluster
    node: int
    order: Sequence[str] = ()
    _places: dict[tuple[str, ...], NodeSpread] = field(default_factory=dict, init=False)

    @property
    def groups(self) -> int:
        """The number of groups of several ranks that messages were priced for."""
        return sum(place.ranks > 1 for place in self._places.values())

    def place(self, axes: Sequence[str]) -> NodeSpread:
        """Return where the group of the first rank over some axes lies."""
        key = tuple(axes)
        if key not in self._places:
            self._places[key] = place_of(self.mesh, key, self.node, self.order)
        return self._places[key]

    def seconds(self, op: str, axes: Sequence[str], size: int, members: int = 0) -> float:
        """Return the time of a collective into which a rank puts ``size`` bytes; ``members`` are the ranks that take
        part, where that is not the whole group."""
        place = self.place(axes).of(members) if members else self.place(axes)
        if place.ranks == 1:
            return 0.0
        wire = COLLECTIVES[f"parc.{op}"].sent(size, place.ranks)
        across = nic_bytes(op, size, place)
        if ALGORITHMS[op] is EACH_TO_EACH:
            return self._exchange(place, wire, across)
        if ALGORITHMS[op] is not TREES:
            return self._ring(place, wire, _OF_SHARE[op], place.ranks - 1, place.nodes)
        ring = self._ring(place, wire, "all_reduce", 2 * (place.ranks - 1), 2 * place.nodes)
        sums = {"ring": ring, "tree": self._tree(place, wire, across), "nvls": self._by_switches(place, wire)}
        return min(sums[algorithm] for algorithm in self.cluster.algorithms)

    def hop(self, axis: str, size: float) -> float:
        """Return the time of one step of a ring of sends along an axis: that of its slowest pair of ranks."""
        return self.send(size, inside=self.place((axis,)).nodes == 1)

    def to_stage(self, axis: str, coordinate: int, other: int, size: float) -> float:
        """Return the time of a send between ranks of two coordinates of an axis."""
        offsets = offsets_of(self.mesh, (axis,), self.order)
        return self.send(size, offsets[coordinate] // self.node == offsets[other] // self.node)

    def send(self, size: float, inside: bool) -> float:
        """Return the time of a message from one rank to another, inside a node or across nodes."""
        link = self.cluster.node if inside else self.cluster.network
        return link.start + link.hop + size / (link.bandwidth * link.send)

    def _travel(self, place: NodeSpread, share: str, wire: float, across: float) -> float:
        """Return the time of bytes on the links: those of each rank inside a node beside those of each NIC."""
        node, network = self.cluster.node, self.cluster.network
        inside = wire / (node.bandwidth * getattr(node, share)) if place.inside > 1 else 0.0
        return max(inside, across / (network.bandwidth * getattr(network, share)) if place.nodes > 1 else 0.0)

    def _ring(self, place: NodeSpread, wire: float, share: str, steps: int, crossings: int) -> float:
        """Return the time of rings, one for each NIC, which share what a rank sends."""
        node, network = self.cluster.node, self.cluster.network
        across = 0 if place.nodes == 1 else min(steps, crossings)
        start = node.start if place.nodes == 1 else network.start
        hops = (steps - across) * node.hop + across * network.hop
        return start + hops + self._travel(place, share, wire, wire / place.inside)

    def _tree(self, place: NodeSpread, wire: float, across: float) -> float:
        """Return the time of an all-reduce by trees over nodes."""
        if place.nodes == 1:
            return math.inf
        node, network = self.cluster.node, self.cluster.network
        hops = 2 * ((place.inside - 1) * node.hop + math.log2(place.nodes) * network.hop)
        return network.start + hops + self._travel(place, "all_reduce", wire, across)

    def _by_switches(self, place: NodeSpread, wire: float) -> float:
        """Return the time of an all-reduce that the switches of a node add up."""
        if place.nodes > 1 or place.ranks < _NVLS_RANKS or wire < _NVLS_BYTES:
            return math.inf
        node = self.cluster.node
        return node.start + 2 * node.hop + wire / (node.bandwidth * self.cluster.nvls)

    def _exchange(self, place: NodeSpread, wire: float, across: float) -> float:
        """Return the time of an all-to-all: each rank sends its parts to others by its own NIC, or inside the node."""
        node, network = self.cluster.node, self.cluster.network
        travel = self._travel(place, "all_to_all", wire * (place.inside - 1) / (place.ranks - 1), across)
        if place.nodes == 1:
            return node.start + (place.ranks - 1) * node.hop + travel
        return network.start + (place.nodes - 1) * network.hop + travel
