"""Weights of a run for others: files that transformers and plain modules load, whatever the mesh was."""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file

import parc
from parc.checking.reports import report_of
from parc.cli import main
from parc.compiler.build.directory import write_build
from parc.compiler.initial.exported import save_configs
from parc.compiler.plan.plan import read_plan
from parc.grammar.source import Source
from parc.runtime.state import exchange as importing
from parc.runtime.state.exchange import import_weights
from parc.runtime.state.opening import open_build
from tests.captured_once import compile_once
from tests.runtime.ranks import run_ranks

MODELS = """
import torch
from torch import nn


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=tied, use_cache=False,
    ))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(32, 6), nn.BatchNorm1d(6), nn.Linear(6, 32, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.arange(6.0))

    def forward(self, input_ids):
        return self.head(self.norm((self.table(input_ids) * self.scale).flatten(0, 1)).unflatten(0, input_ids.shape))


class Phases(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, 6), nn.Linear(6, 32, bias=False)
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(11))
        self.router = nn.Linear(6, 11)
        self.register_buffer("by", torch.full((6,), 0.5), persistent=False)

    def forward(self, input_ids):
        x = (self.table(input_ids) * self.by * self.turn).real.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            row, place = torch.where(chosen == at)
            y.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        return self.head(y.unflatten(0, input_ids.shape))


class Unread(Own):
    def __init__(self):
        super().__init__()
        self.above = nn.Parameter(torch.ones(3), requires_grad=False)
"""
PLAN = """\
model "./models.py:{model}" ({arguments})
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=8
loss cross_entropy({logits}, targets)
optimizer adamw lr 1e-2
data synthetic
"""
SPLIT = """\
include "parc:llama" (tp=2)
"""


def built(
    folder: Path, lines: str = "", model: str = "llama", arguments: str = "", logits: str = "output.logits"
) -> Path:
    (folder / "models.py").write_text(MODELS)
    text = PLAN.format(model=model, arguments=arguments, logits=logits) + lines
    compilation = compile_once(read_plan(Source("plan.parc", text)), folder)
    write_build(compilation.to_write(report_of(compilation)), folder / "build")
    return folder / "build"


def trained(build: str, saved: str) -> dict[str, torch.Tensor]:
    with parc.load(build) as session:
        session.step()
        session.save(saved)
        return session.state_dict()


def export(folder: Path, out: str, *words: str) -> int:
    return main(["export", str(folder / "build"), str(folder / "saved"), "-o", str(folder / out), *words])


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_split_ranks_have_trained(tied: bool, tmp_path: Path) -> None:
    build = built(tmp_path, SPLIT, arguments=f"tied={str(tied).lower()}")
    wanted = run_ranks(trained, 2, str(build), str(tmp_path / "saved"))[0]
    assert export(tmp_path, "out", "--shard-size", "6KB") == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) != tied
    assert all(file.stat().st_size < 9000 for file in (tmp_path / "out").glob("*.safetensors"))
    model = loaded(tmp_path / "out")
    assert model.config.tie_word_embeddings == tied and type(model).__name__ == "LlamaForCausalLM"
    assert all(torch.equal(model.state_dict()[name], value) for name, value in wanted.items())
    assert export(tmp_path, "narrow", "--dtype", "bf16") == 0
    assert loaded(tmp_path / "narrow").dtype == torch.bfloat16


def test_a_plan_begins_with_what_another_has_trained(tmp_path: Path) -> None:
    wanted = trained(str(built(tmp_path)), str(tmp_path / "saved"))
    assert main(["export", str(tmp_path / "saved"), "-o", str(tmp_path / "out"), "--shard-size", "6KB"]) == 0
    with parc.load(built(tmp_path, 'init from "out"\n')) as session:
        found = session.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    import_weights(open_build(tmp_path / "build"), tmp_path / "out", tmp_path / "imported", shard_bytes=6000)
    assert len([*(tmp_path / "imported").glob("state-*.safetensors")]) > 2
    with parc.load(built(tmp_path, "optimizer on lm_head lr 0\n")) as session:
        session.restore(tmp_path / "imported")
        found = session.state_dict()
        assert session.step_number == 0 and not session.optimizer.state
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_plain_module_loads_one_file_with_its_buffers(tmp_path: Path) -> None:
    build = built(tmp_path, model="Own", logits="output")
    wanted = trained(str(build), str(tmp_path / "saved"))
    assert export(tmp_path, "own.safetensors") == 0
    assert load_file(tmp_path / "own.safetensors").keys() == wanted.keys() - {"head.weight"}
    scope: dict[str, Any] = {"__name__": "models"}
    exec(MODELS, scope)
    module = scope["Own"]()
    load_model(module, tmp_path / "own.safetensors")
    assert (tmp_path / "own.safetensors").stat().st_mode & 0o777 == 0o644  # others may read it
    assert all(torch.equal(module.state_dict()[name], value) for name, value in wanted.items())
    assert main(["import", str(build), str(tmp_path / "own.safetensors"), "-o", str(tmp_path / "imported")]) == 0
    with parc.load(build) as session:
        session.restore(tmp_path / "imported")
        assert all(torch.equal(wanted[name], value) for name, value in session.state_dict().items())
    assert int(module.norm.num_batches_tracked) == 1 and not torch.equal(module.norm.running_mean, torch.zeros(6))


