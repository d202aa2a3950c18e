"""Replays of forwards that do something beside returning numbers: each is right as plain PyTorch has it, or refused in
words of its own.

``replay`` yields a row for each: its name, what a build says, and what it should say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from parc.advice import warnings_of
from parc.checking.checks import check_build
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from tests.cases.rows import Row

FOLDER = Path(__file__).parent
PLAN = """\
model "./observed_models.py:Net" (kind="{kind}")
input x float32 [B, 6]
input y float32 [B, 5]
sizes B=8
loss "./observed_models.py:squares"(output, y)
optimizer sgd lr 1e-2
mesh dp=2
shard x, y [B/dp, _]
"""
EXPECTED = {
    "parameter_hook": "P0229",
    "accumulated_hook": "P0229",
    "backward_hook": "P0229",
    "tensor_hook": "P0229",
    "forward_hook": "verified",
    "own_backward": "P0262",
    "right_backward": "verified",
    "checkpointed": "verified",
    "momentum": "P0231",
    "momentum_data": "P0231",
    "normalized": "P0231",
    "renormed": "verified",
    "clamped": "verified",
    "clamped_again": "verified",
    "clamped_late": "P0231",
    "clamped_added": "P0231",
    "clamped_by_tensors": "P0231",
    "clamped_at_first": "P0231",
    "clamped_part": "P0231",
    "clamped_twice": "verified",
    "clamped_between": "P0231",
    "clamped_by_turns": "P0231",
    "momentum_buffer": "verified",
    "one_memory": "P0235",
    "two_halves": "verified",
    "tied": "verified",
    "pruned": "verified",
    "spectral": "verified",
    "spectral_hook": "verified",
    "data_buffer": "verified",
    "data_assigned": "verified",
    "copied": "verified",
    "gumbel": "verified",
    "log_normal": "verified",
    "layer_drop": "P0227",
    "layer_drop_numpy": "P0227",
    "layer_drop_off": "verified",
    "seeded": "P0232",
    "generator": "P0232",
    "first_of_log": "P0227",
    "first_of_global": "P0227",
    "tables": "verified",
    "only_logs": "P0228",
    "counter": "P0228",
    "counter_read": "P0227",
    "counter_ramp": "P0227",
    "own_random": "P0227",
    "global_counter": "P0228",
    "memoised": "verified",
    "side_loss": "verified",
    "tracing": "P0234",
    "packed": "P0229",
    "moved_away": "verified",
    "frozen_tower": "verified",
    "all_eval": "P0236",
}
"""The words of a build of each model: the code of its error or of its warning, or "verified"."""


def replay() -> Iterator[Row]:
    """Yield the name of each model, what its build says, and what it should."""
    for kind, expected in EXPECTED.items():
        yield Row(kind, outcome(kind), expected)


def outcome(kind: str) -> str:
    """Return the code of what a build says of a model, or "verified"."""
    plan = read_plan(Source("observed.parc", PLAN.format(kind=kind)))
    try:
        compiled = compile_plan(plan, FOLDER)
        checked = check_build(compiled)
    except PlanError as error:
        return error.diagnostics[0].code.name
    if checked.faults:
        return f"P0210 {checked.faults[0]}"
    said = (*checked.warnings, *(one for one in warnings_of(compiled) if one.code.name != "P0209"))
    return said[0].code.name if said else "verified"
