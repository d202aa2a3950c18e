"""Evaluation: programs of the model in ``eval()``, with the numbers of the plain module, and refused where they are
wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import parc
from parc.checking.checks import case_of, static_faults
from parc.checking.reports import report_of
from parc.cli import main
from parc.compiler.build.directory import read_build, write_build
from parc.compiling.compiled import Compiled
from parc.compiling.plan_data import check_sample
from parc.grammar.codes_build import READ_IN_EVAL
from parc.grammar.diagnostics import PlanError
from parc.runtime.compare.simulate import Simulation
from parc.runtime.step import Stepper
from tests.checked_plans import checked, compiled
from tests.evaluated_models import Moody
from tests.evaluated_plans import PLAN, PLANS, batch

ROOT = Path(__file__).parent.parent


def made(name: str) -> Compiled:
    return compiled(PLAN + PLANS[name], ROOT)


@pytest.mark.parametrize("name", PLANS)
def test_the_loss_is_that_of_the_plain_module_in_eval(name: str) -> None:
    """All ranks are simulated in float64, and no type rounds there."""
    evaluation = made(name).evaluated
    assert evaluation is not None
    case, draw = case_of(evaluation), torch.Generator().manual_seed(1)
    running = {"norm.running_mean": torch.randn(16, generator=draw), "norm.running_var": torch.rand(16, generator=draw)}
    simulation = Simulation(replace(case, buffers={**case.buffers, **running}))
    plain = Moody()
    plain.load_state_dict({**case.parameters, **running}, strict=False)
    plain.double().eval()
    whole = batch(3)
    expected = F.cross_entropy(plain(whole["x"]), whole["targets"])
    parts = [dict(zip(whole, part, strict=True))
             for part in zip(*(value.chunk(case.microbatches) for value in whole.values()), strict=True)]  # fmt: skip
    for result in simulation.run(Stepper.loss, parts, 0):
        torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["dp, pp", "loss scale"])
def test_programs_of_an_evaluation_are_forward_alone_and_checked(name: str) -> None:
    step = made(name)
    checked(step)
    evaluation = step.build.evaluation
    assert evaluation is not None
    kinds = {action.kind for role in evaluation.roles.values() for action in role.actions}
    more = {"SEND_F", "RECV_F"} if "pp" in name else {"UNSHARD"}
    assert kinds == {"COUNT", "SCALE", "F", "LOSS"} | more
    assert {program.action for program in evaluation.files()} == kinds - {"SEND_F", "RECV_F"}
    ops = {line.op for program in evaluation.files() for function in program.functions for line in function.lines}
    assert not ops & {"parc.dropout_mask.default", "parc.stream_key.default"}
    for program in evaluation.files():
        if program.action == "F":
            assert not program.main.returned("saved") and not program.main.returned("buffer")


def test_a_build_whose_evaluation_is_not_its_plan_s_is_refused(tmp_path: Path) -> None:
    step = made("dp")
    write_build(step.to_write(report_of(step)), tmp_path / "build")
    build = read_build(tmp_path / "build")
    assert build.evaluation is not None and not static_faults(build.evaluation)
    assert main(["verify", str(tmp_path / "build"), "--static"]) == 0
    texts = {name: text for name, text in build.texts.items() if not name.startswith("evaluation/")}
    manifest = {name: fact for name, fact in build.manifest.items() if name != "evaluation"}
    write_build(replace(build, texts=texts, manifest=manifest, evaluation=None), tmp_path / "build")
    assert main(["verify", str(tmp_path / "build"), "--static"]) == 5


def test_a_build_without_an_eval_line_says_what_is_missing(tmp_path: Path) -> None:
    step = compiled(PLAN.replace("eval\n", ""), ROOT)
    write_build(step.to_write(report_of(step)), tmp_path / "build")
    with parc.load(tmp_path / "build") as session, pytest.raises(parc.RunError) as error:
        session.evaluate(batch(0))
    assert str(error.value).startswith("[P0416] ") and "add a line `eval` to the plan" in str(error.value)


DATED = """
import torch


def sample(number):
    draw = torch.Generator().manual_seed(number)
    return {"x": torch.randn(8, generator=draw), "targets": torch.tensor(number % 8)}
