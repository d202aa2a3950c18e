"""Names: what a captured model calls its weights, and which dim of each is its outputs."""

from __future__ import annotations

from functools import cache

from torch import fx

from ...compiler.capture.capture import Captured
from ...compiler.capture.node_facts import noted
from ...compiler.ops.rules import facts
from ...compiler.resolve.names import PlanNames, WeightUse
from ..calls import computes, operands_of, rule_of, tensors_of
from ..canonical.canonicalize import canonicalize
from .heads import Follower


def names_of(captured: Captured) -> PlanNames:
    """The names that a plan's lines can speak of, with how the graph uses each weight."""
    parameters = captured.placeholders("parameter")
    follower = cache(lambda: Follower(canonicalize(captured.graph)))
    uses: dict[str, WeightUse] = {}
    for name, node in parameters.items():
        others = [alias for alias, canonical in captured.aliases.items() if canonical == name]
        for reader, use in _uses(node):
            module = noted(reader).origin.module
            for candidate in (name, *others):
                if candidate.rpartition(".")[0] == module:
                    uses.setdefault(candidate, use)
            uses.setdefault(name, use)
    return PlanNames(
        {name: tuple(noted(node).value.shape) for name, node in parameters.items()},
        {name: tuple(noted(node).value.shape) for name, node in captured.placeholders("input").items()},
        captured.modules,
        uses,
        dict(captured.aliases),
        lambda name, dim: follower().pieces(name, dim),
    )


def _rank_of(reader: fx.Node) -> int:
    value = tensors_of(reader)[0]
    return int(value.dim())


def _uses(weight: fx.Node) -> list[tuple[fx.Node, WeightUse]]:
    """Each reader of a matrix or of its parts, through transposes, with the dims it puts out and contracts."""
    found: list[tuple[fx.Node, WeightUse]] = []
    pending: list[tuple[fx.Node, tuple[int, ...]]] = [(weight, tuple(range(noted(weight).value.dim())))]
    while pending:
        node, dims = pending.pop(0)
        for reader in node.users:
            if not computes(reader):
                continue
            row = facts(reader.target)
            if row.moves == "place" and row.storage == "view" and _rank_of(reader) == len(dims):
                several = [user for user in reader.users if not computes(user) and user.op == "call_function"]
                pending += [(part, dims) for part in several or [reader]]
                continue
            rule, known = rule_of(reader)
            if not known:
                continue
            index = operands_of(reader).index(node)
            terms = rule.operands[index]
            if row.moves in ("copy", "dims") or row.casts:
                order = [next((i for i, t in enumerate(terms) if t == r), -1) for r in rule.results[0]]
                if all(i >= 0 for i in order):
                    pending.append((reader, tuple(dims[i] for i in order)))
                continue
            lookup = row.looks_up
            beside = {name for i, dims_ in enumerate(rule.operands) if i != index for names in dims_ for name in names}
            results = {name for names in rule.results[0] for name in names}
            kept = [dims[i] for i, term in enumerate(terms) if term and term[0] in results]
            lost = [dims[i] for i, term in enumerate(terms) if term and term[0] not in results]
            if not lookup:  # a kernel's extent is neither put out nor contracted
                lost = [dim for dim in lost if terms[dims.index(dim)][0] in beside]
            single = [dim for dim, term in zip(dims, terms, strict=True) if not term]  # no factor is of one entry
            if len(dims) == 2 and row.precision == "product":
                kept, lost = kept or single, lost or single
            if len(kept) == len(lost) == 1:
                out, into = (lost[0], kept[0]) if lookup else (kept[0], lost[0])
                found.append((reader, WeightUse("lookup" if lookup else "linear", out, into)))
            elif len(kept) == 1 and len(terms) > 2:  # a convolution of each channel by itself
                found.append((reader, WeightUse("linear", kept[0], kept[0])))
    return found
