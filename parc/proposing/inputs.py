"""The search for a model's inputs: its forward is called on fake tensors, one guess after the other.

A forward's parameters have names, perhaps types, and no shapes. Each gets one tensor after the other that the model's
layers might read; of calls that fail, the one that ran more operators is nearer. The inputs and a loss are a task.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from parc.compiler.capture.callables import ending_said
from parc.compiler.capture.experts.forms import with_experts
from parc.compiler.capture.experts.lists import unstacked
from parc.compiler.capture.model_output import tensors_in
from parc.compiler.initial.recipes import Recorded
from parc.compiler.plan.directives.loss import CROSS_ENTROPY
from parc.compiler.sizes.size_range import BATCH
from parc.compiler.torch_private import quiet

SAMPLES, LENGTH = 8, 128
_SECONDS = 60
_TARGETS = ("label", "target")
"""Words in the names of parameters that take targets: these are filled though they are optional."""
_MASK = "mask"
"""The word in the names of parameters that take masks, of ones and zeros or of booleans."""
_LENGTHS = (64, 32, 16, 8)
_PICTURES = (32, 64, 224, 28, 16)
_LONGEST, _SOUND = 4096, 16000


@dataclass(frozen=True, slots=True)
class Guess:
    """A tensor for one parameter of a forward: its dtype, and its dims, each a number or the name of a size."""

    dtype: str
    dims: tuple[int | str, ...]

    def text(self) -> str:
        """Return the type and the dims as an ``input`` line has them."""
        return f"{self.dtype} [{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True)
class Tried:
    """The outcome of a call: the output of the forward, or its error and the number of operators before it."""

    output: Any
    error: Exception | None
    operators: int

    @property
    def rank(self) -> tuple[bool, int]:
        """The key by which calls are compared: the largest is best."""
        return self.error is None, self.operators


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A call of the forward: the guess for each parameter, the sizes that guesses name, and the outcome."""

    guesses: Mapping[str, Guess]
    sizes: Mapping[str, int]
    tried: Tried


