"""A step: a role's actions run in order on one or several ranks, from microbatches to reduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..compiler.analysis.dataflow import parts_in_weights
from ..compiler.layout.collectives import COLLECTIVES
from ..compiler.program.actions import (
    ACTIONS,
    AHEAD,
    BACKWARD,
    COUNTING,
    FORWARD,
    INPUT_GRADIENTS,
    REDUCE,
    SCALING,
    STEP,
    UNSHARD,
    WEIGHT_GRADIENTS,
    Action,
    direction_of,
    kinds_to,
    one_step,
)
from ..compiler.program.binding import COUNT, GRAD_NORM, LOSS, RNG, Binding, Kind
from ..compiler.program.program import Function, Program
from .machine.execute import Machine
from .ranks.communication import Arrival, Backend, BoundTensors, Message, PeerLost, Sending, wait_for_nothing
from .ranks.waits import Recorder, recorded
from .ranks.work import Batch, RankState, StepResult, Work, WorkKey, bind, named

# ---- messages between stages


def received_key(action: Action) -> WorkKey:
    """Return the key under which a stage keeps what it received for some work: one for B and I of a microbatch."""
    return action.stage, direction_of(action.kind), action.microbatch


class StageMessages:
    """The messages of a role's ``actions`` along the pipeline ``axis``: received ahead of their readers, and held until
    they are taken. Between two stages of one role nothing is sent."""

    def __init__(self, machines: Mapping[str, Machine], backend: Backend, axis: str, actions: Sequence[Action]) -> None:
        self.machines, self.backend, self.axis = machines, backend, axis
        self.stages = {action.stage for action in actions if action.works}
        self._receives: dict[Message, Callable[[], list[list[torch.Tensor]]]] = {}
        self._sends: list[Sending] = []

    def begin(self) -> None:
        """Forget the messages of an earlier step, which an error may have left."""
        self._receives, self._sends = {}, []

    def machine(self, action: Action, kind: str) -> str:
        """Return the name of the program of a stage's work."""
        return f"{action.stage}{kind}" if self.axis else kind

    def post(self, action: Action) -> None:
        """Start to receive the message that an action waits for, unless that was done."""
        message = Message.of(action, self.axis)
        if message not in self._receives:
            machine = self._reader(action, message.kind)
            types = [value.type for value in machine.program.main.bound("received").values()]
            like = [(type_.local(machine.mesh), machine.dtype(type_.dtype)) for type_ in types]
            self._receives[message] = self.backend.receive(message, like)

    def receive(self, action: Action, work: Sequence[Work]) -> None:
        """Wait for a message, and keep its tensors for the work that reads them."""
        message = Message.of(action, self.axis)
        self._keep(replace(action, kind=message.kind), work, self._receives.pop(message)())

    def _keep(self, action: Action, work: Sequence[Work], pieces: Sequence[Sequence[torch.Tensor]]) -> None:
        """Keep received tensors for a stage's work."""
        main = self._reader(action, action.kind).program.main
        keys = [binding for binding in main.bindings if binding.kind == "received"]
        for w, tensors in zip(work, pieces, strict=True):
            w.kept[received_key(action)] = dict(zip(keys, tensors, strict=True))

    def _reader(self, action: Action, kind: str) -> Machine:
        """Return the machine of the stage's work that reads the results of a kind of work: B or I, both of the same
        types."""
        names = (self.machine(action, reader) for reader in kinds_to(ACTIONS[kind].to))
        return next(self.machines[name] for name in names if name in self.machines)

    def pass_on(self, action: Action, work: Sequence[Work]) -> int | None:
        """Pass the results of work to the next stage if the role runs that, too. Return that stage, else None."""
        to = action.stage + ACTIONS[action.kind].to
        if not self.axis or to == action.stage or to not in self.stages:
            return None
        pieces = [w.sent.pop((action.stage, action.kind, action.microbatch), []) for w in work]
        self._keep(replace(action, stage=to), work, pieces)
        return to

    def send(self, action: Action, work: Sequence[Work]) -> None:
        """Start to send the results of work."""
        message = Message.of(action, self.axis)
        pieces = [w.sent.pop((action.stage, message.kind, action.microbatch), []) for w in work]  # may be none
        self._sends = [sending for sending in self._sends if not sending.done()]
        self._sends.append(self.backend.send(message, pieces))

    @property
    def sending(self) -> bool:
        """True where a message that was sent is not known to be taken."""
        return bool(self._sends)

    def settle(self) -> None:
        """Wait until all messages are taken, so that their tensors may be written over."""
        for sending in self._sends:
            sending.wait()
        self._sends = []


# ---- shards within unsharded weights


