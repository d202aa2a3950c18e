"""The samples that evaluations of a session read: given ones, or all of a data set, each once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import parc
from parc.checking.reports import report_of
from parc.cli import main
from parc.compiler.build.directory import write_build
from parc.runtime.session.evaluation import Extent, extent_of
from tests.checked_plans import compiled
from tests.evaluated_models import wide
from tests.evaluated_plans import PLAN, PLANS, batch
from tests.runtime.ranks import run_ranks

HELD = """
import torch

draw = torch.Generator().manual_seed(3)
X, TARGETS = torch.randn(37, 8, generator=draw, dtype=torch.float64), torch.randint(8, (37,), generator=draw)
TARGETS[2:13] = TARGETS[20::3] = TARGETS[32:36] = -100


class Samples:
    def __len__(self):
        return {count}

    def __getitem__(self, number):
        return {{"x": X[number], "targets": TARGETS[number]}}
"""
WIDE = PLAN.replace("Moody", "wide").replace("float32", "float64").replace("eval\n", "data synthetic\n")


def held(folder: Path, words: str = "", count: int = 37, text: str = WIDE) -> Path:
    """Write a build whose evaluation has so many samples, with targets that are ignored."""
    (folder / "held.py").write_text(HELD.format(count=count))
    step = compiled(f'{text}\neval every 1 data dataset "./held.py:Samples" {words}\n', folder)
    write_build(step.to_write(report_of(step)), folder / "build")
    return folder / "build"


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first of these samples and their targets."""
    names: dict[str, torch.Tensor] = {}
    exec(compile(HELD.format(count=count), "held.py", "exec"), names)
    return names["X"][:count], names["TARGETS"][:count]


def of(session: parc.Session) -> torch.nn.Module:
    """Return the plain module in ``eval()`` with the session's weights."""
    module = wide()
    module.load_state_dict(session.state_dict(), strict=False)
    return module.eval().requires_grad_(False)


def run(path: str) -> tuple[list[float], list[float]]:
    """Return evaluations of whole, small and other batches between steps, and the losses of the steps."""
    with parc.load(path) as session:
        evaluated, losses = [], []
        for step in range(3):
            evaluated.append(session.evaluate(batch(7)))
            losses.append(session.step(batch(step)).loss)
        x, targets = samples(37)
        assert session.evaluation.mean(session.state) == pytest.approx(
            float(F.cross_entropy(of(session)(x), targets)), rel=1e-10
        )
        return [*evaluated, session.evaluate(batch(8, 5)), session.evaluate(batch(8, 1))], losses


def test_a_session_evaluates_between_steps_as_the_plain_module(tmp_path: Path) -> None:
    build = held(tmp_path, text=WIDE + PLANS["dp, pp"])
    plain = parc.reference(build)
    expected: list[float] = []
    losses = []
    for number in range(3):
        expected.append(plain.evaluate(batch(7)))
        losses.append(plain.step(batch(number)).loss)
    small = batch(8, 5)
    expected += [plain.evaluate(small), plain.evaluate(batch(8, 1))]
    with torch.no_grad():
        alone = F.cross_entropy(plain.module.eval()(small["x"]), small["targets"])
    assert expected[3] == pytest.approx(float(alone), rel=1e-12)
    for found, trained in run_ranks(run, 4, str(build)):
        assert found == pytest.approx(expected, rel=1e-8)
        assert trained == pytest.approx(losses, rel=1e-8)


@pytest.mark.parametrize(("words", "count", "read"), [("", 37, 37), ("batches 2", 37, 32), ("batches 9", 5, 5)])
def test_a_run_s_mean_is_that_over_all_samples_of_which_none_comes_twice(
    words: str, count: int, read: int, tmp_path: Path
) -> None:
    """The batches have 5, 12 and 1 targets."""
    with parc.load(held(tmp_path, words, count)) as session:
        session.step()
        found, (x, targets) = session.evaluation.mean(session.state), samples(read)
        assert found == pytest.approx(float(F.cross_entropy(of(session)(x), targets)), rel=1e-10)
        assert not session.evaluation.left_out()
        assert session.evaluation.mean(session.state) == found


SQUARES = """
model "tests.evaluated_models:wide"
input x float64 [B, 8]
sizes B={sizes}
loss "./squares.py:squares"(output)
optimizer sgd lr 0.1
data synthetic
"""


@pytest.mark.parametrize(("sizes", "count", "read"), [("16", 37, 32), ("4..8 by 4", 36, 36)])
def test_samples_that_fill_no_batch_are_left_out_where_the_loss_counts_no_targets(
    sizes: str, count: int, read: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "squares.py").write_text("def squares(output):\n    return (output ** 2).mean()\n")
    with parc.load(held(tmp_path, count=count, text=SQUARES.format(sizes=sizes))) as session:
        left_out = "each evaluation leaves out the last 5 samples of its data: "
        with pytest.warns(UserWarning, match=left_out) if read == 32 else nullcontext():
            found = session.evaluation.mean(session.state)
        assert session.evaluation.mean(session.state) == found  # without a second warning
        assert found == pytest.approx(float((of(session)(samples(read)[0]) ** 2).mean()), rel=1e-10)
    if read == 32:
        assert main(["run", str(tmp_path / "build"), "--steps", "2", "--device", "cpu"]) == 0
        output = capsys.readouterr()
        assert (output.out + output.err).count("leaves out the last 5 samples") == 1


SHARES = """
import torch.nn.functional as F


def shares(output, targets):
    keep = targets > 2
    return (F.cross_entropy(output, targets, reduction="none") * keep).mean() / keep.double().mean()
"""


@pytest.mark.parametrize(("sizes", "count"), [("16", 37), ("4..8 by 4", 36)])
def test_a_smaller_batch_counts_by_its_samples_where_the_loss_is_divided_by_a_share_of_them(
    sizes: str, count: int, tmp_path: Path
) -> None:
    (tmp_path / "shares.py").write_text(SHARES)
    text = WIDE.replace("cross_entropy(output, targets)", '"./shares.py:shares"(output, targets)')
    with parc.load(held(tmp_path, count=count, text=text.replace("B=16", f"B={sizes}"))) as session:
        found, (x, targets) = session.evaluation.mean(session.state), samples(count)
        losses, keep = F.cross_entropy(of(session)(x), targets, reduction="none"), targets > 2
        assert found == pytest.approx(float(losses[keep].mean()), rel=1e-10)


def test_of_a_long_data_set_a_part_is_read_which_is_said_where_the_plan_does_not_say_it() -> None:
    feed: Any = SimpleNamespace(count=16 * 1900 + 3, batch=16)
    note = "each evaluation reads 100 of the 1901 batches of its data; `batches N` in the plan's `eval` line reads N"
    assert extent_of(feed, None) == Extent(100, note=note)
    assert extent_of(feed, 150) == Extent(150)
