"""Factors: the dims of an operator's tensors that are split together, written in one line as "m k, k n -> m n"."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ..layout.mesh import Shape

Dims = tuple[tuple[str, ...], ...]
"""The names of each dim's factors, major first; () for a dim of size 1, or one that belongs to no factor."""


def quotient(a: int, b: int) -> int | None:
    """Return `a / b` if it is a whole number, else None."""
    return None if b == 0 or a % b else a // b


class RuleError(ValueError):
    """The error of a rule whose text is malformed, or does not fit the call it is applied to."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A placeholder in a call's arguments for its `index`-th tensor, counted through args, then kwargs."""

    index: int


@dataclass(frozen=True, slots=True)
class OpCall:
    """One application of an operator, on global or on local shapes alike."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    packed: tuple[int, int] | None = None
    """The part of a rank's packed rows that is there (``TensorType.packed``). The rank's shapes do not say it, as it
    has some of the experts only."""

    def __hash__(self) -> int:
        """Return a hash without the arguments, some of which have none; calls that differ in them alone are few."""
        return hash((self.op, self.operands, self.results))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at `position` of the operator's schema, wherever the call passes it."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


@dataclass(frozen=True, slots=True)
class OpRule:
    """The ways to split one call of an operator. Names of factors mean nothing outside their rule; sizes are global.

    Splitting a factor splits every tensor that has it. A result that lacks it while an operand has it becomes
    Partial(sum); where that is not so, the factor is in `whole`. A factor in `sums` consists of other factors, one
    after the other: splitting it splits each of those. If exactly the operands of one of the sets of `linear` are
    Partial(sum) on an axis, and the others replicated there, all results are Partial(sum).
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def fill_operands(item: Any, values: Sequence[Any]) -> Any:
    """Return an argument of a call with these values in place of its operands."""
    if isinstance(item, Operand):
        return values[item.index]
    if isinstance(item, (list, tuple)):
        return type(item)(fill_operands(inner, values) for inner in item)
    if isinstance(item, dict):
        return {key: fill_operands(inner, values) for key, inner in item.items()}
    return item


# ---- the text of a rule

_ELLIPSIS = "..."
_FACTOR = re.compile(r"[A-Za-z_]\w*!?")
_DIM = re.compile(rf"1|\.\.\.!?|{_FACTOR.pattern}")
_Term = tuple[tuple[str, ...], ...]


def _parse_term(text: str, whole: set[str]) -> _Term:
    dims: list[tuple[str, ...]] = []
    for word in re.findall(r"\([^()]*\)|[^\s()]+|[()]", text):
        group = word[1:-1].split() if word.startswith("(") else None
        if _DIM.fullmatch(word) is None and not (group and all(map(_FACTOR.fullmatch, group))):
            raise RuleError(f"unexpected {word!r} in the term {text.strip()!r}")
        factors = group or ([] if word == "1" else [word])
        whole.update(name[:-1] for name in factors if name.endswith("!"))
        dims.append(tuple(name.removesuffix("!") for name in factors))
    names = [name for factors in dims for name in factors]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RuleError(f"factor {twice!r} stands twice in the term {text.strip()!r}")
    return tuple(dims)


@lru_cache(maxsize=1024)
def _parse(source: str) -> tuple[tuple[_Term, ...], tuple[_Term, ...], frozenset[str]]:
    """Return the dims of operands and of results, and the factors that are whole."""
    sides = source.split("->")
    if len(sides) != 2:
        raise RuleError(f"a rule reads 'operands -> results'; got {source!r}")
    whole: set[str] = set()
    operands = tuple(_parse_term(term, whole) for term in sides[0].split(",")) if sides[0].strip() else ()
    results = tuple(_parse_term(term, whole) for term in sides[1].split(","))
    return operands, results, frozenset(whole)


def _spell(term: _Term, shape: Shape, call: OpCall, source: str) -> Dims:
    """Return a term with its ellipsis written out, aligned right: `...0` is the last of the dims that it covers."""
    covered = len(shape) - len(term) + 1
    if (_ELLIPSIS,) not in term:
        if len(term) != len(shape):
            raise RuleError(f"{call.op}: a tensor of shape {shape} does not fit {len(term)} dims of {source!r}")
        return term
    if covered < 0:
        raise RuleError(f"{call.op}: a tensor of shape {shape} has too few dims for {source!r}")
    at = term.index((_ELLIPSIS,))
    return (*term[:at], *((f"{_ELLIPSIS}{place}",) for place in reversed(range(covered))), *term[at + 1 :])


