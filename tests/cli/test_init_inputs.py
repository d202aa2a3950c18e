"""Inputs and losses that `parc init` finds where layers do not tell them: patches, videos, towers, any names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Captured
from tests.cli.commands import parc as command

SQUARES = '"torch.nn.functional:mse_loss"'
SCORES = "cross_entropy(output, targets)"


@pytest.mark.parametrize(
    ("kind", "inputs", "loss"),
    [
        ("Patches", ["img float32 [B, 3, 32, 32]", "targets int64 [B]"], SCORES),
        ("VideoPatches", ["video float32 [B, 3, 4, 32, 32]", "targets int64 [B]"], SCORES),
        ("Frames", ["video float32 [B, 4, 3, 32, 32]", "targets int64 [B]"], SCORES),
        ("Waves", ["series float64 [B, S]", "target float64 [B, S]"], f"{SQUARES} (output, target)"),
        ("Towers", ["image float32 [B, 3, 32, 32]", "text int64 [B, S]"], f"{SQUARES} (output.0, output.1)"),
        ("Balanced", ["tokens int64 [B, S]", "labels int64 [B, S]"], "output.loss"),
        ("AnyNames", ["rows float32 [B, 16]", "targets int64 [B]"], SCORES),
        ("Keys", ["features float32 [B, 16]", "targets int64 [B]"], SCORES),
        ("Packed", ["features as batch.features float32 [B, 16]", "target as batch.target float32 [B]"], "output"),
        ("Several", ["x as inputs float32 [B, 16]", "x2 as inputs float32 [B, 16]", "targets int64 [B]"], SCORES),
        (
            "Masks",
            [f"{name} int64 [B, S]" for name in ("input_ids", "decoder_input_ids", "attention_mask", "targets")],
            SCORES,
        ),
        (
            "Optional",
            [*(f"{name} int64 [B, S]" for name in ("user", "item", "context")), "target float32 [B, S, 8]"],
            f"{SQUARES} (output, target)",
        ),
        ("Lengths", ["ids int64 [B, S]", "lengths int64 [B]", "targets int64 [B]"], SCORES),
        ("Volume", ["x float32 [B, 1, 8, 8, 8]", "targets int64 [B]"], SCORES),
    ],
)
def test_inputs_and_a_loss_are_found(kind: str, inputs: list[str], loss: str, tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "plan.parc"
    code, _, err = command(capsys, "init", f"tests.input_models:{kind}", "-o", plan)
    assert code == 0, err
    rows = [(verb, rest.split("  #")[0].strip()) for verb, _, rest in
            (line.partition(" ") for line in plan.read_text().splitlines())]  # fmt: skip
    assert [rest for verb, rest in rows if verb == "input"] == inputs
    assert [rest for verb, rest in rows if verb == "loss"] == [loss]


def test_a_loss_that_the_model_makes_of_labels_gets_them(tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "plan.parc"
    code, _, err = command(capsys, "init", "tests.input_models:Balanced", "--loss", "output.loss", "-o", plan)
    assert code == 0 and "labels int64 [B, S]" in plan.read_text(), err
