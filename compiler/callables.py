"""Callables that plans name, ``"package.module:name"`` or ``"./file.py:name"``, and the plan's files that they need."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..grammar.nearest import did_you_mean, listed, nearest


class CallableError(Exception):
    """A callable that cannot be had, or not be called so; a failure inside the user's module is chained.

    ``help`` is a way out, where one is known; ``argument`` the name that the callable does not take.
    """

    def __init__(self, message: str, help: str = "", argument: str = "") -> None:
        super().__init__(message)
        self.help, self.argument = help, argument


def load_callable(target: str, folder: Path) -> Callable[..., Any]:
    """The callable of a name, with ``folder`` importable.

    Raises:
        CallableError: no such file, module or name; or the module fails while it is imported (chained).
    """
    place, _, name = target.rpartition(":")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = _load_file(folder / place) if place.endswith(".py") else _import(place, folder)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise _missing(target, part, dir(found))
        found = getattr(found, part)
    if not callable(found):
        raise CallableError(f"`{target}` is not callable")
    return found  # type: ignore[no-any-return]


def look_up(target: str, folder: Path) -> None:
    """Hold the name of a callable of a ``./file.py`` against the file's text; nothing is imported, and what only an
    import can tell is left to it.

    Raises:
        CallableError: there is no such file, or it has no such name.
    """
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return
    path, first = _existing((folder / place).resolve()), name.partition(".")[0]
    if (tree := _parsed(path)) is not None and not _OPEN.search(path.read_bytes()):
        names = set(_bound(tree))
        if first not in names:
            raise _missing(target, first, names)


def _missing(target: str, part: str, names: Iterable[str]) -> CallableError:
    place, _, name = target.rpartition(":")
    meant = did_you_mean(part, (known for known in names if not known.startswith("_")))
    return CallableError(f"`{place}` has no `{name}`", meant)


_OPEN = re.compile(rb"import\s*\*|\b(globals|vars|exec)\(|\bsys\.modules\b|\bglobal\s|^def __getattr__\b", re.MULTILINE)
"""In a module's text, what may make names that its statements do not show."""


def _bound(tree: ast.AST) -> Iterator[str]:
    """The names that a module's statements give something to, inside functions and classes aside."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        yield from _bound(node)


def check_arguments(function: Callable[..., Any], target: str, named: Iterable[str], positional: int = 0) -> None:
    """Hold a callable's signature, where it has one, against so many arguments and these names.

    Raises:
        CallableError: it takes others.
    """
    try:  # what a decorator wraps may take other arguments than the wrapper
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return
    kinds = {parameter.kind for parameter in parameters}
    in_order = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional > len(in_order) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        count = f"{len(in_order)} argument{'s' * (len(in_order) != 1)}"
        raise CallableError(f"`{target}` takes {count} by position, and is given {positional}")
    free = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and p.name not in in_order[:positional]]  # fmt: skip
    named = list(named)
    for name in named:
        if name not in free and inspect.Parameter.VAR_KEYWORD not in kinds:
            takes = f"it takes {listed(free)}" if free else "it takes none by name"
            raise CallableError(f"`{target}` takes no `{name}`", did_you_mean(name, free, takes), name)
    filled = {*in_order[:positional], *named}
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in filled
               and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    if missing:
        raise CallableError(f"`{target}` needs {listed(missing)}", "give each as `name=value`")


def _import(place: str, folder: Path) -> Any:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise CallableError(f"there is no module `{place}`", _module_meant(error.name, folder)) from None
        raise CallableError(f"importing `{place}` failed") from error
    except Exception as error:
        raise CallableError(f"importing `{place}` failed") from error


def _module_meant(name: str, folder: Path) -> str:
    """The modules near one that is not there: of its package; else of the plan's folder, then of all that are there."""
    package, dot, last = name.rpartition(".")
    places = [getattr(sys.modules[package], "__path__", [])] if package in sys.modules else [[str(folder)], None]
    near = (nearest(last, (module.name for module in pkgutil.iter_modules(place))) for place in places)
    found = [f"{package}{dot}{other}" for other in next(filter(None, near), ())]
    return f"did you mean {listed(found, 'or')}?" if found else ""


def _load_file(path: Path) -> Any:
    """A file as a module of its own; loaded once a process, so that its classes are the same everywhere."""
    path = _existing(path.resolve())
    label = f"parc_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if label in sys.modules:
        return sys.modules[label]
    spec = importlib.util.spec_from_file_location(label, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[label]
        raise CallableError(f"importing `{path.name}` failed") from error
    return module


def file_hashes(target: str, folder: Path) -> dict[str, str]:
    """Hashes of the file in which a callable's name says that it is and of the files of the plan's folder that this
    imports, by their paths from there; none is imported. Empty for a callable of a module that is not of the folder.

    Raises:
        CallableError: there is no such file.
    """
    place = target.rpartition(":")[0]
    if place.endswith(".py"):
        _existing(folder / place)
    return {os.path.relpath(file, folder.resolve()): _hash(file) for file in local_files(place, folder)}


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _existing(path: Path) -> Path:
    if not path.is_file():
        meant = did_you_mean(path.name, (other.name for other in path.parent.glob("*.py")))
        raise CallableError(f"there is no file `{path.name}` beside the plan", meant)
    return path


def target_hashes(target: str, folder: Path) -> dict[str, str]:
    """``file_hashes`` and, where the callable is written in yet another file, a hash of that by its module's name; it
    is imported.

    Raises:
        CallableError: the callable cannot be had.
    """
    named, function = file_hashes(target, folder), inspect.unwrap(load_callable(target, folder))
    try:
        path = Path(inspect.getsourcefile(function) or "")
    except TypeError:
        return named
    known = not path.is_file() or path.resolve() in local_files(target.rpartition(":")[0], folder)
    return named if known else {**named, function.__module__: _hash(path)}


def changed_files(target: str, folder: Path, built: Mapping[str, str]) -> list[str]:
    """Which of a callable's ``target_hashes`` are not those of a build; where one of the plan's folder is not, none is
    imported.

    Raises:
        CallableError: the callable cannot be had.
    """
    found = file_hashes(target, folder)
    if found == {name: hash_ for name, hash_ in built.items() if name.endswith(".py")}:
        found = target_hashes(target, folder)
    return sorted(name for name in found.keys() | built.keys() if found.get(name) != built.get(name))


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
    tree = _parsed(path)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name.split("."), folder)
        elif isinstance(node, ast.ImportFrom):
            root = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files_of([*parts, alias.name], root)


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it says so
        return None


def _files_of(parts: list[str], root: Path) -> Iterator[Path]:
    """The files that an import of a dotted name reads: of each package on the way, then of the module."""
    if parts[0] == _OWN:
        return
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        yield from (file for file in (place / "__init__.py", place.with_name(f"{place.name}.py")) if file.is_file())
