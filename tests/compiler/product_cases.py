"""Strategies that draw valid calls of products, convolutions and pools."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from .op_cases import Draw, Maker, named

# ---- contractions and convolutions


def _sized(g: Draw, *terms: str) -> list[torch.Tensor]:
    """Draw tensors of terms such as "mk": one size per letter; "*" are batch dims, which broadcast."""
    sizes = {letter: g.size() for term in terms for letter in term if letter != "*"}
    batch = g.shape(0, 2)
    return [
        g.n(*(n for letter in term for n in (g.narrowed(batch) if letter == "*" else (sizes[letter],))))
        for term in terms
    ]


def product_of(*terms: str) -> Maker:
    return lambda g: tuple(_sized(g, *terms))


def added(result: str, *terms: str) -> Maker:
    """Return the maker of calls whose first operand broadcasts to the result."""

    def make(g: Draw) -> tuple[Any, ...]:
        x, *rest = _sized(g, result, *terms)
        return (g.n(*g.narrowed(x.shape)), *rest, {"beta": 0.5, "alpha": 2.0})

    return make


def _linear(g: Draw) -> tuple[Any, ...]:
    lead, n, k = g.shape(0, 2), g.size(), g.size()
    bias = [g.n(n)] if g.flag() else []
    return g.n(*lead, k), g.n(n, k), *bias


def _matmul(g: Draw) -> tuple[Any, ...]:
    return tuple(
        _sized(g, *g.pick(("k", "k"), ("*mk", "k"), ("k", "*kn"), ("*mk", "kn"), ("*mk", "*kn"), ("mk", "*kn")))
    )


def _einsum(g: Draw) -> tuple[Any, ...]:
    equation = g.pick(
        "ij,jk->ik", "bij,bjk", "bhsd,bhtd->bhst", "i,j->ij", "ijk->ki", "ab,bc,cd->ad", "ii->i", "...ij,...jk"
    )
    terms = equation.split("->")[0].replace("...", "*").split(",")
    return equation, _sized(g, *terms)


def _conv(space: int, *, composite: bool) -> Maker:
    def make(g: Draw) -> tuple[Any, ...]:
        groups, each_in, each_out = g.pick(1, 1, 2, 6), g.pick(1, 2, 6), g.pick(1, 2, 6)
        transposed = not composite and g.flag()
        x = g.n(*((g.size(),) if not composite or g.flag() else ()), groups * each_in, *[4] * space)
        shape = (groups * each_in, each_out) if transposed else (groups * each_out, each_in)
        bias = g.n(groups * each_out) if g.flag() else None
        ones, zeros = [1] * space, [0] * space
        if composite:
            return x, g.n(*shape, *[2] * space), bias, ones, zeros, ones, groups
        return x, g.n(*shape, *[2] * space), bias, ones, zeros, ones, transposed, zeros, groups

    return make


def _conv_padded(space: int) -> Maker:
    def make(g: Draw) -> tuple[Any, ...]:
        x, weight, bias, ones, _, dilation, groups = _conv(space, composite=True)(g)
        return x, weight, bias, ones, "valid", dilation, groups

    return make


def _conv_backward(g: Draw) -> tuple[Any, ...]:
    x, weight, bias, *rest = _conv(1, composite=False)(g)
    out = torch.ops.aten.convolution.default(x, weight, bias, *rest)
    mask = [True, True, bias is not None]
    return g.n(*out.shape), x, weight, None if bias is None else list(bias.shape), *rest, mask


def _over_space(space: int) -> dict[str, Maker]:
    """Return the makers of pools, pads and resizes, and of their gradients, which get the forward's arguments."""
    ones, zeros, pads = [1] * space, [0] * space, [1] * (2 * space)
    name = {1: "linear1d", 2: "bilinear2d bicubic2d", 3: "trilinear3d"}[space].split()
    resizes: dict[str, list[Any]] = {f"upsample_{kind}": [[6] * space, False] for kind in name}
    resizes |= {f"upsample_nearest{space}d": [[6] * space], f"_upsample_nearest_exact{space}d": [[6] * space]}
    pools = {
        f"max_pool{space}d_with_indices": ([2] * space, [2] * space, zeros, ones, False),
        f"adaptive_max_pool{space}d": ([3] * space,),
        f"avg_pool{space}d": ([2] * space, [2] * space, zeros, False, True, None),
        f"_adaptive_avg_pool{space}d": ([3] * space,),
    }
    padded = {f"reflection_pad{space}d": (pads,), f"replication_pad{space}d": (pads,)}

    def of(op: str, rest: Sequence[Any], *, back: bool) -> Maker:
        def make(g: Draw) -> tuple[Any, ...]:
            x = g.n(g.size(), g.size(), *[4] * space)
            if not back:
                return x, *rest
            made = getattr(torch.ops.aten, op).default(x, *rest)
            out, indices = made if isinstance(made, tuple) else (made, None)
            grad = g.n(*out.shape)
            if op in resizes:
                return grad, rest[0], list(x.shape), *rest[1:]
            kept = () if op.startswith(("adaptive", "_adaptive")) else rest
            return grad, x, *kept, *([] if indices is None else [indices])

        return make

    every = {**resizes, **padded, **(pools if space > 1 else {})}
    return {
        f"aten.{op}{suffix}.default": of(op, rest, back=bool(suffix))
        for op, rest in every.items()
        for suffix in ("", "_backward")
    }


