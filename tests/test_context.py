"""Sequences split over ranks: the same numbers as on one device, whatever attention's mask and its way across ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import parc
from parc.checking.reports import report_of
from parc.cli.build import report_text
from parc.compiler.build.directory import write_build
from parc.compiling.compiled import Compiled
from parc.desugar import desugar
from parc.grammar.diagnostics import PlanError, render
from tests.checked_plans import checked, compiled, simulated
from tests.context_models import MASKS
from tests.draws import wide
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import EXAMPLES

PLAN = """\
model "./context_models.py:Net" ({model})
input tokens int64 [B, S]
input document int64 [B, S]
input targets int64 [B, S]
sizes B=2, S={length}
loss cross_entropy(output, targets)
optimizer sgd lr 0.1
mesh {mesh}
shard tokens, document, targets [B/dp, _]
"""


def plan(lines: str, model: str = "", mesh: str = "dp=1, cp=2", length: str = "24") -> Compiled:
    return compiled(PLAN.format(model=model, mesh=mesh, length=length) + lines, ROOT / "tests")


def steps_of(compilation: Compiled) -> dict[str, int]:
    """Return how often blocks run each collective over ``cp`` in a step."""
    rows = [
        row
        for row in report_of(compilation)["communication"]
        if row["axis"] == "cp" and row["carries"] == "activations"
    ]
    return {op: sum(row["count_per_step"] for row in rows if row["op"] == op) for op in {row["op"] for row in rows}}


@pytest.mark.parametrize(
    ("method", "ranks", "mask"),
    [*(("zigzag", 3, mask) for mask in MASKS), wide("ring", 3, "causal"), ("ring", 4, "window"),
     ("gather", 2, "causal"), ("gather", 3, "document"), wide("ulysses", 2, "window"), ("ulysses", 2, "document")],
)  # fmt: skip
def test_attention_sees_what_it_sees_on_one_device(method: str, ranks: int, mask: str) -> None:
    """Loss, gradients and update of all ranks in float64, beside those of the unsharded model; dropout too."""
    p = 0.1 if mask in ("causal", "document") else 0.0
    layers = 2 if (method, mask) == ("zigzag", "window") else 1  # equal blocks are one function, a single one is not
    lines = f"context blocks.* dim S over cp using {method}\n"
    compilation = plan(lines, f'mask="{mask}", groups=2, p={p}, layers={layers}', f"dp=1, cp={ranks}")
    simulated(compilation)
    wanted = {"gather": {"reduce_scatter": 2}, "ulysses": {"all_to_all": 8}}
    usual = dict.fromkeys(("ring_attention", "ring_attention_backward"), layers)
    assert wanted.get(method, usual).items() <= steps_of(compilation).items()


LINES = {
    "stages, two microbatches": ("dp=1, pp=2, cp=2", "stage before blocks.1 over pp\nschedule 1f1b microbatches 2\n"),
    "zero 3, tensor parallel": (
        "dp=2, cp=2, tp=2", "zero 3 over dp\ncolumn blocks.*.q over tp\nrow blocks.*.out over tp\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("beside", LINES)
def test_a_sequence_is_split_beside_other_axes(beside: str) -> None:
    mesh, lines = LINES[beside]
    compilation = plan(
        f"context ** dim S over cp using zigzag\n{lines}", f"p=0.1, layers={2 if 'pp' in mesh else 1}", mesh
    )
    simulated(compilation)
    assert "ring_attention_backward" in steps_of(compilation)


def test_a_ring_of_groups_has_heads_split_inside() -> None:
    lines = "context ** dim S over cp using zigzag\ncontext ** dim S over ci using ulysses\n"
    compilation = plan(lines, 'mask="window", layers=1', "dp=1, cp=2, ci=2")
    simulated(compilation)
    assert steps_of(compilation) == {"ring_attention": 1, "ring_attention_backward": 1}
    assert "i64[2, (2 12/~cp/ci)]" in compilation.build.texts["programs/stage0.F.py"]


def test_lengths_of_a_range_are_proved_for_all() -> None:
    compilation = plan("context ** dim S over cp using zigzag\n", 'mask="window", layers=1', length="24..36 by 12")
    assert checked(compilation).report["checks"]["numbers"] == "tested"


@pytest.mark.parametrize("method", ["gather", "ring", "zigzag"])
def test_keys_travel_in_as_many_bytes_as_the_whole_has_beside_a_rank_s_own(method: str) -> None:
    """With T the bytes of all keys and values: (n - 1) / n T forward, as many backward, and (n - 1) / n T for gradients
    in float32."""
    ranks, whole = 4, 2 * (2 * 2 * 24 * 4) * 4  # keys and values of 2 samples, 2 heads, 24 places, 4 numbers
    promise = "expect 2 all_gather" if method == "gather" else "expect 1 ring"
    lines = f"context blocks.* dim S over cp using {method}\nprecision bf16\n{promise} in blocks.* during forward\n"
    compilation = plan(lines, "groups=2, layers=1", f"dp=1, cp={ranks}")
    rows = [row for row in report_of(compilation)["communication"] if row["module"].startswith("blocks.0")]
    rows = [row for row in rows if row["carries"] == "activations"]
    sent = {phase: sum(row["wire_bytes"] for row in rows if row["phase"] == phase) for phase in ("forward", "backward")}
    part = whole // 2 * (ranks - 1) // ranks  # bfloat16
    assert sent["forward"] == part
    assert sent["backward"] == (2 * part if method == "gather" else 3 * part)


def test_a_report_names_the_ring_and_a_plan_in_primitives_keeps_its_line() -> None:
    lines = "context blocks.* dim S over cp using zigzag\n"
    compilation = plan(lines, "layers=1", "dp=2, cp=2")
    assert "cp     forward   ring_attention " in report_text(report_of(compilation))
    text = desugar(compilation)
    assert lines.split()[0] in text and "shard     tokens, targets [_/dp, _]" in text.replace(", document", "")
    again = compiled(text, ROOT / "tests")
    assert again.build.texts["programs/stage0.F.py"].replace("plan:10", "") == compilation.build.texts[
        "programs/stage0.F.py"
    ].replace("plan:10", "")


REFUSED = {
    "context blocks.*.mlp dim S over cp using ring": ("P0144", "the 2 modules of `blocks.*.mlp` contain no attention"),
    "context ** dim T over cp using ring": ("P0010", "no input has a dim `T`"),
    "context ** dim S over cp using rings": ("P0010", "did you mean `ring`?"),
    "context ** dim S over cq using ring": ("P0101", "no axis `cq`"),
    "context ** dim S over cp using ulysses": ("P0145", "has 2 heads of keys, for 4 ranks"),
    "context ** dim S over cp using zigzag": ("P0107", "`S` is 12, which does not divide by 8"),
    "context blocks.0 dim S over cp using ring\ncontext blocks.1 dim S over cp using gather": (
        "P0", "a sequence is split over `cp` already"
    ),
    "context ** dim S over cp using ring\ncontext ** dim S over ci using gather": (
        "P0105", "two lines give `S` two methods: `ring` and `gather`"
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines", REFUSED)
def test_a_line_that_cannot_be_is_refused_at_its_place(lines: str) -> None:
    code, said = REFUSED[lines]
    with pytest.raises(PlanError) as refused:
        plan(lines + "\n", "groups=2", "dp=1, cp=4, ci=1", "12")
    text = "\n".join(map(render, refused.value.diagnostics))
    assert f"error[{code}" in text and said in text and "plan.parc:1" in text and "help: " in text, text


@pytest.mark.parametrize("also", ["conv", "lstm"])
def test_what_needs_the_whole_sequence_is_refused_at_the_model_s_line(also: str) -> None:
    with pytest.raises(PlanError) as refused:
        plan("context ** dim S over cp using ring\n", f'also="{also}", layers=1', length="4")
    text = "\n".join(map(render, refused.value.diagnostics))
    assert "P0146" in text and "context_models.py:" in text and "plan.parc:10" in text, text


def long_runs(*paths: str) -> list[list[float]]:
    """Train each build for three steps on this rank; return the losses."""
    losses = []
    for path in paths:
        with parc.load(path) as session:
            losses.append([session.step(token_batch()).loss for _ in range(3)])
    return losses


def token_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(512, (2, 2, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens[0], "targets": tokens[1]}


def test_real_ranks_train_on_parts_of_sequences_as_one_on_the_whole(tmp_path: Path) -> None:
    text, paths = (EXAMPLES / "llama-long.parc").read_text(), []
    for method in ("zigzag", "ulysses"):
        small = f"using={method}, layers=2, width=32, length=32"
        compilation = compiled(text.replace("using=zigzag, layers=4, width=128, length=512", small), EXAMPLES)
        write_build(compilation.to_write(report_of(compilation)), tmp_path / method)
        paths.append(str(tmp_path / method))
    plain = parc.reference(paths[0])
    losses = [plain.step(token_batch()).loss for _ in range(3)]
    for found in run_ranks(long_runs, 4, *paths):
        assert found == [pytest.approx(losses, rel=1e-5)] * 2


def test_a_range_that_begins_with_one_sample_a_rank_says_where_it_may_begin() -> None:
    line = "context blocks.* dim S over cp using gather\n"
    model, mesh = 'mask="causal"', "dp=2, cp=2"
    text = PLAN.format(model=model, mesh=mesh, length="24") + line
    with pytest.raises(PlanError) as error:
        compiled(text.replace("B=2,", "B=2..8 by 2,"), ROOT / "tests")
    assert error.value.diagnostics[0].code.name == "P0225"
    assert str(error.value).endswith("help: begin the range of B above 2, and make a build of its own for B=2")
    compiled(text.replace("B=2,", "B=4..8 by 2,"), ROOT / "tests")
