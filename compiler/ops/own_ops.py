"""parc's own operators: attention, counter-based randomness, sharded lookups and losses, typed conversions, and the
routing of tokens to experts.

They exist where aten's operator would bake in a device, a rank's random state or whole logits. Each has a schema, a
shape-only kernel for tracing and, where it has one, a gradient; ``kernels.py`` computes them, since some need to know
which rank computes.

A *packed* value is an array of [experts, tokens, …], seen as [experts * tokens, …], of which only those rows are
present that ``chosen`` marks, in their order: all rows of the first expert, then those of the second. So it is split
like any array: over tokens, where a rank packs its own tokens for all experts, or over experts, where it holds what all
tokens send to its own. Shapes in programs count all rows; tensors have those that are present.

Experts with a capacity take the first ``capacity`` tokens of a sequence that choose them, in their order; others are
dropped. So their rows are an array of a fixed shape, [experts, sequences, capacity, …], with zeros in empty slots
(Lepikhin et al., "GShard", 2020, whose groups are sequences here).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..layout.placement import dual, parse_kind

LIBRARY = torch.library.Library("parc", "FRAGMENT")

_SCHEMAS = (
    # attention over [b, h, s, d]; the key/value heads may be fewer than the query heads; lse is [b, h, s]; weights are
    # dropped with probability p by the stream of `key`
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key, bool causal, float? scale, float p) "
    "-> (Tensor, Tensor)",
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key, Tensor out, Tensor lse, "
    "bool causal, float? scale, float p) -> (Tensor, Tensor, Tensor)",
    # randomness: a stream's key from the step and microbatch in `rng`; a mask of 0 and 1/(1-p)
    "stream_key(Tensor rng, str name, int seed) -> Tensor",
    "dropout_mask(Tensor key, SymInt[] size, float p, ScalarType dtype) -> Tensor",
    # numbers uniform in [0, 1), or standard normal
    "random(Tensor key, SymInt[] size, str law, ScalarType dtype) -> Tensor",
    # start + step * global index
    "iota(SymInt size, int start, int step, ScalarType dtype) -> Tensor",
    # rows of a table of which a rank holds some: zeros for the others; the row `padding` gets no gradient
    "lookup(Tensor table, Tensor index, int padding) -> Tensor",
    "lookup_backward(Tensor grad, Tensor index, SymInt rows, int padding) -> Tensor",
    # negative log-likelihood of each target, 0 where it is ignored: whole, and in parts over a split vocabulary
    "token_loss(Tensor logits, Tensor targets, int ignore) -> Tensor",
    # the logarithm of each row's sum of exponentials, and the entry of its target
    "row_terms(Tensor logits, Tensor targets) -> (Tensor, Tensor)",
    "row_max(Tensor logits, str axes) -> Tensor",
    "loss_parts(Tensor logits, Tensor peak, Tensor targets) -> Tensor",
    "loss_parts_backward(Tensor grad, Tensor logits, Tensor peak, Tensor targets) -> Tensor",
    # the sum of the squares of all elements
    "square_sum(Tensor x) -> Tensor",
    # the loss scale, the number of good steps and of skipped ones after a step whose gradients have this norm; a scale
    # that would be infinite does not grow
    "next_loss_scale(Tensor norm, Tensor scale, Tensor good, Tensor skipped, float growth, float backoff, "
    "int interval) -> (Tensor, Tensor, Tensor)",
    # padding of a dim seen as (outer, padded), of which the first `real` entries are the model's: a value in it, the
    # dim without it, and the dim with zeros in it
    "fill_pad(Tensor x, int dim, int outer, int real, int padded, float value) -> Tensor",
    "cut_pad(Tensor x, int dim, int outer, int real, int padded) -> Tensor",
    "grow_pad(Tensor x, int dim, int outer, int real, int padded) -> Tensor",
    # a value on its way to where a plan's `offload` line keeps what it names, and back into the memory that computes
    "store(Tensor x, str what) -> Tensor",
    "load(Tensor x, str what) -> Tensor",
    # a typed conversion such as P -> I over "dp,tp", on the global shape; a collective when programs are emitted;
    # packed rows have `chosen` beside them, as it is split before and after
    "convert(Tensor x, str axes, str source, str result, Tensor? before=None, Tensor? after=None) -> Tensor",
    # experts without a capacity: tokens [t, h] as packed rows, `top` for each token, and the sum of a token's rows;
    # chosen is [e, t]
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
    # experts with a capacity: the token in each slot [e, b, c], as its position in the sequence or -1; chosen is [e, b,
    # s], and marks each token `top` times
    "slots(Tensor chosen, int capacity, int top) -> Tensor",
    # tokens [b, s, h] in their slots [e, b, c, h], and the sum of a token's slots over experts
    "dispatch(Tensor x, Tensor slots) -> Tensor",
    "combine(Tensor rows, Tensor slots, int tokens) -> Tensor",
    # numbers [e, b, s] of experts and tokens in the slots of these, and back, with zeros elsewhere
    "pick_slots(Tensor x, Tensor slots) -> Tensor",
    "unpick_slots(Tensor x, Tensor slots, int tokens) -> Tensor",
)
for _schema in _SCHEMAS:
    LIBRARY.define(_schema)
OPS: Any = torch.ops.parc
aten: Any = torch.ops.aten
NO_CLASS = -(1 << 62)
"""The class that a token loss ignores where its targets are all counted: the model fails at any that is no class."""


# ---- shape-only kernels

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _shape_kernel(name: str) -> Callable[[_Function], _Function]:
    """Register the shape-only kernel of an operator."""

    def register(function: _Function) -> _Function:
        torch.library.register_fake(f"parc::{name}", function, lib=LIBRARY)
        return function

    return register


def _check(fits: bool, op: str) -> None:
    if not fits:
        raise ValueError(f"parc.{op}: the operands' shapes do not fit each other")


def _check_attention(q: Any, k: Any, v: Any, mask: Any) -> None:
    fits = k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1] and q.shape[0] == k.shape[0]
    _check(fits and q.shape[1] % k.shape[1] == 0, "attention")
    if mask is not None:
        scores = (*q.shape[:-1], k.shape[2])
        _check(all(m in (1, s) for m, s in zip(reversed(mask.shape), reversed(scores), strict=False)), "attention")


@_shape_kernel("attention")
def _(q: Any, k: Any, v: Any, mask: Any, key: Any, causal: bool, scale: float | None, p: float) -> Any:
    _check_attention(q, k, v, mask)
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@_shape_kernel("attention_backward")
def _(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, key: Any, out: Any, lse: Any, causal: bool, scale: Any, p: float
) -> Any:
    _check_attention(q, k, v, mask)
    _check(grad.shape == out.shape == (*q.shape[:-1], v.shape[-1]) and lse.shape == q.shape[:-1], "attention_backward")
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


@_shape_kernel("stream_key")
def _(rng: Any, name: str, seed: int) -> Any:
    return rng.new_empty((), dtype=torch.int64)


@_shape_kernel("dropout_mask")
@_shape_kernel("random")
def _(key: Any, size: Any, how: Any, dtype: torch.dtype) -> Any:
    return key.new_empty(size, dtype=dtype)


@_shape_kernel("slots")
def _(chosen: Any, capacity: int, top: int) -> Any:
    return chosen.new_empty((*chosen.shape[:2], capacity), dtype=torch.int64)


@_shape_kernel("iota")
def _(size: Any, start: int, step: int, dtype: torch.dtype) -> Any:
    return torch.empty(size, dtype=dtype)


@_shape_kernel("lookup_backward")
def _(grad: Any, index: Any, rows: Any, padding: int) -> Any:
    _check(grad.shape[:-1] == index.shape, "lookup_backward")
    return grad.new_empty(rows, grad.shape[-1])


@_shape_kernel("token_loss")
def _(logits: Any, targets: Any, ignore: int) -> Any:
    _check(logits.shape[:-1] == targets.shape, "token_loss")
    return logits.new_empty(targets.shape)


@_shape_kernel("row_terms")
def _(logits: Any, targets: Any) -> Any:
    _check(logits.shape[:-1] == targets.shape, "row_terms")
    return logits.new_empty(targets.shape), logits.new_empty(targets.shape)


@_shape_kernel("loss_parts")
def _(logits: Any, peak: Any, targets: Any) -> Any:
    _check(peak.shape == (*targets.shape, 1) and logits.shape[:-1] == targets.shape, "loss_parts")
    return logits.new_empty(2, *targets.shape)


@_shape_kernel("loss_parts_backward")
def _(grad: Any, logits: Any, peak: Any, targets: Any) -> Any:
    _check(peak.shape == (*targets.shape, 1) and logits.shape[:-1] == targets.shape, "loss_parts_backward")
    _check(grad.shape == (2, *targets.shape), "loss_parts_backward")
    return logits.new_empty(logits.shape)


@_shape_kernel("square_sum")
def _(x: Any) -> Any:
    return x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))


@_shape_kernel("next_loss_scale")
def _(norm: Any, scale: Any, good: Any, skipped: Any, growth: float, backoff: float, interval: int) -> Any:
    _check(not any(x.shape for x in (norm, scale, good, skipped)), "next_loss_scale")
    return scale.new_empty(()), good.new_empty(()), skipped.new_empty(())


def _resized(x: Any, dim: int, before: int, after: int, op: str) -> Any:
    _check(x.shape[dim] % before == 0, op)
    return x.new_empty(*x.shape[:dim], x.shape[dim] // before * after, *x.shape[dim + 1 :])


@_shape_kernel("cut_pad")
def _(x: Any, dim: int, outer: int, real: int, padded: int) -> Any:
    return _resized(x, dim, padded, real, "cut_pad")


@_shape_kernel("grow_pad")
def _(x: Any, dim: int, outer: int, real: int, padded: int) -> Any:
    return _resized(x, dim, real, padded, "grow_pad")


_SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {
    "lookup": lambda table, index, padding: (*index.shape, table.shape[-1]),
    "row_max": lambda logits, axes: (*logits.shape[:-1], 1),
    **dict.fromkeys(("fill_pad", "convert", "store", "load", "route"), lambda x, *options: x.shape),
    "pack": lambda x, chosen, top: (chosen.numel(), x.shape[1]),
    "unpack": lambda rows, chosen, top: (chosen.shape[1], rows.shape[1]),
    "pick": lambda x, chosen, top: (chosen.numel(), 1),
    "unpick": lambda rows, chosen, top: chosen.shape,
    "spread": lambda x, chosen, top: (chosen.numel(), x.shape[1]),
    "expert_sum": lambda rows, chosen, top: (chosen.shape[0], rows.shape[1]),
    "expert_linear": lambda rows, chosen, weight, transposed, top: (
        chosen.numel(), weight.shape[2 if transposed else 1],
    ),
    "expert_outer": lambda rows, grad, chosen, transposed, top: (
        chosen.shape[0], *(x.shape[1] for x in ((rows, grad) if transposed else (grad, rows))),
    ),
    "dispatch": lambda x, slots: (*slots.shape, x.shape[2]),
    "combine": lambda rows, slots, tokens: (rows.shape[1], tokens, rows.shape[3]),
    "pick_slots": lambda x, slots: slots.shape,
    "unpick_slots": lambda x, slots, tokens: (*slots.shape[:2], tokens),
}  # fmt: skip
"""The shapes of results that have the dtype of the first operand."""


def _empty_of(shape: Callable[..., tuple[int, ...]]) -> Callable[..., Any]:
    """Return the kernel that makes an empty tensor of a shape, like the first operand."""
    return lambda first, *others: first.new_empty(shape(first, *others))


for _name, _shape in _SHAPES.items():
    _shape_kernel(_name)(_empty_of(_shape))


# ---- gradients


def _gradient(name: str, backward: Any, setup: Any) -> None:
    torch.library.register_autograd(f"parc::{name}", backward, setup_context=setup, lib=LIBRARY)


def _attention_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, key, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, mask, key, *output)


def _attention_gradient(ctx: Any, grad: Any, _: Any) -> Any:
    gradients = OPS.attention_backward.default(grad, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None, None


def _loss_gradient(ctx: Any, grad: Any) -> Any:
    return OPS.loss_parts_backward.default(grad, *ctx.saved_tensors), None, None


def _convert_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.axes, ctx.source, ctx.result, *chosen = inputs
    ctx.save_for_backward(*(mask for mask in chosen if mask is not None))


def _convert_gradient(ctx: Any, grad: Any) -> Any:
    """Return the dual conversion: source and result change places, R and P swap."""
    source, result = (str(dual(parse_kind(text))) for text in (ctx.result, ctx.source))
    chosen = reversed(ctx.saved_tensors)
    return OPS.convert.default(grad, ctx.axes, source, result, *chosen), None, None, None, None, None


def _expert_linear_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.transposed, ctx.top = inputs
    ctx.save_for_backward(*tensors)


def _expert_linear_gradient(ctx: Any, grad: Any) -> Any:
    (rows, chosen, weight), transposed, top = ctx.saved_tensors, ctx.transposed, ctx.top
    of_rows, _, of_weight, *_ = ctx.needs_input_grad
    return (
        OPS.expert_linear.default(grad, chosen, weight, not transposed, top) if of_rows else None,
        None,
        OPS.expert_outer.default(rows, grad, chosen, transposed, top) if of_weight else None,
        None,
        None,
    )


def _linear_gradient(name: str, other: str, options: Callable[[Any], tuple[Any, ...]]) -> None:
    """Register the gradient of an operator that is linear in its first operand: another operator on the gradient, the
    other tensors, and ``options(inputs)``."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options, ctx.others = options(inputs), len(inputs) - 1
        ctx.save_for_backward(*(item for item in inputs[1:] if isinstance(item, torch.Tensor)))

    def backward(ctx: Any, grad: Any) -> Any:
        gradient = getattr(OPS, other).default(grad, *ctx.saved_tensors, *ctx.options)
        return gradient, *(None,) * ctx.others

    _gradient(name, backward, setup)


