"""Models as the world writes them: code that asks for the numbers of constants, draws of every kind, loops over
experts, losses over a vocabulary that ranks hold in parts. A step of all ranks is that of the plain module, or refused
by a code of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from parc.checking.checks import check_build
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from tests.cases import value_models as models
from tests.cases.beside_plain import is_right
from tests.cases.rows import Row

FOLDER = Path(__file__).parent
_PLAN = """\
model "./value_models.py:{model}
{inputs}
sizes B=8
loss {loss}
optimizer adamw lr 1e-2
{lines}
"""
_NUMBERS = "input x float32 [B, 16]\ninput targets int64 [B]"
_TOKENS = "input x int64 [B, 8] as {}\ninput targets int64 [B, 8]"
_RANKS, _SPLIT = "mesh dp=2\nshard x, targets [B/dp, ...]", "mesh tp=2\ncolumn a over tp\nrow b over tp"
_CLASSES = "mesh tp=2\nvocab embed, head over tp pad"
_REFUSED = {
    "flag that a step sets": "P0202", "branch": "P0202", "branch on a number": "P0202",
    "poisson": "P0221", "gamma": "P0221", "generator": "P0232",
    "outside by strides": "P0205",
}  # fmt: skip
_DRAWN = list(models.KINDS)[list(models.KINDS).index("randint") :]


@dataclass(frozen=True)
class Written:
    """A case: a plan's text, the model in plain PyTorch, its loss, and the expected outcome. ``by_checks``: the
    checks of a build alone compare it with the module, as they draw the same numbers, and stack experts as it does."""

    text: str
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor] = models.loss
    expected: str = "right"
    by_checks: bool = False


def _between(kind: str, lines: str) -> Written:
    text = _PLAN.format(
        model=f'Between" (kind="{kind}")', inputs=_NUMBERS, loss="cross_entropy(output, targets)", lines=lines
    )
    return Written(text, partial(models.Between, kind), expected=_REFUSED.get(kind, "right"), by_checks=kind in _DRAWN)


def _attending(kind: str) -> Written:
    text = _PLAN.format(
        model=f'Attending" (kind="{kind}")', inputs=_TOKENS.format("tokens"),
        loss="cross_entropy(output, targets)", lines=_RANKS,
    )  # fmt: skip
    return Written(text, partial(models.Attending, kind))


def _routed(form: str) -> Written:
    text = _PLAN.format(
        model=f'Routed" (form="{form}")', inputs=_NUMBERS, loss="cross_entropy(output, targets)", lines=_RANKS
    )
    return Written(text, partial(models.Routed, form), by_checks=True)


def _classes(name: str, vocab: int) -> Written:
    text = _PLAN.format(
        model=f'Classes" (vocab={vocab})', inputs=_TOKENS.format("tokens"),
        loss=f'"./value_models.py:{name}"(output, targets)', lines=_CLASSES,
    )  # fmt: skip
    return Written(text, partial(models.Classes, vocab), models.LOSSES[name])


WRITTEN = {
    **{f"{kind}, dp": _between(kind, _RANKS) for kind in models.KINDS},
    **{f"{kind}, tp": _between(kind, _SPLIT) for kind in models.KINDS if kind not in _REFUSED},
    **{f"mask {kind}": _attending(kind) for kind in models.MASKS},
    **{f"experts {form}": _routed(form) for form in ("unpacked", "counted")},
    **{f"{name}, {vocab} classes": _classes(name, vocab) for name in models.LOSSES for vocab in (27, 28)},
}
"""The cases."""


def replay() -> Iterator[Row]:
    """Replay every case."""
    for name in WRITTEN:
        yield case(name)


def case(name: str) -> Row:
    """Return the row of a case."""
    return Row(name, outcome(WRITTEN[name]), WRITTEN[name].expected)


def compiled_case(name: str) -> Compiled:
    """Return a case's compiled plan."""
    return compile_plan(read_plan(Source("values.parc", WRITTEN[name].text)), FOLDER)


def outcome(written: Written) -> str:
    """Return ``right``, ``wrong``, the code of an error, or the first fault of a build."""
    try:
        compiled = compile_plan(read_plan(Source("values.parc", written.text)), FOLDER)
        checked = check_build(compiled)
    except PlanError as error:
        return error.diagnostics[0].code.name
    if checked.faults:
        return f"P0210 {checked.faults[0]}"
    if written.by_checks:
        return "right"
    draw = torch.Generator().manual_seed(3)
    numbers, tokens = torch.randn(8, 16, generator=draw).double(), torch.randint(0, 27, (2, 8, 8), generator=draw)
    ids = "int64 [B, 8]" in written.text
    batch = {"x": tokens[0] if ids else numbers, "targets": tokens[1] if ids else tokens[1, :, 0] % 4}
    plain: Callable[[nn.Module], Tensor] = lambda module: written.loss(module(batch["x"]), batch["targets"])  # noqa: E731
    return "right" if is_right(compiled, written.make(), plain, batch) else "wrong"
