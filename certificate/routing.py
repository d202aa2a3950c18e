"""Rows of choices: entries by number, the largest ones, and the rows of tokens that experts have."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from .letters import number
from .meaning import Value
from .rows import ROWS, SLOPES, Call, Gradients, row, slope
from .text import Refused, within


def _one_hot(c: Call, index: Value, dim: int, size: int) -> tuple[Value, list[Hashable], list[Hashable]]:
    """Return 1 where an index along a dim is an entry's number, else 0, and the labels of index and entries."""
    t, names = c.tensors, [*range(len(index.dims))]
    marks = t.pointwise("eq", [t.unsqueeze(index, len(names)), c.places(size)])
    entries = [("entry" if at == within(dim, len(names)) else name) for at, name in enumerate(names)]
    return marks, [*names, "entry"], entries


def _gathered(c: Call, x: Value, dim: int, index: Value) -> Value:
    if any(
        a != b for at, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if at != within(dim, len(x.dims))
    ):
        raise Refused(f"{c.line.op} of {list(x.shape)} by {list(index.shape)} has no rule")
    marks, names, entries = _one_hot(c, index, dim, x.shape[dim])
    return c.tensors.product([marks, x], [names, entries], names[:-1])


def _scattered(c: Call, part: Value, dim: int, index: Value, size: int) -> Value:
    marks, names, entries = _one_hot(c, index, dim, size)
    part = c.tensors.expand(part, index.shape) if part.shape != index.shape else part
    return c.tensors.product([marks, part], [names, names[:-1]], entries)


def _found(c: Call, op: str, facts: Hashable, x: Value, dim: int, count: int) -> Value:
    """Return which entries along a dim an operator finds, ``count`` of them and no one twice."""
    names: list[Hashable] = ["along" if at == within(dim, len(x.dims)) else at for at in range(len(x.dims))]
    result: list[Hashable] = ["chosen" if name == "along" else name for name in names]
    return c.tensors.opaque(op, facts, [x], [names], result, ["along"], {"chosen": count})


@row("aten.topk.default")
def _(c: Call) -> tuple[Value, Value]:
    x, count, dim = c.args[0], c.args[1], c.at(2, -1)
    index = _found(c, "largest at", (count, c.at(3, True), c.at(4, True)), x, dim, count)
    return _gathered(c, x, dim, index), index


@row("aten.sort.default", "aten.argsort.default", "aten.sort.stable", "aten.argsort.stable")
def _(c: Call) -> Value | tuple[Value, Value]:
    if c.line.op.endswith(".stable"):
        x, stable, dim = c.args[0], c.kwargs.pop("stable"), c.kwargs.pop("dim", -1)
        down = c.kwargs.pop("descending", False)
    else:
        x, stable, dim, down = c.args[0], False, c.at(1, -1), c.at(2, False)
    index = _found(c, "order", (bool(down), bool(stable)), x, dim, x.shape[dim])
    return index if "argsort" in c.line.op else (_gathered(c, x, dim, index), index)


_ONE = {
    "aten.argmax.default": "largest of all at", "aten.max.dim": "largest of all at",
    "aten.argmin.default": "smallest of all at", "aten.min.dim": "smallest of all at",
    "aten.median.dim": "median at", "aten.mode.default": "most frequent at",
    "aten.kthvalue.default": "smallest ones at",
}  # fmt: skip
"""Operators that find one entry along a dim, and the names of what they find."""


def _one(c: Call) -> tuple[int, bool, Hashable]:
    """Return the dim of such an operator, whether it stays, and what else it is asked."""
    first = 2 if ".kthvalue." in c.line.op else 1
    dim = c.at(first, -1 if ".mode." in c.line.op or first == 2 else None)
    if dim is None:
        raise Refused(f"{c.line.op} of all dims has no rule")
    return dim, c.at(first + 1, False), tuple(c.args[1:first])


@row(*_ONE)
def _(c: Call) -> Value | tuple[Value, Value]:
    x, (dim, keep, facts) = c.args[0], _one(c)
    index = _found(c, _ONE[c.line.op], facts, x, dim, 1)
    results = [index] if "aten.arg" in c.line.op else [_gathered(c, x, dim, index), index]
    results = results if keep else [c.tensors.squeeze(value, [dim]) for value in results]
    return results[0] if len(results) == 1 else (results[0], results[1])


