"""``schedule``: the order of a step's work."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import isqrt
from pathlib import Path

from ....grammar.codes import (
    BAD_VALUE,
    MISSING_STATEMENT,
    NO_EFFECT,
    NO_SCHEDULE,
    SCHEDULE_MISFIT,
    UNEVEN_BATCH,
    UNREADABLE,
)
from ....grammar.diagnostics import Diagnostic, Label, PlanError, Severity
from ....grammar.nearest import did_you_mean, listed, nearest
from ....grammar.source import Source
from ....grammar.syntax import String
from ...program.step_values import DYNAMIC
from ...schedules import DELAYED, MOST_WORK, SCHEDULES, V_SHAPES, problem, timelines
from ...schedules.messages import Endless
from ...schedules.table import RowError
from ...sizes.size_range import BATCH
from ..directive import ONE_OR_MORE, Directive, Scope, argument
from ..include import read_text
from ..layouts import multiples
from .offload import Offload
from .precision import TYPES, Precision
from .sizes import Sizes
from .stage import Stage

ACCUMULATE = TYPES
"""The types in which gradients of microbatches may be added."""
TABLE_WORD = "table"
"""The word for a schedule that a file gives."""


@dataclass(frozen=True)
class Schedule(Directive):
    """The order of the work in a step. `microbatches N` runs the batch `B` in N equal parts, and adds up their
    gradients.

    With `stage` lines the schedule has a name. `gpipe`: every stage runs the forwards of all microbatches, then their
    backwards. `1f1b`: a stage runs a backward after every forward as soon as it can, and so keeps the activations of
    fewer microbatches; there must be at least as many microbatches as ranks. `interleaved`: as `1f1b`, but every rank
    has V stages (`chunks V`): ranks are idle for less time, and send more messages; the number of microbatches must be
    a multiple of the ranks. `gpipe` and `looped` take any number of microbatches.

    In other schedules a backward is two actions: `I` makes the gradients that another stage waits for, and `W` those of
    weights, later. `zb-h1` is `1f1b` so, with less idle time, and no rank has more memory than the first one of `1f1b`;
    `zb-h2` has even less idle time and twice the memory (at least twice as many microbatches as ranks);
    `interleaved-zb` is `interleaved` so. In V shapes each rank has two stages, rank r of p those of numbers r and 2p -
    1 - r; `chunks` is 2 and need not be written, and any number of microbatches will do. `zbv` has the memory of `1f1b`
    and hardly any idle time; with many ranks `v-half` has about half of the activations, `v-min` a third (on two ranks
    no less). `dualpipev` puts a forward of one stage beside a backward of the other (at least as many microbatches as
    stages).

    `async` (PipeDream-2BW) changes the algorithm. A rank begins the next step before it ends this one, so a step makes
    its gradients with the weights before the last update: W(t+1) is W(t), updated by the gradients at W(t-1), and W(-1)
    is W(0). With p ranks of equal work and 2p - 2 microbatches or more no rank is ever idle; rank r then holds 2(p - r)
    - 1 microbatches. There must be at least as many microbatches as ranks. Losses, clipping, averages and rates are
    those of a step's own batch. Checkpoints hold both weights; evaluation and exports take the newest. Steps overlap on
    the plan's own `data`; a loop that passes batches gives the next one too (`session.step(batch, coming=after)`), or
    its steps follow each other, with the same numbers. All levels of `zero` work. `async` refuses a dynamic loss scale,
    `offload`, and models whose steps change buffers.

    `table "FILE"` reads the order from a file, relative to the plan's folder. It has a line for each rank of the axis,
    with `F` and `B` of every stage and microbatch, as `rank 0: 0F0 0F1 0B0 0B1`; `I` and `W` may stand for a `B`. The
    lines may stand in any order, and `#` begins a comment; `0F(0..3)` is `0F0 0F1 0F2 0F3`. With p ranks, rank r has
    stage r and every p-th stage after it; lines such as `stages of rank 0: 0 3` say otherwise. The file may also be CSV
    as torch's pipelines write it, with `_dump_csv(name, format="compute_only")`: the line of rank 0, 1, ... with a cell
    such as `0F2` for each piece of work. `looped` is a table that parc ships (breadth first: a rank's chunks one after
    the other): `schedule looped microbatches 8 chunks 2`.

    `accumulate bf16` adds up the gradients of microbatches in bfloat16: they take half the memory, and every sum is
    rounded. By default, `accumulate fp32`, gradients keep their own type: those of float64 weights are added up in
    float64. The sum over ranks, the norm and the update stay in float32.
    """

    USAGE = (
        "schedule [SCHEDULE] microbatches N [chunks N] [accumulate TYPE]"
        " | table TABLE microbatches N [chunks N] [accumulate TYPE]"
    )
    LAYOUT = True
    LIMITS = (("microbatches", ONE_OR_MORE), ("chunks", ONE_OR_MORE))
    TRAINING = (("accumulate", "adds up gradients"),)

    name: str = argument(lambda line: TABLE_WORD if TABLE_WORD in line else line.text("schedule"))
    """One of ``SCHEDULES``, ``table``, or empty: one stage, its microbatches one after the other."""
    microbatches: int = argument(lambda line: int(line.number("microbatches", 1)))
    chunks: int = argument(lambda line: int(line.number("chunks", 2 if line.text("schedule") in V_SHAPES else 1)))
    accumulate: str = argument(lambda line: line.text("accumulate", "fp32"))
    table: str = argument(lambda line: next((i.text for i in line.items(TABLE_WORD) if isinstance(i, String)), ""))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        yield from self._check_name(scope)
        yield from self._check_accumulate()
        yield from self._check_batch(scope)
        yield from self._check_delayed(scope) if self.name in DELAYED else ()

    def _misfit(self, stages: int) -> Iterator[Diagnostic]:
        """An error if the schedule does not accept so many stages, microbatches or chunks."""
        reason = problem(self.name, stages, self.microbatches, self.chunks)
        if reason is not None:
            message, _, way = reason.partition(": ")
            yield Diagnostic(SCHEDULE_MISFIT, message, Label(self.span), help=way)

    def table_of(self, folder: Path, stages: int) -> str:
        """The text of the schedule's table; empty without one.

        Raises:
            PlanError: it cannot be read, or is not of these stages, microbatches and chunks.
        """
        if self.name != TABLE_WORD:
            return ""
        text, reason = read_text(folder / self.table)
        if text is None:
            message, label = f"`{self.table}` cannot be read: {reason}", Label(self.arguments.span(TABLE_WORD))
            help_ = _schedule_meant(self.table, "name a file with a line for each rank, as `rank 0: 0F0 0F1 0B0 0B1`")
            raise PlanError([Diagnostic(UNREADABLE, message, label, help=help_)])
        try:
            timelines(TABLE_WORD, stages, self.microbatches, self.chunks, text=text)
        except ValueError as error:
            label = Label(self.arguments.span(TABLE_WORD))
            related: tuple[Label, ...] = ()
            if isinstance(error, RowError) and error.shown:
                label, related = Label(Source(self.table, text).span_of(error.line)), (Label(label.span, "read here"),)
            help_ = "list `F` and `B`, or `F`, `I` and `W`, of every stage and microbatch once, in the row of its rank"
            if isinstance(error, Endless):
                help_ = error.way
            raise PlanError([Diagnostic(SCHEDULE_MISFIT, str(error), label, related, help=help_)]) from None
        return text

    def _check_name(self, scope: Scope) -> Iterator[Diagnostic]:
        stages = scope.all(Stage)
        where = self.arguments.span(TABLE_WORD if self.name == TABLE_WORD else "schedule")
        if self.name not in ("", *SCHEDULES, TABLE_WORD):
            help_ = did_you_mean(self.name, SCHEDULES, f"there are {listed(SCHEDULES)}, and `table` with a file")
            yield Diagnostic(BAD_VALUE, f"no schedule is called `{self.name}`", Label(where), help=help_)
        elif stages and not self.name:
            help_ = f"name one before `microbatches`: {listed(SCHEDULES, 'or')}, or `table` and a file"
            message, related = (
                "the plan has stages, but its schedule has no name",
                (Label(stages[0].span, "the stages"),),
            )
            yield Diagnostic(NO_SCHEDULE, message, Label(self.span), related, help=help_)
        elif self.name and not stages and "stage" not in scope.broken:
            name = "a table" if self.name == TABLE_WORD else f"`{self.name}`"
            message = f"{name} is an order of stages, and the plan has no stages"
            help_ = "add a line such as `stage balanced over pp`, or write `schedule microbatches N` alone"
            yield Diagnostic(NO_SCHEDULE, message, Label(where), help=help_)
        if self.name == TABLE_WORD and not self.table.strip():
            word = self.arguments.word(TABLE_WORD)
            message = f"`{word.text}` is not a name in double quotes" if word else "the table's file has no name"
            help_ = _schedule_meant(word.text if word else "", 'write as `schedule table "order.txt" microbatches 8`')
            yield Diagnostic(BAD_VALUE, message, Label(where), help=help_)
        if self.chunks > 1 and not self.name:
            message = "`chunks` is the number of stages of a rank, and the plan has no stages"
            help_ = "remove `chunks`, or give stages and a schedule's name"
            yield Diagnostic(SCHEDULE_MISFIT, message, Label(self.arguments.span("chunks")), help=help_)
        ranks = self._ranks(scope)
        yield from self._misfit(ranks * self.chunks) if ranks > 1 and self.microbatches >= 1 else ()
        if self.microbatches > MOST_WORK and not stages:
            message = f"{self.microbatches} microbatches are over {MOST_WORK:,} forwards"
            yield Diagnostic(SCHEDULE_MISFIT, message, Label(self.span), help="write fewer")

    def _check_delayed(self, scope: Scope) -> Iterator[Diagnostic]:
        """Errors for what a step cannot have that begins before the one before it has ended."""
        where = Label(self.arguments.span("schedule"), "read here")
        for line in (line for line in scope.all(Precision) if line.loss_scale == DYNAMIC):
            message = f"a step of `{self.name}` begins before it is known whether the one before it is skipped"
            help_ = "write `precision bf16`, or a number as the loss scale, or `schedule 1f1b`"
            label = Label(line.arguments.span("loss_scale"))
            yield Diagnostic(SCHEDULE_MISFIT, message, label, (where,), help=help_)
        for offload in scope.all(Offload):
            message = (
                f"`{self.name}` needs the weights and activations of two steps at once; `offload` keeps one step's"
            )
            help_ = "remove the `offload` line, or write `schedule 1f1b`"
            yield Diagnostic(SCHEDULE_MISFIT, message, Label(offload.span), (where,), help=help_)

    def _ranks(self, scope: Scope) -> int:
        """The ranks of the pipeline's axis, if the schedule is one of parc's own; else 1."""
        axis = next((stage.axis.text for stage in scope.all(Stage)), "")
        return scope.mesh.size(axis) if self.name in SCHEDULES and self.chunks >= 1 and axis in scope.mesh else 1

    def _check_batch(self, scope: Scope) -> Iterator[Diagnostic]:
        if self.microbatches <= 1 or "sizes" in scope.broken:
            return
        label = Label(self.arguments.span("microbatches"))
        batches = [(sizes, size) for sizes in scope.all(Sizes) for name, size in sizes.ranges if name == BATCH]
        if not batches:
            message = "there is no size `B` to divide into microbatches"
            yield Diagnostic(MISSING_STATEMENT, message, label, help="call the inputs' batch dim `B`")
        for sizes, size in batches:
            parts = size.low if size.fixed else size.step
            if parts % self.microbatches:
                message = f"B={size.low if size.fixed else size} does not divide into {self.microbatches} microbatches"
                related = (Label(sizes.span, "the batch of one step"),)
                near = " or ".join(map(str, multiples(parts, self.microbatches)))
                step = "" if size.fixed else "a step of the range that is "
                help_ = f"choose {step}a multiple of {self.microbatches}, such as {near}"
                counts = " or ".join(f"`microbatches {count}`" for count in self._dividing(parts, self._ranks(scope)))
                help_ = f"write {counts}, or {help_}" if counts else help_
                yield Diagnostic(UNEVEN_BATCH, message, label, related, help=help_)

    def _dividing(self, parts: int, ranks: int) -> Iterator[int]:
        """Return the numbers of microbatches next to this one, below and above, that divide the batch and that the
        schedule accepts."""
        low = [n for n in range(1, min(isqrt(max(parts, 0)), MOST_WORK) + 1) if parts % n == 0]
        every = sorted({*low, *(parts // n for n in low)})
        above = bisect(every, self.microbatches)
        for side in (reversed(every[:above]), every[above:]):
            few = (n for n in side if n * ranks * self.chunks <= MOST_WORK)
            # acceptance depends on the remainder of n by the ranks alone: a small n stands for a large one
            fits = (n for n in few if ranks == 1 or not problem(
                self.name, ranks * self.chunks, n if n < ranks else ranks + n % ranks, self.chunks))  # fmt: skip
            yield from islice(fits, 1)

    def _check_accumulate(self) -> Iterator[Diagnostic]:
        label = Label(self.arguments.span("accumulate"))
        if self.accumulate not in ACCUMULATE:
            message = f"gradients are not added up in `{self.accumulate}`"
            help_ = "write `accumulate fp32`, which leaves those of float64 as they are, or `accumulate bf16`"
            yield Diagnostic(BAD_VALUE, message, label, help=help_)
        elif self.accumulate != "fp32" and self.microbatches == 1:
            message = "one microbatch has nothing to add up"
            help_ = "remove `accumulate`, or give more microbatches"
            yield Diagnostic(NO_EFFECT, message, label, help=help_, severity=Severity.WARNING)


def _schedule_meant(table: str, otherwise: str) -> str:
    """Return a help text with the schedule of parc's own that a table's name may mean, or with all of them."""
    near = nearest(Path(table).stem, SCHEDULES, 1)
    known = f"{otherwise}; without `table` there are {listed(SCHEDULES)}"
    return f"did you mean `schedule {near[0]}`? no file is needed" if near else known
