"""Masks that models compute from positions, known with the graph: none, causal, or left as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx, nn

from parc.compiler.capture.node_facts import noted
from parc.compiler.program.binding import Binding
from parc.compiler.torch_private import quiet
from parc.passes.canonical import constants
from parc.passes.canonical.canonicalize import canonicalize

Mask = Callable[[int], torch.Tensor]


class Attention(nn.Module):
    """A model of attention under masks of so many positions as it is given."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return [nn.functional.scaled_dot_product_attention(q, q, q, mask(x.shape[1])) for mask in self.masks]


def folded(masks: Sequence[Mask], length: int = 6) -> list[fx.Node]:
    """Return the attention under each mask in a canonical graph, after folding."""
    x = torch.randn(2, length, 8)
    with quiet():
        program = torch.export.export(Attention(masks), (x,), strict=False).run_decompositions({})
    for node in program.graph.nodes:
        if node.op == "placeholder":
            noted(node).binding = Binding("input", "x")
    graph = canonicalize(program.graph)
    constants.fold_constants(graph)
    return [node for node in graph.nodes if "attention" in str(node.target)]


def positions(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of queries as a column, and of keys as a row."""
    at = torch.arange(length)
    return at[:, None], at[None, :]


CASES: dict[str, tuple[Mask, object]] = {
    "keys up to the query": (lambda n: positions(n)[1] <= positions(n)[0], "causal"),
    "keys before the next query": (lambda n: positions(n)[1] < positions(n)[0] + 1, "causal"),
    "a triangle of ones": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), "causal"),
    "one document": (
        lambda n: (positions(n)[1] <= positions(n)[0]) & (torch.zeros(n).long()[:, None] == torch.zeros(n).long()),
        "causal",
    ),
    "a window wider than the sequence": (
        lambda n: (positions(n)[1] <= positions(n)[0]) & (positions(n)[1] > positions(n)[0] - 100),
        "causal",
    ),
    "everything": (lambda n: torch.ones(n, n, dtype=torch.bool), "none"),
    "a narrow window": (
        lambda n: (positions(n)[1] <= positions(n)[0]) & (positions(n)[1] > positions(n)[0] - 3),
        "mask",
    ),
    "keys before the query": (lambda n: positions(n)[1] < positions(n)[0], "mask"),
    "keys from the query on": (lambda n: positions(n)[1] >= positions(n)[0], "mask"),
    "a triangle of nothing": (lambda n: torch.ones(n, n, dtype=torch.bool).triu(), "mask"),
}


@pytest.mark.parametrize("seen", ["by positions alone", "entry by entry"])
def test_a_mask_is_what_it_lets_through(seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {case: kind for case, (_, kind) in CASES.items()}
    if seen == "by positions alone":
        monkeypatch.setattr(constants, "_MOST_ENTRIES", 20)  # of 6 x 6 entries
        expected["a triangle of ones"] = "mask"  # only entries would show it
    nodes = folded([mask for mask, _ in CASES.values()])
    found = ["causal" if node.args[5] else "none" if node.args[3] is None else "mask" for node in nodes]
    assert dict(zip(CASES, found, strict=True)) == expected
