"""Propagation: from a plan's claims on some values to a placement of every value on every mesh axis, as GSPMD does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import AxisType, Split
from ...compiler.layout.stretches import Outer, count, inside, nest
from ...compiler.ops.factors import Dims, OpRule
from ...compiler.ops.infer import Part
from ...compiler.ops.rules import facts
from ...compiler.ops.rules.attention import HEADS
from ...compiler.ops.splits import from_factor, to_factors
from ...compiler.program.binding import BUFFERS
from ...compiler.program.program import Origin
from ...compiler.resolve.requests import Claim
from ..calls import ValueKey, computes, key_of, operands_of, rule_of, tensors_of

HeadAxes = Mapping[fx.Node, Sequence[str]]
"""The axes that split the heads of each attention."""


@dataclass(slots=True)
class Placed:
    """The placements of a graph: for each axis the split dim of each value, and the split factor of each operator. An
    absent axis leaves them whole."""

    splits: dict[ValueKey, dict[str, Split]] = field(default_factory=dict)
    parts: dict[fx.Node, dict[str, Part]] = field(default_factory=dict)
    rules: dict[fx.Node, OpRule] = field(default_factory=dict)
    lines: dict[fx.Node, int] = field(default_factory=dict)
    gathered: frozenset[tuple[ValueKey, str]] = frozenset()
    """The values that are gathered over an axis before their readers."""
    without_rule: list[fx.Node] = field(default_factory=list)
    sites: dict[tuple[ValueKey, str], int] = field(default_factory=dict)
    """The line that splits a value inside the model over an axis, or from whose split that follows."""
    keeps: frozenset[int] = frozenset()
    """The lines of ``sites`` whose values, once gathered for a product, are saved for backward."""
    whole: dict[tuple[ValueKey, str], int] = field(default_factory=dict)
    """The line that keeps a value inside the model whole over an axis. If its operator is split, it is gathered."""
    claims: Sequence[Claim[ValueKey]] = ()
    """The claims from which all follows."""
    terms: Terms | None = None
    """The operators of the graph, which placements of other claims share."""

    def begins(self, claims: Sequence[Claim[ValueKey]], gathered: frozenset[tuple[ValueKey, str]]) -> bool:
        """Return whether propagation of claims comes by these placements: its first claims are theirs, and the others
        are of later lines and over axes that split nothing yet."""
        rest, lines = claims[len(self.claims) :], {claim.line for claim in self.claims}
        axes = {claim.axis for claim in rest}
        return (
            [*claims[: len(self.claims)]] == [*self.claims] and gathered == self.gathered
            and not any(claim.site for claim in self.claims) and not any(claim.line in lines for claim in rest)
            and all(map(axes.isdisjoint, self.splits.values())) and all(map(axes.isdisjoint, self.parts.values()))
        )  # fmt: skip

    def copy(self) -> Placed:
        """Return the same placements, to be changed."""
        splits, parts = {key: {**at} for key, at in self.splits.items()}, {op: {**at} for op, at in self.parts.items()}
        return replace(self, splits=splits, parts=parts, lines={**self.lines}, sites={**self.sites}, whole={})

    def asks(self, key: ValueKey, axis: str, result: AxisType, reader: str) -> bool:
        """Return True for a conversion that a line asks for, or that has a note of its own: the gather of few heads, of
        a value that a line keeps whole, or of one that a line splits between products."""
        row, place = facts(reader), (key, axis)
        between = row.precision == "product" or row.moves == "shape"
        lines = place in self.whole or (between and place in self.sites)
        return place in self.gathered or (lines and not isinstance(result, Split))

    def again(self, key: ValueKey, axes: Iterable[str], source: AxisType, result: AxisType) -> bool:
        """Return True for a conversion that backward recomputes: the gather of a value that lines split inside the
        model."""
        lines = [self.sites.get((key, axis)) for axis in axes]
        gathers = isinstance(source, Split) and not isinstance(result, Split)
        return gathers and not any(line is None or line in self.keeps for line in lines)


class FewHeads(ValueError):
    """The error of an attention whose heads do not divide among the ranks that have parts of its sequence."""

    def __init__(self, axis: str, heads: int, ranks: int, origin: Origin) -> None:
        where = f"in `{origin.module}`" if origin.module else "of the model itself"
        super().__init__(f"the attention {where} has {heads} heads of keys, for {ranks} ranks")
        self.axis, self.origin = axis, origin


class Terms:
    """The operators of a graph in order, with their rules and values: all that propagation reads of it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: at for at, node in enumerate(filter(computes, graph.nodes))}
        self.keys = [(node, index) for node in graph.nodes for index in range(len(tensors_of(node)))]
        self.rules: dict[fx.Node, OpRule] = {}
        self.without_rule: list[fx.Node] = []
        self.of: dict[fx.Node, list[tuple[ValueKey, Dims, bool]]] = {}
        self.readers: dict[ValueKey, list[fx.Node]] = {}
        for node in self.order:
            rule, known = rule_of(node)
            self.rules[node] = rule
            if not known and operands_of(node):  # creation operators have nothing to gather
                self.without_rule.append(node)
            operands = [(key_of(n), dims, True) for n, dims in zip(operands_of(node), rule.operands, strict=True)]
            results = [((node, index), dims, False) for index, dims in enumerate(rule.results)]
            self.of[node] = operands + results
            for key, _, _ in self.of[node]:
                self.readers.setdefault(key, []).append(node)


