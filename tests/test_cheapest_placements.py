"""Placements that an integer program finds: Megatron's from the graph alone, and none dearer than those of
`parc init`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parc.compiler.clock.cluster import find_cluster
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.proposing import integer_program
from parc.proposing.cheapest import PlacementProblem, Placements, cheapest_placements, without_placements
from parc.proposing.integer_program import shared_units
from tests.draws import wide
from tests.pages import ROOT
from tests.plan_strategies import plan_text
from tests.random_layers import Sizes
from tests.strategies import Layer, ModelSpec
from tests.trials import build, subject

EXAMPLES = ROOT / "examples"
PICTURES = """
model "benchmarks.placement_models:{name}"
input x float32 [B, 3, 32, 32]
input y int64 [B]
sizes B=8
loss cross_entropy(output, y)
optimizer adamw lr 1e-3
mesh dp=2, tp={tp}
shard x, y [B/dp, ...]
"""
IMAGES = PICTURES.replace("y int64 [B]", "y float32 [B, 3, 32, 32]").replace(
    "cross_entropy", '"torch.nn.functional:mse_loss"'
)


def example(name: str, defines: Mapping[str, object]) -> Compiled:
    """Compile the plan of an example."""
    path = EXAMPLES / f"{name}.parc"
    return compile_plan(read_plan(path, {key: str(value) for key, value in defines.items()}), EXAMPLES)


def net(name: str, tp: int = 2, text: str = PICTURES) -> Compiled:
    """Compile a plan of a model for pictures, which places nothing."""
    return compile_plan(read_plan(Source("net.parc", text.format(name=name, tp=tp))), ROOT)


def found(compiled: Compiled, axis: str = "tp", cluster: Any = None) -> Placements:
    """Find placements, and hold what is promised of all: none is dearer, divides less or sends more than may be."""
    result = cheapest_placements(compiled.plan, compiled.folder, compiled, axis, cluster)
    assert result.after.total <= result.before.total
    assert result.after.work <= result.before.work + 1e-9
    assert result.after.weights <= result.before.weights + 1e-9
    assert result.before.lacking or result.after.wire_bytes <= result.before.wire_bytes
    return result


def plain(lines: tuple[str, ...]) -> set[str]:
    """Return lines without the comments that say why."""
    return {line.partition("  #")[0] for line in lines}


# ---- Megatron's placements


def test_a_gpt_is_split_as_megatron_splits_it() -> None:
    result = found(example("gpt", {"layers": 2, "width": 64}))
    assert plain(result.lines) == {
        "column blocks.*.attn.qkv over tp rows (3 h/tp d)",
        "row blocks.*.attn.out over tp",
        "column blocks.*.mlp.up over tp",
        "row blocks.*.mlp.down over tp",
        "vocab embed, position over tp",  # the sum over the tokens' rows is that over the positions' rows too
    }
    assert result.found and result.after.wire_bytes == result.before.wire_bytes


def test_a_llama_is_split_as_megatron_splits_it_also_where_ranks_are_more_than_kv_heads() -> None:
    compiled = example("llama", {"layers": 2, "tp": 8})
    lines = plain(found(compiled).lines)
    assert lines == {'include "parc:llama" (tp=$tp)'} or "row model.layers.*.self_attn.o_proj over tp" in lines


def test_experts_are_split_among_ranks_that_have_other_tokens() -> None:
    result = found(example("moe", {}), "ep")
    assert "experts model.layers.*.mlp.experts over ep dropless" in plain(result.lines)
    assert result.before.lacking and not result.after.lacking
    assert result.after.weights < 0.6 * result.before.weights


def test_experts_and_attention_are_split_over_tp() -> None:
    result = found(example("moe", {"tp": 2}))
    lines = plain(result.lines)
    assert "row model.layers.*.self_attn.o_proj over tp" in lines
    assert any("experts" in line for line in lines) and not result.after.lacking
    assert result.after.work == pytest.approx(0.5, abs=0.01)


def test_all_of_three_layers_are_split_where_every_second_one_sends() -> None:
    text = PICTURES.replace("3, 32, 32", "64").replace("x float32", "x as input float32")
    result = found(net("Mlp", text=text))
    assert plain(result.lines) == {"column 0 over tp", "row 2, 4 over tp"} and result.found
    assert result.after.wire_bytes < 0.1 * result.before.wire_bytes and result.after.work == 0.5


# ---- other models


@pytest.mark.parametrize("name", ["Vgg", "Mixer", wide("UNet"), "ConvNext", "MobileNet"])
def test_what_is_no_transformer_sends_no_more_than_with_the_lines_of_init(name: str) -> None:
    result = found(net(name, text=IMAGES if name == "UNet" else PICTURES))
    assert not result.before.lacking and result.after.work < 0.6


def test_a_u_net_sends_less_and_divides_more() -> None:
    result = found(net("UNet", text=IMAGES))
    assert result.found and result.after.wire_bytes < result.before.wire_bytes
    assert result.after.work < result.before.work and result.after.weights < result.before.weights


SIZES = Sizes(batch=4, length=4, heads=4, head=4, vocab=12)
RANDOM = {
    "fused gate": ("tied", (Layer("mlp", ("silu", True, "fused"), 0, 0),), "cross_entropy"),
    "gate apart": ("tokens", (Layer("mlp", ("gelu", False, "apart")), Layer("rms_norm", (True,))), "mse"),
    "fused attention": (
        "tokens", (Layer("attention", ("fused", 1, "enable", "causal", 0.0), 0, 0),) * 2, "cross_entropy",
    ),
    "grouped heads": ("tokens", (Layer("attention", ("apart", 2, "enable", "causal", 0.0), 0, 0),), "mse"),
    "one head of keys": ("floats", (Layer("attention", ("apart", 4, "enable", "none", 0.0)),), "sum"),
    "linear layers": ("floats", (Layer("linear", (True,)), Layer("linear", (False,)), Layer("linear", (True,))), "l1"),
    "nothing to split": ("floats", (Layer("layer_norm", (True,)),), "mean"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("tp", [2, 4])
def test_no_lines_are_dearer_than_those_of_init(kind: str, tp: int) -> None:
    spec = ModelSpec(SIZES, *RANDOM[kind])
    compiled = build(subject(spec), plan_text(spec, {"tp": tp}, []))
    result = cheapest_placements(compiled.plan, Path(), compiled, "tp")
    assert not result.after.excess(result.before) and result.after.total <= result.before.total
    assert result.found == (result.after != result.before)


def test_an_axis_of_one_rank_splits_nothing() -> None:
    result = found(net("Vgg", tp=1))
    assert result.lines == () and not result.found and result.after.wire_bytes == 0


def test_on_a_cluster_no_step_takes_longer() -> None:
    cluster = find_cluster("h100-sxm", Path())
    compiled = example("gpt", {"layers": 2, "width": 64})
    result = found(compiled, cluster=cluster)
    assert result.after.seconds is not None and result.before.seconds is not None
    assert result.after.seconds <= result.before.seconds


# ---- how it is found


def test_equal_blocks_share_their_unknowns() -> None:
    def units(layers: int) -> int:
        compiled = example("gpt", {"layers": layers, "width": 64})
        problem = PlacementProblem(compiled.plan, EXAMPLES, compiled, "tp", None)
        return len(set(shared_units(problem.ways(problem.padded(2))).values()))

    assert units(3) == units(6)


def test_an_estimate_sends_what_the_programs_send() -> None:
    compiled = example("gpt", {"layers": 2, "width": 64})
    problem = PlacementProblem(compiled.plan, EXAMPLES, compiled, "tp", None)
    estimate = problem.pricing.estimated(compiled.request)
    price = problem.pricing.of(compiled, None)
    assert estimate.wire_bytes == pytest.approx(price.wire_bytes, rel=0.01)
    assert replace(estimate, wire_bytes=0, messages=0) == replace(price, wire_bytes=0, messages=0)


def test_lines_that_place_weights_over_the_axis_are_left_out() -> None:
    plan = read_plan(EXAMPLES / "llama.parc")
    text = without_placements(plan, "tp")
    assert not re.search(r"^(column|row|vocab)", text, re.M) and "shard     input_ids" in text
    included = plan.source.text.partition("column")[0] + 'include "parc:llama" (tp=$tp)\nzero 1 over dp\n'
    text = without_placements(read_plan(Source("llama.parc", included)), "tp")
    assert "include" not in text and text.endswith("zero 1 over dp\n")
    assert without_placements(plan, "dp") == plan.source.text


def test_the_package_of_the_solver_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    compiled = net("Vgg")
    monkeypatch.setattr(integer_program, "import_module", missing)
    with pytest.raises(PlanError) as raised:
        cheapest_placements(compiled.plan, ROOT, compiled, "tp")
    (error,) = raised.value.diagnostics
    assert "scipy" in error.message and "pip install" in error.help
