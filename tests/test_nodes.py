"""Nodes: axes that are factored at their boundaries, and what lines about them store and send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parc.checking.checks import case_of, static_faults
from parc.checking.twins import find_twin
from parc.compiler.build.communication import communication_table
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.nodes import UnevenNodes, node_levels
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import Compiled, compile_plan
from parc.grammar.source import Source
from parc.passes.placing.heads import Copies
from parc.runtime.compare.simulate import Agreement, compare

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GPT = """\
model "./gpt.py:GPT" (layers=2, width=16, heads=4, vocab=24, length=4)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=32, S=4
loss cross_entropy(output, targets)
optimizer adamw lr 1e-2 clip 1.0
shard tokens, targets [B/dp, _]
schedule microbatches 2
"""


def compiled(lines: str) -> Compiled:
    """Compile the small GPT with further lines."""
    return compile_plan(read_plan(Source("nodes.parc", GPT + lines)), EXAMPLES)


def agreement_of(made: Compiled) -> Agreement:
    """Prove the build's texts, and compare all ranks in one process with the captured graph."""
    assert static_faults(made.build) == []
    return compare(case_of(made), 2)


def rows(made: Compiled) -> list[dict[str, Any]]:
    """Return the collectives of a step."""
    return [row for role in made.build.roles.values() for row in communication_table(role)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 36))
@settings(max_examples=200, deadline=None)
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
@settings(max_examples=30, deadline=None)
def test_heads_and_nodes_factor_an_axis_together(sizes: tuple[int, ...], nodes: int) -> None:
    kept = {("k", "tp"): 1, ("v", "tp"): 0}
    before = Copies({"tp": sizes}, kept) if len(sizes) > 1 else Copies({}, {("k", "tp"): 1})
    after = before.with_nodes("tp", nodes, 8 // nodes)
    declared = Mesh.parse("tp=8")
    old, new = declared.factor(before.sizes), declared.factor(after.sizes)
    assert after.parts(new) == before.parts(old)
    assert new.groups(new.parts("tp")[after.across["tp"] :]) == [
        list(range(first, first + 8 // nodes)) for first in range(0, 8, 8 // nodes)
    ]


def test_nodes_that_cut_heads_unevenly_are_refused() -> None:
    with pytest.raises(UnevenNodes, match="3 nodes of `tp` neither divide its 2 heads"):
        Copies({"tp": (2, 3)}).with_nodes("tp", 3, 2)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_within_node_gathers_inside_and_sums_across(level: int) -> None:
    made = compiled(f"mesh dp=4\nnode 2\nzero {level} over dp within node\n")
    agreement = agreement_of(made)
    assert agreement.largest <= 1e-10
    stored = made.build.types["blocks.0.mlp.up.weight"]
    assert stored.text(made.mesh) == "f32[64/dp_1, 16]"
    sent = {(row["op"], row["axis"]) for row in rows(made) if row["dtype"] == "float32" and row["bytes"] > 8}
    assert sent == {("all_gather", "dp_1"), ("reduce_scatter", "dp_1"), ("all_reduce", "dp_0")}
    in_backward = {row["op"] for row in rows(made) if row["phase"] == "backward"}
    assert in_backward == {1: set(), 2: {"reduce_scatter"}, 3: {"reduce_scatter", "all_gather"}}[level]


def test_the_twin_keeps_both_levels_of_an_axis() -> None:
    made = compiled("mesh dp=16\nnode 4\nzero 3 over dp within node\n")
    twin, differences = find_twin(made, made.build.programs)
    assert (str(made.mesh), str(twin.mesh), differences) == ("dp=4*4", "dp=2*2", [])
    assert agreement_of(twin).largest <= 1e-10
