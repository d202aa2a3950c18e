"""The plan's placement lines applied to the names of a captured model: seeds of propagation, or every error."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from ...grammar.codes import IDLE_AXIS, NOT_PADDED, REPEATED_PLACEMENT, UNEVEN_SHARD, WRONG_DIM
from ...grammar.diagnostics import Diagnostic, Label, PlanError, Severity
from ...grammar.source import Span
from ...grammar.syntax import Word
from ..layout.mesh import Mesh
from ..ops.recompute import RecomputeLine
from ..padding.pads import Pads, pads_by_value
from ..plan.directives.experts import Experts
from ..plan.directives.precision import TYPES, Precision
from ..plan.directives.sequence import Sequence
from ..plan.layouts import DimLayout, DimSplit, Factor, Fix, SplitWeights, cut_dims, multiples
from ..plan.plan import Plan
from ..program.optimizers import Groups, grouped
from ..sizes.size_range import BATCH, SizeRange
from .names import PlanNames, find_each, find_modules, find_parameters, find_values, find_weights, split_dim
from .requests import Compression, PlanAxes, Sharding
from .seeds import PlacementSeed, Seeds, Views, sequence_seeds, split_inputs
from .stage_lines import find_cuts
from .storage import compressions_of, recompute_lines, shardings_of


@dataclass(frozen=True, slots=True)
class Resolved:
    """The lines of a plan resolved: seeds in the order of the lines, at most one for a value and axis, none on axes of
    size 1; warnings; parameters that are not trained, and the optimizer's groups; and the types in which modules
    compute."""

    seeds: tuple[PlacementSeed, ...]
    warnings: tuple[Diagnostic, ...]
    frozen: frozenset[str] = frozenset()
    groups: Groups = ()
    pads: Pads = field(default_factory=dict)
    """The dims of parameters that are longer than the model's, so that their splits divide them."""
    precision: tuple[tuple[str, tuple[str, ...], int], ...] = ()
    shardings: Mapping[str, list[Sharding]] = field(default_factory=dict)
    """The demands of ``zero`` lines, over the plan's own axes, by the parameters' names."""
    compressions: Mapping[str, Compression] = field(default_factory=dict)
    """The demands of ``compress`` lines, likewise."""
    views: Views | None = None
    recompute: tuple[RecomputeLine, ...] = ()
    axes: PlanAxes = field(default_factory=PlanAxes)
    """The factoring of axes with which the lines were resolved."""

    def line_of(self, value: str, dim: int) -> int:
        """Return the first line of the plan that splits a dim, for the computation or where it is stored."""
        lines = [seed.span.root.line for seed in self.seeds if (seed.value, seed.dim) == (value, dim)]
        return next(iter([*lines, *(sharding.line for sharding in self.shardings.get(value, ()))]))


def resolve(
    plan: Plan, names: PlanNames, longer: Pads | None = None, axes: PlanAxes | None = None, loose: bool = False
) -> Resolved:
    """Apply the plan's placement lines to the values of a captured model.

    Dims that ``longer`` names are made longer even where they divide: in a twin of a build in which they do not.
    Before ``axes`` are known, dims of parameters need not divide: if ``loose``, what does not is no error yet.

    Raises:
        PlanError: with every error of every line.
    """
    longer_dims = {(name, pad.dim) for name, pads in (longer or {}).items() for pad in pads}
    resolver = _Resolver(plan, names, longer_dims, axes.parts(axes.mesh(plan)) if axes is not None else {}, loose)
    # experts first: a line that splits tokens reaches their weights too, where these are whole
    for line in sorted(plan.placements, key=lambda line: not isinstance(line, Experts)):
        resolver.apply(line)
    for sequence in plan.sequence:
        resolver.split_sequences(sequence)
    precision = tuple(resolver.precision(line) for line in plan.precision)
    shardings, errors = shardings_of(plan, names, resolver.seeds, resolver.views)
    compressions, wrong = compressions_of(plan, names)
    recompute, unkept = recompute_lines(plan, names)
    resolver.diagnostics += [*errors, *wrong, *unkept]
    resolver.diagnostics += find_cuts(plan, names)[1]
    frozen = frozenset(resolver.meant(plan.frozen, find_parameters))
    groups = grouped((line.given, resolver.meant(line.where, find_parameters)) for line in plan.groups)
    if any(diagnostic.is_error for diagnostic in resolver.diagnostics):
        raise PlanError(resolver.diagnostics)
    resolver.diagnostics += _idle_axes(plan, resolver.seeds.found.values())
    return Resolved(
        resolver.seeds.in_order(plan),
        tuple(resolver.diagnostics), frozen, groups, pads_by_value(resolver.seeds.pads.items()), precision,
        shardings, compressions, resolver.views, recompute, axes or PlanAxes(),
    )  # fmt: skip