_gradient("attention", _attention_gradient, _attention_setup)
_gradient("loss_parts", _loss_gradient, lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
_gradient("convert", _convert_gradient, _convert_setup)
_gradient("expert_linear", _expert_linear_gradient, _expert_linear_setup)
_linear_gradient("lookup", "lookup_backward", lambda inputs: (inputs[0].shape[0], inputs[2]))
_linear_gradient("fill_pad", "fill_pad", lambda inputs: (*inputs[1:5], 0.0))  # what was written over has none
for _name, _other in ("cut_pad", "grow_pad"), ("grow_pad", "cut_pad"):
    _linear_gradient(_name, _other, lambda inputs: inputs[1:])
for _name, _other in ("pack", "unpack"), ("pick", "unpick"), ("spread", "expert_sum"):
    _linear_gradient(_name, _other, lambda inputs: inputs[2:])
    _linear_gradient(_other, _name, lambda inputs: inputs[2:])
_linear_gradient("dispatch", "combine", lambda inputs: (inputs[0].shape[1],))
_linear_gradient("pick_slots", "unpick_slots", lambda inputs: (inputs[0].shape[2],))
for _name, _other in ("route", "route"), ("combine", "dispatch"), ("unpick_slots", "pick_slots"):
    _linear_gradient(_name, _other, lambda inputs: ())
