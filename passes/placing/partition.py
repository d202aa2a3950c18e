"""Partition: the typed graph, in which every value has a type on every axis, with typed conversions where a reader
needs another type; and the passes that clean it: conversions of parameters leave the microbatch, biases join products.

Shapes stay global here; ``emit.py`` makes them local at the very end, operator by operator, by the same rules.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import FIXED, GradientFlow, made_of
from ...compiler.layout.collectives import TypeFault
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.packed_rows import chosen_placement
from ...compiler.layout.placement import AxisType, Placement, Split, TensorType
from ...compiler.ops.factors import Dims, OpRule
from ...compiler.ops.infer import Part
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.rules import facts, operator_name
from ...compiler.ops.splits import from_factor, to_factor
from ...compiler.program.program import Origin
from ...compiler.resolve.requests import Choices
from ..calls import ValueKey, computes, fake, key_of, operands_of, outputs, substitute_nodes, tensors_of
from ..programs.segments import node_type
from .paths import Changes, cheapest_path, in_levels
from .propagate import Placed


@dataclass(frozen=True, slots=True)
class Reshard:
    """A conversion of a value for a reader that needs another type."""

    value: str
    source: AxisType
    result: AxisType
    axis: str
    cause: Origin
    bytes: int
    """The bytes of a rank's part."""
    reader: str
    """The operator that needs the conversion."""
    asked: bool
    """True for the gather of few heads, which has a note of its own, and for one that a line asks for."""
    attends: bool
    """True where attention computes or reads the value."""
    learns: bool
    """True where a gradient flows through it."""
    whole: bool
    """True where a line keeps a value whole whose operator is split."""
    itemsize: int


class UnevenTokens(ValueError):
    """The error of tokens that do not divide among the ranks that share the experts of a module."""

    def __init__(self, axes: str, chosen: TensorType, mesh: Mesh, origin: Origin) -> None:
        self.axes = frozenset(axes.split(","))
        self.ranks = math.prod(map(mesh.size, self.axes))
        tokens = chosen.local(mesh)[1]
        super().__init__(f"the {tokens} tokens of a rank that go to `{origin.module}` do not divide")


def _gradients(graph: fx.Graph) -> dict[ValueKey, bool]:
    """Return True for the values of a graph through which a gradient flows, False for the others."""
    flow, nodes = GradientFlow(), (node for node in graph.nodes if node.op == "placeholder" or computes(node))
    return {(node, index): isinstance(value, torch.Tensor) and value.is_floating_point() and node in flow
            for node in nodes for index, value in enumerate(tensors_of(node))}  # fmt: skip


@dataclass(slots=True)
class _Emitted:
    """All that was read and changed as one node was emitted: the states of its operands; its new states and forms, in
    order; its reshards; and the forms that it used. It cannot be taken over where it depends on more: ``alone``."""

    read: dict[ValueKey, Placement | None]
    states: list[tuple[ValueKey, Placement]] = field(default_factory=list)
    forms: dict[tuple[ValueKey, Placement], fx.Node] = field(default_factory=dict)
    used: list[tuple[ValueKey, Placement]] = field(default_factory=list)
    reshards: Sequence[Reshard] = ()
    alone: bool = False