def _idle_axes(plan: Plan, seeds: Iterable[PlacementSeed]) -> Iterator[Diagnostic]:
    """Return a warning for every axis of several ranks that splits nothing, or experts alone, and has no stages."""
    seeds = tuple(seeds)
    lines = {(line.span.source, line.span.line) for line in plan.placements if isinstance(line, Experts)}
    by_experts = {seed: (seed.span.source, seed.span.line) in lines for seed in seeds}
    axes = {seed.axis: {plan.refined.owner(part) for part in plan.refined.parts(seed.axis)} for seed in seeds}
    experts = {axis for seed, by in by_experts.items() if by for axis in axes[seed.axis]}
    used = {axis for seed, by in by_experts.items() if seed.dim is not None and not by for axis in axes[seed.axis]}
    used |= {line.axis.text for line in plan.stages}
    batch = next((line for line in plan.inputs if BATCH in line.dims), None)
    placed = {seed.value for seed in seeds}
    for axis, size in plan.mesh.axes:
        if size == 1 or axis in used:
            continue
        help_ = "name it in a line that places weights or inputs"
        if batch is not None and batch.name not in placed:
            dims = ", ".join(f"{BATCH}/{axis}" if dim == BATCH else "_" for dim in batch.dims)
            help_ = f"write `shard {batch.name} [{dims}]`"
        message = f"the axis `{axis}` splits nothing: its {size} ranks do the same work"
        if axis in experts:
            message = f"the axis `{axis}` splits only experts: its {size} ranks all do the same other work"
        label = Label(plan.mesh_spans[axis])
        yield Diagnostic(IDLE_AXIS, message, label, help=f"{help_}, or leave the axis out", severity=Severity.WARNING)


def input_faults(plan: Plan) -> list[Diagnostic]:
    """Return the errors of ``resolve`` that need no model: those of inputs' layouts. Ranges of sizes are checked at
    their largest sizes and, if nothing is wrong there, by their steps."""
    names = PlanNames({}, {line.name: plan.input_shape(line) for line in plan.inputs}, smaller=True)
    errors: list[Diagnostic] = []
    for sizes in ({name: SizeRange(size.high, size.high) for name, size in plan.sizes.items()}, plan.sizes):
        resolver = _Resolver(replace(plan, sizes=sizes), names)
        for line in plan.placements:
            if isinstance(line, Fix):
                resolver.apply(line)
        errors = errors or [error for error in resolver.diagnostics if error.is_error]
    return errors


def _one_cause(first: Diagnostic, other: Diagnostic) -> bool:
    """Return whether two inputs are equally long, and do not divide by the same axes."""
    uneven = first.code is UNEVEN_SHARD is other.code and "`pad`" not in first.help
    return uneven and bool(first.related) and (first.help, first.related) == (other.help, other.related)


