"""Operators that make a tensor from nothing, in canonical form: ``full`` for one value, ``iota`` for counts."""

from __future__ import annotations

from typing import Any

from ...compiler.capture.node_facts import noted
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.rules import facts
from .rewriter import Canonicalizer, rewrites, targets_where


@rewrites(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(c: Canonicalizer, node: Any) -> None:
    value = noted(node).value
    start = node.args[0] if node.target is not aten.arange.default else 0
    step = node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1
    if not isinstance(start, int) or not isinstance(step, int):
        return _typed(c, node)
    count = c.emit(node, OPS.iota.default, value.shape[0], start, step, value.dtype, val=value)
    if (start, step) == (0, 1):
        c.iotas[count] = (0, value.shape[0])
    c.replace(node, count)


@rewrites(aten.linspace.default, aten.logspace.default, aten.eye.default, aten.eye.m)
def _typed(_: Canonicalizer, node: Any) -> None:
    """Write down the dtype of a created tensor: torch's default is float32 in every program, also in one that is run in
    float64."""
    node.kwargs = {**node.kwargs, "dtype": noted(node).value.dtype}


@rewrites(*targets_where(lambda row: row.creates))
def _filled(c: Canonicalizer, node: Any) -> None:
    """Write a tensor of one number as ``full``, whatever its shape comes from."""
    result, row = noted(node).value, facts(node.target)
    number = row.number_in(node.args)
    if row.number is not None and result.dtype.is_floating_point:
        number = float(number)
    c.replace(node, c.emit(node, aten.full.default, list(result.shape), number, val=result, dtype=result.dtype))
