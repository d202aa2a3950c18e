"""`init from`: safetensors files checked against the model all at once, and read by each rank in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import parc
from parc.build import build as build_checked
from parc.checking.reports import report_of
from parc.cli import main
from parc.compiler.build.directory import read_build, write_build
from parc.compiler.initial import files as weights_module
from parc.compiler.initial.files import Expected, open_weights, shown_faults
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.pieces import put_together
from parc.compiler.layout.placement import Placement, Split, TensorType, parse_type
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.initial import Initial
from parc.runtime.state.opening import task_of
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import FLAT, TENSOR, batch, build

CPU = torch.device("cpu")
INIT = 'init from "weights"\n'


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return a state of the tiny GPT that no seed makes; the tied head stands under one of its names."""
    session = parc.load(build(folder, "", name="seeded"))
    generator = torch.Generator().manual_seed(11)
    state = {name: torch.randn(value.shape, generator=generator) * 0.1 for name, value in session.state_dict().items()}
    del state["embed.weight"]
    return state


def write(folder: Path, state: dict[str, torch.Tensor], files: int = 1) -> None:
    """Write the state in one file or several."""
    (folder / "weights").mkdir(exist_ok=True)
    for old in (folder / "weights").glob("*"):
        old.unlink()
    names = sorted(state)
    for index in range(files):
        part = {name: state[name].contiguous() for name in names[index::files]}
        save_file(part, folder / "weights" / f"part-{index}.safetensors")


@pytest.mark.parametrize("files", [1, 3])
def test_runs_begin_with_the_files_weights(tmp_path: Path, files: int) -> None:
    state = tensors(tmp_path)
    write(tmp_path, state, files)
    path = build(tmp_path, "", FLAT + INIT)
    session, plain = parc.load(path), parc.reference(path)
    found = session.state_dict()
    assert found.keys() == state.keys() | {"embed.weight"}
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert torch.equal(found["embed.weight"], state["head.weight"])
    assert all(torch.equal(plain.module.state_dict()[name], value) for name, value in found.items())
    for step in range(2):
        assert session.step(batch(step)).loss == pytest.approx(plain.step(batch(step)).loss, rel=1e-5)


class Counted:
    """A slice that notes how many numbers are read from it."""

    def __init__(self, part: Any, read: list[int]) -> None:
        self._part, self._read = part, read

    def __getitem__(self, at: Any) -> torch.Tensor:
        found: torch.Tensor = self._part[at]
        self._read.append(found.numel())
        return found


def test_every_rank_reads_its_slices_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tensors(tmp_path)
    write(tmp_path, state, 2)
    opened = read_build(build(tmp_path, TENSOR, FLAT + INIT))
    mesh = opened.programs["F"].mesh
    types = {name: parse_type(text, mesh) for name, text in opened.manifest["parameters"].items()}
    read_ranges, read = weights_module._read_ranges, list[int]()

    def counted(part: Any, ranges: Any, outer: tuple[slice, ...] = ()) -> torch.Tensor:
        return read_ranges(part if isinstance(part, Counted) else Counted(part, read), ranges, outer)

    monkeypatch.setattr(weights_module, "_read_ranges", counted)
    pieces = []
    for rank in range(mesh.world):
        initial = Initial(opened, task_of(opened.manifest), mesh, mesh.coordinates(rank), CPU)
        read.clear()
        pieces.append(initial.state(types, {}).parameters)
        assert sum(read) == sum(piece.numel() for piece in pieces[-1].values())
        assert all(piece.is_contiguous() for piece in pieces[-1].values())
    for name, type_ in types.items():
        whole = put_together([rank[name] for rank in pieces], type_.placement, mesh)
        assert torch.equal(whole, state.get(name, state["head.weight"])), name


def _trained(path: str) -> dict[str, torch.Tensor]:
    """Return the weights after two steps, whose first moments must lie as the weights do."""
    with parc.load(path) as session:
        for step in range(2):
            session.step(batch(step))
        return session.state_dict()


def test_weights_split_along_their_columns_train_as_the_plain_module_does(tmp_path: Path) -> None:
    """torch's fused AdamW walks a weight and its gradient with one index, however they lie."""
    write(tmp_path, tensors(tmp_path))
    path = build(tmp_path, TENSOR, FLAT + INIT)
    plain = parc.reference(path)
    for step in range(2):
        plain.step(batch(step))
    for trained in run_ranks(_trained, 2, str(path)):
        for name, value in plain.module.state_dict().items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("split", [Split(0, 1), Split(0, 3), Split(1, 2)])
def test_pieces_of_any_split(tmp_path: Path, split: Split) -> None:
    mesh = Mesh((("a", 2), ("b", 2)))
    whole = torch.randn(12, 8).to(torch.bfloat16)
    save_file({"w": whole, "one": torch.tensor(3.0)}, tmp_path / "x.safetensors")
    weights = open_weights(tmp_path)
    inner = Split(split.dim, split.outer * 2)
    type_ = TensorType(torch.float32, (12, 8), Placement.of(mesh, {"a": split, "b": inner}))
    pieces = [weights.piece(["v", "w"], type_, mesh, mesh.coordinates(rank)) for rank in range(4)]
    assert torch.equal(put_together(pieces, type_.placement, mesh), whole.float())
    assert weights.piece(["one"], TensorType(torch.float32, (), Placement(())), mesh, {}) == 3
    weights.close()


