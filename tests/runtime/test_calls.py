"""Ranks that do not do the same: they are told who is where, and can go on; and gradients that are used twice, or too
late, and rates that something else than the plan sets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

import parc
from parc.runtime.ranks.communication import PeerLost
from parc.runtime.ranks.lockstep import Lockstep
from tests.runtime.ranks import run_ranks
from tests.runtime.test_batches import own
from tests.runtime.tiny import BOTH, EVAL, ONE, PLAN, TENSOR, batch, build

REPEATED = (
    "test_calls.py: ranks 0 to 3 gave the same samples as `local`, so each of them counts 2 times; give each rank its"
    ' own, chosen by `session.coordinates["dp"]`: `parc.dataloader` does so, and torch\'s `DistributedSampler` with'
    " that as its `rank`"
)


def apart(path: str, folder: str) -> dict[str, Any]:
    """Return what one of four ranks is told where rank 0 alone calls something else than the others do, and that of
    the last two; the losses before and after; and the warnings of steps on its own samples."""
    with parc.load(path) as session:
        first = session.evaluate(batch(0))
        session.save(f"{folder}/kept")
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: session.save(f"{folder}/alone"),
            "evaluate": lambda: session.evaluate(batch(0)),
            "state_dict": session.state_dict,
            "restore": lambda: session.restore(f"{folder}/kept"),
            "exchange": lambda: session.exchange([1, 2, 3]),
        }
        said = {}
        for name, call in calls.items():
            with pytest.raises(parc.RunError) as error:
                call() if session.rank == 0 else session.step()
            said[name] = str(error.value)
        with pytest.raises(parc.RunError) as error:
            session.step(batch(0)) if session.rank < 2 else session.evaluate(batch(0))
        said["two and two"] = str(error.value)
        result = session.gradients(batch(0))
        session.update(result)
        with pytest.raises(parc.RunError) as error:
            session.update(result)
        reported: Any = session.on_step  # no result of a step
        with pytest.raises(parc.RunError, match=r"an update takes what .* returns, not method"):
            session.update(reported)
        losses = first, float(result.loss), session.step_number
        return {"said": said, "twice": str(error.value), "losses": losses, "warned": warnings_of(session)}


def warnings_of(session: parc.Session) -> list[list[str]]:
    """Return the warnings of steps on samples of the ranks' own: other ones, the same, and the same again."""
    said = []
    for place in (session.coordinates["dp"], 0, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session.step(local=own(batch(0), place))
        said.append([f"{Path(one.filename).name}: {one.message}" for one in caught])
    return said


def test_ranks_that_do_not_do_the_same_are_told_who_is_where_and_the_session_goes_on(tmp_path: Path) -> None:
    made = build(tmp_path, BOTH + EVAL, PLAN.replace("dropout=0.1", "dropout=0.0"))
    ranks = run_ranks(apart, 4, str(made), str(tmp_path))
    warned = [rank.pop("warned") for rank in ranks]
    assert all(rank == ranks[0] for rank in ranks)
    said = ranks[0]["said"]
    way = "all ranks must call the same methods in the same order: remove conditions such as `if rank == 0:`"
    assert said["save"] == f"[P0418] rank 0 is in `session.save`, and ranks 1 to 3 are in `session.step`; {way}"
    assert said.pop("two and two").startswith(
        "[P0418] ranks 0 and 1 are in `session.step`, and ranks 2 and 3 are in `session.evaluate`; "
    )
    assert all(f"rank 0 is in `session.{name}`, and " in message for name, message in said.items())
    assert not (tmp_path / "alone").exists()
    loss, again, steps = ranks[0]["losses"]
    assert loss == pytest.approx(again, rel=1e-6) and steps == 1
    assert ranks[0]["twice"].startswith("[P0419] an update has used these gradients already; ")
    assert warned == [[[], [REPEATED], []], *[[[], [], []]] * 3]


def unequal(path: str, folder: str) -> list[str]:
    """Return what two ranks are told that call the same methods after other updates, on other weights, or with another
    checkpoint."""
    said = []
    with parc.load(path) as session:

        def refused(call: Callable[[], Any]) -> None:
            with pytest.raises(parc.RunError) as error:
                call()
            said.append(error.value.message)

        for step in range(2):
            session.step(batch(step))
            session.save(f"{folder}/{step}")
        result = session.gradients(batch(2))
        if session.rank == 0:
            session.update(result)
        refused(lambda: session.step(batch(2)))
        refused(lambda: session.save(f"{folder}/apart"))
        refused(lambda: session.restore(f"{folder}/{session.rank}"))
        session.restore(f"{folder}/0")
        session.step(batch(1), lr=0.5 - 0.25 * session.rank)
        refused(session.state_dict)
        session.restore(f"{folder}/0")
        with session.averaged() if session.rank == 0 else nullcontext():
            refused(lambda: session.predict(batch(0)))
        with session.averaged():
            session.predict(batch(0))
        session.step(batch(1))
    return said


def test_ranks_whose_weights_would_differ_are_told_so_until_they_restore_one_checkpoint(tmp_path: Path) -> None:
    made = build(tmp_path, TENSOR + EVAL + "ema 0.5\n")
    first, second = run_ranks(unequal, 2, str(made), str(tmp_path))
    rate = "the last at lr 0.01"
    assert first == second == [
        f"rank 0 is in `session.step` after 3 steps, {rate}, and rank 1 is in `session.step` after 2 steps, {rate}",
        f"rank 0 is in `session.save` after 3 steps, {rate}, and rank 1 is in `session.save` after 2 steps, {rate}",
        "rank 1 reads another checkpoint than rank 0",
        "rank 0 is in `session.state_dict` after 2 steps, the last at lr 0.5, and rank 1 is in `session.state_dict`"
        " after 2 steps, the last at lr 0.25",
        "rank 0 is in `session.predict` after 1 step in `session.averaged()`, and rank 1 is in `session.predict` after"
        " 1 step",
    ]  # fmt: skip
    assert not (tmp_path / "apart").exists()


def last() -> str:
    """Return the error of a rank whose other has ended."""
    rank = torch.distributed.get_rank()
    together = Lockstep(rank, 2, torch.device("cpu"))
    together.meet("session.step")  # one that ends while another still connects to it is another error
    if rank == 1:
        return ""
    with pytest.raises(PeerLost) as error:
        together.meet("session.save")
    return "\n".join([str(error.value), *error.value.__notes__])


def test_a_rank_that_calls_after_the_others_have_ended_is_told_so() -> None:
    said, _ = run_ranks(last, 2)
    assert said.startswith("rank 0 is in `session.save`, and another rank has ended, or takes too long: ")
    assert "\nlook for the first error of another rank; if there is none, all ranks must call the same methods" in said
    assert "GLHF" not in said


def many() -> list[list[int]]:
    rank = torch.distributed.get_rank()
    return Lockstep(rank, 2, torch.device("cpu")).meet("a", [100 * rank + number for number in range(70)])


def test_rows_longer_than_what_is_exchanged_at_a_time_arrive_whole() -> None:
    assert run_ranks(many, 2) == [[list(range(70)), list(range(100, 170))]] * 2


def test_gradients_of_weights_that_were_changed_since_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    with parc.load(build(tmp_path, ONE)) as session:
        session.save(tmp_path / "kept")
        first, second = session.gradients(batch(0)), session.gradients(batch(1))
        session.update(first)
        weights = session.state_dict()
        with pytest.raises(parc.RunError, match=r"^\[P0419\] these gradients are of other weights: .* has changed"):
            session.update(second)
        late = session.gradients(batch(1))
        session.restore(tmp_path / "kept")
        with pytest.raises(parc.RunError, match="these gradients are of other weights"):
            session.update(late)
        session.step(batch(0))
        assert session.step_number == 1
        torch.testing.assert_close(session.state_dict(), weights, rtol=0, atol=0)
        session.gradients(batch(1))  # only looked at
        session.update(session.gradients(batch(1)))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 4),
    "warmup": lambda optimizer: LambdaLR(optimizer, lambda step: step / 4),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_over_the_sessions_optimizer_is_refused_unless_steps_take_its_rate(
    name: str, tmp_path: Path
) -> None:
    own = SCHEDULERS[name](torch.optim.SGD([torch.zeros(1)], lr=1e-2))
    with parc.load(build(tmp_path, ONE)) as session:
        scheduler = SCHEDULERS[name](session.optimizer)
        with pytest.raises(parc.RunError, match=r"^\[P0423\] .* takes the plan's rate instead; write it in the plan"):
            session.step(batch(0))
        assert session.step_number == 0
        for step in range(3):
            report = session.step(batch(step), lr=float(scheduler.get_last_lr()[0]))
            assert report.lr == own.get_last_lr()[0]
            scheduler.step()
            own.optimizer.step()
            own.step()


def test_a_rate_that_is_set_in_the_optimizer_is_refused(tmp_path: Path) -> None:
    with parc.load(build(tmp_path, ONE)) as session:
        session.step(batch(0))
        session.optimizer.param_groups[0]["lr"] = 3e-4
        with pytest.raises(parc.RunError, match=r"^\[P0423\] `lr` of the optimizer was set to 0.0003, and an update"):
            session.step(batch(1))
        for wrong in (math.nan, math.inf, -1e-3):
            with pytest.raises(parc.RunError, match=r"^\[P0423\] `lr` of this step is \S+, which is no learning rate"):
                session.step(batch(1), lr=wrong)
        assert session.step(batch(1), lr=3e-4).step == 2
        assert session.step(batch(2)).lr == 1e-2
