"""The pipelines that ship: cut, proved, simulated, and trained on real processes beside the plain module."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import parc
from certificate.step import certify_texts
from parc.checking.checks import Checked, case_of, check_files, check_numbers, prove
from parc.checking.reports import report_of
from parc.cli.build import report_text
from parc.compiler.analysis.flops import stage_flops, step_timeline
from parc.compiler.build.directory import read_build, write_build
from parc.compiler.plan.plan import read_plan
from parc.compiler.schedules.timeline import simulate
from parc.compiling.compiled import Compiled, files_of, manifest_of
from parc.compiling.driver import compile_plan
from parc.compiling.plan_data import check_sample
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.report_words import stage_rows
from parc.runtime.compare.simulate import compare

from .captured_once import compile_once
from .checked_plans import simulated
from .draws import wide
from .pages import ROOT
from .runtime.ranks import run_ranks

EXAMPLES = ROOT / "examples"
SMALL = {"layers": 4, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 32, "length": 8}


def compiled(name: str, **defines: object) -> Compiled:
    """Compile an example's plan with a small model, and prove it."""
    plan = read_plan(EXAMPLES / f"{name}.parc", {key: str(value) for key, value in defines.items()})
    compilation = compile_once(plan, EXAMPLES, SMALL if name.startswith("llama") else None)
    assert not prove(compilation)
    return compilation


def error(compilation: Compiled) -> float:
    """Return the largest error of all ranks beside the unsharded model in three steps of float64."""
    checked = Checked({})
    check_numbers(compilation, checked)
    assert not checked.faults, checked.faults
    numbers: dict[str, float] = checked.report["numbers"]
    return max(numbers[kind] for kind in ("loss", "gradient", "parameter"))


def test_seven_layers_on_three_ranks_are_naive_model_parallelism() -> None:
    compilation = compiled("seven")
    held = [{b.name.split(".")[1] for b in role.programs[f"{stage}F"].main.bindings if "layers" in b.name}
            for stage, role in enumerate(compilation.build.roles.values())]  # fmt: skip
    assert held == [{"0", "1"}, {"2", "3", "4"}, {"5", "6"}]
    timeline = simulate(compilation.timelines)
    # gradients of weights are computed beside the next stage: 7 slots for F, F, F, I, I, B
    assert [timeline.busy(role) / timeline.makespan for role in compilation.timelines] == [3 / 7] * 3
    assert error(compilation) < 1e-12


UNEVEN = """
model "./gpt.py:GPT" (layers=4, width=32, heads=4, vocab=64, length=16)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=16, S=16
loss cross_entropy(output, targets)
optimizer adamw lr 1e-3
mesh dp=2, pp=2
stage before blocks.3 over pp
schedule 1f1b microbatches 4
shard tokens, targets [B/dp, _]
"""


@pytest.mark.parametrize("again", ["", "recompute blocks.*"])
def test_a_rank_is_idle_by_its_own_stage_beside_the_longest_path(again: str) -> None:
    compilation = compile_once(read_plan(Source("uneven.parc", UNEVEN + again)), EXAMPLES)
    report, flops = report_of(compilation), stage_flops(compilation.build.roles)
    tokens, width, vocab, length = 2 * 16, 32, 64, 16  # of a microbatch on a rank
    weights, scores = tokens * 12 * width**2, tokens * length * width
    block = 2 * (weights + 2 * scores)
    back = 2 * (2 * weights + 5 * scores)  # attention's own backward computes the scores again
    back += block - 2 * tokens * 4 * width**2 if again else 0  # all but the last product, which no gradient reads
    head = 2 * tokens * width * vocab
    products = 2 * weights + 2 * tokens * width * vocab  # of gradients of weights
    assert flops == {0: {"F": 3 * block, "B": 3 * back},
                     1: {"F": block + head, "I": back + 2 * head - products, "W": products}}  # fmt: skip
    first, last = (4 * sum(flops[stage].values()) for stage in (0, 1))
    longest = first + max(0, flops[1]["F"] + flops[1]["I"] - 3 * block)  # it waits for the first gradient alone
    assert report["idle"] == {"pp0": pytest.approx(1 - first / longest), "pp1": pytest.approx(1 - last / longest)}
    embedding = vocab * width
    layer = 12 * width**2 + 13 * width
    assert report["stages"] == [
        {"stage": 0, "role": "pp0", "layers": 3, "parameters": embedding + 16 * width + 3 * layer, "flops": first},
        {"stage": 1, "role": "pp1", "layers": 1, "parameters": embedding + 2 * width + layer, "flops": last},
    ]
    assert report["batch"] == {"samples": 16, "microbatches": 4, "data_ranks": 2}
    text = report_text(report)
    assert "\nbatch        16 samples: 2 a microbatch x 4 microbatches x 2 data ranks\n" in text
    least, most = (f"{100 - 100 * own / longest:.0f}" for own in (first, last))
    assert f"1f1b, 4 microbatches, 2 stages, {least} to {most}% idle\nstages       stage  pp" in text


