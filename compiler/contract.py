"""The communication contract: every collective of a step, numbered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from .actions import Action
from .collectives import COLLECTIVES, payload_bytes
from .program import Function, Origin, Program, Ref
from .verify import Fault

_PHASES = {"COUNT": "forward", "SCALE": "forward", "F": "forward", "B": "backward", "REDUCE": "step", "STEP": "step"}


@dataclass(frozen=True, slots=True)
class Message:
    """One collective as it runs: all ranks of a group must meet in it alike."""

    op: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    phase: str
    origin: Origin


def messages(program: Program, action: str) -> list[Message]:
    """The collectives of one run of a program, in order."""
    return list(_walk(program, program.main, action, None))


def _walk(program: Program, function: Function, action: str, caller: Origin | None) -> Iterator[Message]:
    values = function.values()
    for line in function.lines:
        if line.calls_function:
            yield from _walk(program, program.function(line.op), action, line.origin)
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
        yield Message(line.op.removeprefix("parc."), axes, dtype, size, _PHASES[action], origin)


def step_messages(programs: Mapping[str, Program], actions: Sequence[Action]) -> list[Message]:
    """The collectives of a whole step of a role, in the order of its action list."""
    once = {name: messages(program, name) for name, program in programs.items()}
    return [message for action in actions for message in once.get(action.kind, ())]


def check_contract(roles: Mapping[str, Sequence[Message]]) -> list[Fault]:
    """All roles that meet over some axes do so in the same order, with the same operators, types and sizes.

    Ranks of one role run the same programs, so they agree by construction; ranks that differ along an axis of a
    collective may be of different roles, and then must agree too.
    """
    faults = []
    names = list(roles)
    for first, second in pairwise(names):
        ours, theirs = ([replace(m, origin=Origin()) for m in roles[name]] for name in (first, second))
        if ours != theirs:
            index = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            faults.append(Fault("communication", f"{first}, {second}", f"message {index} of the step differs"))
    return faults


def communication_table(programs: Mapping[str, Program], actions: Sequence[Action], role: str) -> list[dict[str, Any]]:
    """The report's rows: each collective once, with how often a step runs it."""
    times = {name: sum(action.kind == name for action in actions) for name in programs}
    rows = []
    number = 0
    for name in ("COUNT", "SCALE", "F", "B", "REDUCE"):
        for message in messages(programs[name], name) if name in programs else ():
            rows.append({
                "number": number, "op": message.op, "axis": ",".join(message.axes), "phase": message.phase,
                "role": role,
                "bytes": message.bytes, "count_per_step": times[name], "dtype": message.dtype,
                "module": message.origin.module, "line": message.origin.plan,
            })  # fmt: skip
            number += 1
    return rows
