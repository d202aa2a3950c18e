"""``loss``: the number that training minimises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import BAD_VALUE, NOT_SUPPORTED, UNKNOWN_INPUT, WRONG_KIND
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.nearest import did_you_mean, listed
from ....grammar.source import Span
from ....grammar.syntax import Call, Item, Number, Setting, Word
from ....grammar.usage import DIVIDED, Arguments
from ...program.step_values import LossTerm
from ...sizes.size_range import BATCH
from ..directive import Directive, Scope, argument, check_callable
from .input import Input

CROSS_ENTROPY = "cross_entropy"
LOSS_KINDS = {"call": CROSS_ENTROPY, "path": "output", "callable": "callable"}
"""The kinds of a loss's terms, by the argument that a term of each kind has."""


@dataclass(frozen=True)
class Loss(Directive):
    """The loss of a step. A mean cross entropy is the mean over all targets of the step's whole batch that are not
    ignored, however the batch is split. The same holds for a loss of your own that divides a sum by a count of inputs,
    as `(losses * mask).sum() / mask.sum()`: a floor under the count, as `.clamp(min=1)`, and a small number beside it,
    as `+ 1e-6`, are those of the step's count too. Any other loss is added up over microbatches, or averaged. Which of
    the two makes the loss of the whole batch is measured when a plan is compiled: your module runs on random
    microbatches, and your loss on their outputs joined. If neither does, the loss is averaged, and a warning says so.
    If the model is too large for that, its graph decides, and the smaller model is tested.

    `cross_entropy(output, targets, ignore=-100)`: cross entropy of the model's output (logits, with classes in the last
    dim) and an input of class numbers; targets equal to `ignore` do not count. `output.loss`: an attribute or entry of
    what the model returns. `"package.module:name" (output, targets)` or `"./file.py:name" (…)`: your own function,
    called with the model's output and with inputs, in the order that you write. Everywhere `output.NAME` is an
    attribute or an entry of what the model returns, `output.1` its second entry, and `output.hidden.0` an entry of an
    entry.

    A plan without `loss` and `optimizer` lines is for inference: its programs make the tensors that the model returns
    in `eval()`, and hold neither gradients nor an optimizer's state. An `eval` line changes nothing there, and a `data`
    line names the samples of `session.predict()`, a batch at each call. Lines that only training obeys, such as `zero`,
    are refused.

    `/ N` and `/ INPUT` behind a term say that it is a sum over the batch, which a step divides once: by a number, or by
    an input. The input is one number for the step, `input items float32 [1]`, as transformers' `num_items_in_batch`; or
    one for each sample, `[B]`, whose sum over the step divides. `cross_entropy(…)` takes neither, as it is a mean.

    A loss may be a sum of terms, as `cross_entropy(output.logits, targets) + 0.01 output.aux_loss`. Each term with a
    count, as a mean cross entropy, is divided by its own count of the whole step; each term that is a sum is added up.
    Other terms, such as the balance of experts over all tokens of a microbatch, are averaged over microbatches.
    """

    USAGE = "loss [X] CALL [/ DIVISOR] | [X] PATH [/ DIVISOR] | [X] CALLABLE ARGS [/ DIVISOR] [+ ...]"

    terms: tuple[LossTerm, ...] = argument(lambda line: tuple(map(_term, line.terms)))

    @property
    def reads(self) -> tuple[str, ...]:
        """The operands of all terms: `output`, `output.logits`, `output.0`, or names of inputs."""
        return tuple(dict.fromkeys(name for term in self.terms for name in term.reads))

    @property
    def callables(self) -> tuple[str, ...]:
        """The callables that terms name."""
        return tuple(term.target for term in self.terms if term.kind == LOSS_KINDS["callable"])

    def term_span(self, number: int) -> Span:
        """Return the place of a term in the line. Terms are numbered from 1."""
        term = self.arguments.terms[number - 1]
        return next(term.span(kind) for kind in LOSS_KINDS if kind in term)

    def span_of(self, name: str) -> Span:
        """Return the place of a name in the line, or the line's."""
        items = (item for term in self.arguments.terms for item in (*_operands(term), *term.items("path")))
        return next((item.span for item in items if isinstance(item, Word) and item.text == name), self.span)

    @property
    def summed(self) -> frozenset[int]:
        """The numbers of the terms that the plan divides, which are sums over the batch."""
        return frozenset(number for number, term in enumerate(self.terms, 1) if term.divisor is not None)

    @property
    def counted(self) -> frozenset[int]:
        """The numbers of the plan's own cross entropies, which their counts of targets divide."""
        return frozenset(number for number, term in enumerate(self.terms, 1) if term.kind == CROSS_ENTROPY)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        for term, arguments in zip(self.terms, self.arguments.terms, strict=True):
            yield from _check_term(term, arguments, scope)


