"""Checkpoints by shards: each rank writes and reads its own rectangles, under any plan; files that are missing, altered
or that do not make up a tensor are refused by name."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import parc
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import AxisType, Placement, Split, TensorType
from parc.compiler.padding.pads import Pad, padded_shape
from parc.runtime.ranks.faults import RunError
from parc.runtime.state import shards as shard_files
from parc.runtime.state.checkpoint import read_checkpoint
from parc.runtime.state.index import StoredTensor, extent, layouts_of
from parc.runtime.state.opening import build_mesh, open_build
from parc.runtime.state.saving import LocalPart, stored_of
from parc.runtime.state.shards import Piece
from tests.compiler.drawn import meshes, placed
from tests.draws import share
from tests.runtime.ranks import run_ranks
from tests.runtime.shard_ranks import hold, numbers, ranks_of, restore_all, save_all
from tests.runtime.tiny import ONE, PLAN, TENSOR, batch, build

# ---- any types


@st.composite
def stored_as(
    draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh, dtype: torch.dtype, roles: list[str]
) -> StoredTensor:
    """Draw how a plan stores a tensor of a shape: dims split over some axes, fused ones too, padded where they do not
    divide."""
    left = [axis for axis in draw(st.permutations(mesh.names)) if axis != "pp"]
    types: dict[str, AxisType] = {}
    pads = []
    for dim, size in enumerate(shape):
        outer = draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
        axes = [left.pop() for _ in range(draw(st.integers(0, 2))) if left]
        number = math.prod(mesh.size(axis) for axis in axes)
        real = size // outer
        if real % number:
            pads.append(Pad(dim, outer, real, -(-real // number) * number))
        for axis in axes:
            types[axis] = Split(dim, outer)
            outer *= mesh.size(axis)
    type_ = TensorType(dtype, padded_shape(shape, pads), Placement.of(mesh, types))
    owners = draw(st.lists(st.sampled_from(roles), min_size=1, unique=True))
    return StoredTensor(type_, tuple(pads), tuple(sorted(owners)))


@st.composite
def two_plans(draw: st.DrawFn) -> list[tuple[dict[str, StoredTensor], Mesh, list[str]]]:
    """Draw two plans of the same tensors, the second perhaps with a pipeline."""
    mesh = draw(meshes)
    first = {f"parameter.{name}": StoredTensor(draw(placed(mesh, ["I"])), (), ("",)) for name in "ab"}
    first["buffer.count"] = StoredTensor(TensorType(torch.int64, (), Placement.whole(mesh)), (), ("",))
    first["buffer.empty"] = StoredTensor(TensorType(torch.float32, (0, 3), Placement.whole(mesh)), (), ("",))
    other = Mesh((("dp", 2), ("pp", draw(st.sampled_from([1, 2]))), ("tp", draw(st.sampled_from([2, 3])))))
    names = [f"pp{other.coordinates(rank)['pp']}" for rank in range(other.world)]
    drawn = (key for key, one in first.items() if 0 not in one.shape)
    second = {key: draw(stored_as(first[key].shape, other, first[key].type.dtype, sorted(set(names)))) for key in drawn}
    empty = TensorType(torch.float32, (0, 3), Placement.whole(other))
    second["buffer.empty"] = StoredTensor(empty, (), ("pp0",))
    plans = [(first, mesh, [""] * mesh.world), (second, other, names)]
    return draw(st.permutations(plans))


@share(0.25)
@given(two_plans())
def test_what_one_plan_saves_another_restores(plans: list[tuple[dict[str, StoredTensor], Mesh, list[str]]]) -> None:
    (stored, mesh, roles), (others, other_mesh, other_roles) = plans
    wholes = numbers(stored, 0)
    with tempfile.TemporaryDirectory() as folder:
        save_all(Path(folder, "saved"), ranks_of(stored, mesh, roles, wholes), stored)
        files = [path for path in Path(folder, "saved").iterdir() if path.suffix == ".safetensors"]
        entries = sum(value.numel() for path in files for value in load_file(path).values())
        assert entries == sum(whole.numel() for whole in wholes.values())  # each is written once, and no padding
        for plan, place, names in ((stored, mesh, roles), (others, other_mesh, other_roles)):
            ranks = ranks_of(plan, place, names, None)
            restore_all(Path(folder, "saved"), ranks, plan)
            hold(ranks, ranks_of(plan, place, names, wholes))


def test_ranks_that_hold_the_same_numbers_share_the_writing() -> None:
    mesh = Mesh((("dp", 4), ("tp", 2)))
    whole, split = Placement.whole(mesh), Placement.of(mesh, {"tp": Split(0)})
    sizes = range(8, 40)
    stored = {
        f"parameter.{size}{place is split}": StoredTensor(TensorType(torch.float32, (2 * size,), place), (), ("",))
        for size in sizes
        for place in (whole, split)
    }
    layouts = layouts_of(stored, mesh, [""] * mesh.world)
    assert layouts["parameter.8True"].files == (0, 1) and layouts["parameter.8False"].files == (0,)
    written = [0] * mesh.world
    for layout in layouts.values():
        for rectangle, rank in layout.rectangles():
            written[rank] += math.prod(extent(rectangle))
    assert max(written) - min(written) <= 2 * 2 * max(sizes) and sum(written) == 2 * 2 * sum(sizes)


def test_a_piece_is_written_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_BLOCK", 64)
    mesh, pads = Mesh((("tp", 3),)), (Pad(0, 2, 4, 6), Pad(1, 1, 5, 7))
    type_ = TensorType(torch.float32, (12, 7), Placement.of(mesh, {"tp": Split(0, 2)}))
    whole = torch.arange(40.0).reshape(8, 5)
    ranks = ranks_of({"parameter.w": StoredTensor(type_, pads, ("",))}, mesh, [""] * 3, {
        "parameter.w": whole, "optimizer.exp_avg.w": whole, "optimizer.exp_avg_sq.w": whole})  # fmt: skip
    rows = []
    for rank in ranks:
        piece: Piece = rank.files.written(rank.state, rank.optimizer, {})["parameter.w"] if rank is not ranks[2] else (
            rank.files._pieces(rank.state)["parameter.w"])  # fmt: skip
        blocks = list(piece.blocks())
        assert all(block.numel() * 4 <= 64 for block in blocks)
        rows += [torch.cat(blocks)] if blocks else []
    assert torch.equal(torch.cat(rows), whole[[0, 1, 4, 5, 2, 3, 6, 7]])  # the third rank has padding alone


# ---- plans of one model

ODD = PLAN.replace("vocab=256", "vocab=257")
_DATA = "mesh dp={dp}\nshard tokens, targets [B/dp, _]\n"
PLANS = {
    "one": ONE,
    "zero 1": _DATA.format(dp=4) + "zero 1 over dp\n",
    "zero 2": _DATA.format(dp=2) + "zero 2 over dp\n",
    "zero 3": _DATA.format(dp=2) + "zero 3 over dp\n",
    "tp": TENSOR.replace("head over tp", "head over tp pad"),
    "dp and tp": TENSOR.replace("head over tp", "head over tp pad").replace("tp=2", "dp=2, tp=2")
    + _DATA.split("\n")[1] + "\nzero 3 over dp\n",
    "pp": "mesh pp=2\nstage before blocks.1 over pp\nschedule 1f1b microbatches 2\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model under many plans."""
    folder = tmp_path_factory.mktemp("shards")
    plan = ODD.replace("schedule  microbatches 2\n", "")
    lines = {name: text if "schedule" in text else text + "schedule microbatches 2\n" for name, text in PLANS.items()}
    return {name: build(folder, text, plan, name.replace(" ", "")) for name, text in lines.items()}


