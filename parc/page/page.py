"""The page of a build: its facts put into the template, with the flow of values drawn beside the tree of modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from parc.compiler.analysis.memory import MEMORY_KINDS
from parc.compiler.build.build import Build
from parc.compiler.clock.programs import STEP_PARTS
from parc.compiler.schedules.timeline import Timeline, svg
from parc.grammar.syntax import size_in_both, size_text
from parc.page.facts import STORED_KINDS, EqualMessages, ListedFunction, PageFacts, timeline_of, waits_of
from parc.page.flow import ModuleRow
from parc.report_words import (
    across_table,
    across_text,
    check_texts,
    fact_rows,
    floor_words,
    idle_words,
    in_words,
    number_ranges,
    schedule_words,
    stage_rows,
    traffic_by,
    traffic_rows,
    unit_of,
)
from parc.step_time import PricedStep, exposed_rows, plan_line_rows, seconds_text, time_rows
from parc.tables import parameter_rows

# ---- the drawing of edges between rows of a list, in lanes at its left


LANE, EDGE, MOST_LANES = 7, 12, 8
"""The width of a lane and of the edge in pixels, and the number of lanes."""


def arcs_svg(edges: Sequence[tuple[int, int]], rows: int, height: int) -> tuple[str, int]:
    """Return a drawing of edges between rows, each ``height`` pixels high, and its width. An edge to the next row is a
    straight line; others have lanes, each its own while there are any. One to an earlier row has the class `back`."""
    lanes = lanes_of(sorted({(min(edge), max(edge)) for edge in edges}))
    ahead = {edge for edge in edges if edge[0] < edge[1]}
    width = EDGE + LANE * (1 + max(lanes.values(), default=0))
    right, parts = width - EDGE / 2, []
    for (source, target), lane in lanes.items():
        top, bottom = (height * (row + 0.5) for row in (source, target))
        x = right - lane * LANE
        r = min(LANE, right - x)
        way = f"H{x + r:g}q{-r:g} 0 {-r:g} {r:g}V{bottom - r:g}q0 {r:g} {r:g} {r:g}H{right:g}"
        path = f"M{right:g} {top:g}{way if lane else f'V{bottom:g}'}"
        back = "" if (source, target) in ahead else ' class="back"'
        parts.append(f'<path{back} d="{path}" data-e="{source} {target}"/>')
    touched = {row for edge in edges for row in edge}
    parts += [f'<circle cx="{right:g}" cy="{height * (row + 0.5):g}" r="3.5"/>' for row in sorted(touched)]
    box = f'width="{width}" height="{rows * height}" viewBox="0 0 {width} {rows * height}"'
    return f'<svg class="arcs" {box} aria-hidden="true">{"".join(parts)}</svg>', width


def lanes_of(edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return the lane of each edge, 0 for one to the next row. Short edges have the inner lanes, and edges that overlap
    different ones while there are any.

    >>> lanes_of([(0, 1), (0, 3), (1, 4), (4, 6)])
    {(0, 1): 0, (4, 6): 1, (0, 3): 1, (1, 4): 2}
    """
    lanes: dict[tuple[int, int], int] = {}
    for edge in sorted(edges, key=lambda edge: (edge[1] - edge[0], edge)):
        taken = {lanes[other] for other in lanes if other[0] < edge[1] and edge[0] < other[1]}
        free = (lane for lane in range(1, MOST_LANES) if lane not in taken)
        lanes[edge] = next(free, MOST_LANES) if edge[1] - edge[0] > 1 else 0
    return lanes


# ---- the page


ROW_HEIGHT = 30
"""The height of a row of the tree, in pixels."""


def page_of(build: Build, step: PricedStep | None = None) -> str:
    """Return the page of a build, with the times of its step on a cluster if it is priced.

    Raises:
        BuildError: its files contradict one another.
    """
    return _Page(build, step).text()


