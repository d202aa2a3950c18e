"""The loss of a step in microbatches, measured: a plan's module and loss run as they are written, on microbatches and
on the batch that these are together, to find out what divides the sum of each term's values.

The graph of a microbatch does not tell: a number in it may be one over the size of the batch. So the module runs on
each microbatch, and the loss on their outputs joined. What cannot be joined, as ``output.loss``, comes from the module
on the whole batch.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, final

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from parc.compiler.analysis.samples import averaging_reason
from parc.compiler.capture.capture import Captured
from parc.compiler.capture.complex.form import real_form
from parc.compiler.capture.model_calls import TaskLines, model_builder
from parc.compiler.capture.model_output import value_at
from parc.compiler.capture.observer import code_undone
from parc.compiler.initial.recipes import Recorded, initialize
from parc.compiler.layout.mesh import Mesh
from parc.compiler.plan.directives.loss import CROSS_ENTROPY
from parc.compiler.plan.plan import Plan
from parc.compiler.program.binding import COUNT, Binding
from parc.compiler.program.program import Program
from parc.compiler.program.step_values import Division, LossTerm, base_term, term_count
from parc.compiler.resolve.experts import capacities_of
from parc.compiler.resolve.requests import Choices
from parc.compiler.resolve.stage_cuts import numbers_of, products_of
from parc.compiling.compiled import Compiled
from parc.compiling.plan_capture import input_specs
from parc.grammar.codes import AVERAGED
from parc.grammar.diagnostics import Diagnostic, Label, Severity
from parc.passes.pipeline import Measure, TermPrograms
from parc.runtime.backends.in_process import InProcess
from parc.runtime.compare.plain import CPU, PlainModule
from parc.runtime.data.random_batch import random_batch
from parc.runtime.machine.execute import Machine
from parc.runtime.machine.kernels import REFERENCE_KERNELS

_MOST_MICROBATCHES = 3
"""The most microbatches of which the whole batch is made here: their number does not matter beyond a few. Of a large
model it is two."""
_DRAWS = 2
"""The number of batches on which a division must hold: counts of few samples may be equal by chance."""
_NEARLY = 0.01
"""The part of itself by which a term that is almost a mean may differ from its mean over microbatches."""
_NEARLY_GRADIENTS = 0.05
"""The part of the gradients of the whole loss by which those of such a term may differ: those of the experts' balance
differ by 0.01 to 1.4 % for a factor of 0.001 to 0.1."""
_MOST_WORK = 300_000_000
"""The most multiply-adds of a microbatch's forward, and numbers that are read or written, of a module that is run."""
_NOISE = 0.05
"""The size of the noise on parameters, relative to the largest of each: behind weights of zero nothing would differ."""
_TOLERANCES = {8: 1e-6, 4: 1e-4, 2: 3e-2, 1: 3e-1}
"""The allowed relative errors, by the bytes of the narrowest floating numbers in a run."""

_MIXED = "the model takes statistics of a microbatch, and makes the term itself"
"""The reason why a term of a model with BatchNorm is not asked for the whole batch."""


@final
@dataclass(frozen=True, slots=True)
class _Value:
    """The value of a term, and its gradients by parameters, one behind the other."""

    loss: float
    gradient: Tensor

    @property
    def finite(self) -> bool:
        """True where the value and its gradients are finite."""
        return math.isfinite(self.loss) and bool(self.gradient.isfinite().all())

    def near(self, other: _Value, tolerance: float, size: float) -> bool:
        """Return whether two values are equal but for rounding; ``size`` is that of what is added up in one."""
        apart, size = float((self.gradient - other.gradient).norm()), max(abs(self.loss), size)
        norm = max(float(self.gradient.norm()), float(other.gradient.norm()))
        # a gradient of zero is nothing but rounding of what the loss is made of
        return abs(self.loss - other.loss) <= tolerance * size and apart <= tolerance * (10 * norm + 1e-3 * size)


