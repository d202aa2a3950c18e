"""The optimizer: torch's own on a rank's pieces, its learning rates, clipping by the global norm, and its state in
checkpoints."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch

from ...compiler.program.optimizers import AVERAGE, BESIDE, OPTIMIZERS, PREVIOUS, WEIGHT_LIMITS, kept_slots
from ...grammar.codes import BAD_STATE, OTHER_RATE
from ..ranks.faults import RunError
from .checkpoint import Checkpoint, refuse


def make_optimizer(parameters: Mapping[str, torch.Tensor], line: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the plan's optimizer over contiguous tensors that require no autograd of their own: torch's fused updates
    walk a parameter, its gradient and its moments with one index."""
    assert all(tensor.is_contiguous() for tensor in parameters.values()), "a parameter is not laid out as its type says"
    grouped = {name for group in line["groups"] for name in group["parameters"]}
    groups: list[dict[str, Any]] = [{"params": [value for name, value in parameters.items() if name not in grouped]}]
    for group in line["groups"]:
        members = [parameters[name] for name in group["parameters"] if name in parameters]
        groups += [{**group["set"], "params": members}] if members else []
    row = OPTIMIZERS[line["name"]]
    arguments: dict[str, Any] = {name: line[name] for name in row.clauses} | line.get("arguments", {})
    if row.fused:
        arguments["fused"] = not any(tensor.is_complex() for tensor in parameters.values()) or None
    else:
        arguments["foreach"] = True
    optimizer: torch.optim.Optimizer = getattr(torch.optim, row.torch_class)(
        groups, lr=line["lr"], weight_decay=line["weight_decay"], **arguments
    )
    for group in optimizer.param_groups:
        group[_RATIO] = group["lr"] / line["lr"] if line["lr"] else 1.0
        group[_SET] = group["lr"]
    return optimizer


_RATIO = "parc_ratio"
"""The key of a group's learning rate as a multiple of the line's."""
_SET = "parc_lr"
"""The key of the learning rate that parc has set last, to see whether something else sets it too."""
_OF_SCHEDULERS = "initial_lr"
"""The key that torch's schedulers add to the groups of their optimizer."""


def check_rates(optimizer: torch.optim.Optimizer, line: Mapping[str, Any], lr: float | None) -> None:
    """Check the learning rate that a step is given; without one, that nothing but parc sets those of an optimizer,
    which every update sets anew by the plan's ``line``.

    Raises:
        RunError: it is no rate, or a scheduler or a person's own code sets them.
    """
    if lr is not None:
        if not (math.isfinite(lr) and lr >= 0):
            help_ = "give a number of 0 or more, or leave `lr` out: the plan's `optimizer` line says it then"
            raise RunError(OTHER_RATE, f"`lr` of this step is {float(lr):g}, which is no learning rate", help_)
        return
    for group in optimizer.param_groups:
        if group["lr"] != group[_SET]:
            message = f"`lr` of the optimizer was set to {group['lr']:g}, and an update takes the plan's rate instead"
        elif _OF_SCHEDULERS in group:
            message = "a scheduler of torch sets `lr` of the optimizer, and an update takes the plan's rate instead"
        else:
            continue
        help_ = (
            f"write it in the plan, as `optimizer {line['name']} lr {line['lr']:g} warmup 100 cosine to 0 over 1000`,"
        )
        each = "or give it to each step: `session.step(batch, lr=scheduler.get_last_lr()[0])`"
        raise RunError(OTHER_RATE, message, f"{help_} {each}")


def rate(line: Mapping[str, Any], step: int) -> float:
    """Return the learning rate of a step, counted from 1. It rises in ``warmup`` steps, and then is constant, or falls
    to ``to``, which it reaches at step ``over``; if its shape is ``wsd``, in the last ``fall`` steps before. It is
    computed exactly from the decimals that a person wrote, and rounded once.

    >>> line = {"shape": "linear", "lr": 1.0, "warmup": 2, "to": 0.5, "over": 6}
    >>> [rate(line, step) for step in range(1, 8)]
    [0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    >>> [rate({**line, "shape": "wsd", "fall": 2}, step) for step in range(1, 8)]
    [0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.5]
    >>> rate({**line, "lr": 2e-4, "warmup": 10}, 3)  # 2e-4 * 3 / 10 is 6.000000000000001e-05 in floats
    6e-05
    """
    if line["shape"] == "table":
        return _between(line["table"], step)
    peak = _as_written(line["lr"])
    if step <= line["warmup"]:
        return float(peak * step / int(line["warmup"]))
    if line["shape"] == "constant":
        return float(peak)
    begins = line["over"] - line["fall"] if line["shape"] == "wsd" else line["warmup"]
    done = max(Fraction(0), min(Fraction(1), Fraction(step - begins, line["over"] - begins)))
    # a cosine is known to 15 digits
    left = _as_written(round((1 + math.cos(math.pi * done)) / 2, 15)) if line["shape"] == "cosine" else 1 - done
    to = _as_written(line["to"])
    return float(to + (peak - to) * left)


