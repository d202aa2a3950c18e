"""The pages that a newcomer follows, done as they say: their files written, their commands and their Python run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks_of, walk
from tests.runtime.forked import forked_ranks

FOLLOWED = {
    "README.md": "the build has four ranks, and its loop wants torchrun: docs/loop.md has the same calls on one",
    "docs/start.md": "",
    "docs/loop.md": "",
}
"""Pages that are done in full, or all but their Python, for the reason that stands here."""


@pytest.mark.parametrize("page", FOLLOWED)
def test_a_page_works_as_it_says_and_prints_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are processes of their own, forked from one that knows torch; commands run in this process."""
    examples = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=examples)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with forked_ranks():
        wrong = list(walk(page, python=not FOLLOWED[page]))
    assert not wrong, "\n".join(wrong)


def test_the_readme_shows_the_commands_of_a_first_model() -> None:
    commands = {words[1] for block in blocks_of("README.md") for words in block.commands() if words[0] == "parc"}
    assert commands >= {"init", "build", "run", "export", "show", "verify", "check", "explain"}
