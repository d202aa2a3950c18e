"""Rows: what each operator means, and the gradients of its operands.

Most rows are lines of ``rows.txt``, read here. Operators that move entries, see dims whole or belong to ranks are
functions of a `Call`, entered by ``row`` and ``slope``. Every argument is a size, a part of the node, or must equal a
stated value: no row ignores one.
"""

from __future__ import annotations

import ast
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from .letters import Number, number
from .meaning import Value
from .tensors import Tensors
from .text import Atom, Line, Refused, Type

Gradients = Sequence[Value | None]
"""The gradient of each tensor among a line's arguments, in their order; None where none flows."""


@dataclass
class Call:
    """A line with its operands: what a row reads."""

    tensors: Tensors
    line: Line
    args: tuple[Any, ...]
    """The arguments, with values in the place of names and local sizes in the place of split ones."""
    types: dict[int | tuple[int, int], Type] = field(default_factory=dict)
    """The types of the operands by their positions, of those in lists by two."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The named arguments that no row has read yet."""
    results: Sequence[Value] = ()
    grads: Sequence[Value | None] = ()
    """The results, and the gradient of each, for a derivative that reads more than the first."""

    def at(self, position: int, default: Any = None) -> Any:
        """Return an argument, or what torch takes where there is none."""
        return self.args[position] if position < len(self.args) else default

    def operand(self, position: int) -> Value:
        """Return an operand."""
        value: Value = self.args[position]
        return value

    def named(self, name: str, position: int, default: Any = None) -> Any:
        """Return an argument that stands by its name or at a position."""
        return self.kwargs.pop(name, self.at(position, default))

    def demand(self, position: int, value: Any) -> None:
        """Refuse an argument that is not a value, which is torch's default."""
        if (have := self.at(position, value)) != value:
            raise Refused(f"{self.line.op} with {have!r} as its argument {position + 1} has no rule")

    def axes(self, text: str) -> list[str]:
        """Return the axes of the mesh that a collective names."""
        try:
            return [axis for name in text.split(",") if name for axis in self.tensors.mesh.parts(name)]
        except ValueError as error:
            raise Refused(str(error)) from None

    def position(self, dim: int, type_: Type) -> Value:
        """Return the number of each entry along a dim of a type, as a value with this one dim."""
        node = self.tensors.table.leaf("count", (0,))
        return self.tensors.piece(node, Type("i64", (type_.dims[dim],), ()))

    def places(self, size: int) -> Value:
        """Return the numbers from 0 on of entries along a dim, as an operator counts them that knows of no ranks."""
        return self.position(0, Type("i64", (((Atom(size, ""),),),), ()))

    def positions(self, type_: Type) -> list[Value]:
        """Return the numbers of entries along each dim of a type, which broadcast to its shape."""
        rank = len(type_.dims)
        rows = [self.position(dim, type_) for dim in range(rank)]
        return [v._replace(dims=(*((),) * at, *v.dims, *((),) * (rank - 1 - at))) for at, v in enumerate(rows)]


Row = Callable[[Call], Value | tuple[Value, ...]]
Slope = Callable[[Call, Value, Value], Gradients]
ROWS: dict[str, Row] = {}
"""The meaning of each operator."""
SLOPES: dict[str, Slope] = {}
"""The gradients of each operator's operands, from that of its (first) result and the result."""
CONSTANT: set[str] = set()
"""The operators through which no gradient flows."""


_Row = TypeVar("_Row", bound=Row)


def row(*ops: str, constant: bool = False) -> Callable[[_Row], _Row]:
    """Enter a row under the names of operators."""

    def enter(function: _Row) -> _Row:
        ROWS.update(dict.fromkeys(ops, function))
        CONSTANT.update(ops if constant else ())
        return function

    return enter


def slope(*ops: str) -> Callable[[Slope], Slope]:
    """Enter a derivative under the names of operators."""

    def enter(function: Slope) -> Slope:
        SLOPES.update(dict.fromkeys(ops, function))
        return function

    return enter


def like(t: Tensors, gradient: Value, shape: Sequence[int]) -> Value:
    """Return the gradient of a value that was repeated to the gradient's shape."""
    if gradient.shape == tuple(shape):
        return gradient
    more = len(gradient.dims) - len(shape)
    dims = [*range(more), *(at + more for at, size in enumerate(shape) if size != gradient.shape[at + more])]
    return t.reshape(t.total(gradient, dims, keep=True), shape)


