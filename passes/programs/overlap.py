"""Overlap: three passes that hide communication behind computation.

- Early sums: the last backward of a step sums the gradients that it completes, so that REDUCE need not.
- Overlap: a collective of a main function becomes a start and an await. The weights that a unit (one call of a block)
  reads are gathered while the units before it run, and its gradients are summed while the next unit runs. So are the
  weights that UNSHARD gathers once a step: it starts all gathers, unit by unit, and the forwards await them. Tensors of
  one bucket travel in one message: lines that follow one another with the same number.
- Hidden exchanges: in blocks, tokens travel to experts and back while products run that do not need them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...compiler.analysis.liveness import local_bytes
from ...compiler.layout.collectives import COLLECTIVES, MESSAGE, SUMS, WAIT
from ...compiler.layout.packed_rows import EXCHANGE
from ...compiler.ops.rules import facts
from ...compiler.program.actions import ACTIONS, FORWARD, REDUCE, UNSHARD
from ...compiler.program.binding import UNSCALE, Binding
from ...compiler.program.blocks import working
from ...compiler.program.program import LAST, Function, Line, Program, Ref, Value, needed
from ...compiler.program.rewriter import FreshNames, Rewriter, started
from ...compiler.program.roles import Programs
from ...compiler.program.step_values import residual
from ...compiler.resolve.requests import Pipeline

# ---- early sums


@dataclass(frozen=True, slots=True)
class _Sum:
    """The lines of REDUCE that sum one gradient over ranks, up to the last collective, and keep its residual."""

    gradient: Value
    lines: tuple[Line, ...]
    end: Value
    """The result of the last collective."""
    reads: tuple[Value, ...]
    """The other parameters that the lines read: the residual of the last step, and one over the loss scale."""
    left: tuple[tuple[Binding, str], ...]
    """The residual that they return."""


def sum_early(programs: Programs, microbatches: int, pipeline: Pipeline | None = None) -> Programs:
    """The pass of early sums. It takes the programs of a role, and returns them with a main function for the last
    microbatch of every B or W, whichever a stage does last in a step. It sums the gradients that it completes; REDUCE
    no longer does.

    A gradient that several stages return stays in REDUCE, as does a value that is returned as two gradients.
    """
    changed, reduce = dict(programs), Rewriter(programs[REDUCE].mesh, programs[REDUCE].main)
    sums = {one.gradient.binding: one for one in _sums(reduce.source)}
    work = {key: program for key, program in programs.items() if ACTIONS[program.action].works}
    if pipeline is not None:
        ends = [f"{stage}{kinds[-1]}" for stage, kinds in enumerate(pipeline.kinds)]
        work = {key: program for key, program in work.items() if key in ends}
    stages = Counter(key for program in work.values() for key, _ in program.main.returns)
    for at, program in work.items():
        names = Counter(name for _, name in program.main.returns)
        early = {name: sums[key] for key, name in program.main.returns
                 if key in sums and stages[key] == names[name] == 1}  # fmt: skip
        if early:
            last = _last(program, early, microbatches > 1)
            changed[at] = program.with_mains(last, program.main)
        for one in early.values():
            _leave_out(one, reduce)
    main = reduce.function()
    main = replace(main, parameters=tuple(value for value in main.parameters if main.uses[value.name]))
    changed[REDUCE] = replace(programs[REDUCE], functions=(main,))
    return changed


def _sums(main: Function) -> Iterator[_Sum]:
    """Yield the sums of gradients of REDUCE's main function whose inner values no other line reads."""
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
        inner = needed.keys() - {end, *(value.name for value in reads)}
        alone = gradient.name in needed and all(inside[name] == main.uses[name] for name in inner)
        if alone and {value.binding for value in reads} <= {state, UNSCALE} and not any(map(_among, lines)):
            yield _Sum(gradient, lines, line.made[0], reads, left)


def _sends(line: Line) -> bool:
    row = COLLECTIVES.get(line.op)
    return row is not None and row.communicates


def _among(line: Line) -> bool:
    """Return True for a line that sums over roles, or has several results."""
    row = COLLECTIVES.get(line.op)
    return len(line.made) != 1 or (row is not None and bool(row.members(line.args[1:])))


