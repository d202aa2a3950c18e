"""Models without a family of plans: built without a warning, and every check of the build holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.advice import warnings_of
from parc.compiling.compiled import Compiled
from parc.grammar.diagnostics import PlanError, render
from tests.checked_plans import checked, compiled, held
from tests.draws import wide

HEAD = """
model "./architectures.py:{model}"
sizes B=8, S=2
optimizer adamw lr 1e-3 eps 1e-5 clip 1.0
mesh dp={dp}, tp={tp}
schedule microbatches 2
"""
SQUARE = 'loss "./architectures.py:mean_square"(output, wanted)'
CLASSES = "input labels int64 [B]\nshard labels [B/dp]\nloss cross_entropy(output, labels)"
IMAGES = "input {0} float32 [B, 3, 8, 8]\nshard {0} [B/dp, _, _, _]"
MODELS = {
    "Recurrent": (
        "input tokens int64 [B, S]\ninput targets int64 [B, S]\nshard tokens, targets [B/dp, _]\n"
        "loss cross_entropy(output, targets)",
        "vocab embed, head over tp",
    ),
    "Drawing": (f"input x float32 [B, 8]\nshard x [B/dp, _]\n{CLASSES}", "column up over tp\nrow down over tp"),
    "Painter": (
        "\n".join([IMAGES.format("x"), IMAGES.format("wanted"), SQUARE]),
        "column down over tp\nrow mid over tp\nrow up over tp",
    ),
    "Waves": (f"input x float32 [B, 2, 16]\nshard x [B/dp, _, _]\n{CLASSES}", "row point over tp"),
    "Recommender": (
        "input dense float32 [B, 4]\ninput items int64 [B, 3, 2]\ninput wanted float32 [B]\n"
        f"shard dense [B/dp, _]\nshard items [B/dp, _, _]\nshard wanted [B/dp]\n{SQUARE}",
        "vocab bags.* over tp\ncolumn bottom over tp",
    ),
    "Readers": (
        f"input x float32 [B, 6, 8]\ninput which int64 [B]\nshard x [B/dp, _, _]\nshard which [B/dp]\n{CLASSES}",
        "column make over tp",
    ),
}
GATHERED = {("Readers", 2, 1), ("Readers", 2, 2)}
"""Models that need rows of the whole batch, which other ranks have."""
ROWS = [*((name, 2, 2) for name in MODELS), ("Readers", 1, 2), *(wide(name, *axes) for name in MODELS
        for axes in ((2, 1), (1, 2)) if (name, *axes) != ("Readers", 1, 2))]  # fmt: skip


def made(name: str, inputs: str, lines: str, dp: int, tp: int) -> Compiled:
    """A model under a plan."""
    text = HEAD.format(model=name, dp=dp, tp=tp) + inputs + "\n" + (lines if tp > 1 else "")
    return compiled(text, Path(__file__).parent)


@pytest.mark.parametrize(("name", "dp", "tp"), ROWS)
def test_operators_of_other_architectures_are_split(name: str, dp: int, tp: int) -> None:
    model = made(name, *MODELS[name], dp, tp)
    (held if (name, dp, tp) == ("Readers", 1, 2) else checked)(model)  # whose module another mesh has
    assert model.built.without_rule == ()
    found = "\n".join(map(render, warnings_of(model)))
    assert bool(found) == ((name, dp, tp) in GATHERED), found


def test_a_draw_that_no_stream_counts_is_refused_at_its_line() -> None:
    inputs = f"input x float32 [B, 8]\nshard x [B/dp, _]\n{CLASSES}"
    with pytest.raises(PlanError) as refused:
        made("Reordering", inputs, "", 2, 1)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code.name == "P0221" and "aten.poisson" in diagnostic.message
    assert any("architectures.py:" in note for note in diagnostic.notes)
