"""Nodes: machines of equally many ranks, and the part of each axis that lies inside one."""

from __future__ import annotations

from .mesh import Mesh


class UnevenNodes(ValueError):
    """The error of nodes that do not fit a mesh: they do not divide its ranks, or cut an axis unevenly."""


def node_levels(mesh: Mesh, ranks: int) -> dict[str, tuple[int, int]]:
    """Return how many parts of each axis lie across nodes of so many ranks, and how many ranks of it share a node.
    Ranks that are fewer than a node's share one.

    >>> node_levels(Mesh.parse("dp=8, tp=2"), 4)
    {'dp': (4, 2), 'tp': (1, 2)}

    Raises:
        UnevenNodes: the nodes do not fit the mesh.
    """
    if mesh.world <= ranks:
        return {axis: (1, size) for axis, size in mesh.axes}
    if mesh.world % ranks:
        raise UnevenNodes(f"nodes of {ranks} ranks do not divide the {mesh.world} ranks of the mesh")
    levels: dict[str, tuple[int, int]] = {}
    room = ranks
    for axis, size in reversed(mesh.axes):
        within = min(size, room)
        if size % within or room % within:
            raise UnevenNodes(f"nodes of {ranks} ranks cut `{axis}={size}` unevenly")
        levels[axis] = size // within, within
        room //= within
    return {axis: levels[axis] for axis in mesh.names}
