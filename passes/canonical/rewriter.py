"""The rewriter of the canonical form, and the tables of its rewrites and decompositions by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

from ...compiler.capture.node_facts import copy_place, noted
from ...compiler.ops.rules import TABLE, OpRow
from ...compiler.program.binding import Binding
from ...compiler.program.program import operator
from ..calls import FakeResults, insert_call, tensors_of


class Canonicalizer:
    """The rewriter of one graph in place, node by node, by the table of rewrites. Each rewrite gets it, and emits nodes
    with it."""

    def __init__(self, graph: fx.Graph, ranged: bool = False) -> None:
        self.graph, self.ranged = graph, ranged
        self.keys: dict[str, int] = {}
        self.iotas: dict[fx.Node, tuple[int, int]] = {}
        """The nodes that count 0, 1, … along one dim, as ``(dim, size)``."""
        self.results = FakeResults(graph)

    def emit(self, near: fx.Node, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        """Add a node before ``near``, with its place in the model. ``val`` defaults to the operator's result on fake
        tensors."""
        node = insert_call(near, target, args, kwargs)
        copy_place(near, node)
        noted(node).value = self.results.of(target, args, kwargs) if val is None else val
        return node

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Replace ``node`` by ``by`` for all readers."""
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)
        if node in self.iotas:
            self.iotas[by] = self.iotas.pop(node)

    def stream(self, node: fx.Node, rng: fx.Node) -> fx.Node:
        """Return the key of a random operator's stream. Its name is the module and the operator's number there, which
        no plan changes."""
        module = noted(node).origin.module or "model"
        ordinal = self.keys.get(module, 0)
        self.keys[module] = ordinal + 1
        with self.graph.inserting_after(rng):
            key = self.graph.placeholder(f"key_{module.replace('.', '_')}_{ordinal}")
        noted(key).binding = Binding("key", f"{module}.{ordinal}")
        with tensors_of(node)[0].fake_mode:
            noted(key).value = torch.empty((), dtype=torch.int64)
        return key

    def rewrite(self) -> None:
        """Rewrite every node once, in order."""
        self.rng = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        for node in list(self.graph.nodes):
            if node.op == "call_function" and (rewrite := REWRITES.get(node.target)) is not None:
                rewrite(self, node)


Rewrite = Callable[[Canonicalizer, Any], None]
"""A function that replaces a node by others."""
REWRITES: dict[Any, Rewrite] = {}
"""The rewrite of each operator, as ``rewrites`` notes them. An operator without one keeps its form."""
PARTS: dict[Any, Callable[[fx.Node], Any]] = {}
"""For an operator without a rule, a function from its call to the same function in plain torch, or to None where the
call stays."""

_Rewrite = TypeVar("_Rewrite", bound=Callable[..., Any])


def rewrites(*targets: Any) -> Callable[[_Rewrite], _Rewrite]:
    """Note the decorated function as the rewrite of these operators."""

    def note(rewrite: _Rewrite) -> _Rewrite:
        REWRITES.update(dict.fromkeys(targets, rewrite))
        return rewrite

    return note


def takes_apart(*targets: Any) -> Callable[[_Rewrite], _Rewrite]:
    """Note the decorated function as the decomposition of these operators."""

    def note(parts: _Rewrite) -> _Rewrite:
        PARTS.update(dict.fromkeys(targets, parts))
        return parts

    return note


def targets_where(holds: Callable[[OpRow], bool]) -> list[Any]:
    """Return torch's operators whose row fulfils a condition."""
    return [operator(name) for name, row in TABLE.items() if name.startswith("aten.") and holds(row)]
