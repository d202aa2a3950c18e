"""Proposals: plans for models that have none; inputs and loss by calling the model, placements by a search."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from parc.compiler.capture.callables import load_callable
from parc.compiler.capture.capture import Captured
from parc.compiler.capture.faults import explain_failure, user_frame
from parc.compiler.capture.model_calls import forward_text, whole_arguments
from parc.compiler.capture.model_output import tensors_in
from parc.compiler.capture.node_facts import noted
from parc.compiler.initial.recipes import Recorded
from parc.compiler.ops.rules import facts
from parc.compiler.plan.include import FAMILY, families
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiler.resolve.placements import Resolved
from parc.compiler.resolve.requests import Request
from parc.compiler.sizes.size_range import BATCH
from parc.compiling.compiled import Compiled
from parc.compiling.driver import REFUSALS, Progress, compile_captured, compile_plan, task_lines, uncollected
from parc.compiling.plan_capture import capture_diagnostic, capture_plan, make_model
from parc.compiling.request import ask
from parc.grammar.codes import LOSS_NOT_NUMBER, NO_INPUTS
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import did_you_mean, listed
from parc.grammar.source import Source
from parc.passes.calls import operands_of, substitute_nodes, tensors_of
from parc.proposing.guesses import Guess
from parc.proposing.inputs import Caller, ForwardCall
from parc.proposing.lines import ModelLine, PlacingLine, lines_of, plan_text
from parc.proposing.placements import Search
from parc.proposing.tasks import Task, tasks_of


@dataclass(frozen=True)
class Wish:
    """The request for a proposal: the model, the ranks along each axis, and inputs, sizes and loss if they are
    known."""

    model: ModelLine
    ranks: Mapping[str, int]
    inputs: Mapping[str, Guess] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    loss: str = ""
    head: Sequence[str] = ()


@dataclass(frozen=True)
class Proposal:
    """A plan's text, the compiled plan, and the family that it includes, "" for none."""

    text: str
    compiled: Compiled
    family: str


@uncollected()
def propose(wish: Wish, folder: Path, name: str, progress: Progress = lambda _: None) -> Proposal:
    """Return a plan for a model, to be stored in ``folder`` under ``name``. It is compiled once, so that its names and
    sizes fit the model.

    Raises:
        PlanError: the model cannot be constructed or captured, or no inputs were found.
    """
    progress("making the model")
    plan = _draft(wish, Task({"x": Guess("float32", (BATCH,))}, {BATCH: 1}, "output", ""), (), name)
    recorded = make_model(plan, task_lines(plan), folder)
    progress("looking for inputs")
    caller = Caller(recorded, wish.sizes, wish.inputs, wish.loss)
    if idle := caller.idle():
        raise PlanError([_unread_input(plan, caller, idle[0])])
    call = caller.find()
    if call.tried.error is not None:
        raise PlanError([_no_inputs(plan, caller, call)])
    if unknown := caller.unknown(call)[1:]:
        raise PlanError([_unknown(plan, unknown)])
    if entries(recorded.module) > LARGE or call.tried.work > _UNTESTED_WORK:
        progress("looking for a smaller model of the same structure")
        smaller = _smaller(plan, recorded, call, folder)
        wish = replace(wish, model=replace(wish.model, smaller=smaller))
    progress("capture")
    tasks = list(tasks_of(caller, call, wish.loss))
    if not tasks:
        raise PlanError([_no_tensor(plan, call)])
    task, recorded, captured = _captured(wish, tasks, folder, name)
    task = replace(task, why=task.why + _left_out(task, call, recorded, captured))
    draft = _draft(wish, task, (), name)
    progress("looking for placements")
    search = Search(captured, ask(draft, folder, recorded, captured)[1], "tp")
    family, lines = initial_lines(
        search, recorded, lambda lines: ask(_draft(wish, task, lines, name), folder, recorded, captured)
    )
    text = plan_text(wish.head, wish.model, task, wish.ranks, lines)
    plan = read_plan(Source(name, text))
    if wish.model.smaller:
        return Proposal(text, compile_plan(plan, folder, progress=progress), family)
    return Proposal(text, compile_captured(plan, folder, recorded, captured), family)


