"""Attention in a ring: for any number of ranks, lengths, heads, masks and order of parts it is attention on one device;
and implementations with a bug are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.pieces import put_together, take
from parc.compiler.layout.placement import Placement, Split, TensorType
from parc.runtime.backends.in_process import InProcess
from parc.runtime.machine import attention
from parc.runtime.machine import attention as rings
from parc.runtime.machine.attention import Tile
from parc.runtime.machine.kernels import KERNELS
from parc.runtime.machine.registry import KernelContext


@dataclass(frozen=True)
class Call:
    """Attention of random values over a ring: ``order`` is 1 where ranks have one part each, -2 in zigzag."""

    ranks: int
    part: int
    heads: int
    groups: int
    order: int
    mask: str
    causal: bool
    seed: int


calls = st.builds(
    Call, ranks=st.integers(2, 5), part=st.integers(1, 4), heads=st.just(4), groups=st.sampled_from([1, 2, 4]),
    order=st.sampled_from([1, -2]), mask=st.sampled_from(["none", "window", "padding"]), causal=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip


def error_of(call: Call) -> float:
    """Return the largest difference of a ring's results and gradients from those of plain attention."""
    generator = torch.Generator().manual_seed(call.seed)
    mesh, length = Mesh((("cp", call.ranks),)), call.ranks * call.part * abs(call.order)
    shapes = [(2, heads, length, 4) for heads in (call.heads, call.heads, call.groups, call.groups)]
    grad, q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    at = torch.arange(length)
    mask = {"none": None, "window": (at[:, None] - at).abs() < 3, "padding": (at > 1)[None]}[call.mask]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    seen = mask
    if call.causal:
        seen = (at[:, None] >= at) if mask is None else mask & (at[:, None] >= at)
    every_k, every_v = (x.repeat_interleave(call.heads // call.groups, 1) for x in (k, v))
    scores = F.scaled_dot_product_attention(q, every_k, every_v, seen)
    wanted = [scores, *torch.autograd.grad(scores, (q, k, v), grad)]

    split = Placement.of(mesh, {"cp": Split(2, call.order)})
    rows = Placement.of(mesh, {"cp": Split(0, call.order)})
    types = [TensorType(x.dtype, tuple(x.shape), split) for x in (q, k, v)]
    places = [mesh.coordinates(rank) for rank in range(call.ranks)]
    tensors = [x.detach() for x in (grad, q, k, v)]
    pieces = [[take(x, split, mesh, at) for x in tensors] for at in places]
    masks = [mask if mask is None or mask.shape[0] == 1 else take(mask, rows, mesh, at) for at in places]
    run, options = InProcess(mesh), (None, call.causal, None, 0.0)

    def ring(op: str, given: Sequence[Sequence[Any]], types: Sequence[TensorType]) -> list[list[torch.Tensor]]:
        contexts = [KernelContext(mesh, at, types, (), torch.device("cpu")) for at in places]
        parts = [KERNELS[op](context, own[0], "cp", *own[1:]) for context, own in zip(contexts, given, strict=True)]
        return run.run_ring(op, ("cp",), parts)

    forward = [(*own[1:], mask, *options) for own, mask in zip(pieces, masks, strict=True)]
    made = ring("parc.ring_attention", forward, types)
    back = [
        (*own, mask, options[0], *results, *options[1:]) for own, mask, results in zip(pieces, masks, made, strict=True)
    ]
    gradients = ring("parc.ring_attention_backward", back, [types[0], *types])
    found = [
        put_together(list(of_ranks), split, mesh)
        for of_ranks in zip(*([out, *own] for (out, _), own in zip(made, gradients, strict=True)), strict=True)
    ]
    differences = [
        float((one.detach() - other).abs().nan_to_num(math.inf).max()) for one, other in zip(wanted, found, strict=True)
    ]
    return max(differences)


@given(calls)
def test_a_ring_computes_what_one_device_does(call: Call) -> None:
    assert error_of(call) < 1e-10, call


def without_maximum(first: Any, second: Any) -> Any:
    return (first[0] + second[0]) / 2, torch.logaddexp(first[1], second[1])


def of_a_sum(first: Any, second: Any) -> Any:
    lse = torch.maximum(first[1], second[1])
    return first[0] + second[0], lse


def local(context: KernelContext, axes: str, keys: TensorType) -> Any:
    own = context.runs(keys, 2)
    return [own] * context.mesh.size(axes)


def other_way(context: KernelContext, axes: str, keys: TensorType) -> Any:
    own, *others = POSITIONS(context, axes, keys)
    return [own, *others[::-1]]


def fewer(context: KernelContext, axes: str, keys: TensorType) -> Any:
    return POSITIONS(context, axes, keys)[:-1]


def twice(context: KernelContext, axes: str, keys: TensorType) -> Any:
    positions = POSITIONS(context, axes, keys)
    return [*positions, positions[0]]


def all_seen(rows: Any, columns: Any, causal: bool) -> Any:
    return TILES(rows, columns, False)


def shifted(rows: Any, columns: Any, causal: bool) -> Any:
    for piece in TILES(rows, columns, causal):
        first, start = piece.at
        yield Tile(piece.queries, piece.keys, (first, start + 1), "compared" if causal else piece.seen)


POSITIONS: Callable[..., Any] = rings._positions
TILES: Callable[..., Any] = attention.tiles
BUGS: dict[str, tuple[Any, str, Any]] = {
    "outputs averaged": (attention, "_merge", without_maximum),
    "the sums forgotten": (attention, "_merge", of_a_sum),
    "positions from a rank's own zero": (rings, "_positions", local),
    "keys believed to come the other way": (rings, "_positions", other_way),
    "a hop dropped": (rings, "_positions", fewer),
    "a block counted twice": (rings, "_positions", twice),
    "no mask": (attention, "tiles", all_seen),
    "a mask one key late": (attention, "tiles", shifted),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("order", [1, -2])
def test_a_ring_with_a_bug_computes_something_else(bug: str, order: int) -> None:
    place, name, wrong = BUGS[bug]
    call = Call(3, 2, 4, 2, order, "none", True, 1)
    assert error_of(call) < 1e-10
    with patch.object(place, name, wrong):
        assert error_of(call) > 1e-3


def test_in_zigzag_ranks_have_equal_work_under_a_causal_mask() -> None:
    """A plain ring's last rank has 2 n - 1 times the work of its first; in zigzag they differ by less than 2 %."""
    mesh, length = Mesh((("cp", 8),)), 8192

    def work(order: int) -> list[int]:
        type_ = TensorType(torch.float32, (1, 1, length, 8), Placement.of(mesh, {"cp": Split(2, order)}))
        contexts = [KernelContext(mesh, mesh.coordinates(rank), (), (), torch.device("cpu")) for rank in range(8)]
        whole = [(0, length)]
        return [
            sum(
                piece.queries[1] * piece.keys[1] // (1 if piece.seen == "all" else 2)
                for piece in attention.tiles(context.runs(type_, 2), whole, True)
            )
            for context in contexts
        ]

    assert max(work(-2)) / min(work(-2)) < 1.02
    assert max(work(1)) / min(work(1)) == 15
