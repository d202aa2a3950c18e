"""Runs that lose something: their launcher, the reader of what they print, or the disk that they save to."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from parc.cli import main
from parc.grammar.scratch import line_held
from parc.runtime.launch import train
from parc.runtime.launch.failures import Failure, begin, leave_failure, stop_of, stop_said
from parc.runtime.launch.voices import VOICES, stop_signals
from parc.runtime.ranks.processes import STORE
from parc.runtime.session.session import Session
from parc.runtime.state import saving, shards
from parc.runtime.state.opening import open_build
from tests.cli.test_run import environment, steps_of
from tests.runtime.forked import Forked
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, ONE, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with builds of one model: over dp=2, and of one rank."""
    folder = tmp_path_factory.mktemp("lost")
    build(folder, DATA, name="dp")
    build(folder, ONE, name="one")
    return folder


def endless(made: Path, place: Path) -> list[str]:
    """Return the words of a run without an end, which saves and writes metrics in ``place``."""
    words = (made, "--steps", 10**6, "--save", place / "checkpoint", "--metrics", place / "metrics.jsonl")
    return ["-m", "parc", "run", *map(str, words)]


def trained(place: Path) -> None:
    """Wait until a run has done two steps."""
    until = time.monotonic() + 60
    metrics = place / "metrics.jsonl"
    while time.monotonic() < until and not (metrics.is_file() and len(steps_of(metrics)) >= 2):
        time.sleep(0.02)


def saved_step(place: Path) -> int:
    """Return the step of the checkpoint that a run has left, which is the last that it did."""
    last = int(json.loads((place / "checkpoint" / "state.json").read_text())["step"])
    assert steps_of(place / "metrics.jsonl")[-1]["step"] == last
    return last