class Caller:
    """A model on fake tensors, called with one guess after the other. ``known`` are guesses that the user has fixed."""

    def __init__(
        self, recorded: Recorded, sizes: Mapping[str, int], known: Mapping[str, Guess], loss: str = ""
    ) -> None:
        self.module, self.mode = recorded.module, recorded.mode
        self.sizes = {BATCH: SAMPLES, "S": LENGTH, **sizes}
        self._free = not {"S"} & sizes.keys()
        self.parameters = {
            name: parameter
            for name, parameter in inspect.signature(recorded.module.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        self.loss_reads = names_in(loss)
        self.beside = {name: guess for name, guess in known.items()
                       if name in self.loss_reads and name not in self.parameters}  # fmt: skip
        """The known inputs that only the loss reads."""
        self.known = {name: guess for name, guess in known.items() if name not in self.beside}
        self.numbers = _model_numbers(recorded.module)
        self._layers = _Layers.of(recorded.module)
        self._end = time.monotonic() + _SECONDS

    def call(self, guesses: Mapping[str, Guess], sizes: Mapping[str, int]) -> Tried:
        """Call the forward on tensors of these guesses."""
        counter = _Counter()
        checked = sdpa_kernel(SDPBackend.MATH)  # other kernels take fake masks of any shape
        with self.mode, quiet(), with_experts(self.module), unstacked(self.module, parts=False), checked, counter:
            shapes = {name: [dim if isinstance(dim, int) else sizes[dim] for dim in guess.dims]
                      for name, guess in guesses.items()}  # fmt: skip
            values = {name: torch.zeros(shapes[name], dtype=getattr(torch, guess.dtype))
                      for name, guess in guesses.items()}  # fmt: skip
            positional = [values.pop(name) for name, parameter in self.parameters.items()
                          if parameter.kind is parameter.POSITIONAL_ONLY and name in values]  # fmt: skip
            counter.count = 0
            try:
                with ending_said():
                    output = self.module(*positional, **values)
            except Exception as error:
                return Tried(None, error, counter.count)
        return Tried(output, None, counter.count)

    def idle(self) -> list[str]:
        """Return the known inputs that neither the forward nor the loss names."""
        kinds = {parameter.kind for parameter in inspect.signature(self.module.forward).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return []
        return [name for name in self.known if name not in self.parameters]

    def unknown(self, call: ForwardCall) -> list[str]:
        """Return the inputs that the loss names, but neither the call nor the user knows."""
        return [name for name in self.loss_reads if name not in {**call.guesses, **self.beside}]

    def find(self) -> ForwardCall:
        """Return the call that went furthest: with the required parameters, and, if it needs more, with optional
        ones."""
        required = [name for name, parameter in self.parameters.items() if parameter.default is parameter.empty]
        optional = [name for name, parameter in self.parameters.items() if parameter.default is None]
        main = getattr(self.module, "main_input_name", None)
        first = required or ([main] if main in optional else optional[:1])
        best = self._climb(ForwardCall({name: self._options(name)[0] for name in [*self.known, *first]}, self.sizes,
                                Tried(None, None, 0)))  # fmt: skip
        while best.tried.error is not None and time.monotonic() < self._end:
            further = max(self._with_one_more(best, optional), key=lambda call: call.tried.rank, default=best)
            if further.tried.rank <= best.tried.rank:
                break
            best = further
        return best

    def _with_one_more(self, best: ForwardCall, optional: Sequence[str]) -> Iterator[ForwardCall]:
        """Yield the calls with one more parameter, up to the first that succeeds. Targets are tried first: many models
        derive their other inputs from these."""
        for name in sorted(optional, key=lambda name: not _is_target(name)):
            if name not in best.guesses and time.monotonic() < self._end:
                more = self._climb(replace(best, guesses={**best.guesses, name: self._options(name)[0]}))
                yield more
                if more.tried.error is None:
                    return

    def with_targets(self, call: ForwardCall) -> Iterator[tuple[str, ForwardCall]]:
        """Yield the calls that succeed with one more parameter, an optional one with the name of targets."""
        for name, parameter in self.parameters.items():
            if name in call.guesses or parameter.default is parameter.empty or not _is_target(name):
                continue
            for guess in self._targets(call):
                guesses = {**call.guesses, name: guess}
                if (tried := self.call(guesses, call.sizes)).error is None:
                    yield name, ForwardCall(guesses, call.sizes, tried)

    def _climb(self, start: ForwardCall) -> ForwardCall:
        """Return the best call by hill climbing: one guess, or the length of sequences, is changed at a time."""
        best = replace(start, tried=self.call(start.guesses, start.sizes))
        moved = True
        while moved and best.tried.error is not None:
            moved = False
            for changed in self._changes(best):
                if time.monotonic() > self._end:
                    return best
                if not any(BATCH in guess.dims for guess in changed.guesses.values()):
                    continue
                changed = replace(changed, tried=self.call(changed.guesses, changed.sizes))
                if changed.tried.rank > best.tried.rank:
                    best, moved = changed, True
                if best.tried.error is None:
                    break
        return best

    def _changes(self, best: ForwardCall) -> Iterator[ForwardCall]:
        """Yield calls that differ in one thing: the length of sequences, first as a power of two, or one guess."""
        sized = self._free and any("S" in guess.dims for guess in best.guesses.values())
        lengths = [size for size in self.numbers if _LENGTHS[-1] <= size <= _LONGEST] if sized else []
        powers = _LENGTHS if sized else ()
        for length in (length for length in powers if length != best.sizes[BATCH]):
            yield replace(best, sizes={**best.sizes, "S": length})
        for name in best.guesses:
            for guess in self._options(name):
                yield replace(best, guesses={**best.guesses, name: guess})
        for length in (*powers, *lengths):  # a length equal to B fits where a sample and a position are confused
            yield replace(best, sizes={**best.sizes, "S": length})

    def _options(self, name: str) -> list[Guess]:
        """Return the tensors that a parameter may take, those first that the model's first layers read."""
        if name in self.known:
            return [self.known[name]]
        words = str(self.parameters[name].annotation)
        whole, real = "Long" in words or "Int" in words, "Float" in words
        guesses = list(self._layers.guesses(self.numbers))
        if "Bool" in words or _MASK in name.lower():
            dims = dict.fromkeys(((BATCH, "S"), *(guess.dims for guess in guesses), ("S", "S"), (BATCH, "S", "S")))
            masks = [Guess("bool", each) for each in dims]
            guesses = masks if "Bool" in words else [Guess("int64", (BATCH, "S")), *masks, *guesses]
        fits = [guess for guess in guesses
                if (guess.dtype == "int64" or not whole) and (guess.dtype != "int64" or not real)]  # fmt: skip
        return list(dict.fromkeys(fits)) or [Guess("float32", (BATCH,))]

    def _targets(self, call: ForwardCall) -> Iterator[Guess]:
        """Yield the targets that a loss may take: a class for each token or sample, or numbers of an output's shape."""
        tokens = Guess("int64", (BATCH, "S")) in call.guesses.values()
        classes = [Guess("int64", (BATCH, "S")), Guess("int64", (BATCH,))]
        yield from classes if tokens else reversed(classes)
        for _, value in tensors_in(call.tried.output):
            if value.is_floating_point() and value.dim():
                yield Guess("float32", named_dims(value.shape, call.sizes))


class _Counter(TorchDispatchMode):
    """A mode that counts operators."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a model, as far as they tell its inputs: dims and channels of convolutions, widths of linear
    layers. ``lookups``: it has embeddings; ``tokens_first``: before convolutions; ``attention``: it reads sequences."""

    channels: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    lookups: bool
    tokens_first: bool
    attention: bool

    @classmethod
    def of(cls, module: nn.Module) -> _Layers:
        """Read a model's layers in their order."""
        layers = list(module.modules())
        convolutions = [layer for layer in layers if isinstance(layer, torch.nn.modules.conv._ConvNd)]
        tables = [layer for layer in layers if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
        first = next((layer for layer in layers if layer in convolutions or layer in tables), None)
        return cls(
            tuple(dict.fromkeys((len(layer.kernel_size), layer.in_channels) for layer in convolutions)),
            tuple(dict.fromkeys(layer.in_features for layer in layers if isinstance(layer, nn.Linear))),
            bool(tables),
            first in tables,
            any(isinstance(layer, nn.MultiheadAttention) for layer in layers),
        )

    def guesses(self, numbers: Sequence[int]) -> Iterator[Guess]:
        """Yield the tensors that such layers read; ``numbers`` are those in the model's attributes."""
        tokens = [Guess("int64", (BATCH, "S"))] if self.lookups else []
        yield from tokens if self.tokens_first else ()
        for dims, channels in self.channels[:3]:
            yield from _signals(channels, numbers) if dims == 1 else _pictures(dims, channels, numbers)
        yield from tokens
        for width in self.widths[:8]:
            plain, sequence = Guess("float32", (BATCH, width)), Guess("float32", (BATCH, "S", width))
            yield from (sequence, plain) if self.attention else (plain, sequence)
        yield from (Guess(dtype, (BATCH,)) for dtype in ("int64", "float32"))
        yield from (Guess("float32", ("S", width)) for width in (3, 2))
        for length in numbers[:12]:
            yield from (Guess("float32", (BATCH, length, width)) for width in (*self.widths[:4], *numbers[:4]))


def _signals(channels: int, numbers: Sequence[int]) -> Iterator[Guess]:
    if channels == 1:
        yield Guess("float32", (BATCH, _SOUND))
    lengths: tuple[int | str, ...] = ("S", *numbers, *(2 * size for size in numbers))
    for length in dict.fromkeys(lengths):
        yield Guess("float32", (BATCH, channels, length))


def _pictures(dims: int, channels: int, numbers: Sequence[int]) -> Iterator[Guess]:
    for side in dict.fromkeys((_PICTURES[0], *numbers, *_PICTURES)):
        yield Guess("float32", (BATCH, channels, *(side,) * dims))


def _model_numbers(module: nn.Module) -> tuple[int, ...]:
    """Return the whole numbers among a model's attributes and in its configuration, which may be sizes of inputs."""
    holders: list[Any] = [getattr(module, "config", None), *module.modules()]
    numbers: dict[int, None] = {}
    for holder in holders[:200]:
        for value in list(vars(holder).values() if hasattr(holder, "__dict__") else ()):
            for number in value if isinstance(value, (tuple, list)) and len(value) < 5 else [value]:
                if type(number) is int and 2 <= number <= 4096:
                    numbers[number] = None
    return tuple(numbers)


def names_in(loss: str) -> tuple[str, ...]:
    """Return the inputs that the text of a loss names.

    >>> names_in('"./m.py:own"(output.logits, labels, weights, scale=2) + 0.1 square(output.aux, labels)')
    ('labels', 'weights')
    """
    words = re.findall(r"(?<![\w.])[A-Za-z_]\w*(?!\w|\s*[(=])", re.sub(r'"[^"]*"', "", loss))
    return tuple(dict.fromkeys(word for word in words if word != "output"))


def _is_target(name: str) -> bool:
    return any(word in name.lower() for word in _TARGETS)


def named_dims(shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int | str, ...]:
    """Return the dims of a batched tensor; the second is named `S` if it is as long as sequences."""
    return tuple(
        BATCH if at == 0 else "S" if at == 1 and size == sizes["S"] else int(size) for at, size in enumerate(shape)
    )


# ---- the task of a model: its inputs as lines of a plan, and a loss


MEAN_SQUARE = '"torch.nn.functional:mse_loss"'


@dataclass(frozen=True, slots=True)
class Task:
    """The training task: the inputs by name, the sizes that they name, the loss, and the reason for this loss."""

    inputs: Mapping[str, Guess]
    sizes: Mapping[str, int]
    loss: str
    why: str


def tasks_of(caller: Caller, call: ForwardCall, loss: str = "") -> Iterator[Task]:
    """Yield the tasks that fit a call, the likeliest first: the loss that was asked for; the loss that the model
    returns, perhaps only with targets; a loss between the model's output and targets of its form."""
    if loss:
        guesses = {**call.guesses, **caller.beside}
        for guessed in _targets_named(caller.unknown(call), caller, call, CROSS_ENTROPY in loss):
            why = "as asked for" + "".join(f"; `{name}` is a guess" for name in guessed)
            yield Task({**guesses, **guessed}, _used(call, {**guesses, **guessed}), loss, why)
        return
    if name := _loss(call.tried.output):
        yield Task(call.guesses, _used(call), name, "the model returns its loss")
        return
    for targets, more in caller.with_targets(call):
        if name := _loss(more.tried.output):
            yield Task(more.guesses, _used(more), name, f"the model computes its loss from `{targets}`")
            break
    if any(True for _ in tensors_in(call.tried.output)):
        yield _output_task(caller, call)


def _targets_named(
    names: Sequence[str], caller: Caller, call: ForwardCall, classes: bool
) -> Iterator[dict[str, Guess]]:
    """Yield guesses of the targets that the loss reads under the first of these names. ``classes``: the targets are
    class numbers."""
    if not names or not any(True for _ in tensors_in(call.tried.output)):
        yield {}
        return
    *_, targets = _output_task(caller, call).inputs.values()
    numbers = Guess("int64", targets.dims if targets.dtype == "int64" else targets.dims[:-1])
    yield from ({names[0]: guess} for guess in ([numbers] if classes else dict.fromkeys([targets, numbers])))


def _output_task(caller: Caller, call: ForwardCall) -> Task:
    """Return the task of a loss between an output and targets: cross entropy of classes, else the mean square."""
    name, value = _scored_output(caller, call)
    dims = _output_dims(name, value, caller, call)
    if _of_tokens(dims, caller, call) or (len(dims) == 2 and isinstance(dims[1], int) and dims[1] > 1):
        targets = _free("targets", call)
        guesses = {**call.guesses, targets: Guess("int64", dims[:-1])}
        why = f"{value.shape[-1]} classes for each {'token' if len(dims) > 2 else 'sample'}"
        return Task(guesses, _used(call, guesses), f"cross_entropy({name}, {targets})", why)
    targets = _free("target", call)
    guesses = {**call.guesses, targets: Guess("float32", dims)}
    return Task(guesses, _used(call, guesses), f"{MEAN_SQUARE} ({name}, {targets})", "a guess: put your own loss here")


def _output_dims(name: str, value: torch.Tensor, caller: Caller, call: ForwardCall) -> tuple[int | str, ...]:
    """Return the dims of an output, with the name that an input has for the length of sequences. It is a length only if
    the output becomes shorter with shorter sequences."""
    lengths = [dim for guess in call.guesses.values() for dim in guess.dims[1:2] if isinstance(dim, str)]
    named = {call.sizes[dim]: dim for dim in reversed(lengths)}
    dims = tuple(named.get(dim, dim) if at == 1 and isinstance(dim, int) else dim
                 for at, dim in enumerate(named_dims(value.shape, {"S": 0})))  # fmt: skip
    if len(dims) != 2 or not isinstance(dims[1], str):
        return dims
    other = caller.call(call.guesses, {**call.sizes, dims[1]: call.sizes[dims[1]] // 2})
    same = dict(tensors_in(other.output)).get(name) if other.error is None else None
    return dims if same is None or same.shape != value.shape else (dims[0], value.shape[1])


def _of_tokens(dims: tuple[int | str, ...], caller: Caller, call: ForwardCall) -> bool:
    """Return whether a tensor of these dims has a score for each token and each row of the largest embedding."""
    tables = (layer.num_embeddings for layer in caller.module.modules() if isinstance(layer, nn.Embedding))
    rows = max(tables, default=0)
    tokens = len(dims) == 3 and Guess("int64", dims[:-1]) in call.guesses.values()
    return tokens and isinstance(dims[-1], int) and dims[-1] >= max(rows, 2)


def _loss(output: Any) -> str:
    """Return the name of the differentiable scalar that a model returns, "" if it returns none."""
    scalars = [name for name, value in tensors_in(output) if value.dim() == 0 and value.requires_grad]
    return "output.loss" if "output.loss" in scalars else next(iter(scalars), "")


def _scored_output(caller: Caller, call: ForwardCall) -> tuple[str, torch.Tensor]:
    """Return the output that a loss most likely reads. Of the differentiable ones, or else of all, it is the one with
    the name `logits`, the first with a score for each class of each token, or the first."""
    outputs = list(tensors_in(call.tried.output))
    learned = [(name, value) for name, value in outputs if value.requires_grad and value.is_floating_point()] or outputs
    named = [(name, value) for name, value in learned if name.rpartition(".")[2] == "logits"]
    scores = [(name, value) for name, value in learned
              if value.dim() == 3 and _of_tokens(_output_dims(name, value, caller, call), caller, call)]  # fmt: skip
    return (named or scores or learned)[0]


def _free(name: str, call: ForwardCall) -> str:
    return name if name not in call.guesses else _free(f"{name}_", call)


def _used(call: ForwardCall, guesses: Mapping[str, Guess] | None = None) -> dict[str, int]:
    names = {dim for guess in (guesses or call.guesses).values() for dim in guess.dims}
    return {name: size for name, size in call.sizes.items() if name in names}
