"""Rows of operators that work element by element, and of their backward operators."""

from math import nan
from typing import Any

from ..factors import OpCall, OpRule, apply_dims
from ..op_row import OpRow, aligned_dims, overloads, plain_dims, pointwise, rows_of

_UNARY = """
    acosh asinh atan atanh celu cos deg2rad digamma elu erf erfc frac gelu hardsigmoid hardswish i0 leaky_relu lgamma
    mish polygamma rad2deg relu round round.decimals selu sgn sigmoid signbit silu sin sinc special_i0e special_i1
    special_i1e tanh
"""
_BINARY = """
    atan2 copysign.Tensor floor_divide floor_divide.Scalar logical_xor nextafter xlogy.Scalar_Other xlogy.Scalar_Self
    xlogy.Tensor
"""
_WITH_SCALARS = "bitwise_xor __xor__ __lshift__ __rshift__"
_AMPLIFYING = "acos asin cosh erfinv exp exp2 expm1 log log10 log1p log2 sinh tan"
_BOUNDED = "hardtanh threshold softshrink hardshrink"
_BOUNDS = """
    clip logit special_logit fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar fmax fmin max.other min.other
    heaviside hypot logaddexp logaddexp2
"""
_ASKS_NAN = "nan_to_num isfinite isinf isneginf isposinf"

# Backward operators, each linear in the gradient that comes in.
_BACKWARD = """
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward leaky_relu_backward mish_backward
    native_dropout_backward sigmoid_backward silu_backward tanh_backward
"""
_BOUNDED_BACKWARD = " ".join(f"{name}_backward" for name in (*_BOUNDED.split(), "logit"))


def _cast_rule(call: OpCall) -> OpRule:
    """The rule of a cast. It passes a Partial on unless it ends in integers or booleans; without a dtype argument the
    dtype stays."""
    dtype = call.argument(1, "dtype")
    keeps = dtype is None or "float" in str(dtype) or "complex" in str(dtype)
    return pointwise("0" if keeps else "")(call)


def _first_only(call: OpCall) -> OpRule:
    """The rule that is pointwise in operand 0. Another operand only lends its dtype, so its dims belong to no
    factor."""
    rank = len(call.results[0])
    others = [((),) * len(shape) for shape in call.operands[1:]]
    return apply_dims(call, [aligned_dims(len(call.operands[0]), rank), *others], [plain_dims(rank)])


def _pointwise(names: str, linear: str = "", **facts: Any) -> dict[str, OpRow]:
    return rows_of(names, OpRow(pointwise(linear), elementwise=True, **facts))


POINTWISE_RULES = {
    **_pointwise(_UNARY + _BINARY),
    **_pointwise(overloads(_WITH_SCALARS, "Tensor Scalar")),
    **_pointwise(overloads("bitwise_left_shift bitwise_right_shift", "Tensor Tensor_Scalar")),
    **_pointwise(_AMPLIFYING, precision="sensitive"),
    **_pointwise("softplus", precision="sensitive", bounds=True),
    **_pointwise("softplus_backward", "0", precision="sensitive", backward=True, bounds=True),
    **_pointwise(_BOUNDED + _BOUNDS, bounds=True),
    **_pointwise(_ASKS_NAN, bounds=True, limits=(nan,)),
    **_pointwise("isnan", bounds=True, limits=(nan,), exact=True),
    **_pointwise(_BOUNDED_BACKWARD, "0", bounds=True),
    **_pointwise("relu6", bounds=True, limits=(6.0,)),  # torch takes it apart into one that says its bound
    **_pointwise("clamp clamp_min clamp_max clamp.Tensor clamp_min.Tensor clamp_max.Tensor", bounds=True, exact=True),
    **_pointwise("reciprocal", precision="sensitive", power=-1.0, exact=True),
    **_pointwise("sqrt", power=0.5),
    **_pointwise("rsqrt", precision="sensitive", power=-0.5, plain=True),
    **_pointwise("square", power=2.0),
    **_pointwise("pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor", precision="sensitive", plain=True),
    **_pointwise("abs sign floor ceil trunc logical_not bitwise_not", exact=True),
    **_pointwise("maximum minimum", bounds=True, exact=True),
    **_pointwise("logical_and", computes="both", exact=True),
    **_pointwise("logical_or", computes="either", exact=True),
    **_pointwise("bitwise_and.Tensor bitwise_and.Scalar", computes="both", exact=True),
    **_pointwise("bitwise_or.Tensor bitwise_or.Scalar", computes="either", exact=True),
    **_pointwise("__and__.Tensor __and__.Scalar", computes="both"),
    **_pointwise("__or__.Tensor __or__.Scalar", computes="either"),
    **_pointwise("eq.Tensor eq.Scalar ne.Tensor ne.Scalar", bounds=True, exact=True),
    **_pointwise("lt.Tensor lt.Scalar", computes="below", bounds=True, exact=True),
    **_pointwise("le.Tensor le.Scalar", computes="at most", bounds=True, exact=True),
    **_pointwise("gt.Tensor gt.Scalar", computes="above", bounds=True, exact=True),
    **_pointwise("ge.Tensor ge.Scalar", computes="at least", bounds=True, exact=True),
    **_pointwise("div.Scalar_mode div.Tensor_mode", exact=True, plain=True),
    # a mask drawn from the rank's own generator: the partition replaces it by one that counts global elements
    **_pointwise("native_dropout", law="bernoulli"),
    # linear, by argument position: "01" of `add(x, 3)` is void, as 3 would be added once a rank
    **_pointwise(_BACKWARD, "0"),
    **_pointwise("neg", "0", exact=True, plain=True),
    **_pointwise("positive", "0", moves="copy"),
    **_pointwise("clone", "0", moves="copy", storage="fresh", exact=True),
    **_pointwise("contiguous", "0", moves="copy"),
    **_pointwise("lift_fresh_copy", "0", moves="copy", exported=False),
    **_pointwise("alias", "0", moves="copy", storage="view"),
    **_pointwise("detach", "0", moves="copy", storage="view", stops_gradient=True),
    **rows_of("lift lift_fresh", OpRow(moves="copy", exported=False)),
    **_pointwise("copy"),
    **_pointwise("div.Tensor div.Scalar", "0", computes="ratio", exact=True, plain=True),
    **_pointwise("mul.Scalar", "0", computes="multiple", exact=True, plain=True),
    **_pointwise("mul.Tensor", "0|1", computes="multiple", exact=True, plain=True),
    **_pointwise("add.Tensor add.Scalar", "01", computes="total", exact=True, plain=True),
    **_pointwise("sub.Tensor sub.Scalar", "01", computes="difference", exact=True, plain=True),
    **_pointwise("rsub.Tensor rsub.Scalar", "01", exact=True),
    **_pointwise("lerp.Tensor lerp.Scalar addcdiv", "01"),
    **_pointwise("addcmul", "01|02", plain=True),
    **_pointwise("where.self where.ScalarOther where.ScalarSelf", "12", chooses=(0, 1, 2), exact=True),
    **_pointwise("where.Scalar", chooses=(0, 1, 2), exact=True),
    **_pointwise("masked_fill.Tensor masked_fill.Scalar", "02", chooses=(1, 2, 0), bounds=True, exact=True),
    **rows_of("_to_copy", OpRow(_cast_rule, casts=True, elementwise=True, storage="fresh", addable=True)),
    **rows_of("to.dtype", OpRow(_cast_rule, casts=True, elementwise=True)),
    **rows_of("type_as", OpRow(_first_only, casts=True, elementwise=True)),
    **rows_of("prelu", OpRow(precision="product")),  # torch takes it apart before anything is placed
}