def test_plans_of_one_model_restore_what_the_others_save(builds: dict[str, Path], tmp_path: Path) -> None:
    cases = {}
    for name, path in builds.items():
        opened = open_build(path)
        mesh = build_mesh(opened)
        roles = [opened.role_at(mesh.coordinates(rank)).name for rank in range(mesh.world)]
        cases[name] = (stored_of(opened), mesh, roles)
    wholes = numbers(cases["one"][0], 1)
    for name, (stored, mesh, roles) in cases.items():
        save_all(tmp_path / name, ranks_of(stored, mesh, roles, wholes), stored)
        shapes = read_checkpoint(tmp_path / name).shapes
        assert shapes == {key: tuple(whole.shape) for key, whole in wholes.items()}
    assert len(list((tmp_path / "dp and tp").glob("*.safetensors"))) == 4
    names = [*cases]
    for at, (stored, mesh, roles) in enumerate(cases.values()):
        wanted = ranks_of(stored, mesh, roles, wholes)
        for saved in {"one", names[at - 1], names[at - 3]}:  # each is read by two others
            ranks = ranks_of(stored, mesh, roles, None)
            restore_all(tmp_path / saved, ranks, stored)
            hold(ranks, wanted)


def run(path: str, start: str, end: str) -> dict[str, Any]:
    """Restore, train two steps, save; and what a rank that cannot write leaves behind."""
    with parc.load(path) as session:
        if start:
            session.restore(start)
        first = session.step_number
        losses = [session.step(batch(step)).loss for step in range(first, first + 2)]
        session.save(end)
        whole = session.state_dict()
        local = session.state_dict(local=True)
        before = Path(end, "state.json").read_bytes()
        said = []
        with pytest.MonkeyPatch.context() as patched:
            if session.rank == session.world - 1:
                patched.setattr("parc.runtime.state.saving.write_shard", _full)
            session.step(batch(9))
            for _ in range(2):
                with pytest.raises(RunError) as error:
                    session.save(end)
                said.append(error.value.message)
        with pytest.MonkeyPatch.context() as patched:
            if session.rank == session.world - 1:
                patched.setattr(Path, "is_dir", lambda _: False)
            for call in (session.save, session.check_save):
                with pytest.raises(RunError, match=r"in `.*` rank 1 does not find the files that rank 0 makes"):
                    call(end)
        session.check_save(end)
        assert Path(end, "state.json").read_bytes() == before
        session.restore(end)
        assert all(torch.equal(value, whole[name]) for name, value in session.state_dict().items())
        return {"losses": losses, "whole": whole, "local": local, "said": said}


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_real_ranks_save_and_restore_under_other_plans(builds: dict[str, Path], tmp_path: Path) -> None:
    with parc.load(builds["one"]) as session:
        losses = [session.step(batch(step)).loss for step in range(4)]
    sharded = run_ranks(run, 2, str(builds["zero 3"]), "", str(tmp_path / "first"))
    staged = run_ranks(run, 2, str(builds["pp"]), str(tmp_path / "first"), str(tmp_path / "second"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    for rank, folder in [(rank, tmp_path / "first") for rank in sharded] + [(r, tmp_path / "second") for r in staged]:
        full = f"`{folder}` cannot be written: no space left on device"
        assert rank["said"] == [f"`state-00001.safetensors` of {full}"] * 2
    for rank in sharded:
        assert rank["losses"] == pytest.approx(losses[:2], rel=1e-5)
    for rank in staged:
        assert rank["losses"] == pytest.approx(losses[2:], rel=1e-5)
    whole = sharded[0]["whole"]
    for name in ("embed.weight", "head.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.down.bias"):
        found = torch.full_like(whole[name], torch.nan)
        for rank in sharded:
            part: LocalPart = rank["local"][name]
            assert part.shape == tuple(whole[name].shape) and part.tensor.numel() < whole[name].numel()
            index = [torch.cat([torch.arange(*range_) for range_ in ranges]) for ranges in part.ranges]
            found[torch.meshgrid(*index, indexing="ij")] = part.tensor
        assert torch.equal(found, whole[name])