class ShardViews:
    """The shards of the rank at these ``coordinates`` that UNSHARD's weights contain as consecutive rows, so that the
    parameter need not be held twice."""

    def __init__(self, program: Program, coordinates: Mapping[str, int]) -> None:
        self._places: dict[Binding, tuple[str, int]] = {
            key: (name, program.mesh.place(coordinates, axes))
            for key, (name, axes) in parts_in_weights(program).items()
        }

    @property
    def weights(self) -> Collection[Binding]:
        """The weights that contain a shard."""
        return self._places.keys()

    def point_into(self, key: Binding, weight: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make the stored shard a view of this unsharded weight, which has the same values."""
        name, place = self._places[key]
        shard = parameters[name]
        if shard.is_contiguous() and weight.is_contiguous():
            shard.set_(weight.narrow(0, place * len(shard), len(shard)))  # type: ignore[call-overload]


# ---- the step

_NO_LOSS = torch.zeros(())


class Stepper:
    """The runner of a role's actions up to the gradients; the update is the optimizer's. ``axis`` is the pipeline axis
    if the role has stages. With ``account`` the peak of the bytes saved for backward is measured."""

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
        """The peak, with ``account``, of the bytes that one rank held for later actions of each stage."""
        self.current: Action | None = None
        """The action that runs now, or ran last."""
        options.setdefault("reuse", options.get("watch") is None)  # a watch may keep values
        options["axis"] = axis
        self.machines = {name: machine(program, backend, device, **options) for name, program in programs.items()}
        self._messages = StageMessages(self.machines, backend, axis, self.actions)
        self._last = {action.stage: action for action in one_step(self.actions) if action.accumulates}
        """The last work of each stage that returns gradients: B or W of its last microbatch."""
        unshard = self.machines.get(UNSHARD)
        inside = unshard is not None and not self.overlaps  # else steps have weights of their own
        self._shards = [ShardViews(unshard.program, at) for at in unshard.coordinates] if unshard and inside else []

    @property
    def counts(self) -> tuple[Binding, ...]:
        """The bindings of the loss's denominators that the role counts."""
        count = self.machines.get(COUNTING)
        return () if count is None else tuple(key for key, _ in count.program.main.returns)

    @property
    def counts_apart(self) -> bool:
        """True where COUNT has no communication."""
        count = self.machines.get(COUNTING)
        return count is not None and not any(
            line.op in COLLECTIVES and COLLECTIVES[line.op].communicates
            for function in count.program.functions
            for line in function.lines
        )

    def begin(
        self, states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int, keep: bool = True,
        beside: bool = False,
    ) -> list[Work]:  # fmt: skip
        """Begin the work of a step on ``batches[rank][microbatch]``, and count targets if COUNT has no communication.
        ``step`` counts from 0 and seeds dropout. Without ``keep`` nothing is saved for backward. ``beside`` says that
        the step before is still to be finished."""
        work = [Work(state, parts, keep, step) for state, parts in zip(states, batches, strict=True)]
        counting = (action for action in self.actions if action.kind == COUNTING and self.counts_apart)
        self._walk([(action, work) for action in counting], step - beside)
        return work

    def share_counts(self, work: Work, rank: int, key: Binding, counts: Sequence[torch.Tensor]) -> None:
        """Give the counts of all ranks to the work of one of them, so that its SCALE needs no all-reduce."""
        work.counted |= self.machines[SCALING].all_reduced(key, counts, rank)

    def gradients(self, states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int) -> list[StepResult]:
        """Return loss and gradients of a step."""
        return self.finish(self.begin(states, batches, step), step)

    @property
    def overlaps(self) -> bool:
        """True where some actions of a step may be done beside the step before it."""
        return any(action.ahead for action in self.actions)

    def finish(self, work: Sequence[Work], step: int, coming: Sequence[Work] = ()) -> list[StepResult]:
        """Return loss and gradients of a step that was begun. Beside it do what may be done of the next one, on the
        work that is ``coming``, with the weights that are the newest now."""
        rows = [(action, work) for action in self.actions if action.ahead and not work[0].begun]
        for action in self.actions:
            if coming or not action.ahead:
                rows.append((action, coming if action.ahead else work))
        self._walk([row for row in rows if row[0].kind != STEP and not self._counted(*row)], step)
        for w in coming:
            w.begun = True
        return [
            StepResult(r.get(LOSS, _NO_LOSS), r.get(GRAD_NORM), named(r, "gradient"), named(r, "metric"),
                       named(r, "state"), w.returned)
            for w, r in ((w, w.results) for w in work)
        ]  # fmt: skip

    def _counted(self, action: Action, work: Sequence[Work]) -> bool:
        """Return whether an action counts targets that are counted already."""
        return action.kind == COUNTING and any(COUNT in w.totals for w in work)

    def loss(self, states: Sequence[RankState], batches: Sequence[Sequence[Batch]], step: int) -> list[StepResult]:
        """Return the loss alone; nothing is saved for backward."""
        return self.evaluate(self.begin(states, batches, step, keep=False), step)

    def evaluate(self, work: Sequence[Work], step: int, returns: bool = False) -> list[StepResult]:
        """Return the loss of a step that was begun, with ``returns`` also the tensors that the model returns."""
        for w in work:
            w.returns = returns
        every = ((action, work) for action in one_step(self.actions) if action.serves("evaluation"))
        self._walk([row for row in every if not self._counted(*row)], step)
        return [StepResult(w.results.get(LOSS, _NO_LOSS), None, {}, returned=w.returned) for w in work]

    @torch.no_grad()  # a batch may require gradients, but backward is in the programs
    def _walk(self, rows: Sequence[tuple[Action, Sequence[Work]]], step: int) -> None:
        """Do actions in order, each on some work, in the step with this number or beside it."""
        self._messages.begin()
        for index, (action, work) in enumerate(rows):
            self.current = action
            for coming, _ in rows[index : index + 1 + AHEAD]:
                if (row := coming.message) is not None and not row.sends:
                    self._messages.post(coming)
            message = action.message
            handler = HANDLERS.get(action.kind, Stepper.run_program)
            if message is not None:
                handler = Stepper._send if message.sends else Stepper._receive
            try:
                with self.recorded(str(action), "work" if message is None or message.sends else "wait", step):
                    handler(self, action, work[0].step, work)
            except PeerLost as error:
                raise error.during(f"action {action} of step {step + 1}") from error
            except (RuntimeError, IndexError) as error:
                error.add_note(f"in action {action} of step {step + 1}")
                raise

    def recorded(self, name: str, category: str, step: int) -> AbstractContextManager[None]:
        """Record the time of a block, if times are recorded or a profile is made."""
        return recorded(self.recorder, name, category, step)

    # ---- messages

    def _receive(self, action: Action, step: int, work: Sequence[Work]) -> None:
        self._messages.receive(action, work)
        self._note_saved(action.stage, work)

    def _send(self, action: Action, step: int, work: Sequence[Work]) -> None:
        self._messages.send(action, work)

    def _pass_on(self, action: Action, work: Sequence[Work]) -> None:
        if (stage := self._messages.pass_on(action, work)) is not None:
            self._note_saved(stage, work)

    def _settle(self, step: int) -> None:
        """Wait until all messages are taken."""
        if self._messages.sending:
            with self.recorded("sends", "wait", step):
                self._messages.settle()

    def _note_saved(self, stage: int, work: Sequence[Work]) -> None:
        """Note the bytes that are kept for a stage now: each storage once, without parameters, buffers and batches."""
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
        work: Sequence[Work],
        extra: Sequence[BoundTensors] = (),
        totals: Sequence[BoundTensors] = (),
        main: Function | None = None,
        last: Collection[Binding] = (),
    ) -> Iterator[tuple[Work, BoundTensors]]:
        """Run a program, and yield each rank's work with the results on it. ``extra`` are further values to bind.
        Results are added to ``totals``. ``main`` is the main function to run, if it is not that of most microbatches.
        The totals of ``last`` are moved into the program, which frees them."""
        machine = self.machines[name]
        main = main or machine.program.main
        inputs = [
            {value.name: bind(value.binding, w, more) for value in main.parameters if value.binding}
            for w, more in zip(work, extra or [{}] * len(work), strict=True)
        ]
        if name == SCALING:
            for environment, w in zip(inputs, work, strict=True):
                environment |= w.counted
        for more in extra:
            more.clear()  # values die within the program, after their last use
        for key, w in ((key, w) for key in last for w in work):
            w.totals.pop(key, None)
        return zip(work, machine.run(inputs, main.name, totals, work[0].arriving), strict=True)

    def _inputs(self, action: Action, step: int, work: Sequence[Work], *keys: WorkKey) -> list[BoundTensors]:
        """Return the inputs of a microbatch's work: the key of its random streams, its part of the batch, and what is
        kept for it under these keys."""
        rng = torch.tensor([step, action.microbatch], dtype=torch.int64)
        inputs: list[BoundTensors] = []
        for w in work:
            inputs.append({RNG: rng, **{Binding("input", name): t for name, t in w.parts[action.microbatch].items()}})
            for key in keys:
                inputs[-1] |= w.kept.pop(key, {})
        return inputs

    def run_program(self, action: Action, step: int, work: Sequence[Work]) -> None:
        """Run a program of the role. Results of an action before or during the work are summed over microbatches; those
        of an action after it (REDUCE and the like) are results of the step."""
        row = ACTIONS[action.kind]
        if row.place == "after":
            self._settle(step)
        inputs = self._inputs(action, step, work) if row.each else ()
        # the only reader of the gradients' totals
        gradients = self.machines[action.kind].program.main.bound("gradient").values()
        last = [value.binding for value in gradients if value.binding is not None]
        for w, results in self._run(action.kind, work, inputs, last=last):
            if row.place == "after":
                w.results |= results
                w.state.buffers.update(named(results, "buffer"))
                continue
            for key, value in results.items():
                w.total(key, value)

    def _unshard(self, action: Action, step: int, work: Sequence[Work]) -> None:
        self.run_program(action, step, work)

        def arrived(key: Binding, arrival: Arrival = wait_for_nothing) -> None:
            arrival()
            for shards, w in zip(self._shards, work, strict=True):
                shards.point_into(key, w.totals[key], w.state.parameters)

        arriving, inside = work[0].arriving, self._shards[0].weights if self._shards else ()
        for key in inside:  # the last step's weights are freed one by one, as these arrive
            if key in arriving:
                arriving[key] = partial(arrived, key, arriving[key])
            else:
                arrived(key)

    def _forward(self, action: Action, step: int, work: Sequence[Work]) -> None:
        inputs = self._inputs(action, step, work, received_key(action))
        for w, results in self._run(self._messages.machine(action, FORWARD), work, inputs):
            for key in results:
                if key.home == "step":  # the loss, and the loads of experts
                    w.total(key, results[key])
            # the program may return a view of a parameter, which the update changes, or of the caller's batch
            w.state.buffers.update((name, value.clone()) for name, value in named(results, "buffer").items())
            for name, value in named(results, "output").items() if w.returns else ():
                w.returned.setdefault(name, []).append(value)
            w.keep_sent((action.stage, FORWARD, action.microbatch), results)
            if w.keep:
                _keep(w, action, "saved", results)
        self._note_saved(action.stage, work)
        self._pass_on(action, work)

    def _backward(self, action: Action, step: int, work: Sequence[Work]) -> None:
        """Run B, or one of the two phases for which it stands: I keeps what W will read."""
        name = self._messages.machine(action, action.kind)
        machine = self.machines[name]
        last = machine.program.last if self._last[action.stage] == action else None
        totals = [w.exclusive_totals(machine.addable) for w in work]
        kept = ((action.stage, kind, action.microbatch) for kind in _KEPT.intersection(ACTIONS[action.kind].reads))
        inputs = self._inputs(action, step, work, *kept, received_key(action))
        usual = dict(machine.program.main.returns)
        reduced = {key for key, name in last.returns if name != usual.get(key)} if last is not None else set[Binding]()
        accumulated = [{*table} for table in totals]
        runs = zip(self._run(name, work, inputs, totals, last, reduced), accumulated, strict=True)
        for (w, results), keys in runs:
            w.keep_sent((action.stage, action.kind, action.microbatch), results)
            if "deferred" in ACTIONS[action.kind].returns:
                _keep(w, action, "deferred", results)
            for key, value in results.items():
                if key in reduced:
                    (w.results if key.kind == "state" else w.totals)[key] = value
                elif key.kind == "gradient" and key not in keys:
                    w.total(key, value, key in machine.addable)
        self._note_saved(action.stage, work)
        self._pass_on(action, work)

    def _reduce(self, action: Action, step: int, work: Sequence[Work]) -> None:
        self._settle(step)
        for w in work:
            w.unshare_gradients([*w.state.parameters.values(), *w.state.buffers.values(), *w.parts[-1].values()])
        self.run_program(action, step, work)


_KEPT = frozenset[str](("saved", "deferred"))
"""The kinds of values that a stage keeps from one action of a microbatch to the next."""


def _keep(work: Work, action: Action, kind: Kind, results: BoundTensors) -> None:
    """Keep the results of one kind for a later action of the same microbatch."""
    values = {key: value for key, value in results.items() if key.kind == kind}
    work.kept[action.stage, kind, action.microbatch] = values


Handler = Callable[[Stepper, Action, int, Sequence[Work]], None]
"""A function that runs an action of the step with this number on the ranks of a process."""
HANDLERS: dict[str, Handler] = {
    UNSHARD: Stepper._unshard,
    FORWARD: Stepper._forward,
    BACKWARD: Stepper._backward,
    INPUT_GRADIENTS: Stepper._backward,
    WEIGHT_GRADIENTS: Stepper._backward,
    REDUCE: Stepper._reduce,
}
"""The handler of each kind of action; actions without one only run their program."""
