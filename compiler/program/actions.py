"""Actions: the pieces of a step in the order in which a role does them, with their text form ``0F2``. The table of
their kinds is the one source for every pass, schedule, check and run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from .binding import Kind

REFERENCE = "reference"
"""The action of a captured graph's program, of which every function is a main one."""
COUNTING, SCALING, UNSHARD, FORWARD, BACKWARD = "COUNT", "SCALE", "UNSHARD", "F", "B"
INPUT_GRADIENTS, WEIGHT_GRADIENTS = "I", "W"
"""The two phases of a backward that is split: the gradients that other stages wait for, then those of weights."""
AVERAGING, REDUCE, RESCALE, STEP, LOADS = "LOSS", "REDUCE", "RESCALE", "STEP", "LOADS"
PLACES = ("before", "work", "after", "end")
PHASES = ("forward", "backward", "step")
AHEAD = 2
"""The number of actions between the start of a receive and the action that waits for it, which messages overlap."""

Purpose = Literal["inference", "evaluation", "training"]
"""The purpose of programs. Inference makes the model's outputs; evaluation makes the loss too; training also has a
backward and an update."""
PURPOSES: tuple[Purpose, ...] = ("inference", "evaluation", "training")


@dataclass(frozen=True, slots=True)
class ActionRow:
    """A kind of action: its place in a step, the program that it runs, and the values that this program reads and
    returns.

    ``ActionRow("COUNT", "before", "step", each=True, returns=("count",))``: ahead of the work, for each microbatch, a
    program that all roles share, whose results of the kind ``count`` are added up for whoever reads ``count``.
    """

    kind: str
    place: Literal["before", "work", "after", "end"]
    """The place in a step: ``before`` the work of a schedule, part of it, ``after`` it, or at the step's ``end``."""
    program: Literal["step", "stage", "role", ""]
    """The owner of the program that the action runs: the whole step, each stage, each role, or nobody."""
    each: bool = False
    """True where the action is done once a microbatch; else once a step."""
    reads: tuple[Kind, ...] = ()
    """The kinds of values, returned by other actions, that the program reads. Any program may read the model, its
    inputs, and the state of steps as the last step left it."""
    returns: tuple[Kind, ...] = ()
    """The kinds of values that the program returns, beside those that it hands to another stage."""
    optional: bool = False
    """True where a step has the action only if there is a program for it."""
    purpose: Purpose = "training"
    """The first of the ``PURPOSES`` for which the action is done; later ones do it too."""
    compiled: bool = False
    """True where ``--compile`` compiles the action's program. Programs that run once a step are short, and REDUCE grows
    with the number of layers: they are not worth it."""
    phase: Literal["forward", "backward", "step"] = "step"
    """The phase in which ``expect`` and ``forbid`` count the action's collectives."""
    to: int = 0
    """The distance, for work, from a stage to the one that takes its results; 0 where no stage does."""
    instead_of: str = ""
    """The kind of work of which this one is a phase: the phases together stand for it, for some microbatches or all."""
    slots: int = 1
    """The duration of work in a drawing."""
    legend: str = ""
    """The name of work beside its colors in a drawing; by default its phase."""
    colors: tuple[str, ...] = ("#b08ed0",)
    """The colors of work in a drawing, a shade for each of a role's stages."""

    @property
    def works(self) -> bool:
        """True where the action is work, the part of a step that a schedule puts in order."""
        return self.place == "work"

    @property
    def accumulates(self) -> bool:
        """True for work whose gradients of parameters are added up over microbatches. A stage's activations of a
        microbatch are held until then."""
        return self.works and "gradient" in self.returns

    def serves(self, purpose: Purpose) -> bool:
        """Return whether programs of a purpose do the action."""
        return PURPOSES.index(self.purpose) <= PURPOSES.index(purpose)

    @property
    def follows(self) -> tuple[str, ...]:
        """The kinds of actions whose results this one reads: of work the one of the same stage and microbatch, else all
        of them."""
        read = {*self.reads}
        return tuple(row.kind for row in ACTIONS.values() if row is not self and not read.isdisjoint(row.returns))


