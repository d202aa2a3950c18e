"""Rows: what each operator means, and the gradients of its operands.

Most rows are lines of ``rows.txt``, read here. Operators that move entries, see dims whole or belong to ranks are
functions of a `Call`, entered by ``row`` and ``slope``. Every argument is a size, a part of the node, or must equal a
stated value: no row ignores one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from .letters import Number, number
from .meaning import Value
from .tensors import Tensors
from .text import Line, Refused, Type

Gradients = Sequence[Value | None]
"""The gradient of each tensor among a line's arguments, in their order; None where none flows."""


@dataclass
class Call:
    """A line with its operands: what a row reads."""

    tensors: Tensors
    line: Line
    args: tuple[Any, ...]
    """The arguments, with values in the place of names and local sizes in the place of split ones."""
    types: dict[int, Type] = field(default_factory=dict)
    """The types of the operands by their positions."""
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

    def positions(self, type_: Type) -> list[Value]:
        """Return the numbers of entries along each dim of a type, which broadcast to its shape."""
        rank = len(type_.dims)
        rows = [self.position(dim, type_) for dim in range(rank)]
        return [v._replace(dims=(*((),) * at, *v.dims, *((),) * (rank - 1 - at))) for at, v in enumerate(rows)]


Row = Callable[[Call], Value | tuple[Value, ...]]
Slope = Callable[[Call, Value, Value], Gradients]
ROWS: dict[str, Row] = {}
"""What each operator means."""
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
    """Return one over a value, with its coefficient in front."""
    if x.node == t.table.one:
        return t.constant(1 / Fraction(x.coefficient), x.shape)
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


_Expression = Callable[[Tensors, Mapping[str, Item]], Item]
_OPERATIONS: dict[type[ast.operator], Callable[[Tensors, Item, Item], Item]] = {
    ast.Add: _plus, ast.Sub: lambda t, x, y: _plus(t, x, y, -1), ast.Mult: _times, ast.Div: _over,
    ast.Pow: lambda t, x, y: power(t, x, y),
}  # fmt: skip


def _expression(node: ast.expr) -> _Expression:
    """Return the function that a meaning in rows.txt is."""
    match node:
        case ast.Name(id=name):
            return lambda t, given: given[name]
        case ast.Constant(value=int() | float() as value):
            exact = number(value)
            return lambda t, given: exact
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _expression(operand)
            return lambda t, given: _times(t, -1, inner(t, given))
        case ast.BinOp(left=left, op=op, right=right):
            one, other, operation = _expression(left), _expression(right), _OPERATIONS[type(op)]
            return lambda t, given: operation(t, one(t, given), other(t, given))
        case ast.Call(func=ast.Constant(value=str() as labels), args=operands):
            reads, _, result = labels.partition(" -> ")
            rows, inside = [part.split() for part in reads.split(", ")], list(map(_expression, operands))
            return lambda t, given: t.product([f(t, given) for f in inside], rows, result.split())
        case ast.Call(func=ast.Name(id=name), args=operands):
            inside = list(map(_expression, operands))
            return lambda t, given: _function(t, name, [f(t, given) for f in inside])
    raise ValueError(f"rows.txt: `{ast.unparse(node)}` is no meaning")


def _function(t: Tensors, name: str, items: Sequence[Item]) -> Value:
    """Return a function of entries. Numbers are values too; words and flags are a part of its name."""
    words = tuple(item for item in items if item is None or isinstance(item, bool | str))
    values = [_value(t, item) for item in items if item is not None and not isinstance(item, bool | str)]
    return t.pointwise(name, values, words)


_ROW = re.compile(r"([\w.]+)\((.*?)\) = ([^~]+?)(?: ~ (.+))?")


def _enter(text: str) -> None:
    """Enter a line of rows.txt."""
    match = _ROW.fullmatch(text)
    if match is None:
        raise ValueError(f"rows.txt: `{text}` is no row")
    op, names, meaning = match[1], [], _expression(ast.parse(match[3], mode="eval").body)
    defaults: dict[str, Any] = {}
    for word in match[2].split(", "):
        name, equals, default = word.partition("=")
        names.append(name)
        if equals:
            defaults[name] = ast.literal_eval(default)

    def items(call: Call, kwargs: dict[str, Any]) -> dict[str, Item]:
        if len(call.args) > len(names):
            raise Refused(f"{op} with {len(call.args)} arguments has no rule")
        known = {**defaults, **dict(zip(names, call.args, strict=False))}
        known |= {name: kwargs.pop(name) for name in list(kwargs) if name in defaults}
        if missing := [name for name in names if name not in known]:
            raise Refused(f"{op} without `{missing[0]}` has no rule")
        return {name: number(item) if isinstance(item, int | float) and not isinstance(item, bool) else item
                for name, item in known.items()}  # fmt: skip

    ROWS[op] = lambda call: meaning(call.tensors, items(call, call.kwargs))
    if match[4] is None:
        if labels := re.fullmatch(r'"([^"]+)"\((\w+), (\w+)\)', match[3]):
            SLOPES[op] = _product_slope(labels[1])
        return
    body = ast.parse(match[4], mode="eval").body
    parts = [None if isinstance(part, ast.Constant) else _expression(part)
             for part in (body.elts if isinstance(body, ast.Tuple) else [body])]  # fmt: skip
    if not any(parts):
        CONSTANT.add(op)

    def gradients(call: Call, g: Value, y: Value) -> Gradients:
        known = {"y": y, **items(call, dict(call.line.kwargs)), "g": g}
        return [None if part is None else like(call.tensors, part(call.tensors, known), x.shape)
                for part, x in zip(parts, call.args, strict=False) if isinstance(x, Value)]  # fmt: skip

    SLOPES[op] = gradients


def _product_slope(labels: str) -> Slope:
    """Return the gradients of a product of two: each is the product of the result's gradient with the other."""
    reads, _, result = labels.partition(" -> ")
    one, other = (part.split() for part in reads.split(", "))

    def gradients(call: Call, g: Value, y: Value) -> Gradients:
        t, (one_of, two_of) = call.tensors, call.args
        return [
            t.product([g, two_of], [result.split(), other], one),
            t.product([one_of, g], [one, result.split()], other),
        ]

    return gradients


def read_rows(text: str) -> None:
    """Enter all lines of a text in the form of rows.txt."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            _enter(line)


read_rows((Path(__file__).parent / "rows.txt").read_text(encoding="utf-8"))
