"""The messages of a role's step: received ahead of their readers, and held until they are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ..compiler.program.actions import ACTIONS, Action
from .communication import Backend, Message, Sending
from .machine.execute import Machine
from .work import Work


class Mail:
    """The messages between the stages of a role, which its ``actions`` name, and the stages of other roles along
    ``axis``."""

    def __init__(self, machines: Mapping[str, Machine], backend: Backend, axis: str, actions: Sequence[Action]) -> None:
        self.machines, self.backend, self.axis = machines, backend, axis
        self.stages = {action.stage for action in actions if action.works}
        self._receives: dict[Message, Callable[[], list[list[torch.Tensor]]]] = {}
        self._sends: list[Sending] = []

    def begin(self) -> None:
        """Forget all that an earlier step left."""
        self._receives, self._sends = {}, []

    def machine(self, action: Action, kind: str) -> str:
        """Return the name of the program of a stage's work."""
        return f"{action.stage}{kind}" if self.axis else kind

    def post(self, action: Action) -> None:
        """Start to receive the message that an action waits for, unless it was started."""
        message = Message.of(action, self.axis)
        if message not in self._receives:
            machine = self.machines[self.machine(action, message.kind)]
            types = [value.type for value in machine.program.main.bound("received").values()]
            like = [(type_.local(machine.mesh), machine.dtype(type_.dtype)) for type_ in types]
            self._receives[message] = self.backend.receive(message, like)

    def receive(self, action: Action, work: Sequence[Work]) -> None:
        """Wait for a message, and keep its tensors."""
        message = Message.of(action, self.axis)
        self._keep(replace(action, kind=message.kind), work, self._receives.pop(message)())

    def _keep(self, action: Action, work: Sequence[Work], pieces: Sequence[Sequence[torch.Tensor]]) -> None:
        """Keep received tensors for some work of a stage."""
        main = self.machines[self.machine(action, action.kind)].program.main
        keys = [binding for binding in main.bindings if binding.kind == "received"]
        for w, tensors in zip(work, pieces, strict=True):
            w.kept[action.stage, action.kind, action.microbatch] = dict(zip(keys, tensors, strict=True))

    def hand_on(self, action: Action, work: Sequence[Work]) -> int | None:
        """Give the results of work to the next stage if that is the role's own, so that nothing is sent. Return that
        stage."""
        to = action.stage + ACTIONS[action.kind].to
        if not self.axis or to == action.stage or to not in self.stages:
            return None
        pieces = [w.sent.pop((action.stage, action.kind, action.microbatch), []) for w in work]
        self._keep(replace(action, stage=to), work, pieces)
        return to

    def send(self, action: Action, work: Sequence[Work]) -> None:
        """Start to send the results of work."""
        message = Message.of(action, self.axis)
        pieces = [w.sent.pop((action.stage, message.kind, action.microbatch), []) for w in work]  # nothing may flow
        self._sends = [sending for sending in self._sends if not sending.done()]
        self._sends.append(self.backend.send(message, pieces))

    @property
    def sending(self) -> bool:
        """True where a message that was sent is not known to be taken."""
        return bool(self._sends)

    def settle(self) -> None:
        """Wait until all messages are taken: the tensors may then be written over."""
        for sending in self._sends:
            sending.wait()
        self._sends = []
