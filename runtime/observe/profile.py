"""A profile of a few steps by torch's profiler, with the lines of programs as ranges: a file for each rank."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import torch
from torch.profiler import ProfilerActivity, profile

from ...compiler.torch_private import quiet
from ..ranks.faults import writing

_WARM_UP_STEPS, _PROFILED_STEPS = 2, 3


@final
class Profile:
    """A profile of three steps after two warm-up steps, or of fewer if the run is shorter.

    Raises:
        RunError: the folder cannot be written, now or after the last of the steps.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device, done: int, steps: int) -> None:
        self._folder, self._rank = folder, rank
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise OSError(errno.EACCES, "the folder takes no files")
        self._first = min(done + _WARM_UP_STEPS + 1, steps)
        self._last = min(self._first + _PROFILED_STEPS - 1, steps)
        self._profile: profile | None = None
        self._activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Enter a block that does step ``number``; it is profiled if it is one of the profile's."""
        if number == self._first:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines of the profiler's own on the terminal
            with quiet():
                self._profile = profile(activities=self._activities)
                self._profile.start()
        yield

    def written(self, number: int) -> str:
        """Write the file once step ``number``, the last of them, is done. Return a sentence on its place, "" before."""
        if self._profile is None or number < self._last:
            return ""
        ended, self._profile = self._profile, None
        with quiet():
            ended.stop()
            with writing(self._folder):
                ended.export_chrome_trace(str(self._folder / f"rank{self._rank}.json.gz"))
        steps = f"steps {self._first} to {self._last}" if self._first < self._last else f"step {self._last}"
        return (
            f"a profile of {steps} is in {self._folder}, a file for each rank: open rank0.json.gz at ui.perfetto.dev;"
            " a range is a line of a program, with its module, its line in the model, and that of the plan"
        )
