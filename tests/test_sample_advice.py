"""Warnings of a build about its data, and about weights that it does not read: entries that forward takes and no line
names, and labels that are not the next tokens. None where all is right."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parc.advice import warnings_of
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.compiling.plan_data import FirstSample, check_sample
from parc.grammar.diagnostics import Diagnostic, Severity
from parc.grammar.source import Source
from parc.sample_advice import sample_warnings
from tests.runtime.tiny import EXAMPLES

SMALL = (
    "hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,"
    " vocab_size=32"
)
PLAN = """
model "MODEL" (ARGUMENTS)
input input_ids int64 [B, S]
input labels int64 [B, S]
sizes B=4, S=8
loss LOSS
data synthetic
optimizer adamw lr 1e-2
"""
MODELS = '''
import sys
import torch
from torch import nn
from gpt import GPT

class Right(nn.Module):
    """It moves the tokens to the right by itself, so its scores at a token are those for that token."""
    def __init__(self):
        super().__init__()
        self.gpt = GPT(layers=1, width=16, heads=2, vocab=24, length=8, dropout=0.0)
    def forward(self, input_ids):
        return self.gpt(torch.cat([torch.zeros_like(input_ids[:, :1]), input_ids[:, :-1]], 1))

class Left(Right):
    def forward(self, input_ids):
        return self.gpt(input_ids)

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    def forward(self, input_ids):
        return self.head(self.layer(self.table(input_ids)))
'''
LOGITS, OWN = "cross_entropy(output.logits, labels)", "output.loss"
TOKENS = torch.tensor([5, 3, 7, 7, 2, 9, 1, 4, 6])
AHEAD = TOKENS.index_fill(0, torch.tensor([1, 2]), -100)
LABELS = {
    "same": TOKENS[:-1], "same, some ignored": AHEAD[:-1], "next": TOKENS[1:], "next, some ignored": AHEAD[1:],
    "tags": TOKENS[:-1] % 3, "none": torch.full((8,), -100),
}  # fmt: skip


@cache
def compiled(name: str, loss: str, arguments: str = SMALL) -> Compiled:
    model = "parc.hf:model" if arguments else f"./models.py:{name}"
    text = PLAN.replace("MODEL", model).replace("LOSS", loss)
    text = text.replace("ARGUMENTS", f'name="{name}", {arguments}' if arguments else "")
    return compile_plan(read_plan(Source("small.parc", text)), Path.cwd())


def said(compilation: Compiled, labels: torch.Tensor | None, others: Mapping[str, Any] | None = None) -> list[str]:
    """Return the codes and messages of warnings where the first sample has these labels; None where there is none."""
    data = compilation.plan.data
    assert data is not None
    tensors = {"input_ids": TOKENS[:-1], "labels": labels} if labels is not None else {}
    sample = [FirstSample(data, tensors, others or {})] if tensors or others else []
    return [f"{one.code.name} {one.message}; {one.help}" for one in sample_warnings(compilation, sample)]


@pytest.mark.parametrize("loss", [LOGITS, OWN])
def test_labels_of_a_causal_model_of_transformers_are_the_next_tokens_once(loss: str) -> None:
    model = compiled("LlamaForCausalLM", loss)
    wrong = {"same", "same, some ignored"} if loss == LOGITS else {"next", "next, some ignored"}
    for name, labels in LABELS.items():
        found = [one.partition(";")[0] for one in said(model, labels)]
        assert bool(found) == (name in wrong or (loss == LOGITS and name == "none")), name
    if loss == LOGITS:
        (alone,) = said(model, LABELS["same"])
        assert alone.startswith("P0123 LlamaForCausalLM predicts the next token, and the loss compares its scores with")
        assert "; write `loss output.loss`, which shifts labels by one" in alone
        (unknown,) = said(model, None)
        assert unknown.endswith("or, if the data holds the next tokens, call them `targets`")
    else:
        assert said(model, LABELS["next"])[0].startswith(
            "P0123 `labels` holds the next token in each place, and the own"
        )
        assert not said(model, None)


def test_labels_of_tokens_and_of_texts_raise_no_warning_though_the_backbone_is_causal() -> None:
    tagging = compiled("LlamaForTokenClassification", LOGITS, f"{SMALL}, num_labels=3")
    assert not said(tagging, None) and not said(tagging, LABELS["tags"])


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "gpt.py").write_text((EXAMPLES / "gpt.py").read_text())


@pytest.mark.usefixtures("models")
def test_a_model_of_ones_own_is_known_by_its_attention_and_by_what_it_moves() -> None:
    loss = "cross_entropy(output, labels)"
    same, ahead = LABELS["same"], LABELS["next"]
    left, right, encoder = (compiled(name, loss, "") for name in ("Left", "Right", "Encoder"))
    assert said(left, same) and not said(left, ahead) and not said(left, None)
    assert not said(right, same) and not said(encoder, same)
    text = (
        PLAN.replace("input labels int64 [B, S]\n", "")
        .replace("labels", "input_ids")
        .replace("MODEL", "./models.py:Left")
    )
    alone = text.replace("ARGUMENTS", "").replace("LOSS", "cross_entropy(output, input_ids)")
    (warning,) = sample_warnings(compile_plan(read_plan(Source("same.parc", alone)), Path.cwd()), [])
    assert (
        warning.code.name == "P0123"
        and warning.help == "let the data hold the next token in each place, as another input"
    )


def test_an_entry_that_forward_takes_and_no_line_names_is_told_with_its_line() -> None:
    model = compiled("LlamaForCausalLM", OWN)
    others = {"attention_mask": torch.ones(8, dtype=torch.bool), "position_ids": [0] * 8, "text": "abc", "labels": 3}
    found = said(model, LABELS["same"], others)
    assert [one.partition("; add ")[2].partition(", and")[0] for one in found] == [
        "`input attention_mask bool [B, S]`", "`input position_ids int64 [B, S]`",
    ]  # fmt: skip
    assert all(
        one.startswith(f"P0122 the data's `{name}` is left out") for one, name in zip(found, others, strict=False)
    )


SETS = """
import torch
def entries(kind):
    sample = {"input_ids": torch.arange(8), "labels": torch.arange(8), "attention_mask": torch.ones(8)}
    return [sample] * 4 if kind == "rows" else iter([sample] * 4)
