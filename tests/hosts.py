"""Runs of two hosts, over and over: ``python -m tests.hosts`` trains on two hosts of a network of its own by the
commands of docs/nodes.md, stops them by a signal, goes on from the checkpoint, and compares the losses with those of
one launcher. Then a rank, a launcher and a host fail, which all others are to name, and a stranger sends messages to
every port of a run. It ends with 1 if a run hangs, a loss differs, or anything that was sent is executed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from parc.runtime.launch.endpoint import is_of_this_host_alone
from tests.network import HOSTS, Network, NoNetwork, network
from tests.runtime.forked import Forked
from tests.runtime.tiny import DATA, build

ROOT = Path(__file__).resolve().parent.parent
SECRET = "known to the hosts of this run alone"
ALIKE = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables of all runs: ranks that share a host have fewer threads, and so add in another order; and torch warns where
no names of addresses are known."""
_HANG_S = 240
"""The seconds after which a run hangs, on a computer that does much else."""
_TIMEOUT_S = 60
_ENDING_S = 20
"""The seconds beyond a timeout that launchers have to say what happened, and to end their ranks."""


def documented() -> tuple[list[str], list[str]]:
    """Return the command that docs/nodes.md gives for each host, and the options with which its next run goes on."""
    text = (ROOT / "docs" / "nodes.md").read_text()
    (command,) = re.findall(r"^parc (run build/big --nnodes 4 .* --save .*)$", text, re.MULTILINE)
    (resume,) = re.findall(r"resume=\((--resume checkpoint)\)", text)
    return shlex.split(command.replace("--nnodes 4", "--nnodes 2").replace("--save-every 500", "--save-every 50")), [
        *shlex.split(resume)
    ]


@dataclass
class Run:
    """The launchers of one run, and what each printed."""

    processes: dict[str, subprocess.Popen[bytes] | Forked]
    said: dict[str, Path]

    def ended(self, seconds: float = _HANG_S, hosts: Iterable[str] = tuple(HOSTS)) -> dict[str, int | Literal["hung"]]:
        """Return the exit codes of the launchers of some hosts; one that hangs is killed."""
        until, codes = time.monotonic() + seconds, dict[str, int | Literal["hung"]]()
        for host in hosts:
            process = self.processes[host]
            try:
                codes[host] = process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                codes[host] = "hung"
        return codes

    def text(self, host: str) -> str:
        """Return what a launcher printed."""
        return self.said[host].read_text(errors="replace")


@final
class Lab:
    """A folder with a build, in which runs of two hosts are started: by new Pythons, or ``forked``."""

    def __init__(self, folder: Path, hosts: Network, *, forked: bool = False) -> None:
        self.folder, self.hosts, self._forked, self._runs = folder, hosts, forked, 0
        build(folder / "build", DATA, name="big")
        self._reference: list[float] = []

    def start(self, *options: object, each: dict[str, Sequence[object]] | None = None, **env: str) -> Run:
        """Start the documented command on both hosts; ``each`` has further options of a host."""
        self._runs += 1
        words, _ = documented()
        plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        run = Run({}, {})
        with contextlib.chdir(self.folder):
            for host in HOSTS:
                more = [*options, *((each or {}).get(host, ()))]
                command = [sys.executable, "-m", "parc", *words, "--device", "cpu", *map(str, more)]
                run.said[host] = self.folder / f"run{self._runs}.{host}"
                variables = {**plain, "PYTHONPATH": str(ROOT), **ALIKE, "PARC_RUN_SECRET": SECRET, **env}
                if self._forked:
                    with open(run.said[host], "wb") as file:
                        number, namespaces = file.fileno(), self.hosts.namespaces(host)
                        run.processes[host] = Forked(command, variables, number, number, namespaces, forks=True)
                else:
                    run.processes[host] = self.hosts.start(host, command, run.said[host], variables)
        return run

    def losses(self, metrics: Path) -> dict[int, float]:
        """Return the losses of a run by its steps."""
        try:
            rows = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        except FileNotFoundError:
            return {}
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def reference(self, steps: int) -> list[float]:
        """Return the losses of so many steps by one launcher with both ranks."""
        if len(self._reference) < steps:
            metrics = self.folder / "reference.jsonl"
            command = [sys.executable, "-m", "parc", "run", "build/big", "--device", "cpu", "--metrics", str(metrics)]
            command += ["--steps", str(steps + 20), "--no-first-check"]
            env = {**os.environ, "PYTHONPATH": str(ROOT), **ALIKE}
            if self._forked:
                with open(self.folder / "reference.txt", "wb") as file, contextlib.chdir(self.folder):
                    assert Forked(command, env, file.fileno(), file.fileno(), forks=True).wait(_HANG_S) == 0
            else:
                subprocess.run(command, check=True, cwd=self.folder, env=env, capture_output=True)
            self._reference = [loss for _, loss in sorted(self.losses(metrics).items())]
        return self._reference[:steps]


