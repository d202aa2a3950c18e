"""Names and uses of a captured model's weights: the dim of each that is its outputs, and the one that is contracted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from torch import fx

from ...compiler.capture.capture import Captured
from ...compiler.capture.experts.forms import routed_layers
from ...compiler.capture.node_facts import noted
from ...compiler.ops.precision import words_for
from ...compiler.ops.rules import facts
from ...compiler.resolve.names import ModelOperator, PlanNames, WeightUse
from ..calls import computes
from .follow import Follower, canonical_follower, factor_places
from .sites import sites_of


def names_of(captured: Captured) -> PlanNames:
    """Return the names that a plan's lines can use, with the use of each weight in the graph."""
    parameters = captured.placeholders("parameter")
    shapes = {name: tuple(noted(node).value.shape) for name, node in parameters.items()}
    follower = Follower(captured.graph)
    uses: dict[str, WeightUse] = {}
    slotted = {
        module: routings[0].experts
        for module, routings in routed_layers(captured.graph).items() if routings[0].slots
    }  # fmt: skip
    for name, shape in shapes.items():
        if (
            shape and slotted.get(name.rpartition(".")[0]) == shape[0]
        ):  # experts with a capacity multiply by plain products
            uses[name] = WeightUse("experts", 0, 0)
            continue
        others = [alias for alias, canonical in captured.aliases.items() if canonical == name]
        for reader, use in weight_uses(follower, name, len(shape)):
            module = noted(reader).origin.module
            for candidate in (name, *others):
                if candidate.rpartition(".")[0] == module:
                    uses.setdefault(candidate, use)
            uses.setdefault(name, use)
    operators: dict[str, set[ModelOperator]] = {}
    for node in captured.graph.nodes:
        if computes(node):
            operator = ModelOperator(words_for(str(node.target)), facts(node.target).cheap)
            operators.setdefault(noted(node).origin.module, set()).add(operator)
    return PlanNames(
        shapes,
        {name: tuple(noted(node).value.shape) for name, node in captured.placeholders("input").items()},
        captured.modules,
        uses,
        dict(captured.aliases),
        lambda name, dim: _pieces(canonical_follower(captured.graph), name, dim),
        operators,
        sites=cache(lambda: sites_of(canonical_follower(captured.graph).graph)),
    )


def _pieces(follower: Follower, name: str, dim: int) -> tuple[int, ...]:
    """Return the sizes of the first pieces into which operators cut the dim that a parameter's dim becomes; empty if
    they do not."""
    pending = [(follower.parameters[name], dim)] if name in follower.parameters else []
    for (_, at), node, rule, index in follower.readings(pending):
        names = rule.operands[index][at]
        if len(names) == 2 and names[0] in rule.whole and len(rule.results) == rule.sizes[names[0]]:  # equal pieces
            return (int(rule.sizes[names[1]]),) * len(rule.results)
        if len(names) == 1 and names[0] in rule.sums:
            return tuple(int(rule.sizes[member]) for member in rule.sums[names[0]])
        if len(names) == 1:
            pending += [(key, place) for key, place, _ in factor_places(node, rule, names[0])]
    return ()


def weight_uses(follower: Follower, name: str, rank: int) -> Iterator[tuple[fx.Node, WeightUse]]:
    """Yield each reader of a matrix or of its parts, through transposes, with the dim of its outputs and the dim that
    it contracts."""
    pending = [(follower.parameters[name], tuple(range(rank)))]
    for (_, dims), node, rule, index in follower.readings(pending):
        row, terms = facts(node.target), rule.operands[index]
        if row.moves == "place" and row.storage == "view" and len(rule.results[0]) == len(dims):
            pending += [((node, result), dims) for result in range(len(rule.results))]
            continue
        if row.moves in ("copy", "dims") or row.casts:
            order = [next((i for i, t in enumerate(terms) if t == r), -1) for r in rule.results[0]]
            if all(i >= 0 for i in order):
                pending.append(((node, 0), tuple(dims[i] for i in order)))
            continue
        if row.packs == "rows":
            yield node, WeightUse("experts", dims[0], dims[0])
            continue
        others = (*rule.operands[:index], *rule.operands[index + 1 :])
        beside = {name for operand in others for names in operand for name in names}
        results = {name for result in rule.results[:1] for names in result for name in names}
        kept = [dim for dim, names in zip(dims, terms, strict=True) if names and names[0] in results]
        lost = [dim for dim, names in zip(dims, terms, strict=True) if names and names[0] not in results
                and (row.looks_up or names[0] in beside)]  # fmt: skip  # a kernel's extent is not contracted
        single = [dim for dim, names in zip(dims, terms, strict=True) if not names]  # no factor is of one entry
        if len(dims) == 2 and row.precision == "product":
            kept, lost = kept or single, lost or single
        if len(kept) == len(lost) == 1:
            out, into = (lost[0], kept[0]) if row.looks_up else (kept[0], lost[0])
            yield node, WeightUse("lookup" if row.looks_up else "linear", out, into)
        elif len(kept) == 1 and len(terms) > 2:  # a convolution of each channel by itself
            yield node, WeightUse("linear", kept[0], kept[0])
