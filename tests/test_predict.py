"""Rows of published runs as plans, and their steps, which are compiled for few microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import predict
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from parc.step_time import price

ROW = {"layers": "5", "hidden": "64", "heads": "4", "kv_heads": "4", "ffn_hidden": "256", "gated_mlp": "0",
       "vocab": "256", "tied_emb": "0", "seq_len": "32", "micro_batch": "1", "gpu": "A100", "family": "dense",
       "gpus_per_node": "8", "nic_GBps_per_gpu": "", "n_gpus": "2", "tp": "1", "pp": "2", "cp": "1", "vpp": "1",
       "ep": "1", "zero_stage": "0", "seq_parallel": "0", "recompute": "none", "precision": "fp16",
       "system": "zero-bubble", "schedule": "1F1B", "global_batch": "12", "n_experts": ""}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "CACHE", tmp_path)


@pytest.mark.parametrize(
    ("schedule", "line", "barrier"),
    [("ZB-2p", "schedule zb-h2 microbatches $count", False), ("ZB-1p", "schedule zb-h1 microbatches $count", True),
     ("1F1B", "schedule 1f1b microbatches $count", True),
     ("1F1B-I", "schedule interleaved microbatches $count chunks 3", True)],
)  # fmt: skip
def test_schedules_of_rows_are_those_of_plans(schedule: str, line: str, barrier: bool) -> None:
    case = predict.case_of({**ROW, "schedule": schedule, "vpp": "max (1 layer/chunk)"})
    assert line in case.text.splitlines() and case.habits.barrier == barrier
    assert (case.microbatches, case.samples, case.stages) == (12, 12, 6 if schedule == "1F1B-I" else 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"schedule": "ZB-2p", "global_batch": "3"}, "`zb-h2` on 2 ranks wants twice as many microbatches"),
     ({"family": "moe"}, "`n_experts` is ''"), ({"family": "moe", "ep": "3"}, "experts over ranks that do not divide"),
     ({"gpu": "MI300X"}, "no cluster of MI300X"), ({"precision": "fp8-cs"}, "products in fp8-cs")],
)  # fmt: skip
def test_rows_without_a_plan_say_why(change: dict[str, str], why: str) -> None:
    with pytest.raises(predict.Inexpressible) as caught:
        predict.case_of({**ROW, **change})
    assert why in str(caught.value)


@pytest.mark.parametrize("zero", ["0", "3"])
def test_a_row_takes_as_long_as_a_plan_of_its_own_sizes(zero: str) -> None:
    row = {**ROW, "n_gpus": "8", "global_batch": "16", "micro_batch": "2", "zero_stage": zero, "system": "torchtitan"}
    case = predict.case_of({**row, "pp": "1", "layers": "3"})
    assert (case.dp, case.micro, case.microbatches) == (8, 2, 1)
    plan = read_plan(Source("row.parc", f"let layers=3, count=1, data=8, batch=16\n{case.text}\n"), {})
    compiled = compile_plan(plan, predict.ROOT)
    cluster = predict.cluster_of(case)
    assert predict.predicted(case)[0] == pytest.approx(price(compiled.build, plan, cluster, case.habits).time.seconds)


@pytest.mark.parametrize("change", [{"schedule": "ZB-2p"}, {"pp": "1", "n_gpus": "1"}], ids=["zb-h2", "one stage"])
def test_a_step_compiled_for_few_microbatches_takes_as_long(
    change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = predict.case_of({**ROW, **change})
    few, parts = predict.predicted(case)
    monkeypatch.setattr(predict, "_few", lambda case: case.microbatches)
    assert predict.predicted(case) == (few, parts) and few > 0


EXPERTS = {**ROW, "layers": "2", "gated_mlp": "1", "n_gpus": "8", "gpu": "H100", "tp": "2", "pp": "1", "ep": "8",
           "zero_stage": "1", "seq_parallel": "1", "precision": "bf16", "system": "Megatron-LM", "schedule": "none",
           "family": "moe", "n_experts": "8", "topk": "2", "moe_ffn": "32"}  # fmt: skip
LATENT = {**EXPERTS, "model": "deepseekv3-4layers", "kv_heads": "MLA", "recompute": "mla_up_proj+mlp+moe_act"}
IN_STAGES = {**EXPERTS, "tp": "1", "pp": "2", "ep": "2", "seq_parallel": "0", "schedule": "1F1B"}


@pytest.mark.parametrize("row", [EXPERTS, LATENT, IN_STAGES], ids=["heads", "latent attention", "stages"])
def test_products_of_experts_take_as_long_in_each_microbatch(row: dict[str, str]) -> None:
    once, twice = (predict.predicted(predict.case_of({**row, "global_batch": batch}))[1] for batch in ("32", "64"))
    assert twice["products"] == pytest.approx(2 * once["products"])


def test_a_row_of_experts_has_their_sizes_placements_and_recomputation() -> None:
    text = predict.case_of(LATENT | {"global_batch": "32"}).text
    for line in (
        "q_rank=1536, kv_rank=512, rope=64, experts=8, top=2, expert_ffn=32, shared=1, dense=1)",
        "view dp, cp, tp as edp=1, ep=8 in blocks.*.mlp.experts",
        "column blocks.[0..0].mlp.gate, blocks.*.mlp.shared.gate over tp",
        "recompute blocks.[0..0].mlp\n",
    ):
        assert line in text


def test_the_parts_of_more_layers_are_those_of_one_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another role waits least in a step with two layers than in one with three."""
    steps = {
        2: (10.0, {"pp0": {"products": 9.0, "bubble": 1.0}, "pp1": {"products": 8.0, "bubble": 2.0}}),
        3: (12.0, {"pp0": {"products": 9.5, "bubble": 2.5}, "pp1": {"products": 10.0, "bubble": 2.0}}),
    }
    monkeypatch.setattr(predict, "_step", lambda case, layers: steps[layers])
    case = predict.case_of({**ROW, "layers": "20"})
    assert predict.predicted(case) == (26.0, {"products": 24.0, "bubble": 2.0})
