"""Tables of planted bugs: for each class, the number of mutants, and the check that is the first to refuse them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

CHECKS = ("parse", "shapes", "types", "communication", "padding", "numbers", "twin")


@dataclass
class Row:
    """A class of mutants: their number, the checks that are the first to refuse them, and the number that types
    refuse."""

    mutants: int = 0
    by_types: int = 0
    first: Counter[str] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)

    def note(self, what: str, check: str, by_types: bool = False) -> None:
        """Count one more mutant, and note it if no check refuses it."""
        self.mutants += 1
        self.by_types += by_types
        self.first[check] += 1
        self.accepted += [what] if not check else []


def table_text(rows: Mapping[str, Row], title: str = "class") -> str:
    """Return the table: a line for each class, a column for each check that refuses any, sums, and what is accepted."""
    total = sum((row.first for row in rows.values()), Counter[str]())
    checks = [check for check in CHECKS if total[check]]
    lines = [f"{title:<44}{'mutants':>9}" + "".join(f"{check:>15}" for check in checks) + f"{'accepted':>10}"]
    for kind, first in [*((kind, row.first) for kind, row in rows.items()), ("all", total)]:
        counts = "".join(f"{first[check]:>15}" for check in checks)
        lines.append(f"{kind:<44}{first.total():>9}{counts}{first['']:>10}")
    return "\n".join([*lines, *(f"accepted: {kind}: {what}" for kind, row in rows.items() for what in row.accepted)])
