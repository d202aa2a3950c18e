"""Text to statements, line by line, so that one malformed line hides nothing of the others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from .codes_language import MALFORMED
from .diagnostics import Diagnostic, Label
from .mistakes import diagnose
from .source import Source, Span
from .syntax import (
    Binding,
    Call,
    Dim,
    Ellipsis,
    Group,
    Item,
    Layout,
    Number,
    Phrase,
    Range,
    Split,
    Statement,
    String,
    Var,
    Word,
)

MAX_NESTING = 16
MAX_NUMBER = 40  # characters
CLOSES = {")": "(", "]": "[", "}": "{"}
Node = Tree[Token] | Token | None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plan: its statement if it has one and is well formed, and its comment without the ``#``."""

    statement: Statement | None
    comment: str | None
    diagnostic: Diagnostic | None = None


def parse(source: Source) -> tuple[tuple[Statement, ...], tuple[Diagnostic, ...]]:
    """The statements of every well-formed line, and a diagnostic for every other."""
    lines = tuple(parse_lines(source))
    return (
        tuple(line.statement for line in lines if line.statement is not None),
        tuple(line.diagnostic for line in lines if line.diagnostic is not None),
    )


def parse_lines(source: Source) -> Iterator[Line]:
    """Every line of the source, empty ones included."""
    start = 0
    for text in source.text.split("\n"):
        code = re.match(r'(?:[^"#]|"[^"]*")*', text)
        end = code.end() if code else 0
        comment = text[end + 1 :].strip() if text[end : end + 1] == "#" else None
        if not text[:end].strip(" \t\r") and (end == len(text) or comment is not None):
            yield Line(None, comment)
        else:
            yield _parse_line(source, start, text, comment)
        start += len(text) + 1


def parse_value(source: Source) -> Item | None:
    """The single item that is the whole text, or None if it is not one."""
    statements, diagnostics = parse(Source(source.name, "value " + source.text))
    if diagnostics or len(statements) != 1 or len(statements[0].phrases) != 1:
        return None
    items = statements[0].phrases[0].items
    return items[0] if len(items) == 1 else None


def _parse_line(source: Source, start: int, text: str, comment: str | None) -> Line:
    def malformed(message: str, at: int, to: int, help_: str) -> Line:
        label = Label(Span(source, start + at, start + to))
        return Line(None, comment, Diagnostic(MALFORMED, message, label, help=help_))

    unbalanced = _unbalanced(text)
    if unbalanced is not None:
        message, at, help_ = unbalanced
        return malformed(message, at, at + 1, help_)
    parser = _parser()
    try:
        tree = parser(text)
    except UnexpectedInput as error:
        message, help_ = diagnose(error, parser)
        at, to = _error_range(error, text)
        return malformed(message, at, to, help_)
    for token in tree.scan_values(lambda value: isinstance(value, Token) and value.type == "NUMBER"):
        if len(token) > MAX_NUMBER or not math.isfinite(Number(str(token), Span(source, 0, 0)).value):
            at = token.start_pos or 0
            return malformed("the number is too large", at, at + len(token), "write a number that a float can hold")
    return Line(_Builder(source, start).statement(tree), comment)


def _unbalanced(text: str) -> tuple[str, int, str] | None:
    """What is wrong with the quotes and brackets of a line: message, where, help."""
    opened: list[tuple[str, int]] = []
    for token in re.finditer(r'"[^"]*"?|#.*|[()\[\]{}]', text):
        mark, at = token.group(), token.start()
        if mark.startswith("#"):
            break
        if mark.startswith('"'):
            if len(mark) == 1 or not mark.endswith('"'):
                return "the string is not closed", at, 'a string ends with `"` on the same line'
        elif mark in CLOSES:
            if not opened:
                return f"`{mark}` closes nothing", at, f"remove it, or open with `{CLOSES[mark]}` before"
            bracket, since = opened.pop()
            if bracket != CLOSES[mark]:
                return f"`{bracket}` is closed by `{mark}`", since, f"close what was opened last first, before `{mark}`"
        else:
            opened.append((mark, at))
            if len(opened) > MAX_NESTING:
                return "brackets are nested too deeply", at, f"at most {MAX_NESTING} levels are read"
    if opened:
        bracket, at = opened[-1]
        return f"`{bracket}` is not closed", at, "close it on the same line: a statement is one line"
    return None


