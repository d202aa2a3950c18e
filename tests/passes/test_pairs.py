"""Functions of equal blocks are made once in a process; those of blocks that differ in anything are not shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.compiler.layout.mesh import Mesh
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from parc.passes.programs import assemble as pairs
from parc.passes.programs.joint import Joint, trace_joint
from parc.passes.programs.segments import Segment

_NET = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(self.up(x).{act}())

class Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
    def forward(self, input):
        return self.blocks(input)

def mean(output):
    return output.mean()
"""
_PLAN = """\
model "./net.py:Net"
input input float32 [B, 8]
sizes B=8
loss "./net.py:mean"(output)
optimizer sgd lr 0.1
mesh dp=2, tp=2
shard input [B/dp, _]
"""
_TP = "column blocks.*.up over tp\nrow blocks.*.down over tp\n"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return the list that gets the block of each segment that is traced."""
    made: list[str | None] = []

    def counted(segment: Segment, mesh: Mesh) -> Joint:
        made.append(segment.block)
        return trace_joint(segment, mesh)

    monkeypatch.setattr(pairs, "_PAIRS", {})
    monkeypatch.setattr(pairs, "trace_joint", counted)
    return made


def _texts(folder: Path, lines: str = "", act: str = "relu") -> dict[str, str]:
    folder /= act  # a file is loaded once a process
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(_NET.format(act=act))
    compilation = compile_plan(read_plan(Source("net.parc", _PLAN + lines)), folder)
    return {key: program.text() for key, program in compilation.built.programs.items()}


def test_a_later_build_of_the_same_blocks_traces_none(tmp_path: Path, traced: list[str | None]) -> None:
    first = _texts(tmp_path, _TP)
    assert traced.count("blocks.0") == 1 and traced.count("blocks.1") == 1 and "blocks.2" not in traced
    count = len(traced)
    assert _texts(tmp_path, _TP) == first and len(traced) == count
    stored = _texts(tmp_path, _TP + "zero 1 over dp\n")
    assert len(traced) == count and stored != first


@pytest.mark.parametrize(
    "lines, act", [("", "relu"), (_TP, "sigmoid"), ("\n" + _TP, "relu"), (_TP + "recompute blocks.*\n", "relu")]
)
def test_blocks_that_differ_have_functions_of_their_own(
    tmp_path: Path, traced: list[str | None], lines: str, act: str
) -> None:  # fmt: skip
    _texts(tmp_path, _TP)
    traced.clear()
    after_another = _texts(tmp_path, lines, act)
    assert "blocks.0" in traced
    pairs._PAIRS.clear()
    assert _texts(tmp_path, lines, act) == after_another


def test_the_oldest_pairs_are_dropped(
    tmp_path: Path, traced: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "_MOST_PAIRS", 1)
    _texts(tmp_path, _TP)
    assert len(pairs._PAIRS) == 1
    traced.clear()
    _texts(tmp_path, _TP)
    assert "blocks.0" in traced


def test_a_rule_given_between_two_builds_is_read(
    tmp_path: Path, traced: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _texts(tmp_path, _TP)
    traced.clear()
    monkeypatch.setattr(pairs, "registered", lambda: {"own.scale.default": "... d, d -> ... d"})
    assert _texts(tmp_path, _TP) == first
    assert "blocks.0" in traced