def _as_written(number: float) -> Fraction:
    """Return the shortest decimal that is read as a number."""
    return Fraction(repr(number))


def _between(table: Sequence[tuple[int, float]], step: int) -> float:
    """Return the rate of a step from a table of steps and rates.

    >>> [_between([(2, 1.0), (4, 0.0)], step) for step in range(1, 6)]
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """
    at = bisect_right(table, step, key=lambda row: row[0])
    if at in (0, len(table)):
        return float(table[max(at - 1, 0)][1])
    (begin, first), (end, last) = ((number, _as_written(lr)) for number, lr in table[at - 1 : at + 1])
    return float(first + (last - first) * (step - begin) / (end - begin))


def update(
    optimizer: torch.optim.Optimizer,
    line: Mapping[str, Any],
    step: int,
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    grad_norm: torch.Tensor | None,
    lr: float | None = None,
    units: Iterable[Sequence[str]] | None = None,
) -> None:
    """Do the update of a step, counted from 1, as the plan's ``line`` says, keep the weights before it where the line
    says so, and average the weights. Gradients are scaled so that their global norm is at most the line's ``clip``.
    ``lr`` replaces the line's rate. With ``units``, groups of names of parameters, one is updated after the other, so
    that no more than a unit's state is in use at a time."""
    _lay_out(optimizer, parameters)
    lr, clip, average = rate(line, step) if lr is None else lr, line["clip"], line.get(AVERAGE)
    for group in optimizer.param_groups:
        group["lr"] = group[_SET] = lr * group[_RATIO]
    clipped = [gradients[name] for name in parameters if name in gradients]
    if clip is not None and grad_norm is not None and clipped:
        torch._foreach_mul_(clipped, torch.clamp(clip / (grad_norm + 1e-6), max=1.0))
    for names in [list(parameters)] if units is None else units:
        for name in names:
            parameters[name].grad = _as_stored(gradients.get(name), parameters[name])
        changed = [parameters[name] for name in names if name in gradients]
        # torch makes the rest of a parameter's state only where there is none
        averaged = changed if average is not None else []
        begun = [(value, value.clone()) for value in averaged if AVERAGE not in optimizer.state[value]]
        with _beside(optimizer, [parameters[name] for name in names]):
            aside = _laid_aside(optimizer, changed) if PREVIOUS in line else []
            optimizer.step()
            for value, first in begun:
                optimizer.state[value][AVERAGE] = first
            for value, before in aside:
                optimizer.state[value][PREVIOUS] = before
            if average is not None and changed and not step % average["every"]:
                averages = [optimizer.state[value][AVERAGE] for value in changed]
                torch._foreach_lerp_(averages, changed, 1 - average["decay"])
        for name in names:
            parameters[name].grad = None


