"""A small share of ``make soak``'s fuzz: what parc reads, changed at random, ends soon and with a message."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.hostile_changes import mutate_text
from tests.hostile_inputs import fuzz, prepare, run_input


def test_plans_builds_and_checkpoints_changed_at_random_are_borne(tmp_path: Path) -> None:
    prepare(tmp_path, ["tensor"])
    summary = fuzz(7, tmp_path, iter(range(20)))
    assert not summary.bad, summary.text()
    assert summary.ends["refused"] > 10 and len(summary.kinds) == 3, summary.text()


def test_what_is_not_borne_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> int:
        raise RecursionError("no bound")

    monkeypatch.setattr("tests.hostile_inputs.main", fails)
    found = run_input(0, 0, tmp_path, builds=False)
    assert "Traceback: RecursionError: no bound" in found.end
    monkeypatch.setattr("tests.hostile_inputs.main", lambda _: 1)
    assert run_input(0, 0, tmp_path, builds=False).end.startswith("exit code 1")


def test_an_input_follows_from_its_seed_and_number() -> None:
    first, again, other = (mutate_text(Random(seed), "mesh tp=2\nseed 1\n" * 20) for seed in ("0 3", "0 3", "1 3"))
    assert first == again != other
