"""Twins: the choice of a smaller build of the same plan, on which a large one's numbers are tested, and of its smaller
model. The certificate proves that the programs of both compute what their models say; the models are of one code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from parc.compiler.capture.callables import load_callable
from parc.compiler.capture.model_calls import whole_arguments
from parc.compiler.layout.mesh import Mesh
from parc.compiler.plan.directive import Literal
from parc.compiler.plan.directives.experts import Experts
from parc.compiler.plan.directives.stage import Stage
from parc.compiler.plan.directives.view import ViewLine
from parc.compiler.plan.plan import Plan
from parc.compiler.program.blocks import block_of, starred
from parc.compiler.resolve.in_graph import RING_METHODS
from parc.compiler.resolve.names import is_within
from parc.compiler.resolve.stage_cuts import numbers_of, products_of
from parc.compiler.resolve.stage_lines import stage_count
from parc.compiler.sizes.size_range import BATCH, SizeRange
from parc.compiler.sizes.template import sizes_text
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.compiling.fit import stages_of
from parc.compiling.plan_capture import make_model
from parc.grammar.codes import MANY_AXES, NO_TWIN
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import listed
from parc.grammar.syntax import Word

# ---- the choice of a twin


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


def work_of(compiled: Compiled) -> int:
    """Return the multiply-adds of a step's forward. Other operators, and the parameters of every rank, count as many as
    can be done in their time."""
    nodes = [node for node in compiled.captured.graph.nodes if node.op == "call_function"]
    work = sum(products_of(node) + _READ_AND_WRITE * numbers_of(node) for node in nodes)
    parameters = sum(map(numbers_of, compiled.captured.placeholders("parameter").values()))
    return compiled.plan.microbatches * work + _READ_AND_WRITE * parameters * (1 + compiled.mesh.world)


def subject_of(compiled: Compiled, certified: bool = True) -> Subject:
    """Choose the build on which numbers are tested: of a ``certified`` one the same model at smaller sizes, if that
    takes less time; the twin, if there are more ranks or more work than one process should do; else the build itself.

    Raises:
        PlanError: nothing is small enough, the twin cannot be compiled, or its model has not the lines of the build's.
    """
    work, few_ranks = work_of(compiled), compiled.mesh.world <= _LARGE_WORLD
    if certified and work > _SMALL_WORK and few_ranks and compiled.template is None:
        for sizes in _smaller_sizes(compiled, compiled.mesh, {}):
            part = math.prod(sizes.values()) / math.prod(compiled.sizes.values())
            if part > 0.5 or work * part > _LARGE_WORK:
                continue
            try:
                smaller = _compiled(compiled, compiled.mesh, sizes, {}, compiled.plan.stages)
            except PlanError:
                continue  # the model does not take these
            if not _other_lines(compiled, smaller):
                return Subject(smaller, f"the same plan at {sizes_text(sizes)}")
    if work > _LARGE_WORK or not few_ranks:
        twin = find_twin(compiled)
        few = work_of(twin) > _MOST_WORK // _TEST_STEPS
        return Subject(twin, twin_text(twin, few), 1 if few else _TEST_STEPS)
    return Subject(compiled, "the build itself")


def find_twin(compiled: Compiled) -> Compiled:
    """Return the smallest twin whose model has the same kinds of lines.

    Its model has the fewest blocks that may show what the build does; if no mesh helps, twice and four times as many.

    Raises:
        PlanError: the plan has no ``verify`` line that makes the model small enough, no twin can be compiled, or none
            has the model's lines.
    """
    first: Compiled | None = None
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
        small = [(sizes, values) for sizes in _smaller_sizes(compiled, mesh, chosen)
                 for values in models.lengths(sizes, arguments)]  # fmt: skip
        for sizes, values in small:
            try:
                twin = _small_enough(_compiled(compiled, mesh, sizes, values, models.stages(mesh, values)))
            except PlanError as error:  # "too large" is the better message than "no sizes of the model"
                if problem is None or error.diagnostics[0].code is NO_TWIN:
                    problem = error
                continue
            if not _other_lines(compiled, twin):
                return twin
            first = first or twin
    too_large = problem is not None and problem.diagnostics[0].code is NO_TWIN
    if meshes and not too_large and (few := models.fault(meshes[0])) is not None:
        raise PlanError([few])
    if first is None:
        raise problem or _many_axes(compiled)
    raise PlanError([_not_alike(compiled, first)])


_LineKind = tuple[str, str, str]
"""The operator of a line of a model, its module without numbers, and its line of code."""


def _other_lines(compiled: Compiled, smaller: Compiled) -> list[_LineKind]:
    """Return the kinds of lines that one of two models has alone: code that depends on sizes does something else in
    each of them, or a kind of block is not in the smaller one."""
    places = [
        {(line.op, starred(line.origin.module), line.origin.source)
         for function in of.build.reference.functions for line in function.lines}
        for of in (compiled, smaller)
    ]  # fmt: skip
    return sorted(places[0] ^ places[1])


def _not_alike(compiled: Compiled, twin: Compiled) -> Diagnostic:
    """Return the error of a build whose smaller model has other lines. Mostly the model is the cause: code outside its
    blocks reads a value of each block, or does something else at other sizes."""
    line = compiled.plan.verify or compiled.plan.model
    (op, module, source), *others = _other_lines(compiled, twin)
    more = f", and {len(others)} more" if others else ""
    message = f"numbers cannot be tested on the smaller model: one alone has `{op}` in `{module or 'the model'}`{more}"
    counts = Counter(map(starred, blocks_in(compiled.recorded.module))).values()
    large = whole_number_arguments(compiled)
    keep = [f"`{name}={large[name]}`" for name, n in twin.overrides.items() if n != large.get(name, n) in counts]
    help_ = "write a model whose code does the same at all sizes, or name larger ones in the `verify` line"
    if keep:
        help_ = f"keep {' and '.join(keep)} in the `verify` line, or write code that does the same at all sizes"
    notes = (f"at {source}",) if source else ()
    return Diagnostic(NO_TWIN, message, Label(line.span), notes=notes, help=help_)


def _many_axes(compiled: Compiled) -> PlanError:
    line = next(statement for statement in compiled.plan.statements if statement.verb.text == "mesh")
    axes = [axis for axis, size in compiled.mesh.axes if size > 1]
    return PlanError([Diagnostic(
        MANY_AXES,
        f"numbers cannot be tested on {2 ** len(axes)} ranks, 2 along each of {len(axes)} axes",
        Label(line.span),
        help="join axes that split the same tensors into one axis",
    )])  # fmt: skip


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
    resolved = replace(compiled.resolved, axes=replace(compiled.resolved.axes, sizes=factors))
    small = replace(plan, sizes=ranges, mesh=mesh.declared, stages=stages, views=_views(plan, mesh))
    overrides = {**compiled.overrides, **arguments} or None
    return compile_plan(small, compiled.folder, overrides=overrides, like=replace(compiled, resolved=resolved))


def _small_enough(twin: Compiled) -> Compiled:
    if (work := work_of(twin)) > _MOST_WORK:
        line = twin.plan.verify or twin.plan.model
        message = f"the model is too large to test its numbers: {work:.0e} multiply-adds a step, even small"
        raise PlanError([Diagnostic(NO_TWIN, message, Label(line.span), help=_smaller_ways(twin))])
    return twin


_MOST_NAMED = 6
_LONG = 8
"""The dims of inputs from which on a message says that they may be shorter."""


def _smaller_ways(twin: Compiled) -> str:
    """Return advice on how a model has less work: the arguments that it has, and the inputs with long dims."""
    said = [name for name, value in twin.plan.model.values if type(value) is int and value > 1]
    names = [name for name in said or whole_number_arguments(twin) if name not in twin.overrides][:_MOST_NAMED]
    ways = [f"give smaller numbers for {listed(names)} in {'the' if twin.overrides else 'a'} `verify` line"] * bool(
        names
    )
    for line in twin.plan.inputs:
        if any(isinstance(dim, int) and dim > _LONG for dim in line.dims[1:]):
            ways.append(f"choose shorter dims for `input {line.name}`, which is [{', '.join(map(str, line.dims))}]")
    return ", or ".join(ways) or "write a model with arguments of smaller sizes, and name these in a `verify` line"


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


# ---- the twin's model: the ``verify`` line's arguments, with as many blocks and experts as its test needs


SmallArguments = Mapping[str, Literal]
_FEW_BLOCKS = 2
"""The blocks of a stage of which one is the first, and another follows one of the same stage."""


class SmallModels:
    """The arguments of smaller models for meshes. The arguments that set the numbers of blocks and of experts are found
    by making models with other arguments, on fake tensors. ``stated`` are those of the ``verify`` line."""

    def __init__(self, compiled: Compiled, stated: SmallArguments) -> None:
        plan, names = compiled.plan, blocks_in(compiled.recorded.module)
        self._compiled, self._stated, self._of_model = compiled, stated, whole_number_arguments(compiled)
        self._modules = dict[tuple[Any, ...], nn.Module | None]()
        self._blocks = Counter(map(starred, names))
        stages = stages_of(compiled, dict.fromkeys(names, ()))
        last = compiled.request.pipeline.stages - 1 if compiled.request.pipeline is not None else 0
        self._empty_stages = min(stages.values(), default=0), last - max(stages.values(), default=last)
        """The stages without blocks before those that have some, and after them."""
        in_stages = Counter((starred(name), stages[name]) for name in names)
        self._most_in_stage = {kind: max(n for (of, _), n in in_stages.items() if of == kind) for kind in self._blocks}
        """The most blocks of each kind in a stage."""
        axes = {line.axis.text for line in plan.placements if isinstance(line, Experts)}
        layers = [layer for layer in compiled.request.placing.experts.values() if layer.ranks > 1]
        self._experts = (layers[0], axes.pop()) if layers and len(axes) == 1 else None

    def least_ranks(self) -> dict[str, int]:
        """Return the fewest ranks of axes with which two stages have blocks, a token does not choose all experts, and
        the next rank on a ring is not the one before."""
        plan = self._compiled.plan
        least = {line.axis.text: 3 for line in plan.context if line.method in RING_METHODS}
        if plan.stages and plan.schedule is not None:
            least[plan.stages[0].axis.text] = max(2, -(-(2 + sum(self._empty_stages)) // plan.schedule.chunks))
        if self._experts is not None:
            (layer, axis), ranks = self._experts, 2
            while layer.experts // layer.ranks * ranks <= layer.top:
                ranks *= 2
            least[axis] = ranks
        return least

    def arguments(self, mesh: Mesh, times: int = 1) -> SmallArguments:
        """Return the arguments of a model for a mesh: the stated ones, changed so that there are at least two blocks a
        stage and chunk, or ``times`` as many, and as many experts a rank as in the build, if arguments set them."""
        chosen, wanted = self._stated, self._wanted(mesh, times)
        lacks = self._lacks(chosen, wanted) or {}
        smaller = [name for name, value in chosen.items() if type(value) is int and value < self._of_model.get(name, 0)]
        for name in sorted(smaller, key=lambda name: self._of_model[name] not in self._blocks.values()):
            if not lacks:
                break
            factor = max(-(-wanted[kind] // max(wanted[kind] - n, 1)) for kind, n in lacks.items())
            larger = {**chosen, name: min(int(chosen[name]) * factor, self._of_model[name])}  # type: ignore[arg-type]
            left = self._lacks(larger, wanted)
            if left is not None and sum(left.values()) < sum(lacks.values()):
                chosen, lacks = larger, left
        if self._experts is None:
            return chosen
        layer, axis = self._experts
        experts = layer.experts // layer.ranks * mesh.size(axis)
        names = [name for name, value in self._of_model.items() if value == layer.experts]
        fewer = ({**chosen, name: experts} for name in names if chosen.get(name, layer.experts) != experts)
        return next((arguments for arguments in fewer if self._has_experts(arguments, experts)), chosen)

    def lengths(self, sizes: Mapping[str, int], arguments: SmallArguments) -> Iterator[SmallArguments]:
        """Yield the arguments, and then with a number of the model that is a size of the plan, as small as that size
        is: where a GPT has as many positions as its sequences have tokens, ``positions[:length]`` is no slice."""
        yield arguments
        large = self._compiled.plan.sizes
        smaller = {
            name: max(sizes[size] for size in sizes if large[size].high == value)
            for name, value in self._of_model.items()
            if name not in arguments and any(large[size].high == value > sizes[size] for size in sizes if size != BATCH)
        }
        yield from ({**arguments, name: value} for name, value in smaller.items())
        if len(smaller) > 1:
            yield {**arguments, **smaller}

    def stages(self, mesh: Mesh, arguments: SmallArguments) -> tuple[Stage, ...]:
        """Return the plan's stages for a smaller model, whose widths the plan's cuts do not balance: stages have equal
        numbers of blocks; those without blocks, as for a large head, are as in the build."""
        plan, pipeline = self._compiled.plan, self._compiled.request.pipeline
        if not plan.stages or (mesh.declared == plan.mesh and not arguments):
            return plan.stages
        line, module = replace(plan.stages[0], before=(), after=(), balanced=True), self._module(arguments)
        names, (ahead, behind) = blocks_in(module) if module is not None else [], self._empty_stages
        count = self._stage_count(mesh) - ahead - behind
        if pipeline is None or not arguments or not names or count < 1:
            return (line,)
        last = len(pipeline.cuts) - behind
        cuts = [(names[0] if block_of(name) else name, after) for name, after in pipeline.cuts[:ahead]]
        cuts += [(names[len(names) * stage // count], False) for stage in range(1, count)]
        cuts += [(names[-1] if block_of(name) else name, after) for name, after in pipeline.cuts[last:]]
        before, after = (tuple(Word(name, line.span) for name, end in cuts if end == way) for way in (False, True))
        lines = replace(line, before=before, balanced=False), replace(line, after=after, balanced=False)
        return tuple(line for line in lines if line.before or line.after)

    def fault(self, mesh: Mesh) -> Diagnostic | None:
        """Return the error of a ``verify`` line with which the model has too few blocks; None where it has enough."""
        line, wanted = self._compiled.plan.verify, self._wanted(mesh, 1)
        lacks = self._lacks(self.arguments(mesh), wanted)
        if not lacks or line is None:
            return None
        kind, missing = max(lacks.items(), key=lambda item: item[1])
        needed = wanted[kind]
        message = f"the smaller model has {needed - missing} of the blocks `{kind}`, and a test needs {needed}"
        smaller = [name for name, value in self._stated.items() if value != self._of_model.get(name)]
        help_ = f"change {listed(smaller, 'or')} of the `verify` line so that there are as many"
        stages = self._stage_count(mesh)
        notes = (f"a stage of the build has up to {self._most_in_stage[kind]}, and the test has {stages} stages",)
        return Diagnostic(NO_TWIN, message, Label(line.span), help=help_, notes=notes if stages > 1 else ())

    def _stage_count(self, mesh: Mesh) -> int:
        """Return the number of stages on a mesh."""
        return stage_count(replace(self._compiled.plan, mesh=mesh.declared))

    def _wanted(self, mesh: Mesh, times: int) -> dict[str, int]:
        """Return the least number of blocks of each kind."""
        stages = self._stage_count(mesh)
        wanted = {kind: stages * min(most, times * _FEW_BLOCKS) for kind, most in self._most_in_stage.items()}
        if (fitted := self._compiled.fitted) is not None:
            wanted |= {kind: max(least, wanted.get(kind, 0)) for kind, least in fitted.least_blocks(stages).items()}
        return {kind: min(count, self._blocks[kind]) for kind, count in wanted.items()}

    def _lacks(self, arguments: SmallArguments, wanted: Mapping[str, int]) -> dict[str, int] | None:
        """Return how many blocks of each kind a model has too few; None for one that cannot be made."""
        if (module := self._module(arguments)) is None:
            return None
        have = Counter(map(starred, blocks_in(module)))
        return {kind: count - have[kind] for kind, count in wanted.items() if have[kind] < count}

    def _has_experts(self, arguments: SmallArguments, experts: int) -> bool:
        """Return whether a parameter has as many rows as there are ``experts``, where that of the plan's model has as
        many as it has experts."""
        kinds = {starred(path) for path in self._compiled.request.placing.experts}

        def rows(module: nn.Module | None) -> set[tuple[str, int]]:
            named = module.named_parameters() if module is not None else ()
            inside = ((name, value) for name, value in named if any(is_within(starred(name), kind) for kind in kinds))
            return {(starred(name), len(value)) for name, value in inside if value.dim()}

        assert self._experts is not None
        large, total = rows(self._compiled.recorded.module), self._experts[0].experts
        return any((name, total) in large and count == experts for name, count in rows(self._module(arguments)))

    def _module(self, arguments: SmallArguments) -> nn.Module | None:
        """Return a model on fake tensors; None where its code does not take these arguments."""
        key, compiled = tuple(map(repr, arguments.items())), self._compiled
        if key not in self._modules:
            overrides = {**compiled.overrides, **arguments}
            self._modules[key] = None
            with suppress(PlanError):
                self._modules[key] = make_model(compiled.plan, compiled.lines, compiled.folder, overrides).module
        return self._modules[key]


def whole_number_arguments(compiled: Compiled) -> dict[str, int]:
    """Return the whole numbers among the arguments of the plan's model."""
    make = load_callable(compiled.plan.model.callable, compiled.folder)
    return whole_arguments(make, compiled.recorded.module, dict(compiled.plan.model.values))


def blocks_in(module: nn.Module) -> list[str]:
    """Return the names of a model's blocks."""
    return [name for name, _ in module.named_modules() if name and block_of(name) == name]
