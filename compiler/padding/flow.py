"""The contents of padding, followed through operators by their sharding rules: padding must change no other entry.

The entries of a factor that may be split do not depend on each other. So padding of an operand is padding of the
results that have the factor; a result without it is a reduction, in which padding must hold the neutral element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy
import torch

from ..ops.factors import Dims, OpCall, Operand, OpRule, quotient
from ..ops.infer import rule_or_opaque
from ..ops.rules import facts
from ..program.program import Origin, operator

UNKNOWN = math.nan
Held = float | None
"""The contents of all padding of a dim: one number, which may be infinite; None for finite numbers that depend on data;
UNKNOWN for data that may be infinite or not a number."""


class PaddingFault(ValueError):
    """The error of an operator in which padding changes other entries, or may."""

    where = ""
    """The function and the values of the faulty line; "" outside a program."""
    origin = Origin()


@dataclass(frozen=True, slots=True)
class Extra:
    """The padding of one dim, as in ``Pad``, and the number that it holds. ``real`` is None where any entries of a dim
    may be padding, as in a dim of zeros alone; with ``outer`` 1, only entries at its end. A known single number has
    such padding along dim -1."""

    dim: int
    outer: int
    real: int | None
    padded: int
    held: Held = 0.0

    def is_at(self, outer: int, real: int, padded: int) -> bool:
        """Return whether this is, or may be, the padding with these sizes of the dim."""
        if self.real is None:
            return self.outer in (0, outer)
        return (self.outer, self.real, self.padded) == (outer, real, padded)


Extras = tuple[Extra, ...]
"""The padding of one value, at most one a dim."""


def follow_padding(call: OpCall, operands: Sequence[Extras], dtypes: Sequence[torch.dtype]) -> list[Extras]:
    """Return the padding of each result of a call on *padded* shapes, from that of the operands.

    Raises:
        PaddingFault: padding would change other entries, or may.
    """
    if call.op in _PAD_OPERATORS:
        return [_PAD_OPERATORS[call.op](call, operands[0])]
    if call.op == "aten.addmm.default" and not call.kwargs:
        return _follow_addmm(call, operands, dtypes)
    count, row = len(call.results), facts(call.op)
    if row.creates:
        held = float(row.number_in(call.args))
        along = list(enumerate(call.results[0])) or [(-1, 1)]
        return [tuple(Extra(dim, 0, None, size, held) for dim, size in along)]
    results: list[list[Extra]] = [[] for _ in range(count)]
    if row.unread_rows:  # rows that nothing looks up get no gradient
        results[0].append(Extra(0, 1, None, call.results[0][0]))
    if call.op == "aten.expand.default":
        results[0] += _repeated_dims(call, operands[0])
    if row.by_number:
        results[0].append(Extra(0, 1, None, call.results[0][0], None))
    if not any(operands):
        return [tuple(extras) for extras in results]
    inside = any(extra.real is not None and (extra.dim, extra.outer) != (0, 1) for x in operands for extra in x)
    if inside and row.chance_at is not None and call.args[row.chance_at]:
        raise PaddingFault(f"{call.op} draws by the number of an element, which padding changes")
    rule = rule_or_opaque(call)
    if row.looks_up:
        for extra in operands[1]:
            _check_row(call, extra.held)
    for name, pad in _factor_pads(call, rule, operands).items():
        part = pad.part or _FactorPad(1, rule.sizes[name], 1)
        at = [place_of_part(rule.sizes, dims, name, part) for dims in rule.results]
        if pad.part is not None and None in at:
            _require_neutral(call, rule, name, pad)
        after = _result(call, rule, pad, dtypes)
        for place, extras, dims in zip(at, results, rule.results, strict=True):
            if place is None or any(extra.dim == place[0] for extra in extras):
                if place is not None and pad.part is not None:
                    raise PaddingFault(f"{call.op} pads dim {place[0]} of its result twice")
                continue
            if pad.part is not None:
                extras.append(Extra(place[0], place[1], place[3], place[2], after))
            elif len(dims[place[0]]) == 1:
                extras.append(Extra(place[0], pad.free, None, place[2], after))
    return [tuple(sorted(extras, key=lambda extra: extra.dim)) for extras in results]


def follow_number(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> list[Held]:
    """Return the one number in all entries of each result, from those of the operands; None where it is not known.

    Raises:
        PaddingFault: the looked-up row does not exist.
    """
    row, others = facts(call.op), len(call.results) - 1
    if row.creates:
        return [float(row.number_in(call.args))] * (others + 1)
    if row.looks_up:
        _check_row(call, held[1])
    if not held:
        return [None] * (others + 1)
    number = _result(call, rule_or_opaque(call), _CallPad(None, dict(enumerate(held))), dtypes)
    return [number, *[number if _moves(call, held[0]) else None] * others]


def _check_row(call: OpCall, number: Held) -> None:
    """Check that a look-up of a known number has such a row."""
    if number is not None and not 0 <= number < call.operands[0][0]:
        raise PaddingFault(f"{call.op} looks up a row that there is not")


def _follow_addmm(call: OpCall, operands: Sequence[Extras], dtypes: Sequence[torch.dtype]) -> list[Extras]:
    """Follow a product with a bias as two operators: only the product is a reduction."""
    pair = (Operand(0), Operand(1))
    product = OpCall("aten.mm.default", pair, {}, tuple(call.operands[1:]), call.results)
    (of_product,) = follow_padding(product, operands[1:], dtypes[1:])
    total = OpCall("aten.add.Tensor", pair, {}, (call.results[0], call.operands[0]), call.results)
    return follow_padding(total, [of_product, operands[0]], [dtypes[1], dtypes[0]])


def _repeated_dims(call: OpCall, x: Extras) -> list[Extra]:
    """Return the dims along which one entry is repeated: each may be padding anywhere, with the contents of data."""
    before, after = call.operands[0], call.results[0]
    sizes = (1,) * (len(after) - len(before)) + before
    held = _everywhere(x)
    if held is None and not _are_finite(extra.held for extra in x):
        held = UNKNOWN
    return [Extra(dim, 0, None, size, held) for dim, size in enumerate(after) if size != 1 and sizes[dim] == 1]


def _everywhere(x: Extras) -> Held:
    """Return the one number in all entries of a value, or None where it is not known."""
    return next((e.held for e in x if e.real is None and e.outer == 0 and e.held is not None), None)


def _require_neutral(call: OpCall, rule: OpRule, name: str, pad: _CallPad) -> None:
    """Check that padding of a factor that a result lacks holds the neutral element (else raise ``PaddingFault``)."""
    reduction = reduction_of(call.op)
    if reduction is not None:
        held = pad.held.get(0, UNKNOWN)
        if not is_neutral(call.op, held):
            wanted = reduction.value
            raise PaddingFault(f"{call.op} reduces padding that holds {_held_text(held)}, not {_held_text(wanted)}")
    elif not facts(call.op).looks_up and not _is_zero(rule, pad):
        held = next((held for held in pad.held.values() if held != 0.0), None)
        raise PaddingFault(f"{call.op} sums padding that holds {_held_text(held)}, not 0")


def _held_text(held: Held) -> str:
    return "data" if held is None else f"{held:g}"


def _are_finite(held: Iterable[Held]) -> bool:
    return all(number is None or math.isfinite(number) for number in held)


def _is_zero(rule: OpRule, pad: _CallPad) -> bool:
    """Return whether results hold zeros in the padding: the operator is linear in operands that hold zeros there."""
    zeros = {index for index, held in pad.held.items() if held == 0.0}
    return _are_finite(pad.held.values()) and any(joint and joint <= zeros for joint in rule.linear)


def _result(call: OpCall, rule: OpRule, pad: _CallPad, dtypes: Sequence[torch.dtype]) -> Held:
    """Return the number that results hold in the padding of a factor."""
    held = list(pad.held.values())
    if beyond_numbers(call, [pad.held.get(index) for index in range(len(call.operands))], dtypes):
        return UNKNOWN
    if _is_zero(rule, pad):
        return 0.0
    if _moves(call, held[0]) and held.count(held[0]) == len(call.operands):
        return held[0]
    row = facts(call.op)
    ignored = row.ignored_at is not None and pad.held.get(row.named_at) == call.args[row.ignored_at]
    if ignored and pad.held[0] is None:
        return 0.0  # of targets that are ignored
    if row.chooses is not None and _are_finite(held):
        condition, holds, fails = (call.args[position] for position in row.chooses)
        known = pad.held.get(condition.index)
        if known is not None:
            chosen = holds if known else fails
            return pad.held.get(chosen.index) if isinstance(chosen, Operand) else float(chosen)
    if row.elementwise and len(held) == len(call.operands) and None not in held:
        return point(call, tuple(pad.held[index] for index in range(len(held))), tuple(dtypes))[0]
    return None if _are_finite(held) else UNKNOWN


def _moves(call: OpCall, held: Held) -> bool:
    """Return whether results consist of entries of operands, and of the number ``held``."""
    if call.op == "aten.constant_pad_nd.default":
        return bool(held == call.argument(2, "value", 0))
    return facts(call.op).moves in ("copy", "shape", "dims", "place", "join")


# ---- the padding of factors


@dataclass(frozen=True, slots=True)
class _FactorPad:
    """The padding of a factor of size ``(outer, have)``, which has the size ``(outer, other)`` without the padding, or
    with it."""

    outer: int
    have: int
    other: int


def locate(rule: OpRule, dims: Dims, extra: Extra, *, real: bool = False) -> tuple[str, _FactorPad] | None:
    """Return the factor that has the padding of a tensor of these dims, by a rule on padded or on ``real`` shapes; None
    where padding changes more than one factor.
    """
    assert extra.real is not None
    have, other = (extra.real, extra.padded) if real else (extra.padded, extra.real)
    before = 1
    for name in dims[extra.dim]:
        within = quotient(extra.outer, before)
        size = rule.sizes[name]
        if within is None:
            return None
        part = quotient(size, within)
        if part is not None and part != 1:
            rest = quotient(have, part)
            changed = quotient(other, rest) if rest is not None else None
            return None if changed is None else (name, _FactorPad(within, part, changed))
        before *= size
    return None


def place_of_part(
    sizes: Mapping[str, int], dims: Dims, name: str, part: _FactorPad
) -> tuple[int, int, int, int] | None:
    """Return a factor's padding in a tensor of these dims: dim, outer, and the two sizes; None if the tensor lacks the
    factor."""
    for dim, names in enumerate(dims):
        if name in names:
            at = names.index(name)
            before, after = (math.prod(sizes[other] for other in side) for side in (names[:at], names[at + 1 :]))
            return dim, before * part.outer, part.have * after, part.other * after
    return None


@dataclass(frozen=True, slots=True)
class _CallPad:
    """A factor's padding in one call, and the number in it for each operand that has the factor, or holds one number
    everywhere. ``part`` is None if it may be anywhere."""

    part: _FactorPad | None
    held: Mapping[int, Held]
    free: int = 0
    """1 where padding anywhere can only be at the end, as in ``Extra.outer``; else 0."""


def _factor_pads(call: OpCall, rule: OpRule, operands: Sequence[Extras]) -> dict[str, _CallPad]:
    """Return the padding of each factor that has some. It must be the same in all operands, and of no factor that the
    operator needs whole."""
    parts: dict[str, dict[int, tuple[_FactorPad | None, Extra]]] = {}
    for index, (dims, extras) in enumerate(zip(rule.operands, operands, strict=True)):
        for extra in extras:
            if extra.dim < 0:
                continue
            if extra.real is None:
                if len(dims[extra.dim]) == 1:
                    parts.setdefault(dims[extra.dim][0], {})[index] = None, extra
                continue
            place = locate(rule, dims, extra)
            if place is None:
                raise PaddingFault(f"{call.op} takes the padding of dim {extra.dim} of operand {index} apart")
            if extra.outer > 1 and facts(call.op).counted == (index, extra.dim):
                raise PaddingFault(f"{call.op} counts entries of dim {extra.dim} of operand {index} beyond its padding")
            parts.setdefault(place[0], {})[index] = place[1], extra
    pads = {}
    for name, sides in parts.items():
        distinct = {part for part, _ in sides.values() if part is not None}
        held = {index: extra.held for index, (_, extra) in sides.items()}
        lacking = [i for i, dims in enumerate(rule.operands) if not any(name in names for names in dims)]
        held.update((i, known) for i in lacking if (known := _everywhere(operands[i])) is not None)
        free = max((extra.outer for part, extra in sides.values() if part is None), default=0)
        if not distinct:
            pads[name] = _CallPad(None, held, free)
            continue
        part = distinct.pop()
        bare = [i for i, dims in enumerate(rule.operands) if any(name in names for names in dims) and i not in sides]
        if distinct or bare or (free and part.outer != 1):
            raise PaddingFault(f"{call.op} has operands that are padded differently")
        if name in rule.whole:
            raise PaddingFault(f"{call.op} sees all entries of a dim, its padding too")
        pads[name] = _CallPad(part, held)
    return pads


# ---- pointwise operators at the number in padding


_USUAL_NUMBER = 0.7
"""A number in place of data, where the padding beside it decides whether a result is finite."""


_points: dict[tuple[Any, ...], tuple[float, bool]] = {}


_finite: dict[tuple[Any, ...], bool] = {}


def point(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[float, bool]:
    """Return the value of a pointwise operator at one point, and whether the value and its derivatives are finite. None
    counts as 0."""
    key = _cache_key(call, held, dtypes)
    if key not in _points:
        _points[key] = _computed(call, held, dtypes)
    return _points[key]


def beyond_numbers(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether a pointwise operator of finite numbers, some of them padding, is not finite: such as a quotient by
    padding of zeros."""
    pairs = zip(held, dtypes, strict=True)
    numbers = [(_USUAL_NUMBER if dtype.is_floating_point else 1) if value is None else value for value, dtype in pairs]
    if not facts(call.op).elementwise or len(held) < 2 or held.count(None) == len(held):
        return False
    if not all(map(math.isfinite, numbers)) or not any(dtype.is_floating_point for dtype in dtypes):
        return False
    key = _cache_key(call, held, dtypes)
    if key not in _finite:
        with torch.no_grad():
            values = [torch.tensor([value], dtype=_wide(dtype)) for value, dtype in zip(numbers, dtypes, strict=True)]
            _finite[key] = bool(_first_result(call, values).isfinite().all())
    return not _finite[key]


