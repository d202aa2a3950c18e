"""Balance: no other choice of cuts has a smaller largest stage, and operations are those of the shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from parc.compiler.capture.node_facts import noted
from parc.compiler.resolve.stage_cuts import FLOPS_PER_BYTE, PASSES, BalancedPiece, balance, operations_of
from parc.compiler.schedules import live_microbatches, places_of

Ranks = tuple[int, ...]
weights = st.dictionaries(st.sampled_from("abc"), st.just(7), max_size=2)
drawn = st.lists(st.builds(BalancedPiece, st.integers(0, 9), st.integers(0, 9), weights), min_size=1, max_size=8)


def largest(pieces: list[BalancedPiece], begins: tuple[int, ...], ranks: Ranks, live: Ranks) -> tuple[int, int]:
    """Return the operations of the busiest rank, and the bytes of the fullest one."""
    work, kept = Counter[int](), Counter[int]()
    names: dict[int, dict[str, int]] = {rank: {} for rank in ranks}
    for stage, (start, stop) in enumerate(pairwise([0, *begins, len(pieces)])):
        for piece in pieces[start:stop]:
            work[ranks[stage]] += piece.operations
            kept[ranks[stage]] += live[stage] * piece.kept
            names[ranks[stage]].update(piece.parameters)
    return max(work.values()), max(kept[rank] + sum(names[rank].values()) for rank in names)


def every(pieces: list[BalancedPiece], ranks: Ranks) -> Iterator[tuple[int, ...]]:
    """Return all cuts."""
    return combinations(range(1, len(pieces)), len(ranks) - 1)


@given(drawn, st.integers(1, 5), st.booleans())
def test_no_other_cuts_are_better(pieces: list[BalancedPiece], stages: int, falling: bool) -> None:
    ranks = tuple(range(stages))
    live = tuple(stages - stage if falling else 1 for stage in ranks)
    if stages > len(pieces):
        with pytest.raises(ValueError, match="make no"):
            balance(pieces, ranks, live)
        return
    chosen = balance(pieces, ranks, live)
    assert len(chosen) == stages - 1 and all(low < high for low, high in pairwise([0, *chosen, len(pieces)]))
    assert largest(pieces, chosen, ranks, live) == min(largest(pieces, b, ranks, live) for b in every(pieces, ranks))


@given(drawn, st.sampled_from([(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 0, 1, 2), (0, 0, 1, 1), (1, 0, 0)]))
def test_ranks_with_several_stages_are_cut_whatever_the_pieces(pieces: list[BalancedPiece], ranks: Ranks) -> None:
    if len(pieces) >= len(ranks):
        chosen = balance(pieces, ranks, ranks)
        assert len(chosen) == len(ranks) - 1
        assert all(low < high for low, high in pairwise([0, *chosen, len(pieces)]))


@pytest.mark.parametrize("ranks", [(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2)])
@pytest.mark.parametrize("head", [3, 14, 25])
@pytest.mark.parametrize("count", [7, 10])
def test_no_rank_of_several_stages_of_layers_could_do_less(ranks: Ranks, head: int, count: int) -> None:
    pieces, live = layers(count, embedding=2, head=head), (1,) * len(ranks)
    chosen = balance(pieces, ranks, live)
    least = min(largest(pieces, begins, ranks, live)[0] for begins in every(pieces, ranks))
    assert largest(pieces, chosen, ranks, live)[0] == least


def layers(count: int, embedding: int, head: int) -> list[BalancedPiece]:
    """Return the pieces of a model of equal layers of 10 operations."""
    blocks = [BalancedPiece(10, 4, {f"layer{number}": 6}) for number in range(count)]
    return [BalancedPiece(embedding, 1, {"embedding": 9}), *blocks, BalancedPiece(head, 1, {"head": 9})]


def test_an_embedding_and_a_head_on_one_rank_of_a_v_leave_it_fewer_layers() -> None:
    pieces, ranks = layers(22, embedding=10, head=30), places_of("zbv", 4, 4, 2)
    first, middle, last = balance(pieces, ranks, live_microbatches("zbv", 4, 4, 2))
    assert ranks == (0, 1, 1, 0)
    assert (first - 1) + (len(pieces) - 1 - last) == 9 and last - first == 13, "13 times 10 operations on each rank"
    sizes = [first, middle - first, last - middle, len(pieces) - last]
    assert max(sizes) <= 7, "and they are even"


def test_a_weight_that_two_stages_of_a_rank_share_is_there_once() -> None:
    tied = {"embedding": 50}
    blocks = [BalancedPiece(10, 1, {f"layer{number}": 8}) for number in range(4)]
    pieces = [BalancedPiece(0, 1, tied), *blocks, BalancedPiece(0, 1, tied)]
    v, turns = (0, 1, 1, 0), (0, 1, 0, 1)
    assert largest(pieces, balance(pieces, v, (1,) * 4), v, (1,) * 4) == (20, 50 + 16 + 4)
    assert largest(pieces, balance(pieces, turns, (1,) * 4), turns, (1,) * 4) == (20, 50 + 16 + 3)


def test_an_interleaved_70b_is_cut_for_its_ranks_and_not_only_for_its_stages() -> None:
    pieces, sizes = layers(80, embedding=0, head=12), ("interleaved", 16, 16, 4)
    bounds = [0, *balance(pieces, places_of(*sizes), live_microbatches(*sizes)), len(pieces)]
    of_stage = [sum(piece.operations for piece in pieces[start:stop]) for start, stop in pairwise(bounds)]
    assert max(sum(of_stage[rank::4]) for rank in range(4)) == 210, "812 operations are no less on the busiest rank"
    assert min(of_stage) >= 40 and max(of_stage) <= 62


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
