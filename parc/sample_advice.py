"""Warnings of a build about its data: entries that forward takes and no line names, and the labels of a model that
predicts next tokens, which the loss compares with the wrong ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parc.compiler.capture.model_calls import LABELS, free_parameters
from parc.compiler.ops.rules import facts
from parc.compiler.plan.directives.input import INPUT_DTYPES
from parc.compiler.plan.directives.loss import CROSS_ENTROPY
from parc.compiler.plan.plan import Plan
from parc.compiler.program.program import Line
from parc.compiler.program.step_values import LossTerm
from parc.compiler.sizes.size_range import BATCH
from parc.compiling.compiled import Compiled
from parc.compiling.plan_data import FirstSample
from parc.grammar.codes import LEFT_OUT, UNSHIFTED
from parc.grammar.diagnostics import Diagnostic, Label, Severity

_IGNORED = -100
_CAUSAL_CLASSES = ("ForCausalLM", "GPTLMHeadModel", "GPT2LMHeadModel")
"""The ends of the names that transformers and others give to classes of causal language models."""
_ATTENTION, _CAUSAL = "parc.attention.default", 5
"""The operator of attention, and the position of its argument that says that later positions are hidden."""


def sample_warnings(compiled: Compiled, samples: Sequence[FirstSample]) -> Iterator[Diagnostic]:
    """Yield the warnings of a compiled plan about its data, of which ``samples`` are the first of each line."""
    for sample in samples:
        yield from _left_out(compiled, sample)
    yield from _wrong_tokens(compiled, samples)


# ---- entries of the data that no line names


def _left_out(compiled: Compiled, sample: FirstSample) -> Iterator[Diagnostic]:
    """Warn of entries of the data under the name of a parameter of forward that no ``input`` line fills."""
    plan, free = compiled.plan, free_parameters(compiled.recorded.module, compiled.lines)
    for name, value in sample.others.items():
        if name in free:
            help_ = f"add `{input_line(plan, name, value, sample.tensors)}`, and place it as the inputs beside it"
            yield Diagnostic(
                LEFT_OUT, f"the data's `{name}` is left out: the model's forward takes it, and no `input` line names"
                " it", Label(sample.line.span), help=f"{help_}; or leave it out of the data", severity=Severity.WARNING,
            )  # fmt: skip


def input_line(plan: Plan, name: str, value: Any, sample: Mapping[str, Tensor]) -> str:
    """Return the ``input`` line for an entry of a sample: an input whose tensor has the same shape has its dims."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return f"input {name} TYPE [{BATCH}, …]"
    alike = (line.dims for line in plan.inputs if line.name in sample and sample[line.name].shape == tensor.shape
             and line.name not in plan.unbatched)  # fmt: skip
    dims = next(alike, (BATCH, *tensor.shape))
    dtype = str(tensor.dtype).removeprefix("torch.")
    known = dtype if dtype in INPUT_DTYPES else "float32" if tensor.is_floating_point() else "int64"
    return f"input {name} {known} [{', '.join(map(str, dims))}]"


# ---- labels beside the tokens that a model reads


def _wrong_tokens(compiled: Compiled, samples: Sequence[FirstSample]) -> Iterator[Diagnostic]:
    """Warn of a model that predicts next tokens, and of a term of the loss that compares its scores at a token with
    that token, which it reads, or with the one behind the next. The data tells. Where it cannot be read, labels that
    also go to the model's own loss are taken for the tokens, as that loss takes them."""
    plan = compiled.plan
    places = {line.name: line.parameter for line in plan.inputs}
    dims = {line.name: line.dims for line in plan.inputs if line.dtype.startswith("int")}
    for number, term in enumerate(plan.loss.terms, 1):
        labels, shifts = _compared(term, places)
        if labels not in dims or not predicts_next(compiled, labels):
            continue
        ids = [name for name in dims if dims[name] == dims[labels] and name != labels]
        away = {labels_away(sample.tensors, name, labels, _ignored(term)) for sample in samples for name in ids} - {
            None
        }
        read = any(bool((sample.tensors[labels] != _ignored(term)).any()) for sample in samples)
        if not shifts and _reads(compiled, places[labels]):
            known: int | None = 0
        elif not (away or read or shifts) and places[labels] == LABELS and _is_causal_class(compiled) and ids:
            known = None
        elif len(away) == 1 and (known := away.pop()) is not None and known + shifts != 1:
            pass
        else:
            continue
        yield _unshifted(compiled, number, labels, known)


