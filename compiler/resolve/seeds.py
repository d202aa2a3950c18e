"""Seeds of propagation: the placements of single values on single axes that lines ask for, without contradiction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ...grammar.codes import (
    CONFLICT,
    NO_SEQUENCE,
    NOT_TENSOR_PARALLEL,
    OUTSIDE_VIEW,
    PADDED_TWICE,
    TWO_VIEWS,
    UNEVEN_SHARD,
)
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import listed
from ...grammar.source import Span
from ...grammar.syntax import Word
from ..layout.mesh import Mesh
from ..layout.stretches import Outer, count, inside, nest, zigzag
from ..padding.pads import Pad, padded_shape
from ..plan.directives.experts import Experts
from ..plan.directives.sequence import Sequence
from ..plan.directives.view import ViewLine
from ..plan.layouts import multiples, uneven
from ..plan.plan import Plan
from ..sizes.size_range import BATCH
from .names import InnerValue, PlanNames, find_modules, find_parameters


@dataclass(frozen=True, slots=True)
class PlacementSeed:
    """The placement of one value on one axis that a line asks for: split, or whole where ``dim`` is None.

    ``outer``: see the dim as ``(outer, D / outer)``, in global sizes, and split the second part. ``fixed``: the line
    places the value on every axis.
    """

    value: str
    axis: str
    dim: int | None
    outer: Outer
    span: Span
    fixed: bool
    start: int = 1
    inner: int = 1
    pad: bool = False  # the sub-dim, which begins after `start` parts, may be made longer by groups of `inner` entries
    gathered: bool = False  # a value inside the model is kept gathered for backward, where a product gathers it


class Seeds:
    """The seeds of the lines so far, at most one for a value and axis, and the dims that they make longer.

    Dims that ``longer`` names are made longer even where they divide. ``mesh_of`` has of each axis the ranks that hold
    different parts of a value. ``loose``: a dim may be too short for its splits.
    """

    def __init__(
        self, names: PlanNames, mesh_of: Callable[[str], Mesh], longer: Collection[tuple[str, int]], loose: bool
    ) -> None:
        self._names, self._mesh_of, self._longer, self._loose = names, mesh_of, longer, loose
        self.found: dict[tuple[str, str], PlacementSeed] = {}
        self.pads: dict[tuple[str, int], Pad] = {}
        self._asked: dict[tuple[str, str], tuple[int | None, Outer]] = {}  # dim and outer as the line had them

    def in_order(self, plan: Plan) -> tuple[PlacementSeed, ...]:
        """Return the seeds that split or keep something on several ranks. Those of experts come first: where tokens, or
        sequences of them, are split over the same axis, they go to their experts."""
        experts = {line.span.root.line for line in plan.placements if isinstance(line, Experts)}
        real = (seed for seed in self.found.values() if plan.ranks(seed.axis) > 1)
        return tuple(sorted(real, key=lambda seed: seed.span.root.line not in experts))

    def add(self, seed: PlacementSeed) -> Diagnostic | None:
        """Add a seed, or return the error that an earlier line contradicts it."""
        key = seed.value, seed.axis
        asked = seed.dim, seed.outer
        if key in self.found:
            return None if self._asked[key] == asked else self._conflict(seed, self.found[key])
        placed = seed if seed.dim is None else self._nest(seed)
        if isinstance(placed, Diagnostic):
            return placed
        self.found[key], self._asked[key] = placed, asked
        return None

    def _nest(self, seed: PlacementSeed) -> PlacementSeed | Diagnostic:
        """Return the seed inside the splits that earlier lines made of the same dim over other axes."""
        assert seed.dim is not None
        mesh, key = self._mesh_of(seed.value), (seed.value, seed.dim)
        ways = mesh.size(seed.axis)
        size = padded_shape(self._names.shape(seed.value), [self.pads[key]] if key in self.pads else [])[seed.dim]
        others = [s for s in self.found.values() if s.value == seed.value and s.dim == seed.dim and s.span != seed.span]
        axes = [seed.axis]
        for other in sorted(others, key=lambda other: count(other.outer)):
            if seed.outer == other.outer:
                seed = replace(seed, outer=inside(other.outer, mesh.size(other.axis)))
                axes.append(other.axis)
        splits = [(s.outer, mesh.size(s.axis)) for s in (*others, seed)]
        if seed.pad and isinstance(seed.outer, int):
            unit = seed.outer * ways * seed.inner
            if size % unit or (key in self._longer and key not in self.pads):
                divides = size * unit  # whether the splits lie in each other, whatever the size is
                return self._lengthen(seed) if nest(divides, splits) else self._conflict(seed, others[0])
        short = any(isinstance(outer, int) and size % (outer * ranks) for outer, ranks in splits)
        if nest(size, splits) or (self._loose and short):
            return seed
        if isinstance(seed.outer, int) and size % (seed.outer * ways):
            what = f"dim {seed.dim} of `{seed.value}` has {size} entries"
            return uneven(what, size, reversed(axes), mesh, self._label(seed), may_pad=True)
        return self._conflict(seed, others[0])

    def _lengthen(self, seed: PlacementSeed) -> PlacementSeed | Diagnostic:
        """Make the sub-dim of the seed as long as its splits need."""
        assert seed.dim is not None and isinstance(seed.outer, int)
        others = [
            s for s in self.found.values() if (s.value, s.dim) == (seed.value, seed.dim) and s.start != seed.start
        ]
        if others:
            message = f"dim {seed.dim} of `{seed.value}` is padded in one sub-dim and split in another"
            related = (Label(others[0].span, f"first: {self._described(others[0])}"),)
            help_ = "a padded dim can be split in one place only: choose sub-dims that divide, or split another dim"
            return Diagnostic(PADDED_TWICE, message, self._label(seed), related, help=help_)
        real = self._names.shape(seed.value)[seed.dim] // seed.start
        unit = seed.outer // seed.start * self._mesh_of(seed.value).size(seed.axis) * seed.inner
        padded = -(-real // unit) * unit
        padded += unit * (padded == real)
        self.pads[seed.value, seed.dim] = Pad(seed.dim, seed.start, real, padded)
        return seed

    def _conflict(self, seed: PlacementSeed, first: PlacementSeed) -> Diagnostic:
        message = f"two lines place `{seed.value}` differently on `{seed.axis}`"
        if seed.axis != first.axis:
            message = f"two lines split dim {seed.dim} of `{seed.value}` at places that do not fit"
        related = (Label(first.span, f"first: {self._described(first)}"),)
        label = Label(seed.span, self._described(seed))
        help_ = "remove one of the lines, or name fewer tensors in one"
        if first.fixed and not seed.fixed:
            help_ = "a line with a layout places its tensors on every axis: write all splits in that line"
        return Diagnostic(CONFLICT, message, label, related, help=help_)

    def _described(self, seed: PlacementSeed) -> str:
        if seed.dim is None:
            return f"whole on `{seed.axis}`"
        parts = count(seed.outer)
        return f"dim {seed.dim} over `{seed.axis}`" + (f", inside {parts} parts" if parts > 1 else "")

    def _label(self, seed: PlacementSeed) -> Label:
        return Label(seed.span, f"`{seed.value}` is {list(self._names.shape(seed.value))}")


# ---- views: the meshes along which parameters lie


@dataclass(frozen=True, slots=True)
class Views:
    """The views of a plan by the parameters that they name."""

    plan: Plan
    lines: dict[str, ViewLine] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """The axes of views whose names are wrong: no other line is at fault for these."""

    @classmethod
    def of(cls, plan: Plan, names: PlanNames) -> tuple[Views, list[Diagnostic]]:
        """Return the views of a model's parameters, and the errors of all lines."""
        views, errors = cls(plan), list[Diagnostic]()
        for line in plan.views:
            for word in line.where:
                parameters = find_parameters(word, names)
                if isinstance(parameters, Diagnostic):
                    errors.append(parameters)
                    views.wrong.extend(name for name, _ in line.view.axes)
                    continue
                twice = [name for name in parameters if views.lines.setdefault(name, line) is not line]
                if twice:
                    related = (Label(views.lines[twice[0]].span, "the first"),)
                    message = f"`{twice[0]}` is in two views"
                    help_ = "name fewer parameters in one"
                    errors.append(Diagnostic(TWO_VIEWS, message, Label(word.span), related, help=help_))
        return views, errors

    def mesh_of(self, value: str) -> Mesh:
        """Return the mesh along whose axes a parameter or an input lies."""
        line, mesh = self.lines.get(value), self.plan.mesh
        if line is None:
            return Mesh((*mesh.axes, *((axis, 1) for axis in dict.fromkeys(self.wrong))))
        at = mesh.names.index(line.view.over[0])
        return Mesh((*mesh.axes[:at], *line.view.axes, *mesh.axes[at + len(line.view.over) :]))

    def check(self, value: str, axes: Iterable[Word]) -> Iterator[Diagnostic]:
        """Yield the errors of axes along which a value does not lie."""
        line, known = self.lines.get(value), self.mesh_of(value)
        for axis in (axis for axis in axes if axis.text not in known):
            view = line if line is not None and axis.text in line.view.over else self.line_of(axis.text)
            assert view is not None  # every other axis is unknown to the plan
            axes_there = [name for name, _ in view.view.axes]
            message = f"`{value}` has no axis `{axis.text}`, which belongs to a view of other parameters"
            help_ = f"name {listed(view.view.over, 'or')}, or name more parameters in the view's `in`"
            if view is line:
                message = f"`{value}` has the view's {listed(axes_there)} instead of {listed(view.view.over)}"
                help_ = f"name {listed(axes_there, 'or')}, or name fewer parameters in the view's `in`"
            yield Diagnostic(OUTSIDE_VIEW, message, Label(axis.span), (Label(view.span, "the view"),), help=help_)

    def line_of(self, axis: str) -> ViewLine | None:
        """Return the view that has an axis."""
        return next((line for line in self.plan.views if axis in dict(line.view.axes)), None)


