"""Operators of one's own: rows that the manifest has, from the rules by which parc splits these operators.

A rule says of each dim whether an operator looks along it. So its meaning is a function of these dims that nothing else
is known of: equal operators with equal arguments, of equal operands, are one node. A dim that is missing in a result of
a linear operator is summed over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .letters import number
from .meaning import Value
from .rows import ROWS, Call, Expression, Gradients, expression, like
from .tensors import Tensors
from .text import Refused, Word

Term = Sequence[tuple[str, bool]]
"""The dims of a tensor by their names in a rule, and whether the operator needs each whole."""
_Label = tuple[str, int]
_NAME = re.compile(r"(?!aten\.|parc\.|prims\.)\w+\.\w+\.\w+")
_LONGEST = 2000
"""The most letters of a gradient's text."""
_DIM = re.compile(r"\.\.\.|\w+")


@dataclass
class OwnRow:
    """The row of an operator, as a manifest says it."""

    op: str
    names: list[str]
    """Its arguments, in torch's order."""
    defaults: dict[str, Any]
    operands: list[Term]
    results: list[Term]
    linear: set[int]
    """The operands in each of which the results are linear."""
    gradient: str
    text: str
    """The rule, as a sentence tells it."""
    number: float | None
    """The number that all entries of its result are."""
    slope: Callable[[Call, Mapping[str, Any]], list[Value | None]] | None = None

    @property
    def whole(self) -> set[str]:
        """The dims that the operator looks along."""
        return {name for term in (*self.operands, *self.results) for name, marked in term if marked}

    def known(self, call: Call) -> dict[str, Any]:
        """Return a call's arguments by name.

        Raises:
            Refused: there are others.
        """
        call.kwargs.clear()
        return self.named(call.args, call.line.kwargs)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments by name, in their order."""
        items = {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}
        if len(args) > len(self.names) or items.keys() != set(self.names):
            raise Refused(f"{self.op} with such arguments has no rule")
        return {name: items[name] for name in self.names}

    def results_of(
        self, t: Tensors, items: Mapping[str, Any], shapes: Sequence[Sequence[int]] = ()
    ) -> tuple[Value, ...]:
        """Return what the operator makes of arguments by name. Dims that results alone have are as long as in their
        ``shapes``."""
        values = [item for item in items.values() if isinstance(item, Value)]
        facts = tuple((name, _fact(self.op, item)) for name, item in items.items() if not isinstance(item, Value))
        if len(values) != len(self.operands):
            raise Refused(f"{self.op} reads {len(values)} tensors, and its rule {len(self.operands)}")
        dotted = [len(x.dims) - len(term) + 1 for x, term in zip(values, self.operands, strict=True) if _dots(term)]
        rows = [_labels(term, len(x.dims) - len(term) + 1) for x, term in zip(values, self.operands, strict=True)]
        known = {name for row in rows for name in row}
        results: list[Value] = []
        for at, term in enumerate(self.results):
            result = _labels(term, max(dotted, default=0))
            more: dict[Hashable, int] = {
                name: shapes[at][dim] for dim, name in enumerate(result) if shapes and name not in known
            }
            if self.linear:
                results.append(self._sum(t, (at, facts), values, rows, result, more))
            else:
                looked = [name for name in known if name[0] in self.whole or name not in result]
                results.append(t.opaque(self.op, (at, facts), values, rows, result, sorted(looked), more))
        return tuple(results)

    def _sum(
        self,
        t: Tensors,
        facts: Hashable,
        values: Sequence[Value],
        rows: Sequence[Sequence[_Label]],
        result: Sequence[_Label],
        more: Mapping[Hashable, int],
    ) -> Value:
        """Return what is linear in some operands: the sum of their products with numbers of which nothing is known but
        what they depend on. Those are the other operands, and the places along dims that the operator looks along, of
        each operand and of the result."""
        lengths: dict[Hashable, int] = dict(more)
        inside: list[list[Hashable]] = []
        for at, (value, row) in enumerate(zip(values, rows, strict=True)):
            whole = {name: (at, name) for name in row if name[0] in self.whole}
            inside.append([whole.get(name, name) for name in row] if at in self.linear else list(row))
            lengths |= {whole[name]: size for name, size in zip(row, value.shape, strict=True) if name in whole}
        sizes = {
            name: size
            for row, value in zip(rows, values, strict=True)
            for name, size in zip(row, value.shape, strict=True)
        }
        outside: list[Hashable] = [("result", name) if name[0] in self.whole else name for name in result]
        lengths |= {("result", name): sizes[name] for name in result if name[0] in self.whole and name in sizes}
        others = [at for at in range(len(values)) if at not in self.linear]
        labels = list(dict.fromkeys(name for at in others for name in rows[at]))
        looked = [name for name in labels if name[0] in self.whole]
        counted = [name for row in (*(inside[at] for at in self.linear), outside) for name in row if name in lengths]
        reads = [*(name for name in labels if name not in looked), *dict.fromkeys(counted)]
        kernel = t.opaque(
            self.op, (facts, tuple(lengths[name] for name in dict.fromkeys(counted))), [values[at] for at in others],
            [rows[at] for at in others], reads, looked, {name: lengths[name] for name in counted},
        )  # fmt: skip
        factors = [values[at] for at in sorted(self.linear)]
        return t.product([kernel, *factors], [reads, *(inside[at] for at in sorted(self.linear))], outside)

    def row(self, call: Call) -> Value | tuple[Value, ...]:
        """Return the meaning of a line."""
        items = self.known(call)
        if self.number is not None:
            return call.tensors.constant(number(self.number), call.line.types[0].local)
        results = self.results_of(call.tensors, items, [type_.local for type_ in call.line.types])
        return results[0] if len(results) == 1 else results

    def gradients(self, call: Call, g: Value, y: Value) -> Gradients:
        """Return the gradients of the tensors of a line, as the registered text says."""
        items = self.known(call)
        if self.slope is None:
            raise Refused(f'no derivative for `{self.op}`: give its rule `gradient="…"` (docs/adding.md)')
        t = call.tensors
        for at, (result, gradient) in enumerate(zip(call.results, call.grads, strict=True)):
            items[f"y{at}"] = result
            items[f"g{at}"] = t.constant(0, result.shape) if gradient is None else gradient
        parts = self.slope(call, {"y": y, **items, "g": g})
        operands = [item for item in call.args if isinstance(item, Value)]
        parts += [None] * (len(operands) - len(parts))
        return [None if part is None else like(t, part, x.shape) for part, x in zip(parts, operands, strict=True)]


def _fact(op: str, item: Any) -> Hashable:
    """Return an argument that is no tensor as a part of a node.

    Raises:
        Refused: it is a list of tensors.
    """
    if isinstance(item, list):
        return tuple(_fact(op, each) for each in item)
    if type(item) in (int, float):
        exact: Hashable = number(item)
        return exact
    if item is not None and type(item) not in (bool, str, Word):
        raise Refused(f"{op} with such arguments has no rule")
    return type(item).__name__, item


def _dots(term: Term) -> bool:
    return any(name == "..." for name, _ in term)


def _labels(term: Term, many: int) -> list[_Label]:
    """Return a label for each dim of a tensor, of which ``...`` are so many. A dim of ``1`` is no other's."""
    labels: list[_Label] = []
    for at, (name, _) in enumerate(term):
        if name == "...":
            labels += [(name, place) for place in range(-many, 0)]
        else:
            labels.append((name, at if name == "1" else 0))
    return labels


