"""Shards: the safetensors files of a checkpoint, one for each rank that writes. They are written and checked block by
block, so that no process holds a second copy of its state."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...compiler.layout.mesh import Shape
from ...compiler.layout.placement import DTYPES
from ...compiler.padding.tensors import EntryRun, packed
from ...grammar.bounded import MOST_JSON, check_regular, parse_json

_BLOCK = 16 << 20
"""The bytes that are copied or read at a time."""
_SAFETENSORS_TYPES = {dtype: name.upper() for name, dtype in DTYPES.items()}
"""The names that safetensors has for dtypes."""
_CHECKSUM = "crc32."
"""The prefix of a tensor's name where a file's header has the checksum of its bytes."""


class ShardFault(Exception):
    """The error of a shard that is not as it was written; the message says where."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard as it was written: its size, and the hash of its header, in which the checksums of all tensors stand."""

    bytes: int
    header: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's piece of a tensor, with the runs of the model's entries in each of its dims; the rest is padding."""

    tensor: torch.Tensor
    runs: tuple[tuple[EntryRun, ...], ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Piece:
        """Return a whole tensor as a piece of itself."""
        return cls(tensor, tuple(packed(((0, length),)) for length in tensor.shape))

    @property
    def shape(self) -> Shape:
        """The shape without padding."""
        return tuple(sum(run.size for run in runs) for runs in self.runs)

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield the model's entries in their order, some rows at a time, on the CPU."""
        tensor = self.tensor.detach()
        if not self.runs:
            yield tensor.cpu()
            return
        row = max(1, math.prod(self.shape[1:]) * tensor.element_size())
        rows = max(1, _BLOCK // row)
        for at, _, size in self.runs[0]:
            for start in range(0, size, rows):
                yield self.cut(tensor[at + start : at + min(start + rows, size)], 1).cpu().contiguous()

    def cut(self, tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return a tensor without the padding in its dims from dim ``first`` on."""
        for dim, runs in enumerate(self.runs[first:], start=first):
            if sum(run.size for run in runs) < tensor.shape[dim]:
                tensor = torch.cat([tensor.narrow(dim, run.at, run.size) for run in runs], dim)
        return tensor


def write_shard(path: Path, pieces: Mapping[str, Piece]) -> ShardFile:
    """Write pieces of tensors, without their padding.

    Raises:
        OSError: the file cannot be written.
    """
    ordered = dict(sorted(pieces.items(), key=lambda item: -item[1].tensor.element_size()))  # so that all are aligned
    sums = dict.fromkeys(ordered, 0)
    with open(path, "xb") as file:
        file.write(_header(ordered, sums))
        for name, piece in ordered.items():
            for block in piece.blocks():
                data = block.reshape(-1).view(torch.uint8).numpy().data
                sums[name] = zlib.crc32(data, sums[name])
                file.write(data)
        size = file.tell()
        file.seek(0)
        header = _header(ordered, sums)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    return ShardFile(size, hashlib.sha256(header).hexdigest())


def _header(pieces: Mapping[str, Piece], sums: Mapping[str, int]) -> bytes:
    """Return the header of a file, behind the eight bytes of its length. Its length does not depend on the sums."""
    known = {"format": "pt", **{f"{_CHECKSUM}{name}": f"{number:08x}" for name, number in sums.items()}}
    facts: dict[str, Any] = {"__metadata__": known}
    end = 0
    for name, piece in pieces.items():
        start, end = end, end + math.prod(piece.shape) * piece.tensor.element_size()
        kind = _SAFETENSORS_TYPES[piece.tensor.dtype]
        facts[name] = {"dtype": kind, "shape": list(piece.shape), "data_offsets": [start, end]}
    text = json.dumps(facts, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_shard(path: Path, shard: ShardFile, expected: Mapping[str, tuple[torch.dtype | None, Shape]]) -> list[str]:
    """Return the tensors of a file whose bytes are not those that were written, as texts with their places.

    Raises:
        ShardFault: the file's size or header differs, or it does not hold the tensors ``expected``.
        OSError: it cannot be read.
    """
    with open(check_regular(path), "rb") as file:
        header = _read_header(file, shard)
        try:
            facts = parse_json(header[8:].decode("utf-8"))
            sums = facts.pop("__metadata__")
            places = {name: tuple(map(int, fact["data_offsets"])) for name, fact in facts.items()}
            have = {name: (DTYPES.get(fact["dtype"].lower()), tuple(fact["shape"])) for name, fact in facts.items()}
            misfits = [name for name in sorted({*have, *expected}) if have.get(name) != expected.get(name)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ShardFault(f"has a header that cannot be read: {error}") from None
        if misfits:
            raise ShardFault(f"does not hold what the index says of `{misfits[0]}`")
        return [
            f"`{name}` is not as it was written, in bytes {len(header) + start} to {len(header) + end - 1}"
            for name, (start, end) in sorted(places.items())
            if f"{_checksum(file, len(header) + start, end - start):08x}" != sums.get(f"{_CHECKSUM}{name}")
        ]


def _read_header(file: BinaryIO, shard: ShardFile) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size != shard.bytes:
        raise ShardFault(f"has {size} bytes, and {shard.bytes} were written")
    start = file.read(8)
    header = start + file.read(min(int.from_bytes(start, "little"), MOST_JSON))
    if hashlib.sha256(header).hexdigest() != shard.header:
        raise ShardFault("has another header than was written")
    return header


def _checksum(file: BinaryIO, start: int, size: int) -> int:
    file.seek(start)
    total, buffer = 0, memoryview(bytearray(max(0, min(size, _BLOCK))))
    while size > 0:
        count = file.readinto(buffer[:size])  # type: ignore[attr-defined]
        if not count:
            return -1
        total, size = zlib.crc32(buffer[:count], total), size - count
    return total
