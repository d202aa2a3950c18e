"""The task of a plan as functions: one makes the model, one calls it, one computes its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...grammar.nearest import listed, nearest
from ..program.step_values import LossTerm
from .callables import at_home, check_arguments, ending_said, load_callable
from .capture import CallModel, Captured, LossFunction
from .faults import CaptureError
from .model_output import tensor_at, value_at
from .node_facts import noted
from .reach import ancestors


@dataclass(frozen=True, slots=True)
class TaskLines:
    """The lines of a plan that say what is trained. A build's manifest has them, so that a run can make the model."""

    model: str
    arguments: tuple[tuple[str, Any], ...]
    inputs: tuple[str, ...]
    terms: tuple[LossTerm, ...]
    """The terms of the loss."""
    places: tuple[tuple[str, str], ...] = ()
    """Pairs of an input's name and the parameter of forward that it goes to, where the two names differ."""
    batched: str = ""
    """An input whose first dim is the batch."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The callables whose code determines a build: the model's, and those of the loss."""
        return (self.model, *(term.target for term in self.terms if term.kind == "callable"))

    @property
    def loss_reads(self) -> frozenset[str]:
        """The inputs that the loss names."""
        return frozenset(name for term in self.terms for name in term.reads)


class InputsError(Exception):
    """The error of a forward that cannot be called with the plan's inputs. ``inputs`` are those at fault; ``help`` is
    advice."""

    def __init__(self, message: str, help: str, inputs: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.help, self.inputs = help, inputs


def model_builder(
    lines: TaskLines, folder: Path, overrides: Mapping[str, Any] | None = None
) -> Callable[[], nn.Module]:
    """Return a function that makes the model; ``overrides`` are the ``verify`` line's arguments. Parts that the
    callable set to ``eval()`` stay so, as a frozen tower; a model in ``eval()`` as a whole is set to ``train()``.

    Raises:
        CallableError: there is no such callable, its module fails, or it takes other arguments.
    """
    make = load_callable(lines.model, folder)
    arguments = {**dict(lines.arguments), **(overrides or {})}
    check_arguments(make, lines.model, arguments)

    def build() -> nn.Module:
        with at_home(folder), ending_said():
            module = make(**arguments)
        if not isinstance(module, nn.Module):
            raise TypeError(f"`{lines.model}` returned a {type(module).__name__}, not an nn.Module")
        if not any(part.training for part in module.modules()):
            module.train()
            vars(module)[_MADE_IN_EVAL] = True
        return module

    return build


_MADE_IN_EVAL = "_parc_made_in_eval"


def made_in_eval(module: nn.Module) -> bool:
    """Return whether a model's callable returned it in ``eval()`` as a whole."""
    return _MADE_IN_EVAL in vars(module)


def whole_arguments(make: Callable[..., Any], module: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the whole numbers above 1 among the arguments of the callable that made a model: as passed, by default, or
    of the configuration that takes them."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return {}
    values: dict[str, Any] = {parameter.name: parameter.default for parameter in parameters}
    config: Any = getattr(module, "config", None)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) and hasattr(config, "to_dict"):
        values |= config.to_dict()
    values |= arguments
    return {name: value for name, value in values.items() if type(value) is int and value > 1}


def caller(model: nn.Module, lines: TaskLines) -> CallModel:
    """Return a function that calls the model with the inputs, by the names of its forward's parameters.

    Raises:
        InputsError: forward has no parameter for an input that the loss does not read, or no input for a required one.
    """
    parameters = inspect.signature(model.forward).parameters
    forward = forward_text(model)
    filled = _inputs_by_parameter(parameters, lines, forward)
    several = {p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL and p.name in filled}
    said = dict(lines.places)
    entries = {place: [said.get(name, name).split(".")[1:] for name in names] for place, names in filled.items()}
    in_order = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY
                or (several and p.kind in (p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL))]  # fmt: skip
    while in_order and in_order[-1] not in filled:
        in_order.pop()
    named = [place for place in filled if place not in in_order]
    required = {p.name for p in parameters.values()
                if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}  # fmt: skip
    missing = [place for place in parameters if place not in filled and place in {*required, *in_order}]
    if missing:
        help_ = "add an `input` line of that name, or `input NAME as PARAMETER ...`, or give the parameter a default"
        raise InputsError(f"no input fills {listed(missing)} of {forward}", help_)

    def call(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
        values = {place: [inputs[name] for name in names] for place, names in filled.items()}
        whole = {place: [with_entries(zip(entries[place], each, strict=True))] if entries[place][0] else each
                 for place, each in values.items()}  # fmt: skip
        with ending_said():
            return module(*(value for place in in_order for value in whole[place]),
                          **{place: whole[place][0] for place in named})  # fmt: skip

    return call


def with_entries(entries: Iterable[tuple[Sequence[str], Any]]) -> Any:
    """Return a dictionary of values, each under the keys that lead to it; a tuple where these are whole numbers.

    >>> with_entries([(["ids"], 1), (["pair", "1"], 3), (["pair", "0"], 2)])
    {'ids': 1, 'pair': (2, 3)}
    """
    parts: dict[str, list[tuple[Sequence[str], Any]]] = {}
    for (key, *rest), value in entries:
        parts.setdefault(key, []).append((rest, value))
    values = {key: with_entries(inner) if inner[0][0] else inner[0][1] for key, inner in parts.items()}
    if all(key.isdigit() for key in values):
        return tuple(values[key] for key in sorted(values, key=int))
    return values


def _inputs_by_parameter(
    parameters: Mapping[str, inspect.Parameter], lines: TaskLines, forward: str
) -> dict[str, list[str]]:
    """Return the inputs by the parameter that each goes to. Only a parameter such as ``*args`` gets several.

    Raises:
        InputsError: an input has no parameter of its own, and the loss does not read it.
    """
    filled: dict[str, list[str]] = {}
    taken: dict[str, str] = {}
    said = dict(lines.places)
    for name in lines.inputs:
        whole = said.get(name, name)
        place, _, entry = whole.partition(".")
        if place not in parameters and name not in said and name in lines.loss_reads:
            continue
        parameter = parameters.get(place, _keywords(parameters))
        if parameter is None:
            free = [other for other in parameters if other not in {*lines.inputs, *said.values()}]
            meant = (nearest(place, free) or free)[:1]
            help_ = "".join(f"call it `{other}`, or write `input {name} as {other} ...`, or, if that is a dictionary, "
                            f"`as {other}.{name}`; " for other in meant)  # fmt: skip
            way = "leave the line out, or name it in the `loss` line if the loss alone reads it"
            help_ += way if name not in said else f"write one of {forward}"
            raise InputsError(f"{forward} has no parameter `{place}`", help_, (name,))
        before = taken.get(whole) or (taken.get(place) if entry else next(iter(filled.get(place, ())), ""))
        if before and parameter.kind is not parameter.VAR_POSITIONAL:
            message = f"`{before}` and `{name}` both go to `{whole}` of {forward}"
            raise InputsError(message, "each parameter takes one input, and each entry of a dictionary", (name,))
        taken[whole] = name
        filled.setdefault(place, []).append(name)
    return filled


def _keywords(parameters: Mapping[str, inspect.Parameter]) -> inspect.Parameter | None:
    return next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)


