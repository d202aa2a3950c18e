"""Planted bugs: every changed build is refused, types refuse almost all that is about placement, good builds pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.simulate import compare
from tests.planted_bugs import EARLY_BUILDS, early_rows, place_rows, table, type_share
from tests.planted_builds import (
    AUXILIARY_BUILD,
    BUILDS,
    CONTEXT_BUILDS,
    EXPERT_BUILDS,
    MOODY_BUILD,
    OFFLOADED,
    good_build,
    judge,
)
from tests.planted_context import context_rows
from tests.planted_evaluations import evaluated_build, evaluation_rows, pipeline_rows, refused
from tests.planted_experts import expert_rows
from tests.planted_integers import shortened
from tests.planted_norms import wrong_norms
from tests.planted_pipelines import good, refusals
from tests.planted_rows import Row, table_text
from tests.planted_sequences import sequence_rows

PLACEMENT = ("drop a collective", "double a collective", "retype a collective", "re-group a collective",
             "swap a shard's dim", "take a partial sum as whole")  # fmt: skip


PLANTED = Counter[str]()
"""All mutants of each class that there are, with those that are not judged here."""


@cache
def rows() -> dict[str, Row]:
    """The whole table, made once."""
    found = table(share=24, share_of_many=13, known=PLANTED)
    print(f"\n{table_text(found)}")
    return found


@pytest.mark.parametrize("name", BUILDS)
def test_no_good_build_is_refused(name: str) -> None:
    build = good_build(name)
    verdict = judge(build, build.case.programs)
    assert not verdict.check, verdict.reason


def test_every_mutant_is_refused() -> None:
    accepted = [f"{kind}: {what}" for kind, row in rows().items() for what in row.accepted]
    assert not accepted, accepted


def test_values_in_the_wrong_place_are_refused_before_anything_runs() -> None:
    build = good_build(OFFLOADED)
    assert not judge(build, build.case.programs).check
    found = place_rows()
    assert len(found) == 5 and all(row.mutants > 5 and not row.accepted for row in found.values()), found
    assert all(row.first["types"] + row.first["parse"] == row.mutants for row in found.values())


def test_wrong_sums_in_the_last_backward_are_refused_before_anything_runs() -> None:
    for name in EARLY_BUILDS:
        build = good_build(name, early=True)
        assert not (verdict := judge(build, build.case.programs)).check, verdict.reason
    found = early_rows(share=3)
    assert len(found) == 7 and all(row.mutants > 5 and not row.accepted for row in found.values()), found
    assert not any(row.first["numbers"] for row in found.values())


def test_experts_that_are_not_the_model_s_are_refused() -> None:
    for name in (*EXPERT_BUILDS, AUXILIARY_BUILD):
        assert not (verdict := judge(build := good_build(name), build.case.programs)).check, verdict.reason
    found = expert_rows(share=30)
    assert len(found) == 7 and not any(row.accepted for row in found.values()), found
    seen = {kind for kind, row in found.items() if not row.first["numbers"]}
    assert seen >= {kind for kind in found if kind.startswith(("be off", "sum", "split"))}  # before anything runs


def test_sequences_split_otherwise_are_refused() -> None:
    found = sequence_rows()
    assert len(found) == 4 and all(row.mutants >= 6 and not row.accepted for row in found.values()), found
    seen = {kind for kind, row in found.items() if not row.first["numbers"]}
    assert found.keys() - seen == {"take the next rank's part"}  # with types that are right


def test_sequences_whose_parts_meet_wrongly_are_refused() -> None:
    for name in CONTEXT_BUILDS:
        assert not (verdict := judge(build := good_build(name, early=True), build.case.programs)).check, verdict.reason
    found = context_rows(share=5)
    assert len(found) == 6 and all(row.mutants > 1 and not row.accepted for row in found.values()), found
    seen = {kind for kind, row in found.items() if not row.first["numbers"]}
    assert seen >= {kind for kind in found if kind.startswith(("take parts", "leave", "send keys around"))}


def test_evaluations_of_another_model_are_refused_almost_all_before_anything_runs() -> None:
    """The accepted ones have the right numbers: without a gradient, a maximum may be made twice, and padding that meets
    the zeros of a weight may be any finite number."""
    names = (MOODY_BUILD, "stack tp=2, two microbatches", "padded tp=4")
    for name in names:
        assert not (verdict := judge(build := evaluated_build(name), build.case.programs)).check, verdict.reason
    mutants, seen = refused(evaluation_rows(names, share=8))
    assert mutants > 75 and seen >= 0.95 * mutants, f"{seen} of {mutants}"


def test_evaluations_of_pipelines_are_refused_by_the_texts_alone() -> None:
    name = "two stages"
    assert refusals(good(name, evaluates=True)) == []
    mutants, seen = refused(pipeline_rows([name], share=2))
    assert mutants == seen > 40


@pytest.mark.parametrize("kind", [*PLACEMENT, "split a tied weight's gradient", "leave out a gradient"])
def test_what_is_wrong_with_a_placement_is_seen_before_anything_runs(kind: str) -> None:
    row = rows()[kind]
    assert row.mutants > 0
    assert row.first["numbers"] == 0
    assert row.first["communication"] == 0


def test_what_backward_makes_again_otherwise_than_forward_is_refused_by_its_text() -> None:
    row = rows()["make something else again"]
    assert row.mutants >= 20
    assert row.first["numbers"] == 0
    assert rows()["replay another stream"].mutants >= 4
    assert rows()["replay another stream"].first["numbers"] == 0


def test_types_alone_refuse_almost_every_wrong_collective() -> None:
    mutants, by_types = type_share(rows())
    assert by_types >= 0.95 * mutants, f"{by_types} of {mutants}"


def test_the_schedule_is_refused_by_the_communication_contract() -> None:
    row = rows()["change the schedule"]
    assert row.first["communication"] == row.mutants > 0


def test_padding_that_gets_through_is_refused_by_proof() -> None:
    row = rows()["let padding through"]
    assert row.first["padding"] >= 12
    assert row.first["padding"] + row.first["types"] == row.mutants


def test_a_wrong_norm_is_refused_by_proof_and_by_its_number() -> None:
    assert rows()["count a gradient wrongly in the norm"].first["numbers"] == 0
    build = good_build("stack tp=2, two microbatches")  # without clipping
    twice = next(mutant for mutant in wrong_norms(build) if "twice" in mutant.what)
    agreement = compare(replace(build.case, programs=twice.programs), steps=1)
    assert agreement.norm > 1e-3
    assert agreement.largest == agreement.norm
    assert compare(build.case, steps=1).norm < 1e-14


def test_a_whole_number_that_is_cut_off_is_refused_by_proof() -> None:
    row = rows()["cut a whole number off"]
    assert row.first["types"] == row.mutants > 40


def test_a_late_step_draws_its_own_random_numbers() -> None:
    build = good_build("gpt dp=2, tp=2, two microbatches")
    early = next(mutant for mutant in shortened(build) if "rng by aten.remainder" in mutant.what)
    case = replace(build.case, programs=early.programs)
    assert compare(case, steps=1).largest < TOLERANCE
    assert compare(case, steps=2).loss > 1e-3


def test_there_are_enough_mutants_of_every_class() -> None:
    assert sum(row.mutants for row in rows().values()) >= 1300
    assert min(row.mutants for row in rows().values()) >= 4
    assert sum(PLANTED.values()) >= 13_000
    assert rows()["give a gradient to another"].first["numbers"] > 0  # what nothing but numbers sees is still tried
