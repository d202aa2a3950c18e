"""Functions of random models: of one value [B, S, W], of its elements, and of two values; all keep the shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "tanh_gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "square": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "mish": F.mish,
}

JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "scaled": lambda x, y: 0.5 * x + y,
    "times": lambda x, y: x * torch.sigmoid(y),
    "larger": torch.maximum,
    "cat": lambda x, y: torch.cat([x, y], -1)[..., ::2],
    "cat_rows": lambda x, y: torch.cat([x, y], 1)[:, x.shape[1] // 2 : x.shape[1] // 2 + x.shape[1]],
    "attend": lambda x, y: torch.softmax(x @ y.mT, -1) @ y,
    "einsum": lambda x, y: torch.einsum("bsw,btw->bst", x, y).softmax(-1) @ x,
    "mix": lambda x, y: torch.lerp(x, y, 0.3),
}
"""Ways in which a layer's result meets an earlier value."""


def _cat_rows(x: Tensor) -> Tensor:
    return torch.cat([x, -x], 1)[:, x.shape[1] // 2 : -(x.shape[1] - x.shape[1] // 2)]


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    at = torch.arange(x.shape[1], dtype=x.dtype)
    angle = at[:, None] * (0.1 * torch.arange(half, dtype=x.dtype) + 0.1)[None, :]
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    y = x[..., : 2 * half]
    turned = y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin
    return torch.cat([turned, x[..., 2 * half :]], -1) if x.shape[-1] % 2 else turned


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax_rows": lambda x: torch.softmax(x, 1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "mean_rows": lambda x: x + x.mean(1, keepdim=True),
    "mean_batch": lambda x: x - x.mean(0),
    "mean_all": lambda x: x / (1 + x.abs().mean()),
    "sum": lambda x: x * torch.sigmoid(x.sum((0, 2), keepdim=True)),
    "largest": lambda x: x - x.amax(-1, keepdim=True),
    "largest_rows": lambda x: x + x.max(1, keepdim=True).values,
    "variance": lambda x: x * torch.rsqrt(x.var(-1, keepdim=True) + 1e-3),
    "norm": lambda x: F.normalize(x, dim=-1),
    "gram": lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
    "gate": lambda x: torch.cat([x[..., ::2] * torch.sigmoid(x[..., 1::2])] * 2, -1) if x.shape[-1] % 2 == 0 else x,
    "chunk": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "shift": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1] + x,
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(-1),
    "cumsum": lambda x: x.cumsum(1),
    "cat_rows": _cat_rows,
    "rotate": _rotate,
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "clamp": lambda x: x.clamp(-1, 1) + x,
    "masked": lambda x: x.masked_fill(torch.ones(x.shape[1], x.shape[1]).tril().sum(-1)[:, None] > 2, 0.5),
    "detach": lambda x: x + x.detach().square(),
    "stack": lambda x: torch.stack([x, x * x], 0).sum(0),
    "swap": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "select": lambda x: x + x[:, 0:1] + x[:, -1][:, None],
    "ones": lambda x: x * torch.ones_like(x) + torch.zeros(x.shape[-1]),
    "nothing": lambda x: torch.cat([x, x[..., x.shape[-1] :]], -1),
    "repeat": lambda x: x.repeat(1, 2, 1)[:, x.shape[1] :],
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "smallest": lambda x: x - x.amin(-1, keepdim=True),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "logsumexp_rows": lambda x: x - x.logsumexp(1, keepdim=True),
    "deviation": lambda x: x / (1 + x.std(1, keepdim=True)),
    "mean_heads": lambda x: x - x.unflatten(-1, (2, -1)).mean(-2).repeat(1, 1, 2) if x.shape[-1] % 2 == 0 else x,
    "length": lambda x: x / (1 + x.norm(dim=(1, 2), keepdim=True)),
    "order": lambda x: x.sort(-1).values + x,
    "first": lambda x: x * (x >= x.topk(2, -1).values[..., -1:]),
    "tril": lambda x: x.tril() + x,
    "picked": lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "index": lambda x: x.index_select(-1, (torch.arange(x.shape[-1]) * 3) % x.shape[-1]),
    "every": lambda x: x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]],
    "outer": lambda x: torch.einsum("bsi,bsj->bsj", x, torch.tanh(x)) / x.shape[-1],
    "merged": lambda x: torch.tanh(x.reshape(-1)).reshape(x.shape),
    "turned": lambda x: torch.tanh(x.mT.reshape(x.shape)),
    "halves": lambda x: torch.cat([torch.tanh(x[: x.shape[0] // 2]), x[x.shape[0] // 2 :]], 0),
    "quarter": lambda x: F.pad(x[..., : x.shape[-1] // 2], (0, x.shape[-1] - x.shape[-1] // 2)) + x,
    "split": lambda x: torch.cat([torch.relu(part) for part in x.split([1, x.shape[-1] - 1], -1)], -1),
    "unbind": lambda x: torch.stack([row * (1 + at) for at, row in enumerate(x.unbind(1))], 1),
    "pool": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "scores": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "outside": lambda x: x * torch.tensor([1.0, 2.0]).sum() + torch.eye(x.shape[1], x.shape[-1]),
    "power": lambda x: (x.abs() + 1) ** 0.5 * torch.sign(x) + x.exp().log1p(),
    "cumulative": lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
    "drop": lambda x: F.dropout(x, 0.2) + F.dropout1d(x, 0.3),
}
