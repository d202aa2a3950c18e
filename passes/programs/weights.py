"""UNSHARD: the work of a role once a step with its parameters, from which it makes the weights that its stages read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx

from ...compiler.capture.node_facts import StoredAs, noted
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ...compiler.program.actions import UNSHARD
from ...compiler.program.binding import Binding
from ...compiler.program.program import Program, Value
from .conversions import emit_conversions
from .emit import identifier
from .segments import node_type
from .writer import Writer


def unshard(graph: fx.Graph, mesh: Mesh, role: str, read: Collection[Binding]) -> Program:
    """Write UNSHARD of a role: it makes the weights that its work reads, once a step."""
    write, returns = Writer(mesh), []
    stored: dict[Binding, Value] = {}
    for node in graph.find_nodes(op="placeholder"):
        storage, binding = noted(node).storage, noted(node).binding
        if storage is None or weight_of(storage) not in read:
            continue
        if binding not in stored:
            stored[binding] = write.take(identifier(binding.name), storage.rest, binding)
        returns.append(
            (weight_of(storage), emit_conversions(write, stored[binding], storage.step, storage.origin).name)
        )
    return write.program(role, UNSHARD, returns)


def weight_of(storage: StoredAs) -> Binding:
    """The binding of what is made of a stored parameter once a step."""
    return Binding("weight", storage.name)


def stored_type(node: fx.Node) -> TensorType:
    """The type of a parameter between steps."""
    storage = noted(node).storage
    type_ = node_type(node)
    return storage.rest if storage is not None else replace(type_, placement=type_.placement.data())
