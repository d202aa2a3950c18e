"""Sequence parallelism: activations between split layers split along the sequence, beside other lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import parc
from parc.advice import warnings_of
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from parc.desugar import desugar
from parc.grammar.diagnostics import PlanError, Severity, render
from tests.captured_once import compile_once
from tests.checked_plans import compiled, simulated
from tests.draws import share
from tests.family_plans import plan_text
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import EXAMPLES
from tests.test_desugar import messages
from tests.test_experts import plan
from tests.test_views import ATTENTION

ROOT = Path(__file__).parent.parent


def split(name: str = "llama", over: str = "tp", more: str = "", lines: str = "") -> str:
    """Return the plan of a family's model with its sequences split; ``over`` may say more of the line."""
    text = plan_text(name, more).replace("(tp=$tp)", "(tp=$tp)" if lines else f"(tp=$tp, sequence={over})")
    return f"{text}\n{lines}"


def build(text: str, **axes: int) -> Mapping[str, Any]:
    """Compile and check a plan; return its report. It gathers nothing that no line asked for."""
    compilation = compiled(text, ROOT, **axes)
    found = [warning for warning in warnings_of(compilation) if warning.severity is not Severity.NOTE]
    assert not found, "\n".join(map(render, found))
    return simulated(compilation)


def activations(report: Mapping[str, Any], axis: str = "tp") -> dict[tuple[str, str], int]:
    """Return the number of collectives of activations over an axis by phase and operator, but for those of a loss."""
    rows = [row for row in report["communication"] if row["axis"] == axis and row["carries"] == "activations"]
    return Counter((row["phase"].split()[0], row["op"]) for row in rows if row["module"])


INSIDE = """\
shard model.layers.*.mlp.experts.gate_up_proj [_/ep, (2 _/tp), _]
shard model.layers.*.mlp.experts.down_proj [_/ep, _, _/tp]
"""


@pytest.mark.parametrize("inside", ["", INSIDE], ids=["whole experts", "experts split inside"])
def test_experts_get_parts_of_sequences_or_gather_them(inside: str) -> None:
    text = plan("Mixtral", "dp=1, tp=2, ep=2", f"{ATTENTION}{inside}sequence model.layers.* over tp\n")
    compilation = compiled(text, ROOT / "tests")
    report = simulated(compilation)
    assert not [warning for warning in warnings_of(compilation) if warning.severity is not Severity.NOTE]
    exchanged = {row["wire_bytes"] for row in report["communication"] if row["op"] == "exchange"}
    assert exchanged == {1024 if inside else 512}


