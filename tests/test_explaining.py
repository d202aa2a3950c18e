"""`parc explain` of a build and `parc diff`: golden texts, agreement with the report, and words for bad input."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from parc.cli import main
from parc.cli.build import report_text
from parc.cli.diff import print_comparison
from parc.cli.explain import print_explanation
from parc.compiler.analysis.memory import MEMORY_KINDS
from parc.explaining.differences import compare_sides
from parc.explaining.explain import Explainer, UnknownWhat
from parc.explaining.measured import ForeignFile, profile_rows, trace_rows
from parc.explaining.sides import Side, on_cluster, side_of_plan, with_and_without
from parc.report_words import traffic_by
from parc.runtime.ranks.waits import TracedSpan, write_trace

EXAMPLES = Path(__file__).parents[1] / "examples"
CLUSTER = "h100-sxm"
GOLDEN = Path(__file__).parent / "golden" / "explained.txt"

PLAN = """\
let       dp=2, pp=1, tp=2, schedule=accumulation, microbatches=2
model     "./gpt.py:GPT" (layers=2, width=32, heads=4, vocab=64, length=16)
input     tokens int64 [B, S]
input     targets int64 [B, S]
sizes     B=8, S=16
loss      cross_entropy(output, targets)
optimizer adamw lr 1e-3
seed      1
budget    memory 1MB
mesh      pp=$pp, dp=$dp, tp=$tp
node      2
stage     balanced over pp
schedule  1f1b microbatches $microbatches
shard     tokens, targets [B/dp, _]
"""
TENSOR = """\
column    blocks.*.attn.qkv over tp rows (3 h/tp d)
row       blocks.*.attn.out over tp
column    blocks.*.mlp.up over tp
row       blocks.*.mlp.down over tp
"""
TINY = """\
import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, tokens):
        return self.head(self.embed(tokens))
"""
LINES = {
    "tensor": TENSOR,
    "zero 1": TENSOR + "zero 1 over dp\n",
    "zero 3": TENSOR + "zero 3 over dp\n",
    "sequence": 'include   "./split.parc"\n',
    "recompute": TENSOR + "recompute blocks.*\n",
    "compress": TENSOR + "compress gradients over dp using fp16\n",
    "ring": "context blocks.* dim S over tp using ring\n",
    "gathered": "context blocks.* dim S over tp using gather\n",
}
INCLUDED = TENSOR + "sequence  blocks.* over tp\n"

EXPLAINED = [
    ("tensor", "", "line:18"),
    ("zero 3", "", "line:19"),
    ("sequence", "", "split.parc:5"),
    ("sequence", "", "no:4"),
    ("zero 3", "", "no:16"),
    ("zero 3", "", "no:0"),
    ("ring", "", "no:1"),
    ("tensor", "pp=2 tp=1", "pp0:no:1"),
    ("tensor", "", "blocks.1.mlp"),
    ("tensor", "", "memory"),
    ("tensor", "", "time"),
]
TIMED = [
    ("tensor", "", "line:18"),
    ("zero 3", "", "no:16"),
    ("ring", "", "no:1"),
    ("tensor", "pp=2 tp=1", "pp0:no:1"),
    ("tensor", "", "blocks.1.mlp"),
    ("tensor", "pp=2 tp=1", "time"),
]
"""Explanations on a cluster."""
COMPARED = [
    (("tensor", ""), ("tensor", "tp=4")),
    (("zero 1", ""), ("zero 3", "")),
    (("sequence", ""), ("tensor", "")),
    (("tensor", ""), ("recompute", "")),
    (("tensor", ""), ("compress", "")),
    (("tensor", ""), ("tensor", "pp=2 tp=1")),
    (("ring", ""), ("gathered", "")),
    (("tensor", ""), ("tiny", "")),
    (("tensor", ""), ("tensor", "")),
]
COMPARED_TIMES = [
    (("tensor", ""), ("tensor", "tp=4")),
    (("zero 1", ""), ("zero 3", "")),
    (("sequence", ""), ("tensor", "")),
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return a folder with the plans' models and what they include."""
    with TemporaryDirectory() as name:
        place = Path(name)
        shutil.copy(EXAMPLES / "gpt.py", place)
        (place / "tiny.py").write_text(TINY)
        (place / "split.parc").write_text(INCLUDED)
        for word, lines in LINES.items():
            (place / f"{word}.parc").write_text(PLAN + lines)
        tiny = PLAN.replace("gpt.py:GPT", "tiny.py:Tiny").replace(
            "(layers=2, width=32, heads=4, vocab=64, length=16)", ""
        )
        (place / "tiny.parc").write_text(tiny)
        yield place