class Partition:
    """The pass of partition. It takes a canonical graph and its placements, and gives the typed graph, a new one, and
    the ``reshards`` that readers needed. Each value is converted at most once to each placement, for all readers. In a
    trial, which emits no graph, nodes are taken over from one that is ``like`` it where they come out the same."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, placed: Placed, choices: Choices | None,
                 levels: Mapping[str, int], like: Partition | None = None) -> None:  # fmt: skip
        self.source, self.mesh, self.placed, self.choices, self.levels = graph, mesh, placed, choices, levels
        self.graph = fx.Graph()
        self.forms: dict[ValueKey, dict[Placement, fx.Node]] = {}
        self.state: dict[ValueKey, Placement] = {}
        self.like = like
        self.grad: dict[ValueKey, bool] = _gradients(graph) if like is None else like.grad
        self.pure: set[fx.Node] = made_of(graph, FIXED) if like is None else like.pure
        self.emitted: dict[fx.Node, _Emitted] = {}
        self.last = _Emitted({})
        self.reshards: list[Reshard] = []
        self.origin = Origin()
        self.reader = "output"
        self.kept = self.with_rows = False
        self.block: str | None = None
        self.last_block: str | None = None
        self.readers: dict[ValueKey, list[fx.Node]] = _readers(graph) if like is None else like.readers
        self.hoisted_over: dict[str, set[fx.Node]] = {
            axis: like.hoisted_over[axis] if like is not None and _is_alike(placed, like.placed, axis)
            else _hoisted_over(graph, axis, placed, self.grad, self.readers)
            for axis in mesh.names
        }  # fmt: skip
        self.hoisted: dict[fx.Node, set[str]] = {}
        for axis, nodes in self.hoisted_over.items():
            for node in nodes:
                self.hoisted.setdefault(node, set()).add(axis)
        self.moved = self._moved()
        self.is_alike = like is not None
        """True in a trial until the first node that is placed otherwise."""

    def _moved(self) -> set[fx.Node]:
        """Return the nodes that are placed otherwise than in the partition that this one is ``like``."""
        if self.like is None:
            return set()
        (splits, parts), (before, parts_before) = (
            (placed.splits, placed.parts) for placed in (self.placed, self.like.placed)
        )
        moved = {key[0] for key, at in splits.items() if at != before[key]}
        moved.update(node for node in parts.keys() | parts_before.keys() if parts.get(node) != parts_before.get(node))
        asked = self.placed.gathered ^ self.like.placed.gathered
        for mine, theirs in ((self.placed.whole, self.like.placed.whole), (self.placed.sites, self.like.placed.sites)):
            asked |= {at for at in mine.keys() | theirs.keys() if mine.get(at) != theirs.get(at)}
        moved.update(node for key, _ in asked for node in (key[0], *self.readers.get(key, ())))
        return moved.union(*(nodes ^ self.like.hoisted_over[axis] for axis, nodes in self.hoisted_over.items()))

    def type_of(self, key: ValueKey, placement: Placement) -> TensorType:
        """Return the typed shape of a value in a placement."""
        value = fake(key)
        return TensorType(value.dtype, tuple(value.shape), placement, noted(key[0]).packed)

    # ---- conversions

    def convert(self, key: ValueKey, want: Placement) -> fx.Node:
        """Return the value in another placement, converted from its state in the cheapest order of steps."""
        if not self.grad[key]:
            want = want.data()
            if key[0] in self.pure:
                rebuilt = self.rebuild(key, want)
                if rebuilt is not None:
                    self.last.used.append((key, want))
                    return rebuilt
        if want not in self.forms[key]:
            have = self.state[key]
            shape = tuple(fake(key).shape)
            lifts = key[0].op == "placeholder"
            path = cheapest_path(have, want, shape, self.mesh, self.grad[key], lifts)
            levels = self.levels if self.with_rows or noted(key[0]).packed is not None else {}
            for step in in_levels(self._imposed(key, path, have, want), have, self.mesh, levels):
                have = self._step(key, have, dict(step))
        self.last.used.append((key, want))
        return self.forms[key][want]

    def _lies(self, key: ValueKey, placement: Placement) -> None:
        """Set the state of a value."""
        self.state[key] = placement
        self.last.states.append((key, placement))

    def _has(self, key: ValueKey, placement: Placement, form: fx.Node) -> None:
        """Add a form of a value."""
        self.forms.setdefault(key, {})[placement] = form
        self.last.forms[key, placement] = form

    def _imposed(self, key: ValueKey, path: tuple[Changes, ...], have: Placement, want: Placement) -> Sequence[Changes]:
        """Return the path that was cheapest at the largest sizes of a range, or ``path`` if that one does not divide
        here. A choice is a list of steps, each with its axes and their next types; None stands for the wanted type."""
        if self.choices is None:
            return path
        cheapest = [[(axis, None if kind == want[axis] else kind) for axis, kind in step] for step in path]
        kinds = (tuple(getattr(kind, "dim", kind) for _, kind in placement.items()) for placement in (have, want))
        chosen = self.choices.make((key[0].name, key[1], *kinds), cheapest)
        steps = [tuple((axis, want[axis] if kind is None else kind) for axis, kind in step) for step in chosen]
        for step in steps:
            have = have.replace(dict(step))
            if not have.nests(tuple(fake(key).shape), self.mesh):
                return path
        return steps

    def _step(self, key: ValueKey, have: Placement, changes: Mapping[str, AxisType]) -> Placement:
        """Convert one or several axes in one collective, and keep the result for later readers."""
        first = have[next(iter(changes))]
        target = have.replace(changes)
        if target not in self.forms[key]:
            self._has(key, target, self._emit_conversion(key, have, target, tuple(changes)))
            if first == "P" and have == self.state[key]:
                # the reduced form is the value's state from now on: a sum with it would keep two copies alive
                self._lies(key, target)
        return target

    def _emit_conversion(self, key: ValueKey, have: Placement, want: Placement, axes: tuple[str, ...]) -> fx.Node:
        """Add the conversion of a value's form over axes, all of one old and one new type."""
        source, result = have[axes[0]], want[axes[0]]
        form = self.forms[key][have]
        if source == "I" and result == "R" and not self.grad[key]:
            return form
        if source == "R" and result == "I":
            raise TypeFault(f"`{key[0].name}` is R over {axes[0]} and cannot be I again")
        block, origin = self.block, self.origin
        if source == "P":
            # a sum belongs to the block of its operand, so that the first of equal blocks equals the others
            summed = noted(form).origin
            self.origin = replace(summed, plan=self._line_of(key, axes, summed.plan))
            if self.last_block == noted(form).block:
                self.block = noted(form).block
        how = ",".join(axes), str(source), str(result)
        rows = [isinstance(kind, Split) and kind.dim == 0 for kind in (source, result)]
        if (chosen := noted(key[0]).chosen) is not None and any(rows):
            return self._exchange(key, key_of(chosen), have, want, how, all(rows))
        node = self.call(OPS.convert.default, (form, *how), {}, [(key, want)])
        noted(node).again = self.placed.again(key, axes, source, result)
        self.block, self.origin = block, origin
        routed = computes(key[0]) and facts(key[0].target).reroutes  # by a line of `experts`
        if (source, result) != ("I", "R") and not self.with_rows and not routed:
            self._note_reshards(key, have, want, axes)
        return node

    def _line_of(self, key: ValueKey, axes: tuple[str, ...], default: int) -> int:
        """Return the line that placed a value; of one that is partial, that of the operator which left it so: a scale
        or a cast in front of the sum is no cause of it."""
        node = key[0]
        while computes(node):
            summed = (key_of(value) for value in operands_of(node))
            before = next((v for v in summed if v in self.state and self.state[v][axes[0]] == "P"), None)
            if before is None:
                break
            node = before[0]
        return self.placed.lines.get(node, default)

    def _note_reshards(self, key: ValueKey, have: Placement, want: Placement, axes: tuple[str, ...]) -> None:
        """Note a conversion for reports, once for each axis of the mesh."""
        whole = any((key, axis) in self.placed.whole for axis in axes)
        cause = self.origin if whole else replace(self.origin, plan=self._line_of(key, axes, self.origin.plan))
        named = noted(key[0]).binding.name if key[0].op == "placeholder" else key[0].name
        itemsize = fake(key).dtype.itemsize
        size = math.prod(self.type_of(key, have).local(self.mesh)) * itemsize
        attends = str(OPS.attention.default) in (str(key[0].target), self.reader)
        for name in self.mesh.joined(axes):
            axis = self.mesh.parts(name)[0]
            asked = self.placed.asks(key, axis, want[axis], self.reader)
            about = asked, attends, self.grad[key], whole and asked, itemsize
            self.reshards.append(Reshard(named, have[axis], want[axis], name, cause, size, self.reader, *about))

    def _exchange(self, key: ValueKey, mask: ValueKey, have: Placement, want: Placement, how: tuple[str, ...],
                  fits: bool) -> fx.Node:  # fmt: skip
        """Return packed rows split over experts in place of tokens, or the other way round."""
        if not fits:
            raise UnevenTokens(how[0], self.type_of(mask, self.state[mask]), self.mesh, self.origin)
        self.with_rows = True
        masks = [self.convert(mask, chosen_placement(placement, noted(key[0]).packed)) for placement in (have, want)]
        self.with_rows = False
        return self.call(OPS.convert.default, (self.forms[key][have], *how, *masks), {}, [(key, want)])

    def rebuild(self, key: ValueKey, want: Placement) -> fx.Node | None:
        """Recompute a value that depends on creation operators and buffers alone in the wanted placement, so that it is
        never sent; None where that cannot be."""
        node, index = key
        if want in self.forms.get(key, {}):
            return self.forms[key][want]
        if node.op == "placeholder":
            return None
        rule = self.placed.rules[node]
        parts: dict[str, Part] = {}
        for axis, kind in want.items():
            if isinstance(kind, Split):
                part = to_factor(rule, rule.results[index], kind.dim, kind.outer, self.mesh.size(axis))
                if part is None or part[0] in rule.whole:
                    return None
                parts[axis] = part
        operands = []
        for operand, dims in zip(operands_of(node), rule.operands, strict=True):
            rebuilt = self.rebuild(key_of(operand), self._split_by(parts, rule, dims))
            if rebuilt is None:
                return None
            operands.append(rebuilt)
        results = [((node, at), want if at == index else self._split_by(parts, rule, dims))
                   for at, dims in enumerate(rule.results)]  # fmt: skip
        self.emit(node, parts, results, operands)
        return self.forms[key][want]

    def _split_by(self, parts: Mapping[str, Part], rule: OpRule, dims: Dims) -> Placement:
        """Return the placement of an operand or a result of an operator that axes split by these factors."""
        places = {axis: from_factor(rule, dims, *part) for axis, part in parts.items()}
        return Placement.of(self.mesh, {axis: Split(*at) for axis, at in places.items() if at})

    # ---- operators

    def operator(self, node: fx.Node) -> None:
        """Emit one operator: its operands converted to the types that it needs, and the types of its results."""
        rule, parts = self.placed.rules[node], self.placed.parts[node]
        keys = [key_of(n) for n in operands_of(node)]
        if facts(node.target).reroutes:
            self.forms[node, 0], self.state[node, 0] = self.forms[keys[0]], self.state[keys[0]]
            return
        wants: list[dict[str, AxisType]] = [{} for _ in keys]
        states: list[dict[str, AxisType]] = [{} for _ in rule.results]
        for axis in self.mesh.names:
            if axis in parts:
                for key, dims, want in zip(keys, rule.operands, wants, strict=True):
                    at = from_factor(rule, dims, *parts[axis])
                    want[axis] = Split(*at) if at else ("R" if self.grad[key] else "I")
                for dims, state in zip(rule.results, states, strict=True):
                    at = from_factor(rule, dims, *parts[axis])
                    state[axis] = Split(*at) if at else "P"
            else:
                result = self._unsplit(node, axis, keys, wants)
                for state in states:
                    state[axis] = result
        operands = [self.convert(key, Placement.of(self.mesh, want)) for key, want in zip(keys, wants, strict=True)]
        if facts(node.target).reduces == "exponentials":
            terms, placement = expand_rows(self.graph, self.mesh, node, operands, parts, self._note)
            for index, term in enumerate(terms):
                self._has((node, index), placement, term)
                self._lies((node, index), placement)
            return
        results = []
        for index, state in enumerate(states):
            key = (node, index)
            placement = Placement.of(self.mesh, state)
            results.append((key, placement if self.grad.get(key) else placement.data()))
        self.emit(node, parts, results, operands)
        for key, placement in results:
            self._lies(key, placement)
            # a partial sum that is placed split is reduced to that split at once, if the split nests there
            reduced = placement
            for axis, split in self.placed.splits[key].items():
                after = reduced.replace({axis: split})
                if placement[axis] == "P" and after.nests(tuple(fake(key).shape), self.mesh):
                    reduced = after
            # a value that a line keeps whole is gathered here: backward takes its part, and sends nothing
            whole = {axis: line for axis in parts if (line := self.placed.whole.get((key, axis)))
                     and isinstance(reduced[axis], Split)}  # fmt: skip
            if whole:
                reduced = reduced.replace(dict.fromkeys(whole, "I"))
                self.origin = replace(self.origin, plan=min(whole.values()))
            if reduced != placement:
                self.convert(key, reduced)
                self._lies(key, reduced)

    def _unsplit(
        self, node: fx.Node, axis: str, keys: Sequence[ValueKey], wants: Sequence[dict[str, AxisType]]
    ) -> AxisType:
        """Choose the types on an axis that splits no factor of the operator: P through an operator that is linear in
        its partial operands, else R if one operand that carries gradient is R, else I. Return the result's type."""
        have = [self.state[key][axis] if key in self.state else "I" for key in keys]
        partial = frozenset(index for index, kind in enumerate(have) if kind == "P")
        rest_whole = all(not isinstance(kind, Split) for kind in have)
        linear = partial and rest_whole and partial in self.placed.rules[node].linear
        if linear and self._sums_later(node, keys, partial):
            for index, (key, want) in enumerate(zip(keys, wants, strict=True)):
                want[axis] = "P" if index in partial else ("R" if self.grad[key] else "I")
            return "P"
        reads = any(kind == "R" and self.grad[key] for kind, key in zip(have, keys, strict=True))
        target: AxisType = "R" if reads or axis in self.hoisted.get(node, ()) else "I"
        for key, want in zip(keys, wants, strict=True):
            want[axis] = target if self.grad[key] else "I"
        return target

    def _sums_later(self, node: fx.Node, keys: Sequence[ValueKey], partial: frozenset[int]) -> bool:
        """Return True where a sum behind an operator moves at most as many bytes as one before it."""
        bytes_later: int = sum(value.nbytes for value in tensors_of(node) if isinstance(value, torch.Tensor))
        later: bool = bytes_later <= sum(fake(keys[index]).nbytes for index in partial)
        return later if self.choices is None else self.choices.make(("sum", node.name), later)

    def emit(self, node: fx.Node, parts: Mapping[str, Part], results: Sequence[tuple[ValueKey, Placement]],
             operands: Sequence[fx.Node]) -> fx.Node:  # fmt: skip
        """Add the operator as a node whose results have the given placements."""
        remaining = iter(operands)
        args, kwargs = substitute_nodes((node.args, node.kwargs), lambda _: next(remaining))
        target: Any = node.target
        if node.target is aten.embedding.default and any(name == "v" for name, _ in parts.values()):
            padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
            target, args, kwargs = OPS.lookup.default, (*args[:2], padding), {}
        return self.call(target, args, kwargs, results)

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        results: Sequence[tuple[ValueKey, Placement]],
    ) -> fx.Node:  # fmt: skip
        """Add a node to the typed graph; several results become ``getitem`` nodes."""
        self.last_block = self.block
        new = self.graph.call_function(target, args, kwargs)
        self._note(new, [self.type_of(key, placement) for key, placement in results])
        noted(new).kept = self.kept
        if len(results) == 1 and not isinstance(noted(results[0][0][0]).value, (tuple, list)):
            self._has(*results[0], new)
            return new
        for index, (key, placement) in enumerate(results):
            part = self.graph.call_function(operator.getitem, (new, index))
            self._note(part, [self.type_of(key, placement)])
            self._has(key, placement, part)
        return new

    def _note(self, node: fx.Node, types: list[TensorType | None]) -> None:
        noted(node).types = types
        noted(node).origin, noted(node).block = self.origin, self.block

    # ---- the whole graph

    def placeholder(self, node: fx.Node) -> None:
        """Add a parameter, buffer, key or input as it is stored: split as placed, and whole on other axes."""
        key = (node, 0)
        placement = Placement.of(self.mesh, dict(self.placed.splits[key]))
        new = self.graph.placeholder(node.name)
        noted(new).types = [self.type_of(key, placement)]
        noted(new).binding, noted(new).line = noted(node).binding, self.placed.lines.get(node, 0)
        self._lies(key, placement)
        self._has(key, placement, new)

    def run(self) -> fx.Graph:
        """Return the typed graph. Its outputs are numbers, which may still be partial (the loss's numerator), new
        values of buffers, and tensors that the model returns."""
        for _ in self.conversions():
            pass
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return self.graph

    def conversions(self) -> Iterator[Reshard]:
        """Emit the nodes of the typed graph one after the other, and yield the reshards as they are noted."""
        for node in self.source.nodes:
            if node.op == "placeholder" or computes(node):
                if (known := self._known(node)) is not None:
                    self._take_over(known)
                else:
                    self._emit_node(node)
                self.emitted[node] = self.last
                yield from self.last.reshards
        before = len(self.reshards)
        self.last = _Emitted({})
        self._outputs()
        yield from self.reshards[before:]

    def _emit_node(self, node: fx.Node) -> None:
        """Emit a placeholder or an operator."""
        before = len(self.reshards)
        if node.op == "placeholder":
            self.last = _Emitted({})
            self.placeholder(node)
        else:
            self.last = _Emitted({key: self.state.get(key) for key in map(key_of, operands_of(node))})
            origin = noted(node).origin  # a cast names the line that asked for it
            self.origin = replace(origin, plan=origin.plan or self.placed.lines.get(node, 0))
            self.block = noted(node).block
            self.reader, self.kept = operator_name(node.target), noted(node).kept
            self.operator(node)
            self.last.reshards = self.reshards[before:]
            self.last.alone = facts(node.target).reroutes
        self.last.alone |= any(noted(one).packed is not None for one in (node, *(at for at, _ in self.last.read)))

    def _known(self, node: fx.Node) -> _Emitted | None:
        """Return a node as it was emitted under other placements, if it comes out the same under these."""
        if self.like is None:
            return None
        known = self.like.emitted.get(node)
        self.is_alike = self.is_alike and known is not None and not known.alone and node not in self.moved
        if known is None or known.alone or node in self.moved:
            return None
        if self.is_alike:  # and so is all that it reads
            return known
        if any(self.state.get(key) != state for key, state in known.read.items()):
            return None
        if any(placement in self.forms.get(key, ()) for key, placement in known.forms):
            return None
        if any(use not in known.forms and use[1] not in self.forms.get(use[0], ()) for use in known.used):
            return None
        return known

    def _take_over(self, known: _Emitted) -> None:
        """Change what a node changed under other placements."""
        for (key, placement), form in known.forms.items():
            self.forms.setdefault(key, {})[placement] = form
        self.state.update(known.states)
        self.reshards += known.reshards
        self.last = known

    def _outputs(self) -> None:
        self.block, self.reader, self.kept = None, "output", True
        keys, returned_nodes, results = noted(self.source.output_node()).results, outputs(self.source), []
        bound = {noted(n).binding: (n, 0) for n in self.source.nodes if n.op == "placeholder"}
        for key, node in zip([*[None] * (len(returned_nodes) - len(keys)), *keys], returned_nodes, strict=True):
            if key in bound:  # placed as the buffer, so that the next microbatch reads it
                target = Placement.of(self.mesh, dict(self.placed.splits[bound[key]]))
            else:  # a tensor that the model returns stays split, a number may stay partial
                state, returned = self.state[key_of(node)], key is not None and key.kind == "output"
                target = state.replace({axis: "I" for axis, kind in state.items() if (kind == "P") == returned})
            results.append(self.convert(key_of(node), target))
        noted(self.graph.output(tuple(results))).results = keys


