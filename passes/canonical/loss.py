"""The loss as a numerator, which is summed over a step's whole batch, and the count that divides it; and the loads of
experts, which F returns beside the loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from ...compiler.capture.experts.forms import routed_layers
from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.capture.reach import GradientFlow, ancestors, reached_by_gradient
from ...compiler.ops.own_ops import aten
from ...compiler.ops.precision import base_name
from ...compiler.ops.rules import facts
from ...compiler.program.binding import COUNT, LOSS, Binding, Kind
from ...compiler.program.step_values import TAKEN, Division, base_term, term_count, term_weight, terms_with_weights
from ..calls import computes, insert_call, key_of, outputs


@dataclass(frozen=True, slots=True)
class TermGraphs:
    """A term of the loss as graphs of its own, for whoever decides what divides it."""

    term: fx.Graph
    """The graph of the term's value."""
    fraction: fx.Graph | None
    """The graph of a numerator and of the count below it, which is made of inputs alone; None for any other term. A
    sum of token losses stands for its count, and is not in it."""
    division: Division
    """The division by that count, with the floor that the code gives it."""
    token_losses: bool = False
    """True where the numerator is a sum of token losses."""


Decide = Callable[[Sequence[TermGraphs]], Sequence[Division | None]]
"""A function that returns the division of each term of a loss; None for one that is averaged over microbatches though
that may not be the whole batch's."""


class Divided(NamedTuple):
    """The divisors of a loss: the graph of the counts that terms have, from inputs alone, None where no term has one;
    their bindings; the division of each term; and the numbers of the terms that are averaged for want of another."""

    counting: fx.Graph | None = None
    counts: tuple[Binding, ...] = ()
    divisions: tuple[Division, ...] = ()
    averaged: tuple[int, ...] = ()


def split_loss(graph: fx.Graph, terms: int, decide: Decide) -> Divided:
    """The pass that splits a mean loss into numerator and denominator. It takes a canonical graph, and changes it in
    place: its first output becomes the numerator. It returns the graph of the denominators, and the divisions.

    The division of a mean cross entropy, of a sum over samples by a sum over inputs, and of multiples of these, is then
    done once a step, by the count over all data ranks and microbatches: a mean of microbatches' means would weigh
    targets unequally. A floor under the count, as ``clamp(min=1)``, and a small number beside it, as ``+ 1e-6``, are
    those of the step's count too. ``decide`` says of each term what divides it.

    A loss of several ``terms`` is divided by the divisor of its base. Every term that has another one is multiplied by
    a placeholder of its own, which SCALE computes, so that the same division leaves its value.
    """
    if not terms:
        return Divided()
    output = graph.output_node()
    loss, *updates = outputs(graph)
    roots = _terms(loss, terms)
    chains = [_scalings(root) for root in roots]
    fractions = [_fraction(chain[-1]) for chain in chains]
    graphs = [_term_graphs(*pair) for pair in zip(roots, fractions, strict=True)]
    decided = decide(graphs)
    divisions = tuple(division or Division() for division in decided)
    counts = {
        number: fraction.count
        for number, (fraction, division) in enumerate(zip(fractions, divisions, strict=True), 1)
        if fraction is not None and division.by == "count"
    }
    averaged = tuple(number for number, division in enumerate(decided, 1) if division is None)
    for number in counts:
        roots[number - 1] = _numerator(graph, chains[number - 1])
    weighted = terms_with_weights(divisions)
    if counts or weighted:
        output.args = ((_weighted_sum(graph, loss, roots, weighted), *updates),)
    count = _subgraph(list(counts.values())) if counts else None
    graph.eliminate_dead_code()
    base = base_term(divisions)
    keys = tuple(COUNT if number == base else term_count(number) for number in counts)
    return Divided(count, keys, divisions, averaged)


