"""Dense transformers as published runs train them: GPT (LayerNorm, GELU, learned positions) and Llama (RMSNorm, SwiGLU,
rotary positions, grouped keys)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with ``kv_heads`` heads of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.size, self.rotary = width // heads, rotary
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.v = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """[B, S, width] to [B, S, width]."""
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, -1, self.size).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        if cos is not None and sin is not None:
            q, k = (
                t * cos + torch.cat((-t[..., self.size // 2 :], t[..., : self.size // 2]), -1) * sin for t in (q, k)
            )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Two products around a GELU, or three with a gate."""

    def __init__(self, width: int, ffn: int, gated: bool, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn, bias=bias), nn.Linear(ffn, width, bias=bias)
        if gated:
            self.gate = nn.Linear(width, ffn, bias=bias)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width] to [B, S, width]."""
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.gated else F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One layer, with norms first."""

    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int, gated: bool, dropout: float) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2, self.drop = norm(width), norm(width), dropout
        self.attn = Attention(width, heads, kv_heads, not gated, gated)
        self.mlp = MLP(width, ffn, gated, not gated)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """[B, S, width] to [B, S, width]."""
        x = x + F.dropout(self.attn(self.norm1(x), cos, sin), self.drop)
        return x + F.dropout(self.mlp(self.norm2(x)), self.drop)


class Transformer(nn.Module):
    """A stack of blocks, from tokens to next-token logits."""

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, length: int,
        gated: bool = False, tied: bool = True, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = None if gated else nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, ffn, gated, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width) if gated else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.size, self.drop = width // heads, dropout
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 to [B, S, vocab]."""
        x, cos, sin = self.embed(tokens), None, None
        at = torch.arange(tokens.shape[1], device=tokens.device)
        if self.position is not None:
            x = F.dropout(x + self.position(at), self.drop)
        else:
            rates = 1.0 / 500000.0 ** (torch.arange(0, self.size, 2, device=tokens.device) / self.size)
            angles = torch.outer(at.float(), rates)
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