@cache
def side(folder: Path, plan: str, defines: str = "") -> Side:
    """Compile a plan of the folder with values of its `let` names."""
    values = dict(word.split("=") for word in defines.split())
    compiled = side_of_plan(folder / f"{plan}.parc", values, lambda _: None)
    return Side(f"{plan}.parc{''.join(f' -D {word}' for word in defines.split())}", compiled.facts)


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_a_schedule_says_its_order_and_whether_it_changes_the_algorithm(folder: Path, schedule: str) -> None:
    (folder / f"{schedule}.parc").write_text(PLAN.replace("1f1b", schedule) + TENSOR)
    rows = dict(Explainer(side(folder, schedule, "pp=2 tp=1")).explain("line:13").rows)
    assert rows["order"].startswith(f"{schedule}, 2 microbatches, 2 stages, ")
    assert ("algorithm" in rows) == (schedule == "async")


def test_explanations_and_differences_look_as_they_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To accept a change, delete the golden file and run this once."""
    texts = []
    for plan, defines, what in EXPLAINED:
        print_explanation(Explainer(side(folder, plan, defines)).explain(what), what, False)
        texts.append(f"# explain {' '.join(filter(None, (plan, defines)))}: {what}\n{capsys.readouterr().out}")
    for left, right in COMPARED:
        print_comparison(compare_sides(side(folder, *left), side(folder, *right)), False)
        texts.append(
            f"# diff {' '.join(filter(None, left))}, {' '.join(filter(None, right))}\n{capsys.readouterr().out}"
        )
    for plan, defines, what in TIMED:
        print_explanation(Explainer(on_cluster(side(folder, plan, defines), CLUSTER)).explain(what), what, False)
        texts.append(
            f"# explain {' '.join(filter(None, (plan, defines)))}: {what} on {CLUSTER}\n{capsys.readouterr().out}"
        )
    for left, right in COMPARED_TIMES:
        sides = (on_cluster(side(folder, *one), CLUSTER) for one in (left, right))
        print_comparison(compare_sides(*sides), False)
        names = ", ".join(" ".join(filter(None, one)) for one in (left, right))
        texts.append(f"# diff {names} on {CLUSTER}\n{capsys.readouterr().out}")
    sequence = side(folder, "sequence")
    print_comparison(
        compare_sides(*with_and_without(sequence, Explainer(sequence).lines_of("split.parc:5"), lambda _: None)), False
    )
    texts.append(
        f"# explain sequence: split.parc:5 --without\n{capsys.readouterr().out.replace(str(folder), 'FOLDER')}"
    )
    text = "\n".join(texts)
    if not GOLDEN.exists():
        GOLDEN.write_text(text, encoding="utf-8")
        pytest.fail(f"{GOLDEN.name} was missing and is written anew: look at it and run again")
    assert GOLDEN.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("plan", ["tensor", "zero 3", "sequence"])
def test_lines_of_a_plan_share_out_all_that_a_rank_sends(folder: Path, plan: str) -> None:
    explainer = Explainer(side(folder, plan))
    roots = dict.fromkeys(line.root for line in explainer.facts.lines)
    found = [explainer.explain(f"line:{root}").facts["sent"]["bytes"] for root in roots]
    entries = [entry for entry in explainer.report["communication"] if entry["line"]]
    assert sum(found) == sum(entry["wire_bytes"] * entry["count_per_step"] for entry in entries) > 0


def test_each_of_two_lines_that_split_values_has_the_messages_of_its_own_modules(folder: Path) -> None:
    lines = TENSOR + "sequence blocks.0 over tp\nsequence blocks.1 over tp\n"
    (folder / "two.parc").write_text(PLAN + lines)
    explainer = Explainer(side(folder, "two", "dp=1"))
    first, second = (line.place for line in explainer.facts.lines if line.text.startswith("sequence"))
    texts = {first: "`sequence blocks.0 over tp`", second: "`sequence blocks.1 over tp`"}
    seen = set()
    for entry in explainer.report["communication"]:
        block = re.match(r"blocks\.([01])", entry["module"])
        if block is None or entry["axis"] != "tp":
            continue
        expected, other = (first, second) if block[1] == "0" else (second, first)
        facts = explainer.explain(f"{entry['role']}:no:{entry['number']}").facts
        if entry["carries"] == "gradients":
            assert str(entry["line"]) == expected
            seen.add(("gradients", expected))
        elif entry["carries"] == "activations":
            assert expected in facts["serves"] and other not in facts["serves"]
            assert not any(texts[other] in change for change in facts["changes"])
            seen.update(("activations", expected) for change in facts["changes"] if texts[expected] in change)
    assert seen == {(kind, line) for kind in ("gradients", "activations") for line in (first, second)}


def test_equal_blocks_that_lines_of_their_own_split_have_messages_of_these_lines(folder: Path) -> None:
    text = TENSOR
    for verb, name in (("column", "up"), ("row", "down")):
        (line,) = (line for line in text.splitlines(True) if f"blocks.*.mlp.{name}" in line)
        text = text.replace(line, "".join(f"{verb} blocks.{block}.mlp.{name} over tp\n" for block in (0, 1)))
    (folder / "each.parc").write_text(PLAN + text)
    explainer = Explainer(side(folder, "each"))
    plan = {line.place: line.text for line in explainer.facts.lines}
    rows = [row for row in explainer.report["communication"] if row["axis"] == "tp" and ".mlp." in row["module"]]
    assert len(rows) == 4
    for row in rows:
        assert plan[str(row["line"])].split()[1] == row["module"]


def test_every_message_has_a_reason_a_time_and_a_way_out(folder: Path) -> None:
    for plan in LINES:
        explainer = Explainer(side(folder, plan))
        for entry in explainer.report["communication"]:
            facts = explainer.message(entry["role"], entry["number"]).facts
            assert (
                facts["why"]
                and facts["changes"]
                and facts["time"].startswith("hidden" if entry["hidden"] else "exposed")
            )
            assert facts["serves"] or entry["carries"] == "numbers"
            assert "*" not in facts["why"] + facts["time"]


def test_a_difference_counts_what_the_reports_count(folder: Path) -> None:
    left, right = side(folder, "zero 1"), side(folder, "zero 3")
    facts = compare_sides(left, right).facts
    for at, one in enumerate((left, right)):
        report = one.facts.report
        assert facts["numbers"]["peak memory"][at] == report["memory"][0]["peak_bytes"]
        sent = sum(entry["wire_bytes"] * entry["count_per_step"] for entry in report["communication"])
        assert facts["numbers"]["sent"][at] == sent
    moved = [line["sent_bytes"] for line in facts["lines"]]
    assert sum(after - before for before, after in moved) == facts["numbers"]["sent"][1] - facts["numbers"]["sent"][0]
    changes = [abs(after - before) for before, after in moved]
    assert changes == sorted(changes, reverse=True)


def test_explained_seconds_are_those_of_the_clock(folder: Path) -> None:
    for plan, defines in (("tensor", ""), ("zero 3", ""), ("ring", ""), ("tensor", "pp=2 tp=1")):
        explainer = Explainer(on_cluster(side(folder, plan, defines), CLUSTER))
        seconds = explainer.seconds
        assert seconds is not None
        spent = seconds.time.roles[seconds.role]
        roots = {line.root for line in explainer.facts.lines} | {0}
        assert sum(seconds.of_lines({root}).all for root in roots) == pytest.approx(sum(spent.lines.values()))
        modules = seconds.of_modules(explainer.facts.tree.row_of)
        assert sum(one.work for one in modules.values()) == pytest.approx(
            sum(spent.lines.values()) - sum(spent.exposed.values()), rel=0.02
        )
        first = {entry["message"]: entry for entry in explainer.facts.entries if entry["role"] == seconds.role}
        received = spent.exposed.get((explainer.build.axis, 12), 0.0)  # waits for what other stages send
        waits = sum(explainer._message_time(entry).waited for entry in first.values() if entry["op"] != "send")
        assert waits + received == pytest.approx(sum(spent.exposed.values()))


@pytest.mark.parametrize(
    ("what", "message", "help_"),
    [
        ("blocks.1.mpl", "no line, message or module is named `blocks.1.mpl`", "did you mean `blocks.1.mlp`"),
        ("memroy", "no line, message or module is named `memroy`", "did you mean `memory`?"),
        ("line:20", "no statement of the plan is at line 20", "18 is `row blocks.*.mlp.down over tp`"),
        ("no:999", "`stage0` has no message 999", "they go from 0 to"),
        ("pp9:no:1", "there is no role `pp9`", "roles are `stage0`"),
    ],
)
def test_a_what_that_names_nothing_has_the_nearest_names(folder: Path, what: str, message: str, help_: str) -> None:
    with pytest.raises(UnknownWhat) as caught:
        Explainer(side(folder, "tensor")).explain(what)
    assert message in str(caught.value) and help_ in caught.value.help


def test_a_number_alone_needs_a_role_where_there_are_several(folder: Path) -> None:
    with pytest.raises(UnknownWhat, match="several roles have a message 1") as caught:
        Explainer(side(folder, "tensor", "pp=2 tp=1")).explain("no:1")
    assert "`pp0:no:1` or `pp1:no:1`" in caught.value.help


def test_the_commands_take_plans_and_say_what_they_lack(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(folder / "tiny.parc")
    assert main(["explain", plan, "memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"][0]["peak_bytes"] > 0
    assert main(["diff", plan, "-D", "dp=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sides"][1]["mesh"]["dp"] == 4
    for words, code, text in (
        (["explain", plan], 2, "say what, as `line:18`"),
        (["explain", plan, "heda"], 1, "did you mean `head`?"),
        (["explain", str(folder / "no.parc"), "memory"], 1, "cannot be read"),
        (["diff", plan], 2, "name two builds or plans"),
        (["explain", "P9999"], 1, "there is no code `P9999`"),
        (["explain", plan, "time", "--cluster", "h100"], 1, "there is no cluster `h100`"),
        (["diff", plan, "--trace", "trace.json"], 2, "each go with one build"),
    ):
        assert main(words) == code
        assert text in capsys.readouterr().err


# ---- what runs measured


def test_a_traces_times_stand_beside_the_predicted_ones_of_its_build(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = on_cluster(side(folder, "tensor", "pp=2 tp=1"), CLUSTER).step
    assert step is not None
    trace, roles = tmp_path / "trace.json", [*step.build.roles]
    spans: dict[str, list[TracedSpan]] = {
        name: [(str(span.action), "work", number, round(1e9 * (number + span.start)), round(1e9 * (number + span.end)))
               for number in range(3) for span in of_role]
        for name, of_role in step.time.timeline.spans.items()
    }  # fmt: skip
    of = "1" * 16
    monkeypatch.setattr("parc.explaining.measured.hash_at_any_sizes", lambda build: of)
    write_trace(trace, of, [(f"rank {rank} ({roles[rank // 2]})", 0, spans[roles[rank // 2]]) for rank in range(4)])
    rows = trace_rows(trace, step)
    assert {row.role for row in rows} == {*roles}
    assert {row.name for row in rows} >= {"step", "0F", "0RECV_I", "1I", "1W"}
    for row in rows:
        last = max(span.end for span in step.time.timeline.spans[row.role])
        assert row.measured == pytest.approx(last if row.name == "step" else row.predicted, abs=1e-6)
    for old, new, message in (
        ('"0F1"', '"0F7"', "rank 0 did `0F7`"), ('"0F1"', '"0F0"', "rank 0 did no `0F1`"),
        ("rank 1 (pp0)", "rank 1 (pp4)", "`pp4`, which is no role"),
        ('"by": "parc"', '"by": "me"', "no trace of parc's"), (of, "0" * 16, "is of another build"),
    ):  # fmt: skip
        (tmp_path / "other.json").write_text(trace.read_text().replace(old, new))
        with pytest.raises(ForeignFile, match=re.escape(message)):
            trace_rows(tmp_path / "other.json", step)


def test_a_profiles_ranges_stand_beside_the_predicted_lines_of_its_build(folder: Path, tmp_path: Path) -> None:
    step = on_cluster(side(folder, "tensor"), CLUSTER).step
    assert step is not None
    program = next(program for program in step.build.roles["stage0"].programs.values() if program.action == "F")
    block = program.function("blocks")
    first = program.text().split("\n").index("def blocks(") + len(block.parameters) + 3
    names = [
        f"stage0.F.py:{row} {line.names} = {line.op} | {line.origin}" for row, line in enumerate(block.lines, first)
    ]
    events = [{"name": name, "cat": "user_annotation", "dur": 10.0} for name in names for _ in range(2)]

    def write(rows: list[dict[str, object]]) -> None:
        (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": rows}).encode()))

    write(events)
    rows = {row.name: row for row in profile_rows(tmp_path, step)}
    counts = Counter(str(line.origin.plan or "-") for line in block.lines)
    assert {name: row.measured for name, row in rows.items() if row.measured} == pytest.approx(
        {name: 1e-5 * count for name, count in counts.items()}
    )
    assert rows["16"].predicted == step.time.roles["stage0"].lines[16]
    write([{**events[0], "name": names[0].replace(" = ", "_2 = ")}])
    with pytest.raises(ForeignFile, match="of another build"):
        profile_rows(tmp_path, step)


# ---- the figures of `parc show`


def test_sums_of_gradients_are_caused_by_zero_or_by_the_line_that_splits_samples(folder: Path) -> None:
    for plan, line in (("tensor", 14), ("zero 1", 19), ("zero 3", 19), ("compress", 19)):
        report = side(folder, plan).facts.report
        for row in (row for row in report["communication"] if row["carries"] == "gradients"):
            whole = row["module"] in report["stored_whole"]  # no dim divides, so `zero` splits nothing
            assert row["line"] == (14 if whole else line), (plan, row)
    sends = [row for row in side(folder, "tensor", "pp=2 tp=1").facts.report["communication"] if row["op"] == "send"]
    assert {row["line"] for row in sends} == {12}


def test_tensors_of_one_message_go_over_one_axis_and_are_counted_once(folder: Path) -> None:
    report = side(folder, "zero 3").facts.report
    together: dict[int, set[tuple[str, str]]] = {}
    for row in report["communication"]:
        together.setdefault(row["message"], set()).add((row["op"], row["axis"]))
    assert all(len(kinds) == 1 for kinds in together.values())
    assert len(together) < len(report["communication"])
    sent = traffic_by(report["communication"])[()]
    counts = {row["message"]: row["count_per_step"] for row in report["communication"]}
    assert (sent.messages, sent.count) == (
        sum(counts.values()),
        sum(r["count_per_step"] for r in report["communication"]),
    )


def test_memory_names_its_moment_and_the_most_of_each_kind(folder: Path) -> None:
    for plan, defines in (("tensor", ""), ("zero 3", ""), ("tensor", "pp=2 tp=1")):
        facts = side(folder, plan, defines).facts
        for row in facts.report["memory"]:
            assert row["moment"]["action"] in map(str, facts.build.roles[row["role"]].actions)
            assert all(row["most"][kind] >= row[kind] for kind in MEMORY_KINDS)
            assert sum(row["most"].values()) >= row["peak_bytes"]
        assert "budget 1 MB (976.6 KiB), of which" in report_text(facts.report)


def test_folded_rows_send_what_all_rows_send(folder: Path) -> None:
    facts = side(folder, "zero 3").facts
    rows = facts.report["communication"]
    assert sum(one.sent.bytes for one in facts.messages) == sum(r["wire_bytes"] * r["count_per_step"] for r in rows)
    assert len(facts.messages) < len(rows)
    across = facts.report["across_nodes"]
    assert sum(one["bytes"] for one in across["axes"]) == across["bytes"] > 0