def _terms(loss: fx.Node, count: int) -> list[fx.Node]:
    """Return the operands of the additions that end in the loss."""
    if count == 1:
        return [loss]
    assert loss.target is aten.add.Tensor, loss
    first, last = loss.args
    assert isinstance(first, fx.Node) and isinstance(last, fx.Node)
    return [*_terms(first, count - 1), last]


def _weighted_sum(graph: fx.Graph, loss: fx.Node, roots: list[fx.Node], weighted: Collection[int]) -> fx.Node:
    """Add up the terms; the ``weighted`` ones are multiplied by their weights."""
    total: fx.Node | None = None
    first = next(iter(graph.nodes))
    for number, root in enumerate(roots, 1):
        if number in weighted:
            with graph.inserting_before(first):
                weight = graph.placeholder(f"term_{number}")
            noted(weight).value, noted(weight).binding = noted(loss).value, term_weight(number)
            root = _append(loss, aten.mul.Tensor, root, weight)
        total = root if total is None else _append(loss, aten.add.Tensor, total, root)
    assert total is not None
    return total


def _append(like: fx.Node, target: Any, *args: fx.Node) -> fx.Node:
    """Add a call at a graph's end, with the facts of a node."""
    node = insert_call(like.graph.output_node(), target, args)
    copy_facts(like, node)
    return node


def _subgraph(results: list[fx.Node]) -> fx.Graph:
    """Return the graph of these nodes and all that they are computed from."""
    graph, copies, needed = fx.Graph(), dict[fx.Node, fx.Node](), ancestors(results)
    for node in results[0].graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copy_facts(node, copies[node])
    graph.output(tuple(copies[node] for node in results))
    return graph


def stop_gradients(graph: fx.Graph) -> None:
    """The pass that detaches what is not read for the loss, such as the operand of a buffer's update. It takes a
    canonical graph, and inserts ``detach`` in place. Without it every block before would compute a gradient of
    zeros."""
    reached, flow = reached_by_gradient(outputs(graph)[0]), GradientFlow()
    flows = {node for node in graph.nodes if node in flow and (node.op == "placeholder" or key_of(node)[0] in reached)}
    for node in [node for node in graph.nodes if computes(node) and node not in reached]:
        for operand in node.all_input_nodes if not facts(node.target).stops_gradient else ():
            if operand not in flows:
                continue
            stopped = insert_call(node, aten.detach.default, (operand,))
            noted(stopped).value, noted(stopped).origin = noted(operand).value, noted(node).origin
            node.replace_input_with(operand, stopped)


def _scalings(loss: fx.Node) -> list[fx.Node]:
    """Return a loss, the node of which it is a constant multiple, and so on to the last."""
    chain = [loss]
    while (inner := _scaled(chain[-1])) is not None:
        chain.append(inner)
    return chain


def _numerator(graph: fx.Graph, chain: list[fx.Node]) -> fx.Node:
    """Return the numerator of the mean at a chain's end, with copies of the chain's scalings: others may read the mean
    itself."""
    inner = chain[-1]
    numerator: Any = inner.args[0]
    for node in reversed(chain[:-1]):
        renamed = {inner: numerator}
        with graph.inserting_after(node):
            numerator = graph.node_copy(node, lambda operand, renamed=renamed: renamed.get(operand, operand))  # type: ignore[misc]
        copy_facts(node, numerator)
        inner = node
    return numerator  # type: ignore[no-any-return]


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
    if facts(node.target).casts and noted(inner).value.dtype.itemsize <= noted(node).value.dtype.itemsize:
        return inner  # type: ignore[no-any-return]
    return None


@dataclass(frozen=True, slots=True)
class _Fraction:
    """A numerator, the count below it, and what is done to the count before it divides."""

    total: fx.Node
    count: fx.Node
    division: Division


