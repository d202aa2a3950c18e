"""The progress of a run on the terminal: a bar, or a line now and then."""

from __future__ import annotations

import math
import sys
import time
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


@final
class ProgressDisplay:
    """A display of the loss, the tokens or samples (``what``) a second and the seconds a step on stderr: a bar on a
    terminal, else some lines.

    Without a terminal the first and the last step have a line, and those between at least ``every_s`` seconds after
    the line before. On any ``node`` but the first, lines begin with its number.
    """

    def __init__(
        self, steps: int, what: str = "tokens", every_s: float = 5.0, console: Console | None = None, node: int = 0
    ) -> None:
        self._steps = steps
        self._what = what
        self._every_s = every_s
        self._node = f"node {node}: " if node else ""
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
        """Show a line of words as it is: brackets and colons in it mean nothing."""
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def step(self, step: int, loss: float, count: int, step_s: float, mfu: float | None = None) -> None:
        """Show one finished step: its number from 1, its loss, its number of tokens or samples, its seconds, and its
        use of the devices, if that is known."""
        figures = f"loss {loss:.4f}  {count / max(step_s, 1e-9):,.0f} {self._what}/s  {step_s:.3f} s/step"
        figures += f"  MFU {mfu:.1%}" if mfu is not None else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
            return
        now = time.monotonic()
        if step in (1, self._steps) or now - self._shown_at >= self._every_s:
            self._shown_at = now
            self.say(f"{self._node}step {step}/{self._steps}  {figures}")