def _cache_key(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[Any, ...]:
    return call.op, repr((call.args, sorted(call.kwargs.items()))), *held, *dtypes


def _wide(item: Any) -> Any:
    return torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item


def _first_result(call: OpCall, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first result of a call with these operands, in float64."""

    def fill(item: Any) -> Any:
        return values[item.index] if isinstance(item, Operand) else _wide(item)

    results = operator(call.op)(*map(fill, call.args), **{key: fill(item) for key, item in call.kwargs.items()})
    first: torch.Tensor = results[0] if isinstance(results, (tuple, list)) else results
    return first


def _computed(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[float, bool]:
    with torch.enable_grad():
        values = [
            torch.tensor([value or 0.0], dtype=_wide(dtype)).requires_grad_(dtype.is_floating_point)
            for value, dtype in zip(held, dtypes, strict=True)
        ]
        result = _first_result(call, values)
        slopes = []
        if result.requires_grad:
            wanted = [value for value in values if value.requires_grad]
            slopes = [g for g in torch.autograd.grad(result.sum(), wanted, allow_unused=True) if g is not None]
    value = float(result.detach().to(torch.float64).sum())
    finite = math.isfinite(value) and all(bool(torch.isfinite(slope).all()) for slope in slopes)
    return (UNKNOWN if math.isnan(value) else value), finite


# ---- neutral elements of reductions, proved


_n, _m, _i, _j = sympy.symbols("n m i j", integer=True, nonnegative=True)


_s, _c = sympy.symbols("s c", real=True)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of entries, and its neutral element, ``value``.

    ``adds`` is the summand of one entry, or, where ``joins``, the result with that entry after the result ``s`` so far.
    ``c`` is any factor of an entry.
    """

    value: float
    adds: Callable[[sympy.Expr], sympy.Expr]
    joins: bool = False


_REDUCTIONS = {
    "sum": Reduction(0.0, lambda x: _c * x),
    "squares": Reduction(0.0, lambda x: x**2),
    "max": Reduction(-math.inf, lambda x: sympy.Max(_s, x), joins=True),
    "exponentials": Reduction(-math.inf, lambda x: sympy.exp(x - _s)),
}
"""The reductions of an operator's first operand over a factor that results lack, by their names in operator rows."""


def reduction_of(op: str) -> Reduction | None:
    """Return the reduction of an operator's first operand; None for a sum, or if it reduces nothing."""
    name = facts(op).reduces
    return None if name in ("", "sum") else _REDUCTIONS[name]


@lru_cache(maxsize=256)
def is_neutral(op: str, held: float | None) -> bool:
    """Return whether m padded entries of ``held`` leave a reduction of n others as it is, for all n and m, as Sympy
    proves from the summand of one entry. ``held`` is None for data."""
    if facts(op).looks_up:  # no row n + i is one of the numbers below n, which are n - 1 - j
        return ((_n + _i) - (_n - 1 - _j)).is_positive is True
    if held is None or math.isnan(held):
        return False
    reduction = reduction_of(op) or _REDUCTIONS["sum"]
    entry = {math.inf: sympy.oo, -math.inf: -sympy.oo}.get(held)
    term = reduction.adds(sympy.Rational(held) if entry is None else entry)
    change = term - _s if reduction.joins else sympy.Sum(term, (_i, _n, _n + _m - 1)).doit()
    return bool(sympy.simplify(change) == 0)


# ---- parc's operators on padding: (x, dim, outer, real, padded, …)


def _pad_arguments(call: OpCall) -> tuple[int, int, int, int]:
    dim, outer, real, padded = (int(number) for number in call.args[1:5])
    return dim, outer, real, padded


def _named_pad(call: OpCall, x: Extras) -> tuple[Extra, Extras]:
    """Return the padding that the call names, and the other paddings. A dim of one number may be padded anywhere."""
    dim, outer, real, padded = _pad_arguments(call)
    here = next((extra for extra in x if extra.dim == dim), None)
    if here is None or not here.is_at(outer, real, padded):
        raise PaddingFault(f"{call.op} names padding of dim {dim} that its operand does not have")
    return replace(here, outer=outer, real=real, padded=padded), tuple(extra for extra in x if extra.dim != dim)


def _fill_pad(call: OpCall, x: Extras) -> Extras:
    here, others = _named_pad(call, x)
    value = float(call.args[5])
    mixed = (replace(other, held=_mixed(other.held, value)) for other in others)
    return tuple(sorted((replace(here, held=value), *mixed), key=lambda extra: extra.dim))


def _grow_pad(call: OpCall, x: Extras) -> Extras:
    dim, outer, real, padded = _pad_arguments(call)
    if any(extra.dim == dim and extra.real is not None for extra in x):
        raise PaddingFault(f"{call.op} pads dim {dim}, which is padded")
    others = (extra for extra in x if extra.dim != dim and (extra.held == 0.0 or extra.real is not None))
    mixed = (replace(extra, held=_mixed(extra.held, 0.0)) for extra in others)
    return tuple(sorted((Extra(dim, outer, real, padded), *mixed), key=lambda extra: extra.dim))


def _mixed(held: Held, value: float) -> Held:
    """Return the contents of padding in which some entries get another value."""
    if held == value:
        return held
    return None if math.isfinite(value) and (held is None or math.isfinite(held)) else UNKNOWN


_PAD_OPERATORS: Mapping[str, Callable[[OpCall, Extras], Extras]] = {
    "parc.fill_pad.default": _fill_pad,
    "parc.cut_pad.default": lambda call, x: _named_pad(call, x)[1],
    "parc.grow_pad.default": _grow_pad,
}