def made(number):
    return entries("rows")[0]
"""


@pytest.mark.parametrize(
    "data", ['dataset "./sets.py:entries" (kind="rows")', 'dataset "./sets.py:entries" (kind="stream")',
             '"./sets.py:made"', 'folder "saved"'],
)  # fmt: skip
def test_every_form_of_data_tells_what_else_its_samples_hold(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets.py").write_text(SETS)
    rows = {"input_ids": [[*range(8)]] * 4, "labels": [[*range(8)]] * 4, "attention_mask": [[1.0] * 8] * 4}
    if "saved" in data:
        datasets.Dataset.from_dict(rows).save_to_disk("saved")
    model = compiled("LlamaForCausalLM", OWN)
    text = PLAN.replace("synthetic", data).replace("LOSS", OWN).replace("MODEL", "m.py:M").replace("ARGUMENTS", "")
    plan = read_plan(Source("data.parc", text))
    (sample,) = check_sample(plan, tmp_path, model.build)
    assert list(sample.others) == ["attention_mask"]


@pytest.mark.parametrize(
    ("change", "severity", "line"),
    [("", Severity.WARNING, '`init from "saved"`'), (", vocab_size=16", Severity.NOTE, "another model"),
     (', dtype="bfloat16"', Severity.WARNING, '`init from "saved" rounded`'),
     ("", Severity.WARNING, "safetensors, and `init from")],
)  # fmt: skip
def test_weights_beside_a_configuration_that_no_line_reads_are_told(
    change: str, severity: Severity, line: str, tmp_path: Path
) -> None:
    model: Any = compiled("LlamaForCausalLM", LOGITS).recorded.module
    folder = tmp_path / "saved"
    model.config.save_pretrained(folder)
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace("{", '{"architectures": ["LlamaForCausalLM"],', 1)
    )
    text = PLAN.replace('"MODEL" (ARGUMENTS)', f'"parc.hf:folder" (path="saved"{change})').replace("LOSS", OWN)

    def told(text: str) -> list[Diagnostic]:
        compilation = compile_plan(read_plan(Source("saved.parc", text)), tmp_path)
        return [one for one in warnings_of(compilation) if one.code.name == "P0124"]

    if line.startswith("safetensors"):
        torch.save({}, folder / "pytorch_model.bin")
    else:
        save_file(
            {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}, folder / "model.safetensors"
        )
    (one,) = told(text)
    assert one.severity is severity and line in one.help
    if "rounded" in line:
        assert not told(text + line.strip("`"))
