"""The plain module as a reference: the user's own code in eager torch, with parc's initial weights and random
numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ...compiler.build.build import Build
from ...compiler.capture.attributes import attribute_tensors
from ...compiler.capture.complex.form import own_form, real_form
from ...compiler.capture.experts.forms import chosen_by, has_form, have_interface
from ...compiler.capture.experts.lists import unstacked
from ...compiler.capture.model_calls import TaskLines, caller, model_builder, term_functions
from ...compiler.capture.observer import code_undone
from ...compiler.initial.counter import dropped, keep_mask, random, stream
from ...compiler.initial.recipes import initialize, record
from ...compiler.layout.mesh import Mesh
from ...compiler.ops.own_ops import aten
from ...compiler.ops.precision import is_narrow
from ...compiler.ops.rules import facts
from ...compiler.program.actions import COUNTING, FORWARD
from ...compiler.program.binding import COUNT, Binding
from ...compiler.program.optimizers import PREVIOUS
from ...compiler.program.step_values import (
    Bias,
    Division,
    base_term,
    biases_in,
    capacities_in,
    divisions_in,
    term_count,
)
from ...compiler.sizes.size_range import BATCH
from ...grammar.codes import NO_EXPERTS
from ..backends.in_process import InProcess
from ..data.feed import Feed
from ..data.sizes import BySizes
from ..machine.execute import Machine
from ..machine.kernels import REFERENCE_KERNELS
from ..ranks.faults import RunError
from ..ranks.processes import check_device
from ..ranks.work import StepReport
from ..session.evaluation import check_trains
from ..state.initial import expected_of, weights_of
from ..state.opening import check_source_of, open_build, task_of
from ..state.optimizer import make_optimizer, rate, update

# ---- random numbers


@final
class CountedDropout(TorchDispatchMode):
    """A dispatch mode that draws every dropout mask, and all other random numbers, as builds do: from the stream that
    is named by the module's path and the number of the draw in it.

    It is below autograd, where torch's dropout and its attention with dropout fill their masks. A batch of several
    ``joined`` microbatches has the numbers of each, one behind the other along dim 0.
    """

    def __init__(self, seed: int, step: int, microbatch: int, joined: int = 1) -> None:
        super().__init__()
        self._seed, self._step, self._microbatch, self._joined = seed, step, microbatch, joined
        self._paths = [""]
        self._drawn: Counter[str] = Counter()

    def enter_module(self, path: str, *_: Any) -> None:
        """Note that the forward of the module at ``path`` begins, which names the streams of its draws."""
        self._paths.append(path)

    def leave_module(self, *_: Any) -> None:
        """Note that the module's forward has ended."""
        self._paths.pop()

    def _draw(self, like: Tensor, draw: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return the numbers of the next stream, in the shape of a tensor; ``draw`` makes them from the stream's key
        and the index of every element."""
        module = self._paths[-1] or "model"
        name = f"{module}.{self._drawn[module]}"
        self._drawn[module] += 1
        parts = self._joined if like.dim() and like.shape[0] % self._joined == 0 else 1
        shape = (like.shape[0] // parts, *like.shape[1:]) if parts > 1 else like.shape
        index = torch.arange(math.prod(shape), device=like.device).reshape(shape)
        keys = [stream(self._seed, name, self._step, self._microbatch + part) for part in range(parts)]
        return torch.cat([draw(key, index) for key in keys]) if parts > 1 else draw(keys[0], index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keeps = (args[1] if len(args) > 1 else 0.5) if func is aten.bernoulli_.float else 1.0  # dispatch drops defaults
        if keeps not in (0.0, 1.0):
            return args[0].copy_(self._draw(args[0], partial(keep_mask, p=dropped(keeps))))
        if func is aten.native_dropout.default and args[2] is not False and 0 < args[1] < 1:
            keep = self._draw(args[0], partial(keep_mask, p=args[1]))
            return args[0] * keep.to(args[0].dtype).mul_(1 / (1 - args[1])), keep
        if func in _DECOMPOSED_DRAWS:
            import torch._refs  # as long to import as half of torch, for few models

            with self:
                return args[0].copy_(getattr(torch._refs, func._schema.name.removeprefix("aten::")[:-1])(*args))
        result = func(*args, **(kwargs or {}))
        if func is aten.bernoulli.default:
            return result.copy_(self._draw(result, partial(random, law="uniform", dtype=result.dtype)) < args[0])
        law = facts(func).law
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}  # dispatch drops defaults
        if law in ("uniform", "normal"):
            low, high = (
                arguments.get("from", arguments.get("mean", 0.0)),
                arguments.get("to", arguments.get("std", 1.0)),
            )
            drawn = self._draw(result, partial(random, law=law, dtype=result.dtype))
            result.copy_(drawn * (high - low if law == "uniform" else high) + low)
        elif law in ("integers", "permutation", "classes"):
            self._whole_numbers(law, result, arguments)
        return result

    def _whole_numbers(self, law: str, result: Tensor, arguments: Mapping[str, Any]) -> None:
        """Draw whole numbers into a result, as `passes/canonical/attention.py` writes them in programs."""
        uniform = partial(random, law="uniform", dtype=torch.float64)
        if law == "permutation":
            result.copy_(self._draw(result, uniform).argsort(stable=True))
        elif law == "classes" and not (arguments["num_samples"] > 1 and arguments.get("replacement")):
            weights = arguments["self"].double()
            quotients = weights / -torch.log1p(-self._draw(weights, uniform))
            result.copy_(quotients.topk(arguments["num_samples"]).indices)
        elif law == "integers" and (high := arguments.get("high", arguments.get("to"))) is not None:
            low = arguments.get("low", arguments.get("from", 0))
            result.copy_((self._draw(result, uniform) * float(high - low)).floor() + float(low))


_DECOMPOSED_DRAWS = (aten.exponential_.default, aten.cauchy_.default, aten.geometric_.default, aten.log_normal_.default)
"""Draws that a captured graph has as torch decomposes them, into uniform and normal ones."""


# ---- the plain module

CPU = torch.device("cpu")


@final
class PlainModule:
    """A user's module and loss, called as a plan says, one microbatch at a time, with the random numbers of its
    builds."""

    def __init__(
        self, module: nn.Module, lines: TaskLines, folder: Path, seed: int, frozen: Collection[str],
        capacities: Mapping[str, float] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """``capacities`` are the capacity factors of modules of experts, by path."""
        self._module, self._seed = module, seed
        self._capacities, self._batched = capacities, lines.batched
        self._call, self._terms = caller(module, lines), term_functions(lines, folder)
        self._attributes = attribute_tensors(module)
        self.parameters = dict(module.named_parameters())
        for parameter in self.parameters.values():  # a factory may leave them in another order, which no rank has
            parameter.data = parameter.data.contiguous()
        for name in frozen:
            self.parameters[name].requires_grad_(False)

    def forward(self, inputs: Mapping[str, Tensor], step: int = 0, microbatch: int = 0) -> tuple[Any, list[Tensor]]:
        """Return the model's output, and the terms of the loss; ``step`` and ``microbatch`` count from 0."""
        with self.drawing(inputs, step, microbatch):
            output = self.output(inputs)
            return output, self.terms(output, inputs)

    def output(self, inputs: Mapping[str, Tensor]) -> Any:
        """Return the model's output."""
        with unstacked(self._module), self._attributes.pointing():
            return self._call(self._module, inputs)

    def terms(self, output: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the terms of the loss."""
        return [term(output, inputs) for term in self._terms]

    @contextmanager
    def drawing(
        self, inputs: Mapping[str, Tensor], step: int = 0, microbatch: int = 0, joined: int = 1
    ) -> Iterator[None]:
        """Enter a block in which the model and its loss draw the random numbers of a microbatch, or of several
        ``joined`` ones that are one batch, and experts have their capacities.

        Attention runs as torch's MATH backend, because the dropout of fused kernels is not dispatched. On a CPU torch
        itself chooses MATH for dropout; without dropout its flash kernel is wrong for float64 scores with a float32
        mask.
        """
        mode = CountedDropout(self._seed, step, microbatch, joined)
        usual = all(p.device.type == "cpu" and p.dtype != torch.float64 for p in self.parameters.values())
        with ExitStack() as within:
            for path, child in self._module.named_modules():
                within.enter_context(child.register_forward_pre_hook(partial(mode.enter_module, path)))
                within.enter_context(child.register_forward_hook(mode.leave_module, always_call=True))
            for path, factor in self._capacities.items():
                drop = partial(_drop_tokens, factor, len(inputs[self._batched]))
                hook = self._module.get_submodule(path).register_forward_pre_hook(drop, with_kwargs=True)
                within.callback(hook.remove)
            within.enter_context(mode)
            within.enter_context(nullcontext() if usual else sdpa_kernel(SDPBackend.MATH))
            yield

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients by parameter, complex ones as two real parts, and sparse ones dense, as builds have
        them; the next backward starts from none."""
        gradients = {name: real_form(p.grad.to_dense()) for name, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients


def _drop_tokens(
    factor: float, sequences: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drop tokens beyond the capacity: each expert keeps, of each sequence, the first tokens that choose it, at most
    ``factor`` times the mean; the weights of the others become zero."""
    hidden, index, weights = [*args, *(kwargs[name] for name in _EXPERTS_PARAMETERS[len(args) :])]
    (tokens, top), rows = index.shape, index.tolist()
    each = tokens // sequences
    most = math.ceil(Fraction(str(factor)) * each * top / module.num_experts)
    kept = torch.ones(index.shape, dtype=torch.bool)
    for sequence in range(sequences):
        taken: Counter[int] = Counter()
        for token in range(sequence * each, (sequence + 1) * each):
            for place, expert in enumerate(rows[token]):
                taken[expert] += 1
                kept[token, place] = taken[expert] <= most
    return (hidden, index, weights * kept.to(weights)), {}


_EXPERTS_PARAMETERS = ("hidden_states", "top_k_index", "top_k_weights")
"""The parameters of the forward of experts in transformers' interface."""


@final
class PlainBias:
    """The bias of a plain module's router, updated after each step by the loads of its experts."""

    def __init__(self, model: nn.Module, module: str, bias: Bias) -> None:
        owner, _, leaf = bias.buffer.rpartition(".")
        around = (model.get_submodule(path) for path in (module, module.rpartition(".")[0]))
        layer = next((one for one in around if have_interface(one) or has_form(one)), None)
        if layer is None:
            message = (
                f"the plain `{module}` does not say which experts its tokens choose, so its bias cannot follow them"
            )
            raise RunError(NO_EXPERTS, message, "compare with the build's own check: `parc verify BUILD`")
        self._module = module
        self._value: Tensor = getattr(model.get_submodule(owner), leaf)
        self._rate, self._load = bias.rate, torch.zeros(self._value.numel(), dtype=torch.int64)
        layer.register_forward_pre_hook(self._count if have_interface(layer) else self._ask, with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        """Count the experts in the second argument, [tokens, k]."""
        chosen = args[1] if len(args) > 1 else kwargs["top_k_index"]
        self._load += torch.bincount(chosen.flatten().cpu(), minlength=self._load.numel())

    def _ask(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the experts that the layer's registered form routes its tokens to.

        Raises:
            RunError: the routing is random, so the layer's own forward will choose others.
        """
        before = torch.get_rng_state()
        chosen = chosen_by(layer, *args, **kwargs)
        if not before.equal(torch.get_rng_state()):
            message = f"the router of `{self._module}` draws random numbers, so the plain module's choice is not known"
            raise RunError(NO_EXPERTS, message, "compare with the build's own check: `parc verify BUILD`")
        self._load += chosen.sum(1).cpu()

    def move(self) -> None:
        """Add the rate for experts with fewer tokens than the mean, and take it from those with more."""
        load = self._load.double()
        self._value += (self._rate * torch.sign(load.mean() - load)).to(self._value)
        self.forget()

    def forget(self) -> None:
        """Forget the tokens that were counted."""
        self._load.zero_()


@final
class Plain:
    """The plain module of a build, trained on one device as the build trains it: with the same initial weights,
    batches, microbatches and dropout. Nothing of it is captured or compiled.

    Attributes:
        module: your own module.
        step_number: the number of steps that are done.
    """

    def __init__(self, build: Build, device: torch.device = CPU) -> None:
        check_device(device)
        check_source_of(build)
        manifest = build.manifest
        lines = task_of(manifest)
        self.build, self.device = build, device
        seed = int(manifest["seed"])
        make = model_builder(lines, build.folder)
        with code_undone(lines.sources, build.folder):
            recipes = record(make, seed).recipes
        self.module: nn.Module = initialize(make, seed, recipes).to(device)
        self._read_weights()
        self.step_number = 0
        self._plain = PlainModule(self.module, lines, build.folder, seed, manifest["frozen"], capacities_in(manifest))
        self._optimizer = make_optimizer(self._plain.parameters, manifest["optimizer"])
        self._before: dict[str, Tensor] = {}
        """The weights before the last update, where steps compute with them."""
        self._biases = [PlainBias(self.module, *item) for item in biases_in(manifest).items()]
        whole = Mesh(tuple((axis, 1) for axis in build.programs[FORWARD].mesh.names))

        def by_sizes(build: Build) -> BySizes[tuple[Build, Feed]]:
            return BySizes(build, lambda at: (at, Feed(at, whole, whole.coordinates(0), CPU)))

        self._by_sizes = self._evaluated = by_sizes(build)
        if build.evaluation is not None:
            self._evaluated = by_sizes(build.evaluation)

    def _read_weights(self) -> None:
        """Read the weights of the `init` line, whole, into the module."""
        weights = weights_of(self.build)
        if weights is None:
            return
        state = self.module.state_dict()
        with torch.no_grad():
            for tensor in expected_of(self.build.manifest["init"]):
                if weights.has(tensor.names):
                    real_form(state[tensor.names[0]]).copy_(weights.whole(tensor.names, tensor.dtype))
        weights.close()

    def step(self, batch: Mapping[str, Tensor] | None = None, lr: float | None = None) -> StepReport:
        """Do one step on a whole batch, or on the next of the plan's data.

        Raises:
            RunError: the batch is not one of the plan's, or the data cannot be read.
        """
        check_trains(self.build)
        at, feed = self._by_sizes(batch)
        parts = feed.next(self.step_number, self.build.manifest["steps"]) if batch is None else feed.cut(batch)
        line = self.build.manifest["optimizer"]
        lr = rate(line, self.step_number + 1) if lr is None else lr
        trained = self._plain.parameters.items() if PREVIOUS in line else ()
        newest = {name: value.detach().clone() for name, value in trained}
        self._set(self._before)
        total, gradients = self._gradients(at, parts)
        self._set(newest)
        self._before = newest
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
        with torch.no_grad():
            update(self._optimizer, line, self.step_number + 1, self._plain.parameters, gradients, norm, lr)
            for bias in self._biases:
                bias.move()
        self.step_number += 1
        return StepReport(self.step_number, total, float(norm), lr)

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the module."""
        for name, value in weights.items():
            self._plain.parameters[name].copy_(value)

    def evaluate(self, batch: Mapping[str, Tensor] | None = None) -> float:
        """Return the loss of a whole batch with the module in ``eval()``. It changes nothing. Without a batch, it reads
        batch ``step_number`` (from 0) of the evaluation's data, or of the plan's data if the plan has no `eval` line.

        Raises:
            RunError: the batch is not one of the plan's, or the data cannot be read.
        """
        check_trains(self.build)
        at, feed = self._evaluated(batch)
        parts = feed.next(self.step_number, self.build.manifest["steps"]) if batch is None else feed.cut(batch)
        modes = {module: module.training for module in self.module.modules()}
        buffers = {buffer: buffer.clone() for buffer in self.module.buffers()}
        self.module.eval()
        try:
            with torch.no_grad():
                return sum(float(loss) for loss in self._losses(at, parts))
        finally:
            for module, training in modes.items():
                module.training = training
            for buffer, value in buffers.items():
                buffer.copy_(value)
            for bias in self._biases:
                bias.forget()

    def _losses(self, at: Build, parts: list[dict[str, Tensor]]) -> Iterator[Tensor]:
        """Yield each microbatch's part of the loss of a batch."""
        for index, (part, weights) in enumerate(zip(parts, self._weights(at, parts), strict=True)):
            inputs = {name: value.to(self.device) for name, value in {**self._unread(at, part), **part}.items()}
            _, terms = self._plain.forward(inputs, self.step_number, index)
            # the mean of no targets is NaN
            counted = [term * weight for term, weight in zip(terms, weights, strict=True) if weight]
            if counted:
                yield sum(counted[1:], counted[0])

    def _gradients(self, at: Build, parts: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
        """Return the loss, and the gradients summed over microbatches in the plan's type."""
        sums = getattr(torch, self.build.manifest["accumulate"])
        rounds = len(parts) > 1 and is_narrow(sums)
        total, sums_by_name = 0.0, dict[str, Tensor]()
        for loss in self._losses(at, parts):
            loss.backward()
            total += float(loss.detach())
            for name, gradient in self._plain.take_gradients().items():
                part_sum = gradient.to(sums) if rounds and sums.itemsize < gradient.dtype.itemsize else gradient
                sums_by_name[name] = sums_by_name[name] + part_sum if name in sums_by_name else part_sum
        trained = self._plain.parameters
        return total, {
            n: own_form(v.to(real_form(trained[n]).dtype), trained[n].is_complex()) for n, v in sums_by_name.items()
        }

    def _unread(self, at: Build, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return zeros for inputs of the forward that a build does not feed, because nothing reads them."""
        sizes = dict(at.manifest["sizes"])
        sizes[BATCH] = int(sizes.get(BATCH, 1)) // int(at.manifest["microbatches"])
        return {
            entry["name"]: torch.zeros(
                [sizes.get(dim, dim) for dim in entry["dims"]], dtype=getattr(torch, entry["dtype"])
            )
            for entry in at.manifest["inputs"]
            if entry["name"] not in part
        }

    def _weights(self, at: Build, parts: list[dict[str, Tensor]]) -> list[list[float]]:
        """Return, for each microbatch, the weight of each term of its loss in the step's loss: the microbatch's share
        of the targets if the term is a mean over targets."""
        divisions = divisions_in(at.manifest)
        if COUNTING not in at.programs:
            uncounted = [1 / len(parts) if division.by == "mean" else 1.0 for division in divisions]
            return [uncounted for _ in parts]
        machine = Machine(at.reference, InProcess(Mesh()), CPU, kernels=REFERENCE_KERNELS)
        needed = at.reference.function("count").bound("input")
        counts: list[dict[Binding, float]] = []
        for part in parts:
            inputs = {value.name: part[name] for name, value in needed.items()}
            (results,) = machine.run([inputs], "count")
            counts.append({key: float(value) for key, value in results.items()})
        base = base_term(divisions)

        def weight(number: int, division: Division, part: Mapping[Binding, float]) -> float:
            if division.by != "count":
                return 1 / len(parts) if division.by == "mean" else 1.0
            key = COUNT if number == base else term_count(number)
            total = division.of(sum(count[key] for count in counts))
            return division.of(part[key]) / total if total else math.nan

        return [[weight(number, division, part) for number, division in enumerate(divisions, 1)] for part in counts]

    def close(self) -> None:
        """Stop reading data."""
        self._by_sizes()[1].close()
        self._evaluated()[1].close()


def reference(path: Path | str, device: torch.device = CPU) -> Plain:
    """Return the plain module of a build, to compare a run's losses and weights with it.

    Raises:
        RunError: there is no build, or it was altered; the weights of its `init` line are not the model's.
    """
    return Plain(open_build(path), device)
