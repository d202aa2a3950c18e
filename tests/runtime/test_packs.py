"""Weights packed once a step for all its microbatches: the same products, where they are worth it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parc.compiler.mesh import Mesh
from parc.compiler.program import Line, Ref
from parc.compiler.torch_private import packed_linear
from parc.runtime import packs
from parc.runtime.backends.in_process import InProcess
from parc.runtime.execute import Machine
from parc.runtime.packs import Packs, packs_for, weights_of
from parc.runtime.products import kernels_for
from parc.runtime.session import Session, load
from tests.runtime.staged import program

from .test_products import strided, without_onednn
from .tiny import ONE, PLAN, build

CPU = torch.device("cpu")
FOUR = PLAN.replace("microbatches 2", "microbatches 4")
pytestmark = pytest.mark.skipif(packed_linear() is None, reason="this torch has no MKL")


def packing() -> Packs:
    found = packs_for(CPU, 4)
    assert found is not None
    return found


@pytest.mark.parametrize("first", ["rows", "columns", "part"])
@pytest.mark.parametrize("rows", [1, 100])
def test_a_product_by_a_packed_weight_is_exact_to_float32(first: str, rows: int) -> None:
    torch.manual_seed(0)
    a, weight, bias, own = strided(rows, 200, first), torch.randn(300, 200), torch.randn(300), packing()
    for _ in range(2):
        made = own.product(a, weight.t()), own.product(a, weight.t(), bias)
        exact = a.double() @ weight.double().t()
        torch.testing.assert_close(made[0].double(), exact, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(made[1].double(), exact + bias, rtol=1e-5, atol=1e-4)
    assert len(own.packed) == 1


def test_a_weight_that_changes_between_steps_is_packed_again() -> None:
    a, weight, own = torch.randn(100, 200), torch.randn(300, 200), packing()
    before = own.product(a, weight.t())
    weight.mul_(2)
    own.clear()
    torch.testing.assert_close(own.product(a, weight.t()), 2 * before)


@pytest.mark.parametrize(("rows", "columns", "dtype", "across"), [
    (100, 300, torch.float64, False), (100, 300, torch.bfloat16, False), (100, 8, torch.float32, False),
    (0, 300, torch.float32, False), (100, 300, torch.float32, True),
], ids=["float64", "bfloat16", "small", "no rows", "across the weight's rows"])  # fmt: skip
def test_other_products_are_torchs(rows: int, columns: int, dtype: torch.dtype, across: bool) -> None:
    a, weight, own = torch.randn(rows, 200).to(dtype), torch.randn(columns, 200).to(dtype), packing()
    b = weight.t().contiguous() if across else weight.t()
    bias = torch.randn(columns).to(dtype)
    assert torch.equal(own.product(a, b), a @ b)
    assert torch.equal(own.product(a, b, bias), torch.addmm(bias, a, b))
    assert not own.packed


def test_weights_are_packed_where_many_microbatches_read_them() -> None:
    assert packs_for(CPU, 3) is None and packs_for(torch.device("cuda"), 8) is None
    with without_onednn():
        assert packs_for(CPU, 8) is None


def test_a_weight_is_one_in_every_call_of_a_function() -> None:
    types = {"x": "f32[4, 4]", "w": "f32[4, 4]", "v": "f32[4, 4]", "t": "f32[4, 4]", "y": "f32[4, 4]"}
    words = ("x:input x", "w:parameter w", "v:frozen v", "t = t(w)", "y = mm(x, t)", "loss y")
    made = program("stage0", "F", "", words, types)
    assert weights_of(made) == {"main": {"w", "v", "t"}}
    inner = replace(made.main, name="block")
    value = inner.values()["y"]

    def calls(*arguments: tuple[str, str, str]) -> dict[str, set[str]]:
        lines = [
            Line((replace(value, name=f"y{at}"),), "block", tuple(map(Ref, names)))
            for at, names in enumerate(arguments)
        ]
        main = replace(made.main, lines=tuple(lines), returns=(("loss", "y0"),))
        return weights_of(replace(made, functions=(inner, main)))

    assert calls(("x", "w", "v"), ("x", "v", "w"))["block"] == {"w", "v", "t"}
    assert calls(("x", "w", "v"), ("x", "v", "x"))["block"] == {"w", "t"}
    assert calls(("x", "w", "v"), ("w", "x", "v"))["block"] == {"v"}


@pytest.mark.parametrize("weight", [False, True])
def test_a_sum_with_a_product_is_the_same_with_a_packed_weight(weight: bool) -> None:
    types = {"x": "f32[8, 256]", "w": "f32[256, 256]", "t": "f32[256, 256]", "product": "f32[8, 256]"}
    types |= {"y": "f32[8, 256]", "sum": "f32[8, 256]"}
    role = "parameter" if weight else "input"
    made = program("stage0", "F", "", (
        "x:input x", f"w:{role} w", "t = t(w)", "y = exp(x)", "product = mm(x, t)", "sum = add.Tensor(y, product)",
        "loss sum",
    ), types)  # fmt: skip
    own, x, w = packing(), torch.randn(8, 256), torch.randn(256, 256)
    (found,) = Machine(made, InProcess(Mesh()), CPU, reuse=True, packs=own).run([{"x": x, "w": w}])
    torch.testing.assert_close(found["loss"], x.exp() + x @ w.t(), rtol=1e-4, atol=1e-4)
    assert len(own.packed) == weight


def test_a_step_by_packed_weights_is_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    clear = Packs.clear

    def noted(own: Packs) -> None:
        packed.append(len(own.packed))
        clear(own)

    monkeypatch.setattr(packs, "_LEAST", 1)
    monkeypatch.setattr(Packs, "clear", noted)
    monkeypatch.setattr("parc.runtime.products._is_faster", lambda linear: False)
    made = build(tmp_path, ONE, FOUR)
    with without_onednn(), load(made) as plain:
        expected = [plain.step() for _ in range(3)]
    assert not packed
    with load(made) as session:
        found = [session.step() for _ in range(3)]
    assert packed == [0, 9] * 3  # four products of each of two blocks, and the head
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close([one.loss, one.grad_norm], [other.loss, other.grad_norm], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("more", "plan", "onednn", "agreed", "wanted"), [
    ("", FOUR, False, True, True),
    ("", PLAN, False, True, False),
    ("budget memory 1GiB\n", FOUR, False, True, False),
    ("", FOUR, True, True, False),
    ("", FOUR, False, False, False),
], ids=["four microbatches", "two", "memory is bounded", "oneDNN is faster", "another rank has no MKL"])  # fmt: skip
def test_weights_are_packed_where_memory_and_all_ranks_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, plan: str, onednn: bool, agreed: bool, wanted: bool
) -> None:
    monkeypatch.setattr("parc.runtime.products._is_faster", lambda linear: onednn)
    if onednn and kernels_for(CPU) is kernels_for(torch.device("meta")):
        pytest.skip("this torch has no oneDNN")
    if not agreed:
        monkeypatch.setattr(Session, "exchange", lambda self, row: [list(row), [0, 0]])
    with load(build(tmp_path, ONE, plan + more)) as session:
        assert (session.packs is not None) == wanted
