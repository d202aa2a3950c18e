"""Slices of a whole dim, kept: what is traced at one size is the same graph at others."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class EverySlice(TorchFunctionMode):
    """A mode in which ``x[:n]`` is a slice also where ``x`` has ``n`` entries and torch would return ``x`` itself. So a
    trace at one size has the same operators as at others."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__getitem__" and isinstance(args[0], torch.Tensor):
            args = _sliced(*args)
        return function(*args, **(kwargs or {}))


def _sliced(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """Return a tensor with its slices of whole dims made, and an index in which they are full slices."""
    items = list(index) if isinstance(index, tuple) else [index]
    taken = [_taken(item) for item in items]
    dim = 0
    for at, item in enumerate(items):
        first = isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1)
        if first and isinstance(item.stop, int) and item.stop == x.shape[dim]:
            x, items[at] = torch.ops.aten.slice.Tensor(x, dim, 0, item.stop, 1), slice(None)
        dim += x.dim() - sum(taken) if item is Ellipsis else taken[at]
    return x, tuple(items)


def _taken(item: Any) -> int:
    """Return the number of dims that an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype is torch.bool else 1
