"""Profiles: the ranges of torch's profiler, which lead from a kernel to a program's line and to the plan's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import parc
from parc.runtime.observe.observer import Profile
from parc.runtime.ranks.faults import RunError
from tests.runtime.tiny import ONE, PLAN, batch, build, profiled


def test_each_range_is_a_line_by_its_row_in_the_programs(tmp_path: Path) -> None:
    made = build(tmp_path, ONE, PLAN)
    with parc.load(made, "cpu") as session:
        actions = [str(action) for action in session.role.actions]
        profile = Profile(tmp_path / "profile", 0, torch.device("cpu"), 0, 9)
        for number in range(1, 7):
            with profile.step(number):
                session.step(batch(number))
            assert profile.written(number).startswith("a profile of steps 3 to 5 is in ") == (number == 5)
    events = profiled(tmp_path / "profile" / "rank0.json.gz")
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [name.removeprefix("action ") for name in names if name.startswith("action ")] == 3 * actions
    ranges = [found for name in names if (found := re.fullmatch(r"(\S+\.py):(\d+) (.*) = (\S+) \| (.*)", name))]
    assert len(ranges) > 1000
    for file_name, row, results, _, origin in (found.groups() for found in ranges):
        text = (made / "programs" / file_name).read_text().splitlines()[int(row) - 1]
        assert text.strip().startswith(f"{results} = ") and text.endswith(f"| {origin}"), text
    kernels = [event for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::addmm"]
    spans = [
        event for event in events if "mlp_up_addmm = aten.addmm.default | blocks.*.mlp.up gpt.py:" in event["name"]
    ]
    inside = [any(a["ts"] <= kernel["ts"] <= a["ts"] + a["dur"] for a in spans) for kernel in kernels]
    assert sum(inside) == 3 * 2 * 2  # steps, microbatches, layers


def test_a_profile_without_a_place_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file/profile` cannot be written: not a directory"):
        Profile(tmp_path / "file" / "profile", 0, torch.device("cpu"), 0, 9)
