"""Runs that a signal stops: they save, say so, and end with the signal's exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from parc.cli import main
from parc.runtime.state import checkpoint
from tests.cli.test_run import environment, run, steps_of
from tests.runtime.forked import Forked
from tests.runtime.tiny import DATA, ONE, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with builds of one model: over dp=2, and of one rank."""
    folder = tmp_path_factory.mktemp("stopped")
    build(folder, DATA, name="dp")
    build(folder, ONE, name="one")
    return folder


def start(*words: object, launcher: tuple[str, ...] = ("-m", "parc", "run")) -> subprocess.Popen[str]:
    """Start a command."""
    command = [sys.executable, *launcher, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and stderr of a started command; stdout is empty."""
    out, err = process.communicate(timeout=120)
    assert out == ""
    return process.returncode, err


class Stopping(NamedTuple):
    """A run without an end that a signal is to stop."""

    words: tuple[object, ...]
    metrics: Path
    checkpoint: Path

    def begun(self) -> None:
        """Wait until it has trained two steps."""
        until = time.monotonic() + 60
        while time.monotonic() < until and not (self.metrics.is_file() and len(steps_of(self.metrics)) >= 2):
            time.sleep(0.02)

    def stopped(self, err: str, number: signal.Signals) -> None:
        """Check what it said and left."""
        last = json.loads((self.checkpoint / "state.json").read_text())["step"]
        assert f"stopped by {number.name} after step {last}; saved to {self.checkpoint}" in err
        assert "Traceback" not in err
        assert steps_of(self.metrics)[-1]["step"] == last


@pytest.fixture
def stopping(tmp_path: Path) -> Stopping:
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint"
    return Stopping(("--steps", 10**6, "--metrics", metrics, "--save", checkpoint), metrics, checkpoint)


def test_a_signal_saves_between_two_steps(
    folder: Path, tmp_path: Path, stopping: Stopping, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(checkpoint, "HELD_S", 0.0)
    command = [sys.executable, "-m", "parc", "run", str(folder / "one"), *map(str, stopping.words)]
    with open(tmp_path / "said", "w+") as said:
        process = Forked(command, environment(), stderr=said.fileno())
        stopping.begun()
        code_of_another = main(["run", str(folder / "one"), "--steps", "1", "--save", str(stopping.checkpoint)])
        held = f"error[P0411]: another run saves to `{stopping.checkpoint}`: process {process.pid} on "
        assert code_of_another == 1 and held in capsys.readouterr().err
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        said.seek(0)
        stopping.stopped(said.read(), signal.SIGINT)


def test_ranks_save_between_two_steps_when_their_launcher_gets_a_signal(
    folder: Path, stopping: Stopping, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher is this process. It gets the signal several times, as from a scheduler that tells every process."""

    def stop() -> None:
        stopping.begun()
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.003)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    thread = threading.Thread(target=stop)
    thread.start()
    code, err = run(capfd, folder / "dp", *stopping.words)
    thread.join()
    signal.signal(signal.SIGTERM, before)
    assert code == 143, err
    stopping.stopped(err, signal.SIGTERM)


def test_a_signal_before_the_first_step_says_that_nothing_is_saved(folder: Path, tmp_path: Path) -> None:
    said = "stopped by SIGTERM before the first step; nothing was saved\n"
    process = start(folder / "dp", "--save", tmp_path / "checkpoint")
    until = time.monotonic() + 60
    while time.monotonic() < until and not _notes_sigterm(process.pid):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, said)
    code = (
        "import pathlib, sys, time; from parc.runtime.launch.launch import *\n"
        "command = ['-c', f'import os, pathlib, time; pathlib.Path({sys.argv[1]!r}, os.environ[\"RANK\"]).touch(); '\n"
        "           'time.sleep(100)']\n"
        "print(launch(command, Processes(2)).failure.text(), file=sys.stderr)"
    )
    process = start(tmp_path, launcher=("-c", code))
    while time.monotonic() < until and len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[1] == said


def _notes_sigterm(process: int) -> bool:
    """Return whether a process has a handler of SIGTERM, as Linux alone tells."""
    (line,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    return bool(int(line, 16) >> signal.SIGTERM - 1 & 1)
