"""How a model is called with a plan's inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parc.compiler.task import InputsError, TaskLines, caller, passed_on


class Named(nn.Module):
    def forward(self, tokens: Any, mask: Any = None) -> Any:
        return {"tokens": tokens, "mask": mask}


class Ordered(nn.Module):
    def forward(self, tokens: Any, depth: Any = None, /, *, mask: Any) -> Any:
        return {"tokens": tokens, "depth": depth, "mask": mask}


class Several(nn.Module):
    def forward(self, tokens: Any, *tables: Any) -> Any:
        return {"tokens": tokens, "tables": tables}


class Wrapper(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert not args
        return kwargs


def called(model: nn.Module, inputs: str, places: dict[str, str] | None = None, reads: str = "targets") -> Any:
    """What the forward is given: of each parameter the number of the input that goes there."""
    names = tuple(inputs.split())
    lines = TaskLines("", (), names, "cross_entropy", "", ("output", reads), None, tuple((places or {}).items()))
    return caller(model, lines)(model, {name: torch.tensor(at) for at, name in enumerate(names)})


@pytest.mark.parametrize(("model", "inputs", "places", "given"), [
    (Named(), "mask tokens", {}, {"tokens": 1, "mask": 0}),  # not in the plan's order
    (Named(), "targets tokens", {}, {"tokens": 1, "mask": None}),  # what the loss reads goes nowhere else
    (Named(), "mask tokens targets", {"mask": "tokens", "tokens": "mask"}, {"tokens": 0, "mask": 1}),
    (Named(), "tokens targets", {"targets": "mask"}, {"tokens": 0, "mask": 1}),
    (Ordered(), "mask words", {"words": "tokens"}, {"tokens": 1, "depth": None, "mask": 0}),
    (Several(), "a tokens b", {"a": "tables", "b": "tables"}, {"tokens": 1, "tables": (0, 2)}),
    (Wrapper(), "words targets", {"words": "tokens"}, {"tokens": 0}),
])  # fmt: skip
def test_inputs_go_to_parameters_by_name(
    model: nn.Module, inputs: str, places: dict[str, str], given: dict[str, Any]
) -> None:
    assert called(model, inputs, places) == given


@pytest.mark.parametrize(("model", "inputs", "places", "message", "help_"), [
    (Named(), "zebra targets", {}, "forward(tokens, mask) has no parameter `zebra`", "write `input zebra as tokens"),
    (Named(), "tokens zebra", {}, "forward(tokens, mask) has no parameter `zebra`", "write `input zebra as mask"),
    (Named(), "tokens zebra", {"zebra": "tokens"}, "`tokens` and `zebra` both go to `tokens`", "one input"),
    (Named(), "tokens targets", {"targets": "labels"}, "has no parameter `labels`", "as mask"),
    (Named(), "mask targets", {}, "no input fills `tokens`", "as PARAMETER"),
    (Ordered(), "depth mask", {}, "no input fills `tokens`", "as PARAMETER"),
    (Several(), "tokens zebra", {}, "forward(tokens, *tables) has no parameter `zebra`", "input zebra as tables"),
    (Several(), "zebra", {"zebra": "tables"}, "no input fills `tokens`", "as PARAMETER"),
])  # fmt: skip
def test_inputs_without_a_parameter_are_refused_with_a_way_out(
    model: nn.Module, inputs: str, places: dict[str, str], message: str, help_: str
) -> None:
    with pytest.raises(InputsError) as refused:
        called(model, inputs, places)
    assert message in str(refused.value)
    assert help_ in refused.value.help


def test_what_goes_into_kwargs_is_told() -> None:
    lines = TaskLines("", (), ("tokens", "mask"), "output", "loss", (), None, (("mask", "attention_mask"),))
    assert passed_on(Wrapper(), lines) == {"tokens": "tokens", "mask": "attention_mask"}
    assert passed_on(Named(), lines) == {}
