"""Writes that nothing else can see: operators that write into a value of their own, and the form that makes a new one.

    weights = topk(x, 2)[0]; weights.div_(weights.sum())        becomes        weights.div(weights.sum())

A value is its own where no other tensor shares its storage: an operator that never returns its operand or a view made
it, and so are all operators that read it before it is written.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..ops.rules import facts
from ..ops.torch_ops import aten
from ..torch_private import is_composite
from .node_facts import noted

Writes = Mapping[fx.Node, torch._ops.OpOverload]
"""The operators of a graph that write, each with its form that makes a new value."""


def own_writes(graph: fx.Graph) -> Writes:
    """Return the operators of a graph that write into values of their own, in order."""
    written: dict[fx.Node, fx.Node] = {}
    """The value that holds what each of them made."""
    forms: dict[fx.Node, torch._ops.OpOverload] = {}
    aliases: dict[fx.Node, set[fx.Node]] = {}
    seen = set[fx.Node]()
    for node in graph.nodes:
        seen.add(node)
        form = _form(node)
        if form is None:
            continue
        target: Any = node.args[0]
        value = written.get(target, target)
        names = aliases.setdefault(value, {value})
        readers = {reader for name in names for reader in name.users if reader in seen} - names - {node}
        shared = any(not (reader in forms or _is_fresh(reader)) for reader in readers)
        if _is_fresh(value) and not (shared or _twice(value)) and _keeps_type(node, form):
            forms[node], written[node] = form, value
            names.add(node)
    return forms


def without_writes(graph: fx.Graph, writes: Writes) -> None:
    """Write the operators of a graph that write into values of their own in the form that makes a new value: what reads
    the old one after them reads the new one."""
    newest: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        for operand in node.all_input_nodes:
            if operand in newest:
                node.replace_input_with(operand, newest[operand])
        if node in writes:
            node.target = writes[node]
            value: Any = node.args[0]
            newest.update(dict.fromkeys([value, *(old for old, new in newest.items() if new is value)], node))


def _form(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the form of an operator that makes a new value, if all that the operator does is to write its first
    operand: ``aten.add.Tensor`` for ``aten.add_.Tensor``."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    form = returning_form(target) if isinstance(node.args[0], fx.Node) else None
    if form is None or not facts(form).exported or is_composite(form):
        return None
    return form if torch.Tag.pointwise in form.tags and torch.Tag.nondeterministic_seeded not in form.tags else None


def returning_form(target: Any) -> torch._ops.OpOverload | None:
    """Return the overload that takes the arguments of an operator in place and returns its result, or None; its name
    may be another (``transpose_.default``, ``transpose.int``)."""
    schema = target._schema
    name, wanted = schema.name.partition("::")[2], [str(argument.type) for argument in schema.arguments]
    packet = getattr(aten, name.rstrip("_"), None) if name.endswith("_") else None
    names = packet.overloads() if packet is not None else ()
    for name in sorted(names, key=lambda name: name != (schema.overload_name or "default")):
        overload: torch._ops.OpOverload = getattr(packet, name)
        if [str(argument.type) for argument in overload._schema.arguments] == wanted:
            return overload
    return None


def _is_fresh(node: fx.Node) -> bool:
    """Return whether the results of an operator share no storage with its operands."""
    maker: Any = node.args[0] if node.target is operator.getitem else node
    target = maker.target
    if maker.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or is_composite(target):
        return False
    return not any(entry.alias_info for entry in (*target._schema.returns, *target._schema.arguments))


def _twice(node: fx.Node) -> bool:
    """Return whether another node stands for the same result of an operator with several."""
    maker: Any = node.args[0]
    return node.target is operator.getitem and sum(user.args[1] == node.args[1] for user in maker.users) > 1


def _keeps_type(node: fx.Node, form: torch._ops.OpOverload) -> bool:
    """Return whether the new value has the dtype, and lies as the old one does."""
    values = fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: noted(operand).value)
    old: Any = noted(node.args[0]).value  # type: ignore[arg-type]
    if not isinstance(old, torch.Tensor):
        return False
    with old.fake_mode:  # type: ignore[attr-defined]
        new = form(*values[0], **values[1])
    return (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
