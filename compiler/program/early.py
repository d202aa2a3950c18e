"""Early sums: sums of gradients over ranks that the last microbatch's backward starts, while REDUCE waits for them.

B then has two main functions. ``backward_last`` has every line of ``backward``, and lines between them that add a
gradient to those of earlier microbatches and start its sum. Checks read such a step with the sums in REDUCE: there they
mean the same, because they read nothing but whole gradients, what the last step left of these, and one over the loss
scale, and nothing in B reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..layout.collectives import MESSAGE
from .actions import ACTIONS, REDUCE
from .binding import UNSCALE, Binding
from .program import Line, Program, Ref, Value
from .residual import residual, residual_of
from .rewriter import Rewriter


class EarlyFault(ValueError):
    """The error of a last backward that is not the backward of other microbatches with sums of its gradients."""


def in_reduce(programs: Mapping[str, Program]) -> dict[str, Program]:
    """Return the programs of a role with its early sums at the beginning of REDUCE, and one main function in each.

    Raises:
        EarlyFault: the lines of a last backward mean something else.
    """
    made = dict(programs)
    work = [program for program in programs.values() if program.action in ACTIONS and ACTIONS[program.action].works]
    makers = Counter(key for program in work for key, _ in program.main.returns)
    for key, program in programs.items():
        if program.last is None:
            continue
        if REDUCE not in made:
            raise EarlyFault(f"{program.role} has no {REDUCE}")
        sums = _Sums(program)
        if several := [key for key in sums.gradients if makers[key] > 1]:
            raise EarlyFault(f"{sums.where} sums `{several[0]}`, of which another stage makes a part")
        made[key] = replace(program, functions=(*program.blocks, program.main))
        made[REDUCE] = _with_sums(made[REDUCE], sums)
    return made


@dataclass(slots=True)
class _Sums:
    """The lines of a last backward that the backward of other microbatches does not have."""

    program: Program
    lines: list[Line] = field(default_factory=list)
    gradients: dict[Binding, tuple[str, str]] = field(default_factory=dict)
    """The names of a microbatch's gradient and of its sum, for each gradient that is summed."""
    so_far: dict[str, Binding] = field(default_factory=dict)
    """The parameters that hold the gradients of earlier microbatches."""
    reads: list[Value] = field(default_factory=list)
    """The other parameters that sums alone read: what the last step left of gradients, and one over the loss scale."""
    left: tuple[tuple[Binding, str], ...] = ()
    """The residuals that are returned for the next step."""

    def __post_init__(self) -> None:
        main, last = self.program.main, self.program.last
        assert last is not None
        values, common = main.values(), list[Line]()
        for line in last.lines:
            (common if any(value.name in values for value in line.made) else self.lines).append(line)
        added = [value for value in last.parameters if value.name not in values]
        self.left = tuple((key, name) for key, name in last.returns if residual_of(key))
        results = [row for row in last.returns if row not in self.left]
        same = (
            _by_results(common) == _by_results(main.lines)
            and [value for value in last.parameters if value not in added] == list(main.parameters)
            and [key for key, _ in results] == [key for key, _ in main.returns]
        )
        ends = {
            key: (own, end) for (key, own), (_, end) in zip(main.returns, results, strict=True) if own != end
        } if same else {}  # fmt: skip
        self.so_far = {value.name: value.binding for value in added
                       if value.binding is not None and value.kind == "gradient"}  # fmt: skip
        self.reads = [value for value in added if value.name not in self.so_far]
        states = {value.binding for value in self.reads} - {UNSCALE}
        if (
            not same or any(key.kind != "gradient" for key in ends) or not set(self.so_far.values()) <= ends.keys()
            or states != {key for key, _ in self.left} or not states <= {residual(key.name) for key in ends}
        ):  # fmt: skip
            raise EarlyFault(f"{self.where} does other work than `{main.name}`")
        self.gradients = ends

    @property
    def where(self) -> str:
        """The name of the function."""
        last = self.program.last
        return f"{self.program.role}.{self.program.action} {'' if last is None else last.name}"

    def total(self, line: Line) -> Binding | None:
        """Return the gradient that a line adds to that of earlier microbatches, if it does that."""
        if line.op != "aten.add.Tensor" or line.kwargs or not all(isinstance(item, Ref) for item in line.args):
            return None
        before, own = line.uses
        key = self.so_far.get(before)
        return key if key is not None and self.gradients[key][0] == own else None