@contextmanager
def two_ranks(made: Path, place: Path) -> Iterator[tuple[list[Forked], ExitStack, Path]]:
    """Enter a block with two ranks of a run whose launcher is this process, until the stack is closed. Yield the ranks,
    the stack, and the file in which they say something."""
    said, run = place / "said", place / "run"
    run.mkdir()
    with ExitStack() as launcher:
        launcher.enter_context(line_held(run))
        env = {**environment(), VOICES: str(run), STORE: str(run / "store"), "WORLD_SIZE": "2"}
        with open(said, "w") as file:
            told = [env | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
            yield (
                [Forked(["python", *endless(made, place)], each, stderr=file.fileno()) for each in told],
                launcher,
                said,
            )


def test_ranks_end_with_their_launcher_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    with two_ranks(folder / "dp", tmp_path) as (ranks, launcher, _):
        launcher.close()
        assert [rank.wait(10) for rank in ranks] == [129, 129]
    assert not (tmp_path / "checkpoint").exists() and not (tmp_path / "run").exists(), "nothing is left behind"


def test_ranks_that_train_save_when_their_launcher_ends(folder: Path, tmp_path: Path) -> None:
    with two_ranks(folder / "dp", tmp_path) as (ranks, launcher, said):
        trained(tmp_path)
        held = (tmp_path / ".checkpoint.lock").read_text()
        launcher.close()
        assert [rank.wait(10) for rank in ranks] == [129, 129]
    assert f"process {ranks[0].pid} on " in held, "the rank that writes holds the folder, not the launcher"
    assert (
        f"stopped by SIGHUP after step {saved_step(tmp_path)}; saved to {tmp_path / 'checkpoint'}" in said.read_text()
    )
    assert not (tmp_path / "run").exists() and not (tmp_path / ".checkpoint.lock").exists()


@pytest.mark.parametrize(("kind", "code"), [("pipe", 128 + signal.SIGPIPE), ("terminal", 128 + signal.SIGHUP)])
def test_a_run_that_nobody_reads_saves_and_ends(folder: Path, tmp_path: Path, kind: str, code: int) -> None:
    reads, writes = os.pipe() if kind == "pipe" else pty.openpty()
    process = Forked(["python", *endless(folder / "one", tmp_path)], environment(), stderr=writes)
    os.close(writes)
    os.close(reads)
    if kind == "terminal":
        trained(tmp_path)
        process.send_signal(signal.SIGHUP)
    assert process.wait(30) == code
    assert saved_step(tmp_path)


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let so many writes of a shard find the disk full."""
    left, write = [None] * times, shards.write_shard

    def fill(path: Path, pieces: Any) -> Any:
        if left:
            left.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, pieces)

    monkeypatch.setattr(saving, "write_shard", fill)
    monkeypatch.setattr(train, "_WAITS_S", (0.01, 0.02))


@pytest.mark.parametrize(
    ("times", "steps", "said"),
    [
        (2, 5, ["step 2 was not saved: ", "tried again after step 3", "step 3 was not saved: ", "again after step 5"]),
        (1, 1, ["step 1 was not saved: ", "tried again in 0.01 s"]),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_said_and_tried_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    times: int, steps: int, said: list[str],
) -> None:  # fmt: skip
    failing(monkeypatch, times)
    words = ["--steps", str(steps), "--save", str(tmp_path / "checkpoint"), "--save-every", "2"]
    assert main(["run", str(folder / "one"), *words]) == 0
    err = capsys.readouterr().err
    assert "no space left on device" in err and err.count("warning: step") == times, err
    assert all(text in err for text in said), err
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["step"] == steps
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def saves_beside_a_full_disk(made: str, folder: str) -> list[int]:
    """Train beside another rank, of which one finds the disk full at first. Return the steps that were saved."""
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", io.StringIO())
        session = Session(open_build(made))
        failing(patch, 2 * (session.rank == 1))
        patch.setattr(session.replicas, "saved", lambda _, step: steps.append(step))
        options = train.Options(4, save=Path(folder), save_every=1, first_check=False)
        assert train.train(session, options) == 0
    return steps


def test_a_disk_that_is_full_for_one_rank_is_tried_again_by_all(folder: Path, tmp_path: Path) -> None:
    assert run_ranks(saves_beside_a_full_disk, 2, str(folder / "dp"), str(tmp_path / "saved")) == [[3, 4]] * 2


def test_the_last_checkpoint_is_an_error_after_some_tries_and_the_old_one_stays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    words = ["run", str(folder / "one"), "--save", str(checkpoint), "--steps"]
    assert main([*words, "1"]) == 0
    failing(monkeypatch, 3)
    assert main([*words, "2"]) == 1
    err = capsys.readouterr().err
    assert f"warning: `{checkpoint}` has step 1, which the first checkpoint of this run replaces; `--resume" in err
    assert err.count("warning: step 2 was not saved") == 2
    assert f"error[P0304]: `state.safetensors` of `{checkpoint}` cannot be written" in err, err
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 1


def test_a_checkpoint_goes_to_no_other_disk_than_that_of_the_runs_start(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disks = [tmp_path] * 4  # at the run's start, and at the first save
    monkeypatch.setattr(saving, "disk_of", lambda _: disks.pop() if disks else tmp_path.parent)
    monkeypatch.setattr(train, "_WAITS_S", ())
    words = ["run", str(folder / "one"), "--steps", "2", "--save-every", "1", "--save", str(tmp_path / "checkpoint")]
    assert main(words) == 1
    assert f"the disk at `{tmp_path}` is no longer there\nhelp: mount it again" in capsys.readouterr().err
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["step"] == 1


def test_a_launcher_says_what_its_ranks_have_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VOICES, str(tmp_path / "gone"))
    begin()
    stop_said()  # a launcher that is gone hears nothing, and that is no error
    monkeypatch.setenv(VOICES, str(tmp_path))
    early = stop_of(signal.SIGTERM, tmp_path)
    assert early and early.expected and early.text() == "stopped by SIGTERM before the first step; nothing was saved"
    begin()
    late = stop_of(signal.SIGTERM, tmp_path)
    assert late and not late.expected and late.text() == "stopped by SIGTERM; its ranks did not end by themselves"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    leave_failure(Failure(1, 1.0, 1, "the disk is full", expected=True))
    failed = stop_of(signal.SIGTERM, tmp_path)
    assert failed and (failed.exit_code, failed.text()) == (143, "stopped by SIGTERM\nthe disk is full")
    stop_said()
    assert stop_of(signal.SIGTERM, tmp_path) is None


def test_nohup_keeps_a_run_from_sighup_alone() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert stop_signals() == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == (signal.SIGTERM, signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)
