"""Planted bugs: good builds changed in one place, as a faulty pass would, and the check that refuses each.

``python -m tests.planted_bugs`` prints the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from parc.compiler.verify.rounding import check_precision
from tests.planted_awaits import await_rows
from tests.planted_builds import BUILDS, COMPRESSED_BUILDS, OFFLOADED, GoodBuild, good_build, judge
from tests.planted_compressed import compressed_rows
from tests.planted_context import context_rows
from tests.planted_conversions import CONVERSIONS
from tests.planted_early import EARLY
from tests.planted_evaluations import evaluation_rows, pipeline_rows
from tests.planted_experts import expert_rows
from tests.planted_integers import bounded, shortened
from tests.planted_large import refusals
from tests.planted_norms import wrong_norms
from tests.planted_places import PLACES
from tests.planted_remade import wrong_keys, wrong_lines
from tests.planted_rows import Row, table_text
from tests.planted_scales import SCALES
from tests.planted_sequences import sequence_rows
from tests.planted_sites import Mutant
from tests.planted_sizes import size_refusals
from tests.planted_slips import SLIPS, wrong_gradients, wrong_padding
from tests.planted_stored import STORED, renamed
from tests.planted_tables import HOW, early_roundings, tables_build

COLLECTIVE_CLASSES = (
    "drop a collective", "double a collective", "retype a collective", "re-group a collective", "swap a shard's dim",
    "un-scale the loss", "split a tied weight's gradient",
)  # fmt: skip


_SIMILAR = (wrong_norms, shortened, bounded, wrong_lines)
_MANY = (wrong_gradients, renamed, *_SIMILAR)
_FIRST, _FIRST_OF_ALL = 3, 12
_FEW = (wrong_padding,)  # one build has them
EARLY_BUILDS = (BUILDS[0], BUILDS[-2], COMPRESSED_BUILDS[1])
"""The builds in which sums that backward starts are wrong."""


def plant(
    build: GoodBuild, share: int = 1, share_of_many: int = 1, known: Counter[str] | None = None
) -> Iterator[Mutant]:
    """Yield mutants of a build: the first of each class, and of further ones one of ``share``. ``known`` counts those
    of all builds before: of a class that few builds have, more are the first, and of classes with many similar mutants
    one of ``share_of_many`` is yielded, in whichever build."""
    known = Counter() if known is None else known
    for make in (*CONVERSIONS, *SLIPS, *STORED, *SCALES, wrong_keys, *_SIMILAR):
        seen: Counter[str] = Counter()
        for mutant in make(build):
            here, everywhere = seen[mutant.kind], known[mutant.kind]
            first = make in _FEW or (make not in _MANY and (here < _FIRST or everywhere < _FIRST_OF_ALL))
            if first or (everywhere % share_of_many if make in _MANY else here % share) == 0:
                yield mutant
            seen[mutant.kind] += 1
            known[mutant.kind] += 1


def table(
    names: Sequence[str] = BUILDS, share: int = 1, share_of_many: int = 1, known: Counter[str] | None = None
) -> dict[str, Row]:
    """Judge all mutants of some builds, or a share of them. ``known`` counts all of each class."""
    rows: dict[str, Row] = {}
    known = Counter() if known is None else known
    for name in names:
        build = good_build(name)
        for mutant in plant(build, share, share_of_many, known):
            verdict = judge(build, mutant.programs, mutant.actions)
            rows.setdefault(mutant.kind, Row()).note(mutant.what, verdict.check, verdict.by_types)
    return rows


def place_rows() -> dict[str, Row]:
    """Judge what is wrong with the places of values, in a build that keeps them away from memory."""
    rows: dict[str, Row] = {}
    build = good_build(OFFLOADED)
    for mutant in (mutant for make in PLACES for mutant in make(build)):
        verdict = judge(build, mutant.programs)
        rows.setdefault(mutant.kind, Row()).note(mutant.what, verdict.check, verdict.by_types)
    return rows


def early_rows(share: int = 1) -> dict[str, Row]:
    """Judge wrong sums of gradients in the last microbatch's backward, or one of ``share`` of each class."""
    rows: dict[str, Row] = {}
    for name in EARLY_BUILDS:
        build = good_build(name, early=True)
        seen: Counter[str] = Counter()
        for mutant in (mutant for make in EARLY for mutant in make(build)):
            if seen[mutant.kind] % share == 0:
                verdict = judge(build, mutant.programs)
                rows.setdefault(mutant.kind, Row()).note(mutant.what, verdict.check, verdict.by_types)
            seen[mutant.kind] += 1
    return rows


def rounding_rows(ways: Sequence[str] = HOW) -> dict[str, Row]:
    """Judge roundings of tables in narrow builds, which float64 does not see."""
    row = Row()
    for how in ways:
        made = tables_build(how)
        for mutant in early_roundings(made):
            faults = check_precision(mutant.programs, made.build.reference, made.build.rounding)
            row.note(mutant.what, faults[0].check if faults else "", bool(faults))
    return {mutant.kind: row}


def share_text(rows: Mapping[str, Row]) -> str:
    """Return a line about the mutants that types should refuse alone."""
    mutants, by_types = type_share(rows)
    return f"types refuse {by_types} of {mutants} mutants of {', '.join(COLLECTIVE_CLASSES)}: {by_types / mutants:.1%}"


def type_share(rows: Mapping[str, Row]) -> tuple[int, int]:
    """Count the mutants of the collective classes, and those of them that types refuse, whatever else does."""
    counted = [rows[kind] for kind in COLLECTIVE_CLASSES]
    return sum(row.mutants for row in counted), sum(row.by_types for row in counted)


if __name__ == "__main__":
    found = table() | place_rows() | rounding_rows()
    print(f"{table_text(found)}\n{share_text(found)}")
    print(table_text(compressed_rows(), "compressed gradients, by texts alone"))
    print(table_text(compressed_rows(early=True), "the same in backward, by texts alone"))
    print(table_text(early_rows(), "sums that backward starts"))
    print(table_text(expert_rows(), "experts over ranks"))
    print(table_text(sequence_rows(), "split sequences"))
    print(table_text(context_rows(), "sequences over ranks"))
    print(table_text(evaluation_rows(), "evaluations"))
    print(table_text(pipeline_rows(), "evaluations of pipelines, by texts alone"))
    print(table_text(refusals(60), "large builds, by texts alone"))
    print(table_text(size_refusals(60), "ranges of sizes, by texts alone"))
    print(table_text(await_rows(), "values in flight"))
