"""The loss as a numerator and a count: what is summed over a step's whole batch, and what it is divided by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .calls import outputs

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SplitLoss:
    """``graph`` has the numerator as its first output. ``count`` is a graph of the inputs alone, or None: then
    ``summed`` tells whether microbatches are added up (a sum) or averaged (any other loss)."""

    graph: fx.Graph
    count: fx.Graph | None
    summed: bool


def split_loss(graph: fx.Graph) -> SplitLoss:
    """Take the division by the count of targets out of a mean cross entropy, so that it is made once a step, by the
    count over all data ranks and microbatches; a mean of means would weigh targets unequally."""
    output = graph.output_node()
    loss, *updates = outputs(graph)
    denominator = _denominator(loss)
    if denominator is None:
        return SplitLoss(graph, None, loss.target is aten.sum.default and _is_token_loss(loss))
    count = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in _ancestors(graph, denominator):
        made = mapping[node] = count.node_copy(node, mapping.__getitem__)
        made.meta = dict(node.meta)
    count.output((mapping[denominator],))
    output.args = ((loss.args[0], *updates),)
    graph.eliminate_dead_code()
    return SplitLoss(graph, count, False)


def _is_token_loss(total: fx.Node) -> bool:
    return isinstance(total.args[0], fx.Node) and total.args[0].target is torch.ops.parc.token_loss.default


def _denominator(loss: fx.Node) -> fx.Node | None:
    """The count that a mean cross entropy is divided by, where the loss is just that."""
    if loss.target is not aten.div.Tensor:
        return None
    total, count = loss.args
    if not isinstance(total, fx.Node) or not isinstance(count, fx.Node) or total.target is not aten.sum.default:
        return None
    inputs_only = all(
        node.meta["role"].startswith("input") for node in _ancestors(loss.graph, count) if node.op == "placeholder"
    )
    return count if _is_token_loss(total) and inputs_only else None


def _ancestors(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending.extend(current.all_input_nodes)
    return [candidate for candidate in graph.nodes if candidate in found]
