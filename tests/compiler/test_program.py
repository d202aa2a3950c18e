"""Programs and their text: reading gives back what was printed, and refuses everything that is not a program."""

from __future__ import annotations

import ast
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.ops.rules import TABLE
from parc.compiler.program.program import Origin, Program, allowed, operator
from parc.compiler.program.text import ProgramError, parse_program

from .drawn import programs

GOOD = '''"""parc program: role stage0, action F"""

mesh(dp=2, tp=2)


def part(
    x: "f32[8/dp, 4]",
):
    relu = aten.relu.default(x)  # f32[8/dp, 4] | blocks.0 gpt.py:7 plan:3
    return {
        "relu": relu,
    }


def forward(
    x: "f32[8/dp, 4]",  # input x
    w: "f32[(3 4/tp), 4]",  # parameter w
):
    part_relu = part(x)  # f32[8/dp, 4] | - -
    view = aten.reshape.default(part_relu, [32/dp])  # f32[32/dp] | - -
    split, _, split_1 = aten.split.Tensor(w, 4/tp)  # f32[4/tp, 4]; -; f32[4/tp, 4] | - -
    sum = aten.sum.default(view, dtype=torch.float32)  # f32[] +dp | - -
    return {
        "loss": sum,
        "saved w": w,
    }
'''


def test_a_program_reads_back() -> None:
    program = parse_program(GOOD)
    assert program.text() == GOOD
    assert program.main.values()["split"].type.text(program.mesh) == "f32[4/tp, 4]"
    assert program.function("part").lines[0].origin == Origin("blocks.0", "gpt.py:7", 3)
    assert [line.calls_function for line in program.main.lines] == [True, False, False, False]


@given(programs())
def test_what_is_printed_reads_back_the_same(program: Program) -> None:
    text = program.text()
    again = parse_program(text)
    assert again == program
    assert again.text() == text


@given(st.text())
def test_any_text_is_a_program_or_refused(text: str) -> None:
    with pytest.raises(ProgramError):
        parse_program(text)


@given(st.data())
def test_a_program_with_some_characters_changed_is_refused_or_prints_as_it_reads(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(GOOD) - 1))
    end = data.draw(st.integers(at, min(len(GOOD), at + 6)))
    put = data.draw(
        st.one_of(st.text(max_size=4), st.text("_.()[]{}:=/*-#\"' \n" + string.ascii_lowercase, max_size=6))
    )
    text = GOOD[:at] + put + GOOD[end:]
    try:
        program = parse_program(text)
    except ProgramError:
        return
    assert program.text() == text


