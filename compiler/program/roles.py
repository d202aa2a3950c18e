"""Roles: what ranks at one coordinate of the pipeline's axis run; and the step of all roles put together again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ..ops.rules import facts
from .actions import Action
from .binding import GRAD_NORM, LOSS, Binding
from .program import Function, Line, Program, Ref, Value, map_references

Programs = Mapping[str, Program]
"""The programs of one role: ``COUNT``, ``SCALE``, ``REDUCE``, and for work ``F`` and ``B``, or ``2F`` and ``2B`` where
there are stages."""
SINGLE = "stage0"
"""The role of a build without stages, and of programs that all roles share."""


@dataclass(frozen=True, slots=True)
class Role:
    """The ranks at one coordinate of the pipeline's axis: their programs, and what they do in a step in order."""

    name: str
    programs: Programs
    actions: tuple[Action, ...]

    @property
    def stages(self) -> list[int]:
        """The stages whose work it does."""
        return sorted({action.stage for action in self.actions if action.kind == "F"})

    @property
    def axis(self) -> str:
        """The pipeline's axis; nothing where there are no stages."""
        return "" if "F" in self.programs else self.name.removesuffix(str(self.stages[0]))


class JoinFault(ValueError):
    """Programs of stages that are no pieces of one step."""


def work_programs(roles: Mapping[str, Programs]) -> dict[int, tuple[Program, Program]]:
    """F and B of every stage, in order.

    Raises:
        JoinFault: a stage has one of them alone, or a number is missing.
    """
    found: dict[int, dict[str, Program]] = {}
    for programs in roles.values():
        for key, program in programs.items():
            if key[:-1].isdigit():
                found.setdefault(int(key[:-1]), {})[key[-1]] = program
    if sorted(found) != list(range(len(found))) or any(set(pair) != {"F", "B"} for pair in found.values()):
        raise JoinFault(f"stages {sorted(found)} are not all there with their F and B")
    return {stage: (found[stage]["F"], found[stage]["B"]) for stage in sorted(found)}


def join_roles(roles: Mapping[str, Programs]) -> dict[str, Program]:
    """The programs of a step as if one role ran it: stages one after the other, nothing sent.

    A gradient of several stages is their sum, and what roles sum among themselves in REDUCE is a sum there. What is
    wrong with what stages hand one another is not seen here.

    Raises:
        JoinFault: the programs are no pieces of one step.
    """
    if len(roles) == 1:
        return dict(next(iter(roles.values())))
    work, first = work_programs(roles), next(iter(roles.values()))
    for name, missing in ((name, {"SCALE", "REDUCE"} - programs.keys()) for name, programs in roles.items()):
        if missing:
            raise JoinFault(f"{name} has no {', '.join(sorted(missing))}")
    forward = _chain([pair[0] for pair in work.values()])
    backward = _chain([pair[1] for pair in reversed(work.values())])
    shared = {key: first[key] for key in ("COUNT", "SCALE") if key in first}
    reduce = _joined_reduce([programs["REDUCE"] for programs in roles.values()])
    return {**shared, "F": forward, "B": backward, "REDUCE": reduce}


def _chain(programs: Sequence[Program]) -> Program:
    """Main functions one after the other. Several stages may save one value, or make the key of one random stream, by
    the same line; gradients of one name are summed."""
    functions: dict[str, Function] = {}
    parameters: dict[Binding | None, Value] = {}
    lines: list[Line] = []
    makers: dict[str, Value | Line] = {}
    returns: dict[Binding, str] = {}
    for program in programs:
        for function in program.functions[:-1]:
            if functions.setdefault(function.name, function) != function:
                raise JoinFault(f"`{function.name}` of {program.role} is another function in an earlier stage")
        for value in program.main.parameters:
            if value.kind == "received":
                if not isinstance(makers.get(value.name), Line):
                    raise JoinFault(f"{program.role}.{program.action} receives `{value.name}`, which no stage makes")
            elif makers.setdefault(value.name, value) != value or parameters.setdefault(value.binding, value) != value:
                raise JoinFault(f"`{value.binding}` of {program.role} is another value in an earlier stage")
        for line in program.main.lines:
            names = [value.name for value in line.results if value is not None]
            if not any(name in makers for name in names):
                lines.append(line)
                makers.update(dict.fromkeys(names, line))
            elif line.op != "parc.stream_key.default" or makers.get(names[0]) != line:
                raise JoinFault(f"{program.role}.{program.action} makes `{names[0]}`, which an earlier stage makes")
    types = {v.name: v.type for v in (*parameters.values(), *(v for line in lines for v in line.results if v))}
    for program in programs:
        for key, name in program.main.returns:
            if key.kind == "sent" or (key.kind == "saved" and returns.get(key) == name):
                continue
            if key in returns and (program.action == "F" or returns[key] == name):
                text = key.key_in(program.action)
                raise JoinFault(f"{program.role}.{program.action} returns `{text}`, which another stage returns too")
            if key in returns:
                fresh = next(f"tied_{number}" for number in count() if f"tied_{number}" not in types)
                types[fresh] = types[name]
                made = Value(fresh, types[name])
                lines.append(Line((made,), "aten.add.Tensor", (Ref(returns[key]), Ref(name))))
                name = fresh
            returns[key] = name
    main = Function(programs[0].main.name, tuple(parameters.values()), tuple(lines), tuple(returns.items()))
    return replace(programs[0], role=SINGLE, functions=(*functions.values(), main))


