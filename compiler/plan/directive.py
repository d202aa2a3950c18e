"""The base of every directive: a usage line, typed fields, and checks that need no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from ...grammar.codes import (
    BAD_VALUE,
    FOR_TRAINING,
    OUTSIDE_VIEW,
    REPEATED,
    UNEXPECTED_ARGUMENT,
    UNKNOWN_AXIS,
    WRONG_KIND,
)
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import did_you_mean, listed
from ...grammar.source import Span
from ...grammar.syntax import Number, Setting, String, Word
from ...grammar.usage import Arguments
from ..layout.mesh import Mesh

Literal: TypeAlias = int | float | str | bool | None

WORD_VALUES: dict[str, Literal] = {"true": True, "false": False, "none": None}

Limit = tuple[Callable[[int | float], bool], str]
"""A condition on a number, and the words for it."""
TRAINERS = ("loss", "optimizer")
"""The verbs of which a plan for training has lines, and a plan for inference none."""
ONE_OR_MORE: Limit = (lambda value: value >= 1, "1 or more")
NOT_NEGATIVE: Limit = (lambda value: value >= 0, "0 or more")


def argument(read: Callable[[Arguments], Any]) -> Any:
    """Declare a field of a directive, and the function that reads its value."""
    return field(metadata={"read": read})


def of_lines(read: Callable[[Scope], Any]) -> Any:
    """Declare a field of a plan, and the function that reads its value from the plan's lines."""
    return field(metadata={"read": read})


@dataclass(frozen=True)
class Directive:
    """One statement with its arguments typed; a subclass's other fields are its arguments' values."""

    USAGE: ClassVar[str]
    ONCE: ClassVar[bool] = True  # whether a plan has at most one of it
    LAYOUT: ClassVar[bool] = False  # whether it says how work lies on ranks, so that an open `let` may stand in it
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}  # words of other tools, with the arguments that mean the same here
    LIMITS: ClassVar[tuple[tuple[str, Limit], ...]] = ()  # of arguments that are numbers
    TRAINING: ClassVar[tuple[tuple[str, str], ...]] = ()  # arguments of training alone ("": the line), and what they do
    INSTEAD: ClassVar[str] = ""  # what to write in a plan for inference, as " and ..."

    arguments: Arguments = field(compare=False, repr=False)

    @classmethod
    def form(cls, arguments: Arguments) -> type[Directive]:
        """Return the class of a statement with these arguments, where a verb's forms mean different things."""
        return cls

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        """Read the directive of a statement that matches ``USAGE``. Values that make no sense are left to ``check``."""
        readers = {one.name: one.metadata["read"] for one in fields(cls) if one.metadata}
        return cls(arguments, **{name: read(arguments) for name, read in readers.items()})

    @classmethod
    def translated(cls, fault: Diagnostic) -> Diagnostic:
        """Return a fault of a line's form; its help translates a word of another tool."""
        word = fault.primary.span.text.partition("=")[0] if fault.primary is not None else ""
        if fault.code is not UNEXPECTED_ARGUMENT or word not in cls.ELSEWHERE:
            return fault
        return replace(fault, help=f"write `{cls.ELSEWHERE[word]}`")

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        """Yield the errors of the statement that the plan alone can tell."""
        for name, (holds, wanted) in self.LIMITS:
            called = self.verb if name == "n" else name  # `steps N` is called by its verb
            for item in self.arguments.items(name):
                if isinstance(item, Number) and not holds(item.value):
                    message = f"`{called}` is {item.text}: it must be {wanted}"
                    yield Diagnostic(BAD_VALUE, message, Label(item.span), help=f"write a number that is {wanted}")

    def check_inference(self) -> Iterator[Diagnostic]:
        """Yield the errors of the statement in a plan for inference."""
        words = (item for phrase in self.arguments.phrases.values() for item in phrase.items if isinstance(item, Word))
        places = {word.text: word.span for word in words}
        places |= {name: phrase.span for name, phrase in self.arguments.phrases.items()} | {"": self.span}
        for name, reason in self.TRAINING:
            if name in places:
                message = f"`{name or self.verb}` {reason}, and a plan without `loss` and `optimizer` trains nothing"
                help_ = (
                    f"remove {f'`{name}`' if name else 'the line'}{self.INSTEAD}, or add `loss` and `optimizer` lines"
                )
                yield Diagnostic(FOR_TRAINING, message, Label(places[name]), help=help_)

    @property
    def verb(self) -> str:
        """The first word of the line."""
        return self.arguments.statement.verb.text

    @property
    def span(self) -> Span:
        return self.arguments.statement.span

    @property
    def axes(self) -> tuple[Word, ...]:
        """The axes over which the line places or moves something."""
        return self.arguments.words("over")


D = TypeVar("D", bound=Directive)


