"""The tensors of one rank: its state between steps, the values that it gathers during a step, and the step's
results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...compiler.program.binding import BUFFERS, PARAMETERS, Binding, Kind
from ...grammar.codes import RESULT_TAKEN
from .communication import Arrival, BoundTensors, Environment
from .faults import RunError

WorkKey = tuple[int, str, int]
"""The key of values that are kept between actions: a stage, its ``F`` or ``B``, and a microbatch."""
Batch = Mapping[str, Tensor]
"""One microbatch of one rank: its part of each input."""


@dataclass(slots=True)
class RankState:
    """The state of one rank between steps: its pieces of parameters and buffers, and the state of the steps themselves,
    by name."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Work:
    """The work of one rank in a ``step``: its state, its part of each microbatch, and the values that actions pass on.
    ``keep`` is False where there is no backward to read what F saves. ``begun`` is True once that is done which may be
    done beside the step before."""

    state: RankState
    parts: Sequence[Batch]
    keep: bool
    step: int = 0
    begun: bool = False
    totals: BoundTensors = field(default_factory=dict)
    kept: dict[WorkKey, BoundTensors] = field(default_factory=dict)
    sent: dict[WorkKey, list[Tensor]] = field(default_factory=dict)
    results: BoundTensors = field(default_factory=dict)
    counted: Environment = field(default_factory=dict)
    """The count of targets over all ranks by SCALE's name for it, if it is known without a collective."""
    arriving: dict[Binding, Arrival] = field(default_factory=dict)
    """The functions that wait for gradients whose reductions are in flight, and weights whose gathers are."""
    exclusive: set[Binding] = field(default_factory=set)
    """The totals that share storage with nothing, to which later parts are added in place."""
    returns: bool = True
    """False where the tensors that the model returns are not asked for."""
    returned: dict[str, list[Tensor]] = field(default_factory=dict)
    """The rank's parts of the returned tensors, by name and microbatch."""

    def total(self, key: Binding, value: Tensor, exclusive: bool = False) -> None:
        """Add a microbatch's part to its total. ``exclusive`` says that nothing else shares its storage."""
        total = self.totals.get(key)
        if total is None:
            self.totals[key] = value
        elif key in self.exclusive:
            total.add_(value)
        else:
            self.totals[key], exclusive = total + value, True
        if exclusive:
            self.exclusive.add(key)

    def exclusive_totals(self, keys: Iterable[Binding]) -> BoundTensors:
        """Return the totals to which more may be added in place."""
        return {key: self.totals[key] for key in keys if key in self.exclusive}

    def keep_sent(self, key: WorkKey, results: BoundTensors) -> None:
        """Keep the results that are for another stage."""
        if sent := [value for binding, value in results.items() if binding.kind == "sent"]:
            self.sent[key] = sent

    def unshare_gradients(self, others: Iterable[Tensor]) -> None:
        """Clone gradients that overlap another one or ``others``, so that REDUCE may write over each. Parts of one
        bucket do not overlap. A gradient whose reduction is in flight stays where it arrives."""
        taken: dict[int, list[range]] = {other.untyped_storage().data_ptr(): [_ALL] for other in others}
        gradients = [key for key in self.totals if key.kind == "gradient"]
        for key in sorted(gradients, key=lambda key: key not in self.arriving):
            value = self.totals[key]
            spans, bytes_ = taken.setdefault(value.untyped_storage().data_ptr(), []), _bytes_of(value)
            overlaps = any(bytes_.start < span.stop and span.start < bytes_.stop for span in spans)
            if overlaps and key not in self.arriving:
                self.totals[key] = value.clone()
            else:
                spans.append(bytes_)


_ALL = range(1 << 63)
"""All bytes of a storage."""


def _bytes_of(tensor: Tensor) -> range:
    """Return the range of bytes of its storage that a tensor may use."""
    begin = tensor.storage_offset() * tensor.itemsize
    return range(begin, begin + tensor.nbytes) if tensor.is_contiguous() else _ALL


def bind(binding: Binding, work: Work, extra: BoundTensors) -> Tensor:
    """Return a rank's tensor for a binding of a program's parameter."""
    if binding in extra:
        return extra[binding]  # type: ignore[no-any-return]
    if binding.kind in PARAMETERS:
        return work.state.parameters[binding.name]
    if binding.kind in BUFFERS:
        return work.state.buffers[binding.name]
    if binding.home == "state":
        return work.state.steps[binding.name]
    return work.results[binding] if binding in work.results else work.totals[binding]  # type: ignore[no-any-return]


def named(table: BoundTensors, kind: Kind) -> dict[str, Tensor]:
    """Return the tensors of one kind in a table, by their binding's name."""
    return {key.name: value for key, value in table.items() if key.kind == kind}


# ---- results of a step: one rank's before the update, and the report that all ranks have after it


@dataclass(slots=True)
class StepResult:
    """The results of a step on one rank, before its update: the loss (0 without one) and the gradients' norm before
    clipping (the same on all ranks), this rank's parts of the gradients, the numbers of other actions, and state of
    steps such as the loss scale.
    """

    loss: Tensor
    grad_norm: Tensor | None
    gradients: dict[str, Tensor]
    metrics: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    returned: dict[str, list[Tensor]] = field(default_factory=dict)
    """The rank's parts of the tensors that the model returns, by name and microbatch, where they were asked for."""
    taken: bool = False
    """True once an update has used it."""
    weights: object = None
    """The mark of the weights that it was computed with: a session makes another one when it changes them."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """A finished step, the same on every rank: its number (from 1), the loss of the whole batch, the gradients' norm
    before clipping, and the learning rate. ``metrics`` are further numbers by name, such as the imbalance of experts.
    ``skipped`` is True if a dynamic loss scale skipped the step. ``loads`` are the tokens of each expert by module.
    ``seconds``, ``waited_for_data`` and ``waited_for_ranks`` are a rank's own: the time of the step, and the parts of
    it in which the rank waited. On GPUs, waits for other ranks are not counted.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    loads: Mapping[str, Sequence[int]] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    waited_for_data: float = field(default=0.0, compare=False)
    waited_for_ranks: float = field(default=0.0, compare=False)


def consume(result: object, weights: object) -> None:
    """Note that an update uses a result of ``session.gradients``; ``weights`` is the mark of the session's weights.

    Raises:
        RunError: it is none, an update has used it before, or it was computed with other weights.
    """
    if not isinstance(result, StepResult):
        help_ = "write `session.update(session.gradients(batch))`; `session.step(batch)` does both"
        raise RunError(
            RESULT_TAKEN, f"an update takes what `session.gradients` returns, not {_words_for(result)}", help_
        )
    if result.taken:
        help_ = "give the result of another `session.gradients`; only `schedule microbatches` adds up batches"
        raise RunError(RESULT_TAKEN, "an update has used these gradients already", help_)
    if result.weights is not weights:
        message = "these gradients are of other weights: an update or a restore has changed the weights since"
        help_ = "update before the next `session.gradients`: `session.update(session.gradients(batch))`; only"
        raise RunError(RESULT_TAKEN, message, f"{help_} `schedule microbatches` adds up batches")
    result.taken = True


def _words_for(result: object) -> str:
    return "the report of a step" if isinstance(result, StepReport) else type(result).__name__
