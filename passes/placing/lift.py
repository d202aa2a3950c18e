"""Lift: conversions of parameters leave the microbatch, so that their gradients are summed once a step."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.ops.own_ops import OPS
from ..programs.segments import node_type


def lift_parameters(graph: fx.Graph) -> None:
    """Let a parameter that every reader converts ``I→R`` enter the graph as ``R``. Its gradient stays partial over the
    microbatches, and REDUCE sums it once a step."""
    for node in graph.nodes:
        if node.op != "placeholder" or noted(node).binding.kind != "parameter" or not node.users:
            continue
        marks = [user for user in node.users if user.target is OPS.convert.default and user.args[2:4] == ("I", "R")]
        if len(marks) != len(node.users):
            continue
        common = set.intersection(*(set(mark.args[1].split(",")) for mark in marks))
        type_ = node_type(node)
        lifted = replace(type_, placement=type_.placement.replace(dict.fromkeys(common, "R")))
        noted(node).types = [lifted]
        for mark in marks:
            rest = [axis for axis in mark.args[1].split(",") if axis not in common]
            if rest:
                mark.args = (node, ",".join(rest), *mark.args[2:])
            else:
                mark.replace_all_uses_with(node)
                graph.erase_node(mark)
