"""Products of float32 by oneDNN are those of torch, and taken only where every rank would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parc.compiler.layout.mesh import Mesh
from parc.compiler.torch_private import onednn_linear
from parc.runtime.load import load
from parc.runtime.machine import products
from parc.runtime.machine.kernels import KERNELS
from parc.runtime.machine.site import Site
from parc.runtime.session import Session

from .tiny import ONE, PLAN, build, without_onednn

SITE = Site(Mesh(), {}, [], [], torch.device("cpu"))
CPU = torch.device("cpu")
_MLP = PLAN.replace('"./gpt.py:GPT" (layers=2, width=16, heads=2, vocab=256, length=8, dropout=0.1)',
                    '"tests.padded_models:Mlp" (vocab=256, width=16, hidden=32)')  # fmt: skip
needs_onednn = pytest.mark.skipif(onednn_linear() is None, reason="this torch has no oneDNN")


def strided(rows: int, columns: int, way: str) -> torch.Tensor:
    """Return a matrix by rows, by columns, or as the part of a larger one."""
    if way == "columns":
        return torch.randn(columns, rows).t()
    return torch.randn(rows, columns) if way == "rows" else torch.randn(rows, columns + 3)[:, 1:-2]


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    """The build of a GPT for one rank."""
    return build(tmp_path, ONE)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a machine on which oneDNN is the faster."""
    monkeypatch.setattr(products, "_is_faster", lambda linear: True)


@needs_onednn
@pytest.mark.parametrize("first", ["rows", "columns", "part"])
@pytest.mark.parametrize("second", ["rows", "columns", "part"])
def test_a_large_product_is_exact_to_float32(onednn: None, first: str, second: str) -> None:
    torch.manual_seed(0)
    a, b, bias = strided(160, 200, first), strided(200, 120, second), torch.randn(120)
    kernels = products.kernels_for(CPU)
    for made, exact in (
        (kernels["aten.mm.default"](SITE, a, b), a.double() @ b.double()),
        (kernels["aten.addmm.default"](SITE, bias, a, b), a.double() @ b.double() + bias),
    ):
        assert made.dtype == torch.float32 and made.is_contiguous()
        torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_products_and_other_types_are_torchs(onednn: None, dtype: torch.dtype) -> None:
    rows = 8 if dtype == torch.float32 else 160
    a, b, bias = torch.randn(rows, 200).to(dtype), torch.randn(200, 120).to(dtype), torch.randn(rows, 120).to(dtype)
    kernels = products.kernels_for(CPU)
    assert torch.equal(kernels["aten.mm.default"](SITE, a, b), a @ b)
    assert torch.equal(kernels["aten.addmm.default"](SITE, bias, a, b), torch.addmm(bias, a, b))


def test_who_turns_onednn_off_gets_torchs_products() -> None:
    with without_onednn():
        assert products.kernels_for(CPU) is KERNELS


@needs_onednn
def test_ranks_that_do_not_agree_use_torchs_products(onednn: None, monkeypatch: pytest.MonkeyPatch, gpt: Path) -> None:
    with load(gpt) as session:
        assert session.kernels is not KERNELS
    monkeypatch.setattr(Session, "exchange", lambda self, row: [list(row), [0, 0]])
    with load(gpt) as session:
        assert session.kernels is KERNELS


@needs_onednn
@pytest.mark.parametrize("compile", [False, True])
def test_a_step_by_onednn_is_a_step(
    onednn: None, monkeypatch: pytest.MonkeyPatch, gpt: Path, tmp_path: Path, compile: bool
) -> None:
    """The compiled products are those of a smaller model: each region of a GPT takes seconds in a C++ compiler."""
    made = build(tmp_path, ONE, _MLP, name="mlp") if compile else gpt
    calls: list[int] = []
    way = "_opaque" if compile else "_direct"
    taken = getattr(products, way)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(gpt.parent / "cache"))
    monkeypatch.setattr(products, "_LEAST", 1)

    def counted(*given: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return taken(*given)

    monkeypatch.setattr(products, way, counted)
    with without_onednn(), load(made) as plain:
        expected = [plain.step() for _ in range(3)]
    assert not calls
    with load(made, compile=compile) as session:
        found = [session.step() for _ in range(3)]
    assert calls
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close([one.loss, one.grad_norm], [other.loss, other.grad_norm], rtol=2e-5, atol=1e-6)
