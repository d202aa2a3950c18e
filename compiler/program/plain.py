"""Programs in the plain form that checks read: reductions of gradients that backward starts early are in REDUCE, and
rings are the lines that they stand for. So every check of a build knows both without a word about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..layout.collectives import MESSAGE, RINGS, SEQUENCE, local_outer
from ..layout.mesh import Mesh
from ..layout.placement import Split, TensorType
from .actions import ACTIONS, REDUCE, UNSHARD
from .binding import UNSCALE, Binding
from .program import Line, Program, Ref, Value
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
    work = [program for program in programs.values() if program.action in ACTIONS and ACTIONS[program.action].works]
    makers = Counter(key for program in work for key, _ in program.main.returns)
    for key, program in programs.items():
        if program.last is None:
            continue
        if REDUCE not in plain:
            raise EarlyFault(f"{program.role} has no {REDUCE}")
        sums = _Sums(program)
        if several := [key for key in sums.gradients if makers[key] > 1]:
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
