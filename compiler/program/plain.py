"""Programs in the plain form that checks read: reductions of gradients that backward starts early are in REDUCE, a
backward in two phases is one, and rings are the lines that they stand for. So every check of a build knows all three
without a word about them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..layout.collectives import MESSAGE, RINGS, SEQUENCE, WAIT, local_outer
from ..layout.mesh import Mesh
from ..layout.placement import Split, TensorType
from .actions import ACTIONS, BACKWARD, INPUT_GRADIENTS, REDUCE, UNSHARD, WEIGHT_GRADIENTS
from .binding import UNSCALE, Binding
from .program import Function, Line, Program, Ref, Value, needed, remembered
from .rewriter import Rewriter
from .step_values import residual, residual_of

# ---- early sums: reductions of gradients over ranks that the last microbatch's backward starts and REDUCE awaits
# B then has two main functions. ``backward_last`` has every line of ``backward``, and lines between them that add a
# gradient to its total of earlier microbatches and start its reduction. In REDUCE these lines mean the same, because
# they read nothing but accumulated gradients, residuals and one over the loss scale, and nothing in B reads them.


class EarlyFault(ValueError):
    """The error of a last backward that is not the backward of other microbatches with sums of its gradients."""


def in_reduce(programs: Mapping[str, Program]) -> dict[str, Program]:
    """Return the programs of a role with its early sums at the beginning of REDUCE, and with a single main function
    each.

    Raises:
        EarlyFault: the lines of a last backward mean something else.
    """
    plain = dict(programs)
    makers: dict[Binding, set[str]] = {}
    for key, program in programs.items():
        if program.action in ACTIONS and ACTIONS[program.action].works:
            for binding, _ in program.main.returns:
                makers.setdefault(binding, set()).add(key.removesuffix(program.action))
    for key, program in programs.items():
        if program.last is None:
            continue
        if REDUCE not in plain:
            raise EarlyFault(f"{program.role} has no {REDUCE}")
        sums = _Sums(program)
        if several := [key for key in sums.gradients if len(makers[key]) > 1]:
            raise EarlyFault(f"{sums.where} sums `{several[0]}`, of which another stage makes a part")
        plain[key] = program.with_mains(program.main)
        plain[REDUCE] = _with_sums(plain[REDUCE], sums)
    return plain


@dataclass(slots=True)
class _Sums:
    """The lines of a last backward that the backward of other microbatches does not have."""

    program: Program
    lines: list[Line] = field(default_factory=list)
    gradients: dict[Binding, tuple[str, str]] = field(default_factory=dict)
    """The name of the last microbatch's gradient and that of its sum over ranks, for each gradient that is summed."""
    totals: dict[str, Binding] = field(default_factory=dict)
    """The parameters that hold gradients of earlier microbatches."""
    reads: list[Value] = field(default_factory=list)
    """The other parameters that sums alone read: residuals of the last step, and one over the loss scale."""
    residuals: tuple[tuple[Binding, str], ...] = ()
    """The residuals that are returned for the next step."""

    def __post_init__(self) -> None:
        main, last = self.program.main, self.program.last
        assert last is not None
        values, common = main.values(), list[Line]()
        for line in last.lines:
            (common if any(value.name in values for value in line.made) else self.lines).append(line)
        added = [value for value in last.parameters if value.name not in values]
        self.residuals = tuple((key, name) for key, name in last.returns if residual_of(key))
        results = [row for row in last.returns if row not in self.residuals]
        same = (
            _by_results(common) == _by_results(main.lines)
            and [value for value in last.parameters if value not in added] == list(main.parameters)
            and [key for key, _ in results] == [key for key, _ in main.returns]
        )
        ends = {
            key: (name, end) for (key, name), (_, end) in zip(main.returns, results, strict=True) if name != end
        } if same else {}  # fmt: skip
        self.totals = {value.name: value.binding for value in added
                       if value.binding is not None and value.kind == "gradient"}  # fmt: skip
        self.reads = [value for value in added if value.name not in self.totals]
        states = {value.binding for value in self.reads} - {UNSCALE}
        if (
            not same or any(key.kind != "gradient" for key in ends) or not set(self.totals.values()) <= ends.keys()
            or states != {key for key, _ in self.residuals} or not states <= {residual(key.name) for key in ends}
        ):  # fmt: skip
            raise EarlyFault(f"{self.where} does other work than `{main.name}`")
        self.gradients = ends

    @property
    def where(self) -> str:
        """The place of the last backward, for messages."""
        last = self.program.last
        return f"{self.program.role}.{self.program.action} {'' if last is None else last.name}"

    def accumulated(self, line: Line) -> Binding | None:
        """Return the gradient that a line adds to its total of earlier microbatches, if it does that."""
        if line.op != "aten.add.Tensor" or line.kwargs or not all(isinstance(item, Ref) for item in line.args):
            return None
        total, gradient = line.uses
        key = self.totals.get(total)
        return key if key is not None and self.gradients[key][0] == gradient else None


