"""Weights packed once a step for all its microbatches: the same products, where they are worth it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parc.compiler.layout.mesh import Mesh
from parc.compiler.program.program import Line, Ref
from parc.compiler.torch_private import packed_linear
from parc.runtime.backends.in_process import InProcess
from parc.runtime.machine import packs
from parc.runtime.machine.execute import Machine
from parc.runtime.machine.packs import Packs, packs_for, turned_weights
from parc.runtime.session import Session, load
from tests.runtime.staged import program

from .test_products import needs_onednn, strided
from .tiny import ONE, PLAN, build, without_onednn

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
    with own:
        before = own.product(a, weight.t())
    weight.mul_(2)
    torch.testing.assert_close(own.product(a, weight.t()), 2 * before)


LARGE = {"x": "f32[64, 256]", "w": "f32[128, 256]", "t": "f32[256, 128]", "y": "f32[64, 128]"}


@pytest.mark.parametrize(("changes", "product", "wanted"), [
    ({}, "mm(x, t)", 1),
    ({"b": "f32[128]"}, "addmm(b, x, t)", 1),
    ({"b": "f32[1]"}, "addmm(b, x, t)", 0),
    (dict.fromkeys(LARGE, "f64"), "mm(x, t)", 0),
    ({"w": "f32[64, 256]", "t": "f32[256, 64]", "y": "f32[64, 64]"}, "mm(x, t)", 0),
    ({"x": "f32[1, 256]", "y": "f32[1, 128]"}, "mm(x, t)", 0),
    ({"x": "f32[1024, 256]", "y": "f32[1024, 128]"}, "mm(x, t)", 0),
    ({"w": "f32[256, 128]", "t": "f32[128, 256]"}, "mm(x, w)", 0),
], ids=["rows", "with a bias", "with one number", "float64", "narrow", "one row", "many rows", "columns"])  # fmt: skip
def test_products_of_some_rows_by_the_rows_of_large_weights_are_packed(
    changes: dict[str, str], product: str, wanted: int
) -> None:
    types = {name: changes.get(name, text) for name, text in {"b": "f32[128]", **LARGE}.items()}
    types = {name: LARGE.get(name, "f32[128]").replace("f32", "f64") if text == "f64" else text
             for name, text in types.items()}  # fmt: skip
    words = ("x:input x", "w:parameter w", "b:parameter b", "t = t(w)", f"y = {product}", "loss y")
    made, own = program("stage0", "F", "", words, types), packing()
    given = {value.name: torch.randn(value.type.shape, dtype=value.type.dtype) for value in made.main.parameters}
    (found,) = Machine(made, InProcess(Mesh()), CPU, reuse=True, packs=own).run([dict(given)])
    right = given["w"] if product == "mm(x, w)" else given["w"].t()
    exact = given["x"] @ right + (given["b"] if "addmm" in product else 0)
    torch.testing.assert_close(found["loss"], exact, rtol=1e-4, atol=1e-4)
    assert len(own.packed) == wanted


def test_weights_are_packed_where_many_microbatches_read_them() -> None:
    assert packs_for(CPU, 3) is None and packs_for(torch.device("cuda"), 8) is None
    with without_onednn():
        assert packs_for(CPU, 8) is None


def test_a_transposed_weight_is_one_in_every_call_of_a_function() -> None:
    types = {"x": "f32[4, 4]", "w": "f32[4, 4]", "v": "f32[4, 4]", "t": "f32[4, 4]", "y": "f32[4, 4]"}
    words = ("x:input x", "w:parameter w", "v:frozen v", "t = t(w)", "t_1 = t(t)", "y = mm(x, t)", "loss y")
    made = program("stage0", "F", "", words, types | {"t_1": "f32[4, 4]"})
    assert turned_weights(made) == {"main": {"t"}}
    inner = replace(made.main, name="block")
    value = inner.values()["y"]

    def calls(*arguments: tuple[str, str, str]) -> set[str]:
        lines = [
            Line((replace(value, name=f"y{at}"),), "block", tuple(map(Ref, names)))
            for at, names in enumerate(arguments)
        ]
        main = replace(made.main, lines=(made.main.lines[0], *lines), returns=(("loss", "y0"),))
        return turned_weights(replace(made, functions=(inner, main)))["block"]

    assert calls(("x", "w", "v"), ("x", "v", "w")) == {"t"}
    assert calls(("x", "w", "v"), ("x", "x", "w")) == set()
    assert calls(("x", "t", "v"), ("x", "t", "w")) == {"w", "t_1"}
    assert calls(("x", "t", "v"), ("x", "w", "w")) == set()


@pytest.mark.parametrize("weight", [False, True])
def test_a_sum_with_a_product_is_the_same_with_a_packed_weight(weight: bool) -> None:
    types = dict.fromkeys(("x", "y", "product", "sum"), "f32[16, 256]") | dict.fromkeys("wt", "f32[256, 256]")
    role = "parameter" if weight else "input"
    made = program("stage0", "F", "", (
        "x:input x", f"w:{role} w", "t = t(w)", "y = exp(x)", "product = mm(x, t)", "sum = add.Tensor(y, product)",
        "loss sum",
    ), types)  # fmt: skip
    own, x, w = packing(), torch.randn(16, 256), torch.randn(256, 256)
    (found,) = Machine(made, InProcess(Mesh()), CPU, reuse=True, packs=own).run([{"x": x, "w": w}])
    torch.testing.assert_close(found["loss"], x.exp() + x @ w.t(), rtol=1e-4, atol=1e-4)
    assert len(own.packed) == weight


def test_a_step_by_packed_weights_is_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    leave = Packs.__exit__

    def noted(own: Packs, *error: object) -> None:
        packed.append(len(own.packed))
        leave(own, *error)
        assert not own.packed

    monkeypatch.setattr(packs, "_LEAST", 1)
    monkeypatch.setattr(Packs, "__exit__", noted)
    monkeypatch.setattr("parc.runtime.machine.products._is_faster", lambda linear: False)
    made = build(tmp_path, ONE, FOUR)
    with without_onednn(), load(made) as plain:
        expected = [plain.step() for _ in range(3)]
    assert not packed
    with load(made) as session:
        found = [session.step() for _ in range(3)]
    assert packed == [9] * 3  # four products of each of two blocks, and the head
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close([one.loss, one.grad_norm], [other.loss, other.grad_norm], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("more", "plan", "onednn", "agreed", "wanted"), [
    ("", FOUR, False, True, True),
    ("", PLAN, False, True, False),
    ("budget memory 1GiB\n", FOUR, False, True, False),
    pytest.param("", FOUR, True, True, False, marks=needs_onednn),
    ("", FOUR, False, False, False),
], ids=["four microbatches", "two", "memory is bounded", "oneDNN is faster", "another rank has no MKL"])  # fmt: skip
def test_weights_are_packed_where_memory_and_all_ranks_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, plan: str, onednn: bool, agreed: bool, wanted: bool
) -> None:
    monkeypatch.setattr("parc.runtime.machine.products._is_faster", lambda linear: onednn)
    if not agreed:
        monkeypatch.setattr(Session, "exchange", lambda self, row: [list(row), [0, 0]])
    with load(build(tmp_path, ONE, plan + more)) as session:
        assert (session.packs is not None) == wanted
