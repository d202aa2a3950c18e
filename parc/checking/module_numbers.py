"""The numbers of a user's module beside those of its captured graph: tensor by tensor, in float64, at probes.

An error counts beyond what rounding explains. That is measured where a tensor differs by more than a few roundings:
the graph and the module take the step again with every weight and input moved by one rounding. A tensor that is
nothing but rounding, as a sum whose terms cancel, then changes as much as it differs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from parc.checking.probes import SHARES, Probe, ProbeBatches, moved, moved_text
from parc.compiler.capture.complex.form import own_form, real_form
from parc.compiler.capture.model_calls import model_builder
from parc.compiler.capture.model_output import returned_tensors
from parc.compiler.capture.observer import code_undone
from parc.compiler.initial.recipes import initialize
from parc.compiler.program.binding import LOSS, Binding
from parc.compiling.compiled import Compiled
from parc.runtime.compare.agreement import NEAR, Margin
from parc.runtime.compare.in_float64 import Calls, float64_by_default, in_float64, widen_module, widened
from parc.runtime.compare.model_run import Case, ReferenceRun
from parc.runtime.compare.own_types import distance
from parc.runtime.compare.plain import PlainModule
from parc.runtime.compare.roundings import ROUNDINGS_OF_A_STEP, perturbed

StepTensors = Mapping[Binding, Tensor]
"""The compared tensors of a step: loss, gradients, returned tensors, and the state that it leaves."""

_EQUAL = 1e-14
"""The error, relative to a tensor's norm, for which no rounding is measured: it is a few of float64."""
_LEAST = 1e-3
"""The share of the largest tensor of its kind that a tensor is at least taken for: what adds up to nothing is rounded
beside its terms."""
_AGAIN = 1e3
"""The roundings by which the same step may differ, taken again: kernels of several threads add in any order."""
_DRAWS = 4
"""The most roundings that are drawn for a tensor that differs: a single number may change little by chance."""
_STATE = ("buffer", "parameter")
_TINY = 1e-300
_NEAR_IN_FLOAT32 = 1e-6
"""The margin of a top-k below which rounding of float32 may decide."""


# ---- runs


