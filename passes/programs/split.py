"""Split backwards: B as two programs. I makes the gradients that other stages wait for, and W those of weights.

    g1 = mm(g, w); dw = mm(g.t(), x)        I returns g1, and hands on g; W reads g and x

W has the lines that gradients of parameters need beyond I. What it reads of I's values, and of what F saved, I hands on
as ``deferred``: of all such sets, one with the fewest bytes. Cheap lines may be in both programs; products and messages
run once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...compiler.analysis.liveness import local_bytes
from ...compiler.ops.rules import facts
from ...compiler.program.actions import BACKWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS
from ...compiler.program.binding import Binding
from ...compiler.program.program import Function, Line, Program, Ref, Value, needed
from ...compiler.program.rewriter import FreshNames
from ...compiler.program.roles import Programs, stage_key
from ...compiler.resolve.requests import Pipeline
from .segments import fewest_bytes

_PASSING = ("stage", "neighbour")
"""The homes of values that only one action reads: W cannot read them after I."""


def split_backward(roles: Mapping[str, Programs], pipeline: Pipeline) -> dict[str, Programs]:
    """The pass of split backwards. It takes the programs of every role, and returns them with I and W of the stages
    whose schedule has these, beside B or in its place."""
    split: dict[str, Programs] = {}
    for role, programs in roles.items():
        changed: dict[str, Program] = {}
        for key, program in programs.items():
            stage = stage_key(key)
            kinds = pipeline.kinds[stage[0]] if stage is not None and stage[1] == BACKWARD else (BACKWARD,)
            if BACKWARD in kinds:
                changed[key] = program
            if INPUT_GRADIENTS in kinds and stage is not None:
                inputs, weights = _Split(program).programs()
                changed |= {f"{stage[0]}{one.action}": one for one in (inputs, weights)}
        split[role] = changed
    return split


@dataclass(frozen=True, slots=True)
class _Halves:
    """A block's backward in two functions."""

    inputs: Function
    weights: Function | None
    deferred: tuple[str, ...]
    """The values that the first function returns for the second one, or for W's main function."""


@dataclass(slots=True)
class _Main:
    """A main function under construction."""

    lines: list[Line] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)