def wait_for(run: Run, ready: Any, seconds: float = _HANG_S) -> bool:
    """Wait until something is ready, while all launchers run."""
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until or any(process.poll() is not None for process in run.processes.values()):
            return False
        time.sleep(0.05)
    return True


def cycle(lab: Lab, number: int, steps: int, stopped: Sequence[str]) -> list[str]:
    """Train on two hosts, stop the launchers of some by SIGTERM after a few steps, and go on. Return what was wrong."""
    metrics = lab.folder / f"{number}.jsonl"
    run = lab.start("--steps", 10**6, "--metrics", metrics, "--timeout", _TIMEOUT_S, "--no-first-check")
    if not wait_for(run, lambda: len(lab.losses(metrics)) >= steps):
        return [f"{host} of the first run: {code}, {run.text(host)[-800:]}" for host, code in run.ended(1).items()]
    for host in stopped:
        run.processes[host].send_signal(signal.SIGTERM)
    if (codes := run.ended()) != dict.fromkeys(HOSTS, 143):
        return [f"{host} ended with {code} when stopped: {run.text(host)[-800:]}" for host, code in codes.items()]
    return go_on(lab, metrics, steps)


def go_on(lab: Lab, metrics: Path, steps: int) -> list[str]:
    """Go on from the checkpoint of a run that was stopped, for some steps. Return what was wrong: the losses of both
    runs are those of one launcher."""
    done = max(lab.losses(metrics))
    more = metrics.with_suffix(".more.jsonl")
    options = "--steps", done + steps, "--metrics", more, "--timeout", _TIMEOUT_S, "--no-first-check"
    again = lab.start(*documented()[1], *options)
    if (codes := again.ended()) != dict.fromkeys(HOSTS, 0):
        return [f"{host} ended with {code} when resumed: {again.text(host)[-800:]}" for host, code in codes.items()]
    losses = {**lab.losses(metrics), **lab.losses(more)}
    expected = lab.reference(done + steps)
    wrong = [step for step, loss in enumerate(expected, 1) if losses.get(step) != loss]
    return [f"step {step} has {losses.get(step)}, and {expected[step - 1]} by one launcher" for step in wrong[:1]]


# ---- faults of one host, which all launchers are to name


FAULTS = {
    "a rank of host1 is stopped": (signal.SIGSTOP, "rank", "rank 1 does not answer: process"),
    "a rank of host1 is killed": (signal.SIGKILL, "rank", "rank 1 failed: it was killed by SIGKILL"),
    "the launcher of host1 is killed": (signal.SIGKILL, "launcher", "the launcher of rank 1 on `host1` is gone"),
    "host1 is stopped": (signal.SIGSTOP, "launcher and rank", "the launcher of rank 1 on `host1` has not answered"),
}
"""The signal of each fault, the processes of host1 that get it, and what all launchers say that are left."""


def fault(lab: Lab, number: int, name: str, timeout_s: int) -> list[str]:
    """Let a fault happen in a run of two hosts. Return what was wrong: each launcher that is left ends within the
    timeout and some seconds, and names what happened."""
    sent, who, words = FAULTS[name]
    metrics = lab.folder / f"fault{number}.jsonl"
    run = lab.start("--steps", 10**6, "--metrics", metrics, "--timeout", timeout_s, "--no-first-check")
    if not wait_for(run, lambda: len(lab.losses(metrics)) >= 2):
        return [f"{host} of the run: {code}, {run.text(host)[-800:]}" for host, code in run.ended(1).items()]
    launcher = run.processes["host1"].pid
    ranks = subprocess.run(["ps", "--ppid", str(launcher), "-o", "pid="], capture_output=True, text=True, check=True)
    (rank,) = map(int, ranks.stdout.split())
    begun = time.monotonic()
    for process, kind in ((rank, "rank"), (launcher, "launcher")):
        if kind in who:
            os.kill(process, sent)
    left = ["host0"] if "launcher" in who else [*HOSTS]
    codes = run.ended(timeout_s + _ENDING_S, left)
    for process in (launcher, rank):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    run.ended(_ENDING_S)
    seconds = time.monotonic() - begun
    return [
        f"{host} ended with {codes[host]} after {seconds:.0f} s, and does not say `{words}`: {run.text(host)[-800:]}"
        for host in left if codes[host] != 4 or words not in run.text(host)
    ]  # fmt: skip


