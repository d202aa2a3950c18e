"""Open plans: plans with `let`s whose values are chosen later, their choices, and the plan that each choice makes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from pathlib import Path

from ...grammar.codes import OPEN_MISPLACED
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ...grammar.nearest import listed
from ...grammar.parse import parse
from ...grammar.source import Source, Span
from ...grammar.substitute import LET, OpenLet
from ...grammar.syntax import Number, Setting, Statement, String, Var
from ..schedules import DELAYED
from ..sizes.size_range import BATCH
from .include import Expanded, read_source
from .plan import MESH, SIZES, Plan, misplaced, read_plan

_MOST_TRIED = 64
"""The most choices of which one must be a plan without errors, so that an open plan counts as one."""
OpenChoice = Mapping[str, str]
"""A value for each open name, as text."""


@dataclass(frozen=True)
class OpenPlan:
    """A plan with open `let`s. ``batch`` replaces the size `B` of its samples, ``defines`` the values of `-D`."""

    source: Source
    defines: Mapping[str, str]
    lets: tuple[OpenLet, ...]
    batch: int | None = None
    statements: Sequence[Statement] = field(default=(), repr=False)
    """The statements of the plan's own file, with ``$name`` as written."""

    @cached_property
    def _settings(self) -> dict[str, Setting]:
        """Each `let` of the file."""
        return {setting.name.text: setting for setting in self._of_verb(LET)}

    def _of_verb(self, verb: str) -> Iterator[Setting]:
        lines = (line for line in self.statements if line.verb.text == verb)
        items = (item for line in lines for phrase in line.phrases for item in phrase.items)
        return (item for item in items if isinstance(item, Setting))

    @cached_property
    def axes(self) -> dict[str, str | int]:
        """The axes of the file's own `mesh` line: each with its size, or with the open name that gives it."""
        axes: dict[str, str | int] = {}
        names = {let.name for let in self.lets}
        for axis in self._of_verb(MESH):
            value = axis.value
            while isinstance(value, Var) and value.name not in names and value.name in self._settings:
                text = self.defines.get(value.name)
                value = self._settings[value.name].value
                if text is not None:
                    axes[axis.name.text] = int(text) if text.isdecimal() else 1
                    break
            if isinstance(value, Var):
                axes[axis.name.text] = value.name
            elif isinstance(value, Number) and value.is_integer:
                axes.setdefault(axis.name.text, int(value.value))
        return axes

    @property
    def combinations(self) -> int:
        """The number of choices, without those of what the ranks leave."""
        return math.prod(len(let.values) for let in self.lets if let.values)

    def choices(self, ranks: int | None) -> Iterator[dict[str, str]]:
        """Yield every choice whose mesh has so many ranks; without a number all, with 1 for what the ranks leave."""
        chosen = [let for let in self.lets if let.values]
        left = [let.name for let in self.lets if not let.values]
        for values in product(*(let.values for let in chosen)):
            choice = {let.name: value.span.text for let, value in zip(chosen, values, strict=True)}
            if ranks is None:
                yield choice | dict.fromkeys(left, "1")
                continue
            rest, odd = divmod(ranks, self._ranks(choice | dict.fromkeys(left, "1")))
            if not odd and (left or rest == 1):
                yield from (
                    choice | dict(zip(left, map(str, sizes), strict=True)) for sizes in _factored(rest, len(left))
                )

    def _ranks(self, choice: OpenChoice) -> int:
        sizes = (choice[size] if isinstance(size, str) else size for size in self.axes.values())
        return math.prod(int(size) if str(size).isdecimal() else 1 for size in sizes)

    def closed(
        self, choice: OpenChoice, order: Sequence[str] = (), lines: Mapping[str, Sequence[str]] | None = None,
        mesh: Mapping[str, int] | None = None,
    ) -> Source:  # fmt: skip
        """Return the plan that a choice makes: its text, with the values in place of the choices, the axes of the mesh
        in another ``order``, with other ``lines`` in place of those that begin with some words, and with other sizes of
        axes that the ``mesh`` line spells as numbers."""
        changes: list[tuple[Span, str]] = []
        for name, setting in self._settings.items():
            text = choice.get(name, self.defines.get(name))
            if text is not None:
                quoted = isinstance(setting.value, String) and not text.startswith('"')
                changes.append((setting.value.span, f'"{text}"' if quoted else text))
        if self.batch is not None:
            changes += [(size.value.span, str(self.batch)) for size in self._of_verb(SIZES) if size.name.text == BATCH]
        axes = {axis.name.text: axis for axis in self._of_verb(MESH)}
        texts = {name: axis.span.text for name, axis in axes.items()}
        texts |= {name: f"{name}={size}" for name, size in (mesh or {}).items()
                  if name in axes and isinstance(axes[name].value, Number)}  # fmt: skip
        places = [axis.span for axis in axes.values()]
        changes += [(place, texts[name]) for place, name in zip(places, order or axes, strict=True)]
        text = self.source.text
        for span, new in sorted(changes, key=lambda change: -change[0].start):
            text = text[: span.start] + new + text[span.end :]
        return Source(self.source.name, "\n".join(_with_lines(text.split("\n"), lines or {})), path=self.source.path)

    @staticmethod
    def read(source: Source) -> Plan:
        """Read a closed plan.

        Raises:
            PlanError: it is none.
        """
        return read_plan(source)

    def plan(self, choice: OpenChoice, order: Sequence[str] = ()) -> Plan:
        """Read the plan that a choice makes.

        Raises:
            PlanError: the choice makes no plan.
        """
        return read_plan(self.closed(choice, order))

    def example(self) -> tuple[OpenChoice, Plan]:
        """Return the first choice that makes a plan, and that plan, to check all else that the file says.

        Raises:
            PlanError: the plan is wrong with all the first choices; the errors are those of the first.
        """
        first: PlanError | None = None
        for choice in islice(self.choices(None), _MOST_TRIED):
            try:
                return choice, self.plan(choice)
            except PlanError as error:
                first = first or error
        assert first is not None
        raise first


