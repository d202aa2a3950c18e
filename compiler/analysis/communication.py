"""The communication of a step: every collective that its programs run, and what each costs and carries."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..layout.collectives import COLLECTIVES, MESSAGE, RINGS, SUMS, WAIT, axes_of, payload_bytes
from ..layout.mesh import Mesh
from ..layout.placement import TensorType
from ..ops.rules import facts
from ..program.actions import ACTIONS, FORWARD, PHASES, REDUCE, UNSHARD, kinds_to, step_kinds
from ..program.binding import PARAMETERS
from ..program.blocks import complete, working
from ..program.plain import on_their_way
from ..program.program import Function, Line, Origin, Program, Ref, Value
from ..program.roles import Role, stage_key
from .dataflow import converts
from .liveness import local_bytes

Carried = Literal["weights", "gradients", "activations", "numbers"]
"""The payload of a collective. Numbers are the count of targets, the loss, the gradient norm, experts' loads and their
like."""


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective as it runs. All ranks of its group must run the same one at the same place. ``bytes`` is a rank's
    operand, ``wire_bytes`` what the rank sends in a ring. It is ``hidden``, overlapped with computation, if a product
    or an attention lies between its line and the one that waits for it, or the end of the program; for weights that
    UNSHARD gathers, between the beginning of the role's forwards and the line that waits."""

    op: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    wire_bytes: int
    phase: str
    origin: Origin
    carries: Carried
    hidden: bool = False
    once: bool = False
    """True where only the last microbatch has it: a reduction of accumulated gradients."""
    ranks: int = 2
    """The number of ranks that run it together."""


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """A collective with its line, which is ``lines[index]`` of a function. What a stage sends to a neighbour has no
    line: it is what its main function returns, and ``index`` is the number of that function's lines."""

    message: Communication
    program: Program
    function: Function
    index: int
    follows: bool = False
    """True where it travels in the message of the collective before it."""


def messages(program: Program) -> list[Communication]:
    """Return the collectives of one run of a program, in order; for backward, of that of the last microbatch."""
    return [placed.message for placed in _walk(program, program.mains[0], None)]


def _walk(
    program: Program, function: Function, caller: Origin | None, passed: Collection[str] = (),
    elsewhere: Collection[str] = (),
) -> Iterator[PlacedMessage]:  # fmt: skip
    """Yield the collectives of a function and of those that it calls. ``passed`` are the parameters that are weights of
    its ``caller``. ``elsewhere`` are the results of collectives that travel while another program computes."""
    values, number = function.values(), None
    hidden, weights = _overlapped(program, function).union(elsewhere), _weights(function, passed)
    for index, line in enumerate(function.lines):
        before, number = number, dict(line.kwargs).get(MESSAGE)
        if line.calls_function:
            called = program.function(line.op)
            pairs = zip(line.args, called.parameters, strict=True)
            inner = [value.name for item, value in pairs if isinstance(item, Ref) and item.name in weights]
            yield from _walk(program, called, line.origin, inner)
        row = COLLECTIVES.get(line.op)
        if row is None or not row.communicates:
            continue
        source, *options = line.args
        axes = row.axes(options)
        if not axes or not isinstance(source, Ref):
            continue
        type_ = values[source.name].type
        ranks = len(row.members(options) or ()) or math.prod(program.mesh.size(axis) for axis in axes)
        size = bytes_put_in(line, values, program.mesh, ranks)
        origin = line.origin
        if caller is not None:
            origin = replace(origin, module=complete(origin.module, caller.module))
        dtype = "int8" if row.packed else str(type_.dtype).removeprefix("torch.")
        once = function is program.last and line.made[0].name not in program.main.values()
        message = Communication(
            line.op.removeprefix("parc."), program.mesh.joined(axes), dtype, size, row.sent(size, ranks),
            ACTIONS[REDUCE if once else program.action].phase, origin, _payload(caller, source, type_, weights),
            line.made[0].name in hidden, once, ranks,
        )  # fmt: skip
        yield PlacedMessage(message, program, function, index, number is not None and number == before)


def bytes_put_in(line: Line, values: Mapping[str, Value], mesh: Mesh, ranks: int) -> int:
    """Return the bytes that a rank puts into the collective of a line among so many ranks."""
    there, rows = values[line.uses[0]].type.packed or (1, 1)
    sent = COLLECTIVES[line.op].travelling([values[name].type for name in line.uses])
    return sum(payload_bytes(line.op, t.local(mesh), t.dtype.itemsize, ranks) for t in sent) * there // rows


def _payload(caller: Origin | None, source: Ref, type_: TensorType, weights: set[str]) -> Carried:
    """Return the payload of an operand: all but weights are activations in blocks, and gradients in main functions."""
    if not type_.shape:
        return "numbers"
    if source.name in weights:
        return "weights"
    if caller is not None:
        return "activations"
    return "gradients" if type_.dtype.is_floating_point else "numbers"  # the loads of experts


def _weights(function: Function, passed: Collection[str]) -> set[str]:
    """Return a function's weights: its bound parameters, those ``passed`` to it, and what casts these or moves their
    entries."""
    kinds = (*PARAMETERS, "weight")
    bound = (value.name for value in function.parameters if value.binding is not None and value.binding.kind in kinds)
    weights = {*passed, *bound}
    for line in function.lines:
        if line.uses and weights.issuperset(line.uses) and (converts(line) or facts(line.op).moves):
            weights.update(value.name for value in line.made)
    return weights


