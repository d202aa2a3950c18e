"""Planted bugs of capture: the captured graph is changed before everything else, so its programs, its tests and the
graph agree, and the comparison with the module alone can notice it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from parc.checking.checks import case_of, one_thread
from parc.checking.module_numbers import compare_module
from parc.checking.probes import ProbeBatches
from parc.compiler.layout.placement import TensorType
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Line, Program, Ref, Value
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from parc.runtime.compare.model_run import Case
from tests.hidden_models import WAYS
from tests.planted_edits import Programs
from tests.planted_mutators import Changes, Mutant, Site, sites

GRAPH = "model"
_PLAN = """
model "./hidden_models.py:Hidden" (way="{way}")
input tokens int64 [B, S]
input wanted float32 [B, S, 4]
sizes B=4, S=4
loss "./hidden_models.py:square"(output, wanted)
optimizer adamw lr 1e-3
"""
CAPTURES = tuple(f"zeros of {way}" for way in WAYS)


@dataclass(frozen=True)
class Capture:
    """A compiled model, its case, and the batches on which its captured graph is compared with it."""

    compiled: Compiled
    case: Case
    batches: ProbeBatches

    @property
    def programs(self) -> dict[str, Program]:
        return {GRAPH: self.case.reference}


@cache
def captured(name: str) -> Capture:
    """Compile a model of ``CAPTURES``."""
    plan = read_plan(Source("plan.parc", _PLAN.format(way=name.split()[-1])))
    compiled = compile_plan(plan, Path(__file__).parent)
    case = case_of(compiled)
    return Capture(compiled, case, ProbeBatches(compiled, case))


def _share(site: Site) -> Changes:
    """Multiply a floating result by 1.0005."""
    if site.result.type.dtype.is_floating_point:
        yield "a share of", partial(site.then, "aten.mul.Tensor", Ref(site.result.name), 1.0005)


def _other_numbers(site: Site) -> Changes:
    """Put 0 in the place of each small number, as an eps."""
    for place, item in enumerate(site.line.args):
        if isinstance(item, float) and 0 < item < 1e-2:
            yield f"0 for {item} in", partial(site.put, place, 0.0)


def _other_function(site: Site) -> Changes:
    """Take another function, which is alike for many numbers."""
    if site.line.op == "aten.gelu.default":
        yield "relu for", lambda: site.replaced(replace(site.line, op="aten.relu.default", args=site.line.args[:1]))


def _without_row(site: Site) -> Changes:
    """Drop the first and the last row of a table."""
    if site.line.op != "aten.embedding.default":
        return
    table, index = site.line.args[:2]
    known = site.function.values()
    for row in (0, known[table.name].type.shape[0] - 1):
        yield f"row {row} dropped in", partial(_masked, site, index, known[index.name].type, row)


def _masked(site: Site, index: Ref, type_: TensorType, row: int) -> Programs:
    is_other = Value("is_other", replace(type_, dtype=torch.bool))
    mask = Value("mask", replace(is_other.type, shape=(*type_.shape, 1)))
    kept = Value("kept", site.result.type)
    origin = site.line.origin
    lines = (
        Line((is_other,), "aten.ne.Scalar", (index, row), (), origin),
        Line((mask,), "aten.unsqueeze.default", (Ref("is_other"), -1), (), origin),
        Line((kept,), "aten.mul.Tensor", (Ref(site.result.name), Ref("mask")), (), origin),
    )
    return site.replaced(site.line, *lines, read="kept")


_CHANGES = {
    "add a share": _share, "change a small number": _other_numbers, "take another function": _other_function,
    "drop a row": _without_row,
}  # fmt: skip


def in_captured(build: Any) -> Iterator[Mutant]:
    """Yield mutants of a captured graph."""
    for kind, changes in _CHANGES.items():
        for site in sites(build.programs, lambda line: bool(line.made)):
            if site.function.name == "scale":
                continue  # SCALE is proved against the plan's divisions, which are what the module is compared by
            for what, make in changes(site):
                yield Mutant(kind, site.line.op, site.named(what), make)


def by_module(build: Any, mutant: Mutant) -> tuple[str, bool]:
    """Judge by the comparison with the module."""
    with one_thread():
        agreement = compare_module(
            build.compiled, replace(build.case, reference=mutant.programs[GRAPH]), build.batches, 0
        )
    return "" if agreement.holds else "numbers", False