@final
@dataclass(frozen=True, slots=True)
class TermValues:
    """The values of a term: on the whole batch, None where that cannot be known, and on each microbatch."""

    whole: _Value | None
    parts: Sequence[_Value]
    unknown: str = ""
    """The reason why the value on the whole batch cannot be known."""

    def combined(self, division: Division, counts: Sequence[float] | None) -> _Value:
        """Return the sum of the microbatches' numerators over the divisor of the step. ``counts`` are the
        microbatches', for a division by these."""
        weights = [1.0 / len(self.parts) if division.by == "mean" else 1.0 for _ in self.parts]
        if counts is not None:
            total = division.of(sum(counts))
            weights = [division.of(count) / total if total else float("nan") for count in counts]
        used = [(part, weight) for part, weight in zip(self.parts, weights, strict=True) if weight]
        gradient = sum((part.gradient * weight for part, weight in used), torch.zeros_like(self.parts[0].gradient))
        return _Value(sum(part.loss * weight for part, weight in used), gradient)

    def holds(self, division: Division, counts: Sequence[float] | None, tolerance: float) -> bool:
        """Return whether the whole batch's value is that of a division."""
        assert self.whole is not None
        size = max((abs(part.loss) for part in self.parts), default=0.0) if counts is None else 0.0
        return self.whole.near(self.combined(division, counts), tolerance, size)


class WrongTerm(NamedTuple):
    """A term of the loss, by its number, whose value on a whole batch is not what a step makes of microbatches."""

    number: int
    whole: float
    combined: float


class WholeBatch(NamedTuple):
    """The comparison of a step in microbatches with the whole batch: the terms of the loss that differ, and those that
    could not be compared, by their numbers, with the reason."""

    wrong: Sequence[WrongTerm] = ()
    unknown: Mapping[int, str] = MappingProxyType({})
    near: Sequence[WrongTerm] = ()
    """The terms whose mean over microbatches is the whole batch's value on some batches, and nearly so on this one."""


class NotMeasured(Exception):
    """The error of a module or a loss that does not run here, or whose numbers tell nothing. It says why."""


