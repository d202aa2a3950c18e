"""Collectives: the effect of each on pieces is that of its type, and its gradient is its dual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from parc.compiler.layout.collectives import COLLECTIVES, RINGS, TypeFault, lower, payload_bytes
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.pieces import join_dim, put_together, slice_dim
from parc.compiler.layout.placement import AxisType, Placement, Split, TensorType, parse_type
from parc.compiler.layout.stretches import Outer, nest, zigzag
from parc.compiler.ops.own_ops import OPS
from parc.compiler.plan.plan import COLLECTIVE_WORDS

from .drawn import meshes, numbered, pieces_of, placed

MESH = Mesh.parse("dp=2, tp=2")
OUTERS: tuple[Outer, ...] = (1, 2, 3, 4, 6, (2, 1, 1), (1, 3), zigzag(2), zigzag(4))


def run(op: str, options: Sequence[Any], pieces: Sequence[torch.Tensor], mesh: Mesh) -> list[torch.Tensor]:
    """Run a collective in every group of ranks."""
    results = list(pieces)
    row = COLLECTIVES[op]
    for group in mesh.groups(row.axes(options)):
        for rank, piece in zip(group, row.group([pieces[rank] for rank in group], options), strict=True):
            results[rank] = piece
    return results


@st.composite
def calls(draw: st.DrawFn) -> tuple[Mesh, TensorType, str, tuple[Any, ...]]:
    """Draw a collective with an operand and options, which may not fit each other."""
    mesh = draw(meshes)
    type_ = draw(placed(mesh))
    op = draw(st.sampled_from(sorted(COLLECTIVES.keys() - {"parc.all_reduce_among"} - RINGS.keys())))
    axes = draw(st.lists(st.sampled_from(mesh.names), min_size=1, unique=True))
    axes = axes[:1] if draw(st.booleans()) else sorted(axes, key=mesh.names.index)
    dims = st.integers(0, len(type_.shape) - 1)
    outers = st.sampled_from(OUTERS)
    if op in ("parc.all_reduce", "parc.row_max"):
        return mesh, type_, op, (",".join(axes),)
    options = (",".join(axes), draw(dims), draw(outers))
    return mesh, type_, op, (*options, draw(dims), draw(outers)) if op == "parc.all_to_all" else options


@st.composite
def conversions(draw: st.DrawFn) -> tuple[Mesh, TensorType, str, AxisType, AxisType]:
    """Draw a type, an axis, and the types before and after a conversion over it."""
    mesh = draw(meshes)
    type_ = draw(placed(mesh, kinds=("I", "R", "P")))
    axis = draw(st.sampled_from(mesh.names))
    source = type_.placement[axis]
    others = TensorType(type_.dtype, type_.shape, type_.placement.replace({axis: "I"}))
    splits = [Split(dim, outer) for dim, size in enumerate(type_.shape) for outer in OUTERS
              if _nests(others, dim, outer, axis, mesh)]  # fmt: skip
    results: list[AxisType] = ["I", "R", "P", *splits]
    return mesh, type_, axis, source, draw(st.sampled_from(results))


def _nests(type_: TensorType, dim: int, outer: Outer, axis: str, mesh: Mesh) -> bool:
    splits = [(at, mesh.size(name)) for at, name in type_.placement.splits(dim)]
    return nest(type_.shape[dim], [*splits, (outer, mesh.size(axis))])


@st.composite
def fitting(draw: st.DrawFn) -> tuple[Mesh, TensorType, str, tuple[Any, ...]]:
    """Draw the collective of a conversion, or a maximum over the axes that split the last dim."""
    mesh, type_, axis, _, result = draw(conversions())
    type_ = TensorType(type_.dtype, type_.shape, type_.placement.data())
    after = type_.placement.replace({axis: result})
    lowered = None if result == "P" and type_.placement[axis] == "I" else lower(axis, type_.placement, after, mesh)
    if lowered is not None:
        return mesh, type_, *lowered
    whole = TensorType(type_.dtype, type_.shape, type_.placement.replace(dict.fromkeys(type_.placement.partial, "I")))
    return mesh, whole, "parc.row_max", (",".join(name for _, name in whole.placement.splits(len(whole.shape) - 1)),)


@given(st.one_of(calls(), fitting()))
def test_all_pieces_together_are_before_and_after_what_the_types_say(
    call: tuple[Mesh, TensorType, str, tuple[Any, ...]],
) -> None:
    mesh, type_, op, options = call
    try:
        made = COLLECTIVES[op].result(type_, mesh, options)
        made.local(mesh)
    except ValueError:
        return  # refused, as a checker refuses it
    whole = numbered(type_.shape)
    results = run(op, options, pieces_of(whole, type_, mesh), mesh)
    expected = whole.amax(-1, keepdim=True) if op == "parc.row_max" else whole
    assert {tuple(piece.shape) for piece in results} == {made.local(mesh)}
    assert torch.equal(put_together(results, made.placement, mesh), expected)
    for rank, piece in enumerate(results):  # replicas are equal, not only rank 0's
        if not made.placement.partial:
            assert torch.equal(piece, pieces_of(expected, made, mesh)[rank])


FACTORED = Mesh.parse("dp=2, tp=2*3")
FUSED = parse_type("f64[(2 6/tp_1 + 2 3/tp_1 + 2 3/tp_1)]", FACTORED)


@example((FACTORED, FUSED, "dp", "I", Split(0, (2, 1, 1))))  # outside of what splits the parts already
@given(conversions())
def test_a_conversion_lowers_to_the_collective_that_makes_its_result(
    case: tuple[Mesh, TensorType, str, AxisType, AxisType],
) -> None:
    mesh, type_, axis, source, result = case
    after = type_.placement.replace({axis: result})
    if result == "P" and source in ("I", "R"):
        with pytest.raises(TypeFault):
            lower(axis, type_.placement, after, mesh)
        return
    lowered = lower(axis, type_.placement, after, mesh)
    if lowered is None:
        assert type_.placement.data() == after.data()
        return
    op, options = lowered
    plain = TensorType(type_.dtype, type_.shape, type_.placement.data())
    assert COLLECTIVES[op].result(plain, mesh, options).placement == after.data()


FORWARD: list[tuple[str, str]] = [("I", "R"), ("P", "I"), ("P", "R"), ("S(0)", "R"), ("S(0)", "I"), ("P", "S(0)"),
                                  ("S(0)", "S(1)"), ("I", "S(0)"), ("R", "S(0)")]  # fmt: skip


@pytest.mark.parametrize(("source", "result"), FORWARD)
def test_the_gradient_of_a_conversion_is_the_dual_conversion(source: str, result: str) -> None:
    x = torch.empty(4, 4, device="meta", requires_grad=True)
    y = OPS.convert.default(x, "tp", source, result)
    node = y.grad_fn
    assert node is not None
    swapped = {"R": "P", "P": "R"}
    assert (node.source, node.result) == (source, result)
    recorded: list[tuple[str, str]] = []
    with _Watch(recorded):
        (gradient,) = torch.autograd.grad(y, x, torch.empty(4, 4, device="meta"))
    assert gradient.shape == x.shape
    assert recorded == [(swapped.get(result, result), swapped.get(source, source))]


class _Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that notes the conversions that run."""

    def __init__(self, recorded: list[tuple[str, str]]) -> None:
        super().__init__()
        self.recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is OPS.convert.default:
            self.recorded.append((args[2], args[3]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("source", "result"), FORWARD)
def test_the_dual_conversion_is_the_transpose(source: str, result: str) -> None:
    """``<C x, g> = <x, dual(C) g>`` holds over all ranks, by the pieces' own derivative, without any types.

    A value that all ranks hold alike and use alike (``I``) counts once, and so does its gradient.
    """
    mesh = Mesh.parse("tp=2")
    kinds: dict[str, AxisType] = {"I": "I", "R": "R", "P": "P", "S(0)": Split(0), "S(1)": Split(1)}
    swapped: dict[str, str] = {"R": "P", "P": "R"}
    before, after = Placement.of(mesh, {"tp": kinds[source]}), Placement.of(mesh, {"tp": kinds[result]})
    x, g = numbered((4, 4)), numbered((4, 4)).flip(0, 1)
    forward = _convert(pieces_of(x, TensorType(x.dtype, (4, 4), before.data()), mesh), before, after, mesh)
    back_from, back_to = after.dual(), before.dual()
    given_ = pieces_of(g, TensorType(g.dtype, (4, 4), back_from.data()), mesh)
    backward = _convert(given_, back_from, back_to, mesh)
    assert back_from["tp"] == kinds.get(swapped.get(result, result))
    ahead = _inner(forward, given_, result == "I")
    back = _inner(pieces_of(x, TensorType(x.dtype, (4, 4), before.data()), mesh), backward, source == "I")
    assert torch.allclose(ahead, back)


def _convert(pieces: list[torch.Tensor], before: Placement, after: Placement, mesh: Mesh) -> list[torch.Tensor]:
    lowered = lower("tp", before, after, mesh)
    return pieces if lowered is None else run(*lowered, pieces, mesh)


def _inner(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], alike: bool) -> torch.Tensor:
    products = torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)])
    return products.mean() if alike else products.sum()


