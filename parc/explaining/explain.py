"""Explanations of a build: of a line of its plan, of a message, of a module, and of a rank's memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from parc.compiler.analysis.across_nodes import ALGORITHMS, nic_bytes, place_of, row_place
from parc.compiler.analysis.memory import MEMORY_KINDS
from parc.compiler.clock.programs import MessageTime
from parc.compiler.program.blocks import complete
from parc.compiler.resolve.pattern import Pattern
from parc.explaining.flights import RoleMessages
from parc.explaining.reasons import Reason, changes, message_reason
from parc.explaining.seconds import LineSeconds, StepSeconds, seconds_words, sum_of
from parc.explaining.sides import Side, line_text
from parc.grammar.nearest import did_you_mean, listed
from parc.grammar.syntax import size_in_both, size_text
from parc.page.facts import STORED_KINDS, EqualMessages, PlanLine
from parc.page.flow import ModuleRow
from parc.report_words import DELAYED_WORDS, Traffic, idle_words, modules_text, schedule_words, traffic_by, unit_of
from parc.step_time import (
    NO_CLUSTER,
    PricedStep,
    exposed_rows,
    plan_line_rows,
    seconds_text,
    step_json,
    time_rows,
)
from parc.tables import placement_text

_NUMBERED = re.compile(r"(?:(.+):)?(\d{1,9})")
"""A WHAT with a number: of a line of a file, or of a message of a role."""
_LEAST_PART = 0.05
"""The share of a step from which a part is worth advice."""
MOST_ROWS = 12
"""The rows of a table of an explanation, the largest first; a last row says how many more there are."""


class UnknownWhat(Exception):
    """The error of a WHAT that names nothing in a build. ``help`` is advice."""

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


@dataclass
class Explanation:
    """An explanation: a title, rows of a name and a sentence, and a table with its head and the columns that are
    aligned to the right. A row without a name continues the one before. ``facts`` say the same to other programs."""

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    head: tuple[str, ...] = ()
    table: list[tuple[object, ...]] = field(default_factory=list)
    right: tuple[int, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def say(self, name: str, *texts: str) -> None:
        """Add rows, the first with the name; empty texts are left out."""
        self.rows += [(name if at == 0 else "", text) for at, text in enumerate(filter(None, texts))]


class Explainer:
    """The explanations of one build."""

    def __init__(self, side: Side) -> None:
        self.facts, self.build, self.report = side.facts, side.facts.build, side.facts.report
        self.seconds = None if side.step is None else StepSeconds(side.step)
        self.unit = unit_of(self.report)
        self._roles: dict[str, RoleMessages] = {}

    def explain(self, what: str) -> Explanation:
        """Return the explanation of a WHAT: ``line:18``, ``FILE:18``, ``no:3``, ``ROLE:no:3``, a module or a topic.

        Raises:
            UnknownWhat: it names nothing.
        """
        if what in TOPICS:
            return TOPICS[what](self)
        match = _NUMBERED.fullmatch(what)
        if what in self.modules or match is None:
            return self.module(what.removeprefix("module:"))
        before, number = match[1] or "line", int(match[2])
        role, _, word = before.rpartition(":")
        if word == "no" or before in self.build.roles:
            return self.message(role if word == "no" else before, number)
        return self.line(what)

    def lines_of(self, what: str) -> list[PlanLine]:
        """Return the lines of the plan that ``line:18`` or ``FILE:18`` names.

        Raises:
            UnknownWhat: it names none.
        """
        match = _NUMBERED.fullmatch(what)
        if match is None:
            raise UnknownWhat(
                f"`{what}` is no line of the plan", "write `line:18`, or `FILE:18` for one of an included file"
            )
        return self._lines_at("" if match[1] in (None, "line") else match[1].removeprefix("line:"), int(match[2]))

    # ---- a line of the plan

    def line(self, what: str) -> Explanation:
        """Return what a line of the plan places and causes, or all lines that one includes."""
        lines = self.lines_of(what)
        first, place = lines[0], lines[0].place if len(lines) == 1 else str(lines[0].root)
        text = line_text(first) if len(lines) == 1 else f"{len(lines)} lines of `{first.place.rpartition(':')[0]}`"
        result = Explanation(f"line {place}: {text}", facts={"line": place, "text": text})
        if len(lines) > 1:
            result.say("lines", *(f"{line.place}  {line_text(line)}" for line in lines))
        names = {name for name, at in self.facts.placed.items() if at in {line.place for line in lines}}
        names |= {name for line in lines for name in self._stored_by(line)}
        result.say("places", ", ".join(name for line in lines for name in self.facts.placed_by(line)))
        self._say_held(result, names)
        if len({line.root for line in lines}) == 1 and len(lines) == sum(
            line.root == first.root for line in self.facts.lines
        ):
            self._say_seconds(result, lambda seconds: seconds.of_lines({first.root}))
        if len(lines) == 1 and text.split()[0] == "schedule":
            result.say("order", schedule_words(self.report))
            result.say("algorithm", DELAYED_WORDS * any(one["class"] == "delayed" for one in self.report["numerics"]))
        messages = [one for one in self.facts.messages if one.entry["line"] in {line.root for line in lines}]
        together = sum(line.root == first.root for line in self.facts.lines)
        if len(lines) < together:
            messages = [one for one in messages if not {*self._serving(one.entry)}.isdisjoint(lines)]
            result.say("with", f"messages are those of all {together} lines that line {first.root} includes, as far as "
                       "they serve this one; others may serve them too")  # fmt: skip
        self._say_sent(result, messages)
        self._say_changes(result, messages)
        word = place if ":" in place else f"line:{place}"
        result.say("without it", f"`parc explain BUILD {word} --without` compiles the plan again, and says what moves")
        return result

    def _stored_by(self, line: PlanLine) -> list[str]:
        """Return the parameters that a `zero` line may store in parts: those that are split over its axis, though no
        line that places them names it."""
        match = re.match(r"zero \d over (\S+)", line_text(line))
        if match is None:
            return []
        by = {other.place: line_text(other).split() for other in self.facts.lines}
        parts = (row["name"] for row in self.facts.parameters if row["placement"].get(match[1], "I").startswith("S"))
        return [name for name in parts if match[1] not in by.get(self.facts.placed.get(name, ""), ())]

    def _lines_at(self, file: str, number: int) -> list[PlanLine]:
        lines = self.facts.lines
        files = {line.place.rpartition(":")[0] for line in lines if ":" in line.place}
        inside = next((name for name in sorted(files) if name == file or name.endswith(f":{file}")), "")
        if file and not inside and file != "plan" and "." not in file:  # a build does not know the name of its plan
            ways = f"the plan includes {listed(sorted(files))}" if files else "write `line:18` for a line of the plan"
            help_ = did_you_mean(file, [*files, *self.build.roles], ways)
            raise UnknownWhat(f"the plan includes no file `{file}`", help_)
        place = f"{inside}:{number}" if inside else str(number)
        lines_there = [line for line in lines if line.place == place]
        lines_there = lines_there or [line for line in lines if not inside and line.root == number]
        if lines_there:
            return lines_there
        known = {line.place if inside else str(line.root): line for line in lines if line.place.startswith(f"{inside}:")
                 or not inside}  # fmt: skip
        near = sorted(known, key=lambda one: abs(int(one.rpartition(":")[2]) - number))[:3]
        texts = (f"{one} is `{line_text(known[one])}`" for one in near if known[one].place == one)
        raise UnknownWhat(
            f"no statement of the plan is at line {place}", "; ".join(texts) or f"lines are {listed(near)}"
        )

    def _serving(self, entry: Mapping[str, Any]) -> list[PlanLine]:
        """Return the lines of the plan that a message serves: its cause; or, of the lines of a file that its cause
        includes, those that place weights of the modules that make or read its value; and those that split values
        between modules over its axis."""
        causes = [line for line in self.facts.lines if line.root == entry["line"]]
        splitting = [line for line in self.facts.lines if _splits_values(line, entry["axis"])]
        if entry["carries"] != "activations" or entry["op"] == "send":
            splitting = []
        near = {complete(module, entry["module"]) for module in (*self._reason(entry).modules, entry["module"])}
        if len(splitting) > 1:
            others = [line for line in splitting if not any(_names(line, module) for module in near)]
            if len(others) < len(splitting):  # blocks that lines of their own split share a function, with one's lines
                splitting, causes = ([line for line in each if line not in others] for each in (splitting, causes))
        if len(causes) < 2:
            return causes if causes and causes[0] in splitting else [*causes, *splitting]
        places = {place for name, place in self.facts.placed.items() if {name, name.rpartition(".")[0]} & near}
        return [line for line in causes if line.place in places or line in splitting]

    # ---- a message

    def message(self, role: str, number: int) -> Explanation:
        """Return why a message of a role is there, what it costs, what hides it, and what would remove it."""
        roles = [*self.build.roles]
        if role and role not in roles:
            raise UnknownWhat(f"there is no role `{role}`", did_you_mean(role, roles, f"roles are {listed(roles)}"))
        if not role and len(roles) > 1:
            named = listed((f"{one}:no:{number}" for one in roles[:4]), "or")
            raise UnknownWhat(f"several roles have a message {number}", f"name the role too: {named}")
        role = role or roles[0]
        entries = [entry for entry in self.facts.entries if entry["role"] == role]
        if number >= len(entries):
            last = f"they go from 0 to {len(entries) - 1}" if entries else "one rank computes alone, and sends nothing"
            raise UnknownWhat(f"`{role}` has no message {number}", f"{last}; `parc show BUILD` lists them")
        entry = entries[number]
        of_all = Traffic(*(0,) * 4) if not entries else traffic_by(entries)[()]
        sent = entry["count_per_step"] * entry["wire_bytes"]
        result = Explanation(
            f"{self._label(entry)}: {entry['op']} over {entry['axis']} of {entry['carries']}", facts=dict(entry)
        )
        placed = self._role(role).placed[number]
        where = " ".join(filter(None, (entry["module"], placed.message.origin.source)))
        result.say("where", f"{entry['phase']}, {where or 'the model itself'}, in `{placed.function.name}` of "
                   f"{placed.program.role}.{placed.program.action}")  # fmt: skip
        result.say("why", self._reason(entry).text)
        result.say("serves", *(f"line {line.place}  {line_text(line)}" for line in self._serving(entry)))
        share = sent / of_all.bytes if of_all.bytes else 0
        each = f"{size_text(entry['wire_bytes'])} each time ({size_text(entry['bytes'])} put in, {entry['dtype']})"
        in_all = f"{entry['count_per_step']} a {self.unit}: {size_text(sent)}, {share:.1%} of all that a rank sends"
        result.say(
            "sends",
            f"{each}, {in_all}",
            self._equal_text(entry),
            self._together(entries, number),
            self._across_text(entry),
        )
        result.say("time", self._flight_text(entry), self._seconds_text(result, entry))
        result.say("removed by", *self._removed_by(entry))
        result.facts |= {"why": self._reason(entry).text, "sent_bytes": sent, "time": self._flight_text(entry),
                         "serves": [line.place for line in self._serving(entry)],
                         "changes": self._removed_by(entry)}  # fmt: skip
        return result

    def _role(self, name: str) -> RoleMessages:
        if name not in self._roles:
            self._roles[name] = RoleMessages(self.build.roles[name])
        return self._roles[name]

    def _reason(self, entry: Mapping[str, Any]) -> Reason:
        return message_reason(self._role(entry["role"]).placed[entry["number"]], self.build.axis)

    def _flight_text(self, entry: Mapping[str, Any]) -> str:
        """Return words on when a message is under way, and what computes meanwhile."""
        flight = self._role(entry["role"]).flight(entry["number"])
        if entry["hidden"]:
            return f"hidden behind {flight.hidden_words}: it starts {flight.start}, and {flight.before} awaits it"
        if not flight.behind:
            return f"exposed: it starts {flight.start}, and nothing computes until {flight.before} has it"
        return f"exposed: it starts {flight.start}, and {flight.before} awaits it"

    def _message_time(self, entry: Mapping[str, Any]) -> MessageTime:
        """Return the time of the message in which a collective travels, and the waits for it in a step."""
        assert self.seconds is not None
        role = entry["role"]
        together = [self._role(role).placed[number] for number in self._of_message[role, entry["message"]]]
        return self.seconds.message(role, together, entry["count_per_step"])

    @cached_property
    def _of_message(self) -> dict[tuple[str, int], list[int]]:
        """The numbers of the collectives that travel in each message of a role."""
        numbers: dict[tuple[str, int], list[int]] = {}
        for entry in self.facts.entries:
            numbers.setdefault((entry["role"], entry["message"]), []).append(entry["number"])
        return numbers

    def _seconds_text(self, result: Explanation, entry: Mapping[str, Any]) -> str:
        """Return words on the seconds of a message, "" without a cluster."""
        if self.seconds is None:
            return ""
        time, count = self._message_time(entry), entry["count_per_step"]
        result.facts["seconds"] = {"each": time.seconds, "waited": time.waited}
        place = self.seconds.step.links.place(self.build.mesh.spread(entry["axis"].split(","))).words
        together = "its message takes" if entry["message"] != entry["number"] else "it takes"
        each = f"{together} {seconds_text(time.seconds)} {place}, {count} a {self.unit}"
        who = "the next stage waits" if entry["op"] == "send" else "the rank waits"
        if time.waited < 0.005 * time.seconds * count:
            return f"{each}: nobody waits for it" if entry["op"] == "send" else f"{each}, all of it behind work"
        share = time.waited / (time.seconds * count) if time.seconds else 1.0
        part = "all of it" if share > 0.995 else f"{seconds_text(time.waited)} of it ({share:.0%})"
        return f"{each}: {who} for {part}"

    def _say_seconds(self, result: Explanation, of: Callable[[StepSeconds], LineSeconds]) -> None:
        """Say what lines or modules take of a step, if there is a cluster."""
        if self.seconds is None:
            return
        found, several = of(self.seconds), len(self.build.roles) > 1
        words = seconds_words(found, self.seconds.time.seconds)
        result.say("takes", f"{words}, on a rank of {self.seconds.role}" if several else words)
        result.facts["seconds"] = {"work": found.work, "waits": dict(found.waits)}

    def _equal_text(self, entry: Mapping[str, Any]) -> str:
        """Return words on the messages of equal modules, with which `parc show` folds it."""
        found = next(one for one in self.facts.messages if any(other is entry for other in one.entries))
        if len(found.entries) == 1:
            return ""
        return f"it is one of {len(found.entries)} equal ones, {size_text(found.sent.bytes)} a {self.unit} together"

    def _together(self, entries: Sequence[Mapping[str, Any]], number: int) -> str:
        with_it = [entry for entry in entries if entry["message"] == entries[number]["message"]]
        if len(with_it) == 1:
            return ""
        size = sum(entry["wire_bytes"] for entry in with_it)
        return f"it travels in one message with {len(with_it) - 1} more tensors, {size_text(size)} together"

    def _across_text(self, entry: Mapping[str, Any]) -> str:
        """Return words on what goes to other nodes, "" without a `node` line."""
        across = self.report.get("across_nodes")
        if across is None:
            return ""
        place = row_place(entry, place_of(self.build.mesh, entry["axis"].split(","), across["node"]))
        if not (size := nic_bytes(entry["op"], entry["bytes"], place)):
            return f"its {entry['ranks']} ranks share a node"
        way = ALGORITHMS[entry["op"]].words
        return (
            f"its {entry['ranks']} ranks lie on {place.nodes} nodes: each NIC sends {size_text(size)} each time ({way})"
        )

    def _removed_by(self, entry: Mapping[str, Any]) -> list[str]:
        lines = self._serving(entry)
        verbs = {line.text.split()[0]: line_text(line) for line in (*self.facts.lines, *lines)}
        cause = lines[0] if lines else None
        return [*changes(entry, verbs, line_text(cause) if cause is not None else "")]

    # ---- a module

    @cached_property
    def modules(self) -> dict[str, ModuleRow]:
        """The rows of modules by all names of each: its path, those of equal ones, and that with their numbers."""
        rows = {row.path: row for row in self.facts.tree.rows if row.path and "/" not in row.path}
        named = {path: rows[row] for path, row in self.facts.tree.folded.items() if row in rows and path}
        return {**named, **{self.facts.names[path]: row for path, row in rows.items()}}

    def module(self, name: str) -> Explanation:
        """Return what a module's weights and messages cost, with those of the modules in it."""
        pattern = re.compile(r"\.".join(r"[^.]+" if word == "*" else re.escape(word) for word in name.split(".")))
        found = [row for path, row in self.modules.items() if path == name or pattern.fullmatch(path)]
        if not found:
            words = [*self.modules, *TOPICS, *(f"line:{line.root}" for line in self.facts.lines)]
            ways = "write `line:18`, `no:3`, `memory`, `time`, or a module that `parc show BUILD --list` names"
            raise UnknownWhat(f"no line, message or module is named `{name}`", did_you_mean(name, words, ways))
        row = found[0]
        paths = dict.fromkeys(row.path for row in found)
        inside = [one.path for one in self.facts.tree.rows
                  if any(one.path == path or one.path.startswith(f"{path}.") for path in paths)]  # fmt: skip
        equal = f", {len(row.members)} equal ones" if len(row.members) > 1 else ""
        result = Explanation(
            f"{self.facts.names[row.path]}{equal}", facts={"module": row.path, "equal": len(row.members)}
        )
        result.say("makes", row.type)
        self._say_weights(result, row)
        held = self._held_by(inside)
        if any(held.values()):
            kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in held.items() if size)
            together = ", all equal ones together" * (len(row.members) > 1)
            result.say("holds", f"{size_text(sum(held.values()))} on a rank{together}: {kinds}")
        result.facts["held"] = held
        self._say_seconds(result, lambda _: sum_of(self._module_seconds[path] for path in inside
                                                   if path in self._module_seconds))  # fmt: skip
        self._say_sent(result, [one for one in self.facts.messages if one.row in inside])
        self._say_changes(result, [one for one in self.facts.messages if one.row in inside])
        return result

    @cached_property
    def _module_seconds(self) -> dict[str, LineSeconds]:
        assert self.seconds is not None
        return self.seconds.of_modules(self.facts.tree.row_of)

    def _say_weights(self, result: Explanation, row: ModuleRow) -> None:
        inside = [one for one in self.facts.parameters if one["name"].startswith(f"{row.path}.")]
        for one in inside:
            line = self.facts.placed.get(one["name"])
            by = f" by line {line}" if line else ""
            own, where = one["name"].removeprefix(f"{row.path}."), placement_text(one["placement"])
            result.say(
                "" if one is not inside[0] else "weights",
                f"{own} {one['type']}: {where}{by}, {size_text(one['local_bytes'])}",
            )
        result.facts["weights"] = inside

    def _held_by(self, rows: Iterable[str]) -> dict[str, int]:
        """Return the bytes that a rank holds for modules by kind: of the role that holds most of them."""
        most = dict.fromkeys(STORED_KINDS, 0)
        for role in self.build.roles.values():
            sizes = self.facts.module_bytes(role)
            held = {kind: sum(sizes[row][kind] for row in rows if row in sizes) for kind in STORED_KINDS}
            most = max(most, held, key=lambda one: sum(one.values()))
        return most

    # ---- memory

    def memory(self) -> Explanation:
        """Return what a rank of each role holds at its peak, which moment that is, and what would lower it."""
        result = Explanation("memory of a rank, as estimated from its programs")
        budget = self.report.get("budget")
        several = len(self.report["memory"]) > 1
        for entry in self.report["memory"]:
            moment = entry["moment"]
            at = f" at {moment['module']}" if moment["module"] else ""
            left = f", {size_text(budget - entry['peak_bytes'])} below the budget" if budget is not None else ""
            result.say(entry["role"], f"peak {size_text(entry['peak_bytes'])} in action {moment['action']}{at}{left}")
        largest = max(self.report["memory"], key=lambda entry: entry["peak_bytes"])
        if budget is not None:
            result.say("budget", size_in_both(budget))
        if several:
            result.say("below", f"the role that needs most, {largest['role']}")
        result.head, result.right = ("kind", "at the peak", "most in a step"), (1, 2)
        kinds = sorted(MEMORY_KINDS, key=lambda kind: -largest[kind])
        result.table = [(kind, size_text(largest[kind]), size_text(largest["most"][kind])) for kind in kinds
                        if largest["most"][kind]]  # fmt: skip
        sizes = self.facts.module_bytes(self.build.roles[largest["role"]])
        ordered = sorted(sizes, key=lambda row: -sum(sizes[row].values()))[:5]
        result.say("largest", *(
            f"{self.facts.names.get(row) or 'the model itself'}: {size_text(sum(sizes[row].values()))} ("
            + ", ".join(f"{kind} {size_text(size)}" for kind, size in sizes[row].items() if size) + ")"
            for row in ordered if sum(sizes[row].values())
        ))  # fmt: skip
        advice = [*self._lower(largest)]
        result.say("lowered by", *advice)
        result.facts = {"memory": list(self.report["memory"]), "budget": budget, "changes": advice}
        return result

    def _lower(self, entry: Mapping[str, Any]) -> Iterable[str]:
        """Yield changes of the plan that lower the kinds of memory that are largest at the peak."""
        texts = [line_text(line) for line in self.facts.lines]
        verbs = {text.split()[0] for text in texts}
        level = max((int(text.split()[1]) for text in texts if re.match(r"zero \d", text)), default=0)
        batch = self.report["batch"] or {"data_ranks": 1}
        over = f" over the {batch['data_ranks']} data ranks" if batch["data_ranks"] > 1 else ""
        for kind in sorted(MEMORY_KINDS, key=lambda kind: -entry[kind])[:3]:
            if kind == "optimizer" and level < 1 and over:
                yield f"optimizer: `zero 1` splits it{over}"
            elif kind == "gradients" and level < 2 and over:
                yield f"gradients: `zero 2` splits them{over}, and sums them each microbatch"
            elif kind == "parameters" and level < 3 and over:
                yield f"parameters: `zero 3` splits them{over}, and gathers them for each use"
            elif kind == "activations":
                ways = ["`recompute` of blocks"] * ("recompute" not in verbs)
                ways += ["more microbatches"] * bool(
                    batch.get("samples", 1) > batch.get("microbatches", 1) * batch["data_ranks"]
                )
                ways += ["`sequence` over the axis that splits weights"] * (
                    "sequence" not in verbs and "column" in verbs
                )
                if ways:
                    yield f"activations: {', '.join(ways)}"
            elif entry[kind]:
                yield f"{kind}: more ranks for the weights, as of `column` and `row`, or more stages"

    # ---- time

    def time(self) -> Explanation:
        """Return what a step takes and why, and what would shorten it; without a cluster what can be said of it."""
        result = Explanation(f"time of a {self.unit}, as the clock counts it from its programs")
        if self.seconds is None:
            result.title = f"time of a {self.unit}"
            result.say("seconds", f"none without a cluster: {NO_CLUSTER}")
            for (axis,), sent in traffic_by(self.report["communication"], "axis").items():
                exposed = f"{size_text(sent.bytes - sent.hidden)} exposed, {size_text(sent.hidden)} hidden behind work"
                result.say(f"axis {axis}", f"{size_text(sent.bytes)} from one rank: {exposed}")
            result.say("idle", f"{idle_words(self.report)}, counted in operations")
            return result
        step = self.seconds.step
        for name, text in time_rows(step):
            result.say(name, text)
        texts = {line.root: self._root_text(line.root) for line in self.facts.lines}
        of_lines = {root: f"line {root}, `{text}`" for root, text in texts.items()}
        waits = (f"{seconds_text(seconds)} over {axis}, caused by {of_lines.get(line, 'no line of the plan')}"
                 for (axis, line), seconds in exposed_rows(step)[:5])  # fmt: skip
        result.say("waits", *waits)
        advice = [*self._shorter(step)]
        result.say("shorter by", *advice)
        result.head, result.right = ("plan line", "time", "", ""), (0, 1, 2)
        result.table = [*plan_line_rows(step, texts)]
        result.facts = {**step_json(step), "changes": advice}
        return result

    def _root_text(self, root: int) -> str:
        lines = [line for line in self.facts.lines if line.root == root]
        if len(lines) == 1:
            return line_text(lines[0])
        return f"{len(lines)} lines of `{lines[0].place.rpartition(':')[0]}`" if lines else "no line"

    def _shorter(self, step: PricedStep) -> Iterable[str]:
        """Yield changes that shorten the largest parts of a step, other than products."""
        parts = step.time.parts(step.time.longest)
        for part in sorted(parts, key=lambda part: -parts[part])[:3]:
            if parts[part] < _LEAST_PART * step.time.seconds:
                continue
            if part == "bubble":
                yield "bubble: more microbatches, or a schedule that fills it: `interleaved`, `zb-h1`, `zbv`"
            elif part == "other":
                yield "other: `parc run --compile` fuses lines between products: see `parc show --time --compile`"
            elif part == "exposed":
                longest = max(self.facts.messages, key=self._waits)
                yield from (
                    f"exposed: {self._label(longest.entry)}: {text}" for text in self._removed_by(longest.entry)
                )
            elif part == "optimizer" and "optimizer" not in self.facts.plan.offloaded:
                yield "optimizer: `zero 1` splits it over the ranks of data"

    # ---- shared rows

    def _label(self, entry: Mapping[str, Any]) -> str:
        """Return the WHAT of a message."""
        return f"{entry['role']}:no:{entry['number']}" if len(self.build.roles) > 1 else f"no:{entry['number']}"

    def _say_held(self, result: Explanation, names: set[str]) -> None:
        """Say what a rank holds of parameters, beside their whole bytes."""
        rows = [row for row in self.facts.parameters if row["name"] in names]
        if rows:
            types = [self.build.types[row["name"]] for row in rows]
            local, whole = (sum(row["local_bytes"] for row in rows),
                            sum(math.prod(type_.shape) * type_.dtype.itemsize for type_ in types))  # fmt: skip
            split = dict.fromkeys(placement_text(row["placement"]) for row in rows)
            result.say(
                "holds", f"a rank stores {size_text(local)} of {size_text(whole)} of these weights: {'; '.join(split)}"
            )
            result.facts["weights"] = {"local_bytes": local, "bytes": whole}

    def _say_sent(self, result: Explanation, messages: Sequence[EqualMessages]) -> None:
        """Say what a rank sends for messages, with a table of these, largest first."""
        sent = traffic_by(entry for one in messages for entry in one.entries).get((), Traffic())
        result.facts["sent"] = {"bytes": sent.bytes, "hidden_bytes": sent.hidden, "messages": sent.messages,
                                "tensors": sent.count}  # fmt: skip
        if not messages:
            result.say("sends", "nothing")
            return
        every = traffic_by(self.report["communication"])[()]
        share = sent.bytes / every.bytes if every.bytes else 0
        result.say(
            "sends", f"{size_text(sent.bytes)} a {self.unit} from one rank, {share:.1%} of all that it sends, in "
            f"{sent.messages:,} message{'s' * (sent.messages != 1)}: {size_text(sent.bytes - sent.hidden)} exposed, "
            f"{size_text(sent.hidden)} hidden",
        )  # fmt: skip
        ordered, several = sorted(messages, key=lambda one: -one.sent.bytes), len(self.build.roles) > 1
        for hidden in (False, True):
            first = next((one.entry for one in ordered if one.entry["hidden"] is hidden), None)
            if first is not None:
                result.say("time" if hidden is False or not any(not one.entry["hidden"] for one in ordered) else "",
                           f"{self._label(first)} is {self._flight_text(first)}")  # fmt: skip
        result.say("why", f"{self._label(ordered[0].entry)}: {self._reason(ordered[0].entry).text}")
        waits = ("waits",) if self.seconds is not None else ()
        result.head = ("no.", "collective", "axis", "phase", "of", "sent", "time", *waits, "module")
        result.right = (0, 5, 7) if waits else (0, 5)
        result.table = [
            (f"{one.entry['role']}:{one.entry['number']}" if several else one.entry["number"], one.entry["op"],
             one.entry["axis"], one.entry["phase"], one.entry["carries"], size_text(one.sent.bytes),
             "hidden" if one.entry["hidden"] else "exposed", *(seconds_text(self._waits(one)) for _ in waits),
             modules_text(one.modules) or "-")
            for one in ordered[:MOST_ROWS]
        ]  # fmt: skip
        if rest := ordered[MOST_ROWS:]:
            size = size_text(sum(one.sent.bytes for one in rest))
            result.table.append(("", f"{len(rest)} more", "", "", "", size, "", *("" for _ in waits), ""))
        result.facts["messages"] = [
            {
                **one.entry,
                "modules": one.modules,
                "sent_bytes": one.sent.bytes,
                **({"waited_s": self._waits(one)} if waits else {}),
            }
            for one in ordered
        ]

    def _waits(self, found: EqualMessages) -> float:
        """Return the waits of the first one's role in a step for equal messages; tensors of one message count once."""
        own = {entry["message"]: entry for entry in found.entries if entry["role"] == found.entry["role"]}
        return sum(self._message_time(entry).waited for entry in own.values())

    def _say_changes(self, result: Explanation, messages: Sequence[EqualMessages]) -> None:
        """Say what would remove the largest messages of each kind."""
        kinds = dict[str, Mapping[str, Any]]()
        for one in sorted(messages, key=lambda one: -one.sent.bytes):
            kinds.setdefault(one.entry["carries"], one.entry)
        texts = [f"{kind}: {text}" for kind, entry in kinds.items() if kind != "numbers"
                 for text in self._removed_by(entry)]  # fmt: skip
        result.say("removed by", *texts)
        result.facts["changes"] = texts


def _splits_values(line: PlanLine, axis: str) -> bool:
    """Return whether a line splits values between modules over an axis."""
    verb, *words = line.text.split()
    return verb in ("sequence", "context") and axis in words


def _names(line: PlanLine, module: str) -> bool:
    """Return whether a line names a module, or one around it."""
    _, *words = re.split(r",?\s+", line.text.partition(" over ")[0])
    path = module.split(".")
    return any(Pattern(word).matches(".".join(path[:depth])) for word in words for depth in range(1, len(path) + 1))


TOPICS: Mapping[str, Callable[[Explainer], Explanation]] = {"memory": Explainer.memory, "time": Explainer.time}
"""The words that name no line, message or module, each with its explanation."""
