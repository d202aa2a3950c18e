"""Lines that torch computes together, and gradients that are added to a total as they are made, or after a send."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.storages import Storages
from parc.checking.checks import check_build
from parc.compiler.analysis.lifetimes import addable, aliases
from parc.compiler.analysis.liveness import Liveness
from parc.compiler.analysis.memory import estimate_memory
from parc.compiler.analysis.products import BLAS
from parc.compiler.layout.mesh import Mesh
from parc.compiler.ops.rules import TABLE
from parc.compiler.program.binding import LOSS, Binding
from parc.compiler.program.program import Line, Program, Ref
from parc.compiler.resolve.requests import Pipeline
from parc.compiler.schedules import timelines
from parc.passes.programs.split import split_backward
from parc.runtime.backends.in_process import InProcess
from parc.runtime.machine.execute import Machine
from parc.runtime.machine.fusion import fused
from parc.runtime.machine.kernels import KERNELS
from parc.runtime.machine.registry import Kernel, code_for
from tests.checked_plans import compiled_net
from tests.runtime.staged import program

CPU = torch.device("cpu")
TYPES = {"w": "f32[4, 4]", "dw": "f32[4, 4]", "flat": "f32[8, 4]", "product": "f32[8, 4]"}


def lines_of(program: Program) -> list[str]:
    return [
        line.op.split(".")[1]
        for line in fused(program.main, aliases(program)[program.main.name], program.mesh, BLAS).lines
    ]


def test_a_product_that_is_added_to_something_is_one_line_with_the_sum() -> None:
    cube = {"x": "f32[2, 4, 4]", "y": "f32[2, 4, 4]", "back": "f32[2, 4, 4]", "sum": "f32[2, 4, 4]"}
    parsed = program("stage0", "F", "", (
        "x:input x", "w:parameter w", "y = exp(x)", "flat = reshape(y, [8, 4])", "product = mm(flat, w)",
        "back = reshape(product, [2, 4, 4])", "sum = add.Tensor(back, y)", "loss sum",
    ), TYPES | cube)  # fmt: skip
    assert lines_of(parsed) == ["exp", "reshape", "add_product"]
    x, w = torch.randn(2, 4, 4), torch.randn(4, 4)
    (found,) = Machine(parsed, InProcess(Mesh()), CPU, reuse=True).run([{"x": x, "w": w}])
    torch.testing.assert_close(found[LOSS], x.exp() @ w + x.exp())


@pytest.mark.parametrize(("factor", "ops"), [(2.0, ["exp", "addcmul"]), (3.0, ["exp", "mul", "addcmul"])])
def test_a_power_of_two_goes_into_the_line_of_its_sum(factor: float, ops: list[str]) -> None:
    words = ("x:input x", "exp = exp(x)", f"scaled = mul.Scalar(x, {factor})", "product = mul.Tensor(exp, scaled)",
             "sum = add.Tensor(exp, product)", "loss sum")  # fmt: skip
    parsed = program("stage0", "F", "", words, dict.fromkeys(("x", "exp", "scaled", "product", "sum"), "f32[64, 64]"))
    assert lines_of(parsed) == ops
    x = torch.randn(64, 64)
    plain, together = (
        Machine(parsed, InProcess(Mesh()), CPU, reuse=reuse).run([{"x": x.clone()}])[0][LOSS] for reuse in (False, True)
    )
    torch.testing.assert_close(plain, together)
    assert torch.equal(together, torch.addcmul(x.exp(), x * factor, x.exp()))


@pytest.mark.parametrize(("more", "types", "ops"), [
    ((), {}, ["exp", "addcmul"]),
    (("loss product",), {}, ["exp", "mul", "add"]),
    ((), dict.fromkeys(("x", "exp", "product", "sum"), "i64[2, 4]"), ["exp", "mul", "add"]),
    ((), {"x": "bf16[2, 4]"}, ["exp", "mul", "add"]),
], ids=["alone", "read twice", "of integers", "of another type"])  # fmt: skip
def test_a_product_entry_by_entry_is_one_line_with_its_sum(
    more: tuple[str, ...], types: dict[str, str], ops: list[str]
) -> None:
    words = ("x:input x", "exp = exp(x)", "product = mul.Tensor(x, exp)", "sum = add.Tensor(exp, product)")
    assert lines_of(program("stage0", "F", "", (*words, "saved sum", *more), {"product": "f32[2, 4]", **types})) == ops


FAR = (
    "x:input x",
    "w:parameter w",
    "y:input y",
    "big = exp(x)",
    "product = mm(big, w)",
    "neg = neg(y)",
    "s = tanh(neg)",
)


@pytest.mark.parametrize(("types", "ops"), [
    ({"product": "f32[2, 4]", "x": "f32[2, 4]", "big": "f32[2, 4]"}, ["exp", "neg", "tanh", "add_product"]),
    ({"product": "f32[2, 4]", "x": "f32[2, 64]", "big": "f32[2, 64]", "w": "f32[64, 4]"},
     ["exp", "mm", "neg", "tanh", "add"]),
], ids=["as large as the product", "larger"])  # fmt: skip
def test_what_a_product_reads_does_not_live_on_where_it_is_large(types: dict[str, str], ops: list[str]) -> None:
    parsed = program("stage0", "F", "", (*FAR, "sum = add.Tensor(s, product)", "loss sum"), TYPES | types)
    assert lines_of(parsed) == ops


def test_a_product_that_is_spread_over_what_it_is_added_to_stays_a_line_of_its_own(tmp_path: Path) -> None:
    wide = {"x": "f32[3, 2, 4]", "s": "f32[3, 2, 4]", "sum": "f32[3, 2, 4]", "v": "f32[2, 4]", "product": "f32[2, 4]"}
    words = ("x:input x", "v:parameter v", "w:parameter w", "s = exp(x)", "product = mm(v, w)")
    parsed = program("stage0", "F", "", (*words, "sum = add.Tensor(s, product)", "loss sum"), TYPES | wide)
    assert lines_of(parsed) == ["exp", "mm", "add"]
    file = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.register_buffer("pos", torch.randn(3, 8))

    def forward(self, x):
        return self.a(x).view(-1, 3, 8).tanh() + self.b(x).view(-1, 1, 8) + self.b(self.pos)
"""
    assert not check_build(compiled_net(tmp_path, file, 'Net" ()')).faults


