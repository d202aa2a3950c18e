"""Values inside a model that a plan's lines can place, as ``out(blocks.3)`` and ``in(blocks.3)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..layout.mesh import Shape
from ..layout.stretches import Outer
from ..plan.plan import Plan


class DimOfInput(NamedTuple):
    """A dim of an input, found in a value: the entries of the value's ``dim``, seen as ``(outer, rest)``, that ``rest``
    begins with."""

    input: str
    input_dim: int
    dim: int
    outer: Outer


@dataclass(frozen=True, slots=True)
class InnerValue:
    """A value that crosses the border of a module, by the one name that stands for all names it has."""

    name: str
    shape: Shape
    found: tuple[DimOfInput, ...] = ()
    """The dims of inputs that its dims come from, by the operators' rules."""

    def sizes(self, plan: Plan) -> Iterator[tuple[str, int, Outer]]:
        """Yield the plan's sizes that are in the value: name, dim and outer parts, each once."""
        dims = {line.name: line.dims for line in plan.inputs}
        places = ((dims[at.input][at.input_dim], at.dim, at.outer) for at in self.found if at.input in dims)
        yield from dict.fromkeys((name, dim, outer) for name, dim, outer in places if isinstance(name, str))

    def dims(self, plan: Plan, batch: str) -> tuple[str | int, ...]:
        """Return the name of each dim that is a size of the plan, and the number of entries of any other one."""
        names: list[str | int] = list(self.shape)
        for name, dim, _ in self.sizes(plan):
            size = plan.sizes[name].high // (plan.microbatches if name == batch else 1)
            if self.shape[dim] == size:  # and not a product of several sizes
                names[dim] = name
        return tuple(names)


@dataclass(frozen=True)
class InnerValues:
    """The values that cross borders of a model's modules, by ``out(MODULE)`` and ``in(MODULE)``; several ones are in
    the order in which the model makes them."""

    named: Mapping[str, tuple[InnerValue, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_own", {site.name: site for sites in self.named.values() for site in sites})

    def get(self, name: str) -> InnerValue | None:
        """Return the site of this one name."""
        own: Mapping[str, InnerValue] = getattr(self, "_own")  # noqa: B009
        return own.get(name)
