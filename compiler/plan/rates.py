"""Arguments of `optimizer` lines: tables of learning rates, parameter groups, and the clauses that each optimizer
takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ...grammar.codes import BAD_VALUE, MISSING_ARGUMENT, UNEXPECTED_ARGUMENT, UNREADABLE
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ...grammar.nearest import listed, path_meant
from ...grammar.source import Source, Span
from ...grammar.syntax import Dim, Layout, Number, Phrase, Statement, String, Word
from ...grammar.usage import Arguments
from ..program.optimizers import OPTIMIZERS
from .directive import NOT_NEGATIVE, Directive, Limit, Literal, Scope, argument, check_literals, read_literals
from .include import read_text

Rates = tuple[tuple[int, float], ...]
"""Ascending steps, counted from 1, with their rates."""
RATE_TABLE = "table"
_ROW_HELP = "a row is a step and its rate, as `100 3e-4`"
_STEP_HELP = "count steps from 1, each row a later one than the row before"


def rates_of(statement: Statement) -> Rates:
    """Return the rates of a statement's `lr table …`; none without one.

    Raises:
        PlanError: the file cannot be read, or a row is not a step and a rate; the row is named.
    """
    table = table_of(statement)
    if table is None:
        return ()
    rows: list[tuple[int, float]] = []
    for dim in table.dims:
        numbers = [item for item in dim.items if isinstance(item, Number) and not item.unit]
        if len(numbers) != 2 or len(dim.items) != 2:
            raise _table_error(f"`{dim.span.text}` is no step and its rate", dim.span, _ROW_HELP)
        step, rate = numbers[0].value, float(numbers[1].value)
        if not isinstance(step, int) or step < 1:
            raise _table_error(f"`{numbers[0].text}` is no step", numbers[0].span, _STEP_HELP)
        if rows and step <= rows[-1][0]:
            raise _table_error(f"step {step} does not come after step {rows[-1][0]}", numbers[0].span, _STEP_HELP)
        if not (math.isfinite(rate) and rate >= 0):
            raise _table_error(f"`{numbers[1].text}` is no rate", numbers[1].span, "write a number that is 0 or more")
        rows.append((step, rate))
    return tuple(rows)


def table_of(statement: Statement) -> Layout | None:
    """Return the layout behind a statement's `lr table`, read from the file if it names one; None without a table.

    Raises:
        PlanError: the file cannot be read, or has no rows.
    """
    at = _table_at(statement)
    (item,) = statement.phrases[at].items if at is not None else (None,)
    return _read_table(item) if isinstance(item, String) else item if isinstance(item, Layout) else None


def with_table(statement: Statement) -> Statement:
    """Return a statement with the file that its `lr table` names replaced by the file's rows.

    Raises:
        PlanError: the file cannot be read, or has no rows.
    """
    at, table = _table_at(statement), table_of(statement)
    if at is None or table is None:
        return statement
    phrases = (*statement.phrases[:at], Phrase((table,), statement.phrases[at].span), *statement.phrases[at + 1 :])
    return Statement(statement.verb, phrases, statement.span, statement.added)


def _table_at(statement: Statement) -> int | None:
    """Return the index of the phrase behind `lr table`, None without one."""
    words = [phrase.span.text for phrase in statement.phrases]
    at = next((at for at in range(2, len(words)) if words[at - 2 : at] == ["lr", RATE_TABLE]), None)
    return at if at is not None and len(statement.phrases[at].items) == 1 else None


def _read_table(file: String) -> Layout:
    source = file.span.source
    folder = source.path.parent if source.path is not None else Path()
    text, reason = read_text(folder / file.text)
    if text is None:
        help_ = path_meant(folder / file.text, Path.is_file, f"{_ROW_HELP}; the name is relative to the plan's")
        message = f"`{file.text}` cannot be read: {reason}"
        raise PlanError([Diagnostic(UNREADABLE, message, Label(file.span), help=help_)])
    table = Source(file.text, text, file.span)
    lines = text.split("\n")
    starts = accumulate((len(line) + 1 for line in lines), initial=0)
    rows = [row for line, start in zip(lines, starts, strict=False) if (row := _row(table, line, start)) is not None]
    if not rows:
        raise _table_error(f"`{file.text}` has no rows", file.span, _ROW_HELP)
    return Layout(tuple(rows), file.span)


def _row(table: Source, line: str, start: int) -> Dim | None:
    """Return one line of a file as a row; None for an empty one or a comment."""
    line = line.partition("#")[0]
    words = [(match[0], Span(table, start + match.start(), start + match.end())) for match in _FIELD.finditer(line)]
    if not words:
        return None
    span = words[0][1].to(words[-1][1])
    if len(words) != 2 or not all(_DECIMAL.fullmatch(text) for text, _ in words):
        raise _table_error(f"`{span.text[:80]}` is no step and its rate", span, _ROW_HELP)
    return Dim(tuple(Number(text, place) for text, place in words), span)


_FIELD = re.compile(r"[^\s,;]+")
_DECIMAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def _table_error(message: str, span: Span, help_: str) -> PlanError:
    return PlanError([Diagnostic(BAD_VALUE, message, Label(span), help=help_)])


# ---- parameter groups


CLAUSES = tuple(dict.fromkeys(clause for row in OPTIMIZERS.values() for clause in row.clauses))
"""The clauses that only some optimizers take."""
COMMON = ("lr", "weight_decay")
"""The clauses that every optimizer takes, and every group of parameters."""
LIMITS: tuple[tuple[str, Limit], ...] = (
    *((name, NOT_NEGATIVE) for name in ("lr", "weight_decay", "eps", "momentum")),
    ("betas", (lambda value: 0 <= value < 1, "from 0 to below 1")),
)


@dataclass(frozen=True)
class OptimizerGroup(Directive):
    """A line ``optimizer on WHERE …``: a group of parameters with arguments of its own."""

    USAGE = ""  # the second form of `optimizer`
    ONCE = False
    LIMITS = LIMITS

    where: tuple[Word, ...] = argument(lambda line: line.words("on"))
    values: tuple[tuple[str, Literal], ...] = argument(lambda line: read_literals(line.bindings("args")))

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the group, as a build's manifest has them."""
        clauses: dict[str, Any] = {}
        for name in (*COMMON, *CLAUSES):
            if name in self.arguments:
                numbers = [float(number) for number in self.arguments.numbers(name)]
                clauses[name] = numbers if name == "betas" else numbers[0] if numbers else True
        return clauses | dict(self.values)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        if any(not isinstance(item, Number) for item in self.arguments.items("lr")):
            message, label = "the rate of a group is a number", Label(self.arguments.span("lr"))
            help_ = "remove the word before it: in every step the group keeps its ratio to the optimizer's own rate"
            yield Diagnostic(BAD_VALUE, message, label, help=help_)
        if not self.given and not self.arguments.bindings("args"):
            help_ = f"give it {listed(COMMON, 'or')}, or another argument of the optimizer"
            yield Diagnostic(MISSING_ARGUMENT, "the group gives no argument", Label(self.span), help=help_)


