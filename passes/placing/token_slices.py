"""Slices of tokens: where ranks that share experts have the same tokens, each routes a part of them; and the attentions
whose heads ``context`` lines split.

An ``experts`` line may name an axis whose ranks have the same tokens, as tensor parallelism leaves them; a view may
have replicas of experts on such ranks. Each rank then cuts its slice of the tokens where they are packed, and the
slices are gathered behind the sum over experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Split
from ...compiler.layout.stretches import Outer, count, inside, nest
from ...compiler.ops.own_ops import OPS
from ...compiler.ops.rules import facts
from ...compiler.ops.splits import from_factor, to_factor
from ...compiler.resolve.in_graph import ContextLine
from ...compiler.resolve.names import is_within
from ...compiler.resolve.requests import Claim
from ..calls import ValueKey, computes, fake, key_of, operands_of, tensors_of
from .propagate import Placed


def slice_tokens(
    graph: fx.Graph, mesh: Mesh, placed: Placed, replicas: Mapping[str, Collection[str]]
) -> tuple[list[Claim[ValueKey]], frozenset[tuple[ValueKey, str]]]:
    """Return the claims that cut tokens where they are packed for experts, and the sums over experts that are gathered.

    Tokens are cut over axes that split experts but not yet tokens, and over those along which a view has ``replicas``
    of the experts. Tokens that do not divide stay. Over axes that split each expert, as tensor parallelism does, tokens
    are claimed whole.
    """
    claims: list[Claim[ValueKey]] = []
    gathered: set[tuple[ValueKey, str]] = set()
    for route in graph.nodes:
        if not computes(route) or not facts(route.target).reroutes:
            continue
        operands = operands_of(route)
        slots = len(tensors_of(operands[0])[0].shape) == 4
        if not slots and len({*operands}) > 1:
            continue
        chosen = key_of(operands[1 if slots else 0])  # [experts, tokens], or [experts, sequences, slots]
        tokens = {axis: split.outer for axis, split in placed.splits[chosen].items() if split.dim == 1}
        line = placed.lines.get(route, 0)
        for axis in [axis for axis in tokens if _splits_inside(route, axis, placed)]:
            claims.append(Claim(chosen, axis, None, line))
            claims += [Claim(key, axis, None, line) for key, _ in _readers(chosen, axis, tokens[axis], mesh, placed)
                       if key[0].op != "placeholder"]  # fmt: skip
        routed, alike = placed.splits[route, 0], replicas.get(noted(route).origin.module, ())
        for axis in (axis for axis in mesh.names if mesh.size(axis) > 1 and axis not in placed.splits[chosen]):
            outer = _coarsest_parts(tokens, fake(chosen).shape[1], axis, mesh)
            split = routed.get(axis)
            if outer is not None and (axis in alike if split is None else split.dim == 0):
                tokens[axis] = outer
                for key, place in _readers(chosen, axis, outer, mesh, placed):
                    claims.append(Claim(key, axis, place, line))
                    if place is not None and noted(key[0]).packed is None and not (slots and place.dim):
                        gathered.add((key, axis))  # values with an entry for each expert stay split
    return claims, frozenset(gathered)


def _splits_inside(route: fx.Node, axis: str, placed: Placed) -> bool:
    """Return True for an axis that splits each expert's weights: its ranks need the same rows."""
    return any(
        axis in placed.parts[reader]
        and all(from_factor(placed.rules[reader], dims, *placed.parts[reader][axis]) is None
                for operand, dims in zip(operands_of(reader), placed.rules[reader].operands, strict=True)
                if key_of(operand) == (route, 0))
        for reader in route.users if computes(reader)
    )  # fmt: skip


def _coarsest_parts(tokens: Mapping[str, Outer], size: int, axis: str, mesh: Mesh) -> Outer | None:
    """Return the parts of tokens that an axis can split beside the axes that split them already: the coarsest ones that
    nest with these."""
    taken = [(outer, mesh.size(name)) for name, outer in tokens.items()]
    places: list[Outer] = [1, *(inside(outer, ranks) for outer, ranks in taken)]
    fitting = (outer for outer in sorted(places, key=count) if nest(size, [*taken, (outer, mesh.size(axis))]))
    return next(fitting, None)


def _readers(
    chosen: ValueKey, axis: str, outer: Outer, mesh: Mesh, placed: Placed
) -> Iterator[tuple[ValueKey, Split | None]]:
    """Yield the operands of operators on the tokens of a mask, which stay whole (None), and their results, with their
    split."""
    shape = fake(chosen).shape
    for reader in chosen[0].users:
        if not computes(reader) or facts(reader.target).reroutes:
            continue
        rule, operands = placed.rules[reader], [key_of(operand) for operand in operands_of(reader)]
        part = to_factor(rule, rule.operands[operands.index(chosen)], 1, outer, mesh.size(axis))
        if part is None:
            continue
        for key, dims in zip(operands, rule.operands, strict=True):
            in_slots = key != chosen and len(shape) == 3 and fake(key).shape[:3] == shape
            if from_factor(rule, dims, *part) and noted(key[0]).packed is None and not in_slots:
                yield key, None
        for index, dims in enumerate(rule.results):
            if at := from_factor(rule, dims, *part):
                yield (reader, index), Split(*at)


def heads_over(graph: fx.Graph, lines: Sequence[ContextLine]) -> dict[fx.Node, list[str]]:
    """Return the axes that split the heads of attentions, by ``context`` lines using Ulysses."""
    axes: dict[fx.Node, list[str]] = {}
    for line in (line for line in lines if line.method == "ulysses"):
        for node in graph.nodes:
            module = noted(node).origin.module
            if node.target is OPS.attention.default and any(is_within(module, outer) for outer in line.modules):
                axes.setdefault(node, []).append(line.axis)
    return axes
