"""Operators, parameters and types of which a build was wrong, or spoke in torch's words: each is right as plain PyTorch
has it, or refused by a code of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from parc.checking.checks import check_build
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from tests.bag_models import KINDS as BAG_KINDS
from tests.cases.operator_models import KINDS
from tests.cases.rows import Row

FOLDER = Path(__file__).parent
PLAN = """\
model {model}
input x float32 [B, 16]
input tokens int64 [B, 6]
input labels int64 [B]
sizes B=8
loss cross_entropy(output, labels)
optimizer sgd lr 0.1
mesh dp=2
shard x, tokens [B/dp, _]
shard labels [B/dp]
zero {level} over dp
"""
REFUSED = {
    "a number of values": "P0202",
    "ctc": "P0202",
    "bits of numbers": "P0205",
    "steps": "P0281",
    "whole quotients": "P0281",
    "table frequency=true, bag=true": "P0205",
}
"""The codes of the cases that are refused; all others are verified."""
_TABLES = (
    "", "padding=0", "padding=-1", "padding=11", "frequency=true", "padding=3, frequency=true", "sparse=true",
    "bag=true", "bag=true, padding=-1", "bag=true, sparse=true", "frequency=true, bag=true",
)  # fmt: skip
_MODELS = {
    **{kind: f'"./operator_models.py:Net" (kind="{kind}")' for kind in KINDS},
    **{f"table {options}".strip(): f'"./operator_models.py:Table" ({options})' for options in _TABLES},
    "types": '"./operator_models.py:Mixed"',
    "complex numbers": '"./operator_models.py:Waves"',
}


def replay() -> Iterator[Row]:
    """Yield each case, whole and with parameters that ranks store in parts, and then every kind of bag."""
    for name in _MODELS:
        for level in (0, 3):
            yield case(name, level)
    for at, kind in enumerate(BAG_KINDS):
        text = PLAN.format(model=f'"../bag_models.py:Bags" (chosen="{at}")', level=3)
        text = text.replace("input x float32 [B, 16]", "input starts int64 [B]").replace("tokens", "items")
        yield Row(f"bag {kind}", outcome(text.replace("shard x, items", "shard items")), "verified")


def case(name: str, level: int = 0) -> Row:
    """Return the row of a case, whose parameters a ``zero`` line of a level stores."""
    text = PLAN.format(model=_MODELS[name], level=level)
    return Row(f"{name}, zero {level}", outcome(text), REFUSED.get(name, "verified"))


def outcome(text: str) -> str:
    """Return the code with which a plan is refused, the first fault of its build, or "verified"."""
    try:
        faults = check_build(compile_plan(read_plan(Source("operators.parc", text)), FOLDER)).faults
    except PlanError as error:
        return error.diagnostics[0].code.name
    return f"P0210 {faults[0]}" if faults else "verified"
