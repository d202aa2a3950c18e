"""The order of samples: each once an epoch, the same on every mesh, evaluation's apart from training's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parc.runtime.data.samples import DataError, Order, check_order

orders = st.builds(
    Order, st.integers(3, 300), st.integers(0, 9), st.booleans(), st.sampled_from([0.0, 0.01, 0.05, 0.34, 0.5])
)


@given(orders, st.integers(0, 3))
def test_every_sample_comes_once_an_epoch(order: Order, epoch: int) -> None:
    held = Order(order.total, order.seed, order.shuffled, order.split, held=True)
    first = epoch * order.count
    trained = [order(number) for number in range(first, first + order.count)]
    kept = [held(number) for number in range(held.count)] if order.split else []
    assert sorted(trained + kept) == list(range(order.total))
    if not order.shuffled:
        assert trained == sorted(trained)


@given(orders, st.sampled_from([(1, 4), (2, 2), (4, 1)]), st.integers(1, 9), st.integers(0, 5))
def test_ranks_of_any_mesh_take_the_same_samples(order: Order, ways: tuple[int, int], batch: int, done: int) -> None:
    """A run that goes on from sample ``done`` on other ranks takes what one rank would have taken."""
    ranks, each = ways[0], batch
    step = range(done, done + ranks * each)
    parts = [[order(done + rank * each + row) for row in range(each)] for rank in range(ranks)]
    assert [number for part in parts for number in part] == [order(number) for number in step]


def test_seed_and_epoch_choose_another_order_and_never_another_split() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        order = Order(100, seed, True, 0.1)
        return [order(number * 90 + place) for place in range(90)]

    ways = [epoch(0, 0), epoch(1, 0), epoch(0, 1)]
    assert len({tuple(way) for way in ways}) == 3
    assert {tuple(sorted(way)) for way in ways} == {tuple(n for n in range(100) if n % 10 != 9)}


def test_billions_of_samples_need_no_table() -> None:
    order = Order(10**12, 3, True, 0.001)
    seen = {order(number) for number in range(1000)}
    assert len(seen) == 1000 and max(seen) > 10**11 and all(0 <= number < 10**12 for number in seen)


def test_fewer_samples_than_a_batch_are_refused() -> None:
    with pytest.raises(DataError, match="the data has 4 samples, and a step takes 5"):
        check_order(Order(4, 0, True), 5)
    with pytest.raises(DataError, match="the data has 4 samples beside the 1 that `split` keeps, and a step takes 5"):
        check_order(Order(5, 0, True, 0.1), 5)
    check_order(Order(5, 0, True, 0.1, held=True), 1)
