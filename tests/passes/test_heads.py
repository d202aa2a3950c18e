"""Fused rows and grouped heads: every rank has whole heads, and nothing moves but the sums of row-parallel layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from parc.advice import warnings_of
from parc.checking.checks import prove
from parc.checking.twins import find_twin
from parc.compiler.analysis.communication import messages
from parc.compiler.program.roles import SINGLE
from parc.compiling.compiled import Compiled
from parc.desugar import desugar
from parc.grammar.diagnostics import PlanError, Severity
from tests.draws import each_once, wide

from ..checked_plans import checked, compiled, simulated

PLAN = """
model     "./fused.py:{model}" ({arguments})
input     tokens  int64 [B, S]
input     targets int64 [B, S]
sizes     B=4, S=8
loss      cross_entropy(output, targets)
optimizer adamw lr 1e-3 eps 1e-5 clip 1.0
mesh      dp={dp}, tp={tp}
shard     tokens, targets [B/dp, _]
vocab     embed, head over tp
"""
CONCATENATED = "column attention.qkv over tp rows (h/tp d + g/tp d + g/tp d)\nrow attention.out over tp"
WITH_GATES = CONCATENATED.replace("g/tp d)", "g/tp d + h/tp)")
APART = "column attention.{q,k,v} over tp\nrow attention.out over tp"
INTERLEAVED = "column attention.qkv over tp rows (g/tp 4 d)\nrow attention.out over tp"
ENCODER = """
column attention.self_attn.in_proj_weight over tp rows (3 h/tp d)
shard  attention.self_attn.in_proj_bias [(3 h/tp)]
row    attention.self_attn.out_proj over tp
column attention.linear1 over tp
row    attention.linear2 over tp
"""


def build(model: str, arguments: str, lines: str, tp: int, dp: int = 1, check: bool = True) -> Compiled:
    """Compile a model under its plan, and hold it to the captured graph."""
    text = PLAN.format(model=model, arguments=arguments, dp=dp, tp=tp) + lines
    compilation = compiled(text, Path(__file__).parent)
    if check:
        simulated(compilation)
    return compilation


def moved(compilation: Compiled) -> Counter[tuple[str, str]]:
    """Count the collectives over `tp` in the forward and the backward, by phase and operator."""
    programs = compilation.build.programs
    found = [
        m
        for action in compilation.build.roles[SINGLE].actions
        if action.kind in programs
        for m in messages(programs[action.kind])
    ]
    return Counter((m.phase, m.op) for m in found if m.phase != "step" and m.axes != ("dp",))


SPLIT = [
    ("grouped", "heads=4, groups=4", CONCATENATED, 2),
    ("grouped", "heads=8, groups=4, gated=true", WITH_GATES, 4),
    ("grouped", "heads=6, groups=2, fused=false", APART, 6),  # 10 rows of keys
    ("grouped", "heads=3, groups=1, fused=false", APART, 3),
    ("interleaved", "heads=8, groups=4", INTERLEAVED, 4),
]
LARGER = [
    ("grouped", "heads=8, groups=4", CONCATENATED, 4, 1),
    ("grouped", "heads=8, groups=4", CONCATENATED, 2, 2),
    ("grouped", "heads=8, groups=1, fused=false", APART, 4, 2),
]


@pytest.mark.parametrize(
    ("model", "arguments", "lines", "tp", "dp"),
    [
        *((*row, 1) for row in SPLIT),
        ("grouped", "heads=4, groups=2, fused=false", APART, 4, 2),
        *(wide(*row, 2) for row in SPLIT),
        *(wide(*row) for row in LARGER),
    ],
)
def test_attention_is_one_sum_forward_and_one_back(model: str, arguments: str, lines: str, tp: int, dp: int) -> None:
    compilation = build(model, arguments, lines, tp, dp)
    assert not [warning for warning in warnings_of(compilation) if warning.severity is not Severity.NOTE]
    # the embedding and the loss add one forward each, the head one back
    assert moved(compilation) == {
        ("forward", "all_reduce"): 3,
        ("forward", "row_max"): 1,
        ("backward", "all_reduce"): 2,
    }


@pytest.mark.parametrize(("groups", "tp", "gated"), [(1, 4, False), (2, 8, False), (2, 4, True), wide(2, 4, False)])
def test_few_keys_that_are_fused_with_queries_are_gathered_once_where_they_are_taken_out(
    groups: int, tp: int, gated: bool
) -> None:
    """Numbers of eight ranks are those of their twin."""
    arguments = f"heads=8, groups={groups}, size=8, gated={str(gated).lower()}"
    compilation = build("grouped", arguments, WITH_GATES if gated else CONCATENATED, tp, check=tp < 8)
    rows = f'"f32[(64/tp + {8 * groups}/tp + {8 * groups}/tp{" + 8/tp" * gated}), 32]"'
    assert rows in compilation.build.programs["F"].text()
    sums = {("forward", "all_reduce"): 3, ("forward", "row_max"): 1, ("backward", "all_reduce"): 2}
    assert moved(compilation) == {**sums, ("forward", "all_gather"): 2, ("backward", "reduce_scatter"): 2}
    assert [warning.code.name for warning in warnings_of(compilation)] == ["P0220"]
    if tp == 8:
        assert not prove(compilation)
        twin = find_twin(compilation)
        simulated(twin)


@pytest.mark.parametrize(("repeat", "tp"), each_once(["true", "false"], [2, 8]))
def test_what_is_fused_with_more_and_is_no_heads_of_keys_stays_split(repeat: str, tp: int) -> None:
    lines = "column attention.both over tp rows (v/tp=32 + g/tp=8)\nrow attention.out over tp"
    compilation = build("gated", f"heads=8, repeat={repeat}", lines, tp)
    assert not warnings_of(compilation)
    assert moved(compilation) == {
        ("forward", "all_reduce"): 3,
        ("forward", "row_max"): 1,
        ("backward", "all_reduce"): 2,
    }


def test_the_encoder_layer_of_torch_moves_sums_alone() -> None:
    compilation = build("encoder", "heads=4", ENCODER, 2, check=False)
    checked(compilation)
    assert not warnings_of(compilation) and {op for _, op in moved(compilation)} == {"all_reduce", "row_max"}


def test_parts_are_read_in_programs_and_plans_as_they_are_written() -> None:
    compilation = build("grouped", "heads=8, groups=2", CONCATENATED, 2, check=False)
    assert '"f32[(32/tp + 8/tp + 8/tp), 32]"' in compilation.build.programs["F"].text()
    assert "split_with_sizes" in compilation.build.programs["F"].text()
    assert "[(_/tp=32 + _/tp=8 + _/tp=8), _]" in desugar(compilation)


def test_a_plan_in_primitives_and_a_twin_keep_the_copies() -> None:
    compilation = build("grouped", "heads=8, groups=2, fused=false", APART, 8, check=False)
    assert str(compilation.mesh) == "dp=1, tp=2*4"
    assert "attention.k.weight, attention.q.weight, attention.v.weight [_/tp, _]" in desugar(compilation)
    twin = find_twin(compilation)
    assert str(twin.mesh) == "dp=1, tp=2*2"


@pytest.mark.parametrize(
    ("model", "arguments", "lines", "tp", "said"),
    [
        ("grouped", "heads=6, groups=2, size=6", CONCATENATED, 3, "tp=3 neither divides 2 KV heads"),
        ("interleaved", "heads=8, groups=2", INTERLEAVED, 4, "tp=4 does not divide 2 groups of 6 heads"),
        ("grouped", "heads=6, groups=2, fused=false", APART, 3, "tp=3 neither divides 2 KV heads"),
        ("grouped", "heads=6, groups=2, fused=false", APART, 4, "tp=4 does not divide 6 heads"),
        ("grouped", "heads=2, groups=2", CONCATENATED, 4, "tp=4 does not divide 2 heads"),
        ("einsum", "heads=4, groups=2", APART, 4,
         "divide 2 groups of 2 heads\n|for 2 groups of 2 heads: 1, 2, or write the queries' heads as one"),
        ("encoder", "heads=2", ENCODER, 4, "tp=4 does not divide 2 heads"),
        ("grouped", "heads=8, groups=4", CONCATENATED.replace("h/tp", "h/tp=3"), 2, "has 64 entries, and the sizes"),
    ],
)  # fmt: skip
def test_heads_and_parts_that_do_not_fit_are_refused(
    model: str, arguments: str, lines: str, tp: int, said: str
) -> None:
    with pytest.raises(PlanError) as refused:
        build(model, arguments, lines, tp)
    text = str(refused.value)
    assert all(part in text for part in said.split("|")) and "--> plan.parc:" in text and "help: " in text


def test_lines_whose_heads_do_not_divide_alike_have_one_error() -> None:
    lines = "".join(f"column blocks.{block}.attn.qkv over tp rows (3 h/tp d)\n" for block in (0, 1))
    plan = 'model "./gpt.py:GPT" (layers=2, width=96)\ninput tokens int64 [B, S]\ninput targets int64 [B, S]\n'
    plan += "sizes B=8, S=8\nloss cross_entropy(output, targets)\noptimizer sgd lr 0.1\nmesh tp=5\n"
    with pytest.raises(PlanError) as refused:
        compiled(plan + lines, Path("examples").resolve())
    (error,) = refused.value.diagnostics
    assert error.code.name == "P0112"
    assert error.notes[-1] == "the same holds for 1 more weight, also of line 9"
