"""Segments: the typed graph cut at the beginnings and ends of the model's repeated blocks; equal ones are found by
structure.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of nodes, with the values that it reads from before, and those that later nodes read of it. Equal
    signatures are equal work."""

    block: str | None
    stage: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    shared: frozenset[fx.Node]
    """The inputs that other segments read too: kept, they lie in memory once for all."""
    signature: str
    flow: GradientFlow
    """The flow of gradients in the graph that the segment is a run of."""


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
    shared = frozenset(node for node, count in readers.items() if count > 1)
    return [
        _segment(*place, nodes, inputs, shared, final, flow, mesh)
        for (place, nodes), inputs in zip(runs, read, strict=True)
    ]


def _read_before(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return the values that a run of nodes reads from before it, in order."""
    inside = set(nodes)
    return dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside)


def _segment(
    block: str | None, stage: int, nodes: Sequence[fx.Node], inputs: dict[fx.Node, None], shared: frozenset[fx.Node],
    final: set[fx.Node], flow: GradientFlow, mesh: Mesh,
) -> Segment:  # fmt: skip
    inside, shared = set(nodes), shared & inputs.keys()
    outputs = [
        node
        for node in nodes
        if len(noted(node).types) == 1
        and (node in final or any(user not in inside for user in node.users))
    ]  # fmt: skip
    signature = _signature(nodes, inputs, shared, outputs, flow, mesh)
    return Segment(block, stage, tuple(nodes), tuple(inputs), tuple(outputs), shared, signature, flow)


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


# ---- kept values: those of a block whose bytes wait from forward to backward, as few as may be.
#     up = mm(x, w); h = gelu(up); y = mm(h, v)        backward reads x, up and h: x and up are kept, h is made again
#
# ``may_remake`` is the one place that says which operators backward may make again. A minimum cut of the block's graph
# then finds the values to keep: of all sets from which the others can be made, one with the fewest bytes.


_Place = tuple[fx.Node | None, bool]
"""A value as it is made (``False``) and as it is read (``True``); without a node, the start and the end of the cut."""
_Room = dict[_Place, dict[_Place, int]]
_START: _Place = None, False
_END: _Place = None, True
_WITHOUT_END = 1 << 62
_SHARED = 4
"""The number of blocks that are taken to read a value which several read. A twin has fewer blocks than its build, and
must keep the same values."""


def mark_recomputed(graph: fx.Graph, lines: Sequence[RecomputeLine]) -> None:
    """Note on every operator the plan's line by which backward makes it again."""
    for node in graph.nodes if lines else ():
        if node.op == "call_function":
            noted(node).recompute = line_for(lines, noted(node).origin.module)


def may_remake(node: Any, maker: fx.Node | None, mesh: Mesh) -> bool:
    """Return whether backward may make the result of a traced node again: without a line of the plan what costs little
    and sends nothing, gathers of what lines split between products, and keys that attention gathers; with one all but
    what the line keeps. ``maker`` is the model's operator that it is a part of."""
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
    """Return whether a node gathers keys or values along the sequence for an attention: they are as long as the
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
    """Return the values of forward to keep, so that backward has those that it will ``read``. It may make a node again
    if ``remake`` says so. ``inputs`` says of each input whether it is there in backward without being kept; other
    blocks read the ``shared`` ones too. Of equal choices, this is the one that leaves least to be made again."""
    room: _Room = {}

    def edge(source: _Place, target: _Place, size: int) -> None:
        room.setdefault(source, {})[target] = size
        room.setdefault(target, {}).setdefault(source, 0)

    wanted = dict.fromkeys(read)
    for node in ancestors(wanted, inputs):
        there = inputs.get(node)
        shares = there is None and _shares(node)
        size = 0 if there else _bytes(node, mesh) // (_SHARED if node in shared else 1)
        edge((node, False), (node, True), _WITHOUT_END if shares else size)
        if not shares and (there is not None or not remake(node)):
            edge(_START, (node, False), _WITHOUT_END)
        for operand in node.all_input_nodes if there is None else ():
            edge((operand, True), (node, False), _WITHOUT_END)
    for node in wanted:
        edge((node, True), _END, _WITHOUT_END)
    behind = _behind_cut(room)
    return {node for node, is_read in behind if node is not None and is_read and (node, False) not in behind}


def _shares(node: Any) -> bool:
    """Return whether a node has no storage of its own to keep: several results together, or a view of an operand,
    which would keep the whole of it."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(noted(node).value, (tuple, list)) or facts(source.target).storage == "view"


def _bytes(node: fx.Node, mesh: Mesh) -> int:
    return node_type(node).local_bytes(mesh)


def _behind_cut(room: _Room) -> set[_Place]:
    """Return the end's side of that minimum cut which lies nearest to the end. ``room`` is used up."""
    while (way := _way(room)) is not None:
        least = min(room[one][other] for one, other in way)
        for one, other in way:
            room[one][other] -= least
            room[other][one] += least
    behind, pending = {_END}, [_END]
    while pending:
        at = pending.pop()
        for before in room.get(at, ()):
            if before not in behind and room[before][at]:
                behind.add(before)
                pending.append(before)
    return behind


def _way(room: _Room) -> list[tuple[_Place, _Place]] | None:
    """Return the edges of a shortest way with room from the start to the end; None if there is none."""
    reached, pending = {_START: _START}, deque([_START])
    while pending and _END not in reached:
        at = pending.popleft()
        for after, left in room.get(at, {}).items():
            if left and after not in reached:
                reached[after] = at
                pending.append(after)
    if _END not in reached:
        return None
    way, at = list[tuple[_Place, _Place]](), _END
    while at != _START:
        way.append((reached[at], at))
        at = reached[at]
    return way
