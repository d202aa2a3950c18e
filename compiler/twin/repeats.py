"""The short form of a function that reads a value of every layer, such as the logits of all routers: the same for any
number of layers.

A family is such values, one of each layer, and the function's lines repeat once for each member. If each repetition
from the third on is the one before it, one member further, then the first two stand for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from ..program.program import Function, Line

FamilySlots = tuple[tuple[int, int], ...]
"""The place of each operand or result in the short form, where a family has one place, and its number in its family."""
_REPEATED = slice(None), slice(1, None), slice(-1)
"""The members of a family that repetitions may read: the first or the last may stand alone, as a sum that starts with
its first term has one addition less."""


@dataclass(frozen=True, slots=True)
class ShortForm:
    """Lines of which the first two repetitions are left. A family of operands is its first member there, a family of
    results the value of the first repetition."""

    lines: tuple[Line, ...]
    operands: FamilySlots
    results: FamilySlots
    returned: tuple[str, ...]
    """The value of each result that is left."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in the short form: of values that are left out, and of the last repetition's, which the second stands
    for."""
    families: tuple[tuple[str, ...], ...] = ()
    """The families of operands that repetitions read, and those of results."""
    order: str = ""
    """The order in which repetitions read their families and give their results; "" where nothing repeats."""


def short_form(function: Function, families: Sequence[Sequence[str]]) -> ShortForm:
    """Return the short form of a function for families of its operands, all of one size and in the order of layers; all
    of its lines where they do not repeat."""
    lines = function.lines
    uses = {name: [at for at, line in enumerate(lines) if name in line.uses] for of in families for name in of}
    for of in ([family[part] for family in families] for part in _REPEATED if families and all(uses.values())):
        firsts = [uses[name][0] for name in of[0]]
        steps = {later - before for before, later in pairwise(firsts)}
        step = steps.pop() if len(steps) == 1 else 0
        for begin in range(min(firsts), max(min(firsts) - abs(step), -1), -1):
            repeats = _Repeats(lines, begin, step, of)
            if repeats.hold(uses) and (short := repeats.short_form(function)) is not None:
                return short
    operands, results = (tuple((at, 0) for at, _ in enumerate(of)) for of in (function.parameters, function.returns))
    return ShortForm(lines, operands, results, tuple(name for _, name in function.returns))


class _Repeats:
    """Lines from ``begin`` on that may repeat once for each member of the families: the repetition of a member begins
    ``step`` lines after that of the member before. The last member comes first where ``step`` is negative."""

    def __init__(self, lines: Sequence[Line], begin: int, step: int, families: Sequence[Sequence[str]]) -> None:
        self.lines, self.begin, self.period, self.families = lines, begin, abs(step), families
        self.count = len(families[0])
        self.end = begin + self.count * self.period
        self.members = {name: (of[0], number) for of in families for number, name in enumerate(of)}
        self.order = "down" if step < 0 else "up"
        self.turns: dict[str, tuple[int, Hashable]] = {
            name: (number if step > 0 else self.count - 1 - number, head)
            for name, (head, number) in self.members.items()
        }
        """The repetition that reads a member of a family, with the family; and the one that makes a value, with the
        value's place in it."""
        for index, line in enumerate(lines[begin : self.end]):
            self.turns |= {value.name: (index // self.period, (index % self.period, at))
                           for at, value in enumerate(line.results) if value is not None}  # fmt: skip
        self.named = {turn: name for name, turn in self.turns.items()}

    def hold(self, uses: Mapping[str, Sequence[int]]) -> bool:
        """Return whether each repetition reads its own members alone, each from the third on is as the one before it,
        and lines after all of them read values of the first and the last alone."""
        reads = ((name, at) for name in self.members for at in uses[name])
        if self.end > len(self.lines) or any((at - self.begin) // self.period != self.turns[n][0] for n, at in reads):
            return False
        ends = all(self._at_an_end(name) for line in self.lines[self.end :] for name in line.uses)
        earlier = {name: self.named.get((turn - 1, place), "") for name, (turn, place) in self.turns.items()}
        return ends and all(
            _shifted(self.lines[at], earlier) == self.lines[at - self.period]
            for at in range(self.begin + 2 * self.period, self.end)
        )

    def _at_an_end(self, name: str) -> bool:
        """Return whether a value is not of a repetition between the first and the last."""
        return name not in self.turns or (name not in self.members and self.turns[name][0] in (0, self.count - 1))

    def short_form(self, function: Function) -> ShortForm | None:
        """Return the short form; None where a result that is no family is of a repetition between the first and the
        last."""
        last = {name: self.named[1, place] for name, (turn, place) in self.turns.items()
                if turn == self.count - 1 and name not in self.members}  # fmt: skip
        heads = {name: head for name, (head, _) in self.members.items()}
        families, orders = [*map(tuple, self.families)], [self.order]
        places, returned = list[tuple[int, int]](), list[str]()
        for _, same in groupby((name for _, name in function.returns), lambda name: self.turns.get(name, (0, name))[1]):
            names = tuple(same)
            turns = [self.turns[name][0] for name in names if name in self.turns]
            if turns in ([*range(self.count)], [*reversed(range(self.count))]):
                places += [(len(returned), number) for number in range(self.count)]
                orders.append(f"{len(returned)} {'up' if turns[0] == 0 else 'down'}")
                returned.append(heads.get(names[turns[0]], names[turns[0]]))
                families.append(names)
            elif all(map(self._at_an_end, names)):
                places += [(len(returned) + number, 0) for number in range(len(names))]
                returned += [last.get(name, name) for name in names]
            else:
                return None
        left = [*self.lines[: self.begin + 2 * self.period], *(line.renamed(last) for line in self.lines[self.end :])]
        hidden = {name: f"{place} of repetition {turn}" for name, (turn, place) in self.turns.items()
                  if heads.get(name) != name and (name in heads or 0 < turn < self.count - 1)}  # fmt: skip
        operands = [value.name for value in function.parameters]
        kept = {name: slot for slot, name in enumerate(name for name in operands if heads.get(name, name) == name)}
        slots = (self.members.get(name, (name, 0)) for name in operands)
        return ShortForm(
            tuple(line.renamed(heads) for line in left), tuple((kept[head], number) for head, number in slots),
            tuple(places), tuple(returned), {**hidden, **last}, tuple(families), ", ".join(orders),
        )  # fmt: skip


def _shifted(line: Line, names: Mapping[str, str]) -> Line:
    """Return the line with other names for what it reads and makes."""
    results = tuple(value and replace(value, name=names[value.name]) for value in line.results)
    return replace(line.renamed(names), results=results)
