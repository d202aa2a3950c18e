"""The plan's data as ranks read it: their rows and no others, each sample once, a step ahead."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from parc.compiler.build.build import Build
from parc.grammar.codes import BAD_DATA
from parc.runtime.data.feed import Feed
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.opening import build_mesh, open_build
from tests.runtime.tiny import DATA, ONE, PLAN, build

SAMPLES = """
import torch

ASKED = []


def sample(number, length=8):
    ASKED.append(number)
    if number >= 1000:
        raise LookupError("the shelf is empty")
    return {"tokens": torch.arange(length) + number % 200, "targets": torch.full((length,), number % 256)}


def late(number):
    return sample(number) if number < 20 else {}
"""
CPU = torch.device("cpu")


def feeds(build: Build) -> list[Feed]:
    """Return a feed for each rank."""
    mesh = build_mesh(build)
    return [Feed(build, mesh, mesh.coordinates(rank), CPU) for rank in range(mesh.world)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A build over dp=2 whose data is a callable."""
    folder = tmp_path_factory.mktemp("feed")
    (folder / "samples.py").write_text(SAMPLES)
    plan = PLAN.replace('bytes "*.py"', '"samples:sample" (length=8)')
    return open_build(build(folder, DATA, plan))


def test_ranks_read_their_rows_once_and_ahead(made: Build) -> None:
    first, second = feeds(made)
    parts = first.next(2)
    asked = sys.modules["samples"].ASKED
    until = time.monotonic() + 30
    while len(asked) < 8 and time.monotonic() < until:
        time.sleep(0.01)
    first.close()
    assert [list(part["targets"][:, 0]) for part in parts] == [[16, 17], [20, 21]]  # microbatches of 4, half of each
    assert asked == [16, 17, 20, 21, 24, 25, 28, 29]  # step 2, and step 3 ahead of time
    asked.clear()
    assert [list(part["targets"][:, 0]) for part in second.next(2)] == [[18, 19], [22, 23]]
    second.close()
    whole = {"tokens": torch.arange(8) + torch.arange(8)[:, None], "targets": torch.arange(8)[:, None].expand(8, 8)}
    for rank, feed in enumerate(feeds(made)):
        for index, part in enumerate(feed.cut(whole)):
            rows = slice(4 * index + 2 * rank, 4 * index + 2 * rank + 2)
            assert all(torch.equal(part[name], whole[name][rows]) for name in whole)


def test_synthetic_samples_fit_the_model_and_are_alike_on_every_mesh(tmp_path: Path) -> None:
    plan = PLAN.replace('bytes "*.py"', "synthetic").replace("vocab=256", "vocab=11")
    one, two = (open_build(build(tmp_path, text, plan, name)) for text, name in ((ONE, "one"), (DATA, "two")))
    (whole,), halves = feeds(one), feeds(two)
    seen = [part[name] for step in range(8) for part in whole.next(step) for name in ("tokens", "targets")]
    assert {int(number) for value in seen for number in value.unique()} == set(range(11))
    assert len({value.numpy().tobytes() for value in seen}) == len(seen)
    for part, *parts in zip(whole.next(5), *(half.next(5) for half in halves), strict=True):
        assert all(torch.equal(part[name], torch.cat([half[name] for half in parts])) for name in part)
    for feed in (whole, *halves):
        feed.close()


def test_steps_may_be_asked_for_in_any_order(made: Build) -> None:
    feed, other = feeds(made)[0], feeds(made)[0]
    seen = {step: feed.next(step)[0]["tokens"] for step in (0, 1, 5, 2)}
    assert all(torch.equal(other.next(step)[0]["tokens"], value) for step, value in seen.items())
    feed.close()
    other.close()


def test_a_sample_that_fails_is_said_only_when_it_is_needed(made: Build) -> None:
    feed = feeds(made)[0]
    feed.next(124)  # reads ahead to samples from 1000 on
    with pytest.raises(
        RunError, match=r"step 126: making sample 1000 failed: LookupError: the shelf is empty"
    ) as caught:
        feed.next(125)
    assert caught.value.code is BAD_DATA
    feed.close()


@pytest.mark.parametrize(
    ("step", "message"), [(2, "sample 20 is empty, but 16 is tokens"), (3, "samples have no `tokens`")]
)
def test_a_sample_that_holds_nothing_is_said(made: Build, step: int, message: str) -> None:
    plan = PLAN.replace('data      bytes "*.py"', 'data "samples:late"')
    with pytest.raises(RunError, match=message) as caught:
        feeds(open_build(build(made.folder, DATA, plan, "late")))[0].next(step)
    assert caught.value.code is BAD_DATA


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            'data "samples:sample" (length=9)',
            r"`tokens` of sample 0 is int64 \[9\], but `input tokens int64 \[B, S\]` asks for int64 \[8\]"
            r"[^\n]*\n  line \d+ of the build's plan.parc: data \"samples:sample\"",
        ),
        ('data bytes "*.none"', 'no file matches "\\*.none"'),
        ('data "samples:nothing" ()', "the data's callable: `samples` has no `nothing`"),
        ("", "the plan has no `data` line"),
    ],
)
def test_data_that_does_not_fit_is_said(
    tmp_path_factory: pytest.TempPathFactory, made: Build, line: str, message: str
) -> None:
    folder: Path = made.folder
    plan = PLAN.replace('data      bytes "*.py"', line)
    with pytest.raises(RunError, match=message) as caught:
        feeds(open_build(build(folder, DATA, plan, "faulty")))[0].next(0)
    assert caught.value.code is BAD_DATA


def test_text_is_read_by_bytes(tmp_path: Path) -> None:
    feed = feeds(open_build(build(tmp_path, ONE)))[0]
    (part, _) = feed.next(0)
    assert torch.equal(part["tokens"][:, 1:], part["targets"][:, :-1])
    feed.close()
