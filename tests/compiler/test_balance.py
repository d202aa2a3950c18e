"""Balance: no other choice of cuts has a smaller largest stage, and operations are those of the shapes."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from parc.compiler.capture.node_facts import noted
from parc.compiler.resolve.stage_cuts import FLOPS_PER_BYTE, PASSES, BalancedPiece, balance, operations_of

weights = st.dictionaries(st.sampled_from("abc"), st.just(7), max_size=2)
drawn = st.lists(st.builds(BalancedPiece, st.integers(0, 9), st.integers(0, 9), weights), min_size=1, max_size=8)


def largest(pieces: list[BalancedPiece], begins: tuple[int, ...], in_flight: tuple[int, ...]) -> tuple[int, int]:
    """Return the operations, and the bytes, of the largest stage."""
    stages = [pieces[start:stop] for start, stop in pairwise([0, *begins, len(pieces)])]
    operations = [sum(piece.operations for piece in stage) for stage in stages]
    held = [
        sum({name: size for piece in stage for name, size in piece.parameters.items()}.values())
        + count * sum(piece.kept for piece in stage)
        for stage, count in zip(stages, in_flight, strict=True)
    ]
    return max(operations), max(held)


@given(drawn, st.integers(1, 5), st.booleans())
def test_no_other_cuts_are_better(pieces: list[BalancedPiece], stages: int, falling: bool) -> None:
    if stages > len(pieces):
        with pytest.raises(ValueError, match="make no"):
            balance(pieces, stages, lambda stage: 1)
        return
    in_flight = tuple(stages - stage if falling else 1 for stage in range(stages))
    chosen = balance(pieces, stages, in_flight.__getitem__)
    assert len(chosen) == stages - 1 and all(low < high for low, high in pairwise([0, *chosen, len(pieces)]))
    every = combinations(range(1, len(pieces)), stages - 1)
    assert largest(pieces, chosen, in_flight) == min(largest(pieces, begins, in_flight) for begins in every)


def operations(target: Any, *args: object) -> int:
    """Count the operations of one call on tensors, which are given by shape or as they are."""
    graph = fx.Graph()
    values = [torch.zeros(arg) if isinstance(arg, tuple) else arg for arg in args]
    given: list[Any] = []
    for value in values:
        given.append(graph.placeholder("x") if isinstance(value, torch.Tensor) else value)
        if isinstance(value, torch.Tensor):
            noted(given[-1]).value = value
    call = graph.call_function(target, tuple(given))
    noted(call).value = target(*values)
    return operations_of(call)


def products(target: Any, *args: object) -> float:
    """Count the multiply-adds of one call."""
    return operations(target, *args) / (2 * PASSES)


def test_operations_of_products_are_those_of_their_shapes() -> None:
    aten = torch.ops.aten
    assert products(aten.mm.default, (2, 3), (3, 5)) == 2 * 3 * 5
    assert products(aten.linear.default, (7, 2, 3), (5, 3)) == 7 * 2 * 3 * 5
    assert products(aten.matmul.default, (7, 2, 3), (3, 5)) == 7 * 2 * 3 * 5
    assert products(aten.addmm.default, (5,), (2, 3), (3, 5)) == 2 * 3 * 5
    assert products(aten.bmm.default, (4, 2, 3), (4, 3, 5)) == 4 * 2 * 3 * 5
    attention = aten.scaled_dot_product_attention.default
    assert products(attention, (2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)) == 2 * 4 * 6 * 5 * (8 + 8)
    pair = [1, 1]
    assert products(aten.conv2d.default, (1, 4, 6, 6), (8, 2, 3, 3), None, pair, [0, 0], pair, 2) == 8 * 16 * 2 * 9
    assert products(aten.conv_transpose2d.input, (1, 4, 6, 6), (4, 8, 3, 3)) == 4 * 36 * 8 * 9


def test_operations_of_all_else_are_bytes_and_of_views_none() -> None:
    moved = PASSES * FLOPS_PER_BYTE * 4
    assert operations(torch.ops.aten.add.Tensor, (2, 3), (2, 3)) == 18 * moved
    index = torch.arange(4)  # 8 bytes an entry
    assert operations(torch.ops.aten.embedding.default, (1000, 3), index) == moved * (4 * 3 + 4 * 2)
    assert operations(torch.ops.aten.view.default, (2, 3), [6]) == 0
    assert operations(torch.ops.aten.reshape.default, (2, 3), [6]) == 0