def _with_sums(reduce: Program, sums: _Sums) -> Program:
    """Return REDUCE with these sums ahead of its lines."""
    rewriter, values = Rewriter(reduce.mesh, reduce.main), sums.program.main.values()
    rewriter.insert_after(None)
    starts = {key: Value(rewriter.names.fresh(own), values[own].type, key) for key, (own, _) in sums.gradients.items()}
    summed = {*sums.so_far.values()}
    names = {own: starts[key].name for key, (own, _) in sums.gradients.items() if key not in summed}
    known = {value.binding: value for value in reduce.main.parameters}
    for value in sums.reads:
        if value.binding not in known:
            known[value.binding] = rewriter.take(value.name, value.type, value.binding)
        names[value.name] = known[value.binding].name
    for line in sums.lines:
        if (added := sums.total(line)) is not None:
            names[line.made[0].name] = starts[added].name
            continue
        if line.calls_function:
            raise EarlyFault(f"{sums.where} calls `{line.op}`, which `{sums.program.main.name}` does not")
        if unknown := [name for name in line.uses if name not in names]:
            raise EarlyFault(f"{sums.where}: `{unknown[0]}` is read, which is no whole gradient or part of its sum")
        rewriter.copy(line, names)
    if missing := [name for _, name in sums.left if name not in names]:
        raise EarlyFault(f"{sums.where}: `{missing[0]}` is returned, which is no part of a sum")
    if twice := [key for key, _ in sums.left if key in rewriter.returns]:
        raise EarlyFault(f"{sums.where} returns `{twice[0]}`, and so does {REDUCE}")
    ends = (sums.program.last or sums.program.main).values()
    for key, (_, end) in sums.gradients.items():
        gradient = known.get(key)
        if end not in names or gradient is None or gradient.type != ends[end].type:
            raise EarlyFault(f"{sums.where}: `{end}` is not the gradient `{key.name}` as {REDUCE} reads it")
        rewriter.parameters[gradient.name] = starts[key]
        rewriter.rename(gradient.name, names[end])
    rewriter.returns |= {key: names[name] for key, name in sums.left}
    main = rewriter.function()
    own = len(main.lines) - len(reduce.main.lines)
    lines = _numbered_anew([main.lines[:own], main.lines[own:]])
    return replace(reduce, functions=(replace(main, lines=tuple(lines)),))


def _numbered_anew(parts: Sequence[Sequence[Line]]) -> Iterator[Line]:
    """Yield the lines of several parts with their messages numbered through."""
    numbers: dict[tuple[int, object], int] = {}
    for part, lines in enumerate(parts):
        for line in lines:
            kwargs = tuple(
                (key, numbers.setdefault((part, value), len(numbers) + 1) if key == MESSAGE else value)
                for key, value in line.kwargs
            )
            yield replace(line, kwargs=kwargs)


def on_their_way(program: Program) -> dict[Binding, str]:
    """Return the gradients that a program's last backward returns while their sums are made, by the values' names."""
    if program.last is None:
        return {}
    lines = program.last.lines
    sent = {value.name for line in lines if MESSAGE in dict(line.kwargs) for value in line.made}
    return {key: name for key, name in program.last.returns if name in sent and key.kind == "gradient"}


def _by_results(lines: Sequence[Line]) -> dict[tuple[Value | None, ...], Line]:
    """Return lines by what they make, without the numbers of their messages. Their order carries no meaning."""
    return {
        line.results: replace(line, kwargs=tuple(item for item in line.kwargs if item[0] != MESSAGE)) for line in lines
    }