class _Split:
    """The backward of one stage, cut in two."""

    def __init__(self, program: Program) -> None:
        self.program, self.main = program, program.main
        self.values = self.main.values()
        self.lasting = {value.name for value in self.main.parameters
                        if value.binding is not None and value.binding.home not in _PASSING}  # fmt: skip
        self.remade = self._made_of_lasting()
        self.wanted = self._wanted()
        self.chain = {value.name for line in needed(self.main.lines, self.wanted)[0] for value in line.made}
        """The results of the lines that I needs."""
        self.names = FreshNames.beside(self.main)
        self.halves: dict[Hashable, _Halves] = {}
        self.function_names = FreshNames(dict.fromkeys((function.name for function in program.functions), 1))
        self.first, self.second = _Main(), _Main()

    def _made_of_lasting(self) -> dict[str, Line]:
        """Return the lines, by their results, that compute values of what every program may read: weights gathered from
        the parts that a rank stores, and keys of random streams."""
        lines: dict[str, Line] = {}
        for line in self.main.lines:
            if not line.calls_function and line.uses and all(n in self.lasting or n in lines for n in line.uses):
                lines |= dict.fromkeys((value.name for value in line.made), line)
        return lines

    def _wanted(self) -> set[str]:
        """Return the values that another stage waits for. The first stage sends nothing: there they are those that one
        block's backward makes for the next."""
        sent = {name for key, name in self.main.returns if key.kind != "gradient"}
        calls = (line for line in self.main.lines if line.calls_function)
        between = {name for line in calls for name in line.uses if name in self.main.makers and name not in self.remade}
        return sent or between

    def programs(self) -> tuple[Program, Program]:
        """Return I and W."""
        main = self.main
        chain = [line for line in main.lines if any(value.name in self.chain for value in line.made)]
        wanted = self.wanted.union(*(line.uses for line in chain))
        for line in main.lines:
            if not any(value.name in self.chain for value in line.made):
                self._add(self.second, line)
            elif not line.calls_function:
                self._add(self.first, line)
            else:
                self._divide(line, [value is not None and value.name in wanted for value in line.results])
        gradients = [pair for pair in main.returns if pair[0].kind == "gradient"]
        self.second.lines = self._with_remade(self.second.lines, [name for _, name in gradients])
        computed = {value.name for line in self.second.lines for value in line.made}
        read = dict.fromkeys([*(name for line in self.second.lines for name in line.uses), *(n for _, n in gradients)])
        first = {**self.values, **{value.name: value for line in self.first.lines for value in line.made}}
        deferred = [name for name in read if name not in computed and name not in self.lasting]
        inputs = [pair for pair in main.returns if pair[0].kind != "gradient"]
        inputs += [(Binding("deferred", name), name) for name in deferred]
        used = {name for line in self.first.lines for name in line.uses} | {name for _, name in inputs}
        parameters = [value for value in main.parameters if value.name in used]
        handed = [Value(name, first[name].type, Binding("deferred", name)) for name in deferred]
        kept = [value for value in main.parameters if value.name in read and value.name in self.lasting]
        return (
            self._program(INPUT_GRADIENTS, self.first, Function(
                f"{main.name}_inputs", tuple(parameters), tuple(self.first.lines), tuple(inputs))),
            self._program(WEIGHT_GRADIENTS, self.second, Function(
                f"{main.name}_weights", (*kept, *handed), tuple(self.second.lines), tuple(gradients))),
        )  # fmt: skip

    def _program(self, action: str, part: _Main, main: Function) -> Program:
        return Program(self.program.role, action, self.program.mesh, (*part.functions.values(), main))

    def _add(self, part: _Main, line: Line) -> None:
        """Add a line of the main function as it is."""
        if line.calls_function:
            part.functions[line.op] = self.program.function(line.op)
        part.lines.append(line)

    def _with_remade(self, lines: Sequence[Line], returned: Iterable[str]) -> list[Line]:
        """Return W's lines behind those that compute again what they read of lasting values, each before its first
        reader; without those that nobody reads."""
        _, read = needed(lines, returned)
        complete, there = list[Line](), set[str]()

        def add(line: Line) -> None:
            if all(value.name in there for value in line.made):
                return
            for name in line.uses:
                if name in self.remade:
                    add(self.remade[name])
            there.update(value.name for value in line.made)
            complete.append(line)

        for line in lines:
            if any(value.name in read for value in line.made):
                add(line)
        return complete

    def _divide(self, line: Line, wanted: Sequence[bool]) -> None:
        """Add the two calls that stand for a call whose ``wanted`` results are I's."""
        callee = self.program.function(line.op)
        if all(wanted):
            self._add(self.first, line)
            return
        there = {value.name: name for value, name in zip(callee.parameters, line.uses, strict=True)}
        free = frozenset(name for name, outer in there.items() if outer in self.lasting)
        results = {label: value for (_, label), value in zip(callee.returns, line.results, strict=True)}
        key = callee.name, tuple(wanted), free
        if key not in self.halves:
            of_inputs = [label for (_, label), is_wanted in zip(callee.returns, wanted, strict=True) if is_wanted]
            self.halves[key] = self._halves(callee, of_inputs, free)
        halves = self.halves[key]
        prefix = next(value.name for value in line.made)
        for label in halves.deferred:
            if label not in results:
                results[label] = Value(self.names.fresh(f"{prefix}_for_{label}"), callee.values()[label].type)
            handed = results[label]
            assert handed is not None, "a value that is handed on is made"
            there[label] = handed.name

        def call(function: Function) -> Line:
            arguments = tuple(Ref(there[value.name]) for value in function.parameters)
            returned = tuple(results[label] for _, label in function.returns)
            return Line(returned, function.name, arguments, line.kwargs, line.origin)

        self.first.functions[halves.inputs.name] = halves.inputs
        self.first.lines.append(call(halves.inputs))
        if halves.weights is not None:
            self.second.functions[halves.weights.name] = halves.weights
            self.second.lines.append(call(halves.weights))

    def _halves(self, callee: Function, first_results: Collection[str], free: Collection[str]) -> _Halves:
        """Return a block's backward as two functions: the first returns ``first_results``. W may read the ``free``
        parameters again."""
        parameters, makers, values = {v.name for v in callee.parameters}, callee.makers, callee.values()
        inside, _ = needed(callee.lines, first_results)
        of_inputs = {id(line) for line in inside}
        targets = [name for _, name in callee.returns if name not in first_results]

        def size(name: str) -> int | None:
            maker = makers.get(name)
            if maker is None:
                return 0 if name in free else local_bytes(values[name].type, self.program)
            if facts(maker.op).storage == "view" or (id(maker) not in of_inputs and not facts(maker.op).cheap):
                return None  # a view keeps its whole base; the product of a weight's gradient is W's
            return local_bytes(values[name].type, self.program)

        def remade(name: str) -> bool:
            maker = makers.get(name)
            return maker is not None and (id(maker) not in of_inputs or facts(maker.op).cheap)

        _, read = needed(callee.lines, targets)
        reached = [name for name in values if name in read or name in targets]
        cut = fewest_bytes(targets, reached, lambda name: makers[name].uses if name in makers else (), size, remade)
        behind = _lines_behind(callee, [name for name in targets if name not in cut or name in parameters], cut)
        handed = [name for name in values if name in cut and name not in parameters]  # in the order of lines
        first, used = needed(callee.lines, [*first_results, *handed])
        title = self.function_names.fresh(f"{callee.name}_inputs")
        numbered = title.removeprefix(f"{callee.name}_inputs")
        # what I returns for the stage before, W may read too
        returned_first = dict.fromkeys((*(name for _, name in callee.returns if name in first_results), *handed))
        inputs = Function(
            title, tuple(v for v in callee.parameters if v.name in used), first,
            tuple((Binding("value", name), name) for name in returned_first),
        )  # fmt: skip
        returned = [name for _, name in callee.returns if name in targets and (name not in cut or name in parameters)]
        reads = {name for line in behind for name in line.uses} | {*returned}
        computed = {value.name for line in behind for value in line.made}
        weights = Function(
            f"{callee.name}_weights{numbered}",
            (*(v for v in callee.parameters if v.name in reads),
             *(replace(values[name], binding=None) for name in handed if name in reads - computed)),
            behind, tuple((Binding("value", name), name) for name in returned),
        )  # fmt: skip
        return _Halves(inputs, weights if returned else None, tuple(handed))


def _lines_behind(function: Function, wanted: Iterable[str], cut: Collection[str]) -> tuple[Line, ...]:
    """Return the lines that compute ``wanted`` values from those of a cut."""
    live, lines = set(wanted) - set(cut), list[Line]()
    for line in reversed(function.lines):
        if any(value.name in live for value in line.made):
            live.update(name for name in line.uses if name not in cut)
            lines.append(line)
    return tuple(reversed(lines))
