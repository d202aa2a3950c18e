"""Plans with an ``eval`` line on every kind of mesh, and a batch for them."""

from __future__ import annotations

import torch

PLAN = """
model "tests.evaluated_models:Moody"
input x float32 [B, 8]
input targets int64 [B]
sizes B=16
loss cross_entropy(output, targets)
optimizer adamw lr 1e-2
steps 3
eval
"""
DATA = "mesh dp=2\nshard x [B/dp, _]\nshard targets [B/dp]\nschedule microbatches 2\n"
TENSOR = "mesh tp=2\ncolumn first over tp\nrow second over tp\n"
STAGES = "mesh pp=2\nstage before second over pp\nschedule 1f1b microbatches 4\n"
PLANS = {
    "dp": DATA,
    "tp": TENSOR,
    "pp": STAGES,
    "dp, tp": DATA.replace("dp=2", "dp=2, tp=2") + TENSOR.partition("\n")[2],
    "dp, pp": DATA.replace("dp=2\n", "dp=2, pp=2\n").replace("microbatches 2", "1f1b microbatches 2")
    + STAGES.splitlines()[1],
    "zero 3": DATA + "zero 3 over dp\n",
    "bf16": DATA + "zero 1 over dp\nprecision bf16\n",
    "loss scale": DATA + "precision fp16 loss_scale dynamic\n",
}


def batch(step: int, samples: int = 16) -> dict[str, torch.Tensor]:
    """Return a batch in which some targets are ignored."""
    draw = torch.Generator().manual_seed(step)
    targets = torch.randint(8, (samples,), generator=draw)
    targets[1::5] = -100
    return {"x": torch.randn(samples, 8, generator=draw, dtype=torch.float64), "targets": targets}
