"""Conformance of collective backends: real gloo ranks give the results of the in-process backend, for every
collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from parc.compiler.layout.collectives import COLLECTIVES
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Placement, TensorType
from parc.compiler.program.program import Function, Line, Program, Ref, Value
from parc.runtime.backends.distributed import Distributed
from parc.runtime.backends.in_process import InProcess
from tests.runtime.ranks import run_ranks

SHAPE = (8, 24, 8)
_PACKED = ("round_int8", "reduce_scatter_int8", "all_gather_int8")


def cases(mesh: Mesh) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield every collective over every axis and over several, every dim and outer of ``SHAPE``."""
    several = [*mesh.names, ",".join(mesh.names)] if len(mesh.names) > 1 else list(mesh.names)
    yield "parc.row_max", ("",)
    yield "parc.wait", ()
    yield "parc.all_reduce_among", (mesh.names[0], [0, 1])
    for axes in several:
        yield "parc.all_reduce", (axes,)
        yield "parc.row_max", (axes,)
        for dim in range(len(SHAPE)):
            for outer in (1, 2):
                for op in ("all_gather", "reduce_scatter", "shard", "pad", *_PACKED):
                    yield f"parc.{op}", (axes, dim, outer)
                for to_dim in range(len(SHAPE)):
                    for to_outer in (1, 2):
                        yield "parc.all_to_all", (axes, dim, outer, to_dim, to_outer)


def together(mesh: Mesh) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Yield messages of several tensors, over each axis."""
    for axes in mesh.names:
        for op in ("parc.all_gather", "parc.reduce_scatter"):
            yield op, [(axes, dim, outer) for dim in range(len(SHAPE)) for outer in (1, 2)]


def piece(rank: int) -> torch.Tensor:
    """Return a rank's operand: whole numbers, so that sums are exact in any order; not contiguous."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, SHAPE[::-1], generator=generator).float().permute(2, 1, 0)


def program(mesh: Mesh) -> Program:
    """Return a program that uses all cases, from which a backend learns its groups."""
    value = Value("x", TensorType(torch.float32, SHAPE, Placement.whole(mesh)))
    lines = tuple(Line((value,), op, (Ref("x"), *args)) for op, args in cases(mesh))
    return Program("stage0", "F", mesh, (Function("f", (value,), lines, ()),))


def real(axes: tuple[tuple[str, int], ...]) -> list[torch.Tensor]:
    """Run all cases on one rank of a gloo group."""
    mesh = Mesh(axes)
    rank = torch.distributed.get_rank()
    backend = Distributed(mesh, [program(mesh)], rank, torch.device("cpu"))
    results = []
    for op, args in cases(mesh):
        mine = piece(rank)
        (result,), arrival = backend.collective(op, args, [mine])
        if arrival is not None:
            arrival()
        assert torch.equal(mine, piece(rank)), f"{op}{args} changed its operand"
        results.append(result)
    for op, each in together(mesh):
        message, arrival = backend.message(op, each, [[piece(rank + 7 * at)] for at in range(len(each))])
        arrival()
        arrival()  # every tensor of a message asks for it
        results += [tensor for (tensor,) in message]
    return results


def test_every_collective_has_its_cases() -> None:
    assert {op for op, _ in cases(Mesh((("dp", 2),)))} == set(COLLECTIVES)


@pytest.mark.parametrize("axes", [(("dp", 2),), (("dp", 2), ("tp", 2))], ids=["2 ranks", "4 ranks"])
def test_gloo_is_the_in_process_backend(axes: tuple[tuple[str, int], ...]) -> None:
    mesh = Mesh(axes)
    simulated = InProcess(mesh)
    pieces = [piece(rank) for rank in range(mesh.world)]
    found = run_ranks(real, mesh.world, axes)
    for number, (op, args) in enumerate(cases(mesh)):
        for rank, expected in enumerate(simulated.collective(op, args, pieces)[0]):
            result = found[rank][number]
            assert result.shape == expected.shape, (op, args)
            assert torch.equal(result, expected), (op, args, rank)
    number = len(list(cases(mesh)))
    for op, each in together(mesh):
        operands = [[piece(rank + 7 * at) for rank in range(mesh.world)] for at in range(len(each))]
        for of_ranks in simulated.message(op, each, operands)[0]:
            assert all(torch.equal(found[rank][number], expected) for rank, expected in enumerate(of_ranks)), op
            number += 1
