"""Values of a step beside the model's own: the loss scale, the terms of the loss, residuals of compressed gradients,
and the loads of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .binding import COUNT, Binding

# ---- the loss scale
# The loss is multiplied by it before backward, so that small gradients of float16 do not become zero, and gradients are
# divided by it before anything else reads them. A *dynamic* one is part of the state of steps: it grows after many good
# steps, and falls after a step whose gradients are not finite, which is skipped. The numbers and the rule are those of
# ``torch.amp.GradScaler`` (torch/amp/grad_scaler.py and ``_amp_update_scale_`` in ATen).


LossScale = float | Literal["dynamic"] | None
"""A plan's loss scale: a fixed number, ``dynamic``, or none."""
DYNAMIC: Literal["dynamic"] = "dynamic"
LOSS_SCALE, GOOD_STEPS, SKIPPED_STEPS = (
    Binding("state", "loss_scale"), Binding("state", "good_steps"), Binding("state", "skipped_steps"),
)  # fmt: skip
"""The loss scale, the number of steps since it changed or would have, and the number of all skipped steps."""
INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""The defaults of ``torch.amp.GradScaler``."""
NEXT_SCALE = "parc.next_loss_scale.default"
"""The operator that updates a dynamic loss scale by the norm of a step's gradients."""


class StateRow(NamedTuple):
    """A number in the state of steps: its type, and its value before the first step."""

    dtype: str
    initial: float


SCALER: Mapping[Binding, StateRow] = {
    LOSS_SCALE: StateRow("float32", INITIAL),
    GOOD_STEPS: StateRow("int64", 0),
    SKIPPED_STEPS: StateRow("int64", 0),
}
"""The state of a dynamic loss scale. A fixed one is ``LOSS_SCALE`` alone, which no program changes."""


def initial_state(loss_scale: LossScale) -> dict[str, float]:
    """Return the state of steps before the first one, by name, for a ``dynamic`` loss scale, a fixed one, or none.

    >>> initial_state("dynamic"), initial_state(1024.0)
    ({'loss_scale': 65536.0, 'good_steps': 0, 'skipped_steps': 0}, {'loss_scale': 1024.0})
    """
    if loss_scale == DYNAMIC:
        return {key.name: row.initial for key, row in SCALER.items()}
    return {} if loss_scale is None else {LOSS_SCALE.name: float(loss_scale)}


# ---- the terms of a loss


class LossTerm(NamedTuple):
    """A term of a plan's loss: ``factor`` times a number that the model's outputs give. ``kind`` is ``cross_entropy``,
    ``output`` or ``callable``; ``ignore`` is the class that a cross entropy does not count. A term with a ``divisor``,
    a number or the name of an input, is a sum over the whole batch, and a step divides it once."""

    kind: str
    target: str
    operands: tuple[str, ...]
    ignore: int | None = None
    factor: float = 1.0
    divisor: float | str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The names that the term reads: `output`, what it is an entry of, or inputs."""
        return (*self.operands, self.divisor) if isinstance(self.divisor, str) else self.operands


class Division(NamedTuple):
    """The divisor of a term of the loss in a step: of the sum of its values, or numerators, over microbatches. ``by``
    the number of microbatches it is their ``mean``, and by 1 their ``sum``; ``count`` is the term's count of the whole
    step, at ``least`` so much, ``plus`` a number."""

    by: Literal["count", "sum", "mean"] = "mean"
    least: float | None = None
    plus: float = 0.0

    def of(self, count: float) -> float:
        """Return the divisor, where the term's count of the step is so much."""
        return (count if self.least is None else max(count, self.least)) + self.plus


def base_term(divisions: Sequence[Division]) -> int:
    """Return the number, from 1, of the term by whose divisor a step divides the whole loss: the first with a count,
    or else the first that is averaged.

    >>> base_term([Division("sum"), Division("mean"), Division("count")])
    3
    """
    kinds = [division.by for division in divisions]
    return next((kinds.index(by) + 1 for by in ("count", "mean") if by in kinds), 1)


def terms_with_weights(divisions: Sequence[Division]) -> list[int]:
    """Return the numbers of the terms that F multiplies by a weight: those with another divisor than the base's."""
    base = base_term(divisions)
    by = divisions[base - 1].by if divisions else ""
    numbered = enumerate(divisions, 1)
    return [number for number, other in numbered if number != base and (by == "count" or other.by != by)]


def divisors(
    divisions: Sequence[Division], counts: Mapping[Binding, float], microbatches: int
) -> tuple[float, dict[str, float]]:
    """Return the number by which a step divides the whole loss, and the weights of its terms by their numbers, from the
    ``counts`` of the whole step."""

    def divisor_of(number: int) -> float:
        division = divisions[number - 1]
        if division.by == "count":
            return division.of(counts[COUNT if number == base else term_count(number)])
        return float(microbatches) if division.by == "mean" else 1.0

    base = base_term(divisions)
    whole = divisor_of(base) if divisions else 1.0
    return whole, {str(number): whole / divisor_of(number) for number in terms_with_weights(divisions)}


def divisions_in(manifest: Mapping[str, Any]) -> tuple[Division, ...]:
    """Return the divisions of the terms of a build's loss, in their order."""
    return tuple(Division(**fact) for fact in manifest["divisions"])


def term_count(number: int | str) -> Binding:
    """Return the binding of the count that divides a term other than the base, such as a cross entropy's targets."""
    return Binding("count", str(number))


def term_weight(number: int) -> Binding:
    """Return the binding of the number by which F multiplies a term; terms are numbered from 1.

    A step divides the whole loss by the divisor of its *base* term. F therefore multiplies every term with another
    divisor by that of the base over its own.
    """
    return Binding("term", str(number))


# ---- residuals: what rounding left of compressed gradients, which the next step adds to its own (error feedback)


_RESIDUAL = "residual."


def residual(parameter: str) -> Binding:
    """Return the binding of the residual of a parameter's gradient.

    >>> str(residual("head.weight"))
    'state residual.head.weight'
    """
    return Binding("state", _RESIDUAL + parameter)


def residual_of(binding: Binding | None) -> str:
    """Return the parameter whose gradient a residual belongs to; "" for any other binding."""
    if binding is None or binding.kind != "state" or not binding.name.startswith(_RESIDUAL):
        return ""
    return binding.name.removeprefix(_RESIDUAL)


# ---- the loads of experts


LOAD = Binding("metric", "load")
"""The loads of all layers in a step, joined in the order of the reference program's results."""
TAKEN = ".taken"
"""The end of the name of a load that counts only tokens that got a slot, where experts have a capacity."""


class Bias(NamedTuple):
    """The bias that a router adds to the scores of experts before it chooses: a ``buffer`` of the model, and the
    ``rate`` by which a step moves it."""

    buffer: str
    rate: float


def capacities_in(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return the capacities of a build's experts, by their modules."""
    layers = manifest.get("experts", {}).items()
    return {module: fact["capacity"] for module, fact in layers if fact["capacity"] is not None}


def biases_in(manifest: Mapping[str, Any]) -> dict[str, Bias]:
    """Return the biases that a build's steps move, by the module of the experts."""
    layers = manifest.get("experts", {}).items()
    return {module: Bias(fact["buffer"], fact["rate"]) for module, fact in layers if fact["buffer"] is not None}
