"""Twins: the small build on which a large one's numbers are tested, chosen so that its programs are the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from parc.compiler.directive import Literal
from parc.compiler.directives.sizes import SizeRange
from parc.compiler.directives.stage import Stage
from parc.compiler.mesh import Mesh
from parc.compiler.plan import Plan
from parc.compiler.program import Program
from parc.compiler.twin import compare_structure
from parc.compiler.verify import Fault
from parc.driver import Compiled, compile_plan
from parc.grammar.codes_build import MANY_AXES, NO_TWIN
from parc.grammar.diagnostics import Diagnostic, Label, PlanError

_LARGE_WORK = 2_000_000_000  # parameters times tokens of a step: about half a minute in float64 on one core
_LARGE_WORLD = 8
_TWIN_WORLD = 32
_MOST_AXES = 8
"""Up to here a twin has every axis at 2, whatever world that makes: on fewer ranks its programs were others."""


def work_of(compiled: Compiled) -> int:
    """Parameters times tokens of a step."""
    parameters = compiled.captured.placeholders("parameter").values()
    elements = sum(int(math.prod(node.meta["val"].shape)) for node in parameters)
    return elements * (math.prod(compiled.sizes.values()) if compiled.sizes else 1)


def is_large(compiled: Compiled) -> bool:
    """Whether numbers are tested on a twin: more ranks, or more work, than one process should take on."""
    return work_of(compiled) > _LARGE_WORK or compiled.mesh.world > _LARGE_WORLD


def find_twin(compiled: Compiled, programs: Mapping[str, Program]) -> tuple[Compiled, list[Fault]]:
    """The smallest twin with the same programs, and how the nearest differs where there is none.

    Raises:
        PlanError: the plan has no ``verify`` line that makes the model small enough, or the twin cannot be made.
    """
    first: tuple[Compiled, list[Fault]] | None = None
    problem: PlanError | None = None
    for mesh in _meshes(compiled.mesh):
        try:
            twin = _twin(compiled, mesh)
        except PlanError as error:
            problem = problem or error
            continue
        differences = compare_structure(programs, compiled.built.reference, twin.built.programs, twin.built.reference)
        if not differences:
            return twin, []
        first = first or (twin, differences)
    if first is None:
        raise problem or _many_axes(compiled)
    return first


def _many_axes(compiled: Compiled) -> PlanError:
    line = next(statement for statement in compiled.plan.statements if statement.verb.text == "mesh")
    axes = [axis for axis, size in compiled.mesh.axes if size > 1]
    return PlanError([Diagnostic(
        MANY_AXES,
        f"numbers cannot be tested on {2 ** len(axes)} ranks, 2 along each of {len(axes)} axes",
        Label(line.span),
        help="join axes over which the same is split into one",
    )])  # fmt: skip


def _meshes(mesh: Mesh) -> Iterator[Mesh]:
    """Axes cut to 2; then, since something may divide by 2 and not by more, one axis after the other as it is."""
    small = {axis: min(size, 2) for axis, size in mesh.axes}
    choices = [small]
    choices += [{**small, axis: size} for axis, size in mesh.axes if size > 2]
    choices += [{axis: min(size, 4) for axis, size in mesh.axes}, dict(mesh.axes)]
    seen = set()
    for choice in choices:
        candidate = replace(mesh, axes=tuple(choice.items()))
        fits = candidate.world <= (2**_MOST_AXES if choice is small else _TWIN_WORLD)
        if fits and candidate not in seen:
            seen.add(candidate)
            yield candidate


def _twin(compiled: Compiled, mesh: Mesh) -> Compiled:
    """The same plan with the ``verify`` line's arguments, sizes as small as the axes allow."""
    plan = compiled.plan
    given = _arguments(plan)
    sizes = {}
    for name, size in plan.sizes.items():
        chosen = given.pop(name, None)
        if chosen is None:
            unit = mesh.world * (plan.microbatches if name == "B" else 4)
            chosen = min(size.high, unit * 2 if name == "B" else max(unit, 16))
        sizes[name] = SizeRange(int(chosen), int(chosen))
        if not size.fixed:  # two sizes, of what the range's own are multiples of
            step = math.lcm(max(int(chosen) // 2, 1), math.gcd(size.step, 16))
            sizes[name] = SizeRange(step, 2 * step, step)
    factors = {axis: tuple(map(mesh.size, mesh.parts(axis))) for axis, _ in mesh.factored}
    copies, pads = replace(compiled.copies, sizes=factors), compiled.resolved.pads
    small = replace(plan, sizes=sizes, mesh=mesh.declared, stages=_stages(plan, mesh))
    twin = compile_plan(small, compiled.folder, overrides=given, copies=copies, longer=pads)
    if work_of(twin) > _LARGE_WORK:
        line = plan.verify or plan.model
        raise PlanError([Diagnostic(
            NO_TWIN,
            f"the model is too large to test its numbers: {work_of(twin):.0e} parameters times tokens, even small",
            Label(line.span),
            help="a `verify` line names smaller arguments of the model, e.g. `verify layers=2, width=64`",
        )])  # fmt: skip
    return twin


def _stages(plan: Plan, mesh: Mesh) -> tuple[Stage, ...]:
    """The plan's stages, in a model that may have fewer layers than its lines name."""
    if not plan.stages or (mesh.declared == plan.mesh and plan.verify is None):
        return plan.stages
    return (replace(plan.stages[0], before=(), after=(), balanced=True),)


def _arguments(plan: Plan) -> dict[str, Literal]:
    """The ``verify`` line's arguments and sizes; of two numbers the plan's own where that is smaller already."""
    own = {**dict(plan.model.values), **{name: size.high for name, size in plan.sizes.items()}}
    given = dict(plan.verify.values) if plan.verify is not None else {}
    return {name: _smaller(value, own.get(name)) for name, value in given.items()}


def _smaller(value: Literal, own: Literal) -> Literal:
    numbers = isinstance(value, (int, float)) and isinstance(own, (int, float)) and not isinstance(own, bool)
    return min(value, own) if numbers else value  # type: ignore[type-var]


def twin_text(twin: Compiled) -> str:
    """How the twin is smaller."""
    given = _arguments(twin.plan)
    words = [f"{name}={value}" for name, value in given.items()]
    words += [f"{name}={size}" for name, size in twin.plan.sizes.items() if name not in given]
    return f"the twin: {', '.join(words)}, mesh {twin.mesh}"
