"""Gradients of terms that cancel, as of the mean of a norm: their rounding is no fault, and any other error is."""

from __future__ import annotations

from typing import Any

import pytest

from parc.runtime.compare import roundings
from parc.runtime.compare.simulate import Simulation, compare

from ..random_layers import Sizes
from ..strategies import Layer, ModelSpec
from ..trials import TOLERANCE, build, case_of, check, subject

SPEC = ModelSpec(
    Sizes(batch=4, length=4, heads=6, head=2, vocab=12), "tokens",
    (Layer("layer_norm", (False,), 0, 0, "einsum"), Layer("conv", (False, False), 0, 0, "add"),
     Layer("squeeze", (), 2, 0, "add"), Layer("layer_norm", (False,), 0, None, "add"),
     Layer("plain", ("flip",), 0, 0, "cat_rows")),
    "mean", 2, "none", False,
)  # fmt: skip
PLAN = """\
model "./model.py:make"
input x int64 [B, 4]
sizes B=8
loss "./model.py:mean"(output)
optimizer sgd lr 1e-3
mesh dp=2, tp=2, pp=2
shard x [_, _/tp, ...]
stage before layers.0 over pp
schedule gpipe microbatches 2
"""


def test_rounding_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    check(subject(SPEC), PLAN)
    monkeypatch.setattr(roundings, "_ROUNDING_FACTOR", 0)
    with pytest.raises(AssertionError, match=r"gradient=2\.\d*e-10"):
        check(subject(SPEC), PLAN)


@pytest.mark.parametrize("wrong", [1e-6, 1e-8])
def test_any_other_error_is(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    case = case_of(model_subject := subject(SPEC), build(model_subject, PLAN))
    step = Simulation.step

    def planted(*args: Any) -> Any:
        losses, found = step(*args)
        return losses, {name: value * (1 + wrong) for name, value in found.items()}

    monkeypatch.setattr(Simulation, "step", planted)
    assert compare(case, 2).gradient > max(TOLERANCE, wrong / 4)


def test_what_one_rounding_moves_far_cannot_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundings, "_MOST_FORGIVEN", 1e-11)
    agreement = compare(case_of(model_subject := subject(SPEC), build(model_subject, PLAN)), 2)
    assert agreement.gradient > TOLERANCE
    assert agreement.amplified.startswith("one rounding of weights and inputs changes the gradient of")