def _with_sums(reduce: Program, sums: _Sums) -> Program:
    """Return REDUCE with early sums ahead of its lines."""
    rewriter, values = Rewriter(reduce.mesh, reduce.main), sums.program.main.values()
    rewriter.insert_after(None)
    starts = {
        key: Value(rewriter.names.fresh(name), values[name].type, key) for key, (name, _) in sums.gradients.items()
    }
    summed = {*sums.totals.values()}
    names = {name: starts[key].name for key, (name, _) in sums.gradients.items() if key not in summed}
    known = {value.binding: value for value in reduce.main.parameters}
    for value in sums.reads:
        if value.binding not in known:
            known[value.binding] = rewriter.take(value.name, value.type, value.binding)
        names[value.name] = known[value.binding].name
    for line in sums.lines:
        if (added := sums.accumulated(line)) is not None:
            names[line.made[0].name] = starts[added].name
            continue
        if line.calls_function:
            raise EarlyFault(f"{sums.where} calls `{line.op}`, which `{sums.program.main.name}` does not")
        if unknown := [name for name in line.uses if name not in names]:
            raise EarlyFault(f"{sums.where}: `{unknown[0]}` is read, which is no whole gradient or part of its sum")
        rewriter.copy(line, names)
    if missing := [name for _, name in sums.residuals if name not in names]:
        raise EarlyFault(f"{sums.where}: `{missing[0]}` is returned, which is no part of a sum")
    if twice := [key for key, _ in sums.residuals if key in rewriter.returns]:
        raise EarlyFault(f"{sums.where} returns `{twice[0]}`, and so does {REDUCE}")
    ends = (sums.program.last or sums.program.main).values()
    for key, (_, end) in sums.gradients.items():
        gradient = known.get(key)
        if end not in names or gradient is None or gradient.type != ends[end].type:
            raise EarlyFault(f"{sums.where}: `{end}` is not the gradient `{key.name}` as {REDUCE} reads it")
        rewriter.parameters[gradient.name] = starts[key]
        rewriter.rename(gradient.name, names[end])
    rewriter.returns |= {key: names[name] for key, name in sums.residuals}
    main = rewriter.function()
    count = len(main.lines) - len(reduce.main.lines)
    lines = _numbered_anew([main.lines[:count], main.lines[count:]])
    return replace(reduce, functions=(replace(main, lines=tuple(lines)),))


def _numbered_anew(parts: Sequence[Sequence[Line]]) -> Iterator[Line]:
    """Yield the lines of several parts, whose messages are numbered consecutively."""
    numbers: dict[tuple[int, object], int] = {}
    for part, lines in enumerate(parts):
        for line in lines:
            kwargs = tuple(
                (key, numbers.setdefault((part, value), len(numbers) + 1) if key == MESSAGE else value)
                for key, value in line.kwargs
            )
            yield replace(line, kwargs=kwargs)


def on_their_way(program: Program) -> dict[Binding, str]:
    """Return the values that a program returns while their messages are under way, by their bindings: a last backward
    gradients, and UNSHARD weights."""
    if program.last is None and program.action != UNSHARD:
        return {}
    function, kind = program.mains[0], "weight" if program.action == UNSHARD else "gradient"
    sent = {value.name for line in function.lines if MESSAGE in dict(line.kwargs) for value in line.made}
    return {key: name for key, name in function.returns if name in sent and key.kind == kind}


def _by_results(lines: Sequence[Line]) -> dict[tuple[Value | None, ...], Line]:
    """Return lines by their results, without the numbers of their messages: their order carries no meaning."""
    return {
        line.results: replace(line, kwargs=tuple(item for item in line.kwargs if item[0] != MESSAGE)) for line in lines
    }


# ---- split backwards: I and W of a stage are the B that they stand for
# A call of B in two phases is a call of I and one of W. The lines of both are those of B's function, where some cheap
# ones may be in both phases.