def _overlapped(program: Program, function: Function) -> set[str]:
    """Return the results of collectives that travel while a product or an attention runs."""
    works = working(program)
    travelling: dict[str, bool] = {}
    hidden: set[str] = set()
    for line in function.lines:
        for name in line.uses:
            if travelling.pop(name, False):
                hidden.add(name)
        if line.op in works or facts(line.op).precision == "product":
            travelling = dict.fromkeys(travelling, True)
        if line.op in SUMS or MESSAGE in dict(line.kwargs):  # others are done where they stand
            travelling[line.made[0].name] = False
        if line.op in RINGS and not RINGS[line.op].carries_gradients:  # keys travel beside the attention of others
            hidden.add(line.made[0].name)
    return hidden.union(name for name, worked in travelling.items() if worked)


def _beside_forwards(programs: Sequence[Program]) -> set[str]:
    """Return the weights that UNSHARD gathers while forwards compute. ``programs`` are in running order."""
    coming = {key: name for program in programs if program.action == UNSHARD
              for key, name in on_their_way(program).items()}  # fmt: skip
    hidden, computing = set[str](), False
    for program in (program for program in programs if program.action == FORWARD):
        bound = {value.name: value.binding for value in program.main.parameters if value.binding in coming}
        works = working(program)
        for line in program.main.lines:
            if line.op == WAIT and line.uses[0] in bound:
                name = coming.pop(bound[line.uses[0]], None)
                hidden.update([name] if computing and name is not None else [])
            computing = computing or line.op in works or facts(line.op).precision == "product"
    return hidden


def placed_messages(role: Role) -> list[tuple[int, PlacedMessage]]:
    """Return the collectives of a role's step in the order of phases, each once, with how often a step runs it."""
    times = {name: sum(a.program_in(role.programs) == name for a in role.actions) for name in role.programs}
    programs = dict(sorted(role.programs.items(), key=_running_order))
    gathered = _beside_forwards([*programs.values()])
    counted: list[tuple[int, PlacedMessage]] = []
    for name, program in programs.items():
        elsewhere = gathered if program.action == UNSHARD else ()
        counted += ((1 if placed.message.once else times[name], placed)
                    for placed in _walk(program, program.mains[0], None, elsewhere=elsewhere))  # fmt: skip
        stage, kind = stage_key(name) or (0, "")
        alike = [f"{stage}{other}" for other in (kinds_to(ACTIONS[kind].to) if kind else ())]
        if name in [other for other in alike if other in programs][:1]:  # B and I of a stage send the same
            count = sum(times.get(other, 0) for other in alike)
            counted += ((count, placed) for placed in _sends(stage, program, role))
    return sorted(counted, key=lambda row: PHASES.index(row[1].message.phase))


def communication_table(role: Role) -> list[dict[str, Any]]:
    """Return the report's rows of a role, one for each of its placed messages and in their order. Tensors that travel
    together have the same ``message``: the number of the first one's row."""
    rows = list[dict[str, Any]]()
    for number, (count, placed) in enumerate(placed_messages(role)):
        message = placed.message
        rows.append(
            {
                "number": number, "op": message.op, "axis": ",".join(message.axes), "phase": message.phase,
                "role": role.name, "bytes": message.bytes, "wire_bytes": message.wire_bytes, "count_per_step": count,
                "message": rows[-1]["message"] if placed.follows else number, "ranks": message.ranks,
                "dtype": message.dtype, "carries": message.carries, "hidden": message.hidden,
                "module": message.origin.module, "line": message.origin.plan,
            }
        )  # fmt: skip
    return rows


def _running_order(named: tuple[str, Program]) -> tuple[int, int]:
    """Return the sort key that puts programs in the order in which a step runs them, stages in order. Files have
    another order."""
    name, program = named
    order = [row.kind for row in step_kinds()]
    return order.index(program.action), int("".join(filter(str.isdigit, name)) or 0)


def _sends(stage: int, program: Program, role: Role) -> Iterator[PlacedMessage]:
    """Yield what a stage sends to its neighbour, where that lies on another role."""
    values = program.main.values()
    if stage + ACTIONS[program.action].to in role.stages:
        return
    for name in program.main.returned("sent").values():
        type_ = values[name].type
        size = local_bytes(type_, program)
        dtype = str(type_.dtype).removeprefix("torch.")
        message = Communication(
            "send", (role.axis,), dtype, size, size, ACTIONS[program.action].phase, Origin(), "activations", True
        )
        yield PlacedMessage(message, program, program.main, len(program.main.lines))


def bytes_compressed_away(role: Role, mesh: Mesh, axis: str) -> int:
    """Return the bytes that a rank of a role sends less in a step because gradients are compressed over an axis; else
    it would send float32."""
    less = 0
    for count, placed in placed_messages(role):
        line = placed.function.lines[placed.index] if placed.message.carries == "gradients" else None
        if line is None or {axis} != {*map(mesh.owner, axes_of(line.args[1:]))}:
            continue
        row, type_ = COLLECTIVES[line.op], placed.function.values()[line.uses[0]].type
        if row.packed or type_.dtype == torch.float16:
            ranks = math.prod(map(mesh.size, axes_of(line.args[1:])))
            less += count * (row.sent(4 * math.prod(type_.local(mesh)), ranks) - placed.message.wire_bytes)
    return less
