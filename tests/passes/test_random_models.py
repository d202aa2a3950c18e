"""Random models under random plans: all ranks together compute the same as the unsharded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Origin
from parc.compiling.driver import REFUSALS
from parc.compiling.request import ask
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.passes.pipeline import Trials
from parc.passes.placing.partition import Reshard

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


@pytest.mark.hypothesis
@settings(max_examples=settings().max_examples // (2 * SHARE), suppress_health_check=list(HealthCheck))
@given(trials(2))
def test_placements_tried_one_after_the_other_are_those_of_each_alone(trial: tuple[ModelSpec, list[str]]) -> None:
    """A trial takes over from the first one what comes out the same: here the plan without its placing lines."""
    model_subject = subject(trial[0])
    for text in trial[1]:
        shared = Trials(model_subject.captured)
        lines = text.splitlines()
        placing = [line for line in lines if line.split(" ")[0] in ("shard", "column", "row", "vocab", "replicate")]
        for kept in ([], *([line] for line in placing), placing, placing[::2], []):
            plan = "\n".join(line for line in lines if line in kept or line not in placing)
            try:
                request = ask(
                    read_plan(Source("trial.parc", plan)), Path(), model_subject.recorded, model_subject.captured
                )[1]
                expected = without_lines(Trials(model_subject.captured).place(request)[1])
            except (PlanError, *REFUSALS):
                continue
            assert without_lines(shared.place(request)[1]) == expected


def without_lines(reshards: Sequence[Reshard]) -> list[Reshard]:
    """Return reshards without the plan's lines that cause them: these are numbered otherwise in each plan."""
    return [replace(reshard, cause=Origin()) for reshard in reshards]
