"""The machine: a program's lines prepared as calls, and run for one rank or for several ranks in lockstep."""

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
from .registry import Kernel, KernelContext, binding, code_for, library_of
from .reuse import LineLiveness, in_place, liveness

# ---- gradient buckets: the gradients of one message are made in one allocation, so that nothing is packed
#     grad_up = mm(x, grad)       # entries 0 to 511 of the bucket of message 1
#     grad_down = mm(h, grad)     # entries 512 to 1023


@dataclass(slots=True)
class _Bucket:
    """The memory of one message's gradients of one dtype, allocated when the first of them is made."""

    dtype: torch.dtype
    device: torch.device
    entries: int = 0
    memory: torch.Tensor | None = None


@final
@dataclass(frozen=True, slots=True)
class BucketPart:
    """The part of a bucket for one gradient, from the bucket's entry ``begin`` on."""

    bucket: _Bucket
    begin: int
    shape: Shape

    def tensor(self) -> torch.Tensor:
        """Return the part as a tensor with uninitialized entries."""
        bucket = self.bucket
        if bucket.memory is None:
            bucket.memory = torch.empty(bucket.entries, dtype=bucket.dtype, device=bucket.device)
        return bucket.memory[self.begin : self.begin + math.prod(self.shape)].view(self.shape)


def bucket_parts(buckets: Iterable[Sequence[BucketGradient]], device: torch.device) -> Iterator[tuple[str, BucketPart]]:
    """Yield the names of the gradients of each bucket, each with its part of a bucket that is not yet allocated."""
    for gradients in buckets:
        bucket = _Bucket(gradients[0].dtype, device)
        for gradient in gradients:
            yield gradient.name, BucketPart(bucket, bucket.entries, gradient.shape)
            bucket.entries += math.prod(gradient.shape)


# ---- prepared lines, and their ranges in a profile

