"""Reports of a run while it trains: a JSON line for each step in a file, and progress on the terminal."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..faults import writing


@final
class MetricsFile:
    """A file of JSON lines: first ``{"run": …}``, then one object a step; a line is written whole, and at once.

    An existing file is replaced, or continued with ``append=True`` (a resumed run writes another ``run`` line).
    A number that JSON cannot say (NaN, infinity) becomes ``null``.

    Raises:
        RunError: the file cannot be written, now or later.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], append: bool = False) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(path, "ab" if append else "wb", buffering=0)  # noqa: SIM115 closed by close()
        self._write({"run": dict(run)})

    def step(self, step: int, loss: float, **figures: Any) -> None:
        """Write one step's line: its number from 1, the global mean loss, and figures such as ``tokens`` and
        ``step_s``."""
        self._write({"step": step, "loss": loss, **figures})

    def _write(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(_sayable(line), allow_nan=False) + "\n").encode()
        start = self._file.tell() if self._file.seekable() else None
        with writing(self._path):
            try:
                while data:  # a disk that is almost full takes a part
                    data = data[self._file.write(data) :]
            except OSError:
                if start is not None:
                    self._file.truncate(start)  # half of a line is none
                raise

    def close(self) -> None:
        """Close the file; more than once does no harm."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class ProgressDisplay:
    """A display of the loss, the tokens or samples (``what``) a second and the seconds a step on stderr: a bar on a
    terminal, else some lines.

    Without a terminal the first and the last step have a line, and those between at least ``every_s`` seconds after
    the line before.
    """

    def __init__(self, steps: int, what: str = "tokens", every_s: float = 5.0, console: Console | None = None) -> None:
        self._steps = steps
        self._what = what
        self._every_s = every_s
        self._console = console or Console(stderr=True, file=sys.stderr)
        self._shown_at = -math.inf
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, figures="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Show a line of words."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def step(self, step: int, loss: float, count: int, step_s: float, note: str = "") -> None:
        """Show one finished step: its number from 1, its loss, its number of tokens or samples, its seconds, and a line
        about it that is always shown."""
        if note:
            self.say(note)
        figures = f"loss {loss:.4f}  {count / max(step_s, 1e-9):,.0f} {self._what}/s  {step_s:.3f} s/step"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
            return
        now = time.monotonic()
        if step in (1, self._steps) or now - self._shown_at >= self._every_s:
            self._shown_at = now
            self.say(f"step {step}/{self._steps}  {figures}")


def _sayable(value: Any) -> Any:
    """Return the value with None in place of every number that JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _sayable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(item) for item in value]
    return value
