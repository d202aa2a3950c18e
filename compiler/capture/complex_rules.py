"""The table of operators on complex numbers: each as what it does to real and imaginary parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..ops.own_ops import aten
from . import complex_numbers as numbers
from .complex_numbers import ComplexPair, add, is_pair, mul, pair, product, whole
from .fourier import of_reals, to_complex, to_reals

Rule = Callable[..., Any]
"""Takes an operator's arguments, complex ones as pairs; gives a pair, or a tensor."""

_DATA = {"self", "other", "tensor", "tensors", "input", "src", "source", "value", "values"}
"""Arguments that hold complex numbers; all others are sizes, indices and masks."""


def _view_as_real(x: Any) -> Tensor:
    return torch.stack(whole(x), -1)


def _view_as_complex(x: Tensor) -> ComplexPair:
    return ComplexPair(x.select(-1, 0), x.select(-1, 1))


def _cast(x: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Cast to complex numbers, whose parts get their type with the result, or to reals, which drops the imaginary
    part."""
    return pair(x) if dtype is None or dtype.is_complex else whole(x)[0]


def _copy(x: Any, source: Any, *_: Any) -> Any:
    return pair(source) if isinstance(x, ComplexPair) else whole(source)[0]


def _filled(value: Callable[..., Any]) -> Rule:
    """Return the rule of an operator that makes a tensor of one number; shape and type come from the result."""

    def rule(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
        number = value(*args)  # a tensor without dims, or a number
        number = pair(number if isinstance(number, (ComplexPair, Tensor)) else complex(number))
        return number if dtype is None or dtype.is_complex else number.real or 0.0

    return rule


def _part(x: Any, place: int) -> Any:
    parts = pair(x)
    if parts[place] is None:
        return torch.zeros_like(parts[1 - place]) if isinstance(parts[1 - place], Tensor) else 0.0
    return parts[place]


def _each(op: Any, call: Callable[..., Any] | None = None) -> Rule:
    """Return the rule of an operator that moves or adds entries: it does so to each part, and zero parts stay zero."""
    names = [argument.name for argument in op._schema.arguments]

    def rule(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        data = tree_leaves([value for name, value in arguments.items() if name in _DATA], is_pair)

        def part(place: int) -> Any:
            if all(pair(value)[place] is None for value in data):
                return None
            made = {
                name: value.to_real() if isinstance(value, torch.dtype)
                else tree_map(lambda one: _part(one, place), value, is_leaf=is_pair) if name in _DATA
                else value
                for name, value in arguments.items()
            }  # fmt: skip
            first = [made.pop(name) for name in names[: len(args)]]
            return (call or op)(*first, **made)

        real, imag = part(0), part(1)
        if isinstance(some := imag if real is None else real, (list, tuple)):
            none = [None] * len(some)
            return [ComplexPair(*both) for both in zip(real or none, imag or none, strict=True)]
        return ComplexPair(real, imag)

    return rule


def _biased(op: Any) -> Rule:
    """Return the rule of a product whose third operand is added: along a linear layer's last dim, or a convolution's
    second."""

    def rule(x: Any, weight: Any, bias: Any = None, *rest: Any, **kwargs: Any) -> ComplexPair:
        result = product(op)(x, weight, None, *rest, **kwargs)
        if bias is None:
            return result
        dims = 0 if op is aten.linear.default else whole(weight)[0].dim() - 2
        spread = (None if part is None else part.reshape([-1, *[1] * dims]) for part in pair(bias))
        return add(result, ComplexPair(*spread))

    return rule


def _plus_product(op: Any) -> Rule:
    def rule(x: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> ComplexPair:
        result = product(op)(first, second)
        return add(x if beta == 1 else mul(x, beta), result if alpha == 1 else mul(result, alpha))

    return rule


def _norm(x: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    norm: Tensor = aten.linalg_vector_norm.default(numbers.abs_(x), *args, **kwargs)
    return norm


def _dropout(x: Any, p: float, train: bool | None) -> tuple[ComplexPair, Tensor]:
    """Drop the same entries of both parts: they share one mask."""
    real, imag = whole(x)
    kept, mask = aten.native_dropout.default(torch.ones_like(real), p, train)
    return ComplexPair(real * kept, imag * kept), mask


_EACH = """
    alias clone detach contiguous lift_fresh_copy t transpose.int permute expand slice.Tensor select.int
    squeeze squeeze.dim squeeze.dims unsqueeze unbind.int split.Tensor split_with_sizes chunk flip roll repeat cat stack
    index.Tensor index_select gather constant_pad_nd slice_scatter select_scatter index_put index_add index_copy
    scatter.src scatter.value scatter_add masked_fill.Scalar masked_fill.Tensor where.self where.ScalarSelf
    where.ScalarOther where.Scalar tril triu diagonal diag_embed unfold sum sum.dim_IntList mean mean.dim cumsum neg
    positive diagonal_scatter masked_scatter
"""
_ZEROS = "zeros zeros_like new_zeros empty.memory_format empty_like new_empty"


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


RULES: Mapping[Any, Rule] = {
    **{(op := _overload(name)): _each(op) for name in _EACH.split()},
    **{op: _each(op, aten.reshape.default) for op in map(_overload, ("view", "_unsafe_view", "reshape"))},
    **{op: product(op) for op in map(_overload, ["mm", "bmm", "matmul", "mv", "dot", "einsum"])},
    **{op: _biased(op) for op in map(_overload, ["linear", "convolution", "conv1d", "conv2d", "conv3d"])},
    aten.vdot.default: lambda x, y: product(aten.dot.default)(numbers.conj(x), y),
    aten.addmm.default: _plus_product(aten.mm.default),
    aten.baddbmm.default: _plus_product(aten.bmm.default),
    **dict.fromkeys((aten.resolve_conj.default, aten.resolve_neg.default), pair),
    **dict.fromkeys((aten._conj.default, aten._conj_physical.default), numbers.conj),
    aten._neg_view.default: numbers.neg,
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten.complex.default: ComplexPair,
    aten.polar.default: numbers.polar,
    aten.real.default: lambda x: whole(x)[0],
    aten.imag.default: lambda x: whole(x)[1],
    aten._to_copy.default: _cast,
    aten.copy.default: _copy,
    **dict.fromkeys(map(_overload, ("add.Tensor", "add.Scalar")), numbers.add),
    **dict.fromkeys(map(_overload, ("sub.Tensor", "sub.Scalar")), numbers.sub),
    **dict.fromkeys(map(_overload, ("rsub.Tensor", "rsub.Scalar")), lambda x, y, alpha=1: numbers.sub(y, x, alpha)),
    **dict.fromkeys(map(_overload, ("mul.Tensor", "mul.Scalar")), numbers.mul),
    **dict.fromkeys(map(_overload, ("div.Tensor", "div.Scalar")), numbers.div),
    **dict.fromkeys(map(_overload, ("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")), numbers.pow_),
    aten.reciprocal.default: numbers.reciprocal,
    aten.abs.default: numbers.abs_,
    aten.angle.default: numbers.angle,
    aten.sgn.default: numbers.sgn,
    aten.exp.default: numbers.exp,
    aten.log.default: numbers.log,
    aten.log2.default: numbers.log_to(2),
    aten.log10.default: numbers.log_to(10),
    aten.log1p.default: lambda x: numbers.log(add(x, 1.0)),
    aten.expm1.default: lambda x: add(numbers.exp(x), -1.0),
    aten.sqrt.default: numbers.sqrt,
    aten.rsqrt.default: lambda x: numbers.reciprocal(numbers.sqrt(x)),
    aten.sin.default: numbers.sin,
    aten.cos.default: numbers.cos,
    aten.tan.default: lambda x: numbers.div(numbers.sin(x), numbers.cos(x)),
    aten.sinh.default: numbers.sinh,
    aten.cosh.default: numbers.cosh,
    aten.tanh.default: lambda x: numbers.div(numbers.sinh(x), numbers.cosh(x)),
    aten.sigmoid.default: numbers.sigmoid,
    aten.silu.default: lambda x: mul(x, numbers.sigmoid(x)),
    aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys(map(_overload, ("eq.Tensor", "eq.Scalar")), numbers.equal),
    **dict.fromkeys(map(_overload, ("ne.Tensor", "ne.Scalar")), lambda x, y: ~numbers.equal(x, y)),
    aten.isnan.default: numbers.of_any(torch.isnan),
    aten.isinf.default: numbers.of_any(torch.isinf),
    aten.native_dropout.default: _dropout,
    **dict.fromkeys(map(_overload, _ZEROS.split()), _filled(lambda *_: 0)),
    **dict.fromkeys(map(_overload, ["ones", "ones_like", "new_ones"]), _filled(lambda *_: 1)),
    **dict.fromkeys(map(_overload, ["full", "full_like", "fill.Scalar"]), _filled(lambda _, value: value)),
    aten.new_full.default: _filled(lambda _, shape, value: value),
    aten.scalar_tensor.default: _filled(lambda value: value),
    aten._fft_c2c.default: to_complex,
    aten._fft_r2c.default: of_reals,
    aten._fft_c2r.default: to_reals,
}  # fmt: skip
"""The rule of each operator. An operator without one is taken apart as torch does, and refused if a part has no rule
either."""
