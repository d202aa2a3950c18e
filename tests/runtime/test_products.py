"""Products of float32 by oneDNN are those of torch, and taken only where every rank would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parc.compiler.analysis import products as facts
from parc.compiler.layout.mesh import Mesh
from parc.compiler.torch_private import onednn_linear
from parc.runtime.launch.load import load
from parc.runtime.machine import products
from parc.runtime.machine.kernels import KERNELS
from parc.runtime.machine.registry import KernelContext
from parc.runtime.session.session import Session

from .tiny import ONE, build, without_onednn

CONTEXT = KernelContext(Mesh(), {}, [], [], torch.device("cpu"))
CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(onednn_linear() is None, reason="this torch has no oneDNN")


def strided(rows: int, columns: int, way: str) -> torch.Tensor:
    """Return a matrix by rows, by columns, or as the part of a larger one."""
    if way == "columns":
        return torch.randn(columns, rows).t()
    return torch.randn(rows, columns) if way == "rows" else torch.randn(rows, columns + 3)[:, 1:-2]


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build of a GPT for one rank."""
    return build(tmp_path_factory.mktemp("products"), ONE)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a machine on which oneDNN is the faster."""
    monkeypatch.setattr(products, "_is_faster", lambda threads: True)


@needs_onednn
@pytest.mark.parametrize("first", ["rows", "columns", "part"])
@pytest.mark.parametrize("second", ["rows", "columns", "part"])
def test_a_large_product_is_exact_to_float32(onednn: None, first: str, second: str) -> None:
    torch.manual_seed(0)
    a, b, bias = strided(160, 200, first), strided(200, 120, second), torch.randn(120)
    kernels = products.kernels_for(CPU)
    for made, exact in (
        (kernels["aten.mm.default"](CONTEXT, a, b), a.double() @ b.double()),
        (kernels["aten.addmm.default"](CONTEXT, bias, a, b), a.double() @ b.double() + bias),
    ):
        assert made.dtype == torch.float32 and made.is_contiguous()
        torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_products_and_other_types_are_torchs(onednn: None, dtype: torch.dtype) -> None:
    rows = 8 if dtype == torch.float32 else 160
    a, b, bias = torch.randn(rows, 200).to(dtype), torch.randn(200, 120).to(dtype), torch.randn(rows, 120).to(dtype)
    kernels = products.kernels_for(CPU)
    assert torch.equal(kernels["aten.mm.default"](CONTEXT, a, b), a @ b)
    assert torch.equal(kernels["aten.addmm.default"](CONTEXT, bias, a, b), torch.addmm(bias, a, b))


def test_who_turns_onednn_off_gets_torchs_products() -> None:
    with without_onednn():
        assert products.kernels_for(CPU) is KERNELS


@needs_onednn
def test_ranks_that_do_not_agree_use_torchs_products(onednn: None, monkeypatch: pytest.MonkeyPatch, gpt: Path) -> None:
    with load(gpt, CPU) as session:
        assert session.kernels is not KERNELS
    monkeypatch.setattr(Session, "exchange", lambda self, row: [list(row), [0, 0]])
    with load(gpt, CPU) as session:
        assert session.kernels is KERNELS


@needs_onednn
def test_a_step_by_onednn_is_a_step(onednn: None, monkeypatch: pytest.MonkeyPatch, gpt: Path) -> None:
    """The test of the same in a compiled step is beside the others of compiled steps."""
    calls: list[int] = []
    direct = products._direct

    def counted(*operands: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return direct(*operands)

    monkeypatch.setattr(facts, "LARGE_PRODUCT", 1)
    monkeypatch.setattr(products, "_direct", counted)
    with without_onednn(), load(gpt, CPU) as plain:
        expected = plain.step()
    assert not calls
    with load(gpt, CPU) as session:
        found = session.step()
    assert calls
    numbers = [found.loss, found.grad_norm], [expected.loss, expected.grad_norm]
    torch.testing.assert_close(*numbers, rtol=2e-5, atol=1e-6)
