"""Lines write over values that nobody reads again, and over no others."""

from __future__ import annotations

from contextlib import suppress

import torch

from parc.compiler.analysis.lifetimes import aliases, form_over, operand_over, reducible_in_place, spare_operands
from parc.compiler.layout.mesh import Mesh
from parc.compiler.ops.rules import TABLE
from parc.compiler.program.binding import LOSS, Binding
from parc.compiler.program.program import Program, operator
from parc.compiler.program.text import parse_program
from parc.runtime.backends.in_process import InProcess
from parc.runtime.machine.execute import Machine
from parc.runtime.machine.reuse import in_place

TEXT = '''"""parc program: role stage0, action F"""

mesh()


def forward(
    x: "f32[4, 4]",  # input x
):
    add = aten.add.Tensor(x, x)  # f32[4, 4] | - -
    t = aten.t.default(add)  # f32[4, 4] | - -
    neg = aten.neg.default(add)  # f32[4, 4] | - -
    mul = aten.mul.Tensor(t, neg)  # f32[4, 4] | - -
    exp = aten.exp.default(mul)  # f32[4, 4] | - -
    sum = aten.sum.dim_IntList(exp, [1], True)  # f32[4, 1] | - -
    expand = aten.expand.default(sum, [4, 4])  # f32[4, 4] | - -
    sub = aten.sub.Tensor(expand, mul)  # f32[4, 4] | - -
    return {
        "loss": sub,
        "buffer exp": exp,
    }
'''


def spare_of(program: Program) -> list[list[str]]:
    """Return the spare operands of each line of the main function."""
    main = program.main
    return [sorted(names) for names in spare_operands(main, aliases(program)[main.name])]


def test_storage_is_spare_once_nobody_reads_it_under_any_name() -> None:
    (function,) = parse_program(TEXT).functions
    spare = spare_of(parse_program(TEXT))
    assert spare == [
        [],  # the caller's
        [],
        [],  # t still looks at it
        ["neg", "t"],
        [],  # mul is read again
        [],  # returned
        ["sum"],  # but for what is made
        ["expand", "mul"],
    ]
    lines = [in_place(line, function, set(names), Mesh()) for line, names in zip(function.lines, spare, strict=True)]
    assert [None if found is None else (str(found[0]), found[1][0].name) for found in lines] == [
        None, None, None, ("aten.mul_.Tensor", "t"), None, None, None, ("aten.sub_.Tensor", "expand"),
    ]  # fmt: skip


CALL = (
    TEXT.partition("def forward")[0]
    + """def block(
    x: "f32[4, 4]",
    y: "f32[4, 4]",
):
    t = aten.t.default(x)  # f32[4, 4] | - -
    exp = aten.exp.default(y)  # f32[4, 4] | - -
    return {
        "t": t,
        "exp": exp,
    }


def forward(
    x: "f32[4, 4]",  # input x
):
    neg = aten.neg.default(x)  # f32[4, 4] | - -
    tanh = aten.tanh.default(x)  # f32[4, 4] | - -
    turned, grown = block(neg, tanh)  # f32[4, 4]; f32[4, 4] | - -
    add = aten.add.Tensor(grown, tanh)  # f32[4, 4] | - -
    mul = aten.mul.Tensor(neg, add)  # f32[4, 4] | - -
    sub = aten.sub.Tensor(turned, mul)  # f32[4, 4] | - -
    return {
        "loss": sub,
    }
"""
)


def test_the_results_of_a_call_share_storage_with_what_they_look_at_and_nothing_else() -> None:
    program = parse_program(CALL)
    assert spare_of(program)[3:] == [["grown", "tanh"], ["add"], ["mul", "turned"]]
    x = torch.randn(4, 4)
    plain, reused = (
        Machine(program, InProcess(Mesh()), torch.device("cpu"), reuse=reuse).run([{"x": x.clone()}])[0][LOSS]
        for reuse in (False, True)
    )
    assert torch.equal(plain, reused)


def test_a_sum_over_ranks_may_be_written_over_what_nothing_else_needs() -> None:
    head, _, body = TEXT.partition("    add =")
    assert body
    lines = [
        "    total = parc.all_reduce(w, 'dp')  # f32[4, 4] | - -",
        "    neg = aten.neg.default(x)  # f32[4, 4] +dp | - -",
        "    flat = aten.reshape.default(neg, [16])  # f32[16] +dp | - -",
        "    sum = parc.all_reduce(flat, 'dp')  # f32[16] | - -",
        "    exp = aten.exp.default(x)  # f32[4, 4] +dp | - -",
        "    view = aten.reshape.default(exp, [16])  # f32[16] +dp | - -",
        "    other = parc.all_reduce(view, 'dp')  # f32[16] | - -",
        '    return {\n        "gradient w": total,\n        "buffer a": sum,\n        "buffer b": other,',
        '        "buffer c": exp,\n    }\n',
    ]
    parameters = '    x: "f32[4, 4] +dp",  # input x\n    w: "f32[4, 4] +dp",  # gradient w\n):\n'
    text = head.partition("    x:")[0].replace("mesh()", "mesh(dp=2)") + parameters + "\n".join(lines)
    spare = spare_of(parse_program(text))
    assert [spare[at] for at in (0, 3, 6)] == [["w"], ["flat"], []]
    assert not spare_of(parse_program(text.replace('"gradient w"', '"buffer w"')))[0], "the caller's"


