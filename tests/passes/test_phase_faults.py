"""Planted bugs of backwards in two phases: the checks of texts or the certificate refuse each, and good builds pass."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from tests.draws import wide
from tests.planted_bugs import sampled
from tests.planted_mutators import Mutant, mutants
from tests.planted_phases import by_certificate, by_checks, by_numbers, in_phases, of_phases
from tests.planted_pipelines import PHASES, good

NONE = "nothing is planted"


QUICK = ("zb-h1, two stages", "1f1b, three stages", "async, blocks")


@pytest.mark.parametrize("name", [*QUICK, *(wide(name) for name in PHASES if name not in QUICK)])
def test_good_builds_with_split_backwards_are_accepted(name: str) -> None:
    build = good(name)
    mutant = Mutant(NONE, NONE, NONE, partial(dict, build.programs))
    assert not by_checks(build, mutant) and not by_certificate(build, mutant) and not by_numbers(build, mutant)


@pytest.mark.parametrize(
    ("name", "share"),
    [(QUICK[0], 9), (QUICK[1], 18), (QUICK[2], 9), *(wide(name, 2) for name in PHASES)],
)
def test_planted_bugs_of_two_phases_are_refused(name: str, share: int) -> None:
    build, refused = good(name), Counter[str]()
    for mutant in sampled(in_phases(build), 1, fine=False)[::share]:
        if mutant.timelines is None and mutant.programs == build.programs:
            continue
        check = by_checks(build, mutant) or by_certificate(build, mutant)
        assert check or not by_numbers(build, mutant), mutant.what
        refused[check] += 1
    assert refused.total() > 10 and not refused[""], refused


@pytest.mark.parametrize(("name", "most"), [("1f1b, three stages", 1), *(wide(name, 4) for name in PHASES)])
def test_bugs_of_phases_are_refused_by_the_checks_of_texts(name: str, most: int) -> None:
    """A phase is missing or another's, or its last function is; what scales a number is left to the certificate."""
    build = good(name)
    for mutant in sampled(of_phases(build), most, fine=False):
        assert by_checks(build, mutant) or " scales " in mutant.what, mutant.what


def test_whichever_work_a_stage_does_messages_come_in_one_order() -> None:
    build = good("1f1b, three stages")
    planted = [mutant for mutant in mutants(build.programs, lambda *_: False) if "change places" in mutant.what]
    assert {mutant.what.split()[0] for mutant in planted} >= {"stage1.B", "stage1.I", "stage2.I"}
    for mutant in planted:
        assert by_checks(build, mutant) and by_certificate(build, mutant), mutant.what
