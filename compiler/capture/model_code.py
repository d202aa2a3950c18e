"""Hashes of a model's code: of the definitions in the plan's folder that its callables reach, without comments."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...grammar.bounded import real_path
from .callables import CallableError, existing, load_callable, read_python
from .python_code import ReachedCode, read_code

_PACKAGE = __name__.partition(".")[0]

Hashes = Mapping[str, tuple[str, str]]
"""The hash of the code and the hash of the line numbers, by a file's path from the plan's folder or a module's name."""


def file_hashes(targets: Sequence[str], folder: Path) -> Hashes:
    """Return the hashes of the code that callables reach in the files of the plan's folder. A callable in another
    folder has none. Nothing is imported.

    Raises:
        CallableError: there is no such file.
    """
    reached = _reached(targets, real_path(folder))
    hashes = {os.path.relpath(path, real_path(folder)): code.hashes(kept) for path, (code, kept) in reached.items()
             if kept or code.as_text}  # fmt: skip
    return dict(sorted(hashes.items()))


def target_hashes(targets: Sequence[str], folder: Path) -> Hashes:
    """Return ``file_hashes`` and, if the first callable is defined in another file, the hashes of that file by its
    module's name. The module of the callable is imported.

    Raises:
        CallableError: the callable cannot be had.
    """
    hashes, function = file_hashes(targets, folder), inspect.unwrap(load_callable(targets[0], folder))
    try:
        path = Path(inspect.getsourcefile(function) or "")
    except TypeError:
        return hashes
    if not path.is_file() or real_path(path) in _reached(targets, real_path(folder)):
        return hashes
    code = read_code(path, read_python(path))
    return {**hashes, function.__module__: code.hashes(set(range(len(code.statements))))}


def changed_files(targets: Sequence[str], folder: Path, built: Mapping[str, str]) -> list[str]:
    """Return the files whose code differs from that of a build. Nothing is imported if a file of the plan's folder
    differs.

    Raises:
        CallableError: the callable cannot be had.
    """
    hashes = file_hashes(targets, folder)
    if {name: code for name, (code, _) in hashes.items()} == {n: h for n, h in built.items() if n.endswith(".py")}:
        hashes = target_hashes(targets, folder)
    codes = {name: code for name, (code, _) in hashes.items()}
    return sorted(name for name in codes.keys() | built.keys() if codes.get(name) != built.get(name))


def moved_files(targets: Sequence[str], folder: Path, built: Mapping[str, str], lines: Mapping[str, str]) -> list[str]:
    """Return the files of the plan's folder with the same code as in a build, on other lines. Nothing is imported."""
    try:
        hashes = file_hashes(targets, folder)
    except (CallableError, OSError):  # a build may be read where its model is not
        return []
    return [name for name, (code, at) in hashes.items() if built.get(name) == code and lines.get(name) != at]


def _reached(targets: Sequence[str], folder: Path) -> dict[Path, tuple[ReachedCode, set[int]]]:
    search = _Search(folder)
    for target in targets:
        place, _, name = target.rpartition(":")
        first = [existing(folder, place)] if place.endswith(".py") else _files_of(place.split("."), folder)
        files = [search.run(file) for file in first]
        for file in files[-1:]:
            search.ask_for(file, name.partition(".")[0])
    return search.finish()


_EFFECTS, _EVERY = "", "*"
"""Words in place of a name: the statement runs for its other effects; every name of it is asked for."""


class _Search:
    """A search for the statements, by file, that the names asked for depend on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reached: dict[Path, tuple[ReachedCode, set[int]]] = {}
        self._todo: list[tuple[Path, int, str]] = []

    def run(self, path: Path) -> Path:
        """Ask for the effects of an import of the file."""
        if path not in self._reached:
            code = read_code(path, read_python(path))
            self._reached[path] = code, set()
            for at, statement in enumerate(code.statements):
                if code.whole or not statement.inert:
                    self._todo.append((path, at, _EVERY if code.whole else _EFFECTS))
        return path

    def ask_for(self, path: Path, name: str) -> None:
        """Ask for a name of the file; for all of the file where its text does not show the name."""
        code = self._reached[self.run(path)][0]
        statements = list(code.binding(name))
        self._todo += [(path, at, name) for at in statements]
        if not statements:
            self._todo += [(path, at, _EVERY) for at in range(len(code.statements))]

    def finish(self) -> dict[Path, tuple[ReachedCode, set[int]]]:
        """Follow names until nothing new is reached. Return the files, each with the numbers of its statements."""
        seen = set[tuple[Path, int, str]]()
        while self._todo:
            asked = path, at, name = self._todo.pop()
            if asked in seen:
                continue
            seen.add(asked)
            code, kept = self._reached[path]
            kept.add(at)
            statement = code.statements[at]
            self._todo += [(path, other, read) for read in statement.reads for other in code.binding(read)]
            for node in statement.imports:
                self._follow(path, node, name if node is statement.node else _EVERY)
        return self._reached

    def _follow(self, path: Path, node: ast.Import | ast.ImportFrom, name: str) -> None:
        """Run the imports among the folder's files, and ask there for the imported names."""
        for alias in node.names:
            asked = name in (_EVERY, alias.asname or alias.name.partition(".")[0])
            if isinstance(node, ast.Import):
                files = [self.run(file) for file in self._files(alias.name.split("."), self._folder)]
                for file in files if asked else ():
                    self.ask_for(file, _EVERY)
                continue
            root = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else self._folder
            parts = node.module.split(".") if node.module else []
            package = [self.run(file) for file in self._files(parts or ["__init__"], root)]
            inner = [self.run(file) for file in self._files([*parts, alias.name], root) if file not in package]
            if asked and inner:
                self.ask_for(inner[-1], _EVERY)
            if asked and package and not (inner and not any(self._reached[package[-1]][0].binding(alias.name))):
                self.ask_for(package[-1], alias.name)

    def _files(self, parts: list[str], root: Path) -> list[Path]:
        return [file for file in _files_of(parts, root) if file.is_relative_to(self._folder)]


def _files_of(parts: list[str], root: Path) -> Iterator[Path]:
    """Return the files that an import of a dotted name reads: each package on the way, then the module."""
    if parts[0] == _PACKAGE:
        return
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        yield from (file for file in (place / "__init__.py", place.with_name(f"{place.name}.py")) if file.is_file())