class ModuleRun:
    """The user's module, in its own types or in float64, from the weights of probes.

    Attributes:
        dtype: the floating type of its parameters.
        changed: the parameters and buffers that its steps left with other numbers.
    """

    def __init__(self, compiled: Compiled, case: Case, float64: bool) -> None:
        build = model_builder(compiled.lines, compiled.folder, compiled.overrides)
        values = {**case.buffers, **case.parameters}
        module = initialize(build, compiled.plan.seed, compiled.recorded.recipes, values)
        self.dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        self._module: nn.Module = widen_module(module) if float64 else module
        if compiled.request.purpose != "training":
            module.eval()
        layers = compiled.request.placing.experts.items()
        capacities = {path: layer.capacity for path, layer in layers if layer.capacity is not None}
        lines, folder, seed = compiled.lines, compiled.folder, compiled.plan.seed
        self._plain = PlainModule(module, lines, folder, seed, compiled.frozen, capacities)
        self._seed, self._float64, self._returned = seed, float64, compiled.captured.returned
        self._first, self._buffers = self._state(), [(each, dict(each._buffers)) for each in module.modules()]
        """The tensors that the module has at first, and all its buffers by module: a forward may assign others."""
        self._initial = {key: real_form(value.detach().clone()) for key, value in self._first.items()}
        self.changed: frozenset[Binding] = frozenset()

    @property
    def kept(self) -> Collection[Binding]:
        """The parameters and buffers that the module has at first; a buffer that a forward makes may be a cache, and
        what depends on it shows in a second step."""
        return self._first.keys()

    def begin(self, probe: Probe) -> None:
        """Take the weights and buffers of a probe; others are as they were at first."""
        start = {**self._initial, **{Binding("parameter", name): value for name, value in probe.parameters.items()}}
        start |= {Binding("buffer", name): value for name, value in probe.buffers.items()}
        self.changed = frozenset()
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        for key, tensor in self._first.items():
            with torch.no_grad():
                tensor.copy_(own_form(start[key], tensor.is_complex()))

    def step(self, inputs: Mapping[str, Tensor], number: int, calls: Calls | None = None) -> StepTensors:
        """Return the results of a step from the state that the last one left; ``calls`` notes the operators."""
        before = {key: value.detach().clone() for key, value in self._state().items()}
        with torch.random.fork_rng(devices=()), ExitStack() as within:
            torch.manual_seed(self._seed)
            if self._float64:
                within.enter_context(in_float64(self.dtype))
            if calls is not None:  # attention's fused kernels are no float64's
                within.enter_context(calls)
                within.enter_context(sdpa_kernel(SDPBackend.MATH))
            output, terms = self._plain.forward({name: value.clone() for name, value in inputs.items()}, number)
            loss = sum(terms[1:], terms[0]) if terms else torch.zeros((), dtype=torch.float64)
            if loss.requires_grad and calls is None:
                loss.backward()
        after, returned = {key: value.detach() for key, value in self._state().items()}, returned_tensors(output)
        self.changed |= {key for key, value in after.items() if not _equal(value, before.get(key))}
        gradients = {Binding("gradient", name): value for name, value in self._plain.take_gradients().items()}
        outputs = {Binding("output", name): returned[name].detach() for name in self._returned}
        state = {key: real_form(value.clone()) for key, value in after.items()}
        return {LOSS: loss.detach(), **gradients, **outputs, **state}

    def _state(self) -> dict[Binding, Tensor]:
        """Return the tensors that a forward may change."""
        buffers = self._module.named_buffers(remove_duplicate=False)
        state = {Binding("parameter", name): value for name, value in self._plain.parameters.items()}
        return state | {Binding("buffer", name): value for name, value in buffers if value.numel()}


def _equal(first: Tensor, second: Tensor | None) -> bool:
    return second is not None and first.shape == second.shape and _apart(real_form(first), real_form(second)) == 0


class GraphRun:
    """The captured graph, in its own types or in float64, from the weights of a probe."""

    def __init__(self, case: Case, probe: Probe, float64: bool, margin: Margin | None = None) -> None:
        start = replace(case, parameters=probe.parameters, buffers={**case.buffers, **probe.buffers})
        self._run, self._float64 = ReferenceRun(start, float64, margin.watch if margin is not None else None), float64

    def step(self, inputs: Mapping[str, Tensor], number: int) -> StepTensors:
        """Return the results of a step from the state that the last one left."""
        run = self._run
        for parameter in run.parameters.values():
            parameter.grad = None
        with ExitStack() as within:
            if self._float64:
                within.enter_context(float64_by_default())
            loss, gradients = run.gradients([inputs], number)
        outputs = {Binding("output", name): value for name, (value,) in run.returned.items()}
        parameters = {Binding("parameter", name): value.detach() for name, value in run.parameters.items()}
        state = {Binding("buffer", name): value.detach() for name, value in run.buffers.items()} | parameters
        return {LOSS: loss, **{Binding("gradient", n): value for n, value in gradients.items()}, **outputs, **state}