# ---- the operators that compute in ``R``


def _readers(graph: fx.Graph) -> dict[ValueKey, list[fx.Node]]:
    """Return the nodes that read each value."""
    readers: dict[ValueKey, list[fx.Node]] = {}
    for node in graph.nodes:
        if computes(node) or node.op == "output":
            for operand in node.all_input_nodes if node.op == "output" else operands_of(node):
                readers.setdefault(key_of(operand), []).append(node)
    return readers


def _is_alike(placed: Placed, other: Placed, axis: str) -> bool:
    """Return whether placements of one graph are the same over an axis."""
    return (
        placed.rules is other.rules
        and placed.without_rule == other.without_rule
        and placed.parts.keys() == other.parts.keys()
        and all(at.get(axis) == other.splits[key].get(axis) for key, at in placed.splits.items())
        and all(at.get(axis) == other.parts[node].get(axis) for node, at in placed.parts.items())
    )


def _hoisted_over(
    graph: fx.Graph, axis: str, placed: Placed, grad: Mapping[ValueKey, bool],
    consumers: Mapping[ValueKey, list[fx.Node]],
) -> set[fx.Node]:  # fmt: skip
    """Return the operators to compute in ``R`` over an axis: their operands are marked ``I → R`` before them, and not
    their results after them.

    A value in ``R`` never becomes ``I`` again. So an operator is hoisted only if every reader is hoisted, or is split
    and needs ``R`` there; and if every operand that carries gradient is a parameter, is hoisted, is split (the gradient
    of a gather to ``R`` is reduce-scattered), or has another reader that needs it in ``R``. Position embeddings and
    replicated key/value weights are hoisted, norms are not. These are all candidates, less those that fail, to a fixed
    point.
    """

    def reads(consumer: fx.Node, key: ValueKey) -> bool:
        """Return True for a split reader of a whole value, which needs ``R``."""
        if not computes(consumer) or axis not in placed.parts[consumer]:
            return False
        rule, part = placed.rules[consumer], placed.parts[consumer][axis]
        terms = zip(operands_of(consumer), rule.operands, strict=True)
        return all(from_factor(rule, dims, *part) is None for n, dims in terms if key_of(n) == key)

    def readers(node: fx.Node) -> list[tuple[fx.Node, ValueKey]]:
        results = [(node, index) for index in range(len(placed.rules[node].results))]
        return [(consumer, key) for key in results for consumer in consumers.get(key, ())]

    def holds(node: fx.Node) -> bool:
        read = readers(node)
        if not read or not all(consumer in chosen or reads(consumer, key) for consumer, key in read):
            return False
        for operand in operands_of(node):
            key = key_of(operand)
            if not grad[key] or key[0] in chosen or key[0].op == "placeholder" or axis in placed.splits[key]:
                continue
            if not any(consumer is not node and reads(consumer, key) for consumer in consumers[key]):
                return False
        return True

    chosen = {
        node
        for node in graph.nodes
        if computes(node)
        and axis not in placed.parts[node]
        and axis not in placed.splits[node, 0]
        and grad[node, 0]
        and node not in placed.without_rule  # its gradient may not be linear
    }
    pending = list(chosen)
    while pending:
        node = pending.pop()
        if node in chosen and not holds(node):
            chosen.remove(node)
            pending += [key_of(operand)[0] for operand in operands_of(node)]
            pending += [consumer for consumer, _ in readers(node)]
    return chosen


