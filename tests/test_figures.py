"""The page of promises and figures: all rows can be built again, and the quick ones are."""

from __future__ import annotations

import re

from benchmarks.figures import PAGE, READERS, ROW, measured

QUICK = ("four all-reduces", "sums in two levels")


def found() -> list[re.Match[str]]:
    """Return the rows of the page."""
    return [*ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def test_every_row_has_a_reader_and_numbers_for_its_variants() -> None:
    assert len(found()) == PAGE.read_text(encoding="utf-8").count("\n| ") - 1 > 15
    for row in found():
        assert row["unit"] in READERS, row["unit"]
        variants = row["build"].partition(": ")[2]
        count = len(re.findall("`[^`]+`|without", variants)) or 1
        assert len(row["formula"].split(" / ")) == len(row["parc"].split(" / ")) == count, row["claim"]


def test_quick_rows_are_current_and_keep_what_is_promised() -> None:
    quick = [row for row in found() if any(words in row["claim"] for words in QUICK)]
    assert len(quick) == len(QUICK)
    for row in quick:
        assert measured(row) == row[0], "run `make figures`"
        assert row["formula"] == row["parc"]