# ---- a stranger at the cable


@dataclass
class Attack:
    """The outcome of a stranger's messages to a run whose figures are in ``metrics``: how many each port took, how the
    run ended, and what was wrong."""

    metrics: Path
    heard: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    codes: dict[str, int | Literal["hung"]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def attack(lab: Lab, number: int, count: int) -> Attack:
    """Let a stranger at host1 send so many messages to each port of a run that trains, then stop the run."""
    folder = lab.folder / f"stranger{number}"
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    outcome = Attack(metrics)
    command = [sys.executable, "-m", "tests.stranger", str(folder), str(count), str(number)]
    stranger = lab.hosts.start("host1", command, folder / "said", {**os.environ, "PYTHONPATH": str(ROOT)})
    run = lab.start("--steps", 10**6, "--metrics", metrics, "--timeout", _TIMEOUT_S, "--no-first-check")
    begun = wait_for(run, lambda: len(lab.losses(metrics)) >= 2)
    places = {place for host in HOSTS for place in lab.hosts.listening(host) if not is_of_this_host_alone(place[0])}
    outcome.wrong += [f"{place} is open at all addresses" for place in places if place[0] not in HOSTS.values()]
    ports = [place for place in places if place[0] in HOSTS.values()]
    (folder / "ports.json.part").write_text(json.dumps(sorted(ports)))
    (folder / "ports.json.part").rename(folder / "ports.json")
    if stranger.wait(_HANG_S) or not begun:
        outcome.wrong.append(f"it did not begin: {(folder / 'said').read_text()[-800:]} {run.text('host0')[-800:]}")
    else:
        told = json.loads((folder / "said").read_text())
        outcome.heard, outcome.sent = told["heard"], told["sent"]
    run.processes["host0"].send_signal(signal.SIGTERM)
    outcome.codes = run.ended()
    for host, code in outcome.codes.items():
        text = run.text(host)
        if code not in (4, 143) or "Traceback" in text or not text.strip():
            outcome.wrong.append(f"{host} ended with {code}: {text[-1500:]}")
    if (folder / "canary").exists():
        outcome.wrong.append("what a stranger sent was executed")
    losses = lab.losses(metrics)
    expected = lab.reference(len(losses) + 2)
    outcome.wrong += [f"the loss of step {step} is another" for step in losses if losses[step] != expected[step - 1]][
        :1
    ]
    return outcome


def main(words: Sequence[str] | None = None) -> int:
    """Run cycles and attacks, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", metavar="N", type=int, default=20)
    parser.add_argument("--no-faults", dest="faults", action="store_false")
    parser.add_argument("--messages", metavar="N", type=int, default=10_000, help="to each port of a run")
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    args = parser.parse_args(words)
    draw, faults = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory(prefix="parc-hosts-") as name:
        try:
            with network(Path(name)) as hosts:
                lab = Lab(Path(name), hosts)
                for number in range(args.cycles):
                    stopped = draw.choice((["host0"], ["host1"], ["host0", "host1"]))
                    begun, steps = time.monotonic(), draw.randrange(1, 12)
                    wrong = cycle(lab, number, steps, stopped)
                    faults += len(wrong)
                    said = "; ".join(wrong) or f"losses are those of one launcher, {time.monotonic() - begun:.0f} s"
                    print(f"run {number + 1} of {args.cycles}, {' and '.join(stopped)} stopped: {said}", flush=True)
                for number, name in enumerate(FAULTS if args.faults else ()):
                    begun, wrong = time.monotonic(), fault(lab, number, name, 12)
                    faults += len(wrong)
                    print(f"{name}: {'; '.join(wrong) or 'all launchers name it'}, {time.monotonic() - begun:.0f} s")
                if args.messages:
                    outcome = attack(lab, 0, args.messages)
                    faults += len(outcome.wrong)
                    print(f"a stranger who heard {outcome.heard} messages sent {outcome.sent}")
                    print(f"the run ended with {outcome.codes}; {'; '.join(outcome.wrong) or 'nothing was executed'}")
        except NoNetwork as reason:
            print(f"no two hosts can be made here: {reason}")
            return 2
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
