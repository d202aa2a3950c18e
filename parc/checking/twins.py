"""Twins: the choice of a smaller build with the same programs, on which a large one's numbers are tested."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from parc.checking.small_models import SmallArguments, SmallModels, blocks_in, whole_number_arguments
from parc.compiler.layout.mesh import Mesh
from parc.compiler.plan.directive import Literal
from parc.compiler.plan.directives.stage import Stage
from parc.compiler.plan.directives.view import ViewLine
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.blocks import starred
from parc.compiler.program.program import Fault, Program
from parc.compiler.resolve.balance import numbers_of, products_of
from parc.compiler.sizes.size_range import BATCH, SizeRange
from parc.compiler.sizes.template import sizes_text
from parc.compiler.twin.structure import compare_structure
from parc.compiler.twin.wiring import Kinds
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.codes_build import MANY_AXES, NO_TWIN
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import listed

_SMALL_WORK = 200_000_000  # multiply-adds of a step's forward: half a second of tests, less than a twin costs
_LARGE_WORK = 2_000_000_000
_MOST_WORK = 20_000_000_000  # about a minute in float64 on one core
_LARGE_WORLD = 8
_TWIN_WORLD = 32
_MOST_AXES = 8
"""The most axes of a mesh whose twin may have 2 ranks on every axis, whatever world size that is: on fewer ranks its
programs would differ."""
_TEST_STEPS = 3
_READ_AND_WRITE = 10  # multiply-adds in the time in which a number is read and written


@dataclass(frozen=True, slots=True)
class Subject:
    """The build on which numbers are tested, which may be smaller than the plan's."""

    compiled: Compiled
    text: str
    """The words that say how it is smaller."""
    steps: int = _TEST_STEPS
    differences: tuple[Fault, ...] = ()
    """The differences of its programs from those that were read from files."""


def work_of(compiled: Compiled) -> int:
    """Return the multiply-adds of a step's forward. Other operators, and the parameters of every rank, count as many as
    can be done in their time."""
    nodes = [node for node in compiled.captured.graph.nodes if node.op == "call_function"]
    work = sum(products_of(node) + _READ_AND_WRITE * numbers_of(node) for node in nodes)
    parameters = sum(map(numbers_of, compiled.captured.placeholders("parameter").values()))
    return compiled.plan.microbatches * work + _READ_AND_WRITE * parameters * (1 + compiled.mesh.world)


def subject_of(compiled: Compiled) -> Subject:
    """Choose the build on which numbers are tested: the same model at smaller sizes, if that takes less time and gives
    the same programs; the twin, if there are more ranks or more work than one process should do; else the build
    itself.

    Raises:
        PlanError: nothing is small enough, the twin cannot be compiled, or its programs are not the build's.
    """
    work, few_ranks = work_of(compiled), compiled.mesh.world <= _LARGE_WORLD
    if work > _SMALL_WORK and few_ranks and compiled.template is None:
        for sizes in _smaller_sizes(compiled, compiled.mesh, {}):
            part = math.prod(sizes.values()) / math.prod(compiled.sizes.values())
            if part > 0.5 or work * part > _LARGE_WORK:
                continue
            try:
                smaller = _compiled(compiled, compiled.mesh, sizes, {}, compiled.plan.stages)
            except PlanError:
                continue  # the model does not take these
            if not _differences(compiled, smaller, compiled.build.programs):
                return Subject(smaller, f"the same programs at {sizes_text(sizes)}")
    if work > _LARGE_WORK or not few_ranks:
        twin, differences = find_twin(compiled, compiled.build.programs)
        if differences and compiled.written is None:
            raise PlanError([_other_programs(compiled, twin, differences[0])])
        few = work_of(twin) > _MOST_WORK // _TEST_STEPS
        return Subject(twin, twin_text(twin, few), 1 if few else _TEST_STEPS, tuple(differences))
    return Subject(compiled, "the build itself")


