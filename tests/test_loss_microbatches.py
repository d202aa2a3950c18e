"""Losses in microbatches: what divides their terms is what makes the whole batch's loss and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import parc
from parc.advice import warnings_of
from parc.checking.checks import check_build
from parc.checking.reports import report_of
from parc.compiler.analysis.samples import may_read_size
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.step_values import divisions_in
from parc.compiling import driver
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from tests.cases.losses import compiled_loss, outcome
from tests.checked_plans import checked
from tests.runtime.ranks import run_ranks

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn


class Inside(nn.Module):
    def __init__(self, way, norm=False, drop=0.0):
        super().__init__()
        self.fc, self.way = nn.Linear(8, 5), way
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        out = self.drop(self.norm(self.fc(x)))
        each = out.square().sum(-1)
        if self.way == "mean":
            loss = (each * (1 / len(each))).sum()
        elif self.way == "sum":
            loss = each.sum()
        else:
            loss = out.softmax(-1).mean(0).square().sum()
        return {"out": out, "loss": loss}


def wide(way):
    return Inside(way).double()


class AtFirst(nn.Module):  # its loss is no mean over samples until its bias moves
    def __init__(self, part, always):
        super().__init__()
        self.fc, self.bias = nn.Linear(8, 5), nn.Parameter(torch.zeros(5))
        self.part, self.always = part, always

    def forward(self, x):
        out = self.fc(x) + self.bias
        at_first = (self.bias.detach().sum() == 0).float()
        mixed = at_first * out.mean(0).square().sum()
        return {"out": out, "loss": self.always * out.square().mean() + self.part * mixed}


class RareAtFirst(AtFirst):  # a small term whose gradients are none of the loss's: it is a sum
    def forward(self, x):
        out = self.fc(x) + self.bias
        at_first = (self.bias.detach().sum() == 0).float()
        rare = at_first * self.part * (0.01 * out.detach().sum() + out.sum() - out.detach().sum())
        return {"out": out, "loss": self.always * (1 + out.square().mean()) + rare}


def total(out):
    return out.square().sum()


def mean(out):
    return out.square().mean()


def each_scaled(out):
    return (out.square() * (1 / out.shape[0])).sum()


def on_two(out):
    if out.shape[0] > 2:
        raise ValueError("two samples at most")
    return (out.square() * (1 / out.shape[0])).sum()


def mean_on_two(out):
    on_two(out)
    return out.square().mean()


def part_on_two(out):
    on_two(out)
    return (out.square() * 0.3).sum()


def infinite(out):
    return (out.square() * (1 / out.shape[0])).sum() * out.new_tensor(3.0 - out.shape[0]).sqrt()
"""
PLAN = """
model "./models.py:{model}" ({arguments})
input x {dtype} [B, 8]
{inputs}
sizes B={sizes}
loss {loss}
optimizer sgd lr 0.1
{lines}
schedule microbatches {microbatches}
"""


def built(folder: Path, loss: str = "output.loss", arguments: str = 'way="mean"', **words: object) -> Compiled:
    """Compile a plan of ``MODELS``, of 8 samples in 4 microbatches."""
    (folder / "models.py").write_text(MODELS)
    usual = {"model": "Inside", "dtype": "float32", "inputs": "", "sizes": 8, "lines": "", "microbatches": 4}
    text = PLAN.format(**{**usual, **words}, loss=loss, arguments=arguments)
    return compile_plan(read_plan(Source("plan.parc", text)), folder)


def divisors(compilation: Compiled) -> list[str]:
    """Return the divisor of each term; ``averaged`` for one that is warned of."""
    kinds = [division.by for division in compilation.built.divisions]
    warned = [warning.code.name for warning in warnings_of(compilation)].count("P0217")
    assert warned == len(compilation.built.averaged)
    return ["averaged" if at in compilation.built.averaged else kind for at, kind in enumerate(kinds, 1)]


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("each_scaled", 4), ("output_scaled", 2), ("ones_product", 8), ("sum_scaled", 4), ("sum_scaled", 8),
     ("sum_divided", 4), ("ce_none_scaled", 2), ("masked_clamped", 8), ("masked_eps", 4), ("by_size", 8),
     ("square_of_each", 4), ("half", 2)],
)  # fmt: skip
def test_a_loss_is_that_of_the_whole_batch(name: str, microbatches: int, tmp_path: Path) -> None:
    assert outcome(name, microbatches, tmp_path) == "right"


