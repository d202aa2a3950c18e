"""Constant folding of integers and booleans: a mask that hides nothing goes, and a causal one becomes attention's
``causal``.

Models compute masks from positions. A constant of one repeated number becomes ``full``. Attention with no mask, or a
causal one, can use a kernel that reads no mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.rules import facts
from ...compiler.resolve.requests import Choices, agreed
from ..calls import insert_call, operands_of, rule_of, substitute_nodes

_MOST_ENTRIES = 1 << 22
"""The largest tensor that is computed entry by entry."""
_NEUTRAL = {"both": True, "either": False}
"""The neutral operand of each operator on truth values: it leaves the other operand as it is."""
_COMPARISONS = {"at most": (False, 0), "below": (False, 1), "at least": (True, 0), "above": (True, 1)}
"""Each comparison in the form ``row - column >= least``: whether its first operand is the row, and the least."""


def fold_constants(graph: fx.Graph, choices: Choices | None = None) -> None:
    """The pass that folds constants. It takes a canonical graph, and changes it in place: constants, masks and causal
    attention. No floating number is computed, so the result is exact on every device. With ``choices`` of a range, it
    folds only what the largest sizes fold too.
    """
    known: dict[fx.Node, torch.Tensor] = {}
    causal: dict[fx.Node, bool] = {}  # True for a mask that hides exactly the later positions; layers share one
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(noted(node).value, torch.Tensor):
            if node.target is OPS.attention.default:
                _name_mask(node, known, causal, choices)
            continue
        if noted(node).value.dtype.is_floating_point and node.target is not aten.full.default:
            continue
        value = _fold(node, known)
        same = agreed(choices, ("constant", node.name), value is not None and _uniform(value))
        if value is None if choices is None else choices.make(("unknown", node.name), value is None):
            _drop_neutral(node, known, choices)
        if value is None:
            continue
        known[node] = value
        if same and node.target is not aten.full.default:
            args = list(value.shape), _first(value).item()
            constant = insert_call(node, aten.full.default, args, {"dtype": value.dtype})
            noted(constant).value, noted(constant).origin = noted(node).value, noted(node).origin
            node.replace_all_uses_with(constant)
            known[constant] = value
    graph.eliminate_dead_code()


def _fold(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """Return a node's value, or None if it is not constant. A tensor of one repeated number is one expanded entry."""
    result = noted(node).value
    if node.target is OPS.iota.default:
        size, start, step, dtype = node.args
        return torch.arange(size, dtype=torch.int64).mul_(step).add_(start).to(dtype)  # type: ignore[arg-type]
    if node.target is aten.full.default:
        return torch.full((), node.args[1], dtype=result.dtype).expand(result.shape)  # type: ignore[arg-type]
    operands = operands_of(node)
    target: Any = node.target
    if not operands or any(operand not in known for operand in operands):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    pointwise = torch.Tag.pointwise in target.tags or facts(target).computes in _NEUTRAL
    if pointwise and all(_uniform(known[operand]) for operand in operands):
        return _compute(node, {operand: _first(known[operand]) for operand in operands}).expand(result.shape)
    if all(returned.alias_info is not None for returned in target._schema.returns):
        return _compute(node, known)  # a view
    values, shape = _without_copies(node, known)
    if math.prod(shape) > _MOST_ENTRIES:
        return _compare_ranges(node, known)
    value = _compute(node, values)
    same = value.numel() > 0 and bool((value == _first(value)).all())
    return (_first(value).clone() if same else value).expand(result.shape)


def _without_copies(
    node: fx.Node, known: dict[fx.Node, torch.Tensor]
) -> tuple[dict[fx.Node, torch.Tensor], tuple[int, ...]]:
    """Return the operands of a node, with one entry for each factor along which all of them hold copies (a mask's
    batch), and the shape of their result."""
    operands = operands_of(node)
    values, shape = {operand: known[operand] for operand in operands}, tuple(noted(node).value.shape)
    rule, has_rule = rule_of(node)
    if not has_rule or len(values) < len(operands):
        return values, shape
    moving = set(rule.whole)
    for operand, dims in zip(operands, rule.operands, strict=True):
        for size, stride, factors in zip(values[operand].shape, values[operand].stride(), dims, strict=True):
            if len(factors) > 1 or (size > 1 and stride != 0):
                moving.update(factors)
    copies = {factors[0] for factors in rule.results[0] if len(factors) == 1} - moving
    for operand, dims in zip(operands, rule.operands, strict=True):
        for dim, factors in enumerate(dims):
            if factors and factors[0] in copies:
                values[operand] = values[operand].narrow(dim, 0, 1)
    return values, tuple(1 if f and f[0] in copies else n for n, f in zip(shape, rule.results[0], strict=True))


