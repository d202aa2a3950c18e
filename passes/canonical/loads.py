"""The loads of experts: how many tokens a microbatch sends to each expert of a layer, as results beside the loss."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...compiler.capture.experts.forms import routed_layers
from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.ops.own_ops import aten
from ...compiler.program.binding import LOSS, Binding, Kind
from ...compiler.program.step_values import TAKEN
from ..calls import outputs


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
