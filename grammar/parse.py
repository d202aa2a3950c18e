"""The parser of a plan's text, line by line, so that one malformed line hides nothing of the others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from lark import Lark, Token, Transformer, Tree, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken
from lark.tree import Meta

from .codes import INVISIBLE, MALFORMED
from .diagnostics import Diagnostic, Label
from .source import Source, Span
from .syntax import (
    Call,
    Dim,
    Ellipsis,
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

MAX_NESTING = 16
MAX_NUMBER = 40  # characters
LARGEST_NUMBER = 2**63 - 1
"""The largest whole number that sizes of tensors and counters of programs can hold."""
_TOKEN_SHOWN = 80  # characters of a token in a message
LONGEST = 4096
"""The most characters of a name or a string, as of a path."""
GLUED = re.compile(r'"[^"]*"|(?<![\w*.}])([\w*.}]*[\w*}])(\[[0-9]+\.\.[0-9]+(?::[0-9]+)?\])')
Parse = Callable[[str], object]
CLOSES = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of a plan: its statement, if it has one and is well formed, and its comment without the ``#``."""

    statement: Statement | None
    comment: str | None
    diagnostic: Diagnostic | None = None


def parse(source: Source) -> tuple[tuple[Statement, ...], tuple[Diagnostic, ...]]:
    """Return the statements of every well-formed line, and a diagnostic for every other line."""
    lines = tuple(parse_lines(source))
    return (
        tuple(line.statement for line in lines if line.statement is not None),
        tuple(line.diagnostic for line in lines if line.diagnostic is not None),
    )


def parse_lines(source: Source) -> Iterator[SourceLine]:
    """Return every line of the source, empty ones included."""
    start = 0
    for text in source.text.split("\n"):
        code = re.match(r'(?:[^"#]|"[^"]*")*', text)
        end = code.end() if code else 0
        comment = text[end + 1 :].strip() if text[end : end + 1] == "#" else None
        if not text.isprintable() and (hidden := _invisible_at(text)) is not None:
            yield _unseen(source, start + hidden, comment)
        elif not text[:end].strip(" \t\r") and (end == len(text) or comment is not None):
            yield SourceLine(None, comment)
        else:
            yield _parse_line(source, start, text, end, comment)
        start += len(text) + 1


def _invisible_at(text: str) -> int | None:
    """Return the column of the first character that is invisible or changes the text's direction; None without one."""
    ends = text.removesuffix("\r")
    return next((at for at, character in enumerate(ends) if not character.isprintable() and character != "\t"), None)


def _unseen(source: Source, at: int, comment: str | None) -> SourceLine:
    character = source.text[at]
    message = f"the line contains U+{ord(character):04X}, which is invisible or changes the direction of the text"
    help_ = "remove it: a plan contains visible characters, spaces and tabs only"
    return SourceLine(None, comment, Diagnostic(INVISIBLE, message, Label(Span(source, at, at + 1)), help=help_))


def parse_value(source: Source) -> Item | None:
    """Return the single item that the whole text is, or None if it is not one."""
    statements, diagnostics = parse(Source(source.name, "value " + source.text))
    if diagnostics or len(statements) != 1 or len(statements[0].phrases) != 1 or statements[0].added:
        return None
    items = statements[0].phrases[0].items
    return items[0] if len(items) == 1 else None


def _parse_line(source: Source, start: int, text: str, end: int, comment: str | None) -> SourceLine:
    def malformed(message: str, at: int, to: int, help_: str) -> SourceLine:
        label = Label(Span(source, start + at, start + to))
        return SourceLine(None, comment, Diagnostic(MALFORMED, message, label, help=help_))

    unbalanced = _unbalanced(text)
    if unbalanced is not None:
        message, at, help_ = unbalanced
        return malformed(message, at, at + 1, help_)
    glued = next((match for match in GLUED.finditer(text[:end]) if match[1]), None)
    if glued is not None:
        help_ = f"write `{glued[1]}.{glued[2]}`"
        return malformed("a range of numbers is a segment of its own, after a `.`", *glued.span(2), help_)
    try:
        tree = _tree(text)
    except UnexpectedInput as error:
        message, help_ = diagnose(error, _parser())
        at, to = _error_range(error, text)
        return malformed(message, at, to, help_)
    for token in tree.scan_values(lambda value: isinstance(value, Token)):
        at = token.start_pos or 0
        if token.type == "NUMBER" and _too_large(str(token), source):
            help_ = f"whole numbers go to {LARGEST_NUMBER:,}, others as far as a float"
            return malformed("the number is too large", at, at + len(token), help_)
        if len(token) > LONGEST:
            return malformed(f"a word of {len(token):,} characters", at, at + len(token), f"write at most {LONGEST:,}")
    return SourceLine(_Builder(source, start).transform(tree), comment)


def _too_large(text: str, source: Source) -> bool:
    number = Number(text, Span(source, 0, 0))
    whole = number.is_integer and len(text) <= MAX_NUMBER and abs(number.value) > LARGEST_NUMBER
    return len(text) > MAX_NUMBER or whole or not math.isfinite(number.value)


