"""Roles: the programs and actions of the ranks at one coordinate of the pipeline's axis, and the joined step of all
roles, which checks read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..layout.collectives import MESSAGE, WAIT
from ..ops.rules import facts
from .actions import ACTIONS, FORWARD, Action, Purpose, StageRanks, kinds_to, phases_of, step_kinds
from .binding import Binding
from .plain import EarlyFault, RingFault, SplitFault, in_reduce, whole_steps, without_rings
from .program import Function, Line, Program, Ref, Value, map_references, needed
from .rewriter import FreshNames, LineWriter

Programs = Mapping[str, Program]
"""The programs of one role by key: ``COUNT``, ``SCALE``, ``LOSS``, ``REDUCE``, and for work ``F`` and ``B``, or ``2F``
and ``2B`` where there are stages."""
SINGLE = "stage0"
"""The role of a build without stages, and of programs that all roles share."""


@dataclass(frozen=True, slots=True)
class Role:
    """The ranks at one coordinate of the pipeline's axis: their programs, and their actions in a step in order."""

    name: str
    programs: Programs
    actions: tuple[Action, ...]
    axis: str = ""
    """The pipeline's axis; "" where there are no stages."""

    @property
    def overlaps(self) -> bool:
        """True where it does some actions of the next step before it ends one."""
        return any(action.ahead for action in self.actions)

    @property
    def stages(self) -> list[int]:
        """The stages whose work the role does."""
        return sorted({action.stage for action in self.actions if action.works})

    @property
    def rank(self) -> int:
        """The role's coordinate along the axis."""
        return int(self.name.removeprefix(self.axis)) if self.axis else 0


def roles_of(programs: Mapping[str, Programs], timelines: Mapping[str, Sequence[Action]]) -> dict[str, Role]:
    """Return the roles of a build from their programs and actions. A role's name is the axis and the coordinate."""
    axis = next(iter(programs)).removesuffix("0") if len(programs) > 1 else ""
    return {name: Role(name, of_role, tuple(timelines[name]), axis) for name, of_role in programs.items()}


class JoinFault(ValueError):
    """The error of programs of stages that are not pieces of one step."""


StageWork = Mapping[str, Program]
"""The programs of one stage, by the kind of work."""


def stage_key(key: str) -> tuple[int, str] | None:
    """Return the stage and the kind of work of a program's key such as ``2F``; None for a program of the whole role."""
    match = re.fullmatch(r"([0-9]+)([A-Z]+)", key)
    return None if match is None else (int(match[1]), match[2])


def work_programs(roles: Mapping[str, Programs]) -> dict[int, StageWork]:
    """Return the programs of every stage's work, in the order of stages.

    Raises:
        JoinFault: a stage is missing, or lacks a program.
    """
    by_stage: dict[int, dict[str, Program]] = {}
    for programs in roles.values():
        for key, program in programs.items():
            if (stage := stage_key(key)) is not None:
                by_stage.setdefault(stage[0], {})[stage[1]] = program
    kinds = {kind for work in by_stage.values() for kind in work if not ACTIONS[kind].instead_of}
    kinds.update(row.kind for row in step_kinds("work") if not row.optional)

    def lacks(work: StageWork) -> bool:
        return any(kind not in work and not all(phase in work for phase in phases_of(kind) or [""]) for kind in kinds)

    if sorted(by_stage) != list(range(len(by_stage))) or any(map(lacks, by_stage.values())):
        needed = " and ".join(kind for kind in ACTIONS if kind in kinds)
        raise JoinFault(f"stages {sorted(by_stage)} are not all there with their {needed}")
    return {stage: by_stage[stage] for stage in sorted(by_stage)}


def ranks_of(roles: Mapping[str, Programs]) -> StageRanks:
    """Return, for each stage, the number of the role that has its programs.

    Raises:
        JoinFault: a stage has programs on two roles, or lacks one.
    """
    if len(roles) == 1:
        return (0,)
    rank_of: dict[int, int] = {}
    for rank, programs in enumerate(roles.values()):
        for stage, _ in filter(None, map(stage_key, programs)):
            if rank_of.setdefault(stage, rank) != rank:
                raise JoinFault(f"stage {stage} has programs on role {rank_of[stage]} and on role {rank}")
    return tuple(rank_of[stage] for stage in work_programs(roles))