_Run = Callable[[Sequence[Environment]], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A line, or several, as the function ``run(environments)``, with the values that must have arrived before it and
    the names that nobody reads after it. ``line`` is the last of the lines, ``first`` the first of several."""

    line: Line
    run: _Run
    awaited: tuple[str, ...]
    dead: tuple[str, ...]
    first: Line | None = None


def in_ranges(program: Program, function: Function, steps: Sequence[Prepared]) -> list[Prepared]:
    """Return a function's prepared lines as ranges of torch's profiler. Their names have the program's file and row,
    the results and the operator, and the origin in the model and the plan."""
    first = program.text().split("\n").index(f"def {function.name}(") + len(function.parameters) + 3
    original = program.function(function.name)
    rows = {value.name: row for row, line in enumerate(original.lines, first) for value in line.made}

    def in_range(step: Prepared) -> Prepared:
        last = step.line
        span = dict.fromkeys(str(rows[line.made[0].name]) for line in (step.first or last, last) if line.made)
        range_name = f"{program.role}.{program.action}.py:{'-'.join(span)} {last.names} = {last.op} | {last.origin}"

        def run(environments: Sequence[Environment]) -> None:
            with torch.profiler.record_function(range_name):
                step.run(environments)

        return replace(step, run=run)

    return [in_range(step) for step in steps]


def _makes_floats(line: Line, function: Function) -> bool:
    """Return whether an operator makes floating numbers of whole ones in torch's default dtype, as a quotient does."""
    values = function.values()
    read = [values[name].type.dtype for name in line.uses]
    whole = bool(read) and not any(dtype.is_floating_point or dtype.is_complex for dtype in read)
    chooses = operator(line.op)._schema.arguments[0].name == "condition"  # between numbers, by a mask
    return (
        whole and not chooses and line.made[0].type.dtype.is_floating_point and dict(line.kwargs).get("dtype") is None
    )


def _on_floats(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*(arg.to(torch.float64) if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)


# ---- the machine

_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}


class Machine:
    """The machine of one program. ``wide`` reads every floating dtype as float64; ``kernels`` run in place of
    operators. With ``reuse`` lines are fused, and write over dead values, also over gradients among the inputs.
    ``watch`` is called after each line. ``axis`` is that of the pipeline."""

    new_context: Callable[..., KernelContext] = KernelContext

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
        self._addable = addable(program, self._adds)
        self._buckets = gradient_buckets(program, self._makes_in_place, self.dtype)
        self._aliases = aliases(program)
        self._accumulated: set[str] = set()
        """The results of the main function that run() was given a total for."""
        self._overwritable = {main.name: reducible_in_place(program, main) for main in program.mains}
        self._in_flight = frozenset(on_their_way(program).values())
        self._steps = {function.name: self._prepare(function) for function in program.functions}
        self._observed_steps: dict[tuple[str, bool], list[Prepared]] = {}

    def all_reduced(self, key: Binding, pieces: Sequence[torch.Tensor], rank: int) -> Environment:
        """Return one rank's result of the all-reduce that is the only reader of a parameter, given the pieces of all
        ranks of the mesh; an empty environment if there is no such line. With it among its inputs, ``run`` skips the
        all-reduce."""
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
        """The bindings of results that ``run`` can add to a total. Without a total, these results share no storage, but
        may be parts of a bucket."""
        main = self.program.main
        return frozenset(key for key, name in main.returns if name in self._addable[main.name])

    def run(
        self,
        inputs: Sequence[Environment],
        function: str | None = None,
        totals: Sequence[BoundTensors] = (),
        arriving: dict[Binding, Arrival] | None = None,
    ) -> list[BoundTensors]:
        """Run the main function, or another one, and return its results on each rank of this process. A result in
        ``addable`` with a total in ``totals`` is added to that, and the total is returned. ``arriving`` has the waits
        for inputs that are in flight, and gets those for results in flight.

        ``inputs`` and ``totals`` are emptied, so that values die after their last use.
        """
        main = self.program.main if function is None else self.program.function(function)
        environments = [dict(values) for values in inputs]
        names = dict(self.program.main.returns)
        for environment, table in zip(environments, totals, strict=bool(totals)):
            environment.update((f"total of {names[key]}", total) for key, total in table.items())
        self._accumulated = {names[key] for table in totals for key in table}
        for environment in environments:
            for name, part in bucket_parts(self._buckets, self.device):
                environment.setdefault(f"total of {name}", part)
        for values in inputs:
            values.clear()
        for table in totals:
            table.clear()
        waits = {} if arriving is None else arriving
        for value in main.parameters:
            if value.binding in waits:
                environments[0][arrival_name(value.name)] = waits.pop(value.binding)
        results = self._call(main, environments)
        for key, name in main.returns:
            if (arrival := environments[0].pop(arrival_name(name), None)) is not None:
                waits[key] = arrival
        return results

    def _call(self, function: Function, environments: list[Environment]) -> list[BoundTensors]:
        for step in self._steps_of(function):
            for name in step.awaited:
                environments[0].pop(arrival_name(name), wait_for_nothing)()
            step.run(environments)
            if self.watch is not None and MESSAGE not in dict(step.line.kwargs):  # which is in flight until a wait
                for value in step.line.made:
                    environments[0].pop(arrival_name(value.name), wait_for_nothing)()
                self.watch(step.line, environments)
            for name in step.dead:
                for environment in environments:
                    del environment[name]
        in_flight = self._in_flight if function is self.program.mains[0] else ()
        for _, name in function.returns:
            if name not in in_flight:
                environments[0].pop(arrival_name(name), wait_for_nothing)()
        return [{key: environment[name] for key, name in function.returns} for environment in environments]

    def _steps_of(self, function: Function) -> list[Prepared]:
        profiled = profiling()
        if self.watch is None and not profiled:
            return self._steps[function.name]
        if (function.name, profiled) not in self._observed_steps:
            steps = self._line_by_line(function)
            steps = in_ranges(self.program, function, steps) if profiled else steps
            self._observed_steps[function.name, profiled] = steps
        return self._observed_steps[function.name, profiled]

    def _prepare(self, function: Function) -> list[Prepared]:
        """Return a function's lines as stretches of code, and as single lines where other ranks take part."""
        function, lives = self._with_liveness(function)
        steps, stretch = list[Prepared](), list[CodedLine]()

        def end() -> None:
            if stretch:
                steps.append(Prepared(stretch[-1].line, coded(stretch), awaited_first, (), stretch[0].line))
                stretch.clear()

        awaited_first: tuple[str, ...] = ()
        for line, life in zip(function.lines, lives, strict=True):
            alone = self._runs_alone(line, function)
            if alone or life.awaited:
                end()
            if alone:
                steps.append(self._step(line, function, life))
                continue
            awaited_first = awaited_first if stretch else life.awaited
            stretch.append(self._coded(line, function, life.spare, life.dead))
        end()
        return steps

    def _line_by_line(self, function: Function) -> list[Prepared]:
        """Return a function's lines one by one, for a watch or a profile."""
        function, lives = self._with_liveness(function)
        return [self._step(line, function, life) for line, life in zip(function.lines, lives, strict=True)]

    def _with_liveness(self, function: Function) -> tuple[Function, Sequence[LineLiveness]]:
        """Return a function, fused with ``reuse``, and the liveness of its values."""
        known = self._aliases[function.name]
        if self.reuse:
            function = fused(function, known, self.mesh, self.products)
        return function, liveness(function, known, self.reuse)

    def _step(self, line: Line, function: Function, life: LineLiveness) -> Prepared:
        if not line.calls_function:
            return Prepared(line, self._run_of(line, function, life.spare), life.awaited, life.dead)
        dying = frozenset(life.dead).intersection(line.uses)  # the called function frees them after their last use
        dead = tuple(name for name in life.dead if name not in dying)
        return Prepared(line, self._function_call(line, dying), life.awaited, dead)

    def _runs_alone(self, line: Line, function: Function) -> bool:
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
        """Return a line without communication as code."""
        kwargs = {key: self._literal(item) for key, item in line.kwargs}
        kernel, contexts = self._kernel(line, function), list[KernelContext]()
        if kernel is not None:
            contexts = self._contexts(line, function)
        elif any(argument.name == "device" for argument in operator(line.op)._schema.arguments):
            kwargs["device"] = self.device
        over = in_place(line, function, spare, self.mesh)
        addable = [value.name for value in line.made if value.name in self._addable[function.name]]
        direct = adds_itself(function, line) and bool(addable)
        call = kernel or binding(line.op)
        if self.wide and kernel is None and _makes_floats(line, function):
            call = partial(_on_floats, call)
        return CodedLine(
            line, call, [self._literal(item) for item in line.args], kwargs, contexts,
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
                return  # see all_reduced
            pieces = [take(environment) for environment in environments]
            results, arrival = self.backend.collective(line.op, options, pieces, spare)
            for environment, piece in zip(environments, results, strict=True):
                environment[result] = piece
            if arrival is not None:
                environments[0][arrival_name(result)] = arrival

        return run

    def _ring(self, line: Line, function: Function) -> Callable[[Sequence[Environment]], None]:
        kernel, contexts, axes = self.kernels[line.op], self._contexts(line, function), axes_of(line.args[1:])
        args = [self._literal(item) for item in line.args]

        def run(environments: Sequence[Environment]) -> None:
            parts = [
                kernel(context, *(map_references(item, environment.__getitem__) for item in args))
                for context, environment in zip(contexts, environments, strict=True)
            ]
            for environment, results in zip(environments, self.backend.run_ring(line.op, axes, parts), strict=True):
                environment.update((v.name, x) for v, x in zip(line.results, results, strict=True) if v is not None)

        return run

    def _message(self, function: Function, first: Line) -> Callable[[Sequence[Environment]], None]:
        """Return the call of a line of a message of several tensors, which its first line starts for all of them."""
        lines = [line for line in function.lines if line.op == first.op and line.kwargs == first.kwargs]
        takes = {line.made[0].name: itemgetter(*line.uses) for line in lines}  # a tuple, where it reads several
        options = [[item for item in line.args if not isinstance(item, Ref)] for line in lines]
        overwritable = self._overwritable.get(function.name, frozenset[str]()) if self.reuse else frozenset[str]()
        spare = [line.uses[0] in overwritable for line in lines]

        def run(environments: Sequence[Environment]) -> None:
            if first is not lines[0]:
                return
            pieces = [[*map(take, environments)] for take in takes.values()]
            results, arrival = self.backend.message(first.op, options, pieces, spare)
            for name, of_ranks in zip(takes, results, strict=True):
                for environment, piece in zip(environments, of_ranks, strict=True):
                    environment[name] = piece
                environments[0][arrival_name(name)] = arrival or wait_for_nothing

        return run

    def _added_up(self, line: Line) -> Callable[[Sequence[Environment]], None]:
        """Return the call of a line that adds a gradient to a total, if that was not done when the gradient was
        made."""
        total, part = line.uses

        def run(environments: Sequence[Environment]) -> None:
            for environment in environments:
                # an accumulated part is the total already
                value = environment[part]
                environment[line.made[0].name] = value if part in self._accumulated else environment[total] + value

        return run

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return a dtype as this machine reads it."""
        return _WIDER.get(dtype, dtype) if self.wide else dtype

    def _literal(self, item: Any) -> Any:
        """Return an argument with local sizes, and with dtypes as this machine reads them."""
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
        """Return whether the result of a line can be made in its part of a bucket."""
        apart = self.products.apart(line, function, self.mesh)
        return line.op in code_for("into") and not apart and self._adds(function, line)

    def _kernel(self, line: Line, function: Function) -> Kernel | None:
        """Return the code that replaces the operator of a line."""
        library = line.op != PRODUCT or self.products.apart(line, function, self.mesh)
        return self.kernels.get(line.op) if library else None

    def _adding_to(self, line: Line, function: Function) -> Callable[..., Any]:
        """Return the function that adds the result of a line to a total, or makes it in its part of a bucket. A kernel
        that cannot accumulate makes the result first."""
        add, into = code_for("adding")[line.op], code_for("into").get(line.op)
        kernel = self._kernel(line, function)
        if kernel is not None and kernel is not KERNELS.get(line.op):
            context = KernelContext(self.mesh, self.coordinates[0], (), (), self.device)

            def add(total: torch.Tensor, *args: Any) -> torch.Tensor:
                return total.add_(kernel(context, *args))

        def added(total: Any, otherwise: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if isinstance(total, BucketPart):
                return otherwise(*args) if into is None else into(total.tensor(), *args)
            return add(total, *args, **options)

        return added

    def _contexts(self, line: Line, function: Function) -> list[KernelContext]:
        values = function.values()
        operands = [values[name].type for name in line.uses]
        results = [value.type for value in line.results if value is not None]
        return [self.new_context(self.mesh, at, operands, results, self.device, self.axis) for at in self.coordinates]
