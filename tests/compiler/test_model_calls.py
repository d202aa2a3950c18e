"""The making of a model, and its call with a plan's inputs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from parc.compiler.capture.callables import not_found
from parc.compiler.capture.model_calls import InputsError, TaskLines, caller, model_builder, passed_on
from parc.compiler.program.step_values import LossTerm


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
    """Return the arguments that the forward gets: for each parameter the number of the input that goes there."""
    names = tuple(inputs.split())
    lines = TaskLines("", (), names, (LossTerm("cross_entropy", "", ("output", reads)),), tuple((places or {}).items()))
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
    lines = TaskLines("", (), ("tokens", "mask"), (LossTerm("output", "loss", ()),), (("mask", "attention_mask"),))
    assert passed_on(Wrapper(), lines) == {"tokens": "tokens", "mask": "attention_mask"}
    assert passed_on(Named(), lines) == {}


MAKERS = """
from pathlib import Path

from torch import nn


def sized(path):
    return nn.Linear(int(Path(path).read_text()), 1)


def pretrained(path):
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
"""


def made(folder: Path, function: str, path: str) -> nn.Module:
    (folder / "makers.py").write_text(MAKERS)
    lines = TaskLines(f"./makers.py:{function}", (("path", path),), (), (LossTerm("output", "", ()),))
    return model_builder(lines, folder)()


def test_paths_among_a_models_arguments_count_from_the_plans_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "size.txt").write_text("3")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "size.txt").write_text("5")
    monkeypatch.chdir(elsewhere)
    model = made(tmp_path, "sized", "size.txt")
    assert isinstance(model, nn.Linear) and model.in_features == 3
    assert Path.cwd() == elsewhere


@pytest.mark.parametrize(("path", "help_"), [("hff", "did you mean `hf`?"), ("./nothing", "from the plan's folder.")])
def test_a_misspelt_folder_is_not_looked_for_on_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, help_: str
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    looked = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(socket, "getaddrinfo", looked)
    (tmp_path / "hf").mkdir()
    with pytest.raises(OSError) as failed:
        made(tmp_path, "pretrained", path)
    why, way_out = not_found(failed.value, {"layers": 2, "path": path}, tmp_path)
    assert f"there is no folder `{path}` beside the plan" in why and help_ in way_out
    assert not looked.called and "HF_HUB_OFFLINE" not in os.environ
    assert not_found(ValueError("something else"), {"path": path}, tmp_path) == ("", "")