# ---- differences


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs: its ``error`` relative to its size, and how many ``times`` that is what rounding
    explains."""

    key: Binding
    error: float
    times: float
    at: str

    @property
    def what(self) -> str:
        """The tensor, in words."""
        return f"gradient of `{self.key.name}`" if self.key.kind == "gradient" else self.key.words


@dataclass(slots=True)
class ModuleAgreement:
    """The agreement of the captured graph with the module, over all probes."""

    errors: dict[str, float] = field(default_factory=dict)
    """The largest relative error of each kind of tensors."""
    differences: list[TensorDifference] = field(default_factory=list)
    """The tensors that differ by more than rounding explains, the largest error first."""
    types: str = ""
    """The floating type in which both computed."""
    share: float = 0.0
    """The share of themselves by which weights were moved; 0 where none could be."""
    notes: list[str] = field(default_factory=list)
    """The reasons why something was not compared, or guessed."""
    tied: str = ""
    """The place of a top-k whose choice rounding may have decided; "" if there is none."""
    changed: tuple[str, ...] = ()
    """The state in Python that each forward changes, which no program has."""

    @property
    def holds(self) -> bool:
        """True where the captured graph agrees with the module."""
        return not self.differences

    @property
    def compared(self) -> str:
        """The types and weights at which they were compared, in words."""
        return f"in {self.types}, at the initial weights" + (f" and {moved_text(self.share)}" if self.share else "")

    def error(self, kind: str) -> float:
        """Return the largest relative error of the tensors of a kind."""
        return self.errors.get(kind, 0.0)


class OtherAgainError(Exception):
    """The error of a module that gives other numbers in the same step, taken again: ``what`` differs by ``error`` of
    its size."""

    def __init__(self, what: str, error: float) -> None:
        super().__init__(what, error)
        self.what, self.error = what, error


class _FailedError(Exception):
    """The error of a module that fails at some weights or in some types, or is not finite there, or calls other
    operators."""


def compare_module(
    compiled: Compiled, case: Case, batches: ProbeBatches, seed: int, keeps: bool = False
) -> ModuleAgreement:
    """Compare the module with the captured graph at its initial weights and at moved ones: in float64, or in its own
    types where it does not run so, or calls other operators. ``seed`` is that of random data. A module that ``keeps``
    something in Python takes each step twice.

    Raises:
        OtherAgainError: the second time it gives other numbers.
    """
    try:
        with code_undone(compiled.lines.sources, compiled.folder):
            return _Comparison(compiled, case, batches, seed, True, keeps).agreement()
    except _FailedError as error:
        with code_undone(compiled.lines.sources, compiled.folder):
            in_module_types = _Comparison(compiled, case, batches, seed, False, keeps)
            return in_module_types.agreement(f"not in float64: {error}")


class _Comparison:
    """The comparison at all probes, in float64 or in the module's own types."""

    def __init__(
        self, compiled: Compiled, case: Case, batches: ProbeBatches, seed: int, float64: bool, keeps: bool
    ) -> None:  # fmt: skip
        self.compiled, self.case, self.batches, self.seed, self.float64 = compiled, case, batches, seed, float64
        self.keeps = keeps
        self.module, self.margin = ModuleRun(compiled, case, float64), Margin()
        self.types = "float64" if float64 else str(self.module.dtype).removeprefix("torch.")
        constants = compiled.captured.constants  # in the module's code, not in the module
        self.buffers = {name: value for name, value in case.buffers.items() if name not in constants}

    def agreement(self, *notes: str) -> ModuleAgreement:
        """Return the agreement at the initial weights and at moved ones, which move less where the module fails.

        Raises:
            _FailedError: it fails at the initial weights, or differs and calls other operators than in its own types.
        """
        agreement = ModuleAgreement(types=self.types, notes=[*notes])
        self._add(agreement, _AtProbe(self, Probe(self.case.parameters, self.buffers), 2 * self.seed))
        why = ""
        for share in SHARES:
            free = {name: value for name, value in self.buffers.items() if name not in self.compiled.captured.asked}
            probe = Probe(moved(self.case.parameters, share), {**self.buffers, **moved(free, share)}, share)
            try:
                self._add(agreement, _AtProbe(self, probe, 2 * self.seed + 1))
                agreement.share = share
                break
            except _FailedError as error:
                why = why or str(error)
                if agreement.differences:
                    raise
        else:
            agreement.notes.append(f"not at moved weights: {why}")
        agreement.notes += [self.batches.guessed] if self.batches.guessed else []
        agreement.differences.sort(key=lambda one: -one.error)
        near = NEAR if self.float64 else _NEAR_IN_FLOAT32
        agreement.tied = self.margin.at if self.margin.apart < near else ""
        return agreement

    def _add(self, agreement: ModuleAgreement, at: _AtProbe) -> None:
        """Add the errors and differences at a probe."""
        differences = []
        for difference in at.differences():
            kind = difference.key.kind
            agreement.errors[kind] = max(agreement.errors.get(kind, 0.0), difference.error)
            if not difference.times <= 1:
                differences.append(difference)
        if differences and self.float64 and (calls := self._other_calls(at)):
            raise _FailedError(calls)
        agreement.differences += differences

    def _other_calls(self, at: _AtProbe) -> str:
        """Return where the module calls another operator in float64 than in its own types; "" where it does not."""
        in_module_types, noted = ModuleRun(self.compiled, self.case, float64=False), []
        for module, inputs in ((in_module_types, self.batches.batch(at.seed)), (self.module, at.inputs[0])):
            module.begin(at.probe)
            try:
                with Calls() as calls:
                    module.step(inputs, 0, calls)
            except Exception:  # in its own types it may not take what it has kept in float64
                return ""
            noted.append(calls.noted)
        pairs = zip(*noted, strict=False)
        return next((f"it calls {other} there, not {one}" for one, other in pairs if one != other), "")


