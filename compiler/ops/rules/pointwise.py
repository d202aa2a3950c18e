"""Rows of operators that work element by element, and of their backward operators."""

from ..factors import OpCall, OpRule, apply_dims
from ..op_row import OpRow, aligned_dims, overloads, plain_dims, pointwise, rows_of

_UNARY = """
    abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min clip cos cosh deg2rad
    digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite
    isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 logical_not logit mish nan_to_num
    polygamma rad2deg reciprocal relu relu6 round round.decimals rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh
    softplus softshrink special_i0e special_i1 special_i1e special_logit sqrt square tan tanh threshold trunc
"""
_BINARY = """
    atan2 clamp.Tensor clamp_max.Tensor clamp_min.Tensor copy copysign.Tensor div.Scalar_mode div.Tensor_mode
    floor_divide floor_divide.Scalar fmax fmin heaviside hypot logaddexp logaddexp2 logical_and logical_or logical_xor
    max.other maximum min.other minimum nextafter pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor xlogy.Scalar_Other
    xlogy.Scalar_Self xlogy.Tensor
"""
_WITH_SCALARS = """
    eq ne lt le gt ge fmod remainder bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__
"""

# Backward operators, each linear in the gradient that comes in.
_BACKWARD = """
    elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward logit_backward mish_backward native_dropout_backward sigmoid_backward
    silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward
"""

# By argument position: "01" of `add(x, 3)` is void, as 3 would be added once a rank.
_LINEAR = {
    "0": f"neg positive clone contiguous alias detach lift_fresh_copy div.Tensor div.Scalar mul.Scalar {_BACKWARD}",
    "0|1": "mul.Tensor",
    "01": "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar lerp.Tensor lerp.Scalar addcdiv",
    "01|02": "addcmul",
    "12": "where.self where.ScalarOther where.ScalarSelf",
    "02": "masked_fill.Tensor masked_fill.Scalar",
}


def _cast(call: OpCall) -> OpRule:
    """A cast passes a Partial on unless it ends in integers or booleans; no dtype given means none changed."""
    dtype = call.argument(1, "dtype")
    keeps = dtype is None or "float" in str(dtype) or "complex" in str(dtype)
    return pointwise("0" if keeps else "")(call)


def _first_only(call: OpCall) -> OpRule:
    """Pointwise in operand 0; another operand only lends its dtype, so its dims belong to no factor."""
    rank = len(call.results[0])
    others = [((),) * len(shape) for shape in call.operands[1:]]
    return apply_dims(call, [aligned_dims(len(call.operands[0]), rank), *others], [plain_dims(rank)])


POINTWISE_RULES = {
    **rows_of(_UNARY + _BINARY, OpRow(pointwise())),
    **rows_of(overloads(_WITH_SCALARS, "Tensor Scalar"), OpRow(pointwise())),
    **rows_of(overloads("bitwise_left_shift bitwise_right_shift", "Tensor Tensor_Scalar"), OpRow(pointwise())),
    # a mask drawn from the rank's own generator: the partition replaces it by one that counts global elements
    **rows_of("native_dropout", OpRow(pointwise())),
    **rows_of("where.Scalar", OpRow(pointwise())),
    **{
        name: row for linear, names in _LINEAR.items() for name, row in rows_of(names, OpRow(pointwise(linear))).items()
    },
    **rows_of("_to_copy to.dtype", OpRow(_cast)),
    **rows_of("type_as", OpRow(_first_only)),
}
