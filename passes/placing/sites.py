"""Sites: the values inside a model that lines can place, which cross the borders of modules, and the dims of inputs in
them; and the names that lines can use, with the uses of each weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

import torch
from torch import fx

from ...compiler.capture.capture import Captured
from ...compiler.capture.experts.forms import routed_layers
from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import made_of
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, TensorType
from ...compiler.layout.stretches import Outer
from ...compiler.ops.precision import words_for
from ...compiler.ops.rules import facts
from ...compiler.ops.splits import to_factor
from ...compiler.program.binding import BUFFERS
from ...compiler.resolve.names import DimOfInput, InnerValue, InnerValues, ModelOperator, PlanNames, WeightUse
from ..calls import ValueKey, computes, fake, key_of, operands_of
from .heads import Follower, canonical_follower, factor_places
from .propagate import Placed


def sites_of(graph: fx.Graph) -> InnerValues:
    """Return the sites of a canonical graph, each with the dims of inputs in it."""
    crossing = _crossings(graph)
    names: dict[ValueKey, str] = {}
    for name in sorted(crossing, key=lambda name: (name.startswith("in("), -len(name), name)):
        keys = crossing[name]
        for index, key in enumerate(keys):
            names.setdefault(key, _numbered(name, index, len(keys)))
    dims = input_dims(graph)
    sites = {key: InnerValue(name, tuple(fake(key).shape), tuple(dims.get(key, ()))) for key, name in names.items()}
    return InnerValues({name: tuple(sites[key] for key in keys) for name, keys in crossing.items()})


def site_values(graph: fx.Graph) -> dict[str, ValueKey]:
    """Return the values of a graph by all names of their sites."""
    return {_numbered(name, index, len(keys)): key
            for name, keys in _crossings(graph).items() for index, key in enumerate(keys)}  # fmt: skip


def site_types(graph: fx.Graph, mesh: Mesh, placed: Placed, names: Collection[str]) -> dict[str, TensorType]:
    """Return the types of the values of these names."""
    return {
        name: TensorType(fake(key).dtype, tuple(fake(key).shape), Placement.of(mesh, dict(placed.splits[key])))
        for name, key in (site_values(graph) if names else {}).items()
        if name in names
    }


def _numbered(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name[:-1]},{index})"


def _crossings(graph: fx.Graph) -> dict[str, list[ValueKey]]:
    """Return the floating-point values, computed from parameters, that a module gives to others (``out``) or reads from
    others (``in``), in the order of the graph."""
    bare = made_of(graph, ("input", "key", "rng", *BUFFERS))
    crossing: dict[str, dict[ValueKey, None]] = {}
    order = {node: at for at, node in enumerate(graph.nodes)}
    for reader in graph.nodes:
        if not computes(reader) and reader.op != "output":
            continue
        inner = set(_modules_of(reader)) if computes(reader) else set()
        for operand in operands_of(reader) if computes(reader) else reader.all_input_nodes:
            key = key_of(operand)
            value = fake(key)
            if key[0].op == "placeholder" or key[0] in bare or not isinstance(value, torch.Tensor):
                continue
            if value.is_floating_point():
                outer = set(_modules_of(key[0]))
                for name in (*(f"out({m})" for m in outer - inner), *(f"in({m})" for m in inner - outer)):
                    crossing.setdefault(name, {})[key] = None
    return {name: sorted(keys, key=lambda key: (order[key[0]], key[1])) for name, keys in crossing.items()}


def _modules_of(node: fx.Node) -> Iterator[str]:
    """Yield the modules that a node is in, the innermost first, without the whole model."""
    module = "" if noted(node).in_loss else noted(node).origin.module
    while module:
        yield module
        module = module.rpartition(".")[0]


def input_dims(graph: fx.Graph) -> dict[ValueKey, list[DimOfInput]]:
    """Return the dims of inputs that each value has."""
    follower, dims = Follower(graph), dict[ValueKey, list[DimOfInput]]()
    inputs = {noted(node).binding.name: node for node in graph.find_nodes(op="placeholder")
              if noted(node).binding.kind == "input"}  # fmt: skip
    for name, node in inputs.items():
        for at in range(noted(node).value.dim()):
            places: list[tuple[ValueKey, int, Outer]] = [((node, 0), at, 1)]
            for (_, dim, outer), reader, rule, index in follower.readings(places):
                part = to_factor(rule, rule.operands[index], dim, outer, 1)
                for place in factor_places(reader, rule, *part) if part is not None else ():
                    places.append(place)
                    dims.setdefault(place[0], []).append(DimOfInput(name, at, *place[1:]))
    return dims


# ---- names and uses of a captured model's weights


def names_of(captured: Captured) -> PlanNames:
    """Return the names that a plan's lines can use, with the use of each weight in the graph."""
    parameters = captured.placeholders("parameter")
    shapes = {name: tuple(noted(node).value.shape) for name, node in parameters.items()}
    follower = Follower(captured.graph)
    uses: dict[str, WeightUse] = {}
    with_slots = {
        module: routings[0].experts
        for module, routings in routed_layers(captured.graph).items() if routings[0].slots
    }  # fmt: skip
    for name, shape in shapes.items():
        # experts with a capacity multiply by plain products
        if shape and with_slots.get(name.rpartition(".")[0]) == shape[0]:
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
    """Return the sizes of the pieces into which the first operator that cuts a parameter's dim cuts it (queries, keys
    and values of one weight); empty if none does."""
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
    """Yield each reader of a parameter or of its parts, through transposes and casts, with the dim that becomes an
    output dim and the dim that it contracts."""
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
                and (row.looks_up or names[0] in beside)]  # fmt: skip  # a convolution's window is not contracted
        single = [dim for dim, names in zip(dims, terms, strict=True) if not names]  # dims of size 1 have no factor
        if len(dims) == 2 and row.precision == "product":
            kept, lost = kept or single, lost or single
        if len(kept) == len(lost) == 1:
            out, into = (lost[0], kept[0]) if row.looks_up else (kept[0], lost[0])
            yield node, WeightUse("lookup" if row.looks_up else "linear", out, into)
        elif len(kept) == 1 and len(terms) > 2:  # a depthwise convolution
            yield node, WeightUse("linear", kept[0], kept[0])
