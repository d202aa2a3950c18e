"""Writes that nothing else can see: operators that write into a value of their own, and the form that makes a new one.

    weights = topk(x, 2)[0]; weights.div_(weights.sum())        becomes        weights.div(weights.sum())

A value is its own where no other tensor shares its storage: an operator that never returns its operand or a view made
it, and so are all operators that read it before it is written. A buffer is such a value too: its new value is one more
result of the graph. A part of such a value may be written through a view, if nobody reads an older view afterwards:

    cache[:, 2:] = x                                           becomes        cache = slice_scatter(cache, x, 1, 2)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from ..ops.own_ops import aten
from ..ops.rules import facts
from ..program.program import operator as overload
from ..torch_private import is_composite
from .node_facts import copy_place, noted


@dataclass(frozen=True, slots=True)
class MakingForm:
    """An operator that makes new values in place of one that writes: its target, the places of the arguments that it
    takes (None: all), and which result is the new value of the operand at each place that is written, None for the
    only result. Whoever reads the old operator reads its first result."""

    target: torch._ops.OpOverload
    takes: tuple[int, ...] | None = None
    news: Mapping[int, int | None] = field(default_factory=lambda: {0: None})
    whole: fx.Node | None = None
    """The value of which the first operand is a view of a part, where it is one."""

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments that it takes of those of the operator that writes."""
        return args if self.takes is None else tuple(args[place] for place in self.takes)


def forms_that_make(graph: fx.Graph, state: Collection[fx.Node] = ()) -> Mapping[fx.Node, MakingForm]:
    """Return, for every operator of a graph that writes into values of its own, its form that makes new ones, in order;
    and the form of every norm of a batch. ``state``: the placeholders of buffers that are values of their own."""
    written: dict[fx.Node, fx.Node] = {}
    """The value that holds what each of them made."""
    forms: dict[fx.Node, MakingForm] = {}
    aliases: dict[fx.Node, set[fx.Node]] = {}
    seen: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    """The place of the last operator that wrote each value."""

    def keeps_nothing(reader: fx.Node, node: fx.Node) -> bool:
        """Return whether nothing that shares memory with an operand of ``reader`` is read after ``node``."""
        form, target = forms.get(reader), reader.target
        if _is_fresh(reader) or (form is not None and form.whole is None):
            return True
        is_view = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
        users = (user for user in reader.users if user is not node)
        return (form is not None or is_view) and all(user in seen and keeps_nothing(user, node) for user in users)

    def is_own(value: fx.Node, node: fx.Node, view: fx.Node | None) -> bool:
        """Return whether ``node`` may write a value, or the part of it that a view shows, which must be of its newest
        numbers."""
        names = aliases.setdefault(value, {value})
        readers = {reader for name in names for reader in name.users if reader in seen} - names - {node}
        alone = value in state or (_is_fresh(value) and not _twice(value))
        newest = view is None or seen[view] > last.get(value, -1)
        return alone and newest and all(keeps_nothing(reader, node) for reader in readers)

    for place, node in enumerate(graph.nodes):
        seen[node] = place
        form = _form(node)
        if form is None:
            continue
        targets: list[Any] = [node.args[place] for place in form.news]
        view = targets[0] if form.takes is None and facts(targets[0].target).put_back else None
        targets = targets if view is None else [view.args[0]]
        values = [written.get(target, target) for target in targets]
        if not all(is_own(value, node, view) for value in values):
            continue
        if form.takes is not None:
            forms[node] = form
        elif view is not None and _keeps_type(node, form.target, strides=False):
            forms[node] = replace(form, whole=values[0])
        elif view is None and _keeps_type(node, form.target):
            forms[node], written[node] = form, values[0]
            aliases[values[0]].add(node)
        else:
            continue
        last.update(dict.fromkeys(values, place))
    return forms


def without_writes(graph: fx.Graph, forms: Mapping[fx.Node, MakingForm]) -> Mapping[fx.Node, fx.Node]:
    """Write the operators of a graph that have a form in it: what reads an old value after them reads the new one.
    Return the newest value of each value that was written."""
    newest: dict[fx.Node, fx.Node] = {}
    written: dict[fx.Node, fx.Node] = {}
    """The value that each operator in place wrote, and returns."""

    def now(operand: fx.Node) -> fx.Node:
        return newest.get(written.get(operand, operand), operand)

    for node in list(graph.nodes):
        form = forms.get(node)
        targets: list[Any] = [] if form is None else [node.args[place] for place in form.news]
        node.args, node.kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), now)
        if form is None:
            continue
        values = [written.get(target, target) for target in targets]
        if form.whole is not None:
            newest[form.whole] = _write_part(graph, node, form, newest.get(form.whole, form.whole))
        elif form.takes is None:
            node.target, written[node] = form.target, values[0]
            source: Any = node.args[1] if len(node.args) > 1 else None
            newest[values[0]] = source if _is_handed_on(form.target, noted(node).value, source) else node
        else:
            newest.update(zip(values, _write(graph, node, form), strict=True))
    return newest


