"""Numbers that are not finite: the run stops before the update, and every rank names the same first place."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

import pytest
import torch

import parc
from parc.grammar.codes import BAD_NUMBER
from parc.runtime.ranks.faults import RunError
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import ONE, PLAN, batch, build

BROKEN = '''
import torch
from torch import nn


class Poison(nn.Module):
    """An overflow where the input is large: exp of a sum of squares."""

    def forward(self, x):
        return torch.exp(x.square().sum(-1, keepdim=True))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.poison = nn.Linear(4, 4), Poison()

    def forward(self, x):
        mask = torch.full((4, 4), float("-inf")).triu(1)
        weights = torch.softmax(self.linear(x).unsqueeze(-2) + mask, -1)
        return (weights @ x.unsqueeze(-1)).squeeze(-1) * self.poison(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()
'''
PLAN_OF_BROKEN = """
model     "./broken.py:Model" ()
input     x float32 [B, 4]
input     y float32 [B, 4]
sizes     B=4
loss      output
optimizer sgd lr 0.1
seed      1
"""


def broken_batch(row: int | None) -> dict[str, torch.Tensor]:
    """Return a batch of which one row overflows."""
    x = torch.full((4, 4), 0.5)
    if row is not None:
        x[row] = 100.0
    return {"x": x, "y": torch.zeros(4, 4)}


def run_into(path: str, row: int) -> tuple[str, tuple[str, ...], bool]:
    """Run on one rank a good step, then a bad one; return the error, and whether the weights stayed."""
    with parc.load(path) as session:
        session.step(broken_batch(None))
        before = session.state_dict()
        try:
            session.step(broken_batch(row))
        except RunError as error:
            same = all(torch.equal(value, before[name]) for name, value in session.state_dict().items())
            return error.message, error.notes, same and session.step_number == 1
    raise AssertionError("the step was made")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the broken model."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken.py").write_text(BROKEN)
    return folder


def test_the_first_bad_value_is_named(folder: Path) -> None:
    message, notes, same = run_into(str(build(folder, ONE, PLAN_OF_BROKEN)), 1)
    assert same and message.startswith("step 2: the loss is ")
    assert notes[0] == "the first is an infinity, computed in `layers.0.poison` on rank 0"
    assert notes[1].startswith("`aten.exp.default` at broken.py:10, forward")


def test_all_ranks_name_the_rank_that_made_it(folder: Path) -> None:
    path = build(folder, "mesh dp=2\nshard x, y [B/dp, _]\n", PLAN_OF_BROKEN, "two")
    found = run_ranks(run_into, 2, str(path), 3)
    assert found[0] == found[1]
    assert found[0][1][0] == "the first is an infinity, computed in `layers.0.poison` on rank 1" and found[0][2]


def test_a_batch_without_targets_is_said(folder: Path) -> None:
    with parc.load(build(folder, ONE, PLAN, "gpt")) as session:
        nothing = {**batch(0), "targets": torch.full((8, 8), -100)}
        with pytest.raises(RunError, match="step 1: the loss is nan") as caught:
            session.step(nothing)
        assert caught.value.notes[0].startswith("every target of the batch is ignored")
        assert caught.value.exit_code == 4


def test_a_traceback_names_the_error_as_users_catch_it() -> None:
    error = pickle.loads(pickle.dumps(RunError(BAD_NUMBER, "the loss is nan", "lower `lr`")))
    assert isinstance(error, parc.RunError)
    assert traceback.format_exception_only(error) == ["parc.RunError: [P0302] the loss is nan; lower `lr`\n"]
