"""Execution: a program's lines as calls, for one rank or for several in lock step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch

from ...compiler.layout.collectives import COLLECTIVES, MESSAGE, SUMS, axes_of
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.rings import RINGS
from ...compiler.program.binding import Binding
from ...compiler.program.early import on_their_way
from ...compiler.program.program import Function, Line, LocalSize, Program, Ref, map_references, operator, references
from ...compiler.program.totals import addable, adds_up, uses_of
from ...compiler.torch_private import profiling
from ..communication import Arrival, Backend, BoundTensors, Environment, arrival_name, wait_for_nothing
from .fusion import fused
from .gradient_buffers import BufferPart, GradientBuffers
from .kernels import KERNELS
from .prepared import Prepared, ProfileRanges
from .reuse import in_place, lives, own_in_main
from .site import Site
from .ways import Kernel, binding, code_for

_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}


class Machine:
    """The machine of one program. ``wide`` reads every floating dtype as float64; ``kernels`` are the code of parc's
    operators. With ``reuse`` lines are fused, and write over values that nobody reads again, also over gradients that
    they are given."""

    site: Callable[..., Site] = Site
    adding: Mapping[str, Callable[..., torch.Tensor]] = code_for("adding")
    into: Mapping[str, Callable[..., torch.Tensor]] = code_for("into")

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
    ) -> None:
        self.program = program
        self.mesh: Mesh = program.mesh
        self.backend, self.device, self.wide, self.kernels, self.watch = backend, device, wide, kernels, watch
        self.reuse = reuse
        self.coordinates = [self.mesh.coordinates(rank) for rank in backend.ranks]
        self._adding = {op: self._adder(op, add) for op, add in self.adding.items() if reuse}
        self._addable = addable(program, self._adding)
        self._into = {op: make for op, make in self.into.items() if reuse and op not in kernels}
        self._buffers = GradientBuffers(program, addable(program, self._into)[program.main.name], self.dtype)
        self._later: list[Callable[[], torch.Tensor]] | None = None
        self._given: set[str] = set()
        self._own = own_in_main(program)
        self._on_their_way = frozenset(on_their_way(program).values())
        self._steps = {function.name: self._prepare(function) for function in program.functions}
        self._ranges = ProfileRanges(program)

    def summed(self, key: Binding, pieces: Sequence[torch.Tensor], rank: int) -> Environment:
        """Return the result of the sum that alone reads a parameter, for one rank, given the pieces of all ranks of the
        mesh; nothing, if there is no such sum. ``run`` takes it among its inputs, and does not sum again."""
        main = self.program.main
        name, uses = next((value.name for value in main.parameters if value.binding == key), ""), uses_of(main)
        line = next((line for line in main.lines if line.op == SUMS[0] and name in line.uses()), None)
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

        ``inputs`` are taken apart while the program runs, so that values die after their last use.
        """
        main = self.program.main if function is None else self.program.function(function)
        environments = [dict(given) for given in inputs]
        names, self._later = dict(self.program.main.returns), later
        for environment, table in zip(environments, totals, strict=bool(totals)):
            environment.update((f"total of {names[key]}", total) for key, total in table.items())
        self._given = {names[key] for table in totals for key in table}
        for environment in environments if self._buffers else ():
            for name, part in self._buffers.parts(self.device):
                environment.setdefault(f"total of {name}", part)
        for given in inputs:
            given.clear()
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
        steps = self._steps[function.name]
        for step in self._ranges.of(function, steps) if profiling() else steps:
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

    def _prepare(self, function: Function) -> list[Prepared]:
        if self.reuse:
            function = fused(function, self.mesh, products="aten.mm.default" not in self.kernels)
        known = lives(function, self._addable[function.name], self.reuse)
        return [
            self._step(line, function, spare, awaited, dead)
            for line, spare, awaited, dead in zip(function.lines, known.spare, known.awaited, known.dead, strict=True)
        ]

    def _step(
        self, line: Line, function: Function, spare: frozenset[str], awaited: tuple[str, ...], dead: tuple[str, ...]
    ) -> Prepared:
        if not line.calls_function:
            return Prepared(line, self._compile(line, function, spare), awaited, dead)
        dying = frozenset(dead).intersection(line.uses())  # they die within the call, after their last use there
        return Prepared(
            line, self._function_call(line, dying), awaited, tuple(name for name in dead if name not in dying)
        )

    def _compile(
        self, line: Line, function: Function, spare: frozenset[str]
    ) -> Callable[[Sequence[Environment]], None]:
        if MESSAGE in dict(line.kwargs):
            return self._message(function, line)
        if adds_up(function, line):
            return self._added_up(line)
        if line.op in RINGS:
            return self._ring(line, function)
        if line.op in COLLECTIVES:
            return self._collective(line, bool(spare))
        call = self._kernel(line, function) if line.op in self.kernels else self._aten(line)
        if over := in_place(line, function, spare, self.mesh):
            call = self._over(line, call, *over)
        names = tuple(None if value is None else value.name for value in line.results)
        single = names[0] if len(names) == 1 else None
        if single in self._addable[function.name]:
            call = self._added(line, call)

        def run(environments: Sequence[Environment]) -> None:
            for lane, environment in enumerate(environments):
                result = call(lane, environment)
                if single is not None and not isinstance(result, (list, tuple)):
                    environment[single] = result
                    continue
                for name, item in zip(names, result, strict=True):
                    if name is not None:
                        environment[name] = item

        return run

    def _function_call(self, line: Line, given: frozenset[str]) -> Callable[[Sequence[Environment]], None]:
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
                for name in given:
                    del environment[name]
                into.update((to, environment.pop(name)) for to, name in added if name in environment)
            for environment, results in zip(environments, self._call(function, inner), strict=True):
                environment.update(zip(names, results.values(), strict=True))

        return run

    def _collective(self, line: Line, spare: bool) -> Callable[[Sequence[Environment]], None]:
        options = [item for item in line.args if not isinstance(item, Ref)]
        take, result = itemgetter(*line.uses()), line.made[0].name  # a tuple, if it reads several

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
        part, axes = self._kernel(line, function), axes_of(line.args[1:])

        def run(environments: Sequence[Environment]) -> None:
            parts = [part(lane, environment) for lane, environment in enumerate(environments)]
            for environment, made in zip(environments, self.backend.around(line.op, axes, parts), strict=True):
                environment.update((v.name, x) for v, x in zip(line.results, made, strict=True) if v is not None)

        return run

    def _message(self, function: Function, first: Line) -> Callable[[Sequence[Environment]], None]:
        """Return the call of a line whose operand travels with those of other lines: the first of them starts all."""
        together = [line for line in function.lines if line.op == first.op and line.kwargs == first.kwargs]
        takes = {line.made[0].name: itemgetter(*line.uses()) for line in together}  # a tuple, where it reads several
        options = [[item for item in line.args if not isinstance(item, Ref)] for line in together]
        spare = [self.reuse and next(line.uses()) in self._own for line in together]

        def run(environments: Sequence[Environment]) -> None:
            if first is not together[0]:
                return  # the first line began all
            pieces = [[*map(take, environments)] for take in takes.values()]
            made, arrival = self.backend.message(first.op, options, pieces, spare)
            for name, of_ranks in zip(takes, made, strict=True):
                for environment, piece in zip(environments, of_ranks, strict=True):
                    environment[name] = piece
                environments[0][arrival_name(name)] = arrival or wait_for_nothing

        return run

    def _added_up(self, line: Line) -> Callable[[Sequence[Environment]], None]:
        """Return the call of a line that adds a gradient to a total, unless it was added as it was made."""
        total, part = line.uses()

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

    def _arguments(self, line: Line) -> Callable[[Environment], list[Any]]:
        args = [self._literal(item) for item in line.args]
        if not any(isinstance(item, (list, tuple)) and any(references(item)) for item in args):
            plan = [(item.name, True) if isinstance(item, Ref) else (item, False) for item in args]
            return lambda environment: [environment[item] if named else item for item, named in plan]
        return lambda environment: [map_references(item, environment.__getitem__) for item in args]

    def _aten(self, line: Line) -> Callable[[int, Environment], Any]:
        arguments = self._arguments(line)
        kwargs = {key: self._literal(item) for key, item in line.kwargs}
        if any(argument.name == "device" for argument in operator(line.op)._schema.arguments):
            kwargs["device"] = self.device
        call = binding(line.op)
        return lambda _, environment: call(*arguments(environment), **kwargs)

    def _over(
        self, line: Line, otherwise: Callable[[int, Environment], Any], function: Any, args: list[Any]
    ) -> Callable[[int, Environment], Any]:
        """Return a call that writes over the first operand, unless its entries share storage, as those of an expanded
        one do."""
        first = args[0].name
        arguments = self._arguments(replace(line, args=tuple(args)))
        kwargs = {key: self._literal(item) for key, item in line.kwargs}

        def call(lane: int, environment: Environment) -> Any:
            if environment[first].is_contiguous():
                return function(*arguments(environment), **kwargs)
            return otherwise(lane, environment)

        return call

    def _adder(self, op: str, add: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the function that adds an operator's result to a total. A kernel that replaces the operator has no
        such call: its result is made first."""
        kernel = self.kernels.get(op)
        if kernel is None or kernel is KERNELS.get(op):
            return add
        site = Site(self.mesh, self.coordinates[0], (), (), self.device)
        return lambda total, *args: total.add_(kernel(site, *args))

    def _added(self, line: Line, otherwise: Callable[[int, Environment], Any]) -> Callable[[int, Environment], Any]:
        """Return a call that adds to the total of the line's result, or makes it in its part of a buffer, where there
        is one."""
        arguments, add, into = self._arguments(line), self._adding[line.op], self._into.get(line.op)

        def call(lane: int, environment: Environment) -> Any:
            total = environment.pop(f"total of {line.made[0].name}", None)
            if isinstance(total, BufferPart) and into is not None:
                return into(total.tensor(), *arguments(environment))
            if total is None or isinstance(total, BufferPart):
                return otherwise(lane, environment)
            if self._later is None:
                return add(total, *arguments(environment))
            self._later.append(partial(add, total, *arguments(environment)))
            return total

        return call

    def _kernel(self, line: Line, function: Function) -> Callable[[int, Environment], Any]:
        kernel = self.kernels[line.op]
        arguments = self._arguments(line)
        values = function.values()
        operands = [values[name].type for name in line.uses()]
        results = [value.type for value in line.results if value is not None]
        sites = [self.site(self.mesh, at, operands, results, self.device) for at in self.coordinates]
        return lambda lane, environment: kernel(sites[lane], *arguments(environment))
