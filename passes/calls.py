"""Nodes of a graph as calls that rules understand: values with their shapes, arguments, the rule of each node; and the
choices that all sizes of a range share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..compiler.capture.node_facts import noted
from ..compiler.layout.collectives import TypeFault
from ..compiler.layout.mesh import Shape
from ..compiler.ops.factors import OpCall, Operand, OpRule, RuleError, opaque
from ..compiler.ops.infer import packed_result
from ..compiler.ops.results import changed, example_of, results_of
from ..compiler.ops.rules import facts, operator_name, rule_for
from ..compiler.program.program import Origin

ValueKey = tuple[fx.Node, int]
"""One tensor: a node, and the index of one of its results."""


def key_of(node: fx.Node) -> ValueKey:
    """Return the tensor that a node stands for; ``getitem`` stands for a result of its operand."""
    if node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def tensors_of(node: fx.Node) -> tuple[Any, ...]:
    """Fake tensors of a node's results."""
    value = noted(node).value
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def fake(key: ValueKey) -> Any:
    """The fake tensor of one result."""
    return tensors_of(key[0])[key[1]]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for tensor operands, in the order in which a call counts them."""
    operands: list[fx.Node] = []
    substitute_nodes((node.args, node.kwargs), operands.append)
    return operands


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by name, in the order of the operator's schema, with its defaults for those left out."""
    target: Any = node.target
    schema = target._schema.arguments
    passed = {**dict(zip((argument.name for argument in schema), node.args, strict=False)), **node.kwargs}
    return {argument.name: passed.get(argument.name, argument.default_value)
            for argument in schema if argument.name in passed or argument.has_default_value()}  # fmt: skip


def insert_call(before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Insert a call into a graph before a node, without facts."""
    with before.graph.inserting_before(before):
        return before.graph.call_function(target, args, kwargs)


def call_of(node: fx.Node) -> OpCall:
    """The node as a call on its global (or, in a local graph, local) shapes."""
    operands: list[Shape] = []

    def operand(of: fx.Node) -> Operand:
        operands.append(tuple(fake(key_of(of)).shape))
        return Operand(len(operands) - 1)

    args, kwargs = substitute_nodes((node.args, node.kwargs), operand)
    results = tuple(tuple(value.shape) for value in tensors_of(node) if isinstance(value, torch.Tensor))
    return OpCall(operator_name(node.target), args, dict(kwargs), tuple(operands), results)


class FakeResults:
    """Results of operators as fake tensors of one graph.

    An operator on operands of the same layouts runs once in a process (``results_of``); running it on fake tensors each
    time takes five times as long.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._fakes: dict[int, torch.Tensor] = {}

    def of(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of an operator on arguments in which nodes stand for their fake tensors."""
        examples = substitute_nodes((args, kwargs), lambda node: example_of(noted(node).value))
        return changed(results_of(target, *examples).values, self._fake)

    def _fake(self, example: torch.Tensor) -> torch.Tensor:
        if id(example) not in self._fakes:  # an example lives as long as the process
            mode = next(noted(node).value.fake_mode for node in self._graph.nodes if node.op == "placeholder")
            with mode:
                fake = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)
            self._fakes[id(example)] = fake
        return self._fakes[id(example)]


class MixedRows(ValueError):
    """The error of an operator in an expert that mixes rows of tokens."""

    def __init__(self, node: fx.Node) -> None:
        drawn = any(facts(operand.target).law for operand in operands_of(node) if operand.op == "call_function")
        what = "draws a random number for each row" if drawn else f"`{str(node.target).split('.')[1]}` mixes the rows"
        self.origin: Origin = noted(node).origin
        super().__init__(f"in `{self.origin.module}`: {what} of tokens that an expert gets")


def mark_packed(graph: fx.Graph) -> None:
    """The pass that marks packed rows of tokens. It takes a canonical graph, and notes on every operator ``packed``,
    the packing of its results, and ``chosen``, the mask that says which tokens are packed. No operator changes.

    Raises:
        MixedRows: an operator would compute with rows that a rank does not have.
    """
    for node in graph.nodes:
        if node.op == "call_function":
            operands = operands_of(node)
            packed = [noted(operand).packed for operand in operands]
            try:
                noted(node).packed = packed_result(call_of(node), packed) if computes(node) else packed[0]
            except TypeFault:
                raise MixedRows(node) from None
            if noted(node).packed is not None:
                chosen = [noted(operand).chosen for operand in operands if noted(operand).chosen is not None]
                noted(node).chosen = operands[1] if computes(node) and facts(node.target).packs else chosen[0]


def rule_of(node: fx.Node) -> tuple[OpRule, bool]:
    """Return the rule of a node, and True where its operator has one. Without one, every dim is needed whole."""
    call = call_of(node)
    try:
        call_rule = rule_for(call)
    except RuleError:
        call_rule = None
    return (opaque(call), False) if call_rule is None else (call_rule, True)


def computes(node: fx.Node) -> bool:
    """Return True for an operator on tensors (``getitem`` only names a result)."""
    return node.op == "call_function" and node.target is not operator.getitem


def outputs(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a graph returns, in order."""
    returned: Any = graph.output_node().args[0]
    return list(returned)


def substitute_nodes(item: Any, change: Callable[[fx.Node], Any]) -> Any:
    """Return an argument with every node in it replaced."""
    rename: Any = change
    return fx.node.map_arg(item, rename)
