"""Rows of scaled dot product attention: whole heads to a rank."""

from dataclasses import dataclass

from ..factors import Dims, OpCall, OpRule, Shape, apply_dims, opaque, quotient
from .row import Row, is_operand, table


@dataclass(frozen=True, slots=True)
class AttentionFactors:
    """Dims of attention's tensors: q [b h s d], k [b h t d], v [b h t e], mask [.. s t], out [b h s e], lse [b h s].

    Query heads that outnumber the key heads are (g r), key heads g: splitting g splits both, splitting r leaves the
    keys replicated.
    """

    q: Dims
    k: Dims
    v: Dims
    mask: Dims | None
    out: Dims
    lse: Dims
    sizes: dict[str, int]


def attention_factors(q: Shape, k: Shape, v: Shape, mask: Shape | None) -> AttentionFactors | None:
    """The dims of one attention call from its shapes; None where the heads of k do not divide those of q.

    Dims before the heads are batch; they and the mask's dims broadcast.
    """
    lead = len(q) - 2
    batch: Dims = tuple((f"b{dim}",) for dim in range(lead - 1))
    query_heads: Dims = ()
    key_heads: Dims = ()
    sizes: dict[str, int] = {}
    if lead > 0:
        repeats = quotient(q[-3], k[-3])
        if repeats is None:
            return None
        query_heads, key_heads = (("g", "r"),), (("g",),)
        sizes = {"g": k[-3], "r": repeats}
    queries, keys = (*batch, *query_heads), (*batch, *key_heads)
    scores = (*queries, ("s",), ("t",))
    return AttentionFactors(
        q=(*queries, ("s",), ("d",)),
        k=(*keys, ("t",), ("d",)),
        v=(*keys, ("t",), ("e",)),
        mask=None if mask is None else scores[len(scores) - len(mask) :],
        out=(*queries, ("s",), ("e",)),
        lse=(*queries, ("s",)),
        sizes=sizes,
    )


def _mask_shape(call: OpCall, position: int) -> Shape | None:
    mask = call.argument(position, "attn_mask")
    return call.operands[mask.index] if is_operand(mask) else None


def _whole(causal: bool) -> frozenset[str]:
    """A causal mask counts positions from the first query, so it needs all of them."""
    return frozenset({"d", "t", "s"} if causal else {"d", "t"})


def _composite(call: OpCall) -> OpRule:
    """`scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, *, scale, enable_gqa)`; linear in v."""
    q, k, v = call.operands[:3]
    if len(q) != len(k) or len(k) != len(v):
        return opaque(call)
    factors = attention_factors(q, k, v, _mask_shape(call, 3))
    if factors is None:
        return opaque(call)
    operands = [factors.q, factors.k, factors.v] + ([factors.mask] if factors.mask is not None else [])
    whole = _whole(bool(call.argument(5, "is_causal", False)))
    return apply_dims(call, operands, [factors.out], whole=whole, linear=[frozenset({2})], sizes=factors.sizes)


TABLE = table("scaled_dot_product_attention", Row(_composite))
