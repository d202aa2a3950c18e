"""The contents of padding, followed through an operator by its rule: entries that the model does not have must change
none that it has.

A factor that may be split is one whose entries do not see each other, so padding of an operand is padding of the
results that have the factor, and a result that lacks it is a sum to which padding must add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy
import torch

from ..ops.factors import Dims, OpCall, Operand, OpRule, quotient
from ..ops.infer import rule_or_opaque
from ..ops.rules import facts
from ..program.program import Origin, operator

# ---- the number that padding holds, and pointwise operators at that one number


UNKNOWN = math.nan
Held = float | None
"""The contents of all padding of a dim: one number, which may be infinite; None for finite numbers that depend on data;
UNKNOWN for data that may be infinite or not a number."""


_DATA = 0.7
"""A number that stands for data, where the padding beside it decides whether a result is finite."""
_known: dict[tuple[Any, ...], tuple[float, bool]] = {}
_beyond: dict[tuple[Any, ...], bool] = {}


def point(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[float, bool]:
    """Compute a pointwise operator at one point: its value, and whether it and its derivatives are finite numbers. None
    reads as 0."""
    key = _key(call, held, dtypes)
    if key not in _known:
        _known[key] = _computed(call, held, dtypes)
    return _known[key]


def beyond_numbers(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether a pointwise operator makes no finite number of finite ones, as a quotient by padding of zeros.
    What depends on data counts as a usual number."""
    given = [_DATA if value is None else value for value in held]
    if not facts(call.op).elementwise or len(held) < 2 or held.count(None) == len(held):
        return False
    if not all(map(math.isfinite, given)) or not any(dtype.is_floating_point for dtype in dtypes):
        return False
    key = _key(call, held, dtypes)
    if key not in _beyond:
        with torch.no_grad():
            values = [torch.tensor([value], dtype=_wide(dtype)) for value, dtype in zip(given, dtypes, strict=True)]
            _beyond[key] = not bool(_applied(call, values).isfinite().all())
    return _beyond[key]