def _compute(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    args, kwargs = substitute_nodes((node.args, node.kwargs), values.__getitem__)
    result: torch.Tensor = node.target(*args, **{**kwargs})  # type: ignore[operator]
    return result


def _compare_ranges(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """Return True for all entries of a comparison if the range of one side lies beyond that of the other; else None."""
    operands = operands_of(node)
    comparison = _COMPARISONS.get(facts(node.target).computes)
    if comparison is None or len(operands) != 2:
        return None
    first_is_row, least = comparison
    first, second = (_each_once(known[operand]) for operand in operands)
    high, low = (first, second) if first_is_row else (second, first)
    if int(high.min()) - int(low.max()) < least:
        return None
    return torch.tensor(True).expand(noted(node).value.shape)


def _uniform(value: torch.Tensor) -> bool:
    return value.numel() > 0 and all(s == 0 or n == 1 for s, n in zip(value.stride(), value.shape, strict=True))


def _each_once(value: torch.Tensor) -> torch.Tensor:
    """Return a value with one entry along the dims that repeat it, as a mask is repeated for every sample."""
    for dim, stride in enumerate(value.stride()):
        value = value.narrow(dim, 0, 1) if stride == 0 and value.shape[dim] > 1 else value
    return value


def _first(value: torch.Tensor) -> torch.Tensor:
    return value[(0,) * value.dim()]


def _drop_neutral(node: fx.Node, known: dict[fx.Node, torch.Tensor], choices: Choices | None) -> None:
    """Replace ``x and True``, and ``x or False``, by ``x``."""
    operands, neutral_truth = operands_of(node), _NEUTRAL.get(facts(node.target).computes)
    if neutral_truth is None or noted(node).value.dtype != torch.bool or len(operands) != 2:
        return
    first, second = operands
    for kept, other in ((first, second), (second, first)):
        value = known.get(other)
        neutral = value is not None and _uniform(value) and bool(_first(value)) is neutral_truth
        if not agreed(choices, ("neutral", node.name, other.name), neutral):
            continue
        if noted(kept).value.shape != noted(node).value.shape:
            wide = insert_call(node, aten.expand.default, (kept, list(noted(node).value.shape)))
            noted(wide).value, noted(wide).origin = noted(node).value, noted(node).origin
            kept = wide
        node.replace_all_uses_with(kept)
        return


def _name_mask(
    node: fx.Node, known: dict[fx.Node, torch.Tensor], hides_later: dict[fx.Node, bool], choices: Choices | None
) -> None:
    """Drop the mask of an attention where it hides nothing, and replace one that hides later positions by
    ``causal``."""
    q, k, v, mask, key, causal, *rest = node.args
    if not isinstance(mask, fx.Node) or noted(mask).value.dtype != torch.bool:
        return
    value, name = known.get(mask), ""
    if value is not None and _uniform(value) and bool(_first(value)):
        name = "none"
    elif not causal:
        if mask not in hides_later:
            causal_mask = _is_causal(value) if value is not None else _is_causal_comparison(mask, known)
            hides_later[mask] = _square(mask) and causal_mask
        name = "causal" if hides_later[mask] else ""
    name = agreed(choices, ("mask", node.name), name)
    if name:
        node.args = (q, k, v, None, key, causal or name == "causal", *rest)


def _square(mask: fx.Node) -> bool:
    rows, columns = noted(mask).value.shape[-2:]
    return bool(rows == columns and rows > 1)


def _is_causal(mask: torch.Tensor) -> bool:
    size = mask.shape[-1]
    return bool((_each_once(mask) == torch.ones(size, size, dtype=torch.bool).tril()).all())


def _unexpanded(mask: Any) -> Any:
    """Return the mask that this one expands or unsqueezes in front, or None."""
    if mask.target is aten.expand.default:
        return mask.args[0]
    return mask.args[0] if mask.target is aten.unsqueeze.default and mask.args[1] == 0 else None


def _is_causal_comparison(mask: fx.Node, known: dict[fx.Node, torch.Tensor]) -> bool:
    """Return True for a comparison of positions that is the causal mask, though too large to compute entry by entry:
    the positions of columns rise, and the position of row i is at least that of column i, and below that of column i +
    1."""
    while (narrower := _unexpanded(mask)) is not None:
        mask = narrower
    operands = operands_of(mask) if mask.op == "call_function" else []
    comparison = _COMPARISONS.get(facts(mask.target).computes)
    if comparison is None or len(operands) != 2 or any(operand not in known for operand in operands):
        return False
    first_is_row, least = comparison
    row, column = operands if first_is_row else reversed(operands)
    rows, columns = _line_of(known[row], -2), _line_of(known[column], -1)
    if rows is None or columns is None or len(rows) != len(columns):
        return False
    rows = rows - least
    return bool((columns.diff() > 0).all() and (columns <= rows).all() and (rows[:-1] < columns[1:]).all())


def _line_of(value: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return the entries along one dim of a value that repeats them in all others, or None."""
    if value.dim() < -dim:
        return None
    line = _each_once(value.movedim(dim, -1))
    first = line[(0,) * (line.dim() - 1)]
    return first.expand(value.shape[dim]) if bool((line == first).all()) else None
