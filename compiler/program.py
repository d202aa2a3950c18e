"""What a program is: typed lines in functions, with a text form in Python's syntax that is parsed, never executed."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .collectives import COLLECTIVES
from .mesh import Mesh
from .op_rules import TABLE
from .placement import TensorType, parse_type


@dataclass(frozen=True, slots=True)
class Ref:
    """The use of a value by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A size or position in an argument: ``size`` of the whole tensor, cut over ``axes`` on a rank."""

    size: int
    axes: tuple[str, ...]

    def local(self, mesh: Mesh) -> int:
        """What one rank sees."""
        size = self.size
        for axis in self.axes:
            size //= mesh.size(axis)
        return size


@dataclass(frozen=True, slots=True)
class Value:
    """A named, typed value; ``role`` tells what a program's parameter is bound to, e.g. ``parameter blocks.0.w``."""

    name: str
    type: TensorType
    role: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a line comes from: module path, ``file:line`` of the model, line of the plan that last touched it."""

    module: str = ""
    source: str = ""
    plan: int = 0

    def __str__(self) -> str:
        plan = f"plan:{self.plan}" if self.plan else ""
        return " ".join(word for word in (self.module or "-", self.source or "-", plan) if word)


@dataclass(frozen=True, slots=True)
class Line:
    """``results = op(args, kwargs)``; ``op`` is an operator such as ``aten.mm.default`` or a function's name.

    A result that the operator leaves out is None. Arguments hold global sizes, as ``Cut`` where a rank's differ.
    """

    results: tuple[Value | None, ...]
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    origin: Origin = Origin()

    @property
    def calls_function(self) -> bool:
        """Whether the line calls another function of its program."""
        return "." not in self.op

    def uses(self) -> Iterator[str]:
        """Names of the values that the line reads, in order."""
        for item in (*self.args, *(value for _, value in self.kwargs)):
            yield from references(item)


def references(item: Any) -> Iterator[str]:
    """Names of the values in an argument."""
    if isinstance(item, Ref):
        yield item.name
    elif isinstance(item, (list, tuple)):
        for inner in item:
            yield from references(inner)


def map_references(item: Any, change: Callable[[str], Any]) -> Any:
    """The argument with every use replaced by ``change(name)``."""
    if isinstance(item, Ref):
        return change(item.name)
    if isinstance(item, (list, tuple)):
        return type(item)(map_references(inner, change) for inner in item)
    return item


@dataclass(frozen=True, slots=True)
class Function:
    """Parameters, lines, and what is returned: pairs of a key and a value's name."""

    name: str
    parameters: tuple[Value, ...]
    lines: tuple[Line, ...]
    returns: tuple[tuple[str, str], ...]

    def values(self) -> dict[str, Value]:
        """Every value of the function by its name."""
        table = {value.name: value for value in self.parameters}
        for line in self.lines:
            table.update((value.name, value) for value in line.results if value is not None)
        return table


@dataclass(frozen=True, slots=True)
class Program:
    """The work of one role in one action. The last function is the one that runs; it may call the others."""

    role: str
    action: str
    mesh: Mesh
    functions: tuple[Function, ...] = field(default=())

    @property
    def main(self) -> Function:
        """The function that runs."""
        return self.functions[-1]

    def function(self, name: str) -> Function:
        """A function by its name."""
        return next(function for function in self.functions if function.name == name)

    def text(self) -> str:
        """The program's one canonical text."""
        head = f'"""parc program: role {self.role}, action {self.action}"""\n\nmesh({mesh_text(self.mesh)})\n'
        return head + "".join(f"\n\n{_function_text(function, self.mesh)}" for function in self.functions)


def mesh_text(mesh: Mesh) -> str:
    """``dp=2, tp=4``."""
    return ", ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.names)


