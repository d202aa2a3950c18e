"""The effect of `freeze`, `optimizer` and `schedule` on training, from programs to numbers, beside the plain module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import parc
from parc.checking.certified import certificate_of
from parc.compiler.program.program import REFERENCE_FILE
from parc.compiling.compiled import Compiled
from parc.grammar.diagnostics import PlanError
from parc.runtime.state.optimizer import rate
from tests.checked_plans import checked, compiled
from tests.runtime.tiny import BOTH, DATA, PLAN, TENSOR, batch, build

FROZEN = "freeze blocks.0, embed\n"
GROUP = "optimizer on **.bias weight_decay 0\n"


def gradients(compilation: Compiled) -> set[str]:
    """Return the names of the gradients that a step's backward returns."""
    return set(compilation.build.programs["B"].main.returned("gradient"))


@pytest.mark.parametrize("placements", [DATA, TENSOR, BOTH])
def test_frozen_parameters_have_no_gradient_on_any_plan(placements: str) -> None:
    compilation = compiled(PLAN + placements + FROZEN)
    trained = gradients(compilation)
    assert trained and not any(name.startswith(("blocks.0.", "embed.")) for name in trained)
    assert "blocks.1.mlp.up.weight" in trained and "position.weight" in trained
    assert compilation.build.programs["REDUCE"].main.bound("gradient").keys() == trained
    (memory,) = checked(compilation).report["memory"]
    assert memory["optimizer"] == 2 * memory["gradients"] < 2 * memory["parameters"]


def test_a_gradient_of_what_is_frozen_is_refused() -> None:
    whole, frozen = compiled(PLAN + TENSOR), compiled(PLAN + TENSOR + FROZEN)

    def missing(programs: Compiled, model: Compiled) -> str:
        texts = {**programs.build.texts, REFERENCE_FILE: model.build.texts[REFERENCE_FILE]}
        return certificate_of(replace(programs.build, texts=texts)).missing

    assert not missing(frozen, frozen)
    assert "embed.weight" in missing(whole, frozen) and missing(frozen, whole)


def test_a_run_leaves_frozen_weights_alone_and_is_the_plain_modules(tmp_path: Path) -> None:
    plan = PLAN.replace("lr 1e-2", "lr cosine 1e-2 warmup 2 to 1e-3") + FROZEN + GROUP
    path = build(tmp_path, "", plan)
    session, plain = parc.load(path), parc.reference(path)
    before = {name: value.clone() for name, value in session.state_dict().items()}
    for step in range(3):
        ours, theirs = session.step(batch(step)), plain.step(batch(step))
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert ours.lr == theirs.lr == rate(session.build.manifest["optimizer"], step + 1)
    assert [rate(session.build.manifest["optimizer"], step) for step in (1, 2, 3)] == pytest.approx([5e-3, 1e-2, 1e-3])
    after, module = session.state_dict(), plain.module.state_dict()
    for name, value in after.items():
        frozen = name.startswith(("blocks.0.", "embed.", "head."))
        assert torch.equal(value, before[name]) == frozen, name
        torch.testing.assert_close(value, module[name], rtol=1e-3, atol=1e-5)


def test_gradients_are_added_up_in_the_plans_type(tmp_path: Path) -> None:
    narrow = PLAN.replace("microbatches 2", "microbatches 2 accumulate bf16")
    for placements in (TENSOR, BOTH):
        compilation = compiled(narrow + placements)
        values = compilation.build.programs["B"].main.values()
        returned = compilation.build.programs["B"].main.returns
        assert {values[name].type.dtype for _, name in returned} == {torch.bfloat16}
        reduce = compilation.build.programs["REDUCE"].main
        kept = {reduce.values()[name].type.dtype for name in reduce.returned("gradient").values()}
        assert kept == {torch.float32}
        (memory,) = checked(compilation).report["memory"]
        assert 2 * memory["gradients"] == memory["parameters"]
    path = build(tmp_path, "", narrow)
    session, plain = parc.load(path), parc.reference(path)
    exact = parc.reference(build(tmp_path, "", PLAN, "exact"))
    given = batch(0)
    ours, theirs, wide = (trainer.step(given) for trainer in (session, plain, exact))
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    assert ours.grad_norm != pytest.approx(wide.grad_norm, rel=1e-6)
    assert ours.grad_norm == pytest.approx(wide.grad_norm, rel=1e-2)


FREEZER = """
from torch import nn


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 4), nn.Linear(4, 16)
        self.table.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.table(tokens))
"""
HALF = """
model "./half.py:Half"
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=4
loss cross_entropy(output, targets)
optimizer adamw lr 1e-2
mesh tp=2
vocab table, head over tp
"""


def test_what_the_model_does_not_train_is_frozen_and_something_must_be_trained(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(FREEZER)
    compilation = compiled(HALF, tmp_path)
    assert gradients(compilation) == {"head.weight", "head.bias"}
    checked(compilation)
    with pytest.raises(PlanError) as caught:
        compiled(HALF + "freeze head", tmp_path)
    (fault,) = caught.value.diagnostics
    assert fault.code.name == "P0214" and fault.primary is not None and fault.primary.span.text == "head"
