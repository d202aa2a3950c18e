"""Experts with a capacity: the tokens that they leave out, the bytes that they exchange, and the plain module with the
same rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parc
from parc.checking.checks import Checked, check_numbers
from parc.checking.reports import report_of
from parc.compiler.analysis.flops import step_flops
from parc.compiler.build.directory import write_build
from parc.grammar.diagnostics import PlanError, render
from parc.runtime.machine.kernels import KERNELS
from tests.checked_plans import checked, compiled, held
from tests.draws import all_but
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks
from tests.test_experts import BESIDE, plan

FAMILIES = ("Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3", "GptOss", "GraniteMoe")


def limited(family: str = "Mixtral", mesh: str = "dp=2, ep=2", lines: str = "", factor: str = "1.5") -> str:
    """Return the text of a plan whose experts take ``factor`` times the mean of the tokens of a sequence of 8."""
    layers = {"num_hidden_layers": 2} if "pp" in mesh else {}
    lines = lines.replace("8 exchange", "4 all_to_all")  # of slots, which are as many on all ranks
    text = plan(family, mesh, lines, **layers)
    return text.replace("dropless", f"capacity {factor}").replace("S=4", "S=8")


@pytest.mark.parametrize("family", all_but(["Qwen3Moe", "Olmoe", "DeepseekV3", "GraniteMoe"], FAMILIES))
def test_a_family_with_a_capacity_is_the_plain_module_with_the_same_rule(family: str) -> None:
    report = checked(compiled(limited(family, mesh="dp=1, ep=4"), ROOT / "tests")).report
    assert report["checks"]["numbers"] == "tested" and not report["reshards"]
    # 1.5 * 2 experts a token * 16 tokens of a rank, 16 numbers of 4 bytes each, three quarters to other ranks
    sent = [row for row in report["communication"] if row["carries"] == "activations"]
    assert [(row["op"], row["wire_bytes"]) for row in sent] == [("all_to_all", 48 * 16 * 4 * 3 // 4)] * 4


def test_the_plain_module_without_the_rule_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parc.runtime.compare.plain._drop_tokens", lambda *given: (given[-2], given[-1]))
    with pytest.raises(PlanError, match=r"P0280\]: the captured graph is not the module"):
        check_numbers(compiled(limited(mesh="dp=1, ep=4", factor="1"), ROOT / "tests"), Checked({}, []))


@pytest.mark.parametrize("beside", [name for name in BESIDE if name != "experts split inside"])
def test_a_capacity_composes_with(beside: str) -> None:
    mesh, lines = BESIDE[beside]
    assert held(compiled(limited("Mixtral", mesh, lines), ROOT / "tests"))


@given(st.data())
def test_slots_are_the_first_tokens_of_a_sequence_that_choose_an_expert(data: st.DataObject) -> None:
    experts, sequences, tokens, capacity = (data.draw(st.integers(1, most)) for most in (3, 3, 6, 4))
    size = experts * sequences * tokens
    bits = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    chosen = torch.tensor(bits).view(experts, sequences, tokens)
    run = {name.split(".")[1]: kernel for name, kernel in KERNELS.items()}
    slots = run["slots"](None, chosen, capacity, 1)
    for expert, sequence in torch.cartesian_prod(torch.arange(experts), torch.arange(sequences)).tolist():
        first = chosen[expert, sequence].nonzero().flatten().tolist()[:capacity]
        assert slots[expert, sequence].tolist() == first + [-1] * (capacity - len(first))
    x, rows = torch.randn(sequences, tokens, 2), torch.randn(*slots.shape, 2)
    to, back = run["dispatch"](None, x, slots), run["combine"](None, rows, slots, tokens)
    assert not to[slots < 0].any()
    torch.testing.assert_close((to * rows).sum(), (x * back).sum())  # each is the other's transpose
    scores, numbers = torch.randn(experts, sequences, tokens), torch.randn(slots.shape)
    picked, put = run["pick_slots"](None, scores, slots), run["unpick_slots"](None, numbers, slots, tokens)
    torch.testing.assert_close((picked * numbers).sum(), (scores * put).sum())


def token_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (2, 8, 8), generator=torch.Generator().manual_seed(2))
    return {"input_ids": tokens[0], "targets": tokens[1]}


def train(path: str) -> list[tuple[float, float, list[int]]]:
    """Train for two steps; return their losses, the shares of choices that were left out, and the tokens taken."""
    with parc.load(path) as session:
        reports = [session.step(token_batch()) for _ in range(2)]
        name = "model.layers.0.mlp.experts.taken"
        return [(report.loss, report.metrics["drop_rate"], list(report.loads[name])) for report in reports]


def test_the_same_tokens_are_left_out_on_any_number_of_ranks(tmp_path: Path) -> None:
    found = {}
    for ranks in (1, 2):
        text = limited(mesh=f"dp=1, ep={ranks}", factor="1").replace("lr 1e-2", "lr 1e-2 eps 1e-5")
        compilation = compiled(text, ROOT / "tests")
        write_build(compilation.to_write(report_of(compilation)), tmp_path / str(ranks))
        found[ranks], *others = run_ranks(train, ranks, str(tmp_path / str(ranks)))
        assert all(other == found[ranks] for other in others)
    plain = parc.reference(tmp_path / "1")
    expected = [plain.step(token_batch()).loss for _ in range(2)]
    for steps in found.values():
        assert [loss for loss, _, _ in steps] == pytest.approx(expected, rel=1e-5)
        assert [row[1:] for row in steps] == [row[1:] for row in found[1]] and 0.05 < steps[0][1] < 0.6


def test_slots_that_no_token_takes_are_no_model_flops() -> None:
    def flops(text: str) -> int:
        return step_flops(compiled(text, ROOT / "tests").build.reference, 1)

    all_tokens, half = flops(plan("Mixtral", "dp=1, ep=1").replace("S=4", "S=8")), flops(limited(factor="0.5"))
    assert flops(limited(factor="1")) == flops(limited(factor="2")) == all_tokens > half > all_tokens / 2


def test_a_capacity_of_less_than_a_token_is_refused_at_its_line() -> None:
    with pytest.raises(PlanError) as refused:
        compiled(limited(factor="0.4"), ROOT / "tests")
    text = render(refused.value.diagnostics[0])
    assert "P0138" in text and "0.8 tokens of a sequence" in text and "`capacity 0.5` or more" in text, text
    assert "plan.parc:9" in text


def test_a_layer_of_another_form_cannot_have_a_capacity() -> None:
    with pytest.raises(PlanError) as refused:
        compiled(limited("Llama4").replace(".experts?", ""), ROOT / "tests")
    assert "has no experts of transformers' interface" in refused.value.diagnostics[0].message
