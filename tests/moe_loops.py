"""Loops over experts as people write them, of which no form tells anything."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.moe_forms import EXPERTS, TOP, WIDTH, Expert, Model


class Looped(nn.Module):
    """A router, and experts in a list."""

    def __init__(self, top: int = TOP) -> None:
        super().__init__()
        self.top, self.router = top, nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared = nn.Linear(WIDTH, WIDTH)


class ByPlaces(Looped):
    """Takes the places where an expert is named, and adds to what was there."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        weights, index = torch.topk(self.router(tokens), self.top)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype)
        made = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            batch, place = torch.where(index == i)
            made[batch] += weights[batch, place, None] * expert(tokens[batch])
        return (made + self.shared(tokens)).view_as(x)


class ByOneHot(Looped):
    """Turns the experts of tokens into a mask, and adds by an index: transformers' older Mixtral."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights = F.softmax(self.router(tokens), dim=1)
        weights, index = torch.topk(weights, self.top, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        made = torch.zeros((tokens.shape[0], WIDTH), dtype=x.dtype, device=x.device)
        mask = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            expert = self.experts[number]
            place, token = torch.where(mask[number])
            current = tokens[None, token].reshape(-1, WIDTH)
            current = expert(current) * weights[token, place, None]
            made.index_add_(0, token, current.to(x.dtype))
        return made.reshape(x.shape)


class IfAny(Looped):
    """Leaves out experts that no token chose."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).sigmoid().topk(self.top, dim=-1)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mask = index == number
            if not mask.any():
                continue
            token, place = mask.nonzero(as_tuple=True)
            if token.numel() > 0:
                made[token] = made[token] + expert(tokens[token] * weights[token, place].unsqueeze(-1))
        return made.view_as(x)


class ByMask(Looped):
    """Takes tokens by a mask of any of their experts, weighted by a column of all scores."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        index = scores.topk(self.top, dim=-1).indices
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mask = (index == number).any(dim=-1)
            made[mask] += scores[mask, number].unsqueeze(1) * expert(tokens[mask])
        return made.view_as(x)


class ByPlace(Looped):
    """Goes over the first expert of all tokens, then over the second."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(self.top, dim=-1)
        made = torch.zeros_like(tokens)
        for place in range(self.top):
            for number, expert in enumerate(self.experts):
                mask = index[:, place] == number
                made[mask] += expert(tokens[mask]) * weights[mask, place, None]
        return made.view_as(x)


class Repeated(Looped):
    """Repeats each token for each of its experts, and sums behind the loop."""

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(self.top, dim=-1)
        flat = index.view(-1)
        tokens = x.flatten(0, 1).repeat_interleave(self.top, dim=0)
        made = torch.empty_like(tokens)
        for number, expert in enumerate(self.experts):
            made[flat == number] = expert(tokens[flat == number])
        return (made.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=2)


class One(Looped):
    """Sends each token to one expert, and adds what all share in place."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        best, index = scores.max(dim=-1)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (token,) = torch.where(index == number)
            if token.shape[0] == 0:
                continue
            made[token] += best[token].view(-1, 1) * expert(tokens[token])
        made += self.shared(tokens)
        return made.view_as(x)


LOOPS: dict[str, type[Looped]] = {
    made.__name__: made for made in (ByPlaces, ByOneHot, IfAny, ByMask, ByPlace, Repeated, One)
}


def looped(name: str) -> Model:
    """Make the model of one of these layers."""
    return Model(name, layers=LOOPS)