def initial_lines(
    search: Search, recorded: Recorded, ask_with: Callable[[Sequence[PlacingLine]], tuple[Resolved, Request]],
    ranks: str = "$tp",
) -> tuple[str, list[PlacingLine]]:  # fmt: skip
    """Return the placements that are proposed at first: the family that fits, and its line; or "" and the lines of the
    groups that are worth splitting. ``ask_with`` returns the request of a plan with some lines."""

    def fits(lines: Sequence[PlacingLine]) -> int:
        """Return the entries of weights that lines split; -1 if they gather, or do not fit the model."""
        try:
            resolved, request = ask_with(lines)
            return -1 if search.gathers(request) else _split_entries(resolved, search)
        except (PlanError, *REFUSALS):
            return -1

    lines, least = _fitting_lines(lines_of(search.groups(), search), fits)
    named = families() if search.axis == "tp" else ()
    return _family(lines, least, fits, recorded, dict.fromkeys(named, f"(tp={ranks})"))


def _draft(wish: Wish, task: Task, lines: Sequence[PlacingLine], name: str) -> Plan:
    """Return the plan with these lines."""
    return read_plan(Source(name, plan_text(wish.head, wish.model, task, wish.ranks, lines)))


def _captured(wish: Wish, tasks: Sequence[Task], folder: Path, name: str) -> tuple[Task, Recorded, Captured]:
    """Return the first task with which the model (or its smaller twin) can be captured, and the capture.

    Raises:
        PlanError: that of the first task, if none can.
    """
    errors: list[PlanError] = []
    for task in chain.from_iterable(_lengths(task, wish) for task in tasks):
        try:
            return _fitted(wish, task, folder, name)
        except PlanError as error:
            errors.append(error)
    raise errors[0]


def _lengths(task: Task, wish: Wish) -> Iterator[Task]:
    """Yield a task, and the same with shorter sequences: a model that grows its tables as it needs them can be captured
    only with short ones."""
    yield task
    for length in (32, 16):
        if "S" not in wish.sizes and task.sizes.get("S", 0) > length:
            yield replace(task, sizes={**task.sizes, "S": length})


def _fitted(wish: Wish, task: Task, folder: Path, name: str) -> tuple[Task, Recorded, Captured]:
    """Capture a model with a task, with sequences no longer than its position embeddings.

    Raises:
        PlanError: it cannot be captured.
    """
    plan = _draft(wish, task, (), name)
    recorded, captured = capture_plan(plan, task_lines(plan), folder, wish.model.smaller or None)
    length = task.sizes.get("S", 0)
    fitting = length if "S" in wish.sizes else longest(captured, recorded, length)
    if fitting == length:
        return task, recorded, captured
    return _fitted(wish, replace(task, sizes={**task.sizes, "S": fitting}), folder, name)


def _left_out(task: Task, call: ForwardCall, recorded: Recorded, captured: Captured) -> str:
    """Return words on differentiable outputs that the loss does not read, if weights are untrained for that; else
    ""."""
    trained = captured.trainable()
    left = [name for name, weight in recorded.module.named_parameters() if weight.requires_grad and name not in trained
            and name in captured.placeholders("parameter")]  # fmt: skip
    results = [name for name, value in tensors_in(call.tried.output) if value.requires_grad and name not in task.loss]
    return f"; it does not read {', '.join(results[:3])}" if left and results else ""


def _fitting_lines(
    lines: Sequence[PlacingLine], fits: Callable[[Sequence[PlacingLine]], int]
) -> tuple[list[PlacingLine], int]:
    """Return the lines that fit together, and the entries that they split: all, or those that fit in turn."""
    if (most := fits(lines)) >= 0:
        return list(lines), most
    kept: list[PlacingLine] = []
    least = fits(kept)
    for pair in _pairs(lines):
        if (size := fits([*kept, *pair])) >= 0:
            kept, least = [*kept, *pair], size
    return kept, least


def _pairs(lines: Sequence[PlacingLine]) -> Iterator[list[PlacingLine]]:
    """Yield the lines of each part of the model: attentions, hidden widths, the vocabulary."""
    for part in dict.fromkeys(line.part for line in lines):
        yield [line for line in lines if line.part == part]


def _family(
    lines: list[PlacingLine], least: int, fits: Callable[[Sequence[PlacingLine]], int], recorded: Recorded,
    arguments: Mapping[str, str],
) -> tuple[str, list[PlacingLine]]:  # fmt: skip
    """Return the family that splits most, with the one line that includes it, if that is at least as much as the lines
    split, ``least``; else "" and these lines. ``arguments`` are those with which each family is included."""
    kind = type(recorded.module).__name__.lower()
    named = sorted(arguments, key=lambda family: (family.replace("-", "") not in kind, _stands_for(family), family))
    includes = {family: PlacingLine("include", [f'"{FAMILY}{family}"'], arguments[family], _FITS) for family in named}
    sizes = {family: fits([include]) for family, include in includes.items()}
    best = max(sizes, key=sizes.__getitem__, default="")  # the first of equal ones
    return (best, [includes[best]]) if sizes.get(best, -1) >= least > 0 else ("", lines)


