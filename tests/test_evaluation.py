"""Evaluation: programs of the model in ``eval()``, with the numbers of the plain module, and refused where they are
wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from parc.grammar.codes import READ_IN_EVAL
from parc.grammar.diagnostics import PlanError
from parc.runtime.compare.simulate import Simulation
from parc.runtime.step import Stepper
from tests.checked_plans import checked, compiled
from tests.draws import all_but
from tests.evaluated_models import Moody
from tests.evaluated_plans import PLAN, PLANS, batch
from tests.moe_families import family

ROOT = Path(__file__).parent.parent


def made(name: str) -> Compiled:
    return compiled(PLAN + PLANS[name], ROOT)


def hold(evaluation: Compiled | None, plain: torch.nn.Module, whole: Mapping[str, torch.Tensor], seed: int = 1) -> None:
    """Check that all ranks have the loss of the plain module in ``eval()``, with its buffers drawn at random where the
    model updates them. They are simulated in float64, and no type rounds there."""
    assert evaluation is not None
    case, draw = case_of(evaluation), torch.Generator().manual_seed(seed)
    moved = {name: torch.rand(buffer.shape, generator=draw) for name, buffer in plain.named_buffers()
             if name in case.buffers and buffer.is_floating_point() and "running" in name}  # fmt: skip
    simulation = Simulation(replace(case, buffers={**case.buffers, **moved}))
    plain.load_state_dict({**case.parameters, **moved}, strict=False)
    with torch.no_grad():
        output = plain.double().eval()(next(iter(whole.values())))
    expected = F.cross_entropy(getattr(output, "logits", output).flatten(0, -2), whole["targets"].flatten())
    parts = [dict(zip(whole, part, strict=True))
             for part in zip(*(value.chunk(case.microbatches) for value in whole.values()), strict=True)]  # fmt: skip
    for result in simulation.run(Stepper.loss, parts, 0):
        torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", all_but(["dp", "tp", "pp"], PLANS))
def test_the_loss_is_that_of_the_plain_module_in_eval(name: str) -> None:
    hold(made(name).evaluated, Moody(), batch(3))


def test_the_loss_is_that_of_the_plain_module_at_every_size_of_a_range() -> None:
    step = compiled((PLAN + PLANS["dp, tp"]).replace("B=16", "B=8..16 by 8"), ROOT)
    for sizes in ({"B": 8}, {"B": 16}):
        hold(step.at(sizes).evaluated, Moody(), batch(3, sizes["B"]))


EXPERTS = """
model "./moe_families.py:family" (name="Mixtral", attention_dropout=0.5)
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=8
loss cross_entropy(output.logits, targets)
optimizer sgd lr 0.1
mesh ep=2
shard input_ids, targets [B/ep, _]
experts model.layers.*.mlp.experts over ep dropless
eval
"""


def test_the_loss_of_a_mixture_of_experts_is_that_of_the_plain_module() -> None:
    step = compiled(EXPERTS, ROOT / "tests")
    draw = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(32, (2, 4, 8), generator=draw)
    targets[::2, 3:] = -100
    plain: Any = family("Mixtral")
    plain.config._experts_implementation = "eager"  # the grouped products of torch are not there in float64
    hold(step.evaluated, plain, {"input_ids": tokens, "targets": targets})
    assert step.evaluated is not None
    dropped = [0.5 in line.args for build in (step.build, step.evaluated.build) for program in build.files()
               for function in program.functions for line in function.lines if "attention" in line.op]  # fmt: skip
    assert dropped == [True, True, False]  # forward, backward, evaluation


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
    (diagnostic,) = fault.value.diagnostics
    assert diagnostic.code.name == "P0303" and "[9]" in diagnostic.message and diagnostic.primary is not None
    assert diagnostic.primary.span.text == 'eval every 2 data "./dated.py:sample"'
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