# ---- the arithmetic of rows.txt: a value or an exact number

Item = Any
"""A value, a number, or another argument such as ``'tanh'``."""


def inverse(t: Tensors, x: Value) -> Value:
    """Return one over a value, with its coefficient in front: of a product the product of inverses."""
    if x.node == t.table.one:
        return t.constant(1 / Fraction(x.coefficient), x.shape)
    node = t.table.node(x.node)
    if node.op == "product" and not node.inner:
        read, dims, sizes = t.table.letters(x)
        factors = [inverse(t, t.table.value(factor, dims, sizes)) for factor in t.table.inside(read, node)]
        return t.times(*factors, by=1 / Fraction(x.coefficient))
    return t.scaled(t.pointwise("inverse", [x._replace(coefficient=1)]), 1 / Fraction(x.coefficient))


def power(t: Tensors, x: Value, exponent: Number) -> Value:
    """Return a power of a value: a product where the exponent is a small whole number."""
    if exponent == 0:
        return t.constant(1, x.shape)
    if isinstance(exponent, int) and abs(exponent) <= 8:
        return t.times(*[x if exponent > 0 else inverse(t, x)] * abs(exponent))
    return t.pointwise("sqrt", [x]) if exponent == Fraction(1, 2) else t.pointwise("pow", [x], exponent)


def _value(t: Tensors, item: Item) -> Value:
    return item if isinstance(item, Value) else t.constant(item)


def _plus(t: Tensors, x: Item, y: Item, sign: int = 1) -> Item:
    if not isinstance(x, Value) and not isinstance(y, Value):
        return x + sign * y
    return t.plus(_value(t, x), _value(t, y), by=(1, sign))


def _times(t: Tensors, x: Item, y: Item) -> Item:
    if isinstance(x, Value) and isinstance(y, Value):
        return t.times(x, y)
    if isinstance(x, Value) or isinstance(y, Value):
        value, factor = (x, y) if isinstance(x, Value) else (y, x)
        return t.times(value, t.constant(factor)) if isinstance(factor, float) else t.scaled(value, factor)
    return x * y


def _over(t: Tensors, x: Item, y: Item) -> Item:
    return _times(t, x, inverse(t, y) if isinstance(y, Value) else 1 / Fraction(y))


Expression = Callable[[Tensors, Mapping[str, Item]], Item]
"""A meaning in rows.txt."""
_OPERATIONS: dict[type[ast.operator], Callable[[Tensors, Item, Item], Item]] = {
    ast.Add: _plus, ast.Sub: lambda t, x, y: _plus(t, x, y, -1), ast.Mult: _times, ast.Div: _over,
    ast.Pow: lambda t, x, y: power(t, x, y),
}  # fmt: skip


