"""Seeds of propagation: the placements of single values on single axes that lines ask for, without contradiction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ...grammar.codes_plan import CONFLICT, OUTSIDE_VIEW, PADDED_TWICE, TWO_VIEWS
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import listed
from ...grammar.source import Span
from ...grammar.syntax import Word
from ..layout.mesh import Mesh
from ..layout.stretches import Outer, count, inside, nest
from ..padding.pads import Pad, padded_shape
from ..plan.directives.experts import Experts
from ..plan.directives.view import ViewLine
from ..plan.layouts import uneven
from ..plan.plan import Plan
from .names import PlanNames, find_parameters


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
