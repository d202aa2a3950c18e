"""The metrics file and the progress display, on a terminal and without one."""

import io
import json
import resource
from pathlib import Path

import pytest
from rich.console import Console

from parc.runtime.faults import RunError
from parc.runtime.launch.metrics import MetricsFile, ProgressDisplay


def lines(path: Path) -> list[dict[str, object]]:
    """Return the file's lines, each parsed by itself."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_line_then_a_line_a_step_each_flushed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsFile(path, {"mesh": {"dp": 2}, "torch": "2.13"}) as metrics:
        assert lines(path) == [{"run": {"mesh": {"dp": 2}, "torch": "2.13"}}]
        metrics.step(1, 5.5, tokens=8192, step_s=0.5, peak_bytes=[1, 2])
        assert lines(path)[1] == {"step": 1, "loss": 5.5, "tokens": 8192, "step_s": 0.5, "peak_bytes": [1, 2]}
        metrics.step(2, float("nan"), grad_norm=float("inf"))
    assert lines(path)[2] == {"step": 2, "loss": None, "grad_norm": None}


def test_a_disk_without_room_for_a_line_keeps_none_of_it(tmp_path: Path) -> None:
    path, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFile(path, {}) as metrics:
        metrics.step(1, 1.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
        try:
            with pytest.raises(RunError, match="cannot be written: file too large"):
                metrics.step(2, 2.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [list(line) for line in lines(path)] == [["run"], ["step", "loss"]]


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for append in (False, True):
        with MetricsFile(path, {}, append=append) as metrics:
            metrics.step(1, 1.0)
    assert [list(line) for line in lines(path)] == [["run"], ["step", "loss"]] * 2
    MetricsFile(path, {}).close()
    assert lines(path) == [{"run": {}}]


def shown(console: Console, every_s: float) -> str:
    """Return the text that ten steps leave on a console."""
    with ProgressDisplay(10, "tokens", every_s, console) as progress:
        for step in range(1, 11):
            progress.step(step, 5.0 - step / 10, 1000, step_s=0.25)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    few = shown(Console(file=io.StringIO(), force_terminal=False, width=40), every_s=1000)
    assert few.splitlines() == [
        "step 1/10  loss 4.9000  4,000 tokens/s  0.250 s/step",
        "step 10/10  loss 4.0000  4,000 tokens/s  0.250 s/step",
    ]
    assert len(shown(Console(file=io.StringIO(), force_terminal=False), every_s=0).splitlines()) == 10


def test_on_a_terminal_there_is_a_bar() -> None:
    bar = shown(Console(file=io.StringIO(), force_terminal=True, width=120), every_s=0)
    assert "10/10" in bar and "loss 4.0000" in bar and "4,000 tokens/s" in bar
