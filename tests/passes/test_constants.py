"""Masks that models compute from positions, known with the graph: none, causal, or left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from parc.compiler.capture.node_facts import noted
from parc.compiler.program.binding import Binding
from parc.compiler.torch_private import quiet
from parc.passes.canonical import constants
from parc.passes.canonical.canonicalize import canonicalize
from tests.draws import star

Mask = Callable[[int], torch.Tensor]


class Attention(nn.Module):
    """A model of attention under a mask of ``length`` positions."""

    def __init__(self, mask: Mask, causal: bool = False) -> None:
        super().__init__()
        self.mask, self.causal = mask, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, self.mask(x.shape[1]), is_causal=self.causal)


def folded(mask: Mask, length: int = 6) -> fx.Node:
    """Return the attention of a canonical graph after folding."""
    x = torch.randn(2, length, 8)
    with quiet():
        program = torch.export.export(Attention(mask), (x,), strict=False).run_decompositions({})
    for node in program.graph.nodes:
        if node.op == "placeholder":
            noted(node).binding = Binding("input", "x")
    graph = canonicalize(program.graph)
    constants.fold_constants(graph)
    found: fx.Node
    (found,) = [node for node in graph.nodes if "attention" in str(node.target)]
    return found


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


@pytest.mark.parametrize(("case", "seen"), star(list(CASES), ["by positions alone", "entry by entry"]))
def test_a_mask_is_what_it_lets_through(case: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, expected = CASES[case]
    if seen == "by positions alone":
        monkeypatch.setattr(constants, "_MOST", 20)  # of 6 x 6 entries
        if "triangle" in case:
            expected = "mask"  # only entries would show it
    node = folded(mask)
    found = "causal" if node.args[5] else "none" if node.args[3] is None else "mask"
    assert found == expected
