"""The replacement of ``$name`` in statements by the values of ``let``, ``-D name=value`` and an ``include``'s
arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .codes import BAD_VALUE, NO_EFFECT, REPEATED, UNDEFINED_NAME, UNKNOWN_DEFINE, WRONG_KIND
from .diagnostics import Diagnostic, Label, Severity
from .nearest import did_you_mean, listed
from .parse import LONGEST, parse_value
from .source import Source, Span
from .syntax import (
    KIND_NAMES,
    Call,
    Group,
    Item,
    Layout,
    Number,
    Open,
    Phrase,
    Range,
    Setting,
    SplitItem,
    Statement,
    String,
    Var,
    Word,
)

LET = "let"
IN_STRING = re.compile(r"\$([A-Za-z_]\w*)")
LetValue = Number | Word | String | Range


@dataclass(frozen=True, slots=True)
class OpenLet:
    """A name of a `let` whose value is chosen later: one of ``values``, or, without any, what the ranks leave."""

    name: str
    values: tuple[LetValue, ...]
    span: Span
    """The place of the values."""

    @property
    def text(self) -> str:
        """The values as written: ``1 | 2 | 4``."""
        return " | ".join(value.span.text for value in self.values) or "?"


class Substituted(NamedTuple):
    """The statements of a file without ``$name``. Where a `let` is ``open``, its first value stands for it, 1 for
    ``?``, and ``uses`` are the statements that read such names, each with these."""

    statements: tuple[Statement, ...]
    diagnostics: tuple[Diagnostic, ...]
    open: tuple[OpenLet, ...]
    uses: tuple[tuple[Statement, frozenset[str]], ...]
    settings: tuple[tuple[Setting, frozenset[str]], ...]
    """The pairs ``name=value`` that read such names, with these."""


@dataclass(frozen=True, slots=True)
class _Override:
    """The value of a ``-D`` or an include's argument, or None if it is no value; ``said`` is its name in messages."""

    value: LetValue | None
    span: Span
    said: str
    help: str


def substitute(
    statements: Sequence[Statement], defines: Mapping[str, str], include_arguments: Sequence[Setting] = (),
    open_arguments: Mapping[str, frozenset[str]] | None = None,
) -> Substituted:  # fmt: skip
    """Replace every ``$name``. ``defines`` (from ``-D``) and ``include_arguments`` (if this file is included) override
    the values of ``let``, and nothing else. ``open_arguments`` are those whose values are chosen later, each with
    the names that choose it.

    Statements that cannot be replaced are left out, with a diagnostic. A value keeps the span of its use, so later
    messages point at the line that uses it.
    """
    scope = _Scope(open_arguments or {})
    overrides = {name: _define(name, text) for name, text in defines.items()}
    overrides.update((binding.name.text, _argument(binding)) for binding in include_arguments)
    values = {name: override.value for name, override in overrides.items()}
    for statement in statements:
        if statement.verb.text == LET:
            scope.define_all(statement, values)
    lets = tuple(scope.values)
    for name, override in overrides.items():
        if name not in scope.values:
            known = f"the plan's names are {listed(lets)}" if lets else "this plan has no `let`"
            message = f"no `let` defines `{name}`"
            help_ = did_you_mean(name, lets, known)
            scope.diagnostics.append(Diagnostic(UNKNOWN_DEFINE, message, Label(override.span), help=help_))
        elif override.value is None:
            message = f"the value of {override.said} is not a number, a word or a text without quotes"
            scope.diagnostics.append(Diagnostic(UNKNOWN_DEFINE, message, Label(override.span), help=override.help))
    result = [scope.lets.get(id(statement)) or scope.statement(statement) for statement in statements]
    scope.report_unused()
    kept = tuple(statement for statement in result if statement)
    return Substituted(
        kept, tuple(scope.diagnostics), tuple(scope.open.values()), tuple(scope.uses), tuple(scope.settings)
    )


def _define(name: str, text: str) -> _Override:
    """Return the value of one ``-D``: an item if the text is one, else a string."""
    source = Source.option(name, text)
    span = Span(source, 0, len(text))
    said, help_ = f"`-D {name}`", f"write one value: `-D {name}=2`"
    item = parse_value(source)
    if isinstance(item, LetValue):
        return _Override(item, span, said, help_)
    if any(character in text for character in '"$\r\n') or not text.isprintable():
        return _Override(None, span, said, help_)
    return _Override(String(text, span), span, said, help_)