def as_checked(programs: Programs) -> Programs:
    """Return programs of a role as checks read them, with the lines that their rings stand for.

    Raises:
        RingFault: a line is no ring.
    """
    return {key: without_rings(program) for key, program in programs.items()}


def join_roles(roles: Mapping[str, Programs], rings: bool = False) -> dict[str, Program]:
    """Return the programs of a step as checks read them, as if one role ran it: stages one after the other without
    messages between them, and all reductions of gradients in REDUCE. With ``rings`` these stay as they are.

    A gradient of several stages is their sum, and what roles all-reduce among themselves once a step is a sum of the
    roles' values. Faults of messages between stages are not seen here.

    Raises:
        JoinFault: the programs are not those of one step.
    """
    try:
        read = roles if rings else {name: as_checked(programs) for name, programs in roles.items()}
        roles = {name: in_reduce(programs) for name, programs in whole_steps(read).items()}
    except (EarlyFault, RingFault, SplitFault) as fault:
        raise JoinFault(str(fault)) from None
    if len(roles) == 1:
        return dict(next(iter(roles.values())))
    work, joined = list(work_programs(roles).values()), dict[str, Program]()
    kinds = {key for programs in roles.values() for key in programs} | {*work[0]}
    for row in step_kinds():
        if not row.program or (row.optional and row.kind not in kinds):
            continue
        if row.program == "stage":
            in_order = work[::-1] if row.to < 0 else work
            joined[row.kind] = _join_of_stages([programs[row.kind] for programs in in_order])
            continue
        for name, programs in roles.items():
            if row.kind not in programs:
                raise JoinFault(f"{name} has no {row.kind}")
        every = [programs[row.kind] for programs in roles.values()]
        joined[row.kind] = every[0] if row.program == "step" else _join_of_roles(every)
    return joined


def _join_of_stages(programs: Sequence[Program]) -> Program:
    """Join the main functions of stages one after the other. Several stages may save the same value, or make the key of
    the same random stream, by equal lines. Gradients of one name are summed."""
    functions: dict[str, Function] = {}
    parameters: dict[Binding | None, Value] = {}
    writer = LineWriter(programs[0].mesh)
    makers: dict[str, Value | Line] = {}
    for program in programs:
        for function in program.blocks:
            if functions.setdefault(function.name, function) != function:
                raise JoinFault(f"`{function.name}` of {program.role} is another function in an earlier stage")
        for value in program.main.parameters:
            if value.kind == "received":
                if not isinstance(makers.get(value.name), Line):
                    raise JoinFault(f"{program.role}.{program.action} receives `{value.name}`, which no stage makes")
            elif makers.setdefault(value.name, value) != value or parameters.setdefault(value.binding, value) != value:
                raise JoinFault(f"`{value.binding}` of {program.role} is another value in an earlier stage")
        for line in program.main.lines:
            names = [value.name for value in line.made]
            if not any(name in makers for name in names):
                writer.add(line)
                makers.update(dict.fromkeys(names, line))
            elif makers.get(names[0]) != line or not (
                line.op in ("parc.stream_key.default", WAIT) or facts(line.op).carries
            ):
                raise JoinFault(f"{program.role}.{program.action} makes `{names[0]}`, which an earlier stage makes")
    writer.parameters.update((value.name, value) for value in parameters.values())
    types = {value.name: value.type
             for value in (*parameters.values(), *(value for line in writer.lines for value in line.made))}  # fmt: skip
    writer.names, returns = FreshNames(dict.fromkeys(types, 1)), writer.returns
    for program in programs:
        for key, name in program.main.returns:
            if key.kind == "sent" or (key.kind == "saved" and returns.get(key) == name):
                continue
            if key in returns and (key.kind != "gradient" or returns[key] == name):
                text = key.key_in(program.action)
                raise JoinFault(f"{program.role}.{program.action} returns `{text}`, which another stage returns too")
            if key in returns:
                args, type_ = (Ref(returns[key]), Ref(name)), types[name]
                name = writer.emit("aten.add.Tensor", args, type_, name="tied").name
                types[name] = type_
            returns[key] = name
    main = writer.function(programs[0].main.name)
    return replace(programs[0], role=SINGLE, functions=(*functions.values(), main))