def find_twin(compiled: Compiled, programs: Mapping[str, Program]) -> tuple[Compiled, list[Fault]]:
    """Return the smallest twin with the same programs; if there is none, the first that compiles and its differences.

    Its model has the fewest blocks that may show what the build does; if no mesh helps, twice and four times as many.

    Raises:
        PlanError: the plan has no ``verify`` line that makes the model small enough, or no twin can be compiled.
    """
    first: tuple[Compiled, list[Fault]] | None = None
    problem: PlanError | None = None
    stated = _verify_arguments(compiled.plan)
    chosen = {name: int(stated.pop(name)) for name in compiled.plan.sizes if name in stated}  # type: ignore[arg-type]
    models, tried = SmallModels(compiled, stated), list[tuple[Mesh, SmallArguments]]()
    meshes = [*_meshes(compiled.mesh, models.least_ranks())]
    choices = [(mesh, 1) for mesh in meshes]
    choices[1:1] = [(mesh, 2) for mesh in meshes[:1]]
    choices += [(mesh, 4) for mesh in meshes[:1]]
    for mesh, times in choices:
        arguments = models.arguments(mesh, times)
        if (mesh, arguments) in tried:
            continue
        tried.append((mesh, arguments))
        for sizes in _smaller_sizes(compiled, mesh, chosen):
            try:
                twin = _small_enough(_compiled(compiled, mesh, sizes, arguments, models.stages(mesh, arguments)))
            except PlanError as error:  # "too large" is the better message than "no sizes of the model"
                if problem is None or error.diagnostics[0].code is NO_TWIN:
                    problem = error
                continue
            differences = _differences(compiled, twin, programs)
            if not differences:
                return twin, []
            first = first or (twin, differences)
    too_large = problem is not None and problem.diagnostics[0].code is NO_TWIN
    if meshes and not too_large and (few := models.fault(meshes[0])) is not None:
        raise PlanError([few])
    if first is None:
        raise problem or _many_axes(compiled)
    return first


def _other_programs(compiled: Compiled, twin: Compiled, fault: Fault) -> Diagnostic:
    """Return the error of a build whose twin has other programs. Mostly the model is the cause: code outside its blocks
    reads a value of each block, and fewer blocks do not show what it computes with them."""
    line, kinds, main = compiled.plan.verify or compiled.plan.model, Kinds(), compiled.build.reference.main
    ours, theirs = (kinds.graph(of.build.reference.main, of.build.programs[FORWARD]).pieces for of in (compiled, twin))
    known, why, inside = {piece.kind for piece in theirs.values()}, f"its programs differ in {fault.where}", ""
    place, piece = next(((place, piece) for place, piece in ours.items() if piece.kind not in known), ("", None))
    if piece is not None:
        why = f"no part of it is like `{place}`"
    if piece is not None and piece.families:
        places = {value.name: str(source[1]).removeprefix("after ") for source, value, _ in piece.reads}
        first, *_, last = (places[name] for name in piece.families[0])
        reader = next(line for line in main.lines if piece.families[0][0] in line.uses).origin.source
        why = f"`{reader or place}` reads a value of each of `{first}` to `{last}`, and not in equal repetitions"
        inside = ", or add up inside the modules"
    counts = Counter(map(starred, blocks_in(compiled.recorded.module))).values()
    large = whole_number_arguments(compiled)
    keep = [f"`{name}={large[name]}`" for name, n in twin.overrides.items() if n != large.get(name, n) in counts]
    help_ = "please report the plan and this message: parc should make the same programs of both"
    if keep:
        help_ = f"keep {' and '.join(keep)} in the `verify` line, with other arguments smaller{inside}"
    message = f"numbers cannot be tested on the smaller model: {why}"
    return Diagnostic(NO_TWIN, message, Label(line.span), notes=() if keep else (str(fault),), help=help_)


def _many_axes(compiled: Compiled) -> PlanError:
    line = next(statement for statement in compiled.plan.statements if statement.verb.text == "mesh")
    axes = [axis for axis, size in compiled.mesh.axes if size > 1]
    return PlanError([Diagnostic(
        MANY_AXES,
        f"numbers cannot be tested on {2 ** len(axes)} ranks, 2 along each of {len(axes)} axes",
        Label(line.span),
        help="join axes that split the same tensors into one axis",
    )])  # fmt: skip


def _differences(compiled: Compiled, twin: Compiled, programs: Mapping[str, Program]) -> list[Fault]:
    ours, theirs = compiled.build, twin.build
    faults = compare_structure(programs, ours.reference, theirs.programs, theirs.reference)
    if faults or ours.evaluation is None or theirs.evaluation is None:
        return faults
    ours, theirs = ours.evaluation, theirs.evaluation
    faults = compare_structure(ours.programs, ours.reference, theirs.programs, theirs.reference)
    return [replace(fault, where=f"evaluation {fault.where}") for fault in faults]


def _meshes(mesh: Mesh, least: Mapping[str, int]) -> Iterator[Mesh]:
    """Yield the mesh with axes of 2 ranks, or of the ``least`` that they need; then with one axis after the other at
    its full size, because something may divide by 2 and not by more."""
    small = {axis: min(size, least.get(axis, 2)) for axis, size in mesh.axes}
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


