"""Malformed examples, and the messages for lines that are malformed in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lark import Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

Parse = Callable[[str], object]
MOST_MISTAKES = 80  # characters of a token in a message


@dataclass(frozen=True, slots=True)
class Mistake:
    """A malformed ``example`` with its message and help, for lines that go wrong alike (same parser state, same
    token)."""

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
    Mistake("seed ?", "`?` stands alone", "write it directly after a pattern: `blocks.*.bias?`"),
)


def diagnose(error: UnexpectedInput, parse: Parse) -> tuple[str, str]:
    """Return the message and help for a lark error; ``parse`` is the parser that raised it."""
    mistake = _known(parse).get(_key(error))
    if mistake is not None:
        return mistake.message, mistake.help
    if isinstance(error, UnexpectedToken) and isinstance(error.token, Token) and error.token.type != "$END":
        token = str(error.token)
        shown = token if len(token) <= MOST_MISTAKES else f"{token[:MOST_MISTAKES]}…"
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
            known.setdefault(_key(error), mistake)
    return known


def _key(error: UnexpectedInput) -> tuple[object, str]:
    """Return the parser state and the token type; a character that begins no token is wrong in every state."""
    if isinstance(error, UnexpectedToken):
        return getattr(error.state, "position", None), error.token.type
    return None, str(error.char) if isinstance(error, UnexpectedCharacters) else ""