def _join_of_roles(programs: Sequence[Program]) -> Program:
    """Join the programs of one kind that roles run once a step. A gradient, a weight, a buffer or a state is that of
    the first role that has it; other roles must make it by equal lines. All else is a sum of the roles' values, as the
    loss, or the root of such a sum, as the gradient norm."""
    parameters: dict[Binding | None, Value] = {}
    writer = LineWriter(programs[0].mesh)
    returns = writer.returns
    summed: dict[Binding, list[str]] = {}
    values: dict[str, Value] = {}
    first_expressions: dict[Binding, object] = {}
    roots: dict[str, Line] = {}
    for index, program in enumerate(programs):
        names: dict[str, str] = {}
        for value in program.main.parameters:
            if value.binding not in parameters:
                parameters[value.binding] = writer.take(f"{value.name}_{index}", value.type, value.binding)
            names[value.name] = parameters[value.binding].name
        bindings, expressions = set(program.main.bindings), _expressions(program.main)
        for line in program.main.lines:
            if line.op == "parc.all_reduce_among" and isinstance(line.args[0], Ref) and line.results[0] is not None:
                names[line.results[0].name] = names[line.args[0].name]
                continue
            copied = writer.copy(line, names, f"{{}}_{index}")
            values.update((value.name, value) for value in copied.made)
            roots.update((value.name, copied) for value in copied.made if facts(line.op).power == 0.5)
        for key, name in program.main.returns:
            if key.kind not in ("gradient", "state", "weight", "buffer"):
                summed.setdefault(key, []).append(names[name])
            elif key.kind == "gradient" and key not in bindings:  # zeros, for the roles that make it
                continue
            elif first_expressions.setdefault(key, expressions[name]) != expressions[name]:
                raise JoinFault(f"{program.role}.{program.action} makes `{key}` otherwise than an earlier role")
            else:
                returns.setdefault(key, names[name])
    for key, parts in summed.items():
        if len(parts) != len(programs) or len({part in roots for part in parts}) > 1:
            raise JoinFault(f"not every role's {programs[0].action} makes `{key}`, as a sum or as the root of one")
        if parts[0] not in roots:
            returns[key] = _add_sum(parts, values, writer, key.name or key.kind)
            continue
        total = _add_sum([name for part in parts for name in roots[part].uses], values, writer, "square")
        root = replace(values[parts[0]], name=writer.names.fresh(key.name or key.kind))
        writer.add(replace(roots[parts[0]], results=(root,), args=(Ref(total),)))
        returns[key] = root.name
    main = writer.function(programs[0].main.name)
    # of a gradient that several roles have, only the first role's lines remain
    lines, _ = needed(main.lines, returns.values())
    return replace(programs[0], role=SINGLE, functions=(replace(main, lines=lines),))


def _expressions(function: Function) -> dict[str, object]:
    """Return each value as an expression of the function's bound parameters, which does not depend on names, nor on
    where a message is awaited."""
    known: dict[str, object] = {value.name: value.binding for value in function.parameters}
    for line in function.lines:
        if line.op == WAIT:
            known[line.made[0].name] = known[line.uses[0]]
            continue
        options = (item for item in line.kwargs if item[0] != MESSAGE)
        call = line.op, map_references([*line.args, *options], known.__getitem__)
        known.update((v.name, (index, call)) for index, v in enumerate(line.results) if v is not None)
    return known


