"""The checker: a step written by hand passes, and every change of one line is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.checking.checks import static_faults
from parc.compiler.build.build import Build
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import TensorType, parse_type
from parc.compiler.program.actions import accumulation
from parc.compiler.program.program import Fault, Program
from parc.compiler.program.roles import SINGLE, Role
from parc.compiler.program.text import ProgramError, parse_program
from parc.compiler.verify.lines import check_program
from parc.compiler.verify.step import check_bindings, mesh_faults

MESH = Mesh.parse("dp=2, tp=2")
STORED = {"w": parse_type("f32[4, 4/tp]", MESH), "b": parse_type("f32[4]", MESH)}

SCALE = """\
def scale(
):
    full = aten.full.default([], 1.0, dtype=torch.float32)  # f32[] | - -
    return {
        "scale": full,
    }
"""

FORWARD = """\
def forward(
    x: "f32[8/dp, 4/tp]",  # input x
    w: "f32[4, 4/tp]",  # parameter w
    b: "f32[4]",  # parameter b
    rng: "i64[2]",  # rng
):
    key = parc.stream_key.default(rng, 'drop', 1)  # i64[] | - -
    t = aten.t.default(w)  # f32[4/tp, 4] | - -
    mm = aten.mm.default(x, t)  # f32[8/dp, 4] +tp | - -
    all_reduce = parc.all_reduce(mm, 'tp')  # f32[8/dp, 4] | - -
    mask = parc.dropout_mask.default(key, [8/dp, 4], 0.5, torch.float32)  # f32[8/dp, 4] | - -
    mul = aten.mul.Tensor(all_reduce, mask)  # f32[8/dp, 4] | - -
    add = aten.add.Tensor(mul, b)  # f32[8/dp, 4] | - -
    tanh = aten.tanh.default(add)  # f32[8/dp, 4] | - -
    sum = aten.sum.default(tanh)  # f32[] +dp | - -
    return {
        "loss": sum,
        "saved mask": mask,
        "saved tanh": tanh,
    }
"""

BACKWARD = """\
def inner(
    tanh: "f32[8/dp, 4]",
    grad: "f32[]",
):
    expand = aten.expand.default(grad, [8/dp, 4])  # f32[8/dp, 4] | - -
    tanh_backward = aten.tanh_backward.default(expand, tanh)  # f32[8/dp, 4] | - -
    return {
        "tanh_backward": tanh_backward,
    }


def backward(
    scale: "f32[]",  # scale
    x: "f32[8/dp, 4/tp]",  # input x
    mask: "f32[8/dp, 4]",  # saved mask
    tanh: "f32[8/dp, 4]",  # saved tanh
):
    made = inner(tanh, scale)  # f32[8/dp, 4] | - -
    bias = aten.sum.dim_IntList(made, [0])  # f32[4] +dp | - -
    mul = aten.mul.Tensor(made, mask)  # f32[8/dp, 4] | - -
    t = aten.t.default(mul)  # f32[4, 8/dp] | - -
    mm = aten.mm.default(t, x)  # f32[4, 4/tp] +dp | - -
    return {
        "w": mm,
        "b": bias,
    }
"""

LOSS = """\
def loss(
    loss: "f32[] +dp",  # loss
    scale: "f32[]",  # scale
):
    all_reduce = parc.all_reduce(loss, 'dp')  # f32[] | - -
    mul = aten.mul.Tensor(all_reduce, scale)  # f32[] | - -
    return {
        "loss": mul,
    }
