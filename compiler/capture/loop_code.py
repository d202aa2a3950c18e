"""The code of layers that loop over a list of experts, each with the tokens that chose it, found in their source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeGuard

from torch import nn


def looped_lists(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes of a layer that are lists over which its forward loops, with the tokens of each module."""
    names = (name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) > 1)
    return tuple(name for name in names if name in _looped(type(module).forward))


@cache
def _source(forward: Any) -> ast.Module:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


@cache
def _looped(forward: Any) -> frozenset[str]:
    """Return the attributes of ``self`` over whose modules a forward loops, looking for the tokens of each. No graph
    could hold the results: a loop that chooses otherwise is captured as any other code."""
    loops = (node for node in ast.walk(_source(forward)) if isinstance(node, ast.For))
    return frozenset(name for loop in loops if _looks_for_tokens(loop) for name in _attributes(loop))


@cache
def carried(forward: Any) -> frozenset[str]:
    """Return the names that a loop with branches gives other values, and that code outside it reads."""
    tree, found = _source(forward), set[str]()
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and any(isinstance(node, ast.If) for node in ast.walk(loop)):
            inside = {id(node) for node in ast.walk(loop)}
            read = {node.id for node in ast.walk(tree) if id(node) not in inside and _is(node, ast.Load)}
            found |= read & {node.id for node in ast.walk(loop) if _is(node, ast.Store)}
    return frozenset(found)


def _is(node: ast.AST, context: type[ast.expr_context]) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, context)


def _attributes(loop: ast.For) -> Iterator[str]:
    """Yield the attributes of ``self`` that a loop goes over, or takes items of."""
    items = (node.value for node in ast.walk(loop) if isinstance(node, ast.Subscript))
    for node in (*ast.walk(loop.iter), *items):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def _looks_for_tokens(loop: ast.For) -> bool:
    """Return whether a loop asks where a mask is true, or takes entries by a mask of its own number."""
    counted = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    masks = {
        name.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and any(_compares(part, counted) for part in ast.walk(node.value))
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "nonzero" or (node.func.attr == "where" and len(node.args) == 1 and not node.keywords):
                return True
        elif isinstance(node, ast.Subscript):
            parts = list(ast.walk(node.slice))
            if any((isinstance(part, ast.Name) and part.id in masks) or _compares(part, counted) for part in parts):
                return True
    return False


def _compares(node: ast.AST, counted: set[str]) -> bool:
    """Return whether an expression compares something with the number of a loop's turn."""
    sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
    return bool(sides) and any(isinstance(side, ast.Name) and side.id in counted for side in sides)
