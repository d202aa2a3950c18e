"""Early sums: once-a-step sums of gradients over ranks, begun by the last microbatch's backward instead of REDUCE."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...compiler.layout.collectives import COLLECTIVES, SUMS, WAIT
from ...compiler.program.actions import ACTIONS, REDUCE
from ...compiler.program.binding import UNSCALE, Binding
from ...compiler.program.program import LAST, Function, Line, Program, Ref, Value
from ...compiler.program.rewriter import Rewriter
from ...compiler.program.roles import Programs
from ...compiler.program.step_values import residual


@dataclass(frozen=True, slots=True)
class _Sum:
    """The lines of REDUCE that sum one gradient over ranks, up to the last collective, and keep what rounding takes."""

    gradient: Value
    lines: tuple[Line, ...]
    end: Value
    """The value that the last collective makes."""
    reads: tuple[Value, ...]
    """The parameters that the lines read besides: the residual of the last step, and one over the loss scale."""
    left: tuple[tuple[Binding, str], ...]
    """The state that they return: what is left of the gradient now."""


def sum_early(programs: Programs, microbatches: int) -> Programs:
    """Return the programs of a role in which the last backward of a stage sums the gradients that it completes.

    A gradient that several stages make stays in REDUCE, as does a value that is returned as two gradients.
    """
    changed, reduce = dict(programs), Rewriter(programs[REDUCE].mesh, programs[REDUCE].main)
    sums = {one.gradient.binding: one for one in _sums(reduce.source)}
    work = {key: program for key, program in programs.items() if ACTIONS[program.action].works}
    stages = Counter(key for program in work.values() for key, _ in program.main.returns)
    for at, program in work.items():
        names = Counter(name for _, name in program.main.returns)
        early = {name: sums[key] for key, name in program.main.returns
                 if key in sums and stages[key] == names[name] == 1}  # fmt: skip
        if early:
            last = _last(program, early, microbatches > 1)
            changed[at] = replace(program, functions=(*program.blocks, last, program.main))
        for one in early.values():
            _leave_out(one, reduce)
    main = reduce.function()
    main = replace(main, parameters=tuple(value for value in main.parameters if main.uses[value.name]))
    changed[REDUCE] = replace(programs[REDUCE], functions=(main,))
    return changed


def _sums(main: Function) -> Iterator[_Sum]:
    """Yield the sums of gradients of REDUCE's main function of which no other line reads a part."""
    makers, returned = main.makers, dict(main.returns)
    for of, gradient in main.bound("gradient").items():
        state, end = residual(of), returned.get(Binding("gradient", of), "")
        left = tuple((key, returned[key]) for key in (state,) if key in returned)
        while (line := makers.get(end)) is not None and (not _sends(line) or _among(line)):
            end = line.uses[0] if line.uses else ""
        if line is None:
            continue
        needed, pending = dict[str, None](), [end, *(name for _, name in left)]
        while pending:
            name = pending.pop()
            if name not in needed:
                needed[name] = None
                pending += makers[name].uses if name in makers else ()
        lines = tuple(sorted((makers[name] for name in needed if name in makers), key=main.at))
        reads = tuple(main.values()[name] for name in needed if name not in makers and name != gradient.name)
        inside = Counter([*(name for line in lines for name in line.uses), *(name for _, name in left)])
        own = needed.keys() - {end, *(value.name for value in reads)}
        alone = gradient.name in needed and all(inside[name] == main.uses[name] for name in own)
        if alone and {value.binding for value in reads} <= {state, UNSCALE} and not any(map(_among, lines)):
            yield _Sum(gradient, lines, line.made[0], reads, left)


def _sends(line: Line) -> bool:
    row = COLLECTIVES.get(line.op)
    return row is not None and row.communicates


def _among(line: Line) -> bool:
    """Return whether a line sums over roles, or makes several values."""
    row = COLLECTIVES.get(line.op)
    return len(line.made) != 1 or (row is not None and bool(row.members(line.args[1:])))


def _last(program: Program, sums: Mapping[str, _Sum], adds: bool) -> Function:
    """Return the main function of the last microbatch: after the line that makes a gradient it is added to those of
    earlier microbatches, and summed."""
    main, last = program.main, Rewriter(program.mesh, program.main)
    known = {value.binding: value.name for value in main.parameters}
    for line, value in ((maker, made) for maker in main.lines for made in maker.made if made.name in sums):
        last.insert_after(line)
        one, total = sums[value.name], value
        key = one.gradient.binding
        assert key is not None
        if adds:
            before = last.take(f"{value.name}_so_far", value.type, key)
            args, origin = (Ref(before.name), Ref(value.name)), one.lines[0].origin
            total = last.emit("aten.add.Tensor", args, value.type, origin, f"{value.name}_total")
        renamed = {one.gradient.name: total.name}
        for read in one.reads:
            if read.binding not in known:
                known[read.binding] = last.take(read.name, read.type, read.binding).name
            renamed[read.name] = known[read.binding]
        for summing in one.lines:
            word = re.sub(r"_\d+$", "", summing.made[0].name) if one.left else "summed"
            last.copy(summing, renamed, f"{value.name}_{word}")
        last.returns[key] = renamed[one.end.name]
        last.returns |= {key: renamed[name] for key, name in one.left}
    return last.function(f"{main.name}{LAST}")


def _leave_out(one: _Sum, reduce: Rewriter) -> None:
    """Leave a sum out of REDUCE, which is given its result in place of the gradient."""
    reduce.drop(one.lines)
    reduce.parameters[one.gradient.name] = replace(one.gradient, type=one.end.type)
    reduce.rename(one.end.name, one.gradient.name)
    for key, _ in one.left:
        del reduce.returns[key]


def wait_late(programs: Programs) -> Programs:
    """Return the programs of a role in which REDUCE, and not the last backward, waits for the sums that this returns:
    each right before its first reader. Where parts of gradients are summed, backward waits: the whole ones can go."""
    changed, coming = dict(programs), set[Binding]()
    for key, program in programs.items():
        if (last := program.last) is None:
            continue
        rewriter, usual = Rewriter(program.mesh, last), {name for _, name in program.main.returns}
        for gradient, name in last.returns:
            wait = last.makers.get(name)
            if wait is not None and wait.op == WAIT and name not in usual and last.makers[wait.uses[0]].op in SUMS:
                coming.add(gradient)
                rewriter.drop([wait])
                rewriter.returns[gradient] = wait.uses[0]
        changed[key] = replace(program, functions=(*program.blocks, rewriter.function(), program.main))
    if coming:
        changed[REDUCE] = _waiting(programs[REDUCE], coming)
    return changed


def _waiting(reduce: Program, coming: set[Binding]) -> Program:
    """Return REDUCE with a wait for each of these gradients before its first reader."""
    main, rewriter = reduce.main, Rewriter(reduce.mesh, reduce.main)
    arriving = {value.name: value for value in main.parameters if value.binding in coming}
    for name in (name for name in main.uses if name in arriving):
        rewriter.insert_before(next(iter(main.readers[name]), None))
        waited = rewriter.emit(WAIT, (Ref(name),), arriving[name].type, name=f"{name}_summed")
        rewriter.rename(name, waited.name)
    return replace(reduce, functions=(rewriter.function(),))
