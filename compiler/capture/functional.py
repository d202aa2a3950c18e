"""Functionalization: a traced graph without operators that write, or that return sometimes a view and sometimes a copy.

    weights = topk(x, 2)[0]; weights.div_(weights.sum())        becomes        weights.div(weights.sum())

A value may be written if nothing aliases it: an operator that never returns its operand or a view made it, and so are
all operators that read it before the write. A buffer is such a value too: its new value is one more result of the
graph. A part of such a value may be written through a view, if nobody reads an older view afterwards:

    cache[:, 2:] = x                                            becomes        cache = slice_scatter(cache, x, 1, 2)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.utils._pytree import tree_leaves

from ..ops.own_ops import aten
from ..ops.rules import facts
from ..program.program import operator as overload
from ..torch_private import decomposed, is_composite
from .faults import CaptureError
from .node_facts import copy_place, noted
from .parts import composite_parts, inline

_REGION: Any = torch.ops.higher_order.wrap_with_set_grad_enabled


def functional(exported: ExportedProgram) -> ExportedProgram:
    """Return an export whose graph is functional, as after ``run_decompositions({})``, but for conjugates, which are
    not copied before they are read.

    A graph that writes only into unaliased values and buffers is rewritten in place: regions are inlined, and equal
    composite calls are traced once. For any other graph torch traces the whole model twice more.
    """
    buffers = _unaliased_buffers(exported)
    written = _rewritten(exported.graph, exported.graph_module, buffers)
    if written is None:
        return decomposed(exported)
    results: Any = exported.graph.output_node().args[0]
    exported.graph_signature.output_specs[:0] = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(new.name), buffers[node])
        for node, new in zip(written, results, strict=False)
    ]
    return exported


def _unaliased_buffers(exported: ExportedProgram) -> Mapping[fx.Node, str]:
    """Return the placeholders, with their names, of buffers that share memory with nothing, in order."""
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    nodes = exported.graph.find_nodes(op="placeholder")
    values = {**exported.constants, **exported.state_dict}
    memory = {name: value.untyped_storage()._cdata for name, value in values.items() if isinstance(value, torch.Tensor)}
    uses = Counter(memory.values())
    return {
        node: str(spec.target)
        for node in nodes
        if (spec := specs[node.name]).kind is InputKind.BUFFER and uses[memory[str(spec.target)]] == 1
    }


def _rewritten(graph: fx.Graph, module: fx.GraphModule, buffers: Collection[fx.Node]) -> Sequence[fx.Node] | None:
    """Rewrite a graph, and return the buffers that it writes, in order: their new values are its first results. Return
    None, and leave the graph as it was, if it writes anything else, or may."""
    bodies = {region: _body(module, region) for region in graph.find_nodes(op="call_function", target=_REGION)}
    known = {*bodies, *(region.args[1] for region in bodies)}
    forms = {part: out_of_place_forms(part, buffers) for part in (graph, *bodies.values())}
    nodes = [node for part in forms for node in part.nodes if node not in known]
    formed = {node: form.target for part in forms.values() for node, form in part.items()}
    if not all(_is_plain(node, formed.get(node, node.target)) for node in nodes):
        return None
    parts: dict[str, fx.Graph] = {}
    for node in nodes:
        if node not in formed and is_composite(node.target) and (call := _call_key(node)) not in parts:
            if not isinstance(next(iter(tree_leaves(noted(node).value)), None), FakeTensor):
                return None
            decomposed_call = composite_parts(node)
            if decomposed_call is None or not all(map(_is_view_or_copy, decomposed_call.nodes)):
                return None
            parts[call] = decomposed_call
    newest = {part: _without_writes(part, forms[part]) for part in forms}[graph]
    written, output = [node for node in buffers if node in newest], graph.output_node()
    results: Any = output.args[0]
    output.args = ((*map(newest.__getitem__, written), *results),)
    for region, body in bodies.items():
        inline(graph, region, body, region.args[2:], placed=True)
    for node in list(graph.nodes):
        if is_composite(node.target):
            inline(graph, node, parts[_call_key(node)], node.all_input_nodes)
    graph.eliminate_dead_code()
    return written


def _body(module: fx.GraphModule, region: fx.Node) -> fx.Graph:
    inner: Any = getattr(module, region.args[1].target)  # type: ignore[union-attr, arg-type]
    graph: fx.Graph = inner.graph
    return graph


def _is_plain(node: fx.Node, target: Any) -> bool:
    """Return whether an operator, with ``target`` in place of its own, writes to no tensor and returns tensors of known
    shapes only."""
    if node.op != "call_function" or target is operator.getitem:
        return node.op != "get_attr"
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or not facts(target).exported:
        return False
    results = [value for value in tree_leaves(noted(node).value) if value is not None]
    return all(isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape) for value in results)


def _is_view_or_copy(part: fx.Node) -> bool:
    target: Any = part.target
    if part.op != "call_function" or target is operator.getitem or target is aten._assert_tensor_metadata.default:
        return part.op != "get_attr"
    row = facts(target)
    plain = row.moves in ("copy", "shape") or row.casts or row.law != ""
    return _is_plain(part, target) and (
        plain or any(result.alias_info is not None for result in target._schema.returns)
    )


def _call_key(node: fx.Node) -> str:
    """Return a key that is equal for calls that decompose into the same parts."""
    places = {operand: at for at, operand in enumerate(node.all_input_nodes)}

    def described(operand: fx.Node) -> str:
        value = noted(operand).value
        lies = f"{list(value.shape)} {value.stride()} {value.storage_offset()} {value.device}"
        lies += f" {value.is_conj()} {value.is_neg()}"  # facts of a tensor that torch may not have written yet
        return f"{places[operand]}: {value.dtype} {lies}"

    return f"{node.target} {fx.node.map_arg((node.args, dict(node.kwargs)), described)}"


# ---- out-of-place forms of operators that write


@dataclass(frozen=True, slots=True)
class OutOfPlace:
    """The out-of-place form of an operator that writes: ``aten.add.Tensor`` for ``aten.add_.Tensor``. Readers of the
    old operator read its first result."""

    target: torch._ops.OpOverload
    takes: tuple[int, ...] | None = None
    """The places of the arguments that it takes; None for all."""
    new_values: Mapping[int, int | None] = field(default_factory=lambda: {0: None})
    """The number of the result that is the new value, by the place of each written operand; None for the only
    result."""
    whole: fx.Node | None = None
    """The base of the first operand, where that is a view of a part of it."""


_TRAINING = OutOfPlace(aten._native_batch_norm_legit_functional.default, (0, 1, 2, 3, 4, 5, 6, 7), {3: 3, 4: 4})


_EVALUATION = OutOfPlace(aten._native_batch_norm_legit_no_training.default, (0, 1, 2, 3, 4, 6, 7), {})


_WITHOUT_STATE = OutOfPlace(aten._native_batch_norm_legit.no_stats, (0, 1, 2, 5, 6, 7), {})


def out_of_place_forms(graph: fx.Graph, buffers: Collection[fx.Node]) -> Mapping[fx.Node, OutOfPlace]:
    """Return the out-of-place forms of the operators of a graph that write into unaliased values, and of all batch
    norms, in order. ``buffers``: the placeholders of unaliased buffers."""
    written: dict[fx.Node, fx.Node] = {}
    """The value that each of them writes."""
    forms: dict[fx.Node, OutOfPlace] = {}
    aliases: dict[fx.Node, set[fx.Node]] = {}
    seen: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    """The place of the last operator that wrote each value."""

    def is_dead(reader: fx.Node, node: fx.Node) -> bool:
        """Return whether no result of ``reader`` that aliases an operand is read after ``node``."""
        form, target = forms.get(reader), reader.target
        if _is_fresh(reader) or (form is not None and form.whole is None):
            return True
        is_view = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
        users = (user for user in reader.users if user is not node)
        return (form is not None or is_view) and all(user in seen and is_dead(user, node) for user in users)

    def may_write(value: fx.Node, node: fx.Node, view: fx.Node | None) -> bool:
        """Return whether nobody else sees that ``node`` writes a value, or a part of it through a view of its newest
        contents."""
        names = aliases.setdefault(value, {value})
        readers = {reader for name in names for reader in name.users if reader in seen} - names - {node}
        unaliased = value in buffers or (_is_fresh(value) and not _is_read_twice(value))
        newest = view is None or seen[view] > last.get(value, -1)
        return unaliased and newest and all(is_dead(reader, node) for reader in readers)

    for place, node in enumerate(graph.nodes):
        seen[node] = place
        form = _out_of_place(node)
        if form is None:
            continue
        targets: list[Any] = [node.args[place] for place in form.new_values]
        view = targets[0] if form.takes is None and facts(targets[0].target).put_back else None
        targets = targets if view is None else [view.args[0]]
        values = [written.get(target, target) for target in targets]
        if not all(may_write(value, node, view) for value in values):
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


def _out_of_place(node: fx.Node) -> OutOfPlace | None:
    """Return the out-of-place form of an operator that only writes its first operand, or of a batch norm, which writes
    its running statistics though its schema does not say so."""
    target: Any = node.target
    if target is aten.batch_norm.default:
        if None in node.args[3:5]:
            return _WITHOUT_STATE
        return _TRAINING if node.args[5] else _EVALUATION
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    form = returning_form(target) if isinstance(node.args[0], fx.Node) else None
    if form is None or not facts(form).exported or is_composite(form):
        return None
    makes = len(form._schema.returns) == 1 and form._schema.returns[0].alias_info is None
    return OutOfPlace(form) if makes and torch.Tag.nondeterministic_seeded not in form.tags else None


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


def _is_read_twice(node: fx.Node) -> bool:
    """Return whether two nodes stand for one result of an operator with several."""
    maker: Any = node.args[0]
    return node.target is operator.getitem and sum(user.args[1] == node.args[1] for user in maker.users) > 1


def _keeps_type(node: fx.Node, form: torch._ops.OpOverload, strides: bool = True) -> bool:
    """Return whether the new value has the dtype and the shape of the old one, and lies as it does."""
    old: Any = noted(node.args[0]).value  # type: ignore[arg-type]
    if not isinstance(old, torch.Tensor):
        return False
    new = _fake_result(node, form)
    return (new.dtype, new.shape) == (old.dtype, old.shape) and (not strides or new.stride() == old.stride())


def _fake_result(node: fx.Node, target: Any) -> Any:
    """Return the fake result of an operator ``target`` on the arguments of a node."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: noted(operand).value)
    with next(operand.fake_mode for operand in args if isinstance(operand, torch.Tensor)):  # type: ignore[attr-defined]
        return target(*args, **kwargs)


