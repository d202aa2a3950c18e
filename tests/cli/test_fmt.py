"""`parc fmt`: plan files become their canonical text, in place, or are only checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.cli import main

ROUGH = "# a plan\n\n\nmesh dp = 2 ,tp=2   # two axes\nlet  width=64\n\n"
CANONICAL = "# a plan\n\nmesh      dp=2, tp=2  # two axes\nlet       width=64\n"


def test_a_file_is_rewritten_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, other = tmp_path / "plan.parc", tmp_path / "other.parc"
    plan.write_text(ROUGH)
    other.write_text(CANONICAL)
    assert main(["fmt", str(plan), str(other), "--check"]) == 1
    assert plan.read_text() == ROUGH
    assert capsys.readouterr().err == f"{plan} would change\n"
    assert main(["fmt", str(plan), str(other)]) == 0
    assert capsys.readouterr().err == f"{plan} rewritten\n"
    assert plan.read_text() == other.read_text() == CANONICAL
    assert main(["fmt", str(plan), "--check"]) == 0
    assert capsys.readouterr() == ("", "")


def test_ends_of_lines_and_a_byte_order_mark_are_rewritten(tmp_path: Path) -> None:
    plan = tmp_path / "plan.parc"
    for rough in (CANONICAL.replace("\n", "\r\n").encode(), b"\xef\xbb\xbf" + CANONICAL.encode()):
        plan.write_bytes(rough)
        assert main(["fmt", str(plan), "--check"]) == 1
        assert main(["fmt", str(plan)]) == 0
        assert plan.read_bytes() == CANONICAL.encode()


def test_nothing_is_rewritten_where_a_file_is_malformed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, bad = tmp_path / "plan.parc", tmp_path / "bad.parc"
    plan.write_text(ROUGH)
    bad.write_text("mesh dp=\n")
    assert main(["fmt", str(plan), str(bad)]) == 1
    assert "error[P0001]" in capsys.readouterr().err
    assert (plan.read_text(), bad.read_text()) == (ROUGH, "mesh dp=\n")
    assert main(["fmt", str(tmp_path / "missing.parc")]) == 1
    assert "error[P0013]" in capsys.readouterr().err


def test_shipped_plans_are_canonical() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    plans = [*root.glob("parc/plans/*.parc"), *root.glob("examples/*.parc"), *root.glob("benchmarks/*.parc")]
    assert plans and main(["fmt", "--check", *map(str, plans)]) == 0
