"""Counter-based random numbers: their statistics, their bits, and their dependence on key and index alone."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from parc.compiler.initial import counter
from tests.draws import wide

COUNT = 1 << 20
INDEX = torch.arange(COUNT)
KEYS = [counter.stream(seed, name, step) for seed, name, step in [(0, "a", 0), (1, "blocks.0.drop", 7), (0, "b", 0)]]
# Changing these changes every run that parc has ever made.
GOLDEN_KEY = 3780900605010417432
GOLDEN_BITS = [-3578403866382126248, -1675526348680097481, 2276754918251878007, -6037314997750809643]
GOLDEN_UNIFORM = ["0x1.9cade94912d16p-1", "0x1.d17eab538e3b2p-1", "0x1.f98a8890f06d0p-4", "0x1.586e4bfe43d97p-1"]
GOLDEN_NORMAL = ["0x1.ba02bf988fd67p-1", "0x1.55edb696e20d2p+0", "-0x1.28758ad968646p+0", "0x1.ca2a3957e000fp-2"]
GOLDEN_EXPONENTIAL = ["0x1.b9a8ac14ab01dp-3", "0x1.8609481be1741p-4", "0x1.0bcb22f23b36bp+1", "0x1.95f2157488ec2p-2"]


def test_streams_differ_in_every_argument_and_are_golden() -> None:
    keys = {
        counter.stream(seed, name, step, microbatch)
        for seed in range(5) for name in ("a", "b", "1 a", "") for step in range(5) for microbatch in range(5)
    }  # fmt: skip
    assert len(keys) == 500
    assert all(0 <= key < 1 << 63 for key in keys)
    assert counter.stream(0, "a") == GOLDEN_KEY


def test_numbers_are_golden() -> None:
    index = torch.tensor([0, 1, 2, 12345678901])
    assert counter.bits(GOLDEN_KEY, index).tolist() == GOLDEN_BITS
    assert [x.hex() for x in counter.uniform(GOLDEN_KEY, index).tolist()] == GOLDEN_UNIFORM
    assert [x.hex() for x in counter.normal(GOLDEN_KEY, index).tolist()] == GOLDEN_NORMAL
    assert [x.hex() for x in counter.exponential(GOLDEN_KEY, index).tolist()] == GOLDEN_EXPONENTIAL


@pytest.mark.parametrize("key", KEYS)
def test_bits_are_even(key: int) -> None:
    bits = counter.bits(key, INDEX)
    for place in range(64):
        ones = int(((bits >> place) & 1).sum())
        assert abs(ones - COUNT / 2) < 5 * math.sqrt(COUNT) / 2, f"bit {place}"
    for shift in (0, 24, 52):  # chi-square with 4095 degrees of freedom, of three groups of 12 bits
        counts = torch.bincount((bits >> shift) & 4095, minlength=4096).double()
        chi = float(((counts - COUNT / 4096) ** 2 / (COUNT / 4096)).sum())
        assert abs(chi - 4095) < 5 * math.sqrt(2 * 4095)
    assert bits.unique().numel() == COUNT


@pytest.mark.parametrize("key", KEYS)
def test_uniform_and_normal_have_their_moments(key: int) -> None:
    u, z = counter.uniform(key, INDEX), counter.normal(key, INDEX)
    sigma = 1 / math.sqrt(COUNT)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 1 / 2) < 5 * sigma * math.sqrt(1 / 12)
    assert abs(float(u.var()) - 1 / 12) < 5 * sigma * math.sqrt(1 / 180)
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(float((z**power).mean()) - moment) < 5 * sigma * math.sqrt(variance)
    e = counter.exponential(key, INDEX)
    assert abs(float(e.mean()) - 1) < 5 * sigma and float(e.min()) > 0


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))


@pytest.mark.parametrize("distance", [1, wide(2), wide(64), wide(4096), 1 << 32])
def test_neighbours_are_independent(distance: int) -> None:
    bound = 5 / math.sqrt(COUNT)
    for key in (KEYS[0], 0, 1):
        here = counter.uniform(key, INDEX)
        assert abs(_correlation(here, counter.uniform(key, INDEX + distance))) < bound
        assert abs(_correlation(here, counter.uniform(key + distance, INDEX))) < bound
        assert abs(_correlation((here - 0.5) ** 2, (counter.uniform(key + distance, INDEX) - 0.5) ** 2)) < bound


def test_inverse_normal_is_accurate() -> None:
    ends = 2.0 ** -torch.arange(2, 54, dtype=torch.float64)
    middle = torch.linspace(1e-3, 1 - 1e-3, 20001, dtype=torch.float64)
    u = torch.cat([middle[middle != 0.5], ends, 1 - ends])
    expected = torch.special.ndtri(u)
    assert float(((counter.inverse_normal(u) - expected) / expected).abs().max()) < 1e-13
    assert float((counter.natural_log(u) / torch.log(u) - 1).abs().max()) < 1e-15


def test_inverse_erf_is_torch_s() -> None:
    x = torch.tensor([-1.0, -0.999, -0.5, 0.0, 1e-4, 0.7, 1.0])
    torch.testing.assert_close(counter.inverse_erf(x), torch.erfinv(x))
    assert counter.inverse_erf(torch.tensor(1.5)).isnan()


def test_normal_can_be_cut_off() -> None:
    z = counter.normal(KEYS[0], INDEX, 0.0, 0.5)
    assert float(z.max()) <= 0.0
    assert abs(float(z.mean()) + math.sqrt(2 / math.pi)) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.9, 1.0])
def test_keep_mask_keeps_its_share(p: float) -> None:
    kept = int(counter.keep_mask(KEYS[0], INDEX, p).sum())
    assert abs(kept - COUNT * (1 - p)) <= 5 * math.sqrt(COUNT * p * (1 - p))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="probability"):
        counter.keep_mask(0, INDEX, 1.5)
    with pytest.raises(TypeError, match="int64"):
        counter.bits(0, INDEX.int())


DRAWS = [
    counter.bits,
    counter.uniform,
    counter.normal,
    counter.exponential,
    lambda key, index: counter.keep_mask(key, index, 0.3),
]


@given(st.data())
def test_only_key_and_index_decide(data: st.DataObject) -> None:
    """Any subset, order, shape, stride or split of the indices gives the same bits for the same index."""
    draw = data.draw(st.sampled_from(DRAWS))
    key = data.draw(st.integers(0, (1 << 63) - 1))
    start = data.draw(st.integers(0, 1 << 48))
    count = data.draw(st.integers(1, 3000))
    index = torch.arange(start, start + count)
    whole = draw(key, index)
    cut = data.draw(st.integers(0, count))
    assert torch.equal(whole, torch.cat([draw(key, index[:cut]), draw(key, index[cut:])]))
    assert torch.equal(whole[::3], draw(key, index[::3]))
    square = index[: count // 2 * 2].reshape(2, -1).t()
    assert torch.equal(whole[: count // 2 * 2].reshape(2, -1).t(), draw(key, square))
    assert torch.equal(whole[cut - 1], draw(key, index[cut - 1]))


def test_long_index_sets_are_cut_into_blocks_without_a_trace() -> None:
    short = torch.arange(COUNT - 1000, COUNT - 900)
    assert torch.equal(counter.normal(7, INDEX)[short], counter.normal(7, short))


ROUNDED = {"add", "sub", "rsub", "mul", "div"}
"""Operators of which IEEE 754 defines every bit of a result. Some of torch's square roots on a CPU do not follow it."""
EXACT = ROUNDED | {
    "abs", "neg", "minimum", "clamp", "where", "frexp", "to_copy", "copy", "index", "index_put", "slice", "view",
    "full_like", "lt", "le", "gt", "detach", "lift_fresh",
}  # fmt: skip


