"""Schedules as text tables: a row for each rank, with work as in ``schedule.txt``, but without messages.

``rank 0: 0F0 0F1 0B0 0B1`` lists the work of rank 0; ``rank r:`` is the row of every rank that has none of its own. In
a table for all sizes, numbers are ranges in parentheses of whole numbers and of p ranks, v chunks, n = p v stages, m
microbatches and r, the rank: ``(0..m-1)``, or ``(m-1,m-2..0)`` with the first, the second and the last number.
``(0..1)F(0..2)`` is ``0F0 0F1 0F2 1F0 1F1 1F2``. ``#`` starts a comment.

Stage k is on rank k mod p, unless lines such as ``stages of rank r: (r) (n-1-r)`` say which stages a rank has.

A table may also be CSV as torch's pipelines write it (``torch.distributed.pipelining``): the line of rank 0, 1, ...
with a cell such as ``0F2`` for each piece of work. There a rank has the stages of which it does work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod

from ..program.actions import Action, StageRanks, message_row, phases_of, stages_in_turn, step_kinds, work_kinds

TableRow = tuple[int, str]
"""A line's number, and its words."""
TableRows = tuple[Mapping[str, TableRow], Mapping[str, TableRow]]
"""The rows of a table by rank: of work, and of stages where it says which a rank has."""


_NO_WORK = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""The actions of torch's pipelines that are neither work nor messages."""


class RowError(ValueError):
    """An error in one line of a table. ``line`` is its number, from 1; ``shown`` is False where the file is no table at
    all, so that its text should not be shown."""

    def __init__(self, line: int, message: str, shown: bool = True) -> None:
        super().__init__(f"line {line} of the table{message}")
        self.line = line
        self.shown = shown


def table_schedule(text: str) -> Callable[[int, int, int], tuple[tuple[Action, ...], ...]]:
    """Return the schedule that a table's text defines.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import draw, simulate
    >>> print(draw(simulate(timelines("looped", 4, 4, chunks=2), backward=1)))
    pp0 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3         2B3 2B2 2B1 2B0 0B3 0B2 0B1 0B0  idle 11 %
    pp1     1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0      idle 11 %

    Raises:
        RowError: a line is no row. The schedule raises it for work of another rank, of other sizes, or listed twice.
        ValueError: by the schedule, if the table lacks work of the sizes.
    """
    rows, stage_lines = _csv_rows(text) if _is_csv(text) else _rows(text)
    return lambda stages, microbatches, chunks: _timelines(rows, stage_lines, stages, microbatches, chunks)


def _rows(text: str) -> TableRows:
    rows: dict[str, TableRow] = {}
    stage_lines: dict[str, TableRow] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.partition("#")[0].strip()
        match = re.fullmatch(r"(stages +of +)?rank +(r|[0-9]{1,6}) *:(.*)", line)
        if line and match is None:
            shown = bool(rows or stage_lines) or line.startswith(("rank", "stages"))
            raise RowError(number, f" is not `rank 0: 0F0 0B0`{f': `{line[:80]}`' if shown else ''}", shown)
        if match is not None:
            kind, rank = (stage_lines if match[1] else rows), match[2] if match[2] == "r" else str(int(match[2]))
            if rank in kind:
                raise RowError(number, f" is a second row of {'the stages of ' if match[1] else ''}rank {rank}")
            kind[rank] = number, match[3]
    return rows, stage_lines


def _is_csv(text: str) -> bool:
    """Return whether a table is CSV: its first line with words is cells of work."""
    first = next((line for line in text.split("\n") if line.strip(" ,\r")), "")
    return "," in first and re.match(r"[ ,]*\(?[0-9]+[A-Z]", first) is not None