def read_open(plan: Path | Source, defines: Mapping[str, str], batch: int | None = None) -> OpenPlan:
    """Read a plan that may have open `let`s. ``batch`` is the number of samples that every choice trains in a step.

    Raises:
        PlanError: an open name stands where none may, or the file is no plan.
    """
    source = plan if isinstance(plan, Source) else read_source(plan)
    expanded = Expanded(source, defines)
    lets = {let.name: let for let in expanded.open}
    if errors := [one for one in expanded.diagnostics if one.is_error]:
        raise PlanError(errors)
    opened = OpenPlan(source, dict(defines), tuple(lets.values()), batch, parse(source)[0])
    errors = [*misplaced(expanded.uses, lets, batch is not None), *_not_in_mesh(opened)]
    if errors:
        raise PlanError(errors)
    return opened


def _not_in_mesh(plan: OpenPlan) -> Iterator[Diagnostic]:
    """Yield an error for each ``?`` that is no axis of the plan's mesh, and for values that are no choice."""
    for let in plan.lets:
        texts = [value.span.text for value in let.values]
        if len(set(texts)) < len(texts):
            twice = next(text for text in texts if texts.count(text) > 1)
            message = f"`{twice}` is twice among the values of `{let.name}`"
            yield Diagnostic(OPEN_MISPLACED, message, Label(let.span), help="write each value once")
        if len(texts) > 1 and not {text.strip('"') for text in texts}.isdisjoint(DELAYED):
            value = next(value for value in let.values if value.span.text.strip('"') in DELAYED)
            name = value.span.text
            message = f"`{name}` computes with weights of the step before: it trains otherwise than another schedule"
            help_ = f"leave `{name}` out, or write it as the only value, `{let.name}={name}`"
            yield Diagnostic(OPEN_MISPLACED, message, Label(value.span), help=help_)
        if not let.values and let.name not in plan.axes.values():
            axes = [axis for axis, size in plan.axes.items() if size != 1]
            message = f"`?` is what the ranks leave, and no axis of the file's own `mesh` line is `${let.name}`"
            help_ = f"write values, `{let.name} = 1 | 2`, or a line `mesh {(axes or ['dp'])[0]}=${let.name}`"
            yield Diagnostic(OPEN_MISPLACED, message, Label(let.span), help=help_)


def _factored(ranks: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as a product of so many."""
    if parts <= 1:
        yield (ranks,) * parts
        return
    for first in (size for size in range(1, ranks + 1) if ranks % size == 0):
        yield from ((first, *rest) for rest in _factored(ranks // first, parts - 1))


def _with_lines(texts: Sequence[str], lines: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield lines, with others in place of those that begin with some words, or behind all where none does."""
    left = dict(lines)
    for text in texts:
        begin = next((words for words in lines if " ".join(text.split()).startswith(words)), None)
        yield from [text] if begin is None else left.pop(begin, ())
    for new in left.values():
        yield from new


def open_words(lets: Iterable[OpenLet]) -> str:
    """Return open names with their values, in words."""
    return listed([f"{let.name} = {let.text}" for let in lets])
