"""Rows of matrix products and their relatives."""

import re

from ..factors import OpCall, OpRule, linear_sets, opaque, rule
from ..op_row import OpRow, is_operand


def _linear(call: OpCall) -> OpRule:
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
    """The equation is the rule; one that takes a diagonal promises nothing."""
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


def _added(left: str, right: str, result: str) -> OpRow:
    """`beta * x + alpha * (left @ right)`, x broadcast to the result: x and one of the two may be Partial together."""

    def apply(call: OpCall) -> OpRule:
        rank = len(call.operands[0])
        x = " ".join(result.split()[-rank:]) if rank else ""
        return rule(f"{x}, {left}, {right} -> {result}", linear="01|02")(call)

    return OpRow(apply)


_PRODUCTS = {
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "mv": "m k, k -> m",
    "dot": "k, k ->",
    "vdot": "k, k ->",
    "outer": "m, n -> m n",
}

# What is summed is whole: each part of the sum would add x once more.
_SUMS = {
    "addmm": ("m k!", "k! n", "m n"),
    "addmv": ("m k!", "k!", "m"),
    "addr": ("m", "n", "m n"),
    "baddbmm": ("b m k!", "b k! n", "b m n"),
    "addbmm": ("b! m k!", "b! k! n", "m n"),
}

# Rows of one matrix product per expert: tokens [t k] sorted by expert, weights [e k n], and where each expert ends. One
# operator gives both gradients, so that neither factor may be partial.
_GROUPED = {
    "grouped_mm_fallback": ("t! k, e! k n, e! -> t! n", ""),
    "grouped_mm_fallback_backward": ("t! k, e! k n, e!, t! n -> t! k, e! k n", "3"),
}

CONTRACTIONS_RULES = {
    **{f"transformers.{name}.default": OpRow(rule(text, linear=linear)) for name, (text, linear) in _GROUPED.items()},
    **{f"aten.{name}.default": OpRow(rule(text, linear="0|1")) for name, text in _PRODUCTS.items()},
    **{f"aten.{name}.default": _added(*texts) for name, texts in _SUMS.items()},
    "aten.linear.default": OpRow(_linear),
    "aten.matmul.default": OpRow(_matmul),
    "aten.einsum.default": OpRow(_einsum),
}
