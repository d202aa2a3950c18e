"""Models as files of their own, for which plans are proposed: a GPT as people train it, and one of each kind."""

from __future__ import annotations

NANO = '''
"""A GPT in one file: fused q, k and v, a head that is the embedding, and a forward that returns its loss."""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 65
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd), wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(config.dropout), h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        b, t = idx.size()
        assert t <= self.config.block_size
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(t, device=idx.device))
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def gpt(n_layer: int = 2, n_embd: int = 32) -> GPT:
    return GPT(GPTConfig(n_layer=n_layer, n_embd=n_embd))
'''
KINDS = """
import torch
import torch.nn.functional as F
from torch import nn


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, pictures):
        x = self.stem(pictures)
        for block in self.blocks:
            x = x + block(x)
        return {"scores": self.head(x.mean((2, 3)))}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, source, target_tokens, scale=None):
        x, memory = self.words(target_tokens), self.words(source)
        x = x + self.attend(x, memory, memory, need_weights=False)[0]
        return (x + self.net(x)) @ self.words.weight.T


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 64), nn.Linear(32, 12)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.tags = nn.Embedding(50, 16), nn.Linear(16, 7)

    def forward(self, tokens):
        return self.tags(self.words(tokens))


def tagged(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        return self.net(x) if x.sum() > 0 else x


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3 * 17 * 5, 6)

    def forward(self, x):
        assert x.shape[1:] == (3, 17, 5), "pictures of 17 by 5"
        return self.net(x.flatten(1))


class Deep(nn.Module):
    def __init__(self, layers=30, width=1024, vocab=32001):
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
                                    for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()


class Mute(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        self.net(x)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.score, self.length = nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.words(tokens).mean(1)
        return self.score(x).squeeze(1), self.length(x)


def weighted(output, scores, weights):
    return ((output - scores) ** 2 * weights).mean()
"""

OUTPUTS = """
import torch
from torch import nn


class Scored(nn.Module):
    def __init__(self, words=50, wide=128):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(words, 16), nn.Linear(16, 16), nn.Linear(16, words)
        self.length, self.kind = nn.Linear(16, 1), nn.Linear(16, wide)

    def hidden(self, tokens):
        return torch.tanh(self.body(self.words(tokens)))


class Named(Scored):
    def forward(self, tokens):
        x = self.hidden(tokens)
        return {"length": self.length(x.mean(1)), "logits": self.head(x), "kind": self.kind(x)}


class Later(Scored):
    def forward(self, tokens):
        x = self.hidden(tokens)
        return x.mean(1), self.head(x)


class Kinds(Scored):
    def forward(self, tokens):
        return self.kind(self.hidden(tokens).mean(1))


class Each(Scored):
    def forward(self, tokens):
        return self.length(self.hidden(tokens)).squeeze(-1)


class Pair(Scored):
    def forward(self, source, words):
        return self.head(self.hidden(words) + self.hidden(source).mean(1, keepdim=True))
"""