def test_types_are_converted_where_it_is_exact_or_said(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, dtype=torch.float64), "n": torch.ones(2)}, tmp_path / "x.safetensors")
    wanted = [Expected(("w",), (2,), torch.float32), Expected(("n",), (2,), torch.int64)]
    (first, second) = open_weights(tmp_path).faults(wanted)
    assert first == "`w` is float64 there and float32 in the model: write `rounded` to allow it"
    assert second == "`n` is float32 there and int64 in the model"
    assert open_weights(tmp_path, rounded=True).faults(wanted) == [second]


def test_of_very_many_faults_layers_are_folded_and_each_other_one_named() -> None:
    missing = [f"`h.{layer}.{part}` is missing" for layer in (2, 3, 4) for part in ("up", "down")]
    other = [f"`p{number}` is [{number}] there and [4] in the model" for number in range(104)]
    assert shown_faults([*missing, *other]) == (
        "`h.[2..4].up` is missing (3 tensors)",
        "`h.[2..4].down` is missing (3 tensors)",
        *other,
    )
    for names in (("h.0.up", "h.2.up"), ("h.0.up", "h.0.up"), ("0.h.1", "1.h.0"), ("h.00", "h.01"), ("h0", "h1")):
        assert shown_faults(faults := [f"`{name}` is missing" for name in names]) == tuple(faults)
    both = [f"`h.{layer}.e.{expert}.w` is missing" for layer in (0, 1) for expert in (4, 5)]
    assert shown_faults(both) == ("`h.[0..1].e.[4..5].w` is missing (4 tensors)",)
    apart = [f"`h.{at}.{part}` is missing" for part in range(100) for at in (1, 9)]
    assert shown_faults(apart) == tuple(apart)


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tensors(tmp_path)
    write(tmp_path, state)
    path = build(tmp_path, "", FLAT + INIT)
    del state["norm.bias"]
    state["blocks.0.mlp.up.bias"] = torch.zeros(3)
    state["blocks.7.mlp.up.bias"] = torch.zeros(3)
    write(tmp_path, state, 2)
    save_file({"norm.weight": torch.zeros(16)}, tmp_path / "weights" / "z.safetensors")
    wanted = {
        "`norm.bias` is missing",
        "`blocks.7.mlp.up.bias` is not a tensor of the model",
        "`norm.weight` is in two files",
        "`blocks.0.mlp.up.bias` is [3] there and [64] in the model",
    }
    with pytest.raises(PlanError) as refused:
        build_checked(tmp_path / "build.parc", tmp_path / "again", {})
    (fault,) = refused.value.diagnostics
    assert fault.code.name == "P0215" and set(fault.notes) == wanted
    for open_ in (parc.load, parc.reference):
        with pytest.raises(RunError) as failed:
            open_(path)
        assert failed.value.code.name == "P0215" and set(failed.value.notes) == wanted
    assert main(["run", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.count("error[P0215]") == 1 and all(text in said for text in wanted)


def test_a_folder_that_has_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path, "", FLAT + INIT)
    assert main(["check", str(tmp_path / "build.parc")]) == 1
    assert "weights` is not a folder" in capsys.readouterr().err
    (tmp_path / "weights").mkdir()
    assert main(["check", str(tmp_path / "build.parc")]) == 1
    assert "has no `*.safetensors` file" in capsys.readouterr().err
    (tmp_path / "weights" / "x.safetensors").write_text("nothing")
    assert main(["check", str(tmp_path / "build.parc")]) == 1
    assert "x.safetensors` cannot be read" in capsys.readouterr().err
    save_file({"parameter.head.weight": torch.zeros(2)}, tmp_path / "weights" / "x.safetensors")
    assert main(["check", str(tmp_path / "build.parc")]) == 1
    assert "weights` is a checkpoint of a run: use `--resume`" in capsys.readouterr().err


READS = """
import torch
from torch import nn

def make():
    layer = nn.Linear(8, 8, bias=False)
    layer.load_state_dict(torch.load("w.pt"))
    return layer
"""
ALONE = """
model "./net.py:make"
input x as input float32 [B, 8]
input y int64 [B]
sizes B=4
loss cross_entropy(output, y)
optimizer sgd lr 0.1
mesh tp=2
shard weight [_, _/tp]
"""


def test_weights_that_the_models_function_loads_are_those_of_the_build(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(READS)
    weight = torch.arange(64.0).view(8, 8) / 64
    torch.save({"weight": weight}, tmp_path / "w.pt")
    compiled = compile_plan(read_plan(Source("plan.parc", ALONE)), tmp_path)
    write_build(compiled.to_write(report_of(compiled)), tmp_path / "build")
    opened = read_build(tmp_path / "build")
    mesh = opened.programs["F"].mesh
    types = {name: parse_type(text, mesh) for name, text in opened.manifest["parameters"].items()}

    def piece(rank: int) -> torch.Tensor:
        initial = Initial(opened, task_of(opened.manifest), mesh, mesh.coordinates(rank), CPU)
        return initial.state(types, {}).parameters["weight"]

    assert torch.equal(torch.cat([piece(0), piece(1)], 1), weight)
    torch.save({"weight": weight + 1}, tmp_path / "w.pt")
    with pytest.raises(RunError, match=r"\[P0211\] `./net.py:make` reads other weights from files than it did at the"):
        piece(0)
    (tmp_path / "w.pt").unlink()
    with pytest.raises(RunError, match=r"\[P0201\] making the model failed: FileNotFoundError: .*'w.pt'"):
        piece(1)
