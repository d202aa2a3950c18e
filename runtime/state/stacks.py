"""Stacked tensors in files: a file has their parts, each under the model's own name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...compiler.layout.mesh import Shape
from ...compiler.padding.tensors import EntryRun
from ...compiler.program.stacked import is_stacked, part_name, part_names
from .layouts import FileLayout
from .shards import Piece

KEY = "state."
"""The beginning of the names that a checkpoint has for the state of steps. It lies as ranks have it, stacks too."""


def in_parts(key: str) -> bool:
    """Return whether files have the parts of a tensor in place of it, by its name in a checkpoint."""
    return is_stacked(key) and not key.startswith(KEY)


def part_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of tensors in files."""
    return {
        name: shape[1:] if is_stacked(key) else shape
        for key, shape in shapes.items()
        for name in (part_names(key, shape[0]) if is_stacked(key) else (key,))
    }


def numbered(runs: Sequence[EntryRun]) -> Iterator[tuple[int, int]]:
    """Yield the number of each part that a rank has, with its place in the rank's piece."""
    return ((first + step, at + step) for at, first, size in runs for step in range(size))


def piece_parts(key: str, piece: Piece) -> Iterator[tuple[str, Piece]]:
    """Yield what a file has of a rank's piece of a tensor, by the names there."""
    if not in_parts(key):
        yield key, piece
        return
    for number, at in numbered(piece.runs[0]):
        yield part_name(key, number), Piece(piece.tensor[at], piece.runs[1:])


def layout_parts(key: str, layout: FileLayout) -> Iterator[tuple[str, FileLayout]]:
    """Yield the layouts of what files have of a tensor, by the names there."""
    if not in_parts(key):
        yield key, layout
        return
    inner = len(layout.files) // len(layout.parts[0])
    for place, ranges in enumerate(layout.parts[0]):
        files = layout.files[place * inner : (place + 1) * inner]
        for number in (number for first, last in ranges for number in range(first, last)):
            yield part_name(key, number), replace(layout, shape=layout.shape[1:], parts=layout.parts[1:], files=files)
