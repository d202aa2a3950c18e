"""The meaning of a step: what a build's programs hand to each other, and what all of them compute beside the model.

Values are known between programs by their bindings: ``saved x`` is what F of the same stage returned, ``received x``
what the other stage sent, ``gradient w`` the sum over microbatches of what B returned. The number of a microbatch is a
letter like an axis of the mesh, so the sum over all of them is a sum over this letter.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .meaning import DivideAxis, Read, Table, Value
from .programs import Reader, Settle
from .rows import inverse
from .tensors import MICROBATCH
from .text import Function, Parameter, Program, Refused, Type, read_program, read_type

_MOST_FILES = 4096
_ACTION = re.compile(r"(\d+)([A-Z_]+?)(\d*)")
_LEAVES = ("parameter", "frozen", "buffer", "constant", "state")
"""The kinds of values that live from step to step."""
_OF_BATCH = ("input", "rng")


@dataclass
class Build:
    """The texts of a build."""

    folder: Path
    manifest: Mapping[str, Any]
    model: Program
    programs: dict[tuple[str, str], Program]
    """By role or stage, and action."""
    roles: dict[str, list[tuple[int, str, int]]]
    """The timeline of each role: stage, action and microbatch."""

    @property
    def stages(self) -> dict[int, str]:
        """The role of each stage."""
        return {stage: role for role, actions in self.roles.items() for stage, kind, _ in actions if kind == "F"}

    def program(self, role: str, stage: int, action: str) -> Program | None:
        """Return the program of an action: the stage's, the role's, or the one that all share."""
        names = (f"stage{stage}", role, "stage0")
        return next((self.programs[name, action] for name in names if (name, action) in self.programs), None)


def read_build(folder: Path) -> Build:
    """Read a build's texts.

    Raises:
        Refused: a file is missing, or holds what no build has.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        schedule = (folder / "schedule.txt").read_text(encoding="ascii")
        files = sorted((folder / "programs").iterdir())
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{folder} is no build: {error}") from None
    if len(files) > _MOST_FILES or not isinstance(manifest, dict):
        raise Refused(f"{folder} is no build")
    programs: dict[tuple[str, str], Program] = {}
    model = None
    for file in files:
        program = read_program(file)
        if file.name == "model.py":
            model = program
        elif file.name != f"{program.role}.{program.action}.py":
            raise Refused(f"{file.name}: says that it is {program.role}.{program.action}")
        else:
            programs[program.role, program.action] = program
    if model is None or (model.role, model.action) != ("model", "reference"):
        raise Refused(f"{folder} has no programs/model.py")
    return Build(folder, manifest, model, programs, _read_schedule(schedule))


def _read_schedule(text: str) -> dict[str, list[tuple[int, str, int]]]:
    roles: dict[str, list[tuple[int, str, int]]] = {}
    for at, line in enumerate(text.splitlines(), 1):
        role, colon, actions = line.partition(": ")
        if not colon or role in roles:
            raise Refused(f"schedule.txt:{at}: is not `role: actions`")
        roles[role] = []
        for word in actions.split():
            if (match := _ACTION.fullmatch(word)) is None:
                raise Refused(f"schedule.txt:{at}: `{word}` is no action")
            roles[role].append((int(match[1]), match[2], int(match[3] or 0)))
    return roles


@dataclass
class Proof:
    """What was proved: sentences by role."""

    lines: list[str] = field(default_factory=list)
    nodes: int = 0


def certify(folder: Path) -> Proof:
    """Prove that a build computes what its model says.

    Raises:
        Refused: it does not, or the checker has no rule for a part of it.
    """
    collected = gc.isenabled()
    gc.disable()  # a table only grows, and a collection would visit all of it
    try:
        return _certify(Step(read_build(folder)))
    finally:
        if collected:
            gc.enable()


def _certify(step: Step) -> Proof:
    step.table.naming = True
    step.run_model()
    step.table.naming = False
    while True:
        try:
            return step.run_programs()
        except DivideAxis as request:
            # the model's values know no ranks, so they stay
            step.reader.divide(request.axis, request.sizes)