"""


def test_a_run_evaluates_as_often_as_the_plan_or_the_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "dated.py").write_text(DATED)
    text = PLAN.replace("eval\n", 'data "./dated.py:sample"\neval every 2 data synthetic batches 3\n')
    step = compiled(text, tmp_path)
    write_build(step.to_write(report_of(step)), tmp_path / "build")
    metrics = tmp_path / "metrics.jsonl"
    run_it = ["run", str(tmp_path / "build"), "--metrics", str(metrics), "--device", "cpu"]

    def figures() -> dict[int, float]:
        rows = map(json.loads, metrics.read_text().splitlines()[1:])
        return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}

    assert main(run_it) == 0
    found = figures()
    assert found.keys() == {2}
    with parc.load(tmp_path / "build") as session:
        session.step()
        session.step()
        assert session.evaluation.mean(session.state) == pytest.approx(found[2], rel=1e-6)
        assert session.evaluate() == session.evaluation.loss(None, None, session.state, 2)
    assert main([*run_it, "--eval-every", "1"]) == 0
    assert figures().keys() == {1, 2, 3} and figures()[2] == found[2]


def test_an_evaluation_whose_sample_fails_ends_a_run_that_has_saved_its_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = '    if number == 40:\n        raise LookupError("the shelf is empty")\n    draw ='
    (tmp_path / "dated.py").write_text(DATED.replace("    draw =", fails))
    text = PLAN.replace("eval\n", 'data synthetic\neval every 2 data "./dated.py:sample" batches 3\n')
    step = compiled(text, tmp_path)
    write_build(step.to_write(report_of(step)), tmp_path / "build")
    saved = tmp_path / "saved"
    assert main(["run", str(tmp_path / "build"), "--save", str(saved), "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "LookupError: the shelf is empty" in said and f"the state after step 2 was saved to {saved}" in said
    with parc.load(tmp_path / "build") as session:
        session.restore(saved)
        assert session.step_number == 2


def test_a_run_of_a_build_without_an_eval_line_refuses_to_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = compiled(PLAN.replace("eval\n", "data synthetic\n"), ROOT)
    write_build(step.to_write(report_of(step)), tmp_path / "build")
    assert main(["run", str(tmp_path / "build"), "--eval-every", "1", "--device", "cpu"]) != 0
    assert "its plan has no `eval` line" in capsys.readouterr().err


ONLY_EVAL = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) if self.training else self.b(x)
"""


def test_a_parameter_that_only_eval_reads_is_refused_at_the_line(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(ONLY_EVAL)
    with pytest.raises(PlanError) as error:
        compiled(PLAN.replace("tests.evaluated_models:Moody", "./net.py:Net"), tmp_path)
    (fault,) = error.value.diagnostics
    assert fault.code is READ_IN_EVAL and fault.primary is not None and fault.primary.span.text == "eval"
    assert fault.message == "the model in `eval()` reads `b.bias` and `b.weight`, which it does not read in training"


def test_samples_and_batches_of_other_sizes_are_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "dated.py").write_text(DATED.replace("torch.randn(8,", "torch.randn(9,"))
    text = PLAN.replace("eval\n", 'data synthetic\neval every 2 data "./dated.py:sample"\n')
    step = compiled(text, tmp_path)
    with pytest.raises(PlanError) as fault:
        check_sample(step.plan, tmp_path, step.build)
    (found,) = fault.value.diagnostics
    assert found.code.name == "P0303" and "[9]" in found.message and found.primary is not None
    assert found.primary.span.text == 'eval every 2 data "./dated.py:sample"'
    write_build(step.to_write(report_of(step)), tmp_path / "build")
    with parc.load(tmp_path / "build") as session:
        with pytest.raises(parc.RunError) as error:
            session.evaluation.mean(session.state)
        assert error.value.code.name == "P0303" and "[9]" in error.value.message
        assert any('eval every 2 data "./dated.py:sample"' in note for note in error.value.notes)
        for given in (batch(0, 17), {**batch(0), "x": torch.zeros(16, 9)}):
            with pytest.raises(parc.RunError) as error:
                session.evaluate(given)
            assert error.value.code.name == "P0303"


def test_show_prints_programs_of_the_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = made("dp")
    write_build(step.to_write(report_of(step)), tmp_path / "build")
    assert main(["show", str(tmp_path / "build"), "--evaluation", "--action", "F"]) == 0
    assert "frozen first.weight" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "build"), "--evaluation", "--action", "B"]) == 2
