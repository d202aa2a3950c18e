"""Models as people publish them in one file: a GPT that returns its loss, and a Llama with complex rotations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        values = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.c_proj(values.transpose(1, 2).contiguous().view(b, t, c))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = _Attention(width, heads, length)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT with tied weights, a mask in a buffer, and targets that may be missing."""

    def __init__(self, width: int, heads: int, layers: int, vocab: int, length: int) -> None:
        super().__init__()
        self.length = length
        blocks = nn.ModuleList([_Block(width, heads, length) for _ in range(layers)])
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab, width), "wpe": nn.Embedding(length, width), "drop": nn.Dropout(0.1), "h": blocks,
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[b, t]`` to logits and the loss, if there are targets."""
        _, t = idx.size()
        assert t <= self.length
        at = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(at))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nano_gpt() -> nn.Module:
    """Make a NanoGPT of two layers."""
    return NanoGPT(32, 4, 2, 64, 16)


class _Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Multiply pairs of entries, as complex numbers, by those of their positions."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None, :]).flatten(3).type_as(x)


class _LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, few: int) -> None:
        super().__init__()
        self.heads, self.few, size = heads, few, dim // heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = (nn.Linear(dim, few * size, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        self.attention_norm, self.ffn_norm = _Norm(dim), _Norm(dim)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, s, dim = x.shape
        y = self.attention_norm(x)
        q = turned(self.wq(y).view(b, s, self.heads, -1), angles).transpose(1, 2)
        k = (
            turned(self.wk(y).view(b, s, self.few, -1), angles)
            .repeat_interleave(self.heads // self.few, 2)
            .transpose(1, 2)
        )
        v = self.wv(y).view(b, s, self.few, -1).repeat_interleave(self.heads // self.few, 2).transpose(1, 2)
        scores = F.softmax((torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1)) + mask).float(), dim=-1)
        x = x + self.wo(torch.matmul(scores.type_as(q), v).transpose(1, 2).contiguous().view(b, s, dim))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class MetaLlama(nn.Module):
    """A Llama with grouped keys and values, rotation by a complex table in a plain attribute, and a mask from
    ``triu``."""

    def __init__(self, dim: int, heads: int, few: int, layers: int, vocab: int, length: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([_LlamaBlock(dim, heads, few) for _ in range(layers)])
        self.norm, self.output = _Norm(dim), nn.Linear(dim, vocab, bias=False)
        size = dim // heads
        speeds = 1.0 / (10000.0 ** (torch.arange(0, size, 2)[: size // 2].float() / size))
        angles = torch.outer(torch.arange(length), speeds)
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` to logits."""
        s = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        mask = torch.triu(torch.full((s, s), float("-inf"), device=tokens.device), diagonal=1)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[:s].to(h.device), mask)
        return self.output(self.norm(h)).float()


def meta_llama() -> nn.Module:
    """Make a MetaLlama of two layers."""
    return MetaLlama(32, 4, 2, 2, 64, 16)
