"""The rewriter of one graph: rewrites of operators get it, and emit new nodes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

from ...compiler.capture.node_facts import copy_place, noted
from ...compiler.ops.rules import TABLE, OpRow
from ...compiler.program.binding import Binding
from ...compiler.program.program import operator
from ..calls import FakeResults


class Canonicalizer:
    """The rewriting of one graph in place, node by node, through a table of rewrites."""

    def __init__(self, graph: fx.Graph, ranged: bool = False) -> None:
        self.graph, self.ranged = graph, ranged
        self.keys: dict[str, int] = {}
        self.iotas: dict[fx.Node, tuple[int, int]] = {}
        """The nodes that count 0, 1, … along one dim, as ``(dim, size)``."""
        self.results = FakeResults(graph)

    def emit(self, near: fx.Node, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        """Add a node before ``near``, with its provenance. ``val`` defaults to the operator's result on fake
        tensors."""
        with self.graph.inserting_before(near):
            node = self.graph.call_function(target, args, kwargs)
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
        """Return the key of a random operator. Its name is the module and its ordinal there, so no plan changes it."""
        module = noted(node).origin.module or "model"
        ordinal = self.keys.get(module, 0)
        self.keys[module] = ordinal + 1
        with self.graph.inserting_after(rng):
            key = self.graph.placeholder(f"key_{module.replace('.', '_')}_{ordinal}")
        noted(key).binding = Binding("key", f"{module}.{ordinal}")
        noted(key).value = _fake_like(node, (), torch.int64)
        return key

    def rewrite(self) -> None:
        """Rewrite every node once, in order."""
        self.rng = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        for node in list(self.graph.nodes):
            if node.op == "call_function" and (rewrite := REWRITES.get(node.target)) is not None:
                rewrite(self, node)


Rewrite = Callable[[Canonicalizer, Any], None]
"""A function that rewrites one operator: it puts others in a node's place."""
REWRITES: dict[Any, Rewrite] = {}
"""The rewrite of each operator, as ``rewrites`` notes them. An operator without one keeps its form."""
PARTS: dict[Any, Callable[[fx.Node], Any]] = {}
"""For each operator without a rule a function that returns the call's meaning in plain torch, or None to keep the
call."""

_Code = TypeVar("_Code", bound=Callable[..., Any])


def rewrites(*targets: Any) -> Callable[[_Code], _Code]:
    """Note the decorated function as the rewrite of these operators."""

    def note(rewrite: _Code) -> _Code:
        REWRITES.update(dict.fromkeys(targets, rewrite))
        return rewrite

    return note


def takes_apart(*targets: Any) -> Callable[[_Code], _Code]:
    """Note the decorated function as the one that makes the parts of these operators."""

    def note(parts: _Code) -> _Code:
        PARTS.update(dict.fromkeys(targets, parts))
        return parts

    return note


def targets_where(holds: Callable[[OpRow], bool]) -> list[Any]:
    """Return torch's operators whose row fulfils a condition."""
    return [operator(name) for name, row in TABLE.items() if name.startswith("aten.") and holds(row)]


def _fake_like(node: fx.Node, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    value = noted(node).value
    value = value[0] if isinstance(value, (tuple, list)) else value
    with value.fake_mode:
        return torch.empty(shape, dtype=dtype)
