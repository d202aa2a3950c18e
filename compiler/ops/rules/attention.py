"""Rows of attention, torch's and parc's own: whole heads to a rank."""

import math
from collections.abc import Sequence

import torch

from ..factors import Dims, OpCall, OpRule, apply_dims, opaque, quotient
from ..op_row import DRAW_BLOCK, TILE, OpRow, is_operand, plain_dims, rows_of


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


def tile_of_scores(scores: Sequence[int], groups: int, limit: int) -> tuple[int, int, int]:
    """Return how many samples, groups of heads and queries have their scores [b, h, s, t] computed at once, in no more
    than ``limit`` entries: whole samples if one fits, else whole groups, else some queries of one group."""
    samples, heads, queries, keys = (max(1, size) for size in scores)
    sample, group = heads * queries * keys, heads // groups * queries * keys
    if sample <= limit:
        return min(samples, limit // sample), groups, queries
    return 1, max(1, min(groups, limit // group)), queries if group <= limit else max(1, limit * queries // group)


def _temporaries(call: OpCall, dtypes: Sequence[torch.dtype], first: int) -> int:
    """Count the bytes of a call's temporaries, whose queries are operand ``first``. torch's kernel takes keys and
    values with repeated heads, whose gradients it returns, and an additive mask. parc's own takes the scores of a tile,
    with dropout also the numbers of its entries and what is kept, in backward the gradient of the weights; and copies
    of queries, keys and values of a tile."""
    q, k, v, *more = call.operands[first : first + 4]
    backward, p = bool(first), call.args[7 + 3 * first]
    narrow, wide = dtypes[first].itemsize, torch.promote_types(dtypes[first], torch.float32).itemsize
    keys_and_values = math.prod(k) + math.prod(v)
    if not p and q[-1] == v[-1]:
        repeats = q[1] // k[1]
        repeated = (repeats * (1 + backward) - backward) * keys_and_values * narrow if repeats > 1 else 0
        masked = is_operand(call.args[3 + first]) and dtypes[first + 3] == torch.bool
        return repeated + (math.prod(more[0]) * (narrow + (not backward)) if masked else 0)
    samples, groups, queries = tile_of_scores((*q[:3], k[2]), k[1], TILE)
    rows, columns = samples * groups * (q[1] // k[1]) * queries, samples * groups * k[2]
    entries = rows * k[2]
    sums = keys_and_values * (wide - narrow) if backward and queries < q[2] else 0
    if p:
        copies = (rows * q[-1] + columns * k[-1]) * wide if backward and narrow < wide else 0
        return entries * (wide + 9) + min(entries, DRAW_BLOCK) * 16 + copies + sums
    copies = (rows * (q[-1] + v[-1]) + columns * (k[-1] + v[-1])) * wide
    return entries * wide * (1 + backward) + copies * (1 + (backward and narrow < wide)) + sums


ATTENTION_RULES = {
    **rows_of("scaled_dot_product_attention", OpRow(_composite_rule, precision="product", flops=_flops)),
    "parc.attention.default": OpRow(
        _forward_rule, precision="product", flops=_flops, storage="fresh", key_at=4, chance_at=7,
        takes=lambda call, dtypes: _temporaries(call, dtypes, 0),
    ),
    "parc.attention_backward.default": OpRow(
        _backward_rule, precision="product", flops=_backward_flops, backward=True, storage="fresh", key_at=5,
        chance_at=10, takes=lambda call, dtypes: _temporaries(call, dtypes, 1),
    ),
}  # fmt: skip
