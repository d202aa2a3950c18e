"""Conformance of backends: what every collective, message and hop must give on each rank, computed of the operands of
all ranks by index alone, with nothing of the code that backends share.

Each ``wrong_…`` runs its calls on a backend's own ranks, and yields what is wrong in words, or "".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

from parc.compiler.layout.collectives import SMALL_SUM, SUMS
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.packed_rows import EXCHANGE
from parc.compiler.layout.placement import Placement, TensorType
from parc.compiler.program.program import Function, Line, Program, Ref, Value
from parc.runtime.ranks.communication import Arrival, Backend, Message, RingPart

SHAPE = (8, 24, 8)
OUTERS = (1, 2, -2)
"""Parts of a dim: equal ones, and in zigzag. Dim 1 can also have those of ``UNEQUAL``."""
UNEQUAL = (2, 1)
GROUPS = {
    Mesh((("dp", 1),)): {"dp": [[0]]},
    Mesh((("dp", 4),)): {"dp": [[0, 1, 2, 3]]},
    Mesh((("dp", 2), ("tp", 2))): {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]], "dp,tp": [[0, 1, 2, 3]]},
}
"""The groups of ranks over the axes of each mesh."""
MESHES = tuple(mesh for mesh in GROUPS if mesh.world == 4)
_EXPERTS, _TOKENS = 8, 16


# ---- operands


@cache
def _generated(kind: str, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    if kind == "whole":  # numbers whose sums are exact in any order
        return torch.randint(-50, 50, SHAPE[::-1], generator=generator).float().permute(2, 1, 0)
    sizes = torch.logspace(-3, 4, math.prod(SHAPE)).view(SHAPE)  # each block of int8 has another scale
    return torch.randn(SHAPE, generator=generator) * sizes


def operand(op: str, rank: int, number: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's operand. It is not contiguous, unless it is rounded to int8."""
    return _generated("rounded" if "int8" in op else "whole", rank, number).to(dtype, copy=True)


