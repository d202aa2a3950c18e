"""The training task of a model: its inputs as lines of a plan, and a loss, its own or a guess."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parc.compiler.capture.model_output import tensors_in
from parc.compiler.plan.directives.loss import CROSS_ENTROPY
from parc.proposing.guesses import Guess, named_dims
from parc.proposing.inputs import Caller, ForwardCall, read_by, read_by_all, real_name

_OUTPUT = re.compile(r"\boutput(?:\.\w+)*")
_OF_TOWERS = "features of a pair come close, a guess: put your own contrastive loss here"
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
        named = set(_OUTPUT.findall(loss))
        if not named <= _names(call):
            call = next((more for _, more in caller.with_targets(call) if named <= _names(more)), call)
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


def _names(call: ForwardCall) -> set[str]:
    """Return the names by which a loss reaches into the output of a call."""
    return {"output", *(name for name, _ in tensors_in(call.tried.output))}


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
    if pair := _towers(call, value):
        return Task(call.guesses, _used(call), f"{MEAN_SQUARE} ({', '.join(pair)})", _OF_TOWERS)
    dims = _output_dims(name, value, caller, call)
    if _of_tokens(dims, caller, call) or (len(dims) == 2 and isinstance(dims[1], int) and dims[1] > 1):
        targets = _free("targets", call)
        guesses = {**call.guesses, targets: Guess("int64", dims[:-1])}
        why = f"{value.shape[-1]} classes for each {'token' if len(dims) > 2 else 'sample'}"
        return Task(guesses, _used(call, guesses), f"cross_entropy({name}, {targets})", why)
    targets = _free("target", call)
    guesses = {**call.guesses, targets: Guess(real_name(value), dims)}
    return Task(guesses, _used(call, guesses), f"{MEAN_SQUARE} ({name}, {targets})", "a guess: put your own loss here")


def _towers(call: ForwardCall, value: torch.Tensor) -> tuple[str, ...]:
    """Return the features of two towers, which no output joins; () where one output reads all that two do."""
    outputs = [(name, other, read_by(other)) for name, other in tensors_in(call.tried.output)
               if other.dim() == 2 and other.requires_grad and not _of_pairs(other)]  # fmt: skip
    pairs = [(first, second) for first in outputs for second in outputs
             if first[1].shape == second[1].shape and not (first[2] <= second[2] or first[2] >= second[2])]  # fmt: skip
    joined = not _of_pairs(value) and any(first[2] | second[2] <= read_by(value) for first, second in pairs)
    return () if joined or not pairs else (pairs[0][0][0], pairs[0][1][0])


def _of_pairs(value: torch.Tensor) -> bool:
    """Return whether a tensor has a number for each pair of samples."""
    return value.dim() == 2 and value.shape[0] == value.shape[1]


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
    """Return the name of the loss that a model returns, "" if it returns none: the differentiable scalar that reads all
    weights that the other outputs read. A temperature reads only itself, and a balance loss no head."""
    every = read_by_all(output)
    scalars = [name for name, value in tensors_in(output)
               if value.dim() == 0 and value.requires_grad and read_by(value) >= every]  # fmt: skip
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
