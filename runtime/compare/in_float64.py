"""Own code in float64: a user's module computes in it whatever floating types its code names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...compiler.ops.own_ops import aten

_WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor with its floating or complex numbers in float64 or complex128."""
    wider = _WIDER.get(tensor.dtype)
    return tensor if wider is None else tensor.to(wider)


def widen_module(module: nn.Module) -> nn.Module:
    """Widen a module's parameters and buffers in place; torch's ``double`` leaves complex ones as they are."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = widened(tensor.data)
    return module


@contextmanager
def in_float64(dtype_of_model: torch.dtype) -> Iterator[None]:
    """Enter a block in which operators compute in float64, also where code asks for a narrower type. Facts of float64,
    as its smallest number, are those of ``dtype_of_model``: a captured graph has them as constants."""
    finfo, rms_norm = torch.finfo, torch.rms_norm

    def info(dtype: torch.dtype | None = None) -> torch.finfo:
        return finfo(
            dtype_of_model if dtype is torch.float64 else torch.get_default_dtype() if dtype is None else dtype
        )

    def norm(input: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return rms_norm(input, shape, weight, finfo(dtype_of_model).eps if eps is None else eps)

    with ExitStack() as within:
        within.enter_context(patch.object(torch, "finfo", info))
        within.enter_context(patch.object(torch, "rms_norm", norm))
        within.enter_context(_Widening())
        yield


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Enter a block in which operators on whole numbers make float64, as a quotient does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@final
class _Widening(TorchDispatchMode):
    """A mode that gives operators float64 in the place of narrower types, and takes it from them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = func._schema.is_mutable  # what is written keeps its type, and its memory
        args = tuple(_wide(item, writes) for item in args)
        kwargs = {name: _wide(item, writes) for name, item in (kwargs or {}).items()}
        if func is aten._grouped_mm.default:  # has no kernel for float64
            return _grouped_product(*args, **kwargs)
        with float64_by_default():
            results = func(*args, **kwargs)
        return results if writes else _wide(results)


def _wide(item: Any, written: bool = False) -> Any:
    """Return an argument or a result with wider types; of arguments that are ``written`` dtypes alone."""
    if isinstance(item, Tensor):
        return item if written else widened(item)
    if isinstance(item, torch.dtype):
        return _WIDER.get(item, item)
    return type(item)(_wide(one, written) for one in item) if type(item) in (list, tuple) else item


@final
class Calls(TorchDispatchMode):
    """A mode that notes the operators that a module calls, with their numbers and words. Types and conversions of types
    are left out.

    Attributes:
        noted: the texts of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname not in _OF_TYPES:
            items = tree_leaves((args, kwargs or {}))
            words = [str(item) for item in items if isinstance(item, (bool, int, float, str))]
            self.noted.append(f"{func}({', '.join(words)})")
        return func(*args, **(kwargs or {}))


_OF_TYPES = ("_to_copy", "clone", "detach", "lift_fresh", "to")


def _grouped_product(
    rows: Tensor, columns: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Return the products of groups, as ``torch._grouped_mm`` does: a group is a matrix of a three-dimensional operand,
    and those rows or columns of a two-dimensional one that end at its offset."""
    if offsets is None:
        return rows @ columns
    ends = [0, *offsets.tolist()]
    groups = [*pairwise(ends)]
    if rows.dim() == 2 and columns.dim() == 2:
        return torch.stack([rows[:, begin:end] @ columns[begin:end] for begin, end in groups])
    if rows.dim() == 2:
        product = rows.new_zeros(len(rows), columns.shape[-1])
        for matrix, (begin, end) in zip(columns, groups, strict=True):
            product[begin:end] = rows[begin:end] @ matrix
        return product
    product = rows.new_zeros(rows.shape[-2], columns.shape[-1])
    for matrix, (begin, end) in zip(rows, groups, strict=True):
        product[:, begin:end] = matrix @ columns[:, begin:end]
    return product
