"""The facts of a build as a page shows them, by module, by axis and by line of the plan; and its programs as lists of
functions whose lines have anchors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from parc.compiler.analysis.communication import communication_table, placed_messages
from parc.compiler.analysis.flops import step_timeline
from parc.compiler.analysis.liveness import saved_bytes_by_module
from parc.compiler.build.build import Build, BuildError, program_file
from parc.compiler.build.directory import again
from parc.compiler.layout.collectives import COLLECTIVES
from parc.compiler.program.actions import ACTIONS, FORWARD, PHASES
from parc.compiler.program.blocks import starred
from parc.compiler.program.program import Function, Program
from parc.compiler.program.roles import Role
from parc.compiler.program.step_values import DYNAMIC
from parc.compiler.schedules.timeline import Timeline
from parc.page.flow import ForwardWalk, ModuleRow, ModuleTree, module_tree
from parc.report import plan_of, states_of
from parc.report_words import Traffic, traffic_by
from parc.tables import parameter_table, pattern_of

# ---- the functions of programs, each listed once


_NUMBERS = re.compile(r"(?<=[A-Za-z][._])\d+|(?<=message=)\d+")
"""Numbers in the names of values, parameters and modules, and those of messages."""


@dataclass
class ListedFunction:
    """A function as a page shows it: its text, the line of a file at which it starts, and the files that have the same
    text up to numbers in names."""

    number: int
    function: Function
    action: str
    start: int
    rows: list[str]
    files: list[str] = field(default_factory=list)
    exact: bool = True
    """True where all these files have exactly this text."""
    letter: str = "L"
    """The first letter of its anchors, which keeps two lists of functions on one page apart."""

    @property
    def marked(self) -> set[int]:
        """The rows, from 1, of collectives."""
        return {_first_row(self.function) + at for at, line in enumerate(self.function.lines)
                if line.op in COLLECTIVES and COLLECTIVES[line.op].communicates}  # fmt: skip

    def anchor(self, row: int = 0) -> str:
        """Return the anchor of a row, from 1, or of the function."""
        return f"{self.letter}{self.number}.{row}" if row else f"{self.letter}{self.number}"


class Listing:
    """The distinct functions of a build's programs, in the order of a step, without the captured graph. Anchors begin
    with ``letter``."""

    def __init__(self, build: Build, letter: str = "L") -> None:
        self.functions: list[ListedFunction] = []
        self._of: dict[tuple[str, str], ListedFunction] = {}
        alike: dict[tuple[str, str], ListedFunction] = {}
        kinds = list(ACTIONS)
        for program in sorted(build.files(), key=lambda program: kinds.index(program.action)):
            file = program_file(program)
            head, *texts = build.text(program).replace("\n\n\ndef ", "\n\0def ").split("\0")
            row = head.count("\n") + 3
            for function, text in zip(program.functions, texts, strict=True):
                rows = text.rstrip("\n").split("\n")
                key = program.action, _NUMBERS.sub("", text)
                if (listed := alike.get(key)) is None:
                    listed = ListedFunction(len(alike), function, program.action, row, rows, letter=letter)
                    alike[key] = listed
                    self.functions.append(listed)
                listed.files.append(file)
                listed.exact = listed.exact and listed.rows == rows
                self._of[file, function.name] = listed
                row += text.count("\n") + 2

    def anchor(self, program: Program, function: Function, index: int) -> str:
        """Return the anchor of a function's line, or of its `return` if ``index`` is behind its lines. Functions whose
        texts are equal up to numbers in names share anchors."""
        return self._of[program_file(program), function.name].anchor(_first_row(function) + index)

    def forward_anchor(self, module: str, name: str, index: int) -> str:
        """Return the anchor of a line of the forward's function ``name``. If several stages have such a function,
        return that of the first line of ``module``; "" if there is none."""
        named = [one for one in self.functions if (one.action, one.function.name) == (FORWARD, name)]
        for listed in named:
            lines = listed.function.lines
            if len(named) == 1:
                return listed.anchor(_first_row(listed.function) + index)
            first = next((at for at, line in enumerate(lines) if line.origin.module == module), None)
            if first is not None:
                return listed.anchor(_first_row(listed.function) + first)
        return ""


def _first_row(function: Function) -> int:
    """Return the row, from 1, of a function's first line: behind `def`, the parameters and `):`."""
    return len(function.parameters) + 3


# ---- the facts


Entry = Mapping[str, Any]
STORED_KINDS = ("parameters", "gradients", "optimizer", "saved")
"""The kinds of a rank's bytes by module: the stored state, and the values that a microbatch saves for backward."""


