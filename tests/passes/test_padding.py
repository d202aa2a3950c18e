"""Padding: dims that axes do not divide, in models whose operators meet them in every way, and its proof."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from parc.checking.checks import static_faults
from parc.checking.twins import find_twin
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.pieces import put_together, take
from parc.compiler.layout.placement import Placement, Split, TensorType
from parc.compiler.ops.factors import OpCall, Operand
from parc.compiler.ops.infer import infer
from parc.compiler.ops.rules import TABLE
from parc.compiler.padding.flow import UNKNOWN, Extra, PaddingFault, follow_padding, is_neutral, reduction_of
from parc.compiler.padding.pads import Pad, facts_of
from parc.compiler.padding.tensors import grow, real_entries, shrink, spread
from parc.compiling.compiled import Compiled
from parc.desugar import desugar
from parc.runtime.machine.kernels import KERNELS
from parc.runtime.machine.registry import KernelContext
from tests.draws import share, wide

from .. import checked_plans
from ..checked_plans import checked, simulated
from ..padded_models import ACTIVATIONS

TESTS = Path(__file__).parent.parent
VOCAB = "vocab embed, head over tp pad"
GATED = "column up over tp rows (2 f/tp) pad\nrow down over tp pad"
PLAN = """model "./{model}" ({arguments})
input {name} int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=6
loss cross_entropy({logits}, targets)
optimizer adamw lr 1e-3 eps 1e-5 weight_decay 0.1 clip 1.0
mesh dp={dp}, tp={tp}
shard {name}, targets [B/dp, _]
{lines}
"""


def compiled(lines: str, arguments: str = "width=8", dp: int = 1, tp: int = 4, model: str = "") -> Compiled:
    """Compile the small model, or one of transformers, under a plan."""
    of_family = model and ":" not in model
    name, logits = ("input_ids", "output.logits") if of_family else ("tokens", "output")
    model = f"family_models.py:{model}" if of_family else model or "padded_models.py:Mlp"
    text = PLAN.format(model=model, arguments=arguments, dp=dp, tp=tp, lines=lines, name=name, logits=logits)
    return checked_plans.compiled(text, TESTS)


def operators(compilation: Compiled) -> Counter[str]:
    """Count the operators in the forward and the backward."""
    programs = [compilation.build.programs[action] for action in "FB"]
    lines = [line for program in programs for function in program.functions for line in function.lines]
    return Counter(line.op.split(".")[1] for line in lines if not line.calls_function)


def holds(compilation: Compiled) -> Counter[str]:
    """Check that a build is padded and sound, and count its operators."""
    assert compilation.build.pads
    simulated(compilation)
    return operators(compilation)


@pytest.mark.parametrize(("tied", "dp", "tp"), [wide("true", 1, 4), ("true", 2, 2), ("false", 1, 2)])
def test_a_vocabulary(tied: str, dp: int, tp: int) -> None:
    found = holds(compiled(VOCAB, f"vocab=13, tied={tied}", dp, tp))
    assert found["fill_pad"] == 2 and not found["all_gather"]  # the logits, and their gradient


# What an operator does with a padded dim: computes on, fills it, or has it cut back, which takes a gather.
COMPUTED = ("gelu", "flat", "positions", "batch")
FILLED = ("sigmoid", "log", "singular", "inverse", "mean", "outer", "heads")
CUT = ("softmax", "sorted", "halves", "split", "cumulative")
BOTH = ("peak", "total")


def test_every_activation_is_tried() -> None:
    assert {*COMPUTED, *FILLED, *CUT, *BOTH} == set(ACTIVATIONS)


def test_a_hidden_dim_under_every_activation() -> None:
    compilation = compiled(
        "column parts.*.up over tp pad\nrow parts.*.down over tp pad", model="padded_models.py:Several"
    )
    assert holds(compilation)["grow_pad"] > 0
    programs = [compilation.build.programs[action] for action in "FB"]
    lines = [line for program in programs for function in program.functions for line in function.lines]
    changes = {(line.op, *line.origin.module.split(".")[:2]) for line in lines}
    ops = ("parc.fill_pad.default", "parc.cut_pad.default")
    found = {kind: [(op, "parts", kind) in changes for op in ops] for kind in ACTIVATIONS}
    assert found == {kind: [kind in (*FILLED, *BOTH), kind in (*CUT, *BOTH)] for kind in ACTIVATIONS}


@pytest.mark.parametrize(
    ("lines", "arguments", "dp"),
    [
        (GATED, "gated=true", 1),
        (GATED, "gated=true, hidden=9", 2),
        ("column up over tp pad\nvocab embed over tp pad", "hidden=10, vocab=13", 1),
        ("row down over tp pad\nvocab head over tp pad", "hidden=10, vocab=13", 1),
        ("shard embed.weight [V/tp/dp pad, _]\nshard head.weight [V/dp/tp pad, _]", "vocab=13", 2),
        ("shard embed.weight [V/tp pad, w/dp pad]", "width=7", 2),
        ("shard embed.weight [_, w/tp pad]\nrow head, up over tp pad\ncolumn down over tp pad", "width=7", 1),
        ("freeze embed, head\n" + VOCAB, "vocab=13", 2),
    ],
)
def test_other_places(lines: str, arguments: str, dp: int) -> None:
    holds(compiled(lines, arguments, dp, 4 // dp))


LLAMA = """column model.layers.*.mlp.{gate,up}_proj over tp pad
row model.layers.*.mlp.down_proj over tp pad
include "parc:llama" (tp=2)"""


@pytest.mark.parametrize(
    ("model", "more", "dp", "lines"),
    [
        (
            "decoder",
            ', name="llama", kv_heads=4, num_hidden_layers=1, intermediate_size=49, tie_word_embeddings=true',
            2,
            LLAMA,
        ),
        wide("gpt2", ", n_layer=1", 1, 'include "parc:gpt2" (tp=4)'),
    ],
)
def test_models_of_transformers(model: str, more: str, dp: int, lines: str) -> None:
    found = holds(compiled(lines, f"vocab_size=51{more}", dp, 4 // dp, model))
    assert found["fill_pad"] == 2 and not found["all_gather"]


HEADS = """shard **.attn.c_attn.weight [_, (3 h/tp d=8) pad]
shard **.attn.c_attn.bias [(3 h/tp d=8) pad]
shard **.attn.c_proj.weight [(h/tp d=8) pad, _]"""


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_heads(p: float) -> None:
    found = holds(compiled(HEADS, f"vocab_size=52, n_layer=1, n_embd=24, n_head=3, attn_pdrop={p}", 1, 2, "gpt2"))
    assert (found["cut_pad"] > 0) == (found["all_gather"] > 0) == (p > 0)  # weights are dropped by their numbers


def test_a_plan_in_primitives_says_pad() -> None:
    compilation = compiled(GATED + "\n" + VOCAB, "gated=true", 2, 2)
    text = desugar(compilation)
    assert "embed.weight, head.weight [_/tp pad, _]" in text
    compilation = compiled(GATED, "gated=true, hidden=9", 2, 2)
    assert "up.weight [(2 _/tp) pad, _]" in desugar(compilation)
    again = checked_plans.compiled(desugar(compilation), TESTS)
    assert (again.build.pads, again.build.types) == (compilation.build.pads, compilation.build.types)


def test_groups_of_a_sub_dim_stay_together() -> None:
    compilation = compiled("column up over tp rows (2 h/tp 2) pad", "hidden=20")
    assert compilation.resolved.pads["up.weight"] == (Pad(0, 2, 10, 16),)
    assert "[(2 _/tp 2) pad, _]" in desugar(compilation)
    assert checked(compilation).report["checks"]["padding"] == "proved"


def test_a_twin_is_padded_where_its_build_is_even_if_it_divides() -> None:
    compilation = compiled(VOCAB + "\nverify vocab=8", "vocab=13", 1, 4)
    twin = find_twin(compilation)
    assert twin.mesh == Mesh((("dp", 1), ("tp", 2)))
    assert twin.resolved.pads["embed.weight"] == (Pad(0, 1, 8, 10),)


def test_a_padded_parameter_may_be_stored_with_a_padded_dim_beside() -> None:
    """A vocabulary over 2 ranks, and rows of 9 over the 2 ranks of a `zero` line."""
    compilation = compiled(VOCAB + "\nzero 3 over dp", "vocab=13, width=9", 2, 2)
    assert compilation.build.pads["embed.weight"] == (Pad(0, 1, 13, 14), Pad(1, 1, 9, 10))
    assert checked(compilation).report["checks"]["padding"] == "proved"


def test_what_divides_is_not_padded() -> None:
    compilation = compiled(VOCAB, "vocab=16")
    assert not compilation.resolved.pads and not operators(compilation)["fill_pad"]


# ---- what the checker proves


def test_padding_that_a_manifest_denies_or_moves_is_refused() -> None:
    compilation = compiled(GATED, "gated=true")
    (pad,) = compilation.resolved.pads["up.weight"]
    for other in ((), (Pad(0, 1, 20, 24),), (Pad(0, 2, 9, 12),), (Pad(1, 2, 10, 12),), (pad, pad)):
        pads = {**compilation.resolved.pads, "up.weight": other}
        faults = static_faults(
            replace(compilation.build, manifest={**compilation.build.manifest, "padding": facts_of(pads)})
        )
        assert faults, other


LOOKUPS = sorted(op for op, row in TABLE.items() if row.looks_up)
REDUCTIONS = {op: reduction for op in TABLE if (reduction := reduction_of(op)) is not None}


@pytest.mark.parametrize("op", [*REDUCTIONS, *LOOKUPS])
def test_neutral_elements_are_proved_and_nothing_else_is(op: str) -> None:
    values = (0.0, 1.0, -1.0, 0.5, math.inf, -math.inf)
    wanted = values if op in LOOKUPS else (REDUCTIONS[op].value,)
    assert [value for value in values if is_neutral(op, value)] == list(wanted)
    assert is_neutral(op, None) == is_neutral(op, UNKNOWN) == (op in LOOKUPS)


def call(op: str, *shapes: tuple[int, ...], more: tuple[object, ...] = (), result: tuple[int, ...] = ()) -> OpCall:
    """Return a call of operands of these shapes, then other arguments."""
    return OpCall(op, (*(Operand(index) for index in range(len(shapes))), *more), {}, shapes, (result,))


def one(op: OpCall, *held: float | None) -> float | None:
    """Return the number that the padding of the result's last dim holds, where the last 2 of 6 entries of every operand
    are padding."""
    ranks = [len(shape) for shape in op.operands]
    given_ = [(Extra(rank - 1, 1, 4, 6, value),) for rank, value in zip(ranks, held, strict=True)]
    ((extra,),) = follow_padding(op, given_, [torch.float32] * len(held))
    assert (extra.dim, extra.real, extra.padded) == (len(op.results[0]) - 1, 4, 6)
    return extra.held


def test_what_pointwise_operators_make_of_padding() -> None:
    shape = (3, 6)
    assert one(call("aten.gelu.default", shape, result=shape), 0.0) == 0.0
    assert one(call("aten.sigmoid.default", shape, result=shape), 0.0) == 0.5
    assert one(call("aten.sigmoid.default", shape, result=shape), -math.inf) == 0.0
    assert one(call("aten.sigmoid.default", shape, result=shape), None) is None
    assert one(call("aten.log.default", shape, result=shape), 0.0) == -math.inf
    assert one(call("aten.mul.Tensor", shape, shape, result=shape), 0.0, None) == 0.0
    for op, held in (("aten.mul.Tensor", (0.0, -math.inf)), ("aten.div.Tensor", (0.0, 0.0)),
                     ("aten.div.Tensor", (None, 0.0))):  # fmt: skip
        unknown = one(call(op, shape, shape, result=shape), *held)
        assert unknown is not None and math.isnan(unknown), (op, held)
    assert one(call("aten.div.Tensor", shape, shape, result=shape), 0.0, None) == 0.0
    counts = [torch.float32, torch.int64]  # of `amax`'s greatest entries, among which its gradient is split
    ratio, zeros = call("aten.div.Tensor", shape, shape, result=shape), Extra(1, 1, 4, 6)
    assert follow_padding(ratio, [(zeros,), (replace(zeros, held=None),)], counts) == [(zeros,)]
    assert one(call("aten.add.Tensor", shape, shape, result=shape), 1.0, 2.0) == 3.0
    assert one(call("aten.add.Tensor", shape, shape, result=shape), 1.0, None) is None


def test_what_is_one_number_everywhere_is_known_where_other_operands_have_padding() -> None:
    def full(value: float, *shape: int) -> tuple[Extra, ...]:
        (made,) = follow_padding(OpCall("aten.full.default", (list(shape), value), {}, (), (shape,)), (), ())
        return made

    rows = (Extra(1, 1, 4, 6),)
    chosen = call("aten.where.self", (3, 1), (), (3, 6), result=(3, 6))
    types = [torch.bool, torch.float32, torch.float32]
    assert follow_padding(chosen, [(), full(0.0), rows], types) == [rows]
    assert follow_padding(chosen, [(), full(1.0), rows], types) == [(Extra(1, 1, 4, 6, None),)]
    add = call("aten.add.Tensor", (3, 6), (3, 1), result=(3, 6))
    assert follow_padding(add, [rows, full(2.0, 3, 1)], types[1:])[0][-1] == Extra(1, 1, 4, 6, 2.0)
    joined = OpCall("aten.cat.default", ([Operand(0), Operand(1)], 0), {}, ((1, 6), (2, 6)), ((3, 6),))
    assert follow_padding(joined, [full(0.0, 1, 6), ()], types[1:]) == [
        (Extra(1, 0, None, 6, None),)
    ]  # the other's is data


@pytest.mark.parametrize(
    ("op", "held"),
    [
        (call("aten.sum.dim_IntList", (3, 6), more=([1],), result=(3,)), (1.0,)),
        (call("aten.sum.dim_IntList", (3, 6), more=([1],), result=(3,)), (None,)),
        (call("aten.mm.default", (3, 6), (5, 6), result=(3, 5)), (0.5, 0.5)),  # not a product, but no shape is run
        (call("aten.amax.default", (3, 6), more=([1],), result=(3,)), (-math.inf,)),
        (call("aten.sort.default", (3, 6), result=(3, 6)), (0.0,)),
        (call("parc.square_sum.default", (3, 6), result=()), (None,)),
        (call("aten.slice.Tensor", (3, 6), more=(1, 0, 4, 1), result=(3, 4)), (0.0,)),
        (call("mylib.unknown.default", (3, 6), result=(3, 6)), (0.0,)),
    ],
)
def test_what_may_see_padding_is_refused(op: OpCall, held: tuple[float | None, ...]) -> None:
    with pytest.raises(ValueError):
        one(op, *held)


def test_operands_that_are_padded_differently_are_refused() -> None:
    add = call("aten.add.Tensor", (3, 6), (3, 6), result=(3, 6))
    for other in ((), (Extra(1, 1, 5, 6),), (Extra(1, 2, 2, 3),)):
        with pytest.raises(PaddingFault, match="differently"):
            follow_padding(add, [(Extra(1, 1, 4, 6),), other], [torch.float32] * 2)


def test_padding_that_fits_no_factor_of_a_dim_is_refused() -> None:
    for extra in (Extra(1, 8, 1, 1), Extra(1, 2, 1, 2)):
        with pytest.raises(PaddingFault, match="takes the padding of dim 1 of operand 0 apart"):
            follow_padding(call("aten.gelu.default", (3, 8), result=(3, 8)), [(extra,)], [torch.float32])


@share(0.6)
@given(st.data())
def test_a_rank_holds_its_part_of_the_padded_tensor(data: st.DataObject) -> None:
    mesh = Mesh((("a", 2), ("b", 2)))
    outer, real, more, rest = (data.draw(st.integers(1, 4)) for _ in range(4))
    padded = -(-(real + more) // 4) * 4
    pads = (Pad(0, outer, real, padded),)
    whole = torch.arange(1.0, outer * real * rest + 1).reshape(outer * real, rest)
    longer = grow(whole, pads)
    assert torch.equal(shrink(longer, pads), whole)
    split = {"a": Split(0, outer), "b": Split(0, 2 * outer)} if data.draw(st.booleans()) else {"b": Split(0, outer)}
    type_ = TensorType(torch.float32, tuple(longer.shape), Placement.of(mesh, split))
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        places = [real_entries(type_, dim, pads, mesh, at) for dim in range(2)]
        read = whole[places[0][1]][:, places[1][1]]
        assert torch.equal(spread(read, [kept for kept, _ in places]), take(longer, type_.placement, mesh, at))


@share(0.6)
@given(st.data())
def test_operators_about_padding_do_on_ranks_what_they_do_on_the_whole(data: st.DataObject) -> None:
    mesh = Mesh((("a", 2), ("b", 2)))
    op = data.draw(st.sampled_from(["fill", "cut", "grow"]))
    outer, real, more = (
        data.draw(st.sampled_from([1, 2, 4])),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 4)),
    )
    pad = Pad(1, outer, real, real + more)
    whole = torch.randn(4, outer * (real if op == "grow" else real + more), 4, dtype=torch.float64)
    options = (*(pad.dim, pad.outer, pad.real, pad.padded), *([-1.0] if op == "fill" else []))
    expected = {"cut": shrink, "grow": grow}.get(op, lambda x, pads: x)(whole, [pad])
    if op == "fill":
        kept = grow(torch.ones_like(shrink(whole, [pad])), [pad]) > 0
        expected = torch.where(kept, whole, -1.0)
    name = f"parc.{op}_pad.default"
    this = call(name, tuple(whole.shape), more=options, result=tuple(expected.shape))
    places = [Split(0), Split(2), Split(1), Split(1, 2), Split(1, outer)]
    placement = Placement.of(mesh, {axis: data.draw(st.sampled_from([*places, "I"])) for axis in mesh.names})
    try:
        (made,) = infer(this, [placement], mesh)
        types = [TensorType(whole.dtype, tuple(x.shape), p) for x, p in ((whole, placement), (expected, made))]
        shapes = [type_.local(mesh) for type_ in types]
    except ValueError:  # the rule needs the dim whole, or two axes overlap
        assume(False)
    pieces = []
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        context = KernelContext(mesh, at, types[:1], types[1:], torch.device("cpu"))
        piece = KERNELS[name](context, take(whole, placement, mesh, at), *options)
        assert tuple(piece.shape) == shapes[1]
        pieces.append(piece)
    assert torch.equal(put_together(pieces, made, mesh), expected)


def test_a_product_with_its_bias_is_followed_as_the_two() -> None:
    args = (Operand(0), Operand(1), Operand(2))
    call = OpCall("aten.addmm.default", args, {}, ((4,), (2, 6), (6, 4)), ((2, 4),))
    zero, row, types = Extra(1, 1, 5, 6, 0.0), Extra(0, 1, 5, 6, 0.0), [torch.float32] * 3
    assert follow_padding(call, [(), (zero,), (row,)], types) == [()]
    with pytest.raises(PaddingFault):
        follow_padding(call, [(), (replace(zero, held=1.0),), (replace(row, held=1.0),)], types)