def read_own(rows: Any) -> dict[str, OwnRow]:
    """Return the rows of a manifest.

    Raises:
        Refused: one is none, or of an operator that is not a person's own.
    """
    by_name: dict[str, OwnRow] = {}
    try:
        for op, facts in dict(rows).items():
            if not _NAME.fullmatch(op):
                raise Refused(f"manifest.json: `{op}` is no operator of one's own")
            operands, results = (
                [_term(part) for part in side.split(",") if part.strip()] for side in facts["rule"].split("->")
            )
            linear = {int(part) for part in facts["linear"].split("|") if len(part) == 1}
            names = list(map(str, facts["arguments"]))
            if len(gradient := str(facts["gradient"])) > _LONGEST:
                raise ValueError(f"the gradient of {op} has {len(gradient)} letters")
            text = f"`{facts['rule']}`" + (f" with the gradient `{gradient}`" if gradient else "")
            by_name[op] = OwnRow(
                op, names, dict(facts["defaults"]), operands, results, linear, gradient, text, facts["number"]
            )
        for row in by_name.values():
            row.slope = _slope(row.gradient, by_name) if row.gradient else None
    except (LookupError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        raise Refused(f"manifest.json: its operators are none: {error}") from None
    return by_name


def _term(text: str) -> Term:
    dims = []
    for word in text.split():
        if not _DIM.fullmatch(name := word.removesuffix("!")):
            raise ValueError(f"`{word}` of a rule is no dim that certificates know")
        dims.append((name, word.endswith("!")))
    return dims


def _slope(text: str, own: Mapping[str, OwnRow]) -> Callable[[Call, Mapping[str, Any]], list[Value | None]]:
    """Return the function that the text of gradients is: one for each tensor, or an operator that returns them all."""
    body = ast.parse(text, mode="eval").body
    parts = [_part(part, own) for part in (body.elts if isinstance(body, ast.Tuple) else [body])]

    def slope(call: Call, items: Mapping[str, Any]) -> list[Value | None]:
        exact = {name: number(item) if type(item) in (int, float) else item for name, item in items.items()}
        return [value for part in parts for value in part(call, exact, items)]

    return slope


_Part = Callable[[Call, Mapping[str, Any], Mapping[str, Any]], Sequence[Value | None]]


def _part(node: ast.expr, own: Mapping[str, OwnRow]) -> _Part:
    """Return the function that one gradient is: those of an operator of one's own, or one of these, or a meaning."""
    if isinstance(node, ast.Constant):
        return lambda call, exact, items: [None]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        part, at = _part(node.value, own), int(str(node.slice.value))
        return lambda call, exact, items: [part(call, exact, items)[at]]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        meaning: Expression = expression(node)
        return lambda call, exact, items: [meaning(call.tensors, exact)]
    op, arguments = ast.unparse(node.func), list(map(_argument, node.args))
    row = own.get(op)
    if row is None and op not in ROWS:
        raise ValueError(f"`{op}` has no rule")

    def of_operator(call: Call, exact: Mapping[str, Any], items: Mapping[str, Any]) -> Sequence[Value | None]:
        args = tuple(argument(items) for argument in arguments)
        if row is not None:
            return row.results_of(call.tensors, row.named(args, {}))
        # of a row that reads types, nothing comes: there is no line that has them
        results = ROWS[op](Call(call.tensors, call.line._replace(op=op, kwargs={}, types=()), args))
        return (results,) if isinstance(results, Value) else results

    return of_operator


def _argument(node: ast.expr) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function that finds an argument: by its name, the size of one (``x.shape[0]``), or a literal."""
    match node:
        case ast.Name(id=name):
            return lambda items: items[name]
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=dim)):
            return lambda items: items[name].shape[dim]
    value = ast.literal_eval(node)
    return lambda items: value