"""

REDUCE = """\
def reduce(
    w: "f32[4, 4/tp] +dp",  # gradient w
    b: "f32[4] +dp",  # gradient b
):
    all_reduce = parc.all_reduce(w, 'dp')  # f32[4, 4/tp] | - -
    all_reduce_1 = parc.all_reduce(b, 'dp')  # f32[4] | - -
    square_sum = parc.square_sum.default(all_reduce)  # f32[] +tp | - -
    all_reduce_2 = parc.all_reduce(square_sum, 'tp')  # f32[] | - -
    square_sum_1 = parc.square_sum.default(all_reduce_1)  # f32[] | - -
    add = aten.add.Tensor(all_reduce_2, square_sum_1)  # f32[] | - -
    sqrt = aten.sqrt.default(add)  # f32[] | - -
    return {
        "gradient w": all_reduce,
        "gradient b": all_reduce_1,
        "grad_norm": sqrt,
    }
"""

MODEL = '''"""parc program: role model, action reference"""

mesh()


def forward(
    x: "f32[8, 4]",  # input x
    w: "f32[4, 4]",  # parameter w
    b: "f32[4]",  # parameter b
    rng: "i64[2]",  # rng
):
    key = parc.stream_key.default(rng, 'drop', 1)  # i64[] | - -
    linear = aten.linear.default(x, w)  # f32[8, 4] | - -
    mask = parc.dropout_mask.default(key, [8, 4], 0.5, torch.float32)  # f32[8, 4] | - -
    mul = aten.mul.Tensor(linear, mask)  # f32[8, 4] | - -
    add = aten.add.Tensor(mul, b)  # f32[8, 4] | - -
    tanh = aten.tanh.default(add)  # f32[8, 4] | - -
    sum = aten.sum.default(tanh)  # f32[] | - -
    return {
        "loss": sum,
    }
'''

TEXTS = {"SCALE": SCALE, "F": FORWARD, "B": BACKWARD, "LOSS": LOSS, "REDUCE": REDUCE}


def step(action: str = "", old: str = "", new: str = "") -> dict[str, Program]:
    """Return the step's programs, with one text replaced in one of them."""
    found = {}
    for name, text in TEXTS.items():
        if name == action:
            assert text.count(old) == 1
            text = text.replace(old, new)
        head = f'"""parc program: role stage0, action {name}"""\n\nmesh({MESH})\n\n\n'
        found[name] = parse_program(head + text, name)
    return found


def faults(programs: dict[str, Program], stored: dict[str, TensorType] | None = None) -> list[Fault]:
    """Return the faults that all static checks of programs find."""
    found = [fault for program in programs.values() for fault in check_program(program)]
    return found + mesh_faults(programs, MESH) + check_bindings(programs, STORED if stored is None else stored)


def test_the_step_is_right() -> None:
    assert not faults(step())


def test_rows_that_are_packed_otherwise_than_a_line_makes_them_are_refused() -> None:
    text = '''"""parc program: role stage0, action F"""

mesh(dp=2, tp=2)


def forward(
    x: "f32[8, 4] 2 of 8",  # input x
):
    tanh = aten.tanh.default(x)  # f32[8, 4] {} of 8 | - -
    return {{
        "loss": tanh,
    }}
'''
    assert not check_program(parse_program(text.format(2), "F"))
    (fault,) = check_program(parse_program(text.format(1), "F"))
    assert fault.message == "aten.tanh.default does not make rows that are packed so"


