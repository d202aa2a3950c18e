"""The lines that place a model's weights: groups that a search has found, by patterns, or a family's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parc.compiler.layout.stretches import Outer
from parc.compiler.resolve.names import PlanNames
from parc.proposing.patterns import patterns_for
from parc.proposing.placements import Search, SplitGroup


@dataclass(frozen=True, slots=True)
class PlacingLine:
    """A line that places weights: its verb, its patterns, what follows them, and the reason why it is there."""

    verb: str
    patterns: Sequence[str]
    rest: str
    why: str = ""
    part: str = ""
    """The part of the model that it splits, with other lines."""

    def texts(self) -> Iterator[str]:
        """Yield it as one line, or as several if its patterns are long."""
        rows: list[list[str]] = [[]]
        for pattern in self.patterns:
            if rows[-1] and sum(map(len, rows[-1])) + len(pattern) > _WIDTH:
                rows.append([])
            rows[-1].append(pattern)
        for at, row in enumerate(rows):
            yield f"{self.verb} {', '.join(row)} {self.rest}" + (f"  # {self.why}" if self.why and at == 0 else "")


_WIDTH = 90
"""The width of names at which a line is broken."""
_WHY = {
    ("column", True): "their outputs feed attention: each rank has its heads",
    ("row", True): "they read the heads: one sum over tp ends each attention",
    ("column", False): "they make a hidden width, of which each rank has a part",
    ("row", False): "they read it: one sum over tp ends each",
    ("vocab", False): "rows of the vocabulary: no rank holds whole logits",
}
_TABLES = "rows of the vocabulary: each rank has a part of the table"
"""The reason for a line about a vocabulary of which nothing computes logits."""


def lines_of(groups: Sequence[SplitGroup], search: Search) -> list[PlacingLine]:
    """Return the lines of groups. Those of attentions come first, then those of hidden widths, then the vocabulary;
    weights that are split alike for one reason share a line."""
    found: dict[tuple[bool, str, str], list[str]] = {}
    logits = any(name in search.heads for group in groups if group.vocab for name in group.weights)
    for group in sorted(groups, key=lambda group: (group.vocab, not group.attends)):
        for verb, rest, name in _places(group, search):
            found.setdefault((group.attends, verb, rest), []).append(name)
    lines = []
    for (attends, verb, rest), names in sorted(found.items(), key=lambda item: (item[0][1] == "vocab", not item[0][0])):
        lines.append(
            PlacingLine(
                verb,
                patterns_for(names, _others(search.names)),
                rest,
                _WHY[verb, attends] if logits or verb != "vocab" else _TABLES,
                _part(verb, attends),
            )
        )
    return lines


def _part(verb: str, attends: bool) -> str:
    return verb if verb == "vocab" else "attention" if attends else "hidden"


def _places(group: SplitGroup, search: Search) -> Iterator[tuple[str, str, str]]:
    """Yield verb, rest of the line and name for each weight that a line names; others follow from these."""
    over = f"over {search.axis}"
    for name, split in group.weights.items():
        if group.vocab:
            use = search.names.use(name)
            uneven = search.names.shape(name)[use.out_dim or 0] % search.ranks
            yield "vocab", over + " pad" * bool(uneven), _named(name)
        elif search.begins(name, split):
            yield "column", over + _rows(split.outer, search.axis), _named(name)
        elif search.ends(name, split):
            yield "row", over, _named(name)


def _named(parameter: str) -> str:
    """Return the name that a line has for a weight: that of its layer, or its own."""
    return parameter.removesuffix(".weight")


def _others(names: PlanNames) -> list[str]:
    return [_named(name) for name in names.all_parameters if not name.endswith(".bias")]


def _rows(outer: Outer, axis: str) -> str:
    """Return the words for the parts that a weight's outputs consist of."""
    if isinstance(outer, int):
        return "" if outer == 1 else f" rows (3 h/{axis} d)" if outer == 3 else f" rows ({outer} f/{axis})"
    if len(outer) == 3 and outer[1] == outer[2]:
        return f" rows (h/{axis} d + g/{axis} d + g/{axis} d)"
    return f" rows ({' + '.join(f'{letter}/{axis}' for letter in 'abcdefgh'[: len(outer)])})"
