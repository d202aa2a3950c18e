"""Groups of an optimizer: parameters that get other arguments than the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...grammar.codes_plan import BAD_VALUE, MISSING_ARGUMENT, UNEXPECTED_ARGUMENT
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import listed
from ...grammar.syntax import Number, Word
from ...grammar.usage import Arguments
from ..program.optimizers import OPTIMIZERS, OptimizerRow
from .directive import NOT_NEGATIVE, Directive, Limit, Literal, Scope, argument, check_literals, read_literals

CLAUSES = tuple(dict.fromkeys(clause for row in OPTIMIZERS.values() for clause in row.clauses))
"""The clauses that not every optimizer takes."""
COMMON = ("lr", "weight_decay")
"""The clauses that every optimizer takes, and every group of parameters."""
LIMITS: tuple[tuple[str, Limit], ...] = (
    *((name, NOT_NEGATIVE) for name in ("lr", "weight_decay", "eps", "momentum")),
    ("betas", (lambda value: 0 <= value < 1, "from 0 to below 1")),
)


@dataclass(frozen=True)
class OptimizerGroup(Directive):
    """A line ``optimizer on WHERE …``: what it gives holds for the parameters that it names."""

    USAGE = ""  # the second form of `optimizer`
    ONCE = False
    LIMITS = LIMITS

    where: tuple[Word, ...] = argument(lambda given: given.words("on"))
    values: tuple[tuple[str, Literal], ...] = argument(lambda given: read_literals(given.bindings("args")))

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that the line gives, as a build's manifest has them."""
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
    """Find what a line gives that its optimizer, one of ``OPTIMIZERS``, does not take."""
    row = OPTIMIZERS[optimizer]
    for clause in CLAUSES:
        if clause in arguments and clause not in row.clauses:
            owners = [f"`{name}`" for name, other in OPTIMIZERS.items() if clause in other.clauses]
            help_ = f"remove it: `{clause}` is a clause of {', '.join(owners)}"
            label = Label(arguments.span(clause))
            yield Diagnostic(UNEXPECTED_ARGUMENT, f"`{optimizer}` has no `{clause}`", label, help=help_)
    yield from _check_values(arguments, optimizer, row)


def _check_values(arguments: Arguments, optimizer: str, row: OptimizerRow) -> Iterator[Diagnostic]:
    yield from check_literals(arguments, "args")
    for binding in arguments.bindings("args"):
        for name, value in read_literals((binding,)):
            label, known = Label(binding.span), row.arguments
            if name not in known:
                own = f"in parentheses it takes {listed([*known])}" if known else "it takes none in parentheses"
                help_ = f"write `{name} {value}` without parentheses" if name in (*CLAUSES, *COMMON, "clip") else own
                message = f"`{optimizer}` has no argument `{name}`"
                yield Diagnostic(UNEXPECTED_ARGUMENT, message, label, help=help_)
            elif not _fits(value, known[name]):
                wanted = "`true` or `false`" if known[name] is bool else "a number, not below 0"
                yield Diagnostic(BAD_VALUE, f"`{name}` is {wanted}", label, help=f"remove it, or write {wanted}")


def _fits(value: Literal, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
