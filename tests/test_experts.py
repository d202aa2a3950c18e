"""Experts over ranks: models of transformers beside themselves, the exchange of packed rows, and its bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import parc
from parc.advice import warnings_of
from parc.checking.reports import report_of
from parc.checking.twins import subject_of
from parc.compiler.build.directory import write_build
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.packed_rows import exchange_rows
from parc.compiler.layout.placement import parse_type
from parc.compiler.ops.factors import OpCall, Operand
from parc.compiler.ops.infer import packed_result
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.text import parse_program
from parc.compiler.verify.lines import check_program
from parc.grammar.diagnostics import PlanError, render
from parc.runtime.machine import expert_kernels
from parc.runtime.machine.kernels import KERNELS, REFERENCE_KERNELS
from tests.captured_once import compile_once
from tests.checked_plans import checked, compiled, held
from tests.draws import all_but, wide
from tests.family_plans import EXPERT_FAMILIES
from tests.moe_families import FAMILIES
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import EXAMPLES

PLAN = """\
model "./moe_families.py:family" (name="{family}"{sizes})
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=8, S=4
loss cross_entropy(output.logits, targets)
optimizer adamw lr 1e-2 clip 1.0
mesh {mesh}
shard input_ids, targets [B/dp/ep, _]
experts model.layers.*.{{mlp,block_sparse_moe,feed_forward}}.experts? over ep dropless
"""
BESIDE = {
    "zero 3, microbatches": ("dp=2, ep=2", "zero 3 over dp\nschedule microbatches 2\n"),
    "zero 1, bf16": ("dp=2, ep=2", "zero 1 over dp\nprecision bf16\n"),
    "two levels": ("dp=1, ep=4", "node 2\nhierarchical over ep\nexpect 8 exchange in model.layers.*\n"),
    "a pipeline": ("pp=2, dp=1, ep=2", "stage before model.layers.1 over pp\nschedule 1f1b microbatches 2\n"),
    "experts split inside": (
        "dp=1, ep=2, tp=2",
        "shard model.layers.*.mlp.experts.gate_up_proj [_/ep, (2 _/tp), _]\n"
        "shard model.layers.*.mlp.experts.down_proj [_/ep, _, _/tp]\n",
    ),
}
FORWARD, BACKWARD = "forward", "backward"


def plan(family: str = "Mixtral", mesh: str = "dp=2, ep=2", lines: str = "", **sizes: int) -> str:
    """Return the text of a plan for a family with its experts over ``ep``."""
    more = "".join(f", {name}={size}" for name, size in sizes.items())
    return PLAN.format(family=family, mesh=mesh, sizes=more) + lines


def test_experts_that_do_not_say_that_they_have_no_norm_have_none() -> None:
    older, newer = (compiled(plan().replace(":family", f":{make}"), ROOT / "tests") for make in ("older", "family"))
    assert older.built.programs["F"].main == newer.built.programs["F"].main


@pytest.mark.parametrize("family", all_but([*EXPERT_FAMILIES], FAMILIES))  # whose own plans do the same
def test_a_family_trains_with_its_experts_on_other_ranks_as_on_one(family: str) -> None:
    compilation = compiled(plan(family, lines="expect 4 exchange in **\n"), ROOT / "tests")
    assert checked(compilation).report["checks"]["numbers"] == "tested"


@pytest.mark.parametrize("mesh", ["dp=2, ep=1", wide("dp=1, ep=4"), "dp=1, ep=8"])
def test_any_number_of_ranks_has_the_model_s_numbers(mesh: str) -> None:
    report = held(compiled(plan(mesh=mesh), ROOT / "tests"))
    ops = {row["op"] for row in report["communication"] if row["carries"] == "activations"}
    assert ops == (set() if "ep=1" in mesh else {"exchange", "all_to_all"})  # one rank of ep routes its own tokens


def test_numbers_of_many_ranks_and_layers_are_tested_on_fewer_experts_and_layers() -> None:
    """Two experts a rank, and two layers in a stage, as in the build."""
    lines = "verify num_local_experts=2, num_hidden_layers=2\nstage balanced over pp\nschedule 1f1b microbatches 2\n"
    text = plan("Mixtral", "dp=2, ep=4, pp=2", lines, num_hidden_layers=3)
    compilation = compiled(text.replace("B=8", "B=16"), ROOT / "tests")
    twin = subject_of(compilation)
    assert "the twin: num_local_experts=4, num_hidden_layers=3" in twin.text
    assert held(twin.compiled)


@pytest.mark.parametrize("beside", BESIDE)
def test_experts_compose_with(beside: str) -> None:
    mesh, lines = BESIDE[beside]
    compilation = compiled(plan(mesh=mesh, lines=lines, num_hidden_layers=2 if "pp" in mesh else 1), ROOT / "tests")
    assert held(compilation)


def test_a_value_that_a_family_s_configuration_does_not_take_is_named() -> None:
    with pytest.raises(PlanError) as refused:
        compiled(plan(output_router_logits=1), ROOT / "tests")
    text = render(refused.value.diagnostics[0])
    assert "making the model failed: " in text and "output_router_logits" in text and "Hub" not in text


def test_two_exchanges_forward_and_two_backward_send_what_the_closed_form_says() -> None:
    """Each sends tokens * k * width * itemsize * (ep - 1) / ep, as all-to-alls of experts do (Lepikhin et al.,
    "GShard", 2020)."""
    ep, tokens, k, width = 8, 8 * 4 // 8, 2, 16
    rows = report_of(compiled(plan(mesh=f"dp=1, ep={ep}"), ROOT / "tests"))["communication"]
    for phase in (FORWARD, BACKWARD):
        sent = [row for row in rows if row["op"] == "exchange" and row["phase"] == phase]
        assert sum(row["count_per_step"] for row in sent) == 2
        assert {row["wire_bytes"] for row in sent} == {tokens * k * width * 4 * (ep - 1) // ep}


@given(st.data())
def test_an_exchange_brings_every_row_to_its_expert_and_back(data: st.DataObject) -> None:
    """Ranks hold tokens [outer, ranks, rest], or experts [ranks, rest]; rows are counted."""
    ranks, outer, rest, each = (data.draw(st.integers(1, most)) for most in (4, 3, 3, 3))
    tokens, experts = outer * ranks * rest, ranks * each
    bits = data.draw(st.lists(st.booleans(), min_size=tokens * experts, max_size=tokens * experts))
    chosen = torch.tensor(bits).view(experts, tokens)
    numbers = torch.arange(tokens * experts).view(experts, tokens)
    by_token = [part.flatten(1, 2) for part in chosen.view(experts, outer, ranks, rest).unbind(2)]
    own = [part.flatten(1, 2) for part in numbers.view(experts, outer, ranks, rest).unbind(2)]
    by_expert, theirs = chosen.chunk(ranks), numbers.chunk(ranks)
    home = [part[mask][:, None] for part, mask in zip(own, by_token, strict=True)]
    away = [part[mask][:, None] for part, mask in zip(theirs, by_expert, strict=True)]
    there = list(zip(home, by_token, by_expert, strict=True))
    back = list(zip(away, by_expert, by_token, strict=True))
    tokens_at = experts * outer  # tokens lie behind experts
    for found, expected in (
        (exchange_rows(there, ["ep", 0, tokens_at, 0, 1]), away),
        (exchange_rows(back, ["ep", 0, 1, 0, tokens_at]), home),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("chosen", ["some", "none of one expert", "one expert alone"])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_compute_what_a_dense_product_of_all_experts_does(chosen: str, transposed: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    mask = torch.rand(4, 6, generator=draw) < 0.5
    mask[1] = mask[1] & (chosen == "some")
    mask = mask & (torch.arange(4) == 2)[:, None] if chosen == "one expert alone" else mask
    x, weight = torch.randn(6, 3, generator=draw), torch.randn(4, *((3, 5) if transposed else (5, 3)), generator=draw)
    run = {name.split(".")[1]: kernel for name, kernel in KERNELS.items()}
    rows = run["pack"](None, x, mask, 2)
    made = run["expert_linear"](None, rows, mask, weight, transposed, 2)
    dense = torch.einsum("th,ehn->etn", x, weight if transposed else weight.mT)
    torch.testing.assert_close(made, dense[mask])
    torch.testing.assert_close(run["unpack"](None, made, mask, 2), (dense * mask[..., None]).sum(0))
    plain = REFERENCE_KERNELS["parc.expert_linear.default"](None, rows, mask, weight, transposed, 2)
    torch.testing.assert_close(made, plain)
    grad = torch.randn(made.shape, generator=draw)
    whole = torch.zeros_like(dense).masked_scatter_(mask[..., None], grad)
    outer = torch.einsum("th,etn->ehn" if transposed else "th,etn->enh", x, whole)
    torch.testing.assert_close(run["expert_outer"](None, rows, grad, mask, transposed, 2), outer)
    torch.testing.assert_close(run["expert_sum"](None, grad, mask, 2), whole.sum(1))
    scores = torch.randn(4, 6, generator=draw)
    picked = run["pick"](None, scores, mask, 2)
    torch.testing.assert_close(run["unpick"](None, picked, mask, 2), scores * mask)
    torch.testing.assert_close(run["spread"](None, weight[:, 0], mask, 2), weight[:, 0][mask.nonzero()[:, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", ["some", "one expert alone", "nothing"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_product_is_the_product_of_each_expert(dtype: torch.dtype, chosen: str, transposed: bool) -> None:
    """Bit for bit on a CPU. Rows that are not aligned, and float64, take a call for each expert."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.rand(4, 6, generator=draw) < 0.5
    mask &= {"some": mask.new_tensor([1, 0, 1, 1]), "one expert alone": torch.arange(4) == 2}.get(
        chosen, torch.zeros(4, dtype=torch.bool)
    )[:, None]
    run = {name.split(".")[1]: kernel for name, kernel in KERNELS.items()}
    calls = []
    grouped = torch.nn.functional.grouped_mm

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return grouped(*args, **kwargs)

    results = []
    for known in (Mock(return_value=True), Mock(return_value=False)):
        with patch.object(expert_kernels, "has_grouped", known), patch.object(F, "grouped_mm", counted):
            generator = torch.Generator().manual_seed(2)
            x = torch.randn(6, 16, generator=generator).to(dtype)
            weight = torch.randn(4, *((16, 8) if transposed else (8, 16)), generator=generator).to(dtype)
            rows = run["pack"](None, x, mask, 2)
            made = run["expert_linear"](None, rows, mask, weight, transposed, 2)
            results.append((made, run["expert_outer"](None, rows, made, mask, transposed, 2)))
    assert all(a.equal(b) and a.shape == b.shape for a, b in zip(*results, strict=True))
    assert len(calls) == (0 if chosen == "nothing" else 2)


