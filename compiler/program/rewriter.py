"""The rewriter of one function: a pass inserts, replaces, drops and renames lines, under fresh names.

A function never changes, so its def-use maps (makers, readers, uses) stay true while a pass runs: the rewriter notes
the changes, and makes a new function of them at the end. The architecture notes show a pass.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..layout.collectives import MESSAGE, WAIT
from ..layout.mesh import Mesh
from ..layout.placement import TensorType
from .binding import Binding
from .program import Function, Line, Origin, Ref, Value

ORIGIN = Origin()
"""The origin of lines that stand for no line of the model."""


@dataclass(slots=True)
class FreshNames:
    """The names of one function's values: the operator's own name, numbered from its second use on."""

    taken: dict[str, int] = field(default_factory=dict)

    @classmethod
    def beside(cls, function: Function) -> FreshNames:
        """Return fresh names that no value of a function has."""
        return cls(dict.fromkeys(function.values(), 1))

    def fresh(self, base: str) -> str:
        """Return a name that is not taken yet, and take it."""
        base = f"{base}_" if keyword.iskeyword(base) or base in ("inf", "nan") else base
        while True:
            count = self.taken.get(base, 0)
            self.taken[base] = count + 1
            name = base if count == 0 else f"{base}_{count}"
            if count == 0 or name not in self.taken:
                self.taken.setdefault(name, 1)
                return name


class LineWriter:
    """A function under construction, line by line."""

    def __init__(self, mesh: Mesh, names: FreshNames | None = None) -> None:
        self.mesh, self.names = mesh, names or FreshNames()
        self.parameters: dict[str, Value] = {}
        """The parameters by name. One may be replaced under its name."""
        self.returns: dict[Binding, str] = {}
        self.lines: list[Line] = []

    def add(self, line: Line) -> None:
        """Add a line."""
        self.lines.append(line)

    def emit(
        self, op: str, args: tuple[object, ...], type_: TensorType, origin: Origin = ORIGIN, name: str = "",
        **options: object,
    ) -> Value:  # fmt: skip
        """Add a line with one result, which is named after its operator or ``name``, and return that result."""
        value = Value(self.names.fresh(name or op.split(".")[1].strip("_")), type_)
        self.add(Line((value,), op, args, tuple(options.items()), origin))
        return value

    def take(self, base: str, type_: TensorType, binding: Binding | None) -> Value:
        """Add a parameter and return it."""
        value = Value(self.names.fresh(base), type_, binding)
        self.parameters[value.name] = value
        return value

    def copy(self, line: Line, names: dict[str, str], title: str = "{}") -> Line:
        """Add a copy of a line that reads other values where ``names`` has them, and return it. Its results have fresh
        names in the form of ``title``, such as ``{}_copy``, which are put into ``names`` for the lines that follow."""
        fresh = (value and replace(value, name=self.names.fresh(title.format(value.name))) for value in line.results)
        copied = replace(line, results=tuple(fresh)).renamed(names)
        names.update((value.name, new.name) for value, new in zip(line.made, copied.made, strict=True))
        self.add(copied)
        return copied

    def function(self, name: str) -> Function:
        """Return the lines, parameters and returns so far as a function."""
        return Function(name, tuple(self.parameters.values()), tuple(self.lines), tuple(self.returns.items()))


class Rewriter(LineWriter):
    """The changes to one function. New lines go to its end, or where ``insert_before`` and ``insert_after`` say; they
    read exactly what they name, since ``rename`` changes only the function's own lines. ``parameters`` and ``returns``
    are dicts for a pass to change."""

    def __init__(self, mesh: Mesh, function: Function) -> None:
        super().__init__(mesh, FreshNames.beside(function))
        self.source = function
        self.parameters.update((value.name, value) for value in function.parameters)
        self.returns.update(function.returns)
        self._replaced: dict[int, tuple[Line, ...]] = {}
        self._renamed: dict[str, str] = {}
        self._inserted: dict[int, list[Line]] = {}
        self.insert_at(len(function.lines))

    def insert_at(self, index: int) -> None:
        """Insert new lines before the function's own line of this index, behind those that were inserted there."""
        self.lines = self._inserted.setdefault(index, [])

    def insert_before(self, line: Line | None) -> None:
        """Insert new lines before a line: before None, at the end."""
        self.insert_at(len(self.source.lines) if line is None else self.source.at(line))

    def insert_after(self, line: Line | None) -> None:
        """Insert new lines after a line: after None, at the beginning, where parameters have their values."""
        self.insert_at(0 if line is None else self.source.at(line) + 1)

    def replace(self, line: Line, *others: Line) -> None:
        """Put other lines, or none, in the place of a line."""
        self._replaced[self.source.at(line)] = others

    def drop(self, lines: Iterable[Line]) -> None:
        """Leave lines out."""
        for line in lines:
            self.replace(line)

    def rename(self, name: str, new: str) -> None:
        """Let the function's own lines and its returns read another value in place of one."""
        self._renamed[name] = new

    def function(self, name: str = "") -> Function:
        """Return the function with all changes, under its own name or another."""
        lines, source = list[Line](), self.source.lines
        for at in range(len(source) + 1):
            lines += self._inserted.get(at, ())
            for line in self._replaced.get(at, source[at : at + 1]):
                lines.append(line if self._renamed.keys().isdisjoint(line.uses) else line.renamed(self._renamed))
        returns = tuple((key, self._renamed.get(value, value)) for key, value in self.returns.items())
        return Function(name or self.source.name, tuple(self.parameters.values()), tuple(lines), returns)


def started(line: Line, names: FreshNames, message: int | None = None) -> tuple[Line, Line]:
    """Return a collective as two lines, as an asynchronous one: the start of a message, with the message's number if it
    is known, and the wait for its result."""
    coming = replace(line.made[0], name=names.fresh(f"{line.made[0].name}_on_its_way"))
    kwargs = line.kwargs if message is None else ((MESSAGE, message),)
    wait = Line(line.results, WAIT, (Ref(coming.name),), (), line.origin)
    return replace(line, results=(coming,), kwargs=kwargs), wait
