"""Heads: the split weights that attention reads as heads, and the heads that several ranks keep because there are fewer
heads than ranks (GQA); and the ``Follower`` that follows dims of parameters through a graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TypeVarTuple

from torch import fx

from ...compiler.capture.capture import Captured
from ...compiler.capture.node_facts import noted
from ...compiler.layout.stretches import Outer
from ...compiler.ops.factors import OpRule
from ...compiler.ops.rules import facts
from ...compiler.ops.splits import from_factor, to_factor
from ...compiler.padding.pads import Pads
from ...compiler.plan.plan import Plan
from ...compiler.program.binding import PARAMETERS
from ...compiler.resolve.requests import PlanAxes
from ...compiler.resolve.seeds import PlacementSeed
from ...grammar.codes import KEPT_TWICE, UNEVEN_HEADS
from ...grammar.diagnostics import Diagnostic, Label, PlanError, Severity
from ...grammar.nearest import listed
from ..calls import ValueKey, computes, key_of, operands_of, rule_of
from ..canonical.canonicalize import canonical_form

_State = TypeVarTuple("_State")


class Follower:
    """A walk that follows dims of parameters forward through a graph, by the rules of its operators."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        bound = [(noted(node).binding, node) for node in graph.find_nodes(op="placeholder")]
        self.parameters = {binding.name: (node, 0) for binding, node in bound if binding.kind in PARAMETERS}
        self.computed = {node for binding, node in bound if binding.kind == "input"}
        """The inputs, and all nodes that depend on them."""
        self.rule = cache(lambda node: rule_of(node)[0])
        self._readers: dict[ValueKey, list[tuple[fx.Node, int]]] = {}
        for node in graph.nodes:
            if not self.computed.isdisjoint(node.all_input_nodes):
                self.computed.add(node)
            for index, operand in enumerate(operands_of(node) if computes(node) else ()):
                self._readers.setdefault(key_of(operand), []).append((node, index))

    def readings(
        self, pending: list[tuple[ValueKey, *_State]]
    ) -> Iterator[tuple[tuple[ValueKey, *_State], fx.Node, OpRule, int]]:
        """Yield every operator that reads a pending value: the pending state, the operator, its rule, and the index of
        the operand. The caller begins with ``[(weight, 0)]``, and appends the states of results, such as the
        ``factor_places`` of dim 0's factor, which are then followed too."""
        seen = set()
        while pending:
            state = pending.pop(0)
            for node, index in self._readers.get(state[0], ()) if state not in seen else ():
                yield state, node, self.rule(node), index
            seen.add(state)


@lru_cache(maxsize=2)
def canonical_follower(graph: fx.Graph) -> Follower:
    """Return the walk through the canonical form of a captured graph."""
    return Follower(canonical_form(graph, False))


def factor_places(node: fx.Node, rule: OpRule, factor: str, outer: Outer = 1) -> Iterator[tuple[ValueKey, int, Outer]]:
    """Yield the places of a part of a factor in a node's results: the result, its dim, and the outer parts there."""
    for index, dims in enumerate(rule.results):
        place = from_factor(rule, dims, factor, outer)
        if place is not None:
            yield (node, index), *place


# ---- heads


@dataclass(frozen=True, slots=True)
class _Heads:
    """A split parameter that attention reads as heads. One head is a dim that attention contracts whole."""

    seed: PlacementSeed
    count: int
    """The number of heads; of groups, where the model views the weight as groups of heads."""
    most: int
    """The number of the queries' heads, where one weight holds queries, keys and values; else ``count``."""
    source: str
    """The line of the model that views the weight as heads."""
    meets: frozenset[fx.Node]
    """The attentions that read the weight."""
    grouped: int = 1
    """The number of heads in each group."""
    few: frozenset[ValueKey] = frozenset()
    """The values that hold only the fewer heads of a weight."""

    @property
    def fused(self) -> bool:
        """True where more heads lie in the same weight."""
        return self.count < self.most


