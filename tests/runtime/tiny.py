"""Tiny builds for tests of running: the example's GPT, made small, under plans of a few lines, without checks."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from parc.compiler.torch_private import quiet
from tests.captured_once import compile_once

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

PLAN = """
model     "./gpt.py:GPT" (layers=2, width=16, heads=2, vocab=256, length=8, dropout=0.1)
input     tokens  int64 [B, S]
input     targets int64 [B, S]
sizes     B=8, S=8
loss      cross_entropy(output, targets)
data      bytes "*.py"
optimizer adamw lr 1e-2 eps 1e-5 weight_decay 0.1 clip 1.0
seed      3
steps     3
schedule  microbatches 2
"""
FLAT = PLAN.replace("layers=2", "layers=1")
ATTENTION = """\
model "./context_models.py:Net" (p=0.3, layers=1)
input tokens int64 [B, S]
input document int64 [B, S]
input targets int64 [B, S]
loss cross_entropy(output, targets)
optimizer sgd lr 0.1
"""
"""A plan without sizes, in `tests`: its attention has dropout, which parc computes by a kernel of its own."""
ONE = ""
EVAL = "eval\n"
DATA = """
mesh      dp=2
shard     tokens, targets [B/dp, _]
"""
TENSOR = """
mesh      tp=2
column    blocks.*.attn.qkv over tp rows (3 h/tp d)
row       blocks.*.attn.out over tp
column    blocks.*.mlp.up over tp
row       blocks.*.mlp.down over tp
vocab     embed, head over tp
"""
BOTH = TENSOR.replace("tp=2", "dp=2, tp=2") + DATA.split("\n", 2)[2]


def build(folder: Path, placements: str, plan: str = FLAT, name: str = "build") -> Path:
    """Build a plan in ``folder``, beside a copy of the example's model. If none is given, the model has one layer."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(EXAMPLES / "gpt.py", folder)
    text = folder / f"{name}.parc"
    text.write_text(plan + placements)
    out = folder / name
    compiled = compile_once(read_plan(text), folder)
    write_build(compiled.to_write(report_of(compiled)), out)
    return out


def batch(step: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a whole batch of the plan; unequal numbers of targets are ignored."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    tokens, targets = torch.randint(0, 256, (2, 8, 8), generator=generator)
    targets[: 1 + step % 4, 3:] = -100
    return {"tokens": tokens, "targets": targets}


def profiled(path: Path) -> list[dict[str, Any]]:
    """Return the events of a rank's profile in the order of their begin."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return sorted(events, key=lambda event: event.get("ts", 0))


@contextmanager
def without_onednn() -> Iterator[None]:
    """Enter a block in which torch does not use oneDNN. The warning about another library's TF32 is silenced."""
    with quiet(), torch.backends.mkldnn.flags(enabled=False):
        yield
