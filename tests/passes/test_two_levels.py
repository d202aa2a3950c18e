"""Collectives in two levels: the values and the gradients of the one in their place, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from parc.compiler.layout.collectives import COLLECTIVES, axes_of, global_outer, lower
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.packed_rows import EXCHANGE, chosen_placement
from parc.compiler.layout.pieces import take
from parc.compiler.layout.placement import AxisType, Placement, Split, TensorType, along
from parc.passes.placing.paths import in_levels
from parc.passes.programs.two_levels import Step, steps_of
from tests.draws import share


@st.composite
def conversions(draw: st.DrawFn) -> tuple[Mesh, TensorType, Placement]:
    """Draw a mesh with a factored axis, a value's type and its placement after a collective over that axis."""
    text = draw(st.sampled_from(["dp=2*2", "dp=2*3, tp=2", "tp=2, dp=3*2", "dp=2*2*2"]))
    mesh = Mesh.parse(text)
    parts = mesh.parts("dp")
    dims, unit = draw(st.integers(1, 3)), math.prod(size for _, size in mesh.axes)
    shape = tuple(draw(st.sampled_from([unit, 2 * unit, 3])) for _ in range(dims))
    types: dict[str, AxisType] = dict.fromkeys(mesh.names, "I")
    if "tp" in types:
        types["tp"] = draw(st.sampled_from(["I", "P", Split(draw(st.integers(0, dims - 1)), 1)]))
    base = Placement.of(mesh, types)
    assume(base.nests(shape, mesh))
    whole = base.replace(dict.fromkeys(parts, "I"))
    partial = base.replace(dict.fromkeys(parts, "P"))
    dim, outer = draw(st.integers(0, dims - 1)), draw(st.sampled_from([1, 1, 2, 3]))
    try:
        split = base.replace(along(parts, Split(dim, global_outer(base, mesh, dim, outer)), mesh))
    except ValueError:
        split = partial
    before, after = draw(st.sampled_from([(partial, whole), (partial, split), (split, whole)]))
    assume(before != after and before.nests(shape, mesh) and after.nests(shape, mesh))
    return mesh, TensorType(torch.float64, shape, before), after


def run(mesh: Mesh, steps: Sequence[tuple[str, Sequence[Any]]], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return every rank's piece after some collectives."""
    held = list(pieces)
    for op, args in steps:
        for group in COLLECTIVES[op].groups(mesh, args):
            made = COLLECTIVES[op].group([held[rank] for rank in group], args)
            for rank, piece in zip(group, made, strict=True):
                held[rank] = piece
    return held


def in_two_levels(mesh: Mesh, before: TensorType, after: Placement, across: int) -> tuple[tuple[str, Any], list[Step]]:
    """Return a conversion over the factored axis as one collective and as steps."""
    lowered = lower(",".join(mesh.parts("dp")), before.placement, after, mesh)
    assert lowered is not None
    result = TensorType(before.dtype, before.shape, after)
    steps = steps_of(*lowered, before, result, mesh, {"dp": across}, lambda dims, axes: dims[0] if dims else None)
    return lowered, steps


@given(conversions(), st.data())
@share(1.5)
def test_values_and_gradients_are_those_of_one_collective(
    drawn: tuple[Mesh, TensorType, Placement], data: st.DataObject
) -> None:
    mesh, before, after = drawn
    across = data.draw(st.integers(1, len(mesh.parts("dp")) - 1))
    one, steps = in_two_levels(mesh, before, after, across)
    if not steps:
        inside = math.prod(map(mesh.size, mesh.parts("dp")[across:]))
        assert one[0] == "parc.all_reduce"
        assert all(size % inside for size in before.local(mesh))
        return
    type_ = before
    for op, args, made in steps:
        type_ = COLLECTIVES[op].result(type_, mesh, args)
        assert type_ == made, (op, args)
    assert type_.placement == after
    # what crosses nodes is never more than a rank's part
    inner = set(mesh.parts("dp")[across:])
    sizes = [before, *(made for _, _, made in steps)]
    moved = [(axes_of(args), at) for (_, args, _), at in zip(steps, sizes, strict=False)]
    part = min(math.prod(type_.local(mesh)) for type_ in sizes)
    assert all(math.prod(at.local(mesh)) <= part * 4 for axes, at in moved if not inner & set(axes))
    generator = torch.Generator().manual_seed(0)
    given_ = [torch.randn(before.local(mesh), generator=generator, dtype=torch.float64).requires_grad_()
              for _ in range(mesh.world)]  # fmt: skip
    weights = [torch.randn(type_.local(mesh), generator=generator, dtype=torch.float64) for _ in range(mesh.world)]
    found = []
    for way in ([one], [(op, args) for op, args, _ in steps]):
        values = run(mesh, way, given_)
        total = torch.stack([(value * weight).sum() for value, weight in zip(values, weights, strict=True)]).sum()
        found.append((values, torch.autograd.grad(total, given_)))
    for kind in (0, 1):
        for expected, value in zip(found[0][kind], found[1][kind], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@given(st.data())
@share(0.6)
def test_tokens_reach_their_experts_in_two_levels_and_come_back(data: st.DataObject) -> None:
    """Rows are numbered, and every rank must have its own behind each step, which the step's type says."""
    mesh = Mesh.parse(data.draw(st.sampled_from(["ep=2*2", "dp=2, ep=2*3", "ep=3*2, dp=2", "ep=2*2*2"])))
    parts = mesh.parts("ep")
    across = data.draw(st.integers(1, len(parts) - 1))
    experts = math.prod(map(mesh.size, parts)) * data.draw(st.integers(1, 2))
    tokens = mesh.world * data.draw(st.integers(1, 3))
    chosen = torch.rand(experts, tokens, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) < 0.4
    numbers = torch.arange(experts * tokens).view(experts, tokens)
    others = {axis: Split(0, experts) for axis in mesh.names if axis not in parts}
    first = math.prod(map(mesh.size, others))
    by_token = Placement.of(mesh, {**others, **along(parts, Split(0, experts * first), mesh)})
    by_expert = by_token.replace(along(parts, Split(0, 1), mesh))

    def held(rows: Placement) -> list[tuple[torch.Tensor, torch.Tensor]]:
        place = chosen_placement(rows, (2, experts))
        ranks = [mesh.coordinates(rank) for rank in range(mesh.world)]
        masks = [take(chosen, place, mesh, at) for at in ranks]
        return [(take(numbers, place, mesh, at)[mask], mask) for at, mask in zip(ranks, masks, strict=True)]

    for have, want in ((by_token, by_expert), (by_expert, by_token)):
        whole = tuple((axis, want[axis]) for axis in parts)
        steps = list(in_levels([whole], have, mesh, {"ep": across}))
        inside_first = set(dict(steps[0])) == set(parts[across:])
        assert len(steps) == 2 and inside_first == (have is by_token)
        for step in steps:
            after = have.replace(dict(step))
            assert after.nests((experts * tokens,), mesh)
            axes = [axis for axis, _ in step]
            lowered = lower(",".join(axes), have, after, mesh)
            assert lowered is not None
            pieces = [(rows, mask, new) for (rows, mask), (_, new) in zip(held(have), held(after), strict=True)]
            for group in mesh.groups(axes):
                made = COLLECTIVES[EXCHANGE].group([pieces[rank] for rank in group], lowered[1])  # type: ignore[misc]
                for rank, rows in zip(group, made, strict=True):
                    assert torch.equal(rows, held(after)[rank][0])
            have = after
        assert have == want
