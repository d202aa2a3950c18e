"""Exchanges that hide: in blocks, tokens travel to experts and back while work runs that needs none of them.

Gradients of weights need no exchange, nor do shared experts. Each exchange starts as soon as what it sends is made, and
is awaited just before its first reader. Between the two stand products that can be computed there, shared out evenly
among the exchanges of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...compiler.layout.packed_rows import EXCHANGE
from ...compiler.ops.rules import facts
from ...compiler.program.program import Function, Line
from ...compiler.program.rewriter import FreshNames, started
from ...compiler.program.roles import Programs

_HIDING = (EXCHANGE, "parc.all_to_all")


def hide_exchanges(programs: Programs) -> Programs:
    """Return the programs of a role with a start and an await for each all-to-all of blocks."""
    return {
        key: replace(program, functions=(*map(_hidden, program.blocks), *program.mains))
        for key, program in programs.items()
    }


def _hidden(block: Function) -> Function:
    exchanges = any(line.op in _HIDING for line in block.lines)
    return replace(block, lines=_Block(block).lines()) if exchanges else block


class _Block:
    """The lines of a function in a new order: those that an exchange needs first, then others, which hide it."""

    def __init__(self, function: Function) -> None:
        self.source = function.lines
        self.names = FreshNames.beside(function)
        self.behind: list[frozenset[int]] = []
        """For each line the lines that it needs, itself among them."""
        for at, line in enumerate(self.source):
            needed = (self.behind[function.at(function.makers[name])] for name in line.uses if name in function.makers)
            self.behind.append(frozenset({at}).union(*needed))
        self.exchanges = [at for at, line in enumerate(self.source) if line.op in _HIDING]
        self.made: list[Line] = []
        self.done: set[int] = set()
        self.message = 0

    def lines(self) -> tuple[Line, ...]:
        """Return the lines in their new order."""
        products = [at for at, line in enumerate(self.source) if facts(line.op).precision == "product"]
        needed = frozenset[int]().union(*(self.behind[at] for at in self.exchanges))
        free = [at for at in products if at not in needed]
        ahead = list(self.exchanges)
        coming: int | None = None
        for exchange in self.exchanges:
            self._put(at for at in self.behind[exchange] - {exchange} if self.behind[at].isdisjoint(ahead))
            self._await(coming, free, ahead)
            self._put(self.behind[exchange] - {exchange})
            coming = exchange
            self.made.append(self.source[exchange])
        self._await(coming, free, ahead)
        self._put(range(len(self.source)))
        return tuple(self.made)

    def _put(self, places: Iterable[int]) -> None:
        """Add lines that are not there yet, in their old order."""
        new = sorted(set(places) - self.done)
        self.made += [self.source[at] for at in new]
        self.done.update(new)

    def _await(self, coming: int | None, free: Sequence[int], ahead: list[int]) -> None:
        """Add this exchange's share of the free products that can be computed now, and its await. Without a line
        between the two it stays one line."""
        if coming is None:
            return
        start = max(at for at, line in enumerate(self.made) if line is self.source[coming])
        ready = [at for at in free if at not in self.done and self.behind[at].isdisjoint(ahead)]
        for at in ready[: -(-len(ready) // len(ahead))]:
            self._put(self.behind[at])
        if start + 1 < len(self.made):
            self.message += 1
            self.made[start], wait = started(self.made[start], self.names, self.message)
            self.made.append(wait)
        ahead.remove(coming)
        self.done.add(coming)