def _key(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[Any, ...]:
    return call.op, repr((call.args, sorted(call.kwargs.items()))), *held, *dtypes


def _wide(item: Any) -> Any:
    return torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item


def _applied(call: OpCall, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first result of a call on these operands."""

    def fill(item: Any) -> Any:
        return values[item.index] if isinstance(item, Operand) else _wide(item)

    made = operator(call.op)(*map(fill, call.args), **{key: fill(item) for key, item in call.kwargs.items()})
    first: torch.Tensor = made[0] if isinstance(made, (tuple, list)) else made
    return first


def _computed(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> tuple[float, bool]:
    with torch.enable_grad():
        values = [
            torch.tensor([value or 0.0], dtype=_wide(dtype)).requires_grad_(dtype.is_floating_point)
            for value, dtype in zip(held, dtypes, strict=True)
        ]
        made = _applied(call, values)
        slopes = []
        if made.requires_grad:
            wanted = [value for value in values if value.requires_grad]
            slopes = [g for g in torch.autograd.grad(made.sum(), wanted, allow_unused=True) if g is not None]
    value = float(made.detach().to(torch.float64).sum())
    numbers = math.isfinite(value) and all(bool(torch.isfinite(slope).all()) for slope in slopes)
    return (UNKNOWN if math.isnan(value) else value), numbers


# ---- neutral elements, proved


_n, _m, _i, _j = sympy.symbols("n m i j", integer=True, nonnegative=True)
_s, _c = sympy.symbols("s c", real=True)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A way to reduce entries, and the ``value`` that extra entries must hold to change nothing.

    ``adds`` is what one entry adds to a sum, or, where ``joins``, what it makes of the result ``s`` so far. ``c`` is
    whatever else an entry is multiplied by.
    """

    value: float
    adds: Callable[[sympy.Expr], sympy.Expr]
    joins: bool = False


_WAYS = {
    "sum": Reduction(0.0, lambda x: _c * x),
    "squares": Reduction(0.0, lambda x: x**2),
    "max": Reduction(-math.inf, lambda x: sympy.Max(_s, x), joins=True),
    "exponentials": Reduction(-math.inf, lambda x: sympy.exp(x - _s)),
}
"""The reductions that rows name, by name: how an operator reduces its first operand over a factor that results lack."""


def reduction_of(op: str) -> Reduction | None:
    """Return the reduction of an operator's first operand. It is None where the operator is linear in its summands, or
    reduces nothing."""
    way = facts(op).reduces
    return None if way in ("", "sum") else _WAYS[way]


@lru_cache(maxsize=256)
def is_neutral(op: str, held: float | None) -> bool:
    """Return whether m extra entries that hold ``held`` leave a reduction of n others as it is, for all n and m. Sympy
    proves it from what one entry does. ``held`` is None for data, of which nothing is known."""
    if facts(op).looks_up:  # no row n + i is one of the numbers below n, which are n - 1 - j
        return ((_n + _i) - (_n - 1 - _j)).is_positive is True
    if held is None or math.isnan(held):
        return False
    reduction = reduction_of(op) or _WAYS["sum"]
    entry = {math.inf: sympy.oo, -math.inf: -sympy.oo}.get(held)
    made = reduction.adds(sympy.Rational(held) if entry is None else entry)
    left = made - _s if reduction.joins else sympy.Sum(made, (_i, _n, _n + _m - 1)).doit()
    return bool(sympy.simplify(left) == 0)


# ---- the contents of padding, followed through an operator by its rule


class PaddingFault(ValueError):
    """The error of an operator that lets padding change what the model has, or is not known not to."""

    where = ""
    """The function, and the values of the line that failed; "" outside a program."""
    origin = Origin()


@dataclass(frozen=True, slots=True)
class Extra:
    """The padding of one dim, as ``Pad`` has it, and the number that it holds. ``real`` None stands for padding that is
    looked for anywhere, as in a dim of zeros alone; with ``outer`` 1 it may only come after all other entries. A known
    single number has such padding along dim -1."""

    dim: int
    outer: int
    real: int | None
    padded: int
    held: Held = 0.0

    def is_at(self, outer: int, real: int, padded: int) -> bool:
        """Return whether this padding is, or can be, the one at these sizes of the dim."""
        if self.real is None:
            return self.outer in (0, outer)
        return (self.outer, self.real, self.padded) == (outer, real, padded)


Extras = tuple[Extra, ...]
"""The padding of one value, at most one a dim."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The padding within a factor: the factor is seen as ``(outer, have)``, and has ``other`` in place of ``have``
    without (or with) the padding."""

    outer: int
    have: int
    other: int


def locate(rule: OpRule, dims: Dims, extra: Extra, *, real: bool = False) -> tuple[str, _Part] | None:
    """Return the factor in which the padding of a tensor of these dims lies, by a rule on padded or on ``real`` shapes.

    None where padding is no change of one factor alone.
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
            return None if changed is None else (name, _Part(within, part, changed))
        before *= size
    return None


def place_of_part(sizes: Mapping[str, int], dims: Dims, name: str, part: _Part) -> tuple[int, int, int, int] | None:
    """Return the place of a factor's padding in a tensor of these dims: dim, outer, and the sizes with one and with the
    other padding; None if the tensor lacks the factor."""
    for dim, names in enumerate(dims):
        if name in names:
            at = names.index(name)
            before, after = (math.prod(sizes[other] for other in side) for side in (names[:at], names[at + 1 :]))
            return dim, before * part.outer, part.have * after, part.other * after
    return None


@dataclass(frozen=True, slots=True)
class _Carried:
    """A factor's padding in one call: its place, and the number in it for each operand that has the factor, or is one
    number everywhere."""

    part: _Part | None
    held: Mapping[int, Held]
    free: int = 0
    """1 where padding without a place can only be at the end, as ``Extra.outer`` says; else 0."""


def follow_padding(call: OpCall, operands: Sequence[Extras], dtypes: Sequence[torch.dtype]) -> list[Extras]:
    """Return the padding of each result of a call on *padded* shapes, from that of the operands.

    Raises:
        PaddingFault: padding would change a number of the model's, or cannot be shown not to.
    """
    if call.op in OWN:
        return [OWN[call.op](call, operands[0])]
    if call.op == "aten.addmm.default" and not call.kwargs:
        return _biased(call, operands, dtypes)
    count, row = len(call.results), facts(call.op)
    if row.creates:
        held = float(row.number_in(call.args))
        along = list(enumerate(call.results[0])) or [(-1, 1)]
        return [tuple(Extra(dim, 0, None, size, held) for dim, size in along)]
    made: list[list[Extra]] = [[] for _ in range(count)]
    if row.unread_rows:  # rows that nothing looks up get no gradient
        made[0].append(Extra(0, 1, None, call.results[0][0]))
    if call.op == "aten.expand.default":
        made[0] += _copied(call, operands[0])
    if row.by_number:
        made[0].append(Extra(0, 1, None, call.results[0][0], None))
    if not any(operands):
        return [tuple(extras) for extras in made]
    inside = any(extra.real is not None and (extra.dim, extra.outer) != (0, 1) for x in operands for extra in x)
    if inside and row.chance_at is not None and call.args[row.chance_at]:
        raise PaddingFault(f"{call.op} draws by the number of an element, which padding changes")
    rule = rule_or_opaque(call)
    if row.looks_up:
        rows = call.operands[0][0]
        if any(extra.held is not None and not 0 <= extra.held < rows for extra in operands[1]):
            raise PaddingFault(f"{call.op} looks up a row that there is not")
    for name, carried in _carried(call, rule, operands).items():
        at = [
            place_of_part(rule.sizes, dims, name, carried.part or _Part(1, rule.sizes[name], 1))
            for dims in rule.results
        ]
        if carried.part is not None and None in at:
            _require_neutral(call, rule, name, carried)
        after = _result(call, rule, carried, dtypes)
        for place, extras, dims in zip(at, made, rule.results, strict=True):
            if place is None or any(extra.dim == place[0] for extra in extras):
                if place is not None and carried.part is not None:
                    raise PaddingFault(f"{call.op} pads dim {place[0]} of its result twice")
                continue
            if carried.part is not None:
                extras.append(Extra(place[0], place[1], place[3], place[2], after))
            elif len(dims[place[0]]) == 1:
                extras.append(Extra(place[0], carried.free, None, place[2], after))
    return [tuple(sorted(extras, key=lambda extra: extra.dim)) for extras in made]


def follow_number(call: OpCall, held: Sequence[Held], dtypes: Sequence[torch.dtype]) -> list[Held]:
    """Return the number that all entries of each result hold, from those of the operands: None where it is not known.

    Raises:
        PaddingFault: a row is looked up that there is not.
    """
    row, others = facts(call.op), len(call.results) - 1
    if row.creates:
        return [float(row.number_in(call.args))] * (others + 1)
    if row.looks_up and held[1] is not None and not 0 <= held[1] < call.operands[0][0]:
        raise PaddingFault(f"{call.op} looks up a row that there is not")
    if not held:
        return [None] * (others + 1)
    made = _result(call, rule_or_opaque(call), _Carried(None, dict(enumerate(held))), dtypes)
    return [made, *[made if _moves(call, held[0]) else None] * others]


def _biased(call: OpCall, operands: Sequence[Extras], dtypes: Sequence[torch.dtype]) -> list[Extras]:
    """Follow a product with its bias as two operators: only the sum needs its terms whole."""
    pair = (Operand(0), Operand(1))
    product = OpCall("aten.mm.default", pair, {}, tuple(call.operands[1:]), call.results)
    made = follow_padding(product, operands[1:], dtypes[1:])
    total = OpCall("aten.add.Tensor", pair, {}, (call.results[0], call.operands[0]), call.results)
    return follow_padding(total, [made[0], operands[0]], [dtypes[1], dtypes[0]])


def _copied(call: OpCall, x: Extras) -> list[Extra]:
    """Return the dims in which one entry is repeated: each may count as padding that holds data."""
    before, after = call.operands[0], call.results[0]
    sizes = (1,) * (len(after) - len(before)) + before
    held = _everywhere(x)
    if held is None and not all(extra.held is None or math.isfinite(extra.held) for extra in x):
        held = UNKNOWN
    return [Extra(dim, 0, None, size, held) for dim, size in enumerate(after) if size != 1 and sizes[dim] == 1]


def _everywhere(x: Extras) -> Held:
    """Return the one number that all entries of a value hold, or None where it is not known."""
    return next((e.held for e in x if e.real is None and e.outer == 0 and e.held is not None), None)


def _carried(call: OpCall, rule: OpRule, operands: Sequence[Extras]) -> dict[str, _Carried]:
    """Return every factor that has padding and is not needed whole, with its padding, which must be the same in all
    operands."""
    parts: dict[str, dict[int, tuple[_Part | None, Extra]]] = {}
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
    result = {}
    for name, sides in parts.items():
        distinct = {part for part, _ in sides.values() if part is not None}
        held = {index: extra.held for index, (_, extra) in sides.items()}
        lacking = [i for i, dims in enumerate(rule.operands) if not any(name in names for names in dims)]
        held.update((i, known) for i in lacking if (known := _everywhere(operands[i])) is not None)
        free = max((extra.outer for part, extra in sides.values() if part is None), default=0)
        if not distinct:
            result[name] = _Carried(None, held, free)
            continue
        part = distinct.pop()
        bare = [i for i, dims in enumerate(rule.operands) if any(name in names for names in dims) and i not in sides]
        if distinct or bare or (free and part.outer != 1):
            raise PaddingFault(f"{call.op} has operands that are padded differently")
        if name in rule.whole:
            raise PaddingFault(f"{call.op} sees all entries of a dim, its padding too")
        result[name] = _Carried(part, held)
    return result


def _require_neutral(call: OpCall, rule: OpRule, name: str, carried: _Carried) -> None:
    """Refuse an operator that sums over a padded factor (raise ``PaddingFault``), if the padding changes the sum."""
    reduction = reduction_of(call.op)
    if reduction is not None:
        held = carried.held.get(0, UNKNOWN)
        if not is_neutral(call.op, held):
            wanted = reduction.value
            raise PaddingFault(f"{call.op} reduces padding that holds {_word(held)}, not {_word(wanted)}")
    elif not facts(call.op).looks_up and not _is_zero(rule, carried):
        held = next((held for held in carried.held.values() if held != 0.0), None)
        raise PaddingFault(f"{call.op} sums padding that holds {_word(held)}, not 0")


def _word(held: Held) -> str:
    return "data" if held is None else f"{held:g}"


def _is_zero(rule: OpRule, carried: _Carried) -> bool:
    """Return whether the operator makes zeros of the padding: it is linear in operands that hold zeros there."""
    zeros = {index for index, held in carried.held.items() if held == 0.0}
    finite = all(held is None or math.isfinite(held) for held in carried.held.values())
    return finite and any(joint and joint <= zeros for joint in rule.linear)


def _result(call: OpCall, rule: OpRule, carried: _Carried, dtypes: Sequence[torch.dtype]) -> Held:
    """Return the number that results hold in the padding of a factor."""
    held = list(carried.held.values())
    if beyond_numbers(call, [carried.held.get(index) for index in range(len(call.operands))], dtypes):
        return UNKNOWN
    if _is_zero(rule, carried):
        return 0.0
    if _moves(call, held[0]) and held.count(held[0]) == len(call.operands):
        return held[0]
    row = facts(call.op)
    ignored = row.ignored_at is not None and carried.held.get(row.named_at) == call.args[row.ignored_at]
    if ignored and carried.held[0] is None:
        return 0.0  # of targets that are ignored
    if row.chooses is not None and all(value is None or math.isfinite(value) for value in held):
        condition, holds, fails = (call.args[position] for position in row.chooses)
        known = carried.held.get(condition.index)
        if known is not None:
            chosen = holds if known else fails
            return carried.held.get(chosen.index) if isinstance(chosen, Operand) else float(chosen)
    if row.elementwise and len(held) == len(call.operands) and None not in held:
        return point(call, tuple(carried.held[index] for index in range(len(held))), tuple(dtypes))[0]
    return None if all(value is None or math.isfinite(value) for value in held) else UNKNOWN


def _moves(call: OpCall, held: Held) -> bool:
    """Return whether results consist of entries of operands, and of the number in the padding."""
    if call.op == "aten.constant_pad_nd.default":
        return bool(held == call.argument(2, "value", 0))
    return facts(call.op).moves in ("copy", "shape", "dims", "place", "join")


# ---- the operators that are about padding: (x, dim, outer, real, padded, …)


def _named(call: OpCall) -> tuple[int, int, int, int]:
    dim, outer, real, padded = (int(number) for number in call.args[1:5])
    return dim, outer, real, padded


def _padded_there(call: OpCall, x: Extras) -> tuple[Extra, Extras]:
    """Return the padding that the call names, and the other paddings. A dim that holds one number everywhere may be
    padded anywhere."""
    dim, outer, real, padded = _named(call)
    here = next((extra for extra in x if extra.dim == dim), None)
    if here is None or not here.is_at(outer, real, padded):
        raise PaddingFault(f"{call.op} names padding of dim {dim} that its operand does not have")
    return replace(here, outer=outer, real=real, padded=padded), tuple(extra for extra in x if extra.dim != dim)


def _fill(call: OpCall, x: Extras) -> Extras:
    here, others = _padded_there(call, x)
    value = float(call.args[5])
    mixed = (replace(other, held=_mixed(other.held, value)) for other in others)
    return tuple(sorted((replace(here, held=value), *mixed), key=lambda extra: extra.dim))


def _cut(call: OpCall, x: Extras) -> Extras:
    return _padded_there(call, x)[1]


def _grow(call: OpCall, x: Extras) -> Extras:
    dim, outer, real, padded = _named(call)
    if any(extra.dim == dim and extra.real is not None for extra in x):
        raise PaddingFault(f"{call.op} pads dim {dim}, which is padded")
    others = (extra for extra in x if extra.dim != dim and (extra.held == 0.0 or extra.real is not None))
    mixed = (replace(extra, held=_mixed(extra.held, 0.0)) for extra in others)
    return tuple(sorted((Extra(dim, outer, real, padded), *mixed), key=lambda extra: extra.dim))


def _mixed(held: Held, value: float) -> Held:
    """Return the contents of padding of which some entries hold another value."""
    if held == value:
        return held
    return None if math.isfinite(value) and (held is None or math.isfinite(held)) else UNKNOWN


OWN = {
    "parc.fill_pad.default": _fill,
    "parc.cut_pad.default": _cut,
    "parc.grow_pad.default": _grow,
}
"""The functions that follow padding through the operators which speak of padding themselves."""
