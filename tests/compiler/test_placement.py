"""Placements: their text, a rank's piece of a whole tensor, and the arithmetic between global and local."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.layout.collectives import local_outer
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.packed_rows import rows_by_rank
from parc.compiler.layout.pieces import dim_index, join_dim, put_together, row_major, slice_dim, take
from parc.compiler.layout.placement import Placement, Split, TensorType, dual, local_shape, parse_kind, parse_type
from parc.compiler.layout.stretches import atoms, zigzag

from .drawn import DTYPES, meshes, numbered, pieces_of, placed

MESH = Mesh.parse("dp=2, tp=2")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, TensorType]:
    """Draw a mesh and a type on it."""
    mesh = draw(meshes)
    return mesh, draw(placed(mesh))


@given(cases(), st.sampled_from(DTYPES))
def test_a_type_reads_back_from_its_text(case: tuple[Mesh, TensorType], dtype: torch.dtype) -> None:
    mesh, type_ = case
    type_ = TensorType(dtype, type_.shape, type_.placement)
    assert parse_type(type_.text(mesh), mesh) == type_


@pytest.mark.parametrize(
    ("text", "kinds", "shape"),
    [
        ("f32[8/dp, 64]", {"dp": Split(0)}, (8, 64)),
        ("f32[(3 8/tp)] +dp", {"tp": Split(0, 3), "dp": "P"}, (24,)),
        ("i64[8/dp/tp]", {"dp": Split(0), "tp": Split(0, 2)}, (8,)),
        ("bool[(4/tp 6/dp), 1]", {"tp": Split(0), "dp": Split(0, 4)}, (24, 1)),
        ("bf16[]", {}, ()),
        ("f32[(8/tp + 4/tp + 4/tp), 3]", {"tp": Split(0, (2, 1, 1))}, (16, 3)),
        ("f32[(8/dp/tp + 4/dp/tp)]", {"dp": Split(0, (2, 1)), "tp": Split(0, (2, 2, 1, 1))}, (12,)),
        ("f32[(2 4/~dp), 3]", {"dp": Split(0, zigzag(2))}, (8, 3)),
        ("f32[(8/dp + 6/dp + 6/dp)]", {"dp": Split(0, (4, 3, 3))}, (20,)),
    ],
)
def test_the_notation(text: str, kinds: dict[str, Split], shape: tuple[int, ...]) -> None:
    type_ = parse_type(text, MESH)
    assert (type_.shape, type_.placement) == (shape, Placement.of(MESH, kinds))
    assert type_.text(MESH) == text


def test_a_zigzag_deals_out_every_second_part_in_reverse() -> None:
    parts = torch.arange(6)
    pieces = [slice_dim(parts, 3, rank, 0, zigzag(2)) for rank in range(3)]
    assert [piece.tolist() for piece in pieces] == [[0, 5], [1, 4], [2, 3]]
    assert join_dim(pieces, 0, zigzag(2)).tolist() == parts.tolist()
    chosen = torch.ones(1, 6, dtype=torch.bool)  # one expert, which all six tokens chose
    assert rows_by_rank(chosen, 3, 1, zigzag(2)).sizes == [2, 2, 2]
    order = rows_by_rank(chosen, 3, 1, zigzag(2)).ordered(parts)
    assert order.tolist() == [0, 5, 1, 4, 2, 3]


@pytest.mark.parametrize(
    "text",
    ["", "f32", "f31[4]", "f32[4/pp]", "f32[4/dp, 4/dp]", "f32[4/dp] +dp", "f32[x]", "f32[(4/dp + 2)]", "f32[4]+dp"],
)
def test_what_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_type(text, MESH)


@given(cases())
def test_pieces_of_a_whole_put_together_are_the_whole(case: tuple[Mesh, TensorType]) -> None:
    mesh, type_ = case
    whole = numbered(type_.shape)
    assert torch.equal(put_together(pieces_of(whole, type_, mesh), type_.placement, mesh), whole)


@given(cases())
def test_a_rank_takes_what_slicing_along_each_axis_gives(case: tuple[Mesh, TensorType]) -> None:
    mesh, type_ = case
    type_ = TensorType(type_.dtype, type_.shape, _whole_for_sums(type_.placement))
    whole = numbered(type_.shape)
    for rank, piece in enumerate(pieces_of(whole, type_, mesh)):
        taken = take(whole, type_.placement, mesh, mesh.coordinates(rank))
        assert torch.equal(taken, piece)
        assert tuple(taken.shape) == type_.local(mesh) == local_shape(type_.shape, type_.placement, mesh)


def _whole_for_sums(placement: Placement) -> Placement:
    return placement.replace(dict.fromkeys(placement.partial, "I"))


@given(cases())
def test_element_numbers_are_those_of_the_elements_taken(case: tuple[Mesh, TensorType]) -> None:
    mesh, type_ = case
    numbers = (numbered(type_.shape) - 1).long()
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        places = [dim_index(size, dim, type_.placement, mesh, at, None) for dim, size in enumerate(type_.shape)]
        assert torch.equal(row_major(type_.shape, places, None), take(numbers, type_.placement, mesh, at))
        for dim, size in enumerate(type_.shape):
            line = torch.arange(size).reshape([-1 if d == dim else 1 for d in range(len(type_.shape))])
            taken = take(line.expand(type_.shape), type_.placement, mesh, at)
            entries = dim_index(size, dim, type_.placement, mesh, at, None)
            assert torch.equal(entries, taken.movedim(dim, 0).reshape(taken.shape[dim], -1)[:, 0])


@given(cases())
def test_the_stretches_of_a_dim_multiply_to_it_and_tell_what_a_rank_holds_before_a_split(
    case: tuple[Mesh, TensorType],
) -> None:
    mesh, type_ = case
    for dim, size in enumerate(type_.shape):
        splits = [(outer, axis) for outer, axis in type_.placement.splits(dim) if isinstance(outer, int)]
        if len(splits) < len(type_.placement.splits(dim)):
            continue
        found = atoms(size, splits, mesh.size)
        before, product = 1, 1
        for atom in found:
            if atom.axis is None:
                before *= atom.size
            else:
                sign = -1 if atom.mirrored else 1
                assert local_outer(type_.placement, mesh, atom.axis) == sign * before
                assert type_.placement[atom.axis] == Split(dim, sign * product)
            product *= atom.size
        assert product == size


def test_splits_that_do_not_nest_or_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="falls inside"):
        atoms(12, [(1, "dp"), (3, "tp")], MESH.size)
    with pytest.raises(ValueError, match="does not divide"):
        atoms(6, [(1, "dp"), (2, "tp")], MESH.size)
    with pytest.raises(ValueError, match="at least one part"):
        atoms(6, [(0, "dp"), (2, "tp")], MESH.size)
    with pytest.raises(ValueError, match="does not divide"):
        local_shape((3,), Placement.of(MESH, {"dp": Split(0)}), MESH)


@given(cases())
def test_the_dual_of_the_dual_is_the_type_itself(case: tuple[Mesh, TensorType]) -> None:
    mesh, type_ = case
    placement = type_.placement.replace({mesh.names[0]: "R"})
    assert placement.dual().dual() == placement
    assert placement.dual()[mesh.names[0]] == "P"
    assert placement.data()[mesh.names[0]] == "I"
    for _, kind in placement.items():
        assert parse_kind(str(kind)) == kind
        assert dual(dual(kind)) == kind
    with pytest.raises(KeyError):
        placement["pp"]
