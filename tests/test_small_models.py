"""The model of a twin: as many blocks a stage as the build has kinds of, from whatever arguments the model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import parc.checking.twins
from parc.checking.certified import certificate_of
from parc.checking.twins import find_twin, subject_of
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.compiling.fit import stages_of
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.source import Source

_NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x, s):
        return x + self.a(x) * s

class Net(nn.Module):
    def __init__(self, layers=8, width=16, pairs=0, tiny=False, classes=16):
        super().__init__()
        if tiny and pairs:
            raise ValueError("pairs are not tiny")
        self.blocks = nn.ModuleList(Block(width) for _ in range(1 if tiny else 2 * pairs or layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        s = torch.sin(torch.arange(x.shape[-1], device=x.device).float())
        for block in self.blocks:
            x = block(x, s)
        return self.head(x)
"""
_PLAN = """\
model "./net.py:Net" ({model})
verify {verify}
input x float32 [B, D]
input y int64 [B]
sizes B=32, D=16
loss cross_entropy(output, y)
optimizer sgd lr 0.1
mesh pp={stages}, dp={ranks}
stage balanced over pp
schedule {schedule}
shard x [B/dp, _]
shard y [B/dp]
"""


def net(
    folder: Path,
    verify: str,
    model: str = "layers=8",
    stages: int = 4,
    ranks: int = 2,
    schedule: str = "1f1b microbatches 4",
    lines: str = "",
    code: str = _NET,
) -> Compiled:
    """Compile a model of blocks that all read one value which is made before them."""
    (folder / "net.py").write_text(code)
    text = _PLAN.format(verify=verify, model=model, stages=stages, ranks=ranks, schedule=schedule)
    return compile_plan(read_plan(Source("net.parc", text + lines)), folder)


def blocks(twin: Compiled) -> list[int]:
    """Return the number of blocks of each stage."""
    names = [name for name in twin.captured.modules if name.startswith("blocks.") and name.count(".") == 1]
    stages = list(stages_of(twin, dict.fromkeys(names, ())).values())
    return [stages.count(stage) for stage in sorted({*stages})]


def refusal(compilation: Compiled) -> str:
    with pytest.raises(PlanError) as refused:
        find_twin(compilation)
    return render(refused.value.diagnostics[0])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"verify": "layers=1"}, ("layers", 4, [2, 2])),
        ({"verify": "layers=2", "model": "layers=4"}, ("layers", 2, [1, 1])),
        ({"verify": "pairs=1", "model": "pairs=4"}, ("pairs", 2, [2, 2])),
        ({"verify": "layers=2", "model": "layers=8, classes=4096"}, ("layers", 8, [4, 4])),  # and a head
        ({"verify": "layers=1", "stages": 2, "schedule": "interleaved chunks 2 microbatches 2"},
         ("layers", 8, [2, 2, 2, 2])),
        ({"verify": "layers=1", "stages": 1}, ("layers", 2, [2])),
    ],
)  # fmt: skip
def test_a_twin_has_two_blocks_in_each_stage_and_chunk(
    tmp_path: Path, given: dict[str, Any], wanted: tuple[str, int, list[int]]
) -> None:
    compilation = net(tmp_path, **given)
    twin = find_twin(compilation)
    name, value, in_stages = wanted
    assert twin.overrides == {name: value}
    assert blocks(twin) == in_stages


def test_a_report_says_which_smaller_model_was_tested(tmp_path: Path) -> None:
    compilation = net(tmp_path, "layers=1, D=8, width=8", ranks=4)
    twin = subject_of(compilation)
    assert twin.text == "the twin: layers=4, width=8, B=16, D=8, mesh pp=2, dp=2"


def test_a_verify_line_with_too_few_blocks_for_the_stages_is_told_what_to_change(tmp_path: Path) -> None:
    text = refusal(net(tmp_path, "tiny=true"))
    assert "P0213" in text and "verify tiny=true" in text
    assert "the smaller model has 1 of the blocks `blocks.*`, and a test needs 4" in text
    assert "change `tiny` of the `verify` line" in text


@pytest.mark.parametrize("lines", ["zero 3 over dp unit blocks\n", "precision bf16\nprecision fp32 on blocks.{5,11}\n"])
def test_what_fewer_blocks_do_not_show_is_certified(tmp_path: Path, lines: str) -> None:
    given: dict[str, Any] = {"model": "layers=12", "stages": 1, "ranks": 16, "schedule": "1f1b microbatches 2"}
    compilation = net(tmp_path, "layers=1", lines=lines, **given)
    assert subject_of(compilation).text.startswith("the twin: layers=2, ")
    assert not certificate_of(compilation.build).missing


def test_a_model_whose_code_depends_on_its_size_has_no_twin(tmp_path: Path) -> None:
    code = _NET.replace("return x + self.a(x) * s", "return x + (self.a(x).tanh() if len(x) > 4 else self.a(x)) * s")
    text = refusal(net(tmp_path, "layers=1", code=code))
    assert "P0213" in text and "one alone has `aten." in text and "in `blocks.*`" in text
    assert "keep `layers=8` in the `verify` line, or write code that does the same at all sizes" in text


def test_a_smaller_model_that_cannot_be_made_is_the_fault_of_the_verify_line(tmp_path: Path) -> None:
    text = refusal(net(tmp_path, "tiny=true, pairs=1"))
    assert "P0205" not in text and "making the model failed: ValueError: pairs are not tiny" in text
    assert "verify tiny=true, pairs=1" in text and "a smaller model, with tiny=True, pairs=1" in text


def test_a_smaller_model_that_cannot_be_captured_is_the_fault_of_the_verify_line(tmp_path: Path) -> None:
    text = refusal(net(tmp_path, "width=8"))  # of inputs of 16
    assert "P0205" in text and "2 | verify width=8" in text and "a smaller model, with width=8" in text


def test_what_is_still_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = net(tmp_path, "layers=2", "layers=8, width=16, classes=32")
    monkeypatch.setattr(parc.checking.twins, "_MOST_WORK", 1)
    assert "give smaller numbers for `width` and `classes` in the `verify` line" in refusal(compilation)
