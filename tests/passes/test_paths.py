"""Paths of conversions: every step exists, the value stays the same, and the cheapest way is taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.layout.collectives import COLLECTIVES, lower
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.pieces import put_together, take
from parc.compiler.layout.placement import AxisType, Placement, Split, along
from parc.compiler.layout.stretches import Outer
from parc.passes.placing.paths import Changes, cheapest_path
from parc.runtime.backends.in_process import InProcess

MESH = Mesh.parse("dp=2, tp=2, ax=3")
FACTORED = Mesh.parse("dp=2, tp=2*3")
SHAPE = (12, 24)
OUTERS: list[Outer] = [1, 2, 3, 4, 6, (2, 1), (1, 1, 2)]


@st.composite
def kinds(draw: st.DrawFn, partial: bool) -> AxisType:
    """Draw a type on one axis."""
    if draw(st.booleans()):
        return Split(draw(st.sampled_from([0, 1])), draw(st.sampled_from(OUTERS)))
    return "P" if partial and draw(st.booleans()) else "I"


@st.composite
def placements(draw: st.DrawFn, mesh: Mesh, partial: bool) -> Placement:
    """Draw a placement of SHAPE that nests and divides."""
    found = Placement.whole(mesh)
    for name in draw(st.permutations(mesh.declared.names)):
        together = draw(st.booleans())
        for axes in [mesh.parts(name)] if together else [(axis,) for axis in mesh.parts(name)]:
            changed = found.replace(along(axes, draw(kinds(partial)), mesh))
            found = changed if changed.nests(SHAPE, mesh) else found
    return found


def walk(
    have: Placement, path: tuple[Changes, ...], pieces: list[torch.Tensor], mesh: Mesh = MESH
) -> list[torch.Tensor]:
    """Return every rank's piece after the steps, each lowered to its collective."""
    backend = InProcess(mesh)
    for step in path:
        want = have.replace(dict(step))
        assert want.nests(SHAPE, mesh)
        lowered = lower(",".join(axis for axis, _ in step), have, want, mesh)
        if lowered is not None:
            op, args = lowered
            assert op in COLLECTIVES
            pieces, arrival = backend.collective(op, args, pieces)
            if arrival is not None:
                arrival()
        have = want
    return pieces


@given(st.sampled_from([MESH, FACTORED]), st.data(), st.booleans())
def test_a_path_keeps_the_value(mesh: Mesh, data: st.DataObject, flows: bool) -> None:
    have, want = (data.draw(placements(mesh, partial)) for partial in (True, False))
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.world)]
    generator = torch.Generator().manual_seed(0)
    # parts of a sum differ from rank to rank, replicas do not
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    pieces = []
    for at in coordinates:
        key = tuple(at[axis] for axis in have.partial)
        part = parts.setdefault(key, torch.randint(0, 9, SHAPE, generator=generator))
        pieces.append(take(part, have, mesh, at))
    whole = put_together(pieces, have, mesh)
    for at, piece in zip(
        coordinates, walk(have, cheapest_path(have, want, SHAPE, mesh, flows), pieces, mesh), strict=True
    ):
        assert torch.equal(piece, take(whole, want, mesh, at))


def of(**types: AxisType) -> Placement:
    return Placement.of(MESH, types)


PATHS: dict[str, tuple[dict[str, AxisType], dict[str, AxisType], tuple[Changes, ...]]] = {
    "what shrinks comes before what sends": (
        {"dp": Split(0)}, {"tp": Split(1)}, ((("tp", Split(1)),), (("dp", "I"),)),
    ),
    "inner axes are gathered first": ({"dp": Split(0), "tp": Split(0, 2)}, {}, ((("tp", "I"),), (("dp", "I"),))),
    "sums over several axes are one message": ({"dp": "P", "tp": "P"}, {}, ((("dp", "I"), ("tp", "I")),)),
    "a sum goes straight to its split": ({"dp": "P"}, {"dp": Split(1)}, ((("dp", Split(1)),),)),
}  # fmt: skip


@pytest.mark.parametrize("rule", PATHS)
@pytest.mark.parametrize("flows", [False, True])
def test_the_cheapest_way_is_taken(rule: str, flows: bool) -> None:
    have, want, path = PATHS[rule]
    assert cheapest_path(of(**have), of(**want), SHAPE, MESH, flows) == path


def test_axes_in_each_others_way_take_turns() -> None:
    have, want = of(dp=Split(0), tp=Split(0, 2)), of(dp=Split(0, 2), tp=Split(0))
    path = cheapest_path(have, want, SHAPE, MESH, flows=False)
    assert len(path) == 3, "one is gathered, the other moves, the first is cut again"


def test_a_parameter_is_marked_before_it_is_cut() -> None:
    """Its gradient is then summed over `dp` once a step, not once a microbatch."""
    path = cheapest_path(of(), of(dp="R", tp=Split(0)), SHAPE, MESH, flows=True, lifts=True)
    assert path == ((("dp", "R"),), (("tp", Split(0)),))


def test_sub_axes_that_are_together_as_one_axis_move_in_one_message() -> None:
    cases: list[tuple[AxisType, AxisType]]
    cases = [("P", "I"), (Split(0), "I"), ("P", Split(1, 2)), (Split(0), Split(1)), ("I", Split(1))]
    for first, last in cases:
        have, want = (Placement.of(FACTORED, along(("tp_0", "tp_1"), kind, FACTORED)) for kind in (first, last))
        (step,) = cheapest_path(have, want, SHAPE, FACTORED, flows=True)
        assert [axis for axis, _ in step] == ["tp_0", "tp_1"]
