"""The functions of segments, made once for equal work, also in later builds of one process: a search for a plan, or for
what to make again in backward, builds the same blocks many times."""

from __future__ import annotations

from collections.abc import Hashable

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.ops.rules import registered
from .emit import BlockPair, emit_pair
from .joint import trace_joint
from .segments import Segment

_MOST = 256
"""The number of pairs that are kept, the last ones that were asked for."""
_MADE: dict[Hashable, BlockPair] = {}


def pair_of(segment: Segment, name: str, mesh: Mesh, shared: str | None) -> BlockPair:
    """Return the functions ``name`` and ``name_backward`` of a segment. ``shared`` is the path of its block, if several
    blocks use them. They follow from its work, its place in the model's code and the names of what it reads."""
    origins = tuple(noted(node).origin for node in segment.nodes)
    read = tuple(noted(node).binding for node in segment.inputs)
    rules = tuple(registered().items())  # a person may give an operator its rule between two builds
    key = segment.signature, segment.block, origins, read, name, mesh, shared, rules
    pair = _MADE.pop(key, None) or emit_pair(trace_joint(segment, mesh), segment, name, mesh, shared)
    _MADE[key] = pair  # the last of a dict is the newest
    if len(_MADE) > _MOST:
        _MADE.pop(next(iter(_MADE)), None)
    return pair
