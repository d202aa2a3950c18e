"""The families that parc ships: each plan builds the models it is for, and every check of the build holds."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from parc.advice import warnings_of
from parc.build import build as write
from parc.checks import Checked, case_of, check_build, reread
from parc.compiler.include import families
from parc.compiler.placement import take
from parc.compiler.plan import read_plan
from parc.driver import Compiled, compile_plan
from parc.grammar.diagnostics import render
from parc.grammar.source import Source
from parc.runtime.plain import reference
from parc.runtime.random_batch import random_batch
from parc.runtime.simulate import Simulation

from .family_plans import MODELS, include, plan_text


def build(name: str, dp: int, tp: int) -> tuple[Compiled, Checked]:
    """A model under its family's plan, checked."""
    plan = read_plan(Source("family.parc", plan_text(name)), {"dp": str(dp), "tp": str(tp)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own future
        compiled = compile_plan(plan, Path(__file__).parent.parent)
        checked = check_build(compiled)
    assert not checked.faults, "\n".join(map(str, checked.faults))
    assert not warnings_of(compiled), "\n".join(map(render, warnings_of(compiled)))
    return compiled, checked


def test_every_family_is_tried() -> None:
    assert {include(family) for family in families()} == {
        lines for _, _, lines, _ in MODELS.values() if lines.startswith("include")
    }


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_family_serves_its_models(name: str, dp: int) -> None:
    _, checked = build(name, dp, 2)
    table = [row for row in checked.report["communication"] if row["axis"] == "tp" and row["phase"] == "forward"]
    assert {row["op"] for row in table} <= {"all_reduce", "row_max"}
    assert sum(row["op"] == "all_reduce" for row in table) == MODELS[name][-1]


@pytest.mark.parametrize("name", ["convolutions", "t5"])
def test_a_run_is_the_plain_modules(tmp_path: Path, name: str) -> None:
    """Losses of every step, and running statistics after them, which every rank has."""
    (tmp_path / "family.parc").write_text(plan_text(name))
    defines = {"dp": "2", "tp": "2"}
    write(tmp_path / "family.parc", tmp_path / "build", defines)
    compiled = compile_plan(read_plan(Source("family.parc", plan_text(name)), defines), Path(__file__).parent.parent)
    case = case_of(compiled, reread(compiled.built.programs))
    ranks, plain = Simulation(case), reference(tmp_path / "build")
    for step in range(3):
        batches = random_batch(case.reference, case.microbatches, torch.Generator().manual_seed(step))
        kinds = {line.name: getattr(torch, line.dtype) for line in compiled.plan.inputs}
        whole = {key: torch.cat([batch[key] for batch in batches]).to(kinds[key]) for key in batches[0]}
        losses, _ = ranks.step([{key: value.to(kinds[key]).to(value.dtype) for key, value in batch.items()}
                                for batch in batches], step)  # fmt: skip
        assert float(losses[0]) == pytest.approx(plain.step(whole).loss, rel=1e-5)
    found = dict(plain.module.named_buffers())
    for buffer, pieces, type_ in ranks.buffers():
        for rank, piece in pieces.items():
            part = take(found[buffer], type_.placement, compiled.mesh, compiled.mesh.coordinates(rank))
            assert torch.allclose(piece.double(), part.double(), rtol=1e-4, atol=1e-5), f"{buffer} of rank {rank}"
    plain.close()


def test_batch_statistics_are_those_of_all_data_ranks() -> None:
    """Two sums of each norm over dp forward and two backward, running statistics and all; none over tp."""
    compiled, checked = build("convolutions", 2, 2)
    norms = sum(name.endswith("running_mean") for name in compiled.captured.updates)
    for phase, counts in (("forward", 1), ("backward", 0)):  # the count of targets
        rows = [row for row in checked.report["communication"] if (row["axis"], row["phase"]) == ("dp", phase)]
        assert sum(row["op"] == "all_reduce" for row in rows) == 2 * norms + counts, phase
