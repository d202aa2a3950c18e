"""Faults planted in parc's own source, one by one in a copy of it: which check or test notices each.

``python -m tests.planted_faults`` prints the table; names of faults as arguments choose some. What notices a fault is
tried in the order of ``NOTICES``: the checks of a build, a run of it, and the tests that the fault's row names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
SECONDS = 600
"""The time after which a command that has not ended has noticed."""

_COPIED = ("benchmarks", "compiler", "conftest.py", "docs", "examples", "grammar", "parc", "passes", "pyproject.toml",
           "README.md", "runtime", "tests")  # fmt: skip
_GPT = """\
model "./gpt.py:GPT" (layers=2, width=16, heads=2, vocab=24, length=4, dropout=0.25)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=8, S=4
loss cross_entropy(output, targets)
optimizer adamw lr 1e-2 warmup 3 clip 1.0
optimizer on **.norm* lr 1e-3
ema 0.9 every 2
seed 1
data synthetic
"""
_SPLIT = """\
mesh dp=2, tp=2
shard tokens, targets [B/dp, _]
column blocks.*.attn.qkv over tp rows (3 h/tp d)
row blocks.*.attn.out over tp
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
vocab embed, head over tp
schedule microbatches 2
zero 1 over dp
"""
_ATTENTION = """\
model "{root}/tests/context_models.py:Net" (p=0.3, layers=1)
input tokens int64 [B, S]
input document int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=12
loss cross_entropy(output, targets)
optimizer sgd lr 0.1
seed 1
data synthetic
mesh dp=2, cp=2
shard tokens, document, targets [B/dp, _]
context blocks.* dim S over cp using ring
precision bf16
"""
PLANS = {
    "split": _GPT + _SPLIT,
    "attention": _ATTENTION,
    "int8": _GPT + "mesh dp=4\nshard tokens, targets [B/dp, _]\ncompress gradients over dp using int8\n",
    "stages": _GPT + "mesh pp=2\nstage before blocks.1 over pp\nschedule 1f1b microbatches 4\n",
    "async": _GPT + "mesh pp=2\nstage before blocks.1 over pp\nschedule async microbatches 4\n",
    "files": _GPT + 'offload optimizer to "offloaded"\n',
}
"""The plans of which a fault is planted in the build and in the run: ``split``, or the one that a fault's row names."""


@dataclass(frozen=True)
class Fault:
    """A fault: ``old`` stands once in ``file``, and ``new`` in its place is wrong. ``tests`` are those that notice;
    ``unnoticed`` is the reason why nothing can on a CPU, or at all."""

    id: str
    kind: str
    file: str
    old: str
    new: str
    tests: Sequence[str] = ()
    plan: str = "split"
    unnoticed: str = ""


def faults() -> list[Fault]:
    """Return the faults of the table.

    Raises:
        ValueError: the ``old`` of one does not stand exactly once in its file.
    """
    with TABLE.open("rb") as file:
        rows = [Fault(**row) for row in tomllib.load(file)["fault"]]
    for row in rows:
        if (times := (ROOT / row.file).read_text(encoding="utf-8").count(row.old)) != 1:
            raise ValueError(f"{row.id}: its `old` stands {times} times in {row.file}, not once")
    return rows


@dataclass(frozen=True)
class Copy:
    """A copy of the source, in which commands run."""

    folder: Path

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Enter a block in which the copy has a fault."""
        path = self.folder / fault.file
        good = path.read_text(encoding="utf-8")
        try:
            self._write(path, good.replace(fault.old, fault.new))
            yield
        finally:
            self._write(path, good)

    def _write(self, path: Path, text: str) -> None:
        changed = path.stat().st_mtime + 2  # compiled files are told from stale ones by seconds and size
        path.write_text(text, encoding="utf-8")
        os.utime(path, (changed, changed))

    def fails(self, *words: str) -> bool:
        """Run a Python command in the copy, and return whether it fails, or does not end."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *words], cwd=self.folder, env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return process.wait(SECONDS) != 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return True


def source_copy(folder: Path) -> Copy:
    """Copy the source to a folder."""
    for name in _COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.parcbuild", ".*")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    for name, text in PLANS.items():
        (folder / "examples" / f"{name}.parc").write_text(text.replace("{root}", str(folder)), encoding="utf-8")
    return Copy(folder)


# ---- what notices: each returns the name of what did, "" if nothing did


def checks_of_a_build(copy: Copy, fault: Fault) -> str:
    """Build a small plan: its checks refuse."""
    return "a build" if copy.fails("-m", "parc", "build", f"examples/{fault.plan}.parc", "-o", "built") else ""


def a_run(copy: Copy, fault: Fault) -> str:
    """Run that build for two steps, on as many processes as its mesh has: it ends with an error."""
    return "a run" if copy.fails("-m", "parc", "run", "built", "--steps", "2", "--device", "cpu") else ""


def named_tests(copy: Copy, fault: Fault) -> str:
    """Run the tests that the fault's row names, one after the other."""
    return next((test for test in fault.tests if copy.fails(*_PYTEST, test)), "")


_PYTEST = ("-m", "pytest", "-q", "-x", "-n", "0", "-m", "", "--doctest-modules")
NOTICES: Mapping[str, Callable[[Copy, Fault], str]] = {
    "a build": checks_of_a_build, "a run": a_run, "tests": named_tests,
}  # fmt: skip
"""The checks and tests that may notice a fault, in the order in which they are tried."""


def check_copy(copy: Copy, rows: Sequence[Fault], chosen: Sequence[str]) -> None:
    """Check that nothing fails in a copy without a fault.

    Raises:
        SystemExit: something does; says what.
    """
    for plan in sorted({row.plan for row in rows}):
        tests = sorted({test for row in rows for test in row.tests if row.plan == plan})
        none = Fault("none", "", "", "", "", tests, plan=plan)
        if failing := [noticed for name in chosen if (noticed := NOTICES[name](copy, none))]:
            raise SystemExit(f"without a fault there fails with `{plan}`: {', '.join(failing)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of the chosen faults, and return 1 if one is noticed by nothing and says no reason."""
    parser = argparse.ArgumentParser(prog="tests.planted_faults", description="which check or test notices each fault")
    parser.add_argument("ids", nargs="*", help="the ids of faults (default: all)")
    parser.add_argument("--by", action="append", choices=NOTICES, help="try this alone (may be given several times)")
    chosen, unnoticed = parser.parse_args(argv), list[str]()
    rows = [row for row in faults() if not chosen.ids or row.id in chosen.ids]
    by = chosen.by or [*NOTICES]
    with tempfile.TemporaryDirectory() as folder:
        copy = source_copy(Path(folder))
        check_copy(copy, rows, by)
        print(f"{'fault':<28}{'kind':<44}{'seconds':>8}  noticed by")
        for row in rows:
            begun = time.perf_counter()
            with copy.with_fault(row):
                noticed = next(filter(None, (NOTICES[name](copy, row) for name in by)), "")
            seconds = time.perf_counter() - begun
            print(f"{row.id:<28}{row.kind:<44}{seconds:>8.0f}  {noticed or row.unnoticed or '-'}", flush=True)
            unnoticed += [row.id] if not noticed and not row.unnoticed else []
    print(f"{len(rows)} faults, {len(unnoticed)} unnoticed: {', '.join(unnoticed) or 'none'}")
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
