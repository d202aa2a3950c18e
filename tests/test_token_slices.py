"""Slices of tokens: experts on ranks that have the same tokens, each of which routes a part of them."""

from __future__ import annotations

import pytest

from parc.advice import warnings_of
from parc.checking.reports import report_of
from parc.grammar.diagnostics import Severity
from tests.checked_plans import compiled, held
from tests.planted_builds import ROOT
from tests.test_experts import BACKWARD, FORWARD, plan

ALIKE = {
    "zero 3, bf16": ("Mixtral", "dp=2, tp=2", "zero 3 over dp\nprecision bf16\n"),
    "zero 2, a pipeline": (
        "Mixtral",
        "pp=2, dp=2, tp=2",
        "zero 2 over dp\nstage before model.layers.1 over pp\nschedule 1f1b microbatches 2\n",
    ),
    "few heads": ("Mixtral", "dp=1, tp=4", ""),
}


def alike(family: str, mesh: str, lines: str = "") -> str:
    """Return the text of a plan whose experts lie on the ranks that split attention, so these have the same tokens."""
    attention = """\
column model.layers.*.self_attn.{q,k,v}_proj over tp
row model.layers.*.self_attn.o_proj over tp
"""
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2 if "microbatches" in lines else 1}
    text = plan(family, mesh, attention + lines, **sizes).replace("B/dp/ep", "B/dp")
    return text.replace("over ep dropless", "over tp dropless")


@pytest.mark.parametrize("beside", ALIKE)
def test_ranks_with_the_same_tokens_route_a_slice_each(beside: str) -> None:
    compilation = compiled(alike(*ALIKE[beside]), ROOT / "tests")
    assert held(compilation)
    assert not [warning for warning in warnings_of(compilation) if warning.severity is not Severity.NOTE]


def test_slices_are_gathered_once_forward_and_once_backward() -> None:
    """A slice is cut where it is, so beside the exchanges of slices there is one gather of tokens each way, and one of
    the scores' gradients, [experts, tokens]."""
    dp, tp, k, width, experts = 2, 2, 2, 16, 8
    tokens = 8 * 4 // dp
    rows = report_of(compiled(alike("Mixtral", "dp=2, tp=2"), ROOT / "tests"))["communication"]
    for phase, gathered in ((FORWARD, {width}), (BACKWARD, {width, experts})):
        ops = {
            op: [row for row in rows if row["op"] == op and row["phase"] == phase] for op in ("exchange", "all_gather")
        }
        assert [row["wire_bytes"] for row in ops["exchange"]] == [tokens // tp * k * width * 4 * (tp - 1) // tp] * 2
        assert {row["wire_bytes"] for row in ops["all_gather"]} == {tokens * n * 4 * (tp - 1) // tp for n in gathered}
        assert not [row for row in rows if row["op"] == "all_to_all"]  # masks are cut where they are


ATTENTION = "column model.layers.*.self_attn.{q,k,v}_proj over tp\nrow model.layers.*.self_attn.o_proj over tp\n"
INSIDE = """\
shard model.layers.*.mlp.experts.gate_up_proj [_/ep, (2 _/tp), _]
shard model.layers.*.mlp.experts.down_proj [_/ep, _, _/tp]
"""
CONTEXT = "context model.layers.* dim S over cp using zigzag\n"
SPLIT = {
    "sequences between layers, tokens alike on tp, zero 1": alike(
        "Mixtral", "dp=2, tp=2", "sequence model.layers.* over tp\nzero 1 over dp\n"
    ),
    "sequences between layers, tp inside experts": plan(
        "Mixtral", "dp=1, ep=2, tp=2", ATTENTION + INSIDE + "sequence model.layers.* over tp\n", num_attention_heads=4
    ),
    "sequences everywhere": plan(
        "DeepseekV3", "dp=1, ep=2, cp=2", CONTEXT, num_hidden_layers=1, first_k_dense_replace=0
    ),
    "sequences over the axis of experts": plan("Mixtral", "dp=2, cp=2", CONTEXT, num_attention_heads=4)
    .replace("B/dp/ep", "B/dp")
    .replace("over ep dropless", "over cp dropless"),
}


@pytest.mark.parametrize("how", SPLIT)
def test_parts_of_sequences_go_to_experts(how: str) -> None:
    """In zigzag a rank has two parts of each sequence, whose rows are packed in that order."""
    compilation = compiled(SPLIT[how].replace("S=4", "S=8"), ROOT / "tests")
    assert held(compilation)
    assert not [warning for warning in warnings_of(compilation) if warning.severity is not Severity.NOTE]


def test_slots_of_a_capacity_are_filled_by_a_slice_of_the_sequences_each() -> None:
    """The same two exchanges each way as of packed rows, and one gather of tokens."""
    dp, tp, k, width, factor = 2, 2, 2, 16, 2
    tokens = 8 * 4 // dp
    text = alike("Mixtral", "dp=2, tp=2").replace("dropless", f"capacity {factor}")
    compilation = compiled(text, ROOT / "tests")
    assert not warnings_of(compilation)
    rows = [row for row in held(compilation)["communication"] if row["module"].endswith("experts")]
    for phase in (FORWARD, BACKWARD):
        sent = {row["op"]: row["wire_bytes"] for row in rows if row["phase"] == phase and row["axis"] == "tp"}
        assert sent["all_to_all"] == tokens // tp * k * factor * width * 4 * (tp - 1) // tp
        assert phase == BACKWARD or sent["all_gather"] == tokens * width * 4 * (tp - 1) // tp