def _table(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row [3] for each expert and token, and which of them are chosen; two experts have no token."""
    generator = torch.Generator().manual_seed(number)
    chosen = torch.rand(_EXPERTS, _TOKENS, generator=generator) < 0.3
    chosen[2:4] = False
    return torch.arange(3.0 * chosen.numel()).view(*chosen.shape, 3) + number, chosen


def _rows(args: Sequence[Any], ranks: int, index: int, number: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the operands of a rank in an exchange of packed rows, and its result."""
    table, chosen = _table(number)

    def side(outer: int) -> tuple[torch.Tensor, torch.Tensor]:
        by_experts = outer == 1
        dim, parts = (0, 1) if by_experts else (1, int(outer / _EXPERTS))
        return tuple(_part(whole, ranks, index, dim, parts) for whole in (table, chosen))  # type: ignore[return-value]

    (rows, before), (after_rows, after) = side(args[2]), side(args[4])
    return [rows[before], before, after], after_rows[after]


# ---- plain results


@cache
def _owners(size: int, ranks: int, outer: Any) -> torch.Tensor:
    """Return the rank of each entry of a dim."""
    parts = [1] * abs(outer) if isinstance(outer, int) else outer
    owners = list[int]()
    for number, part in enumerate(parts):
        backwards = isinstance(outer, int) and outer < 0 and number % 2
        for rank in reversed(range(ranks)) if backwards else range(ranks):
            owners += [rank] * (part * size // sum(parts) // ranks)
    assert len(owners) == size
    return torch.tensor(owners)


def _part(whole: torch.Tensor, ranks: int, index: int, dim: int, outer: Any) -> torch.Tensor:
    return whole.index_select(dim, (_owners(whole.shape[dim], ranks, outer) == index).nonzero().flatten())


def _joined(pieces: Sequence[torch.Tensor], dim: int, outer: Any) -> torch.Tensor:
    ranks, size = len(pieces), pieces[0].shape[dim]
    whole = pieces[0].new_zeros(*SHAPE[:dim], size * ranks, *SHAPE[dim + 1 :])
    owners = _owners(size * ranks, ranks, outer)
    for rank, piece in enumerate(pieces):
        whole.index_copy_(dim, (owners == rank).nonzero().flatten(), piece)
    return whole


def _round_int8(part: torch.Tensor) -> torch.Tensor:
    """Return a part rounded to 255 numbers of a power of two, for each block of 256 entries, in float64."""
    blocks = list[torch.Tensor]()
    for block in part.double().flatten().split(256):
        top = float(block.abs().max())
        power = max(-126, int(math.log2(top / 127 + 2.0**-200)) - 2)
        while 127 * 2.0**power < top:
            power += 1
        blocks.append((block / 2.0**power).round() * 2.0**power)
    return torch.cat(blocks).view(part.shape)


def _sum(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(pieces)).double().sum(0)


def plain(op: str, args: Sequence[Any], pieces: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """Return the result of the rank at ``index`` of a group, from the pieces of all its ranks."""
    ranks, (piece, split) = len(pieces), (pieces[index], args[1:])

    def pad() -> torch.Tensor:
        return _joined(
            [torch.zeros_like(piece)] * index + [piece] + [torch.zeros_like(piece)] * (ranks - index - 1), *split
        )

    def rounded() -> torch.Tensor:
        return _joined([_round_int8(_part(piece, ranks, rank, *split)) for rank in range(ranks)], *split)

    results: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: _sum(pieces),
        "all_reduce_among": lambda: _sum(pieces),
        "all_gather": lambda: _joined(pieces, *split),
        "reduce_scatter": lambda: _part(_sum(pieces), ranks, index, *split),
        "all_to_all": lambda: _part(_joined(pieces, *args[1:3]), ranks, index, *args[3:]),
        "row_max": lambda: torch.stack([piece.max(-1, keepdim=True)[0] for piece in pieces]).max(0)[0],
        "shard": lambda: _part(piece, ranks, index, *split),
        "pad": pad,
        "wait": lambda: piece,
        "round_int8": rounded,
        "reduce_scatter_int8": lambda: _sum([_round_int8(_part(piece, ranks, index, *split)) for piece in pieces]),
        "all_gather_int8": lambda: _joined([_round_int8(piece) for piece in pieces], *split),
    }
    return results[op.removeprefix("parc.")]()


def _off(op: str, result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str:
    """Return what is wrong with a result, or "". Only sums of what int8 rounded are not exact: they are float32's, and
    are rounded once to a narrower dtype."""
    if (result.shape, result.dtype) != (expected.shape, dtype):
        return f"is {result.dtype} {tuple(result.shape)}"
    allowed = torch.zeros_like(expected, dtype=torch.float64)
    if op == "parc.reduce_scatter_int8":
        allowed = expected.abs() * torch.finfo(dtype).eps / 2 * (1 + 2.0**-8) + expected.abs().max() * 2.0**-22
    apart = (result.double() - expected.double()).abs()
    return "" if bool((apart <= allowed).all()) else f"is off by {float((apart - allowed).max()):.3g}"


# ---- calls


@dataclass(frozen=True)
class Call:
    """A collective with its arguments after the operand, of operands of this dtype."""

    op: str
    args: tuple[Any, ...]
    dtype: torch.dtype = torch.float32

    def group(self, mesh: Mesh, rank: int) -> list[int]:
        """Return the ranks that run it with a rank; none if the rank does not run it."""
        groups = GROUPS[mesh].get(self.args[0] if self.args else "", [[rank]])
        group = next(group for group in groups if rank in group)
        members = [group[place] for place in self.args[1]] if self.op == SUMS[1] else group
        return members if rank in members else []

    def operand(self, mesh: Mesh, rank: int, number: int = 0) -> Any:
        """Return a rank's operand: a tuple, if it has several."""
        group = self.group(mesh, rank)
        if self.op == EXCHANGE:
            return tuple(_rows(self.args, len(group), group.index(rank), number)[0])
        return operand(self.op, rank, number, self.dtype)

    def wrong(self, mesh: Mesh, rank: int, result: torch.Tensor, number: int = 0) -> str:
        """Return what is wrong with a rank's result, or ""."""
        group = self.group(mesh, rank)
        if self.op == EXCHANGE:
            expected = _rows(self.args, len(group), group.index(rank), number)[1]
        else:
            pieces = [operand(self.op, peer, number, self.dtype) for peer in group]
            expected = plain(self.op, self.args, pieces, group.index(rank))
        problem = _off(self.op, result.cpu(), expected, self.dtype)
        return f"{self} on rank {rank} {problem}" if problem else ""


_SPLITS: list[tuple[int, Any]] = [*product(range(len(SHAPE)), OUTERS), (1, UNEQUAL)]
_ROWS = [args for parts in (_EXPERTS, -2 * _EXPERTS) for args in ((0, parts, 0, 1), (0, 1, 0, parts))]
_SPLIT = ("all_gather", "reduce_scatter", "shard", "pad", "round_int8", "reduce_scatter_int8", "all_gather_int8")


def calls(mesh: Mesh) -> Iterator[Call]:
    """Yield every collective over every group of axes, with every kind of split."""
    yield Call("parc.row_max", ("",))
    yield Call("parc.wait", ())
    for members in ((0, 2), (1, 2, 3), (0, 1, 2, 3)) if mesh.size("dp") == 4 else ((0,), (0, 1))[: mesh.size("dp")]:
        yield Call("parc.all_reduce_among", ("dp", list(members)))
    for axes in GROUPS[mesh]:
        yield Call("parc.row_max", (axes,))
        yield from (Call("parc.all_reduce", (axes,), dtype) for dtype in (torch.float32, torch.float64, torch.int64))
        for dtype in (torch.int64, torch.bfloat16):
            yield Call("parc.all_gather", (axes, 1, 2), dtype)
            yield Call("parc.all_to_all", (axes, 0, 1, 2, 2), dtype)
        for split in _SPLITS:
            yield from (Call(f"parc.{op}", (axes, *split)) for op in _SPLIT)
            yield Call("parc.reduce_scatter_int8", (axes, *split), torch.bfloat16)
        some = [split for split in _SPLITS if split[1] in (1, -2)]
        yield from (Call("parc.all_to_all", (axes, *split, *to)) for split in some for to in some)
        yield from (Call(EXCHANGE, (axes, *args)) for args in _ROWS)


def messages(mesh: Mesh) -> Iterator[list[Call]]:
    """Yield messages of several tensors over every group of axes: of every collective that a message may be."""
    for axes in GROUPS[mesh]:
        for op in ("all_gather", "reduce_scatter", "reduce_scatter_int8", "all_gather_int8"):
            yield [Call(f"parc.{op}", (axes, *split)) for split in _SPLITS]
        yield [Call("parc.reduce_scatter_int8", (axes, *split), torch.bfloat16) for split in _SPLITS]
        yield [Call("parc.all_gather", (axes, dim, 1), torch.int64) for dim in (0, 2)]
        yield [
            Call("parc.all_to_all", (axes, dim, outer, to, 2)) for dim, outer, to in ((0, 1, 1), (1, 2, 1), (2, -2, 0))
        ]
        yield [Call(EXCHANGE, (axes, *args)) for args in _ROWS]
        yield from ([Call("parc.all_reduce", (axes,))] * count for count in (2, 3))
        yield [Call("parc.all_gather", (axes, 0, 1))]


def program(mesh: Mesh) -> Program:
    """Return a program with all calls, from which a backend learns its groups."""
    value = Value("x", TensorType(torch.float32, SHAPE, Placement.whole(mesh)))
    lines = tuple(Line((value,), call.op, (Ref("x"), *call.args)) for call in calls(mesh))
    return Program("stage0", "F", mesh, (Function("f", (value,), lines, ()),))


# ---- runs on one backend


def moved(piece: Any, device: torch.device) -> Any:
    """Return an operand, of one tensor or several, on a device."""
    return tuple(one.to(device) for one in piece) if isinstance(piece, tuple) else piece.to(device)


def awaited(arrival: Arrival | None) -> None:
    """Wait for what a backend has started."""
    if arrival is not None:
        arrival()
        arrival()  # every tensor of a message asks for it


def wrong_calls(backend: Backend, mesh: Mesh, device: torch.device, only: str = "") -> Iterator[str]:
    """Run every call, or those of one collective, by itself."""
    for call in calls(mesh):
        if only and call.op != only:
            continue
        if len(backend.ranks) == 1 < mesh.world and not call.group(mesh, backend.ranks[0]):
            continue  # the other members run it
        operands = [
            call.operand(mesh, rank) if call.group(mesh, rank) else operand(call.op, rank) for rank in backend.ranks
        ]
        pieces = [moved(piece, device) for piece in operands]
        results, arrival = backend.collective(call.op, call.args, pieces)
        awaited(arrival)
        for rank, result, piece, before in zip(backend.ranks, results, pieces, operands, strict=True):
            yield call.wrong(mesh, rank, result) if call.group(mesh, rank) else ""
            if not isinstance(piece, tuple) and not torch.equal(piece.cpu(), before):
                yield f"{call} changed its operand"


def wrong_messages(backend: Backend, mesh: Mesh, device: torch.device) -> Iterator[str]:
    """Run every message, and several at once: they may be awaited in any order."""
    started = []
    for message in messages(mesh):
        pieces = [[moved(call.operand(mesh, rank, number), device) for rank in backend.ranks]
                  for number, call in enumerate(message)]  # fmt: skip
        started.append((message, *backend.message(message[0].op, [call.args for call in message], pieces)))
    for message, results, arrival in reversed(started):
        awaited(arrival)
        for number, (call, of_ranks) in enumerate(zip(message, results, strict=True)):
            for rank, result in zip(backend.ranks, of_ranks, strict=True):
                yield call.wrong(mesh, rank, result, number)


def wrong_sums(backend: Backend, mesh: Mesh, device: torch.device) -> Iterator[str]:
    """Sum spare tensors in place, two parts of one buffer and a large one; but not one that is not spare, or not
    contiguous."""
    large, spare = torch.arange(2.0 * SMALL_SUM), [True, True, True, False, True]
    for axes, groups in GROUPS[mesh].items():
        buffers = [torch.arange(12.0, device=device) + rank for rank in backend.ranks]
        pieces = [
            [buffer[8:].view(2, 2) for buffer in buffers],
            [buffer[:8].view(2, 4) for buffer in buffers],
            [moved(large * (rank + 1), device) for rank in backend.ranks],
            [moved(operand("", rank).contiguous(), device) for rank in backend.ranks],
            [moved(operand("", rank, 1), device) for rank in backend.ranks],
        ]
        results, arrival = backend.message(SUMS[0], [(axes,)] * len(pieces), pieces, spare)
        awaited(arrival)
        for at, rank in enumerate(backend.ranks):
            group = next(group for group in groups if rank in group)
            buffer = _sum([torch.arange(12.0) + peer for peer in group])
            wanted = [
                buffer[8:].view(2, 2), buffer[:8].view(2, 4),
                _sum([large * (peer + 1) for peer in group]),
                _sum([operand("", peer) for peer in group]),
                _sum([operand("", peer, 1) for peer in group]),
            ]  # fmt: skip
            for number, (row, expected) in enumerate(zip(results, wanted, strict=True)):
                problem = _off(SUMS[0], row[at].cpu(), expected, torch.float32)
                in_place = row[at].data_ptr() == pieces[number][at].data_ptr()
                problem = problem or ("is in the wrong place" if in_place != (number < 3) else "")
                yield f"sum {number} over {axes} on rank {rank} {problem}" if problem else ""


def _hopped(rank: int) -> list[torch.Tensor]:
    return [operand("", rank), torch.arange(5) * (rank + 1)]


def _around(rank: int, hops: int, device: torch.device) -> RingPart:
    held = [moved(tensor, device) for tensor in _hopped(rank)]
    seen = [held]
    for _ in range(hops):
        arrival = yield held
        held = arrival()
        seen.append(held)
    return [torch.stack(list(tensors)) for tensors in zip(*seen, strict=True)]


def wrong_rings(backend: Backend, mesh: Mesh, device: torch.device) -> Iterator[str]:
    """Send tensors around every ring, more than once around a small one: each comes from the rank before."""
    hops = 5 if mesh.world > 1 else 0
    for axes, groups in GROUPS[mesh].items():
        parts = [_around(rank, hops, device) for rank in backend.ranks]
        results = backend.run_ring("around", tuple(axes.split(",")), parts)
        for rank, of_rank in zip(backend.ranks, results, strict=True):
            group = next(group for group in groups if rank in group)
            seen = [_hopped(group[(group.index(rank) - hop) % len(group)]) for hop in range(hops + 1)]
            for result, tensors in zip(of_rank, zip(*seen, strict=True), strict=True):
                if not torch.equal(result.cpu(), torch.stack(list(tensors))):
                    yield f"the ring of rank {rank} over {axes} brings other tensors"


WRONG = {"calls": wrong_calls, "messages": wrong_messages, "sums": wrong_sums, "rings": wrong_rings}
"""The runs of one backend, by what conforms."""


# ---- messages between stages

_MICROBATCHES = 3


def _sent(message: Message, lane: int) -> list[torch.Tensor]:
    number = 10 * message.stage + message.microbatch + 100 * "FB".index(message.kind)
    return [operand("", lane, number), torch.arange(6).view(2, 3) * (number + lane), torch.ones(()) * number]


def wrong_stages(backend: Backend, role: int, stages: Sequence[int], lanes: Sequence[int]) -> list[str]:
    """Send results of all stages of a ``role`` forth and back, and take those of others last to first. ``stages`` has
    the role of each stage; ``lanes`` are the numbers of the backend's ranks within their stage."""
    numbers = range(_MICROBATCHES)
    every = [Message("pp", stage, kind, number) for number in numbers for stage in range(len(stages)) for kind in "FB"]
    sent = [message for message in every if 0 <= message.receiver < len(stages)]
    sent = [message for message in sent if stages[message.stage] != stages[message.receiver]]
    mine = [message for message in sent if stages[message.receiver] == role]
    takes = {
        message: backend.receive(message, [(tuple(x.shape), x.dtype) for x in _sent(message, 0)])
        for message in reversed(mine)
    }
    sendings = [
        backend.send(message, [_sent(message, lane) for lane in lanes])
        for message in sent
        if stages[message.stage] == role
    ]
    wrong = list[str]()
    for message, take in takes.items():
        for lane, tensors in zip(lanes, take(), strict=True):
            pairs = zip(tensors, _sent(message, lane), strict=True)
            wrong += [] if all(torch.equal(*pair) for pair in pairs) else [f"{message} brings other tensors"]
    for sending in sendings:
        sending.wait()
    return [*wrong, *(["a message that was waited for is not done"] if not all(one.done() for one in sendings) else [])]
