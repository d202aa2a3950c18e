"""The table of planted faults: each can be planted, changes code, and names tests that there are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.planted_faults import ROOT, Copy, Fault, faults


def test_every_fault_can_be_planted_and_changes_the_code() -> None:
    rows = faults()
    assert len({row.id for row in rows}) == len(rows) >= 60
    for row in rows:
        good = (ROOT / row.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(good.replace(row.old, row.new))) != ast.dump(ast.parse(good)), row.id


def test_every_fault_names_tests_that_there_are_or_a_reason() -> None:
    for row in faults():
        assert bool(row.tests) != bool(row.unnoticed), row.id
        for test in row.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not name or f"def {name.partition('[')[0]}(" in text, test


def test_a_fault_that_has_moved_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "faults.toml"
    table.write_text("[[fault]]\nid = 'a'\nkind = 'b'\nfile = 'runtime/step.py'\nold = 'no such line'\nnew = ''\n")
    monkeypatch.setattr("tests.planted_faults.TABLE", table)
    with pytest.raises(ValueError, match=r"^a: its `old` stands 0 times in runtime/step.py, not once$"):
        faults()


def test_a_fault_is_planted_in_a_copy_alone_and_taken_back(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("number = 1\nassert number == 1\n")
    copy, fault = Copy(tmp_path), Fault("a", "b", "code.py", "number = 1", "number = 2")
    assert not copy.fails("code.py")
    with copy.with_fault(fault):
        assert copy.fails("code.py")
    assert (tmp_path / "code.py").read_text().startswith("number = 1\n") and not copy.fails("code.py")
