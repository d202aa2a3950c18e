"""Composition: every pair of the features that change where state lies and how it travels, some triples, and all at
once, each trained beside the unsharded model."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import pytest

from tests.checked_plans import checked, compiled
from tests.draws import all_but
from tests.planted_builds import ROOT

FEATURES = ("zero", "tp", "pipeline", "precision", "microbatches", "compress", "hierarchical", "offload")
TRIPLES = (
    ("zero", "tp", "pipeline"), ("zero", "precision", "offload"), ("zero", "hierarchical", "compress"),
    ("pipeline", "precision", "offload"), ("tp", "microbatches", "compress"), ("zero", "pipeline", "hierarchical"),
    ("precision", "microbatches", "compress"), ("tp", "hierarchical", "offload"),
)  # fmt: skip

_PLAN = """\
model "./planted_models.py:Stack" (width=8)
input x float32 [B, D]
input wanted float32 [B, D]
sizes B=16, D=8
loss "./planted_models.py:square"(output, wanted)
optimizer adamw lr 1e-2 clip 1.0
mesh {mesh}
shard x, wanted [B/dp, _]
"""
_LINES = {
    "tp": "column a over tp\nrow b over tp\n",
    "compress": "compress gradients over dp using int8\n",
    "hierarchical": "hierarchical over dp\n",
    "offload": 'offload optimizer, parameters, activations to "kept"\n',
}


def plan(chosen: Collection[str]) -> str:
    """Return the text of a plan with some features. Axes over which nothing happens have one rank."""
    inner = 2 ** len({"tp", "pipeline"} & set(chosen))
    crosses = "hierarchical" in chosen
    sizes = {"pp": 1 + ("pipeline" in chosen), "dp": 4 if crosses else 2, "tp": 1 + ("tp" in chosen)}
    text = _PLAN.format(mesh=", ".join(f"{axis}={size}" for axis, size in sizes.items()))
    if crosses:
        text += f"node {2 * sizes['tp']}\n"
    if "pipeline" in chosen:
        text += f"stage before c over pp\nschedule 1f1b microbatches {4 if 'microbatches' in chosen else 2}\n"
    elif "microbatches" in chosen:
        text += "schedule microbatches 2\n"
    if "zero" in chosen:
        units = " unit a, b" if "tp" in chosen else ""
        text += f"zero {1 if 'compress' in chosen else 4 - inner if inner < 4 else 2} over dp{units}\n"
    if "precision" in chosen:
        text += "precision bf16\n" if "offload" in chosen else "precision fp16 loss_scale dynamic\n"
    return text + "".join(lines for name, lines in _LINES.items() if name in chosen)


PAIRS = [*combinations(FEATURES, 2)]
IN_TRIPLES = [pair for pair in PAIRS if any({*pair} <= {*triple} for triple in TRIPLES)]


@pytest.mark.parametrize("chosen", [*all_but(IN_TRIPLES, PAIRS), *TRIPLES, FEATURES], ids="+".join)
def test_features_compose(chosen: tuple[str, ...]) -> None:
    report = checked(compiled(plan(chosen), ROOT / "tests")).report
    assert report["checks"]["numbers"] == "tested"
