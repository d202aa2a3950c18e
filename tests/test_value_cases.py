"""Code that asks for the numbers of constants, draws, loops over experts, and losses over a vocabulary in parts: the
quickest of ``python -m tests.cases values``, and what such builds hold."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parc.checking.checks import check_build
from parc.compiler.build.build import Build
from parc.compiler.program.actions import FORWARD
from parc.runtime.compare.plain import CountedDropout
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.initial import Initial
from parc.runtime.state.opening import task_of
from tests.cases.value_models import LOSSES
from tests.cases.values import case, compiled_case

QUICK = (
    "flag, dp", "flag that a step sets, dp", "checks, dp", "branch, dp",
    "checks of numbers, dp", "branch on a number, dp", "mask, tp", "mask that is written, dp",
    "frequencies, dp", "lengths, tp", "list of numbers, dp", "places, dp", "positions, tp", "randint, tp",
    "ones in a product, dp", "ones in a product of one sum, dp", "windows by strides, dp", "windows by strides, tp",
    "gaps by strides, tp", "outside by strides, dp",
    "random_, dp", "randperm, dp", "several classes, dp", "poisson, dp", "mask made", "mask of an input",
    "experts unpacked", "experts counted", "smooth, 27 classes", "entropy, 28 classes", "selected, 27 classes",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_case_is_right_or_refused_in_its_own_words(name: str) -> None:
    row = case(name)
    assert row.outcome == row.expected


@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_a_split_vocabulary_gather_no_logits(name: str) -> None:
    compiled = compiled_case(f"{name}, 27 classes")
    assert not check_build(compiled).faults
    forward = compiled.build.programs[FORWARD]
    lines = [line for function in forward.functions for line in function.lines]
    sent = Counter(line.op for line in lines if line.op.startswith("parc.") and line.op in _MESSAGES)
    assert sent["parc.row_max"] == 1 and not sent["parc.all_gather"]
    assert sent["parc.all_reduce"] <= 1 + 2, sent  # that of the embedding, and two of the loss


_MESSAGES = ("parc.all_gather", "parc.all_reduce", "parc.row_max", "parc.reduce_scatter")


def test_a_build_has_hashes_of_the_buffers_by_which_its_code_decided() -> None:
    compiled = compiled_case("flag, dp")
    asked = compiled.build.manifest["asked"]
    assert [*asked] == ["begun"]
    manifest = {**compiled.build.manifest, "asked": {"begun": "0" * 32}}
    build = Build.of(Path(compiled.folder), dict(compiled.build.texts), manifest, {})
    with pytest.raises(RunError, match="another value than at the build"):
        Initial(build, task_of(manifest), build.mesh, build.mesh.coordinates(0), torch.device("cpu"))


class _Drawing(nn.Module):
    def forward(self, weights: Tensor) -> dict[str, Tensor]:
        """Draw many numbers of each kind."""
        return {
            "integers": torch.randint(-3, 7, (40_000,)),
            "permutation": torch.randperm(20_000),
            "classes": torch.multinomial(weights.expand(40_000, -1), 1).squeeze(1),
            "exponential": torch.empty(40_000).exponential_(2.0),
            "geometric": torch.empty(40_000).geometric_(0.25),
        }


def _drawn(step: int, **of: Any) -> dict[str, Tensor]:
    with CountedDropout(7, step, 0):
        drawn: dict[str, Tensor] = _Drawing()(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    return drawn


def test_draws_have_their_distributions() -> None:
    drawn = _drawn(0)
    counts = drawn["integers"].add(3).bincount(minlength=10)
    assert len(counts) == 10 and (counts - 4000).abs().max() < 5 * math.sqrt(4000)
    order = drawn["permutation"]
    assert torch.equal(order.sort().values, torch.arange(20_000))
    assert abs(float(torch.corrcoef(torch.stack([order.double(), torch.arange(20_000.0)]))[0, 1])) < 0.03
    shares = drawn["classes"].bincount(minlength=4) / 40_000
    assert torch.allclose(shares, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.015)
    assert abs(float(drawn["exponential"].mean()) - 0.5) < 0.02
    assert abs(float(drawn["geometric"].mean()) - 4) < 0.1
    assert all(not torch.equal(values, drawn[name]) for name, values in _drawn(1).items())
