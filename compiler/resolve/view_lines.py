"""The ``view`` lines of a plan on the parameters of one model: the mesh along which each of them lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...grammar.codes_plan import OUTSIDE_VIEW, TWO_VIEWS
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import listed
from ...grammar.syntax import Word
from ..layout.mesh import Mesh
from ..plan.directives.view import ViewLine
from ..plan.plan import Plan
from .names import PlanNames, find_parameters


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
                found = find_parameters(word, names)
                if isinstance(found, Diagnostic):
                    errors.append(found)
                    views.wrong.extend(name for name, _ in line.view.axes)
                    continue
                twice = [name for name in found if views.lines.setdefault(name, line) is not line]
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
            own = [name for name, _ in view.view.axes]
            message = f"`{value}` has no axis `{axis.text}`, which belongs to a view of other parameters"
            help_ = f"name {listed(view.view.over, 'or')}, or name more parameters in the view's `in`"
            if view is line:
                message = f"`{value}` has the view's {listed(own)} instead of {listed(view.view.over)}"
                help_ = f"name {listed(own, 'or')}, or name fewer parameters in the view's `in`"
            yield Diagnostic(OUTSIDE_VIEW, message, Label(axis.span), (Label(view.span, "the view"),), help=help_)

    def line_of(self, axis: str) -> ViewLine | None:
        """Return the view that has an axis."""
        return next((line for line in self.plan.views if axis in dict(line.view.axes)), None)
