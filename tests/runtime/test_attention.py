"""Attention's kernel on a CPU: equal to autograd's result, however its operands lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import parc
from benchmarks.storages import Storages
from parc.compiler.build.directory import write_build
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Placement, TensorType
from parc.compiler.ops.factors import OpCall, Operand
from parc.compiler.ops.rules import facts
from parc.runtime.machine import registry
from parc.runtime.machine.attention import _merge
from parc.runtime.machine.kernels import KERNELS, REFERENCE_KERNELS
from parc.runtime.machine.registry import Kernel, KernelContext
from tests.passes.few_lines import made


def context_of(*operands: torch.Tensor) -> KernelContext:
    """Return the context of a rank that has all of its operands."""
    types = [TensorType(x.dtype, tuple(x.shape), Placement(())) for x in operands]
    return KernelContext(Mesh(), {}, types, [], torch.device("cpu"))


def lying(tensor: torch.Tensor, strided: bool) -> torch.Tensor:
    """Return the same values; with ``strided`` the entries of a head are apart, as in a transposed projection."""
    return tensor.mT.contiguous().mT if strided else tensor


@pytest.mark.parametrize("strided", ["", "q", "k", "v", "grad", "q k v grad"])
@pytest.mark.parametrize("size", [8, 4, 16])
def test_heads_lie_as_they_may_and_values_have_a_size_of_their_own(strided: str, size: int) -> None:
    torch.manual_seed(0)
    shapes = {"q": (2, 4, 6, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, size), "grad": (2, 4, 6, size)}
    q, k, v, grad = (torch.randn(shape).requires_grad_(name != "grad") for name, shape in shapes.items())
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    given = zip(shapes, (q, k, v, grad), strict=True)
    q, k, v, grad = (lying(tensor.detach(), name in strided.split()) for name, tensor in given)
    out, lse = KERNELS["parc.attention.default"](context_of(q, k, v), q, k, v, None, None, True, None, 0.0)
    torch.testing.assert_close(out, want)
    found = KERNELS["parc.attention_backward.default"](
        context_of(grad, q, k, v), grad, q, k, v, None, None, out, lse, True, None, 0.0
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_attention_is_that_of_its_stream_in_narrow_types(dtype: torch.dtype) -> None:
    """Each type drops what float64 drops, in forward and in backward."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, 6, 8) for _ in range(4)]
    key = KERNELS["parc.stream_key.default"](context_of(), torch.tensor([3, 1]), "drop", 7)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, grad = (tensor.to(dtype) for tensor in tensors)
        out, lse = KERNELS["parc.attention.default"](context_of(q, k, v), q, k, v, None, key, True, None, 0.5)
        gradients = KERNELS["parc.attention_backward.default"](
            context_of(grad, q, k, v), grad, q, k, v, None, key, out, lse, True, None, 0.5
        )
        return [x.double() for x in (out, *gradients)]

    for narrow, exact in zip(results(dtype), results(torch.float64), strict=True):
        torch.testing.assert_close(narrow, exact, rtol=0, atol=(1e-5 if dtype is torch.float32 else 5e-2))


class _Types(TorchDispatchMode):
    """Notes the types in which exponentials and their sums are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_")
        if name in ("exp", "logsumexp", "logaddexp"):
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_narrow_queries_are_float32(dtype: torch.dtype) -> None:
    """So are the sums by which the parts of a ring are joined, and what backward computes again."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 4, 8).to(dtype) for _ in range(4))
    key = KERNELS["parc.stream_key.default"](context_of(), torch.tensor([3, 1]), "drop", 7)
    with _Types() as types:
        out, lse = KERNELS["parc.attention.default"](context_of(q, k, v), q, k, v, None, key, True, None, 0.5)
        KERNELS["parc.attention_backward.default"](
            context_of(grad, q, k, v), grad, q, k, v, None, key, out, lse, True, None, 0.5
        )
    assert types.seen == {torch.float32} and lse.dtype is torch.float32
    halves = [(part, torch.full(part.shape[:3], 2.0**-9 * at)) for at, part in enumerate(2 * [torch.ones_like(q)])]
    joined, _ = _merge(*halves)  # each has about half of the weight, to 1/512
    assert joined.dtype is torch.float32 and torch.allclose(joined, torch.ones(()), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_mask_of_float32_is_added_to_the_scores_of_any_queries(dtype: torch.dtype, rtol: float) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 48, 8).to(dtype) for _ in range(4))
    mask = torch.randn(1, 1, 48, 48)
    wide_q, wide_k, wide_v = (x.detach().double().requires_grad_() for x in (q, k, v))
    want = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, mask.double())
    wanted = torch.autograd.grad(want, (wide_q, wide_k, wide_v), grad.double())
    out, lse = KERNELS["parc.attention.default"](context_of(q, k, v), q, k, v, mask, None, False, None, 0.0)
    found = KERNELS["parc.attention_backward.default"](
        context_of(grad, q, k, v), grad, q, k, v, mask, None, out, lse, False, None, 0.0
    )
    for one, other in zip((out, *found), (want.detach(), *wanted), strict=True):
        assert one.dtype == dtype and float((one.double() - other).norm() / other.norm()) < rtol


