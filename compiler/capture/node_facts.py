"""Facts of a node: what capture and passes note on the nodes of their graphs, and what torch notes there itself.

They lie in a node's ``meta``, which fx copies with the node. No other module reads or writes that.
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
    """The types of a parameter that is stored otherwise than it is computed with: as a rank stores it from step to step
    (``rest``), and as it is during a step (``step``), from where its readers gather it each time."""

    name: str
    """The name of what is made of it once a step: the parameter's, with a number for a second type in which it is
    read."""
    rest: TensorType
    step: TensorType
    reduced: tuple[str, ...]
    """The axes over which every backward sums the gradient, each rank keeping its part; over others, REDUCE does."""
    origin: Origin
    """The place in the model that reads it, and the plan's line that says how it is stored."""


class Fact(Generic[_Fact]):
    """An attribute of ``NodeFacts``, which is stored in ``meta`` under a key: its own name unless torch has another. It
    has a default for nodes on which nobody noted it."""

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
    """The place in the model's code, and the plan's line, from which the node comes."""
    in_loss = Fact(False)
    """True where the node stands outside the model, in the loss."""
    token_losses = Fact(False)
    """True where the node's result is the loss of each target, and zero for ignored targets."""
    kept = Fact(False)
    """True where a pass put the node at the graph's end, to give an output the form in which it is kept."""
    results = Fact[tuple[Binding, ...]](())
    """The bindings of the results: the loss, if there is one, loads of experts, new values of buffers, and outputs. A
    note of the output node."""
    types = Fact[list[TensorType | None]]([])
    """The types of its results on the mesh."""
    line = Fact(0)
    """The plan's line that placed a placeholder."""
    again = Fact(False)
    """True where backward makes the node's result again, though that sends messages."""
    storage = Fact[StoredAs | None](None)
    """The types of a parameter before it is as its readers compute with it, where these differ."""
    packed = Fact[Packed](None)
    """The rows of its results that are there, where these are packed."""
    chosen = Fact[fx.Node | None](None)
    """The node that says which they are."""
    block = Fact[str | None](None)
    """The block of the model that the node belongs to."""
    recompute = Fact[RecomputeLine | None](None)
    """The plan's line by which backward makes its results again."""
    stage = Fact(0)
    """The pipeline stage that computes the node."""

    def __init__(self, node: fx.Node) -> None:
        self.meta: dict[str, Any] = node.meta


_PLACE = ("nn_module_stack", "stack_trace", "origin", "in_loss")


noted = NodeFacts
"""A node's facts, to read and to write: ``noted(node).value``."""


def copy_facts(source: fx.Node, node: fx.Node) -> None:
    """Give a node the facts of another, and no others."""
    node.meta = dict(source.meta)


def copy_place(source: fx.Node, node: fx.Node) -> None:
    """Give a node the place of another one: in the model's code, or in the loss."""
    node.meta.update((key, source.meta[key]) for key in _PLACE if key in source.meta)


def keep_value(node: fx.Node) -> None:
    """Forget all facts of a node except its result."""
    node.meta = {"val": node.meta.get("val")}