@dataclass(frozen=True, slots=True)
class Scope:
    """All directives of a plan, for the checks of one. ``broken`` are the verbs of lines that could not be read,
    ``viewed`` the axes of views."""

    directives: tuple[Directive, ...]
    mesh: Mesh
    broken: frozenset[str]
    viewed: frozenset[str] = frozenset()

    @property
    def trains(self) -> bool:
        """False for a plan for inference, which has neither a ``loss`` nor an ``optimizer`` line."""
        return not self.verbs.isdisjoint(TRAINERS)

    @property
    def verbs(self) -> frozenset[str]:
        """The verbs of all lines."""
        return self.broken | {line.verb for line in self.directives}

    def all(self, kind: type[D]) -> tuple[D, ...]:
        """Every directive of a kind, in order."""
        return tuple(directive for directive in self.directives if isinstance(directive, kind))

    def one(self, kind: type[D]) -> D | None:
        """The first directive of a kind, if there is one."""
        return next((directive for directive in self.directives if isinstance(directive, kind)), None)

    def before(self, line: D) -> tuple[D, ...]:
        """The directives of a line's kind that stand before it."""
        alike = self.all(type(line))
        return alike[: next(at for at, other in enumerate(alike) if other is line)]

    def check_axis(self, axis: Word, of_views: bool = False) -> Iterator[Diagnostic]:
        """An error if the mesh has no such axis. ``of_views``: the line may name axes of views too."""
        if axis.text in self.viewed:
            if not of_views:
                message = f"`{axis.text}` is an axis of a view, which only a part of the model has"
                help_ = f"name one of the whole mesh: {listed(self.mesh.names, 'or')}"
                yield Diagnostic(OUTSIDE_VIEW, message, Label(axis.span), help=help_)
        elif axis.text not in self.mesh and self.broken.isdisjoint({"mesh", "view"} if of_views else {"mesh"}):
            names = (*self.mesh.names, *sorted(self.viewed)) if of_views else self.mesh.names
            known = f"the mesh has {listed(names)}" if names else f"add a line `mesh {axis.text}=1`"
            message = f"the mesh has no axis `{axis.text}`"
            yield Diagnostic(UNKNOWN_AXIS, message, Label(axis.span), help=did_you_mean(axis.text, names, known))


def check_unique(words: tuple[Word, ...], what: str) -> Iterator[Diagnostic]:
    """An error for each word that repeats an earlier one."""
    first: dict[str, Word] = {}
    for word in words:
        if word.text in first:
            related = (Label(first[word.text].span, "given here first"),)
            message = f"the {what} `{word.text}` is given twice"
            yield Diagnostic(REPEATED, message, Label(word.span), related, help="remove one, or rename it")
        first.setdefault(word.text, word)


def check_known(word: Word | None, known: Iterable[str], message: str, otherwise: str = "") -> Iterator[Diagnostic]:
    """An error if a word is none of the known ones; its help names near ones, or is ``otherwise``."""
    if word is not None and word.text not in (names := [*known]):
        help_ = did_you_mean(word.text, names, otherwise or f"there are {listed(names)}")
        yield Diagnostic(BAD_VALUE, message, Label(word.span), help=help_)


def read_literals(bindings: tuple[Setting, ...]) -> tuple[tuple[str, Literal], ...]:
    """The names and values of ``name=value`` pairs; pairs with another kind of value are left to ``check_literals``."""
    pairs: list[tuple[str, Literal]] = []
    for binding in bindings:
        value = binding.value
        if isinstance(value, Number) and not value.unit:
            pairs.append((binding.name.text, value.value))
        elif isinstance(value, String):
            pairs.append((binding.name.text, value.text))
        elif isinstance(value, Word) and value.text in WORD_VALUES:
            pairs.append((binding.name.text, WORD_VALUES[value.text]))
    return tuple(pairs)


def check_literals(arguments: Arguments, name: str) -> Iterator[Diagnostic]:
    """Errors for items that are not ``name=value`` with a number, a string, ``true``, ``false`` or ``none``."""
    for item in arguments.flat(name):
        if not isinstance(item, Setting) or not item.name.text.isidentifier():
            message = "arguments are given by name"
            yield Diagnostic(WRONG_KIND, message, Label(item.span), help="write `name=value`")
        elif not read_literals((item,)):
            message = f"`{item.name.text}` is neither a number nor a string, `true`, `false` or `none`"
            yield Diagnostic(WRONG_KIND, message, Label(item.value.span), help="put text in double quotes")
    yield from check_unique(tuple(binding.name for binding in arguments.bindings(name)), "argument")


def check_callable(arguments: Arguments, name: str) -> Iterator[Diagnostic]:
    """An error if a string does not name a callable as ``package.module:name`` or ``./file.py:name``."""
    for item in arguments.items(name):
        if not isinstance(item, String):
            continue
        module, colon, attribute = item.text.rpartition(":")
        if not colon or not module.strip() or not all(part.isidentifier() for part in attribute.split(".")):
            message = f'"{item.text}" does not name a callable'
            help_ = 'write `"package.module:name"` or `"./file.py:name"`'
            yield Diagnostic(BAD_VALUE, message, Label(item.span), help=help_)
