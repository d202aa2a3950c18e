"""Programs compiled by Inductor: the lines between two collectives are a region, and equal regions are compiled once.

Values that differ between ranks or between equal blocks are inputs of a region: the global coordinates of the rank's
entries, and the keys of random streams. So all ranks have the same regions, and the processes of one host share
Inductor's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compiler.analysis.lifetimes import accumulates
from ...compiler.initial.counter import words
from ...compiler.layout.collectives import COLLECTIVES
from ...compiler.layout.placement import TensorType
from ...compiler.ops.rules import facts
from ...compiler.program.actions import ACTIONS
from ...compiler.program.program import Function, Line, Program, Ref, argument_text, map_references, operands
from ...compiler.torch_private import CompiledGraph, compile_graph, compiler_cache, fake_mode, missing_compiler
from ...grammar.codes import NO_COMPILER, NOT_COMPILED
from ..ranks.communication import Backend, Environment
from ..ranks.faults import RunError
from .coded import coded
from .execute import Machine, Prepared
from .registry import KernelContext
from .reuse import LineLiveness, in_flight, last_uses, made_by

_NOTHING_SPARE = frozenset[str]()
"""The empty set of operands to write over: Inductor reuses storage within a region by itself, and a region's results
may alias other values."""

DimOfType = tuple[TensorType, int]
"""A dim of a type. The global coordinates of a rank's entries along it differ from rank to rank."""


@dataclass(slots=True)
class _Lifted:
    """Values that a region asks its context for while it is traced, lifted to inputs: global coordinates by dim, and
    the keys of streams."""

    tracing: bool = False
    coordinates: dict[DimOfType, Tensor] = field(default_factory=dict)
    keys: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegionContext(KernelContext):
    """The context of a line in a region. While the region is traced it returns inputs for values that differ by rank or
    step."""

    lifted: _Lifted

    @property
    def traced(self) -> bool:
        return self.lifted.tracing

    def index(self, type_: TensorType, dim: int) -> Tensor:
        if not self.lifted.tracing:
            return KernelContext.index(self, type_, dim)
        if (type_, dim) not in self.lifted.coordinates:
            self.lifted.coordinates[type_, dim] = KernelContext.index(self, type_, dim)
        return self.lifted.coordinates[type_, dim]

    def key(self, key: Tensor) -> Any:
        if not self.lifted.tracing:
            return KernelContext.key(self, key)
        self.lifted.keys.append(key)
        return (key[0], key[1]) if key.dim() else (key, key)


@dataclass(frozen=True, slots=True)
class _Region:
    """Lines without a collective; equal regions have equal ``text``."""

    lines: tuple[Line, ...]
    text: str


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """A compiled region; ``call`` is None where compiling gains nothing. After its values it takes the coordinates
    along ``dims``. The values at the positions ``keys`` are keys of streams, passed as two numbers each."""

    call: CompiledGraph | None
    dims: tuple[DimOfType, ...]
    keys: tuple[int, ...]


class Regions:
    """The distinct regions of a step's programs, and their compiled code.

    Raises:
        RunError: the device's compiler is missing.
    """

    def __init__(self, device: torch.device) -> None:
        check_compiler(device)
        self.device = device
        self.seconds = 0.0
        self.texts: set[str] = set()
        self._codes: dict[tuple[Any, ...], CompiledRegion] = {}

    @property
    def distinct(self) -> int:
        """The number of different regions."""
        return len(self.texts)

    def machine(self, program: Program, backend: Backend, device: torch.device, **options: Any) -> Machine:
        """Return the machine of a program: a compiled one if the program is of an action that is worth it (F and B) and
        its lines are not watched."""
        if not ACTIONS[program.action].compiled or options.get("watch") is not None:
            return Machine(program, backend, device, **options)
        return CompiledMachine(program, backend, device, regions=self, **options)

    def code(
        self, region: _Region, values: Sequence[Tensor], body: Callable[..., Any], lifted: _Lifted
    ) -> CompiledRegion:
        """Return the code of a region for values of these strides, compiled at the first call.

        Raises:
            RunError: it cannot be compiled.
        """
        key = (region.text, *(value.stride() for value in values))
        if key not in self._codes:
            start = time.perf_counter()
            try:
                with _one_at_a_time(repr((key, self.device))):
                    self._codes[key] = _compile(values, body, lifted, self.device)
            except Exception as error:
                raise _compile_error(region, error) from error
            self.seconds += time.perf_counter() - start
        return self._codes[key]


