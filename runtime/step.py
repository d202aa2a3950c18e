"""A step: the action list of a role walked on one or several ranks, from microbatches to reduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from ..compiler.actions import AHEAD, Action
from ..compiler.program import Program
from .execute import Backend, Environment, Machine, Message, PeerLost, Sending
from .holders import BUFFERS, PARAMETERS
from .trace import Recorder

Batch = Mapping[str, torch.Tensor]
"""One microbatch of one rank: its part of each input."""


@dataclass(slots=True)
class RankState:
    """What one rank holds between steps: its pieces of parameters and buffers, by name."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class StepResult:
    """Of one rank: the loss and the gradients' global norm (the same on all), and its pieces of the gradients."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepReport:
    """A finished step: its number (from 1), the global loss, the gradients' norm before clipping, the learning rate."""

    step: int
    loss: float
    grad_norm: float
    lr: float


Key = tuple[int, str, int]
"""What is kept between actions belongs to a stage, its ``F`` or ``B``, and a microbatch."""
_FORWARD = ("COUNT", "SCALE", "F", "SEND_F", "RECV_F")


class Stepper:
    """Runs the actions of a role's step up to its gradients; the update is the optimizer's. ``axis`` is the pipeline
    axis where the role has stages. With ``account`` it keeps the peak of what waits for backward."""

    def __init__(
        self,
        programs: Mapping[str, Program],
        actions: Sequence[Action],
        backend: Backend,
        device: torch.device,
        machine: Callable[..., Machine] = Machine,
        *,
        axis: str = "",
        recorder: Recorder | None = None,
        account: bool = False,
        **options: Any,
    ) -> None:
        self.actions, self.device, self.backend, self.axis = tuple(actions), device, backend, axis
        self.recorder = recorder
        self.account = account
        self.peak_saved_bytes: dict[int, int] = {}
        """With ``account``: the most bytes that one rank held for each stage's later actions, saved and received."""
        self.current: Action | None = None
        """What runs now, or ran last."""
        self._following: Action | None = None
        self._receives: dict[Message, Callable[[], list[list[torch.Tensor]]]] = {}
        self._sends: list[Sending] = []
        self._later: list[Callable[[], object]] = []
        options.setdefault("reuse", options.get("watch") is None)  # who watches may keep what it saw
        self.machines = {name: machine(program, backend, device, **options) for name, program in programs.items()}

    def gradients(self, states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int) -> list[StepResult]:
        """Loss and gradients of a step. ``batches[rank][microbatch]``; ``step`` counts from 0 and seeds dropout."""
        work = self._walk([action for action in self.actions if action.kind != "STEP"], states, batches, step)
        return [StepResult(w.results["loss"], w.results.get("grad_norm"), _strip(w.results, "gradient ")) for w in work]

    def loss(self, states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int) -> list[StepResult]:
        """The loss alone, of the same numbers; nothing is kept for a backward."""
        work = self._walk([a for a in self.actions if a.kind in _FORWARD], states, batches, step, keep=False)
        self._settle(step)
        self._reduce_loss(work)
        return [StepResult(w.results["loss"], None, {}) for w in work]

    def _walk(
        self, actions: Sequence[Action], states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int,
        keep: bool = True,
    ) -> list[_Work]:  # fmt: skip
        work = [_Work(state, parts, keep) for state, parts in zip(states, batches, strict=True)]
        self._receives, self._sends, self._later = {}, [], []
        for index, (action, following) in enumerate(pairwise([*actions, None])):
            assert action is not None
            self.current, self._following = action, following
            for coming in actions[index : index + 1 + AHEAD]:
                if coming.kind in ("RECV_F", "RECV_B"):
                    self._post(coming)
            handler = getattr(self, f"_{action.kind.lower().partition('_')[0]}")
            try:
                with self.recorded(str(action), "wait" if action.kind.startswith("RECV") else "work", step):
                    handler(action, step, work)
                if action.kind == "SEND_B" and self._later:
                    with self.recorded(str(replace(action, kind="B")), "work", step):
                        self._finish_later()
            except PeerLost as error:
                raise error.during(f"action {action} of step {step + 1}") from error
            except RuntimeError as error:
                error.add_note(f"in action {action} of step {step + 1}")
                raise
        return work

    def recorded(self, name: str, category: str, step: int) -> AbstractContextManager[None]:
        """Keep the time of what happens inside, where times are kept."""
        return nullcontext() if self.recorder is None else self.recorder.span(name, category, step)

    # ---- messages

    def _machine(self, action: Action, kind: str) -> str:
        """The name of the program of a stage's work."""
        return f"{action.stage}{kind}" if self.axis else kind

    def _post(self, action: Action) -> None:
        message = Message.of(action, self.axis)
        if message in self._receives:
            return
        machine = self.machines[self._machine(action, message.kind)]
        types = [value.type for value in machine.program.main.parameters if value.role.startswith("received ")]
        like = [(type_.local(machine.mesh), machine.dtype(type_.dtype)) for type_ in types]
        self._receives[message] = self.backend.receive(message, like)

    def _recv(self, action: Action, step: int, work: Sequence[_Work]) -> None:
        message = Message.of(action, self.axis)
        main = self.machines[self._machine(action, message.kind)].program.main
        names = [value.role for value in main.parameters if value.role.startswith("received ")]
        for w, tensors in zip(work, self._receives.pop(message)(), strict=True):
            w.kept[action.stage, message.kind, action.microbatch] = dict(zip(names, tensors, strict=True))
        self._note_saved(action.stage, work)

    def _send(self, action: Action, step: int, work: Sequence[_Work]) -> None:
        message = Message.of(action, self.axis)
        pieces = [w.sent.pop((action.stage, message.kind, action.microbatch), []) for w in work]  # nothing may flow
        self._sends = [sending for sending in self._sends if not sending.done()]
        self._sends.append(self.backend.send(message, pieces))

    def _finish_later(self) -> None:
        """Add up what a backward left for after it has sent."""
        for call in self._later:
            call()
        self._later.clear()

    def _settle(self, step: int) -> None:
        """Wait until all that was sent was taken: the tensors may be written over then."""
        if self._sends:
            with self.recorded("sends", "wait", step):
                for sending in self._sends:
                    sending.wait()
        self._sends = []

    def _note_saved(self, stage: int, work: Sequence[_Work]) -> None:
        """The bytes kept for a stage now, storages counted once; what the rank holds anyway does not count."""
        if not self.account:
            return
        for w in work:
            lasting = [w.state.parameters, w.state.buffers, *w.parts]
            known = {tensor.untyped_storage().data_ptr() for table in lasting for tensor in table.values()}
            kept = [tensor.untyped_storage() for key, table in w.kept.items() if key[0] == stage
                    for tensor in table.values()]  # fmt: skip
            sizes = {storage.data_ptr(): storage.nbytes() for storage in kept if storage.data_ptr() not in known}
            self.peak_saved_bytes[stage] = max(self.peak_saved_bytes.get(stage, 0), sum(sizes.values()))

    # ---- work

    def _run(
        self,
        name: str,
        work: Sequence[_Work],
        extra: Sequence[Environment] = (),
        totals: Sequence[Mapping[str, torch.Tensor]] = (),
        later: list[Callable[[], object]] | None = None,
    ) -> Iterator[tuple[_Work, Environment]]:
        """Each rank with what a program returns on it; ``extra`` is bound beside what the rank holds, and to ``totals``
        results are added, ``later`` where there is such a list."""
        machine = self.machines[name]
        given = [
            {value.name: _bind(value.role, w, more) for value in machine.program.main.parameters}
            for w, more in zip(work, extra or [{}] * len(work), strict=True)
        ]
        for more in extra:
            more.clear()  # values die within the program, after their last use
        return zip(work, machine.run(given, totals=totals, later=later), strict=True)

    def _inputs(self, action: Action, step: int, work: Sequence[_Work], *kinds: str) -> list[Environment]:
        """What a microbatch's work reads: its random numbers' place, its inputs, and what was kept for it."""
        rng = torch.tensor([step, action.microbatch], dtype=torch.int64)
        found: list[Environment] = []
        for w in work:
            found.append({"rng": rng, **{f"input {name}": t for name, t in w.parts[action.microbatch].items()}})
            for kind in kinds:
                found[-1] |= w.kept.pop((action.stage, kind, action.microbatch), {})
        return found

    def _count(self, action: Action, step: int, work: Sequence[_Work]) -> None:
        for w, made in self._run("COUNT", work, self._inputs(action, step, work)):
            w.total("count", made["count"])

    def _scale(self, action: Action, step: int, work: Sequence[_Work]) -> None:
        for w, made in self._run("SCALE", work):
            w.totals["scale"] = made["scale"]

    def _f(self, action: Action, step: int, work: Sequence[_Work]) -> None:
        for w, made in self._run(self._machine(action, "F"), work, self._inputs(action, step, work, "F")):
            if "loss" in made:
                w.total("loss", made["loss"])
            # never a view of a parameter, which the update changes, or of a batch, which is its owner's
            w.state.buffers.update((name, value.clone()) for name, value in _strip(made, "buffer ").items())
            w.hand_over((action.stage, "F", action.microbatch), made)
            if w.keep:
                w.kept[action.stage, "saved", action.microbatch] = {
                    k: v for k, v in made.items() if k.startswith("saved ")
                }
        self._note_saved(action.stage, work)

    def _b(self, action: Action, step: int, work: Sequence[_Work]) -> None:
        name = self._machine(action, "B")
        addable = self.machines[name].addable
        totals = [w.own_totals(addable) for w in work]
        inputs = self._inputs(action, step, work, "saved", "B")
        sends = self._following is not None and self._following.kind == "SEND_B"
        # a stage waits for what is sent, nobody for the weights' gradients; where other microbatches wait for their
        # backward, there may be no memory to keep what these are made of
        later = self._later if sends and not any(w.kept for w in work) else None
        for w, made in self._run(name, work, inputs, totals, later):
            for parameter, gradient in w.hand_over((action.stage, "B", action.microbatch), made).items():
                w.total(f"gradient {parameter}", gradient, parameter in addable)

    def _reduce(self, action: Action, step: int, work: Sequence[_Work]) -> None:
        self._settle(step)
        for w in work:
            w.own([*w.state.parameters.values(), *w.state.buffers.values(), *w.parts[-1].values()])
        for w, made in self._run("REDUCE", work):
            w.results = made

    def _reduce_loss(self, work: Sequence[_Work]) -> None:
        """The loss's part of REDUCE, where there are no gradients."""
        machine = self.machines["REDUCE"]
        main = machine.program.main
        result = main.values()[dict(main.returns)["loss"]].type
        nothing = torch.zeros((), dtype=machine.dtype(result.dtype), device=self.device)
        pieces = [w.totals.get("loss", nothing) for w in work]
        partial = [value.type.placement.partial for value in main.parameters if value.role == "loss"]
        own = [axis for axes in partial for axis in axes if axis != self.axis]
        for axes in (",".join(own), self.axis):
            if axes:
                pieces, arrival = self.backend.collective("parc.all_reduce", [axes], pieces)
                if arrival is not None:
                    arrival()
        for w, piece in zip(work, pieces, strict=True):
            w.results = {"loss": piece * w.totals["scale"]}


