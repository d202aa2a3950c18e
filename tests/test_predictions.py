"""Predictions: what a model returns in ``eval()``, with the numbers of the plain module, whole and in parts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import parc
from parc.checking.checks import case_of, static_faults
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.layout.placement import Split
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Line, Ref
from parc.compiler.verify.padding import mixed_samples, of_returned, sample_dims, tail_fault
from parc.runtime.compare.agreement import joined, stacked
from parc.runtime.compare.simulate import Simulation
from parc.runtime.ranks.work import Batch, RankState, StepResult
from parc.runtime.session.evaluation import returned_types, without_padding
from parc.runtime.step import Stepper
from tests.checked_plans import checked, compiled
from tests.draws import all_but
from tests.planted_builds import GoodBuild, judge
from tests.predicting_models import Tagger
from tests.runtime.ranks import run_ranks

ROOT = Path(__file__).parent.parent
PLAN = """
model "tests.predicting_models:Tagger"
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=8, S=6
loss cross_entropy(output.logits, targets)
optimizer adamw lr 1e-2
eval
"""
DATA = "shard tokens [B/dp, S]\nshard targets [B/dp, S]\n"
VOCAB = "column head over tp pad\nvocab table over tp pad\n"
PLANS = {
    "dp, microbatches": f"mesh dp=2\n{DATA}schedule microbatches 2\n",
    "tp": f"mesh tp=2\n{VOCAB}",
    "dp, tp": f"mesh dp=2, tp=2\n{DATA}{VOCAB}",
    "pp": "mesh pp=2\nstage before head over pp\nschedule 1f1b microbatches 4\n",
    "sequence": "mesh sp=2\nshard tokens [B, S/sp]\nshard targets [B, S/sp]\n",
}
RETURNED = ["logits", "hidden.0", "hidden.1", "steps", "mean"]
"""The names of what the programs return: ``aside`` needs weights that no step has."""


def batch(samples: int = 8) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(samples)
    return {name: torch.randint(11, (samples, 6), generator=draw) for name in ("tokens", "targets")}


def plain_output(module: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what the plain module returns in ``eval()``, by the names of predictions."""
    with torch.no_grad():
        output = module.eval()(tokens)
    first, second = output["hidden"]
    return {**output, "hidden.0": first, "hidden.1": second}


@pytest.mark.parametrize("name", all_but(["tp"], PLANS))
def test_what_the_model_returns_is_what_the_plain_module_returns_in_eval(name: str) -> None:
    """All ranks are simulated in float64."""
    evaluation = compiled(PLAN + PLANS[name], ROOT).evaluated
    assert evaluation is not None and not static_faults(evaluation.build)
    case, simulation = case_of(evaluation), Simulation(case_of(evaluation))
    plain = Tagger()
    plain.load_state_dict(case.parameters, strict=False)
    whole = batch()
    expected = plain_output(plain.double(), whole["tokens"])
    parts = [dict(zip(whole, part, strict=True))
             for part in zip(*(value.chunk(case.microbatches) for value in whole.values()), strict=True)]  # fmt: skip
    types = returned_types(simulation.roles)
    assert {*types} == {*RETURNED}
    if "tp" in name:
        assert types["logits"][0].placement["tp"] == Split(2)

    def predict(
        stepper: Stepper, states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int
    ) -> list[StepResult]:
        return stepper.evaluate(stepper.begin(states, batches, step, keep=False), step, returns=True)

    returned = [stacked(result.returned) for result in simulation.run(predict, parts, 0)]
    outputs = joined(returned, {name: type_ for name, (type_, _) in types.items()}, case.mesh)
    for one, dim in (("logits", 0), ("hidden.0", 0), ("hidden.1", 1)):
        pieces = [without_padding(piece, (*piece.shape[:2], *expected[one].shape[2:])) for piece in outputs[one]]
        torch.testing.assert_close(torch.cat(pieces, dim), expected[one], rtol=1e-10, atol=1e-12)
    assert torch.equal(outputs["steps"][0], expected["steps"])