def forward_text(model: nn.Module) -> str:
    """Return a model's forward with the names of its parameters, as ``forward(tokens, *args, **kwargs)``."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = (f"{'*' * ((p.kind is p.VAR_POSITIONAL) + 2 * (p.kind is p.VAR_KEYWORD))}{p.name}" for p in parameters)
    return f"forward({', '.join(names)})"


LABELS = "labels"
"""The parameter from which models of transformers compute a loss of their own."""


def free_parameters(model: nn.Module, lines: TaskLines) -> frozenset[str]:
    """Return the parameters of forward that no input fills, and that data may hold. Labels are none of them: without
    them a model computes no loss of its own."""
    parameters, places = inspect.signature(model.forward).parameters, dict(lines.places)
    named = {name for name, parameter in parameters.items() if parameter.kind not in _SEVERAL}
    return frozenset(named - {places.get(name, name).partition(".")[0] for name in lines.inputs} - {LABELS})


_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def passed_on(model: nn.Module, lines: TaskLines) -> dict[str, str]:
    """Return the inputs that forward's signature does not name, by the names under which they go into its
    ``**kwargs``."""
    parameters = inspect.signature(model.forward).parameters
    if _keywords(parameters) is None:
        return {}
    filled = _inputs_by_parameter(parameters, lines, "")
    return {name: place for place, (name, *_) in filled.items() if place not in parameters}


def loss_function(lines: TaskLines, folder: Path) -> LossFunction | None:
    """Return the function that computes the loss from the model's output and the inputs; None where there is no loss.

    Raises:
        CallableError: a callable of the loss cannot be had, or takes other arguments.
    """
    if not lines.terms:
        return None
    first, *more = term_functions(lines, folder)

    def loss(output: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sum((term(output, inputs) for term in more), first(output, inputs))

    return loss


def term_functions(lines: TaskLines, folder: Path) -> list[LossFunction]:
    """Return the functions that compute the terms of the loss, each with its factor and over its divisor.

    Raises:
        CallableError: a callable of the loss cannot be had, or takes other arguments.
    """
    return [_divided(_multiplied(_term_function(term, folder), term.factor), term.divisor) for term in lines.terms]


def _multiplied(function: LossFunction, factor: float) -> LossFunction:
    return function if factor == 1 else lambda output, inputs: function(output, inputs) * factor


def _divided(function: LossFunction, divisor: float | str | None) -> LossFunction:
    """Return a function divided by a number, or by the sum of an input."""
    if isinstance(divisor, str):
        return lambda output, inputs: function(output, inputs) / inputs[divisor].sum()
    return function if divisor is None else lambda output, inputs: function(output, inputs) / divisor


def _term_function(term: LossTerm, folder: Path) -> LossFunction:
    if term.kind == "output":
        name = f"output.{term.target}" if term.target else "output"
        return lambda output, inputs: tensor_at(name, output)
    if term.kind == "cross_entropy":
        ignore = -100 if term.ignore is None else term.ignore

        def cross_entropy(output: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            logits, targets = (inputs[n] if n in inputs else tensor_at(n, output) for n in term.operands)
            _check_classes(term.operands, logits, targets)
            return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore)

        return cross_entropy
    function = load_callable(term.target, folder)
    check_arguments(function, term.target, (), len(term.operands))
    if isinstance(function, FunctionType):
        function = _with_lines(function)

    def call(output: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        operands = (inputs[name] if name in inputs else value_at(name, output) for name in term.operands)
        with ending_said():
            return function(*operands)  # type: ignore[no-any-return]

    return call


def _check_classes(names: Sequence[str], logits: torch.Tensor, targets: torch.Tensor) -> None:
    """Check that there is a target for each row of logits.

    Raises:
        CaptureError: there is not; perhaps classes are in another dim than the last.
    """
    if any(not isinstance(size, int) for size in (*logits.shape, *targets.shape)):
        return  # a size that depends on data is told as that
    if logits.dim() > 1 and logits.shape[:-1].numel() == targets.numel():
        return
    shapes = f"`{names[0]}` is {list(logits.shape)} and `{names[1]}` {list(targets.shape)}"
    rows = f"one row for each of the {targets.numel()} targets"
    help_ = f"let the model return logits with {rows}, classes in the last dim"
    if logits.dim() > 2 and (logits.shape[0], *logits.shape[2:]) == tuple(targets.shape):
        help_ = "classes are in dim 1 here: let the model return its logits with `.movedim(1, -1)`"
    message = f"{shapes}, and `cross_entropy` has classes in the last dim"
    raise CaptureError("other", message, in_loss=True, help=help_, named=names[0])


def _with_lines(function: FunctionType) -> FunctionType:
    """Return the function under the name ``forward``: an export records the lines of functions of that name only."""
    code = function.__code__.replace(co_name="forward")
    renamed = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    renamed.__kwdefaults__ = function.__kwdefaults__
    return renamed


def reading_only(captured: Captured, parameters: Collection[str]) -> Captured:
    """Return a captured model without the returned tensors that need other parameters than these."""
    every: Any = captured.graph.output_node().args[0]
    first = len(every) - len(captured.returned)
    kept = []
    for name, node in zip(captured.returned, every[first:], strict=True):
        bindings = (noted(read).binding for read in ancestors([node]) if read.op == "placeholder")
        if all(binding.kind != "parameter" or binding.name in parameters for binding in bindings):
            kept.append((name, node))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(captured.graph, copies)
    graph.output(tuple(copies[node] for node in (*every[:first], *(node for _, node in kept))))
    graph.eliminate_dead_code()
    return replace(captured, graph=graph, returned=tuple(name for name, _ in kept))
