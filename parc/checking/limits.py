"""The promises of a plan, checked on what it compiles to: ``forbid`` and ``expect`` of collectives, and ``budget``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parc.checking.cheaper import cheaper_plans, most_memory
from parc.compiler.analysis.communication import Communication, messages
from parc.compiler.analysis.liveness import local_bytes
from parc.compiler.analysis.memory import MEMORY_KINDS
from parc.compiler.analysis.products import BLAS, ONEDNN
from parc.compiler.ops.rules import facts
from parc.compiler.plan.plan import Promise
from parc.compiler.program.actions import ACTIONS, BACKWARD, FORWARD, step_kinds
from parc.compiler.program.roles import join_roles
from parc.compiler.resolve.names import find_modules, is_within
from parc.compiling.compiled import Compiled
from parc.compiling.driver import Progress
from parc.compiling.size_ranges import line_span
from parc.grammar.codes import FORBIDDEN, NOT_EXPECTED, OVER_BUDGET
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.syntax import size_in_both, size_text
from parc.passes.pipeline import names_of
from parc.report import memory_by_library

_MOST_NOTES = 5
_HELP = dict.fromkeys(
    ("all_gather", "all_to_all"),
    "split the value in the same way where it is made and where it is read, or name fewer modules",
)
_COUNTED = {
    "": "the count is of the forward and the backward of one microbatch",
    "forward": "the count is of the forward of one microbatch",
    "backward": "the count is of the backward of one microbatch",
    "step": "the count is of the sums that a step makes once",
}
_DIGITS = re.compile(r"\d+")


def hold_promises(compiled: Compiled, progress: Progress = lambda _: None) -> None:
    """Check that a compiled plan keeps its ``budget``, ``forbid`` and ``expect`` lines. Over the budget, changes of the
    plan are compiled, so that the error can name some with which it is kept.

    Raises:
        PlanError: with every promise that the build would not keep.
    """
    broken = [*_collectives(compiled), *_budget(compiled, progress)]
    if broken:
        raise PlanError(broken)


def hold_collectives(compiled: Compiled) -> None:
    """Check that a compiled plan keeps its ``forbid`` and ``expect`` lines.

    Raises:
        PlanError: with each that the build would not keep.
    """
    if broken := [*_collectives(compiled)]:
        raise PlanError(broken)


def _collectives(compiled: Compiled) -> Iterator[Diagnostic]:
    programs = join_roles({name: role.programs for name, role in compiled.build.roles.items()}, rings=True)
    kinds = [row.kind for row in step_kinds() if row.kind in programs]
    collectives = [message for kind in kinds for message in messages(programs[kind])]
    among = Counter[Communication]()  # sums among roles, which joined programs do not have: each role has all of them
    for role in compiled.build.roles.values():
        of_role = (program for program in role.programs.values() if ACTIONS[program.action].program == "role")
        among |= Counter(m for program in of_role for m in messages(program) if m.op == "all_reduce_among")
    collectives += among.elements()
    names = names_of(compiled.captured)

    for promise in compiled.plan.promises:
        modules: list[str] = []
        for word in promise.where:
            result = find_modules(word, names)
            if isinstance(result, Diagnostic):
                yield result
            else:
                modules += result
        counted = [m for m in collectives if promise.means(m.op, _over(compiled, m), m.phase)]
        inside = {module: [m for m in counted if is_within(m.origin.module, module)] for module in modules}
        if promise.count == 0:
            yield from _forbidden(compiled, promise, [m for part in inside.values() for m in part])
        else:
            yield from _unexpected(compiled, promise, inside)


def _forbidden(compiled: Compiled, promise: Promise, collectives: list[Communication]) -> Iterator[Diagnostic]:
    """Yield one message for each collective; those of repeated blocks share one."""
    for first, others in _alike(collectives):
        more = (f"the same holds for {others} more in modules like it",) if others else ()
        message = f"{_collective_text(first)} is forbidden"
        yield Diagnostic(
            FORBIDDEN, message, Label(promise.span), _related(compiled, first), notes=(_cause(first), *more),
            help=_HELP.get(first.op, "place the module otherwise, or name fewer modules"),
        )  # fmt: skip


def _unexpected(
    compiled: Compiled, promise: Promise, inside: Mapping[str, list[Communication]]
) -> Iterator[Diagnostic]:
    """Yield one message for all modules with the same wrong number."""
    wrong: dict[int, list[str]] = {}
    for module, collectives in inside.items():
        if len(collectives) != promise.count:
            wrong.setdefault(len(collectives), []).append(module)
    for count, modules in wrong.items():
        where = f"`{modules[0]}`" if modules[0] else "the model"
        what = "collectives" if promise.op.text == "any" else f"`{promise.op.text}`"
        over = f" over `{promise.axis.text}`" if promise.axis is not None else ""
        collectives = inside[modules[0]]
        groups = _alike(collectives)
        notes = [f"{_collective_text(m)}{_times_text(others + 1)}: {_cause(m)}" for m, others in groups[:_MOST_NOTES]]
        notes += [f"and {len(groups) - _MOST_NOTES} more"] if len(groups) > _MOST_NOTES else []
        notes += [f"the same holds for {len(modules) - 1} more of the modules"] if len(modules) > 1 else []
        message = f"{where} has {count} {what}{over}, not {promise.count}"
        related = _related(compiled, collectives[0]) if collectives else ()
        counted = _COUNTED["" if promise.phase is None else promise.phase.text]
        help_ = f"{counted}: place the module otherwise, or correct the number"
        yield Diagnostic(NOT_EXPECTED, message, Label(promise.span), related, help=help_, notes=tuple(notes))


def _alike(collectives: list[Communication]) -> list[tuple[Communication, int]]:
    """Return the first of each kind of collective, and how many others are like it."""
    groups: dict[tuple[object, ...], list[Communication]] = {}
    for message in collectives:
        module = _DIGITS.sub("*", message.origin.module)
        groups.setdefault((message.op, message.axes, message.phase, module, message.origin.source), []).append(message)
    return [(first, len(others)) for first, *others in groups.values()]


def _collective_text(message: Communication) -> str:
    where = f"`{message.origin.module}`" if message.origin.module else "the model"
    return f"`{message.op}` over `{','.join(message.axes)}` in {where}"


def _times_text(count: int) -> str:
    return f", {count} times" if count > 1 else ""


def _cause(message: Communication) -> str:
    place = f"at {message.origin.source}, " if message.origin.source else ""
    return f"{place}{message.phase}, {size_text(message.bytes)} a rank of {message.dtype}"


def _over(compiled: Compiled, message: Communication) -> tuple[str, ...]:
    """Return the axes over which a collective is: those of the mesh, and those of views with all their sub-axes."""
    mesh = compiled.mesh
    parts = mesh.spread(message.axes)
    return (*map(mesh.owner, parts), *(name for name, of_view in mesh.views if {*of_view} <= {*parts}))


def _related(compiled: Compiled, message: Communication) -> tuple[Label, ...]:
    """Return the line of the plan behind a collective: one that places a weight of the module over the axis, else the
    line that the program names."""
    axes = _over(compiled, message)
    seeds = (seed for seed in compiled.resolved.seeds if seed.axis in axes and message.origin.module)
    near = next((seed.span for seed in seeds if is_within(seed.value, message.origin.module)), None)
    span = near if near is not None else line_span(compiled.plan, message.origin.plan)
    return (Label(span, "placed by this line"),) if span is not None else ()


# ---- memory


@dataclass(frozen=True, slots=True)
class _HeldTensor:
    """A tensor that a rank holds: its name, its type, and its bytes."""

    name: str
    text: str
    bytes: int


def _budget(compiled: Compiled, progress: Progress) -> Iterator[Diagnostic]:
    line = compiled.plan.budget
    if line is None:
        return
    memory, roles = most_memory(compiled), compiled.build.roles.values()
    usual = max(memory_by_library(compiled.build, compiled.plan, role)[BLAS.name].peak_bytes for role in roles)
    over = memory.peak_bytes - line.memory
    if over <= 0:
        return
    shown = MEMORY_KINDS[:4] if compiled.plan.trains else ()
    kinds = {name: size for name, size in memory.shares.items() if size or name in shown}
    notes = [", ".join(f"{name} {size_text(size)}" for name, size in kinds.items())]
    if 100 * memory.peak_bytes > 101 * usual:
        notes.append(
            f"this is on a CPU whose products of float32 are {ONEDNN.name}'s; else it needs {size_text(usual)}"
        )
    largest = sorted([*_parameters(compiled), *_values(compiled)], key=lambda tensor: -tensor.bytes)
    notes += [f"{tensor.name} {tensor.text}, {size_text(tensor.bytes)}" for tensor in largest[:_MOST_NOTES]]
    message = f"a rank needs {size_text(memory.peak_bytes)}, {size_text(over)} more than the budget"
    message += f" of {size_in_both(line.memory)}"
    help_ = cheaper_plans(compiled, memory, line.memory, progress)
    yield Diagnostic(OVER_BUDGET, message, Label(line.span), help=help_, notes=tuple(notes))


def _parameters(compiled: Compiled) -> Iterator[_HeldTensor]:
    forward = compiled.build.programs[FORWARD]
    for name, type_ in compiled.build.types.items():
        yield _HeldTensor(f"`{name}`", type_.text(compiled.mesh), local_bytes(type_, forward))


def _values(compiled: Compiled) -> Iterator[_HeldTensor]:
    """Yield the largest value that the lines of each module make."""
    largest: dict[str, _HeldTensor] = {}
    for action in (FORWARD, BACKWARD):
        program = compiled.build.programs[action]
        for line in (line for function in program.functions for line in function.lines):
            if line.calls_function or facts(line.op).storage == "view":
                continue
            for value in line.made:
                size = local_bytes(value.type, program)
                module = line.origin.module
                where = f"`{line.op}` in {f'`{module}`' if module else 'the model itself'}"
                where += f" at {line.origin.source}" if line.origin.source else ""
                if module not in largest or largest[module].bytes < size:
                    largest[module] = _HeldTensor(where, value.type.text(compiled.mesh), size)
    yield from largest.values()