@dataclass(frozen=True, slots=True)
class EqualMessages:
    """Equal collectives of a step: the first one's row in the report, the row of the modules that have them, the anchor
    of the first one's line, what a rank sends for all of them, and the rows of all."""

    entry: Entry
    row: str
    anchor: str
    sent: Traffic
    entries: Sequence[Entry]

    @property
    def modules(self) -> list[str]:
        """The modules that have them, in order."""
        return [*dict.fromkeys(entry["module"] for entry in self.entries)]


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A line of the plan: its text, its place in the file that a person wrote, and the line of that file by which it
    came into the plan."""

    text: str
    place: str
    root: int


class PageFacts:
    """The facts of a build.

    Raises:
        BuildError: its report is not of its programs or of its plan.
    """

    def __init__(self, build: Build) -> None:
        self.build, self.report, self.plan = build, build.report, plan_of(build)
        self.placed: dict[str, str] = self.report.get("placed", {})
        self.listing = Listing(build)
        self.parameters = parameter_table(build)
        self.tree: ModuleTree = module_tree(build, self.placed)

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """The rows of the report's communication, each with the row of its module and the anchor of its line."""
        try:
            return self._placed(self.build, self.report["communication"], self.listing)
        except ValueError:
            raise self._misfit("communication") from None

    def _placed(self, build: Build, rows: Sequence[Entry], listing: Listing) -> list[dict[str, Any]]:
        """Return the rows of a build's collectives, each with the row of its module and the anchor of its line.

        Raises:
            ValueError: they are not of this build.
        """
        messages = [(role.name, placed) for role in build.roles.values() for _, placed in placed_messages(role)]
        if [(row["role"], row["op"]) for row in rows] != [(role, placed.message.op) for role, placed in messages]:
            raise ValueError("other collectives")
        return [
            {**row, "row": self.tree.row_of(row["module"]),
             "anchor": listing.anchor(placed.program, placed.function, placed.index)}
            for row, (_, placed) in zip(rows, messages, strict=True)
        ]  # fmt: skip

    @cached_property
    def messages(self) -> list[EqualMessages]:
        """The collectives of a step. Equal ones of folded modules, and of several roles, are one."""
        return equal_messages(self.entries)

    @cached_property
    def evaluation(self) -> tuple[Listing, list[EqualMessages]] | None:
        """The functions of the programs that evaluate the model, and their collectives for one batch; None if the build
        has none."""
        evaluation = self.build.evaluation
        if evaluation is None:
            return None
        listing = Listing(evaluation, "E")
        rows = [row for role in evaluation.roles.values() for row in communication_table(role)]
        return listing, equal_messages(self._placed(evaluation, rows, listing))

    @cached_property
    def lines(self) -> list[PlanLine]:
        """The lines of the plan."""
        texts, written = self.build.texts["plan.parc"].splitlines(), self.report["written"]
        if len(texts) != len(written):
            raise self._misfit("written")
        return [PlanLine(text, one["place"], one["line"]) for text, one in zip(texts, written, strict=True)]

    def line_anchor(self, place: str | int) -> str:
        """Return the anchor of a line of the plan, by its place, or by the line through which it came; "" for none."""
        for number, line in enumerate(self.lines):
            if str(place) in (line.place, str(line.root)):
                return f"P{number}"
        return ""

    def placed_by(self, line: PlanLine) -> list[str]:
        """Return the patterns of the names that a line places, those of activations as `out(layers.*)`."""
        alike: dict[tuple[str, str], list[str]] = {}
        every: dict[str, dict[str, None]] = {"": dict.fromkeys(self.build.types)}
        for text, place in self.placed.items():
            match = re.fullmatch(r"(\w+)\((.+)\)", text)
            side, name = match.groups() if match else ("", text)
            every.setdefault(side, {})[name] = None
            if place == line.place:
                alike.setdefault((side, starred(name)), []).append(name)
        patterns = [(side, pattern_of(names, [*every[side]])) for (side, _), names in alike.items()]
        return [f"{side}({pattern})" if side else pattern for side, pattern in patterns]

    @cached_property
    def names(self) -> dict[str, str]:
        """The full name of each row of the tree, with the numbers of folded modules."""
        names: dict[str, str] = {}
        above: list[str] = []
        for row in self.tree.rows:
            del above[row.depth :]
            above.append(row.label)
            names[row.path] = ".".join(filter(None, above))
        return names

    @cached_property
    def stages(self) -> dict[str, dict[int, list[str]]]:
        """For each row the stages that compute with its modules, each with these modules; empty if there is one
        stage."""
        rows: dict[str, dict[int, list[str]]] = {}
        forwards = [program for program in self.build.files() if program.action == FORWARD]
        for program in forwards if len(forwards) > 1 else ():
            stage = int(program.role.removeprefix("stage"))
            for module in _with_above(ForwardWalk(program).first):
                rows.setdefault(self.tree.row_of(module), {}).setdefault(stage, []).append(module)
        return rows

    def module_anchor(self, row: ModuleRow) -> str:
        """Return the anchor of the first line of a module in a forward, "" if it has none."""
        return "" if row.line is None else self.listing.forward_anchor(row.path, *row.line)

    @cached_property
    def lines_of_programs(self) -> dict[int, int]:
        """The number of lines of programs that each line of the plan was the last to change; equal functions count
        once."""
        counts: dict[int, int] = {}
        for function in self.listing.functions:
            for line in function.function.lines:
                counts[line.origin.plan] = counts.get(line.origin.plan, 0) + 1
        return counts

    def module_bytes(self, role: Role) -> dict[str, dict[str, int]]:
        """Return the bytes that a rank of a role holds for the modules of each row, by kind."""
        rows: dict[str, dict[str, int]] = {}
        for name, sizes in states_of(self.build, self.plan, role).items():
            row = rows.setdefault(self.tree.row_of(name.rpartition(".")[0]), dict.fromkeys(STORED_KINDS, 0))
            row["parameters"] += sizes["parameters"] + sizes["weights"]
            row["gradients"] += sizes["gradients"]
            row["optimizer"] += sizes["optimizer"]
        for module, size in self._saved(role):
            row = rows.setdefault(self.tree.row_of(module), dict.fromkeys(STORED_KINDS, 0))
            row["saved"] += size
        return rows

    def _saved(self, role: Role) -> Iterable[tuple[str, int]]:
        for program in role.programs.values():
            if program.action == FORWARD:
                yield from saved_bytes_by_module(program, self.load).items()

    @property
    def load(self) -> float:
        """The load of the busiest rank of experts."""
        return max((float(row["load"]) for row in self.report.get("experts", ())), default=1.0)

    def _misfit(self, key: str) -> BuildError:
        path = self.build.path
        return BuildError(f"`{path / 'report.json'}`: `{key}` is not what the build's other files say", again(path))


