"""The loss as a numerator, which is summed over a step's whole batch, and the count that divides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.capture.reach import GradientFlow, reached_by_gradient
from ...compiler.ops.rules import facts
from ...compiler.ops.torch_ops import aten
from ..calls import ancestors, computes, key_of, outputs


@dataclass(frozen=True, slots=True)
class SplitLoss:
    """The loss in two parts: ``graph`` has the numerator as its first output; ``count`` is a graph of the inputs alone,
    or None."""

    graph: fx.Graph
    count: fx.Graph | None


def split_loss(graph: fx.Graph) -> SplitLoss:
    """Take the division by the count of targets out of a mean cross entropy, or a multiple of one. It is then done once
    a step, by the count over all data ranks and microbatches. A mean of means would weigh targets unequally."""
    output = graph.output_node()
    loss, *updates = outputs(graph)
    mean = _unscaled(loss)
    denominator = _denominator(mean)
    if denominator is None:
        return SplitLoss(graph, None)
    count = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    made_of = ancestors([denominator])
    for node in (node for node in graph.nodes if node in made_of):
        copy = mapping[node] = count.node_copy(node, mapping.__getitem__)
        copy_facts(node, copy)
    count.output((mapping[denominator],))
    numerator: Any = mean.args[0]
    if mean is loss:
        output.args = ((numerator, *updates),)
    else:  # what scales the mean scales its numerator
        mean.replace_all_uses_with(numerator)
    graph.eliminate_dead_code()
    return SplitLoss(graph, count)


def stop_gradients(graph: fx.Graph) -> None:
    """Detach, in place, values that are read for other ends than the loss, such as the update of a buffer. No gradient
    comes back from there, and every block before it would else compute zeros."""
    reached, flow = reached_by_gradient(outputs(graph)[0]), GradientFlow()
    flows = {node for node in graph.nodes if node in flow and (node.op == "placeholder" or key_of(node)[0] in reached)}
    for node in [node for node in graph.nodes if computes(node) and node not in reached]:
        for operand in node.all_input_nodes if not facts(node.target).stops_gradient else ():
            if operand not in flows:
                continue
            with graph.inserting_before(node):
                stopped = graph.call_function(aten.detach.default, (operand,))
            noted(stopped).value, noted(stopped).origin = noted(operand).value, noted(node).origin
            node.replace_input_with(operand, stopped)


def _unscaled(loss: fx.Node) -> fx.Node:
    """Return the node of which the loss is a constant multiple, where nothing else reads the nodes between."""
    while True:
        inner: Any = _scaled(loss)
        if inner is None or len(inner.users) > 1:
            return loss
        loss = inner


def _scaled(node: fx.Node) -> fx.Node | None:
    """Return the operand of which a node is a constant multiple, or a cast to a dtype that is not narrower."""
    inner: Any = node.args[0] if node.args else None
    if facts(node.target).computes in ("multiple", "ratio"):
        by = node.args[1]
        if isinstance(by, fx.Node) and not isinstance(inner, fx.Node):
            inner, by = by, inner
        return inner if isinstance(inner, fx.Node) and isinstance(by, (int, float)) else None
    if node.target is aten.neg.default:
        return inner  # type: ignore[no-any-return]
    if facts(node.target).casts and _width(inner) <= _width(node):
        return inner  # type: ignore[no-any-return]
    return None


def _width(node: fx.Node) -> int:
    dtype: torch.dtype = noted(node).value.dtype
    return dtype.itemsize


def _denominator(loss: fx.Node) -> fx.Node | None:
    """Return the count that divides the loss, if the loss is a mean cross entropy and nothing else."""
    if loss.target is not aten.div.Tensor:
        return None
    total, count = loss.args
    if not isinstance(total, fx.Node) or not isinstance(count, fx.Node) or total.target is not aten.sum.default:
        return None
    read = (noted(node).binding.kind for node in ancestors([count]) if node.op == "placeholder")
    inputs_only = all(kind == "input" for kind in read)
    losses: Any = total.args[0]
    return count if noted(losses).token_losses and inputs_only else None
