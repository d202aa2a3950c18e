"""Examples: copied with their models, and the commands that are printed for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Captured, parc
from tests.runtime.forked import forked_ranks

LARGE = ("llama3-8b", "llama3-70b", "llama3-405b", "llama-470b", "llama-1t", "deepseek-v3")


def test_an_example_is_copied_with_its_model(capsys: Captured, tmp_path: Path) -> None:
    names = [line.split()[0] for line in parc(capsys, "example")[1].splitlines()[1:]]
    assert {"gpt", "llama"} <= set(names)
    for name in names:
        code, _, err = parc(capsys, "example", name, tmp_path / "new")
        following = f"build {tmp_path / 'new' / name}.parc -o {tmp_path / 'new' / name}\n"
        if name.endswith("-open"):
            following = f"plan {tmp_path / 'new' / name}.parc --ranks "
        assert code == 0 and f"\nnext:  parc {following}" in err
        assert ("trains it" in err) == (name in LARGE)
        assert parc(capsys, "check", "--static", tmp_path / "new" / f"{name}.parc")[0] == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} >= {"gpt.parc", "gpt.py", "llama.parc", "llama.py"}
    (tmp_path / "gpt.py").write_text("mine\n")
    code, out, err = parc(capsys, "example", "gpt.parc", tmp_path)
    assert (code, out) == (1, "") and "gpt.py is there and is not the example's" in err
    assert (tmp_path / "gpt.py").read_text() == "mine\n" and not (tmp_path / "gpt.parc").exists()
    code, _, err = parc(capsys, "example", "gtp")
    assert code == 1 and "did you mean `gpt`?" in err
    code, _, err = parc(capsys, "example", "gpt", tmp_path / "gpt.py")
    assert code == 1 and "file exists" in err


def test_the_commands_that_follow_an_example_work(capfd: Captured, tmp_path: Path) -> None:
    err = parc(capfd, "example", "seven", tmp_path)[2]
    commands = [line.partition("parc ")[2].partition("#")[0].split() for line in err.splitlines() if "  parc " in line]
    assert [command[0] for command in commands] == ["build", "run"]
    with forked_ranks():
        for command in commands:
            code, _, err = parc(capfd, *command)
            assert code == 0, err
    assert "step 5/5  loss " in err
    plan = tmp_path / "seven.parc"
    plan.write_text(plan.read_text().replace("data      synthetic\n", ""))
    code, _, err = parc(capfd, "run", plan, "--steps", 5)
    assert code == 1 and "the plan has no `data` line\nhelp: add `data synthetic` for random samples" in err
    assert "built" not in err


def test_a_package_that_an_example_needs_is_named(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parc.cli.example.find_spec", lambda name: None if name == "transformers" else name)
    assert "\nfirst: pip install transformers\nnext:  parc build " in parc(capsys, "example", "llama", tmp_path)[2]
