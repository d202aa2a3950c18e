"""The text of a proposed plan: patterns of names, lines that place weights, and the whole plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from parc.compiler.layout.stretches import Outer
from parc.compiler.resolve.names import PlanNames
from parc.compiler.resolve.pattern import Pattern
from parc.compiler.sizes.size_range import BATCH
from parc.grammar.format import format_source
from parc.grammar.source import Source
from parc.proposing.placements import Search, SplitGroup
from parc.proposing.tasks import Task

# ---- patterns


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


# ---- lines that place weights


@dataclass(frozen=True, slots=True)
class PlacingLine:
    """A line that places weights: its verb, patterns, the rest of the line, and a reason as its comment."""

    verb: str
    patterns: Sequence[str]
    rest: str
    why: str = ""
    part: str = ""
    """The part of the model that it splits together with other lines: `attention`, `hidden` or `vocab`."""

    def texts(self) -> Iterator[str]:
        """Yield one line, or several if the patterns are long."""
        rows: list[list[str]] = [[]]
        for pattern in self.patterns:
            if rows[-1] and sum(map(len, rows[-1])) + len(pattern) > _WIDTH:
                rows.append([])
            rows[-1].append(pattern)
        for at, row in enumerate(rows):
            yield f"{self.verb} {', '.join(row)} {self.rest}" + (f"  # {self.why}" if self.why and at == 0 else "")


_WIDTH = 90
"""The most characters of patterns in a line."""
_WHY = {
    ("column", True): "their outputs feed attention: each rank has its heads",
    ("row", True): "they read the heads: one sum over {axis} ends each attention",
    ("column", False): "they make a hidden width, of which each rank has a part",
    ("row", False): "they read it: one sum over {axis} ends each",
    ("vocab", False): "rows of the vocabulary: no rank holds whole logits",
}
_TABLES = "rows of the vocabulary: each rank has a part of the table"
"""The reason for a `vocab` line without a head that computes logits."""


def lines_of(groups: Sequence[SplitGroup], search: Search) -> list[PlacingLine]:
    """Return the lines of groups: attentions, then hidden widths, then the vocabulary. Weights that are split alike for
    one reason share a line."""
    alike: dict[tuple[bool, str, str], list[str]] = {}
    logits = any(name in search.heads for group in groups if group.vocab for name in group.weights)
    for group in sorted(groups, key=lambda group: (group.vocab, not group.attends)):
        for verb, rest, name in _weight_lines(group, search):
            alike.setdefault((group.attends, verb, rest), []).append(name)
    lines = []
    for (attends, verb, rest), names in sorted(alike.items(), key=lambda item: (item[0][1] == "vocab", not item[0][0])):
        why = _WHY[verb, attends] if logits or verb != "vocab" else _TABLES
        part = verb if verb == "vocab" else "attention" if attends else "hidden"
        why = why.format(axis=search.axis)
        lines.append(PlacingLine(verb, patterns_for(names, _layer_names(search.names)), rest, why, part))
    return lines


def _weight_lines(group: SplitGroup, search: Search) -> Iterator[tuple[str, str, str]]:
    """Yield verb, rest of the line and name for each weight that a line must name; the others follow by propagation."""
    over = f"over {search.axis}"
    for name, split in group.weights.items():
        if group.vocab:
            use = search.names.use(name)
            uneven = search.names.shape(name)[use.out_dim or 0] % search.ranks
            yield "vocab", over + " pad" * bool(uneven), _layer_name(name)
        elif search.begins(name, split):
            yield "column", over + _rows_clause(split.outer, search.axis), _layer_name(name)
        elif search.ends(name, split):
            yield "row", over, _layer_name(name)


def _layer_name(parameter: str) -> str:
    """Return the name that a line has for a weight: that of its layer, or its own."""
    return parameter.removesuffix(".weight")


def _layer_names(names: PlanNames) -> list[str]:
    return [_layer_name(name) for name in names.all_parameters if not name.endswith(".bias")]


def _rows_clause(outer: Outer, axis: str) -> str:
    """Return the clause `rows` for a weight whose outputs consist of several parts."""
    if isinstance(outer, int):
        return "" if outer == 1 else f" rows (3 h/{axis} d)" if outer == 3 else f" rows ({outer} f/{axis})"
    if len(outer) == 3 and outer[1] == outer[2]:
        return f" rows (h/{axis} d + g/{axis} d + g/{axis} d)"
    return f" rows ({' + '.join(f'{letter}/{axis}' for letter in 'abcdefgh'[: len(outer)])})"


# ---- the whole plan


@dataclass(frozen=True, slots=True)
class ModelLine:
    """The `model` line: the callable and its arguments, and the safetensors folder of initial weights."""

    target: str
    arguments: Mapping[str, int | float | str | bool | None] = field(default_factory=dict)
    smaller: Mapping[str, int] = field(default_factory=dict)
    """The arguments of the `verify` line."""
    weights: str = ""


def plan_text(
    head: Sequence[str], model: ModelLine, task: Task, ranks: Mapping[str, int], lines: Sequence[PlacingLine]
) -> str:
    """Return the canonical text of the plan of a model, its task and its placements over ``dp`` and ``tp``. ``head``
    are comments at its start."""
    batched = [name for name, guess in task.inputs.items() if guess.dims[:1] == (BATCH,)]
    wide = {name: ["B/dp", *("_" for _ in task.inputs[name].dims[1:])] for name in batched}
    layouts: dict[str, list[str]] = {}
    for name, dims in wide.items():
        layouts.setdefault(", ".join(dims), []).append(name)
    settings = ", ".join(f"{axis}={size}" for axis, size in ranks.items())
    text = [
        *(f"# {line}" for line in head),
        f"let {settings}  # ranks along each axis, also with -D dp=4",
        "",
        f'model "{model.target}"{_model_arguments(model.arguments)}',
    ]
    if model.smaller:
        smaller = ", ".join(f"{name}={value}" for name, value in model.smaller.items())
        text.append(f"verify {smaller}  # numbers are tested on a model of these sizes")
    places = {name: f"{name} as {guess.place}" if guess.place else name for name, guess in task.inputs.items()}
    text += [f"input {places[name]} {guess.text()}" for name, guess in task.inputs.items()]
    sizes = ", ".join(f"{name}={size}" for name, size in task.sizes.items())
    meant = "B: the samples of a step, over all ranks"
    meant += "; S: the length of sequences, for you to choose" * ("S" in task.sizes)
    text += [
        f"sizes {sizes}  # {meant}" if sizes else "",
        f"loss {task.loss}  # {task.why}",
        "data synthetic  # random samples, for a first run: name your own here",
        *([f'init from "{model.weights}"  # the weights in that folder'] if model.weights else []),
        "optimizer adamw lr 3e-4 weight_decay 0.1 clip 1.0",
        "steps 100",
        "",
        f"mesh {', '.join(f'{axis}=${axis}' for axis in ranks)}",
        *(f"shard {', '.join(names)} [{dims}]" + "  # each rank along dp has its samples" * (at == 0)
          for at, (dims, names) in enumerate(layouts.items())),
        *(row for line in lines for row in line.texts()),
    ]  # fmt: skip
    return format_source(Source("plan.parc", "\n".join(text) + "\n"))


def _model_arguments(arguments: Mapping[str, int | float | str | bool | None]) -> str:
    if not arguments:
        return ""
    return f" ({', '.join(f'{name}={_literal(value)}' for name, value in arguments.items())})"


def _literal(value: int | float | str | bool | None) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
