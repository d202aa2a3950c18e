"""The functions of a run's machine that neither a build's checks nor a first check executes: ``make executed``.

Plans that between them use what a plan can say are built with every check, and their first checks run on real ranks.
A function of the backends, the machine or the optimizer that nothing called stands in ``NOT_EXECUTED`` with a reason,
or this command fails: a fault in it would reach a run unseen.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

from parc.build import build as build_checked
from parc.compiler.build.directory import read_build
from parc.runtime.compare.first_check import first_check
from tests.planted_builds import PLANS, ROOT
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import BOTH, DATA, FLAT, PLAN

LOOKED_AT = ("runtime/backends", "runtime/machine", "runtime/state/optimizer.py")
GPT_PLANS = {
    "dp, tp, zero 1, bf16": FLAT + BOTH + "zero 1 over dp\nprecision bf16\nema 0.9\n",
    "zero 3, prefetch": FLAT + DATA + "zero 3 over dp\nprefetch 1\n",
    "one rank, fp16": FLAT + "precision fp16 loss_scale dynamic\n",
    "int8": FLAT + DATA + "compress gradients over dp using int8\n",
    "two levels": FLAT + DATA.replace("dp=2", "dp=4") + "node 2\nhierarchical over dp\n",
    "stages": PLAN.replace("schedule  microbatches 2\n", "") + "mesh pp=2\nstage before blocks.1 over pp\n"
    "schedule 1f1b microbatches 2\n",
    "optimizer in files": FLAT + 'offload optimizer to "offloaded"\n',
}  # fmt: skip
"""Plans of the example's GPT."""
COMPILED = "dp, tp, zero 1, bf16"
"""The plan that is run with ``--compile`` too."""
ALL = {name: ("examples", text) for name, text in GPT_PLANS.items()} | PLANS


NOT_EXECUTED: dict[str, str] = {}
"""The functions that nothing executes here, by file and name, with the reason."""


# ---- functions that were called


@contextmanager
def executed(codes: set[tuple[str, str]]) -> Iterator[None]:
    """Enter a block whose called functions of the looked-at files are added to ``codes``, of all its threads."""
    seen = dict[CodeType, None]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen[frame.f_code] = None

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        for code in list(seen):  # other threads may go on
            file = Path(code.co_filename).resolve()
            if file.is_relative_to(ROOT) and (name := str(file.relative_to(ROOT))).startswith(LOOKED_AT):
                codes.add((name, code.co_qualname.replace(".<locals>", "")))


def defined() -> Iterator[tuple[str, str]]:
    """Yield every function of the looked-at files, with the names of what it is inside of."""
    for place in LOOKED_AT:
        path = ROOT / place
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            name = str(file.relative_to(ROOT))
            yield from ((name, function) for function in _functions(ast.parse(file.read_text()), ""))


def _functions(node: ast.AST, inside: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            if not _is_declared(child):
                yield f"{inside}{child.name}"
            yield from _functions(child, f"{inside}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{inside}{child.name}.")
        else:
            yield from _functions(child, inside)


def _is_declared(function: ast.FunctionDef) -> bool:
    """Return whether a function has a docstring and no more: a protocol's."""
    return all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in function.body)


# ---- the plans


def check_ranks(folder: str, compile: bool) -> set[tuple[str, str]]:
    """Run the first check of a build on this rank, and return the functions that it called."""
    codes = set[tuple[str, str]]()
    with executed(codes):
        first_check(read_build(Path(folder)), compile=compile)
    return codes


def called(show: Callable[[str], None]) -> set[tuple[str, str]]:
    """Return the functions that builds and first checks of all plans call."""
    codes = set[tuple[str, str]]()
    for name, (folder, text) in ALL.items():
        with TemporaryDirectory() as scratch:
            plan, path = Path(scratch) / "plan.parc", Path(scratch) / "build"
            (plan.parent / "samples.py").write_text(Path(__file__).read_text())  # of `data bytes "*.py"`
            plan.write_text(text.replace('"./', f'"{ROOT / folder}/'))
            with executed(codes):
                build_checked(plan, path, {})
            world = read_build(path).mesh.world
            for compiled in (False, True) if name == COMPILED else (False,):
                for of_rank in run_ranks(check_ranks, world, str(path), compiled, wait_s=240):
                    codes |= of_rank
        show(f"{name}: {len(codes)} functions")
    return codes


def main() -> int:
    """Print the functions that nothing executes and no reason excuses, and the excuses that are not needed."""
    functions = {f"{file}:{name}" for file, name in defined()}
    reached = {f"{file}:{name}" for file, name in called(print)}
    missing = sorted(functions - reached - NOT_EXECUTED.keys())
    needless = sorted(NOT_EXECUTED.keys() & reached | NOT_EXECUTED.keys() - functions)
    for name, reason in sorted(NOT_EXECUTED.items()):
        print(f"not executed: {name}: {reason}")
    for name in missing:
        print(f"EXECUTED BY NOTHING: {name}")
    for name in needless:
        print(f"excused without need: {name}")
    print(f"{len(functions)} functions, {len(functions & reached)} executed, {len(NOT_EXECUTED)} with a reason")
    return 1 if missing or needless else 0


if __name__ == "__main__":
    sys.exit(main())