@pytest.mark.parametrize("name", ["ent", "contrast"])
def test_samples_that_meet_in_a_loss_are_warned_of(name: str, tmp_path: Path) -> None:
    assert outcome(name, 4, tmp_path) == "averaged, P0217"


@pytest.mark.parametrize(
    ("arguments", "by"),
    [('way="mean"', "mean"), ('way="sum"', "sum"), ('way="meet"', "averaged"), ('way="mean", drop=0.5', "mean"),
     ('way="sum", drop=0.25', "sum")],
)  # fmt: skip
def test_a_loss_that_the_model_makes_is_measured_on_the_whole_batch(arguments: str, by: str, tmp_path: Path) -> None:
    """Dropout draws the same numbers there as in microbatches."""
    compilation = built(tmp_path, arguments=arguments)
    assert divisors(compilation) == [by]
    assert checked(compilation).report["checks"]["numbers"] == "tested"


def test_batch_statistics_are_not_asked_for_the_whole_batch(tmp_path: Path) -> None:
    """A BatchNorm's are meant to be a microbatch's: the graph alone answers."""
    assert divisors(built(tmp_path, '"./models.py:mean"(output.out)', 'way="mean", norm=true')) == ["mean"]
    compilation = built(tmp_path, arguments='way="sum", norm=true')
    assert divisors(compilation) == ["averaged"]


def test_a_loss_of_outputs_is_measured_behind_buffers_that_every_forward_writes(tmp_path: Path) -> None:
    """A BatchNorm saves its running statistics for gradients, which are taken after later forwards."""
    compilation = built(tmp_path, '"./models.py:each_scaled"(output.out)', 'way="mean", norm=true')
    assert divisors(compilation) == ["mean"]
    assert not check_build(compilation).warnings


def test_each_term_has_its_own_divisor(tmp_path: Path) -> None:
    loss = '"./models.py:mean"(output.out) + 0.1 "./models.py:total"(output.out) + output.loss'
    compilation = built(tmp_path, loss)
    assert divisors(compilation) == ["mean", "sum", "mean"]
    assert checked(compilation).report["checks"]["numbers"] == "tested"


@pytest.mark.parametrize(
    ("divisor", "inputs", "by"),
    [("8", "", "sum"), ("items", "input items float32 [1]", "sum"), ("items", "input items int64 []", "sum"),
     ("items", "input items float32 [B]", "count")],
)  # fmt: skip
def test_a_plan_divides_a_sum(divisor: str, inputs: str, by: str, tmp_path: Path) -> None:
    compilation = built(tmp_path, f'"./models.py:total"(output.out) / {divisor}', inputs=inputs)
    assert divisors(compilation) == [by]
    assert checked(compilation).report["checks"]["numbers"] == "tested"


def test_a_term_that_is_no_sum_is_not_divided(tmp_path: Path) -> None:
    compilation = built(tmp_path, '"./models.py:mean"(output.out) / 8')
    with pytest.raises(PlanError, match=r"P0285.*in microbatches, but .* on the whole batch"):
        check_build(compilation)


def test_a_term_that_is_nearly_its_mean_is_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that balances experts is nearly a mean, and is one where all microbatches choose alike."""
    monkeypatch.setattr(driver, "measure_of", lambda *_, **__: lambda terms: [{"mean"}])
    compilation = built(tmp_path, "output.loss", "part=0.002, always=1", model="AtFirst")
    assert divisors(compilation) == ["mean"]
    (warning,) = checked(compilation).warnings
    assert warning.code.name == "P0217" and "4 microbatches are averaged" in warning.message
    assert "in microbatches, but" in warning.notes[-1]


@pytest.mark.parametrize("words", ["part=1, always=1", "part=1, always=0"])
def test_a_term_that_is_far_from_its_mean_or_zero_elsewhere_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "measure_of", lambda *_, **__: lambda terms: [{"mean"}])
    with pytest.raises(PlanError, match="P0285"):
        check_build(built(tmp_path, "output.loss", words, model="AtFirst"))


def test_a_term_with_the_value_of_its_mean_but_other_gradients_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "measure_of", lambda *_, **__: lambda terms: [{"mean"}])
    with pytest.raises(PlanError, match="P0285"):
        check_build(built(tmp_path, "output.loss", "part=0.02, always=1", model="RareAtFirst"))


def test_what_the_graph_says_is_tested_on_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model is not run at first: its graph takes one over the size of the batch for a number."""
    monkeypatch.setattr(driver, "measure_of", lambda *_, **__: None)
    compilation = built(tmp_path, '"./models.py:each_scaled"(output.out)')
    assert divisors(compilation) == ["sum"]
    with pytest.raises(PlanError, match="P0285"):
        check_build(compilation)