LINES = {
    "an import": '__import__("os").system("true")',
    "an import by name": "import os",
    "an attribute of a value": "y = x.grad",
    "a method": "y = x.clone()  # f32[8/dp, 4] | - -",
    "a lambda": "y = (lambda: x)()  # f32[8/dp, 4] | - -",
    "a comprehension": "y = aten.stack.default([x for _ in x])  # f32[8/dp, 4] | - -",
    "a starred argument": "y = aten.relu.default(*x)  # f32[8/dp, 4] | - -",
    "starred names": "y = aten.relu.default(x, **x)  # f32[8/dp, 4] | - -",
    "exec": 'y = exec("1")  # f32[8/dp, 4] | - -',
    "an operator that mutates": "y = aten.relu_.default(x)  # f32[8/dp, 4] | - -",
    "an operator that writes to an out": "y = aten.add.out(x, x, out=x)  # f32[8/dp, 4] | - -",
    "an operator that opens a file": 'y = aten.from_file.default("a")  # f32[8/dp, 4] | - -',
    "an operator of another library": "y = prims.copy_to.default(x, x)  # f32[8/dp, 4] | - -",
    "an operator that there is not": "y = aten.nothing.default(x)  # f32[8/dp, 4] | - -",
    "something else of torch": "y = torch.load(x)  # f32[8/dp, 4] | - -",
    "no dtype": "y = aten.sum.default(x, dtype=torch.load)  # f32[8/dp, 4] | - -",
    "a name that is not defined": "y = aten.relu.default(z)  # f32[8/dp, 4] | - -",
    "a function that is not defined": "y = later(x)  # f32[8/dp, 4] | - -",
    "a function with a literal": "y = part(1)  # f32[8/dp, 4] | - -",
    "no type": "y = aten.relu.default(x)",
    "two types": "y = aten.relu.default(x)  # f32[8/dp, 4]; f32[8/dp, 4] | - -",
    "a type that does not divide": "y = aten.relu.default(x)  # f32[7/dp, 4] | - -",
    "an unknown axis": "y = aten.relu.default(x)  # f32[8/pp, 4] | - -",
    "an axis twice": "y = aten.relu.default(x)  # f32[8/dp, 4/dp] | - -",
    "a cut that does not divide": "y = aten.reshape.default(x, [33/dp])  # f32[8/dp, 4] | - -",
    "a cut over no axis": "y = aten.reshape.default(x, [32/x])  # f32[8/dp, 4] | - -",
    "a sum": "y = aten.reshape.default(x, [16 + 16])  # f32[8/dp, 4] | - -",
    "a name twice": "x = aten.relu.default(x)  # f32[8/dp, 4] | - -",
    "an attribute as a result": "x.data = aten.relu.default(x)  # f32[8/dp, 4] | - -",
    "an item as a result": "x[0] = aten.relu.default(x)  # f32[8/dp, 4] | - -",
    "two statements": "y = aten.relu.default(x); z = aten.relu.default(x)  # f32[8/dp, 4] | - -",
    "a chain": "y = z = aten.relu.default(x)  # f32[8/dp, 4] | - -",
    "an assignment inside": "y = aten.relu.default(z := x)  # f32[8/dp, 4] | - -",
    "an f-string": 'y = aten.relu.default(f"{x}")  # f32[8/dp, 4] | - -',
    "a complex number": "y = aten.mul.Scalar(x, 1j)  # f32[8/dp, 4] | - -",
    "bytes": 'y = aten.mul.Scalar(x, b"")  # f32[8/dp, 4] | - -',
    "a call inside": "y = aten.relu.default(aten.relu.default(x))  # f32[8/dp, 4] | - -",
    "a loop": "for y in x: pass",
    "a branch": "y = x if x else x",
    "no origin": "y = aten.relu.default(x)  # f32[8/dp, 4]",
    "another spelling": "y = aten.relu.default( x )  # f32[8/dp, 4] | - -",
    "another number": "y = aten.mul.Scalar(x, 1e-5)  # f32[8/dp, 4] | - -",
    "deep nesting": f"y = aten.stack.default({'[' * 90}x{']' * 90})  # f32[8/dp, 4] | - ",
    "deeper nesting": f"y = aten.stack.default({'[' * 900}x{']' * 900})  # f32[8/dp, 4] | - -",
    "a long division": f"y = aten.reshape.default(x, [32{'/dp' * 5000}])  # f32[8/dp, 4] | - -",
    "a huge number": f"y = aten.mul.Scalar(x, {'9' * 5000})  # f32[8/dp, 4] | - -",
}


@pytest.mark.parametrize("what", LINES)
def test_a_line_that_is_none_is_refused(what: str) -> None:
    start = "    relu = aten"
    assert GOOD.count(start) == 1
    with pytest.raises(ProgramError):
        parse_program(GOOD.replace(start, f"    {LINES[what]}\n{start}"))