def _smaller_sizes(compiled: Compiled, mesh: Mesh, chosen: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield sizes that are small and still show everything: every rank has two entries of each split dim, or one sample
    where it has one in the build, and sizes stay divisible by the same powers of two. First all sizes are small, then
    the batch alone, for a model of images of one size. A size that is ``chosen`` stays."""
    plan = compiled.plan
    pieces, pieces_of_build = _pieces(compiled, mesh), _pieces(compiled, compiled.mesh)
    small = {}
    for name, size in plan.sizes.items():
        batch = name == BATCH
        unit = pieces[name] * (plan.microbatches if batch else 1)
        one_sample = batch and size.high == pieces_of_build[name] * plan.microbatches
        unit *= 1 if one_sample else 2
        twos = 1 if batch else math.gcd(size.high, 32)
        thirds = unit % 3 == 0 and size.high % 3 > 0  # a ring of three ranks
        whole = (n for n in range(unit, size.high, unit) if (thirds or size.high % n == 0) and n % twos == 0)
        fits = (n for n in whole if batch or n >= 16)
        small[name] = chosen.get(name, next(fits, size.high))
    yield small
    batch_alone = {name: n if name == BATCH else chosen.get(name, plan.sizes[name].high) for name, n in small.items()}
    if batch_alone != small:
        yield batch_alone


def _pieces(compiled: Compiled, mesh: Mesh) -> dict[str, int]:
    """Return the number of pieces into which a mesh splits the dim of each of the plan's sizes."""
    pieces = dict.fromkeys(compiled.plan.sizes, 1)
    for program in compiled.build.programs.values():
        placed = program.main.bound("input")
        for line in compiled.plan.inputs:
            for dim, name in enumerate(line.dims):
                if line.name in placed and name in pieces:
                    axes = [axis for _, axis in placed[line.name].type.placement.splits(dim)]
                    pieces[str(name)] = math.lcm(pieces[str(name)], math.prod(map(mesh.size, axes)))
    return pieces


def _compiled(
    compiled: Compiled, mesh: Mesh, sizes: Mapping[str, int], arguments: SmallArguments, stages: tuple[Stage, ...]
) -> Compiled:
    """Compile the same plan on another mesh, with other arguments and stages, at other sizes (a range of two for each
    that has a range).

    Raises:
        PlanError: the model does not take them, or something does not divide.
    """
    plan, ranges = compiled.plan, dict[str, SizeRange]()
    for name, size in sizes.items():
        step = math.lcm(max(size // 2, 1), math.gcd(plan.sizes[name].step, 16))
        ranges[name] = SizeRange(size, size) if plan.sizes[name].fixed else SizeRange(step, 2 * step, step)
    factors = {axis: tuple(map(mesh.size, mesh.parts(axis))) for axis, _ in mesh.factored}
    axes, pads = replace(compiled.resolved.axes, sizes=factors), compiled.resolved.pads
    small = replace(plan, sizes=ranges, mesh=mesh.declared, stages=stages, views=_views(plan, mesh))
    return compile_plan(small, compiled.folder, overrides={**compiled.overrides, **arguments} or None, axes=axes,
                        longer=pads, dims=compiled.built.dims, fitted=compiled.fitted)  # fmt: skip


def _small_enough(twin: Compiled) -> Compiled:
    if (work := work_of(twin)) > _MOST_WORK:
        line = twin.plan.verify or twin.plan.model
        message = f"the model is too large to test its numbers: {work:.0e} multiply-adds a step, even small"
        whole = [name for name, value in twin.plan.model.values if type(value) is int and value > 1]
        names = [name for name in whole if name not in twin.overrides]
        help_ = "a `verify` line names smaller arguments of the model, e.g. `verify layers=2, width=64`"
        if names:
            help_ = f"give smaller numbers for {listed(names)} in {'the' if twin.overrides else 'a'} `verify` line"
        raise PlanError([Diagnostic(NO_TWIN, message, Label(line.span), help=help_)])
    return twin


def _views(plan: Plan, mesh: Mesh) -> tuple[ViewLine, ...]:
    """Return the plan's views for a mesh that may have fewer ranks."""
    sizes = {name: mesh.size(name) for name, _ in mesh.views}
    return tuple(
        replace(line, view=replace(line.view, axes=tuple((name, sizes.get(name, 1)) for name, _ in line.view.axes)))
        for line in plan.views
    )


def _verify_arguments(plan: Plan) -> dict[str, Literal]:
    """Return the ``verify`` line's arguments and sizes; a number of the plan stays where it is smaller already."""
    of_plan = {**dict(plan.model.values), **{name: size.high for name, size in plan.sizes.items()}}

    def smaller(value: Literal, planned: Literal) -> Literal:
        number = isinstance(planned, (int, float)) and not isinstance(planned, bool)
        return min(value, planned) if number and isinstance(value, (int, float)) else value  # type: ignore[type-var]

    arguments = dict(plan.verify.values) if plan.verify is not None else {}
    return {name: smaller(value, of_plan.get(name)) for name, value in arguments.items()}


def twin_text(twin: Compiled, few_steps: bool = False) -> str:
    """Return the words that say how the twin is smaller."""
    words = [f"{name}={value}" for name, value in {**twin.overrides, **twin.plan.sizes}.items()]
    few = " (large for its numbers, so no more steps)" if few_steps else ""
    return f"the twin: {', '.join(words)}, mesh {twin.mesh}{few}"
