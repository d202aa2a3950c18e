"""parc's own operators: attention, counter-based randomness, sharded lookups and losses, and typed conversions.

They exist where aten's operator would bake in a device, a rank's random state or whole logits. Each has a shape-only
kernel for tracing and its gradient; ``kernels.py`` computes them, since some need to know which rank computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..layout.placement import dual, parse_kind

LIBRARY = torch.library.Library("parc", "FRAGMENT")

_GRAPH_SCHEMAS = (
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
    # a typed conversion such as P -> I over "dp,tp", on the global shape; a collective when programs are emitted
    # packed rows have what is chosen beside them, as they are split before and after
    "convert(Tensor x, str axes, str source, str result, Tensor? before=None, Tensor? after=None) -> Tensor",
)
for _schema in _GRAPH_SCHEMAS:
    LIBRARY.define(_schema)
OPS: Any = torch.ops.parc
aten: Any = torch.ops.aten

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _fake(name: str) -> Callable[[_Function], _Function]:
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


@_fake("attention")
def _(q: Any, k: Any, v: Any, mask: Any, key: Any, causal: bool, scale: float | None, p: float) -> Any:
    _check_attention(q, k, v, mask)
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@_fake("attention_backward")
def _(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, key: Any, out: Any, lse: Any, causal: bool, scale: Any, p: float
) -> Any:
    _check_attention(q, k, v, mask)
    _check(grad.shape == out.shape == (*q.shape[:-1], v.shape[-1]) and lse.shape == q.shape[:-1], "attention_backward")
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


@_fake("stream_key")
def _(rng: Any, name: str, seed: int) -> Any:
    return rng.new_empty((), dtype=torch.int64)


@_fake("dropout_mask")
@_fake("random")
def _(key: Any, size: Any, how: Any, dtype: torch.dtype) -> Any:
    return key.new_empty(size, dtype=dtype)


@_fake("iota")
def _(size: Any, start: int, step: int, dtype: torch.dtype) -> Any:
    return torch.empty(size, dtype=dtype)


@_fake("lookup")
def _(table: Any, index: Any, padding: int) -> Any:
    return table.new_empty(*index.shape, table.shape[-1])


@_fake("lookup_backward")
def _(grad: Any, index: Any, rows: Any, padding: int) -> Any:
    _check(grad.shape[:-1] == index.shape, "lookup_backward")
    return grad.new_empty(rows, grad.shape[-1])


@_fake("token_loss")
def _(logits: Any, targets: Any, ignore: int) -> Any:
    _check(logits.shape[:-1] == targets.shape, "token_loss")
    return logits.new_empty(targets.shape)


@_fake("row_max")
def _(logits: Any, axes: str) -> Any:
    return logits.new_empty(*logits.shape[:-1], 1)


@_fake("loss_parts")
def _(logits: Any, peak: Any, targets: Any) -> Any:
    _check(peak.shape == (*targets.shape, 1) and logits.shape[:-1] == targets.shape, "loss_parts")
    return logits.new_empty(2, *targets.shape)


@_fake("loss_parts_backward")
def _(grad: Any, logits: Any, peak: Any, targets: Any) -> Any:
    _check(peak.shape == (*targets.shape, 1) and logits.shape[:-1] == targets.shape, "loss_parts_backward")
    _check(grad.shape == (2, *targets.shape), "loss_parts_backward")
    return logits.new_empty(logits.shape)


@_fake("square_sum")
def _(x: Any) -> Any:
    return x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))


@_fake("next_loss_scale")
def _(norm: Any, scale: Any, good: Any, skipped: Any, growth: float, backoff: float, interval: int) -> Any:
    _check(not any(x.shape for x in (norm, scale, good, skipped)), "next_loss_scale")
    return scale.new_empty(()), good.new_empty(()), skipped.new_empty(())


@_fake("fill_pad")
@_fake("convert")
@_fake("store")
@_fake("load")
def _(x: Any, *options: Any) -> Any:
    return x.new_empty(x.shape)


def _resized(x: Any, dim: int, before: int, after: int, op: str) -> Any:
    _check(x.shape[dim] % before == 0, op)
    return x.new_empty(*x.shape[:dim], x.shape[dim] // before * after, *x.shape[dim + 1 :])


@_fake("cut_pad")
def _(x: Any, dim: int, outer: int, real: int, padded: int) -> Any:
    return _resized(x, dim, padded, real, "cut_pad")


@_fake("grow_pad")
def _(x: Any, dim: int, outer: int, real: int, padded: int) -> Any:
    return _resized(x, dim, real, padded, "grow_pad")


def _gradient(name: str, backward: Any, setup: Any) -> None:
    torch.library.register_autograd(f"parc::{name}", backward, setup_context=setup, lib=LIBRARY)


def _attention_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, key, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, mask, key, *output)


def _attention_backward(ctx: Any, grad: Any, _: Any) -> Any:
    gradients = OPS.attention_backward.default(grad, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None, None


def _lookup_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.rows, ctx.padding = inputs[0].shape[0], inputs[2]
    ctx.save_for_backward(inputs[1])


def _lookup_backward(ctx: Any, grad: Any) -> Any:
    return OPS.lookup_backward.default(grad, ctx.saved_tensors[0], ctx.rows, ctx.padding), None, None


def _loss_backward(ctx: Any, grad: Any) -> Any:
    return OPS.loss_parts_backward.default(grad, *ctx.saved_tensors), None, None


def _convert_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.axes, ctx.source, ctx.result, *chosen = inputs
    ctx.save_for_backward(*(mask for mask in chosen if mask is not None))


def _convert_backward(ctx: Any, grad: Any) -> Any:
    """Return the dual conversion: source and result change places, R and P swap."""
    source, result = (str(dual(parse_kind(text))) for text in (ctx.result, ctx.source))
    chosen = reversed(ctx.saved_tensors)
    return OPS.convert.default(grad, ctx.axes, source, result, *chosen), None, None, None, None, None


def _pad_gradient(name: str, backward: Any, *options: float) -> None:
    """Register the gradient of an operator on named padding: another operator on the same padding."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.pad = inputs[1:5]

    _gradient(name, lambda ctx, grad: (backward(grad, *ctx.pad, *options), *(None,) * (4 + len(options))), setup)


_gradient("attention", _attention_backward, _attention_setup)
_gradient("lookup", _lookup_backward, _lookup_setup)
_gradient("loss_parts", _loss_backward, lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
_gradient("convert", _convert_backward, _convert_setup)
_pad_gradient("fill_pad", OPS.fill_pad.default, 0.0)  # what was written over has no gradient
_pad_gradient("cut_pad", OPS.grow_pad.default)
_pad_gradient("grow_pad", OPS.cut_pad.default)


# ---- operators of experts: rows of tokens packed by the experts that were chosen for them.
# A packed value is an array of [experts, tokens, …], seen as [experts * tokens, …], of which only the rows that
# ``chosen`` marks are there, in their order: all rows of the first expert, then those of the second. So it is split
# like any array: over tokens, where a rank packs its own tokens for all experts, or over experts, where it holds what
# all tokens send to its own. Shapes in programs count all rows; tensors have those that are there.


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


# ---- operators of experts with a capacity: tokens in the slots that an expert has for each sequence.
# An expert takes the first ``capacity`` tokens of a sequence that choose it, in their order; others go without it. So
# its rows are an array of a fixed shape, [experts, sequences, capacity, ...], with zeros in slots that nobody takes
# (Lepikhin et al., "GShard", 2020, whose groups are sequences here).


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
