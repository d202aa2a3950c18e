"""The checker of messages: what is on its way is awaited once before anything reads it, and tensors of one message
travel together."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..layout.collectives import COLLECTIVES, MESSAGE, WAIT
from ..program.actions import REDUCE
from ..program.binding import Binding
from ..program.plain import on_their_way
from ..program.program import Fault, Function
from ..program.roles import Programs


def check_messages(programs: Programs, microbatches: int) -> Iterator[Fault]:
    """Find messages of a role out of order or out of one piece, and values that are read on their way, or awaited
    without being on it. Only the gradients that a last backward returns may be awaited elsewhere, in REDUCE; it must
    have added them to those of the other microbatches, if there are several."""
    coming = {key for program in programs.values() for key in on_their_way(program)}
    for program in programs.values():
        for function in program.functions:
            where = f"{program.role}.{program.action} {function.name}"
            left = coming if function is program.last else ()
            given = coming if program.action == REDUCE else ()
            for name, problem in (*_number_faults(function), *_await_faults(function, given, left)):
                yield Fault("communication", f"{where}: {name}", problem)
        if (last := program.last) is not None:
            before = last.bound("gradient").keys()
            usual = dict(program.main.returns)
            summed = {key.name for key, name in last.returns if key.kind == "gradient" and name != usual.get(key)}
            for name in sorted(before if microbatches == 1 else summed - before):
                where = f"{program.role}.{program.action} {last.name}: {name}"
                yield Fault("types", where, f"is not summed over {microbatches} microbatches")


def _number_faults(function: Function) -> Iterator[tuple[str, str]]:
    last, open_message = 0, None
    for line in function.lines:
        number = dict(line.kwargs).get(MESSAGE) if line.op in COLLECTIVES else None
        if number is None:
            open_message = None
            continue
        alike = line.op, line.args[1], line.made[0].type.dtype
        if number == last and open_message != alike:
            yield line.made[0].name, f"does not travel like the rest of message {number}"
        elif number not in (last, last + 1) or not COLLECTIVES[line.op].communicates:
            yield line.made[0].name, f"is in message {number} behind message {last}"
        last, open_message = number, alike


def _await_faults(
    function: Function, given: Collection[Binding], left: Collection[Binding]
) -> Iterator[tuple[str, str]]:
    """Find wrong awaits in a function. The parameters bound to ``given`` are on their way when it begins, and results
    bound to ``left`` may be when it ends."""
    coming = {line.made[0].name for line in function.lines if MESSAGE in dict(line.kwargs)}
    coming.update(value.name for value in function.parameters if value.binding in given)
    awaited: set[str] = set()
    for line in function.lines:
        for name in line.uses:
            if line.op == WAIT and (name not in coming or name in awaited):
                yield name, "is awaited, but is not on its way"
            elif line.op != WAIT and name in coming:
                yield name, f"is read by `{line.op}` on its way"
            awaited.update([name] if line.op == WAIT else [])
    elsewhere = {name for key, name in function.returns if key in left} - awaited
    returned = {name for _, name in function.returns} - elsewhere
    for name in sorted((coming - awaited - elsewhere) | (coming & returned)):
        yield name, "is never awaited"
