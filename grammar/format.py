"""The one canonical text of statements, and of a whole plan file with its comments."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch

from .diagnostics import PlanError
from .parse import parse_lines
from .source import Source
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

VERB_WIDTH = 9  # phrases start in one column: the longest everyday verb is `recompute`


def format_statements(statements: Iterable[Statement]) -> str:
    """One line a statement; parsing it gives the same statements."""
    return "".join(format_statement(statement) + "\n" for statement in statements)


def format_statement(statement: Statement) -> str:
    """The statement's canonical line, without a newline.

    >>> from .parse import parse
    >>> print(format_statement(parse(Source("p", "mesh  dp = 2 ,tp=2"))[0][0]))
    mesh      dp=2, tp=2
    """
    phrases = " ".join(map(format_phrase, statement.phrases))
    return f"{statement.verb.text:<{VERB_WIDTH}} {phrases}".rstrip()


def format_source(source: Source) -> str:
    """Canonical text of a plan file: comments stay, blank lines are at most one, and the end is one newline.

    Raises:
        PlanError: the text is malformed; nothing is formatted then.
    """
    lines = tuple(parse_lines(source))
    malformed = [line.diagnostic for line in lines if line.diagnostic is not None]
    if malformed:
        raise PlanError(malformed)
    out: list[str] = []
    for line in lines:
        comment = None if line.comment is None else f"# {line.comment}".rstrip()
        text = "" if line.statement is None else format_statement(line.statement)
        text = "  ".join(part for part in (text, comment) if part)
        if text or (out and out[-1]):
            out.append(text)
    return "\n".join(out).rstrip("\n") + "\n" if any(out) else ""


def format_phrase(phrase: Phrase) -> str:
    """Items joined by commas."""
    return ", ".join(map(format_item, phrase.items))


@singledispatch
def format_item(item: Item) -> str:
    """Canonical text of one item."""
    raise TypeError(f"not an item: {item!r}")


@format_item.register(Word)
@format_item.register(Number)
def _text(item: Word | Number) -> str:
    return item.text


@format_item.register
def _string(item: String) -> str:
    return f'"{item.text}"'


@format_item.register
def _var(item: Var) -> str:
    return f"${item.name}"


@format_item.register
def _ellipsis(_: Ellipsis) -> str:
    return "..."


@format_item.register
def _binding(item: Binding) -> str:
    return f"{item.name.text}={format_item(item.value)}"


@format_item.register
def _split(item: Split) -> str:
    name = "" if item.name is None else item.name.text
    size = "" if item.size is None else f"={format_item(item.size)}"
    return name + "".join(f"/{format_item(axis)}" for axis in item.axes) + size


@format_item.register
def _range(item: Range) -> str:
    return f"{format_item(item.low)}..{format_item(item.high)}"


@format_item.register
def _call(item: Call) -> str:
    return f"{item.name}({', '.join(map(format_item, item.arguments))})"


@format_item.register
def _layout(item: Layout) -> str:
    return f"[{', '.join(map(_dim, item.dims))}]"


@format_item.register
def _group(item: Group) -> str:
    return "(" + " + ".join(" ".join(map(format_phrase, term)) for term in item.terms) + ")"


def _dim(dim: Dim) -> str:
    return " ".join(map(format_item, dim.items))
