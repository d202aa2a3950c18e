"""The index of a checkpoint: its files, and which of them holds which part of which tensor.

``index.json`` has three tables. ``files``: name, size and hash of the header of each. ``layouts``: the shape of a
tensor, the parts of each of its dims as ranges of entries, and the number of the file of each rectangle, row by row.
``tensors``: dtype and layout of each tensor by name. Tensors that lie alike share a layout, so the index stays small.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...compiler.build.json_schema import Each, FieldRow, Form, hold_form
from ...compiler.layout.placement import DTYPES
from ...compiler.padding.tensors import EntryRanges
from ...grammar.bounded import MOST_JSON, parse_json, read_bounded
from .layouts import FileLayout
from .shards import ShardFile

TENSORS, FACTS, INDEX_FILE = "state.safetensors", "state.json", "index.json"
_FORM: Form = {
    "files": [{"name": str, "bytes": int, "header": str}],
    "layouts": [{"shape": [int], "parts": [[[FieldRow(int, 2)]]], "files": [int]}],
    "tensors": Each({"dtype": str, "layout": int}),
}
_FILE = re.compile(r"state(-\d{5,9})?\.safetensors")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def shard_name(rank: int, world: int) -> str:
    """Return the name of the file that a rank writes. That of one rank alone holds whole tensors."""
    return TENSORS if world == 1 else f"state-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Index:
    """Files by their numbers, what was written of them, and layouts and dtypes of tensors by name."""

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
        """Return the tensors that the files do not make up, and the files that are not there or of another size."""
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
    """Write the index and the facts of a checkpoint, whose files are named by the numbers of ``index.shards``.

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
    facts = {**facts, "index": hashlib.sha256(text).hexdigest()}
    (folder / FACTS).write_text(json.dumps(facts, sort_keys=True), encoding="utf-8")


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
        if not _FILE.fullmatch(file["name"]):
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
