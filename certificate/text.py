"""The strict reader of programs: mesh, functions, lines, types. What it does not know it refuses, with the line.

    out = parc.all_reduce(x, 'tp')  # f32[8/dp, 64] | blocks.*.mlp gpt.py:40 plan:20

is read as one ``Line``: results with their types, operator, arguments, and where the line comes from. Nothing is
executed or looked up, and every text has limits: one of a hundred megabytes is refused before it is split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

MOST_BYTES = 64 << 20
"""The most bytes of one text."""
MOST_CHARACTERS = 1 << 16
"""The most characters of one line: a stack of all squared norms of a large model has some thousands of operands."""
MOST_DEPTH = 4
"""The deepest nesting of lists in arguments."""


class Refused(Exception):
    """The error of a text, an operator or a meaning that the checker does not accept, in words, with its place."""


class Malformed(Refused):
    """The error of a text that is wrong in all normal forms: of a name, a message, a shape, or a kind of numbers."""


def within(number: int, count: int) -> int:
    """Return the number of a dim or an entry among so many, which a line may count from the end, as counted from 0.

    Raises:
        Refused: there is none of that number.
    """
    if not -count <= number < count:
        raise Refused(f"there is no dim or entry {number} among {count}")
    return number % count


class Name(NamedTuple):
    """A value that a line reads."""

    name: str


class Local(NamedTuple):
    """A size that axes split: ``128/tp`` among the arguments of an operator."""

    size: int
    axes: tuple[str, ...]


class Word(NamedTuple):
    """A constant such as ``torch.float32`` among the arguments of an operator."""

    text: str


class Mesh(NamedTuple):
    """The axes of the ranks with their sizes, and the names of several axes together, major first."""

    sizes: tuple[tuple[str, int], ...]
    names: tuple[tuple[str, tuple[str, ...]], ...]

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the axes that a name means; those of ``~cp`` are named so too.

        Raises:
            ValueError: it is no name.
        """
        axis = name.removeprefix("~")
        known = {**{axis: (axis,) for axis, _ in self.sizes}, **dict(self.names)}
        if axis not in known:
            raise ValueError(f"`{axis}` is no axis of the mesh")
        return tuple("~" * name.startswith("~") + part for part in known[axis])


def read_mesh(text: str) -> Mesh:
    """Read ``dp=2, tp=2*2, ep=dp*tp_0``: axes, one that consists of two, and another name for some.

    Raises:
        ValueError: an axis is named twice, or a name is made of what is no axis.
    """
    sizes: dict[str, int] = {}
    names: dict[str, tuple[str, ...]] = {}
    for word in filter(None, text.split(", ")):
        name, _, what = word.partition("=")
        factors = what.split("*")
        if what[0].isdigit():
            parts = tuple(name if len(factors) == 1 else f"{name}_{at}" for at in range(len(factors)))
            if not sizes.keys().isdisjoint(parts):
                raise ValueError(f"names the axis `{name}` twice")
            sizes.update(zip(parts, map(int, factors), strict=True))
        else:
            parts = tuple(factors)
            if name in sizes or name in names or not sizes.keys() >= set(parts):
                raise ValueError(f"names the axis `{name}` twice, or as what it is not")
        if parts != (name,):
            names[name] = parts
    return Mesh(tuple(sizes.items()), tuple(names.items()))


class Atom(NamedTuple):
    """A factor of a dim, major to minor: entries that the rank keeps (``axis`` ""), or that an axis splits."""

    size: int
    axis: str


Dim = tuple[tuple[Atom, ...], ...]
"""A dim: its stretches, each the factors of its size. Most dims are one stretch."""


class Type(NamedTuple):
    """The type of a value: ``f32[8/dp, (3 64/tp)] +cp``."""

    dtype: str
    dims: tuple[Dim, ...]
    partial: tuple[str, ...]
    packed: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the whole value."""
        return tuple(sum(_product(atom.size for atom in stretch) for stretch in dim) for dim in self.dims)

    @property
    def local(self) -> tuple[int, ...]:
        """The sizes of one rank's piece."""
        return tuple(sum(_product(a.size for a in stretch if not a.axis) for stretch in dim) for dim in self.dims)

    @property
    def axes(self) -> frozenset[str]:
        """The axes on which pieces may differ."""
        split = (atom.axis.removeprefix("~") for dim in self.dims for stretch in dim for atom in stretch if atom.axis)
        return frozenset((*split, *self.partial))


