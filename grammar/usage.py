"""A directive's USAGE line, and the match of a statement with it into named arguments.

``column WHERE over AXIS [rows DIMS]``: the verb, then the subject (words in capitals, one phrase each), and keyword
clauses in any order, each once, after it or between its words. A keyword takes one phrase, or none: then it is a flag;
it may be several words. What stands in ``[]`` may be left out; `` | `` separates whole alternatives. A word in capitals
names its kind in ``ARGUMENT_KINDS``. ``[+ ...]`` at the end: further terms of the same forms may follow, each after a
``+``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from .codes import MISSING_ARGUMENT, REPEATED, UNEXPECTED_ARGUMENT, WRONG_KIND
from .diagnostics import Code, Diagnostic, Label
from .nearest import did_you_mean
from .source import Span
from .syntax import KIND_NAMES, Call, Group, Item, Layout, Number, Phrase, Setting, Statement, String, Word

# ---- kinds of arguments


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """A placeholder of a usage line: it stands for ``count`` items (0: one or more) that ``accepts`` takes."""

    text: str
    accepts: Callable[[Item], bool]
    count: int = 1
    rest: bool = False  # takes every remaining phrase, as one
    leads: frozenset[str] = frozenset()  # words that may stand before the items, as a phrase of their own


def _is_name(item: Item) -> bool:
    return isinstance(item, Word) and item.text.isidentifier()


def _is_where(item: Item) -> bool:
    return isinstance(item, Word) or (isinstance(item, Number) and not item.unit and not item.text.startswith("-"))


def _is_number(item: Item) -> bool:
    return isinstance(item, Number) and not item.unit


def _is_rate(item: Item) -> bool:
    return _is_number(item) or isinstance(item, String | Layout)


def _is_size(item: Item) -> bool:
    return isinstance(item, Number) and item.unit == "B" and item.value > 0


def _is_output(item: Item) -> bool:
    return (
        isinstance(item, Call) and item.name == "out" and bool(item.arguments) and all(map(_is_where, item.arguments))
    )


def _is_value(item: Item) -> bool:
    if not isinstance(item, Call) or item.name not in ("in", "out"):
        return _is_where(item)
    name, *number = item.arguments or (None,)
    whole = all(isinstance(one, Number) and one.text.isdecimal() for one in number)
    return name is not None and _is_where(name) and len(number) < 2 and whole


ARGUMENT_KINDS: dict[str, ArgumentKind] = {
    "NAME": ArgumentKind("a name", _is_name),
    "AXIS": ArgumentKind("a mesh axis", _is_name),
    "AXES": ArgumentKind("mesh axes", _is_name, count=0),
    "TYPE": ArgumentKind("a type", _is_name),
    "PATH": ArgumentKind("a dotted name", lambda item: isinstance(item, Word)),
    "WHERE": ArgumentKind("names or patterns of modules or parameters", _is_where, count=0),
    "VALUES": ArgumentKind("names or patterns of parameters or inputs, or `out(MODULE)`", _is_value, count=0),
    "OUTPUTS": ArgumentKind("outputs of modules, such as `out(blocks.3)`", _is_output, count=0),
    "SCHEDULE": ArgumentKind("a schedule", lambda item: isinstance(item, Word)),
    "STATES": ArgumentKind("`optimizer`, `parameters` or `activations`", _is_name, count=0),
    "LEVEL": ArgumentKind("a level from 0 to 3", lambda item: isinstance(item, Number) and item.is_integer),
    "N": ArgumentKind("a whole number", lambda item: isinstance(item, Number) and item.is_integer),
    "X": ArgumentKind("a number", _is_number),
    "RATE": ArgumentKind(
        "a number, `cosine`, `linear` or `wsd` and a number, or `table` and a file or rows",
        _is_rate,
        leads=frozenset({"cosine", "linear", "wsd", "table"}),
    ),
    "SCALE": ArgumentKind(
        "a number, or `dynamic`", lambda item: _is_number(item) or (isinstance(item, Word) and item.text == "dynamic")
    ),
    "SIZE": ArgumentKind("a size such as `20GB`", _is_size),
    "OPS": ArgumentKind("operators, such as `products` or `attention`", _is_name, count=0),
    "OP": ArgumentKind("a collective such as `all_gather`", _is_name),
    "PAIR": ArgumentKind("two numbers, such as `0.9, 0.95`", _is_number, count=2),
    "LAYOUT": ArgumentKind("a layout such as `[B/dp, _]`", lambda item: isinstance(item, Layout)),
    "DIMS": ArgumentKind("sub-dims such as `(3 h/tp d)`", lambda item: isinstance(item, Group)),
    "CALL": ArgumentKind("a call such as `cross_entropy(output, targets)`", lambda item: isinstance(item, Call)),
    "CALLABLE": ArgumentKind('a callable such as `"file.py:fn"`', lambda item: isinstance(item, String)),
    "ARGS": ArgumentKind("arguments in parentheses", lambda item: isinstance(item, Group) and len(item.terms) <= 1),
    "DIVISOR": ArgumentKind("a number or an input", lambda item: _is_number(item) or _is_name(item)),
    "FILE": ArgumentKind("a name in double quotes", lambda item: isinstance(item, String)),
    # a word is a mistake that the directive explains
    "TABLE": ArgumentKind("a file's name in double quotes", lambda item: isinstance(item, String | Word)),
    "GLOBS": ArgumentKind("strings", lambda item: isinstance(item, String), count=0),
    "NAME=VALUE,...": ArgumentKind(
        "`name=value` pairs", lambda item: isinstance(item, Setting) and _is_name(item.name), count=0
    ),
    "NAME=SIZE,...": ArgumentKind("`NAME=SIZE` pairs", lambda item: True, count=0, rest=True),
}


# ---- usage lines


T = TypeVar("T")
_FORMS_SHOWN = 3
SUM = " [+ ...]"
"""The end of a usage line whose statements may be sums."""
DIVIDED = "/"
"""The keyword before what divides a term."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One argument of a form: a placeholder of the subject, or a keyword clause (a flag without a placeholder)."""

    name: str
    placeholder: str | None
    keyword: bool
    required: bool

    @property
    def text(self) -> str:
        """The argument as a usage line has it."""
        return f"{self.name if self.keyword else ''} {self.placeholder or ''}".strip()