def _csv_rows(text: str) -> TableRows:
    """Return the rows of a table that is CSV. An empty cell is a slot in which the rank waits, and
    ``(0F7;1B3)OVERLAP_F_B`` are two pieces that torch begins together: here they follow each other.

    Raises:
        RowError: a cell is no work, or a stage has work on two ranks.
    """
    rows, stage_lines, rank_of = dict[str, TableRow](), dict[str, TableRow](), dict[int, int]()
    for rank, line in enumerate(text.rstrip().split("\n")):
        number, words = rank + 1, re.sub(r"\(([^()]*)\)OVERLAP_F_B|,", r" \1 ", line).replace(";", " ").split()
        for word in words:
            match = re.fullmatch(r"([0-9]{1,6})([A-Z_]+)[0-9]{0,6}", word)
            if match is None:
                raise RowError(number, f": `{word[:80]}` is not work such as `0F2`")
            if match[2] in _NO_WORK or message_row(match[2]) is not None:
                message = f": `{word}` is no work, and parc places messages, gathers and sums itself"
                raise RowError(number, f'{message}: write the file with `_dump_csv(name, format="compute_only")`')
            if rank_of.setdefault(int(match[1]), rank) != rank:
                raise RowError(number, f": stage {match[1]} is of rank {rank_of[int(match[1])]} and of rank {rank}")
        rows[str(rank)] = number, " ".join(words)
        stage_lines[str(rank)] = number, " ".join(str(stage) for stage in sorted(rank_of) if rank_of[stage] == rank)
    return rows, stage_lines


