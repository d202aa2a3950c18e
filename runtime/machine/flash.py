"""Flash attention: torch's own kernels that store no scores, and the choice of one for given operands.

Each takes queries [b, h, s, d], keys [b, g, t, d], values [b, g, t, d], where h is a multiple of g (GQA), and returns
the output [b, h, s, d] and the log-sum-exp of the scores [b, h, s] in float32 or wider. Backward returns the gradients
of the three. A mask is additive. Their dropout is never used, because it would draw torch's own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...compiler.ops.own_ops import aten
from ...compiler.torch_private import attention_choice

_HALVES = (torch.bfloat16, torch.float16)
_ALIGNED = 8
"""The alignment of a GPU's kernels in entries: sizes of heads, and rows of masks, have to be multiples of it."""
_LSE_ROWS = 32
"""The memory-efficient kernel wants the log-sum-exp padded to a multiple of this many queries."""
_Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Flash:
    """One kernel: ``forward(q, k, v, bias, causal, scale)`` returns the output and the log-sum-exp. ``backward(grad,
    out, lse, q, k, v, bias, causal, scale)`` returns the gradients of q, k and v. ``in_order`` is the deterministic
    backward, of which all replicas get the same bits; on GPUs it takes longer."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[..., _Gradients]
    in_order: Callable[..., _Gradients]


def flash_for(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, traced: bool) -> Flash | None:
    """Return the kernel for such operands; None where torch has none. While a compiler traces, it is never cuDNN's,
    which is slow on some strides of heads that the compiler may choose."""
    if q.shape[-1] != v.shape[-1] or not q.shape[-1]:
        return None
    if q.device.type == "cpu":
        return _CPU
    if q.device.type != "cuda" or q.shape[-1] % _ALIGNED:
        return None
    capability = _compute_capability(q.device)
    if mask is None and _takes_flash(q.dtype, q.shape[-1], capability):
        takes_cudnn = not traced and attention_choice(q, k, v, causal) == SDPBackend.CUDNN_ATTENTION.value
        return _CUDNN if takes_cudnn else _GPU
    wide = _score_dtype(q, mask)
    return _EFFICIENT if wide in (torch.float32, torch.float16) or (wide in _HALVES and capability >= (8, 0)) else None


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as numbers to add to the scores of queries with this dtype.

    Masks narrower than the queries are widened: torch's kernel on a CPU reads the memory of a float32 mask as float64.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return mask.to(torch.promote_types(mask.dtype, dtype))
    mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values with each head repeated, so that there are ``heads`` of them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def fold_heads(grad: Tensor, heads: int) -> Tensor:
    """Return the gradients of ``heads`` heads: the sums over the repetitions of each."""
    if grad.shape[1] == heads:
        return grad
    repeated: Tensor = grad.unflatten(1, (heads, -1))
    if repeated.shape[2] == 2:  # torch's sum over a dim in the middle takes twice as long
        return repeated[:, :, 0] + repeated[:, :, 1]
    return repeated.sum(2)


@lru_cache(maxsize=64)
def _compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU: (8, 0) is Ampere, (9, 0) Hopper."""
    return torch.cuda.get_device_capability(device)


def _takes_flash(dtype: torch.dtype, size: int, capability: tuple[int, int]) -> bool:
    """Return whether the flash kernel has a forward and a backward for heads of this size. On smaller GPUs the backward
    of some sizes does not fit into shared memory."""
    large = capability in ((8, 0), (9, 0), (10, 0))
    return dtype in _HALVES and capability >= (8, 0) and (size <= 192 or 224 < size <= 256 or (large and size <= 256))


def _score_dtype(q: Tensor, mask: Tensor | None) -> torch.dtype:
    """Return the dtype of scores: that of the queries, or the mask's if it is wider."""
    return q.dtype if mask is None or mask.dtype == torch.bool else torch.promote_types(q.dtype, mask.dtype)


