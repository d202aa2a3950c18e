"""One voice: what the ranks of a run print appears once, and what one alone prints has its number."""

from __future__ import annotations

import io
import time
from contextlib import suppress
from pathlib import Path

import pytest

from parc.cli import main
from parc.runtime.launch import voices
from parc.runtime.launch.voices import Voices, _Heard
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
        bar = _Heard(stream, copy)
        for text in ("10 %", "\r\x1b[2K20 %", "\r\x1b[2K\x1b[1mslow\x1b[0m\n30 %"):
            bar.write(text)
    assert stream.getvalue().endswith("slow\x1b[0m\n30 %") and "%" not in said.read_text()
    assert sorted(capsys.readouterr().err.splitlines()) == ["[rank 6] no end", "[ranks 5, 6] only 5 and 6"]


def spoken(folder: Path, *turns: dict[str, str], logs: Path | None = None, pause_s: float = 0.3) -> None:
    """Let ranks print one turn after the other, each by the name of its file."""
    with Voices(folder, logs):
        for turn in turns:
            for name, text in turn.items():
                with open(folder / name, "a") as file:
                    file.write(text)
            time.sleep(pause_s)


def test_a_line_that_a_rank_prints_once_more_than_the_first_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = {"rank7.log": "tries again\n"}
    spoken(tmp_path, {"said": "tries again\n", **again}, again, again)
    assert capsys.readouterr().err == "[rank 7] tries again\n" * 2


def test_what_the_first_rank_said_long_ago_hides_no_line_and_is_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voices, "_RECENT_S", 0.1)
    spoken(tmp_path, {"said": "slow\n"}, {"rank7.log": "slow\n"}, pause_s=0.6)
    assert capsys.readouterr().err == "[rank 7] slow\n"
    monkeypatch.setattr(voices, "_MOST_LINES", 2)
    heard = Voices(tmp_path)
    for number in range(9):
        heard._count("", f"line {number}")
    heard._forget(time.monotonic() - 60)
    assert [*heard._spoken] == ["line 7", "line 8"]


def test_lines_that_no_longer_go_to_their_files_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    (logs / "rank2.log").mkdir(parents=True)  # no file can be there
    spoken(tmp_path, {"rank1.log": "kept\n", "rank2.log": "lost?\nnext\n"}, {"rank1.log": "shown\n"}, logs=logs)
    told, *lines = capsys.readouterr().err.splitlines()
    assert told == f"`{logs}` cannot be written: is a directory; from here on lines of ranks are shown instead"
    assert lines == ["[rank 2] lost?", "[rank 2] next", "[rank 1] shown"]
    assert (logs / "rank1.log").read_text() == "kept\n"


def test_a_copy_on_a_full_disk_takes_no_line_from_the_first_rank() -> None:
    stream = io.StringIO()
    with suppress(OSError), open("/dev/full", "w") as full:  # to close it is an error, too
        heard = _Heard(stream, full)
        heard.write("step 1\nstep 2\n")
        heard.write("step 3\n")
    assert stream.getvalue() == "step 1\nstep 2\nstep 3\n"


def test_under_torchrun_the_first_rank_of_a_host_to_end_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torchrun stops rank 0 as soon as another has failed, maybe before it can say anything."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for local, says in ((2, True), (0, False), (1, False)):
        (tmp_path / str(local)).mkdir()
        monkeypatch.setenv("LOCAL_RANK", str(local))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(local) / "error.json"))
        assert voices.says_the_end() == says
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert not voices.says_the_end(), "started by hand, the first rank is the one"
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert voices.says_the_end()
