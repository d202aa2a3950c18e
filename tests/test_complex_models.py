"""Models that compute with complex numbers: built on a mesh, run as the plain module, their own tensors given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import parc
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Program
from parc.compiling.compiled import Compiled
from parc.grammar.source import Source
from tests.captured_once import compile_once
from tests.checked_plans import checked
from tests.complex_models import Filters
from tests.draws import all_but

ROOT = Path(__file__).parent.parent
PLAN = """
model     "tests.complex_models:{model}" ()
input     {tokens} int64 [B, S]
input     targets int64 [B, S]
sizes     B=8, S=8
loss      cross_entropy(output{logits}, targets)
optimizer adamw lr 1e-2 eps 1e-5 clip 1.0
schedule  microbatches 2
"""
MESH = """
mesh      dp=2, tp=2
shard     {tokens}, targets [B/dp, _]
"""
LINES = {
    "Llama": """
column    layers.*.attention.w[q,k,v] over tp
row       layers.*.attention.wo over tp
column    layers.*.up over tp
row       layers.*.down over tp
vocab     embed, head over tp
""".replace("[q,k,v]", "{q,k,v}"),
    "Filters": "column    up over tp\nrow       down over tp\n",
    "fnet": """
column    **.encoder.layer.*.intermediate.dense over tp
row       **.encoder.layer.*.output.dense over tp
""",
    "llama4": """
column    **.layers.*.self_attn.{q,k,v}_proj over tp
row       **.layers.*.self_attn.o_proj over tp
column    **.layers.*.feed_forward.{gate,up}_proj over tp
row       **.layers.*.feed_forward.down_proj over tp
vocab     **.embed_tokens, lm_head over tp
""",
}
"""The plan's lines for each model; two of the models are of transformers."""


def plan(model: str, lines: str | None = None) -> str:
    own = model[0].isupper()
    names = {"tokens": "tokens" if own else "input_ids", "logits": "" if own else ".logits"}
    return (PLAN + MESH * (lines is None)).format(model=model, **names) + (LINES[model] if lines is None else lines)


def made(text: str, folder: Path = ROOT) -> Compiled:
    return compile_once(read_plan(Source("plan.parc", text)), folder)


def write(text: str, folder: Path, name: str) -> Path:
    """Write the build of a plan in a folder there; return its path."""
    compiled = made(text, folder)
    write_build(compiled.to_write(report_of(compiled)), folder / name)
    return folder / name


def operators(program: Program) -> set[str]:
    return {line.op for function in program.functions for line in function.lines}


@pytest.mark.parametrize("model", all_but(["llama4"], LINES))
def test_models_build_on_a_mesh(model: str) -> None:
    compiled = made(plan(model))
    checked(compiled)
    assert compiled.built.without_rule == ()
    programs = (compiled.build.reference, *compiled.build.programs.values())
    assert not any(word in op for op in set().union(*map(operators, programs)) for word in ("complex", "polar", "fft"))


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def test_sessions_train_and_give_back_complex_tensors(tmp_path: Path) -> None:
    write(plan("Filters", ""), tmp_path, "build")
    session, plain = parc.load(tmp_path / "build"), parc.reference(tmp_path / "build")
    begun = session.state_dict()
    assert begun.keys() == plain.module.state_dict().keys()
    assert all(torch.equal(begun[name], value) for name, value in plain.module.state_dict().items())
    for step in range(2):
        found, wanted = session.step(batch(step)), plain.step(batch(step))
        assert (found.loss, found.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-4)
    state = session.state_dict()
    Filters().load_state_dict(state)
    for name, value in plain.module.state_dict().items():
        assert state[name].dtype == value.dtype
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5)
    assert not torch.equal(state["filter.weight"], begun["filter.weight"]) and state["seen"].abs().min() > 0
    session.save(tmp_path / "kept")
    wanted_loss = session.step(batch(2)).loss
    again = parc.load(tmp_path / "build")
    again.restore(tmp_path / "kept")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in state.items())
    assert again.step(batch(2)).loss == wanted_loss
    (tmp_path / "weights").mkdir()
    save_file(state, tmp_path / "weights" / "model.safetensors")
    write(plan("Filters", 'init from "weights"\n'), tmp_path, "init")
    for holder in (parc.load(tmp_path / "init").state_dict(), parc.reference(tmp_path / "init").module.state_dict()):
        assert all(torch.equal(holder[name], value) for name, value in state.items())