@dataclass(frozen=True)
class Arguments:
    """A statement's arguments by name: placeholders of the subject in small letters, keyword clauses by keyword."""

    statement: Statement
    phrases: dict[str, Phrase]
    """The items of each argument; of a flag, its words."""
    added: tuple[Arguments, ...] = ()
    """The arguments of each further term of a statement that is a sum."""

    @property
    def terms(self) -> tuple[Arguments, ...]:
        """The arguments of each term of a sum, the first included."""
        return self, *self.added

    def __contains__(self, name: str) -> bool:
        return name in self.phrases

    def items(self, name: str) -> tuple[Item, ...]:
        """The items of an argument; none if it was left out."""
        return self.phrases[name].items if name in self.phrases else ()

    def words(self, name: str) -> tuple[Word, ...]:
        """Return the words of an argument; a number counts as a name."""
        return tuple(Word(item.text, item.span) for item in self.items(name) if isinstance(item, Word | Number))

    def word(self, name: str) -> Word | None:
        """The one word of an argument."""
        return next(iter(self.words(name)), None)

    def text(self, name: str, default: str = "") -> str:
        """The text of the one word or string of an argument."""
        return next((item.text for item in self.items(name) if isinstance(item, Word | String)), default)

    def numbers(self, name: str) -> tuple[int | float, ...]:
        """The values of the numbers of an argument."""
        return tuple(item.value for item in self.items(name) if isinstance(item, Number))

    def number(self, name: str, default: T) -> int | float | T:
        """The one number of an argument."""
        return next(iter(self.numbers(name)), default)

    def bindings(self, name: str) -> tuple[Setting, ...]:
        """The ``name=value`` items of an argument, or of the one group in parentheses that it is."""
        return tuple(item for item in self.flat(name) if isinstance(item, Setting))

    def flat(self, name: str) -> tuple[Item, ...]:
        """Return the items of an argument, with groups replaced by their items."""
        out: list[Item] = []
        for item in self.items(name):
            if isinstance(item, Group):
                out.extend(inner for term in item.terms for phrase in term for inner in phrase.items)
            else:
                out.append(item)
        return tuple(out)

    def span(self, name: str) -> Span:
        """Return the place of an argument in the text, or of the whole statement if the argument was left out."""
        return self.phrases[name].span if name in self.phrases else self.statement.span