def _dense_heads(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with stride 1 along each head, on a GPU also with aligned strides and offset, copied where
    needed: the kernels rely on it without a check."""

    def usable(tensor: Tensor) -> bool:
        steps = [step for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
        aligned = tensor.device.type == "cpu" or not any(step % _ALIGNED for step in (tensor.storage_offset(), *steps))
        return tensor.stride(-1) == 1 and aligned

    return [tensor if usable(tensor) else tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _dense_heads(q, *(repeat_heads(x, q.shape[1]) for x in (k, v)))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _cpu_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> _Gradients:  # fmt: skip
    groups = k.shape[1]
    grad, out, q, k, v = _dense_heads(grad, out, q, *(repeat_heads(x, q.shape[1]) for x in (k, v)))
    gq, gk, gv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    del k, v  # free the repeated heads
    gk = fold_heads(gk, groups)
    return gq, gk, fold_heads(gv, groups)


def _gpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*_dense_heads(q, k, v), 0.0, causal, scale=scale)
    return out, lse


def _gpu_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> _Gradients:  # fmt: skip
    grad, out, q, k, v = _dense_heads(grad, out, q, k, v)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # unused, as there is no dropout
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    gq, gk, gv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset, scale=scale
    )
    return gq, gk, gv


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *_dense_heads(q, k, v), None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., 0]


def _cudnn_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> _Gradients:  # fmt: skip
    grad, out, q, k, v = _dense_heads(grad, out, q, k, v)
    state = torch.empty((), dtype=torch.int64, device=q.device)
    gq, gk, gv = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse[..., None].contiguous(), state, state, None, None, None, q.shape[2], k.shape[2], 0.0,
        causal, scale=scale,
    )  # fmt: skip
    return gq, gk, gv


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    narrow, wide = q.dtype, _score_dtype(q, bias)
    q, k, v = _dense_heads(*(x.to(wide) for x in (q, repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]))))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(bias, q, k), True, 0.0, causal, scale=scale
    )
    return out.to(narrow), lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> _Gradients:  # fmt: skip
    groups, narrow, wide = k.shape[1], q.dtype, _score_dtype(q, bias)
    repeated = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    grad, out, q, k, v = _dense_heads(*(x.to(wide) for x in (grad, out, q, *repeated)))
    state = torch.empty((), dtype=torch.int64, device=q.device)
    lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=float("inf")).contiguous()
    gq, gk, gv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _aligned(bias, q, k), out, lse, state, state, 0.0, [True, True, True, False], causal, scale=scale
    )
    return gq.to(narrow), fold_heads(gk, groups).to(narrow), fold_heads(gv, groups).to(narrow)


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return an additive mask expanded to the shape of the scores, with rows that begin at aligned addresses."""
    if bias is None:
        return None
    padded = F.pad(bias.to(q.dtype).expand(*bias.shape[:-1], k.shape[2]), (0, -k.shape[2] % _ALIGNED)).contiguous()
    return padded[..., : k.shape[2]].expand(*q.shape[:3], k.shape[2])


@torch.library.custom_op("parc_runtime::attention_backward_in_order", mutates_args=())
def _in_order(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float, efficient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run a kernel's backward as torch's deterministic algorithm. It is a custom operator, so that this also holds in
    compiled code."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        run = _efficient_backward if efficient else _gpu_backward
        gq, gk, gv = run(grad, out, lse, q, k, v, bias, causal, scale)
        return gq.contiguous(), gk.contiguous(), gv.contiguous()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@_in_order.register_fake
def _in_order_fake(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float, efficient: bool,
) -> _Gradients:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_CPU = Flash(_cpu, _cpu_backward, _cpu_backward)
_GPU = Flash(_gpu, _gpu_backward, partial(_in_order, efficient=False))
_CUDNN = Flash(_cudnn, _cudnn_backward, partial(_in_order, efficient=False))
_EFFICIENT = Flash(_efficient, _efficient_backward, partial(_in_order, efficient=True))
