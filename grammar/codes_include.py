"""Codes of messages about files that a plan includes (P002x)."""

from __future__ import annotations

from .code import Code, shown

NO_FILE = Code(
    name="P0020",
    title="an included file cannot be read",
    why="`include` takes a file, relative to the one that includes it, or `parc:` and the name of a family that parc"
    " ships.",
    example='mesh tp=2\ninclude "parc:lama" (tp=2)',
    instead='mesh tp=2\ninclude "parc:llama" (tp=2)',
)
INCLUDE_CYCLE = shown(
    name="P0021",
    title="a file includes itself",
    why="an included file stands for its lines, so a file that includes itself, by whatever way, would have no end.",
    example='parc check a.parc   # include "b.parc"; and b.parc: include "a.parc"',
    instead="parc check a.parc   # what both need in a third file, c.parc",
)
MESH_DIFFERS = Code(
    name="P0022",
    title="two files give an axis different sizes",
    why="an included file names the axes that it needs with their sizes, and may add axes; an axis has one size.",
    example='mesh tp=2\ninclude "parc:llama" (tp=4)',
    instead='mesh tp=2\ninclude "parc:llama" (tp=2)',
)
