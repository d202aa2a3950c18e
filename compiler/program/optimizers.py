"""Optimizers of ``torch.optim`` that update a parameter entry by entry, so that each rank can update its own shard.

One row says all that parc knows of an optimizer. Its defaults and its arithmetic are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BETAS = ("betas", "eps")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """An optimizer: its class in ``torch.optim``, the clauses of a line that it takes, and further arguments."""

    torch_class: str
    clauses: tuple[str, ...] = _BETAS
    arguments: Mapping[str, type] = field(default_factory=dict)
    """The further arguments, with the types of their values."""
    tensors: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """The names of its state tensors, which have the parameter's shape."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """More such names, each with the clause or the argument that needs it."""
    numbers: Mapping[str, float] = field(default_factory=lambda: {"step": 0.0})
    """The names of its state that are one number, with their first values."""
    fused: bool = False
    """True where torch updates all parameters in one kernel, which parc then takes. It needs no temporaries."""
    moves_by_rate: bool = True
    """True where an update moves an entry by about the learning rate, however small its gradient is."""
    temporaries: Callable[[Mapping[str, Any]], int] = lambda settings: 0
    """The most temporaries, each as large as the parameter, that torch's update holds at once with these settings."""
    eps: float = 1e-8
    weight_decay: float = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        """All names of its state."""
        return (*self.numbers, *self.tensors, *self.optional)


def _decays(settings: Mapping[str, Any]) -> bool:
    """Return whether an update adds weight decay to the gradients, in a copy of them."""
    return settings["weight_decay"] != 0 and not settings.get("decoupled_weight_decay", False)


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        torch_class="AdamW", arguments={"amsgrad": bool}, optional={"max_exp_avg_sq": "amsgrad"}, fused=True,
        weight_decay=0.01,
    ),
    "sgd": OptimizerRow(
        torch_class="SGD", clauses=("momentum", "nesterov"), arguments={"dampening": float}, tensors=(), numbers={},
        optional={"momentum_buffer": "momentum"}, moves_by_rate=False, temporaries=_decays,
    ),
    "adam": OptimizerRow(
        torch_class="Adam", arguments={"amsgrad": bool}, optional={"max_exp_avg_sq": "amsgrad"}, fused=True
    ),
    "nadam": OptimizerRow(
        torch_class="NAdam", arguments={"momentum_decay": float, "decoupled_weight_decay": bool},
        numbers={"step": 0.0, "mu_product": 1.0}, temporaries=lambda settings: 1 + _decays(settings),
    ),
    "radam": OptimizerRow(
        torch_class="RAdam", arguments={"decoupled_weight_decay": bool}, temporaries=lambda settings: 1
    ),
    "adamax": OptimizerRow(torch_class="Adamax", tensors=("exp_avg", "exp_inf"), temporaries=lambda settings: 1),
    "adagrad": OptimizerRow(
        torch_class="Adagrad", clauses=("eps",), arguments={"lr_decay": float}, tensors=("sum",), eps=1e-10,
        temporaries=lambda settings: 2,
    ),
    "adadelta": OptimizerRow(
        torch_class="Adadelta", clauses=("eps",), arguments={"rho": float}, tensors=("square_avg", "acc_delta"),
        eps=1e-6, moves_by_rate=False, temporaries=lambda settings: 2 + _decays(settings),
    ),
    "rmsprop": OptimizerRow(
        torch_class="RMSprop", clauses=("eps", "momentum"), arguments={"alpha": float, "centered": bool},
        tensors=("square_avg",), optional={"momentum_buffer": "momentum", "grad_avg": "centered"},
        temporaries=lambda settings: 1 + _decays(settings),
    ),
}  # fmt: skip
NOT_BY_ENTRY = {
    "adafactor": "scales an entry by the means of its row and column",
    "lbfgs": "takes the loss several times in a step",
    "muon": "updates an entry of a matrix from all others",
    "sparseadam": "reads sparse gradients",
}
"""Optimizers of torch that do not update entry by entry, with the reason."""
NUMBERS = {name: first for row in OPTIMIZERS.values() for name, first in row.numbers.items()}
"""The names of state that is one number, with their first values."""
AVERAGE = "ema"
"""The name of a parameter's moving average among the optimizer's state, and of its facts in a line's."""
PREVIOUS = "previous"
"""The name of a parameter before its last update among the optimizer's state, and of the fact that steps compute with
it."""
WEIGHT_LIMITS = "limits"
"""The name of the facts of parameters that a step clamps before it computes with them."""
BESIDE = (AVERAGE, PREVIOUS)
"""The names of what is kept beside the state of torch's own optimizer. It begins as the parameter."""


