"""The text of a proposed plan: patterns of names, lines that place weights, and the whole plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parc.compiler.layout.stretches import Outer
from parc.compiler.resolve.names import PlanNames
from parc.compiler.resolve.pattern import patterns_for
from parc.compiler.sizes.size_range import BATCH
from parc.grammar.format import format_source
from parc.grammar.source import Source
from parc.proposing.placements import Search, SplitGroup
from parc.proposing.tasks import Task

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
