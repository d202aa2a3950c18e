"""Operators that make a tensor of nothing, in canonical form: ``full`` for one value, ``iota`` for counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ...compiler.ops.torch_ops import OPS, aten
from .rewriter import Canonicalizer, Rewrite


def _arange(c: Canonicalizer, node: Any) -> None:
    value = node.meta["val"]
    start = node.args[0] if node.target is not aten.arange.default else 0
    step = node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1
    if not isinstance(start, int) or not isinstance(step, int):
        return _typed(c, node)
    count = c.emit(node, OPS.iota.default, value.shape[0], start, step, value.dtype, val=value)
    if (start, step) == (0, 1):
        c.iotas[count] = (0, value.shape[0])
    c.replace(node, count)


def _typed(_: Canonicalizer, node: Any) -> None:
    """Its dtype said: torch's default is float32 in every program, also in one that is run in float64."""
    node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}


def _creation(value: Callable[[fx.Node], Any]) -> Rewrite:
    def rewrite(c: Canonicalizer, node: Any) -> None:
        result = node.meta["val"]
        shape = list(result.shape)
        c.replace(node, c.emit(node, aten.full.default, shape, value(node), val=result, dtype=result.dtype))

    return rewrite


def _filled(node: fx.Node) -> Any:
    """The value of ``full``, ``new_full``, ``full_like``."""
    return node.args[2] if node.target is aten.new_full.default else node.args[1]


def _scalar(value: float) -> Callable[[fx.Node], Any]:
    def read(node: fx.Node) -> Any:
        return value if node.meta["val"].dtype.is_floating_point else int(value)

    return read


CREATION: Mapping[Any, Rewrite] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys((aten.linspace.default, aten.logspace.default, aten.eye.default, aten.eye.m), _typed),
    aten.full.default: _creation(_filled),
    aten.full_like.default: _creation(_filled),
    aten.new_full.default: _creation(_filled),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _creation(_scalar(1.0))),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _creation(_scalar(0.0))),
    **dict.fromkeys(
        (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default), _creation(_scalar(0.0))
    ),
}
"""Operator → rewrite."""
