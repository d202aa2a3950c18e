"""Checkpoints that are not as they were written are refused by name; those of older versions are read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import parc
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Placement, Split, TensorType
from parc.grammar.codes import BAD_STATE
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.checkpoint import CHECKPOINT_FORMAT, read_checkpoint
from parc.runtime.state.index import FileLayout, StoredTensor, write_facts
from parc.runtime.state.opening import build_mesh, open_build
from parc.runtime.state.saving import stored_of
from tests.runtime.shard_ranks import hold, numbers, ranks_of, restore_all, save_all
from tests.runtime.tiny import ONE, TENSOR, build


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two ranks; beside it one of a later step."""
    mesh = Mesh((("tp", 2),))
    type_ = TensorType(torch.float32, (6, 4), Placement.of(mesh, {"tp": Split(0, 3)}))
    stored = {"parameter.w": StoredTensor(type_, (), ("",))}
    for name, seed in (("saved", 0), ("later", 1)):
        save_all(tmp_path / name, ranks_of(stored, mesh, [""] * 2, numbers(stored, seed)), stored)
    return tmp_path / "saved"


def _flipped(folder: Path) -> None:
    data = bytearray((folder / "state-00001.safetensors").read_bytes())
    data[-5] ^= 4
    (folder / "state-00001.safetensors").write_bytes(data)


def _another_header(folder: Path) -> None:
    data = (folder / "state-00001.safetensors").read_bytes()
    (folder / "state-00001.safetensors").write_bytes(data.replace(b"exp_avg_sq", b"exp_avg_qs"))


def _shorter(folder: Path) -> None:
    data = (folder / "state-00001.safetensors").read_bytes()
    (folder / "state-00001.safetensors").write_bytes(data[:-4])


def _of_a_later_step(folder: Path) -> None:
    data = (folder.with_name("later") / "state-00001.safetensors").read_bytes()
    (folder / "state-00001.safetensors").write_bytes(data)


def _changed(change: Callable[[Any], None], sealed: bool = True) -> Callable[[Path], None]:
    """Change the index, with a fitting hash if ``sealed``."""

    def changed(folder: Path) -> None:
        index, facts = (json.loads((folder / name).read_text()) for name in ("index.json", "state.json"))
        change(index)
        text = json.dumps(index).encode()
        (folder / "index.json").write_bytes(text)
        if sealed:
            facts["index"] = hashlib.sha256(text).hexdigest()
        write_facts(folder, facts)

    return changed


def _facts_flipped(folder: Path) -> None:
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(re.sub(r'"step": \d+', '"step": 77', text))


def _one_row_more(index: Any) -> None:
    index["layouts"][0]["parts"][0][0][1] = [2, 4]


def _one_row_less(index: Any) -> None:
    del index["layouts"][0]["parts"][0][1][1]


def _the_other_way_round(index: Any) -> None:
    index["layouts"][0]["files"] = [1, 0]
    index["layouts"][0]["parts"][1] = [[[0, 2]], [[2, 4]]]