def untaken(arguments: Arguments, optimizer: str) -> Iterator[Diagnostic]:
    """Yield errors for arguments of a line that its optimizer, one of ``OPTIMIZERS``, does not take."""
    row = OPTIMIZERS[optimizer]
    for clause in CLAUSES:
        if clause in arguments and clause not in row.clauses:
            owners = [f"`{name}`" for name, other in OPTIMIZERS.items() if clause in other.clauses]
            help_ = f"remove it: `{clause}` is a clause of {', '.join(owners)}"
            label = Label(arguments.span(clause))
            yield Diagnostic(UNEXPECTED_ARGUMENT, f"`{optimizer}` has no `{clause}`", label, help=help_)
    yield from check_literals(arguments, "args")
    for binding in arguments.bindings("args"):
        for name, value in read_literals((binding,)):
            label, known = Label(binding.span), row.arguments
            if name not in known:
                help_ = f"in parentheses it takes {listed([*known])}" if known else "it takes none in parentheses"
                if name in (*CLAUSES, *COMMON, "clip"):
                    help_ = f"write `{name} {value}` without parentheses"
                message = f"`{optimizer}` has no argument `{name}`"
                yield Diagnostic(UNEXPECTED_ARGUMENT, message, label, help=help_)
            elif not _is_of_kind(value, known[name]):
                wanted = "`true` or `false`" if known[name] is bool else "a number, not below 0"
                yield Diagnostic(BAD_VALUE, f"`{name}` is {wanted}", label, help=f"remove it, or write {wanted}")


def _is_of_kind(value: Literal, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
