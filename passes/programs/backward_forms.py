"""The forms of a backward from autograd, rewritten in the operators that types and programs know. Nothing is in place,
and creation operators read no tensor, each placed as its one reader needs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...compiler.capture.functional import returning_form
from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.layout.collectives import TypeFault
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.rules import facts, rule_for
from ..calls import call_of, operands_of


def write_functional(graph: fx.Graph) -> None:
    """Replace operators that write a temporary of autograd's own by those that return it. Tracing already lets later
    readers read the result."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and schema.name.endswith("_"):
            form = returning_form(node.target)
            if form is None:
                raise TypeFault(f"{node.target} has no form that returns its result")
            node.target = form
        if node.target is aten.convolution_backward.default and not node.args[10][2]:
            node.update_arg(3, None)  # the bias's sizes, which another dim's may equal by chance


def fold_zeros(backward: Sequence[fx.Node]) -> set[fx.Node]:
    """Write zeros for all that backward computes linearly from zeros and from no other floating number. Such is the
    gradient that ``floor`` or ``sgn`` sends back, also after it is summed to the shape of a smaller operand, or to rows
    of a table. Return all zeros of the backward."""
    zeros: set[fx.Node] = set()
    for node in backward:
        operands = [operand for operand in operands_of(node) if not _is_of_whole_numbers(operand)]
        if operands and zeros.issuperset(operands) and isinstance(noted(node).value, torch.Tensor):
            rule = rule_for(call_of(node))
            if node.target is OPS.convert.default or (rule is not None and rule.linear):
                node.target, node.args, node.kwargs = aten.zeros.default, (list(noted(node).value.shape),), {}
        if facts(node.target).makes_zeros(node.args):
            zeros.add(node)
    return zeros


def _is_of_whole_numbers(node: fx.Node) -> bool:
    value = noted(node).value
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def free_creations(graph: fx.Graph, known: Mapping[fx.Node, Any], owner: dict[fx.Node, Any],
                   zeros: Collection[fx.Node] = ()) -> set[fx.Node]:  # fmt: skip
    """Write creation nodes without a placement, and ``zeros``, which fit any, as ``full``, one for each reader."""
    free: set[fx.Node] = set()
    for node in list(graph.nodes):
        row = facts(node.target)
        if not row.creates or (node in known and node not in zeros):
            continue
        value = noted(node).value
        fill = row.number_in(node.args)
        node.target, node.args, node.kwargs = aten.full.default, (list(value.shape), fill), {"dtype": value.dtype}
        free.add(node)
        for reader in list(node.users)[1:]:
            with graph.inserting_before(node):
                copy = graph.node_copy(node)
            copy_facts(node, copy)
            if node in owner:
                owner[copy] = owner[node]
            reader.replace_input_with(node, copy)
            free.add(copy)
    return free


def simplify(graph: fx.Graph) -> None:
    """Leave out operators of autograd that change nothing. It is done once types are known, and only where they
    agree."""
    for node in list(graph.nodes):
        same = _left_as_it_is(node)
        if same is not None and noted(same).types == noted(node).types:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _left_as_it_is(node: Any) -> fx.Node | None:
    """Return the operand that a node gives back unchanged: a matrix transposed twice, or a first power."""
    if node.target is aten.t.default:
        return node.args[0].args[0] if node.args[0].target is aten.t.default else None
    return node.args[0] if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1 else None


def is_zero(node: fx.Node) -> bool:
    """Return whether a creation node makes zeros, which change no sum."""
    return bool(node.args[1] == 0)