def _without_writes(graph: fx.Graph, forms: Mapping[fx.Node, OutOfPlace]) -> Mapping[fx.Node, fx.Node]:
    """Replace operators by their out-of-place forms: what reads a value after a write reads the new value. Return the
    last new value of each value that was written."""
    newest: dict[fx.Node, fx.Node] = {}
    written: dict[fx.Node, fx.Node] = {}
    """The value that each operator in place wrote, and returns."""

    def now(operand: fx.Node) -> fx.Node:
        return newest.get(written.get(operand, operand), operand)

    for node in list(graph.nodes):
        form = forms.get(node)
        targets: list[Any] = [] if form is None else [node.args[place] for place in form.new_values]
        node.args, node.kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), now)
        if form is None:
            continue
        values = [written.get(target, target) for target in targets]
        if form.whole is not None:
            newest[form.whole] = _scatter_part(graph, node, form, newest.get(form.whole, form.whole))
        elif form.takes is None:
            node.target, written[node] = form.target, values[0]
            source: Any = node.args[1] if len(node.args) > 1 else None
            newest[values[0]] = source if _is_same_copy(form.target, noted(node).value, source) else node
        else:
            newest.update(zip(values, _insert_form(graph, node, form, form.takes), strict=True))
    return newest


def _is_same_copy(target: Any, value: torch.Tensor, source: fx.Node) -> bool:
    """Return whether an operator copies a whole value, dtype and strides as they are: its readers can read the
    source."""
    if target is not aten.copy.default:
        return False
    old: torch.Tensor = noted(source).value
    alike = (old.dtype, old.shape, old.stride()) == (value.dtype, value.shape, value.stride())
    return alike and not (old.is_conj() or old.is_neg())


