"""The README's own commands, in its order, from a copy of the examples; and its links."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from parc.cli import main
from tests.runtime.forked import forked_ranks

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """Return every ``parc`` command of the shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("parc ")]


def test_every_command_of_the_readme_works_and_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks are processes of their own, forked from one that knows torch; commands run in this process."""
    measured = re.compile(r"error \S+|^seconds.*", re.MULTILINE)  # another on every machine
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    found = commands()
    assert {words[0] for words in found} >= {"build", "run", "show", "verify", "explain"}
    said: dict[str, str] = {}
    with forked_ranks():
        monkeypatch.chdir(tmp_path)
        for words in found:
            ended = main(words)
            printed = "".join(capfd.readouterr())
            assert ended == 0, f"parc {' '.join(words)}\n{printed}"
            said[" ".join(words)] = printed
    (picture,) = re.findall(r"```\n(1f1b.*?)```", README, re.DOTALL)
    assert picture in said["show build/gpt3d --pipeline"]
    report, lines = re.findall(r"```\n((?:mesh|t_3) .*?)```", README, re.DOTALL)
    assert measured.sub("", report) == measured.sub("", said["build examples/gpt.parc -o build/gpt"])
    number = re.compile(r"(?<=[a-z])_\d+\b")  # of a value's name: torch's releases count otherwise
    assert number.sub("", lines) in number.sub("", said["show build/gpt --action F"].replace("\n    ", "\n"))


def test_the_plan_in_the_readme_is_the_example() -> None:
    (shown,) = re.findall(r"```parc\n(.*?)```", README, re.DOTALL)

    def words(text: str) -> list[list[str]]:
        return [line.split("#")[0].split() for line in text.splitlines() if line.split("#")[0].strip()]

    assert words(shown) == words((ROOT / "examples/gpt.parc").read_text(encoding="utf-8"))


def test_what_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
