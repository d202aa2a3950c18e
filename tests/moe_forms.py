"""Layers of experts as people write them, each with the form that tells parc how it sends tokens to experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parc

WIDTH, HIDDEN, EXPERTS, TOP, WORDS = 16, 12, 8, 2, 256


class Expert(nn.Module):
    """A gated expert with a norm, biases and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        made: Tensor = self.down(F.silu(self.gate(x)) * self.up(x)) * (1 + self.scale)
        return made


class Listed(nn.Module):
    """Experts in a list, and a loop over them that takes the tokens of each."""

    def __init__(self, top: int = TOP) -> None:
        super().__init__()
        self.top, self.router = top, nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of each token's experts."""
        weights, index = self.router(tokens).softmax(-1).topk(self.top, dim=-1)
        return weights / weights.sum(-1, keepdim=True), index

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.route(tokens)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            made.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return made.view_as(x)


@parc.register_experts(Listed, "experts")
def listed(layer: Listed, x: Tensor) -> Tensor:
    """Compute what ``Listed`` does."""
    tokens = x.flatten(0, 1)
    weights, index = layer.route(tokens)
    return parc.routed(tokens, index, weights, layer.experts).view_as(x)


class Balanced(Listed):
    """The same, chosen by scores and a bias, as DeepSeek-V3's are; it has the form of what it inherits from."""

    def __init__(self, top: int = TOP) -> None:
        super().__init__(top)
        self.register_buffer("choice_bias", torch.zeros(EXPERTS))
        self.choice_bias: Tensor

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of each token's experts."""
        scores = self.router(tokens).sigmoid()
        index = (scores + self.choice_bias).topk(self.top, dim=-1)[1]
        weights = scores.gather(1, index)
        return weights / weights.sum(-1, keepdim=True), index


class Stacked(nn.Module):
    """Experts with stacked weights, each token gathering those of its own."""

    def __init__(self, top: int = TOP) -> None:
        super().__init__()
        self.top, self.router = top, nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        scores, index = self.router(x).sigmoid().topk(self.top, dim=-1)
        inside = torch.einsum("bsh,bskhf->bskf", x, self.up[index]) * scores[..., None] + self.bias[index]
        return torch.einsum("bskf,bskfh->bsh", F.gelu(inside), self.down[index])


@parc.register_experts(Stacked)
def stacked(layer: Stacked, x: Tensor) -> Tensor:
    """Compute what ``Stacked`` does: its scores are on what experts read."""
    tokens = x.flatten(0, 1)
    scores, index = layer.router(tokens).sigmoid().topk(layer.top, dim=-1)

    def expert(rows: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return F.gelu(rows @ up + bias) @ down

    weights = (layer.up, layer.bias, layer.down)
    return parc.routed(tokens, index, scores, expert, weights, on_input=True).view_as(x)


Layers = Mapping[str, Callable[[int], nn.Module]]
LAYERS: dict[str, Callable[[int], nn.Module]] = {"listed": Listed, "stacked": Stacked}
MORE: Layers = {"balanced": Balanced}


class Model(nn.Module):
    """Tokens to ``logits``, through a layer of experts, in which the router prefers expert ``to``."""

    def __init__(self, name: str, top: int = TOP, to: int | None = None, layers: Layers = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = {**layers, **MORE}[name](top)
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": layer})])
        if to is not None:
            with torch.no_grad():
                layer.get_parameter("router.bias")[to] += 20
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer.get_submodule("experts")(x)
        return SimpleNamespace(logits=self.head(x))
