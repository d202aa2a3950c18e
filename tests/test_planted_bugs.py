"""Planted bugs: every changed build is refused, types refuse almost all that is about placement, good builds pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parc.checking.certified import certificate_of
from parc.compiler.program.program import Ref
from parc.compiler.verify.numbers import check_constants
from parc.compiler.verify.rounding import check_recomputed
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.simulate import compare
from tests.certified_judge import refused_in
from tests.checked_plans import in_texts
from tests.planted_bugs import CONTEXT, EARLY, EVALUATED_STAGES, EVALUATIONS, NUMBERS, STEPS
from tests.planted_builds import MOODY_BUILD, OFFLOADED, Row, evaluated_build, good_build, judge, table_text
from tests.planted_mutators import LINES, ROWS, Mutant, mutants, sites
from tests.planted_pipelines import good, refusals

QUICK = tuple(name for name in STEPS.names if name.startswith("stack"))
"""The builds whose numbers are tested quickest."""
PLACEMENT = tuple(f"{kind}: collective" for kind in (
    "leave out", "run again", "take another operator", "retype",
))  # fmt: skip


@cache
def rows() -> dict[str, Row]:
    """A table of every second class and place in quick builds, and one of 20 in all others."""
    found = STEPS.rows(QUICK, 1, share=2)
    for name in STEPS.names:
        for kind, row in STEPS.rows([name], 1, share=20).items() if name not in QUICK else ():
            found.setdefault(kind, Row()).add(row)
    print(f"\n{table_text(found)}")
    return found


@pytest.mark.parametrize("name", STEPS.names)
def test_no_good_build_is_refused(name: str) -> None:
    build = good_build(name)
    verdict = judge(build, build.programs)
    assert not verdict.check, verdict.reason


def test_every_mutant_is_refused() -> None:
    accepted = [f"{kind}: {what}" for kind, row in rows().items() for what in row.accepted]
    assert not accepted, accepted
    assert sum(row.first["equal"] for row in rows().values()) <= 0.02 * sum(row.mutants for row in rows().values())


def test_all_mutators_find_places() -> None:
    planted = {mutant.kind.split(":")[0] for name in QUICK for mutant in mutants(good_build(name).programs)}
    assert planted >= {*LINES, *ROWS}
    assert sum(row.mutants for row in rows().values()) >= 1000


def test_values_in_the_wrong_place_are_refused_before_anything_runs() -> None:
    carrying = ("store", "load")
    build = good_build(OFFLOADED)
    carried = [mutant for mutant in mutants(build.programs)
             if any(f"parc.{word}.default" in mutant.place for word in carrying)]  # fmt: skip
    assert len(carried) > 100
    for mutant in carried[:: -(-len(carried) // 16)]:
        if mutant.programs != build.programs:
            certified = not refused_in(build.build, in_texts(build.build, mutant.programs).texts)
            check = "" if not certified else judge(build, mutant.programs).check
            assert not certified or check in ("types", "parse", "shapes"), mutant.what


def test_wrong_sums_in_the_last_backward_are_refused() -> None:
    for name in EARLY.names:
        build = EARLY.build(name)
        assert not (verdict := judge(build, build.programs)).check, verdict.reason
    found = EARLY.rows(EARLY.names[1:], 1, share=3)
    assert sum(row.mutants for row in found.values()) > 50
    assert not [what for row in found.values() for what in row.accepted]


def test_sequences_whose_parts_meet_wrongly_are_refused() -> None:
    for name in CONTEXT.names:
        assert not (verdict := judge(build := CONTEXT.build(name), build.programs)).check, verdict.reason
    found = CONTEXT.rows(most=1, share=12)
    assert not [what for row in found.values() for what in row.accepted]


def test_numbers_that_data_never_shows_are_refused() -> None:
    rows = NUMBERS.rows(("stack tp=2, two microbatches",), 1, share=3)
    for name in ("gpt dp=2, tp=2, two microbatches", "padded tp=4"):
        for kind, row in NUMBERS.rows((name,), 1, share=24).items():
            rows.setdefault(kind, Row()).add(row)
    assert sum(row.mutants for row in rows.values()) > 12 and "a number once more" in rows
    assert not [what for row in rows.values() for what in row.accepted], table_text(rows)


def test_numbers_of_backward_that_no_derivative_brings_are_refused() -> None:
    build = good_build("stack tp=2, two microbatches")
    *_, last = sites(build.programs, lambda line: line.op.startswith("aten."), "B")
    share = last.then("aten.mul.Tensor", Ref(last.result.name), 1.0005)
    table = good_build("gpt dp=2, tp=2, two microbatches")
    (row,) = (site for site in sites(table.programs, "parc.lookup_backward.default", "B"))
    for planted, programs in ((build, share), (table, row.put(3, 23))):
        assert [*check_constants(planted.programs, planted.build.reference)] == []
        (fault,) = check_constants(programs, planted.build.reference)
        assert "which neither F nor the derivative of one of its operators has" in fault.message


def test_evaluations_of_another_model_are_refused_almost_all_before_anything_runs() -> None:
    names = (MOODY_BUILD, "stack tp=2, two microbatches", "padded tp=4")
    for name in names:
        assert not (verdict := judge(build := evaluated_build(name), build.programs)).check, verdict.reason
    found = EVALUATIONS.rows(names, 1, share=6).values()
    judged = sum(row.mutants for row in found)
    assert judged > 60 and not [what for row in found for what in row.accepted]
    assert sum(row.first["numbers"] for row in found) <= 0.25 * judged


def test_evaluations_of_pipelines_are_refused_by_the_texts_alone() -> None:
    name = "two stages"
    assert refusals(good(name, evaluates=True)) == []
    found = EVALUATED_STAGES.rows([name], 1, share=2)
    assert sum(row.mutants for row in found.values()) > 30
    assert not [what for row in found.values() for what in row.accepted]


@pytest.mark.parametrize("kind", [*PLACEMENT, "leave out a gradient", "take for another type", "retype: line"])
def test_what_is_wrong_with_a_placement_is_seen_before_anything_runs(kind: str) -> None:
    row = rows()[kind]
    assert row.mutants >= 4 and not row.accepted
    assert row.first["numbers"] == 0
    assert row.first["communication"] == 0


def test_types_alone_refuse_almost_every_wrong_collective() -> None:
    wrong = [rows()[kind] for kind in PLACEMENT if not kind.startswith("take another")]
    mutants, by_types = sum(row.mutants for row in wrong), sum(row.by_types for row in wrong)
    assert by_types >= 0.95 * mutants, f"{by_types} of {mutants}"


def test_the_schedule_is_refused_by_the_communication_contract() -> None:
    row = rows()["change the schedule"]
    assert row.first["communication"] == row.mutants > 0


def test_a_number_that_is_cut_off_where_no_data_comes_is_refused_before_anything_runs() -> None:
    row = rows()["change a value on its way"]
    assert row.mutants > 40 and row.first["numbers"] <= 0.05 * row.mutants


def test_what_is_wrong_in_the_scale_or_the_loss_is_not_certified() -> None:
    build = good_build("stack tp=2, two microbatches")
    planted = [mutant for mutant in mutants(build.programs) if mutant.place.split()[0] in ("SCALE", "LOSS")]
    assert len(planted) > 50
    for mutant in planted:
        if (programs := mutant.programs) != build.programs:
            certified = not refused_in(build.build, in_texts(build.build, programs).texts)
            assert not certified or judge(build, programs).check in ("types", "parse", "shapes"), mutant.what


def test_a_backward_that_mixes_two_calls_of_forward_is_refused_by_its_text() -> None:
    build = good_build("gpt dp=2, tp=2, two microbatches")
    planted = [mutant for mutant in mutants(build.programs) if mutant.place == "B a call" and "operand" in mutant.what]
    mixed = [mutant for mutant in planted if "reads values of several calls" in recomputed_faults(mutant)]
    assert len(mixed) >= 3


def recomputed_faults(mutant: Mutant) -> str:
    """Return the faults that the check of what backward recomputes finds by itself."""
    return "; ".join(map(str, check_recomputed(mutant.programs)))


def test_a_wrong_norm_is_refused_by_its_number_and_not_certified() -> None:
    build = good_build("stack tp=2, two microbatches")  # without clipping
    twice = next(
        mutant for mutant in mutants(build.programs) if "aten.stack" in mutant.place and " items of" in mutant.what
    )
    assert "grad_norm" in certificate_of(in_texts(build.build, twice.programs)).missing
    agreement = compare(replace(build.case, programs=twice.programs), steps=1)
    assert agreement.norm > 1e-3
    assert agreement.largest == agreement.norm
    assert compare(build.case, steps=1).norm < 1e-14


def test_a_late_step_draws_its_own_random_numbers() -> None:
    build = good_build("gpt dp=2, tp=2, two microbatches")
    early = next(mutant for mutant in mutants(build.programs) if "rng by [('aten.remainder" in mutant.what)
    case = replace(build.case, programs=early.programs)
    assert compare(case, steps=1).largest < TOLERANCE
    assert compare(case, steps=2).loss > 1e-3
