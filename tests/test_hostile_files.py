"""A share of the hostile files of ``make soak``: commands on files as a stranger gives them end soon, with a code."""

from __future__ import annotations

from pathlib import Path

from tests.hostile_files import cases, prepare, run_cases, sample


def test_files_in_every_hostile_form_are_borne(tmp_path: Path) -> None:
    made = tmp_path / "files"
    prepare(made)
    chosen = sample(60, cases())
    summary = run_cases(made, chosen)
    assert not summary.bad, summary.text()
    assert summary.ends["refused"] > 50 and len({case.kind.name for case in chosen}) > 40, summary.text()
