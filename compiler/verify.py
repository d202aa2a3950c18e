"""The checker: shapes and types of emitted programs, re-derived line by line from their text and the rule table.

It shares the rules with the passes and nothing else. By induction over the lines, what all ranks hold together is at
each line what the operator makes of the whole values before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from . import ops as _ops  # registers parc's operators
from .collectives import COLLECTIVES
from .factors import OpCall, Operand
from .mesh import Mesh
from .op_rules import localize
from .placement import TensorType
from .program import Cut, Function, Line, Program, Ref, Value, operator
from .typing import infer

del _ops


@dataclass(frozen=True, slots=True)
class Fault:
    """What a check refuses: ``check`` is ``shapes``, ``types``, ``communication`` or ``numbers``; ``where`` a program,
    function and value."""

    check: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.message}"


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program, self.mesh = program, program.mesh
        self.mode = FakeTensorMode()
        self.faults: list[Fault] = []

    def fault(self, check: str, function: Function, line: Line | None, message: str) -> None:
        names = ", ".join(v.name for v in line.results if v is not None) if line else "parameters"
        self.faults.append(Fault(check, f"{self.program.role}.{self.program.action} {function.name}: {names}", message))

    def run(self) -> list[Fault]:
        known: dict[str, Function] = {}
        for function in self.program.functions:
            values = {value.name: value for value in function.parameters}
            for line in function.lines:
                self.line(function, line, values, known)
                values.update((value.name, value) for value in line.results if value is not None)
            known[function.name] = function
        return self.faults

    def line(self, function: Function, line: Line, values: Mapping[str, Value], known: Mapping[str, Function]) -> None:
        declared = [None if value is None else value.type for value in line.results]
        if line.calls_function:
            self._call(function, line, values, known[line.op], declared)
        elif line.op in COLLECTIVES:
            self._collective(function, line, values, declared)
        else:
            self._operator(function, line, values, declared)

    def _call(self, function: Function, line: Line, values: Mapping[str, Value], called: Function,
              declared: Sequence[TensorType | None]) -> None:  # fmt: skip
        given = [values[item.name].type if isinstance(item, Ref) else None for item in line.args]
        if given != [value.type for value in called.parameters]:
            self.fault("types", function, line, f"calls `{called.name}` with operands of other types than it takes")
        inner = called.values()
        if [inner[name].type for _, name in called.returns] != list(declared):
            self.fault("types", function, line, f"gives the results of `{called.name}` other types than it returns")

    def _collective(self, function: Function, line: Line, values: Mapping[str, Value],
                    declared: Sequence[TensorType | None]) -> None:  # fmt: skip
        source, *options = line.args
        if not isinstance(source, Ref):
            self.fault("types", function, line, f"{line.op} needs a value")
            return
        row = COLLECTIVES[line.op]
        try:
            axes = row.axes(options)
            if len(set(axes)) != len(axes) or any(axis not in self.mesh.names for axis in axes):
                raise ValueError(f"`{','.join(axes)}` are not distinct axes of the mesh")
            expected = row.result(values[source.name].type, self.mesh, options)
        except (ValueError, TypeError, KeyError, IndexError) as problem:
            self.fault("types", function, line, str(problem))
            return
        if [expected] != list(declared):
            self.fault("types", function, line, f"{line.op} makes `{expected.text(self.mesh)}`, not what is declared")

    def _operator(self, function: Function, line: Line, values: Mapping[str, Value],
                  declared: Sequence[TensorType | None]) -> None:  # fmt: skip
        operands = [values[name].type for name in line.uses()]
        results = [type_ for type_ in declared if type_ is not None]
        call = _call_of(line, operands, results, lambda item: item.size)
        try:
            placements = infer(call, [t.placement for t in operands], self.mesh, [t.placement for t in results])
        except ValueError as problem:
            self.fault("types", function, line, str(problem))
            return
        for made, type_ in zip(placements, results, strict=True):
            if made != type_.placement:
                text = TensorType(type_.dtype, type_.shape, made).text(self.mesh)
                self.fault("types", function, line, f"{line.op} makes `{text}`, not `{type_.text(self.mesh)}`")
        self._shapes(function, line, call, operands, declared)

    def _shapes(self, function: Function, line: Line, call: OpCall, operands: Sequence[TensorType],
                declared: Sequence[TensorType | None]) -> None:  # fmt: skip
        """The operator on whole shapes makes the whole results, on a rank's shapes a rank's; and its sizes on a rank
        are those that its rule derives from the whole's."""
        results = [type_ for type_ in declared if type_ is not None]
        shapes = tuple(t.local(self.mesh) for t in operands), tuple(t.local(self.mesh) for t in results)
        local = _call_of(line, operands, results, lambda item: item.local(self.mesh))
        try:
            args, kwargs = localize(call, *shapes)
            if (list(args), kwargs) != (list(local.args), dict(local.kwargs)):
                self.fault("shapes", function, line, f"sizes of {line.op} on a rank are not those its rule derives")
            whole_made = self._fake(line.op, call, [t.shape for t in operands], operands)
            local_made = self._fake(line.op, local, shapes[0], operands)
        except Exception as problem:
            first = (str(problem).strip() or type(problem).__name__).split("\n")[0]
            self.fault("shapes", function, line, f"{line.op} does not take these shapes: {first}")
            return
        for made, wanted in ((whole_made, [t and (t.dtype, t.shape) for t in declared]),
                             (local_made, [t and (t.dtype, t.local(self.mesh)) for t in declared])):  # fmt: skip
            if made != wanted:
                self.fault("shapes", function, line, f"{line.op} makes {_shape_text(made)}, not {_shape_text(wanted)}")

    def _fake(self, op: str, call: OpCall, shapes: Sequence[Any], types: Sequence[TensorType]) -> list[Any]:
        with self.mode:
            tensors = [torch.empty(s, dtype=t.dtype) for s, t in zip(shapes, types, strict=True)]
            made = operator(op)(*_fill(call.args, tensors), **_fill(dict(call.kwargs), tensors))
        made = made if isinstance(made, (tuple, list)) else [made]
        return [None if x is None else (x.dtype, tuple(x.shape)) for x in made]


