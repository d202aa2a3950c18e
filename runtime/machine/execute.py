"""Execution: a program's lines as calls, for one rank or for several in lock step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, final

import torch

from ...compiler.analysis.lifetimes import (
    BucketGradient,
    accumulates,
    addable,
    adds,
    adds_itself,
    aliases,
    delayed,
    gradient_buckets,
    reducible_in_place,
)
from ...compiler.analysis.products import PRODUCT
from ...compiler.layout.collectives import COLLECTIVES, MESSAGE, RINGS, SUMS, axes_of
from ...compiler.layout.mesh import Mesh, Shape
from ...compiler.program.binding import Binding
from ...compiler.program.plain import on_their_way
from ...compiler.program.program import Function, Line, LocalSize, Program, Ref, map_references, operator
from ...compiler.torch_private import profiling
from ..ranks.communication import Arrival, Backend, BoundTensors, Environment, arrival_name, wait_for_nothing
from .coded import Added, CodedLine, coded
from .fusion import fused
from .kernels import KERNELS
from .reuse import Lives, in_place, lives
from .site import Kernel, Site, binding, code_for, library_of

# ---- buffers of gradients
#     grad_up = mm(x, grad)       # entries 0 to 511 of the buffer of message 1
#     grad_down = mm(h, grad)     # entries 512 to 1023


@dataclass(slots=True)
class _Buffer:
    """The memory of one message's gradients of one dtype. It is allocated when the first of them is made."""

    dtype: torch.dtype
    device: torch.device
    entries: int = 0
    memory: torch.Tensor | None = None


@final
@dataclass(frozen=True, slots=True)
class BufferPart:
    """The part of a buffer that is for one gradient, from its entry ``begin`` on."""

    buffer: _Buffer
    begin: int
    shape: Shape

    def tensor(self) -> torch.Tensor:
        """Return the part, whose entries are not yet set."""
        buffer = self.buffer
        if buffer.memory is None:
            buffer.memory = torch.empty(buffer.entries, dtype=buffer.dtype, device=buffer.device)
        return buffer.memory[self.begin : self.begin + math.prod(self.shape)].view(self.shape)


def buffer_parts(buckets: Iterable[Sequence[BucketGradient]], device: torch.device) -> Iterator[tuple[str, BufferPart]]:
    """Yield the names of gradients in buckets, each with its part of a new buffer, which takes no memory yet."""
    for gradients in buckets:
        buffer = _Buffer(gradients[0].dtype, device)
        for gradient in gradients:
            yield gradient.name, BufferPart(buffer, buffer.entries, gradient.shape)
            buffer.entries += math.prod(gradient.shape)


# ---- lines of a program made ready to run; while torch's profiler runs, each is a range, named by the


_Run = Callable[[Sequence[Environment]], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A line made ready: the function ``run(environments)``, the values that must have arrived before it, and the names
    that nobody reads after it. Where it is several lines, ``line`` is the last of them."""

    line: Line
    run: _Run
    awaited: tuple[str, ...]
    dead: tuple[str, ...]
    first: Line | None = None

    def in_range(self, name: str) -> Prepared:
        """Return the line as a range of a profile."""

        def run(environments: Sequence[Environment]) -> None:
            with torch.profiler.record_function(name):
                self.run(environments)

        return replace(self, run=run)


class ProfileRanges:
    """The lines of a program as ranges of a profile."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: dict[str, list[Prepared]] = {}

    def of(self, function: Function, lines: Sequence[Prepared]) -> list[Prepared]:
        """Return prepared lines of a function as ranges. Their names hold the file of the program and the row in it,
        what is computed, and the origin in the model and the plan."""
        if function.name not in self._made:
            rows = self._rows(function)
            self._made[function.name] = [line.in_range(self._name(line, rows)) for line in lines]
        return self._made[function.name]

    def _rows(self, function: Function) -> dict[str, int]:
        """Return the number of the row of the program's text, from 1, in which each value of a function is made."""
        text = self._program.text().split("\n")
        first = text.index(f"def {function.name}(") + len(function.parameters) + 3
        original = self._program.function(function.name)
        return {value.name: row for row, line in enumerate(original.lines, first) for value in line.made}

    def _name(self, prepared: Prepared, rows: dict[str, int]) -> str:
        program, last = self._program, prepared.line
        found = [str(rows[line.made[0].name]) for line in (prepared.first or last, last) if line.made]
        made = ", ".join(value.name for value in last.made)
        place = f"{program.role}.{program.action}.py:{'-'.join(dict.fromkeys(found))}"
        return f"{place} {made} = {last.op} | {last.origin}"


# ---- execution: a program's lines as calls, for one rank or for several in lock step.


_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}