@final
class StepInParts:
    """A plan's module and loss, run on a few microbatches and on the batch that these are together."""

    def __init__(
        self, plan: Plan, lines: TaskLines, folder: Path, recorded: Recorded, captured: Captured,
        overrides: Mapping[str, Any] | None, evaluates: bool,
    ) -> None:  # fmt: skip
        self._plan, self._lines, self._folder, self._recorded = plan, lines, folder, recorded
        self._overrides, self._evaluates = overrides, evaluates
        self._counted = all(term.kind == CROSS_ENTROPY for term in lines.terms)
        self._measured: list[set[str] | None] | None = None
        self._mixes = any("batch_norm" in str(node.target) for node in captured.graph.nodes) and not evaluates
        work = sum(
            products_of(node) + 10 * numbers_of(node) for node in captured.graph.nodes if node.op == "call_function"
        )
        work += 10 * sum(map(numbers_of, captured.placeholders("parameter").values()))
        self.small = work <= _MOST_WORK
        """True where running the module takes no more than seconds."""

    @classmethod
    def of(cls, compiled: Compiled) -> StepInParts:
        """Return the module and the loss of a compiled plan."""
        evaluates, overrides = compiled.request.purpose == "evaluation", compiled.overrides
        return cls(
            compiled.plan, compiled.lines, compiled.folder, compiled.recorded, compiled.captured, overrides, evaluates
        )

    def measure(self, terms: Sequence[TermPrograms]) -> Sequence[Collection[str] | None]:
        """Return for each term the words of ``Division.by`` that hold on every batch; None where it was not measured.
        A cross entropy of the plan's own is not: it is divided by its count. The answer of the first call stays."""
        if self._measured is not None:
            return self._measured
        every: list[set[str] | None] = [None] * len(terms)
        self._measured = every
        if not self.small or self._counted:
            return every
        for draw in range(_DRAWS):
            try:
                found = self._on_a_batch(terms, draw)
            except NotMeasured:
                continue
            for at, words in enumerate(found):
                before = every[at]
                every[at] = words if before is None else before if words is None else before & words
        return every

    def compare(self, reference: Program, divisions: Sequence[Division], averaged: Collection[int]) -> WholeBatch:
        """Return the terms of the loss of which a step makes another number than the whole batch's, apart from those
        that are known to be ``averaged``. They are run on other batches than those that decided. Where all terms are
        cross entropies of the plan's own there is nothing to decide, and nothing is run.
        """
        if self._counted:
            return WholeBatch()
        counting = [function for function in reference.functions if function.name == "count"]
        programs = [replace(reference, functions=(function,)) for function in counting]
        batches, wrong, near = self.batches([*programs, reference], _DRAWS), list[WrongTerm](), list[WrongTerm]()
        counts = [{key: value for program in programs for key, value in _results(program, batch).items()}
                  for batch in batches]  # fmt: skip
        try:
            values, tolerance = self.values(batches, 0)
        except NotMeasured as error:
            return WholeBatch(unknown=dict.fromkeys(range(1, len(divisions) + 1), str(error)))
        base = base_term(divisions)
        of_all = [of_term.whole.gradient for of_term in values if of_term.whole is not None]
        size = float(sum(of_all, torch.zeros(1)).norm())
        for number, (of_term, division) in enumerate(zip(values, divisions, strict=True), 1):
            key = COUNT if number == base else term_count(number)
            counted = [of_part[key] for of_part in counts] if division.by == "count" else None
            if of_term.whole is None or number in averaged or of_term.holds(division, counted, tolerance):
                continue
            combined = of_term.combined(division, counted)
            term = WrongTerm(number, of_term.whole.loss, combined.loss)
            apart = float((of_term.whole.gradient - combined.gradient).norm())
            is_near = (
                division.by == "mean"
                and abs(term.whole - term.combined) <= _NEARLY * abs(term.whole)
                and apart <= _NEARLY_GRADIENTS * size
                and self._is_a_mean(number, [*programs, reference])
            )
            (near if is_near else wrong).append(term)
        unknown = {number: of_term.unknown for number, of_term in enumerate(values, 1) if of_term.whole is None}
        return WholeBatch(wrong, unknown, near)

    def _is_a_mean(self, number: int, programs: Sequence[Program]) -> bool:
        """Return whether a term is its mean over microbatches, and no sum, on one of the batches that decide: as a
        loss that balances experts is where tokens happen to choose alike."""
        for draw in range(_DRAWS):
            with suppress(NotMeasured):
                values, tolerance = self.values(self.batches(programs, draw), draw)
                term = values[number - 1]
                if term.whole is None or term.holds(Division("sum"), None, tolerance):
                    continue  # what is zero is both
                if term.holds(Division("mean"), None, tolerance):
                    return True
        return False

    def _on_a_batch(self, terms: Sequence[TermPrograms], draw: int) -> list[set[str] | None]:
        batches = self.batches([term.term for term in terms], draw)
        values, tolerance = self.values(batches, draw)
        found: list[set[str] | None] = []
        for term, of_term in zip(terms, values, strict=True):
            counts = None if term.count is None else [_results(term.count, batch)[COUNT] for batch in batches]
            found.append(None if of_term.whole is None else {
                division.by
                for division in (Division("mean"), Division("sum"), *((term.division,) if counts else ()))
                if of_term.holds(division, counts if division.by == "count" else None, tolerance)
            })  # fmt: skip
        return found

    def batches(self, programs: Sequence[Program], draw: int) -> list[dict[str, Tensor]]:
        """Return random microbatches, whose floating inputs are in float64."""
        count = min(self._plan.microbatches, _MOST_MICROBATCHES if self.small else 2)
        specs = input_specs(self._plan)
        batches: list[dict[str, Tensor]] = [
            {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in specs.items()} for _ in range(count)
        ]
        for program in programs:
            drawn = random_batch(program, count, torch.Generator().manual_seed(draw))
            for batch, inputs in zip(batches, drawn, strict=True):
                batch.update(inputs)
        for batch in batches[1:]:
            batch.update((name, batches[0][name]) for name in self._plan.unbatched)
        return batches

    def values(self, batches: Sequence[Mapping[str, Tensor]], draw: int) -> tuple[list[TermValues], float]:
        """Return the values of each term of the loss, and their allowed relative error. They are computed in float64
        where the module runs in it. The first draw has the initial weights, later ones have noise on them.

        Raises:
            NotMeasured: the module or the loss fails.
        """
        for wide in (True, False):
            try:
                with _undisturbed(), code_undone(self._lines.sources, self._folder):
                    return self._values(batches, draw, wide)
            except Exception as error:  # a person's code may fail in any way
                if not wide:
                    words, kind = str(error).strip().partition("\n")[0], type(error).__name__
                    raise NotMeasured(words if isinstance(error, NotMeasured) else f"{kind}: {words}") from error
        raise AssertionError

    def _values(
        self, batches: Sequence[Mapping[str, Tensor]], draw: int, wide: bool
    ) -> tuple[list[TermValues], float]:  # fmt: skip
        plan = self._plan
        module = initialize(
            model_builder(self._lines, self._folder, self._overrides), plan.seed, self._recorded.recipes
        )
        if any(tensor.is_complex() for tensor in (*module.parameters(), *module.buffers())) and wide:
            raise NotMeasured("it has complex numbers")
        module = module.double() if wide else module
        module.train(not self._evaluates)
        _add_noise(module, draw)
        specs = input_specs(plan)
        inputs = [
            {
                name: value if wide and value.is_floating_point() else value.to(specs[name].dtype)
                for name, value in batch.items()
            }
            for batch in batches
        ]
        whole = {
            name: value if name in plan.unbatched else torch.cat([batch[name] for batch in inputs])
            for name, value in inputs[0].items()
        }
        capacities = {path: capacity.factor for path, capacity in capacities_of(plan, module).items()}
        plain = PlainModule(module, self._lines, self._folder, plan.seed, (), capacities)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        dtype = torch.float64 if wide else torch.get_default_dtype()
        # the gradients of a microbatch are taken again after later forwards have written the buffers that it saved
        with _default_dtype(dtype), _Narrowest() as narrowest, allow_mutation_on_saved_tensors():
            values = self._run(plain, trained, inputs, whole, module)
        return values, _TOLERANCES[narrowest.bytes]

    def _run(
        self, plain: PlainModule, trained: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]],
        whole: Mapping[str, Tensor], module: nn.Module,
    ) -> list[TermValues]:  # fmt: skip
        """Run the module and its loss on each microbatch, then on all of them, from the same buffers."""
        buffers = {buffer: buffer.clone() for buffer in module.buffers()}
        outputs, parts = [], []
        for number, batch in enumerate(inputs):
            with plain.drawing(batch, microbatch=number):
                outputs.append(plain.output(batch))
                parts.append([_value(term, trained) for term in plain.terms(outputs[-1], batch)])
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
        with plain.drawing(whole, joined=len(inputs)):
            joined = _Joined(outputs, plain.output(whole))
            values = [_value(term, trained) for term in plain.terms(joined.output, whole)]
        unknown = [
            "" if value.finite and not mixed else _MIXED if mixed else "it is not finite"
            for term, value in zip(self._lines.terms, values, strict=True)
            for mixed in [self._mixes and joined.not_joined(term)]
        ]
        return [
            TermValues(None if reason else value, [of_part[at] for of_part in parts], reason)
            for at, (value, reason) in enumerate(zip(values, unknown, strict=True))
        ]


