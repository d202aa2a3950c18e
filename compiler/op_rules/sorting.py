"""Rows of operators that order or scan a dim: it is whole, all others are free."""

from ..factors import OpCall, OpRule
from .row import Row, along, dim_argument, table


def _diff(call: OpCall) -> OpRule:
    """`diff(x, n, dim, prepend, append)`: linear in all its tensors together."""
    ruled = along(dim_argument(2))(call)
    return OpRule(ruled.operands, ruled.results, ruled.sizes, ruled.whole, (frozenset(range(len(call.operands))),))


TABLE = {
    **table("cumsum", Row(along(dim_argument(1), linear="0"))),
    **table("cumprod logcumsumexp cummax cummin sort argsort", Row(along(dim_argument(1)))),
    **table("sort.stable argsort.stable topk", Row(along(dim_argument(2)))),
    **table("diff", Row(_diff)),
}
