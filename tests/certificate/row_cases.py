"""The calls with which every row of torch's operators is compared: an operator, its arguments and its options."""

import math
from collections.abc import Callable
from typing import Any

import torch

from certificate.text import Name, Word

T = torch.Tensor


def real(*shape: int) -> T:
    return torch.randn(shape, dtype=torch.float64)


def above(*shape: int) -> T:
    """Return numbers between 0.1 and 0.9."""
    return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64)


def whole(most: int, *shape: int) -> T:
    return torch.randint(0, most, shape)


def odd(*shape: int) -> T:
    """Return numbers of which some are infinite, and one is none."""
    x = real(*shape)
    x.view(-1)[:4] = torch.tensor([math.inf, -math.inf, math.nan, 0])
    return x


def frozen(*shape: int) -> T:
    """Return numbers of a type that gets no gradient."""
    return whole(8, *shape).float() / 8


def flag(*shape: int) -> T:
    return torch.rand(shape) < 0.5


F64 = Word("torch.float64")
_ONE = ("exp", "neg", "square", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "relu", "erf", "abs", "softplus",
        "hardtanh", "hardsigmoid", "hardswish", "alias", "clone", "floor", "sign", "sgn")  # fmt: skip
_POSITIVE = "log", "sqrt", "rsqrt", "reciprocal", "acos"
_MORE = (
    "exp2", "expm1", "tan", "atan", "sinh", "cosh", "asinh", "sinc", "i0", "special_i0e", "special_i1", "special_i1e",
    "erfc", "mish", "elu", "selu", "celu", "leaky_relu", "hardshrink", "softshrink", "relu6", "ceil", "trunc", "frac",
    "round", "rad2deg", "deg2rad",
)  # fmt: skip
_MORE_POSITIVE = (
    "log1p", "log2", "log10", "asin", "atanh", "lgamma", "digamma", "erfinv", "logit", "special_logit",
)  # fmt: skip
_ODD = "isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit", "nan_to_num"
_TWO = "atan2", "hypot", "logaddexp", "logaddexp2"
_WITH_NUMBERS = (
    ("elu", [0.7, 1.5, 0.5]), ("celu", [0.7]), ("leaky_relu", [0.2]), ("hardshrink", [0.2]), ("softshrink", [0.2]),
    ("threshold", [0.1, 0.2]), ("logit", [0.2]),
)  # fmt: skip
_BACKWARD: tuple[tuple[str, list[Any]], ...] = (
    ("mish", []),
    ("leaky_relu", [0.2, False]),
    ("hardshrink", [0.2]),
    ("softshrink", [0.2]),
)
_SAMPLINGS: tuple[tuple[str, int, list[Any]], ...] = (
    *((f"{exact}{rank}d", rank, []) for exact in ("upsample_nearest", "_upsample_nearest_exact")
      for rank in (1, 2, 3)),
    ("upsample_linear1d", 1, [False, 1.7]), ("upsample_trilinear3d", 3, [True]), ("upsample_bicubic2d", 2, [False]),
)  # fmt: skip
_COMPARE = "ne", "eq", "lt", "le", "gt", "ge"

