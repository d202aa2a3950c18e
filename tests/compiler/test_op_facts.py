"""Facts in rows are true: each operator is run, and does what its row says."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parc.compiler.ops.op_row import OpFacts
from parc.compiler.ops.rules import TABLE, facts
from parc.compiler.program.program import operator as program_operator
from tests.draws import share

from .op_cases import Draw, case_of
from .sharded_ops import Whole, run_whole
from .test_op_rules import MAKERS

COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "total": operator.add, "difference": operator.sub, "multiple": operator.mul, "ratio": operator.truediv,
    "both": operator.and_, "either": operator.or_, "below": operator.lt, "at most": operator.le, "above": operator.gt,
    "at least": operator.ge,
}  # fmt: skip
EXAMPLES = share(0.24).max_examples


def entries(tensors: list[torch.Tensor]) -> set[float]:
    """Return the numbers in tensors."""
    return {float(number) for tensor in tensors for number in tensor.reshape(-1)}


def hold(whole: Whole, row: OpFacts) -> int:
    """Check a call against its operator's facts, and count the facts that were checked."""
    operands, results, args = whole.operands, whole.results, whole.call.args
    looked = 0
    if row.moves in ("copy", "shape"):
        assert torch.equal(results[0].reshape(-1), operands[0].reshape(-1))
        looked += 1
    if row.keeps_values or row.moves == "join":
        beside = {0.0, *(float(item) for item in args if isinstance(item, (int, float)))}  # what a pad writes
        assert entries(results) <= entries(operands if row.moves == "join" else operands[:1]) | (
            beside if row.moves == "place" else set()
        )
        looked += 1
    if row.storage:
        where = {operand.untyped_storage().data_ptr() for operand in operands if operand.numel()}
        for result in results:
            assert not result.numel() or (result.untyped_storage().data_ptr() in where) == (row.storage == "view")
        looked += 1
    if row.creates and whole.case.has_values:
        args = whole.case.args
        assert bool((results[0] == row.number_in(args)).all())
        looked += 1
    if row.put_back:
        new, others = results[0] + 1, whole.case.args[1:]
        made = program_operator(row.put_back)(operands[0], new, *others)
        assert torch.equal(whole.case.target(made, *others), new)
        assert torch.equal(program_operator(row.put_back)(made, results[0], *others), operands[0])
        looked += 1
    if row.casts and results[0].is_floating_point() and operands[0].is_floating_point():
        torch.testing.assert_close(results[0].double(), operands[0].double(), rtol=1e-2, atol=1e-2)
        looked += 1
    if row.computes and not whole.call.kwargs:
        logical = row.computes in ("both", "either") and results[0].dtype == torch.bool
        pair = [item.bool() if logical else item for item in whole.case.args[:2]]
        torch.testing.assert_close(results[0], COMPUTED[row.computes](*pair))
        looked += 1
    if row.power is not None:
        torch.testing.assert_close(results[0], operands[0] ** row.power)
        looked += 1
    if row.reduces == "sum":
        torch.testing.assert_close(results[0].sum(), operands[0].sum())
        looked += 1
    if row.flops is not None:
        with FlopCounterMode(display=False) as counter:
            whole.case.target(*whole.case.args, **whole.case.kwargs)
        counted = counter.get_total_flops()
        assert counted in (0, 2 * row.flops(whole.call))  # torch counts no products of vectors
        looked += 1
    return looked


@pytest.mark.parametrize("op", MAKERS)
def test_an_operator_does_what_its_row_says(op: str) -> None:
    row, looked = facts(op), 0
    said = row.moves in ("", "index", "scatter") and not (row.storage or row.creates or row.casts or row.computes)
    if said and row.power is None and row.reduces != "sum" and row.flops is None:
        return  # a row that says none of this

    for seed in range(EXAMPLES):
        looked += hold(run_whole(case_of(op, MAKERS[op](Draw(seed)))), row)
    assert looked or "empty" in op


def test_what_stops_gradients_does() -> None:
    x = torch.randn(3, requires_grad=True)
    stops = [op for op, row in TABLE.items() if row.stops_gradient]
    assert stops
    for op in stops:
        _, name, overload = op.split(".")
        assert not getattr(getattr(torch.ops.aten, name), overload)(x).requires_grad


def test_overloads_without_a_row_are_known_as_their_operator_is() -> None:
    assert facts("aten.norm.Scalar").precision == "sensitive"
    assert facts("aten.add_.Tensor").computes == "total"
    assert facts("aten.uniform_.default").law == "uniform"
    assert facts(torch.ops.aten.view.dtype).moves == ""  # it has a row, as it makes other numbers
    assert facts("aten.nothing.default") == facts("mylib.scale.default") == facts("block_1")
