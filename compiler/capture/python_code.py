"""Python files read as text: the statements that run for some of a file's names, and their hash. Nothing is imported.

A statement at a file's top level matters to whoever imports the file, unless it is *inert*: all that it does is bind a
name (a function, a class, an assignment of a literal, an import from torch or Python's library). An inert statement
matters only to code that reads the name. Where the text gives no certain answer, everything matters.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

OPEN = re.compile(rb"import\s*\*|\b(globals|vars|exec)\(|\bsys\.modules\b|\bglobal\s|^def __getattr__\b", re.MULTILINE)
"""Code in a module that may define names which its statements do not show."""
_READS_ANY = re.compile(rb"\b(eval|locals|__import__)\(|\b(importlib|pickle|__globals__)\b|\btorch\.load\b")
"""Code in a module that may read names which its statements do not show."""
_READS_TEXT = re.compile(rb"getsource|linecache|getdoc|getcomments|__doc__|currentframe|_getframe|co_firstlineno")
"""Names by which code may read comments, docstrings or line numbers."""
_LIBRARIES = sys.stdlib_module_names - {"__future__", "this", "antigravity"} | {"torch", "numpy"}
"""Modules that are loaded before any model is imported, or whose import changes no other module."""
_CACHE_SIZE = 64
"""The most files, and hashes of parts of them, in the caches: opening a build asks three times for the same."""


@dataclass(frozen=True)
class CodeStatement:
    """A statement at the top level: the names that it binds, the names that it reads, and its imports. ``inert``:
    binding these names is its only effect."""

    node: ast.stmt
    binds: frozenset[str]
    reads: frozenset[str]
    imports: tuple[ast.Import | ast.ImportFrom, ...]
    inert: bool


@dataclass(frozen=True, eq=False)
class ReachedCode:
    """A file's statements. ``whole``: any name may read each. ``as_text``: the file may read its own text, or is
    not Python, so the whole text is hashed."""

    path: Path
    text: bytes
    statements: tuple[CodeStatement, ...]
    whole: bool
    as_text: bool

    def binding(self, name: str) -> Iterator[int]:
        """Return the numbers of the statements that bind a name."""
        return (at for at, statement in enumerate(self.statements) if name in statement.binds)

    def hashes(self, kept: set[int]) -> tuple[str, str]:
        """Return the hash of some statements without comments, docstrings and layout, and the hash of their line
        numbers. Both are the same in all versions of Python."""
        return _hashes(self, frozenset(kept))


@lru_cache(maxsize=_CACHE_SIZE)
def _hashes(code: ReachedCode, kept: frozenset[int]) -> tuple[str, str]:
    if code.as_text:
        return hashlib.sha256(code.text).hexdigest(), ""
    chosen = [code.statements[at].node for at in sorted(kept)]
    lines = [getattr(node, "lineno", 0) for root in chosen for node in ast.walk(root)]
    tokens = "\0".join(token for node in chosen for token in _tokens(node))
    return hashlib.sha256(tokens.encode()).hexdigest(), hashlib.sha256(str(lines).encode()).hexdigest()


def parsed(text: bytes) -> ast.Module | None:
    """Return a file's syntax tree, or None if it is not Python: its import will say so."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@lru_cache(maxsize=_CACHE_SIZE)
def read_code(path: Path, text: bytes) -> ReachedCode:
    """Return the statements in the text of a file."""
    tree = parsed(text)
    if tree is None or _READS_TEXT.search(text):
        statements = () if tree is None else tuple(_statement(node, False) for node in tree.body)
        return ReachedCode(path, text, statements, True, True)
    statements = tuple(_statements(tree))
    return ReachedCode(path, text, statements, bool(OPEN.search(text) or _READS_ANY.search(text)), False)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Return the names that a module's statements bind, not those inside functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        yield from bound_names(node)


def _statements(tree: ast.Module) -> Iterator[CodeStatement]:
    """Return a file's statements in order. The walk keeps the names bound to libraries so far, and the ``plain``
    classes, whose subclasses run no code when they are defined."""
    library = set[str]()
    others = set(bound_names(tree))
    plain = {
        "object",
        "Exception",
        "ValueError",
        "RuntimeError",
        "dict",
        "list",
        "tuple",
        "int",
        "float",
        "str",
    } - others
    for node in tree.body:
        names = set(bound_names(ast.Module([node], [])))
        match node:
            case ast.Import() | ast.ImportFrom():
                inert = _is_library(node)
                library |= names if inert else set()
            case ast.ClassDef():
                inert = _is_plain_class(node, plain, library, others)
                hooks = any(isinstance(n, ast.FunctionDef) and n.name == "__init_subclass__" for n in node.body)
                plain |= {node.name} if inert and not hooks else set()
            case _:
                inert = _is_inert(node, library, others)
        yield _statement(node, inert)


