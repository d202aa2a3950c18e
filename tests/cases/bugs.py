"""Losses over classes that ranks hold in parts, losses of unequal sequences, arguments of forward and copied layers:
a step is that of the plain module on the whole batch, or refused by a code of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parc.advice import warnings_of
from parc.checking.checks import check_build
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from tests.cases import bug_models as models
from tests.cases.beside_plain import is_right
from tests.cases.rows import Row

FOLDER = Path(__file__).parent
PLAN = """\
model "./bug_models.py:{model}
{inputs}
sizes B=8
loss {loss}
optimizer adamw lr 1e-2 weight_decay 0.1
{lines}
"""
_WORDS = "input tokens int64 [B, 8]\ninput targets int64 [B, 8]\ninput mask float64 [B, 8]"
_SPLIT = "mesh tp=2\ncolumn up over tp\nrow down over tp\nvocab embed, head over tp pad\nschedule microbatches 2"
_RANKS = "mesh dp=2\nshard tokens, targets, mask [B/dp, _]\nschedule microbatches {count}"


@dataclass(frozen=True)
class Bug:
    """A case: a model by its call in a plan, the plan's lines, the model in plain PyTorch with its loss, and the
    expected outcome."""

    model: str
    inputs: str
    loss: str
    lines: str
    make: Callable[[], nn.Module]
    plain: Callable[[Any, dict[str, Tensor]], Tensor] = field(repr=False)
    expected: str = "right"


def _of_words(name: str, loss: models.Loss, lines: str, tied: bool = False, expected: str = "right") -> Bug:
    def plain(module: Any, batch: dict[str, Tensor]) -> Tensor:
        return loss(module(batch["tokens"]), batch["targets"], batch["mask"])

    model = f'Words" (tied={str(tied).lower()})'
    call = f'"./bug_models.py:{name}"(output, targets, mask)'
    return Bug(model, _WORDS, call, lines, partial(models.Words, tied), plain, expected)


def _given(name: str, expected: str = "right", output: str = "output", place: str = "tokens") -> Bug:
    make: Callable[[], models.Given] = getattr(models, name)

    def plain(module: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(module.classes(batch["tokens"]), batch["classes"])

    inputs = f"input tokens{f' as {place}' * (place != 'tokens')} int64 [B, 8]\ninput classes int64 [B]"
    lines = "mesh dp=2\nshard tokens [B/dp, _]\nshard classes [B/dp]"
    return Bug(f'{name}"', inputs, f"cross_entropy({output}, classes)", lines, make, plain, expected)


def _copies(kind: str) -> Bug:
    def plain(module: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(module(batch["x"]), batch["classes"])

    inputs = "input x float64 [B, 8]\ninput classes int64 [B]"
    lines = (
        "" if kind in ("batch", "untracked") else "mesh dp=2\nshard x [B/dp, _]\nshard classes [B/dp]\nzero 3 over dp"
    )
    model = f'Copies" (kind="{kind}")'
    return Bug(model, inputs, "cross_entropy(output, classes)", lines, partial(models.Copies, kind), plain)


_AVERAGED = dict.fromkeys(("two_fractions", "a_fraction_and_a_mean"), "averaged, P0217")
_REFUSED = {"selected": "P0202"}
BUGS = {
    **{f"{name}, classes in parts": _of_words(name, loss, _SPLIT, tied=name in ("several_classes", "smooth"))
       for name, loss in models.SPLIT.items()},
    **{f"{name}, one microbatch": _of_words(name, loss, _RANKS.format(count=1), expected=_REFUSED.get(name, "right"))
       for name, loss in models.COUNTED.items()},
    **{f"{name}, two microbatches": _of_words(name, loss, _RANKS.format(count=2),
                                              expected={**_AVERAGED, **_REFUSED}.get(name, "right"))
       for name, loss in models.COUNTED.items()},
    "forward by keyword": _given("ByKeyword"),
    "forward by position": _given("ByPosition"),
    "forward returns nested parts": _given("Nested", output="output.out.0.0"),
    "forward returns no tensor": _given("Nested", "P0224"),
    "forward takes a dict, and no line says so": _given("OneDict", "P0206"),
    "forward takes a dict": _given("OneDict", place="batch.tokens"),
    "forward takes a tuple in a dict": _given("OnePair", place="batch.pair.0"),
    **{f"copied layers, {kind}": _copies(kind) for kind in models.LAYERS},
}  # fmt: skip
"""The cases."""


def replay() -> Iterator[Row]:
    """Replay every case."""
    for name in BUGS:
        yield case(name)


def case(name: str) -> Row:
    """Return the row of a case."""
    return Row(name, outcome(BUGS[name]), BUGS[name].expected)


def outcome(bug: Bug) -> str:
    """Return ``right``, ``averaged, P0217`` where a warning says so, ``wrong`` where nothing does, the code of an
    error, or the first fault of a build. A loss that is right and warned of is ``right, P0217``."""
    text = PLAN.format(model=bug.model, inputs=bug.inputs, loss=bug.loss, lines=bug.lines)
    try:
        compiled = compile_plan(read_plan(Source("bugs.parc", text)), FOLDER)
        checked = check_build(compiled)
    except PlanError as error:
        return error.diagnostics[0].code.name
    if checked.faults:
        return f"P0210 {checked.faults[0]}"
    batch = {line.name: _batch()[line.name] for line in compiled.plan.inputs}
    right = is_right(compiled, bug.make(), lambda module: bug.plain(module, batch), batch)
    warned = any(warning.code.name == "P0217" for warning in (*warnings_of(compiled), *checked.warnings))
    outcomes = {(True, False): "right", (True, True): "right, P0217", (False, True): "averaged, P0217"}
    return outcomes.get((right, warned), "wrong")


@cache
def _batch() -> dict[str, Tensor]:
    """Return tokens of sequences of unequal lengths, with padding of zeros, and a sample's numbers and class."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.tensor([8, 1, 2, 7, 3, 3, 1, 1])
    words = torch.randint(1, models.CLASSES, (8, 9), generator=draw) * (torch.arange(9) <= lengths[:, None])
    return {
        "tokens": words[:, :-1], "targets": words[:, 1:], "mask": (torch.arange(8) < lengths[:, None]).double(),
        "x": torch.randn(8, 8, generator=draw).double(), "classes": torch.randint(0, 3, (8,), generator=draw),
    }  # fmt: skip
