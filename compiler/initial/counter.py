"""Random numbers as pure functions of (seed, name, step, microbatch, global index): the same bits on every plan.

Nothing here has a state. A stream's key is a hash of what the numbers are for; element i of the stream depends on the
key and on i alone, so a rank that owns some elements of a tensor draws exactly theirs.

Bitwise equality on all devices holds because every step is either integer arithmetic modulo 2**64 or one of the five
IEEE 754 operations that must be rounded exactly (+ - * / sqrt), in float64 and one operator call each: a fused
multiply-add, a vendor's ``log``, or the vectorised and the scalar version of one may differ in the last bit. For the
same reason nothing is divided by a Python number, which some devices turn into a product with the reciprocal.
"""

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache

import numpy
import torch
from torch import Tensor

from ..ops.op_row import DRAW_BLOCK

_TWO_64 = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the usual increment of a Weyl sequence
_MIX_1 = 0xBF58476D1CE4E5B9  # Stafford's variant 13 of the MurmurHash3 finalizer, as in SplitMix64
_MIX_2 = 0x94D049BB133111EB
_DEVICE_BLOCK = 1 << 21  # elements of one pass of a hash on a GPU: its temporaries stay below 64 MiB


def stream(seed: int, name: str, step: int = 0, microbatch: int = 0) -> int:
    """Return the key of the numbers that are drawn for one purpose: a 63-bit hash of all arguments.

    ``name`` is an operator's or a parameter's name, never a position in a file or on a rank.
    """
    text = f"{seed} {step} {microbatch} {name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"parc").digest(), "little") >> 1


def bits(key: int, index: Tensor) -> Tensor:
    """Return 64 random bits for each element of ``index`` (int64, any shape), as int64 of its shape.

    Raises:
        TypeError: ``index`` is not int64.
    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", with one increment for each key.
    """
    return _blockwise(lambda part: _bits(key, part), index, torch.int64)


def uniform(key: int, index: Tensor) -> Tensor:
    """Return multiples of 2**-53, uniform in [0, 1), as float64 of the shape of ``index``."""
    return _blockwise(lambda part: _shift(_bits(key, part), 11).to(torch.float64).mul_(2.0**-53), index, torch.float64)


