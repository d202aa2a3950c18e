"""Operators of experts with a capacity: tokens in the slots that an expert has for each sequence.

An expert takes the first ``capacity`` tokens of a sequence that choose it, in their order; others go without it. So
its rows are an array of a fixed shape, [experts, sequences, capacity, ...], with zeros in slots that nobody takes
(Lepikhin et al., "GShard", 2020, whose groups are sequences here).
"""

from __future__ import annotations

from typing import Any

import torch

from .torch_ops import LIBRARY, OPS

__all__ = ["OPS"]

_SLOT_SCHEMAS = (
    # the token in each slot [e, b, c], its place in the sequence or -1, of those that chosen [e, b, s]
    # marks, `top` times each
    "slots(Tensor chosen, int capacity, int top) -> Tensor",
    # tokens [b, s, h] in their slots [e, b, c, h], and the sum of a token's slots over experts
    "dispatch(Tensor x, Tensor slots) -> Tensor",
    "combine(Tensor rows, Tensor slots, int tokens) -> Tensor",
    # numbers [e, b, s] of experts and tokens in the slots of these, and back, with zeros elsewhere
    "pick_slots(Tensor x, Tensor slots) -> Tensor",
    "unpick_slots(Tensor x, Tensor slots, int tokens) -> Tensor",
)
for _schema in _SLOT_SCHEMAS:
    LIBRARY.define(_schema)


def _like(x: Any, *shape: int) -> Any:
    return x.new_empty(shape)


torch.library.register_fake(
    "parc::slots", lambda chosen, capacity, top: chosen.new_empty((*chosen.shape[:2], capacity), dtype=torch.int64),
    lib=LIBRARY,
)  # fmt: skip
torch.library.register_fake("parc::dispatch", lambda x, slots: _like(x, *slots.shape, x.shape[2]), lib=LIBRARY)
torch.library.register_fake(
    "parc::combine", lambda rows, slots, tokens: _like(rows, rows.shape[1], tokens, rows.shape[3]), lib=LIBRARY
)
torch.library.register_fake("parc::pick_slots", lambda x, slots: _like(x, *slots.shape), lib=LIBRARY)
torch.library.register_fake(
    "parc::unpick_slots", lambda x, slots, tokens: _like(x, *slots.shape[:2], tokens), lib=LIBRARY
)


def _keep_slots(dim: int) -> Any:
    """Return the set-up of an operator's gradient, whose operand has tokens along ``dim``."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.tokens = inputs[0].shape[dim]
        ctx.save_for_backward(inputs[1])

    return setup


def _slot_gradient(back: str, many: bool) -> Any:
    """Return the gradient of an operator that is linear in its first operand, by the operator that is its transpose."""

    def gradient(ctx: Any, grad: Any) -> Any:
        (slots,) = ctx.saved_tensors
        operator = getattr(OPS, back).default
        return (operator(grad, slots), None, None) if many else (operator(grad, slots, ctx.tokens), None)

    return gradient


for _forward, _back, _dim in (("dispatch", "combine", 1), ("pick_slots", "unpick_slots", 2)):
    torch.library.register_autograd(
        f"parc::{_forward}", _slot_gradient(_back, False), setup_context=_keep_slots(_dim), lib=LIBRARY
    )
    torch.library.register_autograd(
        f"parc::{_back}", _slot_gradient(_forward, True), setup_context=_keep_slots(2), lib=LIBRARY
    )