def _distances(g: Draw) -> tuple[Any, ...]:
    x, y = _sized(g, "bmd", "bnd")
    return x, y, 2.0, None


def _distances_backward(g: Draw) -> tuple[Any, ...]:
    x, y, p, _ = _distances(g)
    made = torch.ops.aten._cdist_forward.default(x, y, p, None)
    return g.n(*made.shape), x, y, p, made


def _grouped(g: Draw) -> tuple[Any, ...]:
    importlib.import_module("transformers.integrations.moe")  # registers the operators
    tokens, experts, k, n = g.size(), g.pick(1, 2, 3), g.size(), g.size()
    ends = g.i(tokens + 1, experts).sort().values
    ends[-1] = tokens
    return g.n(tokens, k), g.n(experts, k, n), ends.int()


def _grouped_backward(g: Draw) -> tuple[Any, ...]:
    x, weight, ends = _grouped(g)
    return x, weight, ends, g.n(x.shape[0], weight.shape[2])


CONTRACTIONS: dict[str, Maker] = {
    "transformers.grouped_mm_fallback.default": _grouped,
    "transformers.grouped_mm_fallback_backward.default": _grouped_backward,
    **_over_space(1),
    **_over_space(2),
    **_over_space(3),
    **named("_cdist_forward", _distances),
    **named("_cdist_backward", _distances_backward),
    **named("mm", product_of("mk", "kn")),
    **named("bmm", product_of("bmk", "bkn")),
    **named("mv", product_of("mk", "k")),
    **named("dot vdot", product_of("k", "k")),
    **named("outer", product_of("m", "n")),
    **named("addmm", added("mn", "mk", "kn")),
    **named("addmv", added("m", "mk", "k")),
    **named("addr", added("mn", "m", "n")),
    **named("baddbmm", added("bmn", "bmk", "bkn")),
    **named("addbmm", added("mn", "bmk", "bkn")),
    **named("linear", _linear),
    **named("matmul", _matmul),
    **named("einsum", _einsum),
    **{f"aten.conv{space}d.default": _conv(space, composite=True) for space in (1, 2, 3)},
    **{f"aten.conv{space}d.padding": _conv_padded(space) for space in (1, 2, 3)},
    **named("convolution", _conv(1, composite=False)),
    **named("convolution_backward", _conv_backward),
}
