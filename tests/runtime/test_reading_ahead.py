"""Reading ahead and ending: nothing past the last step, no wait for a callable that blocks, groups ended at exit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parc
from parc.runtime.data.sources import token_inputs
from parc.runtime.ranks.faults import RunError
from parc.runtime.ranks.processes import STORE, leave
from tests.runtime.ranks import SERVER
from tests.runtime.tiny import DATA, ONE, PLAN, batch, build

SAMPLES = """
import time
import torch

ASKED = []


def ends(number):
    ASKED.append(number)
    if number >= 24:
        time.sleep(3600)
    return {"tokens": torch.arange(8), "targets": torch.arange(8)}


def fails(number):
    if number == 9:
        raise LookupError("the shelf is empty")
    return ends(number)
"""
LOOP = """
import atexit, glob, sys
import torch.distributed as dist

def say():
    threads = [open(place).read().strip() for place in glob.glob("/proc/self/task/*/comm")]
    left = [name for name in threads if "gloo" in name]
    print(f"left: {left}" if left or dist.is_initialized() else "ended", file=sys.stderr)

atexit.register(say)
import parc

session = parc.load(sys.argv[1])
for _ in range(3):
    session.step()
"""
ENDLESS = PLAN.replace('bytes "*.py"', '"./samples.py:ends" ()').replace("steps     3\n", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with samples that block after 24, three steps of 8."""
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "samples.py").write_text(SAMPLES)
    return folder


def with_data(folder: Path, name: str, more: str = "") -> Path:
    """Build for one rank with a callable of samples.py as data."""
    plan = PLAN.replace('bytes "*.py"', f'"./samples.py:{name}" ()')
    return build(folder, ONE, plan + more, name=f"{name}{len(more)}")


def test_nothing_is_read_beyond_the_last_step_and_close_waits_for_nothing(folder: Path) -> None:
    with parc.load(with_data(folder, "ends")) as session:
        for _ in range(3):
            session.step()
        (asked,) = (
            m.ASKED for m in list(sys.modules.values()) if getattr(m, "__file__", "") == str(folder / "samples.py")
        )
        assert sorted(asked) == list(range(24))
    start = time.monotonic()
    with parc.load(build(folder, ONE, ENDLESS, name="endless")) as session:
        for _ in range(3):
            session.step()
    assert time.monotonic() - start < 30


def second(environment: dict[str, str], made: str) -> None:
    """Be the second rank."""
    os.environ.update(environment)
    with parc.load(made) as session:
        for _ in range(3):
            session.step()
    dist.destroy_process_group()  # parc still has groups
    with pytest.raises(RunError, match=r"P0301.* needs all 2 ranks, and this process has ended their process group"):
        session.state_dict()
    leave()
    threads = [place.read_text().strip() for place in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "gloo" in name], "a thread of a group may abort the process at its end"


def test_a_script_that_ends_without_a_word_leaves_no_group_and_waits_for_no_sample(folder: Path) -> None:
    """The sample after the last step blocks. The first of two ranks is a Python of its own, to its very end."""
    made = str(build(folder, DATA, ENDLESS, name="split"))
    meet = {"WORLD_SIZE": "2", STORE: str(folder / "store")}
    other = SERVER.Process(target=second, args=({**meet, "RANK": "1", "LOCAL_RANK": "1"}, made), daemon=True)
    other.start()
    environment = {**os.environ, **meet, "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", LOOP, made], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    other.join(60)
    assert done.returncode == 0 and done.stderr.count("ended") == 1, done.stderr
    assert "left: " not in done.stderr and "terminate called" not in done.stderr
    assert other.exitcode == 0


def test_errors_in_a_loop_of_ones_own_say_code_place_and_help(folder: Path) -> None:
    with parc.load(with_data(folder, "fails")) as session:
        session.step()
        with pytest.raises(RunError) as caught:
            session.step()
    text = str(caught.value)
    assert "[P0303] step 2: making sample 9 failed: LookupError: the shelf is empty" in text
    number = 1 + next(
        at for at, line in enumerate((session.build.path / "plan.parc").read_text().splitlines()) if line[:5] == "data "
    )
    assert f"line {number} of the build's plan.parc: data " in text
    assert "samples.py:17: raise LookupError" in text
    with parc.load(with_data(folder, "ends")) as session:
        with pytest.raises(
            RunError, match=r"\[P0303\] the batch has `extra`, which is no input of the plan; give a dict"
        ):
            session.step({**batch(0), "extra": torch.zeros(1)})
        with pytest.raises(RunError, match=r"a batch is a dict of tensors by name, not tuple; .*`tokens`, `targets`"):
            session.step((batch(0)["tokens"], batch(0)["targets"]))  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"\[P0301\] 1 process for .* 2 ranks; start 2: .*torchrun --nproc-per-node 2 S"):
        parc.load(build(folder, DATA, name="dp"))


def test_bytes_go_to_inputs_by_what_they_are_for(tmp_path: Path) -> None:
    plan = PLAN.replace("tokens  int64", "ids int64").replace("targets int64", "labels int64")
    plan = plan.replace("(output, targets)", "(output, labels)").replace('"./gpt.py:GPT"', '"./named.py:Named"')
    (tmp_path / "named.py").write_text(
        "import gpt\n\n\nclass Named(gpt.GPT):\n    def forward(self, ids):\n        return super().forward(ids)\n"
    )
    feed_build = build(tmp_path, ONE, plan)
    with parc.load(feed_build) as session:
        (part, _) = session.feed.next(0)
        assert torch.equal(part["ids"][:, 1:], part["labels"][:, :-1])
        assert session.step().step == 1
    ids, mask = {"name": "ids", "dtype": "int64"}, {"name": "mask", "dtype": "float32"}
    assert token_inputs([mask, ids], []) == {"tokens": "ids"}
    swapped = [{"name": "targets", "dtype": "int64"}, {"name": "tokens", "dtype": "int64"}]
    assert token_inputs(swapped, ["output", "targets"]) == {"tokens": "tokens", "targets": "targets"}
