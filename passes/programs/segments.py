"""Segments: the typed graph cut at the model's repeated blocks, equal ones by structure; and the values that each saves
from forward for backward.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import GradientFlow, ancestors
from ...compiler.layout.collectives import COLLECTIVES, lower
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ...compiler.ops.own_ops import OPS
from ...compiler.ops.precision import words_for
from ...compiler.ops.recompute import SENT_WORD, RecomputeLine, line_for
from ...compiler.ops.rules import facts
from ..calls import substitute_nodes


def node_type(node: fx.Node) -> TensorType:
    """Return the type of a typed node with one tensor."""
    type_ = noted(node).types[0]
    assert type_ is not None
    return type_


def data_type(node: fx.Node) -> TensorType:
    """Return the type of a typed node with one tensor as data alone: R is I."""
    type_ = node_type(node)
    return replace(type_, placement=type_.placement.data())


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of nodes of one block and stage."""

    block: str | None
    stage: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    """The values from before the run that it reads."""
    outputs: tuple[fx.Node, ...]
    """The values that later nodes read."""
    shared: frozenset[fx.Node]
    """The inputs that other segments read too: saved, they take memory once for all."""
    signature: str
    """Types and operators as text; equal signatures are equal work."""
    flow: GradientFlow
    """The gradient flow of the whole graph."""


def cut_segments(graph: fx.Graph, mesh: Mesh) -> list[Segment]:
    """Return the graph as segments in order, each in one stage; every operator is in exactly one."""
    runs: list[tuple[tuple[str | None, int], list[fx.Node]]] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        place = noted(node).block, noted(node).stage
        if node.target is operator.getitem or (runs and runs[-1][0] == place):
            runs[-1][1].append(node)
        else:
            runs.append((place, [node]))
    final, flow = set(graph.output_node().all_input_nodes), GradientFlow()
    read = [_read_before(nodes) for _, nodes in runs]
    readers = Counter(node for inputs in read for node in inputs)
    segments = []
    for ((block, stage), nodes), inputs in zip(runs, read, strict=True):
        inside, shared = set(nodes), frozenset(node for node in inputs if readers[node] > 1)
        outputs = [
            node for node in nodes
            if len(noted(node).types) == 1
            and (node in final or any(user not in inside for user in node.users))
        ]  # fmt: skip
        signature = _signature(nodes, inputs, shared, outputs, flow, mesh)
        segments.append(Segment(block, stage, tuple(nodes), inputs, tuple(outputs), shared, signature, flow))
    return segments


