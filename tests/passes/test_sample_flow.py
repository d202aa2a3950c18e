"""Losses of microbatches beside the whole batch's: a warning where they do not add up to it, and few others."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parc.advice import warnings_of
from parc.checking.checks import case_of, prove
from parc.compiling.compiled import Compiled
from parc.runtime.compare.simulate import Simulation

from ..checked_plans import compiled
from ..draws import all_but

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.fc = nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()

    def forward(self, x):
        return self.norm(self.fc(x))


class Masked(Model):
    def forward(self, x, mask):
        return (self.fc(x) @ mask).softmax(-1).square()


class OneOfEach(Model):
    def forward(self, x, y):
        return self.fc(x)[torch.arange(x.shape[0]), y]
"""
PLAN = """
model "./models.py:{model}" (norm={norm})
input x float32 [B, 8]
input y int64 [B]
{inputs}
sizes B=8
loss {loss}
optimizer sgd lr 0.1
schedule microbatches {microbatches}
"""
EACH = 'F.cross_entropy(out, y, reduction="none")'
ADDED = {
    "smoothed": "F.cross_entropy(out, y, label_smoothing=0.1)",
    "smoothed_sum": "F.cross_entropy(out, y, label_smoothing=0.1, reduction='sum')",
    "smoothed_multiple": "-F.cross_entropy(out, y, label_smoothing=0.1) / 2",
    "mean_of_sums": "out.square().sum(-1).mean()",
    "mean_of_a_multiple": "(2 * out.square().sum()) / out.numel()",
    "mean_by_its_reciprocal": "out.square().sum() * (1 / out.numel())",
    "mean_over_samples_first": "out.mean(0).sum()",
    "tenth_of_a_sum": "0.1 * out.square().sum()",
    "products_of_each_sample": "torch.bmm(out[:, :, None], out[:, None]).square().mean()",
    "two_views_of_each": "torch.cat([out, 2 * out]).chunk(2)[1].square().mean()",
    "with_what_no_sample_reaches": "out.square().mean() + 1.0",
    "mean_of_a_mask": "(out.square().mean(-1) * (y > 1)).sum() / (y > 1).sum()",
    "mean_of_chosen": "-3 * torch.where(y > 1, out.square().sum(-1), 0.0).sum() / (y > 1).sum().float()",
    "mean_by_weights": f"({EACH} * y).sum() / y.sum()",
    "mean_by_a_share": f"({EACH} * (y > 1)).mean() / (y > 1).float().mean()",
    "mean_of_a_sum": "out.sum(0).mean()",
    "sum_by_samples": "out.square().sum() * (1 / out.shape[0])",
    "each_by_samples": "(out.square() / out.shape[0]).sum()",
    "a_product_by_samples": "(torch.full_like(out[:, 0], 1 / out.shape[0]) @ out.square()).sum()",
    "mean_of_a_mask_with_a_floor": "(out.square().mean(-1) * (y > 3)).sum() / (y > 3).sum().clamp(min=2)",
    "token_losses_by_a_floor": "F.cross_entropy(out, y, reduction='sum') / (y > 3).sum().clamp(min=2)",
    "mean_of_a_mask_beside_a_number": "(out.square().mean(-1) * (y > 3)).sum() / ((y > 3).sum() + 0.5)",
}
MIXED = {
    "token_losses_beside_all_others": f"({EACH} * 0.9 + out.square().mean(-1)[:, None]).sum() / (y != -100).sum()",
    "token_losses_and_running_sums": f"({EACH} * 1.0 + out.cumsum(0).square().sum(-1)).sum() / (y != -100).sum()",
    "contrastive": "F.cross_entropy(out @ out.T, torch.arange(out.shape[0]))",
    "twins": "(out.T @ out / 10 - torch.eye(5)).square().sum()",
    "mean_of_twins": "torch.einsum('bi, bj -> ij', out, out).square().mean()",
    "logsumexp": "out.logsumexp(0).mean()",
    "spread": "out.std(0).sum()",
    "flipped": "(out - out.flip(0)).square().mean()",
    "sorted_": "(out - out.sort(0).values).square().mean()",
    "first": "(out - out[:1]).square().mean()",
    "distances": "torch.cdist(out, out).mean()",
    "square_of_a_mean": "out.mean(0).square().mean()",
    "sum_and_what_no_sample_reaches": "out.square().sum() + 1.0",
    "mean_of_a_mask_that_sees_the_batch": f"({EACH} * (y > y.float().mean())).sum() / (y > y.float().mean()).sum()",
    "mean_of_the_models_mask": "(out.square() * (out > 0)).sum() / (out > 0).sum()",
    "mean_by_weights_of_the_greatest": f"({EACH} * y).sum() / (y / y.amax()).sum()",
    "mean_of_a_mask_of_the_greatest": f"({EACH} * (y == y.amax())).sum() / (y == y.amax()).sum()",
    "mean_of_a_mask_of_other_samples": f"({EACH} * (y > y.flip(0))).sum() / (y > y.flip(0)).sum()",
    "token_losses_by_a_share": "F.cross_entropy(out, y, reduction='sum') / (y > 1).double().mean()",
    "mean_by_a_share_and_a_number": f"({EACH} * (y > 1)).mean() / ((y > 1).double().mean() + 0.5)",
    "sum_of_two_means": f"0.5 * ((out[:, 0] * (y > 1)).sum() / (y > 1).sum() + {EACH}.mean())",
    "two_means_of_which_one_is_contrastive": (
        "F.cross_entropy(out @ out.T, torch.arange(out.shape[0])) + out.square().mean()"
    ),
    "mean_by_a_share_of_a_sum": f"({EACH} * (y > 1)).sum() / (y > 1).float().mean()",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("losses")
    losses = [f"def {name}(out, y):\n    return {text}\n" for name, text in {**ADDED, **MIXED}.items()]
    (made / "models.py").write_text("\n\n".join([MODELS, *losses]))
    return made


@cache
def built(
    folder: Path, loss: str, microbatches: int, model: str = "Model", norm: bool = False, inputs: str = ""
) -> Compiled:
    call = f'"./models.py:{loss}"(output, y)' if loss.isidentifier() else loss
    words = {"model": model, "norm": str(norm).lower(), "inputs": inputs, "loss": call, "microbatches": microbatches}
    compilation = compiled(PLAN.format(**words), folder)
    assert not prove(compilation)
    return compilation


def warned(compilation: Compiled) -> bool:
    """Return whether the plan gets the warning that its microbatches may not add up, and no other warning."""
    codes = [warning.code.name for warning in warnings_of(compilation)]
    assert set(codes) <= {"P0217"}
    return bool(codes)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of samples and their targets."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 8, generator=generator).double(), torch.randint(0, 5, (8,), generator=generator)


def loss_of(compilation: Compiled, microbatches: int) -> float:
    """Return the loss of a step, whose batch is in microbatches."""
    parts = [{"x": x, "y": y} for x, y in zip(*(whole.chunk(microbatches) for whole in batch()), strict=True)]
    return float(Simulation(case_of(compilation)).step(parts, 0)[0][0])


def whole_loss(compilation: Compiled, folder: Path, loss: str, counted: bool = False) -> float:
    """Return what Python computes for the whole batch, with the numbers of a build; maybe half of it, beside a mean
    over the targets."""
    code: dict[str, Any] = {}
    exec((folder / "models.py").read_text(), code)
    model = code["Model"]().double()
    model.load_state_dict(dict(case_of(compilation).parameters))
    x, y = batch()
    with torch.no_grad():
        out = model(x)
        term = code[loss](out, y)
        return float(F.cross_entropy(out, y) + 0.5 * term if counted else term)


@pytest.mark.parametrize("loss", [*ADDED, *MIXED])
def test_microbatches_make_the_whole_batchs_loss_or_a_warning(folder: Path, loss: str) -> None:
    parts = built(folder, loss, 2)
    equal = loss_of(parts, 2) == pytest.approx(whole_loss(parts, folder, loss), rel=1e-9)
    assert (equal, warned(parts)) == (loss in ADDED, loss in MIXED)


@pytest.mark.parametrize("loss", ["mean_of_a_mask", "smoothed_sum", "contrastive", "mean_of_the_models_mask"])
def test_a_batch_that_is_one_microbatch_has_its_loss_and_no_warning(folder: Path, loss: str) -> None:
    whole = built(folder, loss, 1)
    assert not warned(whole) and loss_of(whole, 1) == pytest.approx(whole_loss(whole, folder, loss), rel=1e-9)


TERMS = {"mean_of_sums", "tenth_of_a_sum", "mean_of_a_mask", "mean_by_its_reciprocal", "spread"}


@pytest.mark.parametrize("loss", all_but({*ADDED, *MIXED} - TERMS, [*ADDED, *MIXED]))
def test_a_term_beside_a_counted_one_is_the_whole_batchs_or_warned_of(folder: Path, loss: str) -> None:
    term = f'cross_entropy(output, y) + 0.5 "./models.py:{loss}"(output, y)'
    parts = built(folder, term, 2)
    assert warned(parts) == (loss_of(parts, 2) != pytest.approx(whole_loss(parts, folder, loss, True), rel=1e-9))


REASONS = {
    "mean_of_the_models_mask": "its denominator at models.py:",
    "sum_of_two_means": "it is a sum of terms at models.py:",
    "two_means_of_which_one_is_contrastive": "it is no mean and no sum over samples",
    "contrastive": "it is no mean and no sum over samples",
    "spread": "it is no mean and no sum over samples",
}


@pytest.mark.parametrize("loss", REASONS)
def test_the_reason_why_a_loss_is_averaged_is_said_where_its_last_lines_tell_it(folder: Path, loss: str) -> None:
    (warning,) = warnings_of(built(folder, loss, 2))
    assert [note[: len(REASONS[loss])] for note in warning.notes] == [REASONS[loss]]


@pytest.mark.parametrize("loss", ["smoothed", "mean_of_sums"])
def test_batch_statistics_are_a_microbatchs_in_a_mean(folder: Path, loss: str) -> None:
    compilation = built(folder, loss, 2, norm=True)
    assert not warned(compilation)
    assert ("COUNT" in compilation.build.programs) == (loss == "smoothed")


def test_a_sum_behind_batch_statistics_of_microbatches_adds_up(folder: Path) -> None:
    assert not warned(built(folder, "smoothed_sum", 2, norm=True))


def test_an_input_without_the_batch_belongs_to_all_samples(folder: Path) -> None:
    assert not warned(built(folder, "mean_of_sums", 2, "Masked", inputs="input mask float32 [5, 5]"))


def test_one_of_each_samples_entries_keeps_samples_apart(folder: Path) -> None:
    assert not warned(built(folder, "mean_over_samples_first", 2, "OneOfEach"))


@pytest.mark.parametrize("loss", ["smoothed", "mean_of_sums", "smoothed_sum"])
def test_microbatches_of_one_sample_add_up(folder: Path, loss: str) -> None:
    parts = built(folder, loss, 8)
    assert not warned(parts)
    assert loss_of(parts, 8) == pytest.approx(whole_loss(parts, folder, loss), rel=1e-9)
