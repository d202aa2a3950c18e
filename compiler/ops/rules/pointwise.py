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


def _cast(call: OpCall) -> OpRule:
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


def _rows(names: str, linear: str = "", **facts: Any) -> dict[str, OpRow]:
    return rows_of(names, OpRow(pointwise(linear), elementwise=True, **facts))


POINTWISE_RULES = {
    **_rows(_UNARY + _BINARY),
    **_rows(overloads(_WITH_SCALARS, "Tensor Scalar")),
    **_rows(overloads("bitwise_left_shift bitwise_right_shift", "Tensor Tensor_Scalar")),
    **_rows(_AMPLIFYING, precision="sensitive"),
    **_rows("softplus", precision="sensitive", bounds=True),
    **_rows("softplus_backward", "0", precision="sensitive", backward=True, bounds=True),
    **_rows(_BOUNDED + _BOUNDS, bounds=True),
    **_rows(_ASKS_NAN, bounds=True, limits=(nan,)),
    **_rows("isnan", bounds=True, limits=(nan,), exact=True),
    **_rows(_BOUNDED_BACKWARD, "0", bounds=True),
    **_rows("relu6", bounds=True, limits=(6.0,)),  # torch takes it apart into one that says its bound
    **_rows("clamp clamp_min clamp_max clamp.Tensor clamp_min.Tensor clamp_max.Tensor", bounds=True, exact=True),
    **_rows("reciprocal", precision="sensitive", power=-1.0, exact=True),
    **_rows("sqrt", power=0.5),
    **_rows("rsqrt", precision="sensitive", power=-0.5, plain=True),
    **_rows("square", power=2.0),
    **_rows("pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor", precision="sensitive", plain=True),
    **_rows("abs sign floor ceil trunc logical_not bitwise_not", exact=True),
    **_rows("maximum minimum", bounds=True, exact=True),
    **_rows("logical_and", computes="both", exact=True),
    **_rows("logical_or", computes="either", exact=True),
    **_rows("bitwise_and.Tensor bitwise_and.Scalar", computes="both", exact=True),
    **_rows("bitwise_or.Tensor bitwise_or.Scalar", computes="either", exact=True),
    **_rows("__and__.Tensor __and__.Scalar", computes="both"),
    **_rows("__or__.Tensor __or__.Scalar", computes="either"),
    **_rows("eq.Tensor eq.Scalar ne.Tensor ne.Scalar", bounds=True, exact=True),
    **_rows("lt.Tensor lt.Scalar", computes="below", bounds=True, exact=True),
    **_rows("le.Tensor le.Scalar", computes="at most", bounds=True, exact=True),
    **_rows("gt.Tensor gt.Scalar", computes="above", bounds=True, exact=True),
    **_rows("ge.Tensor ge.Scalar", computes="at least", bounds=True, exact=True),
    **_rows("div.Scalar_mode div.Tensor_mode", exact=True, plain=True),
    # a mask drawn from the rank's own generator: the partition replaces it by one that counts global elements
    **_rows("native_dropout", law="bernoulli"),
    # linear, by argument position: "01" of `add(x, 3)` is void, as 3 would be added once a rank
    **_rows(_BACKWARD, "0"),
    **_rows("neg", "0", exact=True, plain=True),
    **_rows("positive", "0", moves="copy"),
    **_rows("clone", "0", moves="copy", storage="fresh", exact=True),
    **_rows("contiguous", "0", moves="copy"),
    **_rows("lift_fresh_copy", "0", moves="copy", exported=False),
    **_rows("alias", "0", moves="copy", storage="view"),
    **_rows("detach", "0", moves="copy", storage="view", stops_gradient=True),
    **rows_of("lift lift_fresh", OpRow(moves="copy", exported=False)),
    **_rows("copy"),
    **_rows("div.Tensor div.Scalar", "0", computes="ratio", exact=True, plain=True),
    **_rows("mul.Scalar", "0", computes="multiple", exact=True, plain=True),
    **_rows("mul.Tensor", "0|1", computes="multiple", exact=True, plain=True),
    **_rows("add.Tensor add.Scalar", "01", computes="total", exact=True, plain=True),
    **_rows("sub.Tensor sub.Scalar", "01", computes="difference", exact=True, plain=True),
    **_rows("rsub.Tensor rsub.Scalar", "01", exact=True),
    **_rows("lerp.Tensor lerp.Scalar addcdiv", "01"),
    **_rows("addcmul", "01|02", plain=True),
    **_rows("where.self where.ScalarOther where.ScalarSelf", "12", chooses=(0, 1, 2), exact=True),
    **_rows("where.Scalar", chooses=(0, 1, 2), exact=True),
    **_rows("masked_fill.Tensor masked_fill.Scalar", "02", chooses=(1, 2, 0), bounds=True, exact=True),
    **rows_of("_to_copy", OpRow(_cast, casts=True, elementwise=True, storage="fresh", addable=True)),
    **rows_of("to.dtype", OpRow(_cast, casts=True, elementwise=True)),
    **rows_of("type_as", OpRow(_first_only, casts=True, elementwise=True)),
    **rows_of("prelu", OpRow(precision="product")),  # torch takes it apart before anything is placed
}
