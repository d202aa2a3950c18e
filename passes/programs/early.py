"""Early sums: once-a-step sums of gradients over ranks, begun by the last microbatch's backward instead of REDUCE."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...compiler.layout.collectives import COLLECTIVES, SUMS, WAIT
from ...compiler.program.actions import ACTIONS, REDUCE
from ...compiler.program.binding import UNSCALE, Binding
from ...compiler.program.program import LAST, Function, Line, Program, Ref, Value
from ...compiler.program.residual import residual
from ...compiler.program.roles import Programs
from ...compiler.program.totals import uses_of
from .emit import FreshNames


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
    made, moved = dict(programs), list[_Sum]()
    sums = {one.gradient.binding: one for one in _sums(programs[REDUCE].main)}
    work = {key: program for key, program in programs.items() if ACTIONS[program.action].works}
    returned = [key for program in work.values() for key, _ in program.main.returns]
    for at, program in work.items():
        names = [name for _, name in program.main.returns]
        own = {name: sums[key] for key, name in program.main.returns
               if key in sums and returned.count(key) == 1 and names.count(name) == 1}  # fmt: skip
        if own:
            made[at] = replace(program, functions=(*program.blocks, _last(program.main, own, microbatches > 1),
                                                   program.main))  # fmt: skip
            moved += own.values()
    made[REDUCE] = _without(programs[REDUCE], moved)
    return made


def _sums(main: Function) -> Iterator[_Sum]:
    """Yield the sums of gradients of REDUCE's main function of which no other line reads a part."""
    makers = {value.name: line for line in main.lines for value in line.made}
    parameters = {value.name: value for value in main.parameters}
    order = {id(line): at for at, line in enumerate(main.lines)}
    uses, returned = uses_of(main), dict(main.returns)
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
        found = {order[id(makers[name])]: makers[name] for name in needed if name in makers}
        lines = tuple(found[at] for at in sorted(found))
        reads = tuple(parameters[name] for name in needed if name in parameters and name != gradient.name)
        inner = Counter([*(name for line in lines for name in line.uses), *(name for _, name in left)])
        own = needed.keys() - {end, *(value.name for value in reads)}
        alone = gradient.name in needed and all(inner[name] == uses[name] for name in own)
        if alone and {value.binding for value in reads} <= {state, UNSCALE} and not any(map(_among, lines)):
            yield _Sum(gradient, lines, line.made[0], reads, left)


def _sends(line: Line) -> bool:
    row = COLLECTIVES.get(line.op)
    return row is not None and row.communicates


def _among(line: Line) -> bool:
    """Return whether a line sums over roles, or makes several values."""
    row = COLLECTIVES.get(line.op)
    return len(line.made) != 1 or (row is not None and bool(row.members(line.args[1:])))


def _last(main: Function, own: Mapping[str, _Sum], adds: bool) -> Function:
    """Return the main function of the last microbatch: behind the line that makes a gradient it is added to those of
    earlier microbatches, and summed."""
    names = FreshNames()
    for name in main.values():
        names.fresh(name)
    lines, parameters, returns = list[Line](), {value.name: value for value in main.parameters}, dict(main.returns)
    known = {value.binding: value.name for value in main.parameters}
    for line in main.lines:
        lines.append(line)
        for value in line.made:
            if (one := own.get(value.name)) is None:
                continue
            renamed = {one.gradient.name: value.name}
            if adds:
                before = Value(names.fresh(f"{value.name}_so_far"), value.type, one.gradient.binding)
                total = Value(names.fresh(f"{value.name}_total"), value.type)
                parameters[before.name], renamed[one.gradient.name] = before, total.name
                args = (Ref(before.name), Ref(value.name))
                lines.append(Line((total,), "aten.add.Tensor", args, (), one.lines[0].origin))
            for read in one.reads:
                if read.binding not in known:
                    known[read.binding] = names.fresh(read.name)
                    parameters[known[read.binding]] = replace(read, name=known[read.binding])
                renamed[read.name] = known[read.binding]
            for summing in one.lines:
                word = re.sub(r"_\d+$", "", summing.made[0].name) if one.left else "summed"
                result = replace(summing.made[0], name=names.fresh(f"{value.name}_{word}"))
                lines.append(replace(summing.renamed(renamed), results=(result,)))
                renamed[summing.made[0].name] = result.name
            returns |= {key: renamed[one.end.name] for key, name in main.returns if name == value.name}
            returns |= {key: renamed[name] for key, name in one.left}
    return Function(f"{main.name}{LAST}", tuple(parameters.values()), tuple(lines), tuple(returns.items()))


def _without(reduce: Program, moved: Sequence[_Sum]) -> Program:
    """Return REDUCE without these sums: it is given their results."""
    gone = {line for one in moved for line in map(id, one.lines)}
    given = {one.gradient.name: replace(one.gradient, type=one.end.type) for one in moved}
    names = {one.end.name: one.gradient.name for one in moved}
    states = {key for one in moved for key, _ in one.left}
    main = reduce.main
    lines = [line.renamed(names) for line in main.lines if id(line) not in gone]
    returns = tuple((key, names.get(name, name)) for key, name in main.returns if key not in states)
    read = {*(name for line in lines for name in line.uses), *(name for _, name in returns)}
    parameters = tuple(given.get(value.name, value) for value in main.parameters if value.name in read)
    return replace(reduce, functions=(Function(main.name, parameters, tuple(lines), returns),))


def wait_late(programs: Programs) -> Programs:
    """Return the programs of a role in which REDUCE, and not the last backward, waits for the sums that this returns:
    each right before its first reader. Where parts of gradients are summed, backward waits: the whole ones can go."""
    made, coming = dict(programs), set[Binding]()
    for key, program in programs.items():
        if (last := program.last) is None:
            continue
        waits = {line.made[0].name: line for line in last.lines if line.op == WAIT}
        usual = {name for _, name in program.main.returns}
        whole = {value.name for line in last.lines if line.op in SUMS for value in line.made}
        late = {name: sent for _, name in last.returns if name in waits and name not in usual
                and (sent := waits[name].uses[0]) in whole}  # fmt: skip
        lines = tuple(line for line in last.lines if line.op != WAIT or line.made[0].name not in late)
        coming.update(gradient for gradient, name in last.returns if name in late)
        returns = tuple((gradient, late.get(name, name)) for gradient, name in last.returns)
        last = replace(last, lines=lines, returns=returns)
        made[key] = replace(program, functions=(*program.blocks, last, program.main))
    if coming:
        made[REDUCE] = _waiting(programs[REDUCE], coming)
    return made


def _waiting(reduce: Program, coming: set[Binding]) -> Program:
    main, names = reduce.main, FreshNames()
    for name in main.values():
        names.fresh(name)
    arriving = {value.name: value for value in main.parameters if value.binding in coming}
    arrived: dict[str, str] = {}
    lines: list[Line] = []

    def wait(name: str) -> None:
        if name in arriving and name not in arrived:
            result = replace(arriving[name], name=names.fresh(f"{name}_summed"), binding=None)
            lines.append(Line((result,), WAIT, (Ref(name),)))
            arrived[name] = result.name

    for line in main.lines:
        for name in line.uses:
            wait(name)
        lines.append(line.renamed(arrived))
    for _, name in main.returns:
        wait(name)
    returns = tuple((key, arrived.get(name, name)) for key, name in main.returns)
    return replace(reduce, functions=(replace(main, lines=tuple(lines), returns=returns),))
