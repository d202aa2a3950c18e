"""Conformance of collective backends: real gloo ranks give the results of the in-process backend, for every
collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from parc.compiler.layout.collectives import COLLECTIVES, RINGS
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.packed_rows import EXCHANGE
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
    yield "parc.all_reduce_among", (mesh.names[0], list(range(min(2, mesh.world))))
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
    buffer = torch.arange(12.0) + rank
    parts = [buffer[8:].view(2, 2), buffer[:8].view(2, 4), piece(rank)]
    axis = mesh.names[0]
    message, arrival = backend.message(
        "parc.all_reduce", [(axis,)] * 3, [[part] for part in parts], [True, True, False]
    )
    arrival()
    assert [tensor.data_ptr() for (tensor,) in message[:2]] == [part.data_ptr() for part in parts[:2]]
    peers = next(ranks for ranks in mesh.groups((axis,)) if rank in ranks)
    assert torch.equal(buffer, sum(torch.arange(12.0) + peer for peer in peers))  # type: ignore[arg-type]
    assert torch.equal(message[2][0], sum(map(piece, peers)))  # type: ignore[arg-type]
    return results


def test_every_collective_has_its_cases() -> None:
    assert {op for op, _ in cases(Mesh((("dp", 2),)))} | {EXCHANGE, *RINGS} == set(COLLECTIVES)


_THERE, _BACK = ("ep", 0, 8, 0, 1), ("ep", 0, 1, 0, 8)  # 8 experts


def rows(rank: int, ranks: int) -> Any:
    """Return a rank's packed rows of its own tokens, and what is chosen of these and of its own experts."""
    chosen = torch.rand(8, 12, generator=torch.Generator().manual_seed(3)) < 0.3
    chosen[2:4] = False  # a rank whose experts have no token
    own = chosen.chunk(ranks, 1)[rank]
    values = torch.arange(96.0).view(8, 12).chunk(ranks, 1)[rank][own]
    return values[:, None].expand(-1, 3).contiguous(), own, chosen.chunk(ranks)[rank]


def exchanged(ranks: int) -> list[torch.Tensor]:
    """Bring packed rows to experts and back, on one rank of a gloo group."""
    mesh, rank = Mesh((("ep", ranks),)), torch.distributed.get_rank()
    value = Value("x", TensorType(torch.float32, (96, 3), Placement.whole(mesh)))
    lines = tuple(Line((value,), EXCHANGE, (Ref("x"), *args)) for args in (_THERE, _BACK))
    made = Program("stage0", "F", mesh, (Function("f", (value,), lines, ()),))
    backend = Distributed(mesh, [made], rank, torch.device("cpu"))
    mine: Any = rows(rank, ranks)
    (there,), _ = backend.collective(EXCHANGE, _THERE, [mine])
    arrived: Any = there, mine[2], mine[1]
    (back,), _ = backend.collective(EXCHANGE, _BACK, [arrived])
    return [there, back]


@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_exchanges_rows_as_the_in_process_backend_does(ranks: int) -> None:
    pieces = [rows(rank, ranks) for rank in range(ranks)]
    there = InProcess(Mesh((("ep", ranks),))).collective(EXCHANGE, _THERE, pieces)[0]
    for rank, (arrived, returned) in enumerate(run_ranks(exchanged, ranks, ranks)):
        assert torch.equal(arrived, there[rank])
        assert torch.equal(returned, pieces[rank][0])


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