class CompiledMachine(Machine):
    """A machine that runs the lines between collectives as compiled regions. Its lines cannot be watched."""

    def __init__(self, program: Program, backend: Backend, device: torch.device, *, regions: Regions, **options: Any):
        self._regions, self._lifted = regions, _Lifted()
        self._indices: dict[tuple[int, DimOfType], Tensor] = {}
        self.new_context = partial(_RegionContext, lifted=self._lifted)
        super().__init__(program, backend, device, **options)

    def _makes_in_place(self, function: Function, line: Line) -> bool:
        return not facts(line.op).compiled and super()._makes_in_place(function, line)

    def _line_by_line(self, function: Function) -> list[Prepared]:
        return self._steps[function.name]  # what is compiled together runs together

    def _prepare(self, function: Function) -> list[Prepared]:
        groups, sums = _cut_regions(function), in_flight(function.lines)
        steps = []
        for group, dead in zip(groups, last_uses(function, groups), strict=True):
            awaited = tuple(sums.intersection(operands(group)))
            if len(group) == 1 and (not _is_local(group[0]) or accumulates(function, group[0])):
                steps.append(self._step(group[0], function, LineLiveness(_NOTHING_SPARE, awaited, dead)))
                continue
            outputs = tuple(name for name in made_by(group) if name not in dead)
            run = self._region(function, group, outputs, frozenset(dead))
            steps.append(Prepared(group[-1], run, awaited, (), group[0]))
        return steps

    def _region(
        self, function: Function, lines: tuple[Line, ...], outputs: tuple[str, ...], dead: frozenset[str]
    ) -> Callable[[Sequence[Environment]], None]:
        inputs = tuple(operands(lines))
        region = _Region(lines, f"wide={self.wide}\n{self._text(function, lines, inputs, outputs)}")
        self._regions.texts.add(region.text)
        addable = self._addable[function.name].intersection(outputs)
        plain = (self._coded(line, function, _NOTHING_SPARE) for line in lines)
        stretch = coded([replace(line, added=None, totalled=()) for line in plain])

        def body(*values: Tensor) -> list[Tensor]:
            environment: Environment = dict(zip(inputs, values, strict=True))
            stretch([environment])
            return [environment[name] for name in outputs]

        def run(environments: Sequence[Environment]) -> None:
            for lane, environment in enumerate(environments):
                values = [environment.pop(name) if name in dead else environment[name] for name in inputs]
                results = self._run(region, lane, values, body)
                environment.update(zip(outputs, results, strict=True))
                if addable:
                    _add_up(environment, addable, [*values, *results])

        return run

    def _run(self, region: _Region, lane: int, values: list[Any], body: Callable[..., Any]) -> Sequence[Tensor]:
        code = self._regions.code(region, values, body, self._lifted)
        if code.call is None:
            return body(*values)  # type: ignore[no-any-return]
        for at in code.keys:
            values[at] = torch.tensor(words(int(values[at])), device=self.device)
        values += [self._index(lane, dim) for dim in code.dims]
        return code.call(values)

    def _index(self, lane: int, of: DimOfType) -> Tensor:
        if (lane, of) not in self._indices:
            context = KernelContext(self.mesh, self.coordinates[lane], [], [], self.device)
            self._indices[lane, of] = context.index(*of)
        return self._indices[lane, of]

    def _text(self, function: Function, lines: Sequence[Line], inputs: Sequence[str], outputs: Sequence[str]) -> str:
        """Return a region's operators, types and flow of values as text, without names and origins."""
        types = {name: value.type.text(self.mesh) for name, value in function.values().items()}
        number = {name: f"v{at}" for at, name in enumerate((*inputs, *made_by(lines)))}
        rows = [f"{number[name]}: {types[name]}" for name in inputs]
        for line in lines:
            items = [(None, item) for item in line.args] + list(line.kwargs)
            operands = [
                f"{key}={argument_text(map_references(i, lambda name: Ref(number[name])), self.mesh)}"
                for key, i in items
            ]
            results = ["_" if value is None else f"{number[value.name]}: {types[value.name]}" for value in line.results]
            rows.append(f"{'; '.join(results)} = {line.op}({', '.join(operands)})")
        return "\n".join([*rows, *(number[name] for name in outputs)])


