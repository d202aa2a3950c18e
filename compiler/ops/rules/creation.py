"""Rows of operators that make a tensor out of a shape; its dims are free factors, and the shape becomes local."""

from ..factors import OpCall, OpRule, apply_dims, rule
from ..op_row import Row, plain_dims, pointwise, result_shape, table


def made(call: OpCall) -> OpRule:
    """Any operand only lends its dtype and device: its dims belong to no factor."""
    operands = [((),) * len(shape) for shape in call.operands]
    return apply_dims(call, operands, [plain_dims(len(call.results[0]))])


TABLE = {
    **table("zeros ones full empty.memory_format", Row(made, result_shape(0, "size"))),
    **table("new_zeros new_ones new_full new_empty", Row(made, result_shape(1, "size"))),
    **table("zeros_like ones_like full_like empty_like fill.Scalar", Row(pointwise())),
    **table("scalar_tensor", Row(made)),
    # a rank's part begins at an offset, which no change of sizes can say: the partition emits it
    **table("arange arange.start arange.start_step", Row(rule("-> n"))),
}
