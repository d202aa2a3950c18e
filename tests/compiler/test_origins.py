"""Every captured operator knows the line of the model that called it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parc.compiler.capture import capture as capturing
from parc.compiler.capture.capture import InputSpec, capture
from parc.compiler.capture.node_facts import noted
from parc.compiler.initial.recipes import record


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x.mul(2.0)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.fc(x).cos()  # cos
        return _twice(self.fc(x).relu()) * scale  # relu


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.tanh()  # tanh


def _origins() -> list[tuple[str, str, str]]:
    """Return the operator, module and line of all captured nodes."""
    recorded = record(_Model, 1)
    captured = capture(
        recorded.module,
        recorded.mode,
        {"x": InputSpec(torch.float32, (4, 8)), "y": InputSpec(torch.float32, (4, 8))},
        lambda model, given: model(given["x"]),
        lambda output, given: F.mse_loss(output, given["y"]),
    )
    made = [(str(node.target), noted(node).origin) for node in captured.graph.nodes if node.op == "call_function"]
    return [(target, origin.module, origin.source) for target, origin in made]


def test_operators_know_the_line_in_a_forward_that_calls_them() -> None:
    lines = Path(__file__).read_text().splitlines()
    found = _origins()
    for operator, module, word in [
        ("relu", "blocks.1", "relu"), ("mul", "blocks.1", "relu"), ("cos", "blocks.0", "cos"), ("tanh", "", "tanh"),
    ]:  # fmt: skip
        (line,) = [at + 1 for at, text in enumerate(lines) if text.endswith(f"# {word}")]
        assert (f"aten.{operator}.default".replace("mul.default", "mul.Tensor"), module,
                f"test_origins.py:{line}") in found  # fmt: skip


def test_the_one_frame_that_is_kept_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _origins()
    monkeypatch.setattr(capturing, "one_frame", lambda own: nullcontext())
    assert found == _origins()