def timeline_of(build: Build, costs: Mapping[str, float] | None = None) -> Timeline:
    """Return the timeline of a step, in which work takes the ``costs`` of its kind, or its floating-point operations.

    Raises:
        BuildError: its ``schedule.txt`` has an impossible order, which only a change of it can have made.
    """
    try:
        return step_timeline(build.roles, costs)
    except ValueError as error:
        raise BuildError(f"`{build.folder / 'schedule.txt'}`: {error}") from None


def waits_of(build: Build) -> list[str]:
    """Return, in words, what a pipeline's ranks wait for before they update weights: results of the last backwards of
    all of them."""
    report, plan = build.report, plan_of(build)
    axis = report["pipeline"].get("axis", "")
    shared = any(row["phase"] == "step" and row["axis"] == axis and row["carries"] == "gradients"
                 for row in report["communication"])  # fmt: skip
    reasons = {
        "the norm of all gradients, for `clip`": plan.optimizer.clip is not None,
        "the look for infinite gradients, for `loss_scale dynamic`": plan.loss_scale == DYNAMIC,
        "the gradients of weights that several stages have": shared,
    }
    ranks = f"before the update, ranks of `{axis}` wait for each other"
    return [f"{ranks}: {reason}" for reason, holds in reasons.items() if axis and holds]


def equal_messages(entries: Sequence[Entry]) -> list[EqualMessages]:
    """Return placed collectives, sorted by phase. Equal ones of folded modules, and of several roles, are one."""
    keys = ("phase", "axis", "op", "carries", "dtype", "bytes", "hidden", "row", "line")
    alike: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        alike.setdefault(tuple(entry[key] for key in keys), []).append(entry)
    sent = traffic_by(entries, *keys)
    messages = [
        EqualMessages(found[0], found[0]["row"], found[0]["anchor"], sent[key], found) for key, found in alike.items()
    ]
    return sorted(messages, key=lambda one: PHASES.index(one.entry["phase"]))


def _with_above(modules: Iterable[str]) -> list[str]:
    """Return modules with all that contain them, each once."""
    paths = dict[str, None]()
    for module in modules:
        words = module.split(".")
        paths.update((".".join(words[:depth]), None) for depth in range(1, len(words) + 1))
    return list(paths)
