"""The search for placements: the weights of a captured model that are worth splitting over an axis.

The outputs of one product are split as a try, and propagation tells the consequences: the other weights that are split
with them, up to the products whose results are all-reduced, and the bytes that are sent. A split qualifies if nothing
is gathered. It is best if most is split for the fewest bytes: all heads of an attention, or the hidden width of an MLP,
for the one all-reduce behind the last product. Names of modules only tell which layers are repeated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from parc.compiler.capture.capture import Captured
from parc.compiler.layout.placement import Split
from parc.compiler.layout.stretches import Outer, outer_of
from parc.compiler.ops.rules import facts
from parc.compiler.program.binding import Binding
from parc.compiler.resolve.requests import Claim, Request
from parc.compiling.driver import REFUSALS
from parc.passes.calls import operands_of
from parc.passes.pipeline import Trials, names_of
from parc.passes.placing.heads import Follower
from parc.passes.placing.partition import Reshard
from parc.passes.placing.sites import weight_uses

Claims = Mapping[str, Split]
"""The splits of some weights, by name."""
_WORTH_KEPT = 0.5
"""The least share of its worth that a group must keep beside the groups that were chosen before it."""


@dataclass(frozen=True, slots=True)
class SplitGroup:
    """Weights that are split together, each with its split, and the bytes that one forward sends for them. ``claims``
    are the splits from which the others follow.

    ``attends``: heads of an attention are split with them. ``vocab``: embeddings and heads of a vocabulary.
    """

    claims: Claims
    weights: Claims
    sent: int
    attends: bool
    vocab: bool = False


class Search:
    """The search over one captured model, for one axis of a mesh over which its plan places nothing yet."""

    def __init__(self, captured: Captured, request: Request, axis: str) -> None:
        self.axis, self.ranks, self.names = axis, request.placing.mesh.size(axis), names_of(captured)
        self._request, self.trials = request, Trials(captured)
        graph = self.trials.graph(request)
        follower = Follower(graph)
        self._nodes = {name: key[0] for name, key in follower.parameters.items()}
        self.heads = {
            name for name in self._nodes
            if any(use.kind == "linear" for _, use in weight_uses(follower, name, len(self.names.shape(name))))
        }  # fmt: skip
        """The weights that products read, tied embeddings included."""
        self._attending = contracting(graph, follower)
        self._looked_up = {
            operand
            for node in graph.nodes
            if node.op == "call_function" and facts(node.target).looks_up and node in follower.computed
            for operand in operands_of(node)
            if operand not in follower.computed
        }
        self.unsplit = frozenset(map(identity, self.trials.place(request)[1]))
        """The identities of the reshards that the plan has without a split over the axis."""
        self._groups: dict[tuple[frozenset[tuple[str, Split]], bool], SplitGroup | None] = {}

    def groups(self) -> list[SplitGroup]:
        """Return the groups that are worth splitting, the best first, then the group of the vocabulary."""
        chosen: list[SplitGroup] = []
        for group in sorted(self._candidates(), key=self._worth, reverse=True):
            before = {name: split for other in chosen for name, split in other.claims.items()}
            if any(name in other.weights for other in chosen for name in group.weights):
                continue
            beside = self.group({**before, **group.claims}, gathering=False)
            sent = sum(other.sent for other in chosen)
            if beside is not None and (beside.sent - sent) * _WORTH_KEPT <= group.sent:
                chosen.append(group)
        vocabulary = self._vocabulary({name: split for group in chosen for name, split in group.claims.items()})
        return [*chosen, *([vocabulary] if vocabulary is not None else [])]

    # ---- one try

    def group(self, claims: Claims, *, gathering: bool = True) -> SplitGroup | None:
        """Return the group that claims split; None if a claim does not hold, or a value is gathered for it and it may
        not be ``gathering``."""
        key = frozenset(claims.items()), gathering
        if key not in self._groups:
            self._groups[key] = self._tried(claims, gathering)
        return self._groups[key]

    def _tried(self, claims: Claims, gathering: bool) -> SplitGroup | None:
        tried = (Claim(Binding("parameter", name), self.axis, split, 1) for name, split in claims.items())
        placing = self._request.placing
        placing = replace(placing, claims=(*placing.claims, *tried))
        try:
            placed, conversions = self.trials.conversions(replace(self._request, placing=placing))
            split = {name: at for name, node in self._nodes.items() if (at := placed.splits[node, 0].get(self.axis))}
            if any(split.get(name) != at for name, at in claims.items()):
                return None
            sent = 0
            for reshard in conversions:
                if identity(reshard) not in self.unsplit:
                    if not gathering and gathers(reshard):
                        return None
                    sent += reshard.bytes
        except REFUSALS:
            return None
        return SplitGroup(claims, split, sent, any(self.axis in placed.parts[node] for node in self._attending))

    def gathers(self, request: Request) -> bool:
        """Return whether a request gathers or exchanges a value unasked that the plan does not without a split."""
        conversions = self.trials.conversions(request)[1]
        return any(gathers(reshard) and identity(reshard) not in self.unsplit for reshard in conversions)

    def _worth(self, group: SplitGroup) -> float:
        """Return the split entries of weights per byte sent."""
        return sum(math.prod(self.names.shape(name)) for name in group.weights) / (group.sent + 1)

    # ---- candidates

    def _candidates(self) -> Iterator[SplitGroup]:
        """Yield the groups that end in all-reduces: all weights of a kind at once, or, if that fails, one at a time."""
        alike: dict[tuple[object, ...], list[str]] = {}
        for name in self._nodes:
            use = self.names.use(name)
            if use.kind == "linear" and use.out_dim != use.in_dim:
                alike.setdefault((re.sub(r"\d+", "*", name), self.names.shape(name), use), []).append(name)
        for names in alike.values():
            if (together := self._split_of(names)) is not None:
                yield together
            elif not any(self._tries(names)) and any(self._split_of([name]) for name in (names[0], names[-1])):
                yield from filter(None, (self._split_of([name]) for name in names))

    def _split_of(self, names: Sequence[str]) -> SplitGroup | None:
        """Return the group of the first way to split the outputs of weights without a gather that all-reduces no more
        than it splits; None without such a way."""
        for group in self._tries(names):
            begin, end = (
                sum(self._outputs(name) for name, at in group.weights.items() if is_side(name, at))
                for is_side in (self.begins, self.ends)
            )
            if 0 < end <= begin:
                return group
        return None

    def _tries(self, names: Sequence[str]) -> Iterator[SplitGroup]:
        """Yield the groups of the ways to split the outputs of weights without a gather."""
        dim = self.names.use(names[0]).out_dim
        assert dim is not None
        for outer in self._ways(names[0], dim):
            group = self.group({name: Split(dim, outer) for name in names}, gathering=False)
            if group is not None:
                yield group

    def _outputs(self, name: str) -> int:
        dim = self.names.use(name).out_dim
        return 0 if dim is None else self.names.shape(name)[dim]

    def _ways(self, name: str, dim: int) -> Iterator[Outer]:
        """Yield the ways to split a dim in parts: as one, by the model's own pieces, as q, k and v, as two halves."""
        pieces, shape = self.names.pieces(name, dim), self.names.shape(name)
        size, matrix = shape[dim], len(shape) == 2
        cut: list[Outer] = [outer_of(pieces)] if len(pieces) > 1 and sum(pieces) == size else []
        for outer in dict.fromkeys([1, *cut, *((3, 2) if matrix else ())]):
            if not isinstance(outer, int) or size % (outer * self.ranks) == 0:
                yield outer

    def ends(self, name: str, split: Split) -> bool:
        """Return whether a split weight is of a product that contracts the split dim (row parallel)."""
        use = self.names.use(name)
        return use.kind == "linear" and split.dim == use.in_dim != use.out_dim

    def begins(self, name: str, split: Split) -> bool:
        """Return whether a split weight is of a product whose outputs are split (column parallel)."""
        use = self.names.use(name)
        return use.kind == "linear" and split.dim == use.out_dim != use.in_dim

    def _vocabulary(self, beside: Claims) -> SplitGroup | None:
        """Return the embeddings of inputs that have more rows than columns, with the heads of which this is so; None
        without such embeddings. Weights whose rows need padding are taken untried."""
        claims: dict[str, Split] = {}
        before = self.group(beside, gathering=False)
        assert before is not None  # groups were tried beside each other
        for name, node in self._nodes.items():
            use, shape = self.names.use(name), self.names.shape(name)
            if use.out_dim is None or use.in_dim is None or name in before.weights or len(shape) != 2:
                continue
            if shape[use.out_dim] <= shape[use.in_dim] or (use.kind == "lookup" and node not in self._looked_up):
                continue
            split = Split(use.out_dim)
            if shape[use.out_dim] % self.ranks:
                claims[name] = split
            elif (tried := self.group({**beside, name: split}, gathering=False)) is not None:
                more = {other: at for other, at in tried.weights.items() if other not in before.weights}
                if not any(self.ends(other, at) for other, at in more.items()):
                    claims[name] = split
        tables = any(self._nodes[name] in self._looked_up for name in claims)
        return SplitGroup(claims, claims, 0, False, vocab=True) if tables else None


def contracting(graph: fx.Graph, follower: Follower) -> list[fx.Node]:
    """Return the products of two computed values: those of attention, and those of experts on the rows that they
    get."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and facts(node.target).precision == "product"
        and sum(operand in follower.computed for operand in operands_of(node)) > 1
    ]


def identity(reshard: Reshard) -> tuple[object, ...]:
    """Return the key of a reshard within its graph."""
    return reshard.value, reshard.axis, reshard.source, reshard.result


def gathers(reshard: Reshard) -> bool:
    """Return whether a reshard, or its backward, gathers or exchanges a value unasked."""
    cut = isinstance(reshard.result, Split) and reshard.source != "P" and reshard.learns
    return not reshard.asked and (isinstance(reshard.source, Split) or cut)
