"""Polynomials of sizes: one text each, found again from their values, and whole numbers exactly where they are."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.sizes.polynomials import (
    Monomial,
    Polynomial,
    Ranges,
    check_points,
    constraint,
    fit,
    is_whole,
    sample_points,
)
from parc.compiler.sizes.size_range import SizeRange
from tests.draws import share

BATCH = {"B": SizeRange(8, 64, 8), "S": SizeRange(128, 4096, 128)}

factors = st.fractions(-9, 9, max_denominator=8).filter(bool)
powers = st.dictionaries(st.sampled_from(["B", "S", "seq"]), st.integers(1, 3), max_size=2)
polynomials = st.dictionaries(powers.map(lambda p: tuple(sorted(p.items()))), factors, max_size=3).map(Polynomial.of)


@given(polynomials)
def test_a_polynomial_is_what_its_text_says(polynomial: Polynomial) -> None:
    assert Polynomial.parse(str(polynomial)) == polynomial


@pytest.mark.parametrize(
    "text",
    ["", "S*B", "1*S", "S+S", "S/1", "+S", "S/2/2", "S*", "x y", "B*B", "S**1", "S**0", "02*S", "(S)", "S/0", "f(S)"],
)
def test_what_parc_does_not_write_is_no_polynomial(text: str) -> None:
    with pytest.raises(ValueError, match="no polynomial of sizes"):
        Polynomial.parse(text)


def values_of(polynomial: Polynomial, points: list[dict[str, int]]) -> list[Fraction]:
    return [polynomial.at(point) for point in points]


@pytest.mark.parametrize("text", ["B*S/4", "32*B*S**2", "S+16", "B*S+B", "S**2/2+S/2", "7", "B/8-1", "B*S/2+3*S"])
def test_three_choices_of_sizes_tell_what_programs_mostly_hold(text: str) -> None:
    points = list(sample_points(BATCH))[:3]
    assert str(fit(points, values_of(Polynomial.parse(text), points), BATCH)) == text


def test_what_is_the_same_at_the_few_values_of_a_size_is_one() -> None:
    ranges = {"B": SizeRange(1, 2, 1), "S": SizeRange(1, 5, 1)}
    points = list(sample_points(ranges))
    assert str(fit(points, values_of(Polynomial.parse("B+1"), points), ranges)) == "B+1"


@share(0.25)
@given(st.data())
def test_what_is_fitted_is_right_at_every_size(data: st.DataObject) -> None:
    """A polynomial of few terms is found, or more sizes are asked for; another one is never found."""
    ranges = {}
    for name in ("B", "S"):
        step, low = data.draw(st.sampled_from([1, 2, 8, 128])), data.draw(st.integers(1, 4))
        ranges[name] = SizeRange(low * step, (low + data.draw(st.integers(1, 40))) * step, step)
    monomials = st.sampled_from(["", "B", "S", "B*S", "B*S**2", "S**2", "B**2"])
    terms = {m: data.draw(factors) for m in data.draw(st.sets(monomials, min_size=1, max_size=2))}
    truth = Polynomial.of({Polynomial.parse(m or "1").terms[0][0]: factor for m, factor in terms.items()})
    points = list(sample_points(ranges))
    found = [fit(points[:count], values_of(truth, points[:count]), ranges) for count in range(3, len(points) + 1)]
    assert found[-1] is not None
    for polynomial in found:
        assert polynomial is None or all(
            polynomial.at(at) == truth.at(at)
            for b in list(ranges["B"].values)[::7] for s in list(ranges["S"].values)[::7] for at in [{"B": b, "S": s}]
        )  # fmt: skip


def test_what_is_no_polynomial_is_not_fitted() -> None:
    points = list(sample_points(BATCH))
    numbers = [Fraction(point["S"] % 1000 + point["B"] // 24) for point in points]
    assert all(fit(points[:count], numbers[:count], BATCH) is None for count in range(3, len(points) + 1))


def test_sizes_that_are_looked_at_are_few_and_differ() -> None:
    points = list(sample_points(BATCH))
    assert points[:2] == [{"B": 64, "S": 4096}, {"B": 8, "S": 128}]
    assert len(points) == len({tuple(point.items()) for point in points}) == 8
    assert points[3:5] == [{"B": 16, "S": 3968}, {"B": 56, "S": 256}]
    largest, smallest, between = check_points(BATCH)
    assert [largest, smallest] == points[:2] and between not in points
    assert all(point[name] in BATCH[name].values for point in [*points, between] for name in BATCH)


def test_few_sizes_are_all_looked_at() -> None:
    few = {"B": SizeRange(4, 8, 4), "S": SizeRange(4, 12, 4)}
    assert len(list(sample_points(few))) == 6
    assert len(list(sample_points({"S": SizeRange(4, 8, 4)}))) == 2
    assert str(fit([{"S": 8}, {"S": 4}], [Fraction(9), Fraction(5)], {"S": SizeRange(4, 8, 4)})) == "S+1"


@pytest.mark.parametrize(
    ("text", "parts", "ok"),
    [
        ("B*S", 4, True),
        ("3*S**2", 4, True),
        ("S+8", 4, True),
        ("S+1", 4, False),
        ("2*B", 4, True),  # B is even
        ("B", 4, False),
        ("66", 4, False),
        ("S**2/64+S/8", 1, True),  # S * (S + 8) / 64: of a multiple of 8 and its neighbour
        ("S**2/64+S/8", 4, False),
        ("S**2/64+S/8", 2, True),  # one of two neighbours is even
        ("S**3/128", 4, True),
        ("S/16", 1, False),
    ],
)
def test_whole_numbers(text: str, parts: int, ok: bool) -> None:
    ranges = {"B": SizeRange(2, 16, 2), "S": SizeRange(8, 512, 8)}
    whole = Polynomial.parse(text)
    assert is_whole(Polynomial.of({monomial: factor / parts for monomial, factor in whole.terms}), ranges) == ok


@given(
    st.lists(st.integers(-3, 6), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_the_proof_is_exact(coefficients: list[int], step: int, low: int, count: int) -> None:
    """A quarter of a polynomial is proved whole if and only if it is at every declared size."""
    ranges: Ranges = {"S": SizeRange(low * step, (low + count) * step, step)}
    terms: dict[Monomial, Fraction] = {(("S", p),) if p else (): Fraction(c, 4) for p, c in enumerate(coefficients)}
    every = [sum(c * size**power for power, c in enumerate(coefficients)) % 4 == 0 for size in ranges["S"].values]
    assert is_whole(Polynomial.of(terms), ranges) == all(every)


def test_the_constraint_is_named_for_each_size_that_is_enough() -> None:
    assert constraint(Polynomial.parse("S/4"), {"S": SizeRange(2, 64, 2)}) == "S must be a multiple of 4"
    ranges = {"B": SizeRange(1, 9), "S": SizeRange(3, 30, 3)}
    assert constraint(Polynomial.parse("B*S/4"), ranges) == "B must be a multiple of 4 or S must be a multiple of 12"
    assert constraint(Polynomial.parse("S+1/2"), ranges) == ""
    odd = constraint(Polynomial.parse("H/2+1/2"), {"H": SizeRange(8, 17)})
    assert odd == "not at H=8, H=10, H=12, ..."  # and not that 9 is the only one of its multiples
    assert constraint(Polynomial.parse("B*H/2+B/2"), {"B": SizeRange(1, 2), "H": SizeRange(8, 9)}) == (
        "B must be a multiple of 2"
    )
    assert constraint(Polynomial.parse("B/2+H/2"), {"B": SizeRange(1, 2), "H": SizeRange(8, 9)}) == (
        "not at B=1 with H=8, B=2 with H=9"
    )


@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 9), st.integers(-5, 300))
def test_the_nearest_sizes_are_sizes(low: int, step: int, count: int, size: int) -> None:
    sizes = SizeRange(low * step, (low + count) * step, step)
    near = sizes.nearest(size)
    assert set(near) <= set(sizes.values)
    assert min(abs(size - other) for other in sizes.values) == min(abs(size - other) for other in near)
