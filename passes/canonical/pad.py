"""Padding: a dim that axes do not divide becomes longer in all values that have it, and its extra entries change no
result.

Shapes stay global, so this is a rewrite of the graph before anything is placed. An operator whose rule lets a padded
factor be split computes on the longer dim. Before a reduction the padding is filled with the reduction's neutral
number, and so gets no gradient. An operator that needs the dim whole, or reads it from elsewhere in its real size,
reads it cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import FIXED, made_of
from ...compiler.ops.factors import OpCall, OpRule, fill_operands
from ...compiler.ops.own_ops import OPS
from ...compiler.ops.rules import facts, localize
from ...compiler.padding.flow import (
    Extra,
    Extras,
    PaddingFault,
    follow_padding,
    locate,
    place_of_part,
    point,
    reduction_of,
)
from ...compiler.padding.pads import Pad, padded_shape
from ...compiler.program.binding import Binding
from ..calls import (
    ValueKey,
    call_of,
    computes,
    fake,
    insert_call,
    key_of,
    operands_of,
    outputs,
    rule_of,
    substitute_nodes,
    tensors_of,
)

BoundPads = Mapping[Binding, tuple[Pad, ...]]
"""The paddings of placeholders, by their binding."""
_SAFE = (1.0, 0.5)
"""Fill values for an operator that is singular at its padding: at one of them it has a value and a slope."""


def pad(graph: fx.Graph, pads: BoundPads) -> None:
    """The pass of padding. It takes a canonical graph and the paddings of its placeholders, and changes the graph in
    place: dims become longer, with operators that grow, fill and cut padding where a reader needs that."""
    if pads:
        _Padder(graph).run(pads)


@dataclass(slots=True)
class _Need:
    """The padding to cut off, to add and to fill in one operand, so that its operator can compute on padded factors."""

    cut: list[Extra] = field(default_factory=list)
    grow: list[Extra] = field(default_factory=list)
    fill: list[tuple[Extra, float]] = field(default_factory=list)


class _Padder:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        nodes = [node for node in graph.nodes if computes(node)]
        # calls and rules on the model's sizes
        self.calls: dict[fx.Node, OpCall] = {node: call_of(node) for node in nodes}
        self.rules: dict[fx.Node, OpRule] = {node: rule_of(node)[0] for node in nodes}
        self.extras: dict[ValueKey, Extras] = {}
        self.pure = made_of(graph, FIXED)
        self.inserted: dict[tuple[Any, ...], fx.Node] = {}

    def run(self, pads: BoundPads) -> None:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self._placeholder(node, pads)
            elif computes(node):
                self._operator(node)
            elif node.op == "call_function":  # one result of several
                noted(node).value = fake(key_of(node))
        out, every = self.graph.output_node(), outputs(self.graph)
        results = [self._result(node, key, out) for key, node in zip(noted(out).results, every, strict=True)]
        out.args = (tuple(results),)
        self.graph.lint()

    def _result(self, node: fx.Node, key: Binding, out: fx.Node) -> fx.Node:
        """Return an output's value without padding. Tensors that the model returns keep padding at a dim's end: to cut
        it, a rank would need the whole dim."""
        extras = self.extras.get(key_of(node), ())
        returned = key.kind == "output"
        return self._without(node, [extra for extra in extras if not returned or extra.outer > 1], out)

    def _placeholder(self, node: fx.Node, pads: BoundPads) -> None:
        rows, value = pads.get(noted(node).binding, ()), noted(node).value
        with value.fake_mode:
            noted(node).value = torch.empty(padded_shape(value.shape, rows), dtype=value.dtype) if rows else value
        self.extras[node, 0] = tuple(Extra(row.dim, row.outer, row.real, row.padded) for row in rows)

    def _operator(self, node: fx.Node) -> None:
        operands = operands_of(node)
        if not any(self.extras.get(key_of(n)) for n in operands):
            return
        before = node.args, node.kwargs, noted(node).value
        try:
            self._compute_padded(node, self._needs(node, operands))
        except (PaddingFault, ValueError, RuntimeError, TypeError):  # a rule or operator takes no longer dims
            node.args, node.kwargs, noted(node).value = before
            cut_operands = iter([self._without(n, self.extras.get(key_of(n), ()), node) for n in operands])
            node.args, node.kwargs = substitute_nodes((node.args, node.kwargs), lambda _: next(cut_operands))
            for index in range(len(self.rules[node].results)):
                self.extras[node, index] = ()

    # ---- what an operator needs

    def _needs(self, node: fx.Node, operands: Sequence[fx.Node]) -> list[_Need]:
        """Return the changes to each operand after which the operator computes padded, as far as its rule allows."""
        rule, needs = self.rules[node], [_Need() for _ in operands]
        parts: dict[str, dict[int, tuple[Any, Extra]]] = {}
        for index, (operand, dims) in enumerate(zip(operands, rule.operands, strict=True)):
            for extra in self.extras.get(key_of(operand), ()):
                place = locate(rule, dims, extra, real=True)
                counted = extra.outer > 1 and facts(node.target).counted == (index, extra.dim)
                if place is None or place[0] in rule.whole or counted:
                    needs[index].cut.append(extra)
                else:
                    parts.setdefault(place[0], {})[index] = place[1], extra
        for name, sides in parts.items():
            part = next(iter(sides.values()))[0]
            at = {index: place_of_part(rule.sizes, dims, name, part) for index, dims in enumerate(rule.operands)}
            bare = {index: (part, Extra(*place)) for index, place in at.items() if place and index not in sides}
            alike = all(other == part for other, _ in sides.values())
            makes = all(key_of(operands[index])[0] in self.pure for index in bare)
            fills = self._fills(node, rule, name, {**sides, **bare}) if alike and makes else None
            if fills is None:
                for index, (_, extra) in sides.items():
                    needs[index].cut.append(extra)
                continue
            for index, (_, extra) in bare.items():
                needs[index].grow.append(extra)
            for index, value in fills.items():
                needs[index].fill.append(({**sides, **bare}[index][1], value))
        return needs

    def _fills(self, node: fx.Node, rule: OpRule, name: str, sides: Mapping[int, tuple[Any, Extra]]) -> Any:
        """Return the fill value for each operand's padding with which it changes no result; None where there is
        none."""
        held = {index: extra.held for index, (_, extra) in sides.items()}
        if all(any(name in names for names in dims) for dims in rule.results):
            return self._safe(node, held)
        op = str(node.target)
        if facts(op).looks_up:
            return {}
        if (reduction := reduction_of(op)) is not None:
            return {0: reduction.value} if list(held) == [0] else None
        alone = all(frozenset({index}) in rule.linear for index in held)
        if alone and len(held) > 1:  # a product: zeros in one operand give the other's padding no gradient
            return {index: 0.0 for index, value in held.items() if value != 0.0}
        # zeros in a sum would still get a gradient: filling stops it
        return dict.fromkeys(held, 0.0) if alone or frozenset(held) in rule.linear else None

    def _safe(self, node: fx.Node, held: Mapping[int, float | None]) -> dict[int, float] | None:
        """Return fill values for an elementwise operator that has no value or no slope at its padding (a logarithm of
        0)."""
        call = self.calls[node]
        if not facts(call.op).elementwise:
            return {}
        dtypes = [fake(key_of(n)).dtype for n in operands_of(node)]
        values = [held.get(index) for index in range(len(dtypes))]
        if not any(dtype.is_floating_point for dtype in dtypes) or point(call, values, dtypes)[1]:
            return {}
        for safe in _SAFE:
            if point(call, [safe if index in held else value for index, value in enumerate(values)], dtypes)[1]:
                return dict.fromkeys(held, safe)
        return None

    # ---- the operator on longer dims

    def _compute_padded(self, node: fx.Node, needs: Sequence[_Need]) -> None:
        operands = [self._prepared(n, need, node) for n, need in zip(operands_of(node), needs, strict=True)]
        carried = [self.extras.get(key_of(n), ()) for n in operands]
        call, rule = self.calls[node], self.rules[node]
        parts = {}
        for extras, dims in zip(carried, rule.operands, strict=True):
            for extra in extras:
                place = locate(rule, dims, extra, real=True)
                assert place is not None
                parts[place[0]] = place[1]
        shapes = [list(shape) for shape in call.results]
        for shape, dims in zip(shapes, rule.results, strict=True):
            for name, part in parts.items():
                at = place_of_part(rule.sizes, dims, name, part)
                if at is not None:
                    if shape[at[0]] != at[1] * at[2]:
                        raise PaddingFault(f"dim {at[0]} of {node.name} would be padded twice")
                    shape[at[0]] = at[1] * at[3]
        args, kwargs = localize(call, tuple(tuple(fake(key_of(n)).shape) for n in operands), tuple(map(tuple, shapes)))
        node.args, node.kwargs = fill_operands(args, operands), fill_operands(kwargs, operands)
        mode = fake(key_of(operands[0])).fake_mode
        fakes = substitute_nodes((node.args, node.kwargs), lambda n: fake(key_of(n)))
        with mode:
            target: Any = node.target
            noted(node).value = target(*fakes[0], **fakes[1])
        result_shapes = [list(value.shape) for value in tensors_of(node) if isinstance(value, torch.Tensor)]
        if result_shapes != shapes:
            raise PaddingFault(f"{node.name} makes {result_shapes}, not {shapes}")
        dtypes = [fake(key_of(n)).dtype for n in operands]
        for index, extras in enumerate(follow_padding(call_of(node), carried, dtypes)):
            self.extras[node, index] = tuple(extra for extra in extras if extra.real is not None)

    def _prepared(self, operand: fx.Node, need: _Need, reader: fx.Node) -> fx.Node:
        operand = self._without(operand, need.cut, reader)
        for extra in need.grow:
            operand = self._emit(OPS.grow_pad.default, operand, extra, (), reader)
        for extra, value in need.fill:
            if not (operand.target is OPS.fill_pad.default and operand.args[5] == value == extra.held):
                operand = self._emit(OPS.fill_pad.default, operand, extra, (value,), reader)
        return operand

    def _without(self, operand: fx.Node, extras: Sequence[Extra], reader: fx.Node) -> fx.Node:
        """Return the value without its padding in these dims."""
        for extra in extras:
            operand = self._emit(OPS.cut_pad.default, operand, extra, (), reader)
        return operand

    def _emit(self, target: Any, x: fx.Node, extra: Extra, more: tuple[float, ...], reader: fx.Node) -> fx.Node:
        """Insert an operator on padding before the first node that reads its result; later readers share it."""
        args = (x, extra.dim, extra.outer, extra.real, extra.padded, *more)
        block = noted(reader).origin.module
        key = (target, args, block)
        if key in self.inserted:
            return self.inserted[key]
        node = self.inserted[key] = insert_call(reader, target, args)
        value = fake(key_of(x))
        with value.fake_mode:
            noted(node).value = target(value, *args[1:])
        noted(node).origin = noted(x if reader.op == "output" else reader).origin
        noted(node).kept = reader.op == "output" or noted(reader).kept
        (self.extras[node, 0],) = follow_padding(call_of(node), [self.extras.get(key_of(x), ())], [value.dtype])
        if key_of(x)[0] in self.pure:
            self.pure.add(node)
        return node
