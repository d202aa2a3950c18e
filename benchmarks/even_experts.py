"""Mixtral's model with a router that favours experts in turn, so that every expert has as many tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from examples.moe import mixtral


class EvenRouter(MixtralTopKRouter):
    """A router whose token t chooses experts ``k t, k t + 1, …``, with the scores that the model gives them."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden_states, self.weight)
        tokens, experts = (torch.arange(size, device=logits.device) for size in logits.shape)
        favoured = (experts - self.top_k * tokens[:, None]) % self.num_experts < self.top_k
        scores, chosen = torch.topk(torch.softmax(logits + 100.0 * favoured, -1), self.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True), chosen


def even(**sizes: int) -> MixtralForCausalLM:
    """Make the model of ``examples/moe.py`` with even routers."""
    model = mixtral(**sizes)
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = EvenRouter
    return model