def _add_sum(names: Sequence[str], values: Mapping[str, Value], writer: LineWriter, base: str) -> str:
    """Add lines that sum the roles' values, but for zeros, and return the sum's name."""
    zeros = {value.name for line in writer.lines if facts(line.op).makes_zeros(line.args) for value in line.made}
    parts = [name for name in names if name not in zeros] or names[:1]
    if len(parts) == 1:
        return parts[0]
    type_ = values[parts[0]].type
    stacked = replace(type_, shape=(len(parts), *type_.shape))
    row = writer.emit("aten.stack.default", ([Ref(name) for name in parts],), stacked, name=f"{base}_stack")
    op, *dims = ("aten.sum.dim_IntList", [0], False) if type_.shape else ("aten.sum.default",)
    return writer.emit(op, (Ref(row.name), *dims), type_, name=f"{base}_sum").name


def group(programs: Iterable[Program], timelines: Mapping[str, Sequence[Action]]) -> dict[str, dict[str, Program]]:
    """Return the programs of a build by role and key. A stage's programs belong to the role whose timeline has its
    work.

    Raises:
        JoinFault: they are not the programs of one build.
    """
    listed = list(programs)
    if unknown := [program for program in listed if program.action not in ACTIONS]:
        raise JoinFault(f"there is no action `{unknown[0].action}`, which {unknown[0].role} has a program of")
    roles = {program.role for program in listed if ACTIONS[program.action].program == "role"} or {*timelines}
    axis = next((name[:-1] for name in roles if roles == {f"{name[:-1]}{rank}" for rank in range(len(roles))}), "")
    names = [SINGLE] if roles == {SINGLE} else [f"{axis}{rank}" for rank in range(len(roles))]
    if list(timelines) != names:
        raise JoinFault(f"its schedule is of {', '.join(timelines)}, its programs are of {', '.join(names)}")
    if names == [SINGLE]:
        return {SINGLE: {program.action: program for program in listed}}
    by_role: dict[str, dict[str, Program]] = {name: {} for name in names}
    home = {action.stage: name for name, actions in timelines.items() for action in actions if action.kind == FORWARD}
    for program in listed:
        row, stage = ACTIONS[program.action], re.fullmatch(r"stage([0-9]+)", program.role)
        if row.program == "stage" and stage is not None:
            name = home.get(int(stage[1]), "")
            if name not in by_role:
                raise JoinFault(f"no role does {FORWARD} of {program.role}")
            by_role[name][f"{stage[1]}{program.action}"] = program
        elif row.program == "step":
            for programs_of_role in by_role.values():
                programs_of_role[program.action] = program
        elif program.role in by_role:
            by_role[program.role][program.action] = program
        else:
            raise JoinFault(f"{program.role}.{program.action} is of no role: there are {', '.join(by_role)}")
    return by_role


def neighbours(roles: Mapping[str, Programs]) -> Iterator[tuple[Program, Program]]:
    """Yield the pairs of programs of which the first may send its results to the second: F of each stage to F of the
    next one, B or I of each stage to B or I of the one before."""
    work = work_programs(roles)
    for stage, programs in work.items():
        for kind, program in programs.items():
            to = ACTIONS[kind].to
            others = work.get(stage + to, {}) if to else {}
            yield from ((program, others[other]) for other in kinds_to(to) if other in others)


def with_idle(role: str, programs: Mapping[str, Program], purpose: Purpose) -> dict[str, Program]:
    """Return the programs of a role for a purpose, with an empty program for each kind of action that the purpose
    leaves out: so checks of a training step apply to inference and evaluation too."""
    complete = dict(programs)
    idle = [row for row in step_kinds() if row.program and not row.optional and not row.serves(purpose)]
    for key, program in programs.items():
        if program.action == FORWARD:
            for row in idle:
                staged = row.program == "stage"
                at = key.removesuffix(FORWARD) + row.kind if staged else row.kind
                function = Function("backward" if staged else row.kind.lower(), (), (), ())
                owner = {"stage": program.role, "role": role, "step": SINGLE}[row.program]
                complete[at] = Program(owner, row.kind, program.mesh, (function,))
    return complete