@given(st.integers(1, 3), st.integers(2, 3), st.integers(1, 3), st.integers(0, 1))
def test_parts_of_a_dim_join_to_the_dim(outer: int, ranks: int, rest: int, dim: int) -> None:
    shape = [2, 2]
    shape[dim] = outer * ranks * rest
    x = numbered(shape)
    parts = [slice_dim(x, ranks, index, dim, outer) for index in range(ranks)]
    assert torch.equal(join_dim(parts, dim, outer), x)
    rows = x.movedim(dim, 0).unflatten(0, (outer, ranks, rest))
    assert torch.equal(parts[1].movedim(dim, 0), rows[:, 1].flatten(0, 1))


REFUSED = [
    ("parc.all_reduce", "f32[4]", ("tp",), "needs P"),
    ("parc.all_reduce", "f32[4/tp]", ("tp",), "needs P"),
    ("parc.all_gather", "f32[4]", ("tp", 0, 1), "is I there"),
    ("parc.all_gather", "f32[4/tp, 4]", ("tp", 1, 1), "at dim 1"),
    ("parc.all_gather", "f32[(2 4/tp)]", ("tp", 0, 1), "outer 1"),
    ("parc.reduce_scatter", "f32[4]", ("tp", 0, 1), "needs P"),
    ("parc.shard", "f32[4] +tp", ("tp", 0, 1), "needs I"),
    ("parc.shard", "f32[4/tp]", ("tp", 0, 1), "needs I"),
    ("parc.pad", "f32[4] +tp", ("tp", 0, 1), "is P there"),
    ("parc.all_to_all", "f32[4, 4]", ("tp", 0, 1, 1, 1), "is I there"),
    ("parc.row_max", "f32[4, 4/tp]", ("dp",), "split over other axes"),
    ("parc.row_max", "f32[4, 4] +tp", ("",), "split over other axes"),
]


