"""Rows of logits that ranks hold in parts: the softmax, its logarithm, the logarithm of the sum of exponentials and the
entries of targets become terms of each row, which ranks sum. So no rank gathers whole rows.

    logsumexp(x) = l,    log_softmax(x) = x - l,    softmax(x) = exp(x - l),    token_loss(x, t) = l - x[t]

where ``l`` and ``x[t]`` of all operators on the same logits are one ``row_terms``: a maximum and one sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.capture.reach import ancestors
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.rules import facts
from ..calls import ValueKey, key_of
from ..canonical.pad import BoundPads, pad
from ..canonical.rewriter import Canonicalizer
from .propagate import Placed

RowOperators = Mapping[fx.Node, list[fx.Node]]
"""The operators on rows of logits, in order, by the logits."""


def rows_of_logits(graph: fx.Graph) -> RowOperators:
    """Return the operators on rows of the same logits, in order: those of the loss, and of the model itself behind all
    of its submodules. Logits of which there are token losses alone are left out."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    inside: set[fx.Node] = set()  # nodes of submodules, and all that these read
    for node in reversed(graph.nodes):
        of_module = node.op == "call_function" and noted(node).origin.module and not noted(node).in_loss
        if of_module or not inside.isdisjoint(node.users):
            inside.add(node)
    for node in graph.nodes:
        if node.op == "call_function" and _is_of_rows(node) and node not in inside:
            groups.setdefault(_root(_logits_of(node)), []).append(node)
    return {
        root: nodes for root, nodes in groups.items() if any(facts(node.target).of_rows != "loss" for node in nodes)
    }


def sum_padded_rows(graph: fx.Graph, pads: BoundPads) -> None:
    """The pass that writes rows of logits as sums of their parts where padding makes rows longer: ranks split those. It
    takes a canonical graph, and changes it in place."""
    groups = rows_of_logits(graph) if pads else {}
    if groups:
        longer, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        copy_facts(graph.output_node(), longer.output(longer.graph_copy(graph, copies)))
        pad(longer, pads)
        _rewrite(graph, groups, lambda root: noted(copies[root]).value.shape[-1] != noted(root).value.shape[-1])


def sum_split_rows(graph: fx.Graph, groups: RowOperators, placed: Placed, claimed: Collection[ValueKey]) -> None:
    """The pass that writes rows of logits as sums of their parts where a first round of placing splits them. It takes a
    canonical graph, and changes it in place; ``claimed`` values stay."""

    def is_split(root: fx.Node) -> bool:
        last = noted(root).value.dim() - 1
        split = any(at.dim == last for at in placed.splits[key_of(root)].values())
        return split and not any((node, 0) in claimed for node in groups[root])

    _rewrite(graph, groups, is_split)


def _rewrite(graph: fx.Graph, groups: RowOperators, chosen: Callable[[fx.Node], bool]) -> None:
    for root, nodes in groups.items():
        if chosen(root):
            _Rows(graph, root, nodes).rewrite()
    graph.eliminate_dead_code()


def _is_of_rows(node: fx.Node) -> bool:
    """Return whether an operator reduces, or normalizes, the last dim of its logits, and keeps their type."""
    kind = facts(node.target).of_rows
    if kind in ("", "loss"):
        return kind != ""
    value = noted(node.args[0]).value  # type: ignore[arg-type]
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    last = value.dim() > 0 and [dim % value.dim() for dim in dims] == [value.dim() - 1]
    one = kind != "entry" or noted(node).value.shape == (*value.shape[:-1], 1)
    return last and one and noted(node).value.dtype == value.dtype


def _logits_of(node: fx.Node) -> Any:
    """Return the logits of an operator; those of a gather of log probabilities are below these."""
    logits: Any = node.args[0]
    below = facts(node.target).of_rows == "entry" and _is_log_softmax(logits)
    return logits.args[0] if below else logits


def _is_log_softmax(node: fx.Node) -> bool:
    computed = node.op == "call_function" and facts(node.target).of_rows == "log softmax"
    return computed and _is_of_rows(node)


