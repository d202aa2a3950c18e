"""Transformers as published runs train them: GPT (LayerNorm, GELU, learned positions), Llama (RMSNorm, SwiGLU, rotary
positions, grouped keys), and such with experts and latent attention, as Qwen3 and DeepSeek have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parc


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of heads by their positions' angles."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    """Causal self-attention with ``kv_heads`` heads of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int, bias: bool) -> None:
        super().__init__()
        self.size = size
        self.q = nn.Linear(width, heads * size, bias=bias)
        self.k = nn.Linear(width, kv_heads * size, bias=bias)
        self.v = nn.Linear(width, kv_heads * size, bias=bias)
        self.out = nn.Linear(heads * size, width, bias=bias)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """[B, S, width] to [B, S, width]."""
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, -1, self.size).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        if cos is not None and sin is not None:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class LatentAttention(nn.Module):
    """Causal self-attention of DeepSeek-V2: keys and values are made from ``kv_rank`` numbers of a token, and queries
    from ``q_rank`` (0: from the token); ``rope`` more entries of each head have positions."""

    def __init__(self, width: int, heads: int, size: int, q_rank: int, kv_rank: int, rope: int) -> None:
        super().__init__()
        self.size, self.rope, self.kv_rank = size, rope, kv_rank
        if q_rank:
            self.q_down, self.q_norm = nn.Linear(width, q_rank, bias=False), nn.RMSNorm(q_rank)
        self.q_rank = q_rank
        self.q = nn.Linear(q_rank or width, heads * (size + rope), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(width, kv_rank + rope, bias=False), nn.RMSNorm(kv_rank)
        self.kv = nn.Linear(kv_rank, heads * 2 * size, bias=False)
        self.out = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, width] to [B, S, width]."""
        batch, length, _ = x.shape
        q = self.q(self.q_norm(self.q_down(x)) if self.q_rank else x)
        q, q_rope = q.view(batch, length, -1, self.size + self.rope).transpose(1, 2).split((self.size, self.rope), -1)
        latent, k_rope = self.kv_down(x).split((self.kv_rank, self.rope), -1)
        kv = self.kv(self.kv_norm(latent)).view(batch, length, -1, 2 * self.size).transpose(1, 2)
        k, v = kv.split(self.size, -1)
        k_rope = rotated(k_rope.unsqueeze(1), cos, sin).expand(-1, k.shape[1], -1, -1)
        q, k = torch.cat((q, rotated(q_rope, cos, sin)), -1), torch.cat((k, k_rope), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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


class Experts(nn.Module):
    """The stacked weights of gated experts."""

    def __init__(self, width: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, width))
        self.down = nn.Parameter(torch.empty(experts, width, ffn))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the weighted sum of each token's experts: [N, width], [N, k], [N, k] to [N, width]."""
        y = torch.zeros_like(x)
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            y = y + _expert(x, gate_up, down) * (weights * (index == number)).sum(-1, keepdim=True)
        return y


def _expert(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute one expert: [N, width] to [N, width]."""
    gate, up = F.linear(rows, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


@parc.register_experts(Experts)
def _packed(layer: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute what ``Experts`` does."""
    return parc.routed(x, index, weights, _expert, (layer.gate_up, layer.down))


class ExpertLayer(nn.Module):
    """An MLP of which each token takes ``top`` of ``experts``, and ``shared`` ones that all tokens take."""

    def __init__(self, width: int, ffn: int, experts: int, top: int, shared: int) -> None:
        super().__init__()
        self.top, self.router = top, nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, ffn, experts)
        self.shared = MLP(width, shared * ffn, True, False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width] to [B, S, width]."""
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).float().softmax(-1).topk(self.top, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        y = self.experts(tokens, index, weights).view_as(x)
        return y if self.shared is None else y + self.shared(x)


class Block(nn.Module):
    """One layer, with norms first."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, width: int, rms: bool, dropout: float) -> None:
        super().__init__()
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.norm1, self.norm2, self.drop = norm(width), norm(width), dropout
        self.attn, self.mlp = attn, mlp

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """[B, S, width] to [B, S, width]."""
        x = x + F.dropout(self.attn(self.norm1(x), cos, sin), self.drop)
        return x + F.dropout(self.mlp(self.norm2(x)), self.drop)


class Transformer(nn.Module):
    """A stack of blocks, from tokens to next-token logits. With ``experts``, all blocks after the first ``dense`` have
    them; with ``kv_rank``, attention is latent. ``size`` is that of a head (0: width / heads)."""

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, length: int,
        gated: bool = False, tied: bool = True, dropout: float = 0.0, size: int = 0, q_rank: int = 0, kv_rank: int = 0,
        rope: int = 0, experts: int = 0, top: int = 0, expert_ffn: int = 0, shared: int = 0, dense: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        size = size or width // heads
        self.embed = nn.Embedding(vocab, width)
        self.position = None if gated else nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            Block(
                LatentAttention(width, heads, size, q_rank, kv_rank, rope) if kv_rank
                else Attention(width, heads, kv_heads, size, not gated),
                ExpertLayer(width, expert_ffn, experts, top, shared) if experts and at >= dense
                else MLP(width, ffn, gated, not gated),
                width, gated, dropout,
            )
            for at in range(layers)
        )  # fmt: skip
        self.norm = nn.RMSNorm(width) if gated else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.turned, self.drop = rope or size, dropout
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 to [B, S, vocab]."""
        x, cos, sin = self.embed(tokens), None, None
        at = torch.arange(tokens.shape[1], device=tokens.device)
        if self.position is not None:
            x = F.dropout(x + self.position(at), self.drop)
        else:
            rates = 1.0 / 500000.0 ** (torch.arange(0, self.turned, 2, device=tokens.device) / self.turned)
            angles = torch.outer(at.float(), rates)
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