# ---- expansion: an operator that becomes several where an axis splits it


AxisParts = Mapping[str, Part]
Note = Callable[[fx.Node, list[TensorType | None]], None]
"""A function that notes the types of a new node, and its place in the model."""


def expand_rows(
    graph: fx.Graph, mesh: Mesh, node: fx.Node, operands: Sequence[fx.Node], parts: AxisParts, note: Note
) -> tuple[Sequence[fx.Node], Placement]:
    """Expand a sum of exponentials over rows of logits, with the entries of targets. Each rank's part of the vocabulary
    gives partial sums of ``exp(x - peak)`` and ``x[target] - peak``, which are summed in one message: no rank holds
    whole logits. A token loss is the logarithm of the one less the other; ``row_terms`` are both, to which the peak is
    added again: its gradients cancel. ``parts`` are the factors that the operator splits. Return the results, and their
    placement."""
    logits, targets = operands
    vocab = tuple(axis for axis in mesh.names if axis in parts and parts[axis][0] == "v")
    type_ = node_type(logits)
    rows = type_.shape[0]

    def emit(
        target: Any, args: tuple[Any, ...], shape: tuple[int, ...] = (rows,), dtype: torch.dtype = type_.dtype,
        at: Placement | None = None,
    ) -> fx.Node:  # fmt: skip
        new = graph.call_function(target, args)
        note(new, [TensorType(dtype, shape, result if at is None else at)])
        return new

    # the terms are placed as the logits' rows, and I over the vocabulary's axes, over which they are summed
    types: dict[str, AxisType] = {axis: "I" if axis in vocab else type_.placement[axis] for axis in mesh.names}
    result = Placement.of(mesh, types)
    peak = emit(OPS.row_max.default, (logits, ",".join(vocab)), (rows, 1), at=result.data())
    shifted = {
        axis: kind._replace(dim=kind.dim + 1) if isinstance(kind, Split) else kind for axis, kind in types.items()
    }
    stacked = Placement.of(mesh, shifted)
    partial = stacked.replace(dict.fromkeys(vocab, "P"))
    sums = emit(OPS.loss_parts.default, (logits, peak, targets), (2, rows), at=partial)
    if vocab:
        sums = emit(OPS.convert.default, (sums, ",".join(vocab), "P", "I"), (2, rows), at=stacked)
    total, picked = (emit(aten.select.int, (sums, 0, at)) for at in range(2))
    total = emit(aten.log.default, (total,))
    if node.target is OPS.row_terms.default:
        peak = emit(aten.reshape.default, (peak, [rows]), at=result.data())
        return [emit(aten.add.Tensor, (term, peak)) for term in (total, picked)], result
    loss = emit(aten.sub.Tensor, (total, picked))
    lead = node_type(targets).placement
    counted = emit(aten.ne.Scalar, (targets, node.args[2]), dtype=torch.bool, at=lead.data())
    return [emit(aten.mul.Tensor, (loss, counted))], result