def _check_term(term: LossTerm, arguments: Arguments, scope: Scope) -> Iterator[Diagnostic]:
    if term.target != CROSS_ENTROPY:
        yield from _check_divisor(term, arguments, scope)
    if "path" in arguments:
        yield from _check_path(arguments)
        return
    yield from check_callable(arguments, "callable")
    if term.kind == CROSS_ENTROPY:
        yield from _check_call(term, arguments)
    if term.target == CROSS_ENTROPY and term.divisor is not None:
        help_ = "leave out what is behind `/`, or write a factor before it: `0.5 cross_entropy(…)`; a sum that the plan"
        help_ += ' divides is a function of yours: `"file.py:total"(output, targets) / N`, which returns'
        help_ += ' `F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")`'
        message = "`cross_entropy` is a mean: a step divides it by the count of its targets already"
        yield Diagnostic(BAD_VALUE, message, Label(arguments.span(DIVIDED)), help=help_)
    known = [line.name for line in scope.all(Input)]
    for item in _operands(arguments):
        if isinstance(item, Setting) and term.kind == CROSS_ENTROPY:
            continue
        if not isinstance(item, Word):
            message = "the loss takes `output` and inputs"
            yield Diagnostic(WRONG_KIND, message, Label(item.span), help="write names, as `(output, targets)`")
        elif item.text.partition(".")[0] != "output" and item.text not in known and "input" not in scope.broken:
            inputs = f"the inputs are {listed(known)}" if known else "the plan has no inputs"
            help_ = did_you_mean(item.text, known, f"{inputs}; the model's output is `output`")
            yield Diagnostic(UNKNOWN_INPUT, f"no input is called `{item.text}`", Label(item.span), help=help_)


def _check_divisor(term: LossTerm, arguments: Arguments, scope: Scope) -> Iterator[Diagnostic]:
    span, inputs = arguments.span(DIVIDED), {line.name: line for line in scope.all(Input)}
    if isinstance(term.divisor, float) and term.divisor <= 0:
        help_ = "write what a step divides the sum by, as `/ 8`; a factor stands before the term"
        yield Diagnostic(BAD_VALUE, f"a loss is not divided by {term.divisor:g}", Label(span), help=help_)
    if isinstance(term.divisor, str) and "input" not in scope.broken:
        line = inputs.get(term.divisor)
        if line is None:
            known = f"the inputs are {listed(inputs)}" if inputs else "the plan has no inputs"
            help_ = did_you_mean(term.divisor, inputs, known)
            yield Diagnostic(UNKNOWN_INPUT, f"no input is called `{term.divisor}`", Label(span), help=help_)
        elif line.dtype == "bool" or line.dims not in ((), (1,), (BATCH,)):
            shape = f"{line.dtype} [{', '.join(map(str, line.dims))}]"
            message = f"`{term.divisor}` is {shape}, and a loss is divided by one number, or by the sum of one a sample"
            help_ = f"write `input {term.divisor} float32 [1]` for a number of the step, `[B]` for one of each sample"
            yield Diagnostic(WRONG_KIND, message, Label(span), help=help_)


def _check_path(arguments: Arguments) -> Iterator[Diagnostic]:
    path = arguments.word("path")
    assert path is not None
    parts = path.text.split(".")
    if parts[0] != "output" or not all(part.isidentifier() or part.isdigit() for part in parts):
        help_ = 'write `loss output.loss`, `loss cross_entropy(output, targets)` or `loss "file.py:fn"(output)`'
        yield Diagnostic(BAD_VALUE, f"`{path.text}` is not a loss", Label(path.span), help=help_)


def _check_call(term: LossTerm, arguments: Arguments) -> Iterator[Diagnostic]:
    span = arguments.span("call")
    usage = "write `cross_entropy(output, targets)` or `cross_entropy(output, targets, ignore=-100)`"
    if term.target != CROSS_ENTROPY:
        message = f"no loss is called `{term.target}`"
        help_ = f'{usage}; any other loss is a callable: `"file.py:{term.target}"(output, targets)`'
        yield Diagnostic(NOT_SUPPORTED, message, Label(span), help=help_)
        return
    items = _operands(arguments)
    for item in items:
        if isinstance(item, Setting) and not (
            item.name.text == "ignore" and isinstance(item.value, Number) and item.value.is_integer
        ):
            message = "`cross_entropy` takes by name only `ignore`, a whole number"
            yield Diagnostic(WRONG_KIND, message, Label(item.span), help=usage)
    if len([item for item in items if not isinstance(item, Setting)]) != 2 or len(items) > 3:
        yield Diagnostic(WRONG_KIND, "`cross_entropy` takes the output and the targets", Label(span), help=usage)


def _term(arguments: Arguments) -> LossTerm:
    kind = next((kind for word, kind in LOSS_KINDS.items() if word in arguments), "")
    operands = tuple(item.text for item in _operands(arguments) if isinstance(item, Word))
    ignore = _ignore(arguments) if "call" in arguments else None
    divisor = next((_divisor(item) for item in arguments.items(DIVIDED)), None)
    return LossTerm(kind, _target(arguments), operands, ignore, arguments.number("x", 1), divisor)


def _divisor(item: Item) -> float | str | None:
    if isinstance(item, Number):
        return float(item.value)
    return item.text if isinstance(item, Word) else None


def _operands(arguments: Arguments) -> tuple[Item, ...]:
    if "call" in arguments:
        (call,) = arguments.items("call")
        return call.arguments if isinstance(call, Call) else ()
    return arguments.flat("args")


def _target(arguments: Arguments) -> str:
    """Return the target of a term: `cross_entropy`, the dotted path after `output`, or "module:name" of a callable."""
    name = next((item.name for item in arguments.items("call") if isinstance(item, Call)), "")
    return name or arguments.text("path").partition(".")[2] or arguments.text("callable")


def _ignore(arguments: Arguments) -> int:
    value = next((item.value for item in _operands(arguments) if isinstance(item, Setting)), None)
    return int(value.value) if isinstance(value, Number) and value.is_integer else -100
