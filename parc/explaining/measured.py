"""Times that a run measured beside those that the clock predicts: traces by role and action, profiles by line."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parc.compiler.build.build import Build, program_file
from parc.compiler.layout.collectives import WAIT
from parc.grammar.bounded import read_json, read_packed_json
from parc.runtime.session.one_build import hash_at_any_sizes
from parc.step_time import PricedStep

_MOST_PACKED, _MOST_PROFILE = 64 << 20, 1 << 30
"""The most bytes of a profile's file, and of its text."""
_RANGE = re.compile(r"(\w+\.\w+)\.py:([0-9-]+) (\S.*) = (\w+\.\S+) \|(?: .*?)??(?: plan:(\d+))?")
"""The name of a range of a profile: program, rows, results, operator, and the line of the plan. Calls of functions,
whose names have no point, hold the ranges of their lines."""
LESS = "on a GPU a traced or profiled run ends each action before the next, so it overlaps less than the prediction"


class ForeignFile(Exception):
    """The error of a trace or a profile that is none of parc's, or of another build. ``help`` is advice."""

    def __init__(self, message: str, help: str = "take one that a run of this build wrote") -> None:
        super().__init__(message)
        self.help = help


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """Seconds of a step, measured and predicted: of a role's actions of a kind, or of a line of the plan. ``kind`` is
    ``work`` or ``wait``, "" for both together."""

    role: str
    name: str
    kind: str
    count: int
    measured: float
    predicted: float


# ---- traces


def trace_rows(path: Path, step: PricedStep) -> list[MeasuredRow]:
    """Return a trace's times of a step by role and kind of action: the median over steps, without the first, and ranks.
    A first row of each role is the step from its first action to its last.

    Raises:
        ForeignFile: it is no trace of parc's, or that of another build.
        OSError: it cannot be read.
    """
    build = step.build
    times, whole = _of_actions(path, build)
    rows = []
    for role in build.roles.values():
        spans = step.time.timeline.spans[role.name]
        predicted, count = defaultdict[tuple[str, str], float](float), Counter[tuple[str, str]]()
        for span in spans:
            key = _key(_alone(str(span.action)))
            predicted[key] += span.end - span.start
            count[key] += 1
        rows.append(MeasuredRow(role.name, "step", "", 1, statistics.median(whole[role.name]), step.time.seconds))
        measured = times[role.name]
        for key in [*predicted, *(key for key in measured if key not in predicted)]:
            seconds = statistics.median(measured[key]) if key in measured else 0.0
            rows.append(MeasuredRow(role.name, *key, count[key], seconds, predicted.get(key, 0.0)))
    return rows


def _key(name: str) -> tuple[str, str]:
    """Return the kind of an action, with its stage, and whether it is work or a wait: `0F3` is `0F`, and work."""
    kind = re.sub(r"(?<=[A-Z_])\d+$", "", name)
    return kind, "wait" if "RECV" in kind or kind == "sends" else "work"


def _alone(name: str) -> str:
    """Return the name of an action in a step of its own: one beside the step before has a `+`."""
    return name.removesuffix("+")


def _of_actions(
    path: Path, build: Build
) -> tuple[dict[str, dict[tuple[str, str], list[float]]], dict[str, list[float]]]:
    """Return the seconds of each kind of action in each step of each rank, by role, and those from the first action of
    a step to the last."""
    ranks, spans = _spans(path, build)
    steps = sorted({number for _, number, *_ in spans})
    sums = defaultdict[tuple[int, int], defaultdict[tuple[str, str], float]](lambda: defaultdict(float))
    ends: dict[tuple[int, int], tuple[float, float]] = {}
    for rank, number, name, begin, seconds in spans:
        if number == steps[0] and len(steps) > 1:
            continue
        key = rank, number
        sums[key][_key(name)] += seconds
        first, last = ends.get(key, (begin, begin))
        ends[key] = min(first, begin), max(last, begin + seconds)
    times: dict[str, dict[tuple[str, str], list[float]]] = {name: {} for name in build.roles}
    whole: dict[str, list[float]] = {name: [] for name in build.roles}
    for (rank, number), of_kinds in sums.items():
        for kind, seconds in of_kinds.items():
            times[ranks[rank]].setdefault(kind, []).append(seconds)
        whole[ranks[rank]].append(ends[rank, number][1] - ends[rank, number][0])
    return times, whole


