"""Changes of a plan that keep a rank within its memory budget: each is compiled before a message names it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parc.compiler.analysis.liveness import local_bytes
from parc.compiler.analysis.memory import Memory
from parc.compiler.ops.recompute import line_for
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.blocks import block_of, starred
from parc.compiler.sizes.size_range import BATCH
from parc.compiling.compiled import Compiled
from parc.compiling.driver import Progress, compile_changed
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Span
from parc.grammar.syntax import size_text
from parc.passes.pipeline import names_of
from parc.report import memory_of

_MOST_NAMED, _MOST_OF_A_KIND, _MOST_ALONE, _MOST_COMPILED = 3, 3, 6, 8
_SMALLEST_PART = 20  # a parameter with less than a twentieth of the bytes of all is not worth a line
_ADD_RANKS = "add ranks to an axis that splits the largest of these, or place them over another axis"


@dataclass(frozen=True)
class PlanChange:
    """A change of a plan. In the sum of two, the later edit of one part, or of one ``-D``, counts."""

    saves: float
    """The most bytes that a rank saves by it."""
    edits: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The new text of parts of the plan, by their start and end in it."""
    lines: tuple[str, ...] = ()
    """New lines at the end."""
    defines: Mapping[str, str] = field(default_factory=dict)
    """New values of ``let`` names, as ``-D`` sets them."""

    def __add__(self, other: PlanChange) -> PlanChange:
        edits, defines = {**self.edits, **other.edits}, {**self.defines, **other.defines}
        return PlanChange(self.saves + other.saves, edits, (*self.lines, *other.lines), defines)

    def text(self, plan: Plan) -> str:
        """Return the changed plan's text."""
        text = plan.source.text
        for (start, end), new in sorted(self.edits.items(), reverse=True):
            text = text[:start] + new + text[end:]
        return "\n".join([text, *self.lines, ""])

    def words(self, plan: Plan) -> str:
        """Return what a person writes to change the plan: options, lines in place of others, and new lines."""
        options = " ".join(f"-D {name}={value}" for name, value in self.defines.items())
        lines = zip(plan.source.text.splitlines(), self.text(plan).splitlines(), strict=False)
        replaced = [f"`{' '.join(new.partition('#')[0].split())}` in place of line {number}"
                    for number, (old, new) in enumerate(lines, 1) if old != new]  # fmt: skip
        return " and ".join([*([f"`{options}`"] if options else []), *replaced, *(f"`{line}`" for line in self.lines)])


def most_memory(compiled: Compiled) -> Memory:
    """Return the memory of a rank of the role that needs the most."""
    build = compiled.build
    return max((memory_of(build, compiled.plan, role) for role in build.roles.values()), key=lambda m: m.peak_bytes)


def cheaper_plans(compiled: Compiled, memory: Memory, budget: int, progress: Progress) -> str:
    """Return the help for a plan that is over its budget: up to three changes with which it is not, or several that are
    enough together, or the one that comes closest. At most eight are compiled: of one kind the mildest three of those
    that could be enough by the shares of the memory."""
    plan, over = compiled.plan, memory.peak_bytes - budget
    needs: list[tuple[float, str]] = []  # the bytes of a rank with a change, and the words that say both

    def need(change: PlanChange) -> float:
        """Compile a change, and return the bytes that a rank then needs; infinite where it does not compile."""
        words = change.words(plan)
        progress(f"over budget: trying {words}")
        try:
            text = replace(plan.source, text=change.text(plan))
            changed = compile_changed(compiled, read_plan(text, {**dict(plan.defines), **change.defines}))
        except PlanError:  # such as heads that do not divide
            return math.inf
        size, world = most_memory(changed).peak_bytes, changed.mesh.world
        on = f" on {world:,} ranks" if world != compiled.mesh.world else ""
        needs.append((size, f"{words}: a rank then needs {size_text(size)}{on}"))
        return size

    changes = {kind: [change for change in kind(compiled, memory) if change.saves > 0] for kind in _KINDS}
    for of_kind in changes.values():
        most = len(needs) + _MOST_OF_A_KIND
        for change in (change for change in of_kind if change.saves >= over):
            if need(change) <= budget or len(needs) == most:
                break
        within = [words for size, words in needs if size <= budget]
        if len(within) == _MOST_NAMED or len(needs) >= _MOST_ALONE:
            break
    if within:
        return "write " + "; or ".join(within)
    together, kinds = PlanChange(0), sorted(filter(changes.get, _KINDS), key=lambda kind: kind is _axes)
    for at, kind in enumerate(kinds, 1):
        strongest = max(reversed(changes[kind]), key=lambda change: change.saves)
        enough = (change for change in changes[kind] if together.saves + change.saves >= over)
        more = together + (next(enough, strongest) if kind is _axes else strongest)
        if more.saves >= over or at >= len(kinds) - 1:
            size = need(more) if len(needs) < _MOST_COMPILED else math.inf
            if size <= budget:
                return f"write {needs[-1][1]}"
            if size == math.inf:
                continue
        together = more
    return f"closest comes {min(needs)[1]}; {_ADD_RANKS}" if needs else _ADD_RANKS


