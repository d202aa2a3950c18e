"""The communication contract: every collective of a step, numbered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..layout.collectives import COLLECTIVES, payload_bytes
from ..program.actions import ACTIONS, PHASES, step_kinds
from ..program.cost import local_bytes
from ..program.program import Function, Origin, Program, Ref
from ..program.roles import Role, stage_key


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective as it runs. All ranks of its group must run the same one at the same place."""

    op: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    phase: str
    origin: Origin


def messages(program: Program) -> list[Communication]:
    """The collectives of one run of a program, in order."""
    return list(_walk(program, program.main, None))


def _walk(program: Program, function: Function, caller: Origin | None) -> Iterator[Communication]:
    values = function.values()
    for line in function.lines:
        if line.calls_function:
            yield from _walk(program, program.function(line.op), line.origin)
        row = COLLECTIVES.get(line.op)
        if row is None or not row.communicates:
            continue
        source, *options = line.args
        axes = row.axes(options)
        if not axes or not isinstance(source, Ref):
            continue
        type_ = values[source.name].type
        size = payload_bytes(line.op, type_.local(program.mesh), type_.dtype.itemsize)
        origin = line.origin
        if caller is not None and ".*" in origin.module:
            origin = replace(origin, module=caller.module + origin.module.split(".*", 1)[1])
        dtype = str(type_.dtype).removeprefix("torch.")
        axes = program.mesh.joined(axes)
        yield Communication(line.op.removeprefix("parc."), axes, dtype, size, ACTIONS[program.action].phase, origin)


def communication_table(role: Role) -> list[dict[str, Any]]:
    """The report's rows of a role, by phase: each collective once, with how often a step runs it."""
    times = {name: sum(a.program_in(role.programs) == name for a in role.actions) for name in role.programs}
    counted = [
        (times[name], message)
        for name, program in sorted(role.programs.items(), key=_place)
        for message in (*messages(program), *_sent(name, program, role))
    ]
    counted.sort(key=lambda row: PHASES.index(row[1].phase))
    return [
        {
            "number": number, "op": message.op, "axis": ",".join(message.axes), "phase": message.phase,
            "role": role.name, "bytes": message.bytes, "count_per_step": count, "dtype": message.dtype,
            "module": message.origin.module, "line": message.origin.plan,
        }
        for number, (count, message) in enumerate(counted)
    ]  # fmt: skip


def _place(item: tuple[str, Program]) -> tuple[int, int]:
    """Return the sort key that puts programs in the order in which a step runs them, with those of several stages in
    order. Files have another order."""
    name, program = item
    order = [row.kind for row in step_kinds()]
    return order.index(program.action), int("".join(filter(str.isdigit, name)) or 0)


def _sent(key: str, program: Program, role: Role) -> Iterator[Communication]:
    """Yield the messages of a stage to its neighbour, where that lies on another role."""
    values, (stage, _) = program.main.values(), stage_key(key) or (0, "")
    if stage + ACTIONS[program.action].to in role.stages:
        return
    for name in program.main.returned("sent").values():
        type_ = values[name].type
        size = local_bytes(type_, program)
        dtype = str(type_.dtype).removeprefix("torch.")
        yield Communication("send", (role.axis,), dtype, size, ACTIONS[program.action].phase, Origin())
