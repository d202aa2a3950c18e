"""The beginnings and operators of stages in captured graphs, and graphs that cannot be cut."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from parc.compiler.capture.capture import Captured
from parc.compiler.capture.node_facts import noted
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiler.resolve.stage_cuts import cuts_of, operations_of, stage_of_nodes
from parc.compiling.driver import task_lines
from parc.compiling.plan_capture import capture_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.passes.pipeline import names_of
from tests.family_plans import plan_text

Stages = dict[fx.Node, int]
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
GPT = """
model "./gpt.py:GPT" (layers=4, width=16, heads=2, length=8, dropout=0.1)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=8, S=8
loss cross_entropy(output, targets)
optimizer adamw lr 1e-3
"""
NORMS = """
model "tests.compiler.test_stage_cuts:Norms" (shared={})
input x float32 [B, 8]
input targets int64 [B]
sizes B=16
loss cross_entropy(output, targets)
optimizer sgd lr 0.1
"""


class Norms(nn.Module):
    """A model of products between norms of the batch, which may be one."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.last, self.shared = nn.BatchNorm1d(8), nn.BatchNorm1d(8), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, 8]`` to ``[b, 4]``."""
        made: torch.Tensor = self.down(self.norm(self.up(x)))
        made = self.head((self.norm if self.shared else self.last)(made))
        return made


def family(name: str) -> str:
    """Return the plan of a model of a family, without lines that place or order anything."""
    kept = ("model", "input", "sizes", "optimizer", "loss")
    return "\n".join(line for line in plan_text(name).splitlines() if line.startswith(kept)) + "\n"


def captured(text: str, lines: str) -> tuple[Plan, Captured]:
    """Capture the model of a plan with further lines."""
    return read_plan(Source("some.parc", text + lines)), model_of(text)


@cache
def model_of(text: str) -> Captured:
    """Return the model of a plan of two microbatches."""
    plan = read_plan(Source("some.parc", text + "schedule microbatches 2\n"))
    return capture_plan(plan, task_lines(plan), EXAMPLES, None)[1]


def cut(text: str, stage: str, ranks: int) -> tuple[list[str], Captured, Stages]:
    """Return the cuts of a ``stage`` line, and the stages of the captured graph; values only ever flow to later
    ones."""
    plan, graph = captured(text, f"mesh pp={ranks}\nstage {stage} over pp\nschedule gpipe microbatches 2\n")
    cuts = cuts_of(plan, Path(), names_of(graph), graph)
    stages = stage_of_nodes(graph, cuts)
    assert set(stages) == {node for node in graph.graph.nodes if node.op == "call_function"}
    assert set(stages.values()) == set(range(len(cuts) + 1))
    assert all(stages[n] >= stages[o] for n in stages for o in n.all_input_nodes if o in stages)
    return list(map(str, cuts)), graph, stages


def modules(stages: Stages, stage: int) -> set[str]:
    """Return the outermost two names of all modules of a stage."""
    return {".".join(noted(node).origin.module.split(".")[:2]) for node, at in stages.items() if at == stage} - {""}


def test_cuts_are_in_the_order_of_the_graph() -> None:
    cuts, _, stages = cut(GPT, "after out(blocks.2.attn) over pp\nstage before blocks.1, norm", 4)
    assert cuts == ["before blocks.1", "after out(blocks.2.attn)", "before norm"]
    found = [modules(stages, stage) for stage in range(4)]
    assert found == [{"embed", "position", "drop", "blocks.0"}, {"blocks.1", "blocks.2"},
                     {"blocks.2", "blocks.3"}, {"norm", "head"}]  # fmt: skip


def test_an_embedding_and_the_loss_can_be_stages_of_their_own() -> None:
    cuts, _, stages = cut(GPT, "after out(embed), out(head)", 3)
    assert cuts == ["after out(embed)", "after out(head)"]
    assert modules(stages, 0) == {"embed"} and modules(stages, 2) == set()
    assert all(noted(node).in_loss for node, stage in stages.items() if stage == 2)