class _Propagation:
    def __init__(self, terms: Terms, mesh: Mesh, placed: Placed, heads: HeadAxes) -> None:
        self.mesh, self.heads, self.placed = mesh, heads, placed
        self.order, self.terms, self.readers = terms.order, terms.of, terms.readers
        self.whole: set[tuple[ValueKey, str]] = set()
        self.inside = False
        self.few: set[tuple[ValueKey, str]] = set()
        self.closed: set[tuple[fx.Node, str]] = set()
        self.claimed: dict[tuple[ValueKey, str], Split] = {}

    def place(self, key: ValueKey, axis: str, split: Split, line: int) -> list[fx.Node]:
        """Split a value, if nothing forbids it and it nests with the value's other splits. Return the operators to
        revisit."""
        splits = self.placed.splits[key]
        if axis in splits or (key, axis) in self.whole or not self.nests(key, axis, split):
            return []
        if self.claimed.get((key, axis), split) != split:  # a later line claims another split
            return []
        if self.inside and noted(key[0]).binding.kind in BUFFERS:  # a whole buffer has every part that readers take
            return []
        splits[axis] = split
        self.placed.lines[key[0]] = line
        if self.inside:
            self.placed.sites[key, axis] = line
        return self.readers.get(key, [])

    def confirm(self, claim: Claim[ValueKey], line: int) -> None:
        """Note a line as the cause of a placement that propagation had found before."""
        if self.placed.splits[claim.value].get(claim.axis) == claim.split:
            self.placed.lines[claim.value[0]] = line
            values = [claim.value]
            for value in values:
                for reader in self.readers.get(value, []):
                    if claim.axis in self.placed.parts[reader]:
                        self.placed.lines[reader] = line
                    row = facts(reader.target)
                    # between a weight and its product lie the model's own transpose and the cast of `precision`
                    if (row.casts or row.keeps_values) and reader is not value[0]:
                        values += [(reader, index) for index in range(len(tensors_of(reader)))]

    def nests(self, key: ValueKey, axis: str, split: Split) -> bool:
        """Return True for a split that divides its dim together with the other axes there."""
        size = tensors_of(key[0])[key[1]].shape[split.dim]
        others = [(s.outer, a) for a, s in self.placed.splits[key].items() if s.dim == split.dim]
        return self.disjoint([*others, (split.outer, axis)], size)

    def disjoint(self, parts: Sequence[tuple[Outer, str]], size: int) -> bool:
        return nest(size, [(outer, self.mesh.size(axis)) for outer, axis in parts])

    def choose(self, node: fx.Node, axis: str) -> Part | None:
        """Return the factor that an operand or a result already splits over the axis: of parameters first, also cast
        ones, then of others in order."""
        rule = self.placed.rules[node]
        ranks = self.mesh.size(axis)
        best: tuple[int, Part] | None = None
        splits = [
            (key, dims, split)
            for key, dims, is_operand in self.terms[node]
            if (split := self.placed.splits[key].get(axis)) and not (is_operand and (key, axis) in self.placed.gathered)
        ]
        parts = to_factors(rule, [(dims, split.dim, split.outer) for _, dims, split in splits], ranks, guess=False)
        for (key, _, _), part in zip(splits, parts, strict=True):
            if part is None or part[0] in rule.whole or not self.fits(node, axis, part):
                continue
            rank = 0 if key[0].op == "placeholder" or _casts_placeholder(key[0]) else 1
            if best is None or rank < best[0]:
                best = rank, part
        return best[1] if best else None

    def fits(self, node: fx.Node, axis: str, part: Part) -> bool:
        """Return True for a factor that nests with the other axes on it, and whose split no result forbids."""
        rule = self.placed.rules[node]
        others = [(outer, a) for a, (name, outer) in self.placed.parts[node].items() if name == part[0]]
        if not self.disjoint([*others, (part[1], axis)], rule.sizes[part[0]]):
            return False
        for key, dims, is_operand in self.terms[node]:
            if is_operand:
                continue
            at = from_factor(rule, dims, *part)
            have = self.placed.splits[key].get(axis)
            if at is not None and (key, axis) in self.whole and (key, axis) not in self.placed.whole:
                return False
            if have is not None and at is not None and have != Split(*at):
                return False
        return True

    def visit(self, node: fx.Node, line: int) -> list[fx.Node]:
        """Choose the operator's factors, and split its operands and results by them. Return the operators to
        revisit."""
        rule, parts = self.placed.rules[node], self.placed.parts[node]
        again: list[fx.Node] = []
        for axis in self.mesh.names:
            if axis not in parts:
                closed = (node, axis) in self.closed or axis in self.heads.get(node, ())
                part = None if closed else self.choose(node, axis)
                if part is None:
                    continue
                parts[axis] = part
                self.placed.lines[node] = line
            for key, dims, _ in self.terms[node]:
                at = from_factor(rule, dims, *parts[axis])
                if at is not None:
                    again += self.place(key, axis, Split(*at), line)
        return again

    def go_inside(self) -> None:
        """Begin with claims on values inside the model. Operators on heads that several ranks keep stay as they are."""
        self.inside = True
        self.closed = {(node, axis) for key, axis in self.few for node in self.readers.get(key, ())}

    def split_heads(self, node: fx.Node) -> None:
        """Split an attention over heads, inside the parts of heads that other axes leave.

        Raises:
            FewHeads: the ranks do not divide the heads.
        """
        rule, parts = self.placed.rules[node], self.placed.parts[node]
        for axis in self.heads[node]:
            others = [(outer, name) for name, (factor, outer) in parts.items() if factor == HEADS]
            places: list[Outer] = [1, *(inside(outer, self.mesh.size(name)) for outer, name in others)]
            last = max(places, key=count)
            if HEADS not in rule.sizes or not self.disjoint([*others, (last, axis)], rule.sizes[HEADS]):
                ranks = count(last) * self.mesh.size(axis)
                raise FewHeads(axis, rule.sizes.get(HEADS, 1), ranks, noted(node).origin)
            parts[axis] = HEADS, last

    def settle(self, start: Iterable[fx.Node], line: int) -> None:
        """Visit changed operators, forward and backward in turn, until nothing changes."""
        dirty = set(start)
        forward = True
        while dirty:
            for node in sorted(dirty, key=self.order.__getitem__, reverse=not forward):
                dirty.discard(node)
                dirty.update(self.visit(node, line))
            forward = not forward


