"""Rows of operators that make a tensor out of a shape; its dims are free factors, and the shape becomes local."""

from ..factors import OpCall, OpRule, apply_dims, rule
from ..op_row import OpRow, plain_dims, pointwise, result_shape, rows_of


def made(call: OpCall) -> OpRule:
    """Any operand only lends its dtype and device: its dims belong to no factor."""
    operands = [((),) * len(shape) for shape in call.operands]
    return apply_dims(call, operands, [plain_dims(len(call.results[0]))])


CREATION_RULES = {
    **rows_of("zeros ones full empty.memory_format", OpRow(made, result_shape(0, "size"))),
    **rows_of("new_zeros new_ones new_full new_empty", OpRow(made, result_shape(1, "size"))),
    **rows_of("zeros_like ones_like full_like empty_like fill.Scalar", OpRow(pointwise())),
    **rows_of("scalar_tensor", OpRow(made)),
    # a rank's part begins at an offset, which no change of sizes can say: the partition emits it
    **rows_of("arange arange.start arange.start_step", OpRow(rule("-> n"))),
}
