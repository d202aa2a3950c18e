"""Random batches: some targets are ignored, and never all targets of a loss."""

from __future__ import annotations

import pytest
import torch

from parc.compiler.program.text import parse_program
from parc.runtime.data.random_batch import random_batch

LOSS = '''"""parc program: role model, action reference"""

mesh()


def forward(
    logits: "f32[{rows}, 8]",  # input logits
    y: "i64[{batch}, 2]",  # input y
):
    kept = aten.slice.Tensor(y, 1, {start}, {end})  # i64[{batch}, 1] | - -
    flat = aten.reshape.default(kept, [{rows}])  # i64[{rows}] | - -
    each = parc.token_loss.default(logits, flat, -100)  # f32[{rows}] | - -
    loss = aten.sum.default(each)  # f32[] | - -
    return {{
        "loss": loss,
    }}
'''


@pytest.mark.parametrize("start", [0, 1])
def test_a_loss_that_leaves_a_position_out_has_targets(start: int) -> None:
    reference = parse_program(LOSS.format(rows=2, batch=2, start=start, end=start + 1))
    ignored = 0
    for seed in range(200):
        (batch,) = random_batch(reference, 1, torch.Generator().manual_seed(seed))
        assert (batch["y"][:, start] != -100).any()
        ignored += int((batch["y"] == -100).sum())
    assert ignored > 0
