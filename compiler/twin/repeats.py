"""Repeats in a function that reads one part of every layer, such as the logits of all routers: their short form, which
is the same for any number of layers.

The lines repeat once for each member of a family of operands. If each repetition from the third on is the one before
it, one member further, then the first two stand for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..program.program import Line

FamilySlots = tuple[tuple[int, int], ...]
"""The place of each operand or result among those of the short form, where a family has one place, and its number in
its family."""


@dataclass(frozen=True, slots=True)
class ShortForm:
    """Lines of which two repetitions are left. A family of operands is its first member there, one of results the value
    of the first repetition."""

    lines: tuple[Line, ...]
    operands: FamilySlots
    results: FamilySlots
    returned: tuple[str, ...]
    """The value of each result that is left."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names in the short form of values that have others, or none, there."""
    families: tuple[tuple[str, ...], ...] = ()
    """The families of operands that repetitions read, and those of results."""
    order: str = ""
    """The order in which repetitions read their family and make their results; "" where nothing repeats."""


def short_form(
    lines: Sequence[Line], operands: Sequence[str], results: Sequence[str], families: Sequence[Sequence[str]]
) -> ShortForm:
    """Return the short form of a function's lines for families of its operands, all of one size, each in order; the
    lines as they are where they are no repetitions. The first member or the last may stand alone."""
    uses = {name: [at for at, line in enumerate(lines) if name in line.uses] for of in families for name in of}
    ways = [slice(None), slice(1, None), slice(-1)]  # a sum from zero has no addition of its first term
    for of in ([family[way] for family in families] for way in ways if families and all(uses.values())):
        firsts = [uses[name][0] for name in of[0]]
        steps, first = {later - before for before, later in pairwise(firsts)}, min(firsts, default=0)
        step = steps.pop() if steps else 0
        for begin in range(first, max(first - abs(step), -1), -1) if step and not steps else ():
            repeats = _Repeats(lines, begin, abs(step), of, down=step < 0)
            if repeats.hold(uses) and (short := repeats.short_form(operands, results)) is not None:
                return short
    own, given = (tuple((at, 0) for at in range(len(names))) for names in (operands, results))
    return ShortForm(tuple(lines), own, given, tuple(results))


class _Repeats:
    """Lines from ``begin`` on that may repeat with a period, once for each member of families: in their order, or
    ``down`` from the last."""

    def __init__(
        self, lines: Sequence[Line], begin: int, period: int, families: Sequence[Sequence[str]], *, down: bool
    ) -> None:
        self.lines, self.begin, self.period, self.down = lines, begin, period, down
        self.count, self.families = len(families[0]), families
        self.end = begin + self.count * period
        self.members = {name: (of[0], number) for of in families for number, name in enumerate(of)}
        self.before = {
            name: earlier
            for of in families
            for earlier, name in pairwise(reversed(of) if down else of)
        }  # fmt: skip
        """The member that the repetition before reads."""
        self.made: dict[str, tuple[int, tuple[int, int]]] = {}
        """The repetition of each value that one makes, and its place in it."""
        for index, line in enumerate(lines[begin : self.end]):
            for at, value in enumerate(line.results):
                if value is not None:
                    self.made[value.name] = index // period, (index % period, at)
        self.named = {place: name for name, place in self.made.items()}

    def hold(self, uses: Mapping[str, Sequence[int]]) -> bool:
        """Return whether each repetition reads its own members alone, and those from the third on are as the one before
        them; and whether nothing else reads what a repetition between the first and the last makes."""
        for name, (_, number) in self.members.items():
            turn = self.count - 1 - number if self.down else number
            if any((at - self.begin) // self.period != turn for at in uses[name]):
                return False
        if self.end > len(self.lines) or not all(
            self._visible(name) for line in self.lines[self.end :] for name in line.uses
        ):
            return False
        return all(self._like_the_one_before(at) for at in range(self.begin + 2 * self.period, self.end))

    def _visible(self, name: str) -> bool:
        return name not in self.made or self.made[name][0] in (0, self.count - 1)

    def _like_the_one_before(self, at: int) -> bool:
        line, other, turn = self.lines[at], self.lines[at - self.period], (at - self.begin) // self.period
        names = {}
        for name in line.uses:
            if name in self.made:
                made, place = self.made[name]
                if made < turn - 1 or (made - 1, place) not in self.named:
                    return False
                names[name] = self.named[made - 1, place]
            elif name in self.members:
                names[name] = self.before[name]
        same = line.renamed(names)
        types = [[value and value.type for value in one.results] for one in (line, other)]
        alike = (same.op, same.args, same.kwargs) == (other.op, other.args, other.kwargs)
        return alike and types[0] == types[1] and line.origin == other.origin

    def short_form(self, operands: Sequence[str], results: Sequence[str]) -> ShortForm | None:
        """Return the short form; None where a single result is that of a repetition between the first and the last."""
        heads = {name: head for name, (head, _) in self.members.items()}
        last = {name: self.named[1, place] for name, (turn, place) in self.made.items() if turn == self.count - 1}
        families = [*map(tuple, self.families)]
        places, orders = list[tuple[int, int]](), ["down" if self.down else "up"]
        returned: list[str] = []
        at = 0
        while at < len(results):
            own = [self.made.get(name) for name in results[at : at + self.count]]
            turns = [made[0] for made in own if made is not None]
            same = None not in own and len({made[1] for made in own if made is not None}) == 1
            if same and len(own) == self.count and turns in ([*range(self.count)], [*reversed(range(self.count))]):
                places += [(len(returned), number) for number in range(self.count)]
                families.append(tuple(results[at : at + self.count]))
                orders.append(f"{len(returned)} {'up' if turns[0] == 0 else 'down'}")
                returned.append(families[-1][turns[0]])
                at += self.count
            elif self._visible(results[at]):
                places.append((len(returned), 0))
                returned.append(last.get(results[at], results[at]))
                at += 1
            else:
                return None
        left = [*self.lines[: self.begin + 2 * self.period], *(line.renamed(last) for line in self.lines[self.end :])]
        between = {name: f"{place} of repetition {turn}" for name, (turn, place) in self.made.items()
                   if 0 < turn < self.count - 1}  # fmt: skip
        between |= {name: f"{head} of repetition {number}" for name, (head, number) in self.members.items() if number}
        return ShortForm(
            tuple(line.renamed(heads) for line in left), self._operands(operands), tuple(places),
            tuple(returned), {**between, **last}, tuple(families), ", ".join(orders),
        )  # fmt: skip

    def _operands(self, operands: Sequence[str]) -> FamilySlots:
        kept = {name: slot for slot, name in enumerate(n for n in operands if self.members.get(n, (n, 0))[1] == 0)}
        return tuple((kept[self.members[name][0]], self.members[name][1]) if name in self.members else (kept[name], 0)
                     for name in operands)  # fmt: skip