class _AtProbe:
    """The steps of the module and of the graph from the weights of a probe: one, or two where the first one changes
    state."""

    def __init__(self, within: _Comparison, probe: Probe, seed: int) -> None:
        """Take the steps.

        Raises:
            _FailedError: the module fails, or its loss or gradients are not finite.
        """
        self._within, self.probe, self.seed = within, probe, seed
        self.inputs = [self._inputs(seed)]
        try:
            self._module = [*self._module_steps(probe, self.inputs)]
            self._changed = within.module.changed
        except Exception as error:  # a person's code may refuse these weights, or float64, in any way
            text = str(error).strip().split("\n")[0]
            raise _FailedError(f"the module fails: {type(error).__name__}: {text}") from error
        for key, value in self._module[0].items():
            if key.kind in ("loss", "gradient") and not bool(value.isfinite().all()):
                raise _FailedError(f"the {key.kind} is not finite")
        if within.keeps:
            self._check_again()
        self._graph = self._graph_steps(probe, self.inputs, within.float64, within.margin)
        self._changes: list[list[dict[Binding, float]]] = []

    def _check_again(self) -> None:
        """Check that the module gives the same numbers in the same steps: what it keeps in Python would otherwise pass
        for rounding, which is measured by further steps.

        Raises:
            OtherAgainError: it does not.
        """
        for first, again in zip(self._module, self._module_steps(self.probe, self.inputs), strict=False):
            for key in first.keys() & again.keys():
                apart, size = _apart(first[key], again[key]), _apart(first[key], None)
                if apart > _AGAIN * self._rounding * max(size, _TINY):
                    what = TensorDifference(key, apart / max(size, _TINY), math.inf, "").what
                    raise OtherAgainError(what, apart / max(size, _TINY))

    def _inputs(self, seed: int) -> dict[str, Tensor]:
        inputs = self._within.batches.batch(seed)
        return {name: widened(value) for name, value in inputs.items()} if self._within.float64 else inputs

    def _module_steps(self, probe: Probe, batches: list[dict[str, Tensor]]) -> Iterator[StepTensors]:
        """Yield the module's results, of two steps where the first changed its state."""
        module = self._within.module
        module.begin(probe)
        yield module.step(batches[0], 0)
        if module.changed:
            batches += [self._inputs(self.seed + 1000)] if len(batches) < 2 else []
            yield module.step(batches[1], 1)

    def _graph_steps(
        self, probe: Probe, batches: Sequence[Mapping[str, Tensor]], float64: bool, margin: Margin | None = None
    ) -> list[StepTensors]:
        graph = GraphRun(self._within.case, probe, float64, margin)
        return [graph.step(inputs, number) for number, inputs in enumerate(batches)]

    def differences(self) -> Iterator[TensorDifference]:
        """Yield the difference of each tensor of each step."""
        for number, (module, graph) in enumerate(zip(self._module, self._graph, strict=True)):
            at = f"{self.probe.at}, in {self._within.types}{', in a second step' * number}"
            either = {**module, **graph}
            keys = [key for key in either if key.kind not in _STATE or (key in module and key in graph)]
            keys += [key for key in self._changed if key not in graph and key in self._within.module.kept]
            sizes = {key: _apart(either[key], None) for key in keys}
            roots = {key: math.sqrt(max(1, either[key].numel())) for key in keys}
            largest: dict[str, float] = {}
            for key in keys:
                largest[key.kind] = max(largest.get(key.kind, 0.0), sizes[key] / roots[key])
            for key in keys:
                apart = _apart(module.get(key), graph.get(key)) if key in graph or key.kind not in _STATE else math.inf
                size = max(sizes[key], _LEAST * largest[key.kind] * roots[key], _TINY)
                times = 0.0 if apart <= _EQUAL * sizes[key] else self._times(number, key, apart, size)
                yield TensorDifference(key, apart / size, times, at)

    def _times(self, number: int, key: Binding, apart: float, size: float) -> float:
        """Return how many times a difference is what rounding explains."""
        times, most, rounding = math.inf, 0.0, self._rounding
        for draw in range(_DRAWS if math.isfinite(apart) else 0):
            if draw == len(self._changes):
                self._changes.append(self._changed_by_rounding(draw))
            most = max(most, self._changes[draw][number].get(key, 0.0))
            times = apart / (ROUNDINGS_OF_A_STEP * (most + rounding * size))
            if times <= 1:
                break
        return times

    @property
    def _rounding(self) -> float:
        return torch.finfo(torch.float64 if self._within.float64 else self._within.module.dtype).eps

    def _changed_by_rounding(self, draw: int) -> list[dict[Binding, float]]:
        """Return, for each step, how far each tensor moves where every weight and input is moved by one rounding. Own
        types also round every result, which the graph shows beside its run in float64."""
        generator = torch.Generator().manual_seed(draw)

        def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {n: perturbed(widened(value), generator, self._rounding) for n, value in tensors.items()}

        buffers = {name: widened(value) for name, value in self.probe.buffers.items()}
        exact = Probe({n: widened(value) for n, value in self.probe.parameters.items()}, buffers)
        probe, inputs = replace(exact, parameters=rounded(self.probe.parameters)), [*map(rounded, self.inputs)]
        graph = self._graph_steps(probe, inputs, float64=True)
        if self._within.float64:
            pairs = [(self._graph, graph), (self._module, [*self._module_steps(probe, inputs)])]
        else:
            wide = [{name: widened(value) for name, value in batch.items()} for batch in self.inputs]
            in_float64 = self._graph_steps(exact, wide, float64=True)
            pairs = [(in_float64, graph), (in_float64, self._graph)]
        changes: list[dict[Binding, float]] = [{} for _ in self.inputs]
        for before, after in pairs:
            for change, one, other in zip(changes, before, after, strict=False):
                for key in one.keys() & other.keys():
                    change[key] = change.get(key, 0.0) + _apart(one[key], other[key])
        return changes


def _apart(first: Tensor | None, second: Tensor | None) -> float:
    """Return the norm of a difference; an absent tensor is zeros, and other shapes are infinitely apart."""
    if first is None or second is None:
        present = first if first is not None else second
        return 0.0 if present is None else distance(present, torch.zeros_like(present))
    return distance(first, second) if first.shape == second.shape else math.inf