# program, what stands there, what stands there instead, and what the checker says
WRONG = [
    ("F", "mm = aten.mm.default(x, t)  # f32[8/dp, 4] +tp", "mm = aten.mm.default(x, t)  # f32[8/dp, 4]",
     "aten.mm.default makes `f32[8/dp, 4] +tp`, not `f32[8/dp, 4]`"),
    ("F", "aten.mul.Tensor(all_reduce, mask)", "aten.mul.Tensor(mm, mask)", "makes `f32[8/dp, 4] +tp`"),
    ("F", "aten.tanh.default(add)", "aten.tanh.default(mm)", "not linear in operands that are still to be summed"),
    ("F", "parc.all_reduce(mm, 'tp')", "parc.all_reduce(mm, 'dp')", "all_reduce over `dp` needs P"),
    ("F", "parc.all_reduce(mm, 'tp')", "parc.all_reduce(mm, 'tp,tp')", "are not distinct axes"),
    ("F", "parc.all_reduce(mm, 'tp')", "parc.all_reduce(mm, 'pp')", "are not distinct axes"),
    ("F", "parc.all_reduce(mm, 'tp')", "parc.all_reduce([mm], 'tp')", "takes one value"),
    ("F", "parc.all_reduce(mm, 'tp')", "parc.all_reduce()", "takes one value"),
    ("F", "aten.mm.default(x, t)", "aten.mm.default(t, x)", "does not take these shapes"),
    ("F", "aten.tanh.default(add)", "aten.rand_like.default(add)", "random state"),
    ("F", "    t = aten", "    dead = aten.t.default(x)  # f32[4/tp, 8/dp] | - -\n    t = aten",
     "is made and never read"),
    ("F", '        "saved tanh": tanh,\n', "", "nothing makes `saved tanh` before it"),
    ("F", '"saved tanh": tanh', '"saved tanh": add', "is not `add`"),
    ("F", '"saved tanh": tanh', '"saved tanh": tanh,\n        "saved add": add', "is saved and never read"),
    ("F", "# parameter b", "# gradient b", "nothing makes `gradient b` before it"),
    ("F", "# parameter b", "# key b", "nothing is bound to"),
    ("F", 'w: "f32[4, 4/tp]"', 'w: "f32[4/tp, 4]"', "`parameter w` has another type"),
    ("F", '"loss": sum', '"count": sum', "`loss` is not returned"),
    ("F", "# rng", "# input x", "takes `input x` twice"),
    ("B", "(grad, [8/dp, 4])", "(grad, [8, 4])",
     "sizes of aten.expand.default on a rank are not those its rule derives"),
    ("B", "tanh: \"f32[8/dp, 4]\",\n    grad", "tanh: \"f32[8, 4/dp]\",\n    grad", "operands of other types"),
    ("B", "inner(tanh, scale)  # f32[8/dp, 4]", "inner(tanh, scale)  # f32[8, 4/dp]", "other types than it returns"),
    ("B", "inner(tanh, scale)", "inner(scale, tanh)", "operands of other types"),
    ("B", '        "b": bias,\n', "", "`gradient b` is returned, but nobody takes it"),
    ("B", '"b": bias', '"c": bias', "`c` is returned, but nobody takes it"),
    ("B", "# saved mask", "# saved key", "nothing makes `saved key`"),
    ("B", '"tanh_backward": tanh_backward', '"other": tanh_backward', "returns `tanh_backward` as `other`"),
    ("REDUCE", "parc.all_reduce(w, 'dp')  # f32[4, 4/tp]", "aten.alias.default(w)  # f32[4, 4/tp] +dp",
     "is still to be summed"),
    ("REDUCE", '"grad_norm": sqrt', '"scale": sqrt', "`scale` is returned, but nobody takes it"),
    ("REDUCE", '        "gradient b": all_reduce_1,\n', "", "`gradient b` is not returned"),
    ("SCALE", '"scale": full', '"count": full', "nothing makes `scale` before it"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "old", "new", "why"), WRONG)
def test_a_change_of_one_line_is_refused_with_its_reason(action: str, old: str, new: str, why: str) -> None:
    found = faults(step(action, old, new))
    assert any(why in fault.message for fault in found), "\n".join(map(str, found)) or "nothing is said"


def test_a_function_that_nobody_calls_is_refused() -> None:
    programs = step("B", "made = inner(tanh, scale)", "made = aten.mul.Tensor(tanh, scale)")
    assert any("is never called" in fault.message for fault in faults(programs))


