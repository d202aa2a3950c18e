"""Kept values of a block: the fewest bytes, with everything made again that is cheap, and the same bits."""

from __future__ import annotations

from itertools import chain, combinations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from benchmarks.kept import GPT, LLAMA, kept_by_parc, plan_of
from parc.compiler.capture.node_facts import noted
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Placement, TensorType
from parc.compiler.ops.own_ops import aten
from parc.passes.programs.segments import kept_values, node_type

MESH = Mesh(())


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[fx.Node], dict[fx.Node, bool], list[fx.Node], set[fx.Node]]:
    """Draw a graph of sums of different sizes: its nodes, inputs, values that backward reads, and those that it may
    make again."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    for at in range(draw(st.integers(3, 7))):
        if at < 2:
            node = graph.placeholder(f"x{at}")
        else:
            operands = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2))
            node = graph.call_function(aten.add.Tensor, (operands[0], operands[-1]))
        noted(node).types = [TensorType(torch.float32, (draw(st.integers(1, 6)),), Placement(()))]
        nodes.append(node)
    read = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
    cheap = set(draw(st.lists(st.sampled_from(nodes[2:]), unique=True)))
    return nodes, {nodes[0]: False, nodes[1]: draw(st.booleans())}, read, cheap


@given(graphs(), st.booleans())
def test_no_other_choice_keeps_fewer_bytes(
    drawn: tuple[list[fx.Node], dict[fx.Node, bool], list[fx.Node], set[fx.Node]], others_read_it: bool
) -> None:
    nodes, inputs, read, cheap = drawn

    def makes_all(kept: set[fx.Node]) -> bool:
        there = set(kept)
        for node in nodes:
            if node in cheap and there.issuperset(node.all_input_nodes):
                there.add(node)
        return there.issuperset(read)

    def bytes_of(kept: set[fx.Node]) -> int:
        """Count the bytes, for one block of four that read a shared value."""
        return sum(node_type(node).shape[0] * (1 if node in shared else 4) for node in kept if not inputs.get(node))

    shared = nodes[:1] if others_read_it else []
    kept = kept_values(read, inputs, shared, cheap.__contains__, MESH)
    every = map(set, chain.from_iterable(combinations(nodes, count) for count in range(len(nodes) + 1)))
    assert makes_all(kept)
    assert bytes_of(kept) == min(bytes_of(choice) for choice in every if makes_all(choice))


def test_a_block_keeps_what_its_cheap_lines_cannot_make() -> None:
    llama = [name for name, *_ in kept_by_parc(plan_of(LLAMA, "precision bf16\n"))]
    assert llama == [
        "x", "input_layernorm_rsqrt", "self_attn_v_proj_mm", "self_attn_add", "self_attn_add_1", "self_attn_attention",
        "self_attn_attention_1", "add_1", "post_attention_layernorm_rsqrt", "mlp_gate_proj_mm", "mlp_up_proj_mm",
    ]  # fmt: skip
    gpt = [name for name, *_ in kept_by_parc(plan_of(GPT))]
    assert "mlp_up_addmm" in gpt
    assert "mlp_gelu" not in gpt
