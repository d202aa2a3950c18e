"""Strategies that draw valid calls of the operators that models are made of: normalisations, losses, attention."""

from typing import Any

import torch

from .op_cases import Draw, Maker, named

# ---- normalisations


def _normalized(g: Draw) -> tuple[tuple[int, ...], list[int]]:
    shape = g.shape(1)
    return shape, list(shape[g.pick(*range(len(shape))) :])


def _layer_norm(g: Draw) -> tuple[Any, ...]:
    shape, last = _normalized(g)
    affine = [g.n(*last) if g.flag() else None for _ in range(2)]
    return g.n(*shape), last, *affine, 1e-5


def _rms_norm(g: Draw) -> tuple[Any, ...]:
    shape, last = _normalized(g)
    return g.n(*shape), last, g.n(*last) if g.flag() else None, 1e-5


def _layer_norm_backward(g: Draw) -> tuple[Any, ...]:
    shape, last = _normalized(g)
    x = g.n(*shape)
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, last, None, None, 1e-5)
    weight, bias = g.n(*last) if g.flag() else None, g.n(*last) if g.flag() else None
    mask = [g.flag(), weight is not None and g.flag(), bias is not None]
    return g.n(*shape), x, last, mean, rstd, weight, bias, mask if any(mask) else [True, False, False]


def _grouped(g: Draw) -> tuple[torch.Tensor, int, list[Any]]:
    groups, each = g.pick(1, 2, 6, 3), g.pick(1, 2, 6)
    x = g.n(g.size(), groups * each, *g.shape(1, 2))
    return x, groups, [g.n(groups * each) if g.flag() else None for _ in range(2)]


def _sizes(x: torch.Tensor, groups: int) -> tuple[int, ...]:
    return x.shape[0], x.shape[1], x[0, 0].numel(), groups


def _group_norm(g: Draw) -> tuple[Any, ...]:
    x, groups, affine = _grouped(g)
    return x, groups, *affine, 1e-5


def _native_group_norm(g: Draw) -> tuple[Any, ...]:
    x, groups, affine = _grouped(g)
    return x, *affine, *_sizes(x, groups), 1e-5


def _group_norm_backward(g: Draw) -> tuple[Any, ...]:
    x, groups, (weight, _) = _grouped(g)
    _, mean, rstd = torch.ops.aten.native_group_norm.default(x, None, None, *_sizes(x, groups), 1e-5)
    return g.n(*x.shape), x, mean, rstd, weight, *_sizes(x, groups), [True, weight is not None, weight is not None]


def _batch(g: Draw) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = g.n(g.pick(6, 4, 2), g.size(), *g.shape(0, 2))
    return x, [g.f(x.shape[1]) for _ in range(4)]


def _batch_norm(*flags: str) -> Maker:
    """Draw the arguments of a batch norm. `flags` come after x: "affine", "running" statistics, "training"; then
    momentum and eps."""

    def make(g: Draw) -> tuple[Any, ...]:
        x, (weight, bias, mean, var) = _batch(g)
        affine = [weight, bias] if g.flag() else [None, None]
        running = [mean, var] if "running" in flags else []
        training = [g.flag() or "running" not in flags] if "training" in flags else []
        return x, *affine, *running, *training, 0.1, 1e-5, *([False] if "cudnn" in flags else [])

    return make


def _batch_norm_backward(g: Draw) -> tuple[Any, ...]:
    x, (weight, mean, var, save) = _batch(g)
    return g.n(*x.shape), x, weight, mean, var, save, save + 0.5, g.flag(), 1e-5, [True, True, True]


NORMALISATION: dict[str, Maker] = {
    **named("layer_norm native_layer_norm", _layer_norm),
    **named("native_layer_norm_backward", _layer_norm_backward),
    **named("rms_norm _fused_rms_norm", _rms_norm),
    **named("group_norm", _group_norm),
    **named("native_group_norm", _native_group_norm),
    **named("native_group_norm_backward", _group_norm_backward),
    **named("batch_norm", _batch_norm("running", "training", "cudnn")),
    **named("_native_batch_norm_legit_functional", _batch_norm("running", "training")),
    **named("_native_batch_norm_legit.no_stats", _batch_norm("training")),
    **named("_native_batch_norm_legit_no_training", _batch_norm("running")),
    **named("native_batch_norm_backward", _batch_norm_backward),
}


