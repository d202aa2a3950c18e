"""Includes: files relative to each other, names of their own, cycles, spans inside them, one mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.compiler.plan.include import families
from parc.compiler.plan.plan import Plan, read_plan
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.source import Source

HEAD = """model "gpt:GPT"
input x int64 [B]
sizes B=4
loss cross_entropy(output, x)
optimizer sgd lr 0.1
"""


def read(folder: Path, plan: str, **files: str) -> Plan:
    """Read the plan, beside files by their names (``__`` stands for a folder's slash)."""
    for name, text in files.items():
        place = folder / f"{name.replace('__', '/')}.parc"
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    path = folder / "plan.parc"
    path.write_text(HEAD + plan)
    return read_plan(path)


def refused(folder: Path, plan: str, **files: str) -> str:
    """Return the message of a plan that is refused."""
    with pytest.raises(PlanError) as caught:
        read(folder, plan, **files)
    return str(caught.value)


def test_a_file_has_names_of_its_own_and_paths_count_from_it(tmp_path: Path) -> None:
    plan = read(
        tmp_path,
        'let tp = 4, width = 8\nmesh dp=2, tp=$tp\ninclude "parts/a.parc" (tp=$tp, seed=5)\nsteps $width\n',
        parts__a='let tp = 1, seed = 1, width = 2\nmesh tp=$tp, cp=$width\nseed $seed\ninclude "b.parc"\n',
        parts__b="shard x [_]  # here\n",
    )
    assert plan.mesh.axes == (("dp", 2), ("tp", 4), ("cp", 2))
    assert (plan.seed, plan.steps) == (5, 8)
    (line,) = plan.placements
    assert str(line.span) == "parts/b.parc:1:1"
    assert str(line.span.root) == "plan.parc:8:1"
    again = read_plan(Source("again.parc", plan.text()))
    assert again.statements == plan.statements and again.mesh == plan.mesh


def test_an_axis_of_an_included_file_comes_after_the_plans_own(tmp_path: Path) -> None:
    plan = read(tmp_path, 'include "a.parc"\nmesh dp=2, tp=2\n', a="mesh tp=2, pp=3\n")
    assert plan.mesh.axes == (("dp", 2), ("tp", 2), ("pp", 3))
    assert read(tmp_path, 'include "a.parc"\n', a="mesh tp=2\n").mesh.axes == (("tp", 2),)


def test_cycles_name_the_way(tmp_path: Path) -> None:
    said = refused(tmp_path, 'include "a.parc"\n', a='include "b.parc"\n', b='\ninclude "./a.parc"\n')
    assert "error[P0021]: `a.parc` includes itself: a.parc → b.parc → a.parc" in said
    assert "--> b.parc:2:9" in said and "::: a.parc:1:1" in said and "::: plan.parc:6:1" in said
    assert "plan.parc → plan.parc" in refused(tmp_path, 'include "plan.parc"\n')


def test_messages_point_into_the_file_and_at_the_line_that_includes_it(tmp_path: Path) -> None:
    said = refused(tmp_path, 'seed 1\ninclude "a.parc"\n', a="steps 3\nseed 2\nmehs x\n")
    assert "error[P0006]: a plan has one `seed` line\n --> a.parc:2:1" in said and "::: plan.parc:6:1" in said
    assert "error[P0002]: unknown verb `mehs`\n --> a.parc:3:1" in said
    assert "7 | include" in said and "included here" in said


def test_what_cannot_be_read_hides_nothing_and_invents_nothing(tmp_path: Path) -> None:
    (tmp_path / "plan.parc").write_text('include "task.parc"\nmesh tp=0\n')
    with pytest.raises(PlanError) as caught:
        read_plan(tmp_path / "plan.parc")
    assert [diagnostic.code.name for diagnostic in caught.value.diagnostics] == ["P0020", "P0010"], str(caught.value)
    assert "P0005" in refused(tmp_path, 'include "a.parc" (3)\n', a="seed 1\n")


@pytest.mark.parametrize("family", families())
def test_families_are_plans_of_their_own(tmp_path: Path, family: str) -> None:
    plan = read(tmp_path, f'mesh dp=2, tp=4\ninclude "parc:{family}" (tp=4)\n')
    assert plan.placements and [axis for axis in plan.mesh.axes if axis[1] > 1] == [("dp", 2), ("tp", 4)]
    assert not plan.warnings, "\n".join(map(render, plan.warnings))
