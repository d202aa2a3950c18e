"""torch's own kernels of attention that keep no scores: the table of those that this project uses, by device.

Each takes queries [b, h, s, d], keys [b, g, t, d], values [b, g, t, d], where h is a multiple of g, and gives the
output [b, h, s, d] and the logarithms of the sums of exponentials [b, h, s] in float32 or wider. Backward gives the
gradients of the three. A mask is of numbers to add. None of them drops weights, because they would draw numbers of
torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...compiler.ops.torch_ops import aten
from ...compiler.torch_private import attention_choice

_HALVES = (torch.bfloat16, torch.float16)
_ALIGNED = 8
"""The multiple of which heads, and rows of masks, have to be on a GPU."""
_WIDEST = 256
"""The widest head of the flash kernel on a GPU."""
_LSE_ROWS = 32
"""The multiple of which the memory-efficient kernel has its sums."""
_Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
_Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Flash:
    """One kernel: ``forward(q, k, v, bias, causal, scale)`` returns the output and the sums, and ``backward(grad, out,
    lse, q, k, v, bias, causal, scale)`` the gradients of q, k and v."""

    forward: _Forward
    backward: _Backward


def flash_for(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, traced: bool) -> Flash | None:
    """Return the kernel that can attend with such operands; None where torch has none. While a compiler is ``traced``
    it is never cuDNN's, which is slow where heads do not lie as it likes."""
    if q.shape[-1] != v.shape[-1] or not q.shape[-1]:
        return None
    if q.device.type == "cpu":
        return _CPU
    if q.device.type != "cuda" or q.shape[-1] % _ALIGNED or q.dtype not in (torch.float32, *_HALVES):
        return None
    if mask is not None or q.dtype not in _HALVES or q.shape[-1] > _WIDEST:
        return _EFFICIENT
    takes_cudnn = not traced and attention_choice(q, k, v, causal) == SDPBackend.CUDNN_ATTENTION.value
    return _CUDNN if takes_cudnn else _GPU


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as numbers to add, where it is of bools."""
    if mask is None or mask.dtype != torch.bool:
        return mask
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


def _lying(*tensors: Tensor) -> list[Tensor]:
    """Return heads whose entries lie side by side in memory: the kernels rely on it without a check."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _lying(q, *(repeat_heads(x, q.shape[1]) for x in (k, v)))
    made: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return made


def _cpu_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad, out, q, k, v = _lying(grad, out, q, k, v)
    seed, offset = (
        torch.empty(2, dtype=torch.uint64, device=q.device),
        torch.empty((), dtype=torch.uint64, device=q.device),
    )
    made: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset, scale=scale
    )
    return made


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*_lying(q, k, v), None, True, 0.0, causal, scale=scale)
    return out, lse[..., 0]


def _cudnn_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad, out, q, k, v = _lying(grad, out, q, k, v)
    state = torch.empty((), dtype=torch.int64, device=q.device)
    made: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse[..., None].contiguous(), state, state, None, None, None, q.shape[2], k.shape[2], 0.0,
        causal, scale=scale,
    )  # fmt: skip
    return made


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = _lying(q, *(repeat_heads(x, q.shape[1]) for x in (k, v)))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(bias, q, k), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    groups = k.shape[1]
    grad, out, q, k, v = _lying(grad, out, q, *(repeat_heads(x, q.shape[1]) for x in (k, v)))
    state = torch.empty((), dtype=torch.int64, device=q.device)
    lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=float("inf")).contiguous()
    gq, gk, gv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _aligned(bias, q, k), out, lse, state, state, 0.0, [True, True, True, False], causal, scale=scale
    )
    return gq, fold_heads(gk, groups), fold_heads(gv, groups)


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask in the shape of the scores, whose rows begin at aligned places of its memory."""
    if bias is None:
        return None
    padded = F.pad(bias.to(q.dtype).expand(*bias.shape[:-1], k.shape[2]), (0, -k.shape[2] % _ALIGNED)).contiguous()
    return padded[..., : k.shape[2]].expand(*q.shape[:3], k.shape[2])


_CPU = Flash(_cpu, _cpu_backward)
_GPU = Flash(_gpu, _gpu_backward)
_CUDNN = Flash(_cudnn, _cudnn_backward)
_EFFICIENT = Flash(_efficient, _efficient_backward)
