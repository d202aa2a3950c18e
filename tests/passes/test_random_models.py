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
from parc.compiling.driver import REFUSALS, compile_plan
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


AVERAGED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.register_buffer("now", torch.zeros(8))

    def forward(self, x):
        y = x + self.down(torch.relu(self.up(x)))
        self.now = y.detach().mean((0, 1))
        return y

def square(output):
    return output.square().mean()
"""


@pytest.mark.parametrize("more", [[], ["column up over tp", "row down over tp"]])
def test_a_trial_after_another_tells_what_outputs_and_lines_need_too(tmp_path: Path, more: list[str]) -> None:
    """A buffer's sum over ranks is behind the last operator; a line that keeps a value whole changes no placement."""
    (tmp_path / "net.py").write_text(AVERAGED)
    head = [
        'model "./net.py:Net" ()', "input x float32 [B, 4, 8]", "sizes B=8", 'loss "./net.py:square"(output)',
        "optimizer sgd lr 0.1", "mesh dp=2, tp=2", "shard x [B/dp, _, _]",
    ]  # fmt: skip
    compiled = compile_plan(read_plan(Source("net.parc", "\n".join(head) + "\n")), tmp_path)

    def place(trials: Trials, lines: list[str]) -> list[Reshard]:
        plan = read_plan(Source("net.parc", "\n".join([*head, *lines]) + "\n"))
        return without_lines(trials.place(ask(plan, tmp_path, compiled.recorded, compiled.captured)[1])[1])

    shared = Trials(compiled.captured)
    for lines in (more, more, [*more, "shard out(down) [B/dp, _, _]"], more):
        expected = place(Trials(compiled.captured), lines)
        assert expected and place(shared, lines) == expected
