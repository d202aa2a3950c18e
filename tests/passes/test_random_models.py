"""Random models under random plans: every rank together computes what the unsharded model does."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from parc.grammar.diagnostics import PlanError

from ..strategies import ModelSpec, models, plans
from ..trials import TOLERANCE, build, check, eager_error, subject

PLANS = 4


@st.composite
def trials(draw: st.DrawFn, most_layers: int) -> tuple[ModelSpec, list[str]]:
    """A model and some plans for it; each plan is an example, the capture is shared."""
    spec = draw(models(most_layers))
    return spec, draw(st.lists(plans(spec), min_size=1, max_size=PLANS))


def run(trial: tuple[ModelSpec, list[str]]) -> None:
    """Check every plan of a trial; plans that cannot be are refused by diagnostics, never by a fault."""
    spec, texts = trial
    note(f"model: {spec}")
    made = subject(spec)
    for text in texts:
        note(f"plan:\n{text}")
        try:
            check(made, text)
        except PlanError as refusal:
            event("plan refused")
            note(f"refused: {refusal}")
        else:
            event("plan simulated")


@settings(max_examples=max(1, settings().max_examples * 3 // 10), suppress_health_check=list(HealthCheck))
@given(trials(3))
def test_small(trial: tuple[ModelSpec, list[str]]) -> None:
    run(trial)
