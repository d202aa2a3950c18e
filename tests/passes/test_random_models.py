"""Random models under random plans: every rank together computes what the unsharded model does."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from parc.grammar.diagnostics import PlanError

from ..strategies import ModelSpec, models, plans
from ..trials import TOLERANCE, check, eager_error, subject

SHARE = 3  # a model's capture serves several plans, so a part of the profile's examples is models enough


@st.composite
def trials(draw: st.DrawFn, most_layers: int) -> tuple[ModelSpec, list[str]]:
    """A model and some plans for it."""
    spec = draw(models(most_layers))
    return spec, draw(st.lists(plans(spec), min_size=1, max_size=6))


@pytest.mark.hypothesis
@pytest.mark.parametrize("most_layers", [1, 2, 3, 5])
def test_random_models(most_layers: int) -> None:
    """Each plan is an example: built, checked, read back from its text and simulated for two steps, or refused by a
    diagnostic; and the captured graph is the module's own mathematics."""
    simulated = refused = 0

    @settings(max_examples=settings().max_examples // SHARE, suppress_health_check=list(HealthCheck))
    @given(trials(most_layers))
    def run(trial: tuple[ModelSpec, list[str]]) -> None:
        nonlocal simulated, refused
        spec, texts = trial
        note(f"model: {spec}")
        made = subject(spec)
        for text in texts:
            note(f"plan:\n{text}")
            try:
                compiled, _ = check(made, text)
            except PlanError as refusal:
                event("plan refused")
                note(f"refused: {refusal}")
                refused += 1
                continue
            event("plan simulated")
            simulated += 1
            if simulated % 4 == 1 and not spec.drops:
                assert eager_error(made, compiled.built.reference) <= TOLERANCE

    run()
    assert simulated >= 50, f"{simulated} plans were simulated, {refused} refused"