def factored_axes(captured: Captured, plan: Plan, seeds: Sequence[PlacementSeed], pads: Pads) -> PlanAxes:
    """Return the heads that several ranks keep: those of keys and values that a plan splits over more ranks than heads.

    The weights of one attention are those whose dims, followed through the graph, meet in an operator that contracts
    two computed values. The largest number of heads among them is that of queries, which the ranks must divide. The
    ranks must divide a smaller number too, or be a multiple of it: then the axis is factored, and the heads are split
    over its major sub-axes. Where one weight holds queries, keys and values, the minor sub-axes split each head, which
    is gathered where it is taken out of the weight. Padded heads divide.

    Raises:
        PlanError: heads do not fit the ranks.
    """
    padded = {(name, pad.dim) for name, rows in pads.items() for pad in rows}
    seeds = [seed for seed in seeds if seed.dim is not None and (seed.value, seed.dim) not in padded]
    if not seeds:
        return PlanAxes()
    follower = canonical_follower(captured.graph)
    errors: list[Diagnostic] = []
    sizes: dict[str, tuple[int, ...]] = {}
    kept: dict[tuple[str, str], int] = {}
    fused: dict[tuple[str, str], int] = {}
    notes: list[Diagnostic] = []
    for axis in plan.mesh.names:
        split = [s for s in seeds if s.axis == axis and s.value in follower.parameters]
        weights = [heads for s in split if (heads := _heads_of(follower, s)) is not None]
        groups = [group for group in _attentions(weights) if max(heads.most for heads in group) > 1]
        ranks = plan.mesh.size(axis)
        wrong = [group for group in groups if not _legal(group, ranks)]
        few = [heads for group in groups for heads in group if heads.count % ranks]
        chain = [*sorted({heads.count for heads in few} - {1}), ranks]
        if not wrong and any(more % less for less, more in pairwise(chain)):
            wrong = groups  # several kinds of attention, which would factor the axis differently
        if wrong:
            errors += _errors(wrong, plan, axis)
        elif few:
            if len(chain) > 1:
                sizes[axis] = tuple(more // less for less, more in pairwise([1, *chain]))
            for heads in few:
                number = chain.index(heads.count) + 1 if heads.count > 1 else 0
                (fused if heads.fused else kept)[heads.seed.value, axis] = number
            notes += _notes(few, axis, ranks, sizes.get(axis, ()))
    if errors:
        raise PlanError(errors)
    return PlanAxes(sizes, kept, fused, tuple(notes))


def few_heads(graph: fx.Graph, fused: Sequence[tuple[PlacementSeed, Sequence[str]]]) -> frozenset[tuple[ValueKey, str]]:
    """Return the values that hold only the few heads of a fused weight, each with the axes over which to gather
    them."""
    if not fused:
        return frozenset()
    follower = Follower(graph)
    fused_heads = [(_heads_of(follower, seed), axes) for seed, axes in fused if seed.value in follower.parameters]
    return frozenset((key, axis) for heads, axes in fused_heads if heads for key in heads.few for axis in axes)


def _heads_of(follower: Follower, seed: PlacementSeed) -> _Heads | None:
    """Return the heads that a split parameter becomes. None if no attention reads it, or if none contracts its dim,
    which then counts heads itself, as that of attention sinks does."""
    assert seed.dim is not None
    counts: dict[int, str] = {}
    taken: set[tuple[ValueKey, int]] = set()
    meets: set[fx.Node] = set()
    grouped = 1
    parameter = follower.parameters[seed.value]
    # the last entry, until heads are counted: the value that was taken out of several parts, or passed on from there
    pending: list[tuple[ValueKey, int, Outer, ValueKey | None]] = [(parameter, seed.dim, seed.outer, parameter)]
    for (_, dim, outer, last), node, rule, index in follower.readings(pending):
        dims, source = rule.operands[index], noted(node).origin.source
        part = to_factor(rule, dims, dim, outer, 1)
        if part is None:
            continue
        contracted = _contracted(follower, node)
        one = part[0] in contracted or part[0] in rule.whole
        if contracted:
            meets.add(node)
            if last and one:
                counts.setdefault(1, source)
        alone = sum(any(part[0] in names for names in dims) for dims in rule.operands) == 1
        # a dim needed whole, or the dim of a single head
        if last and outer == 1 and (one or (contracted and alone)):
            taken.add((last, 1))
        if part[0] in rule.whole:
            continue
        count = _unit(part[1], rule.sizes[part[0]])
        size = _unit(outer, math.prod(rule.sizes[name] for name in dims[dim]))
        apart = count != size and facts(node.target).moves == "shape"
        if last and apart:
            counts.setdefault(count, source)
            taken.add((last, count))
            inner = dims[dim][dims[dim].index(part[0]) + 1 : -1]
            grouped = max(grouped, math.prod(int(rule.sizes[name]) for name in inner))
        for key, at, within in factor_places(node, rule, *part):
            pending.append((key, at, within, None if apart else key if last and outer != 1 else last))
    if not meets or not counts:
        return None
    most = max(counts)
    few = frozenset(key for key, count in taken if count < most)
    source = next(iter(counts.values()), "")
    return _Heads(seed, math.gcd(*counts), most, source, frozenset(meets), grouped, few)


def _contracted(follower: Follower, node: fx.Node) -> set[str]:
    """Return the factors that an operator contracts between two computed values, as attention does."""
    rule = follower.rule(node)
    kept = {name for dims in rule.results for names in dims for name in names}
    pairs = zip(operands_of(node), rule.operands, strict=True)
    factors = [{name for names in dims for name in names} - kept for n, dims in pairs if n in follower.computed]
    return {name for at, first in enumerate(factors) for second in factors[:at] for name in first & second}


def _unit(outer: Outer, size: int) -> int:
    """Return the unit of a dim's parts: the size of every part is a multiple of it."""
    return size // outer if isinstance(outer, int) else size // sum(outer)


def _attentions(weights: Iterable[_Heads]) -> Iterator[list[_Heads]]:
    """Group parameters whose heads meet in the same operators."""
    groups: list[tuple[list[_Heads], set[fx.Node]]] = []
    for heads in weights:
        joined = [group for group in groups if not group[1].isdisjoint(heads.meets)]
        groups = [group for group in groups if group not in joined]
        members = [member for group in joined for member in group[0]]
        groups.append(([*members, heads], set(heads.meets).union(*(group[1] for group in joined))))
    return (members for members, _ in groups)


def _legal(group: Sequence[_Heads], ranks: int) -> bool:
    most = max(heads.most for heads in group)
    return most % ranks == 0 and all(h.count % ranks == 0 or (ranks % h.count == 0 and h.grouped == 1) for h in group)


def _errors(groups: Sequence[Sequence[_Heads]], plan: Plan, axis: str) -> Iterator[Diagnostic]:
    """Yield one error for each kind of attention, at the first line that splits one."""
    ranks = plan.mesh.size(axis)
    alike: dict[tuple[tuple[int, ...], bool], list[_Heads]] = {}
    for group in groups:
        kinds = tuple(sorted({n for heads in group for n in (heads.count, heads.most)}, reverse=True))
        wrong = [n for n in kinds if n % ranks and (n == kinds[0] or ranks % n)]
        seen = (heads for heads in group if (wrong or kinds)[0] in (heads.count, heads.most))
        first = max(seen, key=lambda heads: heads.grouped)
        apart = any(heads.grouped == 1 for heads in group)  # keys have a weight of their own
        alike.setdefault((kinds, apart), []).append(first)
    every = [group for group in groups if _legal(group, 1)]
    legal = [n for n in range(1, max(max(kinds) for kinds, _ in alike) + 1) if all(_legal(g, n) for g in every)]
    for ((most, *fewer), apart), (first, *others) in alike.items():
        few = _kv_heads(first.count)
        all_heads = f"{most} groups of {first.grouped} heads" if first.grouped > 1 else f"{most} heads"
        message = f"{axis}={ranks} does not divide {all_heads}"
        if not most % ranks:
            message = f"{axis}={ranks} neither divides {few} nor is a multiple of them"
        every_kind = " and ".join([all_heads, *map(_kv_heads, fewer)])
        seen_as = "groups of heads" if first.grouped > 1 else "heads"
        notes = [f"the model sees it as {seen_as} at {first.source}"] if first.source else []
        split = ", or write the queries' heads as one dim, and repeat keys" if first.grouped > 1 and apart else ""
        lines = sorted({heads.seed.span.root.line for heads in others} - {first.seed.span.root.line})
        of_lines = f"weight{'s' * (len(others) > 1)}, also of line {' and '.join(map(str, lines))}"
        what = of_lines if lines else "that the pattern matches"
        notes += [f"the same holds for {len(others)} more {what}"] if others else []
        declared = plan.mesh_spans.get(axis)
        yield Diagnostic(
            UNEVEN_HEADS, message, Label(first.seed.span, f"`{first.seed.value}`"),
            (Label(declared, "declared here"),) if declared is not None else (), notes=tuple(notes),
            help=f"sizes of `{axis}` for {every_kind}: {', '.join(map(str, legal))}{split}",
        )  # fmt: skip


def _kv_heads(count: int) -> str:
    return f"{count} KV head{'s' * (count > 1)}"


def _notes(few: Sequence[_Heads], axis: str, ranks: int, sizes: Sequence[int]) -> Iterator[Diagnostic]:
    """Yield one note for each number of heads that several ranks keep, whole or in parts."""
    for count, fused in sorted({(heads.count, heads.fused) for heads in few}):
        first, *others = [heads for heads in few if (heads.count, heads.fused) == (count, fused)]
        shared = f"{ranks // count} ranks hold each" if count > 1 else "every rank holds it"
        then = "gradients of the copies are summed once a step"
        if fused:
            shared = f"{ranks // count} ranks hold a part of {'each' if count > 1 else 'it'}"
            then = (
                "queries, keys and values are one weight: each rank has a part of a head, and gathers the other parts"
            )
        message = f"{_kv_heads(count)} for {ranks} ranks of `{axis}`: {shared}"
        parts = listed(f"{axis}_{i}={size}" for i, size in enumerate(sizes))
        notes = [f"`{axis}` is seen as {parts}" if sizes else "", then]
        notes += [f"the same holds for {len(others)} more parameter{'s' * (len(others) > 1)}"] if others else []
        yield Diagnostic(
            KEPT_TWICE, message, Label(first.seed.span, f"`{first.seed.value}`"), notes=tuple(filter(None, notes)),
            severity=Severity.NOTE,
        )  # fmt: skip