CASES: list[tuple[str, Callable[[], list[Any]], dict[str, Any]]] = [
    *((f"aten.{name}.default", lambda: [real(4, 6)], {}) for name in _ONE),
    *((f"aten.{name}.default", lambda: [above(4, 6)], {}) for name in _POSITIVE),
    *((f"aten.{name}.Scalar", lambda: [whole(3, 4, 6), 1], {}) for name in _COMPARE),
    *((f"aten.{name}.Tensor", lambda: [whole(3, 4, 6), whole(3, 6)], {}) for name in _COMPARE),
    *((f"aten.{name}.Tensor", lambda: [real(4, 6), above(6)], {}) for name in ("add", "sub", "mul", "div", "rsub")),
    *((f"aten.{name}.Tensor", lambda: [real(4, 1, 2), real(6, 1)], {"alpha": 3}) for name in ("add", "sub", "rsub")),
    *((f"aten.{name}.Scalar", lambda: [real(4, 6), 0.3], {}) for name in ("add", "sub", "mul", "div", "rsub")),
    ("aten.add.Tensor", lambda: [flag(4), whole(5, 4)], {}),
    ("aten.mul.Tensor", lambda: [flag(4, 2), flag(2)], {}),
    ("aten.div.Tensor_mode", lambda: [real(4, 6), 2], {"rounding_mode": "floor"}),
    ("aten.remainder.Scalar", lambda: [whole(99, 4, 6), 8], {}),
    ("aten.addcmul.default", lambda: [real(4, 6), real(6), real(4, 1)], {"value": 0.5}),
    *(("aten.pow.Tensor_Scalar", lambda e=e: [above(4, 6), e], {}) for e in (2, 3, -1, 0.5, 1.7, 0)),
    ("aten.pow.Scalar", lambda: [3, real(4, 6)], {}),
    ("aten.pow.Tensor_Tensor", lambda: [above(4, 6), real(6)], {}),
    ("aten.gelu.default", lambda: [real(4, 6)], {"approximate": "tanh"}),
    ("aten.tanh_backward.default", lambda: [real(4, 6), above(4, 6)], {}),
    ("aten.sigmoid_backward.default", lambda: [real(4, 6), above(4, 6)], {}),
    ("aten.silu_backward.default", lambda: [real(4, 6), real(4, 6)], {}),
    ("aten.gelu_backward.default", lambda: [real(4, 6), real(4, 6)], {}),
    ("aten.gelu_backward.default", lambda: [real(4, 6), real(4, 6)], {"approximate": "tanh"}),
    ("aten.softplus_backward.default", lambda: [real(4, 6), real(4, 6), 2, 1], {}),
    ("aten.softplus.default", lambda: [real(4, 6), 2, 1], {}),
    ("aten.hardtanh.default", lambda: [real(4, 6), -0.5, 0.2], {}),
    ("aten.hardtanh_backward.default", lambda: [real(4, 6), real(4, 6), -0.5, 0.2], {}),
    ("aten.hardsigmoid_backward.default", lambda: [real(4, 6), real(4, 6) * 4], {}),
    ("aten.hardswish_backward.default", lambda: [real(4, 6), real(4, 6) * 4], {}),
    ("aten.threshold_backward.default", lambda: [real(4, 6), real(4, 6), 0.1], {}),
    ("aten.clamp.default", lambda: [real(4, 6), -0.3, 0.4], {}),
    ("aten.clamp.default", lambda: [real(4, 6), None, 0.4], {}),
    ("aten.clamp.default", lambda: [real(4, 6), 0.4], {}),
    ("aten.clamp_min.default", lambda: [real(4, 6), 0.1], {}),
    ("aten.clamp_max.default", lambda: [real(4, 6), 0.1], {}),
    *((f"aten.{name}", lambda: [real(4, 6), real(6)], {}) for name in ("maximum.default", "minimum.default",
         "max.other", "min.other")),
    ("aten.maximum.default", lambda: [whole(3, 4).double(), whole(3, 4).double()], {}),
    *((f"aten.{name}", lambda: [flag(4, 6), flag(6)], {}) for name in ("__and__.Tensor", "bitwise_and.Tensor",
         "__or__.Tensor",
       "bitwise_or.Tensor", "logical_and.default", "logical_or.default")),
    ("aten.logical_and.default", lambda: [whole(2, 4, 6), whole(3, 6)], {}),
    ("aten.logical_or.default", lambda: [whole(2, 4, 6), whole(3, 6)], {}),
    ("aten.logical_not.default", lambda: [whole(3, 4, 6)], {}),
    ("aten.bitwise_not.default", lambda: [flag(4, 6)], {}),
    ("aten.where.self", lambda: [flag(4, 6), real(6), real(4, 1)], {}),
    ("aten.where.ScalarOther", lambda: [flag(4, 6), real(6), 2.5], {}),
    ("aten.where.ScalarSelf", lambda: [flag(4, 6), 2.5, real(6)], {}),
    ("aten.where.Scalar", lambda: [flag(4, 6), 2.5, -1.0], {}),
    ("aten.masked_fill.Scalar", lambda: [real(4, 6), flag(6), -7], {}),
    ("aten.sum.default", lambda: [real(4, 6)], {}),
    ("aten.sum.default", lambda: [flag(4, 6)], {}),
    ("aten.mean.default", lambda: [real(4, 6)], {}),
    *((f"aten.{name}", lambda dims=dims, keep=keep: [real(4, 2, 6), dims, keep], {})
      for name in ("sum.dim_IntList", "mean.dim") for dims in ([1], [-1, 0], []) for keep in (False, True)),
    ("aten.linalg_vector_norm.default", lambda: [real(4, 2, 6), 2, [-1, 0], True], {}),
    ("aten.linalg_vector_norm.default", lambda: [real(4, 6)], {}),
    *((f"aten.{name}", lambda: [real(4, 6, 2), 1], {}) for name in ("softmax.int", "log_softmax.int")),
    ("aten.logsumexp.default", lambda: [real(4, 6, 2), [1]], {}),
    ("aten.logsumexp.default", lambda: [real(4, 6, 2), [0, 2], True], {}),
    *((f"aten.{name}.default", lambda: [real(4, 6), -1, False], {}) for name in ("_softmax", "_log_softmax")),
    *((f"aten.{name}.default", lambda: [real(4, 6), above(4, 6), -1, F64], {}) for name in ("_softmax_backward_data",
         "_log_softmax_backward_data")),
    ("aten.mm.default", lambda: [real(4, 6), real(6, 8)], {}),
    ("aten.bmm.default", lambda: [real(2, 4, 6), real(2, 6, 8)], {}),
    ("aten.outer.default", lambda: [real(4), real(6)], {}),
    ("aten.addmm.default", lambda: [real(8), real(4, 6), real(6, 8)], {"beta": 2, "alpha": 0.5}),
    ("aten.baddbmm.default", lambda: [real(2, 1, 8), real(2, 4, 6), real(2, 6, 8)], {"beta": 2, "alpha": 0.5}),
    *(("aten.matmul.default", lambda a=a, b=b: [real(*a), real(*b)], {})
      for a, b in (((4,), (4,)), ((2, 4), (4,)), ((4,), (4, 6)), ((2, 1, 4, 6), (8, 6, 2)), ((2, 4, 6), (6, 8)), ((2,
           4, 6), (6,)))),
    ("aten.linear.default", lambda: [real(2, 4, 6), real(8, 6), real(8)], {}),
    ("aten.linear.default", lambda: [real(4, 6), real(8, 6)], {}),
    *(("aten.einsum.default", lambda equation=equation, shapes=shapes: [equation,
         [real(*shape) for shape in shapes]], {})
      for equation, shapes in (("nhwpqc->nchpwq", [(2, 4, 2, 2, 4, 2)]), ("bhlk,bhtk->bhlt", [(2, 2, 4, 6), (2, 2, 8,
           6)]),
        ("...qhd,...khd->...hqk", [(2, 1, 4, 2, 6), (2, 2, 8, 2, 6)]), ("bi,j->bij", [(2, 4), (6,)]), ("ij,jk,k->i",
             [(2, 4), (4, 6), (6,)]),
        ("ij->j", [(2, 4)]), ("ij,kj->k", [(2, 4), (6, 4)]))),
    ("aten.conv1d.default", lambda: [real(2, 4, 9), real(6, 4, 3), real(6), [2], [1]], {}),
    ("aten.conv1d.default", lambda: [real(2, 4, 8), real(4, 1, 3), None, [1], [2], [2], 4], {}),
    ("aten.conv2d.default", lambda: [real(2, 4, 6, 5), real(4, 2, 3, 2), None, [2, 1], [1, 0], [1, 2], 2], {}),
    ("aten.conv2d.padding", lambda: [real(2, 4, 6, 5), real(4, 4, 3, 2), real(4), [1, 1], "same"], {}),
    ("aten.conv2d.padding", lambda: [real(2, 2, 8, 8), real(4, 2, 4, 4), None, [4, 4]], {}),
    ("aten.convolution.default", lambda: [real(2, 4, 6, 5), real(6, 4, 3, 3), real(6), [1, 1], [1, 1], [1, 1], False,
         [0, 0], 1], {}),
    ("aten.convolution_backward.default", lambda: [real(2, 6, 6, 5), real(2, 4, 6, 5), real(6, 4, 3, 3), [6], [1, 1],
         [1, 1], [1, 1],
                                                   False, [0, 0], 1, [True, True, True]], {}),
    *(("aten.avg_pool2d.default", lambda facts=facts: [real(2, 4, 5, 6), *facts], {})
      for facts in (([2, 2],), ([3, 3], [1, 1], [1, 1], False, False), ([2, 1], [2, 1], [0, 0], True), ([3, 3], [2,
           2], [1, 1], True, True))),
    ("aten.avg_pool2d_backward.default", lambda: [real(2, 4, 5, 6), real(2, 4, 5, 6), [3, 3], [1, 1], [1, 1], False,
         False, None], {}),
    ("aten.upsample_nearest2d.default", lambda: [real(2, 4, 3, 4), [6, 8], 2.0, 2.0], {}),
    ("aten.upsample_nearest2d_backward.default", lambda: [real(2, 4, 6, 8), [6, 8], [2, 4, 3, 4], 2.0, 2.0], {}),
    ("aten.upsample_bilinear2d.default", lambda: [real(2, 4, 3, 4), [5, 8], False], {}),
    ("aten.upsample_bilinear2d.default", lambda: [real(2, 4, 3, 4), [5, 2], True], {}),
    ("aten.upsample_bilinear2d_backward.default", lambda: [real(2, 4, 5, 8), [5, 8], [2, 4, 3, 4], False], {}),
    ("aten.max_pool2d_with_indices.default", lambda: [real(2, 4, 6, 6), [3, 3], [2, 2], [1, 1]], {}),
    ("aten.max_pool2d_with_indices.default", lambda: [real(2, 4, 5, 6), [2, 2]], {}),
    ("aten.embedding.default", lambda: [real(6, 4), whole(6, 2, 4)], {}),
    ("aten.embedding.default", lambda: [real(6, 4), whole(6, 8), 2], {}),
    ("aten.embedding_dense_backward.default", lambda: [real(8, 4), whole(6, 8), 6, 2, False], {}),
    ("aten.index.Tensor", lambda: [real(6, 4), [whole(6, 2, 3) - 3]], {}),
    ("aten.index.Tensor", lambda: [real(2, 6, 4), [None, whole(6, 3), whole(4, 2, 1)]], {}),
    ("aten.layer_norm.default", lambda: [real(4, 2, 6), [6], real(6), real(6)], {}),
    ("aten.layer_norm.default", lambda: [real(4, 2, 6), [2, 6], None, None, 1e-3, False], {}),
    ("aten.native_layer_norm.default", lambda: [real(4, 2, 6), [6], real(6), real(6), 1e-5], {}),
    ("aten.group_norm.default", lambda: [real(2, 8, 3, 3), 4, real(8), real(8), 1e-5, False], {}),
    ("aten.group_norm.default", lambda: [real(2, 8, 5), 2], {}),
    ("aten.native_group_norm.default", lambda: [real(2, 8, 3, 3), real(8), None, 2, 8, 9, 4, 1e-5], {}),
    ("aten.rms_norm.default", lambda: [real(4, 2, 6), [6], real(6), 1e-6], {}),
    ("aten.rms_norm.default", lambda: [real(4, 2, 6), [2, 6], None, 1e-6], {}),
    ("aten._to_copy.default", lambda: [flag(4)], {"dtype": F64}),
    ("aten._to_copy.default", lambda: [whole(3, 4)], {"dtype": Word("torch.bool")}),
    ("aten._to_copy.default", lambda: [3 * real(4)], {"dtype": Word("torch.int64")}),
    ("aten.reshape.default", lambda: [real(4, 6), [2, 2, 6]], {}),
    ("aten.view.default", lambda: [real(4, 6), [24]], {}),
    ("aten.transpose.int", lambda: [real(4, 6, 2), -1, 0], {}),
    ("aten.t.default", lambda: [real(4, 6)], {}),
    ("aten.permute.default", lambda: [real(4, 6, 2), [-1, 0, 1]], {}),
    ("aten.expand.default", lambda: [real(4, 1, 2), [3, -1, 6, -1]], {}),
    ("aten.unsqueeze.default", lambda: [real(4, 6), -1], {}),
    ("aten.squeeze.dim", lambda: [real(4, 1, 6), 1], {}),
    ("aten.squeeze.dims", lambda: [real(4, 1, 6, 1), [1, -1, 0]], {}),
    *(("aten.slice.Tensor", lambda facts=facts: [real(8, 6), *facts], {})
      for facts in ((1, 1, 5), (-1, 2), (0, 0, 9, 3), (0, -3), (1, 0, -1, 2))),
    ("aten.slice_backward.default", lambda: [real(4, 2), [4, 6], 1, 2, 6, 2], {}),
    ("aten.slice_scatter.default", lambda: [real(4, 6), real(4, 2), 1, 1, 5, 2], {}),
    ("aten.select_scatter.default", lambda: [real(4, 6), real(4), 1, -2], {}),
    ("aten.select.int", lambda: [real(4, 6), -1, -2], {}),
    ("aten.select_backward.default", lambda: [real(4), [4, 6], 1, -2], {}),
    ("aten.split.Tensor", lambda: [real(4, 7), 3, 1], {}),
    ("aten.split_with_sizes.default", lambda: [real(4, 6), [1, 3, 2], -1], {}),
    ("aten.unbind.int", lambda: [real(4, 3), -1], {}),
    ("aten.cat.default", lambda: [[real(4, 2), real(4, 3)], -1], {}),
    ("aten.stack.default", lambda: [[real(4, 2), real(4, 2)], -1], {}),
    ("aten.full.default", lambda: [[4, 2], 0.25], {"dtype": F64}),
    ("aten.arange.start_step", lambda: [8, -8, -3], {"dtype": Word("torch.int64")}),
    ("aten.triu.default", lambda: [real(2, 4, 6), 1], {}),
    ("aten.tril.default", lambda: [real(4, 6), -1], {}),
    ("aten.repeat.default", lambda: [real(4, 2), [3, 1, 2]], {}),
    ("aten.flip.default", lambda: [real(4, 6), [-1, 0]], {}),
    ("aten.cumsum.default", lambda: [real(4, 6), -1], {}),
    ("aten.cumsum.default", lambda: [real(4, 1), -1], {}),
    ("aten.constant_pad_nd.default", lambda: [real(4, 6), [1, -2, 0, 3], 0.5], {}),
    ("aten.unfold.default", lambda: [real(4, 6), -1, 2, 2], {}),
    ("aten.unfold.default", lambda: [real(7, 4), 0, 3, 2], {}),
    ("aten.topk.default", lambda: [real(4, 6), 2], {}),
    ("aten.topk.default", lambda: [real(4, 6), 2, 0, False], {}),
    ("aten.sort.default", lambda: [real(4, 6), 0], {}),
    ("aten.argsort.default", lambda: [real(4, 6), -1, True], {}),
    ("aten.argmax.default", lambda: [real(4, 6), -1], {}),
    ("aten.max.dim", lambda: [real(4, 6), 0, True], {}),
    ("aten.max.dim", lambda: [real(4, 6), -1], {}),
    ("aten.gather.default", lambda: [real(4, 6), 1, whole(6, 4, 2)], {}),
    ("aten.conv3d.default", lambda: [real(2, 2, 4, 4, 4), real(2, 2, 2, 2, 2), real(2), [2, 2, 2]], {}),
    ("aten.detach.default", lambda: [real(4, 6)], {}),
    ("aten.scatter_add.default", lambda: [real(4, 6), -1, whole(6, 4, 3), real(4, 3)], {}),
    # functions of entries
    *((f"aten.{name}.default", lambda: [real(4, 6)], {}) for name in _MORE),
    *((f"aten.{name}.default", lambda: [above(4, 6)], {}) for name in _MORE_POSITIVE),
    ("aten.acosh.default", lambda: [1 + above(4, 6)], {}),
    *((f"aten.{name}.default", lambda: [odd(4, 6)], {}) for name in _ODD),
    *((f"aten.{name}.default", lambda: [above(4, 6), above(6)], {}) for name in _TWO),
    *((f"aten.{name}.Tensor", lambda: [3 * real(4, 6), above(6)], {}) for name in ("fmod", "remainder", "copysign")),
    *((f"aten.{name}.default", lambda numbers=numbers: [real(4, 6), *numbers], {})
      for name, numbers in _WITH_NUMBERS),
    *((f"aten.{name}_backward.default", lambda numbers=numbers: [real(4, 6), real(4, 6), *numbers], {})
      for name, numbers in _BACKWARD),
    ("aten.logit_backward.default", lambda: [real(4, 6), above(4, 6)], {}),
    ("aten.logit_backward.default", lambda: [real(4, 6), above(4, 6), 0.2], {}),
    ("aten.elu_backward.default", lambda: [real(4, 6), 0.7, 1.5, 0.5, False, real(4, 6)], {}),
    ("aten.glu.default", lambda: [real(4, 6)], {}),
    ("aten.glu.default", lambda: [real(4, 6), 0], {}),
    ("aten.glu_backward.default", lambda: [real(4, 3), real(4, 6), -1], {}),
    ("aten.polygamma.default", lambda: [1, above(4, 6)], {}),
    ("aten.round.decimals", lambda: [real(4, 6)], {"decimals": 1}),
    *((f"aten.floor_divide.{way}", lambda: [whole(9, 4, 6), 2], {}) for way in ("default", "Scalar")),
    ("aten.div.Scalar_mode", lambda: [real(4, 6), 2], {"rounding_mode": "trunc"}),
    ("aten.fmod.Scalar", lambda: [3 * real(4, 6), 0.7], {}),
    ("aten.heaviside.default", lambda: [whole(3, 4, 6).double() - 1, real(6)], {}),
    ("aten.nextafter.default", lambda: [real(4, 6), real(6)], {}),
    ("aten.fill.Scalar", lambda: [real(4, 6), 0.5], {}),
    ("aten.addcdiv.default", lambda: [real(4, 6), real(6), above(4, 1)], {"value": 0.5}),
    ("aten.lerp.Scalar", lambda: [real(4, 6), real(6), 0.3], {}),
    ("aten.lerp.Tensor", lambda: [real(4, 6), real(6), real(4, 1)], {}),
    ("aten.xlogy.Tensor", lambda: [real(4, 6), above(6)], {}),
    ("aten.xlogy.Scalar_Other", lambda: [real(4, 6), 3.0], {}),
    ("aten.xlogy.Scalar_Self", lambda: [3.0, above(4, 6)], {}),
    ("aten.pow.Tensor_Tensor", lambda: [above(4, 6), whole(3, 4, 6).double()], {}),
    *(("aten.clamp.Tensor", lambda bounds=bounds: [real(4, 6), *(bound and bound() for bound in bounds)], {})
      for bounds in ((lambda: -above(6), lambda: above(4, 1)), (lambda: real(6), lambda: real(4, 6)),
                     (lambda: real(6), None), (None, lambda: real(6)))),
    *((f"aten.clamp_{end}.Tensor", lambda: [real(4, 6), real(6)], {}) for end in ("min", "max")),
    ("aten.clip.default", lambda: [real(4, 6), -0.3, 0.4], {}),
    ("aten.masked_fill.Tensor", lambda: [real(4, 6), flag(6), real()], {}),
    *((f"aten.{name}.default", lambda: [whole(3, 4, 6).double(), whole(3, 6).double()], {})
      for name in ("fmax", "fmin")),
    # bits
    *((f"aten.{name}.{way}", lambda way=way: [whole(9, 4, 6), whole(9, 6) if way == "Tensor" else 5], {})
      for name in ("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor")
      for way in ("Tensor", "Scalar")),
    *((f"aten.{name}.Tensor", lambda: [flag(4, 6), flag(6)], {}) for name in ("__xor__", "bitwise_xor")),
    *((f"aten.{name}", lambda name=name: [whole(9, 4, 6), whole(3, 6) if name.endswith(".Tensor") else 2], {})
      for name in ("__lshift__.Tensor", "__lshift__.Scalar", "__rshift__.Tensor", "__rshift__.Scalar",
        "bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar", "bitwise_right_shift.Tensor",
        "bitwise_right_shift.Tensor_Scalar")),
    ("aten.bitwise_not.default", lambda: [whole(9, 4, 6)], {}),
    ("aten.logical_not.default", lambda: [flag(4, 6)], {}),
    *((f"aten.logical_{name}.default", lambda: [flag(4, 6), flag(6)], {}) for name in ("and", "or", "xor")),
    ("aten.logical_xor.default", lambda: [whole(2, 4, 6), whole(3, 6)], {}),
    # reductions
    *((f"aten.{name}.default", lambda facts=facts: [real(4, 2, 6), *facts], {})
      for name in ("amax", "amin") for facts in ([], [[1]], [[-1, 0], True])),
    *((f"aten.{name}.default", lambda: [whole(3, 4, 6).double(), [1]], {}) for name in ("amax", "amin")),
    *((f"aten.{name}.default", lambda: [whole(3, 4, 6).double()], {}) for name in ("max", "min")),
    *((f"aten.{name}.dim", lambda keep=keep: [flag(4, 6), -1, keep], {})
      for name in ("any", "all") for keep in (False, True)),
    *((f"aten.{name}.dims", lambda: [whole(2, 4, 6, 2), [0, 2]], {}) for name in ("any", "all")),
    *((f"aten.{name}.default", lambda: [whole(2, 4, 6)], {}) for name in ("any", "all")),
    ("aten.count_nonzero.default", lambda: [whole(3, 4, 6), 1], {}),
    ("aten.count_nonzero.dim_IntList", lambda: [whole(3, 4, 6), [0, 1]], {}),
    *(("aten.linalg_vector_norm.default", lambda p=p: [real(4, 2, 6), p, [-1, 0]], {})
      for p in (0, 1, 0.5, 1.5, 2, 3, math.inf, -math.inf)),
    ("aten.norm.ScalarOpt_dim", lambda: [real(4, 6), 2, [1], True], {}),
    ("aten.norm.Scalar", lambda: [real(4, 6), 2], {}),
    *((f"aten.{name}.correction", lambda kwargs=kwargs: [real(4, 2, 6), *([] if "all" in kwargs else [[1, 2]])],
       {key: value for key, value in kwargs.items() if key != "all"})
      for name in ("var", "std", "var_mean", "std_mean")
      for kwargs in ({"correction": 0}, {"correction": 2, "keepdim": True}, {"all": True})),
    *((f"aten.{name}.dim", lambda name=name: [real(4, 2, 6), [-1], False, True], {})
      for name in ("var", "std", "var_mean", "std_mean")),
    *((f"aten.{name}.dim", lambda: [real(4, 2, 6), [0]], {}) for name in ("var", "std")),
    ("aten.cumprod.default", lambda: [real(4, 6), 1], {}),
    ("aten.prod.dim_int", lambda: [real(4, 6), -1], {}),
    ("aten.prod.dim_int", lambda: [real(4, 6), 0, True], {}),
    ("aten.prod.default", lambda: [real(4, 2)], {}),
    ("aten.histc.default", lambda: [torch.linspace(-1.2, 1, 8, dtype=torch.float64), 4, -1, 1], {}),
    *(("aten.bucketize.Tensor", lambda: [whole(7, 4, 6), torch.tensor([1, 3, 3, 5])], {"right": right})
      for right in (False, True)),
    ("aten.searchsorted.Tensor", lambda: [torch.tensor([1, 3, 3, 5]), whole(7, 4, 6)], {}),
    *(("aten._cdist_forward.default", lambda p=p: [real(2, 4, 3), real(2, 6, 3), p, None], {}) for p in (1.0, 2.0)),
    *(("aten._cdist_backward.default",
       lambda p=p: [real(2, 4, 6), x := real(2, 4, 3), y := real(2, 6, 3), p, torch.cdist(x, y, p)], {})
      for p in (1.0, 2.0)),
    ("aten._safe_softmax.default", lambda: [real(4, 6), -1], {}),
    # products
    ("aten.mv.default", lambda: [real(4, 6), real(6)], {}),
    ("aten.dot.default", lambda: [real(6), real(6)], {}),
    ("aten.vdot.default", lambda: [real(6), real(6)], {}),
    ("aten.addmv.default", lambda: [real(4), real(4, 6), real(6)], {"beta": 2, "alpha": 0.5}),
    ("aten.addr.default", lambda: [real(4, 6), real(4), real(6)], {"beta": 2, "alpha": 0.5}),
    ("aten.addbmm.default", lambda: [real(4, 8), real(2, 4, 6), real(2, 6, 8)], {"beta": 2, "alpha": 0.5}),
    ("aten.einsum.default", lambda: ["bii->b", [real(2, 4, 4)]], {}),
    # losses
    *((f"aten.{name}_loss.default", lambda: [real(4, 6), real(4, 6), 0], {})
      for name in ("mse", "l1", "smooth_l1", "huber")),
    *((f"aten.{name}_loss.default", lambda: [real(4, 6), real(4, 6), 0, 0.3], {}) for name in ("smooth_l1", "huber")),
    *((f"aten.{name}_loss_backward.default",
       lambda numbers=numbers: [real(4, 6), real(4, 6), real(4, 6), 0, *numbers], {})
      for name, numbers in (("mse", []), ("smooth_l1", [0.3]), ("huber", [0.3]), ("soft_margin", []))),
    ("aten.soft_margin_loss.default", lambda: [real(4, 6), whole(2, 4, 6) * 2 - 1, 0], {}),
    *(("aten.kl_div.default", lambda: [real(4, 6), above(4, 6), 0], {"log_target": log}) for log in (False, True)),
    *(("aten.binary_cross_entropy.default", lambda weight=weight: [above(4, 6), above(4, 6), weight and weight(), 0],
       {}) for weight in (None, lambda: frozen(6))),
    *(("aten.binary_cross_entropy_backward.default",
       lambda weight=weight: [real(4, 6), above(4, 6), above(4, 6), weight and weight(), 0], {})
      for weight in (None, lambda: above(4, 6))),
    *(("aten.binary_cross_entropy_with_logits.default",
       lambda one=one, other=other: [real(4, 6), above(4, 6), one and one(), other and other(), 0], {})
      for one in (None, lambda: frozen(6)) for other in (None, lambda: frozen(6))),
    ("aten.cross_entropy_loss.default", lambda: [real(4, 6), above(4, 6)], {}),
    ("aten.cross_entropy_loss.default", lambda: [real(4, 6, 2), above(4, 6, 2)], {}),
    # convolutions, pools, samplings and pads
    ("aten.conv1d.padding", lambda: [real(2, 4, 8), real(6, 4, 4), None, [1], "same"], {}),
    ("aten.conv3d.padding", lambda: [real(2, 2, 3, 4, 2), real(2, 2, 2, 3, 2), real(2), [1, 1, 1], "same"], {}),
    ("aten.convolution.default", lambda: [real(2, 4, 5), real(4, 3, 3), real(6), [2], [1], [2], True, [1], 2], {}),
    ("aten.convolution.default", lambda: [real(2, 4, 3, 2), real(4, 2, 2, 3), None, [2, 1], [0, 1], [1, 1], True,
         [0, 0], 1], {}),
    ("aten.convolution_backward.default", lambda: [real(2, 6, 12), real(2, 4, 5), real(4, 3, 3), [6], [2], [1], [2],
         True, [1], 2, [True, True, True]], {}),
    *(("aten.avg_pool3d.default", lambda facts=facts: [real(2, 2, 3, 4, 5), *facts], {})
      for facts in (([2, 2, 2],), ([3, 1, 2], [1, 1, 1], [1, 0, 1], False, False))),
    ("aten.avg_pool3d_backward.default", lambda: [real(2, 2, 3, 4, 5), real(2, 2, 3, 4, 5), [3, 1, 3], [1, 1, 1],
         [1, 0, 1], False, True, None], {}),
    ("aten._adaptive_avg_pool2d.default", lambda: [real(2, 4, 5, 6), [3, 2]], {}),
    ("aten._adaptive_avg_pool3d.default", lambda: [real(2, 2, 3, 4, 5), [2, 4, 3]], {}),
    ("aten._adaptive_avg_pool2d_backward.default", lambda: [real(2, 4, 3, 2), real(2, 4, 5, 6)], {}),
    ("aten._adaptive_avg_pool3d_backward.default", lambda: [real(2, 2, 2, 4, 3), real(2, 2, 3, 4, 5)], {}),
    ("aten.max_pool3d_with_indices.default", lambda: [real(2, 2, 4, 4, 4), [3, 2, 2], [2, 1, 2], [1, 0, 1]], {}),
    ("aten.adaptive_max_pool2d.default", lambda: [real(2, 4, 5, 6), [3, 2]], {}),
    ("aten.adaptive_max_pool3d.default", lambda: [real(2, 2, 3, 4, 5), [2, 4, 3]], {}),
    *((f"aten.{name}.default", lambda rank=rank, facts=facts: [real(2, 2, *[3] * rank), [5, 4, 2][:rank], *facts], {})
      for name, rank, facts in _SAMPLINGS),
    *((f"aten.{name}_backward.default", lambda rank=rank, facts=facts: [real(2, 2, *[5, 4, 2][:rank]), [5, 4, 2][:rank],
         [2, 2, *[3] * rank], *facts], {})
      for name, rank, facts in _SAMPLINGS),
    *((f"aten.{kind}_pad{rank}d.default", lambda rank=rank: [real(2, 2, *[3] * rank),
         [2, 0, 1, 1, 0, 2][: 2 * rank]], {})
      for kind in ("reflection", "replication") for rank in (1, 2, 3)),
    *((f"aten.{kind}_pad{rank}d_backward.default",
       lambda rank=rank: [real(2, 2, *[5] * rank), real(2, 2, *[3] * rank), [2, 0, 1, 1, 0, 2][: 2 * rank]], {})
      for kind in ("reflection", "replication") for rank in (1, 2, 3)),
    # entries
    ("aten.squeeze.default", lambda: [real(4, 1, 6, 1)], {}),
    ("aten.unsafe_split.Tensor", lambda: [real(4, 7), 3, 1], {}),
    ("aten.unsafe_split_with_sizes.default", lambda: [real(4, 6), [1, 3, 2], -1], {}),
    ("aten.roll.default", lambda: [real(4, 6), [2, -1], [-1, 0]], {}),
    ("aten.roll.default", lambda: [real(4, 6), [5]], {}),
    ("aten.diff.default", lambda: [real(4, 6)], {}),
    ("aten.diff.default", lambda: [real(4, 6), 1, 0], {}),
    *(("aten.diagonal.default", lambda facts=facts: [real(4, 2, 6), *facts], {})
      for facts in ((), (1, 2, 0), (-1, 0, -1))),
    ("aten.diagonal_backward.default", lambda: [real(2, 3), [4, 2, 6], -1, 0, 2], {}),
    ("aten.unfold.default", lambda: [real(4, 7), -1, 3, 2], {}),
    ("aten.unfold_backward.default", lambda: [real(4, 3, 3), [4, 7], 1, 3, 2], {}),
    ("aten.arange.default", lambda: [8], {"dtype": Word("torch.int64")}),
    ("aten.arange.start", lambda: [2, 8], {"dtype": Word("torch.int64")}),
    ("aten.linspace.default", lambda: [-1, 2, 7], {"dtype": F64}),
    ("aten.eye.default", lambda: [4], {"dtype": F64}),
    ("aten.eye.m", lambda: [4, 6], {"dtype": F64}),
    ("aten.sort.stable", lambda: [real(4, 6)], {"stable": True, "dim": 0}),
    ("aten.argsort.stable", lambda: [real(4, 6)], {"stable": True, "descending": True}),
    ("aten.argmin.default", lambda: [real(4, 6), -1], {}),
    ("aten.min.dim", lambda: [real(4, 6), 0, True], {}),
    ("aten.median.dim", lambda: [real(4, 6), -1], {}),
    ("aten.mode.default", lambda: [whole(3, 4, 6).double(), 0], {}),
    ("aten.kthvalue.default", lambda: [real(4, 6), 2], {}),
    *((f"aten.{name}.default", lambda: [real(4, 6), -1], {}) for name in ("cummax", "cummin")),
    ("aten.index_select.default", lambda: [real(4, 6), 1, whole(6, 3)], {}),
    ("aten._unsafe_index.Tensor", lambda: [real(2, 6, 4), [None, whole(6, 3), whole(4, 2, 1)]], {}),
    ("aten.index_add.default", lambda: [real(4, 6), -1, whole(6, 3), real(4, 3)], {"alpha": 0.5}),
    ("aten.index_copy.default", lambda: [real(4, 6), 0, torch.tensor([3, 0]), real(2, 6)], {}),
    ("aten.index_fill.int_Scalar", lambda: [real(4, 6), 1, whole(6, 3), 0.5], {}),
    *(("aten.index_put.default", lambda adds=adds: [real(4, 6, 2), [None, whole(6, 2, 2) - 1], real(2, 1, 1), adds], {})
      for adds in (True,)),
    ("aten.index_put.default", lambda: [real(4, 6, 2), [torch.tensor([[1], [3]]), torch.tensor([-1, 2])],
         real(2, 2, 2)], {}),
    ("aten.index_put.default", lambda: [real(4, 6), [flag(4)], real()], {}),
    ("aten.index_put.default", lambda: [real(4, 6), [whole(4, 0), whole(6, 0)], real()], {}),
    ("aten._unsafe_index_put.default", lambda: [real(4, 6), [whole(4, 3), whole(6, 3)], real(3), True], {}),
    ("aten.one_hot.default", lambda: [whole(5, 4, 6), 5], {}),
    ("aten.repeat_interleave.Tensor", lambda: [torch.tensor([2, 0, 1, 3])], {"output_size": 6}),
    ("aten.repeat_interleave.self_Tensor", lambda: [real(4, 6), torch.tensor([2, 0, 1, 3]), 0], {"output_size": 6}),
]  # fmt: skip