def _one_file_twice(index: Any) -> None:
    index["layouts"][0]["files"] = [1, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_flipped, r"`\S+\.w` is not as it was written, in bytes \d+ to \d+ of `state-00001.safetensors`"),
        (_another_header, r"`state-00001.safetensors` has another header than was written; it holds \[1:2 \+ 3:4 \+ "
                          r"5:6, 0:4\] of `parameter.w` and parts of 2 more tensors"),
        (_shorter, r"`state-00001.safetensors` has \d+ bytes, and \d+ were written; it holds a part of `parameter.w`"),
        (_of_a_later_step, r"`state-00001.safetensors` has another header than was written"),
        (lambda folder: (folder / "state-00000.safetensors").unlink(), r"`state-00000.safetensors` is missing; it"),
        (lambda folder: (folder / "index.json").unlink(), "its index.json is missing"),
        (_changed(lambda index: None, sealed=False), "its index.json is not the one that was written"),
        (_facts_flipped, "its state.json is not the one that was written"),
        (_changed(_one_row_more), "`parameter.w` has entry 3 of dim 0 in two parts"),
        (_changed(_one_row_less), "`optimizer.exp_avg.w` lacks entries 3 to 3 of dim 0"),
        (_changed(_the_other_way_round), "`parameter.w` is cut into 4 parts, in 2 files"),
        (_changed(_one_file_twice), "`parameter.w` has two parts in one file"),
        (_changed(lambda index: index["tensors"].pop("parameter.w")), "does not hold what the index says of `param"),
        (_changed(lambda index: index["files"][0].update(name="../state.safetensors")), "is no file of a checkpoint"),
        (_changed(lambda index: index["tensors"]["parameter.w"].update(layout=7)), "its index.json has a tensor of"),
        (_changed(lambda index: index["layouts"][0].update(files=[0, -1])), "its index.json has a layout in files"),
        (_changed(lambda index: index["layouts"][0].update(files=["0"])), "is str, not int"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_as_it_was_written_is_refused(
    saved: Path, change: Callable[[Path], None], said: str
) -> None:
    read_checkpoint(saved).check_shards(range(2))
    change(saved)
    with pytest.raises(RunError) as error:
        read_checkpoint(saved).check_shards(range(2))
    assert error.value.code is BAD_STATE and error.value.help
    assert re.search(said, "\n".join([error.value.message, *error.value.notes])), error.value


def test_a_file_that_does_not_say_how_long_it_is_is_no_trap() -> None:
    for layout, fault in (
        (FileLayout((4,), (((((0, 2),)), ((2, 4),)),), (0, 1)), ""),
        (FileLayout((2**62,), ((((0, 4),),),), (0,)), "lacks entries 4 to 4611686018427387903"),
        (FileLayout((4,), ((((0, 9),),),), (0,)), "has entry 8 in dim 0, which has 4"),
        (FileLayout((4,), ((((2, 4), (0, 2)),),), (0,)), "ranges do not rise"),
        (FileLayout((0, 3), ((), ()), ()), ""),
        (FileLayout((4, 4), ((((0, 4),),),), (0,)), "has 2 dims, and the parts of 1"),
    ):
        found = " ".join(layout.faults())
        assert fault in found and bool(fault) == bool(found), found


def test_a_checkpoint_of_whole_tensors_in_one_file_is_still_read(tmp_path: Path) -> None:
    made = open_build(build(tmp_path, TENSOR, name="split"))
    stored, mesh = stored_of(made), build_mesh(made)
    wholes = numbers(stored, 2)
    (tmp_path / "old").mkdir()
    save_file(wholes, tmp_path / "old" / "state.safetensors")
    (tmp_path / "old" / "state.json").write_text('{"optimizer": "adamw", "step": 3}')
    roles = [*made.roles] * mesh.world
    ranks = ranks_of(stored, mesh, roles, None)
    restore_all(tmp_path / "old", ranks, stored)
    hold(ranks, ranks_of(stored, mesh, roles, wholes))
    with parc.load(build(tmp_path, ONE, name="one")) as session:
        session.restore(tmp_path / "old")
        assert session.step_number == 3
        session.save(tmp_path / "new")
        assert load_file(tmp_path / "new" / "state.safetensors").keys() == wholes.keys()
        assert torch.equal(session.state_dict()["embed.weight"], wholes["parameter.embed.weight"])


def test_a_checkpoint_of_a_newer_format_is_said(saved: Path) -> None:
    facts = json.loads((saved / "state.json").read_text())
    write_facts(
        saved, {**{name: fact for name, fact in facts.items() if name != "checksum"}, "format": CHECKPOINT_FORMAT}
    )
    assert read_checkpoint(saved).facts["step"] == 3
    newer = {"format": CHECKPOINT_FORMAT + 1, "parc": "9.1", "tensors": "elsewhere"}
    (saved / "state.json").write_text(json.dumps(newer))
    with pytest.raises(
        RunError, match=f"is a checkpoint of format {CHECKPOINT_FORMAT + 1}, and this parc reads format"
    ) as caught:
        read_checkpoint(saved)
    assert caught.value.diagnostic().help == "go on with the parc 9.1 that wrote it, or from another checkpoint"


_COMPLEX = """
import torch
from torch import nn


class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(4, 3), torch.arange(12.0).reshape(4, 3)))

    def forward(self, x, y):
        return ((torch.view_as_real(x.unsqueeze(-1) * self.turn).sum(-1) - y) ** 2).mean()
"""
_COMPLEX_PLAN = """
model     "./turn.py:Turn" ()
input     x float32 [B, 4]
input     y float32 [B, 4, 3]
sizes     B=4
loss      output
optimizer adamw lr 0.01
"""


def test_complex_numbers_are_pairs_in_shards_and_read_from_old_files(tmp_path: Path) -> None:
    (tmp_path / "turn.py").write_text(_COMPLEX)
    made = build(tmp_path, ONE, _COMPLEX_PLAN)
    draw = torch.Generator().manual_seed(0)
    given = {"x": torch.randn(4, 4, generator=draw), "y": torch.randn(4, 4, 3, generator=draw)}
    with parc.load(made) as session:
        session.step(given)
        session.save(tmp_path / "pairs")
        turn = session.state_dict()["turn"]
        files = load_file(tmp_path / "pairs" / "state.safetensors")
        assert turn.is_complex() and torch.equal(torch.view_as_complex(files["parameter.turn"]), turn)
        assert session.state_dict(local=True)["turn"].shape == (4, 3, 2)
        (tmp_path / "old").mkdir()
        save_file({**files, "parameter.turn": turn}, tmp_path / "old" / "state.safetensors")
        (tmp_path / "old" / "state.json").write_text('{"optimizer": "adamw", "step": 1}')
        loss = session.step(given).loss
        for name in ("old", "pairs"):
            session.restore(tmp_path / name)
            assert torch.equal(session.state_dict()["turn"], turn)
            assert session.step(given).loss == loss
