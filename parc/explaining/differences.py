"""Differences of two builds: what moved, by line of the plan, and what a rank sends and holds on each side."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from parc.compiler.analysis.memory import MEMORY_KINDS
from parc.compiler.clock.programs import STEP_PARTS
from parc.explaining.seconds import LineSeconds, StepSeconds
from parc.explaining.sides import Side, line_text
from parc.grammar.syntax import size_in_both, size_text
from parc.page.facts import PlanLine
from parc.report_words import Traffic, flops_text, schedule_words, traffic_by
from parc.step_time import seconds_text
from parc.tables import pattern_of

SECONDS = ("step", *(f"{part} time" for part in STEP_PARTS))
"""The numbers that are seconds."""
_LEAST_CHANGE = 0.005
"""The share of seconds that is worth a line."""
_KINDS = 4
"""The kinds of messages, and of weights, that are named under a line of the plan."""


@dataclass
class MovedLine:
    """A line of the plan, or the lines that one `include` brings, on both sides; empty where a side has none. ``sent``
    is what a rank sends for the messages that it causes, ``kinds`` the same by axis, phase and collective, ``placed``
    the types of parameters that changed, by pattern, and ``held`` what a rank stores of them."""

    lines: tuple[Sequence[PlanLine], Sequence[PlanLine]]
    sent: tuple[Traffic, Traffic]
    kinds: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)
    placed: list[tuple[str, str, str]] = field(default_factory=list)
    held: tuple[int, int] = (0, 0)
    seconds: tuple[LineSeconds, LineSeconds] | None = None
    """The seconds of a step that it takes on each side; None without a cluster."""

    @property
    def moved(self) -> tuple[float, int]:
        """The key to sort by: the seconds by which the two sides differ, then the bytes, sent or else stored."""
        bytes_ = abs(self.sent[1].bytes - self.sent[0].bytes) or abs(self.held[1] - self.held[0])
        return (0.0 if self.seconds is None else abs(self.seconds[1].all - self.seconds[0].all)), bytes_

    @property
    def rewritten(self) -> bool:
        """True where its text differs."""
        texts = [[line_text(line) for line in lines] for lines in self.lines]
        return texts[0] != texts[1]

    @property
    def moves(self) -> bool:
        """True where a placement or a message differs, or the seconds by enough to be shown."""
        return self.sent[0] != self.sent[1] or bool(self.placed) or self.takes_other_time

    @property
    def takes_other_time(self) -> bool:
        """True where the seconds differ by a part of them that is worth a line."""
        return self.seconds is not None and _differ(*(one.all for one in self.seconds))


@dataclass(frozen=True)
class Comparison:
    """The difference of two builds: notes, numbers of a rank as name, left, right, and the lines that moved, largest
    first. Numbers are bytes, but for those of ``SECONDS``, operations, and shares of a step's idle time."""

    sides: tuple[Side, Side]
    notes: Sequence[str]
    numbers: Sequence[tuple[str, float, float]]
    lines: Sequence[MovedLine]

    @property
    def facts(self) -> dict[str, Any]:
        """The same for other programs."""
        return {
            "sides": [{"name": side.name, "mesh": side.facts.report["mesh"]} for side in self.sides],
            "notes": list(self.notes),
            "numbers": {name: [left, right] for name, left, right in self.numbers},
            "lines": [
                {
                    "lines": [[{"place": line.place, "text": line_text(line)} for line in of] for of in one.lines],
                    "sent_bytes": [sent.bytes for sent in one.sent], "messages": [sent.messages for sent in one.sent],
                    "hidden_bytes": [sent.hidden for sent in one.sent],
                    "kinds": [{"axis": axis, "phase": phase, "op": op, "carries": carries, "sent_bytes": list(sizes)}
                              for (axis, phase, op, carries), sizes in one.kinds.items()],
                    "placed": [{"parameters": name, "types": [left, right]} for name, left, right in one.placed],
                    "stored_bytes": list(one.held),
                    **({} if one.seconds is None else
                       {"seconds": [{"work": of.work, "waits": dict(of.waits)} for of in one.seconds]}),
                }
                for one in self.lines
            ],
        }  # fmt: skip


