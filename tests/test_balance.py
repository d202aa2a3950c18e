"""The balance of experts: auxiliary losses, the loads of each step, and a bias that steps move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import parc
from parc.checking.certified import certificate_of
from parc.checking.checks import case_of, static_faults
from parc.checking.reports import report_of
from parc.cli.build import report_text
from parc.compiler.build.directory import write_build
from parc.compiler.program.actions import LOADS
from parc.compiler.program.text import parse_program
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.syntax import size_text
from parc.runtime.compare.simulate import compare
from parc.runtime.state.step_state import LoadWatch
from tests.checked_plans import checked, compiled, held, in_texts
from tests.draws import wide
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks
from tests.test_expert_forms import plan as own_plan
from tests.test_experts import plan


def with_balance_loss(family: str) -> str:
    """Return the text of a plan of a family, with the loss that balances its experts."""
    loss = "cross_entropy(output.logits, targets)"
    text = plan(family, lines="schedule microbatches 2\nforbid all_gather in **\n")
    text = text.replace(loss, f"{loss} + 0.01 output.aux_loss")
    return text.replace(f'name="{family}"', f'name="{family}", output_router_logits=true')


@pytest.mark.parametrize("family", ["Mixtral", wide("Qwen3Moe"), wide("Olmoe"), wide("GraniteMoe")])
def test_the_loss_that_balances_experts_is_that_of_all_tokens_of_a_microbatch(family: str) -> None:
    compilation = compiled(with_balance_loss(family), ROOT / "tests")
    assert checked(compilation).report["checks"]["numbers"] == "tested"
    assert compilation.built.averaged == (2,)  # it is no mean over tokens, which a note says


BALANCED = "over ep dropless balance bias 0.01"


def with_bias(mesh: str = "dp=1, ep=2", lines: str = "schedule microbatches 2\n", **sizes: int) -> str:
    """Return the text of a plan of two layers of experts or more, each with a bias that balances them."""
    return plan("DeepseekV3", mesh, lines, first_k_dense_replace=0, **sizes).replace("over ep dropless", BALANCED)


CHUNKS = "".join(f"stage before model.layers.{layer} over pp\n" for layer in (1, 2, 3))
CHUNKS += "schedule interleaved chunks 2 microbatches 2\n"


@pytest.mark.parametrize(
    ("mesh", "lines", "layers"),
    [("pp=2, dp=2, ep=2", CHUNKS, 4), wide("dp=2, ep=2", "schedule microbatches 2\n", 2)],
)
def test_a_bias_that_balances_experts_moves_by_the_loads_of_the_whole_step(mesh: str, lines: str, layers: int) -> None:
    """Stages of chunks tell loads in the order of layers."""
    compilation = compiled(with_bias(mesh, lines, num_hidden_layers=layers), ROOT / "tests")
    assert held(compilation, steps=2)  # the second is with the bias that the first moved
    buffers = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(layers)]
    assert sorted(compilation.build.manifest["updates"]) == buffers


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("parc.all_reduce(cat, 'ep')", "aten.neg.default(cat)"),
        ("aten.lt.Tensor(to_copy, mean)", "aten.lt.Tensor(mean, to_copy)"),
        ("aten.mean.default(to_copy)", "aten.sum.default(to_copy)"),
        ("aten.mul.Tensor(sub, 0.01)", "aten.mul.Tensor(sub, 0.02)"),
    ],
)  # fmt: skip
def test_a_wrong_balance_is_refused(old: str, new: str) -> None:
    compilation = compiled(with_bias(), ROOT / "tests")
    text = compilation.build.programs[LOADS].text()
    assert text.count(old) == 1, text
    programs = compilation.build.programs
    wrong = {**programs, LOADS: parse_program(text.replace(old, new))}
    roles = {name: replace(role, programs=wrong) for name, role in compilation.build.roles.items()}
    bad = replace(compilation.build, programs=wrong, roles=roles)
    assert static_faults(bad) or compare(case_of(replace(compilation, written=bad)), steps=2).largest > 1e-3
    assert certificate_of(in_texts(compilation.build, wrong)).missing


@pytest.mark.parametrize("words", ["dropless load 0.5", "dropless balance bias -0.1", "capacity 0"])
def test_numbers_that_make_no_sense_are_refused(words: str) -> None:
    with pytest.raises(PlanError) as refused:
        compiled(plan().replace("dropless", words), ROOT / "tests")
    assert "it must be" in refused.value.diagnostics[0].message


def test_two_lines_may_not_give_one_layer_other_capacities() -> None:
    more = "experts model.layers.0.mlp.experts over ep dropless\n"
    with pytest.raises(PlanError) as refused:
        compiled(plan(lines=more).replace("dropless", "capacity 2", 1), ROOT / "tests")
    assert "two lines give `model.layers.0.mlp.experts` different capacities" in refused.value.diagnostics[0].message


def balanced_ranks(path: str) -> tuple[list[float], list[list[int]], torch.Tensor]:
    """Train for three steps; return the losses, the loads, and the bias that is left."""
    with parc.load(path) as session:
        reports = [session.step(token_batch()) for _ in range(3)]
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        loads = [list(report.loads["model.layers.1.mlp.experts"]) for report in reports]
        assert all(report.metrics["rank_imbalance"] <= report.metrics["imbalance"] for report in reports)
        return [report.loss for report in reports], loads, session.state_dict()[name]


def token_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (2, 8, 4), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens[0], "targets": tokens[1]}


def test_real_ranks_balance_as_the_plain_module_with_the_published_update(tmp_path: Path) -> None:
    compilation = compiled(with_bias(), ROOT / "tests")
    write_build(compilation.to_write(report_of(compilation)), tmp_path / "build")
    plain = parc.reference(tmp_path / "build")
    losses = [plain.step(token_batch()).loss for _ in range(3)]
    bias = plain.module.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.abs().max() > 0.005
    for found, loads, moved in run_ranks(balanced_ranks, 2, str(tmp_path / "build")):
        assert found == pytest.approx(losses, rel=1e-5) and torch.equal(moved, bias)
        assert [sum(load) for load in loads] == [8 * 4 * 2] * 3


def test_the_bias_of_an_own_layer_follows_its_form_in_the_plain_module(tmp_path: Path) -> None:
    text = own_plan("balanced", "dp=1, ep={}", "schedule microbatches 2\n").replace("over ep dropless", BALANCED)
    assert held(compiled(text.replace("ep={}", "ep=2"), ROOT / "tests"))
    compilation = compiled(text.replace("ep={}", "ep=1"), ROOT / "tests")
    write_build(compilation.to_write(report_of(compilation)), tmp_path / "build")
    plain = parc.reference(tmp_path / "build")
    losses = [plain.step().loss for _ in range(3)]
    bias = plain.module.get_buffer("layers.0.experts.choice_bias")
    assert bias.abs().max() > 0.005
    with parc.load(tmp_path / "build") as session:
        assert [session.step().loss for _ in range(3)] == pytest.approx(losses, rel=1e-5)
        assert torch.equal(session.state_dict()["layers.0.experts.choice_bias"], bias)


def test_a_router_without_a_bias_cannot_be_balanced_by_one() -> None:
    with pytest.raises(PlanError) as refused:
        compiled(with_balance_loss("Mixtral").replace("over ep dropless", BALANCED), ROOT / "tests")
    text = render(refused.value.diagnostics[0])
    assert "P0139" in text and "no buffer of 8 numbers" in text and "output.aux_loss" in text and "plan.parc:9" in text


def test_memory_is_that_of_the_stated_load_and_the_most_is_told() -> None:
    even, stated = (
        report_of(compiled(plan(mesh="dp=1, ep=4", num_hidden_layers=2).replace("dropless", words), ROOT / "tests"))
        for words in ("dropless", "dropless load 2")
    )
    ours, theirs = (report["memory"][0]["peak_bytes"] for report in (even, stated))
    assert ours < theirs <= stated["experts_peak_bytes"] == even["experts_peak_bytes"]
    text = report_text(stated)
    assert "experts      model.layers.*.mlp.experts: 2 layers of 8, 2 a rank, 2 a token\n" in text
    assert f"with 2 times the mean of their rows, and {size_text(stated['experts_peak_bytes'])} with all that" in text


def test_a_load_that_memory_was_not_planned_for_is_told_once() -> None:
    watch = LoadWatch(planned=1.25, limit=1.5, patience=3)
    said = [watch.note(step, load) for step, load in enumerate((1.2, 1.3, 1.6, 1.6, 1.6, 1.6, 1.1, 1.6, 1.6, 1.6), 1)]
    assert [bool(text) for text in said] == [False, True, False, False, True, False, False, False, False, True]
    assert "planned for 1.25" in said[1] and "for 3 steps the busiest rank" in said[4]