def test_a_sum_that_waits_for_ranks_does_not_hold_its_product_up() -> None:
    words = ("x:input x", "w:parameter w", "s = parc.all_reduce(x, 'tp')", "product = mm(x, w)")
    types = TYPES | {"x": "f32[2, 4] +tp", "product": "f32[2, 4]"}
    parsed = program("stage0", "F", "tp=2", (*words, "sum = add.Tensor(s, product)", "loss sum"), types)
    assert lines_of(parsed) == ["all_reduce", "mm", "add"]


W = Binding("gradient", "w")
BACKWARD = program("stage1", "B", "", (
    "g:received g", "x:saved x", "w:parameter w", "t = t(x)", "twice = mul.Scalar(g, 2.0)", "dw = mm(t, twice)",
    "h = mul.Tensor(twice, x)", "w dw", "sent h h",
), TYPES | {"t": "f32[4, 2]"})  # fmt: skip


@pytest.mark.parametrize("kernels", [KERNELS, {**KERNELS, "aten.mm.default": lambda context, a, b: torch.mm(a, b)}])
def test_a_gradient_is_added_to_its_total_as_it_is_made(kernels: dict[str, Kernel]) -> None:
    """``twice`` dies in the line after the gradient's, which must not write over values that are still to be read."""
    machine = Machine(BACKWARD, InProcess(Mesh()), CPU, reuse=True, kernels=kernels)
    assert machine.addable == {W}
    g, x, w, before = torch.randn(2, 4), torch.randn(2, 4), torch.randn(4, 4), torch.randn(4, 4)
    total = before.clone()
    (found,) = machine.run([{"g": g, "x": x, "w": w}], totals=[{W: total}])
    assert found[W] is total
    torch.testing.assert_close(total, before + x.t() @ (2 * g))
    torch.testing.assert_close(found[Binding("sent", "h")], 2 * g * x)


