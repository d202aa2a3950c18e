"""Rows of parc's own operators: attention, randomness, sharded lookups and losses."""

from __future__ import annotations

from typing import Any

from ..factors import Dims, OpCall, OpRule, apply_dims, rule
from .row import Row, plain_dims, replace_arguments, result_shape


def _created(call: OpCall) -> OpRule:
    """Every dim of the result is free: a rank makes its own part, since it knows where it stands."""
    return apply_dims(call, [()] * len(call.operands), [plain_dims(len(call.results[0]))])


def _iota_local(call: OpCall, operands: Any, results: Any) -> Any:
    return replace_arguments(call, (0, "size", results[0][0]))


def _rows_local(call: OpCall, operands: Any, results: Any) -> Any:
    return replace_arguments(call, (2, "rows", results[0][0]))


def attention_dims(call: OpCall, offset: int) -> tuple[list[Dims], Dims]:
    """Dims of q, k, v and an optional mask from operand ``offset`` on, and of the result ``[b, h, s, e]``.

    With fewer key/value heads than query heads, the query heads are ``(h r)``: splitting the groups splits both.
    """
    q, k = call.operands[offset], call.operands[offset + 1]
    heads = ("h",) if q[1] == k[1] else ("h", "r")
    b, s, t = ("b",), ("s",), ("t",)
    dims: list[Dims] = [(b, heads, s, ("d",)), (b, ("h",), t, ("d",)), (b, ("h",), t, ("e",))]
    if isinstance(call.args[offset + 3], type(call.args[offset])):
        dims.append((b, heads, s, t))
    return dims, (b, heads, s, ("e",))


def _attention(call: OpCall) -> OpRule:
    dims, out = attention_dims(call, 0)
    causal = call.args[5]
    while len(dims) < len(call.operands):  # the stream's key
        dims.append(())
    whole = {"t", "d", "e"} | ({"s"} if causal else set())
    return apply_dims(call, dims, [out, out[:3]], whole=frozenset(whole))


def _attention_backward(call: OpCall) -> OpRule:
    (q, k, v, *mask), out = attention_dims(call, 1)
    key = [()] if isinstance(call.args[5], type(call.args[0])) else []
    operands: list[Dims] = [out, q, k, v, *mask, *key, out, out[:3]]
    # rows of the scores are independent given `lse`, so a part of them gives a part of the sum for k and v
    whole = {"t", "d", "e"} | ({"s"} if call.args[8] else set())
    return apply_dims(call, operands, [q, k, v], whole=frozenset(whole), linear=[frozenset({0})])


def _filled(call: OpCall) -> OpRule:
    """Linear where it writes zeros: padding of a sum is the sum of padding."""
    return rule("... -> ...", linear="" if call.args[5] else "0")(call)


def _resized(call: OpCall) -> OpRule:
    """The dim is (outer, entries): a rank with some of the outer parts changes those; entries of a part are whole."""
    dims, (dim, outer) = plain_dims(len(call.operands[0])), call.args[1:3]
    before, after = ((*dims[:dim], ("outer", name), *dims[dim + 1 :]) for name in ("before", "after"))
    whole, linear = frozenset({"before", "after"}), [frozenset({0})]
    return apply_dims(call, [before], [after], whole=whole, linear=linear, sizes={"outer": outer})


TABLE: dict[str, Row] = {
    "parc.attention.default": Row(_attention),
    "parc.attention_backward.default": Row(_attention_backward),
    "parc.square_sum.default": Row(rule("... -> ")),
    "parc.stream_key.default": Row(rule("t! -> ")),
    "parc.dropout_mask.default": Row(_created, result_shape(1, "size")),
    "parc.random.default": Row(_created, result_shape(1, "size")),
    "parc.iota.default": Row(_created, _iota_local),
    "parc.lookup.default": Row(rule("v e, ... -> ... e")),
    "parc.lookup_backward.default": Row(rule("... e, ... -> v e", linear="0"), _rows_local),
    "parc.token_loss.default": Row(rule("t v, t -> t")),
    "parc.loss_parts.default": Row(rule("t v, t 1, t -> c! t")),
    "parc.fill_pad.default": Row(_filled),
    "parc.cut_pad.default": Row(_resized),
    "parc.grow_pad.default": Row(_resized),
    "parc.loss_parts_backward.default": Row(rule("c! t, t v, t 1, t -> t v", linear="0")),
}
