"""The model's output as a plan's loss reaches into it: ``output.loss``, ``output.1``, ``output.hidden.0``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...grammar.nearest import nearest
from ..layout.placement import is_supported
from .faults import CaptureError

_DEEPEST = 3
"""The most levels of entries inside each other in which tensors are searched."""
_MOST_NAMED = 6
"""The most entries of an output that a message names."""


def tensor_at(name: str, output: Any) -> torch.Tensor:
    """Return the tensor at a dotted name that begins with ``output``.

    Raises:
        CaptureError: nothing is there, or no tensor.
    """
    value = value_at(name, output)
    if not isinstance(value, torch.Tensor):
        raise _misnamed(f"`{name}` is {_kind_text(value)}, not a tensor", name, name, value)
    return value


def value_at(name: str, output: Any) -> Any:
    """Return the value at a dotted name that begins with ``output``. Each part is an entry's key, an attribute, or an
    entry's number from 0.

    Raises:
        CaptureError: nothing is there, or None.
    """
    value, so_far = output, "output"
    for part in name.split(".")[1:]:
        entry = _entry(value, part)
        if entry is _ABSENT:
            message = f"the model's `{so_far}` has no `{part}`: it is {_kind_text(value)}"
            raise _misnamed(message, name, so_far, value, part)
        if entry is None:
            raise _misnamed(f"the model's `{so_far}.{part}` is None", name, so_far, value)
        value, so_far = entry, f"{so_far}.{part}"
    return value


def tensors_in(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a plan's loss can name in a model's output, each by its name, in the output's order."""
    pending = [("output", output)]
    while pending:
        name, value = pending.pop(0)
        if isinstance(value, torch.Tensor):
            yield name, value
        elif name.count(".") < _DEEPEST:
            pending[:0] = [(f"{name}.{field}", inner) for field, inner in _entries(value).items()]


def returned_tensors(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's output that have dims and a dtype of programs, by the name with which a loss
    reaches them, without ``output.``: ``logits``, ``1``, or ``output`` for the only one.

    >>> list(returned_tensors({"logits": torch.zeros(2, 3), "loss": torch.zeros(())}))
    ['logits']
    """
    return {
        name.removeprefix("output."): tensor
        for name, tensor in tensors_in(output)
        if tensor.dim() and is_supported(tensor.dtype)
    }


_ABSENT = object()


def _entry(value: Any, part: str) -> Any:
    if isinstance(value, Mapping) and part in value:
        return value[part]
    if part.isdigit() and not isinstance(value, torch.Tensor) and hasattr(value, "__getitem__"):
        try:  # a sequence, or a mapping that counts its entries too
            return value[int(part)]
        except (IndexError, KeyError, TypeError):
            return _ABSENT
    return getattr(value, part, _ABSENT)


def _misnamed(message: str, whole: str, name: str, value: Any, part: str = "") -> CaptureError:
    entries = _entries(value)
    near = [f"`{name}.{field}`" for field in nearest(part, entries)]
    has = [f"`{name}.{field}` ({_kind_text(inner, shapes=True)})" for field, inner in entries.items()]
    if isinstance(value, torch.Tensor):
        help_ = f"write `{name}`"
    elif near:
        help_ = f"did you mean {' or '.join(near)}?"
    elif has:
        more = f" and {len(has) - _MOST_NAMED} more" if len(has) > _MOST_NAMED else ""
        help_ = f"it has {', '.join(has[:_MOST_NAMED])}{more}"
    else:
        help_ = "choose the tensor in a loss of your own"
    return CaptureError("field", message, in_loss=True, help=help_, named=whole)


def _kind_text(value: Any, shapes: bool = False) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if shapes else "a tensor"
    return "None" if value is None else f"a {type(value).__name__}"


def _entries(value: Any) -> dict[str, Any]:
    """Return the entries of a value that a plan can reach, by name or number; empty fields are left out."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        entries = {str(key): inner for key, inner in value.items()}
    elif isinstance(value, Sequence) and not isinstance(value, str):
        return {str(at): inner for at, inner in enumerate(value)}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    else:
        entries = getattr(value, "__dict__", {})
    return {name: inner for name, inner in entries.items()
            if inner is not None and (name.isidentifier() or name.isdigit()) and not name.startswith("_")}  # fmt: skip
