"""The proof of shapes over ranges: sound on every size it speaks for, and it names what must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.directives.sizes import SizeRange
from parc.compiler.mesh import Mesh
from parc.compiler.placement import Placement, Split
from parc.compiler.plan import read_plan
from parc.compiler.ranges import PlacedValue, Sample, prove_shapes, sample_points
from parc.compiler.resolve import resolve
from parc.grammar.source import Source
from parc.passes.pipeline import sample

from ..random_layers import Sizes
from ..strategies import Layer, ModelSpec
from ..trials import subject

MESH = Mesh((("dp", 2), ("tp", 4)))
Number = Callable[[Mapping[str, int]], int]


def samples(ranges: Mapping[str, SizeRange], size: Number, **axes: Number) -> list[Sample]:
    """A graph of one value of one dim, split over ``axes`` at their ``outer``."""
    made = []
    for sizes in sample_points(ranges):
        placement = Placement.of(MESH, {axis: Split(0, outer(sizes)) for axis, outer in axes.items()})
        made.append(Sample(sizes, (PlacedValue("view", "aten.view", "layers.0", 7, (size(sizes),), placement),)))
    return made


def one(sizes: Mapping[str, int]) -> int:
    return 1


@pytest.mark.parametrize(
    ("size", "outer", "ok"),
    [
        (lambda s: s["B"] * s["S"], lambda s: s["B"], True),  # (b s) split on s
        (lambda s: s["B"] * s["S"], one, True),
        (lambda s: 3 * s["S"] * s["S"], one, True),
        (lambda s: s["S"] + 8, one, True),
        (lambda s: s["S"] + 1, one, False),
        (lambda s: s["B"] * 2, one, True),  # B is even
        (lambda s: s["B"], one, False),
        (lambda s: 64, one, True),
        (lambda s: 66, one, False),
        (lambda s: s["S"] * (s["S"] + 8) // 64, one, False),
        (lambda s: s["S"] * (s["S"] + 8) // 16, one, True),  # one of two neighbours is even
        (lambda s: s["S"] ** 3 // 128, one, False),  # of a degree that the samples cannot confirm
    ],
)
def test_polynomials(size: Number, outer: Number, ok: bool) -> None:
    ranges = {"B": SizeRange(2, 16, 2), "S": SizeRange(8, 512, 8)}
    assert (prove_shapes(samples(ranges, size, tp=outer), ranges, MESH) == []) == ok


def test_fault_names_the_constraint_and_the_line() -> None:
    ranges = {"S": SizeRange(2, 64, 2)}
    (fault,) = prove_shapes(samples(ranges, lambda s: s["S"], tp=one), ranges, MESH)
    assert str(fault) == (
        "`view` of `layers.0`: dim 0, split over `tp`, has S entries, which do not divide by 4: "
        "S must be a multiple of 4 (placed by line 7)"
    )


def test_either_of_two_sizes_helps() -> None:
    ranges = {"B": SizeRange(1, 9), "S": SizeRange(3, 30, 3)}
    (fault,) = prove_shapes(samples(ranges, lambda s: s["B"] * s["S"], tp=one), ranges, MESH)
    assert "B must be a multiple of 4 or S must be a multiple of 12" in fault.message


def test_two_axes_nest() -> None:
    ranges = {"S": SizeRange(8, 64, 8)}
    assert prove_shapes(samples(ranges, lambda s: s["S"], dp=one, tp=lambda s: 2), ranges, MESH) == []
    assert prove_shapes(samples(ranges, lambda s: s["S"], dp=one, tp=lambda s: 4), ranges, MESH) != []


def test_what_is_no_polynomial_is_not_proved() -> None:
    ranges = {"S": SizeRange(4, 400, 4)}
    (fault,) = prove_shapes(samples(ranges, lambda s: 4 * (s["S"] % 28 + 1), tp=one), ranges, MESH)
    assert "nothing is known" in fault.message


def test_another_graph_is_named() -> None:
    ranges = {"S": SizeRange(4, 400, 4)}
    first, *others = samples(ranges, lambda s: s["S"], tp=one)
    changed = [Sample(s.sizes, s.values * 2) for s in others]
    (fault,) = prove_shapes([first, *changed], ranges, MESH)
    assert "computes something else at S=4, unlike at S=400" in fault.message


def test_few_sizes_are_all_looked_at() -> None:
    ranges = {"S": SizeRange(4, 12, 4)}
    assert len(sample_points(ranges)) == 3
    assert prove_shapes(samples(ranges, lambda s: s["S"], tp=one), ranges, MESH) == []


@given(
    st.lists(st.integers(-3, 6), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_proof_is_exact_for_polynomials(coefficients: list[int], step: int, low: int, count: int) -> None:
    """Proved if and only if every declared size divides."""
    ranges = {"S": SizeRange(low * step, (low + count) * step, step)}

    def size(sizes: Mapping[str, int]) -> int:
        return sum(c * sizes["S"] ** power for power, c in enumerate(coefficients))

    every = [size({"S": (low + k) * step}) % 4 == 0 for k in range(count + 1)]
    assert (prove_shapes(samples(ranges, size, tp=one), ranges, MESH) == []) == all(every)


def test_a_placed_model_over_ranges() -> None:
    """The graph of a transformer layer, at the sizes that the proof asks for."""
    ranges = {"B": SizeRange(4, 16, 4), "S": SizeRange(8, 64, 8)}
    text = """model "./model.py:make"
input x int64 [B, S]
input y int64 [B, S]
sizes B=4..16 by 4, S=8..64 by 8
loss cross_entropy(output, y)
optimizer sgd lr 0.1
mesh dp=2, tp=4
shard x, y [B/dp, S/tp]
"""
    plan = read_plan(Source("ranges.parc", text))
    made = []
    layers = (Layer("attention", ("split", 1, "enable", "where", 0.0), 0, 0), Layer("plain", ("cat_rows",)))
    for sizes in sample_points(ranges):
        spec = ModelSpec(Sizes(sizes["B"], sizes["S"], 4, 4, 8), "tokens", layers, "cross_entropy")
        captured = subject(spec)
        claims = [
            (f"input {seed.value}", seed.axis, Split(seed.dim, seed.outer), seed.span.line)
            for seed in resolve(plan, captured.names).seeds
            if seed.dim is not None
        ]
        made.append(sample(captured.captured, plan.mesh, claims, sizes))
    assert sum(bool(value.placement.split_axes()) for value in made[0].values) > 20
    assert prove_shapes(made, ranges, plan.mesh) == []
