"""Operators of experts: rows of tokens packed by the experts that were chosen for them.

A packed value is an array of [experts, tokens, …], seen as [experts * tokens, …], of which only the rows that
``chosen`` marks are there, in their order: all rows of the first expert, then those of the second. So it is split like
any array: over tokens, where a rank packs its own tokens for all experts, or over experts, where it holds what all
tokens send to its own. Shapes in programs count all rows; tensors have those that are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .torch_ops import LIBRARY, OPS

__all__ = ["OPS"]

_EXPERT_SCHEMAS = (
    # rows of tokens [t, h] for each of the `top` experts that are chosen for them, and their sum over experts; chosen
    # is [e, t]
    "pack(Tensor x, Tensor chosen, int top) -> Tensor",
    "unpack(Tensor rows, Tensor chosen, int top) -> Tensor",
    # numbers [e, t] as packed rows of one, and back, with zeros elsewhere
    "pick(Tensor x, Tensor chosen, int top) -> Tensor",
    "unpick(Tensor rows, Tensor chosen, int top) -> Tensor",
    # a row [e, n] of each expert for each of its tokens, and the sum over an expert's tokens
    "spread(Tensor x, Tensor chosen, int top) -> Tensor",
    "expert_sum(Tensor rows, Tensor chosen, int top) -> Tensor",
    # each expert's rows times its weight, [e, n, h] or (transposed) [e, h, n]; and the gradient of the weights
    "expert_linear(Tensor rows, Tensor chosen, Tensor weight, bool transposed, int top) -> Tensor",
    "expert_outer(Tensor rows, Tensor grad, Tensor chosen, bool transposed, int top) -> Tensor",
    # packed rows, or `chosen` itself, from here on split over experts or over tokens as their readers want
    "route(Tensor x, Tensor chosen) -> Tensor",
)
for _schema in _EXPERT_SCHEMAS:
    LIBRARY.define(_schema)


def _fake_of_shape(name: str, shape: Callable[..., tuple[int, ...]], at: int = 0) -> None:
    """Register the kernel that makes an empty tensor of the result's shape, like the operand at a position."""
    torch.library.register_fake(f"parc::{name}", lambda *given: given[at].new_empty(shape(*given)), lib=LIBRARY)


def _width(weight: Any, transposed: bool) -> int:
    return int(weight.shape[2 if transposed else 1])


_fake_of_shape("pack", lambda x, chosen, top: (chosen.numel(), x.shape[1]))
_fake_of_shape("unpack", lambda rows, chosen, top: (chosen.shape[1], rows.shape[1]))
_fake_of_shape("pick", lambda x, chosen, top: (chosen.numel(), 1))
_fake_of_shape("unpick", lambda rows, chosen, top: tuple(chosen.shape))
_fake_of_shape("spread", lambda x, chosen, top: (chosen.numel(), x.shape[1]))
_fake_of_shape("expert_sum", lambda rows, chosen, top: (chosen.shape[0], rows.shape[1]))
_fake_of_shape("route", lambda rows, chosen: tuple(rows.shape))
_fake_of_shape(
    "expert_linear", lambda rows, chosen, weight, transposed, top: (chosen.numel(), _width(weight, transposed))
)
_fake_of_shape(
    "expert_outer",
    lambda rows, grad, chosen, transposed, top: (
        chosen.shape[0],
        *(x.shape[1] for x in ((rows, grad) if transposed else (grad, rows))),
    ),
)


def _transposes(name: str, other: str) -> None:
    """Register two linear operators on (value, chosen, top), each as the other's gradient."""
    for forward, backward in ((name, other), (other, name)):
        operator = getattr(OPS, backward).default

        def gradient(ctx: Any, grad: Any, operator: Any = operator) -> Any:
            return operator(grad, *ctx.saved_tensors, ctx.top), None, None

        torch.library.register_autograd(f"parc::{forward}", gradient, setup_context=_keep_chosen, lib=LIBRARY)


def _keep_chosen(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.top = inputs[2]
    ctx.save_for_backward(inputs[1])


def _linear_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.transposed, ctx.top = inputs
    ctx.save_for_backward(*tensors)


def _linear_backward(ctx: Any, grad: Any) -> Any:
    rows, chosen, weight = ctx.saved_tensors
    to_rows = (
        OPS.expert_linear.default(grad, chosen, weight, not ctx.transposed, ctx.top)
        if ctx.needs_input_grad[0]
        else None
    )
    to_weight = (
        OPS.expert_outer.default(rows, grad, chosen, ctx.transposed, ctx.top) if ctx.needs_input_grad[2] else None
    )
    return to_rows, None, to_weight, None, None


_transposes("pack", "unpack")
_transposes("pick", "unpick")
_transposes("spread", "expert_sum")
torch.library.register_autograd("parc::expert_linear", _linear_backward, setup_context=_linear_setup, lib=LIBRARY)
torch.library.register_autograd(
    "parc::route",
    lambda ctx, grad: (OPS.route.default(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    lib=LIBRARY,
)