# ---- sequences: the splits of values between modules by ``sequence`` lines, and of inputs by ``context`` lines


def sequence_seeds(
    line: Sequence, plan: Plan, names: PlanNames, split: Collection[PlacementSeed]
) -> Iterator[PlacementSeed | Diagnostic]:
    """Yield the splits of what a line's modules read and return, or the errors. ``split`` has the splits of other
    lines."""
    if line.idle:
        return
    axis, uneven = line.axis.text, False
    ranks = plan.ranks(axis)
    why = f"the {ranks} ranks of `{axis}`"
    for word in line.where:
        modules = find_modules(word, names)
        if isinstance(modules, Diagnostic):
            yield modules
            continue
        for module in modules:
            sites = [site for kind in ("in", "out") for site in names.sites().named.get(f"{kind}({module})", ())]
            placed = {site: places for site in sites if (places := _sequence_dims(site, line, plan))}
            if not placed and not names.smaller:
                yield _no_sequence(line, module, word, plan, sites)
            elif not _split_inside(module, axis, split) and ranks > 1 and not names.smaller:
                yield _no_tensor_parallelism(line, module, word, split)
                return
            for name in sorted({name for places in placed.values() for name, _, _ in places}):
                if not uneven and (error := _uneven(plan, name, axis, ranks, why, line.axis.span)) is not None:
                    uneven = True
                    yield error
            for site, places in placed.items() if not uneven else ():
                if len(places) == 1:  # scores of attention have two
                    name, dim, outer = places[0]
                    inner = _inside_others(name, outer, axis, plan, split)
                    yield PlacementSeed(site.name, axis, dim, inner, word.span, fixed=False, gathered=line.gathered)


