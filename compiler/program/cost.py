"""Cost: the bytes that a rank holds, by liveness over its programs. Units are in names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..layout.placement import TensorType
from ..ops.rules import facts
from .actions import ACTIONS, AHEAD, Action, receive_kind, send_kind
from .binding import PARAMETERS
from .program import Function, Program
from .residual import residual_of
from .totals import addable, lasting

_Peaks = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one rank in bytes. ``parameters`` are those that it stores, and what a step makes of them once;
    ``activations`` is the most that is alive beside the rest, during forward and backward; ``residuals`` are what
    rounding leaves of gradients for the next step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    residuals: int = 0
    offloaded: Mapping[str, int] = field(default_factory=dict)
    """The bytes that are kept outside this memory, by the word of their ``offload`` line; no other number has them."""

    @property
    def peak_bytes(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.residuals

    def without(self, offloaded: Mapping[str, int]) -> Memory:
        """Return this memory where so many bytes are kept outside it. ``activations`` never had theirs."""
        kept = {word: getattr(self, word) - offloaded.get(word, 0) for word in ("parameters", "optimizer")}
        return replace(self, **kept, offloaded=dict(offloaded))


MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "residuals")
"""The parts of a rank's memory, by the names that ``Memory`` has for them."""


def local_bytes(type_: TensorType, program: Program) -> int:
    """Return the bytes of one rank's piece."""
    return math.prod(type_.local(program.mesh)) * type_.dtype.itemsize


def owners(function: Function) -> dict[str, str]:
    """Return, for each value that is a view, the value whose storage it shares."""
    owner_of: dict[str, str] = {}
    for line in function.lines:
        if facts(line.op).storage == "view":  # it holds nothing of its own
            source = next(line.uses())
            owner_of.update((value.name, owner_of.get(source, source)) for value in line.made)
    return owner_of


def _peak(program: Program, function: Function, late: Mapping[str, frozenset[str]], peaks: _Peaks) -> tuple[int, int]:
    """Return the most bytes that a function's own values hold at once, with results and without parameters. The second
    number is the bytes that stay until the function has ended, because values made ``late``, by function, need them.
    ``peaks`` keeps the answers."""
    if function.name in peaks:
        return peaks[function.name]
    added, end = late.get(function.name, frozenset()), len(function.lines)
    last: dict[str, int] = {name: end for _, name in function.returns}
    for index, line in enumerate(function.lines):
        for name in line.uses():
            last[name] = max(last.get(name, 0), index)
    source = owners(function)
    for name, owner in source.items():  # a view keeps it alive
        last[owner] = max(last.get(owner, 0), last.get(name, 0))
    held = {source.get(name, name) for name in lasting(function, added)}
    held = {name for name in held if last.get(name, 0) < end}
    last.update(dict.fromkeys(held, end))
    live = most = kept = 0
    dying: dict[int, int] = {}
    for index, line in enumerate(function.lines):
        inner = left = 0
        if line.calls_function:
            inner, left = _peak(program, program.function(line.op), late, peaks)
        made, kept = left, kept + left
        for value in line.made if facts(line.op).carries != "away" else ():
            if value.name not in source and value.name not in added:
                size = local_bytes(value.type, program)
                made += size
                kept += size if value.name in held else 0
                at = last.get(value.name, index)
                dying[at] = dying.get(at, 0) + size
        most = max(most, live + max(made, inner))
        live += made - dying.get(index, 0)
    peaks[function.name] = most, kept
    return peaks[function.name]


def estimate_memory(
    programs: Mapping[str, Program], actions: Sequence[Action], stored: Mapping[str, TensorType],
    moments: Mapping[str, int],
) -> Memory:  # fmt: skip
    """Estimate the memory of a rank of a role: its own parameters among ``stored``, and the values kept between its
    actions as they run one after the other. These are saved for backward, received, or sent and kept until the next
    such message. ``moments`` is the number of optimizer tensors of each parameter."""
    work = [program for program in programs.values() if ACTIONS[program.action].works]
    own = {name for program in programs.values() for name in program.main.bound(*PARAMETERS)}
    sizes = {name: local_bytes(type_, work[0]) for name, type_ in stored.items() if name in own}
    weights = {name: local_bytes(value.type, work[0])
               for program in work for name, value in program.main.bound("weight").items()}  # fmt: skip
    optimizer = sum(moments.get(name, 0) * size for name, size in sizes.items())
    gradients: dict[str, int] = {}
    saved: dict[str, int] = {}
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for key, program in programs.items():
        values = program.main.values()
        if program in work:
            made = program.main.returned("gradient")
            gradients.update((name, local_bytes(values[value].type, program)) for name, value in made.items())
        keeps, sends = {*program.main.returned("saved").values()}, {*program.main.returned("sent").values()}
        keeps -= {value.name for line in program.main.lines if facts(line.op).carries for value in line.made}
        saved[key] = sum(local_bytes(values[name].type, program) for name in keeps)
        sent[key] = sum(local_bytes(values[name].type, program) for name in sends - keeps)
        received[key] = sum(local_bytes(value.type, program) for value in program.main.bound("received").values())
        peaks[key] = _peak(program, program.main, {}, {})[0] if program in work else 0
        if (
            program in work and program.main.returned("gradient") and sent[key]
        ):  # with the weights' gradients made one by one after it sends
            late = addable(program)
            one = max((local_bytes(values[name].type, program) for name in late[program.main.name]), default=0)
            peaks[key] = max(peaks[key], _peak(program, program.main, late, {})[0] + one)
    held, most, own_stages = _Held(), 0, {action.stage for action in actions if action.works}
    for index, action in enumerate(actions):
        for coming in actions[index : index + 1 + AHEAD]:
            message = coming.message
            if message is not None and not message.sends:
                held.put(received[f"{coming.stage}{message.work}"], coming.kind, coming.stage, coming.microbatch)
        key, stage, m = action.program_in(programs), action.stage, action.microbatch
        most = max(most, held.total + peaks.get(key, 0))
        if action.message is not None and action.message.sends:
            held.put(held.put(0, "made", action.kind, stage, m), action.kind, stage)
        elif action.works:
            held.put(0, receive_kind(action.kind), stage, m)
            held.put(saved[key], "saved", stage, m)
            to = stage + ACTIONS[action.kind].to
            there = (receive_kind(action.kind), to) if to in own_stages else ("made", send_kind(action.kind), stage)
            held.put(sent[key], *there, m)
    residuals = sum(local_bytes(value.type, program) for program in programs.values()
                    for value in program.main.parameters if residual_of(value.binding))  # fmt: skip
    most = max(most, residuals)  # REDUCE makes new ones beside the old, which a step that is skipped keeps
    return Memory(sum(sizes.values()) + sum(weights.values()), sum(gradients.values()), optimizer, most, residuals)


class _Held:
    """The bytes that are kept, each amount under a key."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[object, ...], int] = {}
        self.total = 0

    def put(self, size: int, *what: object) -> int:
        """Keep so many bytes under a key from now on, and return the bytes that were kept there before."""
        before = self.bytes.pop(what, 0)
        if size:
            self.bytes[what] = size
        self.total += size - before
        return before
