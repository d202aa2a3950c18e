"""Every row of the operator table beside the operator itself: split as the rule says, run, and compared."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from parc.compiler.ops.factors import OpRule
from parc.compiler.ops.rules import OP_TABLES, TABLE, has_rule
from tests.draws import share

from .layout_cases import LAYOUT
from .model_cases import MODEL
from .op_cases import POINTWISE, REDUCTIONS, SORTING, Draw, Maker, case_of
from .product_cases import CONTRACTIONS
from .sharded_ops import check_linear, check_split, run_whole, splits

MAKERS: dict[str, Maker] = {
    name: make
    for family in (POINTWISE, REDUCTIONS, SORTING, CONTRACTIONS, LAYOUT, MODEL)
    for name, make in family.items()
}


EXAMPLES = share(0.4).max_examples
MORE = 4 * EXAMPLES


def try_row(op: str, change: Callable[[OpRule], OpRule] | None = None) -> int:
    """Try splits and Partial operands on drawn calls, by the row's rule or a changed one, and count them."""
    tried = 0
    for seed in range(MORE if change else EXAMPLES):
        whole = run_whole(case_of(op, MAKERS[op](Draw(seed))))
        if change:
            whole = replace(whole, rule=change(whole.rule))
        for ranks in (2, 3):
            for factor, outer in splits(whole.rule, ranks):
                check_split(whole, factor, outer, ranks)
                tried += 1
        for indices in whole.rule.linear:
            check_linear(whole, indices)
            tried += 1
    return tried


@pytest.mark.parametrize("op", sorted(MAKERS))
def test_rule_is_what_the_operator_does(op: str) -> None:
    assert try_row(op), "no example could have shown the row to be wrong: then it may not be in the table"


# A rule that promises too much has to be refused, or the test above says nothing.
NEED_WHOLE = ("softmax.int", "cumsum.default", "amax.default", "layer_norm.default", "linear.default", "cat.default")
NOT_LINEAR = ("gelu.default", "add.Tensor", "pow.Tensor_Scalar", "softmax.int", "amax.default", "addmm.default")


@pytest.mark.parametrize("op", NEED_WHOLE)
def test_a_rule_that_forgets_whole_factors_is_refused(op: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        try_row(f"aten.{op}", lambda rule: replace(rule, whole=frozenset()))


@pytest.mark.parametrize("op", NOT_LINEAR)
def test_a_rule_that_is_linear_too_often_is_refused(op: str) -> None:
    with pytest.raises(AssertionError):
        try_row(f"aten.{op}", lambda rule: replace(rule, linear=(frozenset({0}),)))


@pytest.mark.parametrize("op", ["mm.default", "transpose.int", "view.default", "sum.dim_IntList", "stack.default"])
def test_a_rule_that_names_a_wrong_dim_is_refused(op: str) -> None:
    def turned(rule: OpRule) -> OpRule:
        return replace(rule, results=tuple(tuple(reversed(dims)) for dims in rule.results))

    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        try_row(f"aten.{op}", turned)


def test_every_row_has_cases_and_every_case_a_row() -> None:
    """parc's own operators are tested with their partition, as is a sharded arange's offset; a scalar has no dims."""
    elsewhere = {name for name in TABLE if name.startswith(("parc.", "aten.arange.", "aten.scalar_tensor."))}
    assert {name for name in TABLE if has_rule(name)} - elsewhere == set(MAKERS)


def test_no_row_stands_in_two_tables() -> None:
    assert sum(map(len, OP_TABLES)) == len({name for family in OP_TABLES for name in family})
