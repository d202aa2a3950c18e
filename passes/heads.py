"""Heads: what split weights become where attention reads them, and what is kept on several ranks if heads are few."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ..compiler.capture import Captured
from ..compiler.factors import OpRule, from_factor, to_factor
from ..compiler.mesh import Mesh
from ..compiler.placement import Split, along
from ..compiler.plan import Plan
from ..compiler.resolve import Seed
from ..grammar.codes_build import KEPT_TWICE
from ..grammar.codes_placement import UNEVEN_HEADS
from ..grammar.diagnostics import Diagnostic, Label, PlanError, Severity
from ..grammar.nearest import listed
from .calls import Key, computes, key_of, operands_of, rule_of

_VIEWS = {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.unflatten.int"}


@dataclass(frozen=True, slots=True)
class Copies:
    """What is kept by several ranks of an axis: ``sizes`` of the sub-axes that an axis is factored into, and by value
    and axis how many of these, major first, split the value; on the others it is whole."""

    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kept: Mapping[tuple[str, str], int] = field(default_factory=dict)
    notes: tuple[Diagnostic, ...] = ()

    def splits(self, seed: Seed, mesh: Mesh) -> dict[str, Split | None]:
        """What a seed says of each sub-axis of its axis: split, or whole."""
        parts = mesh.parts(seed.axis)
        found: dict[str, Split | None] = dict.fromkeys(parts)
        if seed.dim is not None:
            kept = parts[: self.kept.get((seed.value, seed.axis), len(parts))]
            found |= along(kept, Split(seed.dim, seed.outer), mesh)
        return found


@dataclass(frozen=True, slots=True)
class _Heads:
    """A split parameter that attention reads as ``count`` heads since ``source``; ``meets`` are its attentions.

    One head is a dim that is never taken apart: attention contracts it.
    """

    seed: Seed
    count: int
    source: str
    meets: frozenset[fx.Node]


def find_copies(captured: Captured, plan: Plan, seeds: Sequence[Seed]) -> Copies:
    """Key heads that are fewer than the ranks over which a plan splits them are kept by several ranks each.

    The weights of one attention are those whose dims, followed through the graph, meet in an operator that contracts
    two computed values. The most heads among them are the queries'; ranks must divide those. Fewer heads either
    divide by the ranks too, or divide them: then the axis is factored, and the heads are split over its major part.

    Raises:
        PlanError: heads neither divide by the ranks nor divide them.
    """
    follower = _Follower(captured.graph)
    parameters = captured.placeholders("parameter")
    errors: list[Diagnostic] = []
    sizes: dict[str, tuple[int, ...]] = {}
    kept: dict[tuple[str, str], int] = {}
    notes: list[Diagnostic] = []
    for axis in plan.mesh.names:
        own = [s for s in seeds if s.axis == axis and s.dim is not None and s.value in parameters]
        found = [heads for s in own if (heads := follower.heads(s, parameters[s.value])) is not None]
        groups = [group for group in _attentions(found) if max(heads.count for heads in group) > 1]
        ranks = plan.mesh.size(axis)
        wrong = [group for group in groups if not _legal(group, ranks)]
        few = [heads for group in groups for heads in group if heads.count % ranks]
        chain = [*sorted({heads.count for heads in few} - {1}), ranks]
        if not wrong and any(more % less for less, more in zip(chain, chain[1:], strict=False)):
            wrong = groups  # of several kinds of attention, which do not factor the axis alike
        if wrong:
            errors += _errors(wrong, plan, axis)
        elif few:
            if len(chain) > 1:
                sizes[axis] = tuple(more // less for less, more in zip([1, *chain], chain, strict=False))
            kept.update({(h.seed.value, axis): chain.index(h.count) + 1 if h.count > 1 else 0 for h in few})
            notes += _notes(few, axis, ranks, sizes.get(axis, ()))
    if errors:
        raise PlanError(errors)
    return Copies(sizes, kept, tuple(notes))


class _Follower:
    """Follows a dim of a parameter forward through a graph, by the rules of its operators."""

    def __init__(self, graph: fx.Graph) -> None:
        self.rules: dict[fx.Node, OpRule] = {}
        self.readers: dict[Key, list[fx.Node]] = {}
        self.computed: set[fx.Node] = {
            node for node in graph.nodes if node.op == "placeholder" and node.meta["role"].startswith("input ")
        }
        for node in graph.nodes:
            if any(operand in self.computed for operand in node.all_input_nodes):
                self.computed.add(node)
            if computes(node):
                for key in dict.fromkeys(map(key_of, operands_of(node))):
                    self.readers.setdefault(key, []).append(node)

    def rule(self, node: fx.Node) -> OpRule:
        """The rule of a node, looked up once."""
        if node not in self.rules:
            self.rules[node] = rule_of(node)[0]
        return self.rules[node]

    def heads(self, seed: Seed, parameter: fx.Node) -> _Heads | None:
        """The heads that a split parameter becomes, if attention reads it."""
        assert seed.dim is not None
        counts: dict[int, str] = {}
        meets: set[fx.Node] = set()
        pending: list[tuple[Key, int, int, bool]] = [((parameter, 0), seed.dim, seed.outer, False)]
        seen = set(pending)
        while pending:
            key, dim, outer, counted = pending.pop()
            for reader in self.readers.get(key, ()):
                rule = self.rule(reader)
                for operand, dims in zip(operands_of(reader), rule.operands, strict=True):
                    part = to_factor(rule, dims, dim, outer, 1) if key_of(operand) == key else None
                    if part is not None and part[0] in self.contracted(reader):
                        meets.add(reader)
                    if part is None or part[0] in rule.whole:
                        continue
                    count = rule.sizes[part[0]] // part[1]
                    size = math.prod(rule.sizes[name] for name in dims[dim]) // outer
                    apart = not counted and count != size and str(reader.target) in _VIEWS
                    if apart:
                        counts.setdefault(count, reader.meta["origin"].source)
                    places = [(i, from_factor(rule, result, *part)) for i, result in enumerate(rule.results)]
                    if any(place is not None for _, place in places) and self.contracted(reader):
                        meets.add(reader)
                    for index, place in places:
                        entry = ((reader, index), *place, counted or apart) if place is not None else None
                        if entry is not None and entry not in seen:
                            seen.add(entry)
                            pending.append(entry)
        if not meets:
            return None
        return _Heads(seed, math.gcd(*counts) or 1, next(iter(counts.values()), ""), frozenset(meets))

    def contracted(self, node: fx.Node) -> set[str]:
        """Factors over which the operator multiplies two computed values and adds up, as attention does."""
        rule = self.rule(node)
        kept = {name for dims in rule.results for names in dims for name in names}
        pairs = zip(operands_of(node), rule.operands, strict=True)
        found = [{name for names in dims for name in names} - kept for n, dims in pairs if n in self.computed]
        return {name for at, first in enumerate(found) for second in found[:at] for name in first & second}


def _attentions(found: Iterable[_Heads]) -> Iterator[list[_Heads]]:
    """The parameters that meet in the same operators."""
    groups: list[tuple[list[_Heads], set[fx.Node]]] = []
    for heads in found:
        joined = [group for group in groups if not group[1].isdisjoint(heads.meets)]
        groups = [group for group in groups if group not in joined]
        members = [member for group in joined for member in group[0]]
        groups.append(([*members, heads], set(heads.meets).union(*(group[1] for group in joined))))
    return (members for members, _ in groups)


def _legal(group: Sequence[_Heads], ranks: int) -> bool:
    most = max(heads.count for heads in group)
    return most % ranks == 0 and all(h.count % ranks == 0 or ranks % h.count == 0 for h in group)


def _errors(groups: Sequence[Sequence[_Heads]], plan: Plan, axis: str) -> Iterator[Diagnostic]:
    """One error for each line and kind of attention."""
    ranks = plan.mesh.size(axis)
    alike: dict[tuple[object, ...], list[_Heads]] = {}
    counts: dict[tuple[object, ...], tuple[int, ...]] = {}
    for group in groups:
        kinds = tuple(sorted({heads.count for heads in group}, reverse=True))
        wrong = [n for n in kinds if n % ranks and (n == kinds[0] or ranks % n)]
        first = next(heads for heads in group if heads.count == (wrong or kinds)[0])
        key = first.seed.span, kinds
        alike.setdefault(key, []).append(first)
        counts[key] = kinds
    every = [group for group in groups if _legal(group, 1)]
    legal = [n for n in range(1, max(max(c) for c in counts.values()) + 1) if all(_legal(g, n) for g in every)]
    for key, (first, *others) in alike.items():
        most, *fewer = counts[key]
        message = f"{first.count} heads do not divide by {axis}={ranks}"
        if first.count != most or not most % ranks:
            message = f"{first.count} heads of keys and values neither divide by {axis}={ranks} nor divide it"
        kinds = " and ".join([f"{most} heads", *(f"{count} heads of keys and values" for count in fewer)])
        notes = [f"the model sees it as heads at {first.source}"] if first.source else []
        notes += [f"the same holds for {len(others)} more that the pattern matches"] if others else []
        declared = plan.mesh_spans.get(axis)
        yield Diagnostic(
            UNEVEN_HEADS, message, Label(first.seed.span, f"`{first.seed.value}`"),
            (Label(declared, "declared here"),) if declared is not None else (), notes=tuple(notes),
            help=f"sizes of `{axis}` for {kinds}: {', '.join(map(str, legal))}",
        )  # fmt: skip


def _notes(few: Sequence[_Heads], axis: str, ranks: int, sizes: Sequence[int]) -> Iterator[Diagnostic]:
    """One note for each number of heads that is kept more than once."""
    for count in sorted({heads.count for heads in few}):
        first, *others = [heads for heads in few if heads.count == count]
        each = f"each is kept by {ranks // count} ranks" if count > 1 else "every rank keeps it"
        message = f"{count} head{'s' * (count > 1)} of keys and values for {ranks} ranks of `{axis}`: {each}"
        parts = listed(f"{axis}_{i}={size}" for i, size in enumerate(sizes))
        notes = [f"`{axis}` is seen as {parts}" if sizes else "", "gradients of the copies are summed once a step"]
        notes += [f"the same holds for {len(others)} more parameters"] if others else []
        yield Diagnostic(
            KEPT_TWICE, message, Label(first.seed.span, f"`{first.seed.value}`"), notes=tuple(filter(None, notes)),
            severity=Severity.NOTE,
        )  # fmt: skip

