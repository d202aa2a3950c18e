"""Averages of the weights: torch's own formula, whatever ranks hold, and the state of a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import parc
from parc.checking.checks import case_of
from parc.cli import main
from parc.compiler.program.optimizers import AVERAGE
from parc.runtime.compare.simulate import Simulation
from parc.runtime.ranks.faults import RunError
from parc.runtime.ranks.gather import whole_tensor
from parc.runtime.state.optimizer import fill_slots, make_optimizer
from tests.checked_plans import compiled
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import BOTH, DATA, EVAL, EXAMPLES, PLAN, batch, build

EMA = "ema 0.9 every 2\n"
STAGED = PLAN.replace("schedule  microbatches 2", "schedule 1f1b microbatches 2")
STAGES = DATA.replace("dp=2", "dp=2, pp=2") + "stage before blocks.1 over pp\n"
FROZEN = "freeze blocks.0.mlp\n"


def averaged(path: Path, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights of the plain module after some steps, and their averages by torch."""
    plain = parc.reference(path)
    averages = AveragedModel(plain.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averages.update_parameters(plain.module)  # the first time it copies
    for step in range(steps):
        plain.step(batch(step))
        if step % 2:
            averages.update_parameters(plain.module)
    kept: nn.Module = averages.module
    return plain.module.state_dict(), kept.state_dict()


Weights = dict[str, torch.Tensor]


def trained(folder: str, steps: int, saved: str, restored: str = "") -> tuple[Weights, Weights, float]:
    with parc.load(folder) as session:
        if restored:
            session.restore(restored)
        for step in range(session.step_number, steps):
            session.step(batch(step))
        session.save(saved)
        with session.averaged():
            loss = session.evaluate(batch(9))
            whole = session.state_dict()
        assert all(torch.equal(whole[name], value) for name, value in session.state_dict(ema=True).items())
        for name, part in session.state_dict(local=True, ema=True).items():
            assert part.shape == whole[name].shape
        assert session.evaluate(batch(9)) != loss
        return session.state_dict(), whole, loss


def close(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-5)


def test_an_average_begins_as_its_weight_wherever_it_is_kept() -> None:
    """State that is kept in files has its tensors before the first step."""
    line = {"name": "adamw", "lr": 0.1, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-8, "groups": [],
            AVERAGE: {"decay": 0.9, "every": 2}}  # fmt: skip
    weight = torch.arange(4.0)
    optimizer = make_optimizer({"w": weight}, line)
    fill_slots(optimizer, line, "w", weight, torch.zeros_like)
    slots = optimizer.state[weight]
    assert torch.equal(slots[AVERAGE], weight) and slots[AVERAGE] is not weight
    assert all(not value.any() for slot, value in slots.items() if slot != AVERAGE)


def test_averages_are_those_of_torch_on_split_ranks_and_in_a_run_that_goes_on(tmp_path: Path) -> None:
    """Three steps of two stages of two ranks, and two more on one rank that keeps the optimizer's state in files."""
    split = build(tmp_path, STAGES + "zero 1 over dp\n" + EMA + FROZEN + EVAL, STAGED)
    alone = build(tmp_path, 'offload optimizer to "state"\n' + EMA + FROZEN + EVAL, PLAN, "alone")
    weights, averages = averaged(alone, 3)
    losses = set()
    for found, kept, loss in run_ranks(trained, 4, str(split), 3, str(tmp_path / "saved")):
        close(found, weights)
        close(kept, averages)
        losses.add(loss)
    assert len(losses) == 1
    moved = {name for name, value in averages.items() if not torch.equal(value, weights[name])}
    assert moved and not any(name.startswith("blocks.0.mlp") for name in moved)
    weights, averages = averaged(alone, 5)
    found, kept, _ = trained(str(alone), 5, str(tmp_path / "last"), str(tmp_path / "saved"))
    close(found, weights)
    close(kept, averages)
    state = json.loads((alone / "report.json").read_text())["memory"][0]["state"]
    frozen = 4 * sum(value.numel() for name, value in weights.items() if name.startswith("blocks.0.mlp."))
    assert state["optimizer"] == 3 * (state["parameters"] - frozen)


@pytest.mark.parametrize(
    "lines", [STAGES + "zero 1 over dp\n", BOTH + "zero 3 over dp\n"], ids=["dp, pp, zero 1", "dp, tp, zero 3"]
)
def test_averages_of_simulated_ranks_are_those_of_the_plain_module_in_float64(lines: str) -> None:
    text = (STAGED if "stage" in lines else PLAN).replace("dropout=0.1", "dropout=0.0") + lines + EMA + FROZEN
    compilation = compiled(text)
    case = case_of(compilation)
    simulation = Simulation(case)
    make = run_path(str(EXAMPLES / "gpt.py"))["GPT"]
    plain: nn.Module = make(layers=2, width=16, heads=2, vocab=256, length=8, dropout=0.0).double()
    plain.load_state_dict({**case.parameters, **case.buffers}, strict=False)
    for name, value in plain.named_parameters():
        value.requires_grad_(not name.startswith("blocks.0.mlp."))
    weights = [value for value in plain.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(weights, 1e-2, eps=1e-5, weight_decay=0.1)
    averages = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averages.update_parameters(plain)
    for step in range(4):
        whole = batch(step)
        parts = [{name: value.chunk(2)[half] for name, value in whole.items()} for half in range(2)]
        simulation.step(parts, step)
        optimizer.zero_grad()
        F.cross_entropy(plain(whole["tokens"]).flatten(0, 1), whole["targets"].flatten()).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if step % 2:
            averages.update_parameters(plain)
    kept: nn.Module = averages.module
    moved = 0
    for name, value in kept.named_parameters():
        pieces: dict[int, torch.Tensor] = {}
        for rank, (state, own) in enumerate(zip(simulation.states, simulation.optimizers, strict=True)):
            if (here := state.parameters.get(name)) is not None:
                pieces[rank] = own.state[here].get(AVERAGE, here) if here in own.state else here
                moved += not torch.equal(pieces[rank], here)
        found = whole_tensor(pieces, simulation.types[name].placement, case.mesh)
        torch.testing.assert_close(found, value.data, rtol=1e-10, atol=1e-11)
    assert moved > 30


def test_averages_begin_where_a_checkpoint_has_none_and_stay_behind_where_a_plan_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without, ema = build(tmp_path, "", PLAN), build(tmp_path, EMA, PLAN, "ema")
    with parc.load(without) as first, parc.load(ema) as second:
        first.step(batch(0))
        first.save(tmp_path / "plain")
        second.restore(tmp_path / "plain")
        (note,) = second.notes
        assert "start as its weights" in note
        begun = second.state_dict(ema=True)
        assert all(torch.equal(begun[name], value) for name, value in first.state_dict().items())
        second.step(batch(1))
        now, after = second.state_dict(), second.state_dict(ema=True)
        for name, value in begun.items():
            torch.testing.assert_close(after[name], 0.9 * value + 0.1 * now[name])
        second.save(tmp_path / "averaged")
        for build_, saved, code in ((ema, "averaged", 0), (without, "plain", 1)):
            out = tmp_path / f"{saved}.safetensors"
            assert main(["export", str(build_), str(tmp_path / saved), "-o", str(out), "--ema"]) == code
        written = load_file(tmp_path / "averaged.safetensors")
        assert all(torch.equal(written[name], after[name]) for name in written) and len(written) > 20
        assert "`--ema`" in capsys.readouterr().err
        first.restore(tmp_path / "averaged")
        assert first.notes and "are not used" in first.notes[0]
        assert first.step(batch(2)).loss == second.step(batch(2)).loss
        second.restore(tmp_path / "averaged")
        found = second.state_dict(ema=True)
        assert all(torch.equal(found[name], value) for name, value in after.items())


def test_averages_are_not_trained(tmp_path: Path) -> None:
    with parc.load(build(tmp_path, EMA)) as session, session.averaged():
        session.state_dict(ema=True)
        for do in (session.step, lambda: session.save(tmp_path / "x"), lambda: session.restore(tmp_path / "x")):
            with pytest.raises(RunError, match="averages instead of its weights"):
                do()
