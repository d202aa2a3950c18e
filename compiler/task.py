"""The task of a plan as functions: how the model is made and called, and what its loss is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..grammar.nearest import listed, nearest
from .callables import check_arguments, load_callable
from .capture import CallModel, LossFunction
from .capture_faults import CaptureError


@dataclass(frozen=True, slots=True)
class TaskLines:
    """What of a plan says what is trained; it stands in a build's manifest, so that a run can make the model."""

    model: str
    arguments: tuple[tuple[str, Any], ...]
    inputs: tuple[str, ...]
    loss: str  # `cross_entropy`, `output` or `callable`
    target: str
    operands: tuple[str, ...]
    ignore: int | None


class InputsError(Exception):
    """The model's forward cannot be called with the plan's inputs. ``inputs`` has those that it does not take."""

    def __init__(self, message: str, inputs: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.inputs = inputs


def model_builder(
    lines: TaskLines, folder: Path, overrides: Mapping[str, Any] | None = None
) -> Callable[[], nn.Module]:
    """A function that makes the model; ``overrides`` are the ``verify`` line's arguments.

    Raises:
        CallableError: there is no such callable, its module fails, or it takes other arguments.
    """
    make = load_callable(lines.model, folder)
    arguments = {**dict(lines.arguments), **(overrides or {})}
    check_arguments(make, lines.model, arguments)

    def build() -> nn.Module:
        module = make(**arguments)
        if not isinstance(module, nn.Module):
            raise TypeError(f"`{lines.model}` returned a {type(module).__name__}, not an nn.Module")
        return module.train()

    return build


def caller(model: nn.Module, lines: TaskLines) -> CallModel:
    """How the model is called: inputs that its forward names are passed by name, others in order unless only the loss
    uses them.

    Raises:
        InputsError: forward has a required parameter that no input fills.
    """
    parameters = inspect.signature(model.forward).parameters
    named = [name for name in lines.inputs if name in parameters]
    rest = [name for name in lines.inputs if name not in named]
    if lines.loss != "output":
        rest = [name for name in rest if name not in lines.operands]
    required = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    positional = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    free = [name for name in positional if name not in named]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if len(rest) > len(free) and not takes_any:
        given = rest[len(free) :]
        raise InputsError(f"forward({', '.join(parameters)}) has no place for `{'`, `'.join(given)}`", tuple(given))
    missing = [name for name in required if name not in named and name not in free[: len(rest)]]
    if missing:
        raise InputsError(f"no input fills `{'`, `'.join(missing)}` of forward({', '.join(parameters)})")
    filled = dict(zip(free, rest, strict=False))

    def call(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
        by_name = {name: inputs[name] for name in named}
        by_name.update((place, inputs[name]) for place, name in filled.items())
        if takes_any and len(rest) > len(free):
            return module(*(inputs[name] for name in rest), **{name: inputs[name] for name in named})
        return module(**by_name)

    return call


def loss_function(lines: TaskLines, folder: Path) -> LossFunction:
    """The loss of the model's output and the inputs.

    Raises:
        CallableError: the loss's callable cannot be had, or takes other arguments.
    """
    if lines.loss == "output":
        return lambda output, inputs: _path(output, lines.target)
    if lines.loss == "cross_entropy":
        ignore = -100 if lines.ignore is None else lines.ignore

        def cross_entropy(output: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            logits, targets = (_tensor(name, output, inputs) for name in lines.operands)
            return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore)

        return cross_entropy
    function = load_callable(lines.target, folder)
    check_arguments(function, lines.target, (), len(lines.operands))
    if isinstance(function, FunctionType):
        function = _with_lines(function)
    return lambda output, inputs: function(*(_operand(name, output, inputs) for name in lines.operands))


def _with_lines(function: FunctionType) -> FunctionType:
    """The same function under the one name of functions whose lines an export records: a model's ``forward``."""
    code = function.__code__.replace(co_name="forward")
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _operand(name: str, output: Any, inputs: Mapping[str, torch.Tensor]) -> Any:
    if name in inputs:
        return inputs[name]
    return _path(output, name.partition(".")[2])


def _tensor(name: str, output: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    value = _operand(name, output, inputs)
    if not isinstance(value, torch.Tensor):
        raise _misnamed(f"`{name}` is {_described(value)}, not a tensor", name, value)
    return value


def _path(value: Any, path: str) -> Any:
    name = "output"
    for part in path.split(".") if path else ():
        found = value[part] if isinstance(value, Mapping) and part in value else getattr(value, part, None)
        if found is None:
            raise _misnamed(f"the model's `{name}` has no `{part}`: it is {_described(value)}", name, value, part)
        value, name = found, f"{name}.{part}"
    return value


def _misnamed(message: str, name: str, value: Any, part: str = "") -> CaptureError:
    fields = _fields(value)
    meant = listed((f"{name}.{field}" for field in nearest(part, fields)), "or")
    if isinstance(value, torch.Tensor):
        help_ = f"write `{name}`"
    elif fields:
        help_ = f"did you mean {meant}?" if meant else f"it has {listed(f'{name}.{field}' for field in fields)}"
    else:
        help_ = "choose the tensor in a loss of your own"
    return CaptureError("field", message, in_loss=True, help=help_)


def _described(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _fields(value: Any) -> list[str]:
    """The names by which a plan reaches something in what a model returns."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    names = [str(name) for name, field in held.items() if field is not None]
    return [name for name in names if name.isidentifier() and not name.startswith("_")]