def _timelines(
    rows: Mapping[str, TableRow], stage_lines: Mapping[str, TableRow], stages: int, microbatches: int, chunks: int
) -> tuple[tuple[Action, ...], ...]:
    sizes = {"p": stages // chunks, "v": chunks, "n": stages, "m": microbatches}
    timelines: list[dict[Action, int]] = []  # the number of each action's line
    for table in (stage_lines, rows):
        for row, (number, _) in table.items():
            if row != "r" and int(row) >= sizes["p"]:
                raise RowError(number, f" is of rank {row}, and there are {sizes['p']} ranks")
    ranks = _stage_ranks(stage_lines, sizes) if stage_lines else stages_in_turn(stages, sizes["p"])
    for rank in range(sizes["p"]):
        number, words = _row_of(rows, rank, sizes, "row")
        timelines.append({})
        for action in _row_work(words, number, {**sizes, "r": rank}):
            if action.stage not in range(stages) or action.microbatch not in range(microbatches):
                raise RowError(number, f": `{action}` is not of {stages} stages and {microbatches} microbatches")
            if ranks[action.stage] != rank:
                raise RowError(number, f": `{action}` is of rank {ranks[action.stage]}, not of rank {rank}")
            if action in timelines[-1]:
                raise RowError(number, f": `{action}` is there twice")
            timelines[-1][action] = number
    listed = {action: number for actions in timelines for action, number in actions.items()}
    used, missing = {action.kind for action in listed}, list[Action]()
    kinds = [work.kind for work in step_kinds("work")
             if not work.instead_of and (work.kind in used or not work.optional)]  # fmt: skip
    for stage, kind, m in product(range(stages), kinds, range(microbatches)):
        whole, phases = Action(stage, kind, m), [Action(stage, phase, m) for phase in phases_of(kind)]
        done = [phase for phase in phases if phase in listed]
        if whole in listed and done:
            message = f": `{whole}` and `{done[0]}` are both there, and a backward is one `B`, or `I` and `W`"
            raise RowError(listed[whole], message)
        missing += [phase for phase in phases if phase not in listed] if done else [whole] * (whole not in listed)
    if missing:
        absent = f"`{missing[0]}` and {len(missing) - 1} more are" if len(missing) > 1 else f"`{missing[0]}` is"
        raise ValueError(f"{absent} not in the table: it needs `F` and `B`, or `F`, `I` and `W`, of {stages} stages and"
                         f" {microbatches} microbatches, each once")  # fmt: skip
    return tuple(map(tuple, timelines))


def _row_of(table: Mapping[str, TableRow], rank: int, sizes: Mapping[str, int], what: str) -> TableRow:
    """Return the line of a rank: its own, or the one for all ranks.

    Raises:
        ValueError: there is none.
    """
    row = table.get(str(rank), table.get("r"))
    if row is None:
        lie = f"{sizes['n']} stages in {sizes['v']} chunks are on {sizes['p']} ranks"
        raise ValueError(f"the table has no {what} of rank {rank}: {lie}")
    return row


def _stage_ranks(stage_lines: Mapping[str, TableRow], sizes: Mapping[str, int]) -> StageRanks:
    """Return the rank of each stage by the table's lines ``stages of rank``.

    Raises:
        ValueError: a stage is on no rank or on two, or there is no such stage.
    """
    rank_of: dict[int, int] = {}
    for rank in range(sizes["p"]):
        number, words = _row_of(stage_lines, rank, sizes, "line of the stages")
        for word in words.split():
            try:
                stages = _number_range(word, {**sizes, "r": rank})
            except ValueError:
                raise RowError(number, f": `{word}` is not stages such as `2` or `(n-1-r)`") from None
            for stage in stages:
                if stage not in range(sizes["n"]):
                    raise RowError(
                        number, f": there is no stage {stage}, but {sizes['n']} stages, with `chunks {sizes['v']}`"
                    )
                if stage in rank_of:
                    raise RowError(number, f": stage {stage} is of rank {rank_of[stage]} and of rank {rank}")
                rank_of[stage] = rank
        if (count := list(rank_of.values()).count(rank)) != sizes["v"]:
            raise RowError(number, f": rank {rank} has {count} stages, not {sizes['v']} as every rank")
    return tuple(rank_of[stage] for stage in range(sizes["n"]))


def _row_work(words: str, line: int, sizes: Mapping[str, int]) -> Iterator[Action]:
    kinds = work_kinds()
    for word in words.split():
        match = re.fullmatch(r"([0-9]+|\([^A-Z]+\))([A-Z]+)([0-9]+|\([^A-Z]+\))", word.removesuffix("+"))
        try:
            if match is None or match[2] not in kinds:
                raise ValueError(word)
            stages, microbatches = _number_range(match[1], sizes), _number_range(match[3], sizes)
        except ValueError:
            raise RowError(line, f": `{word}` is not work such as `0F2` or `(0..1)F(0..m-1)`") from None
        if word.endswith("+"):
            message = f": `{word}` is of the next step, which only `async` begins before a step ends"
            raise RowError(line, f"{message}: write it without `+`, or `schedule async` in the plan")
        yield from (Action(stage, match[2], m) for stage in stages for m in microbatches)


def _number_range(text: str, sizes: Mapping[str, int]) -> range:
    """Read the numbers of ``3``, ``(r)``, ``(first..last)`` or ``(first,second..last)``.

    Raises:
        ValueError: none of these.
    """
    start, dots, last = text.removeprefix("(").removesuffix(")").partition("..")
    first, comma, second = start.partition(",") if dots else (start, "", "")
    begin = _evaluated(first, sizes)
    step = _evaluated(second, sizes) - begin if comma else 1
    end = _evaluated(last, sizes) if dots else begin
    return range(begin, end + (1 if step > 0 else -1), step)


def _evaluated(text: str, sizes: Mapping[str, int]) -> int:
    """Read the value of a sum of products of whole numbers and sizes."""
    one = r"([0-9]{1,9}|[pvnmr])"
    if re.fullmatch(rf"{one}([-+*]{one})*", text) is None:
        raise ValueError(f"`{text}` is not a number")
    terms = re.findall(r"([-+]?)([^-+]+)", text)
    products = (prod(sizes[item] if item in sizes else int(item) for item in term.split("*")) for _, term in terms)
    return sum(-product if sign == "-" else product for (sign, _), product in zip(terms, products, strict=True))