@pytest.mark.parametrize("sums", ["f32", "bf16"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_a_gradient_that_is_cast_is_added_as_the_cast_gradient(dtype: str, sums: str) -> None:
    """The bits are those of the cast gradient's sum, also if a cast rounds."""
    wide = {"f32": torch.float32, "bf16": torch.bfloat16}[sums]
    parsed = program("stage1", "B", "", (
        "g:received g", "x:saved x", "t = t(x)", "dw = mm(t, g)", f"cast = _to_copy(dw, dtype={wide})", "w cast",
    ), {"g": f"{dtype}[2, 4]", "x": f"{dtype}[2, 4]", "t": f"{dtype}[4, 2]", "dw": f"{dtype}[4, 4]",
        "cast": f"{sums}[4, 4]"})  # fmt: skip
    machine = Machine(parsed, InProcess(Mesh()), CPU, reuse=True)
    (type_,) = {value.type.dtype for value in parsed.main.parameters}
    g, x, before = torch.randn(2, 4).to(type_), torch.randn(2, 4).to(type_), torch.randn(4, 4).to(wide)
    (found,) = machine.run([{"g": g, "x": x}], totals=[{W: before.clone()}])
    assert torch.equal(found[W], before + (x.t() @ g).to(wide))


def test_any_gradient_with_storage_of_its_own_is_added_once_made() -> None:
    parsed = program("stage1", "B", "", ("g:received g", "dw = exp(g)", "w dw"), {"g": "f32[4, 4]", "dw": "f32[4, 4]"})
    machine = Machine(parsed, InProcess(Mesh()), CPU, reuse=True)
    g, total = torch.randn(4, 4), torch.randn(4, 4)
    before = total.clone()
    (found,) = machine.run([{"g": g}], totals=[{W: total}])
    assert found[W] is total and torch.equal(total, before + g.exp())


def test_what_is_read_elsewhere_or_given_back_twice_is_not_added() -> None:
    assert code_for("adding").keys() == {op for op, row in TABLE.items() if row.addable}
    words = ("x:input x", "t = t(x)", "dw = mm(t, x)")
    for more, names in (
        (("sent x dw",), set()),
        (("w dw",), {"dw"}),
        (("w dw", "v dw"), set()),
        (("exp = exp(dw)", "w dw", "v exp"), {"exp"}),
        (("turned = t(dw)", "v turned"), set()),
    ):
        parsed = program(
            "stage0", "B", "", (*words, *more), TYPES | {"t": "f32[4, 2]", "exp": "f32[4, 4]", "turned": "f32[4, 4]"}
        )
        assert addable(parsed)["main"] == names


def test_what_one_of_two_callers_reads_is_added_for_neither() -> None:
    types = TYPES | {"t": "f32[4, 2]"}
    inner = replace(
        program("stage0", "B", "", ("x:input x", "t = t(x)", "dw = mm(t, x)", "w dw"), types).main, name="block"
    )
    value, outer = inner.values()["dw"], program("stage0", "B", "", ("x:input x", "w x"), types)
    calls = [Line((replace(value, name=name),), "block", (Ref("x"),)) for name in ("first", "second")]
    read = Line((replace(value, name="e"),), "aten.exp.default", (Ref("first"),))
    for more, names in (([], {"first", "second"}), ([read], set())):
        returns = ((W, "e" if more else "first"), (Binding("gradient", "v"), "second"))
        main = replace(outer.main, lines=(*calls, *more), returns=returns)
        found = addable(replace(outer, functions=(inner, main)))
        assert found == {"block": {"dw"} if names else set(), "main": names or {"e"}}


def test_rows_of_an_embedding_are_added_to_their_total() -> None:
    parsed = program("stage0", "B", "", (
        "g:received g", "index:input index", "dw = embedding_dense_backward(g, index, 5, -1, False)", "w dw",
    ), {"g": "f32[2, 3, 4]", "index": "i64[2, 3]", "dw": "f32[5, 4]"})  # fmt: skip
    g, index, before = torch.randn(2, 3, 4), torch.tensor([[0, 1, 1], [4, 0, 1]]), torch.randn(5, 4)
    machine = Machine(parsed, InProcess(Mesh()), CPU, reuse=True)
    (found,) = machine.run([{"g": g, "index": index}], totals=[{W: before.clone()}])
    wanted = torch.ops.aten.embedding_dense_backward(g, index, 5, -1, False)
    torch.testing.assert_close(found[W], before + wanted)


def test_what_gradients_are_made_of_after_a_send_is_in_the_estimate() -> None:
    """Three products in a row each make a gradient from the result of the line before. In the last microbatch, whose
    backward is in two phases, all these results are there at the end of the first, beside what was saved, and what the
    first microbatch sent. Where the products run at once, a result lasts until the next is made; then the first
    microbatch needs as much, as what the second saved is there too."""
    large, value, small = "f32[64, 4]", 64 * 4 * 4, 4 * 4 * 4
    words = [f"d{n} = exp({'g' if n == 1 else f'd{n - 1}'})" for n in (1, 2, 3, 4)]
    made = [f"w{n} = mm(t, d{n})" for n in (1, 2, 3)]
    lines = [word for pair in zip(words, made, strict=False) for word in pair] + words[3:]
    names = [f"d{n}" for n in (1, 2, 3, 4)] + ["g", "x"]
    types = dict.fromkeys(names, large) | {"t": "f32[4, 64]"} | dict.fromkeys(("w1", "w2", "w3"), "f32[4, 4]")
    backward = program("stage1", "B", "pp=2", (
        "g:received g", "x:saved x", "t = t(x)", *lines, "w1 w1", "w2 w2", "w3 w3", "sent h d4",
    ), types)  # fmt: skip
    forward = program("stage1", "F", "pp=2", ("x:received x", "saved x"), {"x": large})
    pipeline = Pipeline("pp", 1, (("", True),), (0, 1), (), (("F", "B"), ("F", "B", "I", "W")))
    split = split_backward({"pp1": {"1F": forward, "1B": backward}}, pipeline)["pp1"]
    assert {*split} == {"1F", "1B", "1I", "1W"}
    memory = estimate_memory(split, timelines("gpipe", 2, 2, as_run=True)["pp1"], {}, {})
    assert (memory.activations, memory.gradients) == ((2 + 4) * value, 3 * small)
    whole = timelines("gpipe", 2, 2)["pp1"]
    assert estimate_memory({"1F": forward, "1B": backward}, whole, {}, {}).activations == (2 + 2) * value


def test_a_machine_takes_what_is_estimated_where_results_are_written_over_operands() -> None:
    """``e`` is written over ``d``, and ``sum`` and ``s`` over what they read."""
    large, value = "f32[64, 4]", 64 * 4 * 4
    types = dict.fromkeys(("g", "x", "d", "y", "e", "sum", "s"), large) | {"t": "f32[4, 64]", "w": "f32[4, 4]"}
    parsed = program("stage1", "B", "", (
        "g:received g", "x:saved x", "t = t(x)", "d = exp(g)", "w = mm(t, d)", "y = neg(d)", "e = exp(d)",
        "sum = sub.Tensor(y, e)", "s = silu_backward(sum, x)", "w w", "sent h s",
    ), types)  # fmt: skip
    with Storages() as storages:
        given = {"g": torch.randn(64, 4), "x": torch.randn(64, 4)}
        machine, inputs = Machine(parsed, InProcess(Mesh()), CPU, reuse=True), [given]
        del given
        machine.run(inputs)
    live = Liveness(parsed)
    assert storages.peak == live.peak(parsed.main, {"g": value, "x": value}, {}).most == 3 * value + 4 * 4 * 4
