"""Losses, arguments and copied layers that builds got wrong once: the quickest of ``python -m tests.cases bugs``."""

from __future__ import annotations

import pytest

from tests.cases.bugs import case

QUICK = (
    "several_classes, classes in parts", "greatest, classes in parts", "selected, two microbatches",
    "means_of_sequences, two microbatches", "two_fractions, two microbatches", "forward returns nested parts",
    "forward takes a tuple in a dict",
    "copied layers, pruned",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_case_is_right_or_refused_in_its_own_words(name: str) -> None:
    row = case(name)
    assert row.outcome == row.expected
