"""An operator is one row: no table of operators stands outside the rows, and one more needs nothing but its row.

An operator's name is ``aten.mm.default`` or ``aten.mm``, as text or as Python writes torch's object; and, where a
collection or a text holds three or more such words and nothing else, the bare name ``mm``. A table is

- a collection, a dict's keys, a text of several words, or the arguments of a decorator, with two or more operators;
- an expression with ``and`` or ``or`` that compares one thing with two or more;
- a function that compares one thing with four or more, one after the other;
- a comparison with how names of operators begin, but for their namespace.

Comparing with one operator, and making calls of operators, is code that is about them. Code of a higher floor, such as
a rewrite, registers itself in a table of its floor: those are named here. What ranks send each other is no operator:
collectives are rows of their own table.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby

import pytest
import torch

from parc.compiler.layout.collectives import COLLECTIVES
from parc.compiler.ops.rules import TABLE

from .test_house import LAYERS, python_files, shown, tree

TABLES = {
    "compiler/capture/complex/rules.py": {"RULES", "_PARTWISE", "_ZEROS"},
    "compiler/capture/writes.py": {"CLAMPS"},
    "compiler/initial/recorder.py": {"_ELEMENT_MOVES"},
    "compiler/padding/flow.py": {"_PAD_OPERATORS"},
    "passes/programs/joint.py": {"FORMS"},
    "runtime/compare/in_float64.py": {"_OF_TYPES"},
    "runtime/compare/plain.py": {"_DECOMPOSED_DRAWS"},
}
"""Tables of code by operator: without complex numbers, for one element of a result, for padding that an operator makes
or takes away, and for traces that torch's own would not do; and operators of plain modules that no program has, as
those that write a parameter."""
REGISTERS = {"rewrites", "takes_apart", "runs"}
"""The decorators that fill the tables of ``passes/canonical/rewriter.py`` and ``runtime/machine/registry.py``."""
FILES = [file for file in python_files("parc", *LAYERS) if "compiler/ops/" not in shown(file)]

_QUALIFIED = re.compile(r"(aten|parc|prims|transformers)\.[A-Za-z_]\w*(\.\w+)?")
_ROOTS = {"aten", "OPS", "prims"}
_SPACES = ("aten.", "parc.")


@cache
def bare_names() -> frozenset[str]:
    """Return the names of torch's operators, and of those that have rows, without namespace."""
    every = [name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()]
    return frozenset([*every, *(name.split(".")[1] for name in TABLE)])


def qualified(node: ast.AST) -> str | None:
    """Return the operator that an expression names in full, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if _QUALIFIED.fullmatch(node.value) and node.value not in COLLECTIVES else None
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    path.append(node.id)
    path.reverse()
    path = path[2:] if path[:2] == ["torch", "ops"] else path
    return ".".join(path) if path[:1] and path[0] in _ROOTS and len(path) > 1 else None


def named(nodes: Sequence[ast.AST | None]) -> bool:
    """Return whether these are the names of several operators."""
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    bare = len(texts) == len(nodes) > 2 and all(text.partition(".")[0] in bare_names() for text in texts)
    return bare or len({name for node in nodes if node is not None and (name := qualified(node))}) > 1


def words(text: str) -> bool:
    """Return whether a text is a list of operators."""
    found = [word for word in re.split(r"[\s|,()?:\\]+", text) if word not in ("", ".", "aten", "parc")]
    full = [word for word in found if _QUALIFIED.fullmatch(word) and word not in COLLECTIVES]
    return len(full) > 1 or (len(found) > 2 and all(word.partition(".")[0] in bare_names() for word in found))


def compared(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each expression that is compared with an operator, and that operator's name."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Compare):
            for name in filter(None, map(qualified, inner.comparators)):
                yield ast.dump(inner.left), name


def most(pairs: Iterator[tuple[str, str]]) -> int:
    """Return the largest number of operators with which one thing is compared."""
    groups = groupby(sorted(set(pairs)), key=lambda pair: pair[0])
    return max((len(list(group)) for _, group in groups), default=0)


_FORMS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Constant, ast.BoolOp, ast.FunctionDef, ast.Call)


def is_table(node: ast.AST) -> bool:
    """Return whether a node of a syntax tree is a table of operators."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return named(node.elts)
    if isinstance(node, ast.Dict):
        return named(node.keys)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return words(node.value)
    if isinstance(node, ast.BoolOp):
        return most(compared(node)) > 1
    if isinstance(node, ast.FunctionDef):
        return most(compared(node)) > 3 or any(map(_is_foreign_register, node.decorator_list))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
        begins = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
        return any(isinstance(text, str) and text.startswith(_SPACES) and text not in _SPACES for text in begins)
    return False