def _function_text(function: Function, mesh: Mesh) -> str:
    rows = [f"def {function.name}("]
    for value in function.parameters:
        role = f"  # {value.role}" if value.role else ""
        rows.append(f'    {value.name}: "{value.type.text(mesh)}",{role}')
    rows.append("):")
    for line in function.lines:
        names = ", ".join("_" if value is None else value.name for value in line.results)
        words = [argument_text(item) for item in line.args]
        words += [f"{key}={argument_text(item)}" for key, item in line.kwargs]
        types = "; ".join("-" if value is None else value.type.text(mesh) for value in line.results)
        rows.append(f"    {names} = {line.op}({', '.join(words)})  # {types} | {line.origin}")
    rows.append("    return {")
    rows += [f'        "{key}": {name},' for key, name in function.returns]
    return "\n".join([*rows, "    }", ""])


def argument_text(item: Any) -> str:
    """One argument as it stands in a program."""
    if isinstance(item, Ref):
        return item.name
    if isinstance(item, Cut):
        return "/".join([str(item.size), *item.axes])
    if isinstance(item, torch.dtype):
        return str(item)
    if isinstance(item, list):
        return f"[{', '.join(map(argument_text, item))}]"
    if isinstance(item, tuple):
        return f"({', '.join(map(argument_text, item))}{',' if len(item) == 1 else ''})"
    if isinstance(item, str):
        return ast.unparse(ast.Constant(item))
    if item is None or isinstance(item, (bool, int, float)):
        return repr(item)
    raise TypeError(f"a program cannot hold {item!r}")


class ProgramError(ValueError):
    """A program's text is not one that parc writes; the message names the line."""


