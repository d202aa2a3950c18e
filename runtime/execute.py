"""Execution: a program's lines as calls, for one rank or for several in lock step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..compiler.collectives import COLLECTIVES
from ..compiler.mesh import Mesh
from ..compiler.program import Cut, Function, Line, Program, Ref, map_references, operator
from .kernels import KERNELS, Kernel, Site

Environment = dict[str, Any]


class Backend(Protocol):
    """How collectives happen. ``pieces`` are the operands of this process's ranks, results come back alike."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that this process computes."""

    def collective(self, op: str, args: Sequence[Any], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a collective over all ranks of its groups."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A line made ready: ``run(environments)``, and the names nobody reads after it."""

    line: Line
    run: Callable[[Sequence[Environment]], None]
    dead: tuple[str, ...]


_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}


class Machine:
    """Runs one program. ``wide`` reads every floating dtype as float64; ``kernels`` are those of parc's operators."""

    def __init__(
        self,
        program: Program,
        backend: Backend,
        device: torch.device,
        *,
        wide: bool = False,
        kernels: Mapping[str, Kernel] = KERNELS,
        watch: Callable[[Line, Sequence[Environment]], None] | None = None,
    ) -> None:
        self.program = program
        self.mesh: Mesh = program.mesh
        self.backend, self.device, self.wide, self.kernels, self.watch = backend, device, wide, kernels, watch
        self.coordinates = [self.mesh.coordinates(rank) for rank in backend.ranks]
        self._steps: dict[str, list[_Step]] = {}
        for function in program.functions:
            self._steps[function.name] = self._prepare(function)

    def run(self, inputs: Sequence[Environment], function: str | None = None) -> list[Environment]:
        """The results by key of the main function, or of another; one a rank of this process.

        ``inputs`` are taken apart while the program runs, so that values die after their last use.
        """
        main = self.program.main if function is None else self.program.function(function)
        environments = [dict(given) for given in inputs]
        for given in inputs:
            given.clear()
        return self._call(main, environments)

    def _call(self, function: Function, environments: list[Environment]) -> list[Environment]:
        for step in self._steps[function.name]:
            step.run(environments)
            if self.watch is not None:
                self.watch(step.line, environments)
            for name in step.dead:
                for environment in environments:
                    del environment[name]
        return [{key: environment[name] for key, name in function.returns} for environment in environments]

    def _prepare(self, function: Function) -> list[_Step]:
        last: dict[str, int] = {}
        for index, line in enumerate(function.lines):
            for name in line.uses():
                last[name] = index
            for value in line.results:
                if value is not None:
                    last.setdefault(value.name, index)
        returned = {name for _, name in function.returns}
        dying: dict[int, list[str]] = {}
        for name, index in last.items():
            if name not in returned:
                dying.setdefault(index, []).append(name)
        steps = []
        for index, line in enumerate(function.lines):
            steps.append(_Step(line, self._compile(line, function), tuple(dying.get(index, ()))))
        return steps

    def _compile(self, line: Line, function: Function) -> Callable[[Sequence[Environment]], None]:
        if line.calls_function:
            return self._function_call(line)
        if line.op in COLLECTIVES:
            return self._collective(line)
        call = self._kernel(line, function) if line.op in self.kernels else self._aten(line)
        names = tuple(None if value is None else value.name for value in line.results)
        single = names[0] if len(names) == 1 else None

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

    def _function_call(self, line: Line) -> Callable[[Sequence[Environment]], None]:
        function = self.program.function(line.op)
        pairs = [(value.name, item.name) for value, item in zip(function.parameters, line.args, strict=True)]
        names = [value.name for value in line.results if value is not None]
        keys = [key for key, _ in function.returns]

        def run(environments: Sequence[Environment]) -> None:
            inner = [{to: environment[name] for to, name in pairs} for environment in environments]
            for environment, results in zip(environments, self._call(function, inner), strict=True):
                environment.update(zip(names, (results[key] for key in keys), strict=True))

        return run

    def _collective(self, line: Line) -> Callable[[Sequence[Environment]], None]:
        source, *options = line.args
        (result,) = line.results
        assert result is not None and isinstance(source, Ref)

        def run(environments: Sequence[Environment]) -> None:
            pieces = [environment[source.name] for environment in environments]
            results = self.backend.collective(line.op, options, pieces)
            for environment, piece in zip(environments, results, strict=True):
                environment[result.name] = piece

        return run

    def _literal(self, item: Any) -> Any:
        """Sizes as this rank sees them, dtypes as this machine reads them."""
        if isinstance(item, Cut):
            return item.local(self.mesh)
        if self.wide and isinstance(item, torch.dtype):
            return _WIDER.get(item, item)
        if isinstance(item, (list, tuple)):
            return type(item)(self._literal(inner) for inner in item)
        return item

    def _arguments(self, line: Line) -> Callable[[Environment], list[Any]]:
        args = [self._literal(item) for item in line.args]
        if all(not isinstance(item, (list, tuple)) or not any(True for _ in _refs(item)) for item in args):
            plan = [(item.name, True) if isinstance(item, Ref) else (item, False) for item in args]
            return lambda environment: [environment[item] if named else item for item, named in plan]
        return lambda environment: [map_references(item, environment.__getitem__) for item in args]

    def _aten(self, line: Line) -> Callable[[int, Environment], Any]:
        function = operator(line.op)
        arguments = self._arguments(line)
        kwargs = {key: self._literal(item) for key, item in line.kwargs}
        if any(argument.name == "device" for argument in function._schema.arguments):
            kwargs["device"] = self.device
        return lambda _, environment: function(*arguments(environment), **kwargs)

    def _kernel(self, line: Line, function: Function) -> Callable[[int, Environment], Any]:
        kernel = self.kernels[line.op]
        arguments = self._arguments(line)
        values = function.values()
        operands = [values[name].type for name in line.uses()]
        results = [value.type for value in line.results if value is not None]
        sites = [Site(self.mesh, at, operands, results, self.device) for at in self.coordinates]
        return lambda lane, environment: kernel(sites[lane], *arguments(environment))


def _refs(item: Any) -> Any:
    if isinstance(item, Ref):
        yield item
    elif isinstance(item, (list, tuple)):
        for inner in item:
            yield from _refs(inner)
