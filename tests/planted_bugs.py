"""Planted bugs: good builds changed in one place, as a faulty pass would, and the check that refuses each.

``python -m tests.planted_bugs`` prints the tables; titles of tables and names of builds as arguments choose some. A row
of ``TABLES`` has builds, the mutators that change them, and the judge that says what notices a mutant. ``EXCEPTIONS``
are the mutants that are no bugs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Function
from parc.compiler.program.roles import SINGLE
from parc.compiler.verify.rounding import check_precision
from tests.planted_awaits import await_rows
from tests.planted_builds import (
    AUXILIARY_BUILD,
    BUILDS,
    COMPRESSED_BUILDS,
    CONTEXT_BUILDS,
    EXPERT_BUILDS,
    MOODY_BUILD,
    OFFLOADED,
    Row,
    compiled_plan,
    evaluated_build,
    good_build,
    judge,
    step_of,
    table_text,
)
from tests.planted_captures import CAPTURES, by_module, captured, in_captured
from tests.planted_edits import Programs
from tests.planted_large import PLANS as LARGE_PLANS
from tests.planted_large import in_large, large_build
from tests.planted_mutators import Mutant, mutants, rows
from tests.planted_numbers import in_graph
from tests.planted_phases import by_certificate, by_checks, in_phases
from tests.planted_pipelines import PHASES, PIPELINES, good, in_pipeline, refusals
from tests.planted_schedules import wrong_at
from tests.planted_sizes import size_refusals
from tests.planted_special import roundings, specials
from tests.planted_tables import HOW, early_roundings, tables_build

MOST = 2
"""The mutants of each stratum that are judged: of one build, class, program and operator."""

EXCEPTIONS: Mapping[str, str] = {
    r"parc\.lookup\.default.* -1\)$": "which index is padding counts in backward alone",
    r" -2 at 3 of B .*parc\.lookup_backward": "any index below 0 says that none is padding",
    r": (\w+_)?(add)?mm for view_\d in F part": "it is the same value, seen in its own shape",
    r"(expand|grad) for mul_\d in B part\w*: neg =": "of an ignored target nothing is picked anyway",
    r"auxiliary loss: F topk_1 by \[\('aten\.flip": "the auxiliary loss counts the chosen experts in any order",
    r" F full\w* by \[\('aten\.mul\.Scalar'": "it is full of zeros",
    r"window, .*parc\.ring_attention\(.*, True, None, 0\.0\) for": "the mask of a window is causal too",
    r"exchange lines: line: .*all operands.* aten\.select_backward": "two summands are exchanged",
    r"run again: line: .* aten\.mul\.Tensor\(.*Ref\(name='ne'\)": "a mask of zeros and ones may be applied twice",
    r"swap operands: line: .* aten\._softmax_backward_data": "gradients of normalized weights are orthogonal to these",
    r"run again: collective: .* on the result of F .*parc\.row_max": "the largest of one number is itself",
    r"(leave out|run again): line: .* SCALE scale: \w+ = aten\.div\.Tensor\(Ref\(.*\), 1\)$": "it divides by 1",
    r"have a row otherwise: .* B backward parameters: parameter [\w.]*norm\d\.bias and parameter [\w.]*norm\d\.bias are"
    r" exchanged$": "gradients of a norm read no bias",
    r"swap operands: call: routers, means: Ref\(name='\w+_div'\) and Ref\(name='\w+_div'\)": "both are summands",
    r"swap operands: call: .*Ref\(name='\w*dropout_mask'\) and Ref\(name='sum'\) in": "both are factors",
    r"^evaluations: exchange results: line: .* F .*aten\.native_layer_norm": "an evaluation reads neither",
    r"^evaluations: swap operands: line: .* F part: sub = aten\.sub\.Tensor": "the difference is squared",
    r"^evaluations: change a value on its way: .* F eq by": "it masks a gradient, and an evaluation has none",
    r"^evaluations: .*: padded tp=4: .* F part: fill_pad": "padding meets zeros, so it may be any finite number",
}
"""The mutants that are no bugs, by a pattern of their table, class and description, each with its reason."""
HOLES: Mapping[str, str] = {
    r"read another value: collective: .* F part: row_max": "float64 has room for a softmax by another number's peak",
}
"""The mutants that are bugs and pass, each with what would have to be looked at to refuse it."""


@dataclass(frozen=True)
class Table:
    """Builds by name, what plants bugs in them, and the judge, which returns the check that refuses first, "" if none
    does, and whether the checks of types refuse by themselves."""

    title: str
    names: Sequence[str]
    build: Callable[[str], Any]
    plant: Callable[[Any], Iterator[Mutant]]
    judge: Callable[[Any, Mutant], tuple[str, bool]]

    def rows(self, names: Sequence[str] = (), most: int = MOST, share: int = 1) -> dict[str, Row]:
        """Judge the mutants of some builds, or of all: at most ``most`` of each stratum, and one of ``share`` of
        these."""
        rows: dict[str, Row] = {}
        for name in names or self.names:
            build = self.build(name)
            for mutant in sampled(self.plant(build), most, fine=name in FINE)[::share]:
                programs = mutant.make()
                same = programs == getattr(build, "programs", None)  # types derived anew may be what they were
                if same and mutant.actions is None and mutant.timelines is None:
                    continue
                check, by_types = self.judge(build, replace(mutant, make=partial(dict, programs)))
                what = f"{name}: {mutant.what}"
                if not check and (reason := known(f"{self.title}: {mutant.kind}: {what}")):
                    rows.setdefault(reason, Row()).note(what, "known")
                else:
                    rows.setdefault(mutant.kind, Row()).note(what, check, by_types)
        return dict(sorted(rows.items()))


def known(what: str) -> str:
    """Return why a mutant that all checks accept is no bug, or what misses it; "" if neither is known."""
    rows = {"no bug": EXCEPTIONS, "missed": HOLES}
    reasons_known = (
        f"{title}: {reason}" for title, reasons in rows.items() for pattern, reason in reasons.items()
        if re.search(pattern, what)
    )  # fmt: skip
    return next(reasons_known, "")


def sampled(planted: Iterator[Mutant], most: int, fine: bool) -> list[Mutant]:
    """Return at most ``most`` mutants of each class and place, spread over all. Where they are not ``fine``, all
    operators of a program are one place for classes of which often nothing but numbers tells."""
    strata: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in planted:
        coarse = not fine and mutant.kind.split(":")[0] in NUMERIC and mutant.kind.endswith(("line", "call"))
        place = mutant.place.split()[0] if coarse else mutant.place
        strata.setdefault((mutant.kind, place), []).append(mutant)
    return [mutant for found in strata.values() for mutant in found[:: -(-len(found) // most)]]


def in_build(build: Any) -> Iterator[Mutant]:
    """Yield mutants of a build of one role: of its programs and its schedule."""
    yield from mutants(build.programs)
    yield from specials(build)
    draw, timelines = Random(0), {SINGLE: build.case.actions}
    for at, action in enumerate(build.case.actions):
        for what, changed in wrong_at(timelines, SINGLE, at, draw):
            make: Callable[[], Programs] = partial(dict, build.programs)
            yield Mutant("change the schedule", f"{what} {action.kind}", f"{what} {action}", make, changed[SINGLE])


def in_evaluation(build: Any) -> Iterator[Mutant]:
    """Yield mutants of an evaluation, and programs that train: those of its step, and parameters that are trained."""
    yield from in_build(build)
    programs = build.programs
    for action, program in step_of(build.name).items():
        if action in programs and program.text() != programs[action].text():
            changed = {**programs, action: program}
            yield Mutant("evaluate as in training", action, f"{action} of the step", partial(dict, changed))
    for row in rows(programs):
        if row.field == "parameters" and row.key.kind == "frozen":
            trained = replace(row.value, binding=Binding("parameter", row.key.name))
            make = partial(row.put, trained)
            yield Mutant("evaluate as in training", "F trains", f"F trains {row.key}", make)


def in_sums(build: Any) -> Iterator[Mutant]:
    """Yield mutants of the sums of gradients: of the last backward, which starts them, or of REDUCE."""
    last = build.programs["B"].last

    def summing(name: str, function: Function) -> bool:
        return name == "REDUCE" or function is last

    yield from (mutant for mutant in mutants(build.programs, summing))
    yield from roundings(build)


def judged(build: Any, mutant: Mutant) -> tuple[str, bool]:
    """Judge by every check of a build of one role."""
    verdict = judge(build, mutant.programs, mutant.actions)
    return verdict.check, verdict.by_types


def by_texts_of_roles(build: Any, mutant: Mutant) -> tuple[str, bool]:
    reasons = refusals(build, mutant.programs)
    return "types" if reasons else "", bool(reasons)


def by_precision(build: Any, mutant: Mutant) -> tuple[str, bool]:
    """Judge by the check of roundings, which float64 does not see."""
    faults = check_precision(mutant.programs, build.build.reference, build.build.rounding)
    return faults[0].check if faults else "", bool(faults)


STEPS = Table("steps", (*BUILDS, OFFLOADED, *EXPERT_BUILDS, AUXILIARY_BUILD), good_build, in_build, judged)
EARLY = Table(
    "sums that backward starts", (BUILDS[0], *COMPRESSED_BUILDS), partial(good_build, early=True), in_sums, judged
)
SUMS = Table("sums in REDUCE", COMPRESSED_BUILDS, good_build, in_sums, judged)
CONTEXT = Table("sequences over ranks", CONTEXT_BUILDS, partial(good_build, early=True), in_build, judged)
EVALUATIONS = Table("evaluations", (MOODY_BUILD, *BUILDS, *EXPERT_BUILDS, *CONTEXT_BUILDS), evaluated_build,
                    in_evaluation, judged)  # fmt: skip
ROUNDINGS = Table("roundings", HOW, tables_build, early_roundings, by_precision)
STAGES = Table("pipelines, by texts alone", tuple(PIPELINES), good, in_pipeline, by_texts_of_roles)
EVALUATED_STAGES = replace(
    STAGES, title="evaluations of pipelines, by texts alone", build=partial(good, evaluates=True)
)
PHASED = Table("split backwards, by parc's checks", tuple(PHASES), good, in_phases,
               lambda build, mutant: (by_checks(build, mutant), False))  # fmt: skip
CERTIFIED_PHASES = replace(PHASED, title="split backwards, by the certificate",
                           judge=lambda build, mutant: (by_certificate(build, mutant), False))  # fmt: skip
NUMBERS = Table("numbers that data never shows",
                (*BUILDS[:3], BUILDS[4], AUXILIARY_BUILD, MOODY_BUILD, CONTEXT_BUILDS[0]), good_build,
                lambda build: in_graph(compiled_plan(build.name)), judged)  # fmt: skip
LARGE = Table("large builds, by texts alone", tuple(LARGE_PLANS), large_build, in_large,
              lambda build, mutant: (build.faults(mutant.programs)[0], False))  # fmt: skip
CAPTURED = Table("captured graphs, by the module alone", CAPTURES, captured, in_captured, by_module)
TABLES = (CAPTURED, STEPS, EARLY, SUMS, CONTEXT, EVALUATIONS, ROUNDINGS, STAGES, EVALUATED_STAGES, PHASED,
          CERTIFIED_PHASES, NUMBERS, LARGE)  # fmt: skip
FINE = tuple(name for name in BUILDS if name.startswith("stack"))
"""The builds whose numbers are tested quickest: each operator of these is a place of its own."""
NUMERIC = ("read another value", "run again", "take another operator", "change an argument", "swap operands",
           "exchange lines", "exchange results", "leave out")  # fmt: skip

if __name__ == "__main__":
    chosen = set(sys.argv[1:])
    for table in TABLES:
        names = [name for name in table.names if name in chosen]
        if not chosen or table.title in chosen or names:
            print(table_text(table.rows(names), table.title), flush=True)
    if not chosen:
        print(table_text(size_refusals(60), "ranges of sizes, by texts alone"))
        print(table_text(await_rows(), "values in flight"))
