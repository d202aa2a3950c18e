"""Rows of a replay: what a case was expected to do, and what it did."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A case by its name, its outcome in a few words, and the one that is expected."""

    name: str
    outcome: str
    expected: str