class Again(nn.Module):
    """A model of layers of which one stands in the list twice."""

    def __init__(self) -> None:
        super().__init__()
        one = nn.Linear(8, 8)
        self.layers = nn.ModuleList([one, nn.Linear(8, 8), one, nn.Linear(8, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, 8]`` to ``[b, 4]``."""
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_module_under_its_second_name_is_named_by_its_first() -> None:
    again = NORMS.replace('Norms" (shared={})', 'Again"')
    with pytest.raises(PlanError, match=r"no module is called `layers.2`(.|\n)*it is another name of `layers.0`"):
        cut(again, "before layers.2", 2)
    assert cut(again, "before layers.1", 2)[0] == ["before layers.1"]


def test_one_rank_has_one_stage() -> None:
    plan, graph = captured(GPT, "mesh pp=1\nstage before blocks.1 over pp\nschedule gpipe microbatches 2\n")
    assert cuts_of(plan, Path(), names_of(graph), graph) == ()


def test_positions_and_masks_belong_to_the_first_stage_that_reads_them() -> None:
    """The rotary table of a Llama is computed between the embedding and the layers, from positions alone."""
    _, _, stages = cut(family("llama"), "after out(model.embed_tokens)", 2)
    assert modules(stages, 0) == {"model.embed_tokens"} and "model.rotary_emb" in modules(stages, 1)
    cuts, _, stages = cut(family("t5"), "balanced", 4)
    assert cuts == ["before encoder.block.1", "before decoder.block.0", "before decoder.block.1"]
    with pytest.raises(PlanError, match=r"P0244.*rotary_emb. computes nothing with a weight"):
        cut(family("llama"), "before model.rotary_emb", 2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_balanced_stages_differ_by_less_than_a_layer(ranks: int) -> None:
    _, _, stages = cut(GPT, "balanced", ranks)
    work = Counter[int]()
    for node, stage in stages.items():
        work[stage] += operations_of(node)
    layer = sum(operations_of(node) for node in stages if f"{noted(node).origin.module}.".startswith("blocks.1."))
    assert max(work.values()) < sum(work.values()) / ranks + layer


def test_a_running_mean_stays_in_one_stage() -> None:
    _, _, stages = cut(NORMS.format("false"), "before down", 2)
    assert modules(stages, 0) == {"up", "norm"}
    _, graph, stages = cut(NORMS.format("true"), "balanced", 3)
    outputs = graph.graph.output_node().all_input_nodes
    assert len({stages[value] for value in outputs[1:]}) == 1
    with pytest.raises(PlanError, match=r"P0242.*norm.running_mean.*stages 0 and 1"):
        cut(NORMS.format("true"), "before down", 2)


def test_values_do_not_flow_backwards() -> None:
    with pytest.raises(PlanError, match="P0243"):
        cut(GPT, "before blocks.2, blocks.1", 3)
    with pytest.raises(PlanError, match="P0243"):
        cut(GPT, "after out(blocks.1, blocks.1.attn)", 3)


@pytest.mark.parametrize(
    ("stage", "ranks", "said"),
    [
        ("before embed", 2, "stage 0 has no work"),
        ("before **", 2, "stage 0 has no work.*`before \\*\\*`"),
        ("after out(blocks.1), out(blocks)", 3, None),
        ("after out(blocks.3), out(blocks)", 3, "stage 1 has no work.*between `after out.blocks.3.` and"),
        ("after out(**)", 2, "stage 1 has no work"),
        ("balanced", 64, "P0241.*64 stages, but the model can be cut into 10"),
    ],
)
def test_every_stage_has_work(stage: str, ranks: int, said: str | None) -> None:
    if said is None:
        cut(GPT, stage, ranks)
        return
    with pytest.raises(PlanError, match=said):
        cut(GPT, stage, ranks)


def test_a_schedule_is_read_from_a_table(tmp_path: Path) -> None:
    lines = 'mesh pp=2\nstage before blocks.1 over pp\nschedule table "order.txt" microbatches 2\n'
    schedule = read_plan(Source("some.parc", GPT + lines)).schedule
    assert schedule is not None and (schedule.name, schedule.chunks) == ("table", 1)
    good = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
    bad = {"`1B1` is not in the table": good.replace(" 1B1", ""), "`0F1` is there twice": good.replace("0B1", "0F1"),
           "line 1 of the table": "pp0: 0F0"}  # fmt: skip
    with pytest.raises(PlanError, match=r"P0013.*`order\.txt` cannot be read: no such file"):
        schedule.table_of(tmp_path, 2)
    (tmp_path / "order.txt").write_text(good)
    assert schedule.table_of(tmp_path, 2) == good
    for said, text in bad.items():
        (tmp_path / "order.txt").write_text(text)
        with pytest.raises(PlanError, match=f"P0117.*{said}"):
            schedule.table_of(tmp_path, 2)
