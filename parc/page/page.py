"""The page of a build: its facts put into the template."""

from __future__ import annotations

from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from parc.compiler.build.build import Build, BuildError
from parc.compiler.program.cost import MEMORY_KINDS
from parc.compiler.schedules.drawing import svg
from parc.compiler.schedules.timeline import simulate
from parc.grammar.syntax import size_text
from parc.page.arcs import arcs_svg
from parc.page.facts import STORED_KINDS, EqualMessages, PageFacts
from parc.page.flow import LOSS_ROW, OUTPUT_ROW, ModuleRow
from parc.page.listing import ListedFunction
from parc.placement_words import in_words
from parc.report_words import across_text, check_texts, fact_rows, schedule_words, traffic_by, traffic_rows

ROW_HEIGHT = 30
"""The height of a row of the tree, in pixels."""


def page_of(build: Build) -> str:
    """Return the page of a build.

    Raises:
        BuildError: its files contradict one another.
    """
    return _Page(build).text()


class _Page:
    def __init__(self, build: Build) -> None:
        self.build, self.facts, self.report = build, PageFacts(build), build.report
        mesh = build.mesh.declared
        named = dict.fromkeys([*mesh.names, *(axis for view in self.report.get("views", ()) for axis in view["axes"])])
        self.colors = {axis: number % 6 for number, axis in enumerate(named)}
        self.held = {row["name"]: row for row in self.facts.parameters}
        self.of_rows: dict[str, list[EqualMessages]] = {}
        for message in self.facts.messages:
            self.of_rows.setdefault(message.row, []).append(message)

    def text(self) -> str:
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters |= {"size": size_text, "program": program_html}
        environment.globals |= {"color": self.color, "plan_link": self.facts.line_anchor}
        files = {name: (resources.files(__package__) / name).read_text(encoding="utf-8")
                 for name in ("page.html", "page.css", "page.js")}  # fmt: skip
        template = environment.from_string(files["page.html"])
        return template.render(style=Markup(files["page.css"]), script=Markup(files["page.js"]), **self.content())

    def color(self, axis: str) -> int:
        """Return the number of an axis's color; of several axes that of the first."""
        return self.colors.get(axis.split(",")[0], 5)

    def content(self) -> dict[str, Any]:
        """Return all that the template names."""
        facts, report, tree = self.facts, self.report, self.facts.tree
        here = {row.path: at for at, row in enumerate(tree.rows)}
        edges = sorted((here[source], here[target]) for source, target in tree.edges)
        arcs, gutter = arcs_svg(edges, len(tree.rows), ROW_HEIGHT)
        return {
            "model": self.build.manifest["model"]["callable"],
            "mesh": [(axis, size) for axis, size in self.build.mesh.declared.axes],
            "world": report["world"], "parameters": report["parameters"],
            "peak": max(entry["peak_bytes"] for entry in report["memory"]),
            "budget": self.build.manifest.get("budget"),
            "sent": traffic_by(report["communication"]).get(()),
            "pipeline": report["pipeline"], "schedule": schedule_words(report["pipeline"]),
            "facts": fact_rows(report), "across": across_text(report), "checks": report["checks"],
            "check_texts": check_texts(report)[1:],
            "rows": [self.module(row) for row in tree.rows], "arcs": Markup(arcs), "gutter": gutter,
            "row_height": ROW_HEIGHT,
            "memory": self.memory(), "kinds": MEMORY_KINDS, "modules": self.module_memory(),
            "stored_kinds": STORED_KINDS,
            "axes": self.axes(), "traffic": traffic_rows(report["communication"]), "messages": self.messages(),
            "timeline": self.timeline(), "lines": self.lines(), "functions": facts.listing.functions,
        }  # fmt: skip

    def module(self, row: ModuleRow) -> dict[str, Any]:
        """Return a row of the tree with the facts of its card."""
        own = [self.held[name] for name in self.held if name.rpartition(".")[0] == row.path]
        kinds = dict.fromkeys((axis, kind) for one in own for axis, kind in one["placement"].items()
                              if kind not in ("I", "R"))  # fmt: skip
        messages = [message for message in self.of_rows.get(row.path, ()) if row.path or message.entry["module"] == ""]
        return {
            "row": row, "name": self.name(row), "special": row.path.endswith((OUTPUT_ROW, LOSS_ROW)),
            "is_input": row.depth == 0 and row.path in self.build.programs["F"].main.bound("input"),
            "chips": [(axis, kind, in_plain(kind)) for axis, kind in kinds],
            "held": sum(one["local_bytes"] for one in own),
            "parameters": [
                {**one, "own": one["name"].rpartition(".")[2], "line": self.facts.placed.get(one["name"], ""),
                 "kinds": [(axis, in_plain(kind)) for axis, kind in one["placement"].items() if kind not in ("I", "R")]}
                for one in own
            ],
            "marks": list(dict.fromkeys((message.entry["op"], message.entry["axis"]) for message in messages
                                        if message.entry["carries"] == "activations")),
            "messages": messages, "anchor": self.facts.module_anchor(row),
        }  # fmt: skip

    def name(self, row: ModuleRow) -> str:
        """Return a row's full name, with the numbers of folded modules."""
        return self.facts.names[row.path]

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
            found = self.facts.module_bytes(role)
            rows = [{"name": self.facts.names[row.path], "anchor": row.path, "sizes": found[row.path],
                     "sum": sum(found[row.path].values())}
                    for row in self.facts.tree.rows if sum(found.get(row.path, {}).values())]  # fmt: skip
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

    def messages(self) -> list[dict[str, Any]]:
        """Return the collectives with the names of their modules."""
        return [{"message": one, "name": self.facts.names.get(one.row, "")} for one in self.facts.messages]

    def timeline(self) -> Markup | None:
        """Return the drawing of a step; None where there is one stage."""
        if self.report["pipeline"].get("stages", 1) == 1:
            return None
        try:
            played = simulate({name: role.actions for name, role in self.build.roles.items()})
        except ValueError as error:  # only a changed `schedule.txt` holds such an order
            raise BuildError(f"`{self.build.folder / 'schedule.txt'}`: {error}") from None
        return Markup(svg(played, "", "slots"))

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the plan with what each did."""
        facts, rows, before = self.facts, list[dict[str, Any]](), 0
        sent = traffic_by(facts.entries, "line")
        first = {entry["line"]: entry["anchor"] for entry in reversed(facts.entries)}
        for number, line in enumerate(facts.lines):
            verb, _, rest = line.text.partition(" ")
            leads = line.root != before  # the lines of an included file share what messages know of
            rows.append(
                {
                    "anchor": f"P{number}", "verb": verb, "rest": rest.strip(), "line": line,
                    "included": line.place != str(line.root), "leads": leads,
                    "places": facts.placed_by(line),
                    "sent": sent.get((line.root,)) if leads else None, "first": first.get(line.root, ""),
                    "lines": facts.lines_of_programs.get(line.root, 0) if leads else 0,
                    "reshards": sum(one["line"] == line.root for one in self.report["reshards"]) if leads else 0,
                    "padded": sum(one["line"] == line.root for one in self.report["padding"]) if leads else 0,
                    "rounds": any(one["line"] == line.root for one in self.report["numerics"]),
                }
            )  # fmt: skip
            before = line.root
        return rows


def in_plain(kind: str) -> str:
    """Return a placement in words."""
    (sentence,) = in_words([kind])
    return sentence.partition(": ")[2] or sentence


def program_html(listed: ListedFunction) -> Markup:
    """Return a function's rows, each with its anchor, and with what stands behind its code apart."""
    marked, rows = listed.marked, []
    for number, row in enumerate(listed.rows, 1):
        code, mark, behind = row.rpartition("  # ")
        text = f"{escape(code)}<s>{mark}{escape(behind)}</s>" if mark else str(escape(row))
        rows.append(f"<i id={listed.anchor(number)}{' class=c' if number in marked else ''}>{text}</i>")
    return Markup("".join(rows))