R0, R1, R2 = (Name(f"r{at}") for at in range(3))
CHAINS: list[tuple[str, Callable[[], list[Any]], str, Callable[[], list[Any]], tuple[int, ...]]] = [
    ("aten.max_pool2d_with_indices.default", lambda: [real(2, 4, 6, 6), [3, 3], [2, 2], [1, 1]],
     "aten.max_pool2d_with_indices_backward.default",
     lambda: [real(2, 4, 3, 3), Name("t0"), [3, 3], [2, 2], [1, 1], [1, 1], False, R1], (0, 1)),
    ("aten.max_pool3d_with_indices.default", lambda: [real(2, 2, 4, 4, 4), [3, 2, 2], [2, 1, 2], [1, 0, 1]],
     "aten.max_pool3d_with_indices_backward.default",
     lambda: [real(2, 2, 2, 3, 3), Name("t0"), [3, 2, 2], [2, 1, 2], [1, 0, 1], [1, 1, 1], False, R1], (0, 1)),
    ("aten.adaptive_max_pool2d.default", lambda: [real(2, 4, 5, 6), [3, 2]],
     "aten.adaptive_max_pool2d_backward.default", lambda: [real(2, 4, 3, 2), Name("t0"), R1], (0, 1)),
    ("aten.adaptive_max_pool3d.default", lambda: [real(2, 2, 3, 4, 5), [2, 4, 3]],
     "aten.adaptive_max_pool3d_backward.default", lambda: [real(2, 2, 2, 4, 3), Name("t0"), R1], (0,)),
    ("aten.native_layer_norm.default", lambda: [real(4, 2, 6), [6], real(6), real(6), 1e-5],
     "aten.native_layer_norm_backward.default",
     lambda: [real(4, 2, 6), Name("t0"), [6], R1, R2, Name("t1"), Name("t2"), [True, True, True]], (0, 1)),
    ("aten.native_group_norm.default", lambda: [real(2, 8, 3, 3), real(8), real(8), 2, 8, 9, 4, 1e-5],
     "aten.native_group_norm_backward.default",
     lambda: [real(2, 8, 3, 3), Name("t0"), R1, R2, Name("t1"), 2, 8, 9, 4, [True, True, True]], ()),
    *(("aten.reshape.default", lambda: [real(4, 2, 3), [8, 3]],
       "aten.unfold.default", lambda size=size: [R0, 0, size, 2], ()) for size in (2, 3, 4)),
    ("aten.topk.default", lambda: [real(4, 6), 2], "aten.scatter.src", lambda: [Name("t0"), 1, R1, real(4, 2)], (0,)),
    ("aten.topk.default", lambda: [real(4, 6), 2], "aten.scatter.value", lambda: [Name("t0"), -1, R1, -3], (0,)),
]  # fmt: skip
