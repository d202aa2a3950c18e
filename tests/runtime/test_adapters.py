"""Adapters of `peft`: a person's own model with them, split as its layers are, and written for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import parc
from parc.checking.reports import report_of
from parc.cli import main
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from parc.grammar.source import Source
from tests.captured_once import compile_once
from tests.checked_plans import checked, held

MODELS = """
def base(tied=False, layers=2):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, tie_word_embeddings=tied,
    ))


def adapted(target="all-linear", saved="lm_head", tied=False, layers=2):
    from peft import LoraConfig, get_peft_model

    target = target if target == "all-linear" else target.split(" ")
    return get_peft_model(base(tied, layers), LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=target, modules_to_save=saved.split() or None,
    ))
"""
PLAN = """\
model "./models.py:adapted"
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=8
loss cross_entropy(output.logits, targets)
optimizer adamw lr 1e-2 eps 1e-4
init from "pretrained"
"""
SHORT = PLAN.replace(':adapted"', ':adapted" (layers=1)')
SPLIT = """\
include "parc:llama" (tp=2)
"""
PREFIX = "base_model.model."

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),  # which is what is tested
]


def models() -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "models"}
    exec(MODELS, scope)
    return scope


def batch(step: int) -> dict[str, torch.Tensor]:
    tokens, targets = torch.randint(0, 32, (2, 4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "targets": targets}


def build(folder: Path, text: str, name: str) -> tuple[Path, Any]:
    compilation = compile_once(read_plan(Source("plan.parc", text)), folder)
    write_build(compilation.to_write(report_of(compilation)), folder / name)
    return folder / name, compilation


def trained(folder: str, saved: str) -> dict[str, torch.Tensor]:
    with parc.load(folder) as session:
        for step in range(2):
            session.step(batch(step))
        session.save(saved)
        return session.state_dict()


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_adapters_are_trained_beside_pretrained_weights_and_written_for_peft_and_for_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    (tmp_path / "models.py").write_text(MODELS)
    models()["base"](layers=1).save_pretrained(tmp_path / "pretrained")
    first = loaded(tmp_path / "pretrained").state_dict()

    path, made = build(tmp_path, SHORT + SPLIT, "split")
    assert checked(made).report["checks"]["numbers"] == "tested"
    types = json.loads((path / "manifest.json").read_text())["parameters"]
    layer = f"{PREFIX}model.layers.0."
    kinds = {"self_attn.q_proj": ("base_layer", "lora_B.default"), "mlp.down_proj": ("base_layer", "lora_A.default")}
    for module, split in kinds.items():
        for own in ("base_layer", "lora_A.default", "lora_B.default"):
            assert ("/tp" in types[f"{layer}{module}.{own}.weight"]) == (own in split), (module, own)
    assert "/tp" in types[f"{PREFIX}lm_head.modules_to_save.default.weight"]

    alone = str(build(tmp_path, SHORT, "alone")[0])
    with parc.load(alone) as session:
        begun = session.state_dict()
    plain: nn.Module = models()["adapted"](layers=1)
    plain.load_state_dict(begun)
    assert torch.equal(begun[f"{layer}mlp.up_proj.base_layer.weight"], first["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(begun[f"{PREFIX}lm_head.modules_to_save.default.weight"], first["lm_head.weight"])
    optimizer = torch.optim.AdamW([value for value in plain.parameters() if value.requires_grad], 1e-2, eps=1e-4)
    for given in map(batch, range(2)):
        optimizer.zero_grad()
        cross_entropy(plain(given["input_ids"]).logits.flatten(0, 1), given["targets"].flatten()).backward()
        optimizer.step()
    found = trained(alone, str(tmp_path / "saved"))
    torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    frozen = [name for name in found if ".base_layer." in name or "norm" in name]
    assert frozen and all(torch.equal(found[name], begun[name]) for name in frozen)

    plain.load_state_dict(found)
    tokens = batch(9)["input_ids"]
    wanted = plain.eval()(tokens).logits
    for out, words in {"adapter": (), "merged": ("--merge",), "narrow": ("--merge", "--dtype", "bf16")}.items():
        assert main(["export", str(tmp_path / "saved"), "-o", str(tmp_path / out), *words]) == 0
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    model = PeftModel.from_pretrained(loaded(tmp_path / "pretrained"), tmp_path / "adapter").eval()
    assert torch.equal(model(tokens).logits, wanted)
    assert "PeftModel.from_pretrained(base" in capsys.readouterr().err
    for file in (tmp_path / "adapter").glob("*.safetensors"):
        file.rename(tmp_path / "pretrained" / file.name)  # beside the model's own
    assert main(["import", alone, str(tmp_path / "pretrained"), "-o", str(tmp_path / "imported")]) == 0
    with parc.load(alone) as session:
        begun = session.state_dict()
        session.restore(tmp_path / "imported")
        imported = session.state_dict()
    assert all(torch.equal(begun[name], found[name]) and torch.equal(imported[name], found[name]) for name in found)
    merged = plain.merge_and_unload().state_dict()  # type: ignore[operator]
    ours = loaded(tmp_path / "merged").state_dict()
    assert ours.keys() == merged.keys()
    assert all(torch.equal(ours[name], value) for name, value in merged.items())
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")  # the sums are rounded, and not what is added
    assert all(torch.equal(value, merged[name].bfloat16()) for name, value in narrow.items())


STAGES = """\
mesh dp=2, pp=2
shard input_ids, targets [B/dp, _]
stage before base_model.model.model.layers.1 over pp
schedule 1f1b microbatches 2
zero 1 over dp
"""
ZERO = SPLIT + "mesh dp=2\nshard input_ids, targets [B/dp, _]\nzero 3 over dp\nschedule microbatches 2\n"


@pytest.mark.parametrize("lines", [STAGES, ZERO], ids=["dp, pp, zero 1", "dp, tp, zero 3"])
def test_adapters_are_trained_in_pipelines_and_with_zero(tmp_path: Path, lines: str) -> None:
    """All ranks of one model are simulated, and in the pipeline it is compared with the module itself; only what is
    trained has state of the optimizer."""
    (tmp_path / "models.py").write_text(MODELS)
    text = PLAN.replace('init from "pretrained"\n', "").replace(':adapted"', ':adapted" (target="q_proj down_proj")')
    compilation = compile_once(read_plan(Source("plan.parc", text + lines)), tmp_path)
    report = checked(compilation).report if lines == STAGES else held(compilation, 2)
    types = compilation.build.manifest["parameters"]
    base, low = (f"{PREFIX}model.layers.1.mlp.down_proj.{own}.weight" for own in ("base_layer", "lora_A.default"))
    assert low not in compilation.frozen and "/dp" in types[low]
    assert base in compilation.frozen and ("/dp" in types[base]) == ("zero 3" in lines)
    for role, entry in zip(compilation.build.roles.values(), report["memory"], strict=True):
        gradients = role.programs["REDUCE"].main.returned("gradient")
        assert gradients and all("lora_" in name or "modules_to_save" in name for name in gradients)
        assert 0 < entry["state"]["optimizer"] < entry["state"]["parameters"]


def test_a_plan_begins_with_adapters_too_and_a_shared_weight_is_not_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    arguments = '(target="embed_tokens q_proj", saved="", tied=true, layers=1)'
    text = PLAN.replace(':adapted"', f':adapted" {arguments}').replace('init from "pretrained"\n', "")
    path, _ = build(tmp_path, text, "first")
    wanted = trained(str(path), str(tmp_path / "saved"))
    (tmp_path / "pretrained").mkdir()
    whole = tmp_path / "pretrained" / "model.safetensors"
    assert main(["export", str(tmp_path / "saved"), "-o", str(whole)]) == 0
    with parc.load(build(tmp_path, text + 'init from "pretrained"\n', "second")[0]) as session:
        found = session.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert main(["export", str(tmp_path / "saved"), "-o", str(tmp_path / "merged"), "--merge"]) == 1
    assert "are one weight, but an adapter changes" in capsys.readouterr().err
