"""The lines to look at first in a build that is not proved: those that make, of what the model knows, what it does not.

A build is read once more for them. A value is known if it, or the sum of it over the axes along which it is partial, is
a value of the model or a gradient. A line whose operands are known and whose result is not is suspected. Rewritten
lines are suspected too, such as a loss over split classes, until what they lead to is known again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .letters import Number
from .meaning import Value
from .tensors import Tensors
from .text import Refused, Type

MOST_TOLD = 3
"""The most lines that are told."""


class Suspects:
    """The suspected lines of a build, with their places. ``of_model`` is the number of the model's meanings."""

    def __init__(self, tensors: Tensors, of_model: int, multiples: Iterable[Value]) -> None:
        self._tensors, self._of_model = tensors, of_model
        self._multiples: dict[int, set[Number]] = {}
        """The coefficients with which the model has a meaning, where it has it with one."""
        for value in multiples:
            self._multiples.setdefault(value.node, set()).add(value.coefficient)
        self._behind: dict[int, frozenset[str] | None] = {}
        """The suspected lines behind each meaning that is not known, None for one that is known."""
        self._places: dict[str, bool] = {}
        """All lines that were suspected, True for those that still are."""

    def line(self, place: str, operands: Sequence[Value], results: Sequence[tuple[Value, Type]], called: bool) -> None:
        """Look at a line's results; those of one that ``called`` a function were looked at inside."""
        origins = [each for value in operands if (each := self._origins(value.node)) is not None]
        behind = frozenset[str]().union(*origins)
        known = [
            self._knows(value, type_.partial) and (value.coefficient != 0 or not operands) for value, type_ in results
        ]
        if all(known):
            self.clear(behind)
        for (value, _), knows in zip(results, known, strict=True):
            if knows:
                self._behind.setdefault(value.node, None)
            elif called:
                self._behind.setdefault(value.node, behind)
            elif origins or self._behind.get(value.node):
                self._behind[value.node] = behind | (self._behind.get(value.node) or frozenset())
            else:
                self._places.setdefault(place, True)
                self._behind[value.node] = frozenset([place])

    def follow(self, operands: Sequence[Value], result: Value) -> None:
        """Look at what no line makes: a sum over microbatches, or over stages."""
        origins = [each for value in operands if (each := self._origins(value.node)) is not None]
        if origins and result.node >= self._of_model:
            self._behind[result.node] = frozenset[str]().union(*origins)

    def proved(self, value: Value) -> None:
        """Clear the lines behind a value that is proved to be the model's."""
        self.clear(self._origins(value.node) or ())

    def clear(self, places: Iterable[str]) -> None:
        """Suspect some lines no more."""
        self._places |= dict.fromkeys(places, False)

    def told(self, value: Value) -> list[str]:
        """Return the first lines that are suspected behind a value, if there are any; else of all that were."""
        behind = self._origins(value.node) or ()
        left = [place for place, left in self._places.items() if left]
        return ([place for place in left if place in behind] or left or [*self._places])[:MOST_TOLD]

    def _origins(self, node: int) -> frozenset[str] | None:
        """Return the suspected lines behind a meaning; None for one that is known. What no line makes, such as a sum
        over microbatches, has those of what it reads; and the name of a gradient, which is proved, has none."""
        if node < self._of_model:
            return None
        if node not in self._behind:
            reads = self._tensors.table.nodes[node].reads
            of_reads = [each for read in reads if (each := self._origins(read.node)) is not None]
            self._behind[node] = frozenset[str]().union(*of_reads) if of_reads or not reads else None
        return self._behind[node]

    def _knows(self, value: Value, partial: Sequence[str] = ()) -> bool:
        if partial:
            try:
                value = self._tensors.over(value, sorted(value.axes.intersection(partial)))
            except Refused:
                return False
        if value.node == self._tensors.table.one:
            return True
        return value.node < self._of_model and value.coefficient in self._multiples.get(value.node, {value.coefficient})
