"""The strict reader of programs: text becomes a program only if it is, to the letter, what that program prints as.

Nothing is executed or looked up beyond the list of allowed operators and the custom ones that the head declares. That
the text must print back the same makes the reader small: what it does not look at cannot stand in the text.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ..layout.collectives import COLLECTIVES
from ..layout.mesh import Mesh
from ..layout.placement import TensorType, parse_type
from .binding import Binding
from .program import Function, Line, LocalSize, Origin, Program, Ref, Value, allowed

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMBERS = {"inf": math.inf, "nan": math.nan}


class ProgramError(ValueError):
    """The error of a program's text that parc would not write; the message names the line."""


def parse_program(text: str, name: str = "program") -> Program:
    """Read a program; the inverse of ``Program.text``. Nothing is executed: the text is parsed line by line.

    Raises:
        ProgramError: anything else, with the line's number.
    """
    if not text.replace("\n", "").isprintable():
        bad = next(character for character in text if not character.isprintable() and character != "\n")
        raise ProgramError(f"{name}: holds the character {bad!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python's doubts about a text are reason enough
            program = _read(text, name)
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


def _read(text: str, name: str) -> Program:
    """Read the head, then one function after the other."""
    head, *texts = _BETWEEN.split(text)
    part = _Part(head, name=name)
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
        part = _Part(each, mesh, custom, frozenset(functions), action, each is texts[-1], name, row)
        function = _read_function(part)
        if function.name in functions:
            raise part.fail(None, f"`{function.name}` is defined twice")
        functions[function.name] = function
        row += each.count("\n") + 2
    return Program(role, action, mesh, tuple(functions.values()))


_BETWEEN = re.compile(r"(?<=\n)\n\n(?=def )")
_ONLY_FUNCTIONS = "only functions stand here"


@dataclass(frozen=True)
class _Part:
    """The text of a program's head or of one function, with all that its reading depends on: the mesh, the ``custom``
    operators, the functions before it, the action, and whether it is the ``main`` function. Equal parts are read once,
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
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            raise ProgramError(f"{self.name}:{self.row + (error.lineno or 1)}: {error.msg}") from None

    def fail(self, at: ast.AST | None, why: str) -> ProgramError:
        return ProgramError(f"{self.name}:{self.row + getattr(at, 'lineno', 1)}: {why}")


@lru_cache(maxsize=512)
def _read_function(part: _Part) -> Function:
    node, *rest = part.tree().body
    if rest:
        raise part.fail(rest[0], _ONLY_FUNCTIONS)
    return _Reader(part, part.text.split("\n")).function(node)


@lru_cache(maxsize=1 << 14)
def _type(text: str, mesh: Mesh) -> TensorType:
    type_ = parse_type(text, mesh)
    type_.local(mesh)
    return type_


def _mesh(part: _Part, at: ast.AST, keywords: Sequence[ast.keyword]) -> Mesh:
    axes = []
    for item in keywords:
        match item:
            case ast.keyword(arg=str() as axis, value=ast.Constant() | ast.BinOp() as size):
                axes.append(f"{axis}={ast.unparse(size)}".replace(" ", ""))
            case _:
                raise part.fail(at, "the mesh's axes are whole numbers")
    return Mesh.parse(", ".join(axes))


@dataclass
class _Reader:
    """The reader of one function's syntax tree. ``rows`` are the lines of its text, for the comments behind ``#``."""

    part: _Part
    rows: Sequence[str]
    types: dict[str, TensorType] = field(default_factory=dict)
    defined: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh, self.fail = self.part.mesh, self.part.fail

    def type(self, text: str) -> TensorType:
        """Read a type, of which a rank must be able to hold a piece."""
        if text not in self.types:
            self.types[text] = _type(text, self.mesh)
        return self.types[text]

    def behind(self, node: ast.expr | ast.stmt | ast.arg) -> str:
        """Return the text behind a node, on its last line."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.rows[node.end_lineno - 1].encode()[node.end_col_offset :].decode()

    def function(self, node: ast.stmt) -> Function:
        """Read the function whose tree is ``node``."""
        if not isinstance(node, ast.FunctionDef):
            raise self.fail(node, _ONLY_FUNCTIONS)
        for argument in node.args.args:
            match argument.annotation:
                case ast.Constant(value=str() as text):
                    _, _, binding = self.behind(argument).partition("  # ")
                    self._define(argument, argument.arg, text, binding)
                case _:
                    raise self.fail(argument, f"`{argument.arg}` has no type")
        parameters = tuple(self.defined.values())
        lines = tuple(self._line(statement) for statement in node.body[:-1])
        outside = self.part.main or any(value.binding is not None for value in parameters)
        return Function(node.name, parameters, lines, self._returns(node.body[-1], outside))

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

    def _define(self, at: ast.AST, label: str, text: str, binding: str = "") -> Value:
        if label in self.defined or label in _NUMBERS or label == "_":
            raise self.fail(at, f"`{label}` is defined twice, or is no name for a value")
        try:
            value = Value(label, self.type(text), Binding.parse(binding) if binding else None)
        except ValueError as error:
            raise self.fail(at, str(error)) from None
        self.defined[label] = value
        return value

    def _line(self, node: ast.stmt) -> Line:
        fail = self.fail
        match node:
            case ast.Assign(targets=[target], value=ast.Call(func=func, args=args, keywords=keywords)):
                names = target.elts if isinstance(target, ast.Tuple) else [target]
            case _:
                raise fail(node, "a line is `results = operator(arguments)`")
        op = ast.unparse(func)
        if op not in self.part.before and not allowed(op, self.part.custom):
            unknown = "; is the module that registers it imported?" if op in self.part.custom else ""
            raise fail(node, f"`{op}` is not an operator that a program may use{unknown}")
        given = tuple(self._argument(item) for item in args)
        if op in COLLECTIVES and len(given) > 1 and isinstance(given[1], str):
            given = (given[0], ",".join(self.mesh.spread(given[1].split(","))), *given[2:])
        named = tuple((str(item.arg), self._argument(item.value)) for item in keywords)
        if op in self.part.before and (named or not all(isinstance(item, Ref) for item in given)):
            raise fail(node, f"`{op}` is a function and takes values alone")
        types, _, origin = self.behind(node).removeprefix("  # ").partition(" | ")
        texts = types.split("; ")
        if len(texts) != len(names):
            raise fail(node, "results and types differ in number")
        results: list[Value | None] = []
        for name, text in zip(names, texts, strict=True):
            if not isinstance(name, ast.Name):
                raise fail(node, f"`{ast.unparse(name)}` is no name for a value")
            results.append(None if (name.id, text) == ("_", "-") else self._define(node, name.id, text))
        try:
            return Line(tuple(results), op, given, named, Origin.parse(origin))
        except ValueError as error:
            raise fail(node, str(error)) from None

    def _argument(self, item: ast.expr) -> Any:
        match item:
            case ast.Name(id=name) if name in _NUMBERS:
                return _NUMBERS[name]
            case ast.Name(id=name):
                if name not in self.defined:
                    raise self.fail(item, f"`{name}` is used before it is defined")
                return Ref(name)
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
        raise self.fail(item, f"`{ast.unparse(item)}` cannot stand in a program")

    def _cut(self, at: ast.expr, whole: Any, axis: str) -> LocalSize:
        size, axes = (whole.size, whole.axes) if isinstance(whole, LocalSize) else (whole, ())
        mesh = self.mesh
        cut_axes = (*axes, *mesh.parts(axis))
        known = len(set(cut_axes)) == len(cut_axes) and set(cut_axes) <= set(mesh.names)
        if not known or isinstance(size, bool) or not isinstance(size, int):
            raise self.fail(at, f"`{ast.unparse(at)}` does not cut a size over axes of the mesh")
        cut = LocalSize(size, cut_axes)
        if size % math.prod(mesh.size(name) for name in cut.axes):
            raise self.fail(at, f"`{ast.unparse(at)}` does not divide")
        return cut
