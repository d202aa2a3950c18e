"""Lines that were probably meant otherwise, and the words of `show` on lines and placements."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.advice import warnings_of
from parc.checking.certified import certificate_of
from parc.cli import main
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.codes import MEANT_OTHERWISE
from parc.grammar.diagnostics import Diagnostic
from parc.grammar.source import Source
from parc.tables import pattern_of
from tests.checked_plans import compiled
from tests.runtime.tiny import PLAN, TENSOR, build

QKV, OUT = "column    blocks.*.attn.qkv over tp rows (3 h/tp d)", "row       blocks.*.attn.out over tp"
UP, DOWN = "column    blocks.*.mlp.up over tp", "row       blocks.*.mlp.down over tp"
WRONG = {
    "rows of two": {QKV: QKV.replace("(3 h", "(2 h")},
    "no rows": {QKV: QKV.partition(" rows")[0]},
    "column for row": {OUT: OUT.replace("row   ", "column")},
    "both exchanged": {UP: UP.replace("column", "row   "), DOWN: DOWN.replace("row   ", "column")},
}


def said(changes: dict[str, str], more: str = "") -> tuple[Diagnostic, ...]:
    text = TENSOR
    for right, wrong in changes.items():
        assert right in text
        text = text.replace(right, wrong)
    return warnings_of(compiled(PLAN.replace("layers=2", "layers=1") + text + more))


@pytest.mark.parametrize("what", WRONG)
def test_a_line_that_was_meant_otherwise_is_named_itself_and_alone(what: str) -> None:
    (warning,) = said(WRONG[what])
    assert warning.code is MEANT_OTHERWISE and warning.primary is not None
    labels = (warning.primary, *warning.related)
    assert [label.span.text for label in labels] == list(WRONG[what].values())
    assert [label.text.partition("`")[2][:-1] for label in labels] == [" ".join(right.split()) for right in WRONG[what]]
    assert "KiB a rank" in warning.message


_TWO = """
from torch import nn
def net():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 4))
"""


def test_row_and_column_exchanged_are_found_together_where_neither_alone_helps(tmp_path: Path) -> None:
    (tmp_path / "numbered.py").write_text(_TWO)
    text = _NUMBERED_PLAN.replace("column 1 over tp\ncolumn 3", "row 0 over tp\ncolumn 2")
    (warning,) = warnings_of(compile_plan(read_plan(Source("two.parc", text)), tmp_path))
    assert warning.code is MEANT_OTHERWISE and warning.primary is not None
    assert [label.text.partition("`")[2][:-1] for label in (warning.primary, *warning.related)] == [
        "column 0 over tp", "row 2 over tp",
    ]  # fmt: skip


_BAG = """
from torch import nn
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(100, 8, mode="sum"), nn.Linear(8, 4)

    def forward(self, x, z):
        return self.head(self.table(x)) + z
"""
_BAG_PLAN = """\
model "./bag.py:Bag"
input x int64 [B, 3]
input z float32 [B, 4]
input y int64 [B]
sizes B=8
loss cross_entropy(output, y)
optimizer sgd lr 0.1
mesh dp=2
shard z, y [B/dp, ...]
vocab table over dp
"""


def test_a_table_whose_lookups_an_earlier_line_splits_is_told_to_come_first(tmp_path: Path) -> None:
    (tmp_path / "bag.py").write_text(_BAG)
    (warning,) = warnings_of(compile_plan(read_plan(Source("bag.parc", _BAG_PLAN)), tmp_path))
    assert warning.code is MEANT_OTHERWISE and warning.primary is not None
    labels = (warning.primary, *warning.related)
    assert [(label.span.line, label.text.partition("`")[2][:-1]) for label in labels] == [
        (9, "vocab table over dp"), (10, "shard z, y [B/dp, ...]"),
    ]  # fmt: skip
    *before, samples, table = _BAG_PLAN.splitlines()
    changed = "\n".join([*before, table, samples])
    compilation = compile_plan(read_plan(Source("bag.parc", changed)), tmp_path)
    assert not warnings_of(compilation) and not certificate_of(compilation.build).missing


def test_what_no_other_line_would_save_is_said_as_it_is() -> None:
    assert said({}) == ()
    found = said(WRONG["rows of two"], "shard tokens [_, S/tp]\n")
    assert found and MEANT_OTHERWISE not in {warning.code for warning in found}


_NUMBERED = """
from torch import nn
def net():
    return nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
"""
_NUMBERED_PLAN = """\
model "./numbered.py:net"
input input float32 [B, 16]
input y int64 [B]
sizes B=8
loss cross_entropy(output, y)
optimizer sgd lr 0.1
mesh tp=2
column 1 over tp
column 3 over tp
"""


def test_layers_that_have_numbers_keep_them_in_advice_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has BatchNorm: its graph returns updated buffers beside the loss."""
    (tmp_path / "numbered.py").write_text(_NUMBERED)
    plan = tmp_path / "numbered.parc"
    plan.write_text(_NUMBERED_PLAN)
    assert main(["build", str(plan), "-o", str(tmp_path / "build")]) == 0
    said = capsys.readouterr().err
    assert "probably meant: `row 3 over tp`" in said and "of `3.weight`" in said
    assert main(["show", "--list", str(tmp_path / "build")]) == 0
    modules = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert modules == ["0", "1", "2", "3"]


def test_a_pattern_means_what_it_stands_for_and_nothing_else() -> None:
    every = ["stem.0.bias", "stem.1.bias", "stem.2.bias", "stem.3.bias", "head.0.weight"]
    assert pattern_of(every[:4], every) == "stem.*.bias"
    assert pattern_of(every[1:4], every) == "stem.[1..3].bias"
    assert pattern_of([every[0], every[3]], every) == "stem.{0,3}.bias"
    assert pattern_of(every[4:], every) == "head.0.weight"


def test_show_finds_programs_by_role_and_names_modules_lines_and_placements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "part.parc").write_text("mesh tp=2\ncolumn blocks.*.attn.qkv over tp rows (3 h/tp d)\n")
    stages = 'mesh pp=2, tp=2\nstage before blocks.1 over pp\ninclude "part.parc"\n'
    made = build(tmp_path, stages, PLAN.replace("microbatches", "gpipe microbatches"))

    def shown(*words: str) -> str:
        capsys.readouterr()
        assert main(["show", str(made), *words]) == 0
        return capsys.readouterr().out

    assert shown("--role", "pp1", "--action", "F").startswith('"""parc program: role stage1, action F"""')
    assert shown("--role", "stage1", "--action", "F") == shown("--role", "pp1", "--action", "F")
    modules = [line.split() for line in shown("--list").splitlines()]
    assert ["blocks.*.attn.qkv", "x2", "bias", "f32[(3", "16/tp)],", "weight", "f32[(3", "16/tp),", "16]"] in modules
    assert not any(row[0].endswith((".weight", ".bias")) for row in modules)
    whole = shown()
    row = next(line for line in whole.splitlines() if line.startswith("blocks.*.attn.qkv.weight"))
    assert "tp: S(0,3)  part.parc:2" in row
    assert "S(0,3): dim 0 is 3 equal groups one after the other, each of which is split\n" in whole