def test_alike_stages_share_a_row() -> None:
    compilation = compiled("llama-pipeline", schedule="gpipe", pp=4, layers=4, microbatches=4)
    report = report_of(compilation)
    head, *rows = stage_rows(report)
    assert head == ("stage", "pp", "layers", "parameters", "a rank's step", "idle")
    assert [row[:3] for row in rows] == [("0", "0", "1"), ("1..2", "1..2", "1"), ("3", "3", "1")]
    played = step_timeline(compilation.build.roles)
    assert [row[5] for row in rows] == [f"{played.idle_share(role):.0%}" for role in ("pp0", "pp1", "pp3")]
    in_turn = report_of(compiled("llama-pipeline", schedule="interleaved", pp=2, chunks=2, layers=4, microbatches=4))
    assert [row[:2] for row in stage_rows(in_turn)[1:]] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert in_turn["idle"].keys() == {"pp0", "pp1"}


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks"),
    [
        wide("gpipe", 2, 1),
        ("1f1b", 4, 1),
        ("interleaved", 2, 2),
        ("looped", 2, 2),
        ("zb-h1", 2, 1),
        wide("zb-h2", 2, 1),
        wide("interleaved-zb", 2, 2),
        ("zbv", 2, 2),
        wide("dualpipev", 2, 2),
        wide("v-half", 2, 2),
        ("v-min", 2, 2),
    ],
)
def test_llama_trains_alike_under_every_schedule(schedule: str, pp: int, chunks: int) -> None:
    compilation = compiled("llama-pipeline", schedule=schedule, pp=pp, chunks=chunks, layers=4, microbatches=4)
    assert compilation.request.pipeline is not None and compilation.request.pipeline.stages == pp * chunks
    assert compare(case_of(compilation), 1).largest < 1e-12


def test_a_stage_sends_before_it_computes_the_last_gradients_of_its_weights() -> None:
    compilation = compiled("llama-pipeline", schedule="1f1b", pp=4, layers=4, microbatches=4)
    work = [[str(action) for action in actions if action.works] for actions in compilation.timelines.values()]
    assert work[3] == [f"3{kind}{m}" for m in range(4) for kind in "FIW"], "no other microbatch waits"
    assert work[1][-3:] == ["1B2", "1I3", "1W3"], "before the last microbatch, others wait"
    assert not {"0I3", "0W3"} & {*work[0]}, "the first stage sends nothing"
    last = [*map(str, compilation.timelines["pp3"])]
    assert last[-6:] == ["3I3", "3SEND_I3", "3W3", "3LOSS", "3REDUCE", "3STEP"]


def test_a_tied_weight_has_one_sum_where_one_stage_does_b_and_the_other_two_phases() -> None:
    text = (EXAMPLES / "gpt3d.parc").read_text() + "zero 1 over dp\n"
    compilation = compile_once(read_plan(Source("gpt3d.parc", text), {"dp": "2", "tp": "1"}), EXAMPLES)
    kinds = [{*role.programs} for role in compilation.build.roles.values()]
    assert "0B" in kinds[0] and "1W" in kinds[1] and not prove(compilation)