def kept_slots(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the tensors that an update keeps of each parameter, for its line's facts."""
    row, settings = OPTIMIZERS[line["name"]], {**line, **line.get("arguments", {})}
    optional = (name for name, argument in row.optional.items() if settings.get(argument))
    return (*row.tensors, *optional, *(slot for slot in BESIDE if slot in line))


# ---- units of an update

UNIT_BYTES = 1 << 20
"""The bytes up to which small parameters are updated together: fewer calls, and hardly any memory."""


def update_units(sizes: Mapping[str, int]) -> list[list[str]]:
    """Return consecutive parameters as the units of an update, given the bytes of each. One unit is updated after the
    other, so temporaries are those of one. A unit has no more bytes than the largest parameter, which is a unit anyway,
    or than ``UNIT_BYTES``.

    >>> update_units({"embed": 8 << 20, "up": 5 << 20, "bias": 1 << 10, "down": 5 << 20, "norm": 1 << 10})
    [['embed'], ['up', 'bias'], ['down', 'norm']]
    """
    most = max((UNIT_BYTES, *sizes.values()))
    units, room = list[list[str]](), 0
    for name, size in sizes.items():
        if not units or size > room:
            units.append([])
            room = most
        units[-1].append(name)
        room -= size
    return units


def update_bytes(line: Mapping[str, Any], sizes: Mapping[str, int], loaded: int) -> int:
    """Return the most bytes that an update holds at once beside parameters, gradients and state, given the facts of the
    plan's optimizer and the bytes of each parameter: the temporaries of one unit, and the ``loaded`` tensors of state
    of each of its parameters."""
    row, settings = OPTIMIZERS[line["name"]], {**line, **line.get("arguments", {})}
    changes = {name: group["set"] for group in line["groups"] for name in group["parameters"]}
    takes = {name: loaded + row.temporaries({**settings, **changes.get(name, {})}) for name in sizes}
    return max((sum(takes[name] * sizes[name] for name in unit) for unit in update_units(sizes)), default=0)


# ---- parameter groups

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups: each has the names of its parameters and the arguments that are set for them."""


def grouped(lines: Iterable[tuple[Mapping[str, Any], Iterable[str]]]) -> Groups:
    """Return the parameter groups of lines. A line sets arguments for parameters; the last line that sets an argument
    counts.

    >>> for group in grouped([({"lr": 0.1}, ["a", "b"]), ({"weight_decay": 0.0}, ["b", "c"]), ({"lr": 0.2}, ["c"])]):
    ...     print(group["parameters"], group["set"])
    ['a'] {'lr': 0.1}
    ['b'] {'lr': 0.1, 'weight_decay': 0.0}
    ['c'] {'lr': 0.2, 'weight_decay': 0.0}
    """
    of_parameter: dict[str, dict[str, Any]] = {}
    for arguments, names in lines:
        for name in names:
            of_parameter.setdefault(name, {}).update(arguments)
    groups: list[dict[str, Any]] = []
    for name, arguments in sorted(of_parameter.items()):
        arguments = dict(sorted(arguments.items()))
        group = next((group for group in groups if group["set"] == arguments), None)
        if group is None:
            groups.append(group := {"parameters": [], "set": arguments})
        group["parameters"].append(name)
    return groups
