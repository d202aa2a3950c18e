"""Operators, parameters and types that builds got wrong once: the quickest of ``python -m tests.cases operators``."""

from __future__ import annotations

import pytest

from tests.cases.operators import case

QUICK = (
    "linear of positions", "scores of positions", "odd parameters", "values at a mask", "ctc", "sparse",
    "instances", "products of prefixes", "autocast softmax", "autocast layer_norm",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_case_is_right_or_refused_in_its_own_words(name: str) -> None:
    row = case(name)
    assert row.outcome == row.expected