@dataclass(slots=True)
class _Work:
    """What one rank has and gathers during a step: its state, its part of each microbatch; ``keep`` what backward
    reads."""

    state: RankState
    parts: Sequence[Batch]
    keep: bool
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: dict[Key, dict[str, torch.Tensor]] = field(default_factory=dict)
    sent: dict[Key, list[torch.Tensor]] = field(default_factory=dict)
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)
    """Keys of totals with storage of their own, to which later parts are added."""

    def total(self, key: str, value: torch.Tensor, own: bool = False) -> None:
        """Add a microbatch's part, unless it was added as it was made; ``own`` where its storage is nothing else's."""
        total = self.totals.get(key)
        if total is value:
            return
        if total is None:
            self.totals[key] = value
        elif key in self.owned:
            total.add_(value)
        else:
            self.totals[key], own = total + value, True
        if own:
            self.owned.add(key)

    def own_totals(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Totals of gradients, by the parameter's name, to which more may be added."""
        return {name: self.totals[key] for name in names if (key := f"gradient {name}") in self.owned}

    def hand_over(self, key: Key, made: Environment) -> Environment:
        """Put what goes to another stage aside; the rest."""
        if sent := [value for name, value in made.items() if name.startswith("sent ")]:
            self.sent[key] = sent
        return {name: value for name, value in made.items() if not name.startswith("sent ")}

    def own(self, others: Iterable[torch.Tensor]) -> None:
        """Give every gradient storage of its own, so that REDUCE may write over it."""
        taken = {other.untyped_storage().data_ptr() for other in others}
        for key, value in self.totals.items():
            if key.startswith("gradient "):
                if value.untyped_storage().data_ptr() in taken:
                    value = self.totals[key] = value.clone()
                taken.add(value.untyped_storage().data_ptr())


def _bind(role: str, work: _Work, extra: Environment) -> torch.Tensor:
    """What a program's parameter of a role is bound to."""
    kind, _, name = role.partition(" ")
    if role in extra:
        return extra[role]  # type: ignore[no-any-return]
    if kind in PARAMETERS:
        return work.state.parameters[name]
    if kind in BUFFERS:
        return work.state.buffers[name]
    return work.totals[role]


def _strip(table: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in table.items() if key.startswith(prefix)}
