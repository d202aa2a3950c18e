"""State of padded parameters: files hold the model's own entries, whatever the plan pads; two real ranks train as
one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import parc
from parc.compiler.build.directory import read_build
from parc.compiler.initial.recipes import record
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import parse_type
from parc.compiler.padding.pads import pads_from
from parc.compiler.padding.tensors import spread
from parc.runtime.state.checkpoint import read_checkpoint
from parc.runtime.state.initial import Initial
from parc.runtime.state.opening import task_of
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import ONE, PLAN, TENSOR, batch, build

STEPS = 2
ODD = PLAN.replace("vocab=256", "vocab=257")
PADDED = TENSOR.replace("vocab     embed, head over tp", "vocab     embed, head over tp pad")


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A padded plan of two ranks and an unpadded one of one rank; and the padded one from files."""
    folder = tmp_path_factory.mktemp("padded")
    made = {"one": build(folder, ONE, ODD, "one"), "padded": build(folder, PADDED, ODD, "padded")}
    state = {name: value * 1.5 for name, value in parc.reference(made["one"]).module.state_dict().items()}
    (folder / "weights").mkdir()
    del state["head.weight"]  # tied: one of its names is enough
    save_file(state, folder / "weights" / "model.safetensors")
    made["files"] = build(folder, PADDED, ODD + 'init from "weights"\n', "files")
    return made


def train(path: str, first: int, checkpoint: str, restores: bool) -> dict[str, Any]:
    """Train some steps of one rank; return its losses, whole weights, and the local piece of the padded table."""
    with parc.load(path) as session:
        start = session.state_dict()
        if restores:
            session.restore(checkpoint)
        losses = [session.step(batch(step)).loss for step in range(first, first + STEPS)]
        session.save(f"{checkpoint}-{first + STEPS}")
        piece = session.state.parameters["embed.weight"].detach().clone()
        return {"losses": losses, "weights": session.state_dict(), "start": start, "piece": piece}


class Numbers(nn.Module):
    """Whole numbers that float32 does not hold, and zeros with a sign."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.full((6,), 2**40 + 1))
        self.register_buffer("zeros", torch.full((6,), -0.0))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_piece_has_the_bits_of_the_model_s_tensor_and_zeros_for_padding(rank: int) -> None:
    recipes = record(Numbers, 0).recipes
    initial = Initial.__new__(Initial)
    initial._mesh, initial._coordinates, initial._device = Mesh((("tp", 2),)), {"tp": rank}, torch.device("cpu")
    for name, text in (("large", "i64[6/tp]"), ("zeros", "f32[6/tp]")):
        piece = initial._drawn_piece(recipes[name], parse_type(text, initial._mesh), ())
        whole = recipes[name].whole()
        assert torch.equal(piece, whole[:3]) and torch.equal(piece.sign(), whole[:3].sign())
        assert not piece.dtype.is_floating_point or bool(piece.signbit().all())
    mask = torch.tensor([True, True, False, True])
    assert torch.equal(spread(torch.full((3,), 5.0), [mask]), torch.tensor([5.0, 5.0, 0.0, 5.0]))


def test_checkpoints_change_between_padded_and_unpadded_plans(builds: dict[str, Path], tmp_path: Path) -> None:
    plain = train(str(builds["one"]), 0, str(tmp_path / "one"), False)
    more = train(str(builds["one"]), STEPS, str(tmp_path / "one") + f"-{STEPS}", True)
    ranks = run_ranks(train, 2, str(builds["padded"]), 0, str(tmp_path / "padded"), False)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert all(torch.equal(value, plain["start"][name]) for name, value in rank["start"].items())
        assert rank["piece"].shape == (129, 16)
        torch.testing.assert_close(rank["weights"], plain["weights"], rtol=1e-3, atol=1e-5)
    assert torch.count_nonzero(ranks[1]["piece"][128]) == 0 and torch.count_nonzero(ranks[1]["piece"][127]) > 0
    saved = tmp_path / f"padded-{STEPS}"
    shapes = read_checkpoint(saved).shapes
    kinds = ("parameter", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    assert {shapes[f"{kind}.embed.weight"] for kind in kinds} == {(257, 16)}
    # the unpadded plan goes on from the padded one's state, and the other way round
    back = train(str(builds["one"]), STEPS, str(saved), True)
    assert back["losses"] == pytest.approx(more["losses"], rel=1e-5)
    for rank in run_ranks(train, 2, str(builds["padded"]), STEPS, str(tmp_path / f"one-{STEPS}"), True):
        assert rank["losses"] == pytest.approx(more["losses"], rel=1e-5)


def test_files_of_weights_hold_what_the_model_has(builds: dict[str, Path], tmp_path: Path) -> None:
    expected = {name: value * 1.5 for name, value in parc.reference(builds["one"]).module.state_dict().items()}
    for rank in run_ranks(train, 2, str(builds["files"]), 0, str(tmp_path / "files"), False):
        assert all(torch.equal(value, expected[name]) for name, value in rank["start"].items())


@pytest.mark.parametrize("more", ["", 'init from "weights"\n'])
def test_a_rank_may_hold_nothing_but_padding(builds: dict[str, Path], more: str) -> None:
    wide = "mesh tp=128\nvocab embed, head over tp pad\n"
    opened = read_build(build(builds["one"].parent, wide, ODD + more, "wide"))
    mesh, (pad,) = opened.programs["F"].mesh, pads_from(opened.manifest["padding"])["embed.weight"]
    assert (pad.real, pad.padded) == (257, 384)
    types = {"embed.weight": parse_type(opened.manifest["parameters"]["embed.weight"], mesh)}
    expected = parc.reference(builds["files" if more else "one"]).module.state_dict()["embed.weight"]
    for rank in (0, 85, 86, 127):
        initial = Initial(opened, task_of(opened.manifest), mesh, mesh.coordinates(rank), torch.device("cpu"))
        piece = initial.state(types, {}).parameters["embed.weight"]
        rows = expected[3 * rank : 3 * rank + 3]
        assert piece.shape == (3, 16) and torch.equal(piece[: len(rows)], rows)
        assert torch.count_nonzero(piece[len(rows) :]) == 0
