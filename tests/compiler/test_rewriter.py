"""Functions before and after a rewriter, as text; and what a function says of its makers, readers and uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Placement, TensorType
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Function, Line, Ref, needed, operands
from parc.compiler.program.rewriter import FreshNames, LineWriter, Rewriter, started
from parc.compiler.program.text import parse_program

MESH = Mesh.parse("dp=2")
VECTOR = TensorType(torch.float32, (4,), Placement.whole(MESH))
BEFORE = """
def forward(
    x: "f32[4]",  # input x
    w: "f32[4]",  # parameter w
):
    mul = aten.mul.Tensor(x, w)  # f32[4] | net net.py:3
    relu = aten.relu.default(mul)  # f32[4] | net net.py:4
    add = aten.add.Tensor(relu, mul)  # f32[4] | net net.py:5
    neg = aten.neg.default(relu)  # f32[4] | net net.py:6
    sum = aten.sum.default(add)  # f32[] | net net.py:7
    return {
        "loss": sum,
        "metric relu": relu,
    }
"""


@pytest.fixture
def function() -> Function:
    return parse_program(f'"""parc program: role model, action F"""\n\nmesh(dp=2)\n\n{BEFORE}').main


def lines_of(function: Function) -> dict[str, Line]:
    return {line.made[0].name: line for line in function.lines}


def rows(function: Function) -> list[str]:
    """Return parameters, lines without types and origins, and returns."""
    text = (row.strip().partition("  # ")[0] for row in function.text(MESH, "F").splitlines())
    return [row for row in text if row.partition(" = ")[1] or row.partition(": ")[1]]


def texts(lines: Sequence[Line]) -> list[str]:
    return [line.text(MESH).strip().partition("  # ")[0] for line in lines]


def test_a_function_knows_makers_readers_and_uses(function: Function) -> None:
    lines = lines_of(function)
    assert dict(function.makers) == lines
    assert function.readers == {
        "x": [lines["mul"]], "w": [lines["mul"]], "mul": [lines["relu"], lines["add"]],
        "relu": [lines["add"], lines["neg"]], "add": [lines["sum"]], "neg": [], "sum": [],
    }  # fmt: skip
    assert function.uses == {"x": 1, "w": 1, "mul": 2, "relu": 3, "add": 1, "sum": 1}
    assert function.uses["neg"] == 0
    assert [function.at(line) for line in function.lines] == [0, 1, 2, 3, 4]


def test_a_line_that_reads_a_value_twice_is_one_reader_and_two_uses() -> None:
    writer = LineWriter(MESH)
    x = writer.take("x", VECTOR, Binding("input", "x"))
    writer.emit("aten.mul.Tensor", (Ref(x.name), Ref(x.name)), x.type)
    function = writer.function("forward")
    assert (len(function.readers["x"]), function.uses["x"]) == (1, 2)


def test_needed_lines_leave_dead_code_out(function: Function) -> None:
    lines, read = needed(function.lines, ["sum"])
    assert [line.made[0].name for line in lines] == ["mul", "relu", "add", "sum"]
    assert read == {"sum", "add", "relu", "mul", "x", "w"}
    assert needed(function.lines, ["w"]) == ((), {"w"})


def test_operands_of_lines_are_what_others_make(function: Function) -> None:
    assert operands(function.lines) == ["x", "w"]
    assert operands(function.lines[2:4]) == ["relu", "mul"]


def test_copied_lines_read_the_copies_of_what_they_read(function: Function) -> None:
    rewriter, lines, names = Rewriter(MESH, function), lines_of(function), {"mul": "x"}
    rewriter.copy(lines["relu"], names)
    rewriter.copy(lines["add"], names, "{}_again")
    assert rows(rewriter.function())[-4:-2] == [
        "relu_1 = aten.relu.default(x)",
        "add_again = aten.add.Tensor(relu_1, x)",
    ]
    assert names == {"mul": "x", "relu": "relu_1", "add": "add_again"}


def test_a_rewriter_without_changes_makes_the_same_function(function: Function) -> None:
    assert Rewriter(MESH, function).function() == function


def test_inserted_lines_come_where_they_are_said_to_come_and_stay_in_order(function: Function) -> None:
    rewriter, lines = Rewriter(MESH, function), lines_of(function)
    x = function.values()["x"]
    rewriter.emit("aten.exp.default", (Ref("x"),), x.type)
    rewriter.insert_after(lines["mul"])
    rewriter.emit("aten.sin.default", (Ref("mul"),), x.type)
    rewriter.insert_before(lines["relu"])
    rewriter.emit("aten.cos.default", (Ref("mul"),), x.type)
    rewriter.insert_after(None)
    rewriter.emit("aten.abs.default", (Ref("x"),), x.type)
    rewriter.insert_before(None)
    rewriter.emit("aten.log.default", (Ref("exp"),), x.type)
    assert [line.made[0].name for line in rewriter.function().lines] == [
        "abs", "mul", "sin", "cos", "relu", "add", "neg", "sum", "exp", "log",
    ]  # fmt: skip


def test_own_lines_read_a_renamed_value_and_inserted_lines_the_one_that_they_name(function: Function) -> None:
    rewriter, relu = Rewriter(MESH, function), lines_of(function)["relu"]
    rewriter.insert_after(relu)
    doubled = rewriter.emit("aten.mul.Tensor", (Ref("relu"), 2.0), relu.made[0].type, relu.origin)
    rewriter.rename("relu", doubled.name)
    assert rows(rewriter.function()) == [
        'x: "f32[4]",',
        'w: "f32[4]",',
        "mul = aten.mul.Tensor(x, w)",
        "relu = aten.relu.default(mul)",
        "mul_1 = aten.mul.Tensor(relu, 2.0)",
        "add = aten.add.Tensor(mul_1, mul)",
        "neg = aten.neg.default(mul_1)",
        "sum = aten.sum.default(add)",
        '"loss": sum,',
        '"metric relu": mul_1,',
    ]


def test_lines_are_replaced_and_dropped_and_parameters_and_returns_change(function: Function) -> None:
    rewriter, lines = Rewriter(MESH, function), lines_of(function)
    bias = rewriter.take("w", function.values()["w"].type, Binding("parameter", "b"))
    shifted = LineWriter(MESH, rewriter.names)
    total = shifted.emit("aten.add.Tensor", (Ref("relu"), Ref(bias.name)), bias.type)
    shifted.emit("aten.sub.Tensor", (Ref(total.name), Ref("mul")), bias.type)
    rewriter.replace(lines["add"], *shifted.lines)
    rewriter.rename("add", "sub")
    rewriter.drop([lines["neg"]])
    del rewriter.returns[Binding("metric", "relu")]
    assert rows(rewriter.function("backward")) == [
        'x: "f32[4]",',
        'w: "f32[4]",',
        'w_1: "f32[4]",',
        "mul = aten.mul.Tensor(x, w)",
        "relu = aten.relu.default(mul)",
        "add_1 = aten.add.Tensor(relu, w_1)",
        "sub = aten.sub.Tensor(add_1, mul)",
        "sum = aten.sum.default(sub)",
        '"loss": sum,',
    ]
    assert rewriter.function("backward").name == "backward"
    assert [line.made[0].name for line in function.lines] == ["mul", "relu", "add", "neg", "sum"]  # as it was


def test_fresh_names_avoid_those_of_the_function_and_words_of_python(function: Function) -> None:
    names = FreshNames.beside(function)
    assert [names.fresh(base) for base in ("relu", "relu", "exp", "exp", "lambda", "inf")] == [
        "relu_1", "relu_2", "exp", "exp_1", "lambda_", "inf_",
    ]  # fmt: skip
    names = FreshNames({"add": 1, "add_1": 1})
    assert names.fresh("add") == "add_2"


def test_a_collective_that_is_started_is_awaited_under_its_own_name() -> None:
    writer = LineWriter(MESH)
    x = writer.take("x", VECTOR, Binding("input", "x"))
    writer.emit("parc.all_reduce", (Ref(x.name), "dp"), x.type)
    (line,) = writer.lines
    assert texts(started(line, writer.names, message=3)) == [
        "all_reduce_on_its_way = parc.all_reduce(x, 'dp', message=3)",
        "all_reduce = parc.wait(all_reduce_on_its_way)",
    ]
    assert texts(started(line, writer.names)) == [
        "all_reduce_on_its_way_1 = parc.all_reduce(x, 'dp')",
        "all_reduce = parc.wait(all_reduce_on_its_way_1)",
    ]


def test_the_pass_of_the_architecture_notes_starts_sums_and_awaits_them_at_their_readers() -> None:
    writer = LineWriter(MESH)
    x = writer.take("x", VECTOR, Binding("input", "x"))
    summed = writer.emit("parc.all_reduce", (Ref(x.name), "dp"), VECTOR)
    hidden = writer.emit("aten.exp.default", (Ref(x.name),), VECTOR)
    writer.emit("aten.add.Tensor", (Ref(summed.name), Ref(hidden.name)), VECTOR)
    main = writer.function("forward")
    source = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")
    code = next(part for part in source.split("```python\n") if part.startswith("rewriter = ")).partition("```")[0]
    names: dict[str, Any] = {"Rewriter": Rewriter, "started": started, "mesh": MESH, "main": main}
    exec(code, names)
    assert texts(names["main"].lines) == [
        "all_reduce_on_its_way = parc.all_reduce(x, 'dp')",
        "exp = aten.exp.default(x)",
        "all_reduce = parc.wait(all_reduce_on_its_way)",
        "add = aten.add.Tensor(all_reduce, exp)",
    ]
