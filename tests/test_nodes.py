"""Nodes: axes that are factored at their boundaries, and what lines about them store and send."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, permutations
from operator import mul
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parc.advice import warnings_of
from parc.checking.checks import case_of, static_faults
from parc.checking.reports import report_of
from parc.checking.twins import find_twin
from parc.compiler.analysis.communication import communication_table
from parc.compiler.layout.mesh import Mesh, NoCommonParts, UnevenNodes, node_levels
from parc.compiler.plan.plan import read_plan
from parc.compiler.resolve.requests import PlanAxes
from parc.compiling.compiled import Compiled
from parc.grammar.diagnostics import render
from parc.grammar.source import Source
from parc.grammar.syntax import size_text
from parc.runtime.compare.agreement import Agreement
from parc.runtime.compare.simulate import compare
from tests.captured_once import compile_once
from tests.draws import share, wide

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GPT = """\
model "./gpt.py:GPT" (layers=1, width=16, heads=4, vocab=24, length=4)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=32, S=4
loss cross_entropy(output, targets)
optimizer adamw lr 1e-2 clip 1.0
shard tokens, targets [B/dp, _]
schedule microbatches 2
"""
LLAMA = """\
model "./llama.py:llama" (layers=1, width=32, heads=8, kv_heads=2, ffn=16, vocab=24, length=4)
input input_ids int64 [B, S]
input labels int64 [B, S]
sizes B=2, S=4
loss output.loss
optimizer sgd lr 0.1
mesh tp=8
node 2
hierarchical over tp
column model.layers.*.self_attn.{q,k,v}_proj, model.layers.*.mlp.{gate,up}_proj over tp
row model.layers.*.self_attn.o_proj, model.layers.*.mlp.down_proj over tp
"""


def compiled(lines: str) -> Compiled:
    """Compile the small GPT with further lines."""
    return compile_once(read_plan(Source("nodes.parc", GPT + lines)), EXAMPLES)


def agreement_of(compilation: Compiled, steps: int = 1) -> Agreement:
    """Prove the build's texts, and compare all ranks in one process with the captured graph."""
    assert static_faults(compilation.build) == []
    return compare(case_of(compilation), steps)


def rows(compilation: Compiled) -> list[dict[str, Any]]:
    """Return the collectives of a step."""
    return [row for role in compilation.build.roles.values() for row in communication_table(role)]


def sent(compilation: Compiled) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by what they carry."""
    found: dict[str, int] = {}
    for row in rows(compilation):
        found[row["carries"]] = found.get(row["carries"], 0) + row["wire_bytes"] * row["count_per_step"]
    return found


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 36))
@share(2.0)
def test_the_inner_part_of_each_axis_shares_a_node(sizes: list[int], ranks: int) -> None:
    mesh = Mesh(tuple((name, size) for name, size in zip("abc", sizes, strict=False)))
    try:
        levels = node_levels(mesh, ranks)
    except UnevenNodes:
        return
    assert all(across * within == mesh.size(axis) for axis, (across, within) in levels.items())
    finer = mesh.factor({axis: parts for axis, parts in levels.items() if 1 not in parts})
    inner = [axis for axis in finer.names if not axis.endswith("_0") and (axis.endswith("_1") or levels[axis][1] > 1)]
    nodes = [[rank for rank in range(mesh.world) if rank // ranks == node] for node in range(-(-mesh.world // ranks))]
    assert sorted(finer.groups(inner)) == nodes


@given(st.sampled_from([(2, 4), (4, 2), (2, 2, 2), (8,)]), st.sampled_from([1, 2, 4, 8]))
@share(0.3)
def test_heads_and_nodes_factor_an_axis_together(sizes: tuple[int, ...], nodes: int) -> None:
    kept = {("k", "tp"): 1, ("v", "tp"): 0}
    before = PlanAxes({"tp": sizes}, kept) if len(sizes) > 1 else PlanAxes({}, {("k", "tp"): 1})
    after = before.cut("tp", 8, [nodes])
    declared = Mesh.parse("tp=8")
    old, new = declared.factor(before.sizes), declared.factor(after.sizes)
    assert after.parts(new) == before.parts(old)
    across = [1, *accumulate(map(new.size, new.parts("tp")), mul)].index(nodes)
    assert new.groups(new.parts("tp")[across:]) == [
        list(range(first, first + 8 // nodes)) for first in range(0, 8, 8 // nodes)
    ]


def test_nodes_that_cut_heads_unevenly_are_refused() -> None:
    with pytest.raises(NoCommonParts, match="2 and 3 parts cut each other"):
        PlanAxes({"tp": (2, 3)}).cut("tp", 6, [3])


@pytest.mark.parametrize("level", [1, 2, 3])
def test_within_node_gathers_inside_and_sums_across(level: int) -> None:
    compilation = compiled(f"mesh dp=4\nnode 2\nzero {level} over dp within node\n")
    agreement = agreement_of(compilation, 2)
    assert agreement.largest <= 1e-10
    stored = compilation.build.types["blocks.0.mlp.up.weight"]
    assert stored.text(compilation.mesh) == "f32[64/dp_1, 16]"
    sent = {(row["op"], row["axis"]) for row in rows(compilation) if row["dtype"] == "float32" and row["bytes"] > 8}
    assert sent == {("all_gather", "dp_1"), ("reduce_scatter", "dp_1"), ("all_reduce", "dp_0")}
    in_backward = {row["op"] for row in rows(compilation) if row["phase"] == "backward"}
    assert in_backward == {1: set(), 2: {"reduce_scatter"}, 3: {"reduce_scatter", "all_gather"}}[level]


def test_the_twin_keeps_both_levels_of_an_axis() -> None:
    compilation = compiled("mesh dp=16\nnode 4\nzero 3 over dp within node\n")
    twin = find_twin(compilation)
    assert (str(compilation.mesh), str(twin.mesh)) == ("dp=4*4", "dp=2*2")
    assert agreement_of(twin).largest <= 1e-10


@pytest.mark.parametrize("lines", ["", wide("zero 1 over dp\n"), "zero 3 over dp\n", "zero 2 over dp within node\n"])
def test_collectives_in_two_levels_cross_nodes_once(lines: str) -> None:
    """A library's trees cross nodes once too, so sums that leave all ranks the whole save nothing there."""
    compilation = compiled(f"mesh dp=4\nnode 2\nhierarchical over dp\n{lines}")
    assert agreement_of(compilation).largest <= 1e-10
    sums = [row for row in rows(compilation) if row["bytes"] > 8]
    assert {row["axis"] for row in sums} == {"dp_0", "dp_1"}
    across = report_of(compilation)["across_nodes"]
    saves = lines and "within" not in lines
    assert across["bytes"] <= (0.7 if saves else 1.0) * across["in_one_level"]
    flat = compiled(f"mesh dp=4\nnode 2\n{lines}")
    assert sent(compilation) == sent(flat)  # as much in all, but less of it across


