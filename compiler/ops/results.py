"""Results of operators on meta tensors: dtypes, shapes and strides, remembered for a process.

Models repeat operators, and a build asks for the same ones in its passes and in its checks: so an operator on operands
of the same layouts runs once, on torch's meta device or, where it has no kernel there, on fake tensors of a CPU, which
takes five times as long. Operators of several results run on fake tensors too if numbers are narrow: some (norms) keep
their statistics narrow on a CPU alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
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
_CACHED_RESULTS = 1 << 17
"""The most results that are remembered; beyond that, all are forgotten."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of an operator, as examples. ``in_place`` is true if it writes its first operand and returns that."""

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
    # results also depend on the default dtype, and strides on whether kernels of oneDNN run
    key = func, _hashable(args), _hashable(kwargs), torch.get_default_dtype(), torch.backends.mkldnn.enabled
    stored = _RESULTS.get(key)
    if stored is None:
        if len(_RESULTS) >= _CACHED_RESULTS:
            _RESULTS.clear()
        stored = _RESULTS[key] = _compute(func, args, kwargs)
    return stored


def _hashable(item: Any) -> Any:
    """Return an argument as part of a key: examples by identity, and numbers with their type (``1``, ``1.0`` and
    ``True`` are equal)."""
    if isinstance(item, torch.Tensor):
        return id(item)  # an example lives as long as the process
    if isinstance(item, (tuple, list)):
        return type(item), tuple(map(_hashable, item))
    if isinstance(item, dict):
        return tuple((name, _hashable(value)) for name, value in item.items())
    return type(item), item


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Results:
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    if len(func._schema.returns) == 1 or not any(is_narrow(tensor.dtype) for tensor in tensors):
        # no kernel on the meta device; or arguments that it does not take, which fake tensors refuse as well
        with suppress(Exception):
            # an operator that writes gets operands of its own
            return _run_on(func, args, kwargs, "meta", torch.Tensor.detach if func._schema.is_mutable else None)
    with _fake_mode(), quiet():
        return _run_on(func, args, kwargs, "cpu", _on_cpu)


def _run_on(
    func: Any, args: Any, kwargs: Any, device: str, operand: Callable[[torch.Tensor], Any] | None
) -> Results:  # fmt: skip
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": torch.device(device)}
    args, kwargs = changed((args, kwargs), operand) if operand is not None else (args, kwargs)
    results = func(*args, **kwargs)
    return Results(changed(results, example_of), bool(args) and results is args[0])


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


@cache
def _fake_mode() -> FakeTensorMode:
    mode = FakeTensorMode()
    mode.cache_enabled = False  # each operator is asked for once
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