def _find_sizes(
    tensors: Sequence[tuple[Dims, Shape]], known_sizes: Mapping[str, int], call: OpCall, source: str
) -> dict[str, int]:
    sizes = dict(known_sizes)
    groups: list[tuple[tuple[str, ...], int]] = []
    broadcast: list[tuple[tuple[str, ...], int]] = []
    for dims, shape in tensors:
        for names, size in zip(dims, shape, strict=True):
            if len(names) > 1:
                (broadcast if size == 1 else groups).append((names, size))
            elif names:
                known = sizes.setdefault(names[0], size)
                if known == 1:  # that dim broadcasts
                    sizes[names[0]] = size
                elif size != 1 and known != size:
                    raise RuleError(f"{call.op}: factor {names[0]!r} of {source!r} has sizes {known} and {size}")
    while groups:
        unsolved = []
        for names, size in groups:
            unknown = [name for name in names if name not in sizes]
            if len(unknown) > 1:
                unsolved.append((names, size))
                continue
            rest = quotient(size, math.prod(sizes[name] for name in names if name in sizes))
            if rest is None or not (unknown or rest == 1):
                raise RuleError(f"{call.op}: a dim of size {size} does not hold {names} of {source!r}")
            sizes.update(dict.fromkeys(unknown, rest))
        if len(unsolved) == len(groups):
            raise RuleError(f"{call.op}: the sizes of {groups[0][0]} of {source!r} cannot be known from this call")
        groups = unsolved
    for names, _ in broadcast:
        sizes = dict.fromkeys(names, 1) | sizes
    return sizes


def _check_count(call: OpCall, operands: int, results: int) -> None:
    if (operands, results) != (len(call.operands), len(call.results)):
        raise RuleError(
            f"{call.op}: the rule speaks of {operands} operands and {results} results; "
            f"the call has {len(call.operands)} and {len(call.results)}"
        )


def apply_dims(
    call: OpCall,
    operands: Sequence[Dims],
    results: Sequence[Dims],
    *,
    whole: frozenset[str] = frozenset(),
    linear: Sequence[frozenset[int]] = (),
    sizes: Mapping[str, int] | None = None,
    source: str = "",
    sums: Mapping[str, tuple[str, ...]] | None = None,
) -> OpRule:
    """Return the rule that names the dims of a call's tensors; dims of size 1 belong to no factor, so they broadcast.

    Sizes of factors follow from the dims; `sizes` has those that do not.
    """
    _check_count(call, len(operands), len(results))
    shapes = (*call.operands, *call.results)
    tensors = list(zip((*operands, *results), shapes, strict=True))
    if any(len(dims) != len(shape) for dims, shape in tensors):
        raise RuleError(f"{call.op}: dims {[dims for dims, _ in tensors]} do not fit shapes {list(shapes)}")
    factor_sizes = _find_sizes(tensors, sizes or {}, call, source or call.op)
    placed = tuple(
        tuple(
            () if size == 1 else tuple(name for name in names if factor_sizes[name] != 1)
            for names, size in zip(dims, shape, strict=True)
        )
        for dims, shape in tensors
    )
    used = {name for dims in placed for names in dims for name in names}
    return OpRule(
        operands=placed[: len(call.operands)],
        results=placed[len(call.operands) :],
        sizes={name: size for name, size in factor_sizes.items() if name in used},
        whole=whole & used,
        linear=tuple(linear),
        sums=sums or {},
    )


def linear_sets(text: str) -> tuple[frozenset[int], ...]:
    """Read "0|12" as sets of operands: a Partial may come in operand 0 alone, or in 1 and 2 together."""
    if text and not re.fullmatch(r"\d+(\|\d+)*", text):
        raise RuleError(f"linear reads like '0|12'; got {text!r}")
    return tuple(frozenset(map(int, part)) for part in text.split("|")) if text else ()


def rule(text: str, *, linear: str = "") -> Callable[[OpCall], OpRule]:
    """Return the rule of an operator from one line: `"... m k, n k -> ... m n"`.

    A comma separates tensors, a space dims; `name!` is a factor the operator needs whole, `...` any number of dims
    (aligned right, broadcast where of size 1; `...!` all whole), `(b s)` a dim of several factors, major first, and
    `1` a dim of no factor. `linear` names the operands, by their place in the text, that may be Partial(sum): `0|1`
    is either, `01` both together. Raises RuleError for malformed text, and when applied to a call it does not fit.
    """
    operand_terms, result_terms, marked = _parse(text)
    sets = linear_sets(linear)
    if any(index >= len(operand_terms) for indices in sets for index in indices):
        raise RuleError(f"linear={linear!r} names an operand that {text!r} does not have")

    def apply(call: OpCall) -> OpRule:
        _check_count(call, len(operand_terms), len(result_terms))
        operands = [_spell(term, shape, call, text) for term, shape in zip(operand_terms, call.operands, strict=True)]
        results = [_spell(term, shape, call, text) for term, shape in zip(result_terms, call.results, strict=True)]
        whole = marked
        if _ELLIPSIS in whole:
            covered = {name for dims in (*operands, *results) for names in dims for name in names}
            whole = whole | {name for name in covered if name.startswith(_ELLIPSIS)}
        return apply_dims(call, operands, results, whole=whole, linear=sets, source=text)

    return apply


def opaque(call: OpCall, linear: Sequence[frozenset[int]] = ()) -> OpRule:
    """Return the rule that promises nothing: every dim is a factor of its own and needed whole."""
    operands = [tuple((f"o{i}_{dim}",) for dim in range(len(shape))) for i, shape in enumerate(call.operands)]
    results = [tuple((f"r{i}_{dim}",) for dim in range(len(shape))) for i, shape in enumerate(call.results)]
    names = {name for dims in (*operands, *results) for dim in dims for name in dim}
    return apply_dims(call, operands, results, whole=frozenset(names), linear=linear)