def normal(key: int, index: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return standard normal numbers, as float64 of the shape of ``index``; all are below 8.3 in size.

    The inverse of the distribution function at the centres of 2**52 equal cells between the probabilities ``low`` and
    ``high``: other values than 0 and 1 truncate the tails.
    """

    def draw(part: Tensor) -> Tensor:
        u = _cells(_bits(key, part))
        if (low, high) != (0.0, 1.0):
            u = u.mul_(high - low).add_(low).clamp_(2.0**-53, 1.0 - 2.0**-53)
        return inverse_normal(u)

    return _blockwise(draw, index, torch.float64)


def random(key: int, index: Tensor, law: str, dtype: torch.dtype) -> Tensor:
    """Return ``uniform`` numbers in [0, 1) or standard ``normal`` ones of a floating ``dtype``, shaped as ``index``."""
    if law == "normal":
        return normal(key, index).to(dtype)
    one = torch.ones((), dtype=dtype, device=index.device)
    return torch.minimum(uniform(key, index).to(dtype), torch.nextafter(one, torch.zeros_like(one)))


def exponential(key: int, index: Tensor) -> Tensor:
    """Return exponentially distributed numbers with mean 1, as float64 of the shape of ``index``."""
    return _blockwise(lambda part: natural_log(_cells(_bits(key, part))).neg_(), index, torch.float64)


def words(key: int) -> tuple[int, int]:
    """Return the two int64 numbers of a key that ``keep_mask`` needs: its increment, and its start."""
    return _increment(key), _signed(key * _GOLDEN)


def keep_mask(key: int | tuple[Tensor, Tensor], index: Tensor, p: float) -> Tensor:
    """Return True for each element of ``index`` that dropout keeps, with probability ``1 - p``; bool of its shape.

    A key may be given by its ``words`` as tensors without dims, which a compiler can trace.

    Raises:
        ValueError: ``p`` is not in [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a probability is between 0 and 1, not {p}")
    if p in (0.0, 1.0):
        return torch.full(index.shape, p == 0.0, dtype=torch.bool, device=index.device)
    numerator, denominator = p.as_integer_ratio()
    threshold = _TWO_64 * numerator // denominator - (_TWO_64 >> 1)  # bits are compared as signed numbers
    if isinstance(key, tuple):
        return _high_bits(key, index) >= threshold
    numbers = words(key)
    return _blockwise(lambda part: _high_bits(numbers, part) >= threshold, index, torch.bool)


def digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash of a tensor's entries, bit by bit and in their order, as an int64 without dims. It is the
    same on every device, and does not depend on shape and dtype.

    Every eight bytes are mixed together with their place, and the results are added modulo 2**64.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = DRAW_BLOCK if flat.device.type == "cpu" else _DEVICE_BLOCK
    places = torch.arange(min(size, -(-flat.numel() // 8)), device=flat.device).mul_(_signed(_MIX_2))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), 8 * size):
        part = flat[start : start + 8 * size]
        rest = -part.numel() % 8
        if rest or part.storage_offset() % 8:
            part = torch.cat([part, part.new_zeros(rest)])
        words = part.view(torch.int64)
        total += _bits(0, (words + _signed(start // 8 * _MIX_2)).add_(places[: words.numel()])).sum()
    return total


def dropped(kept: float) -> float:
    """Return the probability to drop from ``1 - p`` in floating point: the ``p`` in the model's code has few digits."""
    return float(f"{1 - kept:.15g}")


def _blockwise(draw: Callable[[Tensor], Tensor], index: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply an elementwise function to cache-sized parts of ``index``."""
    if index.dtype != torch.int64:
        raise TypeError(f"element indices are int64, not {index.dtype}")
    count = index.numel()
    if index.device.type != "cpu" or count <= DRAW_BLOCK:
        return draw(index)
    flat = index.reshape(-1)
    out = torch.empty(count, dtype=dtype, device=index.device)
    for start in range(0, count, DRAW_BLOCK):
        out[start : start + DRAW_BLOCK] = draw(flat[start : start + DRAW_BLOCK])
    return out.reshape(index.shape)


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    return (word & (_TWO_64 - 1) ^ (_TWO_64 >> 1)) - (_TWO_64 >> 1)


@lru_cache(maxsize=4096)
def _increment(key: int) -> int:
    """Return an odd number for each key, so that two keys' sequences are not parts of one sequence."""
    word = (key * _GOLDEN + _GOLDEN) % _TWO_64
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD % _TWO_64
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 % _TWO_64
    word = word ^ word >> 33 | 1
    # Multiples of a number with long runs of equal bits are too regular for the mixer.
    return _signed(word if (word ^ word >> 1).bit_count() >= 24 else word ^ 0xAAAAAAAAAAAAAAAA)


def _shift(word: Tensor, count: int) -> Tensor:
    """Shift right, filling with zeros: torch's own shift repeats the sign."""
    return (word >> count).bitwise_and_((1 << 64 - count) - 1)


def _high_bits(words: tuple[int | Tensor, int | Tensor], index: Tensor) -> Tensor:
    """Return 64 bits of which the high ones are random: enough for a comparison, in three passes less than ``bits``."""
    increment, start = words
    word = (index * increment).add_(start)
    word.bitwise_xor_(_shift(word, 30)).mul_(_signed(_MIX_1))
    return word.bitwise_xor_(_shift(word, 27)).mul_(_signed(_MIX_2))


def _bits(key: int, index: Tensor) -> Tensor:
    word = _high_bits(words(key), index)
    return word.bitwise_xor_(_shift(word, 31))


def _cells(word: Tensor) -> Tensor:
    """Return the centre of one of 2**52 equal parts of (0, 1): never 0 or 1, and ``1 - x`` is exact."""
    return _shift(word, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


# Wichura's rational functions, from the highest coefficient down: numerator and denominator for the centre
# (|u - 1/2| <= 0.425), for the tails (sqrt(-log u) <= 5), and for the far tails.
_CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940, 2.05319162663775882187, 1.0),
)  # fmt: skip
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip
_LOG_2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # ends in zeros: an exponent times it is exact
_LOG_2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_SQRT_HALF = 0.7071067811865476


def inverse_erf(x: Tensor) -> Tensor:
    """Return the inverse error function of floating numbers, in their dtype; infinite at -1 and 1, NaN beyond."""
    wide = x.to(torch.float64)
    u = (wide * 0.5).add_(0.5)
    inside = (u > 0.0) & (u < 1.0)
    value = inverse_normal(torch.where(inside, u, 0.5)).mul_(_SQRT_HALF)
    edge = torch.where(wide.abs() == 1.0, wide * math.inf, math.nan)
    return torch.where(inside, value, edge).to(x.dtype)


def inverse_normal(u: Tensor) -> Tensor:
    """Return the standard normal quantile of each ``u`` in (0, 1), float64, with relative error below 1e-13.

    Source: Wichura 1988, "Algorithm AS 241: the percentage points of the normal distribution", PPND16.
    """
    flat = u.reshape(-1)
    q = flat - 0.5
    out = _ratio(q.mul(q).neg_().add_(0.180625), _CENTRE).mul_(q)
    in_tail = (q.abs() > 0.425).nonzero().squeeze(1)  # 15 % of the elements: the costly branch is for them only
    if in_tail.numel():
        u_tail, q_tail = flat[in_tail], q[in_tail]
        distance = square_root(natural_log(torch.minimum(u_tail, 1.0 - u_tail)).neg_())
        near = _ratio(distance - 1.6, _TAIL)
        size = torch.where(distance <= 5.0, near, _ratio(distance - 5.0, _FAR_TAIL))
        out[in_tail] = torch.where(q_tail < 0.0, -size, size)
    return out.reshape(u.shape)


def square_root(x: Tensor) -> Tensor:
    """Return the square root of float64 numbers, rounded exactly. torch with Intel's library is wrong in the last bit
    of one number in a hundred or two on a CPU."""
    return torch.from_numpy(numpy.asarray(numpy.sqrt(x.numpy()))) if x.device.type == "cpu" else x.sqrt()


def natural_log(x: Tensor) -> Tensor:
    """Return the natural logarithm of normal positive float64 numbers to about one unit in the last place.

    ``x = m * 2**e`` with m in [sqrt(1/2), sqrt(2)), and ``log m = 2 atanh s``, ``s = (m - 1) / (m + 1)``, as a series.
    """
    mantissa, exponent = torch.frexp(x)  # no arithmetic: moves bits
    small = mantissa < _SQRT_HALF
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    e = (exponent - small.to(exponent.dtype)).to(torch.float64)
    s = (mantissa - 1.0).div_(mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, _ATANH[0])
    for coefficient in _ATANH[1:]:
        series.mul_(square).add_(coefficient)
    low = series.mul_(square).mul_(s).add_(e * _LOG_2_LOW)
    return low.add_(s * 2.0).add_(e * _LOG_2_HIGH)


_ATANH = tuple(2.0 / (2 * k + 1) for k in range(12, 0, -1))  # of 2 atanh(s) = 2 s + s**3 * polynomial(s**2)


def _ratio(x: Tensor, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """Return a quotient of two polynomials, by Horner's rule."""
    top, bottom = (torch.full_like(x, part[0]) for part in coefficients)
    for over, under in zip(coefficients[0][1:], coefficients[1][1:], strict=True):
        top.mul_(x).add_(over)
        bottom.mul_(x).add_(under)
    return top.div_(bottom)