MASKED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 24, dtype=torch.float64)
        self.register_buffer("mask", torch.linspace(-2, 2, 256).sin().mul(3).reshape(16, 16))

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.fc(x)[:, None].chunk(3, -1), self.mask).square().mean()
"""


def test_a_session_and_the_plain_module_add_a_mask_of_float32_to_scores_of_float64(tmp_path: Path) -> None:
    """torch's own attention does not."""
    compiled, found = made(tmp_path, MASKED, "input x float64 [B, 16, 8]")
    write_build(compiled.to_write(found.report), tmp_path / "build")
    given = {"x": torch.linspace(-3, 3, 512, dtype=torch.float64).sin().reshape(4, 16, 8)}
    plain = parc.reference(tmp_path / "build")
    q, k, v = plain.module.get_submodule("fc")(given["x"])[:, None].chunk(3, -1)
    weights = torch.softmax(q @ k.mT * 8**-0.5 + plain.module.get_buffer("mask"), -1)
    expected = float((weights @ v).square().mean().detach())
    with parc.load(tmp_path / "build", "cpu") as session:
        for side in (session, plain):
            assert side.step(given).loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("size", [8, 4])
@pytest.mark.parametrize("kernels", [KERNELS, REFERENCE_KERNELS], ids=["kernel", "reference"])
@pytest.mark.parametrize("additive", [False, True])
def test_a_query_that_may_see_no_key_sees_nothing(
    additive: bool, kernels: Mapping[str, Kernel], size: int, p: float
) -> None:
    """Padding on the left leaves such queries under a causal mask."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, n, requires_grad=True) for n in (8, 8, size))
    mask: torch.Tensor = (torch.ones(6, 6).tril() * (torch.arange(6) > 1)).bool()
    mask = torch.zeros(6, 6).masked_fill(~mask, -torch.inf) if additive else mask
    type_ = TensorType(q.dtype, (2, 4, 6, 8), Placement(()))
    context = KernelContext(Mesh(), {}, [type_, type_], [type_], torch.device("cpu"))
    key = torch.tensor(12)
    out, lse = kernels["parc.attention.default"](context, q, k, v, mask, key, False, None, p)
    assert not out[:, :, :2].any() and out.isfinite().all()
    if p == 0:
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask))
    if kernels is REFERENCE_KERNELS:
        made = torch.autograd.grad(out.square().sum(), (q, k, v))
    else:
        context = KernelContext(Mesh(), {}, [type_] * 4, [type_], torch.device("cpu"))
        made = kernels["parc.attention_backward.default"](
            context, 2 * out, q, k, v, mask, key, out, lse, False, None, p
        )
    assert all(gradient.isfinite().all() for gradient in made)


@pytest.mark.parametrize("tile", [1, 30, 150, 10_000])
@pytest.mark.parametrize(("p", "size", "mask"), [(0.5, 8, ""), (0.5, 4, "bool"), (0.0, 4, "added"), (0.0, 4, "")])
def test_tiles_of_any_size_are_the_whole(
    tile: int, p: float, size: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some samples, some groups of heads, some queries: whatever fits into a tile."""
    torch.manual_seed(0)
    shapes = [(3, 4, 6, 8), (3, 2, 6, 8), (3, 2, 6, size), (3, 4, 6, size)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    seen = {"": None, "bool": torch.rand(3, 1, 6, 6) > 0.3, "added": torch.randn(4, 6, 6)}[mask]
    key, options = torch.tensor(12) if p else None, (mask != "bool", None, p)
    context, back = context_of(q, k, v), context_of(grad, q, k, v)
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    want, _ = REFERENCE_KERNELS["parc.attention.default"](context, *plain, seen, key, *options)
    monkeypatch.setattr(registry, "TILE", tile)
    out, lse = KERNELS["parc.attention.default"](context, q, k, v, seen, key, *options)
    torch.testing.assert_close(out, want)
    found = KERNELS["parc.attention_backward.default"](back, grad, q, k, v, seen, key, out, lse, *options)
    torch.testing.assert_close(found, torch.autograd.grad(want, plain, grad))


SIZES = {
    "dropout": ((2, 4, 512, 32), (2, 4, 512, 32), (2, 4, 512, 32), 0.1),
    "dropout, shared keys": ((1, 2, 1024, 64), (1, 1, 1024, 64), (1, 1, 1024, 64), 0.1),
    "shared keys": ((2, 8, 512, 32), (2, 2, 512, 32), (2, 2, 512, 32), 0.0),
    "other values": ((1, 4, 1024, 48), (1, 4, 1024, 48), (1, 4, 1024, 32), 0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SIZES)
def test_temporaries_are_those_of_a_tile_and_as_large_as_a_row_says(case: str, dtype: torch.dtype) -> None:
    queries, keys, values, p = SIZES[case]
    q, k, v = (torch.randn(shape).to(dtype) for shape in (queries, keys, values))
    grad, key = torch.randn(*queries[:3], values[3]).to(dtype), torch.tensor(12) if p else None

    def run(op: str, tensors: tuple[torch.Tensor, ...], *args: Any) -> tuple[torch.Tensor, ...]:
        context = context_of(*tensors)
        given = [x for x in args if isinstance(x, torch.Tensor)]
        with Storages() as storages:
            results: tuple[torch.Tensor, ...] = KERNELS[op](context, *args)
        kept = sum(result.nbytes for result in results)
        places = iter(range(len(given)))
        call = OpCall(op, tuple(Operand(next(places)) if isinstance(x, torch.Tensor) else x for x in args), {},
                      tuple(tuple(x.shape) for x in given), ())  # fmt: skip
        takes = facts(op).takes
        assert takes is not None
        assert abs(storages.peak - kept - takes(call, [x.dtype for x in given])) < 0.1 * storages.peak
        return results

    out, lse = run("parc.attention.default", (q, k, v), q, k, v, None, key, True, None, p)
    run("parc.attention_backward.default", (grad, q, k, v), grad, q, k, v, None, key, out, lse, True, None, p)
