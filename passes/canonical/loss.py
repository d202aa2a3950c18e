"""The loss as a numerator, which is summed over a step's whole batch, and the count that divides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...compiler.capture.experts.forms import routed_layers
from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.capture.reach import GradientFlow, ancestors, reached_by_gradient
from ...compiler.ops.own_ops import aten
from ...compiler.ops.rules import facts
from ...compiler.program.binding import COUNT, LOSS, Binding, Kind
from ...compiler.program.step_values import TAKEN, term_count, term_weight
from ..calls import computes, key_of, outputs

Denominators = tuple[fx.Graph | None, tuple[Binding, ...]]
"""A graph of the inputs alone that makes the denominators of a loss, and their bindings; no graph where no term has
one."""


def split_loss(graph: fx.Graph, terms: int, is_one_fraction: Callable[[fx.Graph, bool], bool]) -> Denominators:
    """Take the division by a count, in place, out of a mean cross entropy, out of a sum over samples that is divided by
    a sum over inputs, and out of a multiple of these. It is then done once a step, by the count over all data ranks and
    microbatches. A mean of means would weigh targets unequally. The first output becomes the loss's numerator; return
    what makes the denominators.

    ``is_one_fraction`` tells of the graph of a numerator and a denominator whether they add up over microbatches. If it
    is given True too, the numerator is a sum of token losses, and the graph makes the denominator alone.

    A loss that is the sum of several ``terms`` is divided by the count of its first counted term. Every other term is
    multiplied by an input of its own, which SCALE makes, so that the same division leaves the right mean.
    """
    if not terms:
        return None, ()
    output = graph.output_node()
    loss, *updates = outputs(graph)
    roots = _terms(loss, terms)
    chains = [_scalings(root) for root in roots]
    found = {number: _denominator(chain[-1], is_one_fraction) for number, chain in enumerate(chains, 1)}
    denominators = {number: node for number, node in found.items() if node is not None}
    if not denominators:
        return None, ()
    base = min(denominators)
    for number in denominators:
        roots[number - 1] = _numerator(graph, chains[number - 1])
    output.args = ((_sum_of(graph, loss, roots, base), *updates),)
    count = _graph_of(list(denominators.values()))
    graph.eliminate_dead_code()
    return count, tuple(COUNT if number == base else term_count(number) for number in denominators)


def _terms(loss: fx.Node, count: int) -> list[fx.Node]:
    """Return the operands of the additions that end in the loss."""
    if count == 1:
        return [loss]
    assert loss.target is aten.add.Tensor, loss
    first, last = loss.args
    assert isinstance(first, fx.Node) and isinstance(last, fx.Node)
    return [*_terms(first, count - 1), last]


def _sum_of(graph: fx.Graph, loss: fx.Node, roots: list[fx.Node], base: int) -> fx.Node:
    """Add up the terms; all but the ``base`` are multiplied by their weights."""
    total: fx.Node | None = None
    first = next(iter(graph.nodes))
    for number, root in enumerate(roots, 1):
        if number != base:
            with graph.inserting_before(first):
                weight = graph.placeholder(f"term_{number}")
            noted(weight).value, noted(weight).binding = noted(loss).value, term_weight(number)
            root = _emitted(graph, loss, aten.mul.Tensor, root, weight)
        total = root if total is None else _emitted(graph, loss, aten.add.Tensor, total, root)
    assert total is not None
    return total


def _emitted(graph: fx.Graph, near: fx.Node, target: Any, *args: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(target, args)
    copy_facts(near, node)
    return node


def _graph_of(results: list[fx.Node]) -> fx.Graph:
    """Return a graph that makes these nodes of the inputs."""
    made, mapping, made_of = fx.Graph(), dict[fx.Node, fx.Node](), ancestors(results)
    for node in results[0].graph.nodes:
        if node in made_of:
            copy = mapping[node] = made.node_copy(node, mapping.__getitem__)
            copy_facts(node, copy)
    made.output(tuple(mapping[node] for node in results))
    return made


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


def _scalings(loss: fx.Node) -> list[fx.Node]:
    """Return a loss and the nodes of which it is a constant multiple, one after the other."""
    chain = [loss]
    while (inner := _scaled(chain[-1])) is not None:
        chain.append(inner)
    return chain


def _numerator(graph: fx.Graph, chain: list[fx.Node]) -> fx.Node:
    """Return the numerator of the mean at a chain's end, scaled as the mean is: others may read the mean itself."""
    inner = chain[-1]
    made: Any = inner.args[0]
    for node in reversed(chain[:-1]):
        renamed = {inner: made}
        with graph.inserting_after(node):
            made = graph.node_copy(node, lambda operand, renamed=renamed: renamed.get(operand, operand))  # type: ignore[misc]
        copy_facts(node, made)
        inner = node
    return made  # type: ignore[no-any-return]


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