def test_the_text_of_a_type_says_how_many_rows_are_there() -> None:
    mesh = Mesh((("dp", 2), ("ep", 2)))
    for text in ("f32[(8 64/dp/ep), 32] 2 of 8", "f32[512/ep, 32] +dp 2 of 8"):
        assert parse_type(text, mesh).text(mesh) == text
        assert parse_type(text, mesh).packed == (2, 8)


@pytest.mark.parametrize(
    ("op", "args", "shapes"),
    [
        ("aten.sum.dim_IntList", (Operand(0), [0]), [(32,)]),
        ("aten.softmax.int", (Operand(0), 0), [(64, 32)]),
        ("aten.add.Tensor", (Operand(0), Operand(1)), [(64, 32)]),
    ],
)
def test_what_would_read_rows_that_are_not_there_is_refused(op: str, args: Any, shapes: Any) -> None:
    operands = ((64, 32),) * (2 if op.startswith("aten.add") else 1)
    call = OpCall(op, args, {}, operands, tuple(shapes))
    with pytest.raises(ValueError, match="row by row"):
        packed_result(call, [(2, 8), None][: len(operands)])


def test_rows_that_travel_as_if_all_were_there_are_refused() -> None:
    forward = compiled(plan(mesh="dp=1, ep=2"), ROOT / "tests").built.programs["F"]
    plain = re.sub(
        r"parc\.exchange\((\w+, '\w+', \d+, \d+, \d+, \d+), \w+, \w+\)", r"parc.all_to_all(\1)", forward.text()
    )
    assert plain != forward.text()
    faults = check_program(parse_program(plain))
    assert any("packed rows, and no others, are exchanged" in fault.message for fault in faults)