def _is_foreign_register(decorator: ast.expr) -> bool:
    own = isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id in REGISTERS
    return isinstance(decorator, ast.Call) and not own and named(decorator.args)


def tables(module: ast.Module, allowed: frozenset[str] | set[str] = frozenset()) -> list[ast.AST]:
    """Yield the tables of operators in a module, the outermost of nested ones; docstrings are none."""
    found: list[ast.AST] = []
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
            getattr(name, "id", "") in allowed for name in targets
        ):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, _FORMS) and is_table(node):
            found.append(node)
            if isinstance(node, ast.expr):
                continue
        pending.extend(ast.iter_child_nodes(node))
    return found


def test_no_table_of_operators_stands_outside_the_rows() -> None:
    for file in FILES:
        found = tables(tree(file), TABLES.get(shown(file), set()))
        lines = sorted(getattr(node, "lineno", 0) for node in found)
        assert not found, f"state it as a fact in the operators' rows: {shown(file)}, lines {lines}"


def test_the_tables_of_code_are_where_they_are_said_to_be() -> None:
    for name, allowed in TABLES.items():
        (file,) = (file for file in FILES if shown(file) == name)
        assert len(tables(tree(file))) >= len(allowed)


@pytest.mark.parametrize("text", [
    "X = {'aten.mm.default', 'aten.bmm.default'}",
    "X = (aten.view.default, torch.ops.aten.reshape.default)",
    "X = {'aten.mm.default': 1, OPS.lookup.default: 2}",
    "X = frozenset('mm bmm addmm'.split())",
    "X = re.compile(r'mm|bmm|addmm')",
    "X = re.compile(r'aten\\.(mm|bmm|addmm)')",
    "X = 'aten.mm.default aten.bmm.default'",
    "X = ['mm', 'bmm', 'addmm']",
    "def f(op): return op == 'aten.mm.default' or op == 'aten.bmm.default'",
    "def f(op): return op in ('aten.mm.default', 'aten.bmm.default')",
    "def f(op): return op.startswith('aten.mm')",
    "def f(op):\n" + "".join(f"    if op == 'aten.{name}': pass\n" for name in ("abs", "exp", "log", "neg")),
    "@table(aten.mm.default, aten.bmm.default)\ndef f(): pass",
])  # fmt: skip
def test_a_table_is_found(text: str) -> None:
    assert len(tables(ast.parse(text))) == 1


@pytest.mark.parametrize("text", [
    "'''Such as aten.mm.default and aten.bmm.default.'''",
    "def f(op): return op == 'aten.mm.default'",
    "def f(x): return aten.add.Tensor(aten.mm.default(x, x), x)",
    "def f(a, b): return a.target is aten.add.Tensor and b.target is aten.mm.default",
    "@rewrites(aten.mm.default, aten.bmm.default)\ndef f(): pass",
    "X = {'parc.all_reduce', 'parc.all_gather'}",
    "X = ('sum', 'mean')",
    "X = 'the sum of all'",
    "def f(op): return op.startswith('aten.')",
])  # fmt: skip
def test_code_about_an_operator_is_none(text: str) -> None:
    assert not tables(ast.parse(text))