def _sequence_dims(site: InnerValue, line: Sequence, plan: Plan) -> list[tuple[str, int, Outer]]:
    wanted = line.dim.text if line.dim is not None else None
    return [place for place in site.sizes(plan) if place[0] == wanted or (wanted is None and place[0] != BATCH)]


def _inside_others(name: str, outer: Outer, axis: str, plan: Plan, split: Collection[PlacementSeed]) -> Outer:
    """Return the outer parts of a sequence inside all splits of it over other axes."""
    dims = {batch.name: batch.dims for batch in plan.inputs}
    others = [seed for seed in split if seed.dim is not None and seed.axis != axis and plan.ranks(seed.axis) > 1
              and seed.value in dims and dims[seed.value][seed.dim] == name]  # fmt: skip
    last = max(others, key=lambda seed: count(seed.outer), default=None)
    if last is None or not isinstance(outer, int):
        return outer
    parts = inside(last.outer, plan.ranks(last.axis))
    return outer * parts if isinstance(parts, int) else outer


def _split_inside(module: str, axis: str, split: Collection[PlacementSeed]) -> bool:
    return any(
        seed.axis == axis and seed.dim is not None and (not module or seed.value.startswith(f"{module}."))
        for seed in split
    )


def _uneven(plan: Plan, name: str, axis: str, unit: int, why: str, span: Span) -> Diagnostic | None:
    """Return the error of a length that ``unit`` does not divide, which ``why`` puts into words."""
    size = plan.sizes[name]
    if size.divisor % unit == 0:
        return None
    what = f"`{name}` is {size.divisor}" if size.fixed else f"`{name}` has steps of {size.divisor}"
    related = (Label(plan.mesh_spans[axis], "declared here"),)
    help_ = f"choose a multiple of {unit}, such as {' or '.join(map(str, multiples(size.divisor, unit)))}"
    return Diagnostic(UNEVEN_SHARD, f"{what}, which does not divide by {why}", Label(span), related, help=help_)