def _add_up(environment: Environment, addable: Collection[str], others: Sequence[Tensor]) -> None:
    """Add results of a region to their totals. A result without a total becomes the total, so it is cloned if it shares
    storage with another value of the region."""
    shared = Counter(other.untyped_storage().data_ptr() for other in others)
    for name in addable:
        result, total = environment[name], environment.pop(f"total of {name}", None)
        if total is not None:
            environment[name] = total.add_(result)
        elif shared[result.untyped_storage().data_ptr()] > 1:
            environment[name] = result.clone()


def check_compiler(device: torch.device) -> None:
    """Check that Inductor has the compiler that it needs for a device.

    Raises:
        RunError: it has not; says what is missing.
    """
    missing = missing_compiler(device)
    if missing:
        help_ = "install g++, or set CXX to a C++ compiler" if device.type == "cpu" else "install triton"
        raise RunError(NO_COMPILER, f"--compile needs {missing}, which is not here", f"{help_}; or run without it")


def _is_local(line: Line) -> bool:
    if any(value.type.packed for value in line.made):  # its size changes from step to step
        return False
    return not line.calls_function and line.op not in COLLECTIVES and facts(line.op).compiled


def _cut_regions(function: Function) -> list[tuple[Line, ...]]:
    """Cut lines into groups: a region, or one line outside of regions. An operator that is not compiled goes before the
    open region if it reads nothing from it, so that the region need not end. A region ends before the first line that
    waits for a collective, so that its lines overlap with the collective."""
    groups: list[tuple[Line, ...]] = []
    region: list[Line] = []
    pending = set[str]()
    for line in function.lines:
        local = _is_local(line) and not accumulates(function, line)
        if region and not pending.isdisjoint(line.uses):
            groups.append(tuple(region))
            region = []
        pending.difference_update(line.uses)
        pending.update(in_flight([line]))
        if local:
            region.append(line)
            continue
        if region and (facts(line.op).compiled or not set(made_by(region)).isdisjoint(line.uses)):
            groups.append(tuple(region))
            region = []
        groups.append((line,))
    return [*groups, tuple(region)] if region else groups


def _compile(
    values: Sequence[Tensor], body: Callable[..., Any], lifted: _Lifted, device: torch.device
) -> CompiledRegion:
    """Trace a region twice on fake tensors: first to see what it asks its context for, then with that as inputs."""
    mode = fake_mode()
    fakes: list[Tensor] = [mode.from_tensor(value) for value in values]
    lifted.tracing = True
    try:
        with mode:
            body(*fakes)
        dims = lifted.coordinates
        keys = [at for at, fake in enumerate(fakes) if any(fake is key for key in lifted.keys)]
        with mode:
            for at in keys:
                fakes[at] = torch.empty(2, dtype=torch.int64, device=device)

        def function(*operands: Tensor) -> Any:
            lifted.coordinates = dict(zip(dims, operands[len(values) :], strict=True))
            return body(*operands[: len(values)])

        call = compile_graph(function, [*fakes, *dims.values()])
    finally:
        lifted.tracing, lifted.coordinates, lifted.keys = False, {}, []
    return CompiledRegion(call, tuple(dims), tuple(keys))


@contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    """Hold a lock of this host, so that processes with equal regions do not compile at the same time: those that wait
    find the code in the cache."""
    folder = Path(compiler_cache()) / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"parc-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile_error(region: _Region, error: Exception) -> RunError:
    origin = next((line.origin for line in region.lines if line.origin.source), region.lines[0].origin)
    where = f"from {origin.source or region.lines[0].op} on" + (f" (`{origin.module}`)" if origin.module else "")
    rows = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    faults = [line for line in rows if "error:" in line]
    return RunError(
        NOT_COMPILED, f"the lines {where} cannot be compiled", "run without --compile", (faults or rows)[:4]
    )
