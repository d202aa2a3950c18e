"""The one canonical text of statements, and of a whole plan file with its comments."""

from __future__ import annotations

from collections.abc import Iterable

from . import syntax
from .diagnostics import PlanError
from .parse import parse_lines
from .source import Source
from .syntax import Dim, Item, Phrase, Statement

VERB_WIDTH = 9  # phrases start in one column: the longest everyday verb is `recompute`


def format_statements(statements: Iterable[Statement]) -> str:
    """Return one line for each statement; they parse to the same statements."""
    return "".join(format_statement(statement) + "\n" for statement in statements)


def format_statement(statement: Statement) -> str:
    """Return the statement's canonical line, without a newline.

    >>> from .parse import parse
    >>> print(format_statement(parse(Source("p", "mesh  dp = 2 ,tp=2"))[0][0]))
    mesh      dp=2, tp=2
    """
    phrases = " + ".join(" ".join(map(format_phrase, term)) for term in (statement.phrases, *statement.added))
    return f"{statement.verb.text:<{VERB_WIDTH}} {phrases}".rstrip()


def format_source(source: Source) -> str:
    """Return the canonical text of a plan file: comments stay, blank lines are at most one, and the end is one newline.

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
    """Return items joined by commas."""
    return ", ".join(map(format_item, phrase.items))


def format_item(item: Item | Dim) -> str:
    """Return the canonical text of one item."""
    match item:
        case syntax.Word(text) | syntax.Number(text):
            return text
        case syntax.String(text):
            return f'"{text}"'
        case syntax.Var(name):
            return f"${name}"
        case syntax.Ellipsis():
            return "..."
        case syntax.Setting(name, value):
            return f"{name.text}={format_item(value)}"
        case syntax.SplitItem(name, axes, size):
            after = "" if size is None else f"={format_item(size)}"
            return (name.text if name is not None else "") + "".join(f"/{format_item(axis)}" for axis in axes) + after
        case syntax.Range(low, high):
            return f"{format_item(low)}..{format_item(high)}"
        case syntax.Open(values):
            return " | ".join(map(format_item, values)) or "?"
        case syntax.Call(name, arguments):
            return f"{name}({', '.join(map(format_item, arguments))})"
        case syntax.Layout(dims):
            return f"[{', '.join(map(format_item, dims))}]"
        case syntax.Dim(items):
            return " ".join(map(format_item, items))
        case syntax.Group(terms):
            return "(" + " + ".join(" ".join(map(format_phrase, term)) for term in terms) + ")"