_PHASE = re.compile(r"(.+_backward)_(inputs|weights)(_[0-9]+)?")
"""The names of the functions of I and W."""


class SplitFault(ValueError):
    """The error of an I and a W that are not a backward in two phases, or not the backward of other microbatches."""


def whole_backwards(programs: Mapping[str, Program], blocks: Mapping[str, Function]) -> dict[str, Program]:
    """Return the programs of a role with a B in the place of I and W of each stage. Where the stage has B too, this is
    the same work. ``blocks`` are the functions of every B of the build, which may have the same ones.

    Raises:
        SplitFault: I and W are not one backward, or another one than B.
    """
    phases = (INPUT_GRADIENTS, WEIGHT_GRADIENTS)
    whole = {key: program for key, program in programs.items() if program.action not in phases}
    split = (key.removesuffix(program.action) for key, program in programs.items() if program.action in phases)
    for stage in dict.fromkeys(split):
        inputs, weights = (programs.get(f"{stage}{phase}") for phase in phases)
        if inputs is None or weights is None:
            raise SplitFault(f"stage {stage or 0} has only one of {' and '.join(phases)}")
        key = f"{stage}{BACKWARD}"
        whole[key] = _Joined(inputs, weights, whole.get(key), dict(blocks)).program()
    return whole


def whole_steps(roles: Mapping[str, Mapping[str, Program]]) -> dict[str, dict[str, Program]]:
    """Return the programs of all roles with a B in the place of every I and W.

    Raises:
        SplitFault: some are not one backward.
    """
    blocks: dict[str, Function] = {}
    whole: dict[str, dict[str, Program]] = {}
    for programs in roles.values():
        blocks |= {block.name: block for program in programs.values() if program.action == BACKWARD
                   for block in program.blocks}  # fmt: skip
    for name, programs in roles.items():
        whole[name] = whole_backwards(programs, blocks)
        for program in whole[name].values():
            blocks |= {block.name: block for block in program.blocks if program.action == BACKWARD}
    return whole


@remembered
def synchronous(function: Function) -> Sequence[Line]:
    """Return the lines of a function, with a message that it starts and awaits as one line, where it awaits it."""
    started = {value.name: line for line in function.lines if MESSAGE in dict(line.kwargs) for value in line.made}
    awaited = {line.uses[0]: line for line in function.lines if line.op == WAIT and line.uses[0] in started}
    lines = []
    for line in function.lines:
        if line.op == WAIT and line.uses[0] in started:
            start = started[line.uses[0]]
            kwargs = tuple(item for item in start.kwargs if item[0] != MESSAGE)
            lines.append(replace(start, results=line.results, kwargs=kwargs))
        elif not any(value.name in awaited for value in line.made):
            lines.append(line)
    return lines