@slope("aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.mode.default", "aten.kthvalue.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, index, (dim, keep, _) = c.args[0], c.results[1], _one(c)
    if not keep:
        dim = within(dim, len(x.dims))
        g, index = c.tensors.unsqueeze(g, dim), c.tensors.unsqueeze(index, dim)
    return [_scattered(c, g, dim, index, x.shape[dim])]


@slope("aten.topk.default", "aten.sort.default", "aten.sort.stable")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, dim = c.args[0], c.line.kwargs.get("dim", c.at(2 if ".topk." in c.line.op else 1, -1))
    return [_scattered(c, g, dim, c.results[1], x.shape[dim])]


@row("aten.cummax.default", "aten.cummin.default")
def _(c: Call) -> tuple[Value, Value]:
    x, dim = c.args
    index = _found(c, "largest so far at" if "max" in c.line.op else "smallest so far at", (), x, dim, x.shape[dim])
    return _gathered(c, x, dim, index), index


@slope("aten.cummax.default", "aten.cummin.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, dim = c.args
    return [_scattered(c, g, dim, c.results[1], x.shape[dim])]


@row("aten.gather.default")
def _(c: Call) -> Value:
    c.kwargs.pop("sparse_grad", None)
    return _gathered(c, *c.args[:3])


@slope("aten.gather.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    x, dim, index = c.args[:3]
    return [_scattered(c, g, dim, index, x.shape[dim]), None]


@row("aten.scatter_add.default")
def _(c: Call) -> Value:
    x, dim, index, part = c.args
    return c.tensors.plus(x, _scattered(c, part, dim, index, x.shape[dim]))


@slope("aten.scatter_add.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    _, dim, index, _ = c.args
    return [g, None, _gathered(c, g, dim, index)]


def _distinct(c: Call, index: Value) -> None:
    """Refuse numbers that may name an entry twice: of these one would win."""
    distinct = "largest at", "order", *_ONE.values()
    if c.tensors.table.node(index.node).op not in distinct or index.coefficient != 1:
        raise Refused(f"{c.line.op} by numbers that may be equal has no rule")


@row("aten.scatter.src", "aten.scatter.value")
def _(c: Call) -> Value:
    x, dim, index, part = c.args
    _distinct(c, index)
    t, size = c.tensors, x.shape[dim]
    new = _scattered(c, part if isinstance(part, Value) else t.constant(number(part), index.shape), dim, index, size)
    if not x.coefficient:
        return new
    gone = t.times(x, _scattered(c, t.constant(1, index.shape), dim, index, size))
    return t.plus(x, gone, new, by=(1, -1, 1))


@slope("aten.scatter.src", "aten.scatter.value")
def _(c: Call, g: Value, y: Value) -> Gradients:
    t, (x, dim, index, part) = c.tensors, c.args
    kept = _scattered(c, t.constant(1, index.shape), dim, index, x.shape[dim])
    left = t.plus(g, t.times(g, kept), by=(1, -1))
    return [left, None, *([_gathered(c, g, dim, index)] if isinstance(part, Value) else [])]


# ---- experts with a capacity: the first tokens of a sequence that choose an expert have its slots [e, b, c], each the
# token's number, or -1


@row("parc.slots.default", constant=True)
def _(c: Call) -> Value:
    chosen, capacity, top = c.args
    return c.tensors.opaque("slots", (capacity, top), [chosen], ["ebs"], "ebc", "s", {"c": capacity})


_SLOTS: dict[str, tuple[str, str, str]] = {
    "dispatch": ("bsh", "ebch", "combine"), "combine": ("ebch", "bsh", "dispatch"),
    "pick_slots": ("ebs", "ebc", "unpick_slots"), "unpick_slots": ("ebc", "ebs", "pick_slots"),
}  # fmt: skip
"""Operators on slots: the letters of the operand and of the result, and the one that gives the operand's gradient."""


def _by_slots(c: Call, x: Value, slots: Value, name: str, tokens: int) -> Value:
    """Return tokens in their slots, or the sums of what is in a token's."""
    reads, result, _ = _SLOTS[name]
    marks = c.tensors.pointwise("eq", [c.tensors.unsqueeze(slots, 3), c.places(tokens)])
    return c.tensors.product([marks, x], ["ebcs", reads], result)


def _enter_slots(name: str, reads: str, back: str) -> None:
    def tokens(c: Call) -> int:
        size: int = c.args[2] if len(c.args) > 2 else c.args[0].shape[reads.index("s")]
        return size

    ROWS[f"parc.{name}.default"] = lambda c: _by_slots(c, c.args[0], c.args[1], name, tokens(c))
    SLOPES[f"parc.{name}.default"] = lambda c, g, y: [_by_slots(c, g, c.args[1], back, tokens(c)), None]


for _operator, (_reads, _result, _back) in _SLOTS.items():
    _enter_slots(_operator, _reads, _back)


# ---- experts: packed rows are an array [experts, tokens, ...] of which some rows are absent. What is read of those is
# multiplied by ``chosen``, so that they may be anything, and all that meet have one ``chosen``.


def _rows_of(c: Call, rows: Value, chosen: Value) -> Value:
    """Return packed rows as [experts, tokens, ...].

    Raises:
        Refused: other rows are present.
    """
    have = rows.chosen
    if have is None or not (have == chosen or c.tensors.canonical(have, chosen)):
        raise Refused(f"{c.line.op} reads rows of other tokens than are chosen")
    return c.tensors.reshape(rows._replace(chosen=None), (*chosen.shape, *rows.shape[1:]))


def _packed(c: Call, value: Value, chosen: Value) -> Value:
    experts, tokens, *rest = value.shape
    return c.tensors.reshape(value, (experts * tokens, *rest))._replace(chosen=chosen)


def _pack(c: Call, x: Value, chosen: Value) -> Value:
    return _packed(c, c.tensors.expand(c.tensors.unsqueeze(x, 0), (chosen.shape[0], *x.shape)), chosen)


def _unpack(c: Call, rows: Value, chosen: Value) -> Value:
    return c.tensors.product([_rows_of(c, rows, chosen), chosen], ["eth", "et"], "th")


def _spread_rows(c: Call, x: Value, chosen: Value) -> Value:
    wide = c.tensors.expand(c.tensors.unsqueeze(x, 1), (*chosen.shape, x.shape[1]))
    return _packed(c, wide, chosen)


def _sum_of_experts(c: Call, rows: Value, chosen: Value) -> Value:
    return c.tensors.product([_rows_of(c, rows, chosen), chosen], ["etn", "et"], "en")


def _pick(c: Call, x: Value, chosen: Value) -> Value:
    return _packed(c, c.tensors.unsqueeze(x, 2), chosen)


def _unpick(c: Call, rows: Value, chosen: Value) -> Value:
    return c.tensors.times(c.tensors.squeeze(_rows_of(c, rows, chosen), [2]), chosen)


def _expert_linear(c: Call, rows: Value, chosen: Value, weight: Value, transposed: bool) -> Value:
    result = c.tensors.product([_rows_of(c, rows, chosen), weight], ["eth", "ehn" if transposed else "enh"], "etn")
    return _packed(c, result, chosen)


def _expert_outer(c: Call, rows: Value, grad: Value, chosen: Value, transposed: bool) -> Value:
    values = [_rows_of(c, rows, chosen), _rows_of(c, grad, chosen), chosen]
    return c.tensors.product(values, ["eth", "etn", "et"], "ehn" if transposed else "enh")


_ROUTES: dict[str, tuple[Callable[..., Value], Callable[..., Value]]] = {
    "pack": (_pack, _unpack), "unpack": (_unpack, _pack), "pick": (_pick, _unpick), "unpick": (_unpick, _pick),
    "spread": (_spread_rows, _sum_of_experts), "expert_sum": (_sum_of_experts, _spread_rows),
}  # fmt: skip
"""Operators on packed rows and ``chosen``, each with the one that gives its operand's gradient."""


def _enter_route(name: str, forward: Callable[..., Value], backward: Callable[..., Value]) -> None:
    def mean(c: Call) -> Value:
        _same_top(c, c.args[1], c.args[2])
        return forward(c, c.args[0], c.args[1])

    ROWS[f"parc.{name}.default"] = mean
    SLOPES[f"parc.{name}.default"] = lambda c, g, y: [
        backward(c, g._replace(chosen=c.args[1]), c.args[1]),
        None,
    ]


for _name, (_forward, _backward) in _ROUTES.items():
    _enter_route(_name, _forward, _backward)


def _same_top(c: Call, chosen: Value, top: int) -> None:
    """Refuse another number of experts of a token than the model has for it, by which ranks count rows."""
    if not c.tensors.table.agree(chosen.node, top):
        raise Refused(f"{c.line.op} counts {top} experts of a token, and the model another number of them")


@row("parc.expert_linear.default")
def _(c: Call) -> Value:
    rows, chosen, weight, transposed, top = c.args
    _same_top(c, chosen, top)
    return _expert_linear(c, rows, chosen, weight, transposed)


@row("parc.expert_outer.default")
def _(c: Call) -> Value:
    rows, grad, chosen, transposed, top = c.args
    _same_top(c, chosen, top)
    return _expert_outer(c, rows, grad, chosen, transposed)


@slope("parc.expert_linear.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    rows, chosen, weight, transposed, _ = c.args
    g = g._replace(chosen=chosen)
    weights = _expert_outer(c, g, rows, chosen, False) if transposed else _expert_outer(c, rows, g, chosen, False)
    return [_expert_linear(c, g, chosen, weight, not transposed), None, weights]


@row("parc.exchange")
def _(c: Call) -> Value:
    x, axes, dim, outer, to, to_outer, before, after = c.args
    t = c.tensors
    _rows_of(c, x, before)

    def moved(value: Value) -> Value:
        return t.kept(t.gathered(value, c.axes(axes), dim, outer), c.axes(axes), to, to_outer)

    marks = moved(t.reshape(before, (math.prod(before.shape),)))
    if not t.canonical(t.reshape(marks, after.shape), after):
        raise Refused(f"{c.line.op} moves rows of other tokens than are chosen behind it")
    return moved(x._replace(chosen=None))._replace(chosen=after)


@slope("parc.route.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    return [g, None]