ACTIONS: dict[str, ActionRow] = {row.kind: row for row in (
    ActionRow(COUNTING, "before", "step", each=True, returns=("count",), optional=True, purpose="evaluation",
              phase="forward"),
    ActionRow(SCALING, "before", "step", reads=("count",), returns=("scale", "unscale", "term"),
              purpose="evaluation", phase="forward"),
    ActionRow(UNSHARD, "before", "role", returns=("weight",), optional=True, purpose="inference", phase="forward"),
    ActionRow(FORWARD, "work", "stage", each=True, reads=("weight", "term"),
              returns=("loss", "load", "saved", "buffer", "output"), purpose="inference", compiled=True,
              phase="forward", to=1, colors=("#4c8ed9", "#7db3ec", "#b1d3f7")),
    ActionRow(BACKWARD, "work", "stage", each=True, reads=("scale", "weight", "term", "saved"), returns=("gradient",),
              compiled=True, phase="backward", to=-1, slots=2, colors=("#3f9b5b", "#74be88", "#aedcba")),
    ActionRow(INPUT_GRADIENTS, "work", "stage", each=True, reads=("scale", "weight", "term", "saved"),
              returns=("deferred",), optional=True, compiled=True, phase="backward", to=-1, instead_of=BACKWARD,
              legend="gradients of inputs", colors=("#e0913f", "#ecb67f", "#f6d9ba")),
    ActionRow(WEIGHT_GRADIENTS, "work", "stage", each=True, reads=("scale", "weight", "term", "deferred"),
              returns=("gradient",), optional=True, compiled=True, phase="backward", instead_of=BACKWARD,
              legend="gradients of weights", colors=("#8a9a2b", "#b4c062", "#d6dea6")),
    ActionRow(AVERAGING, "after", "role", reads=("loss", "scale", "unscale"), returns=("loss",),
              purpose="evaluation"),
    ActionRow(REDUCE, "after", "role", reads=("unscale", "gradient"), returns=("gradient", "grad_norm", "state")),
    ActionRow(LOADS, "after", "role", reads=("load",), returns=("metric", "buffer"), optional=True),
    ActionRow(RESCALE, "after", "step", reads=("grad_norm",), returns=("state",), optional=True),
    ActionRow(STEP, "end", ""),
)}  # fmt: skip
"""Every kind of action except messages, which follow from the work whose results they carry."""


def step_kinds(*places: str) -> Iterator[ActionRow]:
    """Return the rows of some places, or of all, in the order of a step."""
    for place in places or PLACES:
        yield from (row for row in ACTIONS.values() if row.place == place)


def work_kinds() -> tuple[str, ...]:
    """Return the kinds of work, which a schedule puts in order."""
    return tuple(row.kind for row in step_kinds("work"))


def phases_of(kind: str) -> tuple[str, ...]:
    """Return the kinds of work that together stand for another kind: those of a split backward.

    >>> phases_of("B")
    ('I', 'W')
    """
    return tuple(row.kind for row in step_kinds("work") if row.instead_of == kind)


def kinds_to(distance: int) -> tuple[str, ...]:
    """Return the kinds of work whose results go to the stage at a distance: a stage does one of them for each
    microbatch.

    >>> kinds_to(-1)
    ('B', 'I')
    """
    return tuple(row.kind for row in step_kinds("work") if row.to == distance)


def direction_of(kind: str) -> str:
    """Return the first kind of work whose results go the way of those of another: all travel on one channel.

    >>> direction_of("I")
    'B'
    """
    return kinds_to(ACTIONS[kind].to)[0]


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One side of a message: the kind of work whose results it carries, whether it sends them, and the distance from
    its own stage to that of the other side."""

    work: str
    sends: bool
    to: int


@cache
def message_row(kind: str) -> MessageRow | None:
    """Return the row of a kind of action that is a message, such as ``SEND_F`` or ``RECV_F``; None for other kinds.

    >>> message_row("RECV_B")
    MessageRow(work='B', sends=False, to=1)
    """
    word, _, work = kind.partition("_")
    row = ACTIONS.get(work)
    if row is None or not row.to or word not in ("SEND", "RECV"):
        return None
    return MessageRow(work, word == "SEND", row.to if word == "SEND" else -row.to)


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a stage, and its microbatch if it has one; prints as ``0F2``, ``1RECV_F2``, ``0REDUCE``, and with a
    ``+`` if it is of the next step, as ``0F2+``.

    ``SEND_F`` hands what a stage's ``F`` made to the stage after it, whose side is ``RECV_F``; ``SEND_B`` hands
    gradients to the stage before it, whose side is ``RECV_B``. What a role does once has the number of its first stage.
    """

    stage: int
    kind: str
    microbatch: int = 0
    ahead: bool = False
    """True for an action of the next step, which a role does before it ends this one."""

    def __str__(self) -> str:
        number = self.microbatch if _per_microbatch(self.kind) else ""
        return f"{self.stage}{self.kind}{number}{'+' * self.ahead}"

    @property
    def works(self) -> bool:
        """True where the action is work, the part of a step that a schedule puts in order."""
        return self.kind in ACTIONS and ACTIONS[self.kind].works

    @property
    def accumulates(self) -> bool:
        """True for work whose gradients of parameters are added up over microbatches."""
        return self.kind in ACTIONS and ACTIONS[self.kind].accumulates

    @property
    def message(self) -> MessageRow | None:
        """The row of the message that the action sends or receives; None where it does neither."""
        return message_row(self.kind)

    def serves(self, purpose: Purpose) -> bool:
        """Return whether programs of a purpose do the action; a message goes with its work."""
        message = self.message
        return ACTIONS[self.kind if message is None else message.work].serves(purpose)

    def program_in(self, programs: Collection[str]) -> str:
        """Return the key of the action's program among a role's: ``2F`` where there are stages."""
        return self.kind if self.kind in programs else f"{self.stage}{self.kind}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``.

        Raises:
            ValueError: not an action.
        """
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)(\+?)", text)
        known = match is not None and (match[2] in ACTIONS or message_row(match[2]) is not None)
        if match is None or not known or bool(match[3]) != _per_microbatch(match[2]):
            raise ValueError(f"`{text}` is not an action such as `0F2`")
        return cls(int(match[1]), match[2], int(match[3] or 0), bool(match[4]))


def _per_microbatch(kind: str) -> bool:
    """Return whether actions of a kind are done once a microbatch, as messages are."""
    return kind not in ACTIONS or ACTIONS[kind].each


def send_kind(work: str) -> str:
    """The kind that sends the results of some work."""
    return f"SEND_{work}"


def receive_kind(work: str) -> str:
    """The kind that receives the results of some work."""
    return f"RECV_{work}"


def one_step(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions of a single step in order, from a role's, of which some are of the next step. What is done of
    a step before the one before it has ended comes first.

    >>> " ".join(map(str, one_step([Action.parse(word) for word in "0F1 0B0 0F0+ 0B1 0STEP".split()])))
    '0F0 0F1 0B0 0B1 0STEP'
    """
    first = (replace(action, ahead=False) for action in actions if action.ahead)
    return (*first, *(action for action in actions if not action.ahead))