def parse_program(text: str, name: str = "program") -> Program:
    """The inverse of ``Program.text``. Nothing is executed: the text must be a program, line by line.

    Raises:
        ProgramError: anything else, with the line's number.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(f"{name}: {error}") from None
    rows = text.split("\n")
    try:
        head, mesh_call, *functions = tree.body
        role, action = _head(head)
        mesh = _mesh(mesh_call)
    except (ValueError, TypeError, AttributeError, IndexError):
        raise ProgramError(f"{name}: does not begin as a parc program does") from None
    parsed: list[Function] = []
    for node in functions:
        parsed.append(_parse_function(node, rows, mesh, name, {function.name for function in parsed}))
    if not parsed:
        raise ProgramError(f"{name}: holds no function")
    return Program(role, action, mesh, tuple(parsed))


def _head(node: ast.stmt) -> tuple[str, str]:
    assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    words = node.value.value.removeprefix("parc program: role ").split(", action ")
    return words[0], words[1]


def _mesh(node: ast.stmt) -> Mesh:
    call = node.value  # type: ignore[attr-defined]
    if call.func.id != "mesh" or call.args:
        raise ValueError("no mesh")
    return Mesh(tuple((str(item.arg), int(ast.literal_eval(item.value))) for item in call.keywords))


def _parse_function(node: ast.stmt, rows: Sequence[str], mesh: Mesh, name: str, known: set[str]) -> Function:
    def fail(at: ast.AST, why: str) -> ProgramError:
        return ProgramError(f"{name}:{getattr(at, 'lineno', 1)}: {why}")

    if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.args.vararg or node.args.kwarg:
        raise fail(node, "only functions stand here")
    defined: dict[str, Value] = {}

    def define(at: ast.AST, label: str, text: str, role: str = "") -> Value:
        if label in defined:
            raise fail(at, f"`{label}` is defined twice")
        try:
            value = Value(label, parse_type(text, mesh), role)
            value.type.local(mesh)
        except ValueError as error:
            raise fail(at, str(error)) from None
        defined[label] = value
        return value

    for argument in node.args.args:
        if not isinstance(argument.annotation, ast.Constant) or not isinstance(argument.annotation.value, str):
            raise fail(argument, f"`{argument.arg}` has no type")
        _, _, role = rows[argument.lineno - 1].partition("  # ")
        define(argument, argument.arg, argument.annotation.value, role)
    parameters = tuple(defined.values())
    lines = []
    *body, last = node.body
    for statement in body:
        lines.append(_parse_line(statement, rows, defined, define, fail, known, mesh))
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Dict):
        raise fail(last, "a function ends in `return {…}`")
    returns = []
    for key, item in zip(last.value.keys, last.value.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(item, ast.Name) or item.id not in defined:
            raise fail(item, "returns an unknown value")
        returns.append((str(key.value), item.id))
    return Function(node.name, parameters, tuple(lines), tuple(returns))


def _parse_line(
    node: ast.stmt,
    rows: Sequence[str],
    defined: dict[str, Value],
    define: Callable[[ast.AST, str, str], Value],
    fail: Callable[[ast.AST, str], ProgramError],
    known: set[str],
    mesh: Mesh,
) -> Line:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or len(node.targets) != 1:
        raise fail(node, "a line is `results = operator(arguments)`")
    target = node.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    op = ast.unparse(node.value.func)
    if not allowed(op) and op not in known:
        raise fail(node, f"`{op}` is not an operator that a program may use")

    def argument(item: ast.expr) -> Any:
        if isinstance(item, ast.Name):
            if item.id in ("inf", "nan"):
                return getattr(math, item.id)
            if item.id not in defined:
                raise fail(item, f"`{item.id}` is used before it is defined")
            return Ref(item.id)
        if isinstance(item, (ast.List, ast.Tuple)):
            inner = [argument(element) for element in item.elts]
            return inner if isinstance(item, ast.List) else tuple(inner)
        if isinstance(item, ast.Attribute):
            dtype = getattr(torch, item.attr, None)
            if ast.unparse(item) != str(dtype) or not isinstance(dtype, torch.dtype):
                raise fail(item, f"`{ast.unparse(item)}` is no dtype")
            return dtype
        if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Div) and isinstance(item.right, ast.Name):
            whole = argument(item.left)
            size, axes = (whole.size, whole.axes) if isinstance(whole, Cut) else (whole, ())
            if item.right.id not in mesh.names or item.right.id in axes or not isinstance(size, int):
                raise fail(item, f"`{ast.unparse(item)}` does not cut a size over axes of the mesh")
            return Cut(size, (*axes, item.right.id))
        if isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.USub):
            return -argument(item.operand)
        if isinstance(item, ast.Constant) and (item.value is None or isinstance(item.value, (bool, int, float, str))):
            return item.value
        raise fail(item, f"`{ast.unparse(item)}` cannot stand in a program")

    args = tuple(argument(item) for item in node.value.args)
    kwargs = tuple((str(item.arg), argument(item.value)) for item in node.value.keywords)
    _, _, note = rows[node.lineno - 1].partition("  # ")
    types, _, origin = note.partition(" | ")
    texts = types.split("; ")
    if len(texts) != len(names):
        raise fail(node, "results and types differ in number")
    labels = [ast.unparse(n) for n in names]
    results = tuple(
        None if (label, text) == ("_", "-") else define(node, label, text)
        for label, text in zip(labels, texts, strict=True)
    )
    return Line(results, op, args, kwargs, _parse_origin(origin))


def _parse_origin(text: str) -> Origin:
    module, source, *plan = text.split(" ") if text.count(" ") else ("-", "-")
    number = plan[0].removeprefix("plan:") if plan else "0"
    return Origin(module.replace("-", "", 1) if module == "-" else module, "" if source == "-" else source,
                  int(number) if number.isdigit() else 0)  # fmt: skip


def operator(op: str) -> Any:
    """The torch operator of a name such as ``aten.mm.default``.

    Raises:
        AttributeError: there is none.
    """
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


# Operators that reach outside the tensors they are given; everything else that mutates nothing is allowed.
_FORBIDDEN = frozenset({"from_file", "_local_scalar_dense", "item", "record_stream", "set_", "_print", "_assert_async"})


def allowed(op: str) -> bool:
    """Whether a program may use the operator: one with a rule, a collective, or any functional one of aten."""
    if op in COLLECTIVES or op in TABLE:
        return True
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    if namespace != "aten" or not name.isidentifier() or not overload.isidentifier() or name in _FORBIDDEN:
        return False
    try:
        found = operator(op)
    except AttributeError:
        return False
    return isinstance(found, torch._ops.OpOverload) and not found._schema.is_mutable
