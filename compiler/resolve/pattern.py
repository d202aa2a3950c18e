"""Patterns of dotted names: ``*``, ``**``, ``{q,k}``, ``[0..31:2]`` and the ``?`` that lets a pattern match nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from ...grammar.nearest import nearest

ANY_DEPTH = "**"
WILD = re.compile(r"[*{\[]")
BRACES = re.compile(r"\{([^}]*)\}")
INDEX = re.compile(r"\[([0-9]+)\.\.([0-9]+)(?::([0-9]+))?\]")
NamePart = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name or a pattern of names, by its text.

    >>> [name for name in ("a.0.q", "a.1.q", "a.2.v") if Pattern("a.[0..1].{q,k}").matches(name)]
    ['a.0.q', 'a.1.q']
    """

    text: str

    @property
    def optional(self) -> bool:
        return self.text.endswith("?")

    @property
    def wild(self) -> bool:
        """True where the pattern can match more than one name."""
        return WILD.search(self.text) is not None

    @property
    def segments(self) -> tuple[str, ...]:
        """The texts between the pattern's dots; a dot inside ``[0..3]`` does not count."""
        return tuple(re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^.\[\{])+", self.text.removesuffix("?")))

    def matches(self, name: str) -> bool:
        """Return whether the whole name fits the pattern."""
        return _path_fits(self.segments, tuple(name.split(".")))

    def of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names that fit the pattern, in their order."""
        if not self.wild:
            exact = self.text.removesuffix("?")
            return tuple(name for name in names if name == exact)
        segments = self.segments
        return tuple(name for name in names if _path_fits(segments, tuple(name.split("."))))

    def idle(self, matched: Sequence[str]) -> Iterator[tuple[str, str, str]]:
        """Yield alternatives that match nothing: a word in braces, or the first number of a range. Each comes with the
        pattern that has this alternative alone. If the numbers before it all match, the pattern that ends its range
        there follows, else "".

        >>> list(Pattern("a.[0..3].{q,k}").idle(["a.0.q", "a.1.q"]))
        [('k', 'a.[0..3].k', ''), ('2', 'a.2.{q,k}', 'a.[0..1].{q,k}')]
        """

        def used(text: str) -> bool:
            return any(map(Pattern(text).matches, matched))

        for braces in BRACES.finditer(self.text):
            before, after = self.text[: braces.start()], self.text[braces.end() :]
            for word in dict.fromkeys(braces[1].split(",")):
                if not used(alone := f"{before}{word}{after}"):
                    yield word, alone, ""
        for index in INDEX.finditer(self.text):
            before, after = self.text[: index.start()], self.text[index.end() :]
            numbers = range(int(index[1]), int(index[2]) + 1, max(int(index[3] or 1), 1))
            there = {int(part) for name in matched for part in name.split(".") if part.isdecimal()}
            there = {number for number in there if number in numbers and used(f"{before}{number}{after}")}
            missing = next((number for number in numbers if number not in there), None)
            if missing is not None:
                step = f":{index[3]}" if index[3] else ""
                begins = there and max(there) < missing
                instead = f"{before}[{index[1]}..{max(there)}{step}]{after}" if begins else ""
                yield str(missing), f"{before}{missing}{after}", instead

    def nearest(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return up to three patterns that match: those that this one lacks the begin of, or has too much of a begin;
        else those that differ from it only in the first segment that fails, or in all."""
        segments = self.segments
        paths = [tuple(name.split(".")) for name in names]
        if ends := tuple(dict.fromkeys(_longer(segments, paths)))[:3] or tuple(_shorter(segments, paths))[:1]:
            return ends
        if ANY_DEPTH in segments:  # which leaves no depth to look at: any one segment may be the wrong one
            words = {word for path in paths for word in path}
            others = ((*segments[:at], word, *segments[at + 1 :])
                      for at, segment in enumerate(segments) for word in nearest(segment, words))  # fmt: skip
            working = [other for other in others if any(_path_fits(other, path) for path in paths)]
            return tuple(map(".".join, working[:3]))
        for depth, segment in enumerate(segments):
            here = [path for path in paths if _path_fits(segments[:depth], path[:depth]) and len(path) > depth]
            if any(_path_fits(segments[: depth + 1], path[: depth + 1]) for path in here):
                continue
            rest = segments[depth + 1 :]
            near = nearest(segment, {path[depth] for path in here})
            mended = [(*segments[:depth], word, *rest) for word in near]
            working = [other for other in mended if any(_path_fits(other, path) for path in here)]
            if working:
                return tuple(map(".".join, working))
            break
        return nearest(self.text, {".".join(path) for path in paths})


def _longer(segments: tuple[str, ...], paths: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield patterns that end as the segments do, and match; numbers before that are any number."""
    for path in paths:
        at = len(path) - len(segments)
        if at > 0 and ANY_DEPTH not in segments and _path_fits(segments, path[at:]):
            yield ".".join(["*" if part.isdecimal() else part for part in path[:at]] + [*segments])


def _shorter(segments: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the ends of the segments that match, the longest first."""
    for at in range(1, len(segments)):
        if segments[at] != ANY_DEPTH and any(_path_fits(segments[at:], path) for path in paths):
            yield ".".join(segments[at:])


def _path_fits(segments: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Return whether the path fits. An automaton keeps the set of pattern positions that are reachable after each
    segment of the path."""
    if ANY_DEPTH not in segments:
        tests = map(_name_test, segments)
        return len(segments) == len(path) and all(test(name) for test, name in zip(tests, path, strict=True))
    if segments.count(ANY_DEPTH) == 1:
        at = segments.index(ANY_DEPTH)
        behind = len(segments) - at - 1
        return (
            at + behind <= len(path)
            and _path_fits(segments[:at], path[:at])
            and _path_fits(segments[at + 1 :], path[len(path) - behind :])
        )
    positions = _skip(segments, {0})
    for name in path:
        after: set[int] = set()
        for at in positions:
            if at < len(segments):
                if segments[at] == ANY_DEPTH:
                    after.add(at)
                elif _name_test(segments[at])(name):
                    after.add(at + 1)
        positions = _skip(segments, after)
        if not positions:
            return False
    return len(segments) in positions


def _skip(segments: tuple[str, ...], positions: set[int]) -> set[int]:
    """Return these positions, and those behind a ``**`` that matches no segment."""
    result = set(positions)
    for at in range(len(segments)):
        if at in result and segments[at] == ANY_DEPTH:
            result.add(at + 1)
    return result


@cache
def _name_test(segment: str) -> NamePart:
    index = INDEX.fullmatch(segment)
    if index:
        low, high, step = int(index[1]), int(index[2]), int(index[3] or 1)
        return lambda name: name.isdecimal() and low <= int(name) <= high and (int(name) - low) % max(step, 1) == 0
    if WILD.search(segment) is None:
        return segment.__eq__
    return lambda name: len(name) in _end_positions(segment, name, {0})


def _end_positions(segment: str, name: str, starts: set[int]) -> set[int]:
    """Return the positions in ``name`` at which the segment can end if it begins at one of ``starts``. Sets are kept,
    so that no pattern is slow."""
    ends = starts
    for part in re.findall(r"\*+|\{[^}]*\}|[^*{]+", segment):
        if part.startswith("*"):
            ends = set(range(min(ends), len(name) + 1)) if ends else set()
        elif part.startswith("{"):
            ends = {end for word in part[1:-1].split(",") for end in _end_positions(word, name, ends)}
        else:
            ends = {end + len(part) for end in ends if name.startswith(part, end)}
    return ends


# ---- patterns of names

_DIGITS = re.compile(r"\d+")


def patterns_for(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return few, short patterns that match these names and none of the ``others``.

    >>> patterns_for(["h.0.q", "h.1.q", "h.0.k", "h.1.k", "h.0.v"], ["h.0.o"])
    ['h.*.{q,k}', 'h.0.v']
    >>> patterns_for(["net.0", "net.2", "words", "head"], ["net.4"])
    ['net.{0,2}', 'words', 'head']
    >>> patterns_for([f"h.{block}.{name}_proj" for block in (0, 1) for name in "qkv"], ["h.0.o_proj", "h.1.o_proj"])
    ['h.*.{q,k,v}_proj']
    """
    wanted = set(names)
    wrong = set(others) - wanted
    return _with_alternatives(list(dict.fromkeys(_starred(name, wanted, wrong) for name in names)))


def _starred(name: str, wanted: Collection[str], wrong: Collection[str]) -> str:
    """Return the name with a star for every number that other wanted names, and no wrong ones, vary."""
    pattern, start = name, 0
    while (number := _DIGITS.search(pattern, start)) is not None:
        tried = f"{pattern[: number.start()]}*{pattern[number.end() :]}"
        both = Pattern(tried)
        alike = sum(map(both.matches, wanted)) > sum(map(Pattern(pattern).matches, wanted))
        if alike and not any(map(both.matches, wrong)):
            pattern, start = tried, number.start() + 1
        else:
            start = number.end()
    return pattern


def _with_alternatives(patterns: Sequence[str]) -> list[str]:
    """Join patterns that differ in one segment into one with alternatives there."""
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
    """Return words as one segment with alternatives; shared starts and ends are outside the braces."""
    if len(words) == 1:
        return words[0]
    start = _common_start(words)
    rest = [word[len(start) :] for word in words]
    end = _common_start([word[::-1] for word in rest])[::-1]
    inner = [word[: len(word) - len(end)] for word in rest]
    if not all(inner) or not _whole_words(start, end):
        return f"{{{','.join(words)}}}"
    return f"{start}{{{','.join(inner)}}}{end}"


def _common_start(words: Sequence[str]) -> str:
    """Return the letters with which all words begin."""
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*words)))  # noqa: B905


def _whole_words(start: str, end: str) -> bool:
    """Return whether shared starts and ends are whole parts of words: `_proj` of `q_proj` and `k_proj` is, `g` of
    `gate` and `glue` is not."""
    return (not start or not start[-1].isalnum()) and (not end or not end[0].isalnum())
