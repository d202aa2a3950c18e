"""Padding: values whose dims are longer than in the model. What is real stands in its place among zeros, and a product
or a function of it is read there alone; where padding is filled with another number, a value remembers what is real."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .letters import number
from .meaning import Value
from .rows import Call, row
from .tensors import Tensors
from .text import Refused, Type


def grown(t: Tensors, x: Value, dim: int, outer: int, real: int, padded: int) -> Value:
    """Return a value with zeros behind the entries of each of ``outer`` parts of a dim.

    Raises:
        Refused: the parts have other sizes.
    """
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if x.shape[dim] != outer * real or real > padded:
        raise Refused(f"a dim of {x.shape[dim]} has not {outer} parts of {real} to be padded to {padded}")
    apart = t.reshape(x, (*before, outer, real, *after))
    return t.reshape(t.place(apart, dim + 1, 0, padded), (*before, outer * padded, *after))


def cut(t: Tensors, x: Value, dim: int, outer: int, real: int, padded: int) -> Value:
    """Return the first entries of each of ``outer`` parts of a dim: those that are real.

    Raises:
        Refused: the parts have other sizes.
    """
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if x.shape[dim] != outer * padded or real > padded:
        raise Refused(f"a dim of {x.shape[dim]} has not {outer} parts of {padded} that are cut to {real}")
    apart = t.reshape(x, (*before, outer, padded, *after))
    return t.reshape(t.part(apart, dim + 1, 0, real), (*before, outer * real, *after))


@row("parc.grow_pad.default")
def _(c: Call) -> Value:
    x, dim, outer, real, padded = c.args
    return grown(c.tensors, x, dim, outer, real, padded)


@row("parc.cut_pad.default")
def _(c: Call) -> Value:
    x, dim, outer, real, padded = c.args
    return cut(c.tensors, x, dim, outer, real, padded)


def _ranks(type_: Type, dim: int) -> tuple[list[str], int]:
    """Return the axes that split a dim, and the number of its parts that they split each of.

    Raises:
        Refused: they do not split it one behind the other.
    """
    stretch = type_.dims[dim][0]
    at = [index for index, atom in enumerate(stretch) if atom.axis]
    if len(type_.dims[dim]) > 1 or at != list(range(at[0], at[0] + len(at)) if at else []):
        raise Refused("pads a dim that is split in stretches")
    axes = [stretch[index].axis for index in at]
    if any(axis.startswith("~") for axis in axes):
        raise Refused("pads a dim whose parts are in reverse")
    return axes, math.prod(atom.size for atom in stretch[: at[0]]) if at else 1


@row("parc.fill_pad.default")
def _(c: Call) -> Value:
    x, dim, outer, real, padded, fill = c.args
    t, (axes, parts) = c.tensors, _ranks(c.types[0], dim)
    inside = cut(t, t.gathered(x, axes, dim, parts) if axes else x, dim, outer, real, padded)
    if math.isfinite(fill):
        whole = grown(t, inside, dim, outer, real, padded)
        real_places = grown(t, t.constant(1, inside.shape), dim, outer, real, padded)
        whole = t.plus(whole, t.constant(number(fill)), real_places, by=(1, 1, -number(fill))) if fill else whole
    elif outer == 1:
        names = list(range(len(inside.dims)))
        result = ["filled" if name == dim else name for name in names]
        whole = t.opaque("filled", number(fill), [inside], [names], result, [dim], {"filled": padded})
    else:
        raise Refused(f"fills the padding of several parts with {fill}")
    return t.kept(whole, axes, dim, parts) if axes else whole


Back = Callable[[Value], Value]


def real_entries(c: Call, x: Value, type_: Type) -> tuple[Value, Back] | None:
    """Return the real entries of a value whose last dim is padded with minus infinity, on all ranks, and what puts
    values of them back in their places with zeros elsewhere; None for a value that is not padded so."""
    t, node, dim = c.tensors, c.tensors.table.node(x.node), len(x.dims) - 1
    if node.op != "filled" or not isinstance(node.args, tuple) or node.args[0] != -math.inf:
        return None
    axes, parts = _ranks(type_, dim)
    whole = t.gathered(x, axes, dim, parts) if axes else x
    (real,), padded = node.args[1], whole.shape[dim]

    def back(value: Value) -> Value:
        there = grown(t, value, dim, 1, real, padded)
        return t.kept(there, axes, dim, parts) if axes else there

    return cut(t, whole, dim, 1, real, padded), back


def padded_whole(t: Tensors, x: Value, rows: Sequence[Sequence[int]]) -> Value:
    """Return a value of the model with the padding that the manifest says, each row a dim, its parts, and their sizes
    without and with padding."""
    for dim, outer, real, padded in rows:
        x = grown(t, x, dim, outer, real, padded)
    return x


def real_whole(t: Tensors, x: Value, type_: Type, rows: Sequence[Sequence[int]]) -> Value:
    """Return what is real of a value on all ranks, of which one rank has the piece that a type says."""
    for dim in range(len(type_.dims)):
        axes, parts = _ranks(type_, dim)
        x = t.gathered(x, axes, dim, parts) if axes else x
    for dim, outer, real, padded in reversed(rows):
        x = cut(t, x, dim, outer, real, padded)
    return x