@dataclass(frozen=True)
class Usage:
    """A parsed USAGE line: its verb and its alternative forms."""

    text: str
    verb: str
    forms: tuple[tuple[Slot, ...], ...]
    sums: bool = False
    """True where a statement may have further terms of these forms, each after a ``+``."""

    def shown(self, form: tuple[Slot, ...]) -> str:
        """Return the usage for a message: of many forms the closest alone."""
        if len(self.forms) <= _FORMS_SHOWN:
            return self.text
        return " ".join([self.verb, *(slot.text if slot.required else f"[{slot.text}]" for slot in form)])

    def match(self, statement: Statement) -> tuple[Arguments | None, tuple[Diagnostic, ...]]:
        """Return the arguments of the statement, or None and every fault of it in the closest form of this usage."""
        first, diagnostics = self._closest(statement)
        if statement.added and not self.sums:
            span = statement.added[0][0].span.to(statement.added[-1][-1].span)
            help_ = "there is no arithmetic: write the result. `+` joins the terms of a `loss`, and rows in parentheses"
            return None, (
                *diagnostics,
                Diagnostic(UNEXPECTED_ARGUMENT, f"`{self.verb}` is no sum", Label(span), help=help_),
            )
        added = [self._closest(replace(statement, phrases=term)) for term in statement.added]
        diagnostics = (*diagnostics, *(fault for _, faults in added for fault in faults))
        arguments = replace(first, added=tuple(arguments for arguments, _ in added))
        return (None if diagnostics else arguments), diagnostics

    def _closest(self, statement: Statement) -> tuple[Arguments, tuple[Diagnostic, ...]]:
        """Return the arguments and the faults of a statement, read as the form that it fits best."""
        tried = [(form, *_Match(self, form, statement).run()) for form in self.forms]

        def distance(one: tuple[tuple[Slot, ...], Arguments, tuple[Diagnostic, ...]]) -> tuple[int, int, int]:
            form, arguments, faults = one
            lacking = sum(slot.required and slot.name not in arguments for slot in form)
            return len(faults), lacking, -len(arguments.phrases)

        form, arguments, faults = min(tried, key=distance)
        if [fault.code for fault in faults] == [MISSING_ARGUMENT]:  # of equally close forms, each may lack another one
            alike = [one[0] for one in tried if distance(one) == distance((form, arguments, faults))]
            lacked = [slot for other in alike for slot in other if slot.required and slot.name not in arguments]
            if len(lacked) == len(alike) > 1:
                names = " or ".join(f"`{slot.text}`" for slot in dict.fromkeys(lacked))
                return arguments, (replace(faults[0], message=f"`{self.verb}` needs {names}"),)
        return arguments, tuple(self._beside(form, arguments, fault) for fault in faults)

    def _beside(self, form: tuple[Slot, ...], arguments: Arguments, fault: Diagnostic) -> Diagnostic:
        """Return a fault. Of a clause of another form it says with which clause of this form it conflicts."""
        if fault.code is not UNEXPECTED_ARGUMENT or fault.primary is None:
            return fault
        word = fault.primary.span.text
        others = [{slot.name for slot in other} for other in self.forms if any(
            slot.keyword and slot.name.split(" ")[0] == word for slot in other)]  # fmt: skip
        rivals = [slot for slot in form if slot.name in arguments]
        rival = next((slot for slot in rivals if others and not any(slot.name in names for names in others)), None)
        if rival is None:
            return fault
        named = rival.name if rival.keyword else arguments.span(rival.name).text
        message = f"`{self.verb}` takes `{named}` or `{word}`, not both"
        related = (Label(arguments.span(rival.name), f"`{named}`"),)
        return replace(fault, message=message, related=related, help=f"remove one of them; usage: {self.shown(form)}")


