"""One voice: what the ranks of a run print appears once, and what one alone prints has its number."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from parc.cli import main
from parc.runtime.launch.voices import Voices, _Copied
from tests.runtime.forked import forked_ranks
from tests.runtime.tiny import DATA, PLAN, build

LOUD = """
import os
import sys
import torch

begun = []


def loud(number):
    if not begun and "RANK" in os.environ:
        begun.append(number)
        print("the shelf opens")
        print(f"rank {os.environ['RANK']} reads", file=sys.stderr)
    return {"tokens": torch.full((8,), number % 256), "targets": torch.zeros(8, dtype=torch.int64)}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build over dp=2 whose data prints."""
    folder = tmp_path_factory.mktemp("loud")
    (folder / "loud.py").write_text(LOUD)
    return build(folder, DATA, PLAN.replace('bytes "*.py"', '"./loud.py:loud" ()'))


@pytest.mark.parametrize("logged", [False, True], ids=["prefixed", "in files"])
def test_a_print_of_all_ranks_appears_once_and_one_that_differs_is_not_lost(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], logged: bool
) -> None:
    capfd.readouterr()
    with forked_ranks():
        words = ["--logs", str(tmp_path / "logs")] if logged else []
        assert main(["run", str(made), "--steps", "1", *words]) == 0
    out, err = capfd.readouterr()
    assert out == "the shelf opens\n"
    assert err.count("rank 0 reads") == 1 and err.count("step 1/1") == 1
    assert ("[rank 1] rank 1 reads\n" in err) is not logged and "[rank 1] the shelf" not in err
    if logged:
        (file,) = (tmp_path / "logs").iterdir()
        assert file.name == "rank1.log"
        assert sorted(file.read_text().splitlines()) == ["rank 1 reads", "the shelf opens"]


def test_a_line_is_compared_as_it_is_left_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar writes over its own line; the first rank may print later than another."""
    stream, said = io.StringIO(), tmp_path / "said"
    with Voices(tmp_path), open(said, "a") as copy:
        for rank, text in (("5", "slow\nonly 5 and 6\n"), ("6", "only 5 and 6\nslow\nno end")):
            (tmp_path / f"rank{rank}.log").write_text(text)
        time.sleep(0.3)
        bar = _Copied(stream, copy)
        for text in ("10 %", "\r\x1b[2K20 %", "\r\x1b[2K\x1b[1mslow\x1b[0m\n30 %"):
            bar.write(text)
    assert stream.getvalue().endswith("slow\x1b[0m\n30 %") and "%" not in said.read_text()
    assert sorted(capsys.readouterr().err.splitlines()) == ["[rank 6] no end", "[ranks 5, 6] only 5 and 6"]