def _argument(binding: Setting) -> _Override:
    """Return the value of one argument of an ``include``."""
    name, value = binding.name.text, binding.value
    kept = value if isinstance(value, LetValue) else None
    return _Override(kept, binding.span, f"`{name}`", f"write one value: `{name}=2`")


class _Scope:
    """The names known so far, and the walk that replaces them."""

    def __init__(self, open_arguments: Mapping[str, frozenset[str]]) -> None:
        self._open_arguments = open_arguments
        self.values: dict[str, LetValue] = {}
        self.spans: dict[str, Span] = {}
        self.lets: dict[int, Statement] = {}
        self.diagnostics: list[Diagnostic] = []
        self.open: dict[str, OpenLet] = {}
        self.uses: list[tuple[Statement, frozenset[str]]] = []
        self.settings: list[tuple[Setting, frozenset[str]]] = []
        self._open_in: dict[str, frozenset[str]] = {}  # the open names that the value of each name depends on
        self._read: frozenset[str] = frozenset()  # those that the value or the statement at hand depends on
        self._failed: set[str] = set()
        self._used: set[str] = set()
        self._complete = True  # whether every name of the current statement was replaced

    def define_all(self, statement: Statement, overrides: Mapping[str, LetValue | None]) -> None:
        """Read one ``let``; its values may use earlier names."""
        phrases = []
        for phrase in statement.phrases:
            items = (self._define(item, overrides) if isinstance(item, Setting) else item for item in phrase.items)
            phrases.append(replace(phrase, items=tuple(items)))
        self.lets[id(statement)] = replace(statement, phrases=tuple(phrases))

    def _define(self, binding: Setting, overrides: Mapping[str, LetValue | None]) -> Setting:
        name = binding.name.text
        if name in self.values or name in self._failed:
            message = f"`{name}` is defined twice"
            related = (Label(self.spans[name], "defined here first"),)
            self.diagnostics.append(
                Diagnostic(REPEATED, message, Label(binding.name.span), related, help="remove one, or rename it")
            )
            return binding
        self.spans[name] = binding.name.span
        before, self._read = len(self.diagnostics), frozenset()
        value = self._item(binding.value)
        if isinstance(value, Open) and not all(isinstance(one, LetValue) for one in value.values):
            value = next(one for one in value.values if not isinstance(one, LetValue))
        if not isinstance(value, LetValue | Open):
            self._failed.add(name)
            if len(self.diagnostics) == before:
                message = f"`{name}` is {KIND_NAMES[type(value)]}: a `let` holds numbers, words, strings or ranges"
                help_ = "write such a value after `=`"
                self.diagnostics.append(Diagnostic(WRONG_KIND, message, Label(binding.value.span), help=help_))
            return binding
        override = overrides.get(name)
        if override is not None:
            # what replaces a string is a string, even where it would read as a word or a number
            value = override if not isinstance(value, String) else String(_text_in_string(override), override.span)
            self._read = self._open_arguments.get(name, frozenset())
        elif isinstance(value, Open):
            alternatives = tuple(one for one in value.values if isinstance(one, LetValue))
            self.open[name] = OpenLet(name, alternatives, value.span)
            self._read |= {name}
            value = alternatives[0] if alternatives else Number("1", value.span)
        assert isinstance(value, LetValue)
        self.values[name] = value
        self._open_in[name] = self._read
        return replace(binding, value=value)

    def report_unused(self) -> None:
        """Warn of every ``let`` name that nothing uses, unless a name is misspelt: it is then too early to tell."""
        for name in self.values:
            if name not in self._used and self._used <= self.spans.keys():
                message = f"nothing uses `${name}`"
                label = Label(self.spans[name])
                self.diagnostics.append(
                    Diagnostic(NO_EFFECT, message, label, help="remove the name", severity=Severity.WARNING)
                )

    def statement(self, statement: Statement) -> Statement | None:
        """Return the statement without ``$name``, or None if one of them has no value that fits."""
        self._complete, self._read = True, frozenset()
        added = tuple(tuple(map(self._phrase, term)) for term in statement.added)
        result = replace(statement, phrases=tuple(map(self._phrase, statement.phrases)), added=added)
        if self._read and self._complete:
            self.uses.append((result, self._read))
        return result if self._complete else None

    def _phrase(self, phrase: Phrase) -> Phrase:
        return replace(phrase, items=tuple(map(self._item, phrase.items)))

    def _item(self, item: Item) -> Item:
        if isinstance(item, Var):
            value = self._find(item.name, item.span)
            return item if value is None else replace(value, span=item.span)
        if isinstance(item, String):
            return self._string(item)
        if isinstance(item, Word):
            return self._name(item)
        if isinstance(item, Setting):
            before, self._read = self._read, frozenset()
            setting = replace(item, name=self._name(item.name), value=self._item(item.value))
            if self._read:
                self.settings.append((setting, self._read))
            self._read |= before
            return setting
        if isinstance(item, Open):
            return replace(item, values=tuple(map(self._item, item.values)))
        if isinstance(item, SplitItem):
            name = None if item.name is None else self._name(item.name)
            axes = tuple(self._needed(axis, (Word, Var), "an axis name") for axis in item.axes)
            size = None if item.size is None else self._needed(item.size, (Number, Var), "a number")
            return replace(item, name=name, axes=axes, size=size)
        if isinstance(item, Range):
            low, high = (self._needed(end, (Number, Var), "a number") for end in (item.low, item.high))
            return replace(item, low=low, high=high)
        if isinstance(item, Call):
            return replace(item, arguments=tuple(map(self._item, item.arguments)))
        if isinstance(item, Layout):
            return replace(item, dims=tuple(replace(dim, items=tuple(map(self._item, dim.items))) for dim in item.dims))
        if isinstance(item, Group):
            return replace(item, terms=tuple(tuple(map(self._phrase, term)) for term in item.terms))
        return item

    def _needed(self, item: Item, kinds: tuple[type, ...], wanted: str) -> Any:
        """Return the item with names replaced; report an error, and return it unchanged, if it is of none of these
        kinds."""
        value = self._item(item)
        if isinstance(value, kinds):
            return value
        self._complete = False
        message = f"this is {KIND_NAMES[type(value)]}: {wanted} is needed here"
        help_ = f"give {wanted} to the `let`, or write one here"
        self.diagnostics.append(Diagnostic(WRONG_KIND, message, Label(item.span), help=help_))
        return item

    def _name(self, word: Word) -> Word:
        """Return a dotted name, or a pattern of names, with values as its segments, numbers or alternatives."""
        if "$" not in word.text:
            return word
        text = self._replaced(word)
        if "$" not in text and not isinstance(parse_value(Source(word.span.source.name, text)), Word):
            self._complete = False
            message, help_ = f"`{word.text}` is `{text}`, which is no name", "give the `let` a number or a word"
            self.diagnostics.append(Diagnostic(WRONG_KIND, message, Label(word.span), help=help_))
        return replace(word, text=text)

    def _replaced(self, item: String | Word) -> str:
        def text(match: re.Match[str]) -> str:
            value = self._find(match[1], item.span)
            return match[0] if value is None else _text_in_string(value)

        return IN_STRING.sub(text, item.text)

    def _string(self, string: String) -> String:
        whole = self._replaced(string)
        if len(whole) > LONGEST:  # lets that contain lets grow exponentially
            self._complete = False
            message, help_ = f"the text has {len(whole):,} characters", f"write at most {LONGEST:,}"
            self.diagnostics.append(Diagnostic(BAD_VALUE, message, Label(string.span), help=help_))
            return string
        return replace(string, text=whole)

    def _find(self, name: str, span: Span) -> LetValue | None:
        self._used.add(name)
        if name in self.values:
            self._read |= self._open_in[name]
            return self.values[name]
        self._complete = False
        if name not in self._failed:
            known = f"the plan's names are {listed(self.values)}" if self.values else "add a line `let`"
            message = f"`${name}` is not defined"
            help_ = did_you_mean(name, self.values, f"{known}; or add `let {name}=...`")
            self.diagnostics.append(Diagnostic(UNDEFINED_NAME, message, Label(span), help=help_))
        return None


def _text_in_string(value: LetValue) -> str:
    """Return the text that a value has inside a string."""
    return value.span.text if isinstance(value, Range) else value.text