def _spans(path: Path, build: Build) -> tuple[dict[int, str], list[tuple[int, int, str, float, float]]]:
    """Return the role of each rank of a trace, and its spans: rank, step, name, begin and seconds."""
    try:
        form = read_json(path)
        if form["otherData"]["by"] != "parc":
            raise ValueError("by another program")
        if form["otherData"].get("build", mine := hash_at_any_sizes(build)) != mine:  # older ones have none
            raise ForeignFile(f"`{path}` is of another build, which computes something else")
        events: Sequence[Any] = form["traceEvents"]
        named = [one for one in events if one["ph"] == "M"]
        ranks = {int(one["pid"]): str(one["args"]["name"]).partition("(")[2].removesuffix(")") for one in named}
        actions = (one for one in events if one["ph"] == "X")
        spans = [
            (int(one["pid"]), int(one["args"]["step"]), _alone(str(one["name"])), one["ts"] / 1e6, one["dur"] / 1e6)
            for one in actions
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ForeignFile(f"`{path}` is no trace of parc's", "`parc run --trace FILE` writes one") from None
    if not spans:
        raise ForeignFile(f"`{path}` has no actions", "`parc run --trace FILE` writes one")
    if len(ranks) != build.mesh.world:
        raise ForeignFile(f"`{path}` has {len(ranks)} ranks, and the build {build.mesh.world}")
    for rank, role in ranks.items():
        if role not in build.roles:
            raise ForeignFile(f"`{path}`: rank {rank} is `{role}`, which is no role of the build")
    known = {name: {_alone(str(action)) for action in role.actions} for name, role in build.roles.items()}
    done: dict[int, set[str]] = {}
    for rank, _, name, *_ in spans:
        done.setdefault(rank, set()).add(name)
    for rank, names in done.items():
        ours = known[ranks[rank]]
        if other := sorted(name for name in names if name not in ours and _key(name)[1] == "work"):
            raise ForeignFile(f"`{path}` is of another build: rank {rank} did `{other[0]}`, which its role does not")
        if missing := sorted(ours - names):
            raise ForeignFile(f"`{path}` is of another build: rank {rank} did no `{missing[0]}`")
    return ranks, spans


# ---- profiles


def profile_rows(folder: Path, step: PricedStep) -> list[MeasuredRow]:
    """Return a profile's times of a step by line of the plan, of the role that waits least for others: the median over
    its ranks. On a GPU they are those of kernels, else those of the process.

    Raises:
        ForeignFile: the folder has no profile, or that of another build.
        OSError: a file cannot be read, or is too large.
    """
    build, role = step.build, step.time.longest
    files = sorted(folder.glob("rank*.json.gz"), key=lambda file: int(re.sub(r"\D", "", file.name) or 0))
    if not files:
        raise ForeignFile(f"`{folder}` has no profile", "`parc run --profile DIR` writes one, a file for each rank")
    programs = {program_file(program).rpartition("/")[2].removesuffix(".py"): build.text(program).split("\n")
                for of_role in build.roles.values() for program in of_role.programs.values()}  # fmt: skip
    own = {program_file(program).rpartition("/")[2].removesuffix(".py")
           for program in build.roles[role].programs.values()}  # fmt: skip
    sums: list[dict[tuple[int, str], float]] = []
    for file in files:
        lines, ranges = defaultdict[tuple[int, str], float](float), list(_ranges(file))
        used = {match[1] for match, _, _ in ranges}
        for match, _, seconds in ranges:
            _check_range(file, match, programs)
            lines[int(match[5] or 0), "wait" if match[4] == WAIT else "work"] += seconds
        if used <= own and ranges:
            steps = max(1, _repeats(ranges))
            sums.append({key: seconds / steps for key, seconds in lines.items()})
    if not sums:
        raise ForeignFile(f"`{folder}` has no rank of {role}", "profile all ranks: each writes its own file")
    predicted = step.time.roles[role]
    keys = dict.fromkeys(line for one in sums for line, _ in one)
    rows = [
        MeasuredRow(role, str(line or "-"), "", 1,
                    statistics.median(one.get((line, "work"), 0.0) + one.get((line, "wait"), 0.0) for one in sums),
                    predicted.lines.get(line, 0.0))
        for line in [*keys, *(line for line in predicted.lines if line not in keys)]
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -max(row.measured, row.predicted))


def _repeats(ranges: Sequence[tuple[re.Match[str], int, float]]) -> int:
    """Return the number of profiled steps: how often an action was done that a step has once."""
    return min(Counter(number for _, number, _ in ranges).values())


def _check_range(file: Path, match: re.Match[str], programs: Mapping[str, Sequence[str]]) -> None:
    """Check that a range is a line of a program.

    Raises:
        ForeignFile: it is none.
    """
    rows, row = programs.get(match[1], ()), int(match[2].rpartition("-")[2])
    if row > len(rows) or not rows[row - 1].strip().startswith(f"{match[3]} = "):  # operators may write in place
        line = f"`{match[3]} = {match[4]}` in row {row} of `{match[1]}.py`"
        raise ForeignFile(f"`{file}` is of another build: it ran {line}")


def _ranges(file: Path) -> Iterator[tuple[re.Match[str], int, float]]:
    """Yield the ranges of lines of a profile, each with the number of its name and its seconds."""
    try:
        events: Sequence[Mapping[str, Any]] = read_packed_json(file, _MOST_PACKED, _MOST_PROFILE)["traceEvents"]
        kinds = {one.get("cat") for one in events}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ForeignFile(f"`{file}` is no profile of parc's", "`parc run --profile DIR` writes one") from None
    kind = "gpu_user_annotation" if "gpu_user_annotation" in kinds else "user_annotation"
    numbers: dict[str, int] = {}
    for one in events:
        match = _RANGE.fullmatch(str(one.get("name"))) if one.get("cat") == kind and "dur" in one else None
        if match is not None:
            yield match, numbers.setdefault(match[0], len(numbers)), float(one["dur"]) / 1e6