def test_dims_of_samples_are_found_from_the_captured_graph() -> None:
    evaluation = compiled(PLAN + PLANS["dp, microbatches"], ROOT).evaluated
    assert evaluation is not None
    reference = evaluation.build.reference
    dims = sample_dims(reference, ())
    assert dims == {"logits": 0, "hidden.0": 0, "hidden.1": 1, "steps": None}
    assert not mixed_samples(reference, dims, ())
    assert [*of_returned(reference.main).bound("input")] == ["tokens"]


def test_wrong_tensors_are_refused() -> None:
    evaluation = compiled(PLAN + PLANS["dp, tp"], ROOT).evaluated
    assert evaluation is not None
    good = GoodBuild("evaluation", case_of(evaluation), evaluation.build)
    programs = good.case.programs
    main = programs["F"].main
    assert not judge(good, programs).check

    def judged(returns: tuple[tuple[Binding, str], ...], more: tuple[Line, ...] = ()) -> str:
        changed = replace(
            programs["F"], functions=(*programs["F"].blocks, replace(main, lines=(*main.lines, *more), returns=returns))
        )
        return judge(good, {**programs, "F": changed}).check

    rows = dict(main.returns)
    logits, first, second = (Binding("output", name) for name in ("logits", "hidden.0", "hidden.1"))
    assert judged(tuple(row for row in main.returns if row[0] != first)) == "types"
    assert judged((*main.returns, (Binding("output", "more"), rows[first]))) == "certificate"
    assert judged(tuple({**rows, first: rows[logits]}.items()))
    longer = replace(main.values()[rows[second]], name="more")
    doubled = Line((longer,), "aten.add.Tensor", (Ref(rows[second]), Ref(rows[second])))
    assert judged(tuple({**rows, second: "more"}.items()), (doubled,)) == "numbers"


def run(path: str) -> list[Any]:
    """Return predictions of whole, small and local batches, and what this rank holds of one."""
    with parc.load(path) as session:
        alone = {"tokens": batch()["tokens"]}
        dp = session.coordinates["dp"]
        mine = {name: value[[0, 1, 4, 5] if dp == 0 else [2, 3, 6, 7]] for name, value in alone.items()}
        parts = session.predict(alone, split=True)
        loss = session.evaluate(batch())
        return [
            session.predict(batch()), session.predict(alone), session.predict({"tokens": batch()["tokens"][:3]}),
            session.predict(local=mine), session.predict(local={"tokens": mine["tokens"][:1]}),
            {name: (part.tensor, part.shape, part.ranges) for name, part in parts.items()},
            loss == session.evaluate(batch()), [*session.predict()],
        ]  # fmt: skip


def test_a_session_predicts_on_real_ranks_what_the_plain_module_returns(tmp_path: Path) -> None:
    text = PLAN + PLANS["dp, tp"] + "schedule microbatches 2\ndata synthetic\n"
    step = compiled(text, ROOT)
    write_build(step.to_write(report_of(step)), tmp_path / "build")
    plain = parc.reference(tmp_path / "build")
    expected = plain_output(plain.module, batch()["tokens"])
    for rank, (*found, parts, same, names) in enumerate(run_ranks(run, 4, str(tmp_path / "build"))):
        dp, tp = divmod(rank, 2)
        rows = torch.tensor([0, 1, 4, 5] if dp == 0 else [2, 3, 6, 7])
        whole, alone, few, local, least = found
        assert same and [*whole] == names == ["logits", "hidden.0", "hidden.1", "steps"]
        for made, chosen in (
            (whole, slice(None)),
            (alone, slice(None)),
            (few, slice(3)),
            (local, rows),
            (least, rows[:1]),
        ):
            torch.testing.assert_close(made["logits"], expected["logits"][chosen])
            torch.testing.assert_close(made["hidden.0"], expected["hidden.0"][chosen])
            torch.testing.assert_close(made["hidden.1"], expected["hidden.1"][:, chosen])
            torch.testing.assert_close(made["steps"], expected["steps"])
        tensor, shape, ranges = parts["logits"]
        assert shape == (8, 6, 11) and ranges[2] == ((0, 6) if tp == 0 else (6, 11),)
        entries = [torch.cat([torch.arange(*pair) for pair in of_dim]) for of_dim in ranges]
        assert entries[0].tolist() == rows.tolist()
        torch.testing.assert_close(tensor, expected["logits"][entries[0]][:, entries[1]][:, :, entries[2]])


