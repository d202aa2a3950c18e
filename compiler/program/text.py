"""The strict reader of programs: text becomes a program only if it is, to the letter, what that program prints as.

Nothing is executed or looked up beyond the list of allowed operators and the custom ones that the head declares. That
the text must print back the same makes the reader small: what it does not look at cannot stand in the text.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from ...grammar.syntax import size_text
from ..layout.collectives import COLLECTIVES
from ..layout.mesh import Mesh
from ..layout.placement import TensorType, parse_type
from .actions import REFERENCE
from .binding import Binding
from .program import Function, Line, LocalSize, Origin, Program, Ref, Value, allowed

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMBERS = {"inf": math.inf, "nan": math.nan}


class ProgramError(ValueError):
    """The error of a program's text that parc would not write, with the line."""


def parse_program(text: str, name: str = "program") -> Program:
    """Read a program; the inverse of ``Program.text``. Nothing is executed: the text is parsed line by line.

    Raises:
        ProgramError: the text is not, to the letter, that of a program.
    """
    if not text.replace("\n", "").isprintable():
        bad = next(character for character in text if not character.isprintable() and character != "\n")
        raise ProgramError(f"{name}: holds the character {bad!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python's doubts about a text are reason enough
            program = _read_program(text, name)
        again = program.text()
    except ProgramError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(f"{name}: {error}") from None
    if again != text:
        raise ProgramError(f"{name}:{_first_difference(text, again)}")
    return program


def _first_difference(text: str, again: str) -> str:
    ours, theirs = text.split("\n"), again.split("\n")
    index = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    wanted = f"`{theirs[index].strip()}`" if index < len(theirs) else "the end"
    return f"{index + 1}: stands where a program says {wanted}"


def _read_program(text: str, name: str) -> Program:
    """Read the head, then one function after the other."""
    if text.count("\n") > _MOST_LINES:
        raise ProgramError(f"{name}: it has more than {_MOST_LINES:,} lines")
    head, *texts = text.replace("\n\n\ndef ", "\n\0def ").split("\0")  # which is not printable
    part = _FunctionText(head, name=name)
    match part.tree().body:
        case [
            ast.Expr(value=ast.Constant(value=str() as words)),
            ast.Expr(value=ast.Call(func=ast.Name(id="mesh"), args=[], keywords=axes)) as at,
            *rest,
        ] if texts:
            role, _, action = words.removeprefix("parc program: role ").partition(", action ")
        case _:
            raise part.fail(None, "does not begin as a parc program does, or holds no function")
    mesh, custom = _mesh(part, at, axes), frozenset[str]()
    match rest:
        case [ast.Expr(value=ast.Call(func=ast.Name(id="operators"), args=names, keywords=[])), *rest]:
            custom = frozenset(str(n.value) for n in names if isinstance(n, ast.Constant))
    if rest:
        raise part.fail(rest[0], _ONLY_FUNCTIONS)
    functions: dict[str, Function] = {}
    row = head.count("\n") + 2
    for each in texts:
        main = each is texts[-1] or action == REFERENCE
        part = _FunctionText(each, mesh, custom, frozenset(functions), action, main, name, row)
        function = _read_function(part)
        if function.name in functions:
            raise part.fail(None, f"`{function.name}` is defined twice")
        functions[function.name] = function
        row += each.count("\n") + 2
    return Program(role, action, mesh, tuple(functions.values()))


_MOST_LINES = 1_000_000
"""The most lines of a program. They take half of a gigabyte when they are read."""
_MOST_PARSED = 8 << 20
"""The most characters that are parsed at once: a program's head, a function without its lines, or a line."""
_ONLY_FUNCTIONS = "only functions stand here"


@dataclass(frozen=True)
class _FunctionText:
    """The text of a program's head or of one function, with all that its reading depends on: the mesh, the ``custom``
    operators, the functions before it, the action, and whether it is a ``main`` function. Equal texts are read once,
    wherever they stand."""

    text: str
    mesh: Mesh = field(default_factory=Mesh)
    custom: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    action: str = ""
    main: bool = False
    name: str = field(default="", compare=False)
    row: int = field(default=0, compare=False)

    def tree(self) -> ast.Module:
        if len(self.text) > _MOST_PARSED:
            raise self.fail(None, f"this is longer than {size_text(_MOST_PARSED)}")
        try:
            return _parsed(self.text)
        except SyntaxError as error:
            raise ProgramError(f"{self.name}:{self.row + (error.lineno or 1)}: {error.msg}") from None

    def fail(self, at: ast.AST | int | None, why: str) -> ProgramError:
        """Return the error of a node, or of a row of the text."""
        row = at if isinstance(at, int) else getattr(at, "lineno", 1)
        return ProgramError(f"{self.name}:{self.row + row}: {why}")


@lru_cache(maxsize=512)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@lru_cache(maxsize=512)
def _read_function(part: _FunctionText) -> Function:
    """Read a function: what stands around its lines as one text, and each line by itself."""
    rows = part.text.split("\n")
    start = rows.index("):") + 1 if "):" in rows else 0
    end = rows.index(_RETURN) if start and _RETURN in rows else start
    around = replace(part, text="\n".join([*rows[:start], *[""] * (end - start), *rows[end:]]))
    match around.tree().body:
        case [ast.FunctionDef(body=[returned]) as node]:
            return _Reader(part, rows).function(node, range(start, end), returned)
        case [_, node, *_]:
            raise part.fail(node, _ONLY_FUNCTIONS)
    raise part.fail(None, _ONLY_FUNCTIONS)


_RETURN = "    return {"


def _mesh(part: _FunctionText, at: ast.AST, keywords: Sequence[ast.keyword]) -> Mesh:
    axes = []
    for item in keywords:
        match item:
            case ast.keyword(arg=str() as axis, value=ast.Constant() | ast.BinOp() | ast.Name() as size):
                axes.append(f"{axis}={ast.unparse(size)}".replace(" ", ""))
            case _:
                raise part.fail(at, "the mesh's axes are whole numbers")
    return Mesh.parse(", ".join(axes))


@dataclass
class _Reader:
    """The reader of one function. ``rows`` are the lines of its text."""

    part: _FunctionText
    rows: Sequence[str]
    defined: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fail = self.part.fail

    def function(self, node: ast.FunctionDef, lines: range, returned: ast.stmt) -> Function:
        """Read the function whose tree, without the rows of its ``lines``, is ``node``."""
        for argument in node.args.args:
            match argument.annotation:
                case ast.Constant(value=str() as text):
                    _, _, binding = _behind(self.rows[(argument.end_lineno or 1) - 1], argument).partition("  # ")
                    self._parameter(argument, text, binding)
                case _:
                    raise self.fail(argument, f"`{argument.arg}` has no type")
        parameters = tuple(self.defined.values())
        read = tuple(map(self._line, lines))
        outside = self.part.main or any(value.binding is not None for value in parameters)
        return Function(node.name, parameters, read, self._returns(returned, outside))

    def _parameter(self, at: ast.arg, text: str, binding: str) -> None:
        try:
            value = Value(at.arg, _type(text, self.part.mesh), Binding.parse(binding) if binding else None)
        except ValueError as error:
            raise self.fail(at, str(error)) from None
        self._define(value, at.lineno)

    def _define(self, value: Value, row: int) -> None:
        if value.name in self.defined or value.name in _NUMBERS or value.name == "_":
            raise self.fail(row, f"`{value.name}` is defined twice, or is no name for a value")
        self.defined[value.name] = value

    def _line(self, index: int) -> Line:
        part, row = self.part, self.rows[index]
        try:
            line = _read_line(_Row(row.removeprefix("    "), part.mesh, part.custom, part.before))
        except SyntaxError as error:
            raise self.fail(index + 1, error.msg) from None
        except ValueError as error:
            raise self.fail(index + 1, str(error)) from None
        for name in line.uses:
            if name not in self.defined:
                raise self.fail(index + 1, f"`{name}` is used before it is defined")
        for value in line.made:
            self._define(value, index + 1)
        return line

    def _returns(self, node: ast.stmt, outside: bool) -> tuple[tuple[Binding, str], ...]:
        """Read a function's returns: bindings if it is the program's main function (``outside``), else names for the
        function that calls it."""
        if not isinstance(node, ast.Return) or not isinstance(node.value, ast.Dict):
            raise self.fail(node, "a function ends in `return {…}`")
        returns: dict[Binding, str] = {}
        for pair in zip(node.value.keys, node.value.values, strict=True):
            match pair:
                case (ast.Constant(value=str() as text), ast.Name(id=name)) if name in self.defined:
                    key = self._key(node, text) if outside else Binding("value", text)
                    if key in returns:
                        raise self.fail(node, f"returns two values as `{text}`")
                    returns[key] = name
                case (_, value):
                    raise self.fail(value, "returns what is no value of the function")
        return tuple(returns.items())

    def _key(self, at: ast.AST, text: str) -> Binding:
        try:
            return Binding.parse_key(text, self.part.action)
        except ValueError as error:
            raise self.fail(at, str(error)) from None


def _type(text: str, mesh: Mesh) -> TensorType:
    """Read a type, of which a rank must be able to hold a piece."""
    type_ = parse_type(text, mesh)
    type_.local(mesh)
    return type_


def _behind(row: str, node: ast.stmt | ast.arg) -> str:
    """Return the text behind a node that ends in a row."""
    return row.encode()[node.end_col_offset :].decode()


@dataclass(frozen=True)
class _Row:
    """The text of one line, with all that its reading depends on: the mesh, the ``custom`` operators, and the functions
    before its own. Equal rows are read once, wherever they stand."""

    text: str
    mesh: Mesh
    custom: frozenset[str]
    before: frozenset[str]

    def line(self) -> Line:
        """Read the line, whatever is defined where it stands.

        Raises:
            ValueError: it is none.
            SyntaxError: it is not even Python.
        """
        if len(self.text) > _MOST_PARSED:
            raise ValueError(f"a line is longer than {size_text(_MOST_PARSED)}")
        match ast.parse(self.text).body:
            case [ast.Assign(targets=[target], value=ast.Call(func=func, args=args, keywords=keywords)) as node]:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
            case _:
                raise ValueError("a line is `results = operator(arguments)`")
        op = self.text.encode()[func.col_offset : func.end_col_offset].decode()
        if op not in self.before and not allowed(op, self.custom):
            raise ValueError(f"`{op}` is not an operator that a program may use")
        arguments = tuple(self._argument(item) for item in args)
        if op in COLLECTIVES and len(arguments) > 1 and isinstance(arguments[1], str):
            arguments = (arguments[0], ",".join(self.mesh.spread(arguments[1].split(","))), *arguments[2:])
        named = tuple((str(item.arg), self._argument(item.value)) for item in keywords)
        if op in self.before and (named or not all(isinstance(item, Ref) for item in arguments)):
            raise ValueError(f"`{op}` is a function and takes values alone")
        types, _, origin = _behind(self.text, node).removeprefix("  # ").partition(" | ")
        texts = types.split("; ")
        if len(texts) != len(names):
            raise ValueError("results and types differ in number")
        results: list[Value | None] = []
        for name, text in zip(names, texts, strict=True):
            if not isinstance(name, ast.Name):
                raise ValueError(f"`{ast.unparse(name)}` is no name for a value")
            results.append(None if (name.id, text) == ("_", "-") else Value(name.id, _type(text, self.mesh)))
        return Line(tuple(results), op, arguments, named, Origin.parse(origin))

    def _argument(self, item: ast.expr) -> Any:
        match item:
            case ast.Name(id=name):
                return _NUMBERS[name] if name in _NUMBERS else Ref(name)
            case ast.List(elts=elements):
                return [self._argument(element) for element in elements]
            case ast.Tuple(elts=elements):
                return tuple(self._argument(element) for element in elements)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if f"torch.{name}" in _DTYPES:
                return _DTYPES[f"torch.{name}"]
            case ast.BinOp(left=left, op=ast.Div(), right=ast.Name(id=axis)):
                return self._cut(item, self._argument(left), axis)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() | ast.Name() as operand):
                value = self._argument(operand)
                if isinstance(value, (int, float)):
                    return -value
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
        raise ValueError(f"`{ast.unparse(item)}` cannot stand in a program")

    def _cut(self, at: ast.expr, whole: Any, axis: str) -> LocalSize:
        size, axes = (whole.size, whole.axes) if isinstance(whole, LocalSize) else (whole, ())
        mesh = self.mesh
        cut_axes = (*axes, *mesh.parts(axis))
        known = len(set(cut_axes)) == len(cut_axes) and set(cut_axes) <= set(mesh.names)
        if not known or isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(f"`{ast.unparse(at)}` does not cut a size over axes of the mesh")
        cut = LocalSize(size, cut_axes)
        if size % math.prod(mesh.size(name) for name in cut.axes):
            raise ValueError(f"`{ast.unparse(at)}` does not divide")
        return cut


_read_line = lru_cache(maxsize=1 << 14)(_Row.line)