class _Narrowest(TorchDispatchMode):
    """A mode that notes the bytes of the narrowest floating numbers that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 8

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        floats = (x for x in tree_leaves(results) if isinstance(x, Tensor) and x.is_floating_point())
        self.bytes = min([self.bytes, *(x.element_size() for x in floats)])
        return results


class _Joined:
    """The outputs of microbatches as one of the whole batch: tensors with samples are joined, those that are the same
    in all are taken once, and others are those of the module on the whole batch."""

    def __init__(self, outputs: Sequence[Any], whole: Any) -> None:
        leaves, spec = tree_flatten(whole)
        by_part = [tree_flatten(output)[0] for output in outputs]
        if any(len(part) != len(leaves) for part in by_part):
            raise NotMeasured("the model returns another number of tensors for more samples")
        self._whole = set[int]()
        columns = list(zip(*by_part, strict=True)) if leaves else []
        self.output: Any = tree_unflatten([self._leaf(*pair) for pair in zip(columns, leaves, strict=True)], spec)

    def _leaf(self, parts: Sequence[Any], whole: Any) -> Any:
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if isinstance(whole, Tensor) and len(tensors) == len(parts):
            dims = [dim for dim, size in enumerate(whole.shape) if size != tensors[0].size(dim)] if (
                whole.dim() == tensors[0].dim()) else []  # fmt: skip
            if not dims and all(part.shape == whole.shape and torch.equal(part, tensors[0]) for part in tensors):
                return tensors[0]
            if len(dims) == 1 and whole.size(dims[0]) == sum(part.size(dims[0]) for part in tensors):
                return torch.cat(tensors, dims[0])
        if not isinstance(whole, int | float | str | None):
            self._whole.add(id(whole))
        return whole

    def not_joined(self, term: LossTerm) -> bool:
        """Return whether a term reads something that is not joined."""
        names = [f"output.{term.target}".rstrip(".")] if term.kind == "output" else term.operands
        read = (value_at(name, self.output) for name in names if name.split(".")[0] == "output")
        inside = {id(leaf) for value in read for leaf in tree_leaves(value)}
        return not inside or not self._whole.isdisjoint({id(self.output), *inside})


def _value(term: Tensor, trained: Sequence[Tensor]) -> _Value:
    """Return a term's value and gradients."""
    if not term.requires_grad:
        return _Value(float(term), torch.zeros(1, dtype=torch.float64))
    gradients = torch.autograd.grad(term, trained, retain_graph=True, allow_unused=True)
    flat = [
        torch.zeros(of.numel()) if gradient is None else real_form(gradient).double().flatten()
        for of, gradient in zip(trained, gradients, strict=True)
    ]
    return _Value(float(term.detach()), torch.cat([part.double() for part in flat]))


