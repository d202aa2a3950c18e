"""Families of transformers, captured without a warning and split: equal to the captured graph."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from parc.checks import check_build
from parc.compiler.contract import step_messages
from parc.compiler.plan import read_plan
from parc.driver import Compiled, compile_plan
from parc.grammar.source import Source

from .families import LINES


def build(family: str, dp: int, tp: int, kv_heads: int, microbatches: int) -> Compiled:
    """The family under its plan; every check of a build must pass."""
    text = f"""model "./families.py:make" (family="{family}", kv_heads={kv_heads})
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
        for message in step_messages(made.built.programs, made.actions)
    )


@pytest.mark.parametrize("family", LINES)
def test_data_and_tensor_parallel(family: str) -> None:
    made = build(family, 2, 2, kv_heads=2, microbatches=2)
    found = counts(made)
    assert not [key for key in found if key[0] == "dp" and key[1] == "backward"]
    if family not in ("Phi3", "Olmo2"):  # rows of a fused qkv with fewer key heads; norms over all heads
        assert found["tp", "forward", "all_reduce"] == 2 * 6
        assert found["tp", "backward", "all_reduce"] == 2 * 5


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 4), (4, 2), (2, 1), (4, 4)])
def test_key_heads_above_at_and_below_the_ranks(family: str, tp: int, kv_heads: int) -> None:
    found = counts(build(family, 1, tp, kv_heads, microbatches=1))
    assert found["tp", "forward", "all_reduce"] == 6 and found["tp", "backward", "all_reduce"] == 5
    moved = sum(count for (_, _, op), count in found.items() if op in ("all_gather", "all_to_all", "reduce_scatter"))
    assert (moved > 0) == (kv_heads < tp), f"{found}: keys and values move only where there are too few heads"
