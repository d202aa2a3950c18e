"""Random batches: some targets are ignored, and never all targets of a loss; columns that look up tables of their own
have bounds of their own."""

from __future__ import annotations

import pytest
import torch

from parc.compiler.program.text import parse_program
from parc.runtime.data.random_batch import NO_BOUND, IndexBound, class_bounds, random_batch

LOSS = '''"""parc program: role model, action reference"""

mesh()


def forward(
    logits: "f32[{rows}, 8]",  # input logits
    y: "i64[{batch}, 2]",  # input y
):
    kept = aten.slice.Tensor(y, 1, {start}, {end})  # i64[{batch}, 1] | - -
    flat = aten.reshape.default(kept, [{rows}])  # i64[{rows}] | - -
    each = parc.token_loss.default(logits, flat, -100)  # f32[{rows}] | - -
    loss = aten.sum.default(each)  # f32[] | - -
    return {{
        "loss": loss,
    }}
'''


@pytest.mark.parametrize("start", [0, 1])
def test_a_loss_that_leaves_a_position_out_has_targets(start: int) -> None:
    reference = parse_program(LOSS.format(rows=2, batch=2, start=start, end=start + 1))
    ignored = 0
    for seed in range(200):
        (batch,) = random_batch(reference, 1, torch.Generator().manual_seed(seed))
        assert (batch["y"][:, start] != -100).any()
        ignored += int((batch["y"] == -100).sum())
    assert ignored > 0


COLUMNS = '''"""parc program: role model, action reference"""

mesh()


def forward(
    city: "f32[1000, 4]",  # parameter city
    day: "f32[7, 4]",  # parameter day
    x: "i64[6, 2, 4]",  # input x
):
    first = aten.select.int(x, 2, 0)  # i64[6, 2] | - -
    rows = aten.embedding.default(city, first)  # f32[6, 2, 4] | - -
    some = aten.slice.Tensor(x, 2, 1, 4, 2)  # i64[6, 2, 2] | - -
    flat = aten.reshape.default(some, [24])  # i64[24] | - -
    more = aten.embedding.default(day, flat)  # f32[24, 4] | - -
    others = aten._to_copy.default(x, dtype=torch.float32)  # f32[6, 2, 4] | - -
    a = aten.sum.default(rows)  # f32[] | - -
    b = aten.sum.default(more)  # f32[] | - -
    c = aten.sum.default(others)  # f32[] | - -
    sum_1 = aten.add.Tensor(a, b)  # f32[] | - -
    loss = aten.add.Tensor(sum_1, c)  # f32[] | - -
    return {
        "loss": loss,
    }
'''


def test_each_column_is_below_the_rows_of_its_own_table() -> None:
    reference = parse_program(COLUMNS)
    bound = class_bounds(reference)["x"]
    assert torch.as_tensor(bound.rows).flatten().tolist() == [1000, 7, NO_BOUND, 7]
    (batch,) = random_batch(reference, 1, torch.Generator().manual_seed(0))
    most = batch["x"].amax((0, 1))
    assert most[0] > 7 and most[1] <= 6 and most[2] <= 1 and most[3] <= 6
    sample = torch.tensor([[999, 6, -123456, 6], [0, 0, 10**6, 7]])
    assert bound.fault("x", sample)[0] == "`x` holds 7 at [1, 3], but the model knows 0 to 6 there"
    assert bound.fault("x", sample[:1]) == ("", "")
    assert bound.within(sample).tolist() == [[999, 6, -123456, 6], [0, 0, 10**6, 0]]


MOVED = '''"""parc program: role model, action reference"""

mesh()


def forward(
    table: "f32[16, 4]",  # parameter table
    x: "i64[6, 4]",  # input x
):
{lines}
    rows = aten.embedding.default(table, part)  # f32[6, {columns}, 4] | - -
    loss = aten.sum.default(rows)  # f32[] | - -
    return {{
        "loss": loss,
    }}
'''
MOVES = {
    "rolled": (["roll.default(x, [-1], [1])  # i64[6, 4]", "slice.Tensor(moved, 1, 0, 3)  # i64[6, 3]"], [16]),
    "flipped": (["flip.default(x, [1])  # i64[6, 4]", "slice.Tensor(moved, 1, 0, 3)  # i64[6, 3]"], [16]),
    "padded": (["constant_pad_nd.default(x, [1, 0])  # i64[6, 5]", "slice.Tensor(moved, 1, 1, 4)  # i64[6, 3]"], [16]),
    "copied": (["clone.default(x)  # i64[6, 4]", "slice.Tensor(moved, 1, 1, 4)  # i64[6, 3]"], [NO_BOUND, 16, 16, 16]),
    "turned": (["permute.default(x, [1, 0])  # i64[4, 6]", "slice.Tensor(moved, 0, 0, 3)  # i64[3, 6]"],
               [16, 16, 16, NO_BOUND]),
    "of some samples": (["slice.Tensor(x, 0, 0, 3)  # i64[3, 4]", "slice.Tensor(moved, 1, 0, 3)  # i64[3, 3]"],
                        [16, 16, 16, NO_BOUND]),
}  # fmt: skip


@pytest.mark.parametrize("how", MOVES)
def test_an_order_that_no_view_has_bounds_all_entries(how: str) -> None:
    (first, last), expected = MOVES[how]
    lines = [f"    {name} = aten.{text} | - -" for name, text in (("moved", first), ("part", last))]
    reference = parse_program(MOVED.format(lines="\n".join(lines), columns=3))
    assert torch.as_tensor(class_bounds(reference)["x"].rows).flatten().tolist() == expected


def test_a_part_of_a_dim_whose_entries_have_several_bounds_is_held_to_the_largest() -> None:
    bound = IndexBound(torch.tensor([[5, 3]]))
    assert bound.drawn(torch.zeros(2, 1)).tolist() == [[3], [3]]
    assert bound.within(torch.tensor([[7, 7]], dtype=torch.int32)).dtype is torch.int32
    assert bound.fault("x", torch.tensor([[4, 4]]))[0] and not bound.fault("x", torch.tensor([[4], [4]]))[0]
    assert bound.fault("x", torch.tensor([[5], [4]]))[0]