@cache
def parse_usage(text: str) -> Usage:
    """Read a USAGE line.

    Raises:
        ValueError: a word in capitals is not in ``ARGUMENT_KINDS``.
    """
    verb, _, rest = text.partition(" ")
    forms = rest.removesuffix(SUM)
    return Usage(text, verb, tuple(tuple(_form_slots(form)) for form in forms.split(" | ")), forms != rest)


def _form_slots(form: str) -> Iterator[Slot]:
    for optional, needed in re.findall(r"\[([^]]*)\]|([^][]+)", form.replace(", ...", ",...")):
        keyword: list[str] = []
        for token in (optional or needed).split():
            if token.upper() != token or token == DIVIDED:
                keyword.append(token)
            elif token not in ARGUMENT_KINDS:
                raise ValueError(f"no kind is called {token!r}")
            else:
                name = " ".join(keyword) or token.partition("=")[0].lower()
                yield Slot(name, token, bool(keyword), not optional)
                keyword = []
        if keyword:
            yield Slot(" ".join(keyword), None, True, not optional)


class _Match:
    """One attempt to read a statement as one form."""

    def __init__(self, usage: Usage, form: tuple[Slot, ...], statement: Statement) -> None:
        self._usage, self._form = usage, form
        self._subject = [slot for slot in form if not slot.keyword]
        self._led = {
            slot.name for at, slot in enumerate(form) if any(one.keyword and one.required for one in form[:at])
        }
        self._clauses = {slot.name: slot for slot in form if slot.keyword}
        self._statement = statement
        self._rest = list(statement.phrases)
        self._phrases: dict[str, Phrase] = {}
        self._diagnostics: list[Diagnostic] = []

    def run(self) -> tuple[Arguments, tuple[Diagnostic, ...]]:
        for slot in self._subject:
            while (slot.required or slot.name in self._led) and self._rest and self._keyword(self._rest[0]) is not None:
                self._take_clause()
            self._take_subject(slot)
        while self._rest:
            self._take_clause()
        missing = [slot for slot in self._clauses.values() if slot.required and slot.name not in self._phrases]
        for slot in missing:
            self._error(MISSING_ARGUMENT, f"`{self._usage.verb}` needs `{slot.text}`", self._statement.verb.span)
        unknown = [diagnostic for diagnostic in self._diagnostics if diagnostic.code is UNEXPECTED_ARGUMENT]
        if len(missing) == 1 and unknown:  # one mistake, not two: the clause is there under another word
            first = unknown[0].primary.span.text if unknown[0].primary is not None else ""
            help_ = f"did you mean `{missing[0].name}`? usage: {self._usage.shown(self._form)}"
            help_ = self._spaced(first) or help_
            self._diagnostics[self._diagnostics.index(unknown[0])] = replace(unknown[0], help=help_)
            self._diagnostics.pop()
        return Arguments(self._statement, self._phrases), tuple(self._diagnostics)

    def _take_subject(self, slot: Slot) -> None:
        assert slot.placeholder is not None
        kind = ARGUMENT_KINDS[slot.placeholder]
        if not self._rest or self._keyword(self._rest[0]) is not None:
            if slot.required:
                message = f"`{self._usage.verb}` needs {slot.placeholder}: {kind.text}"
                self._error(MISSING_ARGUMENT, message, self._statement.verb.span)
            return
        if not slot.required and not all(map(kind.accepts, self._rest[0].items)):
            return
        phrase = self._rest.pop(0)
        if kind.rest:
            while self._rest:
                more = self._rest.pop(0)
                phrase = Phrase(phrase.items + more.items, phrase.span.to(more.span))
        self._check(kind, phrase, f"`{self._usage.verb}`")
        self._phrases[slot.name] = phrase

    def _take_clause(self) -> None:
        phrase = self._rest.pop(0)
        slot = self._keyword(phrase)
        if slot is None:
            first = phrase.items[0]
            help_ = did_you_mean(first.text, self._clauses) if isinstance(first, Word) else ""
            help_ = help_ or self._spaced(phrase.span.text) or self._joined(phrase)
            message = f"`{self._usage.verb}` takes no `{phrase.span.text}` here"
            while self._rest and self._keyword(self._rest[0]) is None:
                self._rest.pop(0)  # most likely the argument of a misspelt keyword
            self._error(UNEXPECTED_ARGUMENT, message, phrase.span, help_)
            return
        first_word, *more_words = slot.name.split(" ")
        for word in more_words:
            if not self._rest or self._rest[0].span.text != word:
                wanted = " ".join([*more_words, *([slot.placeholder] if slot.placeholder else [])])
                self._error(MISSING_ARGUMENT, f"`{first_word}` needs `{wanted}`", phrase.span)
                return
            phrase = Phrase(phrase.items, phrase.span.to(self._rest.pop(0).span))
        earlier = self._phrases.get(slot.name)
        if earlier is not None:
            message = f"`{slot.name}` is given twice"
            self._error(REPEATED, message, phrase.span, "remove one", (Label(earlier.span, "given here first"),))
        if slot.placeholder is None:
            self._phrases[slot.name] = phrase
            return
        kind = ARGUMENT_KINDS[slot.placeholder]
        if not self._rest or self._keyword(self._rest[0]) is not None:
            self._phrases.setdefault(slot.name, phrase)  # the clause is there, though empty: it is not missing too
            self._error(MISSING_ARGUMENT, f"`{slot.name}` needs {slot.placeholder}: {kind.text}", phrase.span)
            return
        value = self._rest.pop(0)
        leads = len(value.items) == 1 and value.span.text in kind.leads
        if leads and self._rest and not self._keyword(self._rest[0]):
            more = self._rest.pop(0)
            value = Phrase((*value.items, *more.items), value.span.to(more.span))
        self._check(kind, value, f"`{slot.name}`")
        if earlier is None:
            self._phrases[slot.name] = value

    def _keyword(self, phrase: Phrase) -> Slot | None:
        """Return the clause that this phrase begins, if it is a keyword of the form. Right behind the verb a keyword of
        several words counts only as a whole: in ``shard keep [B/dp]`` it is an input's name."""
        first = phrase.items[0]
        if not isinstance(first, Word) or len(phrase.items) > 1:
            return None
        leads = not self._phrases and self._rest[:1] == [phrase] and len(self._rest) > 1
        for name, slot in self._clauses.items():
            word, *more = name.split(" ")
            if word == first.text and (not more or not leads or self._rest[1].span.text == more[0]):
                return slot
        return None

    def _check(self, kind: ArgumentKind, phrase: Phrase, taker: str) -> None:
        items = phrase.items
        if isinstance(items[0], Word) and items[0].text in kind.leads and len(items) > 1:
            items = items[1:]
        for item in items:
            if not kind.accepts(item):
                text = f" `{item.text}`" if isinstance(item, Word | Number) else ""
                message = f"{taker} takes {kind.text}, not {KIND_NAMES[type(item)]}{text}"
                self._error(WRONG_KIND, message, item.span)
        if kind.count and len(items) != kind.count:
            message = f"{taker} takes {kind.text}, not {len(items)} item{'s' * (len(items) != 1)}"
            spaced = [phrase.span.text]
            while len(items) < kind.count and self._rest and all(map(kind.accepts, self._rest[0].items)):
                spaced.append(self._rest.pop(0).span.text)
            help_ = f"a comma joins items: {taker[:-1]} {', '.join(spaced)}`" if len(spaced) > 1 else ""
            self._error(WRONG_KIND, message, phrase.span, help_)

    def _spaced(self, text: str) -> str:
        """Return the advice to write `name value` for a clause that is written `name=value`, else ""."""
        name, sign, value = text.partition("=")
        return f"write `{name} {value}`, without `=`" if sign and name in self._clauses else ""

    def _joined(self, phrase: Phrase) -> str:
        """Return the advice to join a setting to the one before it by a comma, else ""."""
        before = list(self._phrases.values())[-1:]
        settings = before and isinstance(before[0].items[-1], Setting) and isinstance(phrase.items[0], Setting)
        return (
            f"a comma joins items: `{self._usage.verb} {before[0].span.text}, {phrase.span.text}`" if settings else ""
        )

    def _error(self, code: Code, message: str, span: Span, help_: str = "", related: tuple[Label, ...] = ()) -> None:
        help_ = help_ or f"usage: {self._usage.shown(self._form)}"
        self._diagnostics.append(Diagnostic(code, message, Label(span), related, help=help_))
