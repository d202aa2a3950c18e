"""Plans compiled and checked as ``parc build`` does, with nothing written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from parc.checking.checks import Checked, case_of, check_build, prove, static_faults
from parc.checking.limits import hold_promises
from parc.checking.reports import report_of
from parc.compiler.build.build import Build, program_file
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Program
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.simulate import compare
from tests.captured_once import compile_once
from tests.runtime.tiny import EXAMPLES

_SQUARE = """

def square(output):
    return (output ** 2).mean() + output.mean()
"""
_SMALL = """\
model "./net.py:{model}
input x float32 [{shape}]
sizes {sizes}
loss "./net.py:square"(output)
optimizer sgd lr 0.1
mesh dp=2, pp={pp}
shard x [B/dp, ...]
"""
_STAGES = "stage before b over pp\nschedule gpipe microbatches 2\n"


def compiled_net(
    folder: Path, file: str, model: str, stages: bool = False, lines: str = "", shape: str = "B, 8", sizes: str = "B=8"
) -> Compiled:
    """Compile a model of 8 numbers a sample, or another ``shape``, on two data ranks. ``model`` is the plan's text
    after the name of the file, whose text is ``file``. With ``stages`` the model is cut before its ``b``; ``lines``
    come last."""
    (folder / "net.py").write_text(file + _SQUARE)
    text = _SMALL.format(model=model, shape=shape, sizes=sizes, pp=1 + stages) + _STAGES * stages + lines
    return compile_plan(read_plan(Source("net.parc", text)), folder)


@lru_cache(maxsize=16)
def compiled(text: str, folder: Path = EXAMPLES, **defines: int) -> Compiled:
    """Compile a plan whose paths count from a folder."""
    words = {name: str(value) for name, value in defines.items()}
    return compile_once(read_plan(Source("plan.parc", text), words), folder)


def in_texts(build: Build, programs: Mapping[str, Program]) -> Build:
    """Return a build of one role with the texts of other programs: all that a certificate looks at."""
    texts = {program_file(program): program.text() for program in programs.values()}
    return replace(build, texts={**build.texts, **{name: text for name, text in texts.items() if name in build.texts}})


def simulated(compilation: Compiled, steps: int = 1) -> Mapping[str, Any]:
    """Return the report of a build whose checks hold: all of its texts, and its numbers beside the captured graph's in
    some steps. What ``checked`` does more are the module itself, further steps, and the plan's promises."""
    faults = static_faults(compilation.build)
    assert not faults, "\n".join(map(str, faults))
    agreement = compare(case_of(compilation), steps)
    assert agreement.largest <= TOLERANCE, agreement
    return report_of(compilation)


def held(compilation: Compiled, steps: int = 1) -> Mapping[str, Any]:
    """Return the report of a build as ``simulated`` does, of which the facts are proved too, and which keeps the
    promises of its plan. It is for plans of a module that another test compares with its captured graph."""
    assert prove(compilation) == []
    hold_promises(compilation)
    agreement = compare(case_of(compilation), steps)
    assert agreement.largest <= TOLERANCE, agreement
    return report_of(compilation)


def checked(compilation: Compiled) -> Checked:
    """Return the report of all checks of a build, which must hold, and the promises of its plan with them."""
    hold_promises(compilation)
    outcome = check_build(compilation)
    assert not outcome.faults, "\n".join(map(str, outcome.faults))
    return outcome