_FITS = "a family of plans that fits: `parc show PLAN --expand` has its lines"


def _stands_for(family: str) -> bool:
    """Return whether a family only includes another family."""
    text = (files("parc") / "plans" / f"{family}.parc").read_text(encoding="utf-8")
    return any(line.startswith("include ") for line in text.splitlines())


def _split_entries(resolved: Resolved, search: Search) -> int:
    """Return the entries of the weights that a plan splits over the axis of a search."""
    names = {seed.value for seed in resolved.seeds if seed.axis == search.axis and seed.dim is not None}
    return sum(math.prod(search.names.shape(name)) for name in names)


def _no_tensor(plan: Plan, call: ForwardCall) -> Diagnostic:
    """Return the error of a model without an output that a loss could read."""
    message = f"forward returns {type(call.tried.output).__name__}, in which no tensor is found"
    help_ = "let it return tensors, or give a loss of your own: `--loss \"'./model.py:loss' (output)\"`"
    return Diagnostic(LOSS_NOT_NUMBER, message, Label(plan.model.span), help=help_)


def _unread_input(plan: Plan, caller: Caller, name: str) -> Diagnostic:
    """Return the error of an input of the user that nothing reads."""
    message = f"{forward_text(caller.module)} has no parameter `{name}`, and no `--loss` names it"
    otherwise = f'name it there if the loss alone reads it, as `--loss "cross_entropy(output, {name})"`'
    help_ = did_you_mean(name, caller.parameters, otherwise)
    return Diagnostic(NO_INPUTS, message, Label(plan.model.span), help=help_)


def _unknown(plan: Plan, names: Sequence[str]) -> Diagnostic:
    """Return the error of inputs that only the loss reads, so that they cannot be inferred."""
    help_ = "say it for each, as " + " ".join(f'`--input "{name} float32 [B]"`' for name in names)
    message = f"the loss reads {listed(names)}, of which neither type nor shape is known"
    return Diagnostic(NO_INPUTS, message, Label(plan.model.span), help=help_)


def _no_inputs(plan: Plan, caller: Caller, call: ForwardCall) -> Diagnostic:
    """Return the error that no call of the forward succeeds, with the call that went furthest; or the reason why the
    model's code cannot be captured, if that is why."""
    error = call.tried.error
    assert error is not None
    if (explained := explain_failure(error, in_loss=False)).kind != "other":
        return capture_diagnostic(plan, explained)
    text = (str(error).strip() or type(error).__name__).partition("\n")[0]
    nearest = ", ".join(f"{name} {guess.text()}" for name, guess in call.guesses.items())
    sizes = ", ".join(f"{name}={size}" for name, size in call.sizes.items())
    notes = [f"the call that went furthest: {nearest} at {sizes}", f"it fails: {type(error).__name__}: {text}"]
    if where := user_frame(error):
        notes.append(f"at {where}")
    names = ", ".join(caller.parameters)
    options = (f'--input "{name} {guess.text()}"' for name, guess in call.guesses.items())
    help_ = f"correct the types or dims in these options, and give them: `{' '.join(options)}`"
    if not call.guesses:
        help_ = "write a forward that takes tensors"
    return Diagnostic(NO_INPUTS, f"no inputs were found with which forward({names}) runs",
                      Label(plan.model.span), help=help_, notes=tuple(notes))  # fmt: skip


Make = Callable[[Mapping[str, int]], nn.Module | None]
"""A function that constructs the model with some arguments replaced; None if that fails, or a call of it does."""

LARGE = 20_000_000
"""The most parameters of a model that is tested numerically at its full size, without a `verify` line."""
_UNTESTED_WORK = 20_000_000_000
"""The multiply-adds of a forward that is too much to be tested without one, whatever its batch."""
_LAYERS, _WIDTH, _MULTIPLE = 2, 256, 16
"""The layers, the least width, and the divisor of the widths of a smaller model."""


