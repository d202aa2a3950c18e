"""Memory: the bytes that a rank holds at the peak of a step, the bytes of its training state, and the buffers of what
it offloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..layout.placement import TensorType
from ..program.actions import (
    ACTIONS,
    AHEAD,
    FORWARD,
    STEP,
    UNSHARD,
    Action,
    direction_of,
    kinds_to,
    one_step,
    send_kind,
)
from ..program.binding import BUFFERS, PARAMETERS, Binding, Kind
from ..program.optimizers import update_bytes
from ..program.plain import on_their_way
from ..program.program import Function, Program, kept_away
from ..program.step_values import residual_of
from .dataflow import parts_in_weights
from .liveness import Liveness, Peak, Share, local_bytes
from .products import BLAS, Products


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one rank in bytes, at the peak of a step. ``parameters`` are the stored ones and the unsharded
    weights; ``gradients`` are accumulated ones and those that the running program returns; ``optimizer`` is its state,
    and during the update its temporaries; ``messages`` are results of collectives and their buffers; ``residuals`` are
    those of compressed gradients, of the last step and of this one; ``activations`` are all the rest, the batch and the
    model's buffers too."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    messages: int = 0
    residuals: int = 0
    offloaded: Mapping[str, int] = field(default_factory=dict)
    """The bytes that are kept outside this memory, by the word of their ``offload`` line; no other number has them."""
    most: Mapping[str, int] = field(default_factory=dict)
    """The most bytes of each kind in a step. Kinds are largest at different moments, so their sum is more than the
    peak."""
    moment: Mapping[str, str] = field(default_factory=dict)
    """The moment of the peak: the ``action`` of the step, and the ``module`` whose line runs, "" for none."""

    @property
    def shares(self) -> dict[str, int]:
        """The bytes of each part."""
        return {word: getattr(self, word) for word in MEMORY_KINDS}

    @property
    def peak_bytes(self) -> int:
        return sum(self.shares.values())


MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "messages", "residuals")
"""The parts of a rank's memory, which are fields of ``Memory``."""


def estimate_memory(
    programs: Mapping[str, Program], actions: Sequence[Action], stored: Mapping[str, TensorType],
    moments: Mapping[str, int], offload: Collection[str] = (), load: float = 1.0, products: Products = BLAS,
    line: Mapping[str, Any] | None = None,
) -> Memory:  # fmt: skip
    """Estimate the memory of a rank of a role: its share of the ``stored`` parameters, with ``moments`` optimizer
    tensors of each that is trained, the values of its actions as they run one after the other, and the temporaries of
    the update that the facts of the plan's optimizer ``line`` describe, if there is one. Between actions it keeps what
    is saved for backward, what was received, what was sent until the next such message, and accumulated gradients. What
    the words of ``offload`` lines name lies elsewhere, but for single numbers; an update loads the state of one unit to
    where its parameters are. The busiest rank of experts has ``load`` times the mean of their rows. ``products`` is the
    library that multiplies."""
    return _step_memory(programs, actions, stored, moments, offload, load, products, line).memory()


def action_peaks(
    programs: Mapping[str, Program], actions: Sequence[Action], stored: Mapping[str, TensorType],
    moments: Mapping[str, int], offload: Collection[str] = (), load: float = 1.0, products: Products = BLAS,
    line: Mapping[str, Any] | None = None,
) -> dict[Action, int]:  # fmt: skip
    """Estimate the most bytes that a rank of a role holds while each of its actions runs; see ``estimate_memory``."""
    step = _step_memory(programs, actions, stored, moments, offload, load, products, line)
    step.memory()
    return step.peaks


def _step_memory(
    programs: Mapping[str, Program], actions: Sequence[Action], stored: Mapping[str, TensorType],
    moments: Mapping[str, int], offload: Collection[str], load: float, products: Products,
    line: Mapping[str, Any] | None,
) -> _StepMemory:  # fmt: skip
    resident = {
        word: {name: type_ for name, type_ in stored.items() if word not in offload or not type_.shape}
        for word in ("parameters", "optimizer")
    }
    overlaps = any(action.ahead for action in actions)
    parameters = state_bytes(programs, resident["parameters"], moments, overlaps)["parameters"]
    optimizer = state_bytes(programs, resident["optimizer"], moments)["optimizer"]
    loaded = max(moments.values(), default=0) if {"optimizer", "parameters"} & {*offload} == {"optimizer"} else 0
    trained = {name: size for name, size in _stored_bytes(programs, stored).items() if name in moments}
    update = 0 if line is None else update_bytes(line, trained, loaded)
    return _StepMemory(programs, actions, parameters, optimizer, update, load, products)