def _joined_reduce(programs: Sequence[Program]) -> Program:
    """REDUCE of all roles in one: gradients of the first role that makes them, which the others make by the same lines;
    the loss and the norm's square are sums over roles."""
    parameters: dict[Binding | None, Value] = {}
    lines: list[Line] = []
    returns: dict[Binding, str] = {}
    summed: dict[Binding, list[str]] = {}
    values: dict[str, Value] = {}
    ways: dict[Binding, object] = {}
    for index, program in enumerate(programs):
        names: dict[str, str] = {}
        for value in program.main.parameters:
            names[value.name] = parameters.setdefault(value.binding, replace(value, name=f"{value.name}_{index}")).name
        ends, made = dict(program.main.returns), set(program.main.bindings)
        for line in program.main.lines:
            if line.op == "parc.all_reduce_among" and isinstance(line.args[0], Ref) and line.results[0] is not None:
                names[line.results[0].name] = names[line.args[0].name]
                continue
            results = tuple(v and replace(v, name=f"{v.name}_{index}") for v in line.results)
            names.update((v.name, f"{v.name}_{index}") for v in line.results if v is not None)
            values.update((v.name, v) for v in results if v is not None)
            lines.append(_renamed(replace(line, results=results), names))
        for key, name in ends.items():
            if key in (LOSS, GRAD_NORM):
                summed.setdefault(key, []).append(names[name])
            elif key in made:
                if ways.setdefault(key, way := _way(program.main, name)) != way:
                    raise JoinFault(f"{program.role}.REDUCE makes `{key}` otherwise than an earlier role")
                returns.setdefault(key, names[name])
    squares = [line for line in lines if line.results[0] and line.results[0].name in summed.get(GRAD_NORM, ())]
    if len(summed.get(LOSS, ())) != len(programs) or len(squares) != len(programs):
        raise JoinFault("a role's REDUCE makes no loss or no norm of gradients")
    returns[LOSS] = _added(summed[LOSS], values, lines, "loss")
    lines = [line for line in lines if line not in squares]
    inner = [name for line in squares for name in line.uses()]
    total = _added(inner, values, lines, "square")
    root = replace(values[summed[GRAD_NORM][0]], name="grad_norm")
    lines.append(replace(squares[0], results=(root,), args=(Ref(total),)))
    returns[GRAD_NORM] = "grad_norm"
    main = Function("reduce", tuple(parameters.values()), _read(lines, returns.values()), tuple(returns.items()))
    return replace(programs[0], role=SINGLE, functions=(main,))


def _way(function: Function, name: str) -> object:
    """How a value is made of a function's parameters, whatever values are called."""
    known: dict[str, object] = {value.name: value.binding for value in function.parameters}
    for line in function.lines:
        made = line.op, map_references([*line.args, *line.kwargs], known.__getitem__)
        known.update((v.name, (index, made)) for index, v in enumerate(line.results) if v is not None)
    return known[name]


def _read(lines: Sequence[Line], returned: Iterable[str]) -> tuple[Line, ...]:
    """Lines whose results somebody reads: of a gradient that several roles have, those of the first."""
    wanted = set(returned)
    kept = []
    for line in reversed(lines):
        if any(value is not None and value.name in wanted for value in line.results):
            wanted.update(line.uses())
            kept.append(line)
    return tuple(reversed(kept))


def _renamed(line: Line, names: Mapping[str, str]) -> Line:
    def new(name: str) -> Ref:
        return Ref(names[name])

    args = tuple(map_references(item, new) for item in line.args)
    return replace(line, args=args, kwargs=tuple((key, map_references(item, new)) for key, item in line.kwargs))


def _added(names: Sequence[str], values: dict[str, Value], lines: list[Line], base: str) -> str:
    """The sum of what roles have, but for zeros."""
    zeros = {value.name for line in lines if facts(line.op).makes_zeros(line.args) for value in line.made}
    parts = [name for name in names if name not in zeros] or names[:1]
    if len(parts) == 1:
        return parts[0]
    row = replace(values[parts[0]], name=f"{base}_stack", type=replace(values[parts[0]].type, shape=(len(parts),)))
    total = replace(values[parts[0]], name=f"{base}_sum")
    lines.append(Line((row,), "aten.stack.default", ([Ref(name) for name in parts],)))
    lines.append(Line((total,), "aten.sum.default", (Ref(row.name),)))
    values.update({row.name: row, total.name: total})
    return total.name


def group(programs: Iterable[Program]) -> dict[str, dict[str, Program]]:
    """Programs by role and key.

    Raises:
        JoinFault: they are not the programs of the roles of one build.
    """
    found = list(programs)
    roles = {program.role for program in found if program.action == "REDUCE"}
    if roles <= {SINGLE}:
        return {SINGLE: {program.action: program for program in found}}
    axis = next((name[:-1] for name in roles if roles == {f"{name[:-1]}{rank}" for rank in range(len(roles))}), "")
    made: dict[str, dict[str, Program]] = {f"{axis}{rank}": {} for rank in range(len(roles))}
    for program in found:
        stage = re.fullmatch(r"stage([0-9]+)", program.role)
        if program.action in ("F", "B") and stage is not None:
            made[f"{axis}{int(stage[1]) % len(roles)}"][f"{stage[1]}{program.action}"] = program
        elif program.action in ("COUNT", "SCALE"):
            for own in made.values():
                own[program.action] = program
        elif program.role in made:
            made[program.role][program.action] = program
        else:
            raise JoinFault(f"{program.role}.{program.action} is of no role: there are {', '.join(made)}")
    return made


def neighbours(roles: Mapping[str, Programs]) -> Iterator[tuple[Program, Program]]:
    """What sends and what receives: F of each stage and the next, B of each and the one before."""
    work = work_programs(roles)
    for stage in range(len(work) - 1):
        yield work[stage][0], work[stage + 1][0]
        yield work[stage + 1][1], work[stage][1]
