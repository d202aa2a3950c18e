"""Small models of the kinds that go wrong where several parallelisms meet, and their losses in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.moe_families import family


class Block(nn.Module):
    """Attention with a trained sink for each head, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.sinks = heads, nn.Parameter(torch.linspace(-1, 1, heads))
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (width // self.heads) ** 0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), self.sinks[:, None, None])
        weights = (scores - total).exp()
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Two blocks, with a head for the next token and one for the token behind it. ``tied``: the first head is the
    embedding."""

    def __init__(self, tied: bool = False, width: int = 8, heads: int = 2, vocab: int = 13) -> None:
        super().__init__()
        self.embed, self.ahead = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return {"logits": self.head(x), "ahead": self.ahead(x)}


class Tokenwise(nn.Module):
    """Tokens that never meet, with one head: its sequences are split without attention."""

    def __init__(self, width: int = 8, vocab: int = 13) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(vocab, width), nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.embed(tokens))))


class Attending(nn.Module):
    """One attention of torch over a sequence, and two heads."""

    def __init__(self, width: int = 8, vocab: int = 13) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = (
            nn.Embedding(vocab, width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.head, self.ahead = nn.Linear(width, vocab), nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return {"logits": self.head(x), "ahead": self.ahead(x)}


class Routed(nn.Module):
    """A router of soft experts whose balance counts the tokens of a mask alone, as transformers' does."""

    def __init__(self, width: int = 8, vocab: int = 13) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(vocab, width), nn.Linear(width, 4)
        self.experts, self.head = nn.Linear(width, 4 * width), nn.Linear(width, vocab)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        shares = self.router(x).softmax(-1)
        chosen = (shares == shares.amax(-1, keepdim=True)).to(x.dtype)
        x = x + torch.tanh((self.experts(x).unflatten(-1, (4, -1)) * shares[..., None]).sum(-2))
        real = mask.to(x.dtype)[..., None]
        means = [(part * real).flatten(0, 1).sum(0) / real.sum() for part in (chosen, shares)]
        return {"logits": self.head(x), "aux_loss": 4 * (means[0] * means[1]).sum()}


class Mixture(nn.Module):
    """A Mixtral of transformers that returns its logits."""

    def __init__(self) -> None:
        super().__init__()
        model: Any = family("Mixtral", vocab_size=13, num_local_experts=4)
        model.set_experts_implementation("eager")
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        model: Any = self.model
        logits: Tensor = model(input_ids=tokens).logits
        return logits


class Captions(nn.Module):
    """An encoder of pictures and a decoder of words, each with weights that a plan may split over an axis of its
    own."""

    def __init__(self, width: int = 8, vocab: int = 13) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, width), nn.LayerNorm(width))
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.decoder = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width), nn.LayerNorm(width))

    def forward(self, tokens: Tensor, picture: Tensor) -> Tensor:
        return self.head(self.decoder(self.embed(tokens) + self.encoder(picture)[:, None]))


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=0.1)


def masked(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()