class _Joined:
    """I and W of a stage as one program, whose functions are those of the stage's B if it has one."""

    def __init__(
        self, inputs: Program, weights: Program, backward: Program | None, blocks: dict[str, Function]
    ) -> None:
        self.inputs, self.weights, self.backward, self.functions = inputs, weights, backward, blocks
        handed, read = inputs.main.returned("deferred"), weights.main.bound("deferred")
        types = inputs.main.values()
        for name in sorted(handed.keys() ^ read.keys()):
            raise self.fault(f"`{name}` is deferred or read, not both")
        for name, value in read.items():
            if handed[name] != value.name or types[value.name].type != value.type:
                raise self.fault(f"`{name}` has another name or type where it is read")

    def fault(self, message: str) -> SplitFault:
        """Return the error of this stage."""
        return SplitFault(f"{self.inputs.role}: {INPUT_GRADIENTS} and {WEIGHT_GRADIENTS}: {message}")

    def program(self) -> Program:
        """Return B. It has a last main function if one of the programs has."""
        mains = [self._main(main) for main in self.weights.mains]
        if self.backward is not None:
            main = self.backward.main
            if _same_work(mains[-1]) != _same_work(replace(main, lines=tuple(synchronous(main)))):
                raise self.fault(f"do other work than {BACKWARD}")
            mains = mains if len(mains) > 1 else [*self.backward.mains]
        called = dict.fromkeys(line.op for main in mains for line in main.lines if line.calls_function)
        blocks = (self.functions[name] for name in called)
        return Program(self.inputs.role, BACKWARD, self.inputs.mesh, (*blocks, *mains))

    def _main(self, weights: Function) -> Function:
        """Return I's main function with one of W: a pair of calls is one call, and lines that both have stand once."""
        inputs, calls = self.inputs.main, self._calls(weights)
        returns = [pair for pair in inputs.returns if pair[0].kind != "deferred"] + [*weights.returns]
        lines = self._together(inputs, weights, calls)
        parameters = {value.name: value for value in (*inputs.parameters, *weights.parameters)
                      if value.kind != "deferred"}  # fmt: skip
        live, read = needed(lines, [name for _, name in returns])
        kept = tuple(value for value in parameters.values() if value.name in read)
        return Function(re.sub("_(inputs|weights)", "", weights.name), kept, live, tuple(returns))

    def _together(self, first: Function, second: Function | None, calls: Mapping[str, Line] = {}) -> list[Line]:
        """Return the lines of two functions, those that both have once, and ``calls`` in the place of the lines that
        make the results by which they are known."""
        functions = [first] if second is None else [first, second]
        alike: dict[str, Line] = {}
        for line in (line for function in functions for line in synchronous(function)):
            name = line.made[0].name
            if name not in calls and alike.setdefault(name, line) != line:
                raise self.fault(f"make `{name}` by different lines")
        lines: dict[str, Line] = {}
        for line in (line for function in functions for line in function.lines):
            call = calls.get(line.made[0].name)
            lines.setdefault((call or line).made[0].name, call or line)
        return [*self._ordered([*lines.values()])]

    def _calls(self, weights: Function) -> dict[str, Line]:
        """Return B's calls by the first result of each call of I and W that stands for them. The calls of two halves of
        one function are paired in their order."""
        waiting: dict[str, list[list[tuple[Line, Function]]]] = {}
        pairs: list[list[tuple[Line, Function]]] = []
        for program, main in ((self.inputs, self.inputs.main), (self.weights, weights)):
            for line in filter(lambda line: line.calls_function, main.lines):
                function, match = program.function(line.op), _PHASE.fullmatch(line.op)
                if match is None:
                    if self.functions.setdefault(function.name, function) != function:
                        raise self.fault(f"call two functions `{function.name}`")
                elif match[2] == "inputs":
                    pairs.append([(line, function)])
                    waiting.setdefault(f"{match[1]}_weights{match[3] or ''}", []).append(pairs[-1])
                elif waiting.get(line.op):
                    waiting[line.op].pop(0).append((line, function))
                else:
                    raise self.fault(f"`{line.op}` is called without the call before it")
        read = Counter(
            name for main in (self.inputs.main, weights)
            for name in (*(n for line in main.lines for n in line.uses), *(n for key, n in main.returns
                                                                           if key.kind != "deferred"))
        )  # fmt: skip
        calls: dict[str, Line] = {}
        for pair in pairs:
            calls |= dict.fromkeys((line.made[0].name for line, _ in pair), self._call(pair, read))
        return calls

    def _call(self, pair: Sequence[tuple[Line, Function]], read: Counter[str]) -> Line:
        """Return the call that one or two calls stand for. ``read`` counts the reads of the main functions' values."""
        arguments, parameters = dict[str, Any](), dict[str, Value]()
        results, ends = dict[str, Value | None](), dict[str, Binding]()
        for line, function in pair:
            for value, argument in zip(function.parameters, line.args, strict=True):
                if parameters.get(value.name) == value and arguments[value.name] == argument:
                    continue  # I may return it too, as the gradient of a residual
                handed = results.get(value.name)
                known = Ref(handed.name) if handed is not None else arguments.setdefault(value.name, argument)
                if known != argument or (handed is None and parameters.setdefault(value.name, value) != value):
                    raise self.fault(f"`{line.op}` reads another `{value.name}`")
            results |= {name: value for (_, name), value in zip(function.returns, line.results, strict=True)}
            ends |= {name: key for key, name in function.returns}
        of_pair = Counter(pair[1][0].uses if len(pair) > 1 else ())
        outside = [name for name, value in results.items() if value is None or read[value.name] > of_pair[value.name]]
        name = re.sub(_PHASE, r"\1", pair[0][0].op)
        lines, _ = needed(self._together(pair[0][1], pair[1][1] if len(pair) > 1 else None), outside)
        whole = Function(name, tuple(parameters.values()), lines, tuple((ends[label], label) for label in outside))
        known_function = self.functions.setdefault(name, whole)
        if _same_work(known_function) != _same_work(whole):
            raise self.fault(f"`{pair[0][0].op}` is a half of another `{name}`")
        return Line(tuple(results[label] for _, label in known_function.returns), name,
                    tuple(arguments[value.name] for value in known_function.parameters),
                    pair[0][0].kwargs, pair[0][0].origin)  # fmt: skip

    def _ordered(self, lines: Sequence[Line]) -> Iterator[Line]:
        """Yield lines in their order, but each behind those whose results it reads."""
        makers = {value.name: line for line in lines for value in line.made}
        done, pending = set[int](), [*reversed(lines)]
        waiting: dict[int, None] = {}
        while pending:
            line = pending[-1]
            before = [makers[name] for name in line.uses if name in makers and id(makers[name]) not in done]
            if id(line) in done or not before:
                pending.pop()
                if id(line) not in done:
                    done.add(id(line))
                    yield line
            elif id(line) in waiting:
                raise self.fault(f"`{line.names}` needs itself")
            else:
                waiting[id(line)] = None
                pending += before


