"""``examples/llama-zero.parc`` on four processes: every level trains alike, and holds less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import parc
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from tests.captured_once import compile_once
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import EXAMPLES

LEVELS = range(4)


def ranks_train(folder: str) -> list[tuple[list[float], dict[str, torch.Tensor], int]]:
    """Train every level for two steps. Return losses, whole weights, and the bytes of optimizer state on this rank."""
    ends = []
    for level in LEVELS:
        with parc.load(f"{folder}/{level}") as session:
            losses = [session.step().loss for _ in range(2)]
            slots = [slot for state in session.optimizer.state.values() for slot in state.values() if slot.dim()]
            ends.append((losses, session.state_dict(), sum(slot.nbytes for slot in slots)))
    return ends


def test_four_processes_train_llama_at_every_level(tmp_path: Path) -> None:
    for level in LEVELS:
        defines = {"zero": str(level), "width": "32", "layers": "2"}
        compilation = compile_once(read_plan(EXAMPLES / "llama-zero.parc", defines), EXAMPLES)
        write_build(compilation.to_write(report_of(compilation)), tmp_path / str(level))
    for (losses, weights, most), *others in run_ranks(ranks_train, 4, str(tmp_path)):
        for found, state, held in others:
            assert found == pytest.approx(losses, rel=1e-6)
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
            assert held == most // 2
