"""Twins: what counts as the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parc.compiler.artifact import read_build
from parc.compiler.twin import compare_structure
from parc.twins import find_twin, twin_text
from tests.checked_plans import compiled
from tests.runtime.tiny import PLAN, TENSOR, build


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


def test_a_twin_is_nowhere_larger_than_its_build() -> None:
    lines = TENSOR + "verify layers=4, width=8, S=16\n"
    made = compiled(PLAN.replace("layers=2", "layers=1") + lines)
    twin, differences = find_twin(made, made.built.programs)
    assert not differences
    assert twin_text(twin).startswith("the twin: layers=1, width=8, S=8, B=8, mesh tp=2")
