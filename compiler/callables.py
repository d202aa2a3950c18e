"""Callables that plans name: ``"package.module:name"`` or ``"./file.py:name"`` beside the plan."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CallableError(Exception):
    """A callable that cannot be had; a failure inside the user's module is chained."""


def load_callable(target: str, folder: Path) -> Callable[..., Any]:
    """The callable of a name, with ``folder`` importable.

    Raises:
        CallableError: no such file, module or name; or the module fails while it is imported (chained).
    """
    place, _, name = target.rpartition(":")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = _load_file(folder / place) if place.endswith(".py") else _import(place)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise CallableError(f"`{place}` has no `{name}`")
        found = getattr(found, part)
    if not callable(found):
        raise CallableError(f"`{target}` is not callable")
    return found  # type: ignore[no-any-return]


def _import(place: str) -> Any:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise CallableError(f"there is no module `{place}`") from None
        raise CallableError(f"importing `{place}` failed") from error
    except Exception as error:
        raise CallableError(f"importing `{place}` failed") from error


def _load_file(path: Path) -> Any:
    """A file as a module of its own; loaded once a process, so that its classes are the same everywhere."""
    path = path.resolve()
    if not path.is_file():
        raise CallableError(f"there is no file `{path.name}` beside the plan")
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


def file_hash(target: str, folder: Path) -> str:
    """A hash of the file that a callable's name names, which is not imported; empty for one of a module.

    Raises:
        CallableError: there is no such file.
    """
    place = target.rpartition(":")[0]
    if not place.endswith(".py"):
        return ""
    path = folder / place
    if not path.is_file():
        raise CallableError(f"there is no file `{path.name}` beside the plan")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def target_hash(target: str, folder: Path) -> str:
    """A hash of the file that is named and, where the callable is written in another, also of that; it is imported.

    Raises:
        CallableError: the callable cannot be had.
    """
    named, written = file_hash(target, folder), source_hash(load_callable(target, folder))
    return "+".join(dict.fromkeys(part for part in (named, written) if part))


def source_hash(function: Callable[..., Any]) -> str:
    """A hash of the file in which a callable is written; empty where it has none."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        return ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else ""
