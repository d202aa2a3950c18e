"""Bags of embeddings are torch's own: every mode, offsets, padding, weights, and the last row of a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import parc
from parc.build import build
from parc.checking.checks import case_of
from parc.compiler.capture.model_calls import model_builder
from parc.compiler.initial.recipes import initialize
from parc.compiling.compiled import Compiled
from parc.grammar.diagnostics import PlanError
from parc.runtime.compare.model_run import ReferenceRun
from parc.runtime.ranks.faults import RunError
from tests.bag_models import KINDS, RAGGED, clicked
from tests.checked_plans import checked, compiled, held

BAGS = """
model "./bag_models.py:Bags" {chosen}
input items int64 [B, 6]
input starts int64 [B]
input labels int64 [B]
sizes B=8
loss cross_entropy(output, labels)
optimizer sgd lr 0.1
mesh dp={dp}, tp={tp}
shard items [B/dp, _]
shard starts, labels [B/dp]
{lines}
"""
DLRM = """
model "./bag_models.py:Dlrm" (mode="{mode}")
input dense float32 [B, 13]
input indices int64 [3, N]
input offsets int64 [3, B]
input click float32 [B]
sizes B=8, N={entries}
loss "./bag_models.py:clicked"(output, click)
optimizer adamw lr 1e-3
mesh dp={dp}, tp={tp}
shard dense [B/dp, _]
shard click [B/dp]
{lines}
"""
FOLDER = Path(__file__).parent


def plain(model: Compiled) -> torch.nn.Module:
    """Return the module of a plan with its initial weights, in float64."""
    build = model_builder(model.lines, model.folder, model.overrides)
    return initialize(build, model.plan.seed, model.recorded.recipes).double()


def differences(model: Compiled, inputs: dict[str, Tensor], loss: Tensor, module: torch.nn.Module) -> dict[str, float]:
    """Return, by parameter, the largest difference of the captured graph's gradient from the module's own."""
    case = case_of(model)
    captured_loss, gradients = ReferenceRun(case).gradients([inputs], 0)
    loss.backward()
    assert torch.allclose(captured_loss, loss.detach(), rtol=1e-12)
    return {
        name: float((gradients[name] - parameter.grad).abs().max())
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def last_rows(module: torch.nn.Module) -> list[tuple[torch.nn.EmbeddingBag, float]]:
    """Return each table of bags, and the largest entry of the gradient of its last row."""
    tables = [table for table in module.modules() if isinstance(table, torch.nn.EmbeddingBag)]
    return [(table, 0.0 if table.weight.grad is None else float(table.weight.grad[-1].abs().max())) for table in tables]


def test_every_kind_of_bag_has_torch_s_own_gradients_in_every_row() -> None:
    model = compiled(BAGS.format(chosen="", dp=1, tp=1, lines=""), FOLDER)
    generator = torch.Generator().manual_seed(3)
    items = torch.randint(0, 12, (8, 6), generator=generator)
    items[0], items[1], items[2] = 11, 0, 10  # the last row alone, and bags of nothing but padding
    inputs = {"items": items, "starts": torch.tensor(RAGGED), "labels": torch.arange(8) % 4}
    module = plain(model)
    loss = torch.nn.functional.cross_entropy(module(items, inputs["starts"]), inputs["labels"])
    apart = differences(model, inputs, loss, module)
    assert len(apart) == len(KINDS) + 4
    assert {name: value for name, value in apart.items() if value > 1e-12} == {}
    assert all(last for bag, last in last_rows(module) if bag.padding_idx != 11)


ROW_SPLIT, STORED = "vocab bags.* over tp", "zero 3 over dp"
PLANS = [
    ("0 1 2 4 5 6 8", 1, 2, ROW_SPLIT),
    ("0 1 2 5 8", 2, 1, STORED),
    ("9 11 13 17 18 20 27 28", 2, 2, ROW_SPLIT),
    ("21 22 23 24 25 26 29 30", 1, 2, ROW_SPLIT),
    ("9 15 18 24 29", 2, 1, STORED),
]


@pytest.mark.parametrize(("chosen", "dp", "tp", "lines"), PLANS)
def test_bags_are_split_by_rows_by_samples_and_as_they_are_stored(chosen: str, dp: int, tp: int, lines: str) -> None:
    model = compiled(BAGS.format(chosen=f'(chosen="{chosen}")', dp=dp, tp=tp, lines=lines), FOLDER)
    assert model.built.without_rule == ()
    held(model)


@pytest.mark.parametrize(
    ("mode", "entries", "dp", "tp", "lines"),
    [("sum", 20, 1, 2, "vocab tables.* over tp"), ("mean", 8, 2, 1, "zero 1 over dp")],
)
def test_a_dlrm_trains_as_plain_pytorch_does(mode: str, entries: int, dp: int, tp: int, lines: str) -> None:
    model = compiled(DLRM.format(mode=mode, entries=entries, dp=dp, tp=tp, lines=lines), FOLDER)
    checked(model)
    module, generator = plain(model), torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randint(rows, (entries,), generator=generator) for rows in (12, 4, 30)])
    indices[:, 3] = torch.tensor([11, 3, 29])
    starts = torch.randint(0, entries, (3, 8), generator=generator).sort(1).values if entries > 8 else torch.arange(8)
    offsets = (starts * (torch.arange(8) > 0)).expand(3, 8)
    dense = torch.randn(8, 13, generator=generator, dtype=torch.float64)
    inputs = {"dense": dense, "indices": indices, "offsets": offsets, "click": (torch.arange(8) % 2).double()}
    loss = clicked(module(dense, indices, offsets), inputs["click"])
    assert max(differences(model, inputs, loss, module).values()) < 1e-12
    assert all(last for _, last in last_rows(module))


def own_bags(folder: Path, tables: str, output: str, dp: int = 1) -> str:
    """Write a model of these tables, and return a plan of it."""
    (folder / "own.py").write_text(
        "from torch import nn\n"
        "class Own(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        {tables}\n"
        "    def forward(self, items, starts):\n"
        f"        return {output}\n"
    )
    return BAGS.format(chosen="", dp=dp, tp=1, lines="").replace("./bag_models.py:Bags", "./own.py:Own")


def test_counts_of_a_bag_s_rows_are_refused_with_a_way_out(tmp_path: Path) -> None:
    text = own_bags(tmp_path, "self.bag = nn.EmbeddingBag(12, 4, scale_grad_by_freq=True)", "self.bag(items)")
    with pytest.raises(PlanError) as refused:
        compiled(text, tmp_path)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code.name == "P0205" and diagnostic.message.startswith("in `bag`: `scale_grad_by_freq` of a bag")
    assert "nn.Embedding" in diagnostic.help and any("own.py:7" in note for note in diagnostic.notes)


def test_sparse_gradients_are_trained_dense(tmp_path: Path) -> None:
    bags = "self.bag = nn.EmbeddingBag(12, 4, sparse=True)"
    rows = "self.row = nn.Embedding(12, 4, sparse=True, padding_idx=-1)"
    text = own_bags(tmp_path, f"{bags}; {rows}", "self.bag(items) + self.row(items).sum(1)", dp=2)
    checked(compiled(text, tmp_path))


def test_a_bag_that_begins_in_another_microbatch_is_an_error_in_words(tmp_path: Path) -> None:
    text = own_bags(tmp_path, "self.bag = nn.EmbeddingBag(12, 4)", "self.bag(items, starts)")
    text = text.replace("[B, 6]", "[N]").replace("B=8", "B=8, N=16").replace("shard items [B/dp, _]\n", "")
    (tmp_path / "plan.parc").write_text(f"{text}schedule microbatches 2\n")
    build(tmp_path / "plan.parc", tmp_path / "build", {})
    batch = {"items": torch.arange(16) % 12, "starts": torch.arange(0, 16, 2), "labels": torch.arange(8) % 4}
    with parc.load(tmp_path / "build") as session, pytest.raises(RunError, match="a place that a tensor does not have"):
        session.step(batch)
