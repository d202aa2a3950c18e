"""The files of a plan's folder that a module of it imports, found in their texts: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_OWN = __name__.partition(".")[0]


def local_files(place: str, folder: Path) -> list[Path]:
    """The file of a module (`package.module`, `./file.py`), and every file below ``folder`` that it imports, and those
    import, by ``import`` statements; empty where the module is not of the folder. parc's own are left out."""
    folder = folder.resolve()
    first = (folder / place).resolve()
    todo = [first] if place.endswith(".py") else list(_files_of(place.split("."), folder))
    found: dict[Path, None] = {}
    while todo:
        path = todo.pop()
        if path not in found:
            found[path] = None
            todo += [file for file in _imported(path, folder) if file.is_relative_to(folder)]
    return sorted(found)


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name.split("."), folder)
        elif isinstance(node, ast.ImportFrom):
            root = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files_of([*parts, alias.name], root)


def _files_of(parts: list[str], root: Path) -> Iterator[Path]:
    """The files that an import of a dotted name reads: of each package on the way, then of the module."""
    if parts[0] == _OWN:
        return
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        yield from (file for file in (place / "__init__.py", place.with_name(f"{place.name}.py")) if file.is_file())
