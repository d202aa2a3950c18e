"""Processor seconds of the tests at two commits, in turn on one machine: of all processes, and of each file's tests.

``python benchmarks/test_time.py BEFORE AFTER [pytest's arguments]``; what a rank or a server of ranks takes is in the
sum alone. A machine that shares its cores with others may be faster in one run than in the other: so a small piece of
work is timed once a second meanwhile, and the sum is also shown in units of it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
_RECORD = "PARC_TEST_TIME"
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER: processes that outlive their parents are waited for here


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check a commit out into a folder of its own, for the time of a block."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def used() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Generator[None, Any, Any]:
    """Note the time of a test with its fixtures: this file is a plugin of the runs that it starts."""
    start = used()
    done = yield
    with open(os.environ[_RECORD], "a") as record:
        record.write(f"{item.location[0]}\t{used() - start}\n")
    return done


def note_pace(ended: Event, seconds: list[float]) -> None:
    """Time a small piece of work once a second, until the end."""
    while not ended.wait(1):
        seconds.append(min(timeit.repeat(lambda: [str(n) for n in range(10_000)], timer=time.thread_time, number=1)))


def run(commit: str, arguments: Sequence[str]) -> tuple[float, float, float, dict[str, float]]:
    """Run a commit's tests. Return the seconds of the clock, those of processors, those of a small piece of work in the
    mean, and those of processors by file."""
    ended, paces = Event(), list[float]()
    pace = Thread(target=note_pace, args=(ended, paces))
    with checkout(commit) as tree:
        record = tree.with_name("record")
        record.write_text("")
        path = os.pathsep.join([str(tree), str(Path(__file__).parent)])
        environment = {**os.environ, "PYTHONPATH": path, _RECORD: str(record)}
        pace.start()
        clock, start = time.monotonic(), used()
        try:
            words = [sys.executable, "-m", "pytest", "-q", "-p", "test_time", "-p", "no:cacheprovider", *arguments]
            failed = subprocess.run(words, cwd=tree, env=environment, check=False).returncode
            while True:
                try:
                    os.wait()
                except ChildProcessError:
                    break
        finally:
            ended.set()
            pace.join()
        clock, seconds = time.monotonic() - clock, used() - start
        lines = record.read_text().splitlines()
    if failed:
        sys.exit(f"the tests of {commit} failed")
    files: dict[str, float] = defaultdict(float)
    for file, taken in (line.split("\t") for line in lines):
        files[file] += float(taken)
    return clock, seconds, fmean(paces), files


def main(before: str, after: str, *arguments: str) -> None:
    """Print the times of both commits, and the files that take more than a second at either, by their time."""
    ctypes.CDLL(None).prctl(_ADOPT, 1)
    runs = [run(commit, arguments or ("-n", "2")) for commit in (before, after)]
    (clock, whole, pace, files), (clock_after, whole_after, pace_after, files_after) = runs
    print(f"{'processor seconds':<50}{before:>10}{after:>10}")
    for file in sorted({*files, *files_after}, key=lambda file: -files[file]):
        if max(files[file], files_after[file]) > 1:
            print(f"{file:<50}{files[file]:>10.1f}{files_after[file]:>10.1f}")
    print(f"{'all processes':<50}{whole:>10.0f}{whole_after:>10.0f}   {whole_after / whole:.2f} of before")
    print(f"{'a small piece of work, milliseconds':<50}{pace * 1e3:>10.3f}{pace_after * 1e3:>10.3f}")
    whole, whole_after = whole / pace, whole_after / pace_after
    print(f"{'all, in small pieces':<50}{whole:>10.0f}{whole_after:>10.0f}   {whole_after / whole:.2f} of before")
    print(f"{'clock':<50}{clock:>10.0f}{clock_after:>10.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