class _Page:
    def __init__(self, build: Build, step: PricedStep | None) -> None:
        mesh, self.step = build.mesh.declared, step
        self.build, self.facts = build, PageFacts(build)
        self.report = {**build.report, "mesh": dict(mesh.axes)}  # JSON's sorted keys lost their order
        named = dict.fromkeys([*mesh.names, *(axis for view in self.report.get("views", ()) for axis in view["axes"])])
        self.colors = {axis: number % 6 for number, axis in enumerate(named)}
        self.above: dict[str, ModuleRow] = {}
        way: list[ModuleRow] = []
        for row in self.facts.tree.rows:
            del way[row.depth :]
            way.append(row)
            self.above[row.path] = way[-2] if row.depth else row
        self.held = {row["name"]: row for row in self.facts.parameters}
        self.of_rows: dict[str, list[EqualMessages]] = {}
        for message in self.facts.messages:
            self.of_rows.setdefault(message.row, []).append(message)

    def text(self) -> str:
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters |= {
            "size": size_text,
            "both": size_in_both,
            "short": short_count,
            "seconds": seconds_text,
            "program": program_html,
        }
        environment.globals |= {"color": self.color, "plan_link": self.facts.line_anchor}
        files = {name: (resources.files(__package__) / name).read_text(encoding="utf-8")
                 for name in ("page.html", "page.css", "page.js")}  # fmt: skip
        template = environment.from_string(files["page.html"])
        return template.render(style=Markup(files["page.css"]), script=Markup(files["page.js"]), **self.content())

    def color(self, axis: str) -> int:
        """Return the number of an axis's color; of several axes that of the first."""
        return self.colors.get(self.build.mesh.owner(axis.split(",")[0]), 5)

    def content(self) -> dict[str, Any]:
        """Return the values of the template's names."""
        facts, report, tree = self.facts, self.report, self.facts.tree
        here = {row.path: at for at, row in enumerate(tree.rows)}
        edges = sorted((here[source], here[target]) for source, target in tree.edges)
        arcs, gutter = arcs_svg(edges, len(tree.rows), ROW_HEIGHT)
        return {
            "model": self.build.manifest["model"]["callable"],
            "mesh": report["mesh"],
            "world": report["world"], "parameters": report["parameters"],
            "peak": max(entry["peak_bytes"] for entry in report["memory"]),
            "budget": self.build.manifest.get("budget"),
            "sent": traffic_by(report["communication"]).get(()),
            "pipeline": report["pipeline"], "schedule": schedule_words(report), "unit": unit_of(report),
            "stages": stage_rows(report), "idle": idle_words(report),
            "facts": self.other_facts(), "across": across_text(report),
            "across_axes": across_table(report), "checks": report["checks"],
            "check_texts": check_texts(report)[1:],
            "rows": [self.module(row) for row in tree.rows], "arcs": Markup(arcs), "gutter": gutter,
            "row_height": ROW_HEIGHT,
            "memory": self.memory(), "modules": self.module_memory(),
            "kinds": [kind for kind in MEMORY_KINDS if any(entry[kind] for entry in report["memory"])],
            "table": parameter_rows(facts.parameters, facts.placed), "axis_of_stages": self.build.axis,
            "stored_kinds": STORED_KINDS,
            "axes": self.axes(), "traffic": traffic_rows(report["communication"]),
            "traffic_roles": len({entry["role"] for entry in report["communication"]}),
            "messages": self.messages(facts.messages), "evaluation": self.evaluation(),
            "timeline": self.timeline(), "time": self.time(), "lines": self.lines(),
            "functions": facts.listing.functions,
        }  # fmt: skip

    def other_facts(self) -> list[tuple[str, str]]:
        """Return the report's facts in words, without those about memory, which have a table."""
        rows, subject = list[tuple[str, str]](), ""
        for name, text in fact_rows(self.report):
            subject = name or subject  # rows without a name belong to the one above
            if subject != "memory":
                rows.append((name, text))
        return rows

    def stage_words(self, row: ModuleRow) -> tuple[str, list[tuple[int, str]]]:
        """Return the stages of a row's modules as text, and, if these are several blocks, the numbers of the blocks of
        each stage."""
        stages = self.facts.stages.get(row.path, {})
        blocks = {stage: [module.rpartition(".")[2] for module in modules if module in row.members]
                  for stage, modules in sorted(stages.items())}  # fmt: skip
        each = [(stage, number_ranges(words)) for stage, words in blocks.items() if words and row.kind == "block"]
        return number_ranges(map(str, sorted(stages))), each if len(each) > 1 else []

    def module(self, row: ModuleRow) -> dict[str, Any]:
        """Return a row of the tree with the facts of its card."""
        parameters = [held for name, held in self.held.items() if name.rpartition(".")[0] == row.path]
        kinds = dict.fromkeys((axis, kind) for one in parameters for axis, kind in one["placement"].items()
                              if kind not in ("I", "R"))  # fmt: skip
        messages = [message for message in self.of_rows.get(row.path, ()) if row.path or message.entry["module"] == ""]
        stages, stages_of = self.stage_words(row)
        return {
            "row": row, "name": self.facts.names[row.path], "stages_of": stages_of,
            "stages": stages if row.kind == "block" or stages != self.stage_words(self.above[row.path])[0] else "",
            "chips": [(axis, kind, in_plain(kind)) for axis, kind in kinds],
            "held": sum(one["local_bytes"] for one in parameters),
            "parameters": [
                {**one, "own": one["name"].rpartition(".")[2], "line": self.facts.placed.get(one["name"], ""),
                 "kinds": [(axis, in_plain(kind)) for axis, kind in one["placement"].items() if kind not in ("I", "R")]}
                for one in parameters
            ],
            "marks": list(dict.fromkeys((message.entry["op"], message.entry["axis"]) for message in messages
                                        if message.entry["carries"] == "activations")),
            "messages": messages, "anchor": self.facts.module_anchor(row),
        }  # fmt: skip

    def memory(self) -> list[dict[str, Any]]:
        """Return the peaks of ranks; roles that are alike share a row."""
        alike: dict[str, dict[str, Any]] = {}
        for entry in self.report["memory"]:
            sizes = {kind: entry[kind] for kind in MEMORY_KINDS}
            row = alike.setdefault(str((sizes, entry["offloaded"])), {**entry, "sizes": sizes, "roles": []})
            row["roles"].append(entry["role"])
        return list(alike.values())

    def module_memory(self) -> list[dict[str, Any]]:
        """Return tables of the bytes of each row's modules on a rank, one for each kind of role, largest peak first."""
        peaks = {entry["role"]: entry["peak_bytes"] for entry in self.report["memory"]}
        alike: dict[str, dict[str, Any]] = {}
        for name, role in self.build.roles.items():
            sizes_of = self.facts.module_bytes(role)
            sums = {row: sum(sizes.values()) for row, sizes in sizes_of.items()}
            rows = [{"name": self.facts.names[row.path], "anchor": f"M{at}", "sizes": sizes_of[row.path],
                     "sum": sums[row.path]}
                    for at, row in enumerate(self.facts.tree.rows) if sums.get(row.path)]  # fmt: skip
            shown = str([(row["name"], row["sizes"]) for row in rows])
            alike.setdefault(shown, {"rows": rows, "roles": [], "peak": peaks[name]})["roles"].append(name)
        for table in alike.values():
            table["most"] = max((row["sum"] for row in table["rows"]), default=1)
            table["sums"] = {kind: sum(row["sizes"][kind] for row in table["rows"]) for kind in STORED_KINDS}
        return sorted(alike.values(), key=lambda table: -table["peak"])

    def axes(self) -> list[dict[str, Any]]:
        """Return what a rank sends over each axis."""
        sent = traffic_by(self.report["communication"], "axis")
        most = max((one.bytes for one in sent.values()), default=0) or 1
        return [{"axis": axis, "sent": one, "most": most} for (axis,), one in sent.items()]

    def messages(self, messages: Sequence[EqualMessages]) -> list[dict[str, Any]]:
        """Return collectives with the names of their modules."""
        return [{"message": one, "name": self.facts.names.get(one.row, "")} for one in messages]

    def evaluation(self) -> dict[str, Any] | None:
        """Return the programs that evaluate the model and what they send; None if there are none."""
        if self.facts.evaluation is None:
            return None
        listing, messages = self.facts.evaluation
        lines = [number for number, line in enumerate(self.facts.lines) if line.text.split()[:1] == ["eval"]]
        return {"functions": listing.functions, "messages": self.messages(messages),
                "line": self.facts.lines[lines[0]].place if lines else ""}  # fmt: skip

    def timeline(self) -> dict[str, Any] | None:
        """Return the drawing of a step, in milliseconds on a cluster, and sentences about its idle time; without a
        cluster None if there is one stage."""
        if self.step is not None:
            spans = {role: [replace(span, start=1e3 * span.start, end=1e3 * span.end) for span in spans]
                     for role, spans in self.step.time.timeline.spans.items()}  # fmt: skip
            timeline, unit, sentences = Timeline(spans), "ms", list[str]()
        elif len(self.report["stages"]) == 1:
            return None
        else:
            timeline, unit = timeline_of(self.build), "%"
            sentences = [floor_words(timeline, in_percent=True), *waits_of(self.build)]
        return {"picture": Markup(svg(timeline, "", unit)), "overlaps": timeline.overlaps, "sentences": sentences}

    def time(self) -> dict[str, Any] | None:
        """Return what a step takes on a cluster: in all, of each role by part, of each line of the plan, and waits."""
        step = self.step
        if step is None:
            return None
        texts = {line.root: line.text for line in self.facts.lines}
        return {
            "step": seconds_text(step.time.seconds), "seconds": step.time.seconds, "cluster": step.cluster.name,
            "rows": [row for row in time_rows(step) if row[0] not in ("step", "parts")], "parts": STEP_PARTS,
            "roles": {name: step.time.parts(name) for name in step.time.roles}, "longest": step.time.longest,
            "lines": plan_line_rows(step, texts),
            "waits": [(axis, line or "", seconds_text(wait)) for (axis, line), wait in exposed_rows(step)],
        }  # fmt: skip

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the plan with the effects of each."""
        facts, rows, before = self.facts, list[dict[str, Any]](), 0
        sent = traffic_by(facts.entries, "line")
        first = {entry["line"]: entry["anchor"] for entry in reversed(facts.entries)}
        for number, line in enumerate(facts.lines):
            verb, _, rest = line.text.partition(" ")
            leads = line.root != before  # messages know only the root line, which all lines of an included file share
            rows.append(
                {
                    "anchor": f"P{number}", "verb": verb, "rest": rest.strip(), "line": line,
                    "included": line.place != str(line.root), "leads": leads,
                    "places": facts.placed_by(line),
                    "sent": sent.get((line.root,)) if leads else None, "first": first.get(line.root, ""),
                    "lines": facts.lines_of_programs.get(line.root, 0) if leads else 0,
                    "reshards": sum(one["line"] == line.root for one in self.report["reshards"]) if leads else 0,
                    "padded": sum(one["line"] == line.root for one in self.report["padding"]) if leads else 0,
                    "rounds": (line.root, "lossy") in ((one["line"], one["class"]) for one in self.report["numerics"]),
                }
            )  # fmt: skip
            before = line.root
        return rows


def short_count(number: int) -> str:
    """Return a count in at most four digits from a million on.

    >>> short_count(842_496), short_count(1_240_000), short_count(405_853_388_800)
    ('842,496', '1.24 M', '405.9 B')
    """
    for size, word in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.4g} {word}"
    return f"{number:,}"


def in_plain(kind: str) -> str:
    """Return a placement in words."""
    (sentence,) = in_words([kind])
    return sentence.partition(": ")[2] or sentence


def program_html(listed: ListedFunction) -> Markup:
    """Return a function's rows, each with its anchor, and with its comment apart from its code."""
    marked, rows = listed.marked, []
    for number, row in enumerate(listed.rows, 1):
        code, mark, behind = row.rpartition("  # ")
        text = f"{escape(code)}<s>{mark}{escape(behind)}</s>" if mark else str(escape(row))
        rows.append(f"<i id={listed.anchor(number)}{' class=c' if number in marked else ''}>{text}</i>")
    return Markup("".join(rows))