def _unbalanced(text: str) -> tuple[str, int, str] | None:
    """Return the fault of a line's quotes and brackets: message, place, help."""
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
                return (
                    f"`{bracket}` is closed by `{mark}`",
                    since,
                    f"first close the bracket that was opened last, before `{mark}`",
                )
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


@lru_cache(maxsize=1024)
def _tree(text: str) -> Tree[Token]:
    """Return lark's tree of a line. Trees are cached and never changed: many plans include the same families."""
    return _parser()(text)


@v_args(meta=True)
class _Builder(Transformer[Token, Statement]):
    """The transformer of lark's tree of a line into frozen syntax, with spans in the whole source. Its methods are the
    grammar's rules."""

    def __init__(self, source: Source, start: int) -> None:
        super().__init__()
        self._source = source
        self._start = start

    def _span(self, where: Meta | Token) -> Span:
        return Span(self._source, self._start + (where.start_pos or 0), self._start + (where.end_pos or 0))

    def __default_token__(self, token: Token) -> Item | Phrase | Token:
        text, span = str(token), self._span(token)
        match token.type:
            case "WORD":
                return Word(text, span)
            case "NUMBER":
                return Number(text, span)
            case "STRING":
                return String(text[1:-1], span)
            case "VAR":
                return Var(text[1:], span)
            case "ELLIPSIS":
                return Ellipsis(span)
            case "DIVIDED":
                return Phrase((Word(text, span),), span)
        return token

    def start(self, meta: Meta, children: list[Any]) -> Statement:
        verb, *rest = children
        phrases, *added = _terms(rest)
        return Statement(verb, phrases, self._span(meta), tuple(added))

    def phrase(self, meta: Meta, items: list[Item]) -> Phrase:
        return Phrase(tuple(items), self._span(meta))

    def binding(self, meta: Meta, children: list[Any]) -> Setting:
        name, value = children
        return Setting(name, value, self._span(meta))

    def split(self, meta: Meta, children: list[Any]) -> SplitItem:
        first, *axes, size = children
        return SplitItem(first if isinstance(first, Word) else None, tuple(axes), size, self._span(meta))

    def range(self, meta: Meta, children: list[Any]) -> Range:
        low, high = children
        return Range(low, high, self._span(meta))

    def open(self, meta: Meta, values: list[Any]) -> Open:
        return Open(tuple(values), self._span(meta))

    def call(self, meta: Meta, children: list[Any]) -> Call:
        name, *arguments = children
        return Call(name[:-1], tuple(item for item in arguments if item is not None), self._span(meta))

    def dim(self, meta: Meta, items: list[Item]) -> Dim:
        return Dim(tuple(items), self._span(meta))

    def layout(self, meta: Meta, dims: list[Dim | None]) -> Layout:
        return Layout(tuple(dim for dim in dims if dim is not None), self._span(meta))

    def group(self, meta: Meta, children: list[Any]) -> Group:
        terms = _terms(children)
        return Group(terms if terms[0] else (), self._span(meta))


def _terms(children: list[Any]) -> tuple[tuple[Phrase, ...], ...]:
    """Return the phrases between each ``+`` and the next."""
    terms: list[list[Phrase]] = [[]]
    for child in children:
        if isinstance(child, Phrase):
            terms[-1].append(child)
        elif child is not None:  # a `+`
            terms.append([])
    return tuple(map(tuple, terms))


# ---- messages of malformed lines, by examples


@dataclass(frozen=True, slots=True)
class Mistake:
    """A malformed ``example`` with its message and help, which hold for all lines that fail at the same parser state
    and token."""

    example: str
    message: str
    help: str


