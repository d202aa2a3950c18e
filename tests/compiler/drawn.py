"""Strategies that draw meshes, placements, types and whole programs for property tests."""

from __future__ import annotations

import keyword
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import AxisType, Placement, Split, TensorType
from parc.compiler.layout.stretches import joined_stretches
from parc.compiler.program.binding import Binding, Kind
from parc.compiler.program.program import Function, Line, LocalSize, Origin, Program, Ref, Value

AXES = ("dp", "tp", "cp")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

plain_meshes = st.lists(st.integers(2, 3), min_size=1, max_size=3).map(
    lambda sizes: Mesh(tuple(zip(AXES, sizes, strict=False)))
)
factored_meshes = st.sampled_from([Mesh.parse("dp=2, tp=2*3"), Mesh.parse("dp=2*2, tp=3"), Mesh.parse("tp=2*2")])
meshes = st.one_of(plain_meshes, factored_meshes)


@st.composite
def placed(draw: Any, mesh: Mesh, kinds: Sequence[str] = ("I", "P"), max_dims: int = 3) -> TensorType:
    """Draw a small tensor's type. Its dims are built from their splits, so that every split nests and divides."""
    rank = draw(st.integers(1, max_dims))
    left = list(draw(st.permutations(mesh.names)))
    types: dict[str, AxisType] = {}
    shape = []
    for dim in range(rank):
        size = draw(st.integers(1, 2))
        outers: dict[str, int] = {}
        parts = draw(st.sampled_from([(1,), (1,), (2,), (2, 1, 1), (1, 3)]))  # each of them split alike
        while left and draw(st.booleans()):
            axis, kept = left.pop(), draw(st.integers(1, 2))
            size *= kept
            outers[axis] = -size if kept == 2 and parts == (1,) and draw(st.booleans()) else size
            size *= mesh.size(axis)
        types |= {
            a: Split(dim, joined_stretches([(part * size, outer) for part in parts])) for a, outer in outers.items()
        }
        shape.append(size * sum(parts))
    types.update((axis, draw(st.sampled_from(kinds))) for axis in left)
    return TensorType(torch.float64, tuple(shape), Placement.of(mesh, types))


def pieces_of(whole: torch.Tensor, type_: TensorType, mesh: Mesh) -> list[torch.Tensor]:
    """Return every rank's piece, cut along one axis after the other. Partial sums are unequal and add up to the whole.
    The code is independent of ``take``."""
    return [_piece(whole, type_, mesh, mesh.coordinates(rank)) for rank in range(mesh.world)]


def _piece(whole: torch.Tensor, type_: TensorType, mesh: Mesh, at: dict[str, int]) -> torch.Tensor:
    keep = [torch.ones(size, dtype=torch.bool) for size in whole.shape]
    share = 1.0
    for axis, kind in type_.placement.items():
        ranks, here = mesh.size(axis), at[axis]
        if isinstance(kind, Split):
            parts = (1,) * abs(kind.outer) if isinstance(kind.outer, int) else kind.outer
            unit = whole.shape[kind.dim] // sum(parts)
            turned = isinstance(kind.outer, int) and kind.outer < 0
            places = [ranks - 1 - here if turned and number % 2 else here for number in range(len(parts))]
            taken = [torch.arange(part * unit) // (part * unit // ranks) == place
                     for part, place in zip(parts, places, strict=True)]  # fmt: skip
            keep[kind.dim] &= torch.cat(taken)
        elif kind == "P":
            share *= 1 - 0.25 * (ranks - 1) if here == 0 else 0.25
    piece = whole
    for dim, mask in enumerate(keep):
        piece = piece.index_select(dim, mask.nonzero().flatten())
    return piece * share if whole.is_floating_point() else piece


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor with another number in every entry."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(tuple(shape))


_names = st.from_regex(r"[a-z][a-z_0-9]{0,5}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name) and name not in ("inf", "nan")
)
_paths = st.from_regex(r"[a-z0-9_.%/ -]{0,8}", fullmatch=True)
_BOUND = (None, Binding("input", "x"), Binding("parameter", "a.b  # c"))
_RETURNED: tuple[Kind, ...] = ("saved", "sent", "buffer", "gradient")
_keys = st.text(st.characters(max_codepoint=0x2FF), max_size=4)
_numbers = st.one_of(
    st.integers(-(10**6), 10**6), st.booleans(), st.none(), st.text(max_size=5), st.sampled_from(DTYPES),
    st.floats(allow_nan=False), st.just(float("inf")),
)  # fmt: skip
_OPERATORS = ("aten.mm.default", "aten.add.Tensor", "parc.all_reduce", "parc.iota.default", "aten.split.Tensor")


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program that its text must give back. Its lines make no sense: reading does not judge them."""
    mesh = draw(meshes)
    action = draw(st.sampled_from(("F", "B", "REDUCE")))
    functions: list[Function] = []
    labels = draw(st.lists(_names, min_size=1, max_size=3, unique=True))
    for label in labels:
        functions.append(_function(draw, mesh, label, functions, action, main=label == labels[-1]))
    return Program(draw(_names), action, mesh, tuple(functions))


def _function(draw: Any, mesh: Mesh, label: str, known: Sequence[Function], action: str, main: bool) -> Function:
    names = iter(draw(st.lists(_names, min_size=8, max_size=8, unique=True)))

    def value(binding: Binding | None = None) -> Value:
        return Value(next(names), draw(placed(mesh)), binding)

    def cut() -> LocalSize:
        axes = tuple(draw(st.lists(st.sampled_from(mesh.names), min_size=1, unique=True)))
        return LocalSize(draw(st.integers(0, 9)) * math.prod(mesh.size(axis) for axis in axes), axes)

    bindings = [draw(st.sampled_from(_BOUND)) for _ in range(draw(st.integers(0, 2)))]
    parameters = tuple(value(binding) for binding in bindings)
    defined = [item.name for item in parameters]
    lines = []
    for _ in range(draw(st.integers(0, 2))):
        refs = [Ref(draw(st.sampled_from(defined))) for _ in range(draw(st.integers(0, 2)))] if defined else []
        results: tuple[Value | None, ...] = tuple(value() for _ in range(draw(st.integers(1, 2))))
        results = (*results, None) if draw(st.booleans()) else results
        origin = Origin(draw(_paths), draw(_paths), draw(st.integers(0, 99)))
        if known and draw(st.booleans()):
            lines.append(Line(results, draw(st.sampled_from([f.name for f in known])), tuple(refs), (), origin))
        else:
            literals = [*draw(st.lists(_numbers, max_size=2)), cut(), [*refs, cut()], tuple(refs)]
            kwargs = (("dtype", draw(_numbers)),)
            lines.append(Line(results, draw(st.sampled_from(_OPERATORS)), (*refs, *literals), kwargs, origin))
        defined += [item.name for item in results if item is not None]
    outside = main or any(bindings)
    kinds = ("gradient", "sent") if outside and action == "B" else _RETURNED if outside else ("value",)
    keys = [Binding(draw(st.sampled_from(kinds)), name) for name in draw(st.lists(_keys, unique=True, max_size=2))]
    return Function(
        label, parameters, tuple(lines), tuple((key, draw(st.sampled_from(defined))) for key in keys if defined)
    )
