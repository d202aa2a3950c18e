"""Optimizers of torch by their names: the same updates on parts of parameters, and state that a run goes on from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import parc
from benchmarks.storages import Storages
from parc.compiler.program.optimizers import NOT_BY_ENTRY, OPTIMIZERS, kept_slots, update_bytes, update_units
from parc.grammar.diagnostics import PlanError, render
from parc.runtime.state.optimizer import make_optimizer, update
from tests.checked_plans import checked, compiled
from tests.draws import all_but
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import EXAMPLES, PLAN, batch, build

ARGUMENTS = {
    "adamw": "(amsgrad=true)", "adam": "", "sgd": "(dampening=0.1)", "nadam": "(momentum_decay=0.01)", "radam": "",
    "adamax": "", "adagrad": "(lr_decay=0.1)", "adadelta": "(rho=0.8)", "rmsprop": "(alpha=0.9, centered=true)",
}  # fmt: skip
FEW = re.sub("model .*", 'model "tests.padded_models:Mlp" (vocab=256, width=8, hidden=16)', PLAN)
SPLIT = """
mesh dp=2, tp=2
shard tokens, targets [B/dp, _]
column up over tp
row down over tp
vocab embed, head over tp
zero 1 over dp
"""
LINE = "adamw lr 1e-2 eps 1e-5 weight_decay 0.1 clip 1.0"


def plan(name: str) -> str:
    assert ARGUMENTS.keys() == OPTIMIZERS.keys()
    more = " momentum 0.9" if "momentum" in OPTIMIZERS[name].clauses else ""
    more += " eps 1e-5" if "eps" in OPTIMIZERS[name].clauses else ""
    return FEW.replace(LINE, f"{name} {ARGUMENTS[name]} lr 1e-2{more} weight_decay 0.1 clip 1.0")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_update_their_parts_as_one_device_updates_the_whole(name: str) -> None:
    compilation = compiled(plan(name) + SPLIT, EXAMPLES)
    assert checked(compilation).report["checks"]["numbers"] == "tested"


@pytest.mark.parametrize("name", all_but(["adamw", "radam", "adamax", "rmsprop"], OPTIMIZERS))
def test_a_run_goes_on_from_its_state(name: str, tmp_path: Path) -> None:
    """Three steps, beside two, a checkpoint, and the third in another session; and the state is what a report says."""
    folder = build(tmp_path, "", plan(name))
    with parc.load(folder) as whole, parc.load(folder) as begun, parc.load(folder) as later:
        for step in range(3):
            whole.step(batch(step))
        for step in range(2):
            begun.step(batch(step))
        begun.save(tmp_path / "saved")
        later.restore(tmp_path / "saved")
        later.step(batch(2))
        wanted, found = whole.state_dict(), later.state_dict()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    report, line = (json.loads((folder / f"{file}.json").read_text()) for file in ("report", "manifest"))
    state = report["memory"][0]["state"]
    assert state["optimizer"] == len(kept_slots(line["optimizer"])) * state["parameters"]


SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "adamw": ({"amsgrad": True},), "adam": ({},), "sgd": ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}),
    "nadam": ({}, {"decoupled_weight_decay": True}), "radam": ({}, {"decoupled_weight_decay": True}), "adamax": ({},),
    "adagrad": ({},), "adadelta": ({},), "rmsprop": ({}, {"centered": True}, {"momentum": 0.9}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_by_units_has_the_bits_of_torch_and_takes_what_its_row_says(name: str) -> None:
    """Temporaries are those of the largest unit, which another unit's small parameters do not enlarge."""
    row, torch_class = OPTIMIZERS[name], getattr(torch.optim, OPTIMIZERS[name].torch_class)
    defaults = {"betas": (0.9, 0.999), "eps": row.eps, "momentum": 0.0, "nesterov": False}
    shapes = {"large": (640, 512), "bias": (512,), "small": (512, 512), "last": (8,)}
    for settings in SETTINGS[name]:
        for decay in (0.0, 0.1):
            clauses = {key: settings.get(key, defaults[key]) for key in row.clauses}
            arguments = {key: value for key, value in settings.items() if key not in clauses}
            line = {"name": name, "lr": 0.1, "weight_decay": decay, "clip": None, "groups": [],
                    "arguments": arguments, **clauses}  # fmt: skip
            parameters = {key: torch.randn(shape) for key, shape in shapes.items()}
            whole = {key: value.clone() for key, value in parameters.items()}
            options = {"fused" if row.fused else "foreach": True}
            plain = torch_class([*whole.values()], lr=0.1, weight_decay=decay, **clauses, **arguments, **options)
            optimizer, sizes = make_optimizer(parameters, line), {key: x.nbytes for key, x in parameters.items()}
            units = update_units(sizes)
            assert units == [["large"], ["bias", "small", "last"]]
            for step in range(3):
                gradients = {key: torch.randn_like(value) for key, value in parameters.items()}
                for key, value in whole.items():
                    value.grad = gradients[key].clone()
                plain.step()
                with Storages() as storages:
                    storages.peak = storages.bytes
                    update(optimizer, line, step + 1, parameters, gradients, None, 0.1, units)
                assert all(torch.equal(parameters[key], whole[key]) for key in shapes), (settings, decay)
            # the rest are single numbers: counts of steps
            assert abs(storages.peak - update_bytes(line, sizes, 0)) < 1000, (settings, decay)


def parts(folder: str) -> dict[str, torch.Tensor]:
    with parc.load(folder) as session:
        for step in range(2):
            session.step(batch(step))
        return session.state_dict()


def test_real_ranks_keep_state_of_their_parts(tmp_path: Path) -> None:
    wanted = parts(str(build(tmp_path / "one", "", plan("rmsprop"))))
    split = build(tmp_path / "four", "mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 2 over dp\n", plan("rmsprop"))
    for found in run_ranks(parts, 2, str(split)):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NOT_BY_ENTRY)
def test_what_is_no_update_of_each_entry_by_itself_is_refused(name: str) -> None:
    with pytest.raises(PlanError) as refused:
        compiled(PLAN.replace(LINE, f"{name} lr 1e-2"), EXAMPLES)
    text = render(refused.value.diagnostics[0])
    assert NOT_BY_ENTRY[name] in text and "P0010" in text and "a rank has parts of parameters" in text