class Step:
    """The values of one step, by their bindings."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.microbatches = int(build.manifest["microbatches"])
        self.mesh = next(iter(build.programs.values())).mesh
        for program in build.programs.values():
            if program.mesh != self.mesh:
                raise Refused(f"{program.file}: has another mesh than other programs")
        self.table = Table({**dict(self.mesh.sizes), MICROBATCH: self.microbatches})
        self.reader = Reader(self.table, self.mesh)
        self.tensors = self.reader.tensors

    # ---- the model

    def outside(self, parameter: Parameter, whole: Mapping[str, tuple[int, ...]]) -> Value:
        """Return a rank's piece of what no program makes: weights, buffers, inputs."""
        kind = parameter.binding.split(" ")[0]
        if parameter.binding not in whole:
            raise Refused(f"the model reads no `{parameter.binding}`")
        shape = whole[parameter.binding]
        if parameter.type.shape != shape:
            raise Refused(
                f"`{parameter.binding}` has the shape {list(parameter.type.shape)}, and {list(shape)} in the model"
            )
        each = self.microbatches if kind in _OF_BATCH else 1
        node = self.table.leaf(parameter.binding, (each, *shape) if each > 1 else shape)
        return self.tensors.piece(node, parameter.type, each)

    def run_model(self) -> None:
        """Give every result and gradient of the model a meaning."""
        functions = self.build.model.functions
        forward = functions["forward"]
        self.whole = {p.binding: p.type.shape for function in functions.values() for p in function.parameters}
        values = {p.name: self.outside(p, self.whole) for p in forward.parameters}
        calls = self.reader.forward(forward, values)
        self.expected = {key: values[name] for key, name in forward.returns}
        if "loss" not in self.expected:
            raise Refused("model.py returns no loss")
        self.counts = {}
        if "count" in functions:
            count = functions["count"]
            inside = {p.name: self.outside(p, self.whole) for p in count.parameters}
            self.reader.forward(count, inside)
            self.counts = {key: self.over_microbatches(inside[name]) for key, name in count.returns}
        self.scale = inverse(self.tensors, self.counts["count"]) if self.counts else self.table.constant(1)
        names = {p.name: p.binding.partition(" ")[2] for p in forward.parameters if p.binding.startswith("parameter ")}
        floats = [p.name for p in forward.parameters if p.name in names and p.type.dtype.startswith(("f", "bf"))]
        start = {dict(forward.returns)["loss"]: self.scale}
        self.gradients = {names[name]: value for name, value in self.reader.gradients(calls, start, floats).items()}

    def over_microbatches(self, value: Value) -> Value:
        """Return the sum of a value over all microbatches."""
        return self.tensors.over(value, [MICROBATCH]) if self.microbatches > 1 else value

    # ---- the programs

    def arguments(self, program: Program, function: Function, known: Mapping[str, Value]) -> list[Value]:
        """Return what a main function's parameters are bound to."""
        result = []
        for parameter in function.parameters:
            binding = parameter.binding
            where = f"{program.file}:{parameter.row}"
            try:
                if binding.startswith("state residual"):
                    result.append(self.table.constant(0, parameter.type.local))
                elif binding.startswith("state "):
                    result.append(self.tensors.piece(self.table.leaf(binding, parameter.type.shape), parameter.type))
                elif binding.split(" ")[0] in (*_LEAVES, *_OF_BATCH):
                    self.check_stored(parameter)
                    result.append(self.outside(parameter, self.whole))
                elif binding in known:
                    result.append(known[binding])
                else:
                    raise Refused(f"nothing makes `{binding}` before it")
            except Refused as error:
                raise Refused(f"{where}: {error}") from None
        return result

    def check_stored(self, parameter: Parameter) -> None:
        """Refuse a parameter that is read in another placement than it is stored in."""
        kind, _, name = parameter.binding.partition(" ")
        stored = self.build.manifest.get("parameters", {}) if kind in ("parameter", "frozen") else {}
        if kind == "parameter" and name not in stored:
            raise Refused(f"the manifest stores no `{name}`")
        if name in stored and read_type(stored[name], self.mesh) != parameter.type:
            raise Refused(f"`{name}` is stored as {stored[name]}")

    def run(self, program: Program, function: Function, known: Mapping[str, Value]) -> dict[str, Value]:
        """Return what a main function returns, by key."""
        return self.reader.run(program, function, self.arguments(program, function, known))

    def run_programs(self) -> Proof:
        """Follow all programs of a step, and compare what leaves it with the model."""
        build, proof = self.build, Proof()
        shared: dict[str, Value] = {}
        first = next(iter(build.roles))
        if (program := build.program(first, 0, "COUNT")) is not None:
            for key, value in self.run(program, _main(program), {}).items():
                shared[key] = self.over_microbatches(value)
        if (program := build.program(first, 0, "SCALE")) is not None:
            results = self.run(program, _main(program), shared)
            shared.update(results)
            if "unscale" in results:
                scale = self.tensors.times(results["scale"], results["unscale"])
                self.same("SCALE", program, "scale", scale, self.scale)
                self.loss_scale = inverse(self.tensors, results["unscale"])
            else:
                self.same("SCALE", program, "scale", results["scale"], self.scale)
        weights = {
            role: self.run(program, _main(program), shared)
            for role in build.roles
            if (program := build.programs.get((role, "UNSHARD"))) is not None
        }
        order = sorted(build.stages)
        saved: dict[int, dict[str, Value]] = {}
        losses: dict[str, list[Value]] = {role: [] for role in build.roles}
        sent: dict[str, Value] = {}
        for stage in order:
            role, program = build.stages[stage], self._needed(stage, "F")
            results = self.run(program, _main(program), {**shared, **weights.get(role, {}), **_received(sent)})
            sent = {key: value for key, value in results.items() if key.startswith("sent ")}
            saved[stage] = {key: value for key, value in results.items() if key.startswith("saved ")}
            if "loss" in results:
                losses[role].append(results["loss"])
        gradients: dict[str, dict[str, Value]] = {role: {} for role in build.roles}
        sent = {}
        for stage in reversed(order):
            role, program = build.stages[stage], self._needed(stage, "B")
            known = {**shared, **weights.get(role, {}), **saved[stage], **_received(sent)}
            sent = self._backward(program, known, gradients[role])
        self._after(gradients, losses, shared, proof)
        proof.nodes = len(self.table.nodes)
        return proof

    def _needed(self, stage: int, action: str) -> Program:
        program = self.build.programs.get((f"stage{stage}", action))
        if program is None:
            raise Refused(f"there is no program stage{stage}.{action}")
        return program

    def _backward(self, program: Program, known: Mapping[str, Value], gradients: dict[str, Value]) -> dict[str, Value]:
        """Run a stage's backward, and add its gradients to those of the role. Return what it sends."""
        main = _main(program)
        each = self.run(program, main, known)
        sums = {
            key: self.over_microbatches(value) for key, value in each.items() if not key.startswith(("sent ", "state "))
        }
        last = program.functions.get(f"{main.name}_last")
        if last is not None:
            # what earlier microbatches added up to is all of them, less the last one's own
            before = {f"gradient {key}": self.tensors.plus(total, each[key], by=(1, -1)) for key, total in sums.items()}
            at_end = self.run(program, last, {**known, **before})
            for key, value in at_end.items():
                if key.startswith("sent ") and not self._equal(value, each[key]):
                    raise Refused(f"{program.file}: the last backward sends another `{key}`")
                if not key.startswith(("sent ", "state ")):
                    sums[key] = value if key in sums and not self._equal(value, each[key]) else sums[key]
        for key, value in sums.items():
            gradients[key] = self.tensors.plus(gradients[key], value) if key in gradients else value
        return {key: value for key, value in each.items() if key.startswith("sent ")}

    def _after(
        self,
        gradients: Mapping[str, Mapping[str, Value]],
        losses: Mapping[str, list[Value]],
        shared: Mapping[str, Value],
        proof: Proof,
    ) -> None:
        build = self.build
        results = self._together("LOSS", {
            role: {**shared, **({"loss": self.over_microbatches(self.tensors.plus(*parts))} if parts else {})}
            for role, parts in losses.items()
        })  # fmt: skip
        loss = self.tensors.times(self.over_microbatches(self.expected["loss"]), self.scale)
        for role, values in results.items():
            self.same(role, build.program(role, 0, "LOSS"), "loss", values["loss"], loss)
        known = {
            role: {**shared, **{f"gradient {key}": value for key, value in parts.items()}}
            for role, parts in gradients.items()
        }
        wanted = {name: self.over_microbatches(value) for name, value in self.gradients.items()}
        stored = {name: read_type(text, self.mesh) for name, text in build.manifest["parameters"].items()}
        symbols = {
            name: self.tensors.piece(self.table.leaf(f"gradient {name}", stored[name].shape), stored[name])
            for name in wanted
        }
        settle = {role: self._settled(role, wanted, symbols, stored) for role in build.roles}
        results = self._together("REDUCE", known, settle)
        squares = [self.tensors.over(self.tensors.squares(symbol), sorted(symbol.axes)) for symbol in symbols.values()]
        norm = self.tensors.pointwise("sqrt", [self.tensors.plus(*squares)]) if squares else None
        seen: set[str] = set()
        for role, values in results.items():
            program = build.program(role, 0, "REDUCE")
            names = {key.partition(" ")[2] for key in values if key.startswith("gradient ")}
            for name in sorted(names - wanted.keys()):
                raise Refused(f"{role}.REDUCE.py: returns a gradient of `{name}`, on which the loss does not depend")
            if norm is not None:
                self.same(role, program, "grad_norm", values["grad_norm"], norm)
            seen |= names
            proof.lines.append(f"{role}: the loss, {len(names)} gradients, the norm")
        if missing := sorted(wanted.keys() - seen):
            raise Refused(f"no role returns the gradient of `{missing[0]}`, on which the loss depends")

    def _settled(
        self, role: str, wanted: Mapping[str, Value], symbols: Mapping[str, Value], stored: Mapping[str, Type]
    ) -> Settle:
        """Return a function that proves each gradient that REDUCE returns, and lets all lines read a symbol of it."""
        program = self.build.programs[role, "REDUCE"]
        names = {
            name: key.partition(" ")[2] for key, name in _main(program).returns
            if key.startswith("gradient ") and key.partition(" ")[2] in wanted
        }  # fmt: skip

        def settle(name: str, value: Value) -> Value:
            gradient = names.get(name)
            if gradient is None:
                return value
            self.same(
                role, program, f"gradient {gradient}", value, self.tensors.cut(wanted[gradient], stored[gradient])
            )
            return symbols[gradient]

        return settle

    def _together(
        self, action: str, known: Mapping[str, Mapping[str, Value]], settle: Mapping[str, Settle] = {}
    ) -> dict[str, dict[str, Value]]:
        """Run a program of every role, all of them together: sums among roles add what each of them has there."""
        running: dict[str, Generator[Any, Value, dict[str, Value]]] = {}
        results: dict[str, dict[str, Value]] = {}
        waiting: dict[str, tuple[Any, Value]] = {}
        roles = list(self.build.roles)
        answers: dict[str, Any] = {}
        for role in roles:
            program = self.build.programs.get((role, action))
            if program is None:
                raise Refused(f"there is no program {role}.{action}")
            main = _main(program)
            running[role] = self.reader.steps(
                program, main, self.arguments(program, main, known[role]), *([settle[role]] if role in settle else [])
            )
            answers[role] = None
        while running:
            for role in list(running):
                if role in waiting:
                    continue
                try:
                    waiting[role] = running[role].send(answers[role])
                except StopIteration as end:
                    results[role] = end.value
                    del running[role]
            if not running:
                break
            place = next(iter(waiting.values()))[0]
            members = [roles[at] for at in place[1]]
            if any(member not in waiting or waiting[member][0] != place for member in members):
                raise Refused(f"the roles {', '.join(members)} do not meet at a sum over `{place[0]}` in {action}")
            total = self.tensors.plus(*(waiting[member][1] for member in members))
            for member in members:
                answers[member] = total
                del waiting[member]
        return results

    # ---- comparison

    def _equal(self, one: Value, other: Value) -> bool:
        return one == other or self.tensors.canonical(one, other)

    def same(self, role: str, program: Program | None, key: str, value: Value, expected: Value) -> None:
        """Refuse a result that is not what the model says."""
        if not self._equal(value, expected):
            where = "" if program is None else f"{program.file}: "
            raise Refused(f"{where}`{key}` is not what model.py says\n{describe(self.table, value, expected)}")


def _main(program: Program) -> Function:
    """Return a program's main function: its last one."""
    return list(program.functions.values())[-1]


def _received(sent: Mapping[str, Value]) -> dict[str, Value]:
    return {f"received {key.partition(' ')[2]}": value for key, value in sent.items()}


def describe(table: Table, value: Value, expected: Value) -> str:
    """Return the first difference of two values in words: node below node, until what they read is another."""
    lines = []
    one: Value | Read = value
    other: Value | Read = expected
    for depth in range(40):
        a, b = table.nodes[one.node], table.nodes[other.node]
        pad = "  " * depth
        if one.node == other.node:
            lines.append(f"{pad}{a.op}: {one.coefficient} at {one.maps} beside {other.coefficient} at {other.maps}")
            break
        lines.append(f"{pad}{a.op} {a.args or ''} {a.sizes} {a.inner} beside {b.op} {b.args or ''} {b.sizes} {b.inner}")
        left, right = ([r for r in x.reads if r not in y.reads] for x, y in ((a, b), (b, a)))
        if a.op != b.op or not left or len(left) != len(right):
            break
        one, other = left[0], right[0]
    return "\n".join(lines)