@pytest.mark.parametrize(
    ("name", "microbatches", "taken", "reason"),
    [("on_two", 4, "a sum", "ValueError: two samples at most"), ("on_two", 8, "a sum", "ValueError"),
     ("infinite", 4, "a sum", "it is not finite"), ("mean_on_two", 4, "", ""), ("mean_on_two", 8, "", ""),
     ("part_on_two", 4, "", "")],
)  # fmt: skip
def test_a_loss_that_fails_on_more_samples_is_warned_of_where_its_graph_is_not_sure(
    name: str, microbatches: int, taken: str, reason: str, tmp_path: Path
) -> None:
    """A mean is one whatever the size, and 0.3 does not come from two samples."""
    compilation = built(tmp_path, f'"./models.py:{name}"(output.out)', microbatches=microbatches)
    found = check_build(compilation).warnings
    assert [warning.code.name for warning in found] == ["P0217"] * bool(taken)
    for warning in found:
        assert reason in warning.message and taken in warning.notes[0]


@pytest.mark.parametrize(
    ("names", "sure"),
    [("mean ce ce_smooth masked mask_mean total ce_sum norm_rows cos_sum smooth bce by_targets", True),
     ("each_scaled output_scaled sum_scaled weights_full dot huber_sum by_size ent square_of_each", False)],
)  # fmt: skip
def test_a_graph_is_sure_of_means_and_sums_without_numbers(
    names: str, sure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are losses of which the graph says something wrong."""
    monkeypatch.setattr(driver, "measure_of", lambda *_, **__: None)
    for name in names.split():
        compiled = compiled_loss(name, 4, tmp_path)
        (division,), reference = divisions_in(compiled.build.manifest), compiled.build.reference
        assert compiled.built.averaged == (), name
        assert may_read_size(reference, 1, division) is not sure, name


def test_a_term_that_the_plan_divides_needs_no_measuring(tmp_path: Path) -> None:
    assert not check_build(built(tmp_path, '"./models.py:on_two"(output.out) / 8')).warnings


def test_sizes_of_a_range_and_an_evaluation_have_the_same_divisors(tmp_path: Path) -> None:
    compilation = built(tmp_path, '"./models.py:mean"(output.out)', sizes="8..16 by 8", lines="eval every 2 batches 1")
    assert compilation.evaluation is not None and divisors(compilation) == ["mean"]
    assert compilation.evaluation.built.divisions == compilation.built.divisions
    assert checked(compilation).report["checks"]["numbers"] == "tested"


def test_gradients_of_float64_are_added_up_in_float64(tmp_path: Path) -> None:
    compilation = built(tmp_path, model="wide", dtype="float64")
    main = compilation.build.programs["B"].main
    types = {main.values()[name].type.dtype for key, name in main.returns if key.kind == "gradient"}
    assert types == {torch.float64}
    narrow = built(tmp_path, model="wide", dtype="float64", lines="", microbatches="4 accumulate bf16")
    assert "bf16" in narrow.build.text(narrow.build.programs["B"])


def losses_of(path: str, batch: Mapping[str, torch.Tensor]) -> float:
    """Return the loss of a step on real ranks."""
    with parc.load(path) as session:
        return session.step(batch).loss


def test_an_input_divides_on_real_ranks(tmp_path: Path) -> None:
    """Every microbatch and every rank gets the step's number; the plain module divides by it too."""
    lines = "mesh dp=2\nshard x [B/dp, _]"
    loss, inputs = '"./models.py:total"(output.out) / items', "input items float32 [1]"
    compilation = built(tmp_path, loss, inputs=inputs, lines=lines, microbatches=2)
    write_build(compilation.to_write(report_of(compilation)), tmp_path / "build")
    batch = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), "items": torch.tensor([5.0])}
    plain = parc.reference(tmp_path / "build")
    whole = float(plain.module(batch["x"])["out"].square().sum().detach()) / 5
    assert plain.step(batch).loss == pytest.approx(whole, rel=1e-6)
    for found in run_ranks(losses_of, 2, str(tmp_path / "build"), batch):
        assert found == pytest.approx(whole, rel=1e-6)


def test_the_cross_entropy_of_the_plan_is_not_divided(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="`cross_entropy` is a mean: a step divides it by the count of its targets"):
        built(tmp_path, "cross_entropy(output.out, t) / 8", inputs="input t int64 [B]")