def compare_sides(left: Side, right: Side) -> Comparison:
    """Return what moved from one side to the other."""
    pairs = list(_pairs(left, right))
    messages = [_by_root(side) for side in (left, right)]
    moved = _moved_parameters(left, right, pairs)
    lines = []
    for at, lines_of in enumerate(pairs):
        roots = [{line.root for line in of_side} for of_side in lines_of]
        entries = [[entry for root in of_side for entry in table.get(root, ())]
                   for of_side, table in zip(roots, messages, strict=True)]  # fmt: skip
        lines.append(_moved_line(lines_of, entries, moved.get(at, ()), (left, right)))
    others = [table.get(0, ()) for table in messages]
    lines.append(_moved_line(((), ()), others, moved.get(-1, ()), (left, right)))
    if left.step is not None and right.step is not None:
        times = StepSeconds(left.step), StepSeconds(right.step)
        for line in lines:
            of_sides = [{one.root for one in of_side} for of_side in line.lines]
            roots = of_sides if any(of_sides) else [{0}, {0}]
            line.seconds = times[0].of_lines(roots[0]), times[1].of_lines(roots[1])
    lines = sorted((line for line in lines if line.rewritten or line.moves), key=lambda line: line.moved, reverse=True)
    return Comparison((left, right), [*_notes(left, right)], [*_numbers(left, right)], lines)


# ---- lines of two plans


def _pairs(left: Side, right: Side) -> Iterator[tuple[Sequence[PlanLine], Sequence[PlanLine]]]:
    """Yield the lines of the two plans that stand for each other: equal ones, then those in equal places with the same
    first word; lines that one `include` brings count as one."""
    groups = [
        [[*lines] for _, lines in groupby(side.facts.lines, key=lambda line: line.root)] for side in (left, right)
    ]
    ours_text, theirs_text = (["\n".join(map(line_text, lines)) for lines in of_side] for of_side in groups)
    for tag, a, b, c, d in difflib.SequenceMatcher(None, ours_text, theirs_text, autojunk=False).get_opcodes():
        ours, theirs = groups[0][a:b], groups[1][c:d]
        if tag == "equal":
            yield from zip(ours, theirs, strict=True)
            continue
        for lines in ours:
            word = _word(lines)
            same = next((other for other in theirs if _word(other) == word), [])
            theirs = [other for other in theirs if other is not same]
            yield lines, same
        yield from (((), other) for other in theirs)


def _word(lines: Sequence[PlanLine]) -> str:
    return lines[0].place.rpartition(":")[0] or line_text(lines[0]).partition(" ")[0]


def _by_root(side: Side) -> dict[int, list[Mapping[str, Any]]]:
    table: dict[int, list[Mapping[str, Any]]] = {}
    for entry in side.facts.report["communication"]:
        table.setdefault(entry["line"] or 0, []).append(entry)
    return table


# ---- what moved


def _moved_line(
    lines: tuple[Sequence[PlanLine], Sequence[PlanLine]], entries: Sequence[Iterable[Mapping[str, Any]]],
    names: Sequence[str], sides: tuple[Side, Side],
) -> MovedLine:  # fmt: skip
    left, right = (traffic_by(of_side).get((), Traffic()) for of_side in entries)
    tables = [traffic_by(of_side, "axis", "phase", "op", "carries") for of_side in entries]
    keys = dict.fromkeys(key for table in tables for key in table)
    sizes = {key: (tables[0].get(key, Traffic()).bytes, tables[1].get(key, Traffic()).bytes) for key in keys}
    kinds = {key: pair for key, pair in sizes.items() if pair[0] != pair[1]}
    kinds = dict(sorted(kinds.items(), key=lambda item: -abs(item[1][1] - item[1][0])))
    rows = [{row["name"]: row for row in side.facts.parameters} for side in sides]
    held = tuple(sum(table[name]["local_bytes"] for name in names) for table in rows)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault((*(table[name]["type"] for table in rows), str(name.count("."))), []).append(name)
    placed = [(_names(found), before, after) for (before, after, _), found in groups.items()]
    return MovedLine(lines, (left, right), kinds, placed, (held[0], held[1]))


def _names(found: Sequence[str]) -> str:
    try:
        return pattern_of(found, found)
    except ValueError:  # numbers and names in one column
        return f"{found[0]} and {len(found) - 1} more"


def _moved_parameters(
    left: Side, right: Side, pairs: Sequence[tuple[Sequence[PlanLine], Sequence[PlanLine]]]
) -> dict[int, list[str]]:
    """Return the parameters whose types differ, by the number of the pair of lines that places them: the one that names
    them, or else a `zero` line of one of the sides; -1 for neither."""
    rows = [{row["name"]: row for row in side.facts.parameters} for side in (left, right)]
    places = [{line.place: at for at, pair in enumerate(pairs) for line in pair[side]} for side in (0, 1)]
    zero = next((at for at, pair in enumerate(pairs) for lines in pair for line in lines
                 if line_text(line).startswith("zero") and pair[0] != pair[1]), -1)  # fmt: skip
    moved: dict[int, list[str]] = {}
    for name in rows[0].keys() & rows[1].keys():
        if rows[0][name]["type"] == rows[1][name]["type"]:
            continue
        at = next((table[place] for side, table in zip((right, left), reversed(places), strict=True)
                   if (place := side.facts.placed.get(name)) in table), zero)  # fmt: skip
        moved.setdefault(at, []).append(name)
    return {at: sorted(names) for at, names in moved.items()}