def test_weights_that_can_no_longer_be_read_are_told_from_a_checkpoint_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, source = built(tmp_path, model="Own", logits="output"), tmp_path / "own.safetensors"
    trained(str(made), str(tmp_path / "saved"))
    assert export(tmp_path, source.name) == 0
    monkeypatch.setattr(importing, "check_target", lambda _: source.unlink())
    assert main(["import", str(made), str(source), "-o", str(tmp_path / "imported")]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "error[P0215]" in err and "cannot be read" in err and "cannot be written" not in err, err
    assert not (tmp_path / "imported").exists()


def planted(file: Path) -> Path:
    """Make a model's file tell, by another file, that it was imported."""
    canary = file.with_name("canary")
    file.write_text(f"open({str(canary)!r}, 'w').close()\n{file.read_text()}")
    return canary


def elsewhere(folder: Path, out: str, *words: str) -> tuple[int, str]:
    """Export in a process that knows no model; return the exit code and what was said."""
    with redirect_stderr(StringIO()) as said:
        return export(folder, out, *words), said.getvalue()


@pytest.mark.parametrize("model", ["llama", "Phases"])
def test_no_code_is_imported_where_files_have_every_tensor(tmp_path: Path, model: str) -> None:
    build = built(tmp_path, model=model, logits="output.logits" if model == "llama" else "output")
    wanted = trained(str(build), str(tmp_path / "saved"))
    canary = planted(tmp_path / "models.py")
    for words in ([], ["--dtype", "bf16"]):
        assert run_ranks(elsewhere, 1, tmp_path, f"out{len(words)}", *words)[0][0] == 0
        have = load_file(tmp_path / f"out{len(words)}" / "model.safetensors")
        narrow = torch.bfloat16 if words else torch.float32
        dtypes = {name: narrow if value.is_floating_point() else value.dtype for name, value in wanted.items()}
        assert {name: value.dtype for name, value in have.items()} == dtypes
        if not words:
            assert all(torch.equal(have[name], value) for name, value in wanted.items())
    assert not canary.exists()
    if model == "llama":
        scope: dict[str, Any] = {"__name__": "models"}
        exec(MODELS, scope)
        for number, dtype in ((0, None), (2, torch.bfloat16)):
            (as_module := tmp_path / f"as-module{number}").mkdir()
            save_configs(scope["llama"](), as_module, dtype)
            for file in as_module.iterdir():
                assert (tmp_path / f"out{number}" / file.name).read_text() == file.read_text()


@pytest.mark.parametrize(("model", "made"), [("Own", "scale"), ("Unread", "above")])
def test_code_is_imported_for_what_no_file_has_and_that_is_said(tmp_path: Path, model: str, made: str) -> None:
    trained(str(built(tmp_path, model=model, logits="output")), str(tmp_path / "saved"))
    canary = planted(tmp_path / "models.py")
    ((code, said),) = run_ranks(elsewhere, 1, tmp_path, "out")
    assert code == 0 and canary.exists()
    assert f"importing `{tmp_path / 'models.py'}`: `{made}` is in no file, and the model's code makes it" in said
    assert made in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("place", ["build", "saved"])
def test_code_in_a_folder_that_somebody_else_may_have_written_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    trained(str(built(tmp_path, model="Own", logits="output")), str(tmp_path / "saved"))
    canary = planted(tmp_path / "models.py")
    (tmp_path / "models.py").rename(tmp_path / place / "models.py")
    manifest = tmp_path / "build" / "manifest.json"
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "folder": "." if place == "build" else "../saved"}))
    assert export(tmp_path, "out") == 1
    said = " ".join(capsys.readouterr().err.split())
    what = "build" if place == "build" else "checkpoint"
    assert "error[P0308]" in said and f"which is in the folder of the {what}" in said and "--import-model" in said
    assert not canary.exists() and not (tmp_path / "out").exists()
    assert export(tmp_path, "out", "--import-model") == 0 and canary.exists()


def test_what_cannot_be_exported_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(str(built(tmp_path)), str(tmp_path / "saved"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert export(tmp_path, "full") == 1
    assert "exists; it is left as it is" in capsys.readouterr().err
    assert export(tmp_path, "out", "--shard-size", "5") == 2
    assert export(tmp_path, "out", "--shard-size", "infGB") == 2
    assert export(tmp_path, "out.pt") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"`-o {tmp_path}/out.safetensors` writes one file, and `-o {tmp_path}/out` a folder" in said
    build, saved = str(tmp_path / "build"), str(tmp_path / "saved")
    assert main(["export", saved, build, "-o", "out"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        f"parc export: `{saved}` is a checkpoint, and the build stands before it"
        f" help: parc export {build} {saved} -o out"
    )
    assert main(["run", saved]) == 1
    assert f"`{saved}` is a checkpoint, not a build" in " ".join(capsys.readouterr().err.split())
    assert main(["export", build, "-o", "out"]) == 1
    assert f"`{build}` is a build, not a checkpoint" in " ".join(capsys.readouterr().err.split())
    assert export(tmp_path, "out", "--merge") == 1
    assert "no adapter wraps a layer" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    built(tmp_path / "other", model="Own", logits="output")
    (tmp_path / "build").rename(tmp_path / "first")
    (tmp_path / "other" / "build").rename(tmp_path / "build")
    assert export(tmp_path, "out") == 1
    assert "is a checkpoint of another model" in capsys.readouterr().err
    (tmp_path / "names").mkdir()
    save_file({"table.weight": torch.zeros(32, 6)}, tmp_path / "names" / "a.safetensors")
    assert main(["import", str(tmp_path / "build"), str(tmp_path / "names"), "-o", str(tmp_path / "in")]) == 1
    said = capsys.readouterr().err
    assert "are not the model's" in said and "`norm.weight` is missing" in said and not (tmp_path / "in").exists()
    (tmp_path / "build").rename(tmp_path / "elsewhere")
    assert main(["export", str(tmp_path / "saved"), "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "was written by a run of the build" in said and "name the build too" in said
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert not (tmp_path / "out").exists()
