"""The checker of stages: neighbours agree on their messages, and roles sum each value among themselves exactly once.

Everything else is proved of the step that the roles' programs join to (``roles.join``), where nothing is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from ..layout.collectives import COLLECTIVES
from ..layout.mesh import Mesh
from ..ops.rules import facts
from ..program.actions import ACTIONS, AVERAGING, BACKWARD, FORWARD, REDUCE, UNSHARD, step_kinds
from ..program.binding import GRAD_NORM, LOSS, UNSCALE, Binding
from ..program.program import Fault, Program, Value
from ..program.roles import JoinFault, Programs, StageWork, neighbours, ranks_of, stage_key, work_programs
from .scaling import scaled_once

AMONG = "parc.all_reduce_among"


def check_stages(roles: Mapping[str, Programs], mesh: Mesh, axis: str) -> list[Fault]:
    """Return the faults of stages. A stage's work must lie on one role, and each role must have as many stages. A stage
    must receive what its neighbour sends, of the same type and in the same order. B must read values that F of its own
    stage saved. REDUCE must sum each gradient over exactly the roles that have it, and the norm over all, with each
    parameter once in it; LOSS must sum the loss over all."""
    try:
        work, places = work_programs(roles), Counter(ranks_of(roles))
    except JoinFault as fault:
        return [Fault("types", "step", str(fault))]
    faults = [*_place_faults(roles, mesh, axis)]
    if len({places[rank] for rank in range(len(roles))}) > 1:
        faults.append(Fault("types", "step", f"{len(work)} stages do not lie on the roles, the same number on each"))
    for sender, receiver in neighbours(roles):
        faults += _message_faults(sender, receiver)
    ends = [(program, side) for stage, programs in work.items() for kind, program in programs.items()
            for side, to in (("sent", ACTIONS[kind].to), ("received", -ACTIONS[kind].to))
            if not to or stage + to not in work]  # fmt: skip
    for program, side in ends:
        keys = [*program.main.bindings, *(key for key, _ in program.main.returns)]
        faults += [Fault("types", f"{program.role}.{program.action} {key}", "goes beyond the ends of the pipeline")
                   for key in keys if key.kind == side]  # fmt: skip
    loss_scaled = any(UNSCALE in own[REDUCE].main.bindings for own in roles.values())
    for programs in work.values():
        forward, backward = programs[FORWARD], programs[BACKWARD]
        for name in sorted(forward.main.returned("saved").keys() ^ backward.main.bound("saved").keys()):
            where = f"{forward.role} {Binding('saved', name)}"
            faults.append(Fault("types", where, "is saved or read in this stage, not both"))
        for program in (program for kind, program in programs.items() if "gradient" in ACTIONS[kind].returns):
            faults += scaled_once(program, f"{program.role}.{program.action}", loss_scaled)
    faults += _buffer_faults(work)
    faults += _meeting_faults(roles, axis)
    return faults or [*_reduce_faults(roles, mesh, axis)]


def _buffer_faults(work: Mapping[int, StageWork]) -> Iterator[Fault]:
    """Find buffers that one stage updates and another one reads."""
    for stage, programs in work.items():
        updated = {key for key, _ in programs[FORWARD].main.returns if key.kind == "buffer"}
        for other in (program for at, own in work.items() if at != stage for program in own.values()):
            for key in sorted(updated.intersection(other.main.bindings)):
                yield Fault("types", f"{other.role}.{other.action} {key}", f"is updated in stage {stage}")


def _meeting_faults(roles: Mapping[str, Programs], axis: str) -> Iterator[Fault]:
    """Find collectives between roles that are not allowed. Only programs that all roles run after the work may sum
    among roles, because other programs do not run at the same time."""
    for programs in roles.values():
        for key, program in programs.items():
            for function in program.functions:
                for line in function.lines:
                    row = COLLECTIVES.get(line.op)
                    axes = {program.mesh.owner(one) for one in row.axes(line.args[1:])} if row is not None else set()
                    may = line.op == AMONG and axes == {axis} and key in _together(programs)
                    if (axis in axes or line.op == AMONG) and not may:
                        yield Fault("communication", f"{program.role}.{key}", f"has `{line.op}` over `{axis}`")


def _together(programs: Programs) -> list[str]:
    """Return the programs that all roles run after their work, in one order."""
    return [row.kind for row in step_kinds("after") if row.program == "role" and row.kind in programs]


def _place_faults(roles: Mapping[str, Programs], mesh: Mesh, axis: str) -> Iterator[Fault]:
    ranks = mesh.size(axis)
    if list(roles) != [f"{axis}{rank}" for rank in range(ranks)]:
        yield Fault("types", "step", f"its roles are {', '.join(roles)}, not those of the {ranks} ranks of `{axis}`")
    for name, programs in roles.items():
        for key, program in programs.items():
            stage, kind = stage_key(key) or (0, key)
            expected = name if kind in ACTIONS and ACTIONS[kind].program == "role" else f"stage{stage}"
            if program.role != expected or program.mesh != mesh or program.action != kind:
                yield Fault("types", f"{name} {key}", f"says that it is {program.action} of {program.role}")


def _message_faults(sender: Program, receiver: Program) -> Iterator[Fault]:
    values = sender.main.values()
    keys = {v and v.name for line in sender.main.lines if line.op == "parc.stream_key.default" for v in line.results}
    for key, name in sender.main.returns:
        if key.kind == "sent" and name in keys:
            yield Fault("communication", f"{sender.role} {key}", "is a random stream's key, which lies on the CPU")
    sent = [(key.name, name, values[name].type) for key, name in sender.main.returns if key.kind == "sent"]
    received = [(value.binding.name, value.name, value.type) for value in receiver.main.parameters
                if value.binding is not None and value.binding.kind == "received"]  # fmt: skip
    if sent == received and all(key == name for key, name, _ in sent):
        return
    names, others = ([row[0] for row in rows] for rows in (sent, received))
    where = f"{sender.role}.{sender.action} to {receiver.role}.{receiver.action}"
    if names != others:
        yield Fault("communication", where, f"sends {_listed(names)}, where {_listed(others)} is received")
    else:
        row = next(a for a, b in zip(sent, received, strict=True) if a != b or a[0] != a[1])
        yield Fault("communication", where, f"`{row[0]}` has another type or name where it is received")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _reduce_faults(roles: Mapping[str, Programs], mesh: Mesh, axis: str) -> Iterator[Fault]:
    """Find wrong sums among roles, followed from the gradients of each role's stages."""
    owners: dict[str, list[int]] = {}
    makes = [
        {key for name, program in programs.items() if stage_key(name) for key in program.main.returned("gradient")}
        for programs in roles.values()
    ]
    trained = set().union(*makes)
    for rank, (gradients, programs) in enumerate(zip(makes, roles.values(), strict=True)):
        for name in sorted(gradients ^ programs[REDUCE].main.bound("gradient").keys()):
            yield Fault("types", f"{programs[REDUCE].role}.REDUCE {name}", "is no gradient of the role's stages")
        readers = [program for program in programs.values() if program.action in (UNSHARD, FORWARD)]
        reads = {name for program in readers for name in program.main.bound("parameter")}
        for name in gradients | (reads & trained):  # a role that only reads it keeps it up to date
            owners.setdefault(name, []).append(rank)
    everyone = tuple(range(mesh.size(axis)))
    counted = Counter[_Part]()
    for rank, programs in enumerate(roles.values()) if trained else ():  # else there is no norm, and nothing to sum
        program = programs[REDUCE]
        parts, made_up = _parts(program, makes[rank])
        if made_up:
            yield Fault(
                "types", f"{program.role}.REDUCE {made_up[0]}", "is no part of what the roles sum, and not zero"
            )
        ends = dict(program.main.returns)
        lines = program.main.makers
        for name in (name for name, found in owners.items() if rank in found):
            end, alone = ends.get(Binding("gradient", name), ""), len(owners[name]) == 1
            last = alone or (end in lines and lines[end].op == AMONG)
            if not last or parts.get(end) != Counter([_summed(name, owners)]):
                yield Fault(
                    "types", f"{program.role}.REDUCE {name}", f"is not summed once over the roles {owners[name]}"
                )
        root = lines.get(ends.get(GRAD_NORM, ""))
        square = next(iter(root.uses), "") if root is not None and facts(root.op).power == 0.5 else ""
        line = lines.get(square)
        if line is None or line.op != AMONG or tuple(line.args[2]) != everyone:
            yield Fault("types", f"{program.role}.REDUCE {GRAD_NORM}", "is not summed once over all roles")
        else:
            counted += parts[line.uses[0]]
    for name in sorted(owners):
        times = counted.pop(_summed(name, owners), 0)
        if times != 1:
            yield Fault("types", f"REDUCE {name}", f"counts {times} times in the gradients' norm, not once")
    for key, _ in counted:
        yield Fault("types", f"REDUCE {key}", "counts in the gradients' norm as it is not")
    yield from _loss_faults(roles, everyone)
    yield from _order_faults(roles, axis)
    yield from _metric_faults(roles, everyone)


