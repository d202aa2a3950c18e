"""Explanations in words of the short forms of placements, for the places where they are printed."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SPLIT = re.compile(r"S\((\d+)(?:,([\d+]+))?\)")
_WORDS = {
    "P": "P: every rank has a part of a sum, which is added up over the ranks",
    "R": "R: every rank has the same value, and uses it with different data",
    "I": "I: every rank has the same value, and all do the same with it",
}


def in_words(kinds: Iterable[str]) -> list[str]:
    """Return one sentence for each different placement on an axis.

    >>> in_words(["S(2)", "S(0,3)", "S(2)"])
    ['S(2): dim 2 is split', 'S(0,3): dim 0 is 3 equal groups one after the other, each of which is split']
    """
    return [_word(kind) for kind in dict.fromkeys(kinds)]


def _word(kind: str) -> str:
    match = _SPLIT.fullmatch(kind)
    if match is None:
        return _WORDS.get(kind, kind)
    dim, groups = match.groups()
    if groups is None:
        return f"{kind}: dim {dim} is split"
    how = f"groups of {groups.replace('+', ' and ')} parts" if "+" in groups else f"{groups} equal groups"
    return f"{kind}: dim {dim} is {how} one after the other, each of which is split"
