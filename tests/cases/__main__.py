"""Replay small cases that failed once, group by group: ``python -m tests.cases losses observed``, or all groups. It
prints a line for each case, and ends with 1 if one is not as expected."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

from tests.cases.rows import Row

GROUPS: Mapping[str, str] = {
    name: f"tests.cases.{name}" for name in ("bugs", "losses", "observed", "operators", "values")
}
"""The module of each group, whose ``replay`` yields its rows."""


def main(groups: Iterable[str]) -> int:
    """Replay groups, and return the number of cases that are not as expected."""
    wrong = 0
    for group in groups:
        replay: Callable[[], Iterable[Row]] = import_module(GROUPS[group]).replay
        count = 0
        for row in replay():
            count += 1
            same = row.outcome == row.expected
            wrong += not same
            print(f"{group}: {row.name}: {row.outcome}" + ("" if same else f" (expected: {row.expected})"), flush=True)
        print(f"{group}: {count} cases")
    print(f"{wrong} are not as expected")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:] or GROUPS), 1))
