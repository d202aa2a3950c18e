"""Rows of operators that reduce, order or scan dims; a sum leaves its dims free, everything else needs them whole."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import nan, prod

from ..factors import OpCall, OpRule, apply_dims, rule
from ..op_row import OpRow, along_dims, argument_linear, dim_argument, normal_dims, plain_dims, rows_of


def _reduced(*, free: bool, linear: str = "", dim: int | None = 1) -> Callable[[OpCall], OpRule]:
    """The rule that reduces the dims at argument `dim` (None: all). The result's number of dims shows whether they are
    kept."""

    def ruling(call: OpCall) -> OpRule:
        rank = len(call.operands[0])
        dims = normal_dims(None if dim is None else call.argument(dim, "dim"), rank)
        kept = len(call.results[0]) == rank
        result = tuple(() if i in dims else names for i, names in enumerate(plain_dims(rank)) if kept or i not in dims)
        whole = frozenset() if free else frozenset(f"d{i}" for i in dims)
        return apply_dims(
            call, [plain_dims(rank)], [result] * len(call.results), whole=whole, linear=argument_linear(call, linear)
        )

    return ruling


def _histc(call: OpCall) -> OpRule:
    """The rule of a histogram. Counts add up where the range is given; else the range is that of the data, which must
    be whole."""
    dims = plain_dims(len(call.operands[0]))
    low, high = call.argument(2, "min", 0), call.argument(3, "max", 0)
    whole = frozenset(name for names in dims for name in names) if low == high else frozenset()
    return apply_dims(call, [dims], [(("bins",),)], whole=whole | {"bins"})


def _diff(call: OpCall) -> OpRule:
    """The rule of `diff(x, n, dim, prepend, append)`: linear in all its tensors together."""
    ruled = along_dims(dim_argument(2))(call)
    return replace(ruled, linear=(frozenset(range(len(call.operands))),))


_SOME = "amax amin max.dim min.dim median.dim mode argmax argmin any.dim any.dims all.dim all.dims"
_STATISTICS = """
    prod.dim_int var.dim var.correction var_mean.dim var_mean.correction std.dim std.correction
    std_mean.correction
"""
_SOFTMAX = "_softmax _log_softmax _safe_softmax"
_SOFTMAX_BACKWARD = "_softmax_backward_data _log_softmax_backward_data"
_sensitive = partial(OpRow, precision="sensitive")

REDUCTIONS_RULES = {
    # a part of the dim gives a part of the sum
    **rows_of("sum", _sensitive(_reduced(free=True, linear="0", dim=None), reduces="sum", plain=True)),
    **rows_of(
        "sum.dim_IntList", _sensitive(_reduced(free=True, linear="0"), reduces="sum", storage="fresh", plain=True)
    ),
    **rows_of("nansum", _sensitive(_reduced(free=True), bounds=True, limits=(nan,))),
    **rows_of("count_nonzero count_nonzero.dim_IntList", OpRow(_reduced(free=True))),
    **rows_of("histc", OpRow(_histc)),
    # distances between the rows of two tensors; each part of the rows of one gives a part of the other's gradient
    **rows_of("_cdist_forward", _sensitive(rule("... m d!, ... n d! -> ... m n"))),
    **rows_of(
        "_cdist_backward",
        _sensitive(rule("... m n, ... m d!, ... n d!, ... m n -> ... m d", linear="0"), backward=True),
    ),
    # a mean divides by the size of what it sees, so its dims are whole; a Partial on another axis passes
    **rows_of("mean", _sensitive(_reduced(free=False, linear="0", dim=None))),
    **rows_of("mean.dim", _sensitive(_reduced(free=False, linear="0"))),
    **rows_of(_SOME, OpRow(_reduced(free=False))),
    **rows_of(_STATISTICS, _sensitive(_reduced(free=False))),
    **rows_of(
        "logsumexp",
        _sensitive(
            _reduced(free=False),
            takes=lambda call, dtypes: prod(call.operands[0]) * dtypes[0].itemsize,
            of_rows="log sum",
        ),
    ),
    **rows_of("linalg_vector_norm norm.ScalarOpt_dim", _sensitive(_reduced(free=False, dim=2))),
    **rows_of("kthvalue", OpRow(_reduced(free=False, dim=2))),
    **rows_of("softmax.int", _sensitive(along_dims(dim_argument(1)), of_rows="softmax")),
    **rows_of("log_softmax.int", _sensitive(along_dims(dim_argument(1)), of_rows="log softmax")),
    **rows_of(_SOFTMAX, _sensitive(along_dims(dim_argument(1)))),
    **rows_of(_SOFTMAX_BACKWARD, _sensitive(along_dims(dim_argument(2), linear="0"), backward=True)),
    **rows_of("cumsum", _sensitive(along_dims(dim_argument(1), linear="0"))),
    **rows_of("cumprod logcumsumexp", _sensitive(along_dims(dim_argument(1)))),
    **rows_of("cummax cummin sort argsort", OpRow(along_dims(dim_argument(1)))),
    **rows_of("sort.stable argsort.stable topk", OpRow(along_dims(dim_argument(2)))),
    **rows_of("diff", OpRow(_diff)),
    # torch takes these apart before anything is placed
    **rows_of("dist cdist pdist renorm cosine_similarity", OpRow(precision="sensitive")),
}