def _product(sizes: Iterator[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


NO_TYPE = Type("", (), ())
"""The type of a result that a line does not have."""


class Parameter(NamedTuple):
    """A parameter of a function: its name, type, and what it is bound to (``parameter blocks.0.w``)."""

    name: str
    type: Type
    binding: str
    row: int


class Line(NamedTuple):
    """A line: its results' names and types, the operator or the function that it calls, and its arguments."""

    results: tuple[str, ...]
    types: tuple[Type, ...]
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    origin: str
    row: int


@dataclass(frozen=True)
class Function:
    """A function of a program: parameters, lines, and what it returns under which key."""

    name: str
    parameters: tuple[Parameter, ...]
    lines: tuple[Line, ...]
    returns: tuple[tuple[str, str], ...]
    row: int

    def type_of(self, name: str) -> Type:
        """Return the type of a value of the function."""
        types = {parameter.name: parameter.type for parameter in self.parameters}
        for line in self.lines:
            types.update(zip(line.results, line.types, strict=True))
        return types[name]


@dataclass(frozen=True)
class Program:
    """A program: its role, action and mesh, and its functions by name."""

    file: str
    role: str
    action: str
    mesh: Mesh
    functions: Mapping[str, Function] = field(repr=False)

    @property
    def main(self) -> Function:
        """The main function: the last one."""
        return list(self.functions.values())[-1]


_HEAD = re.compile(r'"""parc program: role (\w+), action (\w+)"""')
_MESH = re.compile(r"mesh\(((?:\w+=(?:[1-9]\d*(?:\*[1-9]\d*)*|[a-z_]\w*(?:\*\w+)*)(?:, )?)*)\)")
_OPERATORS = re.compile(r'operators\("[\w.:]+"(?:, "[\w.:]+")*\)')
_PARAMETER = re.compile(r'    (\w+): "([^"]+)",(?:  # (.+))?')
_LINE = re.compile(r"    (\w+(?:, \w+)*) = ([\w.]+)\((.*)\)  # (.+?) \| (.*)")
_RETURN = re.compile(r'        "([^"\\]+)": (\w+),')


def read_program(name: str, text: str) -> Program:
    """Read a program's text.

    Raises:
        Refused: the text is larger than a program, or holds a line that no program has.
    """
    if len(text) > MOST_BYTES:
        raise Refused(f"{name}: has {len(text):,} characters, and a program at most {MOST_BYTES:,}")
    if not text.isascii():
        raise Refused(f"{name}: holds a character that no program has")
    return _Reader(name, text.split("\n")).program()


class _Reader:
    """The rows of one text, and the next of them."""

    def __init__(self, name: str, rows: list[str]) -> None:
        self.name, self.rows, self.at = name, rows, 0
        self.mesh = Mesh((), ())

    def refuse(self, what: str) -> NoReturn:
        raise Refused(f"{self.name}:{self.at}: {what}")

    def next(self) -> str:
        if self.at >= len(self.rows):
            self.refuse("ends within a function")
        row = self.rows[self.at]
        self.at += 1
        if len(row) > MOST_CHARACTERS:
            self.refuse(f"has {len(row):,} characters")
        return row

    def expect(self, text: str) -> None:
        if (row := self.next()) != text:
            self.refuse(f"stands `{row[:80]}` where a program has `{text}`")

    def program(self) -> Program:
        """Read the head and all functions."""
        head = _HEAD.fullmatch(self.next())
        if head is None:
            self.refuse("does not begin as a program does")
        self.expect("")
        mesh = _MESH.fullmatch(self.next())
        if mesh is None:
            self.refuse("names no mesh")
        try:
            self.mesh = read_mesh(mesh[1])
        except ValueError as error:
            self.refuse(str(error))
        if self.rows[self.at : self.at + 1] != [""] and not _OPERATORS.fullmatch(self.next()):
            self.refuse("names no operators")
        functions: dict[str, Function] = {}
        while self.at < len(self.rows) - 1:
            self.expect("")
            self.expect("")
            function = self.function()
            if function.name in functions:
                self.refuse(f"`{function.name}` is defined twice")
            functions[function.name] = function
        self.expect("")
        if not functions:
            self.refuse("holds no function")
        return Program(self.name, head[1], head[2], self.mesh, functions)

    def function(self) -> Function:
        """Read one function."""
        row, start = self.next(), self.at
        match = re.fullmatch(r"def (\w+)\((\):)?", row)
        if match is None:
            self.refuse(f"stands `{row[:80]}` where a function begins")
        parameters, lines = [], []
        while match[2] is None and (row := self.next()) != "):":
            if (parameter := _PARAMETER.fullmatch(row)) is None:
                self.refuse(f"`{row[:80]}` is no parameter")
            parameters.append(Parameter(parameter[1], self.type(parameter[2]), parameter[3] or "", self.at))
        names = {parameter.name for parameter in parameters}
        if len(names) != len(parameters):
            self.refuse("a parameter stands twice")
        while (row := self.next()) != "    return {":
            lines.append(self.line(row))
            for name in lines[-1].results:
                if name in names and name != "_":
                    self.refuse(f"`{name}` is set twice")
                names.add(name)
        returns = []
        while (row := self.next()) != "    }":
            if (result := _RETURN.fullmatch(row)) is None or result[2] not in names:
                self.refuse(f"`{row[:80]}` is no result")
            returns.append((result[1], result[2]))
        if len({key for key, _ in returns}) != len(returns):
            self.refuse("a result stands twice")
        return Function(match[1], tuple(parameters), tuple(lines), tuple(returns), start)

    def line(self, row: str) -> Line:
        match = _LINE.fullmatch(row)
        if match is None:
            self.refuse(f"`{row[:80]}` is no line of a program")
        results = tuple(match[1].split(", "))
        types = tuple(self.type(text) if text != "-" else NO_TYPE for text in match[4].split("; "))
        if len(results) != len(types):
            self.refuse(f"has {len(results)} results and {len(types)} types")
        args, kwargs = self.arguments(match[3])
        return Line(results, types, match[2], args, kwargs, match[5], self.at)

    def type(self, text: str) -> Type:
        try:
            return read_type(text, self.mesh)
        except ValueError as error:
            self.refuse(str(error))

    def arguments(self, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            return _Arguments(text).all()
        except ValueError as error:
            self.refuse(str(error))


_TYPE = re.compile(r"(\w+)\[([^\]]*)\]((?: \+\w+)*)(?: ([1-9]\d*) of ([1-9]\d*))?")
_DIM = re.compile(r"\([\d/~\w +]+\)|[\d/~\w]+")


@lru_cache(maxsize=1 << 14)
def read_type(text: str, mesh: Mesh) -> Type:
    """Read a type; ``(3 128/tp)`` is a dim of 384 whose three parts are split over ``tp``.

    Raises:
        ValueError: not such a text.
    """
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ValueError(f"`{text}` is no type")
    sizes, dims = dict(mesh.sizes), []
    for entry in match[2].split(", ") if match[2] else []:
        if not _DIM.fullmatch(entry):
            raise ValueError(f"`{entry}` in `{text}` is no dim")
        stretches = []
        for term in entry.strip("()").split(" + "):
            atoms: list[Atom] = []
            for word in term.split(" "):
                number, *axes = word.split("/")
                if not number.isdigit():
                    raise ValueError(f"`{number}` in `{text}` is no size")
                rest = int(number)
                for axis in (part for name in axes for part in mesh.parts(name)):
                    ranks = sizes[axis.removeprefix("~")]
                    if rest % ranks:
                        raise ValueError(f"`{text}` splits {rest} over `{axis}`")
                    rest //= ranks
                    if axis.startswith("~") and not (atoms and (atoms[-1].axis[:1] == "~" or _is_even(atoms[-1]))):
                        raise ValueError(f"`{text}` has no pairs of parts of which `{axis}` counts one in reverse")
                    atoms.append(Atom(ranks, axis))
                atoms.append(Atom(rest, ""))
            stretches.append(tuple(atom for atom in atoms if atom.size != 1 or len(atoms) == 1))
        dims.append(tuple(stretches))
    partial = tuple(axis for word in match[3].split() for axis in mesh.parts(word[1:]))
    packed = (int(match[4]), int(match[5])) if match[4] else None
    return Type(match[1], tuple(dims), partial, packed)


def _is_even(atom: Atom) -> bool:
    return not atom.axis and atom.size % 2 == 0


_TOKEN = re.compile(
    r"(?P<local>\d+(?:/\w+)+)|(?P<number>-?(?:inf|nan|\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b)|(?P<text>'[\w.,:*\->~ ]*')"
    r"|(?P<word>torch\.\w+)|(?P<key>\w+)=|(?P<name>\w+)|(?P<mark>[\[\]()])|(?P<comma>, ?)"
)
_CONSTANTS = {"None": None, "True": True, "False": False}


class _Arguments:
    """The tokens of a line's arguments."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def token(self) -> re.Match[str]:
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            raise ValueError(f"`{self.text[self.at : self.at + 40]}` is no argument")
        self.at = match.end()
        return match

    def all(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while self.at < len(self.text):
            token = self.token()
            if token["key"]:
                if token["key"] in kwargs:
                    raise ValueError(f"`{token['key']}` stands twice")
                kwargs[token["key"]] = self.value(self.token(), 0)
            elif kwargs:
                raise ValueError("an argument stands behind a named one")
            else:
                args.append(self.value(token, 0))
            self.comma("")
        return tuple(args), kwargs

    def comma(self, end: str) -> None:
        """Pass a comma, unless what follows is the end."""
        if self.text[self.at : self.at + 2] == ", ":
            self.at += 2
        elif self.text[self.at : self.at + 1] == "," and end == ")":
            self.at += 1
        elif self.text[self.at :][: len(end)] != end or (not end and self.at < len(self.text)):
            raise ValueError(f"`{self.text[self.at : self.at + 40]}` is no argument")

    def value(self, token: re.Match[str], depth: int) -> Any:
        """Return the value that a token is, or begins."""
        kind, text = token.lastgroup, token[0]
        if kind == "local":
            size, *axes = text.split("/")
            return Local(int(size), tuple(axes))
        if kind == "number":
            return int(text) if text.lstrip("-").isdigit() else float(text)
        if kind == "text":
            return text[1:-1]
        if kind == "word":
            return Word(text)
        if kind == "name":
            return _CONSTANTS[text] if text in _CONSTANTS else Name(text)
        if text not in "[(" or depth == MOST_DEPTH:
            raise ValueError(f"`{text}` begins no argument")
        end, items = "]" if text == "[" else ")", list[Any]()
        while self.text[self.at : self.at + 1] != end:
            items.append(self.value(self.token(), depth + 1))
            self.comma(end)
        self.at += 1
        return items if end == "]" else tuple(items)
