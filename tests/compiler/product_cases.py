"""Draws valid applications of products, convolutions and pools."""

import importlib
from typing import Any

import torch

from .op_cases import Draw, Maker, named

# ---- contractions and convolutions


def _sized(g: Draw, *terms: str) -> list[torch.Tensor]:
    """Tensors of terms such as "mk": one size per letter; "*" are batch dims, which broadcast."""
    sizes = {letter: g.size() for term in terms for letter in term if letter != "*"}
    batch = g.shape(0, 2)
    return [
        g.n(*(n for letter in term for n in (g.narrowed(batch) if letter == "*" else (sizes[letter],))))
        for term in terms
    ]


def product_of(*terms: str) -> Maker:
    return lambda g: tuple(_sized(g, *terms))


def added(result: str, *terms: str) -> Maker:
    """The first operand broadcasts to the result."""

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


def _image(g: Draw, space: int = 2) -> torch.Tensor:
    return g.n(*g.shape(1 if space == 2 else 2, 2), *[4] * space)


def _max_pool_backward(g: Draw) -> tuple[Any, ...]:
    x = _image(g)
    out, indices = torch.ops.aten.max_pool2d_with_indices.default(x, [2, 2])
    return g.n(*out.shape), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


def _avg_pool_backward(g: Draw) -> tuple[Any, ...]:
    x = _image(g)
    return g.n(*x.shape[:-2], 2, 2), x, [2, 2], [2, 2], [0, 0], False, True, None


def _adaptive_backward(g: Draw) -> tuple[Any, ...]:
    x = _image(g)
    return g.n(*x.shape[:-2], 2, 2), x


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
    **named("max_pool2d_with_indices avg_pool2d", lambda g: (_image(g), [2, 2])),
    **named("adaptive_avg_pool2d _adaptive_avg_pool2d", lambda g: (_image(g), [2, 3])),
    **named("avg_pool1d adaptive_avg_pool1d", lambda g: (_image(g, 1), [2])),
    **named("max_pool2d_with_indices_backward", _max_pool_backward),
    **named("avg_pool2d_backward", _avg_pool_backward),
    **named("_adaptive_avg_pool2d_backward", _adaptive_backward),
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
