"""Rows of operators that route tokens to experts: the first dim of packed rows is (experts, tokens)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..factors import OpCall, OpRule, rule
from ..op_row import OpRow, Ruling, contracted


def _by_weights(plain: str, transposed: str, linear: str) -> Ruling:
    """Return the rule of an operator whose weights are [e, n, h], or [e, h, n] if it is ``transposed``."""

    def apply(call: OpCall) -> OpRule:
        return rule(transposed if call.args[3] else plain, linear=linear)(call)

    return apply


def _chosen_flops(ruling: Ruling) -> Callable[[OpCall], int]:
    """Count the multiply-adds of rows that are present: those of ``top`` experts for each token."""

    def count(call: OpCall) -> int:
        present, rows = call.packed or (int(call.args[4]), int(ruling(call).sizes.get("e", 1)))
        return contracted(ruling)(call) * present // rows

    return count


_EXPERT_LINEAR = _by_weights("(e t) h, e t, e n h -> (e t) n", "(e t) h, e t, e h n -> (e t) n", "0|2")
_EXPERT_OUTER = _by_weights("(e t) h, (e t) n, e t -> e n h", "(e t) h, (e t) n, e t -> e h n", "0|1")


def _routed(call: OpCall) -> OpRule:
    if len(call.operands[0]) == 4:  # slots
        return rule("e! b c h, e! b c -> e! b c h")(call)
    rows = "e! t" if call.operands[0] == call.operands[1] else "(e! t) h"
    return rule(f"{rows}, e! t -> {rows}")(call)


_packed_row = partial(OpRow, storage="fresh", compiled=False)

EXPERTS_RULES: dict[str, OpRow] = {
    "parc.pack.default": _packed_row(rule("t h, e t -> (e t) h", linear="0"), packs="rows"),
    "parc.unpack.default": _packed_row(rule("(e t) h, e t -> t h", linear="0"), packs="sums"),
    "parc.pick.default": _packed_row(rule("e t, e t -> (e t) 1", linear="0"), packs="rows"),
    "parc.unpick.default": _packed_row(rule("(e t) 1, e t -> e t", linear="0"), packs="sums"),
    "parc.spread.default": _packed_row(rule("e n, e t -> (e t) n", linear="0"), packs="rows"),
    "parc.expert_sum.default": _packed_row(rule("(e t) n, e t -> e n", linear="0"), packs="sums"),
    # packed rows change here from a split over experts to one over tokens, or back: experts may not be split
    "parc.route.default": OpRow(_routed, moves="copy", packs="rows", reroutes=True, compiled=False),
    "parc.expert_linear.default": _packed_row(
        _EXPERT_LINEAR, precision="product", packs="rows", flops=_chosen_flops(_EXPERT_LINEAR)
    ),
    "parc.expert_outer.default": _packed_row(
        _EXPERT_OUTER, precision="product", packs="sums", flops=_chosen_flops(_EXPERT_OUTER)
    ),
    "parc.slots.default": OpRow(rule("e b s! -> e b c!"), storage="fresh", of_slots="assigns"),
    "parc.dispatch.default": OpRow(rule("b s! h, e b c -> e b c h", linear="0"), storage="fresh"),
    "parc.combine.default": OpRow(rule("e b c h, e b c -> b s! h", linear="0"), storage="fresh", of_slots="leaves"),
    "parc.pick_slots.default": OpRow(rule("e b s!, e b c -> e b c", linear="0"), storage="fresh"),
    "parc.unpick_slots.default": OpRow(rule("e b c, e b c -> e b s!", linear="0"), storage="fresh", of_slots="leaves"),
}
