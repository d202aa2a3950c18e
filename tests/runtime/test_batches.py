"""The batches that ranks give to a step: one whole batch, or each its own samples; anything else is refused on all
ranks, before the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import parc
from parc.compiler.initial.counter import digest
from parc.grammar.codes import BATCHES_DIFFER
from parc.runtime.data.batches import _as_counts, _as_integer
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import BOTH, EVAL, PLAN, batch, build

CALM = PLAN.replace("dropout=0.1", "dropout=0.0")
Batch = dict[str, torch.Tensor]


def own(whole: Batch, place: int, count: int = 4) -> Batch:
    """Return the samples of one of two places of ``dp``: half of each of the two microbatches, the first ``count`` of
    them."""
    rows = [4 * index + 2 * place + row for index in range(2) for row in range(2)]
    return {name: value[rows[:count]] for name, value in whole.items()}


def without_last(whole: Batch) -> Batch:
    """Return the whole batch in the form that ``dp=1`` has with one sample fewer: the targets of its last are
    ignored."""
    targets = whole["targets"].clone()
    targets[7] = -100
    return {**whole, "targets": targets}


def ask(path: str) -> dict[str, Any]:
    """Return the messages that one of four ranks gets for faulty batches, and the results of good ones afterwards."""
    with parc.load(path) as session:
        at, tp = session.coordinates["dp"], session.coordinates["tp"]
        whole = batch(0)
        odd = {**whole, "targets": whole["targets"].clone()}
        odd["targets"][7, 7] ^= session.rank == 3
        given: dict[str, dict[str, Any]] = {
            "parts as whole": {"batch": own(whole, at)},
            "one entry": {"batch": odd},
            "other samples beside": {"local": own(batch(tp), at)},
            "only some": {"batch": whole if session.rank == 0 else None},
            "another way": {
                ("local" if session.rank == 2 else "batch"): own(whole, at) if session.rank == 2 else whole
            },
            "an input less": {"local": {"tokens": own(whole, at)["tokens"]} if session.rank == 3 else own(whole, at)},
            "too many": {"local": whole},
            "both": {"batch": whole, "local": own(whole, at)},
        }
        said = {}
        for name, arguments in given.items():
            for call in (session.step, session.gradients, session.evaluate):
                with pytest.raises(parc.RunError) as error:
                    call(**arguments)
                said[f"{name} {call.__name__}"] = str(error.value)
        assert session.step_number == 0
        short = session.evaluate(local=own(whole, at, 4 - at)), session.evaluate(without_last(whole))
        strided = {name: value.t().contiguous().t() for name, value in own(whole, at).items()}
        exact = session.evaluate(whole), session.evaluate(local=strided)
        reports = [session.step(local=own(batch(0), at)), session.step(batch(1)), session.step()]
        return {"said": said, "short": short, "exact": exact, "reports": reports}


def test_ranks_give_one_batch_whole_or_in_parts_and_nothing_else(tmp_path: Path) -> None:
    made = build(tmp_path, BOTH + EVAL, CALM)
    plain = parc.reference(made)
    expected = [plain.step(batch(0)), plain.step(batch(1)), plain.step()]
    plain.close()
    ranks = run_ranks(ask, 4, str(made))
    for rank in ranks:
        assert rank["said"] == ranks[0]["said"]
        assert rank["short"][0] == pytest.approx(rank["short"][1], rel=1e-6)
        assert rank["exact"][0] == rank["exact"][1]
        for found, wanted in zip(rank["reports"], expected, strict=True):
            assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
            assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    said = {name: text for name, text in ranks[0]["said"].items() if name.endswith(" step")}
    code = f"[{BATCHES_DIFFER.name}]"
    starts = {
        "parts as whole": f"{code} `tokens` of rank 2 is not that of rank 0; ",
        "one entry": f"{code} `targets` of rank 3 is not that of rank 0; ",
        "other samples beside": f"{code} `tokens` of rank 1 is not that of rank 0, though both are at dp=0; ",
        "only some": f"{code} rank 0 gave a whole batch, and rank 1 gave nothing, so it reads the plan's data; ",
        "another way": f"{code} rank 0 gave a whole batch, and rank 2 gave samples of its own; ",
        "an input less": "[P0303] the batch has no `targets`",
        "too many": "[P0303] this rank's part has 8 samples; of a step it takes 1 to 4; ",
        "both": f"{code} both a whole batch and `local` samples were given; ",
    }
    for name, start in starts.items():
        assert said[f"{name} step"].startswith(start), said[f"{name} step"]
    assert "a rank's own 4 samples of it are `local=batch`" in said["parts as whole step"]
    assert '`session.coordinates["dp"]`' in said["other samples beside step"]


LINES = """
import random

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, keep, scale):
        y = self.linear(x) * scale
        return torch.where(keep, y, torch.zeros_like(y)).square().mean()


