"""The families that parc ships: each plan builds the models that it is for, and every check of the build holds; with
sequences split too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from parc.advice import warnings_of
from parc.checking.checks import case_of, prove
from parc.checking.eager import compare_with_eager
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.layout.pieces import take
from parc.compiler.plan.include import families
from parc.compiling.compiled import Compiled
from parc.grammar.diagnostics import PlanError, Severity, render
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.plain import reference
from parc.runtime.compare.simulate import Simulation, compare
from parc.runtime.data.random_batch import random_batch
from tests.draws import all_but, star, wide

from .checked_plans import compiled, simulated
from .family_plans import EXPERT_FAMILIES, MODELS, expert_plan_text, include, plan_text
from .test_sequence import activations, split

ROOT = Path(__file__).parent.parent


def build(name: str, dp: int, tp: int, more: str = "") -> tuple[Compiled, Counter[tuple[str, str, str]]]:
    """Build a model under its family's plan, with all checks of a build in one step; return its collectives too, by
    axis, phase and operator."""
    compilation = compiled(plan_text(name, more), ROOT, dp=dp, tp=tp)
    found = [warning for warning in warnings_of(compilation) if warning.severity is not Severity.NOTE]
    assert not found, "\n".join(map(render, found))
    assert prove(compilation) == []
    case = case_of(compilation)
    assert compare_with_eager(compilation, case).holds
    assert compare(case, 1).largest <= TOLERANCE
    return compilation, collectives(report_of(compilation))


def collectives(report: Mapping[str, Any]) -> Counter[tuple[str, str, str]]:
    return Counter((row["axis"], row["phase"], row["op"]) for row in report["communication"])


ONE_LAYER = ", num_hidden_layers=1"
FEWER = {"phi3": 2, "olmo2": 4, "gpt2": 2, "bert": 2, "vit": 2}
"""Models that are tried with one layer, and what a layer adds up in forward and in backward. Llama tries two, and T5,
whose layers share the bias of positions."""


def fewer(name: str) -> str:
    """Return the argument for one layer of a model that is tried with one."""
    return ", n_layer=1" if name == "gpt2" else ONE_LAYER * (name in FEWER)


def test_every_family_is_tried() -> None:
    tried = {lines for _, _, lines, *_ in MODELS.values() if lines.startswith("include")}
    assert {include(family) for family in families()} == tried | {*map(include, EXPERT_FAMILIES.values())}


EXPERT_AXES = ({"tp": 2, "ep": 2}, {"dp": 2, "pp": 2, "ep": 2, "zero": 1})
SAME_PLAN = ("Olmoe", "GraniteMoe")
"""Models that Mixtral stands for."""
EXPERT_ROWS = [
    *star([name for name in EXPERT_FAMILIES if name not in SAME_PLAN], EXPERT_AXES),
    *(wide(name, axes) for name in SAME_PLAN for axes in EXPERT_AXES),
]


@pytest.mark.parametrize(("name", "axes"), EXPERT_ROWS, ids=str)
def test_a_family_of_experts_serves_its_models(name: str, axes: dict[str, int]) -> None:
    layers = 1 if name in ("DeepseekV3", "Qwen3Moe") and "pp" not in axes else 2  # DeepSeek's first is dense
    text = expert_plan_text(name)
    if name == "Qwen3Moe":
        text = text.replace("num_hidden_layers=2", f"num_hidden_layers={layers}")
    compilation = compiled(text, ROOT, **axes)
    assert not (found := [warning for warning in warnings_of(compilation) if warning.severity is not Severity.NOTE]), (
        found
    )
    report = simulated(compilation)
    moved = Counter((row["axis"], row["phase"]) for row in report["communication"] if row["op"] == "exchange")
    assert sum(moved.values()) == 4 * layers
    kinds = {row["op"] for row in report["communication"] if row["axis"] == "tp" and row["carries"] == "activations"}
    assert kinds == ({"all_reduce", "row_max"} if "tp" in axes else set())


@pytest.mark.parametrize("dp", [2, wide(1)])
@pytest.mark.parametrize("name", all_but(["mistral", "qwen2", "qwen3", "gemma2"], MODELS))
def test_a_family_serves_its_models(name: str, dp: int) -> None:
    made, counts = build(name, dp, 2, fewer(name))
    assert made.captured.updates or not [key for key in counts if key[:2] == ("dp", "backward")]
    assert {op for _, _, op in counts} <= {"all_reduce", "row_max"}
    of_layer = FEWER.get(name, 0)
    summed = [counts["tp", phase, "all_reduce"] + of_layer for phase in ("forward", "backward")]
    assert summed == [*MODELS[name][3:]]


@pytest.mark.parametrize("name", ["convolutions", wide("t5")])
def test_a_run_is_the_plain_modules(tmp_path: Path, name: str) -> None:
    """Losses of every step are compared, and the running statistics after them, which every rank has."""
    compilation = compiled(plan_text(name), ROOT, dp=2, tp=2)
    write_build(compilation.to_write(report_of(compilation)), tmp_path / "build")
    case = case_of(compilation)
    ranks, plain = Simulation(case), reference(tmp_path / "build")
    for step in range(2):
        batches = random_batch(case.reference, case.microbatches, torch.Generator().manual_seed(step))
        kinds = {line.name: getattr(torch, line.dtype) for line in compilation.plan.inputs}
        whole = {key: torch.cat([batch[key] for batch in batches]).to(kinds[key]) for key in batches[0]}
        losses, _ = ranks.step([{key: value.to(kinds[key]).to(value.dtype) for key, value in batch.items()}
                                for batch in batches], step)  # fmt: skip
        assert float(losses[0]) == pytest.approx(plain.step(whole).loss, rel=1e-5)
    found = dict(plain.module.named_buffers())
    for buffer, pieces, type_ in ranks.buffers():
        for rank, piece in pieces.items():
            part = take(found[buffer], type_.placement, compilation.mesh, compilation.mesh.coordinates(rank))
            assert torch.allclose(piece.double(), part.double(), rtol=1e-4, atol=1e-5), f"{buffer} of rank {rank}"
    plain.close()


def test_batch_statistics_are_those_of_all_data_ranks() -> None:
    """Each norm has two sums over dp in forward and two in backward, with running statistics, and none over tp."""
    compilation = compiled(plan_text("convolutions"), ROOT, dp=2, tp=2)
    counts = collectives(report_of(compilation))
    norms = sum(name.endswith("running_mean") for name in compilation.captured.updates)
    assert counts["dp", "forward", "all_reduce"] == 2 * norms + 1  # the count of targets
    assert counts["dp", "backward", "all_reduce"] == 2 * norms


@pytest.mark.parametrize("name", ["llama", wide("qwen2")])
@pytest.mark.parametrize(("tp", "kv_heads"), [(4, 2), (4, 1), wide(6, 2), wide(2, 4), wide(2, 1)])
def test_key_heads_above_and_below_the_ranks_move_nothing(name: str, tp: int, kv_heads: int) -> None:
    more = f", kv_heads={kv_heads}, heads={max(tp, 4)}, intermediate_size=48{ONE_LAYER}"
    counts = collectives(simulated(compiled(plan_text(name, more), ROOT, tp=tp)))
    assert counts.pop(("tp", "forward", "all_reduce")) == 4 and counts.pop(("tp", "backward", "all_reduce")) == 3
    counts.pop(("tp", "forward", "row_max"))
    copies = 0 if kv_heads >= tp else 2 if name == "llama" else 4  # k and v; Qwen2 has biases
    axis = "tp_1" if 1 < kv_heads < tp else "tp"
    norms = {("tp", "step", "all_reduce"): 1, ("tp_0", "step", "all_reduce"): int(axis == "tp_1")}
    assert counts == Counter({(axis, "step", "all_reduce"): copies}) + Counter(norms)


@pytest.mark.parametrize(("name", "kv_heads"), [("olmo2", 2), wide("gemma2", 1), ("qwen3", 2)])
def test_few_key_heads_of_other_families_move_nothing(name: str, kv_heads: int) -> None:
    more = f", kv_heads={kv_heads}" * (kv_heads != 2)  # two is the models' own number
    counts = collectives(simulated(compiled(plan_text(name, f"{more}{ONE_LAYER}"), ROOT, tp=4)))
    assert {op for _, _, op in counts} == {"all_reduce", "row_max"}


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads", "said"),
    [
        (8, 4, 4, "tp=8 does not divide 4 heads"),
        wide(8, 4, 2, "tp=8 does not divide 4 heads"),
        (3, 6, 2, "tp=3 neither divides 2 KV heads nor is a multiple of them"),
        (2, 6, 3, "tp=2 neither divides 3 KV heads nor is a multiple of them"),
    ],
)
def test_heads_that_do_not_fit_the_ranks_are_refused(tp: int, heads: int, kv_heads: int, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        build("llama", 1, tp, f", kv_heads={kv_heads}, heads={heads}{ONE_LAYER}")
    legal = {4: "1, 2, 4", 6: f"1, {kv_heads}, 6"}[heads]
    text = str(refused.value)
    assert text.startswith(f"error[P0112]: {said}\n  --> parc:llama:6:11\n") and text.endswith(f": {legal}")
    assert "modeling_llama.py:" in text and "declared here" in text


GATHERED = {"gpt2": 3, "llama": 5, "bert": 3, "t5": 12}
"""The places before split layers in each model, GPT-2 and BERT with one layer, the others with two: two a layer (three
where a decoder reads an encoder, and one for what the encoder gives), and one before the head."""


@pytest.mark.parametrize("name", GATHERED)
def test_a_family_splits_its_sequences(name: str) -> None:
    report = simulated(compiled(split(name, more=fewer(name)), ROOT, dp=1, tp=2))
    counts, places = activations(report), GATHERED[name]
    assert counts["forward", "all_gather"] == counts["forward", "reduce_scatter"] == places
    assert counts["backward", "reduce_scatter"] == places
    assert counts["backward", "all_gather"] == 2 * places  # a half of them gather inputs of split layers again
    assert ("backward", "all_reduce") not in counts


@pytest.mark.parametrize("name", [wide("Mixtral"), wide("Qwen3Moe"), "DeepseekV3", "GptOss"])
def test_a_family_of_experts_splits_its_sequences(name: str) -> None:
    text = expert_plan_text(name).replace("ep=$ep)", "ep=$ep, sequence=tp)")
    report = simulated(compiled(text, ROOT, tp=2, ep=2))
    counts = activations(report)
    summed = 2 if name == "GptOss" else 0  # its experts add a bias to their rows, which are whole before
    assert counts["forward", "reduce_scatter"] and counts["forward", "all_reduce"] == summed