def _denominator(loss: fx.Node, is_one_fraction: Callable[[fx.Graph, bool], bool]) -> fx.Node | None:
    """Return the count that divides the loss, if the loss is a mean cross entropy, or a sum over samples divided by a
    sum over inputs, as a mean over the samples of a mask, and nothing else."""
    if loss.target is not aten.div.Tensor:
        return None
    total, count = loss.args
    if not isinstance(total, fx.Node) or not isinstance(count, fx.Node):
        return None
    read = {noted(node).binding.kind for node in ancestors([count]) if node.op == "placeholder"}
    if not read <= {"input"} or noted(total).value.dtype != noted(loss).value.dtype:
        return None
    losses: Any = total.args[0] if total.target is aten.sum.default else total
    known = noted(losses).token_losses
    return count if is_one_fraction(_graph_of([count if known else total, count]), known) else None


# ---- the loads of experts: how many tokens a microbatch sends to each expert of a layer, as results


def count_loads(
    graph: fx.Graph, updates: tuple[str, ...], returned: tuple[str, ...] = (), evaluates: bool = False
) -> None:
    """Add the tokens of each expert to the graph's outputs, between the loss, if there is one, and the new values of
    the buffers ``updates``, behind which are the tensors ``returned`` by the model; note the bindings of all outputs.
    In an evaluation nothing reads the tokens."""
    every = outputs(graph)
    first = len(every) - len(updates) - len(returned)
    loads: dict[Binding, fx.Node] = {}
    for module, routings in routed_layers(graph).items() if not evaluates else ():
        loads[Binding("load", module)] = _counted(graph, [routing.chosen for routing in routings])
        slots = [routing.slots for routing in routings if routing.slots is not None]
        if slots:
            loads[Binding("load", f"{module}{TAKEN}")] = _counted(graph, [_taken(graph, node) for node in slots])
    output = graph.output_node()
    output.args = ((*every[:first], *loads.values(), *every[first:]),)
    kept: tuple[tuple[Kind, tuple[str, ...]], ...] = (("buffer", updates), ("output", returned))
    noted(output).results = (*[LOSS] * first, *loads, *(Binding(kind, name) for kind, names in kept for name in names))


def _taken(graph: fx.Graph, slots: fx.Node) -> fx.Node:
    """Add the marks of slots that a token takes."""
    with graph.inserting_after(slots):
        taken = graph.call_function(aten.ge.Scalar, (slots, 0))
    copy_facts(slots, taken)
    noted(taken).value = noted(slots).value >= 0
    return taken


def _counted(graph: fx.Graph, every: Sequence[fx.Node]) -> fx.Node:
    """Add the number of marks of each expert, which is the first dim, in all routings of a layer."""
    total: fx.Node | None = None
    for marks in every:
        dims = list(range(1, noted(marks).value.dim()))
        with graph.inserting_after(marks):
            count = graph.call_function(aten.sum.dim_IntList, (marks, dims, False))
        copy_facts(marks, count)
        noted(count).value = noted(marks).value.sum(dims)
        if total is not None:
            with graph.inserting_before(graph.output_node()):
                both = graph.call_function(aten.add.Tensor, (total, count))
            copy_facts(count, both)
            count = both
        total = count
    assert total is not None
    return total
