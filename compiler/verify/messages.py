"""The checker of messages: what is on its way is awaited once before anything reads it, and tensors of one message
travel together."""

from __future__ import annotations

from collections.abc import Iterator

from ..layout.collectives import COLLECTIVES, WAIT
from ..program.faults import Fault
from ..program.program import Function, Program
from .lines import MESSAGE


def check_messages(program: Program) -> Iterator[Fault]:
    """Find messages out of order or out of one piece, and values that are read on their way, or awaited without
    being on it."""
    for function in program.functions:
        where = f"{program.role}.{program.action} {function.name}"
        for name, problem in (*_number_faults(function), *_await_faults(function)):
            yield Fault("communication", f"{where}: {name}", problem)


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


def _await_faults(function: Function) -> Iterator[tuple[str, str]]:
    coming = {line.made[0].name for line in function.lines if MESSAGE in dict(line.kwargs)}
    awaited: set[str] = set()
    for line in function.lines:
        for name in line.uses():
            if line.op == WAIT and (name not in coming or name in awaited):
                yield name, "is awaited, but is not on its way"
            elif line.op != WAIT and name in coming:
                yield name, f"is read by `{line.op}` on its way"
            awaited.update([name] if line.op == WAIT else [])
    returned = {name for _, name in function.returns}
    for name in sorted(coming - awaited | (coming & returned)):
        yield name, "is never awaited"