def _read_before(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the values from before a run of nodes that it reads, in order."""
    inside = set(nodes)
    read = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside)
    return tuple(read)


def _signature(nodes: Sequence[fx.Node], inputs: Collection[fx.Node], shared: Collection[fx.Node],
               outputs: Sequence[fx.Node], flow: GradientFlow, mesh: Mesh) -> str:  # fmt: skip
    names = {node: f"i{index}" for index, node in enumerate(inputs)}
    names.update((node, f"n{index}") for index, node in enumerate(nodes))
    rows = [f"{names[n]}:{typed_text(n, mesh)}:{n in flow}:{n in shared}" for n in inputs]
    for node in nodes:
        args = substitute_nodes((node.args, dict(node.kwargs)), names.__getitem__)
        line = noted(node).recompute
        again = f":{sorted(line.keep)}" if line is not None else ""
        rows.append(f"{names[node]}={node.target}{args}:{typed_text(node, mesh)}{again}{noted(node).again}")
    return "\n".join([*rows, ",".join(names[node] for node in outputs)])


def typed_text(node: fx.Node, mesh: Mesh) -> str:
    """Return the types of a node's results as text, with the difference between R and I."""
    return ";".join(f"{t.text(mesh)}{[axis for axis, kind in t.placement.items() if kind == 'R']}"
                    for t in noted(node).types if t is not None)  # fmt: skip


# ---- saved values: those of a block that are kept from forward to backward, in the fewest bytes
#     up = mm(x, w); h = gelu(up); y = mm(h, v)        backward reads x, up and h: x and up are saved, h is recomputed
#
# ``may_remake`` alone decides which operators backward may recompute. A minimum cut of the block's graph then finds the
# values to save: of all sets from which the others can be recomputed, one with the fewest bytes.


_Vertex = tuple[Hashable, bool]
"""A value as it is computed (``False``) and as it is read (``True``); None stands for the source and the sink."""
_Value = TypeVar("_Value", bound=Hashable)
_Capacities = dict[_Vertex, dict[_Vertex, int]]
"""The residual capacity of each edge of the flow network."""
_SOURCE: _Vertex = None, False
_SINK: _Vertex = None, True
_INFINITE = 1 << 62
_ASSUMED_READERS = 4
"""The number of blocks among which the bytes of a shared value are divided. A constant, since a twin has fewer blocks
than its build, and must save the same values."""


def mark_recomputed(graph: fx.Graph, lines: Sequence[RecomputeLine]) -> None:
    """The pass of recomputation. It takes the typed graph, and notes on every operator the plan's ``recompute`` line by
    which backward recomputes it. No operator changes."""
    for node in graph.nodes if lines else ():
        if node.op == "call_function":
            noted(node).recompute = line_for(lines, noted(node).origin.module)


def may_remake(node: Any, maker: fx.Node | None, mesh: Mesh) -> bool:
    """Return True where backward may recompute a traced node. Without a ``recompute`` line these are cheap operators,
    gathers of values that lines split between products, and the gathers of attention's keys; with one, all but what the
    line keeps. ``maker`` is the model's operator that the node is a part of."""
    traced = node.args[0] if node.target is operator.getitem else node
    line = noted(maker).recompute if maker is not None else None
    if traced.target is OPS.convert.default:
        lowered = lower(str(node.args[1]), node_type(node.args[0]).placement, node_type(node).placement, mesh)
        sends = lowered is not None and COLLECTIVES[lowered[0]].communicates
        if line is None:
            return not sends or gathers_keys(node) or (maker is not None and noted(maker).again)
        return not sends or SENT_WORD not in line.keep
    if line is None or maker is None:
        return facts(traced.target).cheap
    return line.keep.isdisjoint(words_for(str(traced.target)) | words_for(str(maker.target)))


def gathers_keys(node: Any) -> bool:
    """Return True for the gather of an attention's keys or values along the sequence: its result is as long as the
    sequence, of which a rank has a part."""
    if node.target is not OPS.convert.default or not str(node.args[2]).startswith("S(2") or node.args[3][0] == "S":
        return False
    value, readers = node, list(node.users)
    while [facts(reader.target).moves for reader in readers] == ["copy"]:  # the alias for its reader
        (value,) = readers
        readers = list(value.users)
    return any(reader.target is OPS.attention.default and value in reader.args[1:3] for reader in readers)


def kept_values(
    read: Iterable[fx.Node], inputs: Mapping[fx.Node, bool], shared: Collection[fx.Node],
    remake: Callable[[fx.Node], bool], mesh: Mesh,
) -> set[fx.Node]:  # fmt: skip
    """Return the values of forward to save, so that backward has those that it will ``read``.

    Backward may recompute a node where ``remake`` returns True. ``inputs`` are the inputs, with True for those that
    backward has without saving them; other blocks read the ``shared`` ones too. Of equal choices, this is the one that
    leaves least to recompute.
    """

    def size(node: fx.Node) -> int | None:
        there = inputs.get(node)
        if there is None and _shares_storage(node):
            return None
        return 0 if there else node_type(node).local_bytes(mesh) // (_ASSUMED_READERS if node in shared else 1)

    def remade(node: fx.Node) -> bool:
        return node not in inputs and (_shares_storage(node) or remake(node))

    wanted = dict.fromkeys(read)
    return fewest_bytes(wanted, ancestors(wanted, inputs), lambda node: node.all_input_nodes if node not in inputs
                        else (), size, remade)  # fmt: skip


def fewest_bytes(
    wanted: Iterable[_Value], values: Iterable[_Value], operands: Callable[[_Value], Iterable[_Value]],
    size: Callable[[_Value], int | None], remade: Callable[[_Value], bool],
) -> set[_Value]:  # fmt: skip
    """Return the set of values with the fewest bytes from which those ``wanted`` can be computed: a minimum cut. Of
    equal sets, this is the one that leaves least to compute.

    ``values`` are the wanted ones and all that they are computed from. A value has a ``size`` in bytes, or None if it
    cannot be in the set. If it may be ``remade``, it can be computed of its ``operands``.
    """
    capacities: _Capacities = {}

    def edge(source: _Vertex, target: _Vertex, bytes_: int) -> None:
        capacities.setdefault(source, {})[target] = bytes_
        capacities.setdefault(target, {}).setdefault(source, 0)

    for value in values:
        bytes_ = size(value)
        edge((value, False), (value, True), _INFINITE if bytes_ is None else bytes_)
        if not remade(value):
            edge(_SOURCE, (value, False), _INFINITE)
        for operand in operands(value):
            edge((operand, True), (value, False), _INFINITE)
    for value in wanted:
        edge((value, True), _SINK, _INFINITE)
    behind = _behind_cut(capacities)
    return {value for value, is_read in behind if value is not None and is_read and (value, False) not in behind}  # type: ignore[misc]


def _shares_storage(node: Any) -> bool:
    """Return True for a node without storage of its own to save: several results together, or a view, which would keep
    the whole storage of its base."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(noted(node).value, (tuple, list)) or facts(source.target).storage == "view"


def _behind_cut(capacities: _Capacities) -> set[_Vertex]:
    """Return the sink's side of that minimum cut which lies nearest to the sink. ``capacities`` are used up."""
    while path := _augmenting_path(capacities):
        least = min(capacities[one][other] for one, other in path)
        for one, other in path:
            capacities[one][other] -= least
            capacities[other][one] += least
    behind, pending = {_SINK}, [_SINK]
    while pending:
        at = pending.pop()
        for before in capacities.get(at, ()):
            if before not in behind and capacities[before][at]:
                behind.add(before)
                pending.append(before)
    return behind


def _augmenting_path(capacities: _Capacities) -> list[tuple[_Vertex, _Vertex]]:
    """Return the edges of a shortest path from the source to the sink with capacity left; empty if there is none."""
    reached, pending = {_SOURCE: _SOURCE}, deque([_SOURCE])
    while pending and _SINK not in reached:
        at = pending.popleft()
        for after, left in capacities.get(at, {}).items():
            if left and after not in reached:
                reached[after] = at
                pending.append(after)
    path, at = list[tuple[_Vertex, _Vertex]](), _SINK
    while at != _SOURCE and _SINK in reached:
        path.append((reached[at], at))
        at = reached[at]
    return path
