"""Rows of contractions: matrix products and einsum."""

import math
import re
from typing import Any

from ..factors import OpCall, OpRule, linear_sets, opaque, rule
from ..op_row import OpRow, Ruling, contracted, is_operand, rows_of


def _linear_rule(call: OpCall) -> OpRule:
    if len(call.operands[1]) == 1:  # a weight that is a vector
        return rule("... k, k -> ...", linear="0|1")(call) if len(call.operands) == 2 else opaque(call)
    if is_operand(call.argument(2, "bias")):
        return rule("... k!, n k!, n -> ... n", linear="02|12")(call)  # else the bias is added once per part of k
    return rule("... k, n k -> ... n", linear="0|1")(call)


def _matmul(call: OpCall) -> OpRule:
    left, right = (len(shape) for shape in call.operands)
    if left > 1 and right > 1:
        return rule("... m k, ... k n -> ... m n", linear="0|1")(call)
    first = "k" if left == 1 else "... k"
    second = "k" if right == 1 else "... k n"
    result = "" if left == right else "... n" if left == 1 else "..."
    return rule(f"{first}, {second} -> {result}", linear="0|1")(call)


def _einsum(call: OpCall) -> OpRule:
    """The rule of `einsum`, which is its equation. An equation that takes a diagonal promises nothing."""
    inputs, arrow, output = str(call.args[0]).replace(" ", "").partition("->")
    letters = inputs.replace("...", "").replace(",", "")
    if not arrow:
        output = "..." * ("..." in inputs) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    linear = "|".join(str(index) for index in range(len(call.operands)))
    terms = [*inputs.split(","), output]
    if any(len(set(term.replace("...", ""))) != len(term.replace("...", "")) for term in terms):
        return opaque(call, linear_sets(linear))
    spaced = [" ".join(re.findall(r"\.\.\.|\w", term)) for term in terms]
    return rule(f"{', '.join(spaced[:-1])} -> {spaced[-1]}", linear=linear)(call)


def _product_row(ruling: Ruling, **facts: Any) -> OpRow:
    return OpRow(ruling, precision="product", flops=contracted(ruling), **facts)


def _einsum_flops(call: OpCall) -> int:
    """Count the multiply-adds of the first two operands, of their product with the third, and so on, as torch takes
    them."""
    ruled, count = _einsum(call), 0
    factors = [{name for names in dims for name in names} for dims in (*ruled.operands, *ruled.results)]
    product = factors[0]
    for at, other in enumerate(factors[1:-1], 1):
        product = product | other
        count += math.prod(ruled.sizes[name] for name in product)
        product = product & set().union(*factors[at + 1 :])
    return count


def _added_product(left: str, right: str, result: str) -> Ruling:
    """The rule of `beta * x + alpha * (left @ right)`, with x broadcast: x and one of the two may be Partial
    together."""

    def apply(call: OpCall) -> OpRule:
        rank = len(call.operands[0])
        x = " ".join(result.split()[-rank:]) if rank else ""
        return rule(f"{x}, {left}, {right} -> {result}", linear="01|02")(call)

    return apply


def _pair(text: str) -> Ruling:
    return rule(text, linear="0|1")


def _bilinear(call: OpCall) -> int:
    return math.prod(call.results[0]) * math.prod(call.operands[2][1:])


CONTRACTIONS_RULES = {
    # rows of one matrix product per expert: tokens [t k] sorted by expert, weights [e k n], and where each expert ends;
    # one operator gives both gradients, so that neither factor may be partial
    "transformers.grouped_mm_fallback.default": OpRow(rule("t! k, e! k n, e! -> t! n"), precision="product"),
    "transformers.grouped_mm_fallback_backward.default": OpRow(
        rule("t! k, e! k n, e!, t! n -> t! k, e! k n", linear="3")
    ),
    **rows_of(
        "mm",
        _product_row(
            _pair("m k, k n -> m n"), storage="fresh", addable=True, plain=True, stands_for="aten.linear.default"
        ),
    ),
    **rows_of("bmm", _product_row(_pair("b m k, b k n -> b m n"), storage="fresh")),
    **rows_of("mv", _product_row(_pair("m k, k -> m"))),
    **rows_of("dot vdot", _product_row(_pair("k, k ->"))),
    **rows_of("outer", OpRow(_pair("m, n -> m n"), precision="product")),
    # what is summed is whole: each part of the sum would add x once more
    **rows_of(
        "addmm",
        _product_row(_added_product("m k!", "k! n", "m n"), storage="fresh", plain=True, stands_for="aten.add.Tensor"),
    ),
    **rows_of("addmv", _product_row(_added_product("m k!", "k!", "m"))),
    **rows_of("addr", OpRow(_added_product("m", "n", "m n"), precision="product")),
    **rows_of("baddbmm", _product_row(_added_product("b m k!", "b k! n", "b m n"))),
    **rows_of("addbmm", _product_row(_added_product("b! m k!", "b! k! n", "m n"))),
    **rows_of("linear", _product_row(_linear_rule)),
    **rows_of("matmul", _product_row(_matmul)),
    **rows_of("einsum", OpRow(_einsum, precision="product", flops=_einsum_flops)),
    # torch takes these apart before anything is placed
    **rows_of("bilinear", OpRow(precision="product", flops=_bilinear)),
    **rows_of("_grouped_mm lstm.input gru.input rnn_tanh.input rnn_relu.input", OpRow(precision="product")),
}