class NotPlaced(ValueError):
    """The error of a claim on a value inside the model that another line places otherwise."""

    def __init__(self, claim: Claim[ValueKey], other: int) -> None:
        super().__init__(f"`{claim.site}` is not placed as line {claim.line} says")
        self.name, self.line, self.other = claim.site, claim.line, other


def check_sites(claims: Sequence[Claim[ValueKey]], placed: Placed, mesh: Mesh) -> None:
    """Compare the claims on values inside the model with their placements.

    Raises:
        NotPlaced: another line placed such a value.
    """
    for claim in claims:
        split = placed.splits[claim.value].get(claim.axis)
        if claim.site and mesh.size(claim.axis) > 1 and split != claim.split:
            raise NotPlaced(claim, placed.lines.get(claim.value[0], 0))


def _casts_placeholder(node: fx.Node) -> bool:
    """Return True for a cast of a parameter or an input."""
    casts = node.op == "call_function" and facts(node.target).casts
    return casts and operands_of(node)[0].op == "placeholder"


def propagate(
    graph: fx.Graph,
    mesh: Mesh,
    claims: Sequence[Claim[ValueKey]],
    gathered: frozenset[tuple[ValueKey, str]] = frozenset(),
    heads: HeadAxes = MappingProxyType({}),
    like: Placed | None = None,
) -> Placed:
    """The pass of placements. It takes a canonical graph and a plan's claims, and returns the placements of all values
    that follow from them. The graph stays as it is.

    Splits spread in both directions to a fixed point, one line's claims after the other: where two lines would split a
    value or an operator differently, the earlier one does. Claims over axes of size 1 hold trivially. Values that are
    ``gathered`` over an axis split none of their readers there. ``heads`` are axes that split an attention over heads,
    whatever else they split of its operands. Placements ``like`` these of the same graph and mesh are gone on from, if
    they are those of the first claims.
    """
    terms = like.terms if like is not None and like.terms is not None else Terms(graph)
    if like is not None and not heads and like.begins(claims, gathered):
        placed, settled = like.copy(), {(False, claim.line) for claim in like.claims}
    else:
        placed, settled = (
            Placed({key: {} for key in terms.keys}, {node: {} for node in terms.order}, gathered=gathered),
            set(),
        )
    placed.rules, placed.without_rule, placed.claims, placed.terms = terms.rules, terms.without_rule, claims, terms
    state = _Propagation(terms, mesh, placed, heads)
    real = [claim for claim in claims if mesh.size(claim.axis) > 1]
    state.placed.keeps = frozenset(claim.line for claim in real if claim.gathered)
    for claim in real:
        if claim.split is None:
            state.whole.add((claim.value, claim.axis))
            if claim.site:
                state.placed.whole[claim.value, claim.axis] = claim.line
            if claim.few:
                state.few.add((claim.value, claim.axis))
        else:
            state.claimed[claim.value, claim.axis] = claim.split
    by_line: dict[tuple[bool, int], list[Claim[ValueKey]]] = {}
    for claim in sorted(real, key=lambda claim: bool(claim.site)):
        by_line.setdefault((bool(claim.site), claim.line), []).append(claim)
    for (site, line), group in ((key, group) for key, group in by_line.items() if key not in settled):
        start: list[fx.Node] = []
        if site:
            state.go_inside()
        for claim in group:
            if claim.split is not None:
                start += state.place(claim.value, claim.axis, claim.split, line)
                state.confirm(claim, line)
        for node in [*filter(_casts_placeholder, start)]:  # casts first: they are placed as their operands
            start += state.visit(node, line)
        state.settle(start, line)
    for node in heads:
        state.split_heads(node)
    return state.placed