def _loss_faults(roles: Mapping[str, Programs], everyone: tuple[int, ...]) -> Iterator[Fault]:
    """Find a loss that is not the sum over all roles of that of one of them and zeros."""
    losses = Counter[_Part]()
    if not any(LOSS in dict(program.main.returns) for programs in roles.values() for program in programs.values()):
        return  # programs of inference
    for programs in roles.values():
        program = programs[AVERAGING]
        if (LOSS in program.main.bindings) != any(
            stage_key(key) and LOSS in dict(own.main.returns) for key, own in programs.items()
        ):
            yield Fault("types", f"{program.role}.LOSS {LOSS}", "is read or made by the role's stages, not both")
        parts, made_up = _parts(program, ())
        if made_up:
            yield Fault("types", f"{program.role}.LOSS {made_up[0]}", "is no part of what the roles sum, and not zero")
        lines = program.main.makers
        line = lines.get(dict(program.main.returns).get(LOSS, ""))
        if line is None or line.op != AMONG or tuple(line.args[2]) != everyone:
            yield Fault("types", f"{program.role}.LOSS {LOSS}", "is not summed once over all roles")
        else:
            losses += parts[line.uses[0]]
    if losses != Counter([(LOSS, ())]):
        yield Fault("types", "LOSS loss", "is not the loss of one role")