def _root(logits: fx.Node) -> fx.Node:
    """Return the value of which logits are the rows in another shape."""
    while logits.target is aten.reshape.default:
        whole: Any = logits.args[0]
        if noted(whole).value.shape[-1:] != noted(logits).value.shape[-1:]:
            break
        logits = whole
    return logits


def _targets_of(node: fx.Node) -> Any:
    """Return the targets of an operator, in whatever shape; None where it has none."""
    kind = facts(node.target).of_rows
    return node.args[1 if kind == "loss" else 2] if kind in ("loss", "entry") else None


def _plain(targets: fx.Node) -> fx.Node:
    """Return the value of which targets are another shape."""
    while targets.op == "call_function" and facts(targets.target).moves == "shape":
        targets = targets.args[0]  # type: ignore[assignment]
    return targets


class _Rows:
    """The operators on one tensor of logits, in order."""

    def __init__(self, graph: fx.Graph, root: fx.Node, nodes: list[fx.Node]) -> None:
        self._c, self._graph, self._nodes, self._near = Canonicalizer(graph), graph, nodes, nodes[0]
        self._below = {node for node in nodes if _logits_of(node) is not node.args[0]}
        self._logs: dict[fx.Node, fx.Node] = {}
        """The log probabilities of logits in each shape."""
        self._logits = self._rows(root, noted(root).value.shape[-1])
        self._chosen = next((targets for node in nodes if (targets := self._moved(_targets_of(node)))), None)
        count = noted(self._logits).value.shape[0]
        self._terms = self._terms_with(
            self._emit(aten.full.default, [count], 0, dtype=torch.int64) if self._chosen is None else self._chosen
        )

    def _emit(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        node = self._c.emit(self._near, target, *args, **options)
        noted(node).block = noted(self._near).block
        return node

    def _rows(self, value: fx.Node, *last: int) -> fx.Node:
        """Return a value with one dim of rows."""
        shape = noted(value).value.shape
        rows = shape[: len(shape) - len(last)].numel()
        return value if tuple(shape) == (rows, *last) else self._emit(aten.reshape.default, value, [rows, *last])

    def _moved(self, targets: fx.Node | None) -> fx.Node | None:
        """Move targets before the first of these operators, and return them; None where they depend on one."""
        if targets is None:
            return None
        behind = {targets, *ancestors([targets])}
        if not behind.isdisjoint(self._nodes):
            return None
        later = self._near
        while (later := later.next).op != "output":
            if later in behind:
                self._near.prepend(later)
                later = self._near
        return targets

    def _terms_with(self, targets: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return the logarithms of the sums of exponentials, and the targets' entries, of all rows."""
        pair = self._emit(OPS.row_terms.default, self._logits, self._rows(targets))
        first, second = (self._emit(operator.getitem, pair, at, val=noted(pair).value[at]) for at in range(2))
        return first, second

    def rewrite(self) -> None:
        """Rewrite the operators, each in its place."""
        for node in self._nodes:
            self._near = node
            kind, value = facts(node.target).of_rows, noted(node).value
            targets, (log_sum, entry) = _targets_of(node), self._terms
            if targets is not None and (self._chosen is None or _plain(targets) is not _plain(self._chosen)):
                if kind == "loss":
                    continue
                log_sum, entry = self._terms_with(targets)
            if kind == "loss":
                kept = self._emit(aten.ne.Scalar, targets, node.args[2])
                new = self._emit(aten.mul.Tensor, self._emit(aten.sub.Tensor, log_sum, entry), kept)
            elif kind == "entry":
                new = self._emit(aten.sub.Tensor, entry, log_sum) if node in self._below else entry
                new = self._emit(aten.reshape.default, new, list(value.shape))
            elif kind == "log sum":
                new = self._emit(aten.reshape.default, log_sum, list(value.shape))
            else:
                logits: Any = node.args[0]
                if logits not in self._logs:
                    total = self._emit(aten.reshape.default, log_sum, [*value.shape[:-1], 1])
                    self._logs[logits] = self._emit(aten.sub.Tensor, logits, total)
                new = self._logs[logits]
                new = self._emit(aten.exp.default, new) if kind == "softmax" else new
            self._c.replace(node, new)
