"""A fuzz of all that parc reads: plans, builds and checkpoints, changed at random, each read under limits of time and
memory. ``python -m tests.hostile_inputs --seconds 60 --seed 7`` prints what it did, and what parc did not bear.

An input is borne where the command ends with an exit code of its own and a message: no traceback, no fault of parc's
own. Every input follows from the seed and its number, whatever the machine does meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path

from safetensors.torch import save_file

from parc.cli import main
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.index import FACTS, INDEX_FILE, TENSORS, write_facts
from parc.runtime.state.opening import build_mesh, open_build, open_checkpoint
from parc.runtime.state.saving import stored_of
from tests.hostile_changes import mutate_bytes, mutate_json, mutate_text, rehash
from tests.runtime.shard_ranks import numbers, ranks_of, save_all
from tests.runtime.tiny import BOTH, DATA, EXAMPLES, PLAN, TENSOR, build

MOST = {"read": (10.0, 512 << 20), "build": (120.0, 3 << 30)}
"""The limits of reading and of building: seconds of a processor, and bytes of resident memory beyond those that the
process held before its first input. A forked process begins with all that its parent holds, which says nothing of an
input."""
STAGED = PLAN.replace("schedule  microbatches 2", "schedule  1f1b microbatches 2") + (
    "mesh      pp=2\nstage     before blocks.1 over pp\n"
)
RANGED = PLAN.replace("sizes     B=8, S=8", "sizes     B=4..8 by 4, S=4..8 by 4")
BUILDS = {"tensor": (TENSOR, PLAN), "staged": ("", STAGED), "ranged": (DATA, RANGED)}
SAID = re.compile(r"(error|warning)\[P[0-9]{4}\]|usage:|parc \w+:|`|would change|is there and")


@dataclass
class Outcome:
    """The outcome of one input. Its ``end`` is ``accepted``, ``refused``, or a fault of parc: a crash, or a limit
    passed. ``said`` are the words of the command."""

    number: int
    what: str
    end: str
    seconds: float = 0.0
    bytes: int = 0
    said: str = ""


@dataclass
class Summary:
    """All findings of a fuzz."""

    seed: int
    ends: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    bad: list[Outcome] = field(default_factory=list)
    slowest: Outcome = field(default_factory=lambda: Outcome(0, "", ""))
    largest: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count an input."""
        self.kinds[outcome.what.split(":")[0]] += 1
        self.ends[outcome.end if outcome.end in ("accepted", "refused") else "not borne"] += 1
        self.bad += [outcome] if outcome.end not in ("accepted", "refused") else []
        self.slowest = max(self.slowest, outcome, key=lambda one: one.seconds)
        self.largest = max(self.largest, outcome.bytes)

    def text(self) -> str:
        """Return the findings as text for a reader."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        lines = [f"seed {self.seed}: {self.ends.total()} inputs ({kinds}): {self.ends['refused']} refused with a "
                 f"message, {self.ends['accepted']} accepted, {self.ends['not borne']} not borne; slowest "
                 f"{self.slowest.seconds:.1f} s ({self.slowest.what}); largest {self.largest >> 20} MiB"]  # fmt: skip
        return "\n".join([*lines, *(f"--- input {one.number}, {one.what}:\n{one.end}" for one in self.bad)])


def prepare(folder: Path, names: Collection[str] = tuple(BUILDS)) -> None:
    """Make the originals: builds, or those of ``names`` alone, and checkpoints of the first: one by shards, and one of
    whole tensors in one file."""
    for name in names:
        build(folder / name, *BUILDS[name])
    opened = open_build(folder / "tensor" / "build")
    stored, mesh = stored_of(opened), build_mesh(opened)
    save_all(folder / "shards", ranks_of(stored, mesh, [*opened.roles] * mesh.world, numbers(stored, 0)), stored)
    (folder / "whole").mkdir()
    save_file(numbers(stored, 0), folder / "whole" / TENSORS)
    (folder / "whole" / FACTS).write_text('{"optimizer": "adamw", "step": 3}')


def plans() -> list[Path]:
    """Return every plan that parc ships."""
    return sorted([*EXAMPLES.glob("*.parc"), *(EXAMPLES.parent / "parc" / "plans").glob("*.parc")])


def read_plan_input(draw: random.Random, made: Path, folder: Path) -> tuple[str, Callable[[], int]]:
    """Check a changed plan without its model, or format it."""
    source = draw.choice(plans())
    shutil.copy(EXAMPLES / "gpt.py", folder)
    place = folder / "plan.parc"
    text = mutate_text(draw, source.read_text("utf-8"))
    place.write_bytes(mutate_bytes(draw, text.encode()) if draw.random() < 0.1 else text.encode("utf-8"))
    words = draw.choice((["check", "--static"], ["check", "--static"], ["fmt", "--check"]))
    return f"plan: {' '.join(words)} of {source.name}", lambda: main([*words, str(place)])


def read_build_input(draw: random.Random, made: Path, folder: Path) -> tuple[str, Callable[[], int]]:
    """Verify or show a build with one changed file and fitting hashes."""
    name = draw.choice(sorted(name for name in BUILDS if (made / name).is_dir()))
    copy = Path(shutil.copytree(made / name / "build", folder / "build"))
    files = sorted(str(place.relative_to(copy)) for place in copy.rglob("*") if place.is_file())
    file = draw.choice([*files, *["manifest.json"] * 6, *["report.json"] * 2, *["schedule.txt"] * 2])
    place = copy / file
    if file.endswith(".json"):
        value = mutate_json(draw, json.loads(place.read_text("utf-8")))
        place.write_text(json.dumps(value), "utf-8")
    elif draw.random() < 0.1:
        place.write_bytes(mutate_bytes(draw, place.read_bytes()))
    else:
        place.write_bytes(mutate_text(draw, place.read_text("utf-8")).encode("utf-8"))
    if file != "manifest.json" and draw.random() < 0.95:
        rehash(copy)
    words = draw.choice((["verify", "--static"], ["verify", "--static"], ["show"], ["show", "--pipeline"]))
    return f"build: {' '.join(words)} of {name} with another {file}", lambda: main([*words, str(copy)])


def read_checkpoint_input(draw: random.Random, made: Path, folder: Path) -> tuple[str, Callable[[], int]]:
    """Open a changed checkpoint for a build."""
    kind = draw.choice(("shards", "shards", "whole"))
    copy = Path(shutil.copytree(made / kind, folder / "checkpoint"))
    file = draw.choice(sorted(place.name for place in copy.iterdir()))
    place = copy / file
    if file.endswith(".json") and draw.random() < 0.7:
        place.write_text(json.dumps(mutate_json(draw, json.loads(place.read_text("utf-8")))), "utf-8")
    else:
        place.write_bytes(mutate_bytes(draw, place.read_bytes()))
    if file == INDEX_FILE and draw.random() < 0.9:
        facts = {**json.loads((copy / FACTS).read_text("utf-8")), "index": sha256(place.read_bytes()).hexdigest()}
        write_facts(copy, facts)
    build = open_build(made / "tensor" / "build")

    def read() -> int:
        try:
            checkpoint, _ = open_checkpoint(build, copy)
            checkpoint.check_shards(range(len(checkpoint.index.files)))
        except RunError as error:
            print(error.diagnostic().message, "`", file=sys.stderr)
            return 1
        return 0

    return f"checkpoint: another {file}", read


def build_input(draw: random.Random, made: Path, folder: Path) -> tuple[str, Callable[[], int]]:
    """Build a changed plan with its model."""
    shutil.copy(EXAMPLES / "gpt.py", folder)
    text = PLAN + draw.choice((TENSOR, BOTH, DATA))
    (folder / "plan.parc").write_bytes(mutate_text(draw, text).encode("utf-8"))
    words = ["build", str(folder / "plan.parc"), "-o", str(folder / "out")]
    return "model: build", lambda: main(words)


KINDS = (read_plan_input, read_build_input, read_plan_input, read_build_input, read_checkpoint_input)


def run_input(seed: int, number: int, made: Path, builds: bool) -> Outcome:
    """Make one input and read it."""
    draw = random.Random(f"{seed} {number}")
    make = build_input if builds else KINDS[number % len(KINDS)]
    with tempfile.TemporaryDirectory(prefix="parc-hostile-") as folder:
        return read_input(number, *make(draw, made, Path(folder)))


def read_input(number: int, what: str, read: Callable[[], int]) -> Outcome:
    """Read an input, and judge how that ended."""
    said, start = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = read()
        except BaseException as error:  # nothing may pass the command line
            code = 3
            print(f"Traceback: {type(error).__name__}: {error}", file=sys.stderr)
    seconds, text = time.process_time() - start, said.getvalue()
    end = "accepted" if code == 0 else "refused"
    if code not in (0, 1, 5) or "Traceback" in text or "parc's own" in text or (code and not SAID.search(text)):
        end = f"exit code {code}\n{text[-3000:]}"
    return Outcome(number, what, end, seconds, _held(), text)


def _held() -> int:
    """Return the most bytes of memory that this process has held so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _writable() -> int:
    """Return the bytes of memory of its own that this process may write, which are those that the limit counts."""
    (words,) = re.findall(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(words)


def _work(pipe: Connection, run: Callable[[int], Outcome], most: int) -> None:
    before = _held()
    most = _writable() + 3 * most  # torch asks for more than it ever touches
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    while (number := pipe.recv()) is not None:
        outcome = run(number)
        pipe.send(replace(outcome, bytes=max(0, outcome.bytes - before)))


def fuzz(seed: int, made: Path, numbers: Iterator[int], builds: bool = False) -> Summary:
    """Read inputs that follow from a seed and their numbers, within the limits of reading or of building."""
    summary, limits = Summary(seed), MOST["build" if builds else "read"]
    for outcome in in_worker(lambda number: run_input(seed, number, made, builds), numbers, limits):
        summary.add(outcome)
    return summary


def in_worker(run: Callable[[int], Outcome], numbers: Iterable[int], limits: tuple[float, int]) -> Iterator[Outcome]:
    """Yield the outcomes of inputs by their numbers, within limits of seconds and bytes. They are read in a process of
    their own, and in a new one if an input kills it or does not end."""
    context = multiprocessing.get_context("fork")
    (seconds, most), wait = limits, 3 * limits[0]
    worker, pipe = None, None
    for number in numbers:
        if worker is None or pipe is None:
            pipe, other = context.Pipe()
            worker = context.Process(target=_work, args=(other, run, most), daemon=True)
            worker.start()
            other.close()
        pipe.send(number)
        try:
            outcome = pipe.recv() if pipe.poll(wait) else Outcome(number, "?", f"no end in {wait:.0f} s")
        except EOFError:
            outcome = Outcome(number, "?", "the process died")
        if outcome.end in ("accepted", "refused") and (outcome.seconds > seconds or outcome.bytes > most):
            outcome.end = f"{outcome.seconds:.1f} s, {outcome.bytes / 2**20:.0f} MiB\n{outcome.said[-3000:]}"
        yield outcome
        if outcome.end not in ("accepted", "refused"):
            worker.kill()
            worker.join()
            worker = None
    if worker is not None and pipe is not None:
        pipe.send(None)
        worker.join()


def until(end: float) -> Iterator[int]:
    """Yield numbers as long as there is time."""
    number = 0
    while time.monotonic() < end:
        yield number
        number += 1


def command() -> int:
    """Fuzz the readers, and for a quarter of the time the builds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NUMBER", type=int, help="one input of those that read, again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="parc-hostile-") as folder:
        prepare(Path(folder))
        if given.only is not None:
            print(run_input(given.seed, given.only, Path(folder), builds=False))
            return 0
        found = [
            fuzz(given.seed, Path(folder), until(time.monotonic() + share * given.seconds), builds)
            for share, builds in ((0.75, False), (0.25, True))
        ]
    print("\n".join(summary.text() for summary in found))
    return int(any(summary.bad for summary in found))


if __name__ == "__main__":
    sys.exit(command())
