"""Values inside a model: those that cross the borders of modules, and the dims of inputs that are in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.capture.reach import made_of
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Placement, TensorType
from ...compiler.layout.stretches import Outer
from ...compiler.ops.splits import to_factor
from ...compiler.program.binding import BUFFERS
from ...compiler.resolve.names import DimOfInput, InnerValue, InnerValues
from ..calls import ValueKey, computes, fake, key_of, operands_of
from .follow import Follower, factor_places
from .propagate import Placed


def sites_of(graph: fx.Graph) -> InnerValues:
    """Return the sites of a canonical graph, each with the dims of inputs that are in it."""
    crossing = _crossings(graph)
    names: dict[ValueKey, str] = {}
    for name, keys in sorted(
        crossing.items(), key=lambda entry: (entry[0].startswith("in("), -len(entry[0]), entry[0])
    ):
        for index, key in enumerate(keys):
            names.setdefault(key, _numbered(name, index, len(keys)))
    found = _input_dims(graph)
    sites = {key: InnerValue(name, tuple(fake(key).shape), tuple(found.get(key, ()))) for key, name in names.items()}
    return InnerValues({name: tuple(sites[key] for key in keys) for name, keys in crossing.items()})


def site_values(graph: fx.Graph) -> dict[str, ValueKey]:
    """Return the values of a graph by all names of their sites."""
    return {_numbered(name, index, len(keys)): key
            for name, keys in _crossings(graph).items() for index, key in enumerate(keys)}  # fmt: skip


def site_types(graph: fx.Graph, mesh: Mesh, placed: Placed, names: Collection[str]) -> dict[str, TensorType]:
    """Return the types of the values of these names, each as its readers find it."""
    return {
        name: TensorType(fake(key).dtype, tuple(fake(key).shape), Placement.of(mesh, dict(placed.splits[key])))
        for name, key in (site_values(graph) if names else {}).items()
        if name in names
    }


def _numbered(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name[:-1]},{index})"


def _crossings(graph: fx.Graph) -> dict[str, list[ValueKey]]:
    """Return the floating-point values that parameters reach and that a module gives to others (``out``) or reads of
    others (``in``), in the order of the graph."""
    bare = made_of(graph, ("input", "key", "rng", *BUFFERS))
    crossing: dict[str, dict[ValueKey, None]] = {}
    order = {node: at for at, node in enumerate(graph.nodes)}
    for reader in graph.nodes:
        if not computes(reader) and reader.op != "output":
            continue
        inner = set(_around(reader)) if computes(reader) else set()
        for operand in operands_of(reader) if computes(reader) else reader.all_input_nodes:
            key = key_of(operand)
            value = fake(key)
            if key[0].op == "placeholder" or key[0] in bare or not isinstance(value, torch.Tensor):
                continue
            if value.is_floating_point():
                outer = set(_around(key[0]))
                for name in (*(f"out({m})" for m in outer - inner), *(f"in({m})" for m in inner - outer)):
                    crossing.setdefault(name, {})[key] = None
    return {name: sorted(keys, key=lambda key: (order[key[0]], key[1])) for name, keys in crossing.items()}


def _around(node: fx.Node) -> Iterator[str]:
    """Yield the modules that a node is in, without the whole model."""
    module = "" if noted(node).in_loss else noted(node).origin.module
    while module:
        yield module
        module = module.rpartition(".")[0]


def _input_dims(graph: fx.Graph) -> dict[ValueKey, list[DimOfInput]]:
    """Follow every dim of every input through the graph."""
    follower, found = Follower(graph), dict[ValueKey, list[DimOfInput]]()
    inputs = {noted(node).binding.name: node for node in graph.find_nodes(op="placeholder")
              if noted(node).binding.kind == "input"}  # fmt: skip
    for name, node in inputs.items():
        for at in range(noted(node).value.dim()):
            places: list[tuple[ValueKey, int, Outer]] = [((node, 0), at, 1)]
            for (_, dim, outer), reader, rule, index in follower.readings(places):
                part = to_factor(rule, rule.operands[index], dim, outer, 1)
                for place in factor_places(reader, rule, *part) if part is not None else ():
                    places.append(place)
                    found.setdefault(place[0], []).append(DimOfInput(name, at, *place[1:]))
    return found
