"""The communication contract: every message of a step in order, and schedules that cannot work."""

from __future__ import annotations

from dataclasses import replace

from parc.cli.build import communication_text
from parc.compiler.analysis.communication import communication_table, messages
from parc.compiler.program.actions import accumulation
from parc.compiler.program.program import Program
from parc.compiler.program.roles import Role
from parc.compiler.program.text import parse_program

FORWARD = '''"""parc program: role stage0, action F"""

mesh(dp=2, tp=2)


def block(
    x: "f32[8/dp, 4] +tp",
):
    all_reduce = parc.all_reduce(x, 'tp')  # f32[8/dp, 4] | blocks.*.mlp gpt.py:7 plan:3
    shard = parc.shard(all_reduce, 'tp', 1, 1)  # f32[8/dp, 4/tp] | blocks.*.mlp -
    row_max = parc.row_max(shard, 'tp')  # f32[8/dp, 1] | - -
    return {
        "row_max": row_max,
    }


def forward(
    x: "f32[8/dp, 4] +tp",  # input x
):
    first = block(x)  # f32[8/dp, 1] | blocks.0 -
    second = block(x)  # f32[8/dp, 1] | blocks.1 -
    row_max = parc.row_max(first, '')  # f32[8/dp, 1] | - -
    sum = aten.sum.default(row_max)  # f32[] +dp | - -
    all_reduce = parc.all_reduce(sum, 'dp')  # f32[] | - -
    return {
        "loss": all_reduce,
        "saved second": second,
    }
'''


def program() -> Program:
    """Return a forward program whose two blocks are one function."""
    return parse_program(FORWARD)


def test_messages_are_those_that_meet_other_ranks_once_a_call_with_the_callers_module() -> None:
    found = [(m.op, m.axes, m.bytes, m.dtype, m.origin.module) for m in messages(program())]
    block = [("all_reduce", ("tp",), 64, "float32"), ("row_max", ("tp",), 16, "float32")]
    assert found == [
        *((*block[0], "blocks.0.mlp"), (*block[1], "")),
        *((*block[0], "blocks.1.mlp"), (*block[1], "")),
        ("all_reduce", ("dp",), 4, "float32", ""),
    ]


def test_the_table_counts_each_message_once_with_how_often_it_runs() -> None:
    rows = communication_table(Role("stage0", {"F": program()}, accumulation(3)))
    assert [row["number"] for row in rows] == list(range(5))
    assert {row["count_per_step"] for row in rows} == {3}
    assert rows[0]["module"] == "blocks.0.mlp"
    assert rows[0]["line"] == 3


def test_rows_are_by_phase_whatever_the_order_of_programs_and_roles() -> None:
    backward, forward = replace(program(), action="B"), program()
    role = Role("pp0", {"B": backward, "F": forward}, accumulation(3))
    rows = communication_table(role)
    assert [row["phase"] for row in rows] == ["forward"] * 5 + ["backward"] * 5
    other = [{**row, "role": "pp1", "axis": "pp" if row["op"] == "row_max" else row["axis"]} for row in rows]
    head, *lines = communication_text([*rows, *other]).splitlines()
    assert head.endswith("most by") and {line.split()[-1] for line in lines} == {"pp0", "pp1"}
    assert not communication_text(rows).splitlines()[0].endswith("most by")
    shown = [tuple(line.split()[:3]) for line in lines]
    one = [("tp", "all_reduce"), ("tp", "row_max"), ("dp", "all_reduce"), ("pp", "row_max")]
    assert shown == [(axis, phase, op) for phase in ("forward", "backward") for axis, op in one]