def _no_sequence(line: Sequence, module: str, word: Word, plan: Plan, sites: list[InnerValue]) -> Diagnostic:
    """Return the error of a module whose values have no sequence dim."""
    dims = {dim for batch in plan.inputs for dim in batch.dims if isinstance(dim, str)} - {BATCH}
    called = module or "the model"
    wanted = f"the dim `{line.dim.text}`" if line.dim is not None else f"a dim {listed(sorted(dims), 'or')}"
    message = f"nothing that `{called}` reads or returns has {wanted} of the inputs"
    help_ = "name blocks that compute with sequences, as `model.layers.*`"
    if not dims:
        message = f"`{called}` has no sequence: the inputs have no named dim beside `{BATCH}`"
        help_ = "name the dim in the `input` and `sizes` lines, as `input tokens int64 [B, S]`"
    shapes = listed([f"`{site.name}` is {list(site.shape)}" for site in sites[:3]])
    return Diagnostic(NO_SEQUENCE, message, Label(word.span, shapes), help=help_)


def _no_tensor_parallelism(line: Sequence, module: str, word: Word, split: Collection[PlacementSeed]) -> Diagnostic:
    """Return the error of a module of which the line's axis splits no weight."""
    axis = line.axis.text
    others = sorted({seed.axis for seed in split if seed.dim is not None and seed.value.startswith(f"{module}.")})
    message = f"no line splits a weight of `{module or 'the model'}` over `{axis}`"
    help_ = f"split the weights by `column` and `row` lines over `{axis}`, or name an axis that splits them"
    if others:
        help_ = f"name {listed(others, 'or')}, which splits them, or split them over `{axis}` too"
    notes = ("every product would work on a part of each sequence, with whole weights",)
    return Diagnostic(NOT_TENSOR_PARALLEL, message, Label(word.span), (Label(line.axis.span, "over this axis"),),
                      help=help_, notes=notes)  # fmt: skip


# ---- context: inputs, split along a sequence


def split_inputs(plan: Plan, seeds: Seeds) -> tuple[dict[str, set[str]], list[Diagnostic]]:
    """Add the splits of ``context`` lines to the seeds. Return their axes for each input, which a layout may then leave
    out, and the errors."""
    axes: dict[str, set[str]] = {}
    errors: list[Diagnostic] = []
    for result in _seeds_of(plan):
        error = result if isinstance(result, Diagnostic) else seeds.add(result)
        if error is not None:
            errors.append(error)
        elif isinstance(result, PlacementSeed):
            axes.setdefault(result.value, set()).add(result.axis)
    return axes, errors


def _seeds_of(plan: Plan) -> Iterator[PlacementSeed | Diagnostic]:
    """Yield the splits of inputs along the sequences of ``context`` lines, or the error of a length that does not
    divide."""
    position: dict[str, int] = {}  # the parts into which earlier lines cut a sequence
    for line in plan.context:
        axis, name, halves = line.axis.text, line.dim.text, 2 if line.method == "zigzag" else 1
        outer = position.get(name, 1) * halves
        position[name] = unit = outer * plan.mesh.size(axis)
        why = f"{unit}: {f'{halves} parts' if halves > 1 else 'a part'} for each rank"
        if plan.mesh.size(axis) > 1 and (error := _uneven(plan, name, axis, unit, why, line.dim.span)) is not None:
            yield error
            continue
        dealt = zigzag(outer) if halves > 1 else outer
        for batch in plan.inputs:
            for dim in (at for at, called in enumerate(batch.dims) if called == name):
                yield PlacementSeed(batch.name, axis, dim, dealt, line.span, fixed=False)
