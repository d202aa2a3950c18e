"""Slices of a whole dim stay slices in a traced graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parc.compiler.capture.capture import EverySlice


@pytest.mark.parametrize(
    ("index", "slices"),
    [(lambda x: x[:4], 1), (lambda x: x[:, :8], 1), (lambda x: x[..., :8], 1), (lambda x: x[None, :4, :8], 2),
     (lambda x: x[1], 0)],
)  # fmt: skip
def test_a_slice_of_all_is_a_slice(index: Callable[[Tensor], Tensor], slices: int) -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return index(x) * 2

    x = torch.arange(32.0).reshape(4, 8)
    with EverySlice():
        graph = torch.export.export(Cut(), (x,)).graph
        assert torch.equal(Cut()(x), index(x) * 2)
    assert [str(node.target) for node in graph.nodes].count("aten.slice.Tensor") == slices
