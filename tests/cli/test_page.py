"""The page of a build: one file that needs nothing else, whose links lead somewhere, with the facts of `show`."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from parc.compiler.analysis.flops import block_costs
from parc.compiler.build.build import Build
from parc.compiler.build.directory import read_build
from parc.compiler.clock.cluster import find_cluster
from parc.page.facts import PageFacts
from parc.page.page import page_of
from parc.report import plan_of, states_of
from parc.step_time import price, seconds_text
from tests.cli.commands import Captured, parc
from tests.hostile_changes import rehash
from tests.runtime.tiny import BOTH, DATA, ONE, PLAN, build

SMALL = PLAN.replace("layers=2", "layers=1")
STAGES = PLAN.replace("schedule  microbatches 2", "schedule  1f1b microbatches 2")
RANGES = SMALL.replace("B=8, S=8", "B=8..16 by 8, S=8")
PIPELINE = """
mesh      dp=2, pp=2
stage     before blocks.1 over pp
shard     tokens, targets [B/dp, _]
zero      3 over dp
"""
EVAL = "eval      every 3\n"


class Page(HTMLParser):
    """A page's anchors, the targets of its links, all that it would load, and its text."""

    VOID = frozenset({"meta", "br", "input", "path", "circle", "rect", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.anchors += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if tag == "a" else []
        loading = ("src", "srcset", "data", "poster", "xlink:href", "action") if tag == "a" else (
            "src", "srcset", "data", "poster", "href", "xlink:href", "action")  # fmt: skip
        self.loads += [f"<{tag} {name}>" for name in loading if name in given]
        self.loads += [f"<{tag}>" for _ in range(tag in ("link", "img", "iframe", "object", "embed", "base"))]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Build]:
    """Builds of one rank, of two axes, of two stages with ZeRO, and of sizes with ranges."""
    folder = tmp_path_factory.mktemp("page")
    plans = {"one": (ONE, PLAN), "both": (BOTH, PLAN), "stages": (PIPELINE + EVAL, STAGES),
             "ranges": (DATA + EVAL, RANGES)}  # fmt: skip
    return {name: read_build(build(folder, lines, plan, name)) for name, (lines, plan) in plans.items()}


@pytest.fixture(scope="module")
def facts(made: dict[str, Build]) -> dict[str, PageFacts]:
    """The facts of each build."""
    return {name: PageFacts(one) for name, one in made.items()}


@pytest.fixture(scope="module")
def pages(made: dict[str, Build]) -> dict[str, str]:
    """The page of each build."""
    return {name: page_of(one) for name, one in made.items()}


@pytest.mark.parametrize("name", ["one", "both", "stages", "ranges"])
def test_a_page_needs_nothing_else_and_its_links_lead_somewhere(pages: dict[str, str], name: str) -> None:
    text = pages[name]
    page = Page(text)
    assert not page.open and not page.loads
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)|fetch\(|import\(", text)
    assert len(page.anchors) == len(set(page.anchors))
    assert page.links and all(link.startswith("#") for link in page.links)
    assert not {link[1:] for link in page.links} - {*page.anchors}


def test_links_of_collectives_lead_to_the_lines_that_say_them(facts: dict[str, PageFacts]) -> None:
    for one in facts.values():
        rows = {f.anchor(number): row for f in one.listing.functions for number, row in enumerate(f.rows, 1)}
        for entry in one.entries:
            row = rows[entry["anchor"]]
            assert f"parc.{entry['op']}(" in row or (entry["op"] == "send" and row == "    return {")


@pytest.mark.parametrize("name", ["stages", "ranges"])
def test_an_evaluation_is_shown_with_what_it_sends_and_the_lines_that_say_so(
    made: dict[str, Build], facts: dict[str, PageFacts], pages: dict[str, str], name: str
) -> None:
    one = made[name]
    found = facts[name].evaluation
    assert found is not None
    listing, messages = found
    for listed in listing.functions:
        text = one.texts[f"evaluation/{listed.files[0]}"].split("\n")
        assert text[listed.start - 1 :][: len(listed.rows)] == listed.rows
    assert {listed.action for listed in listing.functions} >= {"F", "COUNT", "SCALE", "LOSS"}
    rows = {f.anchor(number): row for f in listing.functions for number, row in enumerate(f.rows, 1)}
    for message in messages:
        row = rows[message.anchor]
        assert f"parc.{message.entry['op']}(" in row or (message.entry["op"] == "send" and row == "    return {")
    assert ("send" in {message.entry["op"] for message in messages}) == (name == "stages")
    assert not any(message.entry["phase"] == "backward" for message in messages)
    page = Page(pages[name])
    assert "#evaluation" in page.links and {message.anchor for message in messages} <= {link[1:] for link in page.links}
    assert "#evaluation" not in Page(pages["both"]).links


def test_bytes_of_modules_are_those_of_the_report(made: dict[str, Build], facts: dict[str, PageFacts]) -> None:
    for name, one in made.items():
        plan = plan_of(one)
        for role, entry in zip(one.roles.values(), one.report["memory"], strict=True):
            rows, state = facts[name].module_bytes(role).values(), entry["state"]
            assert sum(row["parameters"] for row in rows) == state["parameters"] + state["weights"]
            assert sum(row["gradients"] for row in rows) == state["gradients"]
            assert sum(row["optimizer"] for row in rows) == state["optimizer"]
            assert sum(row["saved"] for row in rows) == sum(cost.kept for cost in block_costs(role).values())
            assert set(states_of(one, plan, role)) <= one.manifest["parameters"].keys()


def test_programs_are_listed_as_their_files_have_them(
    made: dict[str, Build], facts: dict[str, PageFacts], pages: dict[str, str]
) -> None:
    for name, one in made.items():
        for listed in facts[name].listing.functions:
            text = one.texts[listed.files[0]].split("\n")
            assert text[listed.start - 1 :][: len(listed.rows)] == listed.rows
    stages = facts["stages"].listing.functions
    assert any(len(listed.files) == 2 for listed in stages), "stages share functions"
    assert "{B" in pages["ranges"], "sizes are names in programs for ranges of sizes"


def test_values_flow_between_modules_as_in_the_models_code(facts: dict[str, PageFacts]) -> None:
    tree = facts["both"].tree
    assert [row.label for row in tree.rows if row.depth == 1][3] == "blocks.0..1"
    into = {to: {source for source, target in tree.edges if target == to} for _, to in tree.edges}
    assert into["drop"] == {"embed", "position"}
    assert into["blocks.0.norm2"] == {"blocks.0", "blocks.0.attn.drop"}, "what goes around attention is added"
    assert into["blocks.0.mlp.down"] == {"blocks.0.mlp.up"}
    assert into["/loss"] == {"/targets", "head"}


def test_a_page_is_not_made_of_a_report_that_others_contradict(
    capsys: Captured, made: dict[str, Build], tmp_path: Path
) -> None:
    for key in ("written", "communication"):
        copy = Path(shutil.copytree(made["both"].path, tmp_path / key))
        report = json.loads((copy / "report.json").read_text())
        report[key].pop()
        (copy / "report.json").write_text(json.dumps(report))
        assert "report.json` was altered" in parc(capsys, "show", copy, "--html", tmp_path / "page.html")[2]
        rehash(copy)
        code, _, err = parc(capsys, "show", copy, "--html", tmp_path / "page.html")
        assert code == 1 and f"`{key}` is not what the build's other files say" in err and "parc build PLAN" in err
        assert not (tmp_path / "page.html").exists()


def test_names_from_a_persons_code_are_text_and_not_markup(made: dict[str, Build]) -> None:
    one = made["one"]
    odd = "./gpt.py:<script>alert('x')</script>"
    manifest = {**one.manifest, "model": {**one.manifest["model"], "callable": odd}}
    text = page_of(replace(one, manifest=manifest))
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_a_page_is_written_where_one_may_write(
    capsys: Captured, made: dict[str, Build], pages: dict[str, str], tmp_path: Path
) -> None:
    code, out, err = parc(capsys, "show", made["both"].path, "--html", tmp_path / "page.html")
    assert (code, out) == (0, "") and err.startswith(f"wrote {tmp_path / 'page.html'} (")
    assert (tmp_path / "page.html").read_text() == pages["both"]
    code, _, err = parc(capsys, "show", made["both"].path, "--html", tmp_path / "page.html" / "inside.html")
    assert code == 1 and "error[P0412]" in err


@pytest.mark.parametrize("name", ["one", "stages"])
def test_a_page_on_a_cluster_has_times_of_parts_lines_and_actions(made: dict[str, Build], name: str) -> None:
    one = made[name]
    step = price(one, plan_of(one), find_cluster("h100-sxm"))
    text = page_of(one, step)
    page = Page(text)
    assert {"#time", "#timeline"} <= {*page.links} and not page.open and not page.loads
    assert f"takes {seconds_text(step.time.seconds)} on h100-sxm" in text
    for parts in (step.time.parts(role) for role in step.time.roles):
        assert all(f'title="{part} {seconds_text(s)}, ' in text for part, s in parts.items() if s)
    spans = [span for spans in step.time.timeline.spans.values() for span in spans if span.action.works]
    assert spans and all(f"{s.action}: {1e3 * s.start:.4g} to {1e3 * s.end:.4g} ms" in text for s in spans)
    assert "#time" not in Page(page_of(one)).links