_HELD = '''"""parc program: role stage0, action F"""

mesh()


def forward(
    x: "f32[4, 4]",  # input x
):
    flat = aten.reshape.default(x, [16])  # f32[16] | - -
    neg = aten.neg.default(x)  # f32[4, 4] | - -
    twice = aten.add.Tensor(neg, neg)  # f32[4, 4] | - -
    view = aten.reshape.default(twice, [16])  # f32[16] | - -
    return {
        "gradient a": flat,
        "gradient b": neg,
        "gradient c": twice,
        "gradient d": view,
    }
'''


def test_a_sum_is_not_written_over_what_a_caller_or_another_result_holds() -> None:
    program = parse_program(_HELD)
    assert reducible_in_place(program, program.main) == {"neg"}


def test_reuse_changes_no_bit() -> None:
    program = parse_program(TEXT)
    x = torch.randn(4, 4)
    found = []
    for reuse in (False, True):
        given = x.clone()
        machine = Machine(program, InProcess(Mesh()), torch.device("cpu"), reuse=reuse)
        found.append(machine.run([{"x": given}])[0])
        assert torch.equal(given, x)
    plain, reused = found
    exp = Binding("buffer", "exp")
    assert torch.equal(plain[LOSS], reused[LOSS])
    assert torch.equal(plain[exp], reused[exp])


def storages(text: str) -> dict[str, int]:
    """Return the address of each value's storage when it was made."""
    seen: dict[str, int] = {}
    machine = Machine(parse_program(text), InProcess(Mesh()), torch.device("cpu"), reuse=True)
    machine.watch = lambda line, environments: seen.update(
        (value.name, environments[0][value.name].untyped_storage().data_ptr()) for value in line.results if value
    )
    machine.run([{"x": torch.randn(4, 4)}])
    return seen


_WIDENED = '''"""parc program: role stage0, action F"""

mesh()


def forward(
    x: "bf16[4, 4]",  # input x
    y: "f32[4, 4]",  # input y
):
    narrow = aten.neg.default(x)  # bf16[4, 4] | - -
    wide = aten.neg.default(y)  # f32[4, 4] | - -
    sum = aten.add.Tensor(narrow, wide)  # f32[4, 4] | - -
    return {
        "loss": sum,
    }
'''


def test_a_result_is_written_over_an_operand_of_its_own_type_alone() -> None:
    main = parse_program(_WIDENED).main
    line = main.lines[-1]
    assert operand_over(line, main, {"narrow"}, Mesh()) is None
    assert operand_over(line, main, {"narrow", "wide"}, Mesh()) == 1


def test_a_result_takes_the_storage_of_an_operand_that_is_laid_out_alike() -> None:
    seen = storages(TEXT)
    assert seen["sub"] != seen["expand"], "an expanded value has one entry for many"
    assert seen["mul"] != seen["t"], "transposed, it is not laid out as the result"
    seen = storages(TEXT.replace("aten.t.default(add)", "aten.abs.default(add)"))
    assert seen["mul"] == seen["t"]


_NUMBERS = {"number": 1, "Optional[number]": 5, "float": 0.5, "Optional[float]": 0.1, "int": 1, "bool": False}
"""Arguments by their types, beside tensors."""


def test_every_form_over_an_operand_has_the_bits_of_its_operator() -> None:
    """A form that writes while it still reads would differ in entries that it reads later."""
    formed = {op: form for op in TABLE if (form := form_over(op)) is not None}
    wanted = ("silu", "gelu", "tanh", "sigmoid", "threshold", "hardtanh", "leaky_relu", "elu")
    assert {f"aten.{name}_backward.default" for name in wanted} < formed.keys()
    compared = set()
    for op, form in formed.items():
        types = [str(argument.type) for argument in operator(op)._schema.arguments if not argument.has_default_value()]
        for dtype in (torch.float32, torch.int64, torch.bool):
            args = [
                torch.rand(64, 64).mul(8).to(dtype) if type_ == "Tensor" else _NUMBERS.get(type_) for type_ in types
            ]
            with suppress(RuntimeError):  # not of this dtype
                plain = operator(op)(*args)
                if isinstance(args[0], torch.Tensor) and plain.dtype == dtype:
                    over = form(*args)
                    assert over is args[0], op
                    torch.testing.assert_close(over, plain, rtol=0, atol=0, equal_nan=True)
                    compared.add(op)
    assert {f"aten.{name}_backward.default" for name in wanted} < compared


def test_a_form_that_computes_elsewhere_and_copies_is_none() -> None:
    assert form_over("aten.native_dropout_backward.default") is None
    assert form_over("aten.clone.default") is None
