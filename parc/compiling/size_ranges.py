"""Ranges of sizes: a plan compiled at a few of them as one template, and its errors in the plan's terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from parc.compiler.plan.plan import Plan
from parc.compiler.sizes.polynomials import Ranges, Sizes, choices_of, moving, sample_points
from parc.compiler.sizes.size_range import BATCH, SizeRange
from parc.compiler.sizes.template import Misfit, ShapeFault, Template, sizes_text
from parc.grammar.codes import NO_DIVIDE, NOT_POLYNOMIAL, OTHER_PROGRAM
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.source import Span

_AtSizes = TypeVar("_AtSizes")
_ALL_COMPILED = 6  # choices of sizes at most: with more,
_LEAST = 5  # are compiled, the two next to the ends among them,
_CONFIRMED = 2  # of which so many only confirm


def fixed(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """Return the plan for one choice of its sizes."""
    return replace(plan, sizes={**plan.sizes, **{name: SizeRange(size, size) for name, size in sizes.items()}})


def compile_range(
    plan: Plan,
    compile_at: Callable[[Mapping[str, int]], _AtSizes],
    texts_of: Callable[[_AtSizes], Mapping[str, str]],
    constants_of: Callable[[_AtSizes], Mapping[str, object]],
) -> tuple[list[_AtSizes], Template]:
    """Compile a plan at a few of its sizes, the largest first, and make the template of its programs. Further sizes are
    compiled until every number is a polynomial of them, and the programs of two more are exactly the template's; small
    ranges are compiled completely. Constants, which no program spells, must be equal at all of them.

    Raises:
        PlanError: the plan or the model is at fault at some size, or has no one program for two of them.
    """
    ranges, compilations = moving(plan.sizes), list[_AtSizes]()
    points, texts = list[Mapping[str, int]](), list[Mapping[str, str]]()
    template: Template | None = None
    misfit: Misfit | None = None
    confirmed, broken = 0, False
    for point in sample_points(ranges):
        try:
            compilations.append(compile_at(point))
        except PlanError as error:
            raise PlanError(at_sizes(error.diagnostics, point)) from error.__cause__
        points.append(point)
        texts.append(texts_of(compilations[-1]))
        constants, first = constants_of(compilations[-1]), constants_of(compilations[0])
        if constants != first:
            raise PlanError([_constant_diagnostic(plan, constants, first, point)])
        try:
            holds = template is not None and template.misfit(point, texts[-1]) is None
        except ValueError:  # no whole number here, which is what to say, if at others it is right
            broken = True
            continue
        confirmed += holds
        if not holds:
            template, misfit = _merged(plan, ranges, points, texts)
            confirmed, broken = 0, False
        if confirmed >= _CONFIRMED and len(points) >= _LEAST and choices_of(ranges) > _ALL_COMPILED:
            break
    if broken and confirmed < _CONFIRMED:
        template, misfit = _merged(plan, ranges, points, texts)
    if template is None:
        assert misfit is not None
        raise PlanError([misfit_diagnostic(plan, misfit)])
    return compilations, template


def _merged(
    plan: Plan, ranges: Ranges, points: Sequence[Sizes], texts: Sequence[Mapping[str, str]]
) -> tuple[Template | None, Misfit | None]:
    """Return a template, or the misfit of a number that is no polynomial of the sizes."""
    try:
        return Template.merge(ranges, points, texts), None
    except Misfit as error:
        if error.numbers:
            return None, error
        raise PlanError([misfit_diagnostic(plan, error)]) from error


def at_sizes(diagnostics: Iterable[Diagnostic], sizes: Mapping[str, int]) -> list[Diagnostic]:
    """Return errors of the model, with the sizes at which it has them."""
    note = f"at {sizes_text(sizes)}, of the declared sizes"
    return [replace(d, notes=(note, *d.notes)) if d.code.name.startswith("P02") else d for d in diagnostics]


def misfit_diagnostic(plan: Plan, misfit: Misfit) -> Diagnostic:
    """Return the message that no one program serves two of the sizes: the first line that differs, and where it comes
    from."""
    code, origin = (NOT_POLYNOMIAL if misfit.numbers else OTHER_PROGRAM), misfit.origin
    first, second = map(sizes_text, misfit.points)
    where = f" in `{origin.module}`" if origin.module else ""
    where += f" at {origin.source}" if origin.source else ""
    what = "a number that is no polynomial of the sizes" if misfit.numbers else "another program"
    message = f"the model has {what} at {second} than at {first}{where}"
    message = message if not misfit.numbers else f"the model has {what}, between {first} and {second}{where}"
    notes = [f"{misfit.file}, {sizes}: {row.strip() or 'nothing'}"
             for sizes, row in zip((first, second), misfit.rows, strict=True)]  # fmt: skip
    help_ = "choose a smaller range that contains only one of the two sizes, and make a build for each part"
    help_ += "; or use a larger step, if the sizes differ in what divides them"
    few = min((point[BATCH] for point in misfit.points if BATCH in point), default=0)
    in_parts = ["[(" in row for row in misfit.rows]
    if plan.context and any(in_parts) and not all(in_parts):
        notes.append("a rank with one sample has a part of one sequence, and one with more has a part of each")
        help_ = f"begin the range of {BATCH} above {few}, and make a build of its own for {BATCH}={few}"
    if misfit.numbers:
        help_ = "write it with sums, products and quotients of sizes; or declare one size, and make a build for each"
    return Diagnostic(
        code, message, Label(line_span(plan, origin.plan) or _sizes_span(plan)), help=help_, notes=tuple(notes)
    )


def _constant_diagnostic(
    plan: Plan, constants: Mapping[str, object], others: Mapping[str, object], sizes: Mapping[str, int]
) -> Diagnostic:
    name = next(name for name in {**constants, **others} if constants.get(name) != others.get(name))
    message = f"the tensor `{name}`, which the model's code makes from numbers, is different at {sizes_text(sizes)}"
    help_ = "compute with the size itself, not with a tensor of it; or choose a smaller range"
    return Diagnostic(OTHER_PROGRAM, message, Label(plan.model.arguments.statement.span), help=help_)


def fault_diagnostic(plan: Plan, fault: ShapeFault) -> Diagnostic:
    """Return the message about a size that is not a whole number for some declared sizes, with the line that splits
    it."""
    where = f"`{fault.value}`" + (f" of `{fault.module}`" if fault.module else "")
    declared = sizes_text(moving(plan.sizes))
    code = NO_DIVIDE if fault.divides else OTHER_PROGRAM
    return Diagnostic(
        code, f"{where}: {fault.message}", Label(line_span(plan, fault.line) or _sizes_span(plan)),
        help="declare sizes for which it holds" + (", or leave the axis out here" if fault.line else ""),
        notes=(f"the declared sizes are {declared}",),
    )  # fmt: skip


def line_span(plan: Plan, line: int) -> Span | None:
    """Return the place of the plan's statement at a line; an `include` stands for all that it brings."""
    return next((s.span.root for s in plan.statements if s.span.root.line == line), None)


def _sizes_span(plan: Plan) -> Span:
    return next(s.span.root for s in plan.statements if s.verb.text == "sizes")
