"""Patterns for a set of names: as few and as short as a person would write."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import takewhile

from parc.compiler.resolve.pattern import Pattern

_NUMBER = re.compile(r"\d+")


def patterns_for(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return patterns that match these names, and none of the ``others``.

    >>> patterns_for(["h.0.q", "h.1.q", "h.0.k", "h.1.k", "h.0.v"], ["h.0.o"])
    ['h.*.{q,k}', 'h.0.v']
    >>> patterns_for(["net.0", "net.2", "words", "head"], ["net.4"])
    ['net.{0,2}', 'words', 'head']
    >>> patterns_for([f"h.{block}.{name}_proj" for block in (0, 1) for name in "qkv"], ["h.0.o_proj", "h.1.o_proj"])
    ['h.*.{q,k,v}_proj']
    """
    wanted = set(names)
    wrong = set(others) - wanted
    found = {name: _starred(name, wanted, wrong) for name in names}
    return _joined(list(dict.fromkeys(found.values())))


def _starred(name: str, wanted: Collection[str], wrong: Collection[str]) -> str:
    """Return the name with a star for every number of it for which others may stand too."""
    pattern, start = name, 0
    while (number := _NUMBER.search(pattern, start)) is not None:
        tried = f"{pattern[: number.start()]}*{pattern[number.end() :]}"
        both = Pattern(tried)
        alike = sum(map(both.matches, wanted)) > sum(map(Pattern(pattern).matches, wanted))
        if alike and not any(map(both.matches, wrong)):
            pattern, start = tried, number.start() + 1
        else:
            start = number.end()
    return pattern


def _joined(patterns: Sequence[str]) -> list[str]:
    """Join patterns that differ in one segment, as alternatives of it."""
    joined = [pattern.split(".") for pattern in patterns]
    for at in range(max(map(len, joined), default=0)):
        alike: dict[tuple[str, ...], list[str]] = {}
        for segments in joined:
            plain = 1 < len(segments) > at and not {"*", "{"} & set(segments[at])
            same = (*segments[:at], "", *segments[at + 1 :]) if plain else tuple(segments)
            alike.setdefault(same, []).append(segments[at] if plain else "")
        joined = [[*same[:at], _alternatives(words), *same[at + 1 :]] if words[0] else [*same]
                  for same, words in alike.items()]  # fmt: skip
    return [".".join(segments) for segments in joined]


def _alternatives(words: Sequence[str]) -> str:
    """Return words as one segment with alternatives, what they share at their ends outside."""
    if len(words) == 1:
        return words[0]
    start = _shared(words)
    rest = [word[len(start) :] for word in words]
    end = _shared([word[::-1] for word in rest])[::-1]
    inner = [word[: len(word) - len(end)] for word in rest]
    if not all(inner) or not _whole_words(start, end):
        return f"{{{','.join(words)}}}"
    return f"{start}{{{','.join(inner)}}}{end}"


def _shared(words: Sequence[str]) -> str:
    """Return the letters with which all words begin."""
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*words)))  # noqa: B905


def _whole_words(start: str, end: str) -> bool:
    """Return whether what words share ends where a part of a word does: `q_proj` and `k_proj` share `_proj`, but
    `gate` and `glue` do not share a `g` that anyone would write apart."""
    return (not start or not start[-1].isalnum()) and (not end or not end[0].isalnum())