class _Resolver:
    """The lines applied so far, in order, with all that they said."""

    def __init__(
        self, plan: Plan, names: PlanNames, longer: Collection[tuple[str, int]] = (),
        parts: Mapping[tuple[str, str], int] = MappingProxyType({}), loose: bool = False,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._names = names
        self.views, self.diagnostics = Views.of(plan, names)
        self._parts, self._loose = parts, loose
        self.seeds = Seeds(names, self._mesh_of, longer, self._loose)
        self._sequences, uneven = split_inputs(plan, self.seeds)
        self._report(uneven)

    def apply(self, line: Fix | SplitWeights) -> None:
        """Add the seeds of one line, or its errors. Of like errors of one word only the first is kept."""
        known = dict(self.seeds.found)
        wishes: list[PlacementSeed] = []
        for word in line.where:
            errors: list[Diagnostic] = []
            for result in self._fix(line, word) if isinstance(line, Fix) else self._split(line, word):
                if isinstance(result, Diagnostic):
                    errors.append(result)
                elif (conflict := self.seeds.add(result)) is not None:
                    errors.append(conflict)
                else:
                    wishes.append(result)
            self._report(errors)
        repeated = [known[wish.value, wish.axis] for wish in wishes if (wish.value, wish.axis) in known]
        if wishes and len(repeated) == len(wishes):
            related = (Label(repeated[0].span, "said here already"),)
            message, label = "the line changes nothing", Label(line.span)
            self.diagnostics.append(
                Diagnostic(REPEATED_PLACEMENT, message, label, related, help="remove it", severity=Severity.WARNING)
            )

    def split_sequences(self, line: Sequence) -> None:
        """Add the seeds of a `sequence` line, or its errors."""
        split = tuple(self.seeds.found.values())
        added = ((seed if isinstance(seed, Diagnostic) else self.seeds.add(seed))
                 for seed in sequence_seeds(line, self._plan, self._names, split))  # fmt: skip
        self._report([error for error in added if error is not None])

    def meant(
        self, words: Iterable[Word], find: Callable[[Word, PlanNames], tuple[str, ...] | Diagnostic]
    ) -> list[str]:
        """Return the names that words mean, each once, and note the errors."""
        meant, errors = find_each(words, self._names, find)
        self.diagnostics += errors
        return meant

    def precision(self, line: Precision) -> tuple[str, tuple[str, ...], int]:
        """Return a line's type, the modules that it means (all, if it names none), and the line's number."""
        modules = self.meant(line.where, find_modules) if line.where else [""]
        return TYPES[line.type], tuple(modules), line.span.root.line

    def _mesh_of(self, value: str) -> Mesh:
        """Return the mesh in which an axis counts as many ranks as hold different parts of a value."""
        axes = self.views.mesh_of(value).axes
        return Mesh(tuple((axis, self._parts.get((value, axis), size)) for axis, size in axes))

    def _report(self, errors: list[Diagnostic]) -> None:
        alike: dict[tuple[object, ...], list[Diagnostic]] = {}
        for error in errors:
            spans = tuple(label.span for label in (error.primary, *error.related) if label is not None)
            alike.setdefault((error.code.name, spans), []).append(error)
        for first, *others in alike.values():
            more = f"the same holds for {len(others)} more that the pattern matches"
            first = replace(first, notes=(*first.notes, more)) if others else first
            at = next((at for at, other in enumerate(self.diagnostics) if _one_cause(other, first)), None)
            if at is None:
                self.diagnostics.append(first)
            else:
                what, line = first.message.partition(" has ")[0], first.primary.span.line if first.primary else 0
                note = f"the same holds for {what}, line {line}"
                self.diagnostics[at] = replace(self.diagnostics[at], notes=(*self.diagnostics[at].notes, note))

    def _fix(self, line: Fix, word: Word) -> Iterator[PlacementSeed | Diagnostic]:
        values = find_values(word, self._names)
        if isinstance(values, Diagnostic):
            yield values
            return
        for value in values:
            results = [*self._cuts(line, value)]
            errors = [result for result in results if isinstance(result, Diagnostic)]
            yield from errors
            cuts = {result[1].axis: result for result in results if not isinstance(result, Diagnostic)}
            for axis in self.views.mesh_of(value).names if not errors else ():
                if axis in cuts:
                    yield _seed(value, *cuts[axis], word.span, fixed=True, gathered=line.gathered)
                elif axis not in self._sequences.get(value, ()):
                    yield PlacementSeed(value, axis, None, 1, word.span, fixed=True, gathered=line.gathered)

    def _cuts(self, line: Fix, value: str) -> Iterator[tuple[int, DimSplit] | Diagnostic]:
        """Return the cuts that a layout makes in a value, with their dims."""
        sizes = tuple(map(self._divisible, self._dims(value)))
        dims = self._fitted(line.dims or (), len(sizes)) if line.dims is not None else ()
        if dims is None:
            shape = list(self._names.shape(value))
            entries = sum(not dim.rest for dim in line.dims or ())
            message = f"the layout has {entries} entries, but `{value}` has {len(sizes)} dims"
            (*_, last) = line.dims or ()
            label = Label(line.dims[0].span.to(last.span) if line.dims else line.span, f"`{value}` is {shape}")
            help_ = "write one entry for each dim: `_` is a whole dim, `...` stands for the rest"
            yield Diagnostic(WRONG_DIM, message, label, help=help_)
            return
        if outside := [*self.views.check(value, line.axes)]:
            yield from outside
            return
        for at, (layout, size, called) in enumerate(zip(dims, sizes, self._dims(value), strict=False)):
            name = layout.factors[0].name if len(layout.factors) == 1 and not layout.more else None
            if isinstance(called, str) and name is not None and name != called:
                message = f"dim {at} of `{value}` is `{called}`, not `{name}`"
                help_ = f"write `{called}`, as the `input` line does"
                yield Diagnostic(WRONG_DIM, message, Label(layout.factors[0].span), help=help_)
            trained = value in self._names.parameters
            earlier = (value, at) in self.seeds.pads  # a line before may have said it
            pad = (layout.pad or earlier) if trained else None
            if layout.pad and not trained:
                message = f"`{value}` is no parameter: it is not padded"
                help_ = "choose sizes that divide, or pad the input where you make it, with ignored targets"
                yield Diagnostic(NOT_PADDED, message, Label(layout.span), help=help_)
            pieces = partial(self._names.pieces, value, at)
            what, mesh = f"dim {at} of `{value}`", self._mesh_of(value)
            result = cut_dims(layout, size, mesh, what, pieces=pieces, pad=pad, loose=self._loose)
            if isinstance(result, Diagnostic):
                yield self._declared(self._batched(result, layout) if called == BATCH else result, layout)
            else:
                yield from ((at, cut) for cut in result)

    def _fitted(self, dims: tuple[DimLayout, ...], count: int) -> tuple[DimLayout, ...] | None:
        """Return one layout for each of ``count`` dims, with ``...`` filled in; None if they do not fit."""
        at = next((i for i, dim in enumerate(dims) if dim.rest), None)
        if at is None:
            return dims if len(dims) == count else None
        missing = count - (len(dims) - 1)
        whole = DimLayout((Factor(None, None, (), dims[at].span),), dims[at].span)
        return (*dims[:at], *[whole] * missing, *dims[at + 1 :]) if missing >= 0 else None

    def _dims(self, value: str) -> tuple[str | int, ...]:
        """Return the dims of a value: the name of a size of the plan, or a number."""
        if (site := self._names.site(value)) is not None:
            return site.dims(self._plan, BATCH)
        line = next((line for line in self._plan.inputs if line.name == value), None)
        return self._names.shape(value) if line is None or value in self._names.parameters else line.dims

    def _divisible(self, dim: str | int) -> int:
        """Return the number that must divide: a dim's size, or the step of a range of sizes. An input's batch is that
        of one microbatch."""
        if isinstance(dim, int):
            return dim
        return self._plan.sizes[dim].divisor // (self._plan.microbatches if dim == BATCH else 1)

    def _batched(self, error: Diagnostic, layout: DimLayout) -> Diagnostic:
        """Return the error that a microbatch does not divide, with the batch sizes that would."""
        parts = self._plan.microbatches
        if error.code is not UNEVEN_SHARD or parts == 1:
            return error
        unit = parts * math.prod(map(self._plan.ranks, (axis.text for axis in layout.axes)))
        size = self._plan.sizes[BATCH]
        which = f"`B` as a multiple of {unit}" if size.fixed else f"a step of `B` that is a multiple of {unit}"
        near = " or ".join(map(str, multiples(size.divisor, unit)))
        return replace(error, help=f"choose {which}, such as {near}: it is split into {parts} microbatches first")

    def _declared(self, error: Diagnostic, layout: DimLayout) -> Diagnostic:
        """Return the error that a dim does not divide, with the lines that split it."""
        spans = self._plan.mesh_spans
        labels = (Label(spans[axis.text], "declared here") for axis in layout.axes if axis.text in spans)
        return replace(error, related=tuple(labels)) if error.code is UNEVEN_SHARD else error

    def _split(self, line: SplitWeights, word: Word) -> Iterator[PlacementSeed | Diagnostic]:
        weights, errors = find_weights(line, word, self._names)
        yield from errors
        for weight, bias in weights:
            yield from self._split_weight(line, word, weight, bias)

    def _split_weight(
        self, line: SplitWeights, word: Word, weight: str, bias: str | None
    ) -> Iterator[PlacementSeed | Diagnostic]:
        dim = split_dim(line.style, self._names.use(weight))
        assert dim is not None  # find_weights checked the style
        targets = [(weight, dim), *([(bias, 0)] if bias is not None and line.style != "row" else [])]
        rows = line.rows or DimLayout((Factor(None, None, (line.axis,), line.axis.span),), line.axis.span)
        for name, at in targets:
            value = self._names.canonical(name)
            if outside := [*self.views.check(value, (line.axis,))]:
                yield from outside
                return
            shape = self._names.shape(name)
            label = None if line.rows is not None else Label(word.span, f"`{name}` is {list(shape)}")
            pieces = partial(self._names.pieces, value, at)
            pad = line.pad or (value, at) in self.seeds.pads
            what, mesh = f"dim {at} of `{name}`", self._mesh_of(value)
            result = cut_dims(rows, shape[at], mesh, what, label, pieces, pad=pad, loose=self._loose)
            if isinstance(result, Diagnostic):
                if isinstance(line, Experts) and result.code is UNEVEN_SHARD:
                    result = replace(result, help="choose a number of ranks that divides that of experts")
                yield self._declared(result, rows)
                return
            yield from (_seed(value, at, cut, word.span, fixed=False) for cut in result)


def _seed(value: str, dim: int, cut: DimSplit, span: Span, *, fixed: bool, gathered: bool = False) -> PlacementSeed:
    return PlacementSeed(value, cut.axis, dim, cut.outer, span, fixed, cut.start, cut.inner, cut.pad, gathered)
