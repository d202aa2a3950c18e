"""Complex numbers as pairs of real tensors: arithmetic, functions and products, which autograd goes through."""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def real_form(tensor: Tensor) -> Tensor:
    """Return a tensor in the form that programs hold: complex numbers become real and imaginary parts along a last dim
    of 2 (a view)."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def own_form(tensor: Tensor, is_complex: bool) -> Tensor:
    """Return the model's own tensor from the form that programs hold."""
    return torch.view_as_complex(tensor.contiguous()) if is_complex else tensor


class ComplexPair(NamedTuple):
    """A complex value; a part that is None is zero everywhere, and costs nothing."""

    real: Any
    imag: Any


_UNIT = 1.0
"""The one of every pair, known by its identity: a product with it costs nothing."""


def pair(x: Any) -> ComplexPair:
    """Return any operand as a pair. Parts of a Python number that are zero become None."""
    if isinstance(x, ComplexPair):
        return x
    if isinstance(x, Tensor):
        return ComplexPair(x, None)
    return ComplexPair(*(None if part == 0 else _UNIT if part == 1 else part for part in (x.real, x.imag)))


def is_pair(x: Any) -> bool:
    """Return whether an operand is a pair: a leaf for walks over trees of operands."""
    return isinstance(x, ComplexPair)


