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
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

from parc.build import build as build_checked
from parc.compiler.build.directory import read_build
from parc.runtime.compare.first_check import first_check
from tests.planted_builds import PLANS, ROOT
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import ATTENTION, BOTH, DATA, FLAT, PLAN

LOOKED_AT = ("runtime/backends", "runtime/machine", "runtime/state/optimizer.py")
GPT_PLANS = {
    "dp, tp, zero 1, bf16": FLAT + BOTH + "zero 1 over dp\nprecision bf16\nema 0.9\n",
    "zero 3, prefetch": FLAT + DATA + "zero 3 over dp\nprefetch 1\n",
    "one rank, fp16": FLAT + "precision fp16 loss_scale dynamic\n",
    "int8": FLAT + DATA + "compress gradients over dp using int8\n",
    "two levels": FLAT + DATA.replace("dp=2", "dp=4") + "node 2\nhierarchical over dp\n",
    "stages": PLAN.replace("schedule  microbatches 2\n", "") + "mesh pp=2\nstage before blocks.1 over pp\n"
    "schedule 1f1b microbatches 2\n",
    "clipped, 2 microbatches, recompute": FLAT + DATA + "recompute blocks.*\nzero 2 over dp\n",
    "optimizer in files": FLAT + 'offload optimizer to "offloaded"\n',
}  # fmt: skip
"""Plans of the example's GPT."""
COMPILED = "dp, tp, zero 1, bf16"
"""The plan that is run with ``--compile`` too."""
ALL = {name: ("examples", text) for name, text in GPT_PLANS.items()} | PLANS | {
    "attention with dropout": ("tests", ATTENTION + "sizes B=4, S=12\n")}  # fmt: skip


_GPU = "a GPU's kernel: a first check on a GPU runs it; tests/runtime/test_gpu.py, test_flash.py"
_LARGE = (
    "for products that are larger than those of small programs: `parc verify --run`; tests/runtime/test_products.py"
)
_FORMS = "of other models, which a first check of theirs runs: tests/test_expert_forms.py"
_WORDS = "words or ranges of profiles, which no number depends on"
NOT_EXECUTED = {
    "runtime/backends/distributed.py:Distributed.release": "the end of a process",
    "runtime/backends/distributed.py:_Waiter.close": "the end of a process",
    "runtime/backends/moves.py:_packed_scatter*": "NCCL's form, which a first check on GPUs runs: test_backends.py",
    "runtime/backends/moves.py:_regroup": "NCCL's form, which a first check on GPUs runs: test_backends.py",
    "runtime/machine/coded.py:_Writer.line_at": _WORDS,
    "runtime/machine/compiled.py:CompiledMachine._line_by_line": _WORDS,
    "runtime/machine/compiled.py:Regions.distinct": _WORDS,
    "runtime/machine/compiled.py:_compile_error": _WORDS,
    "runtime/machine/execute.py:Machine._adding_to.add": _LARGE,
    "runtime/machine/execute.py:_on_floats": "quotients of whole numbers in a simulation: tests/test_operator_cases.py",
    "runtime/machine/execute.py:in_ranges*": _WORDS,
    "runtime/machine/expert_kernels.py:_expert_sum": _FORMS,
    "runtime/machine/expert_kernels.py:_route": _FORMS,
    "runtime/machine/expert_kernels.py:_slice_backward": _FORMS,
    "runtime/machine/expert_kernels.py:_spread_rows": _FORMS,
    "runtime/machine/flash.py:_*": _GPU,
    "runtime/machine/kernels.py:_carry": "offload without a place for it, as the reference has: it returns its operand",
    "runtime/machine/kernels.py:_*_pad": "a padded value that something reads whole: tests/passes/test_padding.py",
    "runtime/machine/kernels.py:_dense*": "GroupNorm: tests/test_outside_operators.py",
    "runtime/machine/kernels.py:_random_numbers": "draws of a model's own: tests/compiler/test_counter.py",
    "runtime/machine/products.py:*": _LARGE,
    "runtime/machine/registry.py:runs*": "done when a module is imported",
    "runtime/state/optimizer.py:_between": "rates in a table: each build that has one compares them with a formula",
    "runtime/state/optimizer.py:_type_of": _WORDS,
    "runtime/state/optimizer.py:average_notes": _WORDS,
    "runtime/state/optimizer.py:restore_optimizer": "checkpoints: tests/runtime/test_restore.py",
}
"""The functions that may be executed by nothing here, by file and name, with the reason; `*` is any text."""


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
    """Print the functions that nothing executes, with the reasons, and reasons that are not needed on this machine."""
    functions = {f"{file}:{name}" for file, name in defined()}
    reached = {f"{file}:{name}" for file, name in called(print)}
    excused = {name: next((NOT_EXECUTED[row] for row in NOT_EXECUTED if fnmatchcase(name, row)), "")
               for name in sorted(functions - reached)}  # fmt: skip
    for name, reason in excused.items():
        print(f"not executed: {name}: {reason}" if reason else f"EXECUTED BY NOTHING: {name}")
    needless = [row for row in NOT_EXECUTED if not any(fnmatchcase(name, row) for name in excused)]
    for row in needless:
        print(f"excused without need: {row}")
    listed = sum(map(bool, excused.values()))
    print(f"{len(functions)} functions, {len(functions & reached)} executed, {listed} with a reason")
    return 0 if all(excused.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
