"""Families of transformers, captured without a warning and split: equal to the captured graph."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from parc.checks import check_build
from parc.compiler.contract import messages
from parc.compiler.plan import read_plan
from parc.driver import Compiled, compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source

from .families import LINES


def build(family: str, dp: int, tp: int, kv_heads: int, microbatches: int, heads: int = 4) -> Compiled:
    """The family under its plan; every check of a build must pass."""
    text = f"""model "./families.py:make" (family="{family}", kv_heads={kv_heads}, heads={heads})
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=8, S=16
loss cross_entropy(output.logits, targets)
optimizer adamw lr 1e-3 clip 1.0
mesh dp={dp}, tp={tp}
shard input_ids, targets [B/dp, _]
{LINES[family].strip()}
schedule microbatches {microbatches}
"""
    made = compile_plan(read_plan(Source("family.parc", text)), Path(__file__).parent)
    checked = check_build(made)
    assert not checked.faults, "\n".join(map(str, checked.faults))
    assert checked.agreement is not None and checked.agreement.largest <= 1e-10
    assert made.built.without_rule == ()
    return made


def counts(made: Compiled) -> Counter[tuple[str, str, str]]:
    """Collectives of a step by axis, phase and operator."""
    return Counter(
        (",".join(message.axes), message.phase, message.op.removeprefix("parc."))
        for action in made.actions
        if action.kind in made.built.programs
        for message in messages(made.built.programs[action.kind])
    )


@pytest.mark.parametrize("family", LINES)
def test_data_and_tensor_parallel(family: str) -> None:
    made = build(family, 2, 2, kv_heads=2, microbatches=2)
    found = counts(made)
    assert not [key for key in found if key[0] == "dp" and key[1] == "backward"]
    if family != "Olmo2":  # norms over all heads
        assert found["tp", "forward", "all_reduce"] == 2 * 6
        assert found["tp", "backward", "all_reduce"] == 2 * 5


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 4), (4, 2), (2, 1), (4, 1), (6, 2)])
def test_key_heads_above_and_below_the_ranks_move_nothing(family: str, tp: int, kv_heads: int) -> None:
    found = counts(build(family, 1, tp, kv_heads, microbatches=1, heads=max(tp, 4)))
    assert found.pop(("tp", "forward", "all_reduce")) == 6 and found.pop(("tp", "backward", "all_reduce")) == 5
    found.pop(("tp", "forward", "row_max"))
    copies = 0 if kv_heads >= tp else 4 if family == "Llama" else 8  # k and v of two layers; Qwen2 has biases
    axis = "tp_1" if 1 < kv_heads < tp else "tp"
    norms = {("tp", "step", "all_reduce"): 1, ("tp_0", "step", "all_reduce"): int(axis == "tp_1")}
    assert found == Counter({(axis, "step", "all_reduce"): copies}) + Counter(norms)


@pytest.mark.parametrize(("family", "kv_heads"), [("Olmo2", 2), ("Gemma2", 1), ("Qwen3", 2)])
def test_few_key_heads_of_other_families_move_nothing(family: str, kv_heads: int) -> None:
    found = counts(build(family, 2, 4, kv_heads, microbatches=2))
    assert {op for _, _, op in found} == {"all_reduce", "row_max"}


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads", "said"),
    [
        (8, 4, 4, "tp=8 does not divide 4 heads"),
        (8, 4, 2, "tp=8 does not divide 4 heads"),
        (3, 6, 2, "tp=3 neither divides 2 heads of keys and values nor is a multiple of them"),
        (2, 6, 3, "tp=2 neither divides 3 heads of keys and values nor is a multiple of them"),
    ],
)
def test_heads_that_do_not_fit_the_ranks_are_refused(tp: int, heads: int, kv_heads: int, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        build("Llama", 1, tp, kv_heads, microbatches=1, heads=heads)
    legal = {4: "1, 2, 4", 6: f"1, {kv_heads}, 6"}[heads]
    text = str(refused.value)
    assert text.startswith(f"error[P0112]: {said}\n --> family.parc:9:8\n") and text.endswith(f": {legal}")
    assert "modeling_llama.py:" in text and "declared here" in text