# ---- losses


def _pair(*optional: str, before: int = 0) -> Maker:
    """Draw `(grad if before, x, y, weights that broadcast, reduction)`."""

    def make(g: Draw) -> tuple[Any, ...]:
        shape, reduction = g.shape(), g.pick(0, 1, 2)
        grad = [g.n(*(shape if reduction == 0 else ()))] * before
        weights = [g.f(*g.narrowed(shape)) if g.flag() else None for _ in optional]
        return *grad, g.f(*shape), g.f(*shape), *weights, reduction

    return make


def _with(make: Maker, *more: Any) -> Maker:
    return lambda g: (*make(g), *more)


def _scores(g: Draw, spatial: int | None) -> tuple[torch.Tensor, torch.Tensor, list[Any], int]:
    """Draw scores, targets (one of them ignored), class weights or None, and a reduction."""
    c = g.pick(6, 4, 2)
    space = [g.size() for _ in range(spatial or 0)]
    lead = [g.size()] if spatial is not None else []
    x = g.n(*lead, c, *space).log_softmax(len(lead))
    target = g.i(c, *lead, *space)
    if target.numel() > 1:
        target.flatten()[0] = -100
    return x, target, [g.f(c) if g.flag() else None], g.pick(0, 1, 2)


def _cross_entropy(g: Draw) -> tuple[Any, ...]:
    x, target, weight, reduction = _scores(g, g.pick(None, 0, 0, 1))
    soft = g.pick(False, False, True)
    return x, g.f(*x.shape) if soft else target, *weight, reduction, -100, g.pick(0.0, 0.1)


def _nll(spatial: int | None) -> Maker:
    def make(g: Draw) -> tuple[Any, ...]:
        x, target, weight, reduction = _scores(g, spatial)
        return x, target, *weight, reduction, -100

    return make


def _nll_backward(spatial: int) -> Maker:
    def make(g: Draw) -> tuple[Any, ...]:
        x, target, weight, reduction = _scores(g, spatial)
        grad = g.n(*(target.shape if reduction == 0 else ()))
        return grad, x, target, *weight, reduction, -100, g.f()

    return make


LOSSES: dict[str, Maker] = {
    **named("mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss", _pair()),
    **named("binary_cross_entropy", _pair("weight")),
    **named("binary_cross_entropy_with_logits", _pair("weight", "pos_weight")),
    **named("mse_loss_backward soft_margin_loss_backward", _pair(before=1)),
    **named("smooth_l1_loss_backward huber_loss_backward", _with(_pair(before=1), 0.5)),
    **named("binary_cross_entropy_backward", _pair("weight", before=1)),
    **named("cross_entropy_loss", _cross_entropy),
    **named("nll_loss nll_loss_forward", _nll(0)),
    **named("nll_loss_nd", _nll(0)),
    **named("nll_loss2d_forward", _nll(2)),
    **named("nll_loss_backward", _nll_backward(0)),
    **named("nll_loss2d_backward", _nll_backward(2)),
}


# ---- attention


def _attention(g: Draw) -> tuple[Any, ...]:
    batch = g.shape(1, 1)
    heads, repeats = g.pick(1, 2, 6), g.pick(1, 2, 6)
    s, t, d, e = (g.pick(1, 2, 6, 4) for _ in range(4))
    causal = g.pick(False, False, True)
    queries = heads * repeats
    mask = None if causal else g.n(*g.narrowed((*batch, queries, s, t))) if g.flag() else None
    if mask is not None and mask.dim() < 2:
        mask = g.n(s, t)
    q, k, v = g.n(*batch, queries, s, d), g.n(*batch, heads, t, d), g.n(*batch, heads, t, e)
    return q, k, v, mask, 0.0, causal, {"enable_gqa": repeats > 1}


ATTENTION: dict[str, Maker] = named("scaled_dot_product_attention", _attention)

MODEL: dict[str, Maker] = {**NORMALISATION, **LOSSES, **ATTENTION}