def test_a_schedule_may_be_a_table_beside_the_plan(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "order.txt").write_text("rank 0: 0F0 0F1 0B1 0B0\nrank 1: 1F0 1F1 1B1 1B0\n")
    plan = tmp_path / "seven.parc"
    text = plan.read_text().replace("schedule  gpipe microbatches 1", 'schedule  table "order.txt" microbatches 2')
    plan.write_text(text.replace("pp=3", "pp=2").replace("layers.2, layers.5", "layers.4"))
    compilation = compile_once(read_plan(plan), tmp_path)
    work = [str(action) for action in compilation.timelines["pp0"] if action.kind in ("F", "B")]
    assert work == ["0F0", "0F1", "0B1", "0B0"]
    assert not prove(compilation) and compare(case_of(compilation), 2).largest < 1e-12


def in_a_v(tmp_path: Path) -> Path:
    """Return the plan of seven layers in four stages on two ranks, the first of which has the first and the last
    stage."""
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    shutil.copy(ROOT / "tests" / "in_a_v.txt", tmp_path)
    plan = tmp_path / "seven.parc"
    text = plan.read_text().replace(
        "schedule  gpipe microbatches 1", 'schedule  table "in_a_v.txt" microbatches 2 chunks 2'
    )
    plan.write_text(text.replace("pp=3", "pp=2").replace("layers.2, layers.5", "layers.2, layers.4, layers.6"))
    return plan


def test_stages_lie_where_a_table_says(tmp_path: Path) -> None:
    plan, out = in_a_v(tmp_path), tmp_path / "build"
    compilation = compile_once(read_plan(plan), tmp_path)
    assert compilation.request.pipeline is not None and compilation.request.pipeline.ranks == (0, 1, 1, 0)
    assert [role.stages for role in compilation.build.roles.values()] == [[0, 3], [1, 2]]
    assert not prove(compilation) and compare(case_of(compilation), 2).largest < 1e-12
    check_sample(compilation.plan, tmp_path, compilation.build)
    write_build(compilation.to_write(report_of(compilation)), out)
    build = read_build(out)
    assert build.stage_ranks == (0, 1, 1, 0) and not check_files(build)
    # from stage 1 to stage 2 and back nothing is sent: they are of one rank
    sends = Counter(line["role"] for line in build.report["communication"] if line["op"] == "send")
    assert sends == {"pp0": 2, "pp1": 2}
    expected = [parc.reference(out).step().loss]
    for losses, _ in run_ranks(train, 2, str(out), 1):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        (
            "# order\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1f1 1B0 1B1\n",
            """\
  --> order.txt:3:1
 3 | rank 1: 1F0 1f1 1B0 1B1
   | ^^^^^^^^^^^^^^^^^^^^^^^
  ::: seven.parc:13:17
13 | schedule  table "order.txt" microbatches 2
   |                 ----------- read here""",
        ),
        ("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1F0 1B0 1B1\n", "help: put work that other ranks wait for before"),
        ("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1B0 1F0 1F1 1B1\n", "help: put `1F0` before `1B0`"),
        ("rank ٠: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n", " --> order.txt:1:1"),
    ],
)
def test_a_wrong_table_is_shown_where_it_is_wrong(tmp_path: Path, table: str, shown: str) -> None:
    (tmp_path / "order.txt").write_text(table, encoding="utf-8")
    text = (EXAMPLES / "seven.parc").read_text()
    text = text.replace("schedule  gpipe microbatches 1", 'schedule  table "order.txt" microbatches 2')
    (tmp_path / "seven.parc").write_text(text.replace("pp=3", "pp=2"))
    schedule = read_plan(tmp_path / "seven.parc").schedule
    assert schedule is not None
    with pytest.raises(PlanError) as found:
        schedule.table_of(tmp_path, 2)
    assert shown in str(found.value)


