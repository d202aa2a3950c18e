"""Ranks and coordinates: a bijection, and groups that partition the world."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.layout.mesh import Mesh

meshes = st.lists(st.integers(1, 4), max_size=4).map(
    lambda sizes: Mesh(tuple(zip(("pp", "dp", "cp", "tp"), sizes, strict=False)))
)
FACTORED = Mesh.parse("dp=2, tp=2*3*2, cp=1")


@given(meshes)
def test_text_reads_back(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


@given(meshes)
def test_coordinates_and_ranks_are_one_to_one_and_the_last_axis_varies_fastest(mesh: Mesh) -> None:
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world)]
    assert places == sorted(set(places))
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.world)] == list(range(mesh.world))


@given(meshes, st.data())
def test_groups_partition_the_ranks_and_differ_only_along_their_axes(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.names), unique=True)) if mesh.axes else []
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        assert group == sorted(group)
        assert len({tuple((a, c) for a, c in mesh.coordinates(r).items() if a not in axes) for r in group}) == 1


def test_a_factored_axis_is_the_same_ranks_in_the_same_order() -> None:
    assert Mesh.parse(str(FACTORED)) == FACTORED == Mesh.parse("dp=2, tp=12, cp=1").factor({"tp": (2, 3, 2)})
    assert FACTORED.axes == (("dp", 2), ("tp_0", 2), ("tp_1", 3), ("tp_2", 2), ("cp", 1))
    assert FACTORED.declared == Mesh.parse("dp=2, tp=12, cp=1") and FACTORED.declared.declared == FACTORED.declared
    assert FACTORED.groups(FACTORED.parts("tp")) == FACTORED.declared.groups(["tp"])
    assert [FACTORED.owner(axis) for axis in FACTORED.names] == ["dp", "tp", "tp", "tp", "cp"]
    with pytest.raises(ValueError, match="named twice"):
        Mesh.parse("tp_0=2, tp=4").factor({"tp": (2, 2)})


def test_sub_axes_are_said_together_where_all_stand_in_order() -> None:
    for axes, said in [(("dp", "tp_0", "tp_1", "tp_2"), ("dp", "tp")), (("tp_0", "tp_1"), ("tp_0", "tp_1")),
                       (("tp_1", "tp_0", "tp_2"), ("tp_1", "tp_0", "tp_2"))]:  # fmt: skip
        assert FACTORED.joined(axes) == said and FACTORED.spread(said) == axes


def test_impossible_meshes_are_refused() -> None:
    for axes in ((("dp", 2), ("dp", 2)), (("dp", 0),)):
        with pytest.raises(ValueError):
            Mesh(axes)
    for text in ("dp", "dp=two", "dp=2,,tp=2", "dp=0"):
        with pytest.raises(ValueError):
            Mesh.parse(text)
    mesh = Mesh.parse("dp=2, tp=2")
    with pytest.raises(ValueError):
        mesh.coordinates(4)
    with pytest.raises(ValueError):
        mesh.rank({"dp": 2, "tp": 0})
    with pytest.raises(KeyError):
        mesh.groups(["cp"])
