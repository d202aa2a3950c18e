"""Kernels of attention on a GPU, as far as they can be told without one: which one is chosen, and the shapes and types
of what they make. ``test_gpu.py`` has their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import parse_type
from parc.runtime.machine import flash
from parc.runtime.machine.registry import KernelContext

HOPPER, ADA, TURING = (9, 0), (8, 9), (7, 5)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {"flash": flash._GPU, "cudnn": flash._CUDNN, "efficient": flash._EFFICIENT, "scores": None}


@pytest.mark.parametrize(
    ("generation", "dtype", "size", "mask", "expected"),
    [
        (HOPPER, BF16, 64, None, "cudnn"), (HOPPER, BF16, 64, torch.bool, "efficient"),
        (HOPPER, BF16, 64, F32, "efficient"), (HOPPER, F32, 64, None, "efficient"),
        (HOPPER, F32, 64, torch.float64, "scores"), (HOPPER, BF16, 12, None, "scores"),
        (HOPPER, BF16, 208, None, "cudnn"), (HOPPER, BF16, 264, None, "efficient"), (ADA, F16, 64, None, "cudnn"),
        (ADA, F16, 208, None, "efficient"), (TURING, F16, 64, None, "efficient"), (TURING, BF16, 64, None, "scores"),
        (TURING, BF16, 64, F32, "efficient"), (HOPPER, torch.float64, 64, None, "scores"),
    ],
)  # fmt: skip
def test_a_gpu_has_the_kernel_that_can_do_the_work(
    generation: tuple[int, int], dtype: torch.dtype, size: int, mask: torch.dtype | None, expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A line has cuDNN's where torch would take it, and a compiled region the flash kernel in its place."""
    monkeypatch.setattr(flash, "_compute_capability", lambda device: generation)
    monkeypatch.setattr(flash, "attention_choice", lambda *_: SDPBackend.CUDNN_ATTENTION.value)
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, size, dtype=dtype, device="cuda")
        bias = None if mask is None else torch.empty(16, 16, dtype=mask, device="cuda")
        assert flash.flash_for(q, q, q, bias, False, False) is NAMES[expected]
        traced = NAMES["flash" if expected == "cudnn" else expected]
        assert flash.flash_for(q, q, q, bias, False, True) is traced


@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        ("flash", None),
        ("cudnn", None),
        *(("efficient", shape) for shape in (None, (2, 1, 1, 21), (20, 21), (2, 4, 20, 1))),
    ],
)
def test_kernels_make_results_and_gradients_like_their_operands(kernel: str, mask: tuple[int, ...] | None) -> None:
    q, grad = (torch.empty(2, 20, 4, 64, dtype=BF16, device="meta").transpose(1, 2) for _ in range(2))
    k, v = (torch.empty(2, 2, 21, 64, dtype=BF16, device="meta") for _ in range(2))
    bias = None if mask is None else torch.empty(mask, dtype=F32, device="meta")
    chosen = NAMES[kernel]
    assert chosen is not None
    out, lse = chosen.forward(q, k, v, bias, False, 0.125)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, BF16, q.shape[:3], F32)
    for run in (chosen.backward, chosen.in_order):
        made = run(grad, out, lse, q, k, v, bias, False, 0.125)
        assert [(x.shape, x.dtype) for x in made] == [(x.shape, BF16) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("kernel", "mask"), [("flash", False), ("cudnn", False), ("efficient", False), ("efficient", True)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_are_asked_for_the_attention_that_is_meant(
    kernel: str, mask: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and its deterministic form: the rule of causal, the scale, no dropout, and each operand."""
    asked: dict[str, dict[str, Any]] = {}

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            target = getattr(torch.ops.aten, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                names = [argument.name for argument in target.default._schema.arguments]
                asked[name] = dict(zip(names, args, strict=False)) | kwargs
                return target(*args, **kwargs)

            return call if "attention" in name else target

    monkeypatch.setattr(flash, "aten", Recorder())
    q, grad = (torch.empty(2, 4, 16, 64, dtype=BF16, device="meta") for _ in range(2))
    k, v = (torch.empty(2, 4, 24, 64, dtype=BF16, device="meta") for _ in range(2))
    bias = torch.empty(16, 24, dtype=BF16, device="meta") if mask else None
    chosen = NAMES[kernel]
    assert chosen is not None
    out, lse = chosen.forward(q, k, v, bias, causal, 0.3)
    chosen.backward(grad, out, lse, q, k, v, bias, causal, 0.3)
    assert len(asked) == 2
    for name, given in asked.items():
        operands = [given[key].shape[2] for key in ("query", "key", "value")]
        assert (given["is_causal"], given["scale"], given["dropout_p"]) == (causal, 0.3, 0.0), name
        assert operands == [16, 24, 24] and (given.get("attn_bias") is not None) == mask, name


def test_a_gpu_reads_from_aligned_places() -> None:
    """So a part of a projection of odd width is copied."""
    odd = torch.empty(2, 16, 4 * 64 + 1, device="meta")[..., :256].unflatten(2, (4, 64)).transpose(1, 2)
    after = torch.empty(2 * 16 * 256 + 4, device="meta")[4:].view(2, 4, 16, 64)
    even = torch.empty(2, 16, 4, 64, device="meta").transpose(1, 2)
    copied = flash._dense_heads(odd, after, even, even.mT)
    assert [x is y for x, y in zip(copied, (odd, after, even, even.mT), strict=True)] == [False, False, True, False]
    assert all(x.stride(-1) == 1 and not x.storage_offset() for x in copied)


def test_ranks_that_compute_the_same_value_are_known() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2), ("pp", 2)))

    def repeated(text: str, pipeline: str = "pp") -> bool:
        return KernelContext(mesh, {}, (), (), torch.device("cpu"), pipeline).repeated(parse_type(text, mesh))

    assert not repeated("f32[4/dp, 4/tp, 8, 8]") and repeated("f32[4/dp, 4/tp, 8, 8]", "")
    assert repeated("f32[4/dp, 4, 8, 8]") and not repeated("f32[4/dp, 4, 8, 8] +tp")
