"""The loads of experts: how many tokens a microbatch sends to each expert of a layer, as results beside the loss."""

from __future__ import annotations

from torch import fx

from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.capture.routed import chosen_experts, routed_layers
from ...compiler.ops.torch_ops import aten
from ...compiler.program.binding import Binding
from ..calls import outputs


def count_loads(graph: fx.Graph, updates: tuple[str, ...]) -> None:
    """Add the tokens of each expert to the graph's outputs, between the loss and the new values of the buffers
    ``updates``; note the bindings of all outputs behind the loss."""
    loss, *buffers = outputs(graph)
    loads: dict[Binding, fx.Node] = {}
    for module, pack in routed_layers(graph).items():
        chosen = chosen_experts(pack)
        with graph.inserting_after(chosen):
            load = graph.call_function(aten.sum.dim_IntList, (chosen, [1], False))
        copy_facts(chosen, load)
        noted(load).value = noted(chosen).value.sum(1)
        loads[Binding("load", module)] = load
    output = graph.output_node()
    output.args = ((loss, *loads.values(), *buffers),)
    noted(output).results = (*loads, *(Binding("buffer", name) for name in updates))
