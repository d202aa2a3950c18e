"""Early sums: once-a-step sums of gradients over ranks, begun by the last microbatch's backward instead of REDUCE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...compiler.layout.collectives import COLLECTIVES, SUMS, WAIT
from ...compiler.program.actions import ACTIONS, REDUCE
from ...compiler.program.binding import Binding
from ...compiler.program.program import LAST, Function, Line, Program, Ref, Value
from ...compiler.program.roles import Programs
from ...compiler.program.totals import uses_of
from .emit import FreshNames


@dataclass(frozen=True, slots=True)
class _Chain:
    """The lines of REDUCE that alone read a gradient, up to its last sum over ranks."""

    gradient: Value
    lines: tuple[Line, ...]

    @property
    def end(self) -> Value:
        """The value that the last line makes."""
        return self.lines[-1].made[0]


def sum_early(programs: Programs, microbatches: int) -> Programs:
    """Return the programs of a role in which the last backward of a stage sums the gradients that it completes.

    A gradient that several stages make stays in REDUCE, as does a value that is returned as two gradients.
    """
    made, moved = dict(programs), list[_Chain]()
    chains = {chain.gradient.binding: chain for chain in _chains(programs[REDUCE].main)}
    work = {key: program for key, program in programs.items() if ACTIONS[program.action].works}
    returned = [key for program in work.values() for key, _ in program.main.returns]
    for at, program in work.items():
        names = [name for _, name in program.main.returns]
        own = {name: chains[key] for key, name in program.main.returns
               if key in chains and returned.count(key) == 1 and names.count(name) == 1}  # fmt: skip
        if own:
            made[at] = replace(program, functions=(*program.blocks, _last(program.main, own, microbatches > 1),
                                                   program.main))  # fmt: skip
            moved += own.values()
    made[REDUCE] = _without(programs[REDUCE], moved)
    return made


def _chains(main: Function) -> list[_Chain]:
    """Return the sums of gradients of REDUCE's main function that read nothing else."""
    uses, readers = uses_of(main), {name: line for line in main.lines for name in line.uses}
    chains = []
    for value in main.bound("gradient").values():
        lines: list[Line] = []
        end = 0
        name = value.name
        while uses[name] == 1 and (line := readers.get(name)) is not None:
            row = COLLECTIVES.get(line.op)
            if len(line.uses) > 1 or len(line.made) != 1 or (row is not None and row.members(line.args[1:])):
                break
            lines.append(line)
            name = line.made[0].name
            end = len(lines) if row is not None and row.communicates else end
        if end:
            chains.append(_Chain(value, tuple(lines[:end])))
    return chains


def _last(main: Function, own: Mapping[str, _Chain], adds: bool) -> Function:
    """Return the main function of the last microbatch: behind the line that makes a gradient it is added to those of
    earlier microbatches, and summed."""
    names = FreshNames()
    for name in main.values():
        names.fresh(name)
    lines, parameters, ends = list[Line](), list(main.parameters), dict[str, str]()
    for line in main.lines:
        lines.append(line)
        for value in line.made:
            if (chain := own.get(value.name)) is None:
                continue
            source, origin = value, chain.lines[0].origin
            if adds:
                before = Value(names.fresh(f"{value.name}_so_far"), value.type, chain.gradient.binding)
                source = Value(names.fresh(f"{value.name}_total"), value.type)
                parameters.append(before)
                lines.append(Line((source,), "aten.add.Tensor", (Ref(before.name), Ref(value.name)), (), origin))
            for summing in chain.lines:
                result = replace(summing.made[0], name=names.fresh(f"{value.name}_summed"))
                lines.append(replace(summing, results=(result,), args=(Ref(source.name), *summing.args[1:])))
                source = result
            ends[value.name] = source.name
    returns = tuple((key, ends.get(name, name)) for key, name in main.returns)
    return Function(f"{main.name}{LAST}", tuple(parameters), tuple(lines), returns)


def _without(reduce: Program, moved: Sequence[_Chain]) -> Program:
    """Return REDUCE without these sums: it is given their results."""
    gone = {line for chain in moved for line in map(id, chain.lines)}
    given = {chain.gradient.name: replace(chain.gradient, type=chain.end.type) for chain in moved}
    names = {chain.end.name: chain.gradient.name for chain in moved}
    main = reduce.main
    lines = [line.renamed(names) for line in main.lines if id(line) not in gone]
    parameters = tuple(given.get(value.name, value) for value in main.parameters)
    returns = tuple((key, names.get(name, name)) for key, name in main.returns)
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