# ---- notes and numbers


def _notes(left: Side, right: Side) -> Iterator[str]:
    """Yield sentences on what makes the sides hard to compare."""
    models = [side.facts.build.manifest["model"] for side in (left, right)]
    if models[0]["callable"] != models[1]["callable"]:
        both = " and ".join(f"`{model['callable']}`" for model in models)
        yield f"the models differ: {both}; parameters are compared by name"
    elif models[0] != models[1] or left.facts.report["parameters"] != right.facts.report["parameters"]:
        sizes = " and ".join(f"{side.facts.report['parameters']:,}" for side in (left, right))
        yield f"the arguments of the model differ: {sizes} parameters"
    names = [{row["name"] for row in side.facts.parameters} for side in (left, right)]
    for ours, theirs, word in ((names[0], names[1], "left"), (names[1], names[0], "right")):
        if only := sorted(ours - theirs):
            yield f"only on the {word}: {only[0]}" + (f" and {len(only) - 1} more parameters" if len(only) > 1 else "")
    worlds = [side.facts.report["world"] for side in (left, right)]
    if worlds[0] != worlds[1]:
        yield f"the left has {worlds[0]:,} ranks and the right {worlds[1]:,}; numbers are those of one rank"
    batches = [(side.facts.report["batch"] or {}).get("samples") for side in (left, right)]
    if batches[0] != batches[1]:
        yield f"a step has {batches[0]} samples on the left and {batches[1]} on the right"
    on = [side.step.cluster.name if side.step is not None else "" for side in (left, right)]
    if on[0] != on[1] and all(on):
        yield f"the left runs on `{on[0]}` and the right on `{on[1]}`"
    elif on[0] != on[1]:
        yield "only one side names a cluster, so there are no seconds: name one for both with `--cluster`"
    for side, word in ((left, "left"), (right, "right")):
        budget = side.facts.report.get("budget")
        if budget is not None and max(entry["peak_bytes"] for entry in side.facts.report["memory"]) > budget:
            yield f"the {word} needs more memory than its budget of {size_in_both(budget)}"


def _differ(left: float, right: float) -> bool:
    return abs(right - left) > _LEAST_CHANGE * max(left, right)


def _numbers(left: Side, right: Side) -> Iterator[tuple[str, float, float]]:
    if left.step is not None and right.step is not None:
        yield "step", left.step.time.seconds, right.step.time.seconds
        parts = [side.time.parts(side.time.longest) for side in (left.step, right.step)]
        yield from (
            (f"{part} time", parts[0][part], parts[1][part]) for part in STEP_PARTS if any(of[part] for of in parts)
        )
    reports = [side.facts.report for side in (left, right)]
    sent = [traffic_by(report["communication"]).get((), Traffic()) for report in reports]
    yield "sent", sent[0].bytes, sent[1].bytes
    yield "exposed", sent[0].bytes - sent[0].hidden, sent[1].bytes - sent[1].hidden
    if any("across_nodes" in report for report in reports):
        across = [report.get("across_nodes", {}).get("bytes", 0) for report in reports]
        yield "to other nodes", across[0], across[1]
    largest = [max(report["memory"], key=lambda entry: entry["peak_bytes"]) for report in reports]
    yield "peak memory", largest[0]["peak_bytes"], largest[1]["peak_bytes"]
    for kind in MEMORY_KINDS:
        if largest[0][kind] or largest[1][kind]:
            yield kind, largest[0][kind], largest[1][kind]
    flops = [max(_flops(report).values()) for report in reports]
    yield "operations", flops[0], flops[1]
    yield "idle", *(max(report["idle"].values()) for report in reports)


def _flops(report: Mapping[str, Any]) -> dict[str, int]:
    """Return the floating-point operations of a step on a rank of each role."""
    sums: dict[str, int] = {}
    for row in report["stages"]:
        sums[row["role"]] = sums.get(row["role"], 0) + row["flops"]
    return sums


# ---- in words


def number_rows(found: Comparison) -> list[tuple[str, str, str, str]]:
    """Return rows of a table of the numbers: name, left, right, change."""
    rows = []
    for name, left, right in found.numbers:
        text = flops_text if name == "operations" else seconds_text if name in SECONDS else size_text
        before, after, change = text(left), text(right), change_text(left, right)
        if name == "idle":
            before, after, change = f"{left:.0%}", f"{right:.0%}", f"{100 * (right - left):+.0f} points"
        indent = "  " * (name in (*MEMORY_KINDS, *SECONDS[1:], "exposed"))
        rows.append((f"{indent}{name}", before, after, change if left != right else ""))
    return rows