MISTAKES: tuple[Mistake, ...] = (
    Mistake("mesh dp=", "`=` has no value", "write the value after it: `name=value`"),
    Mistake("mesh dp=,", "`=` has no value", "write the value after it: `name=value`"),
    Mistake("mesh dp==2", "`=` twice", "write one: `name=value`"),
    Mistake("mesh dp=2,", "nothing follows the comma", "a comma continues a phrase: write the next item, or drop it"),
    Mistake("input x int64 [B,]", "nothing follows the comma", "write the next dim, or drop the comma"),
    Mistake("input x int64 [,B]", "nothing precedes the comma", "write the dim before it; a whole dim is `_`"),
    Mistake('model "f.py:M" (a=1,)', "nothing follows the comma", "write the next item, or drop the comma"),
    Mistake("loss f(a,)", "nothing follows the comma", "write the next item, or drop the comma"),
    Mistake("mesh , dp=2", "nothing precedes the comma", "a comma joins items of one phrase; a space starts the next"),
    Mistake("mesh dp=2,, tp=2", "two commas", "drop one of them"),
    Mistake("shard x [B/]", "`/` names no axis", "write the mesh axis after it: `B/dp`"),
    Mistake("shard x [B/, _]", "`/` names no axis", "write the mesh axis after it: `B/dp`"),
    Mistake("shard x [B/2]", "a number after `/`", "write the name of a mesh axis: `B/dp`"),
    Mistake("shard x [/]", "`/` names no axis", "write the mesh axis after it: `B/dp`"),
    Mistake("sizes S=1..", "the range has no end", "write both ends: `128..4096`"),
    Mistake("sizes S=1..x", "a range ends in a number", "write both ends as numbers: `128..4096`"),
    Mistake("sizes ..4", "the range has no start", "write both ends: `128..4096`"),
    Mistake("column x over tp rows (3 +)", "nothing follows the `+`", "write the next rows, or drop it"),
    Mistake("column x over tp rows (+ 3)", "nothing precedes the `+`", "write the rows before it, or drop it"),
    Mistake("loss output.loss +", "nothing follows the `+`", "write the next term of the loss, or drop it"),
    Mistake("4 blocks", "a line begins with a verb", "write the directive's name first: `column`, `shard`, `mesh`"),
    Mistake('"gpt.py"', "a line begins with a verb", "write the directive's name first: `model`, `data`"),
    Mistake("$x", "a line begins with a verb", "write the directive's name first; `$name` stands for a value only"),
    Mistake("[B]", "a line begins with a verb", "write the directive's name first: `shard tokens [B/dp, _]`"),
    Mistake("(x)", "a line begins with a verb", "write the directive's name first"),
    Mistake("= 2", "a line begins with a verb", "write the directive's name first: `let x = 2`"),
    Mistake(
        "x = 2",
        "a line begins with a verb",
        "names are given by `let`: `let x = 2`; after a verb comes a space: `mesh tp=2`, `sizes B=8`",
    ),
    Mistake("shard x [B=2=3]", "`=` twice", "write one: `name=value`"),
    Mistake("seed ;", "`;` is not used", "a line holds one statement: start a new line"),
    Mistake("seed 'a'", "`'` is not used", 'strings have double quotes: `"..."`'),
    *(
        Mistake(f"seed {quote}", f"`{quote}` is not used", 'strings have straight quotes: `"..."`')
        for quote in "“”„‘’«»"
    ),
    Mistake("seed \\", "`\\` is not used", "a statement is one line and cannot be continued"),
    Mistake(
        "seed :",
        "`:` is not used here",
        'write `mesh tp=2` for `mesh: tp=2` or `tp: 2`; the path of a callable is a string: `"file.py:fn"`',
    ),
    Mistake("seed {", "`{` is not used here", "alternatives have no spaces and no quotes: `blocks.*.{q,k}`"),
    Mistake("seed $", "`$` without a name", "write the name directly after it: `$width`"),
    Mistake("seed .", "`.` stands alone", "paths are written without spaces: `blocks.0.attn`"),
    Mistake("seed @", "`@` is not used", "see the directive's usage in docs/language.md"),
    Mistake("seed -", "`-` stands alone", "a negative number has no space in it: `-100`"),
    Mistake("let x=1 |", "nothing follows the `|`", "write the next value, or drop it: `let tp = 1 | 2 | 4`"),
    Mistake(
        "let x=? | 1", "`?` is no value of several", "write values, `1 | 2 | 4`, or `?` alone: what the ranks leave"
    ),
    Mistake("let x=1 | ?", "`?` stands alone", "write values, `1 | 2 | 4`, or `?` alone: what the ranks leave"),
    Mistake("seed |", "`|` is not used here", "a choice of values stands in a `let`: `let tp = 1 | 2 | 4`"),
    Mistake(
        "seed ?", "`?` stands alone", "write it directly after a pattern, `blocks.*.bias?`, or in a `let`: `let dp = ?`"
    ),
)


def diagnose(error: UnexpectedInput, parse: Parse) -> tuple[str, str]:
    """Return the message and help for a lark error; ``parse`` is the parser that raised it."""
    mistake = _known(parse).get(_error_key(error))
    if mistake is not None:
        return mistake.message, mistake.help
    if isinstance(error, UnexpectedToken) and isinstance(error.token, Token) and error.token.type != "$END":
        token = str(error.token)
        shown = token if len(token) <= _TOKEN_SHOWN else f"{token[:_TOKEN_SHOWN]}…"
        return f"unexpected `{shown}`", "a line is a verb and phrases; see docs/language.md"
    if isinstance(error, UnexpectedCharacters):
        return f"unexpected character `{error.char}`", "remove it"
    return "the line ends too early", "write the rest of the statement on the same line"


@cache
def _known(parse: Parse) -> dict[tuple[object, str], Mistake]:
    known: dict[tuple[object, str], Mistake] = {}
    for mistake in MISTAKES:
        try:
            parse(mistake.example)
        except UnexpectedInput as error:
            known.setdefault(_error_key(error), mistake)
    return known


def _error_key(error: UnexpectedInput) -> tuple[object, str]:
    """Return the parser state and the token type; a character that begins no token is wrong in every state."""
    if isinstance(error, UnexpectedToken):
        return getattr(error.state, "position", None), error.token.type
    return None, str(error.char) if isinstance(error, UnexpectedCharacters) else ""