def message(text: str) -> str:
    with pytest.raises(PlanError) as refusal:
        compiled(text, ROOT / "tests")
    return "\n".join(render(diagnostic) for diagnostic in refusal.value.diagnostics)


def test_mistakes_are_told_at_their_line() -> None:
    uneven_tokens = message(plan(mesh="dp=8, ep=8").replace("B/dp/ep", "B/dp"))
    assert "the 4 tokens of a rank that go to `model.layers.0.mlp.experts` do not divide over `ep`" in uneven_tokens
    assert "choose sizes that divide by 8 on each rank" in uneven_tokens
    (idle,) = warnings_of(compiled(plan(mesh="dp=1, ep=2").replace("B/dp/ep", "B/dp"), ROOT / "tests"))
    assert idle.message == "the axis `ep` splits only experts: its 2 ranks all do the same other work"
    many = message(plan(num_experts_per_tok=9))
    assert "`topk` is to choose more entries than there are" in many
    assert "choose at most as many as there are; a router's top-k is at most its number of experts" in many
    other = message(plan().replace("{mlp,block_sparse_moe,feed_forward}.experts?", "self_attn"))
    assert "`model.layers.0.self_attn` holds no weights that are stacked over experts" in other
    assert "name the modules of experts, as `model.layers.0.mlp.experts`" in other
    uneven = message(plan(mesh="dp=1, ep=3").replace("B/dp/ep", "B/dp"))
    assert "`model.layers.0.mlp.experts.gate_up_proj` has 8 entries, which do not divide by ep=3" in uneven
    assert "choose a number of ranks that divides that of experts" in uneven


def ranks_train(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the ranks of this mesh. Return losses and whole weights."""
    with parc.load(folder) as session:
        return [session.step().loss for _ in range(2)], session.state_dict()


@pytest.mark.parametrize(
    ("ranks", "words"),
    [wide(4, {}), (8, {"dp": "1", "pp": "2", "tp": "2", "microbatches": "2"})],
    ids=str,
)
def test_processes_train_a_mixture_of_experts_on_real_text_as_the_plain_module(
    tmp_path: Path, ranks: int, words: dict[str, str]
) -> None:
    compilation = compile_once(read_plan(EXAMPLES / "moe.parc", {**words, "width": "32"}), EXAMPLES)
    write_build(compilation.to_write(report_of(compilation)), tmp_path / "built")
    plain = parc.reference(tmp_path / "built")
    expected = [plain.step().loss for _ in range(2)]
    weights = plain.module.state_dict()
    for losses, state in run_ranks(ranks_train, ranks, str(tmp_path / "built"), wait_s=200):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