def whole_step(
    work: Sequence[Action], stage: int, microbatches: int, also: Collection[str] = (), ahead: bool = False
) -> tuple[Action, ...]:
    """Return a role's timeline: its work and messages, with the actions before and after; ``also`` has the optional
    kinds. With ``ahead`` some of the work is of the next step, and what comes before the work of that step comes before
    all of that."""

    def of(*places: str) -> Iterator[Action]:
        for row in step_kinds(*places):
            if not row.optional or row.kind in also:
                yield from (Action(stage, row.kind, index, ahead and row.place == "before")
                            for index in range(microbatches if row.each else 1))  # fmt: skip

    begins = next((at for at, action in enumerate(work) if action.ahead), len(work)) if ahead else 0
    return (*work[:begins], *of("before"), *work[begins:], *of("after", "end"))


def accumulation(microbatches: int, *, also: Collection[str] = ()) -> tuple[Action, ...]:
    """Return the timeline of one stage that does its microbatches one after the other: gradient accumulation.

    >>> " ".join(map(str, accumulation(2, also=["COUNT"])))
    '0COUNT0 0COUNT1 0SCALE 0F0 0B0 0F1 0B1 0LOSS 0REDUCE 0STEP'
    """
    kinds = [row.kind for row in step_kinds("work") if not row.optional or row.kind in also]
    work = [Action(0, kind, index) for index in range(microbatches) for kind in kinds]
    return whole_step(work, 0, microbatches, also)


StageRanks = tuple[int, ...]
"""The rank along the pipeline's axis on which each stage lies, which is the number of its role."""


def stage_ranks(timelines: Sequence[Sequence[Action]]) -> StageRanks:
    """Return the rank of each stage: the one whose timeline has the stage's work.

    >>> rows = "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"
    >>> stage_ranks([[Action.parse(word) for word in row.split()] for row in rows])
    (0, 1, 1, 0)

    Raises:
        ValueError: a stage has work on two ranks, or on none.
    """
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(timelines):
        for action in actions:
            if action.works and rank_of.setdefault(action.stage, rank) != rank:
                raise ValueError(f"stage {action.stage} has work on rank {rank_of[action.stage]} and on rank {rank}")
    missing = [stage for stage in range(max(rank_of, default=0)) if stage not in rank_of]
    if missing or not rank_of:
        raise ValueError(f"stage {next(iter(missing), 0)} has no work on any rank")
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def stages_in_turn(stages: int, ranks: int) -> StageRanks:
    """Return the ranks of stages in turn, as in most schedules: stage k on rank k mod ``ranks``."""
    return tuple(stage % ranks for stage in range(stages))


def schedule_text(timelines: Mapping[str, Sequence[Action]]) -> str:
    """Return the text of ``schedule.txt``, one line for each role."""
    return "".join(f"{role}: {' '.join(map(str, actions))}\n" for role, actions in timelines.items())


def parse_schedule(text: str) -> dict[str, tuple[Action, ...]]:
    """The inverse of ``schedule_text``.

    Raises:
        ValueError: a line that is not ``role: actions``.
    """
    timelines = {}
    for number, line in enumerate(text.splitlines(), 1):
        role, colon, actions = line.partition(": ")
        if not colon:
            raise ValueError(f"line {number} of the schedule is not `role: actions`")
        timelines[role] = tuple(Action.parse(word) for word in actions.split())
    return timelines
