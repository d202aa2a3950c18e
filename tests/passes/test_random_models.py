"""Random models under random plans: all ranks together compute the same as the unsharded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from parc.grammar.diagnostics import PlanError

from ..draws import wide
from ..plan_strategies import plans
from ..strategies import ModelSpec, models
from ..trials import TOLERANCE, check, eager_error, subject

SHARE = 3  # a model's capture serves several plans, so a part of the profile's examples is models enough


@st.composite
def trials(draw: st.DrawFn, most_layers: int) -> tuple[ModelSpec, list[str]]:
    """Draw a model and some plans for it."""
    spec = draw(models(most_layers))
    return spec, draw(st.lists(plans(spec), min_size=1, max_size=6))


@pytest.mark.hypothesis
@pytest.mark.parametrize("most_layers", [2, wide(1), wide(3), wide(5)])
def test_random_models(most_layers: int, record_property: Callable[[str, object], None]) -> None:
    """Each plan is an example. It is built, checked, read back from its text and simulated for two steps, or refused by
    a diagnostic; and the captured graph is the module's own mathematics."""
    tried: Counter[str] = Counter()

    @settings(max_examples=settings().max_examples // SHARE - 1, suppress_health_check=list(HealthCheck))
    @given(trials(most_layers))
    def run(trial: tuple[ModelSpec, list[str]]) -> None:
        spec, texts = trial
        tried["models"] += 1
        note(f"model: {spec}")
        model_subject = subject(spec)
        for text in texts:
            note(f"plan:\n{text}")
            try:
                case, _ = check(model_subject, text)
            except PlanError as refusal:
                event("plan refused")
                note(f"refused: {refusal}")
                tried["refused"] += 1
                continue
            event("plan simulated")
            tried["simulated"] += 1
            if tried["simulated"] % 4 == 1 and not spec.drops:
                assert eager_error(model_subject, case) <= TOLERANCE

    try:
        run()
    finally:
        for name, number in tried.items():
            record_property(name, number)
    assert tried["simulated"] >= 0.4 * settings().max_examples, tried
