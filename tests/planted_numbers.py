"""Planted bugs that random data never shows: a captured graph with another number, of which the passes make F and B,
beside the graph as it was.

Each change is made in the graph that the passes read, so F and B agree with each other. A random batch is seldom beyond
a threshold of 100, an epsilon of 1e-12 is beside no variance, and a share of one in 2,000 may be too small for a
comparison: the texts have to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from parc.compiler.capture.node_facts import noted
from parc.compiler.ops.own_ops import aten
from parc.compiler.ops.rules import facts
from parc.compiling.compiled import Compiled
from parc.passes.canonical.canonicalize import copied
from parc.passes.canonical.rewriter import Canonicalizer
from parc.passes.pipeline import build_programs
from tests.planted_edits import Programs
from tests.planted_mutators import Mutant

Graph = fx.Graph
Edit = Callable[[Canonicalizer, fx.Node, fx.Node], Any]
"""A function that gets a node, and the one behind it, and returns the node that others read in its place; None where
it changes the node itself."""


def _share(c: Canonicalizer, node: fx.Node, after: fx.Node) -> fx.Node:
    return c.emit(after, aten.mul.Tensor, node, 1.0005)


def _shifted(c: Canonicalizer, node: fx.Node, after: fx.Node) -> fx.Node:
    beyond = c.emit(after, aten.relu.default, c.emit(after, aten.sub.Tensor, node, 100.0))
    return c.emit(after, aten.add.Tensor, node, beyond)


def _gated(c: Canonicalizer, node: fx.Node, after: fx.Node) -> fx.Node:
    gate = c.emit(after, aten.sigmoid.default, c.emit(after, aten.add.Tensor, node, 1000.0))
    return c.emit(after, aten.mul.Tensor, node, gate)


def _chosen(c: Canonicalizer, node: fx.Node, after: fx.Node) -> fx.Node:
    far = c.emit(after, aten.gt.Scalar, node, 300.0)
    return c.emit(after, aten.masked_fill.Scalar, node, far, 0.0)


def _tensor(c: Canonicalizer, node: fx.Node, after: fx.Node, number: float) -> fx.Node:
    """Make a tensor of one number, which leaves the shape of what is computed with the node."""
    value = noted(node).value
    return c.emit(after, aten.full.default, [1] if value.dim() else [], number, dtype=value.dtype)


def _made(c: Canonicalizer, node: fx.Node, after: fx.Node) -> fx.Node:
    factor = _tensor(c, node, after, 1.0005)
    return c.emit(after, aten.mul.Tensor, node, factor)


def _composed(c: Canonicalizer, node: fx.Node, after: fx.Node) -> fx.Node:
    """Make a number of others: 1,000 as ten to the third power."""
    ten = _tensor(c, node, after, 10.0)
    far = c.emit(after, aten.mul.Tensor, c.emit(after, aten.mul.Tensor, ten, ten), ten)
    beyond = c.emit(after, aten.relu.default, c.emit(after, aten.sub.Tensor, node, far))
    return c.emit(after, aten.add.Tensor, node, beyond)


def _row(c: Canonicalizer, node: fx.Node, after: fx.Node) -> fx.Node | None:
    """Train all rows of a table but the last."""
    if node.target is not aten.embedding.default:
        return None
    table, index = node.args[:2]
    last = c.emit(after, aten.eq.Scalar, index, noted(table).value.shape[0] - 1)  # type: ignore[arg-type]
    untrained = c.emit(after, aten.detach.default, node)
    return c.emit(after, aten.where.self, c.emit(after, aten.unsqueeze.default, last, -1), untrained, node)


ADDED: dict[str, Edit] = {
    "a share": _share, "a share by a tensor": _made, "a threshold behind": _shifted, "a gate": _gated,
    "a choice": _chosen, "a composed threshold": _composed, "a row of a table": _row,
}  # fmt: skip
"""The changes of what comes behind a node, by their words."""


def _again(c: Canonicalizer, node: fx.Node, after: fx.Node) -> fx.Node:
    """Compute with a number twice."""
    return c.emit(after, node.target, node, *node.args[1:], **node.kwargs)


def _near(number: Any) -> list[tuple[str, float]]:
    """Return the class and the number of each change of a number: a share more, and none where it is an epsilon."""
    if not isinstance(number, float) or number == 0:
        return []
    small = abs(number) < 1e-3
    return [("an epsilon", 0.0), ("an epsilon", 10 * number)] if small else [("a number", number * 1.0005)]


def _with_number(_: Canonicalizer, node: fx.Node, after: fx.Node, place: int, number: float) -> None:
    node.args = (*node.args[:place], number, *node.args[place + 1 :])


def _edits(node: fx.Node) -> Iterator[tuple[str, str, Edit]]:
    """Yield the changes of a node: their class, words for each, and the edit."""
    for kind, edit in ADDED.items():
        if kind != "a row of a table" or node.target is aten.embedding.default:
            yield kind, f"behind {node.name}", edit
    numbered = any(type(item) in (int, float) for item in node.args) and facts(node.target).elementwise
    if numbered and len(node.all_input_nodes) == 1:
        yield "a number once more", f"behind {node.name}", _again
    for place, number in enumerate(node.args):
        for kind, other in _near(number):
            yield kind, f"{other!r} for {number!r} in {node.name}", partial(_with_number, place=place, number=other)


def _changed_programs(compiled: Compiled, name: str, edit: Edit) -> Programs:
    graph = copied(compiled.captured.graph)
    node = next(node for node in graph.nodes if node.name == name)
    readers, after = list(node.users), node.next
    replacement = edit(Canonicalizer(graph), node, after)
    if replacement is not None:
        for reader in readers:
            reader.replace_input_with(node, replacement)
    graph.lint()
    return build_programs(replace(compiled.captured, graph=graph), compiled.request).programs


def in_graph(compiled: Compiled) -> Iterator[Mutant]:
    """Yield the programs of changed graphs of a compiled plan."""
    for node in compiled.captured.graph.nodes:
        value = noted(node).value if node.op == "call_function" else None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        for kind, what, edit in _edits(node):
            yield Mutant(kind, str(node.target), what, partial(_changed_programs, compiled, node.name, edit))