def train(path: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on one rank; return the losses, and the whole weights afterwards."""
    with parc.load(path) as session:
        losses = [session.step().loss for _ in range(steps)]
        return losses, session.state_dict()


def test_eight_processes_in_three_dimensions_train_as_the_plain_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from parc.cli import main

    shutil.copytree(EXAMPLES, tmp_path / "examples")
    plan, out = tmp_path / "examples" / "gpt3d.parc", tmp_path / "gpt3d"
    plan.write_text(plan.read_text().replace("layers=4, width=64", "layers=2, width=32"))
    compilation = compile_plan(read_plan(plan), plan.parent)
    check_sample(compilation.plan, plan.parent, compilation.build)
    assert not prove(compilation)
    write_build(compilation.to_write(report_of(compilation)), out)
    assert main(["show", str(out), "--pipeline", "--svg", str(tmp_path / "drawn.svg")]) == 0
    drawn = "drawn.svg: 1f1b, 4 microbatches, 2 stages, 8 to 41% idle, on 2 ranks of `pp`\n"
    assert capsys.readouterr().err.endswith(drawn) and (tmp_path / "drawn.svg").is_file()
    assert main(["show", str(out), "--pipeline", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    flops = stage_flops(compilation.build.roles)
    assert shown["idle"]["pp1"] == pytest.approx(1 - 4 * sum(flops[1].values()) / shown["flops"])
    end = flops[0]["F"] + flops[1]["F"] + flops[1]["I"]
    assert {"action": "1I0", "start": end - flops[1]["I"], "end": end} in shown["roles"]["pp1"]
    assert shown["idle_share"] == shown["idle"] and shown["makespan"] == shown["flops"]
    assert shown["live"] == {"pp0": 2, "pp1": 1}
    assert main(["show", str(out), "--pipeline", "--costs", "F=4, I=5, W=3", "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)
    assert priced.keys() == shown.keys() and priced["flops"] == shown["flops"] and priced["live"] == shown["live"]
    assert priced["makespan"] == 4 + 4 * (4 + 8) + 5 and priced["idle"] == {"pp0": 9, "pp1": 9}
    assert main(["show", str(out), "--pipeline", "--costs", "F=4,I=5,W=3,B=10"]) == 0
    head, *_, floor, norm, shared = capsys.readouterr().out.splitlines()
    assert (
        head == "1f1b, 4 microbatches, 2 stages, 8 to 21% idle; boxes are as long as their costs, F=4, B=10, I=5, W=3"
    )
    formula = "(p - 1)F, as backwards may be split: some are"
    assert floor == f"ranks are idle for up to 13 of 61; the floor of a synchronous step is 4, {formula}"
    wait = "before the update, ranks of `pp` wait for each other: the"
    assert norm == f"{wait} norm of all gradients, for `clip`"
    assert shared == f"{wait} gradients of weights that several stages have"
    plain = parc.reference(out)
    expected = [plain.step().loss for _ in range(2)]
    weights = plain.module.state_dict()
    for losses, found in run_ranks(train, 8, str(out), 2, wait_s=200):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        assert found.keys() == weights.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)


CUT = """\
model     "./{model}
input     input_ids int64 [B, S]
input     targets int64 [B, S]
sizes     B=8, S=16
loss      cross_entropy(output.logits, targets)
optimizer sgd lr 1e-3
mesh      pp=2, dp=2
shard     input_ids, targets [B/dp, _]
stage     {cut} over pp
schedule  1f1b microbatches 2
"""
LLAMA = 'llama.py:llama" (layers=1, width=32, heads=4, kv_heads=2, ffn=48, vocab=64, length=16)'
MIXTRAL = 'moe.py:mixtral" (layers=1, width=32, ffn=32, experts=4, top=2, length=16)'


@pytest.mark.parametrize(
    ("model", "cut"),
    [(LLAMA, "after out(model.layers.0.mlp.up_proj)"), (MIXTRAL, "before model.layers.0.self_attn")],
    ids=["a gradient of a residual is sent as it came", "a gradient is sent, and read by a gradient of a weight"],
)
def test_a_stage_may_begin_inside_a_block(model: str, cut: str) -> None:
    compiled = compile_once(read_plan(Source("cut.parc", CUT.format(model=model, cut=cut))), EXAMPLES)
    simulated(compiled)
    assert certify_texts(files_of(compiled), manifest_of(compiled)).lines