def _metric_faults(roles: Mapping[str, Programs], everyone: tuple[int, ...]) -> Iterator[Fault]:
    """Find metrics that are not one sum over all roles, in each of them."""
    for programs in roles.values():
        for kind in _together(programs):
            main = programs[kind].main
            for label, name in main.returned("metric").items():
                line = main.makers.get(name)
                if line is None or line.op != AMONG or tuple(line.args[2]) != everyone:
                    where = f"{programs[kind].role}.{kind} {label}"
                    yield Fault("types", where, "is not summed once over all roles")


def _order_faults(roles: Mapping[str, Programs], axis: str) -> Iterator[Fault]:
    """Find two roles that do not meet in the same sums in the same order."""
    lines = [[line for kind in _together(programs) for line in programs[kind].main.lines if line.op == AMONG]
             for programs in roles.values()]  # fmt: skip
    meetings = [[(line.args[2], str(line.results[0] and line.results[0].type)) for line in own] for own in lines]
    for second in range(len(meetings)):
        for first in range(second):
            ours, theirs = ([m for m in meetings[rank] if {first, second} <= set(m[0])] for rank in (first, second))
            if ours != theirs:
                yield Fault(
                    "communication", f"{axis}{first}, {axis}{second}", "meet in other sums, or in another order"
                )


_Part = tuple[Binding, tuple[int, ...]]
"""The loss or a gradient, and the roles over which it was summed, with the roles of every such sum."""


def _summed(name: str, owners: Mapping[str, list[int]]) -> _Part:
    """Return the gradient as a part that is summed over its owners, if there are several."""
    return Binding("gradient", name), tuple(owners[name]) if len(owners[name]) > 1 else ()


def _parts(program: Program, makes: Collection[str]) -> tuple[dict[str, Counter[_Part]], list[str]]:
    """Count, for each value of REDUCE, how often the loss and each gradient is in it. The second result names values
    that are summed over roles though they are neither made of these nor zero. For a gradient that is not among those it
    ``makes``, a role adds zeros."""
    parts = {v.name: _source(v) for v in program.main.parameters}
    zeros: set[str] = set()
    others = {value: key for key, value in program.main.returns if key.kind == "gradient" and key.name not in makes}
    made_up: list[str] = []
    for line in program.main.lines:
        uses = line.uses
        results = [value.name for value in line.results if value is not None]
        counts = sum((parts[use] for use in uses), Counter[_Part]())
        if facts(line.op).makes_zeros(line.args):
            zeros.update(results)
        if line.op == AMONG:
            if not counts and uses[0] not in zeros:
                made_up += uses
            if not counts and results[0] in others:
                counts = Counter([(others[results[0]], ())])
            counts = Counter({(key, (*roles, *line.args[2])): times for (key, roles), times in counts.items()})
        parts.update(dict.fromkeys(results, counts))
    return parts, made_up


def _source(value: Value) -> Counter[_Part]:
    binding = value.binding
    return Counter([(binding, ())] if binding is not None and binding.kind in ("gradient", "loss") else ())
