"""The text of a proposed plan: its lines in the canonical form, each with the reason why it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parc.compiler.sizes.size_range import BATCH
from parc.grammar.format import format_source
from parc.grammar.source import Source
from parc.proposing.lines import PlacingLine
from parc.proposing.tasks import Task


@dataclass(frozen=True, slots=True)
class ModelLine:
    """The model as a plan names it: its callable, its arguments, and the safetensors folder that it begins with."""

    target: str
    arguments: Mapping[str, int | float | str | bool | None] = field(default_factory=dict)
    smaller: Mapping[str, int] = field(default_factory=dict)
    """Arguments of the twin on which numbers are tested."""
    weights: str = ""


def plan_text(
    head: Sequence[str], model: ModelLine, task: Task, ranks: Mapping[str, int], lines: Sequence[PlacingLine]
) -> str:
    """Return the plan of a model, its task and its placements over ``dp`` and ``tp``, with ``head`` as its first
    comments."""
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
        f'model "{model.target}"{_arguments(model.arguments)}',
    ]
    if model.smaller:
        smaller = ", ".join(f"{name}={value}" for name, value in model.smaller.items())
        text.append(f"verify {smaller}  # numbers are tested on a model of these sizes")
    text += [f"input {name} {guess.text()}" for name, guess in task.inputs.items()]
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


def _arguments(arguments: Mapping[str, int | float | str | bool | None]) -> str:
    if not arguments:
        return ""
    return f" ({', '.join(f'{name}={_literal(value)}' for name, value in arguments.items())})"


def _literal(value: int | float | str | bool | None) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
