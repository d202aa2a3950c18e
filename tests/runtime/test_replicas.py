"""The comparison of what ranks hold alike: hashes with an exchange that is made anyway, and tensors where they
differ."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch

import parc
from parc.compiler.build.directory import read_build
from parc.compiler.initial.counter import digest
from parc.compiler.layout.mesh import Mesh
from parc.runtime.launch.train import Options, train
from parc.runtime.observe.observer import Observe
from parc.runtime.observe.writers import FigurePlaces
from parc.runtime.ranks.lockstep import Lockstep
from parc.runtime.ranks.replicas import Bounds, ReplicaDifference, Replicas, Spread, chains_of
from parc.runtime.session.session import Session
from parc.runtime.state.opening import build_mesh
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import BOTH, DATA, ONE, build

# ---- hashes


def test_a_hash_goes_on_over_passes_of_any_length() -> None:
    """A pass takes 65,536 entries of float32."""
    seen = set()
    for entries in (65_536, 65_537, 200_001):
        tensor = torch.ones(entries)
        seen.add(int(digest(tensor)))
        for place in {0, 65_535, 65_536, entries - 1} & {*range(entries)}:
            tensor[place] = -1
            seen.add(int(digest(tensor)))
            tensor[place] = 1
        assert int(digest(tensor)) == int(digest(torch.ones(entries + 1)[1:])) in seen
    assert len(seen) == 3 + 2 + 3 + 4


def test_flipped_signs_of_two_entries_do_not_cancel() -> None:
    tensor = torch.ones(8, dtype=torch.float64)
    changed = tensor.clone()
    changed[[2, 5]] = -1
    assert int(digest(tensor)) != int(digest(changed)) != int(digest(-tensor)) != int(digest(tensor))


# ---- ranks and bounds


def test_ranks_of_one_place_hold_the_same_piece() -> None:
    mesh = Mesh.parse("pp=2, dp=2, tp=2")
    roles = [f"pp{rank // 4}" for rank in range(8)]
    assert chains_of(Spread(("tp",), ()), mesh, roles) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert chains_of(Spread(("tp",), ("pp0", "pp1")), mesh, roles) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert chains_of(Spread(("dp", "tp"), ()), mesh, roles) == []
    assert chains_of(Spread((), ("pp0",)), mesh, roles) == [[0, 1, 2, 3]]


def test_rounding_is_bounded_by_type_and_steps() -> None:
    narrow = torch.finfo(torch.bfloat16).eps
    bounds = Bounds(steps=100, eps=2**-23, rate=0.0)
    assert bounds.allowed("exp_avg", torch.float32, 2.0) == pytest.approx(16 * 10 * 2**-23 * 2)
    assert bounds.allowed("step", torch.float32, 9.0) == bounds.allowed("buffer", torch.int64, 9.0) == 0.0
    assert Bounds(100, narrow, 0.0).allowed("exp_avg", torch.float32, 2.0) == 2.0 / 16
    moved = Bounds(100, narrow, 1e-3)
    assert moved.allowed("exp_avg", torch.float32, 2.0) == 2.0 / 16
    for kind in ("parameter", "ema"):
        assert moved.allowed(kind, torch.float32, 2.0) == pytest.approx(16 * 10 * 2**-23 * 2.0 + 4 * 1e-3)
    long = Bounds(10_000, narrow, 1e-3).allowed("parameter", torch.float32, 2.0)
    assert long == pytest.approx(16 * 100 * 2**-23 * 2.0 + 16 * 100 * narrow * 1e-3)


def difference(first: list[float], second: list[float], dtype: torch.dtype = torch.float32) -> ReplicaDifference:
    found = ReplicaDifference(("parameter", "w"), (0, 1))
    for start in (0, 2):  # in pieces
        a, b = (torch.tensor(each[start : start + 2], dtype=dtype) for each in (first, second))
        found.compare(a, b)
    return found


def test_a_difference_is_the_largest_of_all_pieces() -> None:
    found = difference([1.0, 2.0, 3.0, -5.0], [1.0, 2.5, 3.0, -4.0])
    assert (found.entries, found.count, found.apart, found.at, found.values) == (4, 2, 1.0, 3, (-5.0, -4.0))
    assert found.sizes == (5.0, 4.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_rank_is_infinitely_apart(value: float) -> None:
    one, both = difference([1.0, 2, 3, value], [1.0, 2, 3, 4]), difference([value, 2, 3, 4], [value, 2, 3, 4])
    assert (one.apart, one.sizes, one.count) == (math.inf, (3.0, 4.0), 1)
    assert (both.apart, both.sizes, both.count) == (0.0, (4.0, 4.0), 0)


def test_whole_numbers_differ_where_floats_round() -> None:
    found = difference([1, 2, 3, 2**60], [1, 2, 3, 2**60 + 1], torch.int64)
    assert found.count == 1 and found.apart >= 1 and found.share == math.inf
    signs = difference([0.0, 1, 2, 3], [-0.0, 1, 2, 3])
    assert (signs.count, signs.apart, signs.share) == (1, 0.0, 0.0)


# ---- runs


CHECK = "check replicas every 2\n"


@pytest.mark.parametrize(("lines", "due"), [("", [1000]), (CHECK, [2, 4]), ("check replicas never\n", [])])
def test_a_plan_says_when_ranks_are_compared(lines: str, due: list[int], tmp_path: Path) -> None:
    made = read_build(build(tmp_path, DATA + lines))
    alone = parc.load(build(tmp_path, ONE, name="alone"))
    together = Lockstep(0, 2, alone.device)
    roles = [made.role_at({"dp": rank}) for rank in range(2)]
    replicas = Replicas(made, build_mesh(made), roles, together, alone.state, alone.optimizer)
    seen = []
    for step in (1, 2, 3, 4, 1000) if not due or due[0] > 4 else (1, 2, 3, 4):
        replicas.stepped(step)
        if together.passenger is not None:
            row = replicas.row()
            replicas.judge([row, row])
            seen.append(step)
    assert seen == due and together.passenger is None
    replicas.due()  # as before a checkpoint: the state was just compared, or never is
    assert together.passenger is None


def flip(session: Session, name: str, entry: int = 5, bit: int = 30) -> None:
    """Flip one bit of a weight on this rank: the highest of its exponent, if no other is named."""
    session.state.parameters[name].view(-1)[entry : entry + 1].view(torch.int32)[0] ^= 1 << bit


def end_of(session: Session, checkpoint: Path) -> tuple[str, int]:
    """Return the error of a step, and the step of the checkpoint that a later attempt to save leaves."""
    with pytest.raises(parc.RunError) as error:
        session.step()
    with pytest.raises(parc.RunError) as again:
        session.save(checkpoint)
    assert again.value.message == error.value.message and error.value.exit_code == 4
    return str(error.value), json.loads((checkpoint / "state.json").read_text())["step"]


def in_a_loop(path: str, folder: str) -> list[object]:
    checkpoint = Path(folder) / "checkpoint"
    said: list[object] = []
    with parc.load(path) as session, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        session.step()
        session.save(checkpoint)
        session.step()
        if session.rank == 1:
            flip(session, "blocks.0.mlp.up.weight")
        said += end_of(session, checkpoint)

        session.restore(checkpoint)
        session.step()
        if session.rank == 1:
            session.optimizer.state[session.state.parameters["embed.weight"]]["step"] += 1
        said += end_of(session, checkpoint)

        session.restore(checkpoint)
        session.step()
        if session.rank == 1:
            flip(session, "blocks.0.mlp.up.weight", bit=0)  # the last bit of the mantissa
        session.step()
        if session.rank == 1:
            flip(session, "blocks.0.mlp.up.weight", 6, bit=0)
        session.save(checkpoint)
        checked = session.replicas.last
        assert checked is not None and 0 < checked.apart < 1 and session.step_number == 3
        said.append([str(each.message) for each in warned])
    return said


def test_ranks_that_drift_apart_end_a_run_and_rounding_warns(tmp_path: Path) -> None:
    path = build(tmp_path, DATA + CHECK)
    first, second = run_ranks(in_a_loop, 2, str(path), str(tmp_path))
    flipped, flipped_at, counted, counted_at, warned = first
    assert second[:4] == first[:4] and second[4] == []
    assert flipped_at == counted_at == 1
    assert "[P0422] after step 2, parameter `blocks.0.mlp.up.weight` of rank 1 is not that of rank 0: 1 of " in flipped
    assert f"go on from the checkpoint `{tmp_path}/checkpoint`, which is after step 1" in flipped
    assert "`step` of `embed.weight` of rank 1 is not that of rank 0: 1 of 1 entries differs, at most by 1 " in counted
    (warning,) = warned  # of two checks that found it
    assert warning.startswith("after step 2, parameter `blocks.0.mlp.up.weight` of rank 1 is not that of rank 0: 1 of ")
    assert "; up to 0.04 is taken for rounding. A kernel that adds in another order each time may do this; " in warning


def four_ranks(path: str, folder: str) -> list[object]:
    checkpoint = Path(folder) / "checkpoint"
    said: list[object] = []
    with parc.load(path) as session:
        session.step()
        session.save(checkpoint)
        for rank, name in ((2, "norm.weight"), (3, "blocks.0.mlp.up.weight")):
            session.step()
            if session.rank == rank:
                flip(session, name)
            said += end_of(session, checkpoint)
            session.restore(checkpoint)
    return said


def test_of_four_ranks_the_odd_one_is_named(tmp_path: Path) -> None:
    path = build(tmp_path, BOTH + CHECK)
    said = run_ranks(four_ranks, 4, str(path), str(tmp_path))
    assert all(each == said[0] for each in said)
    norm, norm_at, shard, shard_at = said[0]
    assert "parameter `norm.weight` of rank 2 is not that of rank 1: 1 of 16 entries differs" in norm
    assert norm.endswith("\n  ranks 0, 1 and 3 agree, so look at rank 2")
    assert "parameter `blocks.0.mlp.up.weight` of rank 3 is not that of rank 1: 1 of 512 entries differs" in shard
    assert "agree, so" not in shard and norm_at == shard_at == 1


def in_a_run(path: str, folder: str) -> tuple[str, int]:
    checkpoint, metrics = Path(folder) / "run", Path(folder) / "metrics.jsonl"
    session = parc.load(path)

    def fault(report: parc.StepReport) -> None:
        if session.rank == 1 and report.step == 4:
            flip(session, "embed.weight")

    session.on_step(fault)
    observe = Observe(places=FigurePlaces(metrics=metrics))
    with pytest.raises(parc.RunError) as error:
        train(session, Options(6, observe, save=checkpoint, save_every=1))
    return str(error.value), json.loads((checkpoint / "state.json").read_text())["step"]


def test_a_run_ends_before_it_saves_what_one_rank_has_spoiled(tmp_path: Path) -> None:
    path = build(tmp_path, DATA + CHECK)
    first, second = run_ranks(in_a_run, 2, str(path), str(tmp_path))
    assert first == second and first[1] == 3
    assert "[P0422] after step 4, parameter `embed.weight` of rank 1 is not that of rank 0" in first[0]
    assert f"go on from the checkpoint `{tmp_path}/run`, which is after step 3" in first[0]
    _, *steps = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [step.get("replicas_apart") for step in steps] == [None, 0.0, None]
