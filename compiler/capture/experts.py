"""Experts: modules that send each token to some of many experts, captured as packed rows.

The models of transformers share one interface, ``experts(hidden, index, weights)`` with weights stacked over experts;
its implementations sort tokens in ways that no rule could follow. A capture takes one of parc's own operators instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from ..ops.expert_ops import OPS


def routed(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of the chosen experts' outputs for each token, weighted.

    ``hidden`` is [tokens, width]; ``index`` and ``weights`` are [tokens, k], the experts of each token. ``experts`` is
    a module of transformers 5 with its facts on its weights (``is_transposed``, ``has_bias``, ``has_gate``).
    """
    tokens, top, count = *index.shape, experts.num_experts
    chosen = torch.zeros(tokens, count, dtype=torch.bool, device=hidden.device).scatter(1, index, True).t()
    scores = weights.new_zeros(tokens, count).scatter(1, index, weights).t()

    inside = OPS.route(chosen, chosen)

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        made: torch.Tensor = OPS.expert_linear(rows, inside, getattr(experts, name), experts.is_transposed, top)
        return made + OPS.spread(getattr(experts, f"{name}_bias"), inside, top) if experts.has_bias else made

    rows = OPS.route(OPS.pack(hidden, chosen, top), chosen)
    rows = linear(rows, "gate_up_proj" if experts.has_gate else "up_proj")
    rows = linear(experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows), "down_proj")
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    rows = OPS.route(rows, chosen) * OPS.pick(scores, chosen, top)
    made: torch.Tensor = OPS.unpack(rows, chosen, top).to(hidden.dtype)
    return made


@contextmanager
def with_experts() -> Iterator[None]:
    """Let experts of transformers' interface compute by packed rows, whatever implementation they are set to."""
    moe = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ExpertsInterface", None)
    if interface is None:
        yield
        return
    with patch.object(interface, "get_interface", lambda self, name, default: routed):
        yield
