"""Slices that together are all of a dim, written as one split, which says how the dim may be placed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import fx

from ...compiler.capture.node_facts import copy_facts
from ...compiler.ops.own_ops import aten
from .decompose import shape_of
from .rewriter import Canonicalizer


def join_slices(c: Canonicalizer, node: fx.Node, order: Mapping[fx.Node, int]) -> None:
    """Replace slices that make up a dim by one split: only together do they say how the dim may be placed."""
    slices: list[Any] = [user for user in node.users if user.target is aten.slice.Tensor and user.args[4] == 1]
    for dim in sorted({cut.args[1] for cut in slices}):
        cuts = sorted((cut for cut in slices if cut.args[1] == dim), key=lambda cut: cut.args[2])
        ends = [0, *(cut.args[3] for cut in cuts)]
        sizes = [after - before for before, after in pairwise(ends)]
        tiled = [cut.args[2] for cut in cuts] == ends[:-1] and ends[-1] == shape_of(node)[dim]
        if not tiled or len(cuts) < 2:
            continue
        split = c.emit(min(cuts, key=order.__getitem__), aten.split_with_sizes.default, node, sizes, dim)
        for index, cut in enumerate(cuts):
            with c.graph.inserting_after(split):
                part = c.graph.call_function(operator.getitem, (split, index))
            copy_facts(cut, part)
            c.replace(cut, part)