def _is_handed_on(target: Any, value: torch.Tensor, source: fx.Node) -> bool:
    """Return whether a copy of a whole value is as its source: nobody needs the copy, or what was there before."""
    if target is not aten.copy.default:
        return False
    given: torch.Tensor = noted(source).value
    alike = (given.dtype, given.shape, given.stride()) == (value.dtype, value.shape, value.stride())
    return alike and not (given.is_conj() or given.is_neg())


def _write(graph: fx.Graph, node: fx.Node, form: MakingForm) -> list[fx.Node]:
    """Write a form with several results before an operator that it replaces. Return the new values."""
    with graph.inserting_before(node):
        made = graph.call_function(form.target, form.arguments(node.args))
        parts = {index: graph.call_function(operator.getitem, (made, index)) for index in (0, *form.news.values())}
    args = fx.node.map_arg(made.args, lambda operand: noted(operand).value)
    with noted(node).value.fake_mode, enable_python_dispatcher():
        results = form.target(*args)
    for part, value in ((made, results), *((part, results[index]) for index, part in parts.items())):
        copy_place(node, part)
        noted(part).value = value
    node.replace_all_uses_with(parts[0])
    graph.erase_node(node)
    return [parts[index] for index in form.news.values()]


def _write_part(graph: fx.Graph, node: fx.Node, form: MakingForm, whole: fx.Node) -> fx.Node:
    """Write an operator that writes a part of a value in its form. Return the value with the new part; what reads the
    operator reads the part of it."""
    view: Any = node.args[0]
    readers, node.target = list(node.users), form.target
    noted(node).value = _made(node, node.target)
    with graph.inserting_after(node):
        new = graph.call_function(overload(facts(view.target).put_back), (whole, node, *view.args[1:]))
    with graph.inserting_after(new):
        part = graph.call_function(view.target, (new, *view.args[1:]))
    for made in (new, part):
        copy_place(node, made)
        noted(made).value = _made(made, made.target)
    for reader in readers:
        reader.replace_input_with(node, part)
    if not readers:
        graph.erase_node(part)
    return new


def _made(node: fx.Node, target: Any) -> Any:
    """Return the result of an operator ``target`` on the arguments of a node."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: noted(operand).value)
    with next(operand.fake_mode for operand in args if isinstance(operand, torch.Tensor)):  # type: ignore[attr-defined]
        return target(*args, **kwargs)


_TRAINING = MakingForm(aten._native_batch_norm_legit_functional.default, (0, 1, 2, 3, 4, 5, 6, 7), {3: 3, 4: 4})
_EVALUATION = MakingForm(aten._native_batch_norm_legit_no_training.default, (0, 1, 2, 3, 4, 6, 7), {})
_WITHOUT_STATE = MakingForm(aten._native_batch_norm_legit.no_stats, (0, 1, 2, 5, 6, 7), {})


def _norm_form(node: fx.Node) -> MakingForm:
    """Return the form of a norm of a batch, which writes its running statistics, though its schema does not say so."""
    if any(statistics is None for statistics in node.args[3:5]):
        return _WITHOUT_STATE
    return _TRAINING if node.args[5] else _EVALUATION


def _form(node: fx.Node) -> MakingForm | None:
    """Return the form of an operator that makes a new value, if all that the operator does is to write its first
    operand: ``aten.add.Tensor`` for ``aten.add_.Tensor``; and the form of a norm of a batch."""
    target: Any = node.target
    if target is aten.batch_norm.default:
        return _norm_form(node)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    form = returning_form(target) if isinstance(node.args[0], fx.Node) else None
    if form is None or not facts(form).exported or is_composite(form):
        return None
    makes = len(form._schema.returns) == 1 and form._schema.returns[0].alias_info is None
    return MakingForm(form) if makes and torch.Tag.nondeterministic_seeded not in form.tags else None


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


def _keeps_type(node: fx.Node, form: torch._ops.OpOverload, strides: bool = True) -> bool:
    """Return whether the new value has the dtype and the shape of the old one, and lies as it does."""
    old: Any = noted(node.args[0]).value  # type: ignore[arg-type]
    if not isinstance(old, torch.Tensor):
        return False
    new = _made(node, form)
    return (new.dtype, new.shape) == (old.dtype, old.shape) and (not strides or new.stride() == old.stride())