def sample(number):
    drawn = random.Random() if number >= 8 else random.Random(number)
    x = torch.full((4,), drawn.random(), dtype=torch.float32)
    return {"x": x, "keep": x > 2, "scale": torch.ones(4)}
"""
LINES_PLAN = """
model     "./model.py:Model" ()
input     x     float32 [B, 4]
input     keep  bool [B, 4]
input     scale float32 [4]
sizes     B=8
loss      output
data      "./model.py:sample"
optimizer sgd lr 0.1
schedule  microbatches 2
mesh      dp=2, tp=2
shard     x, keep [B/dp, _]
"""


def ask_without_a_count(path: str) -> dict[str, Any]:
    """Return the same where no target is counted, and one input has no samples."""
    generator = torch.Generator().manual_seed(1)
    whole = {"x": torch.randn(8, 4, generator=generator), "scale": torch.rand(4, generator=generator)}
    whole["keep"] = whole["x"] > 0
    with parc.load(path) as session:
        at = session.coordinates["dp"]
        mine = {**own({name: whole[name] for name in ("x", "keep")}, at), "scale": whole["scale"]}
        same = session.evaluate(whole), session.evaluate(local=mine)
        said = []
        faulty: list[dict[str, Any]] = [
            {"local": {**mine, "scale": whole["scale"] + at}},
            {"batch": {**whole, "keep": whole["keep"] ^ (session.rank == 1)}},
        ]
        for arguments in faulty:
            with pytest.raises(parc.RunError) as error:
                session.step(**arguments)
            said.append(str(error.value))
        step = session.step()  # the samples of its data below 8 are the same on every rank
        with pytest.raises(parc.RunError) as error:
            session.step()
        return {"said": [*said, str(error.value)], "same": same, "loss": (step.loss, session.evaluate(whole))}


def test_floats_and_inputs_without_samples_are_held_alike_too(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LINES)
    ranks = run_ranks(ask_without_a_count, 4, str(build(tmp_path, EVAL, LINES_PLAN)))
    for rank in ranks:
        assert rank["said"] == ranks[0]["said"] and rank["loss"] == ranks[0]["loss"]
        assert rank["same"][0] == rank["same"][1]
    scale, keep, data = ranks[0]["said"]
    assert scale.startswith("[P0410] `scale` of rank 2 is not that of rank 0; no axis of the mesh splits it")
    assert keep.startswith("[P0410] `keep` of rank 1 is not that of rank 0; ")
    assert data.startswith("[P0410] `x` of rank 1 is not that of rank 0, though both are at dp=0; a sample must depend")


@pytest.mark.parametrize("counts", [[3, 2**40], [0.5, 7.25, 2.0**-30]])
def test_counts_come_through_the_exchange_of_hashes_bit_by_bit(counts: list[float]) -> None:
    """A loss may be divided by a sum of weights, which is no whole number."""
    own = [torch.tensor(count) for count in counts]
    for like in own:
        assert torch.equal(_as_counts([int(_as_integer(count)) for count in own], like), torch.stack(own))


def test_a_hash_sees_every_bit_and_its_place_whatever_the_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(70_001, generator=generator)
    base[3] = float("nan")
    changed = [base.clone() for _ in range(6)]
    changed[0][70_000] += 1e-3
    changed[1][[5, 6]] = base[[6, 5]]
    changed[2][[10, 50_010]] = base[[50_010, 10]]
    changed[3][9] = -base[9]
    changed[4][[1, 2]] = -base[[1, 2]]
    changed[5][:32768], changed[5][32768:65536] = base[32768:65536].clone(), base[:32768].clone()
    found = {int(digest(value)) for value in [base, *changed]}
    assert len(found) == 7
    for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.int32):
        value = torch.randint(-9, 9, (9, 7), generator=generator).to(dtype)
        bits = int(digest(value))
        assert bits == int(digest(value.t().contiguous().t())) == int(digest(value.clone().requires_grad_(False)))
        assert bits == int(digest(torch.cat([value[:1], value])[1:]))  # an offset that is no multiple of eight bytes
        value[8, 6] = value[8, 6] == 0
        assert bits != int(digest(value))
    doubles = torch.zeros(4, dtype=torch.float64)
    assert int(digest(doubles)) != int(digest(-doubles * torch.tensor([1, 1, 1, -1])))
    assert int(digest(torch.zeros(0))) == 0
