"""Planted bugs of values in flight: texts that read a value before its await, and machines and backends that forget an
await, are late with it, or write over what is sent.

``python -m tests.planted_awaits`` prints the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any
from unittest.mock import patch

import torch

from parc.compiler.layout.collectives import COLLECTIVES, MESSAGE, RINGS, SUMS, WAIT
from parc.compiler.ops.rules import facts
from parc.compiler.program.program import Function, Line, Ref, map_references
from parc.runtime.backends.in_process import InProcess
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.model_run import Case
from parc.runtime.compare.simulate import compare
from parc.runtime.machine import execute, reuse
from parc.runtime.machine.reuse import LineLiveness
from tests.planted_builds import (
    COMPRESSED_BUILDS,
    CONTEXT_BUILDS,
    EXPERT_BUILDS,
    GoodBuild,
    Row,
    good_build,
    judge,
    table_text,
)
from tests.planted_edits import with_function
from tests.planted_mutators import Mutant, sites

AWAITING_BUILDS = (
    "gpt dp=2, zero 3", "llama dp=2, tp=2, split sequences", COMPRESSED_BUILDS[1], EXPERT_BUILDS[0], CONTEXT_BUILDS[1],
)  # fmt: skip
"""Builds with messages of every kind."""


# ---- in texts


def wrong_awaits(build: GoodBuild) -> Iterator[Mutant]:
    """Leave out an await, or put it behind the first line that reads its value."""
    programs = build.case.programs
    for site in sites(programs, WAIT):
        coming, name = site.source, site.result.name
        early = {**programs, **site.replaced(read=coming.name)}
        yield Mutant("leave out an await", site.action, site.named("leave out"), partial(dict, early))
        lines = [*site.function.lines]
        reader = next((at for at, line in enumerate(lines) if name in line.uses), None)
        if reader is not None:

            def instead(read: str, name: str = name, coming: Ref = coming) -> Ref:
                return coming if read == name else Ref(read)

            lines[reader] = replace(lines[reader], args=map_references(lines[reader].args, instead))
            lines.insert(reader, lines.pop(site.index))
            late = with_function(programs, site.action, replace(site.function, lines=tuple(lines)))
            yield Mutant("await behind a reader", site.action, site.named("move"), partial(dict, late))


# ---- in the machine and the backend


@dataclass(frozen=True)
class Planted:
    """A bug that ``plant`` puts into the machine or the backend, for a block."""

    kind: str
    what: str
    plant: Callable[[], AbstractContextManager[object]]


Sent = tuple[str, object]
"""A function, and what it starts: the number of a message, or the name of a collective's result."""


def _liveness(sent: list[Sent], late: Sent | None, function: Function, *options: Any) -> Sequence[LineLiveness]:
    """Return the liveness of a function's lines, and add to a list what it starts and reads. What is ``late`` is not
    awaited before its first reader. Rings wait for their hops themselves."""
    lives = [*reuse.liveness(function, *options)]
    names = {value.name: (function.name, dict(line.kwargs).get(MESSAGE, value.name)) for line in function.lines
             for value in line.made if line.op not in RINGS and _travels(line)}  # fmt: skip
    sent += dict.fromkeys(names[name] for line in function.lines for name in line.uses if name in names)
    coming = {name for name, key in names.items() if key == late}
    for at, (line, life) in enumerate(zip(function.lines, lives, strict=True)):
        if coming.intersection(line.uses):
            lives[at] = life._replace(awaited=tuple(name for name in life.awaited if name not in coming))
            if line.op != WAIT and facts(line.op).storage != "view":  # a view reads no numbers
                break
            coming.update(value.name for value in line.made)
    return lives


def _travels(line: Line) -> bool:
    row = COLLECTIVES.get(line.op)
    return row is not None and row.communicates and bool(row.axes(line.args[1:]))


def late_awaits(case: Case) -> Iterator[Planted]:
    """Await what is sent only after its first reader."""
    sent = list[Sent]()
    with patch.object(execute, "liveness", partial(_liveness, sent, None)):
        assert agrees(case)
    for late in dict.fromkeys(sent):
        plant = partial(patch.object, execute, "liveness", partial(_liveness, [], late))
        yield Planted("await behind a reader, in the machine", "{1} of {0}".format(*late), plant)


def _message_of(backend: InProcess, number: int, sent: list[str], op: str, *operands: Any) -> Any:
    """Start a message, and add its collective to a list. The operands of the message of this ``number`` are other
    numbers, which nobody else sees, while its results are made at the await."""
    results, arrival = _MESSAGE(backend, op, *operands)
    sent.append(op)
    if len(sent) - 1 != number:
        return results, arrival
    tensors = [piece[0] if isinstance(piece, tuple) else piece for pieces in operands[1] for piece in pieces]

    def late() -> None:
        before = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.fill_(1) if tensor.dtype == torch.bool else tensor.neg_().sub_(1)
        arrival()
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)

    return results, late


_MESSAGE: Any = InProcess.message


def overwritten(case: Case) -> Iterator[Planted]:
    """Write over the operands of a message until it is awaited; sums are made in copies."""
    sent = list[str]()
    with patch.object(InProcess, "message", partialmethod(_message_of, -1, sent)):
        assert agrees(case)
    for number, op in enumerate(sent):
        if op not in SUMS:
            plant = partial(patch.object, InProcess, "message", partialmethod(_message_of, number, []))
            yield Planted("write over what is sent", f"message {number}: {op}", plant)


def agrees(case: Case) -> bool:
    """Return whether a step runs, and is that of the captured graph."""
    try:
        return compare(case, steps=1).largest <= TOLERANCE
    except (RuntimeError, ValueError, IndexError):  # wrong whole numbers are no places and no counts
        return False


def await_rows(names: Sequence[str] = AWAITING_BUILDS, share: int = 1) -> dict[str, Row]:
    """Judge what is wrong with values in flight, or one of ``share`` of each class in each build."""
    rows: dict[str, Row] = {}
    for name in names:
        build, seen = good_build(name, early=True), Counter[str]()
        bugs: list[Mutant | Planted] = [*wrong_awaits(build), *late_awaits(build.case), *overwritten(build.case)]
        for bug in bugs:
            seen[bug.kind] += 1
            if seen[bug.kind] % share != 1 % share:
                continue
            if isinstance(bug, Mutant):
                check = judge(build, bug.programs).check
            else:
                with bug.plant():
                    check = "" if agrees(build.case) else "numbers"
            rows.setdefault(bug.kind, Row()).note(f"{name}: {bug.what}", check)
    return rows


if __name__ == "__main__":
    print(table_text(await_rows(), "values in flight"))