def _reads(compiled: Compiled, parameter: str) -> bool:
    """Return whether forward takes an input otherwise than for its own loss."""
    return parameter != LABELS and parameter in inspect.signature(compiled.recorded.module.forward).parameters


def _takes_labels(compiled: Compiled) -> bool:
    return LABELS in inspect.signature(compiled.recorded.module.forward).parameters


def _is_causal_class(compiled: Compiled) -> bool:
    return any(base.__name__.endswith(_CAUSAL_CLASSES) for base in type(compiled.recorded.module).__mro__)


def predicts_next(compiled: Compiled, labels: str) -> bool:
    """Return whether a model's scores at a token depend on that token and on those before it, so that it is trained to
    predict the next one: as its class says, or as all its attention is causal and it moves no sequence by itself."""
    main = compiled.build.reference.main
    if _is_causal_class(compiled):
        return True
    attentions = [line for line in main.lines if line.op == _ATTENTION]
    length, values = main.bound("input")[labels].type.shape[1:2], main.values()

    def moves(line: Line) -> bool:
        """Return whether a line cuts, lengthens, rolls or flips sequences."""
        row, long = facts(line.op), line.made[0].type.shape[1:2] if line.made else ()
        shapes = [values[name].type.shape for name in line.uses]
        of_sequences = any(len(shape) in (2, 3) and shape[1:2] == length for shape in shapes)
        return of_sequences and row.moves in ("place", "join") and (long != length or row.storage != "view")

    causal = all(line.args[_CAUSAL] is True for line in attentions)
    return bool(attentions) and causal and not any(map(moves, main.lines))


def _compared(term: LossTerm, places: Mapping[str, str]) -> tuple[str, int]:
    """Return the input whose numbers a term compares with scores, and by how many positions the term itself shifts
    them; "" for any other term."""
    inputs = [name for name in term.operands if name in places]
    if term.kind == CROSS_ENTROPY and len(inputs) == 1:
        return inputs[0], 0
    if term.kind == "output" and term.target == "loss":
        return next((name for name, place in places.items() if place == LABELS), ""), 1
    return "", 0


def labels_away(sample: Mapping[str, Tensor], ids: str, labels: str, ignore: int) -> int | None:
    """Return how many positions behind their own tokens the labels of a sample are: 0 if they are the tokens, 1 if each
    is the next one. None if they are neither, or both.

    >>> sample = {"ids": torch.tensor([5, 3, 7]), "same": torch.tensor([-100, 3, 7]), "next": torch.tensor([3, 7, 9])}
    >>> labels_away(sample, "ids", "same", -100), labels_away(sample, "ids", "next", -100)
    (0, 1)
    """
    if ids not in sample or labels not in sample or sample[ids].shape != sample[labels].shape or not sample[ids].dim():
        return None
    tokens, targets = sample[ids], sample[labels]
    counted = targets != ignore
    fits = {0: (tokens == targets)[counted], 1: (tokens[..., 1:] == targets[..., :-1])[counted[..., :-1]]}
    away = [count for count, same in fits.items() if same.numel() > 1 and bool(same.all())]
    return away[0] if len(away) == 1 else None


def _ignored(term: LossTerm) -> int:
    return _IGNORED if term.ignore is None else term.ignore


def _unshifted(compiled: Compiled, number: int, labels: str, known: int | None) -> Diagnostic:
    """Return the warning of a term whose labels are ``known`` positions behind their tokens, or probably the tokens."""
    plan, name = compiled.plan, type(compiled.recorded.module).__name__
    held = "let the data hold the next token in each place"
    with_labels = "" if any(line.parameter == LABELS for line in plan.inputs) else " and an input `labels`"
    if known == 1:
        message = f"`{labels}` holds the next token in each place, and the own loss of {name} shifts it once more"
        help_ = "let the data hold the tokens themselves as labels"
    else:
        message = f"{name} predicts the next token, and the loss compares its scores with `{labels}` at the same token"
        own_loss = f"write `loss output.loss`{with_labels}, which shifts labels by one"
        help_ = (
            f"{own_loss}; or {held}, as an input `targets`" if _takes_labels(compiled) else f"{held}, as another input"
        )
        help_ = (
            help_ if known is not None else f"{own_loss}; or, if the data holds the next tokens, call them `targets`"
        )
    return Diagnostic(UNSHIFTED, message, Label(plan.loss.term_span(number)), help=help_, severity=Severity.WARNING)