def _rewritten(plan: Plan, span: Span, place: str, value: int, saves: float) -> Iterator[PlanChange]:
    """Yield the change of the number that the pattern ``place`` finds in a line, by ``-D`` where the line reads a
    ``let``; nothing for a line of an included file."""
    number = re.search(place, span.text)
    if number is None or span.source is not plan.source:
        return
    if number[1].startswith("$"):
        yield PlanChange(saves, defines={number[1][1:]: str(value)})
    else:
        yield PlanChange(saves, {(span.start + number.start(1), span.start + number.end(1)): str(value)})


def _zero(compiled: Compiled, memory: Memory) -> Iterator[PlanChange]:
    """Yield higher ZeRO levels over an axis whose ranks read different parts of the inputs."""
    plan, axis = compiled.plan, next(iter(_data_axes(compiled, of_samples=False)), None)
    if axis is None:
        return
    line = next((line for line in plan.zero if line.axis.text == axis), None)
    for level in range(line.level + 1 if line is not None else 1, 4):
        accumulated = level == 1 and plan.microbatches > 1  # level 1 accumulates whole gradients
        split = memory.optimizer + memory.parameters + (0 if accumulated else memory.gradients)
        saves = split * (1 - 1 / plan.mesh.size(axis))
        new = [PlanChange(saves, lines=(f"zero {level} over {axis}",))]
        yield from new if line is None else _rewritten(plan, line.span, r"zero\s+(\S+)", level, saves)


def _recompute(compiled: Compiled, memory: Memory) -> Iterator[PlanChange]:
    """Yield the recomputation of all blocks."""
    lines = compiled.resolved.recompute
    blocks = {block for name in compiled.captured.modules if (block := block_of(name)) is not None}
    chosen = [line_for(lines, block) for block in blocks]
    if any(line is None or line.keep for line in chosen) and not any(line.fit for line in lines):
        where = ", ".join(sorted({starred(block) for block in blocks}))
        yield PlanChange(memory.activations, lines=(f"recompute {where}",))


def _microbatches(compiled: Compiled, memory: Memory) -> Iterator[PlanChange]:
    """Yield more microbatches, with fewer samples in each, and one microbatch, which accumulates no gradients."""
    plan, now = compiled.plan, compiled.plan.microbatches
    batch = plan.sizes.get(BATCH)
    unit = 1 if batch is None else batch.low if batch.fixed else batch.step
    ranks = math.prod(map(plan.mesh.size, _data_axes(compiled)))
    saves = {n: memory.activations * (1 - now / n) for n in range(now + 1, unit + 1) if unit % (n * ranks) == 0}
    if now > 1:
        saves[1] = memory.gradients - memory.activations * (now - 1)
    for n, size in sorted(saves.items(), key=lambda item: (item[0] <= now, item[0])):
        yield from _scheduled(plan, n, size)


