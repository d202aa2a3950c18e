"""``view``: the same ranks along other axes, for a part of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ....grammar.codes import BAD_VALUE, BAD_VIEW, REPEATED, UNUSED_VIEW
from ....grammar.diagnostics import Diagnostic, Label, Severity
from ....grammar.nearest import listed
from ....grammar.syntax import Setting, Word
from ...layout.mesh import NoCommonParts, View, view_cuts
from ..directive import Directive, Scope, argument, check_unique
from .mesh import MeshLine, check_sizes, declared_mesh, merged
from .stage import Stage

_SIZES_SHOWN = 4
"""The number of fitting sizes that an error names."""


@dataclass(frozen=True)
class ViewLine(Directive):
    """Lets a part of the model see the same ranks along other axes than those of `mesh`: `view dp, tp as edp=2, ep=4 in
    model.layers.*.mlp.experts` (Megatron's parallel folding of experts).

    `AXES` are axes that stand next to each other in `mesh`. The axes of the view have as many ranks in all, in the same
    order, the outermost first. Lines that place parameters of `WHERE` name the view's axes in place of these; all other
    lines name those of `mesh`. In the example, experts are split over `ep`, whose ranks are `dp` and `tp` ranks for
    attention; the experts' gradients are summed over `edp` alone. For a parameter in `WHERE`, `zero 1 over dp` means
    those ranks of `dp` that hold the same part of it.

    If an axis of the view begins or ends inside an axis of `mesh`, parc sees that axis as several, `tp_0` and `tp_1`;
    of the numbers of ranks up to the two ends, one must divide the other. `WHERE` names modules, with all their
    parameters, or parameters. The axis of `stage` cannot be in a view: its ranks hold different stages.
    """

    USAGE = "view AXES as NAME=VALUE, ... in WHERE"
    LAYOUT = True
    ONCE = False

    view: View = argument(
        lambda line: View(tuple(word.text for word in line.words("axes")), declared_mesh(line.bindings("as")).axes)
    )
    where: tuple[Word, ...] = argument(lambda line: line.words("in"))

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The view's axes as they are written."""
        return self.arguments.bindings("as")

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        over = self.arguments.words("axes")
        errors = [error for axis in over for error in scope.check_axis(axis)]
        errors += [*check_unique(over, "axis"), *self._check_names(scope)]
        errors += check_sizes(self.settings)
        if not errors and {*self.view.over} <= {*scope.mesh.names}:
            errors += self._check_fit(scope)
        yield from errors
        used, view_axes = {word.text for line in scope.directives for word in line.axes}, dict(self.view.axes)
        if not errors and not scope.broken and used.isdisjoint(view_axes):
            help_ = "name one of them in a line that places weights in the view's modules, or remove the view"
            message = f"no line names {listed(view_axes, 'or')}"
            yield Diagnostic(UNUSED_VIEW, message, Label(self.span), help=help_, severity=Severity.WARNING)

    def _check_names(self, scope: Scope) -> Iterator[Diagnostic]:
        """Find axes whose names are taken, or are names of sub-axes."""
        settings = (*merged(scope.all(MeshLine)), *(one for line in scope.all(ViewLine) for one in line.settings))
        first = {one.name.text: one.name for one in reversed(settings)}
        for word in (setting.name for setting in self.settings):
            taken, (whole, _, number) = first[word.text], word.text.rpartition("_")
            if taken is not word:
                related = (Label(taken.span, "given here first"),)
                message = f"the axis `{word.text}` is given twice"
                yield Diagnostic(REPEATED, message, Label(word.span), related, help="choose another name")
            elif whole in scope.mesh and number.isdecimal():
                message = f"`{word.text}` is the name that programs use for a part of the axis `{whole}`"
                help_ = f"choose another name, such as `{whole}{number}`"
                yield Diagnostic(BAD_VALUE, message, Label(word.span), help=help_)

    def _check_fit(self, scope: Scope) -> Iterator[Diagnostic]:
        mesh, over, label = scope.mesh, self.view.over, Label(self.span)
        at = mesh.names.index(over[0])
        if mesh.names[at : at + len(over)] != over:
            in_order = listed(sorted(over, key=mesh.names.index), "and")
            message = f"{listed(over, 'and')} do not follow each other in `mesh`, in this order"
            help_ = f"put {in_order} next to each other in `mesh`, and name them in its order"
            yield Diagnostic(BAD_VIEW, message, label, help=help_)
            return
        if (stage := next((one for one in scope.all(Stage) if one.axis.text in over), None)) is not None:
            related = (Label(stage.axis.span, "the axis of stages"),)
            message = f"`{stage.axis.text}` is the axis of stages: its ranks hold different parts of the model"
            yield Diagnostic(BAD_VIEW, message, label, related, help="view other axes of the mesh")
            return
        ranks, view_ranks = math.prod(map(mesh.size, over)), math.prod(size for _, size in self.view.axes)
        others = [line.view for line in scope.before(self) if line.view.fits(mesh)]
        fitting = "; ".join(
            ", ".join(f"{name}={size}" for (name, _), size in zip(self.view.axes, sizes, strict=True))
            for sizes in islice(self.view.fitting(mesh, others), _SIZES_SHOWN)
        )
        if ranks != view_ranks:
            sizes = " × ".join(f"{axis}={mesh.size(axis)}" for axis in over)
            message = f"the view has {view_ranks} ranks, but {sizes} are {ranks}"
            yield Diagnostic(BAD_VIEW, message, label, help=f"choose sizes whose product is {ranks}, such as {fitting}")
            return
        try:
            view_cuts(mesh, (*others, self.view))
        except NoCommonParts as error:
            help_ = f"choose sizes that divide each other: {fitting}"
            yield Diagnostic(BAD_VIEW, str(error), label, help=help_)