def _shape_text(made: Sequence[Any]) -> str:
    return "; ".join("-" if item is None else f"{str(item[0]).removeprefix('torch.')}{list(item[1])}" for item in made)


def _call_of(line: Line, operands: Sequence[TensorType], results: Sequence[TensorType], size: Any) -> OpCall:
    """The line as a call, its sizes read by ``size`` (whole or a rank's)."""
    counter = iter(range(len(operands)))

    def read(item: Any) -> Any:
        if isinstance(item, Ref):
            return Operand(next(counter))
        if isinstance(item, Cut):
            return size(item)
        if isinstance(item, (list, tuple)):
            return type(item)(read(inner) for inner in item)
        return item

    args = tuple(read(item) for item in line.args)
    kwargs = {key: read(item) for key, item in line.kwargs}
    return OpCall(line.op, args, kwargs, tuple(t.shape for t in operands), tuple(t.shape for t in results))


def _fill(item: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(item, Operand):
        return tensors[item.index]
    if isinstance(item, (list, tuple)):
        return type(item)(_fill(inner, tensors) for inner in item)
    if isinstance(item, dict):
        return {key: _fill(inner, tensors) for key, inner in item.items()}
    return item


def check_program(program: Program) -> list[Fault]:
    """Shapes and types of every line of one program."""
    return _Checker(program).run()


def check_bindings(programs: Mapping[str, Program], stored: Mapping[str, TensorType]) -> list[Fault]:
    """What one program hands to another has the type the other takes; gradients end as their parameters are stored,
    and nothing that leaves a step is still to be summed."""
    return list(_binding_faults(programs, stored))


def _binding_faults(programs: Mapping[str, Program], stored: Mapping[str, TensorType]) -> Iterator[Fault]:
    made: dict[str, TensorType] = {}
    for action in ("COUNT", "SCALE", "F", "B", "REDUCE"):
        if action not in programs:
            continue
        main, values = programs[action].main, programs[action].main.values()
        for value in main.parameters:
            expected = _expected(value.role, made, stored)
            if expected is None and value.role.split(" ")[0] in ("saved", "count", "scale", "loss", "gradient"):
                yield Fault("types", f"{action} {value.name}", f"nothing makes `{value.role}` before it")
            elif expected is not None and expected != value.type:
                yield Fault("types", f"{action} {value.name}", f"`{value.role}` has another type where it is made")
            if value.role.split(" ")[0] in ("input", "buffer", "constant"):
                made.setdefault(value.role, value.type)
        for key, name in main.returns:
            made[f"gradient {key}" if action == "B" else key] = values[name].type
            if action == "REDUCE":
                yield from _final_faults(key, values[name].type, stored)
    if programs["REDUCE"].main.returns and "loss" not in dict(programs["REDUCE"].main.returns):
        yield Fault("types", "REDUCE", "the loss is not returned")
    reduced = dict(programs["REDUCE"].main.returns)
    for key, _ in programs["B"].main.returns:
        if f"gradient {key}" not in reduced:
            yield Fault("types", "REDUCE", f"the gradient of `{key}` is not returned")


def _expected(role: str, made: Mapping[str, TensorType], stored: Mapping[str, TensorType]) -> TensorType | None:
    kind, _, name = role.partition(" ")
    return stored.get(name) if kind == "parameter" else made.get(role)


def _final_faults(key: str, type_: TensorType, stored: Mapping[str, TensorType]) -> Iterator[Fault]:
    kind, _, name = key.partition(" ")
    if type_.placement.partial:
        yield Fault("types", f"REDUCE {key}", f"is still to be summed over {', '.join(type_.placement.partial)}")
    elif kind == "gradient" and stored.get(name) != type_:
        yield Fault("types", f"REDUCE {key}", "is not placed as its parameter is stored")
    elif kind in ("loss", "grad_norm") and type_.placement.split_axes():
        yield Fault("types", f"REDUCE {key}", "is not whole on every rank")


def mesh_faults(programs: Mapping[str, Program], mesh: Mesh) -> list[Fault]:
    """Every program is of the build's mesh."""
    return [Fault("types", action, f"is of mesh {p.mesh}, not {mesh}") for action, p in programs.items() if p.mesh != mesh]
