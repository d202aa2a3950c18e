"""The index of a checkpoint: its files, and which of them holds which rectangle of which tensor.

``index.json`` has three tables. ``files``: name, size and hash of the header of each. ``layouts``: the shape of a
tensor, the parts of each of its dims as ranges of entries, and the number of the file of each rectangle, row by row.
``tensors``: dtype and layout of each tensor by name. Tensors that are cut alike share a layout, so the index stays
small. A stack has no tensor of its own there: files have its parts, each under the model's own name.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...compiler.build.json_schema import Each, FieldRow, Form, hold_form
from ...compiler.layout.mesh import Mesh, Shape
from ...compiler.layout.placement import DTYPES, TensorType
from ...compiler.padding.pads import Pad, real_shape
from ...compiler.padding.tensors import EntryRanges, EntryRun, ranges_of, runs_of
from ...compiler.program.stacked import is_stacked, part_name, part_names
from ...grammar.bounded import MOST_JSON, parse_json, read_bounded, read_json
from ..ranks.gather import piece_place
from .shards import Piece, ShardFile

# ---- layouts: the rectangles that a tensor is cut into, and their files


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the state: how the plan stores it, and the names of the roles that own it."""

    type: TensorType
    pads: tuple[Pad, ...]
    owners: tuple[str, ...]

    @property
    def shape(self) -> Shape:
        """Its shape in the model."""
        return real_shape(self.type.shape, self.pads)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The cut of a tensor into rectangles, each of which is in one file. ``parts`` are the parts of each dim, each of
    them ranges of the model's entries: a part of a fused dim has several. ``files`` are the numbers of the rectangles'
    files, row by row: the ranks that write them, or places in a list of files.

    Of a tensor of [6, 4] whose rows ``(3 2/tp)`` are split, the parts are ``((((0, 1), (2, 3), (4, 5)), ((1, 2), (3,
    4), (5, 6))), (((0, 4),),))``, and the files ``(0, 1)``.
    """

    shape: Shape
    parts: tuple[tuple[EntryRanges, ...], ...]
    files: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], file: int = 0) -> FileLayout:
        """The layout of a tensor that is in one file."""
        if 0 in shape:
            return cls(tuple(shape), ((),) * len(shape), ())
        return cls(tuple(shape), tuple((((0, size),),) for size in shape), (file,))

    def rectangles(self) -> Iterator[tuple[tuple[EntryRanges, ...], int]]:
        """Pairs of a rectangle, as the ranges of each dim, and its file."""
        return zip(itertools.product(*self.parts), self.files, strict=True)

    def faults(self) -> Iterator[str]:
        """Yield the reasons why the rectangles do not cover the tensor, each of its entries once."""
        if len(self.parts) != len(self.shape):
            yield f"has {len(self.shape)} dims, and the parts of {len(self.parts)}"
            return
        for dim, (size, parts) in enumerate(zip(self.shape, self.parts, strict=True)):
            if 0 in self.shape and not parts:
                continue
            done = 0
            for first, last in sorted(itertools.chain(*parts)):
                if first < done:
                    yield f"has entry {first} of dim {dim} in two parts"
                elif first > done:
                    yield f"lacks entries {done} to {first - 1} of dim {dim}"
                done = max(done, last)
            if done < size:
                yield f"lacks entries {done} to {size - 1} of dim {dim}"
            elif done > size:
                yield f"has entry {done - 1} in dim {dim}, which has {size}"
            if not all(_rises(part) for part in parts):
                yield f"has a part of dim {dim} whose ranges do not rise"
        if len(self.files) != math.prod(len(parts) for parts in self.parts):
            yield f"is cut into {math.prod(len(parts) for parts in self.parts)} parts, in {len(self.files)} files"
        if len(set(self.files)) < len(self.files):
            yield "has two parts in one file"


def _rises(ranges: EntryRanges) -> bool:
    """Return whether there are ranges, none of them is empty, and each begins behind the one before."""
    ends = [end for range_ in ranges for end in range_]
    return bool(ends) and all(low < high for low, high in itertools.pairwise(ends))


def extent(rectangle: Sequence[EntryRanges]) -> Shape:
    """Return the shape of a rectangle."""
    return tuple(sum(last - first for first, last in ranges) for ranges in rectangle)


def rectangle_text(rectangle: Sequence[EntryRanges]) -> str:
    """Return a rectangle as text.

    >>> rectangle_text([((0, 4), (8, 10)), ((0, 3),)])
    '[0:4 + 8:10, 0:3]'
    """
    return f"[{', '.join(' + '.join(f'{first}:{last}' for first, last in ranges) for ranges in rectangle)}]"


def layouts_of(tensors: Mapping[str, StoredTensor], mesh: Mesh, roles: Sequence[str]) -> dict[str, FileLayout]:
    """Return the layout of each tensor. Its files are the ranks that write them; ``roles`` names the role of each rank.

    Of ranks that hold the same numbers, the one with the least to write so far writes; of several such, the lowest.
    """
    layouts: dict[str, FileLayout] = {}
    rectangles: dict[StoredTensor, tuple[tuple[tuple[EntryRanges, ...], ...], list[list[int]]]] = {}
    written: dict[tuple[object, ...], list[int]] = {}
    for name, stored in tensors.items():
        if stored not in rectangles:
            rectangles[stored] = _rectangles(stored, mesh, roles)
        parts, holders = rectangles[stored]
        equal = min(map(len, holders), default=1)
        sums = written.setdefault((stored.type.placement, stored.owners), [0] * equal)
        least = min(range(equal), key=sums.__getitem__)
        sums[least] += math.prod(stored.type.shape)
        layouts[name] = FileLayout(stored.shape, parts, tuple(ranks[least] for ranks in holders))
    return layouts


def _rectangles(
    stored: StoredTensor, mesh: Mesh, roles: Sequence[str]
) -> tuple[tuple[tuple[EntryRanges, ...], ...], list[list[int]]]:
    """Return the parts of each dim, and the ranks that hold each rectangle; what is padding alone is none."""
    by_rank: dict[int, tuple[EntryRanges, ...]] = {}
    by_place: dict[tuple[int, ...], tuple[EntryRanges, ...]] = {}
    for rank, role in enumerate(roles):
        if role in stored.owners:
            place = piece_place(rank, stored.type.placement, mesh)
            if place not in by_place:
                runs = runs_of(stored.type, stored.pads, mesh, mesh.coordinates(rank))
                by_place[place] = tuple(map(ranges_of, runs))
            by_rank[rank] = by_place[place]
    kept = {rectangle for rectangle in by_place.values() if all(rectangle)}
    parts = tuple(tuple(sorted({rectangle[dim] for rectangle in kept})) for dim in range(len(stored.type.shape)))
    order = {rectangle: number for number, rectangle in enumerate(itertools.product(*parts))} if kept else {}
    holders: list[list[int]] = [[] for _ in order]
    for rank, rectangle in by_rank.items():
        if rectangle in order:
            holders[order[rectangle]].append(rank)
    return parts, holders


# ---- the index


TENSORS, FACTS, INDEX_FILE = "state.safetensors", "state.json", "index.json"
_FORM: Form = {
    "files": [{"name": str, "bytes": int, "header": str}],
    "layouts": [{"shape": [int], "parts": [[[FieldRow(int, 2)]]], "files": [int]}],
    "tensors": Each({"dtype": str, "layout": int}),
}
TENSOR_FILE = re.compile(r"state(-\d{5,9})?\.safetensors")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def shard_name(rank: int, world: int) -> str:
    """Return the name of the file that a rank writes. That of one rank alone holds whole tensors."""
    return TENSORS if world == 1 else f"state-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Index:
    """Names of files by number, the size and hash of each as written, and layouts and dtypes of tensors by name."""

    files: Sequence[str]
    shards: Mapping[int, ShardFile]
    layouts: Mapping[str, FileLayout]
    dtypes: Mapping[str, torch.dtype | None]

    def held_by(self, numbers: Collection[int]) -> dict[int, dict[str, tuple[EntryRanges, ...]]]:
        """Return the rectangles of tensors that some of the files hold."""
        held: dict[int, dict[str, tuple[EntryRanges, ...]]] = {number: {} for number in numbers}
        for name, layout in self.layouts.items():
            if not held.keys().isdisjoint(layout.files):
                for rectangle, number in layout.rectangles():
                    if number in held:
                        held[number][name] = rectangle
        return held

    def faults(self, folder: Path) -> list[str]:
        """Return the tensors that the layouts do not cover; if there are none, the files that are missing or of another
        size."""
        by_layout: dict[FileLayout, list[str]] = {}
        for name, layout in self.layouts.items():
            by_layout.setdefault(layout, []).append(name)
        faults = [
            f"`{name}` {fault}" for layout, names in by_layout.items() for fault in layout.faults() for name in names
        ]
        return faults or [*self._file_faults(folder)]

    def _file_faults(self, folder: Path) -> Iterator[str]:
        for number, shard in self.shards.items():
            name = self.files[number]
            place = folder / name
            size = place.stat().st_size if place.is_file() else None
            if size != shard.bytes:
                what = "is missing" if size is None else f"has {size} bytes, and {shard.bytes} were written"
                held = next(iter(self.held_by([number])[number]), None)
                yield f"`{name}` {what}" + (f"; it holds a part of `{held}`" if held else "")


def write_index(folder: Path, index: Index, facts: Mapping[str, Any]) -> None:
    """Write the index and the facts of a checkpoint. Of its files only those that were written are named.

    Raises:
        OSError: a file cannot be written.
    """
    place = {number: row for row, number in enumerate(index.shards)}
    layouts: dict[FileLayout, int] = {}
    tensors = {
        name: {"dtype": _NAMES[dtype], "layout": layouts.setdefault(index.layouts[name], len(layouts))}
        for name, dtype in index.dtypes.items()
        if dtype is not None
    }
    text = json.dumps(
        {
            "files": [
                {"name": index.files[number], "bytes": shard.bytes, "header": shard.header}
                for number, shard in index.shards.items()
            ],
            "layouts": [
                {"shape": layout.shape, "parts": layout.parts, "files": [place[number] for number in layout.files]}
                for layout in layouts
            ],
            "tensors": tensors,
        },
        separators=(",", ":"),
    ).encode()
    (folder / INDEX_FILE).write_bytes(text)
    write_facts(folder, {**facts, "index": hashlib.sha256(text).hexdigest()})


_CHECKSUM = "checksum"
"""The fact that is the hash of all others."""


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts of a checkpoint, with their hash among them.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({**facts, _CHECKSUM: _hash_of(facts)}, sort_keys=True)
    (folder / FACTS).write_text(text, encoding="utf-8")


def read_facts(folder: Path) -> Any:
    """Read the facts of a checkpoint. Those that an older parc wrote have no hash.

    Raises:
        OSError: they cannot be read.
        ValueError: they are no JSON, or not those that were written.
    """
    facts = read_json(folder / FACTS)
    if isinstance(facts, dict) and _CHECKSUM in facts and facts[_CHECKSUM] != _hash_of(facts):
        raise ValueError(f"its {FACTS} is not the one that was written")
    return facts


def _hash_of(facts: Mapping[str, Any]) -> str:
    others = {name: value for name, value in facts.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def read_index(folder: Path, digest: str) -> Index:
    """Read the index of a checkpoint.

    Raises:
        OSError: it cannot be read.
        ValueError, FormError: it is not the one that was written, or makes no sense.
    """
    try:
        data = read_bounded(folder / INDEX_FILE, MOST_JSON)
    except FileNotFoundError:
        raise ValueError(f"its {INDEX_FILE} is missing") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"its {INDEX_FILE} is not the one that was written")
    value = parse_json(data.decode("utf-8"))
    hold_form(value, _FORM)
    files = value["files"]
    for file in files:
        if not TENSOR_FILE.fullmatch(file["name"]):
            raise ValueError(f"its {INDEX_FILE} names `{file['name']}`, which is no file of a checkpoint")
    layouts = [_layout(row) for row in value["layouts"]]
    tensors = value["tensors"]
    for row in tensors.values():
        if not 0 <= row["layout"] < len(layouts) or row["dtype"] not in DTYPES:
            raise ValueError(f"its {INDEX_FILE} has a tensor of {row}")
    if any(not 0 <= number < len(files) for layout in layouts for number in layout.files):
        raise ValueError(f"its {INDEX_FILE} has a layout in files that it does not name")
    return Index(
        [file["name"] for file in files],
        {number: ShardFile(file["bytes"], file["header"]) for number, file in enumerate(files)},
        {name: layouts[row["layout"]] for name, row in tensors.items()},
        {name: DTYPES[row["dtype"]] for name, row in tensors.items()},
    )


def _layout(row: Mapping[str, Any]) -> FileLayout:
    parts = tuple(tuple(tuple((first, last) for first, last in part) for part in parts) for parts in row["parts"])
    return FileLayout(tuple(row["shape"]), parts, tuple(row["files"]))


# ---- the parts of stacks


KEY = "state."
"""The prefix of the names that a checkpoint has for the state of steps. It is stored as ranks hold it, stacks too."""


def in_parts(key: str) -> bool:
    """Return whether files have a tensor's parts in place of it; ``key`` is its name in a checkpoint."""
    return is_stacked(key) and not key.startswith(KEY)


