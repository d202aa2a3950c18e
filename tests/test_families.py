"""The families that parc ships: each plan builds the models it is for, and every check of the build holds."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from parc.advice import warnings_of
from parc.checks import check_build
from parc.compiler.include import families
from parc.compiler.plan import read_plan
from parc.driver import compile_plan
from parc.grammar.diagnostics import render
from parc.grammar.source import Source

PLAN = """
let       dp = 1
model     {model}
input     input_ids int64 [B, S]
input     targets int64 [B, S]
sizes     B=4, S=8
loss      cross_entropy(output.logits, targets)
optimizer adamw lr 1e-3 eps 1e-5 clip 1.0
mesh      dp=$dp, tp=2
shard     input_ids, targets [B/dp, _]
include   "parc:{family}" (tp=2)
"""
MODELS = {
    "gpt2": ("gpt2", '"tests.family_models:gpt2"', 6),
    "llama": ("llama", '"tests.family_models:decoder" (name="llama")', 6),
    "mistral": ("llama", '"tests.family_models:decoder" (name="mistral")', 6),
    "qwen2": ("llama", '"tests.family_models:decoder" (name="qwen2")', 6),
    "qwen3": ("llama", '"tests.family_models:decoder" (name="qwen3")', 6),
    "phi3": ("phi3", '"tests.family_models:decoder" (name="phi3")', 6),
    "olmo2": ("olmo2", '"tests.family_models:decoder" (name="olmo2")', 10),
}
"""Family, model, and all-reduces of a forward over tp: two a layer, one of the embedding and one of the loss; for
OLMo 2 two more a layer, of the squares that its norms of q and k add up."""


def test_every_family_is_tried() -> None:
    assert {family for family, _, _ in MODELS.values()} == set(families())


@pytest.mark.parametrize("dp", ["1", "2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_family_serves_its_models(name: str, dp: str) -> None:
    family, model, reductions = MODELS[name]
    plan = read_plan(Source("family.parc", PLAN.format(family=family, model=model)), {"dp": dp})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own future
        compiled = compile_plan(plan, Path(__file__).parent.parent)
        checked = check_build(compiled)
    assert not checked.faults, "\n".join(map(str, checked.faults))
    assert not warnings_of(compiled), "\n".join(map(render, warnings_of(compiled)))
    table = [row for row in checked.report["communication"] if row["axis"] == "tp" and row["phase"] == "forward"]
    assert {row["op"] for row in table} == {"all_reduce", "row_max"}
    assert sum(row["op"] == "all_reduce" for row in table) == reductions
