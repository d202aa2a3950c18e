"""Rows of parc's own operators: randomness, padding, sharded lookups and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..factors import OpCall, OpRule, apply_dims, rule
from ..op_row import DRAW_BLOCK, TILE, OpRow, plain_dims, pointwise, result_shape
from .creation import created


def _fill_pad(call: OpCall) -> OpRule:
    """The rule of an operator that fills padding. It is linear if it writes zeros: padding of a sum is the sum of
    paddings."""
    return rule("... -> ...", linear="" if call.args[5] else "0")(call)


def _resize_pad(call: OpCall) -> OpRule:
    """The rule of an operator that changes the length of a dim (outer, entries). The outer parts may be split; the
    entries of a part are whole."""
    dims, (dim, outer) = plain_dims(len(call.operands[0])), call.args[1:3]
    before, after = ((*dims[:dim], ("outer", name), *dims[dim + 1 :]) for name in ("before", "after"))
    whole, linear = frozenset({"before", "after"}), [frozenset({0})]
    return apply_dims(call, [before], [after], whole=whole, linear=linear, sizes={"outer": outer})


def _numbered(call: OpCall, dtypes: Sequence[torch.dtype]) -> int:
    """Count the bytes of the temporaries of drawn numbers: the numbers of a tile's entries, and what is drawn."""
    shape = call.results[0]
    entries, columns = math.prod(shape), next(
        (size for dim in range(len(shape)) if (size := math.prod(shape[dim:])) <= TILE), TILE
    )  # fmt: skip
    if entries > TILE:
        return 13 * TILE + 8 * columns
    return max(9 * entries, 5 * entries + 16 * min(entries, DRAW_BLOCK))


def _first_operand(call: OpCall, dtypes: Sequence[torch.dtype]) -> int:
    """Count the bytes of a temporary like the first operand."""
    return math.prod(call.operands[0]) * dtypes[0].itemsize


OWN_RULES: dict[str, OpRow] = {
    "parc.square_sum.default": OpRow(
        rule("... -> "), precision="sensitive", reduces="squares", power=2.0, storage="fresh"
    ),
    "parc.next_loss_scale.default": OpRow(
        rule(", , , -> , , "), precision="sensitive", storage="fresh", compiled=False
    ),
    "parc.stream_key.default": OpRow(rule("t! -> "), storage="fresh", compiled=False),
    "parc.dropout_mask.default": OpRow(
        created, result_shape(1, "size"), law="bernoulli", key_at=0, by_number=True, storage="fresh",
        takes=_numbered,
    ),
    "parc.random.default": OpRow(
        created, result_shape(1, "size"), key_at=0, storage="fresh", compiled=False, takes=_numbered
    ),
    "parc.iota.default": OpRow(
        created, lambda call, operands, results: [(0, "size", results[0][0])], by_number=True, storage="fresh"
    ),
    "parc.lookup.default": OpRow(
        rule("v e, ... -> ... e"), moves="index", counted=(0, 0), stands_for="aten.embedding.default", storage="fresh"
    ),
    "parc.lookup_backward.default": OpRow(
        rule("... e, ... -> v e", linear="0"), lambda call, operands, results: [(2, "rows", results[0][0])],
        unread_rows=True, storage="fresh", compiled=False, takes=_first_operand,
    ),
    "parc.token_loss.default": OpRow(
        rule("t v, t -> t"), precision="loss", reduces="exponentials", counted=(0, 1), ignored_at=2, replaced=True,
        of_rows="loss",
    ),
    "parc.row_terms.default": OpRow(rule("t v, t -> t, t"), precision="loss", reduces="exponentials"),
    "parc.row_max.default": OpRow(precision="sensitive", reduces="max"),
    "parc.loss_parts.default": OpRow(
        rule("t v, t 1, t -> c! t"), precision="loss", reduces="exponentials", counted=(0, 1), named_at=2,
        storage="fresh", takes=lambda call, dtypes: dtypes[0].itemsize * min(math.prod(call.operands[0]), TILE),
    ),
    "parc.loss_parts_backward.default": OpRow(
        rule("c! t, t v, t 1, t -> t v", linear="0"), precision="loss", backward=True, counted=(1, 1), named_at=3,
        storage="fresh",
    ),
    "parc.fill_pad.default": OpRow(_fill_pad, moves="place"),  # it passes on what holds no padding
    "parc.cut_pad.default": OpRow(_resize_pad, moves="place", storage="fresh", compiled=False),
    "parc.grow_pad.default": OpRow(_resize_pad, moves="place", storage="fresh", compiled=False),
    # where both places are one memory, the result is the operand
    "parc.store.default": OpRow(pointwise("0"), moves="copy", elementwise=True, carries="away", compiled=False),
    "parc.load.default": OpRow(pointwise("0"), moves="copy", elementwise=True, carries="back", compiled=False),
}  # fmt: skip
