"""``loss``: the number that training minimises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import BAD_VALUE, NOT_SUPPORTED, UNKNOWN_INPUT, WRONG_KIND
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.nearest import did_you_mean, listed
from ....grammar.syntax import Call, Item, Number, Setting, Word
from ....grammar.usage import Arguments
from ..directive import Directive, Scope, argument, check_callable
from .input import Input

CROSS_ENTROPY = "cross_entropy"
LOSS_KINDS = {"call": CROSS_ENTROPY, "path": "output", "callable": "callable"}
"""The kinds of losses, by the argument that a line of each kind has."""


@dataclass(frozen=True)
class Loss(Directive):
    """The loss. A mean cross entropy, or a multiple of one, is the mean over all unmasked targets of a step's
    whole batch, however it is split; a sum is added up over microbatches, and any other loss is averaged over them.

    `cross_entropy(output, targets, ignore=-100)`: cross entropy of the model's output (logits, classes last) with an
    input of class numbers; targets equal to `ignore` do not count. `output.loss`: an attribute or entry of what the
    model returns. `"package.module:name" (output, targets)` or `"./file.py:name" (…)`: a callable of the output, as the
    model returns it, and of inputs, in its own order.
    Everywhere `output.NAME` is an attribute or an entry of what the model returns, `output.1` its second entry, and
    `output.hidden.0` an entry of an entry.
    """

    USAGE = "loss CALL | PATH | CALLABLE ARGS"

    kind: str = argument(lambda given: next(kind for word, kind in LOSS_KINDS.items() if word in given))
    target: str = argument(lambda given: _target(given))
    """The called function: for cross_entropy its name, for output the dotted path after `output`, for callable
    "module:name"."""
    operands: tuple[str, ...] = argument(lambda given: tuple(i.text for i in _operands(given) if isinstance(i, Word)))
    """The operands of a call: `output`, `output.logits`, `output.0`, or names of inputs."""
    ignore: int | None = argument(lambda given: _ignore(given) if "call" in given else None)
    """The class number that cross_entropy ignores."""

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        if self.kind == "output":
            yield from self._check_path()
            return
        yield from check_callable(self.arguments, "callable")
        if self.kind == CROSS_ENTROPY:
            yield from self._check_call()
        known = [line.name for line in scope.all(Input)]
        for item in _operands(self.arguments):
            if isinstance(item, Setting) and self.kind == CROSS_ENTROPY:
                continue
            if not isinstance(item, Word):
                message = "the loss takes `output` and inputs"
                yield Diagnostic(WRONG_KIND, message, Label(item.span), help="write names, as `(output, targets)`")
            elif item.text.partition(".")[0] != "output" and item.text not in known and "input" not in scope.broken:
                inputs = f"the inputs are {listed(known)}" if known else "the plan has no inputs"
                help_ = did_you_mean(item.text, known, f"{inputs}; the model's output is `output`")
                yield Diagnostic(UNKNOWN_INPUT, f"no input is called `{item.text}`", Label(item.span), help=help_)

    def _check_path(self) -> Iterator[Diagnostic]:
        path = self.arguments.word("path")
        assert path is not None
        parts = path.text.split(".")
        if parts[0] != "output" or not all(part.isidentifier() or part.isdigit() for part in parts):
            help_ = 'write `loss output.loss`, `loss cross_entropy(output, targets)` or `loss "file.py:fn"(output)`'
            yield Diagnostic(BAD_VALUE, f"`{path.text}` is not a loss", Label(path.span), help=help_)

    def _check_call(self) -> Iterator[Diagnostic]:
        span = self.arguments.span("call")
        usage = "write `cross_entropy(output, targets)` or `cross_entropy(output, targets, ignore=-100)`"
        if self.target != CROSS_ENTROPY:
            message = f"no loss is called `{self.target}`"
            help_ = f'{usage}; any other loss is a callable: `"file.py:{self.target}"(output, targets)`'
            yield Diagnostic(NOT_SUPPORTED, message, Label(span), help=help_)
            return
        items = _operands(self.arguments)
        for item in items:
            if isinstance(item, Setting) and not (
                item.name.text == "ignore" and isinstance(item.value, Number) and item.value.is_integer
            ):
                message = "`cross_entropy` takes by name only `ignore`, a whole number"
                yield Diagnostic(WRONG_KIND, message, Label(item.span), help=usage)
        if len([item for item in items if not isinstance(item, Setting)]) != 2 or len(items) > 3:
            yield Diagnostic(WRONG_KIND, "`cross_entropy` takes the output and the targets", Label(span), help=usage)


def _operands(arguments: Arguments) -> tuple[Item, ...]:
    if "call" in arguments:
        (call,) = arguments.items("call")
        return call.arguments if isinstance(call, Call) else ()
    return arguments.flat("args")


def _target(arguments: Arguments) -> str:
    name = next((item.name for item in arguments.items("call") if isinstance(item, Call)), "")
    return name or arguments.text("path").partition(".")[2] or arguments.text("callable")


def _ignore(arguments: Arguments) -> int:
    value = next((item.value for item in _operands(arguments) if isinstance(item, Setting)), None)
    return int(value.value) if isinstance(value, Number) and value.is_integer else -100
