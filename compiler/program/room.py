"""Room: the buffers in which a rank keeps what ``offload`` lines name, outside the memory that computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ..layout.placement import TensorType
from .actions import BACKWARD, FORWARD, Action
from .binding import PARAMETERS
from .liveness import local_bytes
from .places import kept_away
from .program import Program

Room = Mapping[str, Counter[int]]
"""The number of buffers of each size in bytes that are in use at once, by the word of an ``offload`` line."""


def room_of(
    programs: Mapping[str, Program], actions: Sequence[Action], stored: Mapping[str, TensorType],
    moments: Mapping[str, int], offload: Collection[str],
) -> dict[str, Counter[int]]:  # fmt: skip
    """Return the buffers for a role's share of what ``offload`` lines name: its own parameters among ``stored``, each
    with its number of optimizer tensors (``moments``), the weights that a step makes of them, and what waits for
    backward as its actions run one after the other."""
    rooms: dict[str, Counter[int]] = {word: Counter() for word in offload}
    any_program = next(iter(programs.values()))
    own = {name for program in programs.values() for name in program.main.bound(*PARAMETERS)}
    for name, type_ in stored.items():
        size = local_bytes(type_, any_program)
        if name in own and type_.shape and size:
            for word, count in (("optimizer", moments.get(name, 0)), ("parameters", 1)):
                if word in rooms and count:
                    rooms[word][size] += count
    if "parameters" in rooms:
        rooms["parameters"] += sum((_stored(program, "weight", offload) for program in programs.values()), Counter())
    if "activations" in rooms:
        rooms["activations"] = _waiting(programs, actions, offload)
    return rooms


def _stored(program: Program, kind: str, offload: Collection[str]) -> Counter[int]:
    """Return the sizes of the values of one kind that a program returns and that are kept away."""
    values = program.main.values()
    kept = (values[name] for key, name in program.main.returns
            if key.kind == kind and kept_away(key, values[name], offload))  # fmt: skip
    return Counter(size for value in kept if (size := local_bytes(value.type, program)))


def _waiting(programs: Mapping[str, Program], actions: Sequence[Action], offload: Collection[str]) -> Counter[int]:
    """Return the most buffers of each size that wait for backward at once."""
    most: Counter[int] = Counter()
    now: Counter[int] = Counter()
    for action in actions:
        if action.kind == FORWARD:
            now.update(_stored(programs[action.program_in(programs)], "saved", offload))
            most |= now
        elif action.kind == BACKWARD:
            forward = Action(action.stage, FORWARD, action.microbatch)
            now.subtract(_stored(programs[forward.program_in(programs)], "saved", offload))
    return most


def room_bytes(room: Mapping[int, int]) -> int:
    """Return the bytes of buffers, given their number by size."""
    return sum(size * count for size, count in room.items())
