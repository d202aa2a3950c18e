"""Ring attention: keys and values go around the ranks of an axis while each computes the attention of its queries.

A ring's line means a gather of keys and values along the sequence and an attention on what is gathered; that of its
backward also cuts and sums their gradients. No rank ever holds the keys of the whole sequence (Liu, Zaharia and Abbeel,
"Ring attention with blockwise transformers for near-infinite context", 2023).

    out, lse = parc.ring_attention(q, 'cp', k, v, mask, key, causal, scale, p)
    gq, gk, gv = parc.ring_attention_backward(grad, 'cp', q, k, v, mask, key, out, lse, causal, scale, p)

With n ranks a line has n - 1 hops, each to the next rank of the axis and with the keys and values of one rank. Their
gradients make n - 1 hops more, in float32 or a wider type: they follow their keys, and end where these came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .placement import TensorType

SEQUENCE = 2
"""The dim of queries, keys and values [b, h, s, d] along which ranks have parts."""


@dataclass(frozen=True, slots=True)
class RingRow:
    """One operator of rings: the operator of one rank that it spreads, and the places of keys and values among the
    arguments of both, where the axis is left out."""

    attention: str
    keys: int
    carries_gradients: bool = False

    def inner(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments of the operator of one rank, for those of a line."""
        return [args[0], *args[2:]]

    def line(self, axes: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of a line, for those of the operator of one rank."""
        return (args[0], axes, *args[1:])


RINGS = {
    "parc.ring_attention": RingRow("parc.attention.default", 1),
    "parc.ring_attention_backward": RingRow("parc.attention_backward.default", 2, carries_gradients=True),
}
"""The operators of rings."""


def travelling_types(op: str, keys: Sequence[TensorType]) -> list[TensorType]:
    """Return the types of what travels in a ring, given those of keys and values."""
    gradients = [TensorType(travelling_dtype(type_.dtype), type_.shape, type_.placement) for type_ in keys]
    return [*keys, *gradients * RINGS[op].carries_gradients]


def travelling_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients travel and are summed."""
    return torch.promote_types(dtype, torch.float32)
