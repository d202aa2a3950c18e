"""Rows of attention, and of what ranks do together."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from .letters import number
from .meaning import Value
from .rows import Call, Gradients, row, slope
from .tensors import Tensors
from .text import Atom, Refused, Type

# ---- attention


def _scores(
    c: Call,
    q: Value,
    k: Value,
    mask: Value | None,
    key: Value | None,
    causal: bool,
    scale: float | None,
    p: float,
    types: tuple[Type, Type, Type | None],
) -> tuple[list[Value], list[str], tuple[Hashable, ...]]:
    """Return what attention's probabilities are made of, with labels, and the other facts of them: queries [b, g, r, s,
    d] and keys [b, g, t, d], where ``r`` counts the queries' heads of one head of keys. A causal attention also reads
    which places come first, and one with dropout the numbers of all entries. A mask of truth values hides scores;
    another one is added to them."""
    t, groups = c.tensors, k.shape[1]
    repeats = q.shape[1] // groups

    def by_group(x: Value) -> Value:
        return t.reshape(x, (x.shape[0], groups, repeats, *x.shape[2:]))

    values, labels = [by_group(q), k], ["bgrsd", "bgtd"]
    if mask is not None:
        mask = mask._replace(dims=(*((),) * (4 - len(mask.dims)), *mask.dims))
        values.append(by_group(mask) if mask.shape[1] > 1 else t.unsqueeze(mask, 1))
        labels.append("bgrst")
    if causal:
        both = Type("bool", (types[0].dims[2], types[1].dims[2]), ())
        values.append(t.piece(t.table.leaf("not after", (0, 0)), both))
        labels.append("st")
    if p:
        if key is None:
            raise Refused(f"{c.line.op} drops probabilities by no key")
        values += [key, c.position(0, types[0]), t.reshape(c.position(1, types[0]), (groups, repeats)),
                   c.position(2, types[0]), c.position(2, types[1])]  # fmt: skip
        labels += ["", "b", "gr", "s", "t"]
    kind = "" if mask is None else "hides" if types[2] is not None and types[2].dtype == "bool" else "adds"
    return values, labels, (None if scale is None else number(scale), number(p), kind, bool(causal))


def _by_head(t: Tensors, value: Value) -> Value:
    """Return [b, g, r, s, ...] as [b, h, s, ...]."""
    b, g, r, *rest = value.shape
    return t.reshape(value, (b, g * r, *rest))


@row("parc.attention.default")
def _attention(c: Call) -> tuple[Value, ...]:
    t, (q, k, v, mask, key, causal, scale, p) = c.tensors, c.args
    values, labels, facts = _scores(c, q, k, mask, key, causal, scale, p, (c.types[0], c.types[1], c.types.get(3)))
    out = t.opaque("attention", facts, [*values, v], [*labels, "bgte"], "bgrse", "dt")
    without = slice(None) if not p else slice(0, -5)
    mass = t.opaque("attention mass", (*facts[:1], 0, *facts[2:]), values[without], labels[without], "bgrs", "dt")
    return _by_head(t, out), _by_head(t, mass)


def _attention_gradients(
    c: Call,
    types: tuple[Type, Type, Type | None],
    g: Value,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    key: Value | None,
    out: Value,
    mass: Value,
    causal: bool,
    scale: float | None,
    p: float,
) -> tuple[Value, Value, Value]:
    t, groups = c.tensors, k.shape[1]
    values, labels, facts = _scores(c, q, k, mask, key, causal, scale, p, types)

    def by_group(x: Value) -> Value:
        return t.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))

    factor, g = t.factored(g)
    values = [by_group(g), *values, v, by_group(out), by_group(mass)]
    labels = ["bgrse", *labels, "bgte", "bgrse", "bgrs"]
    gq = t.opaque("attention gradient of q", facts, values, labels, "bgrsd", "dte")
    # every query adds its part to the gradients of keys and values
    gk = t.opaque("attention gradient of k", facts, values, labels, "bgrstd", "dte")
    gv = t.opaque("attention gradient of v", facts, values, labels, "bgrste", "dte")
    gk, gv = t.total(gk, (2, 3)), t.total(gv, (2, 3))
    return t.times(factor, _by_head(t, gq)), t.times(factor, gk), t.times(factor, gv)


@row("parc.attention_backward.default")
def _(c: Call) -> tuple[Value, ...]:
    return _attention_gradients(c, (c.types[1], c.types[2], c.types.get(4)), *c.args)


@slope("parc.attention.default")
def _(c: Call, g: Value, y: Value) -> Gradients:
    q, k, v, mask, key, causal, scale, p = c.args
    types = c.types[0], c.types[1], c.types.get(3)
    both = _attention_gradients(c, types, g, q, k, v, mask, key, y, c.results[1], causal, scale, p)
    return [*both, *(None for item in (mask, key) if item is not None)]


# ---- collectives


@row("parc.all_reduce")
def _(c: Call) -> Value:
    return c.tensors.over(c.args[0], c.axes(c.args[1]))


@row("parc.all_gather", "parc.all_gather_int8")
def _(c: Call) -> Value:
    x, axes, dim, outer = c.args
    return c.tensors.gathered(x, c.axes(axes), dim, outer)


@row("parc.reduce_scatter", "parc.reduce_scatter_int8")
def _(c: Call) -> Value:
    x, axes, dim, outer = c.args
    return c.tensors.kept(c.tensors.over(x, c.axes(axes)), c.axes(axes), dim, outer)


@row("parc.shard")
def _(c: Call) -> Value:
    x, axes, dim, outer = c.args
    return c.tensors.kept(x, c.axes(axes), dim, outer)


@row("parc.all_to_all")
def _(c: Call) -> Value:
    x, axes, dim, outer, to, to_outer = c.args
    return c.tensors.kept(c.tensors.gathered(x, c.axes(axes), dim, outer), c.axes(axes), to, to_outer)


@row("parc.pad")
def _(c: Call) -> Value:
    x, axes, dim, outer = c.args
    return c.tensors.padded(x, c.axes(axes), dim, outer)


@row("parc.ring_attention", "parc.ring_attention_backward")
def _(c: Call) -> tuple[Value, ...]:
    """A ring is an attention on keys and values that are gathered along the sequence, and their gradients are summed
    over its ranks and scattered."""
    t, axes, backward = c.tensors, c.axes(c.args[1]), "backward" in c.line.op
    args = [c.args[0], *c.args[2:]]
    at = 2 if backward else 1
    keys = c.types[at + 1]
    outer = _outer(keys, 2, axes[0])
    whole = Type(keys.dtype, (*keys.dims[:2], ((Atom(keys.shape[2], ""),),), *keys.dims[3:]), ())
    args[at], args[at + 1] = (t.gathered(x, axes, 2, outer) for x in args[at : at + 2])
    if not backward:
        types: dict[int | tuple[int, int], Type] = {0: c.types[0], 1: whole}
        types |= {3: c.types[4]} if 4 in c.types else {}
        return _attention(replace(c, args=tuple(args), types=types))
    gq, gk, gv = _attention_gradients(c, (c.types[2], whole, c.types.get(5)), *args)
    return gq, *(t.kept(t.over(g, axes), axes, 2, outer) for g in (gk, gv))


def _outer(type_: Type, dim: int, axis: str) -> int:
    """Return the parts of a rank's dim that an axis splits each of; negative where every second one is in reverse."""
    (stretch,) = type_.dims[dim]
    outer = 1
    for atom in stretch:
        if atom.axis.lstrip("~") == axis:
            return -outer if atom.axis.startswith("~") else outer
        outer *= 1 if atom.axis else atom.size
    raise Refused(f"its keys are not split over `{axis}`")