@pytest.mark.parametrize(("op", "operand", "options", "why"), REFUSED)
def test_an_operand_of_another_type_is_refused(op: str, operand: str, options: tuple[Any, ...], why: str) -> None:
    with pytest.raises(TypeFault, match=why):
        COLLECTIVES[op].result(parse_type(operand, MESH), MESH, options)


def test_a_sum_among_some_coordinates_leaves_the_others_as_they_are() -> None:
    mesh, options = Mesh.parse("dp=2, pp=3"), ("pp", [0, 2])
    type_ = parse_type("f32[2]", mesh)
    assert COLLECTIVES["parc.all_reduce_among"].result(type_, mesh, options) == type_
    row = COLLECTIVES["parc.all_reduce_among"]
    assert row.groups(mesh, options) == [[0, 2], [3, 5]]
    pieces = [torch.full((2,), 10.0**rank) for rank in (0, 2)]
    assert [piece.tolist() for piece in row.group(pieces, options)] == [[101.0, 101.0]] * 2


@pytest.mark.parametrize("members", [[], [1, 0], [0, 0], [0, 2]])
def test_what_are_no_coordinates_in_order_is_refused(members: list[int]) -> None:
    with pytest.raises(TypeFault, match="not coordinates"):
        COLLECTIVES["parc.all_reduce_among"].result(parse_type("f32[2]", MESH), MESH, ("tp", members))


def test_the_bytes_of_a_message() -> None:
    assert payload_bytes("parc.all_reduce", (2, 3), 4) == 24
    assert payload_bytes("parc.row_max", (2, 3), 4) == 8
    assert payload_bytes("parc.all_gather", (), 8) == 8


def test_lines_about_collectives_mean_each_of_them() -> None:
    meant = {f"parc.{op}" for ops in COLLECTIVE_WORDS.values() for op in ops}
    assert meant == {op for op, row in COLLECTIVES.items() if row.communicates}
