"""Facts of nodes: what capture, passes and torch itself note in a node's ``meta``, which fx copies with the node. No
other module reads or writes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import fx

from ..layout.placement import Packed, TensorType
from ..ops.recompute import RecomputeLine
from ..program.binding import Binding
from ..program.program import Origin

_Fact = TypeVar("_Fact")


@dataclass(frozen=True, slots=True)
class StoredAs:
    """The storage types of a parameter that differ from its compute type: ``rest`` between steps, and ``step`` during a
    step, of which its readers unshard it each time."""

    name: str
    """The name of its value in the type of ``step``: the parameter's, with a number for a second compute type."""
    rest: TensorType
    step: TensorType
    reduced: tuple[str, ...]
    """The axes over which every backward sums the gradient, each rank keeping its part; over others, REDUCE does."""
    origin: Origin
    """The place in the model that reads it, and the plan's line that shards its storage."""


class Fact(Generic[_Fact]):
    """An attribute of ``NodeFacts``, stored in ``meta`` under its name, or under torch's key; with a default for nodes
    that have no such note."""

    def __init__(self, default: _Fact, key: str = "") -> None:
        self._default, self._key = default, key

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = self._key or name

    def __get__(self, facts: NodeFacts, owner: type) -> _Fact:
        fact: _Fact = facts.meta.get(self._key, self._default)
        return fact

    def __set__(self, facts: NodeFacts, value: _Fact) -> None:
        facts.meta[self._key] = value


class NodeFacts:
    """A view of a node's facts.

    >>> node = fx.Graph().placeholder("x")
    >>> noted(node).binding = Binding("input", "x")
    >>> noted(node).binding.kind, noted(node).block
    ('input', None)
    """

    __slots__ = ("meta",)
    value = Fact[Any](None, key="val")
    """The node's result, as fake tensors. Torch keeps its own note under the same key."""
    modules = Fact[Mapping[str, Any]]({}, key="nn_module_stack")
    """The modules in which torch traced it."""
    trace = Fact[str]("", key="stack_trace")
    """The lines of Python at which torch traced it."""
    binding = Fact(Binding("value"))
    """The binding of a placeholder."""
    origin = Fact(Origin())
    """The place in the model's code, and the line of the plan, that the node comes from."""
    in_loss = Fact(False)
    """True where the node stands outside the model, in the loss."""
    token_losses = Fact(False)
    """True where the node's result is the loss of each target, and zero for ignored targets."""
    kept = Fact(False)
    """True where a pass put the node at the graph's end, to convert an output to the type in which it is stored."""
    results = Fact[tuple[Binding, ...]](())
    """The bindings of the results: the loss, if there is one, loads of experts, new values of buffers, and outputs. A
    note of the output node."""
    types = Fact[list[TensorType | None]]([])
    """The types of its results on the mesh."""
    line = Fact(0)
    """The plan's line that placed a placeholder."""
    again = Fact(False)
    """True where backward recomputes the node's result, though that sends messages."""
    storage = Fact[StoredAs | None](None)
    """The storage types of a parameter, where these differ from its compute type."""
    packed = Fact[Packed](None)
    """The rows of its results that are present, where these are packed."""
    chosen = Fact[fx.Node | None](None)
    """The node of the mask that chooses these rows."""
    block = Fact[str | None](None)
    """The block of the model that the node belongs to."""
    recompute = Fact[RecomputeLine | None](None)
    """The plan's line by which backward recomputes its results."""
    stage = Fact(0)
    """The pipeline stage that computes the node."""

    def __init__(self, node: fx.Node) -> None:
        self.meta: dict[str, Any] = node.meta


noted = NodeFacts
"""A node's facts, to read and to write: ``noted(node).value``."""


def copy_facts(source: fx.Node, node: fx.Node) -> None:
    """Replace all facts of a node by those of another."""
    node.meta = dict(source.meta)


def copy_place(source: fx.Node, node: fx.Node) -> None:
    """Copy the facts about a node's place in the code of the model or the loss."""
    place = ("nn_module_stack", "stack_trace", "origin", "in_loss")
    node.meta.update((key, source.meta[key]) for key in place if key in source.meta)


def keep_value(node: fx.Node) -> None:
    """Forget all facts of a node except its result."""
    node.meta = {"val": node.meta.get("val")}
