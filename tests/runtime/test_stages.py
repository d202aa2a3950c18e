"""Pipelines: roles that run different stages, simulated and over gloo, train like the model that is not cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from parc.checking.checks import case_of
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import REDUCE, Action
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.runtime.backends.in_process import Stuck
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.model_run import Case
from parc.runtime.compare.plain import reference
from parc.runtime.compare.simulate import Simulation, compare
from parc.runtime.launch import failures
from parc.runtime.launch.failures import failure_of, leave_failure, read_failure
from parc.runtime.launch.launch import _explained, _outcome
from parc.runtime.ranks.communication import PeerLost
from parc.runtime.ranks.faults import RunError
from parc.runtime.session.session import Session
from parc.runtime.state.opening import open_build
from parc.runtime.step import HANDLERS
from tests.runtime.ranks import run_ranks
from tests.runtime.staged import MICROBATCHES, batch, roles, staged, write

MESHES = [("pp=2", 2), ("dp=2, pp=2", 2), ("pp=2, dp=2", 2), ("pp=4", 4)]


@cache
def case(mesh: str, ranks: int) -> Case:
    """The plan, run by stages."""
    with TemporaryDirectory() as folder:
        compilation = compiled(Path(folder), mesh)
        return replace(case_of(compilation), roles=roles(mesh, ranks))


def compiled(folder: Path, mesh: str) -> Compiled:
    """The plan without its stages."""
    return compile_plan(read_plan(write(folder, mesh)), folder)


def built(folder: Path, mesh: str) -> Path:
    """A build of the plan without its stages."""
    compilation = compiled(folder, mesh)
    out = folder / "build"
    write_build(compilation.to_write(report_of(compilation)), out)
    return out


# ---- simulated


@pytest.mark.parametrize(("mesh", "ranks"), MESHES)
def test_stages_train_as_the_model_that_is_not_cut(mesh: str, ranks: int) -> None:
    agreement = compare(case(mesh, ranks))
    assert agreement.steps == 3
    assert agreement.largest < TOLERANCE, agreement.worst


def test_a_rank_holds_the_parameters_of_its_stages_alone() -> None:
    simulation = Simulation(case("pp=4", 4))
    assert [list(state.parameters) for state in simulation.states] == [["tied"], ["second"], ["third"], ["tied"]]


def test_evaluation_hands_forward_results_on_and_no_gradients() -> None:
    from parc.runtime.step import Stepper

    simulation = Simulation(case("dp=2, pp=2", 2))
    parts = [{name: value[2 * m : 2 * m + 2].double() for name, value in batch(0).items()} for m in range(MICROBATCHES)]
    trained = simulation.run(Stepper.gradients, parts, 0)
    found = simulation.run(Stepper.loss, parts, 0)
    assert {float(result.loss) for result in found} == {float(trained[0].loss)}
    assert not any(result.gradients for result in found)


def test_copies_of_a_tied_parameter_that_differ_are_seen() -> None:
    simulation = Simulation(case("pp=4", 4))
    simulation.states[3].parameters["tied"][0, 0] += 1e-3
    assert simulation.parameter_spread()["tied"] == pytest.approx(1e-3)


def test_roles_that_all_wait_are_named_at_once() -> None:
    made = case("pp=2", 2)
    first = made.roles["pp0"]
    lacking = tuple(action for action in first.actions if action != Action(0, "SEND_F", 1))
    broken = replace(made, roles={**made.roles, "pp0": replace(first, actions=lacking)})
    begin = time.monotonic()
    with pytest.raises(Stuck, match=r"role 0 waits for .*; role 1 waits for 0SEND_F1 of stage 0"):
        Simulation(broken).step([batch_of(m) for m in range(MICROBATCHES)], 0)
    assert time.monotonic() - begin < 5


def test_an_error_in_one_role_ends_the_others() -> None:
    made = case("pp=4", 4)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    simulation = Simulation(made)
    simulation.steppers[2].machines["2F"].watch = fail
    with pytest.raises(ZeroDivisionError, match="planted"):
        simulation.step([batch_of(m) for m in range(MICROBATCHES)], 0)


def test_the_first_difference_of_stages_is_found() -> None:
    from parc.checking.verification import first_difference

    assert first_difference(case("dp=2, pp=2", 2)) is None


def test_a_stage_keeps_what_its_microbatches_under_way_saved() -> None:
    """Two microbatches of 2 x 4 float64 are under way: stage 1 saves two values of each, stage 2 one, and while it runs
    a backward it holds gradients too."""
    simulation = Simulation(case("pp=4", 4), account=True)
    simulation.step([batch_of(m) for m in range(MICROBATCHES)], 0)
    value = 2 * 4 * 8
    found = {stage: peak for stepper in simulation.steppers for stage, peak in stepper.peak_saved_bytes.items()}
    assert found == {0: value, 1: (2 * 2 + 2) * value, 2: (2 + 1) * value, 3: 2 * 2 * value}


def batch_of(microbatch: int) -> dict[str, torch.Tensor]:
    """Return one microbatch of a batch, in float64."""
    return {name: value[2 * microbatch : 2 * microbatch + 2].double() for name, value in batch(0).items()}


# ---- over gloo


def session_of(path: str, mesh: str, trace: bool = False) -> Session:
    return Session(staged(open_build(path), mesh, 2), torch.device("cpu"), trace=trace)


def train(path: str, mesh: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], float, list[str]]:
    """Train three steps; return their reports, the whole state, another batch's loss, and the tensors that this
    rank holds."""
    with session_of(path, mesh) as session:
        reports = [session.step(batch(step)) for step in range(3)]
        figures = [(report.loss, report.grad_norm) for report in reports]
        at, places = session.coordinates.get("dp", 0), session.mesh.world // 2
        with pytest.raises(RunError, match="`x` of rank 1 is not that of rank 0"):
            session.gradients(batch(session.rank))
        own = {name: value.unflatten(0, (MICROBATCHES, places, -1))[:, at].flatten(0, 1)
               for name, value in batch(3).items()}  # fmt: skip
        loss = float(session.gradients(batch(3)).loss)
        assert float(session.gradients(local=own).loss) == loss
        return figures, session.state_dict(), loss, sorted(session.state.parameters)


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2, pp=2"])
def test_real_ranks_train_as_the_plain_module(tmp_path: Path, mesh: str) -> None:
    path = built(tmp_path, mesh)
    plain = reference(path)
    expected = [plain.step(batch(step)) for step in range(3)]
    ranks = run_ranks(train, 2 if mesh == "pp=2" else 4, str(path), mesh)
    for figures, state, evaluated, _ in ranks:
        assert [loss for loss, _ in figures] == pytest.approx([report.loss for report in expected], rel=1e-5)
        assert [norm for _, norm in figures] == pytest.approx([report.grad_norm for report in expected], rel=1e-5)
        assert evaluated == ranks[0][2]
        assert list(state) == list(plain.module.state_dict())
        for name, value in plain.module.state_dict().items():
            assert torch.equal(state[name], ranks[0][1][name])
            assert torch.allclose(state[name], value, atol=1e-6), name
    assert (ranks[0][3], ranks[1][3]) == (["third", "tied"], ["second", "tied"])
    plain.close()


def save_and_restore(path: str, mesh: str, folder: str) -> list[float]:
    """Do two steps, a checkpoint and a third step; then the third again from the checkpoint."""
    with session_of(path, mesh) as session:
        for step in range(2):
            session.step(batch(step))
        session.save(f"{folder}/checkpoint")
        third = session.step(batch(2)).loss, session.step(batch(3)).loss
        session.restore(f"{folder}/checkpoint")
        again = session.step(batch(2)).loss, session.step(batch(3)).loss
        return [*third, *again]


def test_a_checkpoint_of_stages_is_of_the_whole_model(tmp_path: Path) -> None:
    path = built(tmp_path, "pp=2")
    for losses in run_ranks(save_and_restore, 2, str(path), "pp=2", str(tmp_path)):
        assert losses[:2] == losses[2:]
    (tmp_path / "one").mkdir()
    alone = built(tmp_path / "one", "")
    with Session(open_build(alone), torch.device("cpu")) as session:
        session.restore(tmp_path / "checkpoint")
        assert session.step(batch(2)).loss == pytest.approx(losses[0], rel=1e-5)
        assert session.step(batch(3)).loss == pytest.approx(losses[1], rel=1e-5)


def traced(path: str, file: str) -> None:
    """Do two steps with a trace."""
    with session_of(path, "pp=2", trace=True) as session:
        for step in range(2):
            session.step(batch(step))
        session.write_trace(file)


def test_a_trace_has_every_action_of_every_rank_in_its_order(tmp_path: Path) -> None:
    path = built(tmp_path, "pp=2")
    run_ranks(traced, 2, str(path), str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    expected = roles("pp=2", 2)
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"rank 0 (pp0)", "rank 1 (pp1)"}
    spans = {rank: [e for e in events if e["ph"] == "X" and e["pid"] == rank] for rank in (0, 1)}
    for rank, role in enumerate(expected.values()):
        second = [e for e in spans[rank] if e["args"]["step"] == 2]
        names = [e["name"] for e in second if e["name"] != "sends"]
        assert names == [str(action) for action in role.actions]
        assert {e["name"][1:5] for e in second if e["cat"] == "wait"} - {"ends"} == {"RECV"}
        ends = [e["ts"] + e["dur"] for e in second]
        assert ends == sorted(ends)
    at = {(e["name"], e["args"]["step"]): e for found in spans.values() for e in found}
    for step in (1, 2):  # one clock: nothing is received before it was sent
        sent, received = at["0SEND_F0", step], at["1RECV_F0", step]
        assert received["ts"] + received["dur"] >= sent["ts"]


def die(path: str, at: str) -> Any:
    """End rank 0 in the middle of a step; return the message of rank 1."""
    session = session_of(path, "pp=2")
    rank = session.rank
    session.step(batch(0))
    if rank == 0:
        stepper = session._by_sizes().stepper
        send = stepper.backend.send

        def broken(message: Any, pieces: Any) -> Any:
            if str(message) == at:
                os._exit(0)
            return send(message, pieces)

        stepper.backend.send = broken  # type: ignore[method-assign]
    try:
        session.step(batch(1))
    except RuntimeError as error:
        failure = failure_of(rank, error)
        return failure.message, failure.follows
    return None


def test_a_rank_whose_peer_died_says_what_it_waited_for(tmp_path: Path) -> None:
    path = built(tmp_path, "pp=2")
    with pytest.raises(AssertionError, match="a rank died"):
        run_ranks(die_and_tell, 2, str(path), "0SEND_F1", str(tmp_path / "said"))
    message, follows = json.loads((tmp_path / "said").read_text())
    assert "rank 1 waited for 0SEND_F1 of stage 0 (rank 0)" in message
    assert follows


def test_the_launcher_tells_who_waited_for_a_rank_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    leave_failure(
        failure_of(0, PeerLost("rank 0 waited for 1SEND_B2 of stage 1 (rank 1)", "Connection closed by peer"))
    )
    killed = read_failure(1, -9, Path("<N/A>"))
    failure = _outcome([4], *_explained([killed], tmp_path, late=False)).failure
    assert failure is not None
    assert failure.text().splitlines() == [
        "rank 1 failed: it was killed by SIGKILL, often because memory ran out",
        "rank 0 waited for 1SEND_B2 of stage 1 (rank 1)",
    ]


def test_a_rank_that_hung_and_was_killed_in_the_end_is_not_said_to_lack_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    lost = PeerLost("rank 0 waited for 1SEND_B2 of stage 1 (rank 1)", "Application timeout caused pair closure")
    leave_failure(failure_of(0, lost.during("action 0RECV_B2 of step 3")))
    late, hung = read_failure(0, 4, tmp_path / "error.json"), read_failure(1, -9, Path("<N/A>"))
    failure = _outcome([4], *_explained([hung, late], tmp_path, late=late.late)).failure
    assert failure is not None
    assert failure.text().splitlines() == [
        "rank 0 failed: it waited too long for another rank",
        "rank 0 waited for 1SEND_B2 of stage 1 (rank 1) in action 0RECV_B2 of step 3: "
        "Application timeout caused pair closure",
    ]
    # Ranks 1 and 2 end after the launcher found them running, and before it asks where they are.
    monkeypatch.setattr(failures, "_FAILING_S", 0.0)
    monkeypatch.setattr(failures, "_state", lambda process: "S")
    for rank in (1, 2):
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        (tmp_path / f"process{rank}").write_text(f"{ended.pid} {rank}")
    hanging = failures.Hanging(tmp_path)
    hanging._look()
    assert not hanging.reports


def hang(path: str, file: str) -> None:
    """Let rank 0 leave before the sums of a step; the other's message goes to a file."""
    session = session_of(path, "pp=2")
    rank = session.rank
    session.step(batch(0))
    if rank == 0:
        HANDLERS[REDUCE] = lambda *_: os._exit(0)
    try:
        session.step(batch(1))
    except RuntimeError as error:
        Path(file).write_text(failure_of(rank, error).waited)