def _last(program: Program, sums: Mapping[str, _Sum], adds: bool) -> Function:
    """Return the main function of the last microbatch: behind the line that computes a gradient it is added to those of
    earlier microbatches, and summed."""
    main, last = program.main, Rewriter(program.mesh, program.main)
    known = {value.binding: value.name for value in main.parameters}
    completed: list[tuple[Line | None, Value]] = [(None, value) for value in main.parameters if value.name in sums]
    completed += [(line, value) for line in main.lines for value in line.made if value.name in sums]
    for line, value in completed:
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
    """Drop a sum from REDUCE, which reads its result in place of the gradient."""
    reduce.drop(one.lines)
    reduce.parameters[one.gradient.name] = replace(one.gradient, type=one.end.type)
    reduce.rename(one.end.name, one.gradient.name)
    for key, _ in one.left:
        del reduce.returns[key]


def wait_late(programs: Programs, prefetches: bool) -> Programs:
    """Return the programs of a role in which readers await what an earlier program has started, each value right before
    its first reader: REDUCE the sums that the last backward returns, and F, where a role ``prefetches``, the weights
    that UNSHARD gathers. Backward itself awaits reduce-scatters, so that whole gradients are freed."""
    changed, coming = dict(programs), set[Binding]()
    for key, program in programs.items():
        if program.last is not None:
            usual = {name for _, name in program.main.returns}
            sums = [(gradient, name) for gradient, name in program.last.returns if name not in usual]
            changed[key], started = _without_waits(program, sums, SUMS)
            coming |= started
    if UNSHARD in programs and prefetches:
        awaitable = _awaitable(programs)
        weights = [row for row in programs[UNSHARD].main.returns if row[0] in awaitable]
        changed[UNSHARD], started = _without_waits(programs[UNSHARD], weights, _APART)
        coming |= started
    for key, program in changed.items():
        if program.action in (FORWARD, REDUCE) and not coming.isdisjoint(program.main.bindings):
            changed[key] = _waiting(program, coming)
    return changed


def _without_waits(
    program: Program, returned: Iterable[tuple[Binding, str]], ops: Collection[str]
) -> tuple[Program, set[Binding]]:
    """Return a program that returns, of these results of its first main function, those of messages of ``ops`` while
    they are on their way. The second result has their bindings."""
    first, *others = program.mains
    rewriter, started = Rewriter(program.mesh, first), set[Binding]()
    for key, name in returned:
        wait = first.makers.get(name)
        if wait is not None and wait.op == WAIT and first.uses[name] == 1 and first.makers[wait.uses[0]].op in ops:
            started.add(key)
            rewriter.drop([wait])
            rewriter.returns[key] = wait.uses[0]
    return program.with_mains(rewriter.function(), *others), started


def _awaitable(programs: Programs) -> set[Binding]:
    """Return the weights that work alone reads, and that F of each such stage can await: it reads them too, and not
    first in a message of several lines, between which no await may stand."""
    awaitable, others = dict[str, set[Binding]](), set[Binding]()
    for key, program in programs.items():
        if program.action == FORWARD:
            main = program.main
            weights = ((value.binding, main.readers[value.name][:1]) for value in main.bound("weight").values())
            awaitable[key.removesuffix(FORWARD)] = {
                weight for weight, first in weights if weight and first and MESSAGE not in dict(first[0].kwargs)
            }
    for key, program in programs.items():
        there = awaitable.get(key.removesuffix(program.action)) if ACTIONS[program.action].works else None
        others.update(weight for weight in program.main.bindings if weight not in (there or ()))
    return set[Binding]().union(*awaitable.values()) - others


def _waiting(program: Program, coming: set[Binding]) -> Program:
    """Return a program that awaits each of these values before its first reader."""
    main, rewriter = program.main, Rewriter(program.mesh, program.main)
    arriving = {value.name: value for value in main.parameters if value.binding in coming}
    word = "summed" if program.action == REDUCE else "arrived"
    for name in (name for name in main.uses if name in arriving):
        rewriter.insert_before(next(iter(main.readers[name]), None))
        waited = rewriter.emit(WAIT, (Ref(name),), arriving[name].type, name=f"{name}_{word}")
        rewriter.rename(name, waited.name)
    return program.with_mains(rewriter.function())