def _statement(node: ast.stmt, inert: bool) -> CodeStatement:
    inside = list(ast.walk(node))
    reads = frozenset(n.id for n in inside if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store))
    imports = tuple(n for n in inside if isinstance(n, ast.Import | ast.ImportFrom))
    return CodeStatement(node, frozenset(bound_names(ast.Module([node], []))), reads, imports, inert)


def _is_library(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    relative = isinstance(node, ast.ImportFrom) and node.level > 0
    return not relative and all(name.partition(".")[0] in _LIBRARIES for name in names)


def _is_plain_class(node: ast.ClassDef, plain: set[str], library: set[str], others: set[str]) -> bool:
    """Return whether a class definition does nothing but define the class."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    known = all(_dotted(base) in plain or _dotted(base).partition(".")[0] in library for base in bases)
    body = (_is_inert(inner, library, others) for inner in node.body)
    return known and not node.keywords and _has_plain_decorators(node, library, others) and all(body)


_EXPRESSIONS = (
    ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp,
    ast.Compare, ast.IfExp, ast.Subscript, ast.Slice, ast.Starred, ast.JoinedStr, ast.FormattedValue, ast.expr_context,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


def _is_inert(node: ast.AST | None, library: set[str], others: set[str]) -> bool:
    """Return whether all that a statement or expression does is compute a value and bind names to it."""
    match node:
        case None | ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            arguments = [*ast.walk(node.args), node.returns]
            hints = [argument.annotation for argument in arguments if isinstance(argument, ast.arg)]
            parts = [*node.args.defaults, *node.args.kw_defaults, *hints, node.returns]
            return _has_plain_decorators(node, library, others) and all(
                _is_inert(value, library, others) for value in parts
            )
        case ast.Assign():
            return all(map(_is_name, node.targets)) and _is_inert(node.value, library, others)
        case ast.AnnAssign():
            return _is_name(node.target) and all(_is_inert(v, library, others) for v in (node.value, node.annotation))
        case ast.If(
            test=ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value=v)])
        ):
            return v == "__main__" and not node.orelse  # a model's file is imported, never run
        case ast.Lambda():
            return all(_is_inert(v, library, others) for v in (*node.args.defaults, *node.args.kw_defaults))
        case _:
            inner = ast.iter_child_nodes(node)
            return isinstance(node, _EXPRESSIONS) and all(_is_inert(child, library, others) for child in inner)


def _is_name(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) or (
        isinstance(target, ast.Tuple | ast.List) and all(map(_is_name, target.elts))
    )


_DECORATORS = frozenset({
    "staticmethod", "classmethod", "property", "dataclass", "dataclasses.dataclass", "abstractmethod", "override",
    "abc.abstractmethod", "typing.override", "cache", "lru_cache", "cached_property", "functools.cache",
    "functools.lru_cache", "functools.cached_property", "torch.no_grad", "torch.inference_mode",
})  # fmt: skip


def _has_plain_decorators(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, library: set[str], others: set[str]
) -> bool:
    """Return whether a definition has only decorators that do nothing but wrap it."""
    for decorator in node.decorator_list:
        arguments: list[ast.expr] = []
        if isinstance(decorator, ast.Call):
            arguments, decorator = [*decorator.args, *(word.value for word in decorator.keywords)], decorator.func
        name = _dotted(decorator)
        first = name.partition(".")[0]
        mine = first in others and first not in library
        setter = name.endswith((".setter", ".getter", ".deleter"))
        if not setter and (mine or name not in _DECORATORS):
            return False
        if not all(_is_inert(value, library, others) for value in arguments):
            return False
    return True


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for names and attributes, "" for any other expression."""
    if isinstance(node, ast.Attribute):
        first = _dotted(node.value)
        return f"{first}.{node.attr}" if first else ""
    return node.id if isinstance(node, ast.Name) else ""


def _tokens(root: ast.AST) -> Iterator[str]:
    """Yield the words of a syntax tree, nested by brackets. Empty fields are left out: versions of Python differ in
    them."""
    todo: list[Any] = [root]
    while todo:
        item = todo.pop()
        if isinstance(item, ast.JoinedStr):  # Python 3.12 has an empty text behind a format that is computed
            item = ast.JoinedStr([part for part in item.values if not _is_empty(part)])
        match item:
            case str():
                yield item
            case list():
                kept = [inner for inner in item if not _is_docstring(inner)]
                todo += ["]", *reversed(kept), "["]
            case ast.AST():
                fields = [
                    (n, v) for n, v in ast.iter_fields(item) if n not in _IGNORED_FIELDS and v is not None and v != []
                ]
                todo.append(")")
                for name, value in reversed(fields):
                    todo += [value if isinstance(value, ast.AST | list) else _token(value), f"{name}="]
                todo.append(f"{type(item).__name__}(")
            case _:
                todo.append(_token(item))


_IGNORED_FIELDS = frozenset({"kind", "type_comment", "type_ignores"})


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_empty(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""


def _token(value: Any) -> str:
    return f"{type(value).__name__} {hex(value) if type(value) is int else ascii(value)}"