def state_bytes(
    programs: Mapping[str, Program],
    stored: Mapping[str, TensorType],
    moments: Mapping[str, int],
    overlaps: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Return the bytes of a rank's training state by kind, summed over parameters; see ``states``."""
    sums = dict.fromkeys(STATE_KINDS, 0)
    for sizes in states(programs, stored, moments, overlaps).values():
        for kind, size in sizes.items():
            sums[kind] += size
    return sums


STATE_KINDS = ("parameters", "weights", "gradients", "optimizer")
"""The parts of a rank's training state."""


def states(
    programs: Mapping[str, Program],
    stored: Mapping[str, TensorType],
    moments: Mapping[str, int],
    overlaps: bool = False,
) -> dict[str, dict[str, int]]:  # fmt: skip
    """Return the bytes of a rank's training state by parameter and kind, offloaded or not: its share of the ``stored``
    parameters, but for those that lie in unsharded weights, these weights, the accumulated gradients, and ``moments``
    optimizer tensors of each. Where a step ``overlaps`` the next one, no parameter lies in the weights of either."""
    gathers = parts_in_weights(programs[UNSHARD]) if UNSHARD in programs and not overlaps else {}
    inside = {name for name, _ in gathers.values()}
    sizes = _stored_bytes(programs, stored)
    weights, gradients = dict[str, int](), dict[str, int]()
    for program in programs.values():
        if ACTIONS[program.action].works:
            values = program.main.values()
            weights.update(
                {name: local_bytes(value.type, program) for name, value in program.main.bound("weight").items()}
            )
            returned = program.main.returned("gradient")
            gradients.update({name: local_bytes(values[value].type, program) for name, value in returned.items()})
    tables = {
        "parameters": {name: size for name, size in sizes.items() if name not in inside},
        "weights": weights, "gradients": gradients,
        "optimizer": {name: moments.get(name, 0) * size for name, size in sizes.items()},
    }  # fmt: skip
    names = dict.fromkeys(name for table in tables.values() for name in table)
    return {name: {kind: tables[kind].get(name, 0) for kind in STATE_KINDS} for name in names}


def _stored_bytes(programs: Mapping[str, Program], stored: Mapping[str, TensorType]) -> dict[str, int]:
    """Return the bytes of a rank's share of stored parameters: of those that its programs read."""
    any_program = next(iter(programs.values()))
    read = {name for program in programs.values() for name in program.main.bound(*PARAMETERS)}
    return {name: local_bytes(type_, any_program) for name, type_ in stored.items() if name in read}


class _StepMemory:
    """The memory of a role's step, action by action."""

    def __init__(
        self, programs: Mapping[str, Program], actions: Sequence[Action], parameters: int, optimizer: int, update: int,
        load: float, products: Products,
    ) -> None:  # fmt: skip
        self.programs, self.load = programs, load
        single = one_step(actions)
        steps = 1 + any(action.ahead for action in actions)
        self.actions = (*single[: sum(action.ahead for action in actions)], *actions)
        """The actions of a step beside the one before it, and then all between two updates."""
        self.last = {(action.stage, action.kind): action for action in single}
        self.parameters, self.optimizer, self.update = parameters, optimizer, update
        self.microbatches = 1 + max((action.microbatch for action in actions), default=0)
        self.inputs = _bound_bytes(programs, *BUFFERS) + steps * self.microbatches * _bound_bytes(programs, "input")
        self.residuals = sum(
            local_bytes(value.type, program)
            for program in programs.values() for value in program.bound("state").values() if residual_of(value.binding)
        )  # fmt: skip
        gathers = parts_in_weights(programs[UNSHARD]) if UNSHARD in programs and steps == 1 else {}
        sizes = _returned_bytes(programs[UNSHARD]) if gathers else {}
        self.inside = {key: sizes[key] for key in gathers}
        """The bytes of weights in which parameters lie."""
        self.live = {key: Liveness(program, load, products) for key, program in programs.items()}
        self.sums: tuple[dict[Binding, int], dict[Binding, int]] = ({}, {})
        """The bytes of what is kept for the rest of this step, and of the next one."""
        self.arrivals: tuple[dict[Binding, int], dict[Binding, int]] = ({}, {})
        """The bytes that are held beside each weight that is on its way, of this step and of the next one: buffers of
        its message, and the last step's weight, in which the parameter lies until then."""
        self.kept: dict[tuple[int, int], dict[str, int]] = {}
        self.held: dict[tuple[object, ...], int] = {}
        """The bytes that are kept between actions, beside accumulated gradients."""
        self.most = Memory(0, 0, 0, 0)
        self.peaks: dict[Action, int] = {}
        """The most bytes while each action runs."""
        self.highs = dict.fromkeys(MEMORY_KINDS, 0)
        self.running: Action | None = None
        self.stages = {action.stage for action in actions if action.works}

    @property
    def totals(self) -> dict[Binding, int]:
        """The sums of the step of which the running action is."""
        return self.sums[self.running is not None and self.running.ahead]

    @property
    def arriving(self) -> dict[Binding, int]:
        """The arrivals of the step of which the running action is."""
        return self.arrivals[self.running is not None and self.running.ahead]

    def _number(self, action: Action) -> int:
        """Return the number of an action's microbatch, counted on into the next step."""
        return action.microbatch + self.microbatches * action.ahead

    def memory(self) -> Memory:
        """Follow the actions, and return the memory at the peak."""
        for index, action in enumerate(self.actions):
            for coming in self.actions[index : index + 1 + AHEAD]:
                message = coming.message
                if message is not None and not message.sends:
                    self.held[direction_of(message.work), coming.stage, self._number(coming)] = self._received(coming)
            self.running = action
            self._action(action)
        return replace(self.most, most=self.highs)

    def _received(self, action: Action) -> int:
        assert action.message is not None
        readers = (f"{action.stage}{kind}" for kind in kinds_to(ACTIONS[action.message.work].to))
        program = next(self.programs[reader] for reader in readers if reader in self.programs)
        return sum(local_bytes(value.type, program, self.load) for value in program.main.bound("received").values())

    def _action(self, action: Action) -> None:
        held, stage, m = self.held, action.stage, self._number(action)
        key = action.program_in(self.programs)
        if action.message is not None and action.message.sends:
            self._note(Peak({}, {}))
            held["sent", action.kind, stage] = held.pop(("made", action.kind, stage, m), 0)
        if action.kind == STEP:
            self._note(Peak({}, {}), update=self.update)
        if action.message is not None or key not in self.programs:
            return
        if ACTIONS[action.kind].place == "after":
            self.held = held = {key: size for key, size in held.items() if key[0] != "sent"}  # all are taken by then
        main, live = self._main(action, key), self.live[key]
        owned: dict[str, int] = {}
        totals = any(Binding("gradient", name) in self.totals for name in main.returned("gradient")) and action.works
        if action.works:
            held.pop((direction_of(action.kind), stage, m), None)
            held.pop(("saved", stage, m), None)
        saved = self.kept.pop((stage, m), {}) if action.works else {}
        for value in main.parameters:
            if value.binding is None:
                continue
            if value.binding.kind == "gradient":  # a total, which is the program's own
                owned[value.name] = self.totals.pop(value.binding, 0)
            elif value.binding.home == "stage":
                owned[value.name] = saved.get(value.binding.name, 0)
            elif value.binding.home == "neighbour":
                owned[value.name] = local_bytes(value.type, self.programs[key], self.load)
            elif value.binding in self.arriving:
                owned[value.name] = self.arriving.pop(value.binding)
        peak = live.peak(main, owned, live.addable if totals else {})
        # the last step's weights, in which parameters lie
        before = sum(self.inside.values()) if action.kind == UNSHARD else 0
        self._note(peak, before)
        self._keep(action, main, peak)

    def _note(self, peak: Peak, before: int = 0, update: int = 0) -> None:
        """Note the memory while a program with this peak runs, and ``before`` bytes of weights of the last step, or
        ``update`` bytes of temporaries of an update."""
        shares = {
            kind: sum(size for sums in self.sums for key, size in sums.items() if key.kind == kind)
            for kind in ("weight", "gradient", "state")
        }

        def memory(held: Mapping[Share, int]) -> Memory:
            return Memory(
                parameters=self.parameters + before + shares["weight"] + arriving + held.get("weights", 0),
                gradients=shares["gradient"] + held.get("gradients", 0),
                optimizer=self.optimizer + update,
                activations=self.inputs + activations + held.get("values", 0),
                messages=held.get("messages", 0),
                residuals=self.residuals + shares["state"],
            )

        arriving, activations = sum(sum(each.values()) for each in self.arrivals), sum(self.held.values())
        for kind, size in memory(peak.highs or peak.shares).shares.items():
            self.highs[kind] = max(self.highs[kind], size)
        at_peak = memory(peak.shares)
        assert self.running is not None
        self.peaks[self.running] = max(self.peaks.get(self.running, 0), at_peak.peak_bytes)
        if at_peak.peak_bytes > self.most.peak_bytes:
            self.most = replace(at_peak, moment=self._moment(peak))

    def _moment(self, peak: Peak) -> dict[str, str]:
        """Return the action that runs, and the module of the line at which its program holds most."""
        action, module = self.running, ""
        assert action is not None
        if peak.at >= 0:
            module = self._main(action, action.program_in(self.programs)).lines[peak.at].origin.module
        return {"action": str(action), "module": module}

    def _main(self, action: Action, key: str) -> Function:
        """Return the main function that an action runs."""
        program = self.programs[key]
        is_last = program.last is not None and self.last[action.stage, action.kind] == action
        return program.last if program.last is not None and is_last else program.main

    def _keep(self, action: Action, main: Function, peak: Peak) -> None:
        """Keep a program's results for later actions, each storage once."""
        key, stage, m = action.program_in(self.programs), action.stage, self._number(action)
        root, left = self.live[key].root(main), dict(peak.kept)
        usual = dict(self.programs[key].main.returns)
        saved, sent, returned = dict[str, int](), 0, 0
        # what a later action reads lives longer than what is sent
        for binding, name in sorted(main.returns, key=lambda pair: pair[0].home != "stage"):
            size = left.pop(root[name], 0)
            if binding.home == "stage":
                saved[binding.name] = size
            elif binding.kind == "sent":
                sent += size
            elif binding.kind == "output":
                returned += size
            elif name != usual.get(binding):  # a reduced gradient, or its residual
                self.totals[binding] = size
            elif binding.home == "step":
                self.totals[binding] = (
                    self.totals.get(binding, 0) + size
                    if ACTIONS[action.kind].place == "after"
                    else max(size, self.totals.get(binding, 0))
                )
        if action.kind == UNSHARD:
            sizes = _returned_bytes(self.programs[key])
            for binding in on_their_way(self.programs[key]):
                buffers = max(self.totals[binding] - sizes[binding], 0)
                self.totals[binding] -= buffers
                self.arriving[binding] = buffers + self.inside.get(binding, 0)
        if not action.works:
            return
        if saved:
            self.kept[stage, m] = saved
        self.held["saved", stage, m] = sum(saved.values())
        self.held["returned", stage, m] = returned
        to = stage + ACTIONS[action.kind].to
        there = (direction_of(action.kind), to) if to in self.stages else ("made", send_kind(action.kind), stage)
        self.held[*there, m] = sent


def _returned_bytes(program: Program) -> dict[Binding, int]:
    """Return the bytes of a program's results."""
    values = program.main.values()
    return {key: local_bytes(values[name].type, program) for key, name in program.main.returns}


def _bound_bytes(programs: Mapping[str, Program], *kinds: Kind) -> int:
    """Return the bytes of everything of some kinds that programs read, each once."""
    sizes = {
        (value.binding, name): local_bytes(value.type, program)
        for program in programs.values() for name, value in program.main.bound(*kinds).items()
    }  # fmt: skip
    return sum(sizes.values())


# ---- offload buffers, outside the memory that computes


def offload_buffers(
    programs: Mapping[str, Program], actions: Sequence[Action], stored: Mapping[str, TensorType],
    moments: Mapping[str, int], offload: Collection[str],
) -> dict[str, Counter[int]]:  # fmt: skip
    """Return the number of buffers of each size in bytes that a role needs at once for each word of an ``offload``
    line: for its share of the ``stored`` parameters, each with its number of optimizer tensors (``moments``), for the
    unsharded weights, and for activations that wait for backward as its actions run one after the other."""
    buffers: dict[str, Counter[int]] = {word: Counter() for word in offload}
    for name, size in _stored_bytes(programs, stored).items():
        if stored[name].shape and size:
            for word, count in (("optimizer", moments.get(name, 0)), ("parameters", 1)):
                if word in buffers and count:
                    buffers[word][size] += count
    if "parameters" in buffers:
        weights = (_offloaded(program, "weight", offload) for program in programs.values())
        buffers["parameters"] += sum(weights, Counter())
    if "activations" in buffers:
        buffers["activations"] = _waiting(programs, actions, offload)
    return buffers


def _offloaded(program: Program, kind: str, offload: Collection[str]) -> Counter[int]:
    """Return the sizes of the values of one kind that a program returns and that are kept away."""
    values = program.main.values()
    kept = (values[name] for key, name in program.main.returns
            if key.kind == kind and kept_away(key, values[name], offload))  # fmt: skip
    return Counter(size for value in kept if (size := local_bytes(value.type, program)))


def _waiting(programs: Mapping[str, Program], actions: Sequence[Action], offload: Collection[str]) -> Counter[int]:
    """Return the most buffers of each size whose values wait for backward at once."""
    most: Counter[int] = Counter()
    now: Counter[int] = Counter()
    for action in actions:
        if action.kind == FORWARD:
            now.update(_offloaded(programs[action.program_in(programs)], "saved", offload))
            most |= now
        elif action.works and "saved" in ACTIONS[action.kind].reads:
            forward = Action(action.stage, FORWARD, action.microbatch)
            now.subtract(_offloaded(programs[forward.program_in(programs)], "saved", offload))
    return most