def _insert_form(graph: fx.Graph, node: fx.Node, form: OutOfPlace, takes: Sequence[int]) -> list[fx.Node]:
    """Replace an operator by a form with several results. Return the new values of its operands."""
    with graph.inserting_before(node):
        call = graph.call_function(form.target, tuple(node.args[place] for place in takes))
        parts = {at: graph.call_function(operator.getitem, (call, at)) for at in (0, *form.new_values.values())}
    args = fx.node.map_arg(call.args, lambda operand: noted(operand).value)
    with noted(node).value.fake_mode, enable_python_dispatcher():
        results = form.target(*args)
    for part, value in ((call, results), *((part, results[at]) for at, part in parts.items())):
        copy_place(node, part)
        noted(part).value = value
    node.replace_all_uses_with(parts[0])
    graph.erase_node(node)
    return [parts[at] for at in form.new_values.values()]


def _scatter_part(graph: fx.Graph, node: fx.Node, form: OutOfPlace, whole: fx.Node) -> fx.Node:
    """Replace an operator that writes a part of a value, and return the value with the new part. Readers of the
    operator read that part of it."""
    view: Any = node.args[0]
    readers, node.target = list(node.users), form.target
    noted(node).value = _fake_result(node, node.target)
    with graph.inserting_after(node):
        new = graph.call_function(overload(facts(view.target).put_back), (whole, node, *view.args[1:]))
    with graph.inserting_after(new):
        part = graph.call_function(view.target, (new, *view.args[1:]))
    for added in (new, part):
        copy_place(node, added)
        noted(added).value = _fake_result(added, added.target)
    for reader in readers:
        reader.replace_input_with(node, part)
    if not readers:
        graph.erase_node(part)
    return new


