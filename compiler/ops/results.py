"""Results of operators on tensors without numbers: dtypes, shapes and strides, remembered.

An operator on operands of the same layouts is run once in a process: on torch's meta device, or, where it has no kernel
there, on fake tensors of a CPU. These take five times as long. Operators of several results are asked on a CPU too if
numbers are narrow: some (norms) keep their statistics narrow on a CPU alone.
Models repeat operators, and a build asks for the same ones in its passes and in its checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..torch_private import quiet
from .precision import is_narrow

TensorLayout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""A tensor's dtype, shape, strides and offset in its storage, in entries."""
_MOST = 1 << 17
"""The most results that are kept; beyond that, all are forgotten."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of an operator, as examples. ``in_place``: it writes its first operand and returns that."""

    values: Any
    in_place: bool


_EXAMPLES: dict[TensorLayout, torch.Tensor] = {}
_RESULTS: dict[Any, Results] = {}


def example_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the one meta tensor that stands for all tensors of a layout; it is never written."""
    layout = tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    stored = _EXAMPLES.get(layout)
    if stored is None:
        dtype, shape, strides, offset = layout
        most = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        storage = torch.empty(most if 0 not in shape else offset, dtype=dtype, device="meta")
        stored = _EXAMPLES[layout] = storage.as_strided(shape, strides, offset)
    return stored


@cache
def example(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the example of a dense tensor, whose entries lie in order."""
    return example_of(torch.empty(shape, dtype=dtype, device="meta"))


def results_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Results:
    """Return the results of an operator on examples in its arguments.

    Raises:
        Exception: whatever torch raises for arguments that it does not take.
    """
    # all that results depend on beside the arguments: a default that code may set, and strides that kernels choose
    key = func, _key(args), _key(kwargs), torch.get_default_dtype(), torch.backends.mkldnn.enabled
    stored = _RESULTS.get(key)
    if stored is None:
        if len(_RESULTS) >= _MOST:
            _RESULTS.clear()
        stored = _RESULTS[key] = _run(func, args, kwargs)
    return stored


def _key(item: Any) -> Any:
    """Return an argument as part of a key. Examples count by their layout, and numbers with their type (``1``, ``1.0``
    and ``True`` are equal)."""
    if isinstance(item, torch.Tensor):
        return id(item)  # an example lives as long as the process
    if isinstance(item, (tuple, list)):
        return type(item), tuple(map(_key, item))
    if isinstance(item, dict):
        return tuple((name, _key(value)) for name, value in item.items())
    return type(item), item


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Results:
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    if len(func._schema.returns) == 1 or not any(is_narrow(tensor.dtype) for tensor in tensors):
        try:
            # an operator that writes gets operands of its own
            return _run_on(func, args, kwargs, "meta", torch.Tensor.detach if func._schema.is_mutable else None)
        except Exception:  # no kernel for it; or what it does not take, which fake tensors say as well
            return _run_fake(func, args, kwargs)
    return _run_fake(func, args, kwargs)


def _run_fake(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Results:
    with _fakes(), quiet():
        return _run_on(func, args, kwargs, "cpu", _fake)


def _run_on(
    func: Any, args: Any, kwargs: Any, device: str, operand: Callable[[torch.Tensor], Any] | None
) -> Results:  # fmt: skip
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": torch.device(device)}
    args, kwargs = changed((args, kwargs), operand) if operand is not None else (args, kwargs)
    made = func(*args, **kwargs)
    return Results(changed(made, example_of), bool(args) and made is args[0])


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


@cache
def _fakes() -> FakeTensorMode:
    mode = FakeTensorMode()
    mode.cache_enabled = False  # what is asked for is asked for once
    return mode


def changed(item: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument, or results, with every tensor in its tuples, lists and dicts replaced."""
    if isinstance(item, torch.Tensor):
        return change(item)
    if isinstance(item, (tuple, list)):
        return type(item)(changed(inner, change) for inner in item)
    if isinstance(item, dict):
        return {name: changed(value, change) for name, value in item.items()}
    return item