def test_stages_of_a_pipeline_send_in_two_levels() -> None:
    text = (
        GPT.replace("schedule ", "schedule 1f1b ").replace("layers=1", "layers=2")
        + "mesh pp=2, dp=4\nstage before blocks.1 over pp\n"
    )
    compilation = compile_once(
        read_plan(Source("nodes.parc", text + "node 2\nhierarchical over dp\nzero 3 over dp\n")), EXAMPLES
    )
    assert agreement_of(compilation).largest <= 1e-10


@pytest.mark.parametrize("lines", ["", "zero 1 over dp within node\ncompress gradients over dp using int8\n"])
def test_large_builds_in_two_levels_have_twins(lines: str) -> None:
    """The vocabulary of 25 divides nowhere, so the table is cut along its other dim: also that of the twin."""
    text = GPT.replace("vocab=24", "vocab=25") + "mesh dp=16\nnode 4\nhierarchical over dp\nverify vocab=24\n"
    compilation = compile_once(read_plan(Source("nodes.parc", text + lines)), EXAMPLES)
    twin = find_twin(compilation)
    assert (str(compilation.mesh), str(twin.mesh)) == ("dp=4*4", "dp=2*2")
    assert agreement_of(twin).largest <= 1e-10


def test_heads_and_levels_share_an_axis() -> None:
    """Two heads of keys over eight ranks, in nodes of two: the axis has three parts."""
    compilation = compile_once(read_plan(Source("llama.parc", LLAMA)), EXAMPLES)
    assert str(compilation.mesh) == "tp=2*2*2"
    assert agreement_of(compilation).largest <= 1e-10
    inside = {row["axis"] for row in rows(compilation) if row["phase"] == "forward" and row["bytes"] > 8}
    assert {"tp_2", "tp_0,tp_1"} <= inside


TOPOLOGY = """\
node 2
stage balanced over pp
schedule 1f1b microbatches 4
column blocks.*.attn.qkv over tp rows (3 h/tp d)
row blocks.*.attn.out over tp
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
"""


@pytest.mark.parametrize("order", [*permutations(("tp", "pp", "dp"))])
def test_an_order_of_axes_that_sends_twice_as_much_across_nodes_is_warned_of(order: tuple[str, ...]) -> None:
    """The warning names the best order, and both numbers are those of the builds."""
    text = GPT.replace("layers=1", "layers=4").replace("schedule microbatches 2\n", "") + TOPOLOGY

    def warned(order: Sequence[str]) -> tuple[list[str], int]:
        mesh = f"mesh {', '.join(f'{axis}=2' for axis in order)}"
        compilation = compile_once(read_plan(Source("order.parc", f"{text}{mesh}\n")), EXAMPLES)
        texts = [render(one) for one in warnings_of(compilation) if one.code.name == "P0149"]
        return texts, report_of(compilation)["across_nodes"]["bytes"]

    found, sent = warned(order)
    assert len(found) == (order[-1] != "tp")
    for message in found:
        best = re.findall(r"(\w+)=2", message.partition("help: ")[2])
        silent, less = warned(best)
        assert silent == [] and best[-1] == "tp" and less < sent
        assert f"sends {size_text(sent)[:3]}" in message and f": {size_text(less)[:3]}" in message


def test_a_plan_within_one_node_has_no_better_order() -> None:
    compilation = compiled("mesh dp=4\nnode 2\n")
    assert not [one for one in warnings_of(compilation) if one.code.name == "P0149"]
