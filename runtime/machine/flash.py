"""torch's own kernels of attention that keep no scores, and which of them can do the work of a line.

Each takes queries [b, h, s, d], keys [b, g, t, d], values [b, g, t, d], where h is a multiple of g, and gives the
output [b, h, s, d] and the logarithms of the sums of exponentials [b, h, s] in float32 or wider. Backward gives the
gradients of the three. A mask is of numbers to add. None of them drops weights, because they would draw numbers of
torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...compiler.ops.own_ops import aten
from ...compiler.torch_private import attention_choice

_HALVES = (torch.bfloat16, torch.float16)
_ALIGNED = 8
"""The entries between aligned places of a GPU's memory. Heads, and rows of masks, have to be multiples of it."""
_LSE_ROWS = 32
"""The memory-efficient kernel wants the number of its sums to be a multiple of this."""
_Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Flash:
    """One kernel: ``forward(q, k, v, bias, causal, scale)`` returns the output and the sums. ``backward(grad, out, lse,
    q, k, v, bias, causal, scale)`` returns the gradients of q, k and v. ``in_order`` does the same, and adds numbers up
    in one order, so that all ranks have the same bits; on GPUs that takes longer."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[..., _Gradients]
    in_order: Callable[..., _Gradients]


def flash_for(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, traced: bool) -> Flash | None:
    """Return the kernel that can attend with such operands; None where torch has none. While a compiler traces it is
    never cuDNN's, which is slow where heads do not lie as it likes."""
    if q.shape[-1] != v.shape[-1] or not q.shape[-1]:
        return None
    if q.device.type == "cpu":
        return _CPU
    if q.device.type != "cuda" or q.shape[-1] % _ALIGNED:
        return None
    generation = _generation(q.device)
    if mask is None and _takes_flash(q.dtype, q.shape[-1], generation):
        takes_cudnn = not traced and attention_choice(q, k, v, causal) == SDPBackend.CUDNN_ATTENTION.value
        return _CUDNN if takes_cudnn else _GPU
    wide = _with_mask(q, mask)
    return _EFFICIENT if wide in (torch.float32, torch.float16) or (wide in _HALVES and generation >= (8, 0)) else None


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as numbers to add to the scores of queries with this dtype.

    Numbers narrower than the queries are widened: torch's kernel on a CPU takes the memory of float32 ones for float64.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return mask.to(torch.promote_types(mask.dtype, dtype))
    mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values with each head repeated, so that there are so many."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def fold_heads(grad: Tensor, heads: int) -> Tensor:
    """Return the sums of the gradients of repeated heads."""
    if grad.shape[1] == heads:
        return grad
    repeated: Tensor = grad.unflatten(1, (heads, -1))
    if repeated.shape[2] == 2:  # torch's sum over a dim in the middle takes twice as long
        return repeated[:, :, 0] + repeated[:, :, 1]
    return repeated.sum(2)


@lru_cache(maxsize=64)
def _generation(device: torch.device) -> tuple[int, int]:
    """Return the generation of a GPU: (8, 0) is Ampere, (9, 0) Hopper."""
    return torch.cuda.get_device_capability(device)


def _takes_flash(dtype: torch.dtype, size: int, generation: tuple[int, int]) -> bool:
    """Return whether the flash kernel has a forward and a backward for heads of this size. Small GPUs have no room for
    the backward of some."""
    large = generation in ((8, 0), (9, 0), (10, 0))
    return dtype in _HALVES and generation >= (8, 0) and (size <= 192 or 224 < size <= 256 or (large and size <= 256))


def _with_mask(q: Tensor, mask: Tensor | None) -> torch.dtype:
    """Return the type of scores: that of queries, or a mask's if it is the wider one."""
    return q.dtype if mask is None or mask.dtype == torch.bool else torch.promote_types(q.dtype, mask.dtype)


def _lying(*tensors: Tensor) -> list[Tensor]:
    """Return heads whose entries lie side by side in memory, on a GPU from aligned places on: the kernels rely on it
    without a check."""

    def lies(tensor: Tensor) -> bool:
        steps = [step for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
        aligned = tensor.device.type == "cpu" or not any(step % _ALIGNED for step in (tensor.storage_offset(), *steps))
        return tensor.stride(-1) == 1 and aligned

    return [tensor if lies(tensor) else tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _lying(q, *(repeat_heads(x, q.shape[1]) for x in (k, v)))
    made: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return made


def _cpu_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> _Gradients:  # fmt: skip
    groups = k.shape[1]
    grad, out, q, k, v = _lying(grad, out, q, *(repeat_heads(x, q.shape[1]) for x in (k, v)))
    gq, gk, gv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    del k, v  # the repeated heads
    gk = fold_heads(gk, groups)
    return gq, gk, fold_heads(gv, groups)


def _gpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*_lying(q, k, v), 0.0, causal, scale=scale)
    return out, lse


def _gpu_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> _Gradients:  # fmt: skip
    grad, out, q, k, v = _lying(grad, out, q, k, v)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    made: _Gradients = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset, scale=scale
    )
    return made


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*_lying(q, k, v), None, True, 0.0, causal, scale=scale)
    return out, lse[..., 0]


def _cudnn_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> _Gradients:  # fmt: skip
    grad, out, q, k, v = _lying(grad, out, q, k, v)
    state = torch.empty((), dtype=torch.int64, device=q.device)
    made: _Gradients = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse[..., None].contiguous(), state, state, None, None, None, q.shape[2], k.shape[2], 0.0,
        causal, scale=scale,
    )  # fmt: skip
    return made


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    narrow, wide = q.dtype, _with_mask(q, bias)
    q, k, v = _lying(*(x.to(wide) for x in (q, repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]))))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(bias, q, k), True, 0.0, causal, scale=scale
    )
    return out.to(narrow), lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> _Gradients:  # fmt: skip
    groups, narrow, wide = k.shape[1], q.dtype, _with_mask(q, bias)
    repeated = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    grad, out, q, k, v = _lying(*(x.to(wide) for x in (grad, out, q, *repeated)))
    state = torch.empty((), dtype=torch.int64, device=q.device)
    lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=float("inf")).contiguous()
    gq, gk, gv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _aligned(bias, q, k), out, lse, state, state, 0.0, [True, True, True, False], causal, scale=scale
    )
    return gq.to(narrow), fold_heads(gk, groups).to(narrow), fold_heads(gv, groups).to(narrow)


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask in the shape of the scores, whose rows begin at aligned places of its memory."""
    if bias is None:
        return None
    padded = F.pad(bias.to(q.dtype).expand(*bias.shape[:-1], k.shape[2]), (0, -k.shape[2] % _ALIGNED)).contiguous()
    return padded[..., : k.shape[2]].expand(*q.shape[:3], k.shape[2])


@torch.library.custom_op("parc_runtime::attention_backward_in_order", mutates_args=())
def _in_order(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float, efficient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run a kernel's backward as torch's deterministic algorithm. It is an operator, so that this holds in compiled
    code, too."""
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


def _flash_in_order(*given: Tensor | bool | float | None) -> _Gradients:
    made: _Gradients = _in_order(*given, False)
    return made


def _efficient_in_order(*given: Tensor | bool | float | None) -> _Gradients:
    made: _Gradients = _in_order(*given, True)
    return made


_CPU = Flash(_cpu, _cpu_backward, _cpu_backward)
_GPU = Flash(_gpu, _gpu_backward, _flash_in_order)
_CUDNN = Flash(_cudnn, _cudnn_backward, _flash_in_order)
_EFFICIENT = Flash(_efficient, _efficient_backward, _efficient_in_order)