def test_tables_that_the_rules_split_only_once_replaced_are_whole() -> None:
    text = '''"""parc program: role stage0, action F"""

mesh(dp=2, tp=2)


def forward(
    w: "f32[8/tp, 4]",  # parameter w
    x: "i64[6]",  # input x
):
    embedding = aten.embedding.default(w, x)  # f32[6, 4] +tp | - -
    return {
        "loss": embedding,
    }
'''
    assert [fault.message for fault in check_program(parse_program(text))] == [
        "aten.embedding.default needs dim 0 of its table whole"
    ]
    lookup = text.replace("aten.embedding.default(w, x)", "parc.lookup.default(w, x, -1)")
    assert not check_program(parse_program(lookup))


ZEROS = '''"""parc program: role stage0, action F"""

mesh(dp=2, tp=2)


def forward(
):
    full = aten.full.default([4], 0.0, dtype=torch.float32)  # f32[4] +tp | - -
    return {
        "loss": full,
    }
'''


def test_zeros_are_partial_sums_of_zero_and_ones_are_not() -> None:
    assert not check_program(parse_program(ZEROS))
    assert check_program(parse_program(ZEROS.replace("0.0", "1.0")))


def test_a_type_is_no_number() -> None:
    """torch takes any number for a type, and ends the process where there is no such type."""
    assert "dtype=torch.float32" in ZEROS
    (fault,) = check_program(parse_program(ZEROS.replace("dtype=torch.float32", "dtype=6")))
    assert "has a number where it takes a type" in str(fault)


def test_a_call_lacks_nothing_and_has_no_number_for_a_truth() -> None:
    (line,) = (row for row in ZEROS.splitlines() if "aten.full" in row)
    name, _, rest = line.partition(" = ")
    for call, said in (
        ("aten.full.default([4])", "lacks its `fill_value`"),
        ("aten.full.default([4], 0.0, dtype=torch.float32, pin_memory=1)", "a number for `pin_memory`"),
    ):
        (fault, *_) = check_program(parse_program(ZEROS.replace(line, f"{name} = {call}{rest[rest.index('  #') :]}")))
        assert said in str(fault)


@pytest.mark.parametrize("call", ["empty.memory_format([4]", "empty_strided.default([4], [1]"])
def test_memory_that_nobody_wrote_is_no_value(call: str) -> None:
    """Such memory often holds zeros, and then every test of numbers accepts it."""
    with pytest.raises(ProgramError, match="is not an operator that a program may use"):
        parse_program(ZEROS.replace("full.default([4], 0.0", call))


def test_programs_of_another_mesh_or_action_or_role_are_refused() -> None:
    programs = step()
    assert any("is of mesh" in fault.message for fault in mesh_faults(programs, Mesh.parse("dp=2")))
    swapped = {**programs, "F": programs["B"]}
    assert any("says that it is B" in fault.message for fault in mesh_faults(swapped, MESH))
    other = parse_program(programs["F"].text().replace("role stage0", "role stage1"))
    assert any("of the roles" in fault.message for fault in mesh_faults({**programs, "F": other}, MESH))


@pytest.mark.parametrize("lacking", ["SCALE", "F", "B", "LOSS", "REDUCE"])
def test_a_step_without_one_of_its_programs_is_refused(lacking: str) -> None:
    programs = {action: program for action, program in step().items() if action != lacking}
    reference = parse_program(MODEL)
    facts = {"microbatches": 1, "parameters": {name: type_.text(MESH) for name, type_ in STORED.items()},
             "padding": {}, "precision": [], "accumulate": "float32",
             "divisions": []}  # fmt: skip
    roles = {SINGLE: Role(SINGLE, programs, accumulation(1))}
    faults = static_faults(Build(Path(), {}, facts, programs, reference, roles, {}))
    assert any(f"has no program {lacking}" in str(fault) for fault in faults), faults


def test_a_stored_parameter_of_another_type_is_refused() -> None:
    other = {**STORED, "w": parse_type("f32[4/tp, 4]", MESH)}
    found = [str(fault) for fault in check_bindings(step(), other)]
    assert any("REDUCE gradient w: is not placed as its parameter is stored" in text for text in found), found