# ---- buffers that a forward assigns, and where their new values are computed


@contextmanager
def assigned_in_place(model: nn.Module) -> Iterator[None]:
    """Enter a block in which assignments to buffers (``self.mean = ...``) become writes in place: a trace sees only
    those.

    Raises:
        CaptureError: what is assigned is no tensor of the buffer's shape and dtype. A buffer without elements may
            become anything.
    """
    buffers = [(path, module, name, value) for path, module in model.named_modules()
             for name, value in module.named_buffers(recurse=False) if value.numel()]  # fmt: skip
    yield
    assigned: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
    for path, module, name, value in buffers:
        new: Any = getattr(module, name, None)
        if new is value:
            continue
        now, then = _type_text(new), _type_text(value)
        if now != then:
            called = f"{path}.{name}" if path else name
            help_ = "register it with that shape and type, or keep it as a plain attribute"
            raise CaptureError("other", f"the buffer `{called}` becomes {now}, not {then}", help=help_)
        assigned.append((module, name, value, new.detach().clone()))  # it may be another buffer, assigned too
    for module, name, value, new in assigned:
        setattr(module, name, value.copy_(new))


def _type_text(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")


def move_updates(updates: Mapping[str, fx.Node], buffers: Mapping[str, fx.Node], graph: fx.Graph) -> None:
    """Move the copies into buffers from the graph's end to where each new value is computed. If that is a placeholder,
    they move behind the readers of the buffer."""
    tails: dict[str, list[fx.Node]] = {}
    computed = dict(updates)
    for name in updates:
        tails[name] = []
        while _is_copy(computed[name]) and len(computed[name].users) < 2:
            node = computed[name]
            tails[name].append(node)
            computed[name] = node.args[-1 if node.target is aten.copy.default else 0]  # type: ignore[assignment]
    moved = {node for tail in tails.values() for node in tail}
    order = {node: index for index, node in enumerate(graph.nodes)}
    for name, tail in tails.items():
        last = computed[name]
        if last.op == "placeholder":
            readers = {*(buffers[name].users if name in buffers else ()), *last.users} - moved
            last = max(readers, key=order.__getitem__, default=graph.find_nodes(op="placeholder")[-1])
        for node in reversed(tail):
            last.append(node)
            copy_place(last, node)
            last = node


def _is_copy(node: fx.Node) -> bool:
    return node.target is aten.copy.default or facts(node.target).moves == "copy"
