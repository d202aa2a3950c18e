"""Layers of random models: each maps [B, S, W] to [B, S, W], as real models write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .random_functions import ACTIVATIONS, FUNCTIONS


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a random model; ``batch`` is that of one microbatch."""

    batch: int
    length: int
    heads: int
    head: int
    vocab: int

    @property
    def width(self) -> int:
        """The size of the last dim."""
        return self.heads * self.head


class MLP(nn.Module):
    """Two products around an activation; with ``gate`` the first is fused with a gate."""

    def __init__(self, s: Sizes, activation: str, bias: bool, gate: str) -> None:
        super().__init__()
        self.activation, self.gate, inner = ACTIVATIONS[activation], gate, 2 * s.width
        self.up = nn.Linear(s.width, 2 * inner if gate == "fused" else inner, bias)
        self.side = nn.Linear(s.width, inner, bias) if gate == "apart" else None
        self.down = nn.Linear(inner, s.width, bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.side is not None:
            return self.down(self.activation(up) * self.side(x))
        if self.gate == "fused":
            first, second = up.chunk(2, -1)
            return self.down(self.activation(first) * second)
        return self.down(self.activation(up))


class RMSNorm(nn.Module):
    """The root mean square norm as model files write it out."""

    def __init__(self, s: Sizes, per_head: bool) -> None:
        super().__init__()
        self.per_head = per_head
        self.heads = s.heads
        self.weight = nn.Parameter(torch.ones(s.head if per_head else s.width))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        if self.per_head:
            x = x.view(*shape[:-1], self.heads, -1)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * x).reshape(shape)


class Attention(nn.Module):
    """Self-attention; ``qkv`` says how the projections are written, ``mask`` how it is made causal, if it is."""

    def __init__(self, s: Sizes, qkv: str, shared: int, repeat: str, mask: str, dropout: float) -> None:
        super().__init__()
        self.qkv, self.repeat, self.mask, self.dropout = qkv, repeat, mask, dropout
        self.heads, self.head, self.groups = s.heads, s.head, s.heads // shared
        inner = self.groups * s.head
        if qkv == "apart":
            self.q, self.k, self.v = (nn.Linear(s.width, n, n == s.width) for n in (s.width, inner, inner))
        else:
            self.fused = nn.Linear(s.width, 3 * s.width)
        self.out = nn.Linear(s.width, s.width)
        self.bias = nn.Parameter(torch.zeros(s.heads, s.length, s.length)) if mask == "learned" else None

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, width = x.shape
        if self.qkv == "interleaved":  # rows are (heads, 3, head size)
            q, k, v = self.fused(x).view(batch, length, self.heads, 3, self.head).unbind(3)
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.qkv == "permuted":
            made = self.fused(x).view(batch, length, 3, self.heads, self.head).permute(2, 0, 3, 1, 4)
            return made[0], made[1], made[2]
        if self.qkv == "apart":
            parts = self.q(x), self.k(x), self.v(x)
        else:
            fused = self.fused(x)
            parts = fused.split(width, -1) if self.qkv == "split" else fused.chunk(3, -1)
        q, k, v = (part.view(batch, length, -1, self.head).transpose(1, 2) for part in parts)
        return q, k, v

    def _mask(self, length: int) -> Tensor | None:
        if self.mask in ("none", "causal"):
            return None
        if self.bias is not None:
            return self.bias
        at = torch.arange(length)
        if self.mask == "slopes":
            slopes = 0.5 ** torch.arange(1, self.heads + 1)
            return slopes[:, None, None] * (at[None, :] - at[:, None]).abs().neg()
        allowed = at[None, :] <= at[:, None]
        if self.mask == "bool":
            return allowed
        if self.mask == "where":
            return torch.where(allowed, 0.0, -1e9)[None, None]
        return torch.full((length, length), -1e9).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._project(x)
        grouped = k.shape[1] != self.heads
        if grouped and self.repeat == "expand":
            batch, groups, length, head = k.shape
            times = self.heads // groups
            k, v = (
                t[:, :, None].expand(batch, groups, times, length, head).reshape(batch, self.heads, length, head)
                for t in (k, v)
            )
        elif grouped and self.repeat == "interleave":
            k, v = (t.repeat_interleave(self.heads // t.shape[1], 1) for t in (k, v))
        options: dict[str, Any] = {"enable_gqa": True} if grouped and self.repeat == "enable" else {}
        mask = self._mask(x.shape[1])
        if mask is not None and mask.is_floating_point():
            mask = mask.to(x.dtype)
        if self.repeat == "plain" and not grouped:  # written out
            scores = q @ k.transpose(-2, -1) / self.head**0.5
            if mask is not None:
                scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -1e9)
            y = F.dropout(torch.softmax(scores, -1), self.dropout) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.mask == "causal", **options)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Experts(nn.Module):
    """Experts that each compute every token; a router weighs them, or keeps the best for each token."""

    def __init__(self, s: Sizes, count: int, best: bool) -> None:
        super().__init__()
        self.best = best
        self.router = nn.Linear(s.width, count, bias=False)
        self.up = nn.Parameter(torch.ones(count, s.width, 2 * s.head))
        self.down = nn.Parameter(torch.ones(count, 2 * s.head, s.width))

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.router(x), -1)
        if self.best:
            shares = shares * (shares >= shares.topk(1, -1).values)
        inner = F.silu(torch.einsum("bsw,ewf->ebsf", x, self.up))
        return torch.einsum("ebsf,efw,bse->bsw", inner, self.down, shares)


