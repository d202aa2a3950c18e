"""Codes of messages about layers that send tokens to experts (P02xx)."""

from __future__ import annotations

from .code import Code

_FORM = """import torch

import parc


def expert(rows, up):
    return {expert}


@parc.register_experts(Layer)
def form(layer, x):
    weights, index = layer.router(x).softmax(-1).topk(2)
    return parc.routed(x, index, {weights}, expert, [layer.up])"""

NO_EXPERTS = Code(
    name="P0263",
    title="experts that packed rows do not follow",
    why="the code of one expert runs on the rows of all experts. If it reads a weight of its own, each row "
    "must meet the weight of its expert. parc can do this for linear layers, matrix products, norms of "
    "rows, and functions of single entries. Experts in a list must have one structure, and each token "
    "must have the same number of them, [tokens, k]. A loop over a list gives each expert the tokens that "
    "chose it, and adds its results to the rows of these tokens.",
    example=_FORM.format(expert="rows * up.cumsum(0)", weights="weights"),
    instead=_FORM.format(expert="rows * up", weights="weights"),
    language="python",
)
MIXED_ROWS = Code(
    name="P0264",
    title="an operator that mixes the rows of an expert",
    why="the rows that a rank has for an expert, and their order, depend on the plan. So an expert must "
    "compute each row by itself: a statistic over its tokens, or a random number for each, would differ "
    "from plan to plan.",
    example=_FORM.format(expert="(rows - rows.mean(0)) * up", weights="weights"),
    instead=_FORM.format(expert="(rows - rows.mean(1, keepdim=True)) * up", weights="weights"),
    language="python",
)
OTHER_FORM = Code(
    name="P0265",
    title="a form of experts that computes something else",
    why="a layer that `parc.register_experts` names is captured by its form, and trained by it. A build runs the"
    " layer's own forward beside it, on random inputs: loss and gradients must be the same.",
    example=_FORM.format(expert="rows * up", weights="2 * weights"),
    instead=_FORM.format(expert="rows * up", weights="weights"),
    language="python",
)
