"""The typed, frozen ``Plan``; ``read_plan``, which reads and checks one as far as that needs no model; and
``Promise``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from ...grammar.codes import BAD_VALUE, MISSING_STATEMENT, OPEN_LET, OPEN_MISPLACED, REPEATED, UNKNOWN_VERB, UNREADABLE
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ...grammar.format import format_statements
from ...grammar.nearest import did_you_mean, listed, path_meant
from ...grammar.source import Source, Span
from ...grammar.substitute import IN_STRING, LET, OpenLet
from ...grammar.syntax import Phrase, Setting, Statement, Word
from ...grammar.usage import parse_usage
from ..layout.mesh import Mesh, view_cuts, viewed
from ..program.actions import PHASES
from ..program.step_values import LossScale
from ..schedules import DELAYED
from ..sizes.size_range import BATCH, SizeRange
from .directive import TRAINERS, Directive, Scope, argument, check_known, check_unique, of_lines
from .directives import directive, verbs
from .directives.bucket import DEFAULT as BUCKET
from .directives.bucket import Bucket
from .directives.budget import Budget
from .directives.check import Check
from .directives.cluster import ClusterLine
from .directives.compress import Compress
from .directives.context import Context
from .directives.data import Data
from .directives.ema import Ema
from .directives.eval import Eval
from .directives.freeze import Freeze
from .directives.hierarchical import Hierarchical
from .directives.init import Init
from .directives.input import Input
from .directives.loss import Loss
from .directives.mesh import MeshLine, declared_mesh, merged
from .directives.model import Model
from .directives.node import Node, nodes_of
from .directives.offload import Offload
from .directives.optimizer import Optimizer
from .directives.precision import Precision
from .directives.prefetch import DEFAULT as PREFETCH
from .directives.prefetch import Prefetch
from .directives.recompute import Recompute
from .directives.schedule import Schedule
from .directives.seed import Seed as SeedLine
from .directives.sequence import Sequence as SequenceLine
from .directives.sizes import Sizes
from .directives.stage import Stage
from .directives.steps import Steps
from .directives.verify import Verify
from .directives.view import ViewLine
from .directives.zero import Zero
from .include import NAME_A_PLAN, Expanded, has_plan_name, read_source
from .layouts import Fix, SplitWeights
from .rates import OptimizerGroup, with_table
from .samples_said import SamplesSaid

MESH, OPTIMIZER, SIZES = "mesh", "optimizer", "sizes"
MOST_ERRORS = 100
REQUIRED: dict[str, str] = {
    "model": 'model "./model.py:Model" (width=64)',
    "input": "input tokens int64 [B, S]",
    "loss": "loss cross_entropy(output, targets)",
    "optimizer": "optimizer adamw lr 3e-4",
}


@dataclass(frozen=True)
class Plan:
    """A plan, with its defaults; ``statements`` are without ``$name``, ``let`` and ``include``. A field that lines give
    is declared with the way to read it from them."""

    source: Source
    statements: tuple[Statement, ...]
    defines: tuple[tuple[str, str], ...]
    mesh_spans: dict[str, Span] = field(compare=False)
    """The place where each axis is declared."""
    warnings: tuple[Diagnostic, ...] = field(compare=False)
    model: Model = of_lines(lambda lines: lines.one(Model))
    verify: Verify | None = of_lines(lambda lines: lines.one(Verify))
    inputs: tuple[Input, ...] = of_lines(lambda lines: lines.all(Input))
    sizes: dict[str, SizeRange] = of_lines(lambda lines: dict(line.ranges) if (line := lines.one(Sizes)) else {})
    loss: Loss = of_lines(lambda lines: lines.one(Loss) or Loss(lines.all(Model)[0].arguments, ()))
    data: Data | None = of_lines(lambda lines: lines.one(Data))
    optimizer: Optimizer = of_lines(lambda lines: lines.one(Optimizer) or Optimizer.none(lines.all(Model)[0].arguments))
    groups: tuple[OptimizerGroup, ...] = of_lines(lambda lines: lines.all(OptimizerGroup))
    ema: Ema | None = of_lines(lambda lines: lines.one(Ema))
    seed: int = of_lines(lambda lines: line.value if (line := lines.one(SeedLine)) else 0)
    steps: int | None = of_lines(lambda lines: line.value if (line := lines.one(Steps)) else None)
    check: Check | None = of_lines(lambda lines: lines.one(Check))
    mesh: Mesh = of_lines(lambda lines: lines.mesh)
    microbatches: int = of_lines(lambda lines: line.microbatches if (line := lines.one(Schedule)) else 1)
    accumulate: str = of_lines(lambda lines: line.accumulate if (line := lines.one(Schedule)) else "fp32")
    precision: tuple[Precision, ...] = of_lines(lambda lines: lines.all(Precision))
    recompute: tuple[Recompute, ...] = of_lines(
        lambda lines: tuple(line for line in lines.all(Recompute) if not line.idle)
    )
    zero: tuple[Zero, ...] = of_lines(lambda lines: lines.all(Zero))
    bucket: int = of_lines(lambda lines: line.size if (line := lines.one(Bucket)) else BUCKET)
    prefetch: int = of_lines(lambda lines: line.units if (line := lines.one(Prefetch)) else PREFETCH)
    offload: tuple[Offload, ...] = of_lines(lambda lines: lines.all(Offload))
    frozen: tuple[Word, ...] = of_lines(lambda lines: tuple(word for line in lines.all(Freeze) for word in line.where))
    placements: tuple[Fix | SplitWeights, ...] = of_lines(
        lambda lines: tuple(line for line in lines.directives if isinstance(line, Fix | SplitWeights))
    )
    promises: tuple[Promise, ...] = of_lines(lambda lines: lines.all(Promise))
    budget: Budget | None = of_lines(lambda lines: lines.one(Budget))
    evaluation: Eval | None = of_lines(lambda lines: lines.one(Eval) if lines.one(Loss) is not None else None)
    init: Init | None = of_lines(lambda lines: lines.one(Init))
    node: Node | None = of_lines(nodes_of)
    cluster: ClusterLine | None = of_lines(lambda lines: lines.one(ClusterLine))
    hierarchical: tuple[Hierarchical, ...] = of_lines(lambda lines: lines.all(Hierarchical))
    compress: tuple[Compress, ...] = of_lines(lambda lines: lines.all(Compress))
    context: tuple[Context, ...] = of_lines(lambda lines: lines.all(Context))
    schedule: Schedule | None = of_lines(lambda lines: lines.one(Schedule))
    stages: tuple[Stage, ...] = of_lines(lambda lines: lines.all(Stage))
    views: tuple[ViewLine, ...] = of_lines(lambda lines: lines.all(ViewLine))
    sequence: tuple[SequenceLine, ...] = of_lines(lambda lines: lines.all(SequenceLine))

    @cached_property
    def refined(self) -> Mesh:
        """The mesh with the axes of views, and with axes factored where those begin or end inside them."""
        views = [line.view for line in self.views]
        return viewed(self.mesh, views, view_cuts(self.mesh, views))

    def ranks(self, axis: str) -> int:
        """The number of ranks along an axis of the mesh or of a view."""
        return next((dict(line.view.axes)[axis] for line in self.views if axis in dict(line.view.axes)), None) or (
            self.mesh.size(axis)
        )

    @property
    def trains(self) -> bool:
        """False for a plan without `loss` and `optimizer`, which is for inference."""
        return bool(self.loss.terms)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the `precision` lines."""
        return next((line.loss_scale for line in self.precision if line.loss_scale is not None), None)

    @property
    def moments(self) -> int:
        """The number of tensors that the update keeps of each trained parameter."""
        return self.optimizer.moments + (self.ema is not None) + self.is_delayed

    @property
    def is_delayed(self) -> bool:
        """True where a step computes with the weights before the last update."""
        return self.schedule is not None and self.schedule.name in DELAYED

    @property
    def unbatched(self) -> frozenset[str]:
        """The inputs whose first dim is not the batch."""
        return frozenset(line.name for line in self.inputs if line.dims[:1] != (BATCH,))

    @property
    def sampled(self) -> list[tuple[Data | Eval, SamplesSaid]]:
        """The lines that name samples, those of training first, with what each says of them."""
        lines = [line for line in (self.data, self.evaluation) if line is not None]
        return [(line, line.samples) for line in lines if line.samples is not None]

    @property
    def offloaded(self) -> dict[str, Offload]:
        """The line that says where each part of the state of training is kept."""
        return {word.text: line for line in self.offload for word in line.states}

    def input_shape(self, line: Input) -> tuple[int, ...]:
        """The shape of an input in one microbatch, over all data ranks, at the largest sizes."""
        sizes = ((dim, dim if isinstance(dim, int) else self.sizes[dim].high) for dim in line.dims)
        return tuple(size // self.microbatches if dim == BATCH else size for dim, size in sizes)

    def text(self) -> str:
        """The plan as built: every ``$name`` and ``include`` replaced, in canonical form."""
        return format_statements(self.statements)


def read_plan(plan: Path | str | Source, defines: Mapping[str, str] | None = None) -> Plan:
    """Read a plan from a file or a text, with the values of ``-D name=value``.

    Raises:
        PlanError: with every error that can be found without the model.
    """
    source = plan if isinstance(plan, Source) else read_source(Path(plan))
    defines = dict(defines or {})
    expanded = Expanded(source, defines)
    directives, errors = _read_directives(expanded.statements)
    if expanded.open and not errors and not any(one.is_error for one in expanded.diagnostics):
        names = {let.name: let for let in expanded.open}
        raise PlanError([*map(_still_open, expanded.open), *misplaced(expanded.uses, names, batch=True)])
    wrong = [*expanded.diagnostics, *errors]
    if wrong and not directives and source.path is not None and source.path.suffix != ".parc":
        message = f"`{source.path}` is no plan: none of its lines is one of a plan"
        raise PlanError([Diagnostic(UNREADABLE, message, help=path_meant(source.path, has_plan_name, NAME_A_PLAN))])
    axes = merged([line for line in directives if isinstance(line, MeshLine)])
    mesh, views = declared_mesh(axes), (line.view for line in directives if isinstance(line, ViewLine))
    view_axes = frozenset(name for view in views for name, _ in view.axes if name not in mesh)
    scope = Scope(directives, mesh, _broken(expanded, directives), view_axes)
    diagnostics = [_with_defines(diagnostic, defines) for diagnostic in (*wrong, *_few(_check(scope, source)))]
    diagnostics.sort(key=_position)
    if any(diagnostic.is_error for diagnostic in diagnostics):
        raise PlanError(diagnostics)
    settings = (*axes, *(setting for line in scope.all(ViewLine) for setting in line.settings))
    return Plan(
        source, _built_statements(expanded.statements, axes), tuple(defines.items()),
        {setting.name.text: setting.span for setting in settings}, tuple(diagnostics),
        **{one.name: one.metadata["read"](scope) for one in fields(Plan) if one.metadata},
    )  # fmt: skip


def _still_open(let: OpenLet) -> Diagnostic:
    """Return the error of a name that a command needs closed."""
    value = let.values[0].span.text if let.values else "2"
    message = f"`{let.name}` is open: `{let.text}`"
    help_ = f"`-D {let.name}={value}` closes it; `parc plan` chooses the fastest"
    return Diagnostic(OPEN_LET, message, Label(let.span), help=help_)


def misplaced(
    uses: Iterable[tuple[Statement, frozenset[str]]], lets: Mapping[str, OpenLet], batch: bool
) -> Iterator[Diagnostic]:
    """Yield an error for each line that says what is trained, and depends on an open name."""
    for statement, names in uses:
        verb = statement.verb.text
        if verb not in verbs() or directive(verb).LAYOUT or (verb == SIZES and batch):
            continue
        name = next(name for name in lets if name in names)
        message = f"`{verb}` says what is trained, and `{name}` is open"
        help_ = f"give `{name}` one value, or write another name here"
        if verb == SIZES:
            message = f"the sizes depend on `{name}`, which is open: choices would train other batches"
            help_ = f"`--batch N` gives one `{BATCH}` to all of them"
        related = (Label(lets[name].span, "chosen here"),)
        yield Diagnostic(OPEN_MISPLACED, message, Label(statement.span.root), related, help=help_)


def _with_defines(diagnostic: Diagnostic, defines: Mapping[str, str]) -> Diagnostic:
    """Return a message about a ``$name`` of the plan, with the ``-D`` that gives its value."""
    span = diagnostic.primary.span if diagnostic.primary is not None else None
    if span is None or next(span.includes, None) is not None:
        return diagnostic
    names = [name for name in IN_STRING.findall(span.text) if name in defines]
    options = [Source.option(name, defines[name]) for name in names]
    labels = (Label(Span(source, 0, len(source.text))) for source in options)
    return replace(diagnostic, related=(*labels, *diagnostic.related))


def _built_statements(statements: Sequence[Statement], axes: tuple[Setting, ...]) -> tuple[Statement, ...]:
    """Return the statements as a build keeps them: no ``let``, one ``mesh`` line of all axes, tables of rates
    inline."""
    kept: list[Statement] = []
    for statement in statements:
        if statement.verb.text == MESH:
            if any(earlier.verb.text == MESH for earlier in kept):
                continue
            statement = replace(statement, phrases=(Phrase(axes, statement.phrases[0].span),))
        if statement.verb.text != LET:
            kept.append(with_table(statement) if statement.verb.text == OPTIMIZER else statement)
    return tuple(kept)


def _read_directives(statements: Sequence[Statement]) -> tuple[tuple[Directive, ...], tuple[Diagnostic, ...]]:
    """The directives of every statement that matches its verb's usage, and errors for the others."""
    directives: list[Directive] = []
    errors: list[Diagnostic] = []
    for statement in statements:
        verb = statement.verb
        if verb.text not in verbs():
            help_ = did_you_mean(verb.text, verbs(), f"verbs are {listed(verbs())}")
            errors.append(Diagnostic(UNKNOWN_VERB, f"unknown verb `{verb.text}`", Label(verb.span), help=help_))
            continue
        kind = directive(verb.text)
        arguments, faults = parse_usage(kind.USAGE).match(statement)
        errors.extend(map(kind.translated, faults))
        if arguments is not None:
            directives.append(kind.form(arguments).read(arguments))
    return tuple(directives), tuple(errors)


def _broken(expanded: Expanded, directives: Sequence[Directive]) -> frozenset[str]:
    """Return the verbs with a line that could not be read. Such a line may say anything, so nothing of its verb is
    reported missing."""
    if not expanded.complete:
        return frozenset(verbs())
    texts = (line for source in expanded.sources for line in source.text.split("\n"))
    lines = Counter(match[1] for line in texts if (match := re.match(r"\s*(\w+)", line)))
    read = Counter(line.verb for line in directives)
    return frozenset(verb for verb in lines if lines[verb] > read[verb])


def _few(diagnostics: Iterator[Diagnostic]) -> Iterator[Diagnostic]:
    """Yield diagnostics up to the hundredth error: so many have one cause, and every check looks at all lines."""
    errors = 0
    for diagnostic in diagnostics:
        yield diagnostic
        errors += diagnostic.is_error
        if errors == MOST_ERRORS:
            return


def _check(scope: Scope, source: Source) -> Iterator[Diagnostic]:
    first: dict[type[Directive], Directive] = {}
    for line in scope.directives:
        if line.ONCE and type(line) in first:
            related = (Label(first[type(line)].span, "given here first"),)
            place = Label(line.arguments.statement.verb.span)
            yield Diagnostic(REPEATED, f"a plan has one `{line.verb}` line", place, related, help="remove one of them")
        first.setdefault(type(line), line)
        yield from line.check(scope)
    names = [line.arguments.words("name")[0] for line in scope.all(Input)]
    yield from check_unique(tuple(names), "input")
    present = scope.broken | {line.verb for line in scope.directives if not isinstance(line, OptimizerGroup)}
    trainer = next((line for line in scope.directives if line.verb in TRAINERS), None)
    for required, example in REQUIRED.items():
        if required not in present and (scope.trains or required not in TRAINERS):
            label, help_ = None, f"add a line: `{example}`"
            if required in TRAINERS and trainer is not None:
                label = Label(trainer.span)
                help_ += f"; or remove the `{trainer.verb}` line: a plan with neither is for inference"
            yield Diagnostic(MISSING_STATEMENT, f"`{source.name}` has no `{required}` line", label, help=help_)
    for line in scope.directives if not scope.trains else ():
        yield from line.check_inference()


def _position(diagnostic: Diagnostic) -> tuple[bool, int, int]:
    """Return the sort key of a message: the order of the plan's lines, then messages without a place (a missing
    statement, a ``-D``)."""
    if diagnostic.primary is None:
        return True, 0, 0
    span = diagnostic.primary.span
    return span.source.is_option, span.root.start, span.start


# ---- promises of `forbid` and `expect` lines


ANY = "any"
COLLECTIVE_WORDS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("all_reduce", "row_max", "all_reduce_among"),
    "all_gather": ("all_gather", "all_gather_int8"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_int8"),
    "all_to_all": ("all_to_all",),
    "exchange": ("exchange",),
    "ring": ("ring_attention", "ring_attention_backward"),
}
"""The words of a line for collectives, each with the operators of programs that it means. A row's maximum is an
all-reduce too, and so is a sum among some stages."""


@dataclass(frozen=True)
class Promise(Directive):
    """A promise of how many collectives a microbatch's forward and backward (or one phase) run in each of some
    modules."""

    ONCE = False

    count: int = argument(lambda line: int(line.number("n", 0)))
    op: Word = argument(lambda line: line.word("op"))
    where: tuple[Word, ...] = argument(lambda line: line.words("in"))
    axis: Word | None = argument(lambda line: line.word("over"))
    phase: Word | None = argument(lambda line: line.word("during"))

    def means(self, op: str, axes: tuple[str, ...], phase: str) -> bool:
        """Return whether the line is about such a collective."""
        phases = ("forward", "backward") if self.phase is None else (self.phase.text,)
        named = self.op.text == ANY or op in COLLECTIVE_WORDS[self.op.text]
        return named and phase in phases and (self.axis is None or self.axis.text in axes)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        yield from check_known(self.op, (*COLLECTIVE_WORDS, ANY), f"no collective is called `{self.op.text}`")
        if self.axis is not None:
            yield from scope.check_axis(self.axis, of_views=True)
        if self.phase is not None and self.phase.text not in PHASES:
            message = f"a step has no phase `{self.phase.text}`"
            yield Diagnostic(BAD_VALUE, message, Label(self.phase.span), help=f"phases are {listed(PHASES)}")