PLACES = {
    "a default": ('x: "f32[8/dp, 4]",\n', 'x: "f32[8/dp, 4]" = 1,\n'),
    "a decorator": ("def part", "@part\ndef part"),
    "a class": ("def part(", "class part:\n    pass\n\n\ndef part("),
    "code between functions": ("\n\n\ndef forward", "\n\nx = 1\n\n\ndef forward"),
    "a function twice": ("def forward", "def part"),
    "an async function": ("def part", "async def part"),
    "another head": ("mesh(dp=2, tp=2)", "mesh(2, 2)"),
    "a mesh by stars": ("mesh(dp=2, tp=2)", "mesh(**x)"),
    "a mesh of no size": ("mesh(dp=2, tp=2)", "mesh(dp=0, tp=2)"),
    "a mesh of words": ("mesh(dp=2, tp=2)", 'mesh(dp="2", tp=2)'),
    "no return": ('    return {\n        "relu": relu,\n    }\n', ""),
    "another return": ('    return {\n        "relu": relu,\n    }', "    return relu"),
    "returning a literal": ('"relu": relu', '"relu": 1'),
    "returning stars": ('"relu": relu', "**relu"),
    "one key twice": ('"saved w": w', '"loss": w'),
    "a comment": ("mesh(dp=2, tp=2)", "mesh(dp=2, tp=2)  # hello"),
    "a tab": ("    relu", "\trelu"),
    "a carriage return": ("mesh(dp=2, tp=2)\n", "mesh(dp=2, tp=2)\r\n"),
    "a form feed": ("\n\n\ndef part", "\f\n\n\ndef part"),
    "no end of line": ('"saved w": w,\n    }\n', '"saved w": w,\n    }'),
    "no functions": (GOOD[GOOD.index("\n\n\ndef part") :], "\n"),
    "the number infinity as a name": ("part_relu", "inf"),
}


@pytest.mark.parametrize("what", PLACES)
def test_a_text_that_is_not_made_as_programs_are_is_refused(what: str) -> None:
    old, new = PLACES[what]
    assert old in GOOD
    with pytest.raises(ProgramError):
        parse_program(GOOD.replace(old, new))


def test_the_message_names_the_line_and_what_should_stand_there() -> None:
    with pytest.raises(ProgramError, match=r"mine:9: stands where a program says `relu = aten.relu.default\(x\) "):
        parse_program(GOOD.replace("default(x)", "default( x)"), "mine")
    with pytest.raises(ProgramError, match=r"mine:9: `aten\.nothing\.default` is not an operator"):
        parse_program(GOOD.replace("relu.default", "nothing.default"), "mine")
    with pytest.raises(ProgramError, match=r"mine:21: `aten\.nothing\.default` is not an operator"):
        parse_program(GOOD.replace("split.Tensor", "nothing.default"), "mine")
    with pytest.raises(ProgramError, match=r"mine:22: invalid syntax"):
        parse_program(GOOD.replace("sum = aten", "sum = = aten"), "mine")


def test_a_function_that_stands_in_two_programs_is_read_once() -> None:
    first, second = parse_program(GOOD), parse_program(GOOD.replace("[(3 4/tp), 4]", "[(3 4/tp), 5]").replace(
        "f32[4/tp, 4]", "f32[4/tp, 5]"))  # fmt: skip
    assert first.main != second.main
    assert first.function("part") is second.function("part")
    other = parse_program(GOOD.replace("tp=2", "tp=4"))
    assert other.function("part") is not first.function("part")


def test_no_allowed_operator_mutates() -> None:
    mutable = []
    for name in TABLE:
        try:
            mutable += [name] if operator(name)._schema.is_mutable else []
        except (AttributeError, RuntimeError):
            assert not name.startswith(("aten.", "parc."))  # of a library that is not here
    assert not mutable
    every = [name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    names = [name if name.count(".") > 1 else f"{name}.default" for name in every]
    taken = [name for name in names if allowed(name)]
    assert len(names) > len(taken) > 500
    assert not [name for name in taken if operator(name)._schema.is_mutable]


@given(st.text(), st.text(), st.integers(0, 10**6))
def test_an_origin_reads_back(module: str, source: str, plan: int) -> None:
    origin = Origin(module, source, plan)
    assert Origin.parse(str(origin)) == origin


def test_a_program_is_python() -> None:
    """Editors can color it; nothing runs it."""
    assert len(ast.parse(GOOD).body) == 4