def _same_work(function: Function) -> object:
    """Return all that a function does, without the order of lines and parameters."""
    parameters = {value.name: value for value in function.parameters}
    return function.name, parameters, _by_results(synchronous(function)), {*function.returns}


# ---- rings: all-gathers of keys and values, attention, and reduce-scatters of their gradients


class RingFault(ValueError):
    """The error of a line that is no ring."""


def without_rings(program: Program) -> Program:
    """Return a program with the lines that its rings stand for.

    Raises:
        RingFault: a ring's keys are not split along the sequence over its axis.
    """
    if not any(line.op in RINGS for function in program.functions for line in function.lines):
        return program
    functions = []
    for function in program.functions:
        rewriter = Rewriter(program.mesh, function)
        for line in (line for line in function.lines if line.op in RINGS):
            _expand_ring(line, rewriter)
        functions.append(rewriter.function())
    return replace(program, functions=tuple(functions))


def _expand_ring(line: Line, rewriter: Rewriter) -> None:
    """Replace a ring by the lines that it stands for."""
    row, mesh, origin = RINGS[line.op], rewriter.mesh, line.origin
    if len(line.args) < row.keys + 3 or not isinstance(line.args[1], str) or line.kwargs:
        raise RingFault(f"{line.op} takes a value, axes, and what attention takes")
    axes, args, values = line.args[1], row.inner(line.args), rewriter.source.values()
    rewriter.insert_before(line)
    for at, what in ((row.keys, "keys"), (row.keys + 1, "values")):
        if not isinstance(args[at], Ref) or args[at].name not in values:
            raise RingFault(f"{line.op} reads no {what}")
        type_ = values[args[at].name].type
        gathered, name = _changed(type_, axes, "I", line), f"{line.made[0].name}_whole_{what}"
        operands = args[at], axes, SEQUENCE, _sequence_outer(type_, axes, mesh)
        args[at] = Ref(rewriter.emit("parc.all_gather", operands, gathered, origin, name).name)
    if not row.carries_gradients:
        rewriter.replace(line, Line(line.results, row.attention, tuple(args), (), origin))
        return
    if len(line.results) != 3:
        raise RingFault(f"{line.op} makes three gradients")
    partial: dict[Value, Value] = {}
    for result in filter(None, line.results[1:]):
        name = rewriter.names.fresh(f"{result.name}_in_parts")
        partial[result] = Value(name, _changed(result.type, axes, "P", line))
    results = (line.results[0], *(result and partial[result] for result in line.results[1:]))
    outers = {result: _sequence_outer(result.type, axes, mesh) for result in partial}
    sums = (Line((result,), "parc.reduce_scatter", (Ref(part.name), axes, SEQUENCE, outers[result]), (), origin)
            for result, part in partial.items())  # fmt: skip
    rewriter.replace(line, Line(results, row.attention, tuple(args), (), origin), *sums)


def _changed(type_: TensorType, axes: str, kind: str, line: Line) -> TensorType:
    """Return a type that is whole, or partial, over the axes of a ring instead of split along the sequence."""
    changes: Mapping[str, object] = dict.fromkeys(axes.split(","), kind)
    if any(not isinstance(at := type_.placement[axis], Split) or at.dim != SEQUENCE for axis in changes):
        raise RingFault(f"{line.op} over `{axes}`: its keys, values and their gradients are not split over it")
    return replace(type_, placement=type_.placement.replace(changes))  # type: ignore[arg-type]


def _sequence_outer(type_: TensorType, axes: str, mesh: Mesh) -> object:
    return local_outer(type_.placement, mesh, axes.split(",")[0])
