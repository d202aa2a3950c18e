"""Places in Python that outlive a model: names of modules, classes and objects, cells of closures, caches of functions.
What a trace or a run leaves there is undone where it holds a tensor: the next one has tensors of another kind, real or
wider ones, and makes such a table again. Other values stay, as code may rely on what it does once."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, final

from torch import Tensor

_MOST_OBJECTS = 10_000
"""The objects among which a tensor is looked for."""
_WITHOUT = (type, types.ModuleType, types.FunctionType, str, bytes, int, float, type(None))
"""The types of values without others in them."""


class Place(Protocol):
    """A place, with what was there when this was made."""

    def restore(self) -> None:
        """Undo what holds a tensor now."""


@final
class Names:
    """The names of a module, a class, an object or a function; those of a module have no ``owner``."""

    def __init__(self, names: Mapping[str, Any], owner: object = None) -> None:
        self._names, self._owner, self._before = names, owner, dict(names)

    def restore(self) -> None:
        """Assign the values of before."""
        missing = object()
        for name, value in [*self._names.items()]:
            before = self._before.get(name, missing)
            if value is before or not holds_tensor(value):
                continue
            if isinstance(self._owner, type):
                delattr(self._owner, name) if before is missing else setattr(self._owner, name, before)
            elif isinstance(self._names, dict):
                self._names.update({name: before})
                if before is missing:
                    del self._names[name]


@final
class ClosureCell:
    """A variable of a closure."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell, self._before = cell, _contents(cell)

    def restore(self) -> None:
        """Assign the value of before."""
        now = _contents(self._cell)
        if [*map(id, now)] != [*map(id, self._before)] and holds_tensor(now):
            del self._cell.cell_contents
            for value in self._before:
                self._cell.cell_contents = value


def _contents(cell: types.CellType) -> list[Any]:
    """Return the value of a cell, or nothing for an empty one."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


@final
class Cache:
    """The results that `functools.cache` keeps for a function."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def restore(self) -> None:
        """Forget them all."""
        if any(map(holds_tensor, gc.get_referents(self._function))):
            self._function.cache_clear()


def holds_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, or has one in it."""
    seen, pending = set[int](), deque([value])
    while pending and len(seen) < _MOST_OBJECTS:
        inner = pending.popleft()
        if isinstance(inner, Tensor):
            return True
        if id(inner) in seen or isinstance(inner, _WITHOUT):
            continue
        seen.add(id(inner))
        if isinstance(inner, dict):
            pending.extend([*inner.values()])
        elif isinstance(inner, (list, tuple, set, frozenset, deque)):
            pending.extend([*inner])
        else:
            pending.extend(getattr(inner, "__dict__", {}).values())
    return False
