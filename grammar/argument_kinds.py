"""The kinds of a directive's arguments, by the words in capitals that usage lines have for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .syntax import Call, Group, Item, Layout, Number, Setting, String, Word


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """A placeholder of a usage line: it stands for ``count`` items (0: one or more) that ``accepts`` takes."""

    text: str
    accepts: Callable[[Item], bool]
    count: int = 1
    rest: bool = False  # takes every remaining phrase, as one
    leads: frozenset[str] = frozenset()  # words that may stand before the items, as a phrase of their own


def _name(item: Item) -> bool:
    return isinstance(item, Word) and item.text.isidentifier()


def _where(item: Item) -> bool:
    return isinstance(item, Word) or (isinstance(item, Number) and not item.unit and not item.text.startswith("-"))


def _number(item: Item) -> bool:
    return isinstance(item, Number) and not item.unit


def _rate(item: Item) -> bool:
    return _number(item) or isinstance(item, String | Layout)


def _size(item: Item) -> bool:
    return isinstance(item, Number) and item.unit == "B" and item.value > 0


def _output(item: Item) -> bool:
    return isinstance(item, Call) and item.name == "out" and bool(item.arguments) and all(map(_where, item.arguments))


def _value(item: Item) -> bool:
    if not isinstance(item, Call) or item.name not in ("in", "out"):
        return _where(item)
    name, *number = item.arguments or (None,)
    whole = all(isinstance(one, Number) and one.text.isdecimal() for one in number)
    return name is not None and _where(name) and len(number) < 2 and whole


ARGUMENT_KINDS: dict[str, ArgumentKind] = {
    "NAME": ArgumentKind("a name", _name),
    "AXIS": ArgumentKind("a mesh axis", _name),
    "AXES": ArgumentKind("mesh axes", _name, count=0),
    "TYPE": ArgumentKind("a type", _name),
    "PATH": ArgumentKind("a dotted name", lambda item: isinstance(item, Word)),
    "WHERE": ArgumentKind("names or patterns of modules or parameters", _where, count=0),
    "VALUES": ArgumentKind("names or patterns of parameters or inputs, or `out(MODULE)`", _value, count=0),
    "OUTPUTS": ArgumentKind("outputs of modules, such as `out(blocks.3)`", _output, count=0),
    "SCHEDULE": ArgumentKind("a schedule", lambda item: isinstance(item, Word)),
    "STATES": ArgumentKind("`optimizer`, `parameters` or `activations`", _name, count=0),
    "LEVEL": ArgumentKind("a level from 0 to 3", lambda item: isinstance(item, Number) and item.is_integer),
    "N": ArgumentKind("a whole number", lambda item: isinstance(item, Number) and item.is_integer),
    "X": ArgumentKind("a number", _number),
    "RATE": ArgumentKind(
        "a number, `cosine`, `linear` or `wsd` and a number, or `table` and a file or rows",
        _rate,
        leads=frozenset({"cosine", "linear", "wsd", "table"}),
    ),
    "SCALE": ArgumentKind(
        "a number, or `dynamic`", lambda item: _number(item) or (isinstance(item, Word) and item.text == "dynamic")
    ),
    "SIZE": ArgumentKind("a size such as `20GB`", _size),
    "OPS": ArgumentKind("operators, such as `products` or `attention`", _name, count=0),
    "OP": ArgumentKind("a collective such as `all_gather`", _name),
    "PAIR": ArgumentKind("two numbers", _number, count=2),
    "LAYOUT": ArgumentKind("a layout such as `[B/dp, _]`", lambda item: isinstance(item, Layout)),
    "DIMS": ArgumentKind("sub-dims such as `(3 h/tp d)`", lambda item: isinstance(item, Group)),
    "CALL": ArgumentKind("a call such as `cross_entropy(output, targets)`", lambda item: isinstance(item, Call)),
    "CALLABLE": ArgumentKind('a callable such as `"file.py:fn"`', lambda item: isinstance(item, String)),
    "ARGS": ArgumentKind("arguments in parentheses", lambda item: isinstance(item, Group) and len(item.terms) <= 1),
    "FILE": ArgumentKind("a name in double quotes", lambda item: isinstance(item, String)),
    # a word is a mistake that the directive explains
    "TABLE": ArgumentKind("a file's name in double quotes", lambda item: isinstance(item, String | Word)),
    "GLOBS": ArgumentKind("strings", lambda item: isinstance(item, String), count=0),
    "NAME=VALUE,...": ArgumentKind(
        "`name=value` pairs", lambda item: isinstance(item, Setting) and _name(item.name), count=0
    ),
    "NAME=SIZE,...": ArgumentKind("`NAME=SIZE` pairs", lambda item: True, count=0, rest=True),
}