def test_a_rank_whose_peers_died_says_which_sum_it_waited_in(tmp_path: Path) -> None:
    path = built(tmp_path, "pp=2")
    with pytest.raises(AssertionError, match="a rank died"):
        run_ranks(hang, 2, str(path), str(tmp_path / "said"))
    said = (tmp_path / "said").read_text()
    assert said.startswith("rank 1 waited for the other ranks of `parc.all_reduce") and "over `pp`" in said
    assert said.endswith("in action 1REDUCE of step 2")


def die_and_tell(path: str, at: str, file: str) -> None:
    """Do as ``die``, with the message in a file: the other rank's death ends the test's pipes."""
    said = die(path, at)
    Path(file).write_text(json.dumps(said))


def poisoned(path: str, mesh: str) -> tuple[str, tuple[str, ...]]:
    """Do a step whose loss overflows in the last stage."""
    with session_of(path, mesh) as session:
        bad = batch(0)
        bad["x"][0] = 3e38
        with pytest.raises(RunError) as error:
            session.step(bad)
        return error.value.message, error.value.notes


def test_every_rank_names_the_stage_that_made_the_first_bad_number(tmp_path: Path) -> None:
    path = built(tmp_path, "pp=2")
    first, second = run_ranks(poisoned, 2, str(path), "pp=2")
    assert first == second
    assert "on rank 0" in first[1][0]