def _smaller(plan: Plan, recorded: Recorded, call: ForwardCall, folder: Path) -> dict[str, int]:
    """Return arguments of a smaller model that takes the same inputs."""
    lines = task_lines(plan)

    def make(changes: Mapping[str, int]) -> nn.Module | None:
        try:
            smaller = make_model(plan, lines, folder, changes)
        except PlanError:
            return None
        tried = Caller(smaller, {}, {}).call(call.guesses, call.sizes)
        return smaller.module if tried.error is None else None

    numbers = whole_arguments(load_callable(lines.model, folder), recorded.module, dict(lines.arguments))
    return smaller_arguments(recorded.module, numbers, make)


def smaller_arguments(module: nn.Module, numbers: Mapping[str, int], make: Make) -> dict[str, int]:
    """Return arguments with which a model is as small as its structure allows: first fewer of equal blocks, then
    narrower layers. ``numbers`` are the whole numbers among its arguments."""
    chosen: dict[str, int] = {}
    kinds, count = kinds_of(module), entries(module)
    for name, value in numbers.items():
        if value > _LAYERS:
            fewer = make({**chosen, name: _LAYERS})
            if fewer is not None and kinds_of(fewer) == kinds and entries(fewer) < count:
                chosen[name], count = _LAYERS, entries(fewer)
    names = {name for name, _ in kinds}
    for name, value in numbers.items():
        for size in _widths(value) if name not in chosen else ():
            narrow = make({**chosen, name: size})
            if narrow is not None and {kind for kind, _ in kinds_of(narrow)} == names and entries(narrow) < count:
                chosen[name], count = size, entries(narrow)
                break
    return chosen


def _widths(value: int) -> Iterator[int]:
    """Yield smaller values of a width, the smallest first: halves that are multiples of 16, for heads and ranks; then
    one with the same remainder by 16."""
    sizes = []
    while value % (2 * _MULTIPLE) == 0 and value >= 2 * _WIDTH:
        value //= 2
        sizes.append(value)
    yield from reversed(sizes)
    if value > 8 * _WIDTH:
        yield 4 * _WIDTH + value % _MULTIPLE


def kinds_of(module: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    """Return the parameters of a model by name and shape, those of numbered blocks once."""
    return {(re.sub(r"\d+", "*", name), tuple(value.shape)) for name, value in module.named_parameters()}


def entries(module: nn.Module) -> int:
    """Return the entries of all parameters."""
    return sum(math.prod(value.shape) for value in module.parameters())


_TOKEN = 2
"""The token that fills all inputs: the first tokens often pad, and have no position."""
_MOST_COMPUTED = 1 << 20  # entries


def longest(captured: Captured, recorded: Recorded, length: int) -> int:
    """Return the largest sequence length, at most ``length``, at which every embedding has the rows that are read."""
    values: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        try:
            values[node] = _computed(node, recorded, values)
        except (IndexError, RuntimeError):  # a table among buffers or constants is shorter
            return length // 2
        if node.op == "call_function" and facts(node.target).looks_up:
            table, index = operands_of(node)[:2]
            indices, rows = values.get(index), noted(table).value.shape[0]
            if indices is not None and indices.numel() and (beyond := int(indices.max()) + 1 - rows) > 0:
                length = min(length, max(_power(length - beyond), 1))
    return length


def _power(size: int) -> int:
    """Return the largest power of two that is not larger."""
    return 1 << max(size.bit_length() - 1, 0)


def _computed(node: fx.Node, recorded: Recorded, values: Mapping[fx.Node, Any]) -> Any:
    """Return a node's value if it follows from positions and tokens alone; None if it depends on more."""
    with unset_fake_temporarily():
        if node.op == "placeholder":
            binding, value = noted(node).binding, noted(node).value
            if binding.kind == "input" and not value.is_floating_point():
                return torch.full(tuple(value.shape), _TOKEN, dtype=value.dtype)
            known = binding.kind == "buffer" and binding.name in recorded.recipes and value.numel() <= _MOST_COMPUTED
            return recorded.recipes[binding.name].whole() if known else None
        tensors = tensors_of(node)
        if node.op != "call_function" or not all(
            isinstance(t, torch.Tensor) and t.numel() <= _MOST_COMPUTED for t in tensors
        ):
            return None
        if any(values.get(operand) is None for operand in node.all_input_nodes):
            return None
        args, kwargs = substitute_nodes((node.args, node.kwargs), values.__getitem__)
        operator: Any = node.target
        return operator(*args, **kwargs)