def _plus(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


def _minus(x: Any, y: Any) -> Any:
    return x if y is None else -y if x is None else x - y


def _multiplied(x: Any, y: Any) -> Any:
    if x is None or y is None:
        return None
    return x if y is _UNIT else y if x is _UNIT else x * y


def whole(x: Any) -> tuple[Tensor, Tensor]:
    """Return both parts, with zeros written out."""
    real, imag = pair(x)
    return torch.zeros_like(imag) if real is None else real, torch.zeros_like(real) if imag is None else imag


# ---- arithmetic


def add(x: Any, y: Any, alpha: Any = 1) -> ComplexPair:
    """``x + alpha y``."""
    first, second = pair(x), pair(y) if alpha == 1 else mul(y, alpha)
    return ComplexPair(_plus(first.real, second.real), _plus(first.imag, second.imag))


def sub(x: Any, y: Any, alpha: Any = 1) -> ComplexPair:
    """``x - alpha y``."""
    first, second = pair(x), pair(y) if alpha == 1 else mul(y, alpha)
    return ComplexPair(_minus(first.real, second.real), _minus(first.imag, second.imag))


def mul(x: Any, y: Any) -> ComplexPair:
    """``x y``, or a number by either."""
    (a, b), (c, d) = pair(x), pair(y)
    return ComplexPair(_minus(_multiplied(a, c), _multiplied(b, d)), _plus(_multiplied(a, d), _multiplied(b, c)))


def neg(x: Any) -> ComplexPair:
    """``-x``."""
    return sub(0, x)


def conj(x: Any) -> ComplexPair:
    """The conjugate: the imaginary part with the other sign."""
    real, imag = pair(x)
    return ComplexPair(real, None if imag is None else -imag)


def scaled(x: Any, by: Any) -> ComplexPair:
    """``x / by``, with a real number or tensor ``by``."""
    real, imag = pair(x)
    return ComplexPair(None if real is None else real / by, None if imag is None else imag / by)


def square_sum(x: Any) -> Any:
    """``|x|^2``."""
    real, imag = pair(x)
    return _plus(_multiplied(real, real), _multiplied(imag, imag))


def div(x: Any, y: Any) -> ComplexPair:
    """``x / y``."""
    divisor = pair(y)
    if divisor.imag is None:
        return scaled(x, y if not isinstance(y, ComplexPair) else y.real)
    return scaled(mul(x, conj(y)), square_sum(y))


def reciprocal(x: Any) -> ComplexPair:
    """``1 / x``."""
    return div(1.0, x)


def abs_(x: Any) -> Tensor:
    """``|x|``, whose gradient at zero is zero, as in torch."""
    real, imag = pair(x)
    if real is None or imag is None:
        return torch.abs(imag if real is None else real)
    is_zero = (real == 0) & (imag == 0)
    return torch.hypot(real.masked_fill(is_zero, 1.0), imag).masked_fill(is_zero, 0.0)


def angle(x: Any) -> Tensor:
    """The angle of ``x``, from -pi to pi, whose gradient at zero is zero."""
    real, imag = whole(x)
    is_zero = (real == 0) & (imag == 0)
    side = torch.copysign(torch.ones_like(real), real)  # a zero has a sign
    return torch.atan2(torch.where(is_zero, imag.detach(), imag), torch.where(is_zero, side, real))


def sgn(x: Any) -> ComplexPair:
    """``x / |x|``, and zero for zero."""
    size = abs_(x)
    return scaled(x, size.masked_fill(size == 0, 1.0))


# ---- functions


def polar(size: Tensor, angle: Tensor) -> ComplexPair:
    """The number with this size and this angle."""
    return ComplexPair(size * angle.cos(), size * angle.sin())


def exp(x: Any) -> ComplexPair:
    """``e^x``."""
    real, imag = pair(x)
    if imag is None:
        return ComplexPair(real.exp(), None)
    turn = ComplexPair(imag.cos(), imag.sin())
    return turn if real is None else mul(ComplexPair(real.exp(), None), turn)


def log(x: Any) -> ComplexPair:
    """The principal logarithm."""
    return ComplexPair(abs_(x).log(), angle(x))


def log_to(base: float) -> Callable[[Any], ComplexPair]:
    """Return the logarithm to a base, as a function."""
    return lambda x: scaled(log(x), math.log(base))


def sqrt(x: Any) -> ComplexPair:
    """The principal root."""
    return polar(abs_(x).sqrt(), angle(x) / 2)


def pow_(x: Any, y: Any) -> ComplexPair:
    """``x ** y``: products where ``y`` is a small whole number, else ``exp(y log x)``."""
    if isinstance(y, (int, float)) and float(y).is_integer() and abs(y) <= 64:
        if y == 0:
            return ComplexPair(torch.ones_like(whole(x)[0]), None)
        result, power = None, reciprocal(x) if y < 0 else pair(x)
        for bit in bin(abs(int(y)))[:1:-1]:
            if bit == "1":
                result = power if result is None else mul(result, power)
            power = mul(power, power)
        return result or power
    return exp(mul(y, log(x) if isinstance(x, (ComplexPair, Tensor)) else cmath.log(x)))


def sin(x: Any) -> ComplexPair:
    """The sine."""
    real, imag = whole(x)
    return ComplexPair(real.sin() * imag.cosh(), real.cos() * imag.sinh())


def cos(x: Any) -> ComplexPair:
    """The cosine."""
    real, imag = whole(x)
    return ComplexPair(real.cos() * imag.cosh(), -real.sin() * imag.sinh())


def sinh(x: Any) -> ComplexPair:
    """The hyperbolic sine."""
    real, imag = whole(x)
    return ComplexPair(real.sinh() * imag.cos(), real.cosh() * imag.sin())


def cosh(x: Any) -> ComplexPair:
    """The hyperbolic cosine."""
    real, imag = whole(x)
    return ComplexPair(real.cosh() * imag.cos(), real.sinh() * imag.sin())


def sigmoid(x: Any) -> ComplexPair:
    """``1 / (1 + e^-x)``."""
    return reciprocal(add(exp(neg(x)), 1.0))


# ---- comparisons


def equal(x: Any, y: Any) -> Tensor:
    """Compare the entries of two complex values, or of one and a number: an entry is true where both parts are
    equal."""
    (a, b), (c, d) = whole(x), pair(y)
    return torch.eq(a, 0.0 if c is None else c) & torch.eq(b, 0.0 if d is None else d)


def of_any(test: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    """Return a test that a pair passes if one of its parts does, such as ``isnan``."""

    def rule(x: Any) -> Tensor:
        real, imag = whole(x)
        return test(real) | test(imag)

    return rule


# ---- products


def product(op: Any) -> Callable[..., ComplexPair]:
    """Return the rule of an operator that is linear in each tensor: the sum of its results for each choice of real or
    imaginary parts, times a power of i."""

    def rule(*args: Any, **kwargs: Any) -> ComplexPair:
        leaves, structure = tree_flatten((args, kwargs), is_pair)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, ComplexPair)]
        sums: list[Any] = [None, None]
        for choice in itertools.product((0, 1), repeat=len(places)):
            parts = {place: leaves[place][part] for place, part in zip(places, choice, strict=True)}
            if any(part is None for part in parts.values()):
                continue
            operands, options = tree_unflatten([parts.get(at, leaf) for at, leaf in enumerate(leaves)], structure)
            turns = sum(choice) % 4
            sums[turns % 2] = (_plus if turns < 2 else _minus)(sums[turns % 2], op(*operands, **options))
        return ComplexPair(*sums)

    return rule