def part_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of tensors as files have them: of a stack those of its parts."""
    return {
        name: shape[1:] if is_stacked(key) else shape
        for key, shape in shapes.items()
        for name in (part_names(key, shape[0]) if is_stacked(key) else (key,))
    }


def numbered(runs: Sequence[EntryRun]) -> Iterator[tuple[int, int]]:
    """Yield the number of each part of a stack that a rank has, with its place in the rank's piece."""
    return ((first + step, at + step) for at, first, size in runs for step in range(size))


def piece_parts(key: str, piece: Piece) -> Iterator[tuple[str, Piece]]:
    """Yield the pieces that a file has of a rank's piece of a tensor, by their names there."""
    if not in_parts(key):
        yield key, piece
        return
    for number, at in numbered(piece.runs[0]):
        yield part_name(key, number), Piece(piece.tensor[at], piece.runs[1:])


def layout_parts(key: str, layout: FileLayout) -> Iterator[tuple[str, FileLayout]]:
    """Yield the layouts of the tensors that files have of a tensor, by their names there."""
    if not in_parts(key):
        yield key, layout
        return
    inner = len(layout.files) // len(layout.parts[0])
    for place, ranges in enumerate(layout.parts[0]):
        files = layout.files[place * inner : (place + 1) * inner]
        for number in (number for first, last in ranges for number in range(first, last)):
            yield part_name(key, number), replace(layout, shape=layout.shape[1:], parts=layout.parts[1:], files=files)