def _laid_aside(
    optimizer: torch.optim.Optimizer, values: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return weights with what they are before an update. That stays in its place in memory, because the next step has
    begun with it and may hold views of it; the update writes where the weights before it were."""
    pairs = []
    for value in values:
        before = optimizer.state[value].get(PREVIOUS)
        before = value.clone() if before is None else before.copy_(value)
        before.data, value.data = value.data, before.data
        pairs.append((value, before))
    return pairs


def read_by_steps(
    optimizer: torch.optim.Optimizer, line: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights that the next step computes with: its parameters, or, where the plan's ``line`` says so, those
    before the last update, which are the initial ones before the first. Those that the model's forward clamps are
    clamped in place."""
    read = {**parameters}
    if PREVIOUS in line:
        read = {name: optimizer.state.get(value, {}).get(PREVIOUS, value) for name, value in parameters.items()}
    clamp_weights(read, line)
    return read


def clamp_weights(weights: Mapping[str, torch.Tensor], line: Mapping[str, Any]) -> None:
    """Clamp weights to the limits that ``line`` has, as the model's forward does before it reads them."""
    with torch.no_grad():
        for name, (low, high) in line.get(WEIGHT_LIMITS, {}).items():
            if name in weights:
                weights[name].clamp_(low, high)


def _lay_out(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Copy into C order what a person's own code, such as ``load_state_dict``, put in the place of parameters or of
    their state: the fused update walks all of them with one index."""
    for parameter in parameters.values():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        slots = optimizer.state.get(parameter, {})
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor) and not value.is_contiguous():
                slots[slot] = value.contiguous()


def _as_stored(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient on its parameter's device, and laid out in memory like it: the fused update walks both with
    one index."""
    if gradient is None or (gradient.stride(), gradient.device) == (parameter.stride(), parameter.device):
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


@contextmanager
def _beside(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Enter a block in which the optimizer's state is on its parameters' devices: tensors on other devices are copied
    there, and back at the end."""
    away = [
        (optimizer.state[parameter], slot, value, parameter.device)
        for parameter in parameters if parameter in optimizer.state
        for slot, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device
    ]  # fmt: skip
    for state, slot, value, device in away:
        state[slot] = value.to(device)
    yield
    for state, slot, value, _ in away:
        state[slot] = value.copy_(state[slot])


def fill_slots(
    optimizer: torch.optim.Optimizer, line: Mapping[str, Any], name: str, parameter: torch.Tensor,
    zeros: Callable[[torch.Tensor], torch.Tensor],
) -> None:  # fmt: skip
    """Create the optimizer's state of the parameter of a name, as it is before the first step's update. ``zeros``
    returns a tensor of zeros like another, in the place where the state is kept."""
    if slots := {slot: zeros(parameter) for slot in kept_slots(line)}:
        for slot in slots.keys() & {*BESIDE}:
            slots[slot].copy_(parameter)
            clamp_weights({name: slots[slot]}, line)
        for slot, number in OPTIMIZERS[line["name"]].numbers.items():
            slots[slot] = torch.full((), number, dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = slots


def restore_optimizer(
    checkpoint: Checkpoint, line: Mapping[str, Any], forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, list[str]]:
    """Return the slots of the optimizer's state that a checkpoint holds for each parameter. ``line`` has the facts of
    the plan's optimizer; ``forms`` are the shapes and dtypes of the parameters.

    Raises:
        RunError: the state is another optimizer's, or differs from the parameters in shape or dtype; what does is
            named.
    """
    saved, name = checkpoint.facts.get("optimizer"), line["name"]
    tensors = kept_slots({key: value for key, value in line.items() if key not in BESIDE})
    wanted_slots = (*OPTIMIZERS[name].numbers, *(tensors or OPTIMIZERS[name].optional))
    if saved != name:
        raise RunError(
            BAD_STATE, f"`{checkpoint.folder}` holds the state of `{saved}`, but the plan's optimizer is `{name}`",
            "name the optimizer that the checkpoint was made with",
        )  # fmt: skip
    slots: dict[str, list[str]] = {}
    faults, steps = [], list[str]()
    for key, shape in checkpoint.shapes.items():
        kind, _, rest = key.partition(".")
        slot, _, owner = rest.partition(".")
        if kind != "optimizer":
            continue
        slots.setdefault(owner, []).append(slot)
        if owner not in forms or slot not in (*wanted_slots, *BESIDE):
            faults.append(f"`{key}` is no state of `{name}`")
        elif slot in OPTIMIZERS[name].numbers:
            is_number = shape == () and checkpoint.dtypes[key] == torch.float32
            faults += [] if is_number else [f"`{key}` is {_type_of(checkpoint, key)} there, not a number of float32"]
            steps += [key] * (slot == "step")
        elif (shape, checkpoint.dtypes[key]) != forms[owner]:
            wanted = f"{forms[owner][1]} {list(forms[owner][0])}".removeprefix("torch.")
            faults.append(f"`{key}` is {_type_of(checkpoint, key)} there, its parameter {wanted}")
    faults += [f"`{owner}` has {', '.join(f'`{slot}`' for slot in held)} alone, not all of {', '.join(wanted_slots)}"
               for owner, held in slots.items() if {*held} - {*BESIDE} and not {*wanted_slots} <= {*held}]  # fmt: skip
    if not faults:
        with checkpoint.tensors() as files:
            done = {key: float(files.whole(key)) for key in steps}
        faults = [
            f"`{key}` is {value}, which is no number of steps" for key, value in done.items() if not 0 <= value < 2**53
        ]
    refuse(checkpoint.folder, "holds a state of the optimizer that does not fit the model", faults)
    unused = {slot for slot in BESIDE if slot not in line}
    return {owner: [slot for slot in held if slot not in unused] for owner, held in slots.items()}


_NOTES = {
    AVERAGE: (
        "the checkpoint's averages of weights are not used: the plan has no `ema` line",
        "the checkpoint has no averages of weights: those of the plan's `ema` line start as its weights",
    ),
    PREVIOUS: (
        "the checkpoint's weights before the last update are not used: the plan's schedule is not `async`",
        "the checkpoint has no weights before the last update: the first step of `schedule async` computes with its"
        " weights, as after an initialization",
    ),
}
"""The notes on what is kept beside an optimizer's state: in a checkpoint that has it alone, and in a plan that does."""


def slot_notes(checkpoint: Checkpoint, line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on what only one of the checkpoint and the plan's ``line`` keeps beside the optimizer's state."""
    there = {slot for slot in BESIDE if any(name.startswith(f"optimizer.{slot}.") for name in checkpoint.shapes)}
    return tuple(_NOTES[slot][slot in line] for slot in BESIDE if (slot in there) != (slot in line))


def _type_of(checkpoint: Checkpoint, key: str) -> str:
    return f"{checkpoint.dtypes[key]} {list(checkpoint.shapes[key])}".removeprefix("torch.")