class Squeeze(nn.Module):
    """Channels gated by a summary of the whole sequence."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(s.width, s.width)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x.mean(1)))[:, None]


class Glu(nn.Module):
    """A product whose outputs are halves, of which one gates the other."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.up = nn.Linear(s.width, 2 * s.width)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.up(x), -1)


class Image(nn.Module):
    """A convolution over positions and the entries of a head, with heads as channels."""

    def __init__(self, s: Sizes, pooled: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(s.heads, s.heads, 3, padding=1)
        self.heads, self.pooled = s.heads, pooled

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.unflatten(-1, (self.heads, -1)).permute(0, 2, 1, 3))
        if self.pooled:
            y = y - F.avg_pool2d(y, 3, 1, 1)
        return y.permute(0, 2, 1, 3).flatten(2)


class Positions(nn.Module):
    """Position embeddings by counting."""

    def __init__(self, s: Sizes, batched: bool) -> None:
        super().__init__()
        self.table, self.batched = nn.Embedding(s.length, s.width), batched

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        if self.batched:
            positions = positions.unsqueeze(0).expand(x.shape[0], -1)
        return x + self.table(positions)


class Running(nn.Module):
    """Statistics over the batch, kept in a buffer that every step updates."""

    mean: Tensor

    def __init__(self, s: Sizes, kind: str) -> None:
        super().__init__()
        self.norm, self.assigned = nn.BatchNorm1d(s.width) if kind == "batch_norm" else None, kind == "assigned"
        self.register_buffer("mean", torch.zeros(s.width))

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.assigned:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        else:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return x - self.mean


WEIGHTED = {
    "scalar", "vector", "grid", "column", "heads", "length", "flat", "stacked", "twice", "tied_transposed", "rows",
    "einsum", "cat", "unused",
}  # fmt: skip
"""The ways to use a parameter."""


class Weighted(nn.Module):
    """Parameters used in other ways than as a layer's matrix; ``kind`` names the way."""

    def __init__(self, s: Sizes, kind: str) -> None:
        super().__init__()
        shape = {
            "scalar": (), "vector": (s.width,), "grid": (s.length, s.width), "column": (s.length, 1),
            "heads": (s.heads, 1), "length": (s.length, s.length), "flat": (s.length * s.width, s.length * s.width),
            "stacked": (s.heads, s.head, s.head),
        }.get(kind, (s.width, s.width))  # fmt: skip
        self.kind, self.heads = kind, s.heads
        self.weight = nn.Parameter(torch.ones(shape))
        self.unused = nn.Parameter(torch.ones(3)) if kind == "unused" else None

    def forward(self, x: Tensor) -> Tensor:
        w, kind, shape = self.weight, self.kind, x.shape
        if kind in ("scalar", "vector", "grid", "column"):
            return x * w + w
        if kind == "heads":
            return (x.view(*shape[:-1], self.heads, -1) * w).flatten(2)
        if kind == "length":
            return F.linear(x.transpose(1, 2), w).transpose(1, 2)
        if kind == "flat":
            return F.linear(x.reshape(shape[0], -1), w).view(shape)
        if kind == "stacked":
            per_head = x.reshape(-1, self.heads, shape[-1] // self.heads).transpose(0, 1)
            return torch.bmm(per_head, w).transpose(0, 1).reshape(shape)
        if kind == "twice":
            return F.linear(torch.tanh(F.linear(x, w)), w)
        if kind == "tied_transposed":
            return F.linear(torch.tanh(x @ w), w)
        if kind == "rows":
            return F.linear(x.flatten(0, 1), w).unflatten(0, shape[:2])
        if kind == "einsum":
            return torch.einsum("bsw,wv->bsv", x, w)
        if kind == "cat":
            return torch.cat([x @ w, x], -1).unflatten(-1, (2, -1)).sum(-2)
        return x @ w


class Conv(nn.Module):
    """A convolution along the sequence."""

    def __init__(self, s: Sizes, grouped: bool, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.conv = nn.Conv1d(s.width, s.width, 3, padding=0 if causal else 1, groups=s.heads if grouped else 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        return self.conv(F.pad(y, (2, 0)) if self.causal else y).transpose(1, 2)


class Plain(nn.Module):
    """A function without parameters."""

    def __init__(self, s: Sizes, name: str) -> None:
        super().__init__()
        self.function = FUNCTIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda s, bias: nn.Linear(s.width, s.width, bias),
    "mlp": MLP,
    "layer_norm": lambda s, affine: nn.LayerNorm(s.width, elementwise_affine=affine),
    "group_norm": lambda s: nn.Sequential(
        nn.Flatten(0, 1), nn.GroupNorm(s.heads, s.width), nn.Unflatten(0, (s.batch, s.length))
    ),
    "rms_norm": RMSNorm,
    "torch_rms_norm": lambda s, affine: nn.RMSNorm(s.width, eps=1e-6, elementwise_affine=affine),
    "experts": Experts,
    "squeeze": Squeeze,
    "glu": Glu,
    "image": Image,
    "attention": Attention,
    "dropout": lambda s, p: nn.Dropout(p),
    "positions": Positions,
    "running": Running,
    "weighted": Weighted,
    "conv": Conv,
    "plain": Plain,
}
"""The function that makes each kind of layer, from the model's sizes and the layer's options."""