def run_rows(rows: str, loss: str) -> list[Any]:
    """Return predictions of rows, the errors of calls that cannot go on, and what the session does after them."""
    mine = {"tokens": batch()["tokens"][:4]}
    with parc.load(rows) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [session.predict({"tokens": batch()["tokens"]}), session.predict({"tokens": batch(3)["tokens"]}),
                 session.predict(local=mine), session.predict(local={"tokens": mine["tokens"][:3]})]  # fmt: skip
        with pytest.raises(parc.RunError) as apart:
            session.predict(mine, split=True) if session.rank == 0 else session.predict(mine)
        weights = session.predict(batch(), split=True)["weights"].tensor
        before = weights.clone()
        session.step(batch())
    with parc.load(loss) as session:
        with pytest.raises(parc.RunError) as nothing:
            session.predict()
        assert math.isfinite(session.evaluate())
    return [found, apart.value.message, torch.equal(before, weights), nothing.value.code.name]


def test_every_row_of_a_sample_is_predicted_and_a_refused_call_leaves_the_session(tmp_path: Path) -> None:
    """Tokens have rows of their own; the integers are of a type that gloo does not send."""
    scores, text = "cross_entropy(output.logits, targets)", PLAN + PLANS["dp, microbatches"]
    alone = text.replace("input targets int64 [B, S]\n", "").replace("shard targets [B/dp, S]\n", "")
    plans = {
        "rows": text.replace("Tagger", "Rows"),
        "loss": alone.replace("Tagger", "Loss").replace(scores, "output") + "data synthetic\n",
    }
    for name, plan in plans.items():
        step = compiled(plan, ROOT)
        write_build(step.to_write(report_of(step)), tmp_path / name)
    plain = parc.reference(tmp_path / "rows").module.eval()
    tokens = batch()["tokens"]
    for found, apart, kept, code in run_ranks(run_rows, 2, str(tmp_path / "rows"), str(tmp_path / "loss")):
        for made, given in zip(found, (tokens, batch(3)["tokens"], tokens[:4], tokens[:3]), strict=True):
            expected = {name: value.detach() for name, value in plain(given).items()}
            assert [*made] == ["logits", "classes", "known", "weights"]
            for name, value in made.items():
                torch.testing.assert_close(value, expected[name])
        assert "`session.predict(split=True)`" in apart
        assert kept and code == "P0420"


def test_returned_tensors_that_mix_samples_do_not_refuse_a_smaller_batch_of_an_evaluation() -> None:
    step = compiled(PLAN.replace("Tagger", "Rows") + PLANS["dp, microbatches"], ROOT)
    checked(step)  # integers and booleans are compared too
    evaluation = step.evaluated
    assert evaluation is not None
    assert tail_fault(evaluation.build.reference, {"targets": -100}) == ""


def test_what_cannot_be_predicted_is_said(tmp_path: Path) -> None:
    step = compiled(PLAN.replace("Tagger", "Mixing"), ROOT)
    write_build(step.to_write(report_of(step)), tmp_path / "build")
    with parc.load(tmp_path / "build") as session:
        tokens = batch()["tokens"]
        assert session.predict({"tokens": tokens}).keys() == {"logits"}
        refused: list[tuple[dict[str, torch.Tensor], str]] = [
            ({"tokens": tokens[:3]}, "samples meet in"),
            ({}, "needs `tokens`; other inputs may be left out"),
            ({"tokens": tokens, "more": tokens}, "`more`, which is no input"),
            ({"tokens": torch.zeros(9, 6).long()}, "9 samples"),
        ]
        for given, said in refused:
            with pytest.raises(parc.RunError) as error:
                session.predict(given)
            assert said in str(error.value), error.value
