"""Rows of attention, torch's and parc's own: whole heads to a rank."""

import math

from ..factors import Dims, OpCall, OpRule, apply_dims, opaque, quotient
from ..op_row import OpRow, is_operand, plain_dims, rows_of


def _attention_dims(rank: int, mask: list[int]) -> tuple[list[Dims], Dims]:
    """Return the dims of q [b h s d], k [b h t d], v [b h t e], and a mask [.. s t] if the number of its dims is given;
    then those of the result [b h s e].

    Query heads that outnumber the key heads are (g r), key heads g: splitting g splits both, splitting r leaves the
    keys replicated. Dims before the heads are batch; they and the mask's dims broadcast.
    """
    batch = plain_dims(rank - 3, "b")
    queries, keys = ((*batch, ("g", "r")), (*batch, ("g",))) if rank > 2 else ((), ())
    scores = (*queries, ("s",), ("t",))
    masks = [scores[len(scores) - dims :] for dims in mask]
    operands: list[Dims] = [(*queries, ("s",), ("d",)), (*keys, ("t",), ("d",)), (*keys, ("t",), ("e",)), *masks]
    return operands, (*queries, ("s",), ("e",))


HEADS = "g"
"""The factor of heads of keys, and of the groups of query heads that read one."""
_KEYS = frozenset("tde")
"""The factors that must be whole. parc's own attention knows the position of each query that it has."""


def _composite_rule(call: OpCall) -> OpRule:
    """The rule of `scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, *, scale, enable_gqa)`; linear in
    v."""
    q, k, v, *mask = call.operands
    if not len(q) == len(k) == len(v) or (len(q) > 2 and quotient(q[-3], k[-3]) is None):
        return opaque(call)
    operands, out = _attention_dims(len(q), list(map(len, mask)))
    # torch counts positions under a causal mask from the first query that it gets
    whole = frozenset("tds" if call.argument(5, "is_causal", False) else "td")
    return apply_dims(call, operands, [out], whole=whole, linear=[frozenset({2})])


def _forward_rule(call: OpCall) -> OpRule:
    """The rule of `attention(q, k, v, mask, key, causal, scale, p)`; the stream's key has no dims."""
    mask = [len(call.operands[3])] if is_operand(call.args[3]) else []
    operands, out = _attention_dims(4, mask)
    key: list[Dims] = [()] * is_operand(call.args[4])
    return apply_dims(call, [*operands, *key], [out, out[:3]], whole=_KEYS)


def _backward_rule(call: OpCall) -> OpRule:
    """The rule of `attention_backward(grad, q, k, v, mask, key, out, lse, causal, scale, p)`."""
    mask = [len(call.operands[4])] if is_operand(call.args[4]) else []
    operands, out = _attention_dims(4, mask)
    key: list[Dims] = [()] * is_operand(call.args[5])
    # rows of the scores are independent given `lse`, so a part of them gives a part of the sum for k and v
    read = [out, *operands, *key, out, out[:3]]
    return apply_dims(call, read, operands[:3], whole=_KEYS, linear=[frozenset({0})])


def _flops(call: OpCall) -> int:
    """Count the multiply-adds of the scores, and of the weighted sum of the values."""
    return (math.prod(call.operands[0]) + math.prod(call.results[0])) * call.operands[1][-2]


def _backward_flops(call: OpCall) -> int:
    """Count the multiply-adds of the scores again, and of the gradients of weights, values, queries and keys."""
    grad, queries, keys = call.operands[:3]
    return (3 * math.prod(queries) + 2 * math.prod(grad)) * keys[-2]


ATTENTION_RULES = {
    **rows_of("scaled_dot_product_attention", OpRow(_composite_rule, precision="product", flops=_flops)),
    "parc.attention.default": OpRow(
        _forward_rule, precision="product", flops=_flops, storage="fresh", key_at=4, chance_at=7
    ),
    "parc.attention_backward.default": OpRow(
        _backward_rule, precision="product", flops=_backward_flops, backward=True, storage="fresh", key_at=5,
        chance_at=10,
    ),
}  # fmt: skip