def _fraction(loss: fx.Node) -> _Fraction | None:
    """Return the fraction that a loss is, if what divides it is made of inputs alone: a mean cross entropy, or a sum
    over samples that is divided by a sum over inputs (a mask's mean). None for any other loss."""
    if loss.target is not aten.div.Tensor:
        return None
    total, below = loss.args
    if not isinstance(total, fx.Node) or not isinstance(below, fx.Node):
        return None
    read = {noted(node).binding.kind for node in ancestors([below]) if node.op == "placeholder"}
    if not read <= {"input"} or noted(total).value.dtype != noted(loss).value.dtype:
        return None
    count, division = _floor(below)
    return _Fraction(total, count, division)


def _floor(below: fx.Node) -> tuple[fx.Node, Division]:
    """Return the count behind a denominator, and its division: a floor under the count, or a number beside it."""
    operands = below.args[:2] if below.args[2:] in ((), (None,)) else ()
    nodes = [operand for operand in operands if isinstance(operand, fx.Node)]
    numbers = [operand for operand in operands if isinstance(operand, int | float)]
    if (len(nodes), len(numbers)) != (1, 1) or below.kwargs:
        return below, Division("count")
    if facts(below.target).bounds and not base_name(str(below.target)).endswith("max"):
        return nodes[0], Division("count", least=float(numbers[0]))
    if below.target is aten.add.Tensor and numbers[0] > 0:
        return nodes[0], Division("count", plus=float(numbers[0]))
    return below, Division("count")


def _term_graphs(root: fx.Node, fraction: _Fraction | None) -> TermGraphs:
    if fraction is None:
        return TermGraphs(_subgraph([root]), None, Division())
    total, count = fraction.total, fraction.count
    losses: Any = total.args[0] if total.target is aten.sum.default else total
    known = noted(losses).token_losses
    return TermGraphs(_subgraph([root]), _subgraph([count if known else total, count]), fraction.division, known)


# ---- loads: the number of tokens that a microbatch sends to each expert of a layer


def count_loads(
    graph: fx.Graph, updates: tuple[str, ...], returned: tuple[str, ...] = (), evaluates: bool = False
) -> None:
    """The pass that counts the tokens of experts. It takes a canonical graph, and changes it in place: its outputs
    become the loss, if there is one, the loads, the new values of the buffers ``updates``, and the tensors ``returned``
    by the model. It notes the bindings of all outputs. An evaluation has no loads."""
    every = outputs(graph)
    first = len(every) - len(updates) - len(returned)
    loads: dict[Binding, fx.Node] = {}
    for module, routings in routed_layers(graph).items() if not evaluates else ():
        loads[Binding("load", module)] = _count_marks(graph, [routing.chosen for routing in routings])
        slots = [routing.slots for routing in routings if routing.slots is not None]
        if slots:
            taken = [_mark_taken(graph, node) for node in slots]
            loads[Binding("load", f"{module}{TAKEN}")] = _count_marks(graph, taken)
    output = graph.output_node()
    output.args = ((*every[:first], *loads.values(), *every[first:]),)
    kept: tuple[tuple[Kind, tuple[str, ...]], ...] = (("buffer", updates), ("output", returned))
    noted(output).results = (*[LOSS] * first, *loads, *(Binding(kind, name) for kind, names in kept for name in names))


def _mark_taken(graph: fx.Graph, slots: fx.Node) -> fx.Node:
    """Add a mask of the slots that hold a token."""
    with graph.inserting_after(slots):
        taken = graph.call_function(aten.ge.Scalar, (slots, 0))
    copy_facts(slots, taken)
    noted(taken).value = noted(slots).value >= 0
    return taken


def _count_marks(graph: fx.Graph, masks: Sequence[fx.Node]) -> fx.Node:
    """Add the count of marks of each expert, the first dim, in the masks of all routings of a layer."""
    total: fx.Node | None = None
    for marks in masks:
        dims = list(range(1, noted(marks).value.dim()))
        with graph.inserting_after(marks):
            count = graph.call_function(aten.sum.dim_IntList, (marks, dims, False))
        copy_facts(marks, count)
        noted(count).value = noted(marks).value.sum(dims)
        total = count if total is None else _append(count, aten.add.Tensor, total, count)
    assert total is not None
    return total
