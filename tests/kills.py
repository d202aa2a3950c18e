"""Kills of launchers and ranks at random times: ``python -m tests.kills --kills 200``.

A run of two ranks, each with a data worker, trains without an end; its launcher or a rank gets SIGKILL before, in or
after the first step, sometimes while a process below it is stopped. Then another run saves to the same folder,
sometimes at once. It is counted which processes are left 10 seconds later, and whether the folder holds another
checkpoint than that of the later run.

Launchers and ranks are forked from a process that has imported torch; with ``--started`` they are new Pythons.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from parc.cli import main as parc_main
from tests.runtime.ranks import hide_gpus
from tests.runtime.tiny import DATA, FLAT, build

SAMPLES = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        tokens = torch.full((8,), number)
        return {"tokens": tokens, "targets": tokens}
"""
_LEFT_S = 10.0
"""The seconds after which no process of a killed run may be left."""
_MOST_SHOWN = 8_000
"""The most characters of a run's output that are shown."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans become children of this process, so that it finds them


@final
class ForkedRank:
    """A forked process ``python -m parc …``, with the part of ``subprocess.Popen`` that torch's agent asks for."""

    def __init__(self, command: tuple[str, ...], env: dict[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            be_parc(command[command.index("parc") + 1 :], env)

    def poll(self) -> int | None:
        """Return the exit code, less than zero for a signal, None while it runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("parc", timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def be_parc(words: tuple[str, ...] | list[str], env: dict[str, str]) -> NoReturn:
    """Be a process ``parc``, with a session and an environment of its own and no open file but the first three."""
    try:
        os.setsid()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        faulthandler.register(signal.SIGUSR2, os.dup(2))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        hide_gpus()
        SubprocessHandler._popen = lambda handler, command, env: ForkedRank(command, env)  # type: ignore
        sys.argv = ["parc", *words]
        runpy.run_module("parc", run_name="__main__", alter_sys=True)
    finally:
        os._exit(1)


def start(words: list[str], log: Path, started: bool) -> int:
    """Start a launcher, whose output goes to a file. Return its process."""
    sys.stdout.flush()
    with open(log, "w") as file:
        if started:
            command = [sys.executable, "-m", "parc", *words]
            return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True).pid
        process = os.fork()
        if not process:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            be_parc(words, dict(os.environ))
        return process


def descendants(process: int) -> list[int]:
    """Return the processes below a process that have not ended."""
    below = []
    for place in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            below += [int(number) for number in place.read_text().split()]
    return [other for child in below for other in ([child] if lives(child) else []) + descendants(child)]


def lives(process: int) -> bool:
    """Return whether a process has not ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def reap() -> None:
    """Take the exit codes of all children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def ended(seconds: float) -> bool:
    """Wait until no process is left below this one. Return whether that came within so many seconds."""
    until = time.monotonic() + seconds
    while left := descendants(os.getpid()):
        reap()
        if time.monotonic() > until:
            for process in left:
                show_left(process)
            time.sleep(1)
            return False
        time.sleep(0.05)
    reap()
    return True


def show_left(process: int) -> None:
    """Print what a process waits for: in the kernel, in C by a debugger if there is one, and in Python, to its log."""
    for name in ("status", "wchan", "syscall", "stack"):
        with suppress(OSError):
            print(f"left: {process} {name}:", Path(f"/proc/{process}/{name}").read_text(), sep="\n")
    tools = {"py-spy": ["dump", "--native", "--pid"], "gdb": ["-batch", "-ex", "thread apply all bt 40", "-p"]}
    for tool, words in tools.items():
        if shutil.which(tool):
            shown = subprocess.run([tool, *words, str(process)], capture_output=True, text=True, timeout=60)
            print(shown.stdout)
    with suppress(OSError):
        os.kill(process, signal.SIGUSR2)


def one_kill(draw: random.Random, folder: Path, first_step_s: float, started: bool) -> tuple[str, str, str]:
    """Kill a process of a run, and let another run save. Return the kind of the victim, the time, and what is wrong."""
    place = Path(tempfile.mkdtemp(dir=folder))
    checkpoint, metrics = place / "checkpoint", place / "metrics.jsonl"
    words = ["run", str(folder / "dp"), "--no-first-check", "--timeout", "60"]
    begun = time.monotonic()
    endless = ["--steps", "1000000", "--metrics", str(metrics), "--save", str(checkpoint)]
    launcher = start([*words, *endless, *draw.choice(([], ["--save-every", "1"]))], place / "first", started)
    after = draw.random() * 2.2 * first_step_s
    time.sleep(max(0.0, begun + after - time.monotonic()))
    ranks = [process for process in descendants(launcher) if process in below_once(launcher)]
    victim, kind = (draw.choice(ranks), "rank") if ranks and draw.random() < 0.4 else (launcher, "launcher")
    steps = metrics.read_text().count('"step":') if metrics.is_file() else 0
    with suppress(ProcessLookupError):
        if draw.random() < 0.4 and steps and (below := descendants(victim)):  # a rank or a data worker
            os.kill(draw.choice(below), signal.SIGSTOP)
            kind += ", one below it stopped,"
        os.kill(victim, signal.SIGKILL)
    killed, wrong = time.monotonic(), []
    if draw.random() < 0.5 and not ended(_LEFT_S):
        wrong.append("orphans")
    later = start([*words[:1], str(folder / "later"), *words[2:], "--steps", "3", "--save", str(checkpoint)],
                  place / "later", started)  # fmt: skip
    while lives(later):
        time.sleep(0.02)
    if not ended(max(1.0, _LEFT_S - (time.monotonic() - killed))):
        wrong.append("orphans")
        for process in descendants(os.getpid()):
            os.kill(process, signal.SIGKILL)
        ended(_LEFT_S)
    facts: dict[str, Any] = {}
    with suppress(OSError):
        facts = json.loads((checkpoint / "state.json").read_text())
    if facts.get("step") != 3 or Path(facts["build"]).name != "later":
        wrong.append(f"the later run's checkpoint is not there: {facts}")
    if wrong:
        logs = [f"{name}: {(place / name).read_text()[-_MOST_SHOWN:]}" for name in ("first", "later")]
        print(*wrong, place, *logs, sep="\n")
    return kind, "before" if not steps else "in or after" if steps < 3 else "after", "; ".join(wrong)


def below_once(process: int) -> list[int]:
    """Return the children of a process."""
    return [
        int(number)
        for place in Path(f"/proc/{process}/task").glob("*/children")
        for number in place.read_text().split()
    ]


def main() -> int:
    """Kill, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--started", action="store_true", help="start each process as a new Python")
    args = parser.parse_args()
    draw, counts, wrong = random.Random(args.seed), Counter[str](), Counter[str]()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    torch.set_num_threads(1)  # a forked process has none of the threads of the pool
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "samples.py").write_text(SAMPLES)
        plan = FLAT.replace('bytes "*.py"', 'dataset "./samples.py:Rows" () shuffle workers 1')
        for made in ("dp", "later"):
            build(folder, DATA, plan, made)
        assert parc_main(["run", str(build(folder, "", FLAT, "one")), "--steps", "1"]) == 0  # all is imported now
        begun = time.monotonic()
        launcher = start(["run", str(folder / "dp"), "--no-first-check", "--steps", "2"], folder / "log", args.started)
        while lives(launcher):
            time.sleep(0.02)
        first_step_s = time.monotonic() - begun
        reap()
        for _ in range(args.kills):
            kind, when, fault = one_kill(draw, folder, first_step_s, args.started)
            counts[f"{kind} {when} the first step"] += 1
            wrong.update([fault] if fault else [])
    print(
        f"{args.kills} kills of {dict(sorted(counts.items()))}, seed {args.seed}: {wrong.total()} wrong {dict(wrong)}"
    )
    return min(1, wrong.total())


if __name__ == "__main__":
    sys.exit(main())
