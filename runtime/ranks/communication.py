"""Communication as programs and action lists see it: messages, collectives, and lost peers."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...compiler.layout.mesh import Shape
from ...compiler.program.actions import ACTIONS, Action, send_kind
from ...compiler.program.binding import Binding

Environment = dict[str, Any]
"""The values of a running program by name: tensors, and the totals that gradients are added to."""
Arrival = Callable[[], object]
"""A function that waits for a value that is in flight."""
RingPart = Generator[list[torch.Tensor], Callable[[], list[torch.Tensor]], list[torch.Tensor]]
"""A rank's part of a ring of ranks. It yields tensors for the next rank, and gets a function that waits for those of
the rank before it and returns them; it may compute between. It returns its results."""
BoundTensors = dict[Binding, Any]
"""Tensors by their binding: the inputs and the results of a program."""


def arrival_name(name: str) -> str:
    """Return the name under which an environment holds the ``Arrival`` of a value."""
    return f"arrival of {name}"


def wait_for_nothing() -> None:
    """Do nothing: the ``Arrival`` of a value that is there."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message between neighbouring stages over a mesh axis: results of the work of ``kind`` that stage ``stage`` did.
    Those of ``F`` go to the stage after it, those of ``B`` to the one before it. It prints as the action that sends
    it."""

    axis: str
    stage: int
    kind: str
    microbatch: int

    @classmethod
    def of(cls, action: Action, axis: str) -> Message:
        """The message that an action sends or receives."""
        row = action.message
        assert row is not None, f"{action} is no message"
        return cls(axis, action.stage if row.sends else action.stage + row.to, row.work, action.microbatch)

    @property
    def receiver(self) -> int:
        """The stage that the message goes to."""
        return self.stage + ACTIONS[self.kind].to

    def __str__(self) -> str:
        return f"{self.stage}{send_kind(self.kind)}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Sending:
    """A message that is being sent, with the tensors that it must keep alive. ``done`` returns whether it is known to
    be taken, so that ``wait`` returns at once. ``wait`` waits until it is, and its tensors may be written over; it
    raises ``PeerLost`` if it never is."""

    tensors: Sequence[torch.Tensor]
    done: Callable[[], bool]
    wait: Callable[[], None]


_GLOO_NOISE = re.compile(r"^\[\S+:\d+\] |\s*GLHF!.*$", re.DOTALL)
"""The words that gloo writes around an error: a line of its source, and a wish."""


class PeerLost(RuntimeError):
    """The error of a rank that lost another: that rank ended, or took too long. ``what`` says who waited for what;
    ``why`` is the backend's error, without the words that gloo writes around it."""

    def __init__(self, what: str, why: object) -> None:
        super().__init__(f"{what}: {_GLOO_NOISE.sub('', str(why))}")
        self.what, self.why = what, why

    def during(self, work: str) -> PeerLost:
        """Return the same error with the place where it happened."""
        return PeerLost(f"{self.what} in {work}", self.why)


class Backend(Protocol):
    """A way in which ranks communicate. ``pieces`` are the operands of this process's ranks; results come back in the
    same order."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that this process computes."""

    def collective(
        self, op: str, args: Sequence[Any], pieces: Sequence[torch.Tensor], spare: bool = False
    ) -> tuple[list[torch.Tensor], Arrival | None]:
        """Start a collective over all ranks of its groups. Return the results, and a function to call before they are
        read, or None. ``spare``: the pieces may be written over."""

    def message(
        self, op: str, args: Sequence[Sequence[Any]], pieces: Sequence[Sequence[torch.Tensor]],
        spare: Sequence[bool] = (),
    ) -> tuple[list[list[torch.Tensor]], Arrival | None]:  # fmt: skip
        """Start one message of several tensors, each with its own arguments of the collective. Return the results of
        each, and a function to call before they are read, or None. ``spare`` says of each tensor whether it may be
        written over."""

    def run_ring(self, op: str, axes: tuple[str, ...], parts: Sequence[RingPart]) -> list[list[torch.Tensor]]:
        """Run the parts of this process's ranks in rings over some axes, and return their results."""

    def send(self, message: Message, pieces: Sequence[Sequence[torch.Tensor]]) -> Sending:
        """Start to send the tensors of each rank, without waiting for the receivers."""

    def receive(
        self, message: Message, like: Sequence[tuple[Shape, torch.dtype]]
    ) -> Callable[[], list[list[torch.Tensor]]]:
        """Start to receive tensors of these local shapes on each rank. Return a function that waits for them and
        returns them; it may raise ``PeerLost``."""
