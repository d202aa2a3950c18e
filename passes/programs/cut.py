"""Stages: every operator of a typed graph gets one stage of the pipeline, and main functions are cut into those of
stages."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.capture.reach import computed_anywhere
from ...compiler.program.binding import Binding
from ...compiler.program.program import Function
from ...compiler.resolve.requests import Pipeline
from ..calls import computes, outputs


def in_stages(graph: fx.Graph, pipeline: Pipeline) -> fx.Graph:
    """The pass of stages. It takes the typed graph, and returns a new one, its operators in order of their stages, with
    the ``stage`` noted on each.

    A stage is the operators between two cuts. An operator that reads a later stage's value moves there; the last
    operators of a buffer's new value (a sum over ranks, the cut of padding) stay with the stage that computes it.
    Values that depend on no parameter (positions, rotary tables, masks) are computed in every stage that reads them,
    and never sent.
    """
    updates = [key.name for key in noted(graph.output_node()).results if key.kind == "buffer"]
    free = computed_anywhere(graph, updates)
    stages = _stages(graph, pipeline, free)
    wanted: dict[fx.Node, set[int]] = {node: {stage} for node, stage in stages.items()}
    results = _result_stages(graph, stages)
    for node in reversed(list(graph.nodes)):
        if node in free:
            wanted[node] = {stage for user in node.users for stage in wanted.get(user, ())}
            wanted[node] |= {stage for value, stage in results if value is node}
    staged = fx.Graph()
    copies: dict[tuple[fx.Node, int], fx.Node] = {}
    order = {node: index for index, node in enumerate(graph.nodes)}

    def copy(node: fx.Node, stage: int) -> None:
        copies[node, stage] = staged.node_copy(node, lambda operand: _seen_from(copies, operand, stage, wanted))
        copy_facts(node, copies[node, stage])
        noted(copies[node, stage]).stage = stage

    for node in graph.find_nodes(op="placeholder"):
        copy(node, 0)
    rows = [(stage, order[node], node) for node in graph.nodes if node.op == "call_function" for stage in wanted[node]]
    for stage, _, node in sorted(rows, key=lambda row: row[:2]):
        copy(node, stage)
    copy(graph.output_node(), len(pipeline.cuts))
    kept = [copies[value, stage] if value in free else _seen_from(copies, value, stage, wanted)
            for value, stage in results]  # fmt: skip
    staged.output_node().args = (tuple(kept),)
    noted(staged.output_node()).results = noted(graph.output_node()).results
    return staged


def _result_stages(graph: fx.Graph, stages: Mapping[fx.Node, int]) -> list[tuple[fx.Node, int]]:
    """Return the graph's results with the stages that return them: for a buffer's new value (two buffers may share one)
    the stage that reads the old value."""
    values = outputs(graph)
    bound = {noted(node).binding: node for node in graph.find_nodes(op="placeholder")}
    results = zip(values, noted(graph.output_node()).results, strict=True)
    near = [(value, list(bound[key].users) if key in bound else [value]) for value, key in results]
    return [(value, max((stages.get(node, 0) for node in nodes), default=0)) for value, nodes in near]


def _seen_from(copies: Mapping[tuple[fx.Node, int], fx.Node], operand: fx.Node, stage: int,
               wanted: Mapping[fx.Node, set[int]]) -> fx.Node:  # fmt: skip
    """Return the node that a stage reads for an operand: its copy in the stage where there is one."""
    if (operand, stage) in copies:
        return copies[operand, stage]
    return copies[operand, 0 if operand.op == "placeholder" else min(wanted[operand])]


def _stages(graph: fx.Graph, pipeline: Pipeline, free: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the stages of all operators but ``free`` ones. An operator that a pass inserted for an output (``kept``)
    stays with its operands."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    places = [_index_of_cut(nodes, module, after, pipeline.modules) for module, after in pipeline.cuts]
    stages: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        if node in free:
            continue
        operands = [stages[operand] for operand in node.all_input_nodes if operand in stages]
        follows = operands and (node.target is operator.getitem or noted(node).kept)
        stages[node] = max(operands) if follows else max([sum(place <= index for place in places), *operands])
    return stages


def _index_of_cut(nodes: Sequence[fx.Node], module: str, after: bool, modules: Sequence[str]) -> int:
    """Return the index of the first operator behind a cut. If no operator of the module is left, the model's next
    module counts."""
    within = {name for name in modules if f"{name}.".startswith(f"{module}.")}
    origins = [noted(node).origin.module if computes(node) else None for node in nodes]
    inside = [index for index, origin in enumerate(origins) if origin in within]
    if inside:
        return inside[-1] + 1 if after else inside[0]
    later = modules[max(index for index, name in enumerate(modules) if name in within) + 1 :]
    return next((index for index, origin in enumerate(origins) if origin in later), len(nodes))


def split_lines(main: Function, at: Sequence[int], returns: Sequence[Sequence[tuple[Binding, str]]]) -> list[Function]:
    """Split a main function into one for every place, in order. ``at`` has each line's place, ``returns`` the returns
    of each function.

    Every function has the parameters that it reads, and the buffers that it updates. Any other value is handed from
    place to place up to its last reader: ``sent NAME`` of one function is ``received NAME`` of the next, in the order
    of the lines that compute them. A value that several places compute is not sent."""
    places = range(len(returns))
    home = {value.name: place for line, place in zip(main.lines, at, strict=True) for value in line.made}
    lines = [[line for line, place in zip(main.lines, at, strict=True) if place == here] for here in places]
    reads = [
        {name for line in lines[here] for name in line.uses} | {name for _, name in returns[here]} for here in places
    ]
    last = {name: max((here for here in places if name in reads[here]), default=0) for name in home}
    pieces, values = [], main.values()
    for here in places:
        received = [replace(values[name], binding=Binding("received", name)) for name in home
                    if home[name] < here <= last[name]]  # fmt: skip
        sent = [(Binding("sent", name), name) for name in home if home[name] <= here < last[name]]
        updated = {key for key, _ in returns[here] if key.kind == "buffer"}
        kept = [v for v in main.parameters if v.name in reads[here] or v.binding in updated or len(places) == 1]
        pieces.append(Function(main.name, (*kept, *received), tuple(lines[here]), (*returns[here], *sent)))
    return pieces