def _scheduled(plan: Plan, microbatches: int, saves: float) -> Iterator[PlanChange]:
    if plan.schedule is not None:
        yield from _rewritten(plan, plan.schedule.span, r"microbatches\s+(\S+)", microbatches, saves)
    else:
        yield PlanChange(saves, lines=(f"schedule microbatches {microbatches}",))


def _split_parameter(compiled: Compiled, memory: Memory) -> Iterator[PlanChange]:
    """Yield the split of the largest parameter that can be split further, over an axis without samples or stages."""
    names, types, mesh = names_of(compiled.captured), compiled.build.types, compiled.mesh
    taken = {*_data_axes(compiled), compiled.request.pipeline.axis if compiled.request.pipeline is not None else ""}
    sizes = {name: local_bytes(type_, compiled.build.programs[FORWARD]) for name, type_ in types.items()}
    for name in sorted(types, key=lambda name: -sizes[name]):
        if sizes[name] * _SMALLEST_PART < sum(sizes.values()):
            return
        verb = {"lookup": "vocab", "linear": "column"}.get(names.use(name).kind)
        split = {mesh.owner(axis) for axis in types[name].placement.split_axes()}
        axis = next((axis for axis, size in mesh.declared.axes if size > 1 and axis not in taken | split), None)
        if verb is not None and axis is not None:
            yield PlanChange(memory.peak_bytes, lines=(f"{verb} {name.removesuffix('.weight')} over {axis}",))
            return


def _axes(compiled: Compiled, memory: Memory) -> Iterator[PlanChange]:
    """Yield axes inside a node, or of stages, with 2, 4, … times the ranks, taken from the data axis; without a data
    axis, with twice the ranks. For an axis that splits sequences there are as many times more microbatches: otherwise a
    rank would have as many times more samples, and save nothing."""
    plan, data = compiled.plan, next(iter(_data_axes(compiled)), "")
    free = plan.mesh.size(data) if data else 2
    stages = next((line.axis.text for line in plan.stages), "")
    choices = ((2**power, *axis) for power in range(1, free.bit_length()) for axis in reversed(plan.mesh.axes))
    for factor, axis, size in choices:
        outside = axis != stages and plan.node is not None and factor * size > plan.node.ranks
        if axis == data or free % factor or outside:
            continue
        wanted = {axis: factor * size} | ({data: free // factor} if data else {})
        parts = [change for name in plan.mesh.names if name in wanted
                 for change in _rewritten(plan, plan.mesh_spans[name], r"=\s*(\S+)", wanted[name], 0)]  # fmt: skip
        if len(parts) == len(wanted):
            if data and any(line.axis.text == axis for line in plan.context):
                parts += _scheduled(plan, plan.microbatches * factor, 0)
            yield sum(parts, PlanChange(memory.peak_bytes * (1 - 1 / factor)))


def _offload(compiled: Compiled, memory: Memory) -> Iterator[PlanChange]:
    """Yield the optimizer's state in the host's memory."""
    if "optimizer" not in compiled.plan.offloaded:
        yield PlanChange(memory.optimizer, lines=("offload optimizer to cpu",))


_KINDS: Sequence[Callable[[Compiled, Memory], Iterator[PlanChange]]] = (
    _zero, _recompute, _microbatches, _split_parameter, _axes, _offload,
)  # fmt: skip


def _data_axes(compiled: Compiled, of_samples: bool = True) -> list[str]:
    """Return the axes of several ranks that split inputs: ``of_samples``, or sequences too."""
    inputs = [value.type for value in compiled.build.programs[FORWARD].main.bound("input").values()]
    axes = [axis for type_ in inputs if type_.shape for _, axis in type_.placement.splits(0)]
    axes += [] if of_samples else [axis for type_ in inputs for axis in type_.placement.split_axes()]
    return [axis for axis in dict.fromkeys(map(compiled.mesh.owner, axes)) if compiled.plan.mesh.size(axis) > 1]