def expression(node: ast.expr) -> Expression:
    """Return the function that a meaning in rows.txt is."""
    match node:
        case ast.Name(id=name):
            return lambda t, items: items[name]
        case ast.Constant(value=value):
            exact = number(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
            return lambda t, items: exact
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = expression(operand)
            return lambda t, items: _times(t, -1, inner(t, items))
        case ast.BinOp(left=left, op=op, right=right):
            one, other, operation = expression(left), expression(right), _OPERATIONS[type(op)]
            return lambda t, items: operation(t, one(t, items), other(t, items))
        case ast.Call(func=ast.Constant(value=str() as labels), args=operands):
            reads, _, result = labels.partition(" -> ")
            rows, inside = [part.split() for part in reads.split(", ")], list(map(expression, operands))
            return lambda t, items: t.product([f(t, items) for f in inside], rows, result.split())
        case ast.Call(func=ast.Name(id=name), args=operands):
            inside = list(map(expression, operands))
            return lambda t, items: _function(t, name, [f(t, items) for f in inside])
    raise ValueError(f"rows.txt: `{ast.unparse(node)}` is no meaning")


FUNCTIONS: dict[str, Callable[..., Item]] = {}
"""The functions of rows.txt that are not of each entry."""


def function(meaning: Callable[..., Item]) -> Callable[..., Item]:
    """Enter a function under its name, for rows.txt."""
    FUNCTIONS[meaning.__name__] = meaning
    return meaning


def _function(t: Tensors, name: str, items: Sequence[Item]) -> Item:
    """Return a function of entries. Numbers are values too; words and flags are a part of its name, by their place."""
    if name in FUNCTIONS:
        return FUNCTIONS[name](t, *items)
    words = tuple((at, item) for at, item in enumerate(items) if item is None or isinstance(item, bool | str))
    values = [_value(t, item) for item in items if item is not None and not isinstance(item, bool | str)]
    return t.pointwise(name, values, words)


def listed(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """Return the dims that an operator names, from 0 on; all of them where it names none."""
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % max(rank, 1) for dim in ([dims] if isinstance(dims, int) else dims)] if rank else []


@function
def total(t: Tensors, x: Value, dims: Any = None, keep: bool = False) -> Value:
    """Return the sum over some dims."""
    return t.total(x, listed(dims, len(x.dims)), keep)


@function
def count(t: Tensors, x: Value, dims: Any = None) -> int:
    """Return the number of entries along some dims."""
    return math.prod(x.shape[dim] for dim in listed(dims, len(x.dims)))


@function
def wide(t: Tensors, g: Value, x: Value, dims: Any = None) -> Value:
    """Return what has one entry along some dims, or lacks these, in the shape of ``x``."""
    gone = listed(dims, len(x.dims))
    return t.expand(t.reshape(g, [1 if at in gone else size for at, size in enumerate(x.shape)]), x.shape)


@function
def largest(t: Tensors, x: Value, dims: Any) -> Value:
    """Return the maximum along some dims, which stay."""
    return t.largest(x, sorted(listed(dims, len(x.dims))), True)


@function
def exp(t: Tensors, x: Item) -> Value:
    """Return the exponential: a logarithm among the terms is a factor, ``exp(a - 2 * log(b)) = exp(a) / b / b``."""
    read, dims, sizes = t.table.letters(_value(t, x))
    rest, factors = [], []
    for term in t.table.terms(read):
        node = t.table.node(term.node)
        if node.op == "log" and isinstance(term.coefficient, int) and abs(term.coefficient) <= 8:
            (inside,) = t.table.inside(term, node)
            factors.append(power(t, t.table.value(inside, dims, sizes), term.coefficient))
        else:
            rest.append(term)
    if not factors:
        return t.pointwise("exp", [_value(t, x)])
    more = [t.pointwise("exp", [t.table.value(t.table.sum(rest, sizes), dims, sizes)])] if rest else []
    return t.times(*more, *factors)


@function
def log_softmax(t: Tensors, x: Value, dim: int) -> Value:
    """Return the logarithms of shares along a dim."""
    below = _plus(t, x, largest(t, x, dim), -1)
    return t.plus(below, t.pointwise("log", [t.total(exp(t, below), [dim], keep=True)]), by=(1, -1))


TRUTHS = "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isposinf", "isneginf", "signbit"
"""The functions that are 1 or 0."""


@function
def nonzero(t: Tensors, x: Item) -> Item:
    """Return 1 where entries are not 0, as the results of comparisons are."""
    if isinstance(x, Value) and x.coefficient == 1 and t.table.node(x.node).op in TRUTHS:
        return x
    return t.pointwise("ne", [_value(t, x), t.constant(0)])


@function
def within(t: Tensors, x: Value, low: Item, high: Item) -> Item:
    """Return 1 where entries are not below and not above two bounds, of which one may be missing."""
    bounds = [t.pointwise(op, [x, _value(t, bound)]) for op, bound in (("ge", low), ("le", high)) if bound is not None]
    return t.times(*bounds)


@function
def below(t: Tensors, x: Value, low: Item, high: Item) -> Value:
    """Return 1 where entries are clamped to a lower bound, which is not above the higher one."""
    lower = t.pointwise("lt", [x, low])
    return lower if high is None else t.times(lower, t.pointwise("lt", [low, high]))


@function
def beyond(t: Tensors, x: Value, low: Item, high: Item) -> Value:
    """Return 1 where entries are clamped to a higher bound."""
    higher = t.pointwise("gt", [x, high])
    return higher if low is None else either(t, higher, t.pointwise("lt", [high, low]))


@function
def either(t: Tensors, one: Value, other: Value) -> Value:
    """Return 1 where one of two truth values is."""
    return t.plus(one, other, t.times(one, other), by=(1, 1, -1))


@function
def weighted(t: Tensors, x: Value, weight: Value | None) -> Value:
    """Return a value times a weight, if there is one."""
    return x if weight is None else t.times(x, weight)


@function
def ln(t: Tensors, x: Item) -> Number:
    """Return the logarithm of a number."""
    if isinstance(x, Value) or x <= 0:
        raise Refused("the logarithm of such a number has no rule")
    exact: Number = number(math.log(x))
    return exact


@function
def over(t: Tensors, x: Number) -> Number:
    """Return one over a number as torch's gradient of ``celu`` has it, which rounds the number to float32."""
    exact: Number = number(1 / struct.unpack("f", struct.pack("f", float(x)))[0])
    return exact


@function
def share(t: Tensors, g: Value, x: Value, other: Item, lost: str) -> Value:
    """Return the gradient of one of two of which the larger (or smaller) counts: half of it where they are equal, none
    where ``lost`` holds."""
    other = _value(t, other)
    equal, gone = t.pointwise("eq", [x, other]), t.pointwise(lost, [x, other])
    split = t.plus(t.times(equal, t.scaled(g, Fraction(1, 2))), t.times(_plus(t, 1, equal, -1), g))
    return t.times(_plus(t, 1, gone, -1), split)


_ROW = re.compile(r"([\w.]+(?:{[\w,]+})?)\((.*?)\)(?: -> (\w+))? = ([^~]+?)(?: ~ (.+))?")
FLOATS = ("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64")
WHOLE = ("bool", "u8", "i8", "i16", "i32", "i64")
"""Types of whole numbers, each with all numbers of those before it (but ``i8``)."""


def demand_type(call: Call, dtype: Any) -> None:
    """Refuse a type in which a result would be other numbers than its operand's."""
    whole = all(type_.dtype in WHOLE for type_ in call.types.values())
    if dtype is not None and dtype.text not in (("torch.int64", *FLOATS) if whole else FLOATS):
        raise Refused(f"{call.line.op} in {dtype.text} has no rule")


def demand_whole(call: Call, type_: Type, *dims: int) -> None:
    """Refuse dims that ranks split: an operator of torch counts the entries of a rank's piece from 0 on."""
    if any(atom.axis for dim in dims for stretch in type_.dims[dim] for atom in stretch):
        raise Refused(f"{call.line.op} counts the entries of a dim that is split")


class _Parameters:
    """The arguments that a row of rows.txt takes: names with their defaults, types that some must have, and literals
    that others must equal."""

    def __init__(self, op: str, text: str, result: str | None) -> None:
        self.op, self.result = op, result
        self.names: list[str] = []
        self.defaults: dict[str, Any] = {}
        self.types: dict[int, str] = {}
        self.equal: dict[str, Any] = {}
        for at, word in enumerate(filter(None, text.split(", "))):
            head, equals, default = word.partition("=")
            name, colon, rule = head.partition(": ")
            self.names.append(name)
            if rule in ("bool", "whole", "real"):
                self.types[at] = rule
            elif colon:
                self.equal[name] = ast.literal_eval(rule)
            if equals:
                self.defaults[name] = ast.literal_eval(default)

    def fit(self, call: Call) -> bool:
        """Return whether a call's arguments are as they must be."""
        try:
            self.items(call, dict(call.kwargs or call.line.kwargs))
        except Refused:
            return False
        return True

    def items(self, call: Call, kwargs: dict[str, Any]) -> dict[str, Item]:
        """Return a call's arguments by name; numbers are exact.

        Raises:
            Refused: there are others, or some are not as they must be.
        """
        op, names = self.op, self.names
        if len(call.args) > len(names):
            raise Refused(f"{op} with {len(call.args)} arguments has no rule")
        known = {**self.defaults, **dict(zip(names, call.args, strict=False))}
        known |= {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        for at, name in enumerate(names):
            if name not in known:
                raise Refused(f"{op} without `{name}` has no rule")
            if name in self.equal and known[name] != self.equal[name]:
                raise Refused(f"{op} with {known[name]!r} as its `{name}` has no rule")
            if at in self.types and not _has_type(call, at, known[name], self.types[at]):
                raise Refused(f"{op} of another `{name}` than {self.types[at]} has no rule")
        if self.result is not None and (call.line.types[0].dtype == "bool") != (self.result == "bool"):
            raise Refused(f"{op} to {call.line.types[0].dtype} has no rule")
        demand_type(call, known.get("dtype"))
        return {name: number(item) if type(item) in (int, float) else item for name, item in known.items()}


def _has_type(call: Call, position: int, item: Any, rule: str) -> bool:
    """Return whether an argument is of bools, of whole numbers, or of others."""
    if isinstance(item, Value):
        dtype = call.types[position].dtype
        return dtype == "bool" if rule == "bool" else (dtype in WHOLE) == (rule == "whole")
    return isinstance(item, {"bool": bool, "whole": int, "real": float}[rule])


@dataclass(frozen=True)
class _Alternative:
    """A line of rows.txt."""

    parameters: _Parameters
    meaning: Expression
    slope: Slope | None


_ALTERNATIVES: dict[str, list[_Alternative]] = {}
"""The lines of each operator of rows.txt."""


def _enter(text: str) -> None:
    """Enter a line of rows.txt; ``aten.ne.{Scalar,Tensor}`` are two operators."""
    match = _ROW.fullmatch(text)
    if match is None:
        raise ValueError(f"rows.txt: `{text}` is no row")
    base, braces, each = match[1].partition("{")
    if braces:
        for name in each.removesuffix("}").split(","):
            _enter(text.replace(match[1], f"{base}{name}", 1))
        return
    op, meaning = match[1], expression(ast.parse(match[4], mode="eval").body)
    parameters = _Parameters(op, match[2], match[3])
    alternatives = _ALTERNATIVES.setdefault(op, [])
    alternatives.append(_Alternative(parameters, meaning, _gradients(match[5], match[4], parameters)))

    def chosen(call: Call) -> _Alternative:
        return next((each for each in alternatives[:-1] if each.parameters.fit(call)), alternatives[-1])

    def mean(call: Call) -> Value:
        each = chosen(call)
        value: Value = each.meaning(call.tensors, each.parameters.items(call, call.kwargs))
        return value

    def gradients(call: Call, g: Value, y: Value) -> Gradients:
        slope = chosen(call).slope
        if slope is None:
            raise Refused(f"no derivative for `{op}`")
        return slope(call, g, y)

    ROWS[op] = mean
    if any(each.slope for each in alternatives):
        SLOPES[op] = gradients
    if match[5] == "0" or (match[5] and set(match[5]) <= set("0, ")):
        CONSTANT.add(op)


def _gradients(text: str | None, meaning: str, parameters: _Parameters) -> Slope | None:
    """Return the derivative of a line of rows.txt; a product's follows from its labels."""
    if text is None:
        labels = re.fullmatch(r'"([^"]+)"\((\w+), (\w+)\)', meaning)
        if labels is None:
            return None
        reads, _, result = labels[1].partition(" -> ")
        rows = [part.split() for part in reads.split(", ")]
        return lambda call, g, y: product_gradients(call.tensors, g, call.args, rows, result.split())
    body = ast.parse(text, mode="eval").body
    parts = [None if isinstance(part, ast.Constant) else expression(part)
             for part in (body.elts if isinstance(body, ast.Tuple) else [body])]  # fmt: skip

    def gradients(call: Call, g: Value, y: Value) -> Gradients:
        known = {"y": y, **parameters.items(call, dict(call.line.kwargs)), "g": g}
        return [None if part is None else like(call.tensors, part(call.tensors, known), x.shape)
                for part, x in zip(parts, call.args, strict=False) if isinstance(x, Value)]  # fmt: skip

    return gradients


def product_gradients(
    t: Tensors, g: Value, values: Sequence[Value], rows: Sequence[Sequence[Any]], result: Sequence[Any], first: int = 9
) -> list[Value]:
    """Return the gradients of the first values of a product: each is the product of the result's with the others."""
    gradients = []
    for at, (x, row) in enumerate(zip(values[:first], rows, strict=False)):
        others, labels = [*values[:at], *values[at + 1 :]], [*rows[:at], *rows[at + 1 :]]
        kept: list[Any] = []
        for name, size in zip(row, x.shape, strict=True):
            if name in kept:  # the gradient of a diagonal stands on it
                others.append(t.leaf("delta", (size, size), (), (0, 0)))
                labels.append([name, name := ("again", len(kept))])
            kept.append(name if size != 1 else None)
        gradients.append(t.expand(t.product([g, *others], [result, *labels], kept), x.shape))
    return gradients


def read_rows(text: str) -> None:
    """Enter all lines of a text in the form of rows.txt."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            _enter(line)


read_rows((Path(__file__).parent / "rows.txt").read_text(encoding="utf-8"))
