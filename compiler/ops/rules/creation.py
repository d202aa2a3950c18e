"""Rows of operators that create a tensor of a shape; its dims are free factors, and the shape becomes local."""

from ..factors import OpCall, OpRule, apply_dims, rule
from ..op_row import OpRow, plain_dims, pointwise, result_shape, rows_of


def created(call: OpCall) -> OpRule:
    """Return the rule of a creation operator. An operand lends its dtype and device alone: its dims have no factor."""
    operands = [((),) * len(shape) for shape in call.operands]
    return apply_dims(call, operands, [plain_dims(len(call.results[0]))])


CREATION_RULES = {
    **rows_of("zeros", OpRow(created, result_shape(0, "size"), number=0)),
    **rows_of("new_zeros", OpRow(created, result_shape(1, "size"), number=0)),
    **rows_of("zeros_like", OpRow(pointwise(), number=0)),
    **rows_of("zero _efficientzerotensor", OpRow(number=0)),
    # a model's memory that nobody wrote is written as zeros: no program may read what lies there
    **rows_of("empty.memory_format", OpRow(created, result_shape(0, "size"), number=0, reaches_outside=True)),
    **rows_of("new_empty", OpRow(created, result_shape(1, "size"), number=0, reaches_outside=True)),
    **rows_of("empty_like", OpRow(pointwise(), number=0, reaches_outside=True)),
    **rows_of("empty_strided new_empty_strided empty_permuted", OpRow(number=0, reaches_outside=True)),
    **rows_of("ones", OpRow(created, result_shape(0, "size"), number=1)),
    **rows_of("new_ones", OpRow(created, result_shape(1, "size"), number=1)),
    **rows_of("ones_like", OpRow(pointwise(), number=1)),
    **rows_of("full", OpRow(created, result_shape(0, "size"), number_at=1)),
    **rows_of("new_full", OpRow(created, result_shape(1, "size"), number_at=2)),
    **rows_of("full_like", OpRow(pointwise(), number_at=1)),
    **rows_of("fill.Scalar", OpRow(pointwise())),  # what it is written over has a gradient, of zeros
    **rows_of("scalar_tensor", OpRow(created, number_at=0)),
    # a rank's part begins at an offset, which no change of sizes can say: the partition emits it
    **rows_of("arange arange.start arange.start_step", OpRow(rule("-> n"), counts=True)),
}
