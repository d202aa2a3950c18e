"""Pipeline schedules: the order and the rank of each stage's work in a step; one file each, a function or a table.

A schedule maps (stages, microbatches, chunks) to a timeline of work for each of p = stages / chunks ranks. A stage is
on the rank that has its work. ``timelines`` completes the work to whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path

from ..program.actions import Action, StageRanks, one_step, stage_ranks, whole_step
from .asynchronous import asynchronous
from .gpipe import gpipe
from .interleaved import interleaved, interleaved_zb
from .messages import add_messages
from .one_f_one_b import one_f_one_b
from .table import table_schedule
from .timeline import most_live
from .v_shapes import dualpipev, v_half, v_min, zbv
from .zero_bubble import split_last, zb_h1, zb_h2

Kinds = tuple[str, ...]
ScheduleFunction = Callable[[int, int, int], tuple[tuple[Action, ...], ...]]

SCHEDULES: Mapping[str, ScheduleFunction] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "interleaved-zb": interleaved_zb,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipev": dualpipev,
    "async": asynchronous,
    **{file.stem: table_schedule(file.read_text("utf-8")) for file in sorted(Path(__file__).parent.glob("*.txt"))},
}
ONE_CHUNK = ("gpipe", "1f1b", "zb-h1", "zb-h2", "async")
"""The schedules with one stage on each rank."""
V_SHAPES = ("zbv", "v-half", "v-min", "dualpipev")
"""The schedules that go down the ranks and come back up: two stages on each rank."""
DELAYED = ("async",)
"""The schedules whose steps compute with the weights before the last update."""
SEVERAL_CHUNKS = {"interleaved": "1f1b", "interleaved-zb": "zb-h1"}
"""The schedules with several stages on each rank, and those that they are with one."""
MOST_WORK = 1_000_000
"""The most forwards of a step: these take seconds to list and prove."""


def timelines(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    *,
    axis: str = "pp",
    also: Collection[str] = (),
    text: str = "",
    as_run: bool = False,
) -> dict[str, tuple[Action, ...]]:
    """Return the timeline of every role ``{axis}{rank}``: ``SCALE``, the schedule's work with its messages, ``REDUCE``
    and ``STEP``. ``also`` names optional kinds of the step, such as ``COUNT``. ``text`` is the table of the schedule
    called ``table``. With ``as_run`` some backwards are in two phases, as builds run them (``split_last``).

    >>> from parc.compiler.program.actions import schedule_text
    >>> print(schedule_text(timelines("1f1b", 2, 2)), end="")
    pp0: 0SCALE 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0LOSS 0REDUCE 0STEP
    pp1: 1SCALE 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1LOSS 1REDUCE 1STEP

    Raises:
        ValueError: ``problem`` says why.
    """
    work = _schedule_work(name, stages, microbatches, chunks, text)
    ranks = stage_ranks(work)
    first = {rank: stage for stage, rank in reversed([*enumerate(ranks)])}
    work = split_last(work, ranks) if as_run else work
    ahead = any(action.ahead for actions in work for action in actions)
    return {
        f"{axis}{rank}": whole_step(actions, first[rank], microbatches, also, ahead)
        for rank, actions in enumerate(add_messages(work))
    }


def places_of(name: str, stages: int, microbatches: int, chunks: int = 1, *, text: str = "") -> StageRanks:
    """Return the rank of each stage of a schedule.

    >>> places_of("looped", 6, 1, 2)
    (0, 1, 2, 0, 1, 2)

    Raises:
        ValueError: ``problem`` says why.
    """
    return stage_ranks(_schedule_work(name, stages, microbatches, chunks, text))


def live_microbatches(name: str, stages: int, microbatches: int, chunks: int = 1, *, text: str = "") -> tuple[int, ...]:
    """Return, for each stage, the microbatches whose activations it holds when its rank holds the most of all its
    stages.

    >>> live_microbatches("1f1b", 3, 8), live_microbatches("interleaved", 4, 4, 2)
    ((3, 2, 1), (3, 2, 2, 1))

    Raises:
        ValueError: ``problem`` says why.
    """
    live: dict[int, int] = {}
    for actions in _schedule_work(name, stages, microbatches, chunks, text):
        live |= most_live(actions)
    return tuple(live[stage] for stage in range(stages))


def kinds_of_stages(name: str, stages: int, microbatches: int, chunks: int = 1, *, text: str = "") -> tuple[Kinds, ...]:
    """Return, for each stage, the kinds of work that it does as builds run a schedule, the last of the step last.

    >>> kinds_of_stages("1f1b", 2, 2)
    (('F', 'B'), ('F', 'I', 'W'))

    Raises:
        ValueError: ``problem`` says why.
    """
    work = _schedule_work(name, stages, microbatches, chunks, text)
    kinds: list[dict[str, None]] = [{} for _ in range(stages)]
    for action in (action for actions in split_last(work, stage_ranks(work)) for action in one_step(actions)):
        kinds[action.stage].pop(action.kind, None)
        kinds[action.stage][action.kind] = None
    return tuple(map(tuple, kinds))


@lru_cache(maxsize=4096)
def problem(name: str, stages: int, microbatches: int, chunks: int = 1, *, text: str = "") -> str | None:
    """Return the reason why a schedule does not accept these sizes, with the way out; None if it does."""
    try:
        timelines(name, stages, microbatches, chunks, text=text)
    except ValueError as error:
        return str(error)
    return None


@lru_cache(maxsize=64)
def _schedule_work(name: str, stages: int, microbatches: int, chunks: int, text: str) -> tuple[tuple[Action, ...], ...]:
    """Return the work of each rank, without messages, by a schedule that accepts these sizes."""
    schedule = table_schedule(text) if name == "table" else SCHEDULES.get(name)
    if schedule is None:
        known = ", ".join(f"`{known}`" for known in SCHEDULES)
        raise ValueError(f"there is no schedule `{name}`: choose {known}, or `table` and a file")
    if stages * microbatches > MOST_WORK:
        raise ValueError(
            f"{stages} stages with {microbatches} microbatches are over {MOST_WORK:,} forwards: write fewer"
        )
    if chunks > 1 and name in ONE_CHUNK:
        several = next((row for row, one in SEVERAL_CHUNKS.items() if one == name), "interleaved")
        raise ValueError(f"`{name}` has one stage a rank, not {chunks} chunks: remove `chunks`, or choose `{several}`")
    if chunks == 1 and name in SEVERAL_CHUNKS:
        raise ValueError(f"`{name}` has 2 or more stages a rank: write `chunks 2`, or choose `{SEVERAL_CHUNKS[name]}`")
    if chunks != 2 and name in V_SHAPES:
        raise ValueError(f"`{name}` has 2 stages a rank, not {chunks}: remove `chunks`")
    if stages % chunks:
        raise ValueError(
            f"{stages} stages do not divide into {chunks} chunks: on p ranks, write p times {chunks} stages"
        )
    if stages // chunks == 1 and stages > 1:
        lie = f"{stages} stages in {chunks} chunk{'s' * (chunks != 1)}"
        raise ValueError(f"{lie} are on one rank: a pipeline takes 2 or more")
    return schedule(stages, microbatches, chunks)
