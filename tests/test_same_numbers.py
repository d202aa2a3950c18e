"""Random numbers are functions of global positions: every plan draws the same bits for weights and for dropout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parc.compiler.initial.recipes import record
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.pieces import put_together, take
from parc.compiler.layout.placement import Placement, Split, TensorType
from parc.runtime.machine.kernels import KERNELS
from parc.runtime.machine.registry import KernelContext

CPU = torch.device("cpu")


@st.composite
def placed_types(draw: st.DrawFn) -> tuple[Mesh, TensorType]:
    """Draw a tensor of which one or two dims are split over axes of 1, 2 or 4 ranks, fused rows among them."""
    mesh = Mesh(tuple((name, draw(st.sampled_from([1, 2, 4]))) for name in ("dp", "tp")))
    shape = tuple(draw(st.sampled_from([4, 12, 24])) for _ in range(draw(st.integers(1, 3))))
    types = {}
    free = list(range(len(shape)))
    for axis in mesh.names:
        if free and mesh.size(axis) > 1 and draw(st.booleans()):
            dim = free.pop(draw(st.integers(0, len(free) - 1)))
            outer = draw(st.sampled_from([1, 3])) if shape[dim] % (3 * mesh.size(axis)) == 0 else 1
            types[axis] = Split(dim, outer)
    return mesh, TensorType(torch.float32, shape, Placement.of(mesh, types))


@given(placed_types(), st.sampled_from([0.1, 0.5, 0.9]))
def test_dropout_masks_are_bitwise_those_of_one_rank(case: tuple[Mesh, TensorType], p: float) -> None:
    mesh, type_ = case
    key = torch.tensor(123456789)
    mask = KERNELS["parc.dropout_mask.default"]
    pieces = [
        mask(KernelContext(mesh, mesh.coordinates(rank), [], [type_], CPU), key, type_.local(mesh), p, torch.float32)
        for rank in range(mesh.world)
    ]
    whole_type = TensorType(type_.dtype, type_.shape, Placement(()))
    whole = mask(KernelContext(Mesh(), {}, [], [whole_type], CPU), key, type_.shape, p, torch.float32)
    assert torch.equal(put_together(pieces, type_.placement, mesh), whole)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 12)
        self.table = nn.Embedding(24, 12, padding_idx=3)
        self.odd = nn.Parameter(torch.randn(12, 4).clamp(-1, 1) * 0.5 + torch.rand(12, 1))


RECORDED = record(_Layers, 7)


@given(st.data())
def test_initial_weights_are_bitwise_those_of_one_rank(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(RECORDED.recipes)))
    recipe = RECORDED.recipes[name]
    mesh = Mesh((("dp", 2), ("tp", data.draw(st.sampled_from([1, 2, 4])))))
    dim = data.draw(st.integers(0, len(recipe.shape) - 1))
    split = Split(dim, data.draw(st.sampled_from([1, 3])) if recipe.shape[dim] % 12 == 0 else 1)
    assert isinstance(split.outer, int)
    splits = {"tp": split} if mesh.size("tp") > 1 and recipe.shape[dim] % (split.outer * mesh.size("tp")) == 0 else {}
    placement = Placement.of(mesh, splits)
    numbers = torch.arange(math.prod(recipe.shape)).reshape(recipe.shape)
    pieces = [recipe.elements(take(numbers, placement, mesh, mesh.coordinates(rank))) for rank in range(mesh.world)]
    assert torch.equal(put_together(pieces, placement, mesh), recipe.whole())


@pytest.mark.parametrize("first, second", [("a.0", "b.0"), ("a.0", "a.1")])
def test_streams_of_different_names_differ(first: str, second: str) -> None:
    key = KERNELS["parc.stream_key.default"]
    context = KernelContext(Mesh(), {}, [], [], CPU)
    rng = torch.tensor([3, 1])
    assert key(context, rng, first, 0) != key(context, rng, second, 0)
    assert key(context, rng, first, 0) != key(context, rng, first, 1)
    assert key(context, rng, first, 0) != key(context, torch.tensor([3, 2]), first, 0)