class Calls(TorchDispatchMode):
    """Records the name and the arguments of every operator that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append((func.overloadpacket.__name__.strip("_"), args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("draw", [*DRAWS, lambda key, index: counter.normal(key, index, 0.0, 0.5)])
def test_every_bit_of_a_draw_is_defined_on_all_devices(draw: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Beside integers there is only float64, in operators that round exactly, one operation each."""
    with Calls() as calls:
        draw(KEYS[0], torch.arange(70000))
    assert len(calls.made) > 20
    for name, args, kwargs in calls.made:
        floats = [item for item in args if isinstance(item, torch.Tensor) and item.is_floating_point()]
        assert not floats or name in EXACT, name
        assert {item.dtype for item in floats} <= {torch.float64}
        if floats and name in ROUNDED:
            assert "alpha" not in kwargs  # a product and a sum in one: some devices round once
            assert name != "div" or len(floats) == 2  # by a number: some devices multiply by the reciprocal


def test_normal_numbers_are_those_of_arithmetic_that_rounds_exactly() -> None:
    """Python's own numbers are such."""

    def ratio(x: float, parts: tuple[tuple[float, ...], tuple[float, ...]]) -> float:
        top, bottom = (reduce(lambda made, coefficient: made * x + coefficient, part) for part in parts)
        return top / bottom

    def quantile(u: float, log: float) -> float:
        if abs(q := u - 0.5) <= 0.425:
            return ratio(0.180625 - q * q, counter._CENTRE) * q
        distance = math.sqrt(-log)
        near = ratio(distance - 1.6, counter._TAIL)
        return math.copysign(near if distance <= 5.0 else ratio(distance - 5.0, counter._FAR_TAIL), q)

    u = torch.cat(
        [counter.uniform(KEYS[0], INDEX[:20000]).clamp(2.0**-53, 1 - 2.0**-53), 2.0 ** -torch.arange(2.0, 53)]
    )
    logs = counter.natural_log(torch.minimum(u, 1.0 - u))
    expected = [quantile(*pair) for pair in zip(u.tolist(), logs.tolist(), strict=True)]
    assert counter.inverse_normal(u).tolist() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("draw", DRAWS)
def test_a_gpu_draws_the_same_bits(draw: object) -> None:
    assert callable(draw)
    assert torch.equal(draw(KEYS[0], INDEX), draw(KEYS[0], INDEX.cuda()).cpu())