def change_text(left: float, right: float) -> str:
    """Return the change of a number of bytes, with its share.

    >>> change_text(2048, 3072), change_text(2048, 0), change_text(0, 512)
    ('+50%', 'gone', 'new')
    """
    if left == right:
        return ""
    if not left or not right:
        return "new" if not left else "gone"
    ratio = right / left
    return f"{ratio - 1:+.0%}" if ratio < 10 else f"x{ratio:.0f}"


def head_rows(one: MovedLine) -> list[str]:
    """Return the text of a line of the plan on both sides, once where they are equal."""
    heads = [_head(lines) for lines in one.lines]
    if not one.rewritten:
        there = f" (line {one.lines[1][0].root} on the right)" if heads[0] != heads[1] else ""
        return [f"{heads[0]}{there}" if heads[0] else "no line of the plan"]
    rows = [f"{mark} {head}" for mark, head in zip("-+", heads, strict=True) if head]
    if max(map(len, one.lines)) > 1:  # an include
        before, after = ([*map(line_text, lines)] for lines in one.lines)
        rows += [f"    {row}" for row in difflib.ndiff(before, after) if row[0] in "-+"]
    return rows


def line_rows(one: MovedLine) -> list[str]:
    """Return what moved at a line of the plan in words: its text on both sides, then messages and placements."""
    rows = head_rows(one)
    if one.seconds is not None and one.takes_other_time:
        rows += _seconds_rows(*one.seconds)
    left, right = one.sent
    if left != right:
        counts = ", then ".join(dict.fromkeys(f"{sent.messages:,}" for sent in one.sent))
        bytes_ = f"{size_text(left.bytes)}, then {size_text(right.bytes)} ({_of(left.bytes, right.bytes)})"
        rows.append(f"    sends {bytes_} in {counts} message{'s' * (counts != '1')}")
        rows += [f"      {op} over {axis} of {carries}, {phase}: {size_text(before)}, then {size_text(after)}"
                 for (axis, phase, op, carries), (before, after) in [*one.kinds.items()][:_KINDS]]  # fmt: skip
        if len(one.kinds) > _KINDS:
            rows.append(f"      and {len(one.kinds) - _KINDS} more kinds of messages")
        if left.hidden != right.hidden:
            rows.append(f"      hidden behind work: {size_text(left.hidden)}, then {size_text(right.hidden)}")
    if one.placed:
        rows.append(
            f"    stores {size_text(one.held[0])}, then {size_text(one.held[1])} ({_of(*one.held)}) of what it places"
        )
        rows += [f"      {name}: {before}, then {after}" for name, before, after in one.placed[:_KINDS]]
        if len(one.placed) > _KINDS:
            rows.append(f"      and {len(one.placed) - _KINDS} more kinds of weights")
    return rows


def _seconds_rows(left: LineSeconds, right: LineSeconds) -> Iterator[str]:
    """Yield what a line takes of a step on both sides, its work and its waits."""
    yield f"    takes {seconds_text(left.all)}, then {seconds_text(right.all)} ({_of(left.all, right.all)})"
    if _differ(left.work, right.work):
        yield f"      work: {seconds_text(left.work)}, then {seconds_text(right.work)}"
    for axis in dict.fromkeys((*left.waits, *right.waits)):
        before, after = left.waits.get(axis, 0.0), right.waits.get(axis, 0.0)
        if _differ(before, after):
            yield f"      waits over {axis}: {seconds_text(before)}, then {seconds_text(after)}"


def _of(left: float, right: float) -> str:
    return change_text(left, right) or "as before"


def _head(lines: Sequence[PlanLine]) -> str:
    if not lines:
        return ""
    if len(lines) == 1:
        return f"line {lines[0].place}: {line_text(lines[0])}"
    return f"line {lines[0].root}: {len(lines)} lines of `{lines[0].place.rpartition(':')[0]}`"


def rewritten_rows(found: Comparison) -> list[str]:
    """Return the lines of the plans whose texts differ."""
    return [row for one in sorted((one for one in found.lines if one.rewritten), key=_at) for row in head_rows(one)]


def _at(one: MovedLine) -> int:
    return next(line.root for lines in one.lines for line in lines)


def side_text(side: Side) -> str:
    """Return a side in words: its mesh and its schedule."""
    report = side.facts.report
    mesh = ", ".join(f"{axis}={size}" for axis, size in side.facts.build.mesh.declared.axes) or "one rank"
    return f"{side.name}: {mesh} ({report['world']:,} ranks), {schedule_words(report)}"