# ---- passes over the typed graph


def lift_parameters(graph: fx.Graph) -> None:
    """The pass that lifts conversions out of the microbatch. It takes the typed graph, and changes it in place: a
    parameter that every reader converts ``I → R`` becomes an input in ``R``. Its gradient stays partial over the
    microbatches, and REDUCE sums it once a step.
    """
    for node in graph.nodes:
        if node.op != "placeholder" or noted(node).binding.kind != "parameter" or not node.users:
            continue
        marks = [user for user in node.users if user.target is OPS.convert.default and user.args[2:4] == ("I", "R")]
        if len(marks) != len(node.users):
            continue
        common = set.intersection(*(set(mark.args[1].split(",")) for mark in marks))
        type_ = node_type(node)
        lifted = replace(type_, placement=type_.placement.replace(dict.fromkeys(common, "R")))
        noted(node).types = [lifted]
        for mark in marks:
            rest = [axis for axis in mark.args[1].split(",") if axis not in common]
            if rest:
                mark.args = (node, ",".join(rest), *mark.args[2:])
            else:
                mark.replace_all_uses_with(node)
                graph.erase_node(mark)


def fuse_bias(graph: fx.Graph) -> None:
    """The pass that fuses biases. It takes the typed graph, and changes it in place: ``linear(x, w) + b`` becomes one
    operator again where no conversion stands between."""
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        product, bias = node.args
        if not isinstance(product, fx.Node) or product.target is not aten.linear.default or len(product.args) != 2:
            continue
        if len(product.users) != 1 or not isinstance(bias, fx.Node) or len(node_type(bias).shape) != 1:
            continue
        if noted(product).types != noted(node).types or node_type(product).placement.partial:
            continue
        node.target, node.args = aten.linear.default, (*product.args, bias)
        graph.erase_node(product)