def _results(program: Program, batch: Mapping[str, Tensor]) -> dict[Binding, float]:
    """Return the counts of a microbatch."""
    machine = Machine(program, InProcess(Mesh()), CPU, wide=True, kernels=REFERENCE_KERNELS)
    (results,) = machine.run([{value.name: batch[name] for name, value in program.main.bound("input").items()}])
    return {key: float(value) for key, value in results.items()}


def _add_noise(module: nn.Module, draw: int) -> None:
    """Move parameters, except for the first draw."""
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for parameter in module.parameters():
            if draw and parameter.is_floating_point() and parameter.numel():
                size = _NOISE * (float(parameter.abs().max()) or 1.0)
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=size)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Enter a block in which tensors that code makes of numbers have a type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Enter a block in which a person's code runs on one thread, which is faster for small tensors, and after which
    random numbers are as before."""
    states, threads = (random.getstate(), numpy.random.get_state()), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=()), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def averaged_term(compiled: Compiled, number: int) -> Diagnostic:
    """Return the warning of a term of the loss whose mean over microbatches may not be its value for the whole batch.
    For an entry of the model's output beside other terms, such as an auxiliary loss of experts, it is a note."""
    loss, many = compiled.plan.loss, compiled.plan.microbatches
    alone, auxiliary = len(loss.terms) == 1, loss.terms[number - 1].kind == "output"
    averaged = f"the losses of {many} microbatches are averaged"
    if not alone:
        averaged = f"term {number} of the loss is averaged over {many} microbatches"
    reason = averaging_reason(compiled.build.reference, number, compiled.plan.unbatched)
    return Diagnostic(
        AVERAGED, f"{averaged}, which may not be the whole batch's {'loss' if alone else 'value'}",
        Label(loss.span if alone else loss.term_span(number)),
        notes=(reason,) if reason else (),
        help="exact are means, sums, `cross_entropy(…)`, `(losses * mask).sum() / mask.sum()` of a mask that is "
        "made of inputs alone, and a sum that the plan divides: `/ N`, or `/ INPUT`",
        severity=Severity.NOTE if auxiliary and not alone else Severity.WARNING,
    )  # fmt: skip


def measure_of(
    plan: Plan, lines: TaskLines, folder: Path, recorded: Recorded, captured: Captured, choices: Choices | None = None,
    like: Compiled | None = None, overrides: Mapping[str, Any] | None = None, evaluates: bool = False,
) -> Measure | None:  # fmt: skip
    """Return a function that says what divides the terms of a plan's loss: that of a larger build, ``like`` which this
    one is, or what is measured, at the largest sizes where these have ranges. None for one microbatch."""
    if plan.microbatches == 1 or not plan.trains:
        return None
    if like is not None:
        averaged, divisions = like.built.averaged, like.built.divisions
        words = [set() if number in averaged else {division.by} for number, division in enumerate(divisions, 1)]
        return lambda terms: words
    step = StepInParts(plan, lines, folder, recorded, captured, overrides, evaluates)
    return step.measure if choices is None else choices.make("measure", step.measure)