def _error_range(error: UnexpectedInput, text: str) -> tuple[int, int]:
    end = len(text.rstrip(" \t\r"))
    if isinstance(error, UnexpectedToken) and error.token.type != "$END":
        at = error.token.start_pos or 0
        return at, max(at + len(error.token), at + 1)
    if isinstance(error, UnexpectedCharacters):
        at = error.pos_in_stream or 0
        return at, at + 1
    return end, end + 1


@cache
def _parser() -> Callable[[str], Tree[Token]]:
    grammar = Path(__file__).with_name("plan.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", propagate_positions=True, maybe_placeholders=True).parse


class _Builder:
    """Turns lark's trees of one line into frozen syntax with spans in the whole source."""

    def __init__(self, source: Source, start: int) -> None:
        self._source = source
        self._start = start

    def statement(self, tree: Tree[Token]) -> Statement:
        verb, *phrases = tree.children
        assert isinstance(verb, Token)
        return Statement(self._word(verb), tuple(map(self._phrase, phrases)), self._span(tree))

    def _span(self, node: Tree[Token] | Token) -> Span:
        where = node if isinstance(node, Token) else node.meta
        return Span(self._source, self._start + (where.start_pos or 0), self._start + (where.end_pos or 0))

    def _word(self, token: Token) -> Word:
        return Word(str(token), self._span(token))

    def _phrase(self, node: Node) -> Phrase:
        assert isinstance(node, Tree)
        return Phrase(tuple(map(self._item, node.children)), self._span(node))

    def _item(self, node: Node) -> Item:
        assert node is not None
        if isinstance(node, Token):
            return self._token(node)
        return _ITEMS[node.data](self, node.children, self._span(node))

    def _token(self, token: Token) -> Item:
        text, span = str(token), self._span(token)
        if token.type == "NUMBER":
            return Number(text, span)
        if token.type == "STRING":
            return String(text[1:-1], span)
        if token.type == "VAR":
            return Var(text[1:], span)
        if token.type == "ELLIPSIS":
            return Ellipsis(span)
        return Word(text, span)

    def _binding(self, children: list[Tree[Token] | Token], span: Span) -> Item:
        name, value = children
        assert isinstance(name, Token)
        return Binding(self._word(name), self._item(value), span)

    def _split(self, children: list[Tree[Token] | Token], span: Span) -> Item:
        first, *rest = children
        assert isinstance(first, Token)
        name = self._word(first) if first.type == "WORD" else None
        parts = [self._item(node) for node in rest if node is not None]
        size = parts.pop() if rest[-1] is not None else None
        assert size is None or isinstance(size, Number | Var)
        return Split(name, tuple(part for part in parts if isinstance(part, Word | Var)), size, span)

    def _range(self, children: list[Tree[Token] | Token], span: Span) -> Item:
        low, high = map(self._item, children)
        assert isinstance(low, Number | Var) and isinstance(high, Number | Var)
        return Range(low, high, span)

    def _call(self, children: list[Tree[Token] | Token], span: Span) -> Item:
        name, *arguments = children
        return Call(str(name)[:-1], tuple(self._item(node) for node in arguments if node is not None), span)

    def _layout(self, children: list[Tree[Token] | Token], span: Span) -> Item:
        dims = [node for node in children if isinstance(node, Tree)]
        return Layout(tuple(Dim(tuple(map(self._item, dim.children)), self._span(dim)) for dim in dims), span)

    def _group(self, children: list[Tree[Token] | Token], span: Span) -> Item:
        terms: list[list[Phrase]] = [[]]
        for node in children:
            if isinstance(node, Token):
                terms.append([])
            elif node is not None:
                terms[-1].append(self._phrase(node))
        return Group(tuple(map(tuple, terms)) if terms[0] else (), span)


_ITEMS: dict[str, Callable[[_Builder, list[Tree[Token] | Token], Span], Item]] = {
    "binding": _Builder._binding,
    "split": _Builder._split,
    "range": _Builder._range,
    "call": _Builder._call,
    "layout": _Builder._layout,
    "group": _Builder._group,
}
