"""Models that compute with complex numbers: Meta's way to write a Llama, filters of frequencies, transformers' own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn


def turns(dim: int, length: int, theta: float = 10000.0) -> Tensor:
    """Return, for every position, one number on the unit circle for each pair of a head's entries: shape `[length, dim
    / 2]`."""
    frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Multiply heads [b, t, h, d], with their entries in pairs as complex numbers, by ``turn`` [t, d / 2]."""
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    shape = [size if dim in (1, z.ndim - 1) else 1 for dim, size in enumerate(z.shape)]
    return torch.view_as_real(z * turn.view(*shape)).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], self.heads, -1) for layer in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in (rotated(q, turn), rotated(k, turn), v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        made = torch.matmul(F.softmax((scores + mask).float(), dim=-1).type_as(q), v)
        out: Tensor = self.wo(made.transpose(1, 2).contiguous().view(*x.shape))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.first(x), turn, mask)
        out: Tensor = x + self.down(F.silu(self.up(self.second(x))))
        return out


class Llama(nn.Module):
    """A Llama whose table of turns lies in a plain attribute, and is read from a position on."""

    def __init__(self, layers: int = 1, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, width), nn.Linear(width, 32, bias=False)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.freqs_cis = turns(width // heads, 32)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens)
        self.freqs_cis = self.freqs_cis.to(x.device)
        turn = self.freqs_cis[start : start + length]
        mask = torch.triu(torch.full((length, length), float("-inf")), diagonal=1).type_as(x)
        for layer in self.layers:
            x = layer(x, turn, mask)
        out: Tensor = self.head(self.norm(x)).float()
        return out


class Filter(nn.Module):
    """A layer that multiplies the frequencies of a sequence by trained complex weights."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length // 2 + 1, width, dtype=torch.complex64) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.fft.rfft(x, dim=1, norm="ortho") * self.weight
        return torch.fft.irfft(made, n=x.shape[1], dim=1, norm="ortho")


class Filters(nn.Module):
    """A model with a complex buffer, and one that every step changes."""

    turn: Tensor
    seen: Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.filter, self.up, self.down = Filter(8, width), nn.Linear(width, 32), nn.Linear(32, width)
        self.register_buffer("turn", torch.polar(torch.ones(width), torch.arange(width).float()))
        self.register_buffer("seen", torch.zeros(width, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        z = (x + self.down(torch.relu(self.up(self.filter(x))))) * self.turn
        self.seen.mul_(0.9).add_(z.detach().mean((0, 1)), alpha=0.1)
        out: Tensor = self.head(z.real - z.imag)
        return out


def fnet() -> nn.Module:
    """Make an FNet of one layer, which mixes by an FFT of sequence and width."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 32}
    return transformers.FNetForMaskedLM(transformers.FNetConfig(**sizes, vocab_size=32, type_vocab_size=2))


def llama4() -> nn.Module:
    """Make Llama 4's text model of one dense layer."""
    made = transformers.Llama4TextConfig(
        hidden_size=32, intermediate_size=32, intermediate_size_mlp=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, vocab_size=32, interleave_moe_layer_step=3,
        num_local_experts=2, attention_chunk_size=8, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(made)
