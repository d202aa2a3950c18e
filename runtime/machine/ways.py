"""Code for operators: the one table of functions that the machine runs in place of torch's own, by purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

import torch

from ...compiler.analysis.lifetimes import BLAS, ONEDNN, PRODUCT, Products
from ...compiler.ops.precision import base_name
from ...compiler.ops.rules import facts
from ...compiler.program.program import operator

Kernel = Callable[..., Any]
Way = Literal["kernel", "reference", "over", "into", "adding", "onednn"]
"""The purposes of code. A *kernel* gets the site of its line, then the operator's arguments. Code for the *reference*
replaces it in the captured graph, and that for *onednn* where this library is faster. Code that writes *over* its first
operand, *into* a tensor that comes first, or is *adding* to such a one, gets no site."""

_CODE: dict[Way, dict[str, Kernel]] = {way: {} for way in get_args(Way)}
_Code = TypeVar("_Code", bound=Kernel)


def runs(op: str, way: Way = "kernel") -> Callable[[_Code], _Code]:
    """Note the decorated function as the code of an operator for a purpose."""

    def note(code: _Code) -> _Code:
        _CODE[way][op] = code
        return code

    return note


def code_for(way: Way) -> Mapping[str, Kernel]:
    """Return the code for a purpose by operator, from the modules that are imported."""
    return _CODE[way]


def library_of(kernels: Mapping[str, Kernel]) -> Products:
    """Return the library that makes large products of float32 with these kernels."""
    return ONEDNN if PRODUCT in kernels else BLAS


def binding(op: str) -> Callable[..., Any]:
    """Return an operator in its fastest form for Python. For the most frequent ones that is torch's own function with
    the same arguments, in half the time."""
    if not facts(op).plain:
        return operator(op)  # type: ignore[no-any-return]
    name = base_name(op)
    return getattr(torch, name, None) or getattr(torch.Tensor, name)  # type: ignore[no-any-return]
