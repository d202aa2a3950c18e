"""Rows of operators that reach outside the tensors they are given, which no program may have."""

from ..op_row import OpRow, rows_of

OUTSIDE_RULES = rows_of("from_file _local_scalar_dense item _print _assert_async", OpRow(reaches_outside=True))