BESIDE = {
    "few heads": ("dp=1, tp=4", ""),
    "one head of keys": ("dp=1, tp=2", ""),
    "zero 3 in bf16": ("dp=2, tp=2", "zero 3 over dp\nprecision bf16\n"),
    "zero 1 and dropout": ("dp=2, tp=2", "zero 1 over dp\n"),
    "a pipeline": ("dp=1, pp=2, tp=2", "stage before model.layers.1 over pp\n"),
    "a part of the model": ("dp=1, tp=2", ""),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_sequences_are_split_beside(beside: str) -> None:
    mesh, lines = BESIDE[beside]
    more = ", attention_dropout=0.1" if "dropout" in beside else ", kv_heads=1" * ("one head" in beside)
    more += "" if "pp" in mesh or "part" in beside else ", num_hidden_layers=1"
    where = "model.layers.0" if "part" in beside else "model.layers.*"
    text = split(more=more, lines=f"sequence {where} over tp\n{lines}")
    text = re.sub(r"mesh .*", f"mesh {mesh}", text).replace("dp = 1, tp = 2", mesh[mesh.index("tp") :])
    if "pp" in mesh:
        text = text.replace("schedule  micro", "schedule  1f1b micro")
    build(text)


@pytest.mark.parametrize("line", ["sequence model.layers.* over tp", "sequence model.layers.* over tp keep gathered"])
def test_a_plan_in_primitives_is_the_same_plan(line: str) -> None:
    compilation = compiled(split(lines=line), ROOT, dp=2, tp=2)
    text = desugar(compilation)
    assert "sequence" not in text
    assert "out(model.layers.0), out(model.layers.1) [_/dp, _/tp, _]" in text
    again = compiled(text, ROOT)
    assert messages(again) == messages(compilation)
    assert desugar(again) == text


def test_bytes_are_those_of_tensor_parallelism_or_a_quarter_more() -> None:
    """A gather and a scatter are an all-reduce. For eight of them backward gathers two again."""

    def sent(line: str) -> int:
        rows = report_of(compiled(split(lines=line), ROOT, dp=2, tp=2))["communication"]
        return sum(row["wire_bytes"] for row in rows if row["carries"] == "activations" and row["module"])

    line = "sequence model.layers.* over tp"
    assert sent(f"{line} keep gathered") == sent("# none")
    assert sent(line) * 4 == sent("# none") * 5


MISTAKES = {
    "sequence model.layers.* over dp": [
        "P0163",
        "no line splits a weight of `model.layers.0` over `dp`",
        "name `tp`, which splits them",
    ],
    "sequence model.rotary_emb over tp": ["P0161", "nothing that `model.rotary_emb` reads or returns has a dim `S` of"],
    "sequence model.layers.* over tp dim T": ["no input has a dim `T`"],
    "sequence model.layer.* over tp": ["P0104", "did you mean"],
    "shard out(model.layers.0) [B/dp, _, _/tp]\nsequence model.layers.* over tp": ["P0105", "`out(model.layers.0)`"],
    "shard in(model.layers.1) [B/dp, _, _]\nshard out(model.layers.0) [B/dp, S/tp, _]": ["P0105", "first:"],
    "shard out(model.rotary_emb) [B/dp, S/tp, _]": ["P0160", "no value that depends on weights"],
    "shard out(model.layers.0) [B/dp, T/tp, _]": ["P0103", "dim 1 of `out(model.layers.0)` is `S`, not `T`"],
    "shard out(model.layers.0) [B/dp, S/tp]": ["P0103", "the layout has 2 entries"],
    "shard model.norm.weight [_] keep gathered": ["is for values inside the model"],
}


@pytest.mark.parametrize("lines", MISTAKES)
def test_mistakes_are_told_at_their_line(lines: str) -> None:
    with pytest.raises(PlanError) as error:
        compiled(split(lines=lines), ROOT, dp=2, tp=2)
    (text, *others) = [render(diagnostic) for diagnostic in error.value.diagnostics if diagnostic.is_error]
    assert not others and all(part in text for part in MISTAKES[lines]), text
    assert "plan.parc:" in text and "help:" in text


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        text = split(more=", num_hidden_layers=1", lines="sequence model.layers.* over tp")
        compiled(text.replace("S=8", "S=10"), ROOT, dp=1, tp=4)
    text = "\n".join(map(render, error.value.diagnostics))
    assert "`S` is 10, which does not divide by the 4 ranks of `tp`" in text and "such as 8 or 12" in text


def ranks_train(folder: str) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Train the builds in a folder for two steps each."""
    ends = []
    for name in ("split", "whole"):
        with parc.load(f"{folder}/{name}") as session:
            ends.append(([session.step().loss for _ in range(2)], session.state_dict()))
    return ends


def test_four_processes_train_llama_with_split_sequences_as_without(tmp_path: Path) -> None:
    source = EXAMPLES / "llama-sequence.parc"
    for name, sequence in (("split", "tp"), ("whole", "none")):
        compilation = compile_once(read_plan(source, {"sequence": sequence, "width": "32", "layers": "2"}), EXAMPLES)
        write_build(compilation.to_write(report_of(compilation)), tmp_path / name)
    for (losses, weights), (expected, others) in run_ranks(ranks_train, 4, str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-6)
        for name, value in others.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@settings(share(0.12), phases=[Phase.generate])  # to shrink takes minutes
@given(st.data())
def test_any_lengths_and_heads_have_the_model_s_numbers(data: st.DataObject) -> None:
    heads, ranks = data.draw(st.sampled_from([(2, 2), (4, 2), (4, 4)]))
    kv_heads = data.draw(st.sampled_from([count for count in (1, 2, 4) if count <= heads]))
    length = ranks * data.draw(st.integers(1, 4))
    gathered = " keep gathered" * data.draw(st.booleans())
    text = split(
        more=f", heads={heads}, kv_heads={kv_heads}, num_hidden_layers=1",
        lines=f"sequence model.layers.* over tp{gathered}\n",
    )
    build(text.replace("S=8", f"S={length}"), dp=1, tp=ranks)
