"""Shapes at all declared sizes: a shape that is right only at the sizes looked at is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parc.compiler.layout.mesh import Mesh
from parc.compiler.program.program import REFERENCE_FILE
from parc.compiler.sizes.polynomials import Ranges, check_points
from parc.compiler.sizes.size_range import SizeRange
from parc.compiler.sizes.template import Template
from parc.compiler.verify.ranges import size_faults

RANGES = {"B": SizeRange(4, 64, 4), "S": SizeRange(8, 800, 8)}
MESH = Mesh((("dp", 2), ("tp", 2)))
HEAD = '"""parc program: role model, action F"""\n\nmesh(dp=2, tp=2)\n\n\n'
PROGRAM = (
    HEAD
    + """def block(
    x: "f32[{B}/dp, {S}, (4 8/tp)]",
):
    rows = aten.reshape.default(x, [{B*S}/dp, 32/tp])  # f32[{B*S}/dp, (4 8/tp)] | blocks.* m.py:3
    part = aten.slice.Tensor(x, 1, 0, {S/2})  # f32[{B}/dp, {S/2}, (4 8/tp)] | blocks.* m.py:4
    more = aten.cat.default([part, x, part], 1)  # f32[{B}/dp, {2*S}, (4 8/tp)] | blocks.* m.py:5
    return {
        "rows": rows,
        "more": more,
    }


def forward(
    x: "f32[{B}/dp, {S}, (4 8/tp)]",  # input x
    table: "f32[800, (4 8/tp)]",  # parameter table
):
    places = aten.slice.Tensor(table, 0, 0, {S})  # f32[{S}, (4 8/tp)] | embed m.py:8
    placed = aten.add.Tensor(x, places)  # f32[{B}/dp, {S}, (4 8/tp)] | embed m.py:9
    rows, more = block(placed)  # f32[{B*S}/dp, (4 8/tp)]; f32[{B}/dp, {2*S}, (4 8/tp)] | blocks.0 plan:7
    whole = parc.all_gather(more, 'dp', 0, 1)  # f32[{B}, {2*S}, (4 8/tp)] | - -
    return {
        "saved rows": rows,
        "saved whole": whole,
    }
"""
)


def found(program: str, ranges: Ranges = RANGES) -> list[str]:
    template = Template.read(ranges, {"p.py": program, REFERENCE_FILE: program})  # whose numbers are its own
    return [f"{fault.value}: {fault.message}" for fault in size_faults(template, MESH)]


def test_shapes_are_proved_for_all_sizes() -> None:
    assert found(PROGRAM) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[{B*S}/dp, 32/tp])", "[{B*S+8*B}/dp, 32/tp])", "rows: aten.reshape.default does not take all sizes: shape"),
        ("x, 1, 0, {S/2})", "x, 1, 0, {S/2+8})", "part: aten.slice.Tensor makes [B, S/2 + 8, 32], not [B, S/2, 32]"),
        ("dp, {2*S}, (4 8/tp)] | b", "dp, {3*S}, (4 8/tp)] | b", "more: aten.cat.default makes [B, 2*S, 32], not [B"),
        ("] | blocks.0", ", 1] | blocks.0", "rows, more: gives the results of `block` other types than it returns"),
        ("f32[{B}, {2*S}, (4 8/tp)] | -", "f32[{B}, {S+8}, (4 8/tp)] | -", "whole: parc.all_gather makes"),
        (", (4 8/tp)] | embed m.py:9", ", 4, 8/tp] | embed m.py:9", "placed: aten.add.Tensor makes [B, S, 32], not [B"),
        (", (4 8/tp)] | embed m.py:9", "] | embed m.py:9", "placed: aten.add.Tensor makes [B, S, 32], not [B, S]"),
        ("f32[800, (4 8/tp)]", "f32[792, (4 8/tp)]", "places: aten.slice.Tensor makes"),
        ("table, 0, 0, {S})  # f32[{S},", "table, 0, 0, 800)  # f32[800,", "placed: aten.add.Tensor does not take"),
    ],
)  # fmt: skip
def test_what_does_not_follow_the_sizes_is_refused(old: str, new: str, message: str) -> None:
    assert old in PROGRAM
    said = found(PROGRAM.replace(old, new))
    assert any(line.startswith(message) for line in said), said


def test_a_size_that_is_right_wherever_it_is_looked_at_is_refused() -> None:
    low, high, between = sorted(point["S"] for point in check_points({"S": RANGES["S"]}))
    # (S - low)(S - between)(S - high) is nothing there
    ones, twos, threes = low + high + between, low * high + low * between + high * between, low * high * between
    wrong = f"{{S**3-{ones}*S**2+{twos + 1}*S-{threes}}}"
    ranges = {"S": RANGES["S"]}
    program = PROGRAM.replace("{B}", "8").replace("{B*S}", "{8*S}")
    assert found(program, ranges) == []
    line = "f32[{S}, (4 8/tp)] | embed"
    right = Template.read(ranges, {"p.py": program, REFERENCE_FILE: program})
    template = replace(right, texts={**right.texts, "p.py": program.replace(line, line.replace("{S}", wrong))})
    assert all(template.at(point) == right.at(point) for point in check_points(ranges))
    assert [fault.value for fault in size_faults(template, MESH)] == ["places", "placed"]


def test_a_number_that_is_rounded_is_held_at_every_size() -> None:
    # of two sizes a line goes through what is rounded at both; of more it does not
    program = HEAD + (
        'def forward(\n    x: "f32[{S}]",  # input x\n):\n'
        "    half = aten.unfold.default(x, 0, 3, 2)  # f32[SIZE, 3] | a m.py:3\n"
        '    return {\n        "saved half": half,\n    }\n'
    )
    few = {"S": SizeRange(8, 16, 8)}
    assert found(program.replace("SIZE", "{S/2-1}"), few) == []
    odd = {"S": SizeRange(7, 700, 7)}
    said = found(program.replace("SIZE", "{S-4}"), {"S": SizeRange(7, 14, 7)})
    assert said and "makes" in said[0]
    assert found(program.replace("SIZE", "{S-4}"), odd)
