"""Twins: what counts as the same work."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from parc.compiler.artifact import read_build
from parc.compiler.plan import read_plan
from parc.compiler.twin import compare_structure
from parc.driver import compile_plan
from parc.grammar.source import Source
from parc.twins import find_twin, twin_text
from tests.runtime.tiny import EXAMPLES, PLAN, TENSOR, build


def test_the_order_of_work_counts(tmp_path: Path) -> None:
    programs = read_build(build(tmp_path, TENSOR)).programs
    assert not compare_structure(programs, programs)
    main = programs["F"].main
    seen: list[str] = []
    for at, line in enumerate(main.lines[:-1]):
        seen.append(line.op)
        if main.lines[at + 1].op not in seen and seen.count(line.op) == 1:
            break
    lines = list(main.lines)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    swapped = replace(programs["F"], functions=(*programs["F"].functions[:-1], replace(main, lines=tuple(lines))))
    (fault,) = compare_structure(programs, {**programs, "F": swapped})
    assert "the order of work differs" in fault.message


def test_a_twin_is_nowhere_larger_than_its_build(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "gpt.py", tmp_path)
    lines = TENSOR + "verify layers=4, width=8, S=16\n"
    made = compile_plan(read_plan(Source("tiny.parc", PLAN.replace("layers=2", "layers=1") + lines)), tmp_path)
    twin, differences = find_twin(made, made.built.programs)
    assert not differences
    assert twin_text(twin).startswith("the twin: layers=1, width=8, S=8, B=8, mesh tp=2")