class Machine:
    """The machine of one program. ``wide`` reads every floating dtype as float64; ``kernels`` are the code of parc's
    operators. With ``reuse`` lines are fused, and write over values that nobody reads again, also over gradients that
    they are given. ``axis`` is that of the pipeline."""

    site: Callable[..., Site] = Site

    def __init__(
        self,
        program: Program,
        backend: Backend,
        device: torch.device,
        *,
        wide: bool = False,
        kernels: Mapping[str, Kernel] = KERNELS,
        watch: Callable[[Line, Sequence[Environment]], None] | None = None,
        reuse: bool = False,
        axis: str = "",
    ) -> None:
        self.program = program
        self.mesh: Mesh = program.mesh
        self.backend, self.device, self.wide, self.kernels, self.watch = backend, device, wide, kernels, watch
        self.reuse, self.axis = reuse, axis
        self.coordinates = [self.mesh.coordinates(rank) for rank in backend.ranks]
        self.products = library_of(kernels)
        self._addable, self._delayed = addable(program, self._adds), delayed(program, self._adds)
        self._together = gradient_buckets(program, self._makes_in_place, self.dtype)
        self._aliases = aliases(program)
        self._later: list[Callable[[], torch.Tensor]] | None = None
        self._given: set[str] = set()
        self._own = {main.name: reducible_in_place(program, main) for main in program.mains}
        self._on_their_way = frozenset(on_their_way(program).values())
        self._steps = {function.name: self._prepare(function) for function in program.functions}
        self._lines: dict[str, list[Prepared]] = {}
        self._ranges = ProfileRanges(program)

    def summed(self, key: Binding, pieces: Sequence[torch.Tensor], rank: int) -> Environment:
        """Return the result of the sum that alone reads a parameter, for one rank, given the pieces of all ranks of the
        mesh; nothing, if there is no such sum. ``run`` takes it among its inputs, and does not sum again."""
        main = self.program.main
        name, uses = next((value.name for value in main.parameters if value.binding == key), ""), main.uses
        line = next((line for line in main.readers.get(name, ()) if line.op == SUMS[0]), None)
        if line is None or uses[name] > 1:
            return {}
        row, args = COLLECTIVES[line.op], line.args[1:]
        group = next(group for group in row.groups(self.mesh, args) if rank in group)
        return {line.made[0].name: row.group([pieces[other] for other in group], args)[group.index(rank)]}

    @cached_property
    def addable(self) -> frozenset[Binding]:
        """The bindings of results that ``run`` can add to a total. Without a total, these results have memory of their
        own, which may be a part of a buffer."""
        main = self.program.main
        return frozenset(key for key, name in main.returns if name in self._addable[main.name])

    def run(
        self,
        inputs: Sequence[Environment],
        function: str | None = None,
        totals: Sequence[BoundTensors] = (),
        later: list[Callable[[], torch.Tensor]] | None = None,
        arriving: dict[Binding, Arrival] | None = None,
    ) -> list[BoundTensors]:
        """Run the main function, or another one, and return its results on each rank of this process. If a result is in
        ``addable`` and has a total in ``totals``, it is added to the total, now or by calls put into ``later``; both
        return the total. ``arriving`` has the waits for inputs on their way, and gets those for such results.

        ``inputs`` and ``totals`` are taken apart while the program runs, so that values die after their last use.
        """
        main = self.program.main if function is None else self.program.function(function)
        environments = [dict(values) for values in inputs]
        names, self._later = dict(self.program.main.returns), later
        for environment, table in zip(environments, totals, strict=bool(totals)):
            environment.update((f"total of {names[key]}", total) for key, total in table.items())
        self._given = {names[key] for table in totals for key in table}
        for environment in environments:
            for name, part in buffer_parts(self._together, self.device):
                environment.setdefault(f"total of {name}", part)
        for values in inputs:
            values.clear()
        for table in totals:
            table.clear()
        sums = {} if arriving is None else arriving
        for value in main.parameters:
            if value.binding in sums:
                environments[0][arrival_name(value.name)] = sums.pop(value.binding)
        results = self._call(main, environments)
        for key, name in main.returns:
            if (arrival := environments[0].pop(arrival_name(name), None)) is not None:
                sums[key] = arrival
        return results

    def _call(self, function: Function, environments: list[Environment]) -> list[BoundTensors]:
        for step in self._steps_of(function):
            for name in step.awaited:
                environments[0].pop(arrival_name(name), wait_for_nothing)()
            step.run(environments)
            if self.watch is not None and MESSAGE not in dict(step.line.kwargs):  # it may not be there yet
                self.watch(step.line, environments)
            for name in step.dead:
                for environment in environments:
                    del environment[name]
        left = self._on_their_way if function is self.program.last else ()
        for _, name in function.returns:
            if name not in left:
                environments[0].pop(arrival_name(name), wait_for_nothing)()
        return [{key: environment[name] for key, name in function.returns} for environment in environments]

    def _steps_of(self, function: Function) -> list[Prepared]:
        profiled = profiling()
        if self.watch is None and not profiled:
            return self._steps[function.name]
        if function.name not in self._lines:
            self._lines[function.name] = self._each(function)
        steps = self._lines[function.name]
        return self._ranges.of(function, steps) if profiled else steps

    def _prepare(self, function: Function) -> list[Prepared]:
        """Return a function's lines as stretches of code, and as single lines where other ranks take part."""
        function, known = self._known(function)
        steps, stretch = list[Prepared](), list[CodedLine]()

        def end() -> None:
            if stretch:
                steps.append(Prepared(stretch[-1].line, coded(stretch), awaited_first, (), stretch[0].line))
                stretch.clear()

        awaited_first: tuple[str, ...] = ()
        for line, spare, awaited, dead in zip(function.lines, known.spare, known.awaited, known.dead, strict=True):
            alone = self._alone(line, function)
            if alone or awaited:
                end()
            if alone:
                steps.append(self._step(line, function, spare, awaited, dead))
                continue
            awaited_first = awaited_first if stretch else awaited
            stretch.append(self._coded(line, function, spare, dead))
        end()
        return steps

    def _each(self, function: Function) -> list[Prepared]:
        """Return a function's lines one by one, as a watch or a profile sees them."""
        function, known = self._known(function)
        return [
            self._step(line, function, spare, awaited, dead)
            for line, spare, awaited, dead in zip(function.lines, known.spare, known.awaited, known.dead, strict=True)
        ]

    def _known(self, function: Function) -> tuple[Function, Lives]:
        known, late = self._aliases[function.name], self._delayed[function.name]
        if self.reuse:
            function = fused(function, known, self.mesh, self.products)
        return function, lives(function, known, late, self.reuse)

    def _step(
        self, line: Line, function: Function, spare: frozenset[str], awaited: tuple[str, ...], dead: tuple[str, ...]
    ) -> Prepared:
        if not line.calls_function:
            return Prepared(line, self._run_of(line, function, spare), awaited, dead)
        dying = frozenset(dead).intersection(line.uses)  # they die within the call, after their last use there
        return Prepared(
            line, self._function_call(line, dying), awaited, tuple(name for name in dead if name not in dying)
        )

    def _alone(self, line: Line, function: Function) -> bool:
        return line.calls_function or line.op in COLLECTIVES or line.op in RINGS or accumulates(function, line)

    def _run_of(self, line: Line, function: Function, spare: frozenset[str]) -> Callable[[Sequence[Environment]], None]:
        if MESSAGE in dict(line.kwargs):
            return self._message(function, line)
        if accumulates(function, line):
            return self._added_up(line)
        if line.op in RINGS:
            return self._ring(line, function)
        if line.op in COLLECTIVES:
            return self._collective(line, bool(spare))
        return coded([self._coded(line, function, spare)])

    def _coded(self, line: Line, function: Function, spare: frozenset[str], dead: tuple[str, ...] = ()) -> CodedLine:
        """Return a line that no other rank takes part in, with its code."""
        kwargs = {key: self._literal(item) for key, item in line.kwargs}
        kernel, sites = self._kernel(line, function), list[Site]()
        if kernel is not None:
            sites = self._sites(line, function)
        elif any(argument.name == "device" for argument in operator(line.op)._schema.arguments):
            kwargs["device"] = self.device
        over = in_place(line, function, spare, self.mesh)
        addable = [value.name for value in line.made if value.name in self._addable[function.name]]
        direct = adds_itself(function, line) and bool(addable)
        return CodedLine(
            line, kernel or binding(line.op), [self._literal(item) for item in line.args], kwargs, sites,
            (over[0], [self._literal(item) for item in over[1]]) if over else None,
            Added(addable[0], self._adding_to(line, function)) if direct else None, () if direct else addable, dead,
        )  # fmt: skip

    def _function_call(self, line: Line, dying: frozenset[str]) -> Callable[[Sequence[Environment]], None]:
        function = self.program.function(line.op)
        pairs = [(value.name, item.name) for value, item in zip(function.parameters, line.args, strict=True)]
        names = [value.name for value in line.results if value is not None]
        outer = {
            inner: name
            for name, (_, inner) in zip(names, function.returns, strict=True)
            if inner in self._addable[function.name]
        }
        added = [(f"total of {inner}", f"total of {name}") for inner, name in outer.items()]

        def run(environments: Sequence[Environment]) -> None:
            inner = [{to: environment[name] for to, name in pairs} for environment in environments]
            for environment, into in zip(environments, inner, strict=True):
                for name in dying:
                    del environment[name]
                into.update((to, environment.pop(name)) for to, name in added if name in environment)
            for environment, results in zip(environments, self._call(function, inner), strict=True):
                environment.update(zip(names, results.values(), strict=True))

        return run

    def _collective(self, line: Line, spare: bool) -> Callable[[Sequence[Environment]], None]:
        options = [item for item in line.args if not isinstance(item, Ref)]
        take, result = itemgetter(*line.uses), line.made[0].name  # a tuple, if it reads several

        def run(environments: Sequence[Environment]) -> None:
            if result in environments[0]:
                return  # its result was given
            pieces = [take(environment) for environment in environments]
            results, arrival = self.backend.collective(line.op, options, pieces, spare)
            for environment, piece in zip(environments, results, strict=True):
                environment[result] = piece
            if arrival is not None:
                environments[0][arrival_name(result)] = arrival

        return run

    def _ring(self, line: Line, function: Function) -> Callable[[Sequence[Environment]], None]:
        kernel, sites, axes = self.kernels[line.op], self._sites(line, function), axes_of(line.args[1:])
        args = [self._literal(item) for item in line.args]

        def run(environments: Sequence[Environment]) -> None:
            parts = [
                kernel(site, *(map_references(item, environment.__getitem__) for item in args))
                for site, environment in zip(sites, environments, strict=True)
            ]
            for environment, results in zip(environments, self.backend.around(line.op, axes, parts), strict=True):
                environment.update((v.name, x) for v, x in zip(line.results, results, strict=True) if v is not None)

        return run

    def _message(self, function: Function, first: Line) -> Callable[[Sequence[Environment]], None]:
        """Return the call of a line whose operand travels with those of other lines: the first of them starts all."""
        together = [line for line in function.lines if line.op == first.op and line.kwargs == first.kwargs]
        takes = {line.made[0].name: itemgetter(*line.uses) for line in together}  # a tuple, where it reads several
        options = [[item for item in line.args if not isinstance(item, Ref)] for line in together]
        own = self._own.get(function.name, frozenset[str]()) if self.reuse else frozenset[str]()
        spare = [line.uses[0] in own for line in together]

        def run(environments: Sequence[Environment]) -> None:
            if first is not together[0]:
                return  # the first line began all
            pieces = [[*map(take, environments)] for take in takes.values()]
            results, arrival = self.backend.message(first.op, options, pieces, spare)
            for name, of_ranks in zip(takes, results, strict=True):
                for environment, piece in zip(environments, of_ranks, strict=True):
                    environment[name] = piece
                environments[0][arrival_name(name)] = arrival or wait_for_nothing

        return run

    def _added_up(self, line: Line) -> Callable[[Sequence[Environment]], None]:
        """Return the call of a line that adds a gradient to a total, unless it was added as it was made."""
        total, part = line.uses

        def run(environments: Sequence[Environment]) -> None:
            for environment in environments:
                before, own = environment[total], environment[part]
                environment[line.made[0].name] = own if part in self._given else before + own

        return run

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return a dtype as this machine reads it."""
        return _WIDER.get(dtype, dtype) if self.wide else dtype

    def _literal(self, item: Any) -> Any:
        """Return an argument with sizes as this rank sees them, and dtypes as this machine reads them."""
        if isinstance(item, LocalSize):
            return item.local(self.mesh)
        if isinstance(item, torch.dtype):
            return self.dtype(item)
        if isinstance(item, (list, tuple)):
            return type(item)(self._literal(inner) for inner in item)
        return item

    def _adds(self, function: Function, line: Line) -> bool:
        """Return whether the results of a line are added to totals as they are made."""
        return self.reuse and adds(function, line)

    def _makes_in_place(self, function: Function, line: Line) -> bool:
        """Return whether the result of a line can be made in its part of a buffer."""
        apart = self.products.apart(line, function, self.mesh)
        return line.op in code_for("into") and not apart and self._adds(function, line)

    def _kernel(self, line: Line, function: Function) -> Kernel | None:
        """Return the code that replaces the operator of a line."""
        library = line.op != PRODUCT or self.products.apart(line, function, self.mesh)
        return self.kernels.get(line.op) if library else None

    def _adding_to(self, line: Line, function: Function) -> Callable[..., Any]:
        """Return the function that adds the result of a line to a total, or makes it in its part of a buffer. A product
        that the library makes apart is made first."""
        add, into, delays = code_for("adding")[line.op], code_for("into").get(line.op), self._delayed[function.name]
        late, kernel = line.made[0].name in delays, self._kernel(line, function)
        if kernel is not None and kernel is not KERNELS.get(line.op):
            site = Site(self.mesh, self.coordinates[0], (), (), self.device)

            def add(total: torch.Tensor, *args: Any) -> torch.Tensor:
                return total.add_(kernel(site, *args))

        def added(total: Any, otherwise: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if isinstance(total, BufferPart):
                return otherwise(*args) if into is None else into(total.tensor(), *args)
            if self._later is None or not late:
                return add(total, *args, **options)
            self._later.append(partial(add, total, *args))
            return total

        return added

    def _sites(self, line: Line, function: Function) -> list[Site]:
        values = function.values()
        operands = [values[name].type for name in line.uses]
        results = [value.type for value in line.results if value is not None]
        return [self.site(self.mesh, at, operands, results, self.device, self.axis) for at in self.coordinates]
