"""Desugared plans: only primitives of concrete names, with the same placements and messages as the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parc.cli import main
from parc.compiler.analysis.communication import communication_table
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Placement, Split, TensorType
from parc.compiling.compiled import Compiled
from parc.desugar import desugar, layout
from tests.checked_plans import compiled
from tests.runtime.tiny import PLAN
from tests.two_layers import MODULE, TASK

PLACED = """
let       tp = 2
mesh      dp=2, tp=$tp
shard     tokens, targets [B/dp, _]
column    blocks.*.attn.qkv over tp rows (3 h/tp d)
row       blocks.*.attn.out over tp
column    blocks.0.mlp.up over dp
column    blocks.*.mlp.up over tp
row       blocks.*.mlp.down over tp
vocab     embed, head over tp
replicate norm.weight
"""


def messages(compilation: Compiled) -> list[dict[str, Any]]:
    """Return the rows of a step's communication, without the lines of the plan that asked for it."""
    table = communication_table(*compilation.build.roles.values())
    return [{key: value for key, value in row.items() if key != "line"} for row in table]


def test_a_plan_in_primitives_is_the_same_plan() -> None:
    compilation = compiled(PLAN + PLACED)
    text = desugar(compilation)
    assert "let " not in text and "$" not in text and "column" not in text
    assert "shard     blocks.0.attn.qkv.weight, blocks.1.attn.qkv.weight [(3 _/tp), _]\n" in text
    assert "shard     blocks.0.mlp.up.weight [_/dp/tp, _]\n" in text
    assert "shard     embed.weight [_/tp, _]\n" in text and "replicate norm.weight\n" in text
    again = compiled(text)
    assert again.build.types == compilation.build.types
    assert messages(again) == messages(compilation)
    assert desugar(again) == text


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ({}, ""),
        ({"a": Split(1, 1)}, "[_, _/a]"),
        ({"a": Split(0, 3)}, "[(3 _/a), _]"),
        ({"a": Split(0, 1), "b": Split(0, 2)}, "[_/a/b, _]"),
        ({"a": Split(0, 1), "b": Split(0, 6)}, "[(_/a=6 _/b), _]"),
        ({"a": Split(0, 2), "b": Split(0, 12)}, "[(2 _/a=6 _/b), _]"),
    ],
)
def test_layouts_say_every_split(splits: dict[str, Split], expected: str) -> None:
    mesh = Mesh((("a", 2), ("b", 2)))
    type_ = TensorType(torch.float32, (24, 8), Placement.of(mesh, splits))
    assert layout(type_, mesh) == expected


NET_PLAN = f"""
let       tp = 2
{TASK}mesh      dp=2, tp=$tp
shard     input, y [B/dp, ...]
"""


def test_show_expand_of_a_plan_and_of_its_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(MODULE)
    plan = tmp_path / "plan.parc"
    plan.write_text(NET_PLAN)
    assert main(["show", str(plan), "--expand", "-D", "tp=1"]) == 0
    assert "mesh      dp=2, tp=1" in capsys.readouterr().out
    assert main(["show", str(plan), "--expand"]) == 0
    shown = capsys.readouterr().out
    assert main(["build", str(plan), "-o", str(tmp_path / "build"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == {"dp": 2, "tp": 2}
    assert main(["show", str(tmp_path / "build"), "--expand"]) == 2
    assert "which imports its model, `./net.py:net`" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "build"), "--expand", "--import-model"]) == 0
    assert capsys.readouterr().out == shown