# ---- hidden exchanges: each starts as soon as its operand is computed, and is awaited just before its first reader.
# Between the two stand products that need no exchange (gradients of weights, shared experts), shared out evenly among
# the exchanges of a block.


_HIDING = (EXCHANGE, "parc.all_to_all")


def hide_exchanges(programs: Programs) -> Programs:
    """The pass of hidden exchanges. It takes the programs of a role, and returns them with a start and an await for
    each all-to-all of blocks, whose lines are reordered."""
    return {
        key: replace(program, functions=(*map(_hide_in, program.blocks), *program.mains))
        for key, program in programs.items()
    }


def _hide_in(block: Function) -> Function:
    exchanges = any(line.op in _HIDING for line in block.lines)
    return replace(block, lines=_Block(block).lines()) if exchanges else block


class _Block:
    """The lines of a function in a new order: those that an exchange needs first, then others to hide it."""

    def __init__(self, function: Function) -> None:
        self.source = function.lines
        self.names = FreshNames.beside(function)
        self.behind: list[frozenset[int]] = []
        """For each line, the indices of the lines that it needs, and its own."""
        for at, line in enumerate(self.source):
            needed = (self.behind[function.at(function.makers[name])] for name in line.uses if name in function.makers)
            self.behind.append(frozenset({at}).union(*needed))
        self.exchanges = [at for at, line in enumerate(self.source) if line.op in _HIDING]
        self.ordered: list[Line] = []
        self.done: set[int] = set()
        self.message = 0

    def lines(self) -> tuple[Line, ...]:
        """Return the lines in their new order."""
        products = [at for at, line in enumerate(self.source) if facts(line.op).precision == "product"]
        needed = frozenset[int]().union(*(self.behind[at] for at in self.exchanges))
        free = [at for at in products if at not in needed]
        ahead = list(self.exchanges)
        coming: int | None = None
        for exchange in self.exchanges:
            self._put(at for at in self.behind[exchange] - {exchange} if self.behind[at].isdisjoint(ahead))
            self._await(coming, free, ahead)
            self._put(self.behind[exchange] - {exchange})
            coming = exchange
            self.ordered.append(self.source[exchange])
        self._await(coming, free, ahead)
        self._put(range(len(self.source)))
        return tuple(self.ordered)

    def _put(self, places: Iterable[int]) -> None:
        """Add the lines of these places that are not added yet, in their old order."""
        new = sorted(set(places) - self.done)
        self.ordered += [self.source[at] for at in new]
        self.done.update(new)

    def _await(self, coming: int | None, free: Sequence[int], ahead: list[int]) -> None:
        """Add an exchange's share of the free products that can be computed now, and its await. Without a line between
        start and await it stays one line."""
        if coming is None:
            return
        start = max(at for at, line in enumerate(self.ordered) if line is self.source[coming])
        ready = [at for at in free if at not in self.done and self.behind[at].isdisjoint(ahead)]
        for at in ready[: -(-len(ready) // len(ahead))]:
            self._put(self.behind[at])
        if start + 1 < len(self.ordered):
            self.message += 1
            self.ordered[start], wait = started(self.ordered[start], self.names, self.message)
            self.ordered.append(wait)
        ahead.remove(coming)
        self.done.add(coming)


# ---- overlap: the place where each message of weights or gradients starts, and where it is awaited


_APART = ("parc.all_gather", "parc.reduce_scatter", "parc.all_gather_int8", "parc.reduce_scatter_int8")
_SUM = "parc.all_reduce"


@dataclass(slots=True)
class _Unit:
    """A call of a main function, with the conversions before it, and those of its results behind it."""

    before: list[Line] = field(default_factory=list)
    call: Line | None = None
    counts: bool = True
    """False for a call without products, of the rest of a block around smaller units: it hides no message."""
    behind: list[Line] = field(default_factory=list)


def overlapped(programs: Programs, bucket: int, ahead: int, offload: Collection[str]) -> Programs:
    """Return the programs of a role with a start and an await for each gather and each sum of gradients of their main
    functions. Messages have at most a ``bucket`` of bytes (one tensor may be larger); a gather runs so many units
    ``ahead``. UNSHARD starts its gathers unit by unit in the order of the forwards, which await them, unless the plan's
    ``offload`` lines keep weights elsewhere as soon as they are there."""
    prefetches = "parameters" not in offload
    units = _read_together(programs) if prefetches else []
    changed = {
        key: _in_units(program, units, bucket) if program.action == UNSHARD else _overlapped(program, bucket, ahead)
        for key, program in programs.items()
    }
    return wait_late(changed, prefetches)


def _overlapped(program: Program, bucket: int, ahead: int) -> Program:
    apart = frozenset((*_APART, _SUM) if ACTIONS[program.action].works else _APART)
    mains = (
        replace(main, lines=tuple(_Overlap(program, main, bucket, ahead, apart).lines()))
        if any(line.op in apart for line in main.lines) else main
        for main in program.mains
    )  # fmt: skip
    return program.with_mains(*mains)


def _read_together(programs: Programs) -> list[list[Binding]]:
    """Return the weights that a role's forwards read, in the order of their first readers, those of one line
    together."""
    units, known = list[list[Binding]](), set[Binding]()
    for program in programs.values():
        if program.action == FORWARD:
            weights = {value.name: value.binding for value in program.main.bound("weight").values() if value.binding}
            for line in program.main.lines:
                unit = dict.fromkeys(weights[name] for name in line.uses if name in weights)
                units.append([weight for weight in unit if weight not in known])
                known.update(unit)
    return [unit for unit in units if unit]


def _in_units(program: Program, units: Iterable[Sequence[Binding]], bucket: int) -> Program:
    """Return UNSHARD with the gathers of each unit of weights started together, in the order of the units. Weights of
    which a gather is not the last line come first: UNSHARD itself awaits their messages, and no others before them."""
    main, apart = program.main, frozenset(_APART)
    if not any(line.op in apart for line in main.lines):
        return program
    names = dict(main.returns)
    first = [key for key, name in main.returns if name not in main.makers or main.makers[name].op not in apart]
    parts, known = list[Sequence[Line]](), set[int]()
    for unit in (first, *units, names):
        pending, of_unit = [names[key] for key in unit if key in names], set[int]()
        while pending:
            line = main.makers.get(pending.pop())
            if line is not None and (at := main.at(line)) not in known:
                of_unit.add(at)
                known.add(at)
                pending += line.uses
        parts.append([main.lines[at] for at in sorted(of_unit)])
    lines = tuple(_Overlap(program, main, bucket, 0, apart).in_parts(parts))
    return replace(program, functions=(replace(main, lines=lines),))


class _Overlap:
    def __init__(self, program: Program, main: Function, bucket: int, ahead: int, apart: Collection[str]) -> None:
        self.program, self.main, self.apart = program, main, apart
        self.bucket, self.ahead = bucket, ahead
        self.values = main.values()
        self.names = FreshNames.beside(main)
        self.message = 0

    def lines(self) -> Iterator[Line]:
        """Yield the lines in their new order."""
        units = _units(self.main, working(self.program))
        before = [self._steps(unit.before) for unit in units]
        waiting: list[Line] = []
        for at, unit in enumerate(units):
            distance = 0
            for near, steps in zip(units[at:], before[at:], strict=True):
                while len(steps) > 1 and distance <= self.ahead * (len(steps) - 1):
                    yield from self._numbered(steps.pop(0))
                distance += near.counts
            (rest,) = before[at]
            calls = [unit.call] if unit.call is not None else []
            read = {name for line in (*rest, *calls) for name in line.uses}
            if any(value.name in read for line in waiting for value in line.made):
                yield from waiting
                waiting = []
            yield from rest
            yield from calls
            due, again = self._started(waiting, now=True) if unit.counts else ([], waiting)
            yield from self._numbered(due)
            sent, waiting = self._started(unit.behind)
            yield from self._numbered(sent)
            waiting = again + waiting
        while waiting:
            due, waiting = self._started(waiting, now=True)
            yield from self._numbered(due)

    def in_parts(self, parts: Sequence[Sequence[Line]]) -> Iterator[Line]:
        """Yield the lines part by part: the first messages of each, then those that need them, then what is left."""
        steps = [self._steps(lines) for lines in parts]
        while any(len(left) > 1 for left in steps):
            for left in steps:
                if len(left) > 1:
                    yield from self._numbered(left.pop(0))
        for left in steps:
            yield from left[0]

    def _steps(self, lines: Sequence[Line]) -> list[list[Line]]:
        """Return lines as steps: the starts of messages, with the lines that they need; the awaits of these, with the
        starts of the messages that follow, as in two levels; and so on to the rest."""
        steps, rest = list[list[Line]](), list(lines)
        while any(map(self._apart, rest)):
            first, rest = self._started(rest)
            steps.append(first)
        return [*steps, rest]

    def _started(self, lines: Sequence[Line], now: bool = False) -> tuple[list[Line], list[Line]]:
        """Return the lines up to the starts of the first messages, and the others: awaits of these, their readers, and,
        unless they are due ``now``, the lines that no message needs."""
        first: list[Line] = []
        later: list[Line] = []
        late: set[str] = set()
        _, sent = needed(lines, (name for line in lines if self._apart(line) for name in line.uses))
        for line in lines:
            feeds = any(value.name in sent for value in line.made)
            if late.intersection(line.uses) or not (self._apart(line) or feeds or now):
                later.append(line)
                late.update(value.name for value in line.made)
            elif self._apart(line):
                start, wait = started(line, self.names)
                first.append(start)
                later.append(wait)
                late.add(line.made[0].name)
            else:
                first.append(line)
        return first, later

    def _apart(self, line: Line) -> bool:
        return line.op in self.apart

    def _numbered(self, lines: Sequence[Line]) -> Iterator[Line]:
        """Yield lines with the numbers of their messages: tensors of one collective and dtype, up to a bucket's bytes,
        behind their casts."""
        yield from (line for line in lines if not self._apart(line))
        groups: dict[tuple[object, ...], list[list[Line]]] = {}
        sizes: dict[int, int] = {}
        for line in (line for line in lines if self._apart(line)):
            source = line.uses[0]
            size = max(
                local_bytes(self.values[source].type, self.program), local_bytes(line.made[0].type, self.program)
            )
            key = line.op, line.args[1], line.made[0].type.dtype
            buckets = groups.setdefault(key, [[]])
            if buckets[-1] and sizes[id(buckets[-1])] + size > self.bucket:
                buckets.append([])
            buckets[-1].append(line)
            sizes[id(buckets[-1])] = sizes.get(id(buckets[-1]), 0) + size
        for group in (group for buckets in groups.values() for group in buckets):
            self.message += 1
            yield from (replace(line, kwargs=((MESSAGE, self.message),)) for line in group)


def _units(main: Function, works: Collection[str]) -> list[_Unit]:
    """Return a main function as units in order. A line that reads results of calls, directly or not, or what an earlier
    phase made, belongs to the call ahead of it; any other belongs to the next call."""
    units, results = [_Unit()], {value.name for value in main.parameters if value.kind == "deferred"}
    around = {outer for line in main.lines if line.calls_function for outer in _outer_modules(line.origin.module)}
    for line in main.lines:
        if line.calls_function:
            if units[-1].call is not None:
                units.append(_Unit())
            units[-1].call, units[-1].counts = line, line.op in works or line.origin.module not in around
            results.update(value.name for value in line.made)
        elif units[-1].call is not None and results.intersection(line.uses):
            units[-1].behind.append(line)
            results.update(value.name for value in line.made)
        else:
            if units[-1].call is not None:
                units.append(_Unit())
            units[-1].before.append(line)
    return units


def _outer_modules(module: str) -> Iterator[str]:
    """Yield the modules around a module."""
    while module := module.rpartition(".")[0]:
        yield module
