"""State that ``offload`` lines keep away: in files that end with the run, with the numbers of a run without them."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import parc
from parc.checking.reports import report_of
from parc.compiler.build.directory import read_build, write_build
from parc.compiler.plan.plan import read_plan
from parc.grammar.codes import OFFLOAD_FOLDER
from parc.runtime.ranks.faults import RunError
from parc.runtime.session.session import Session
from parc.runtime.state.offload import MappedFiles
from tests.captured_once import compile_once
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import EXAMPLES, ONE, PLAN, batch, build

CPU = torch.device("cpu")

ALL = 'offload optimizer, parameters, activations to "kept"\n'
SGD = PLAN.replace("adamw lr 1e-2 eps 1e-5 weight_decay 0.1 clip 1.0", "sgd lr 1e-2 momentum 0.9 weight_decay 0.1")


def mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return "/kept/rank" in line
    return False


def trained(session: Session, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [session.step(batch(session.step_number)).loss for _ in range(steps)]
    return losses, session.state_dict()


def same(first: tuple[Any, Any], second: tuple[Any, Any]) -> bool:
    """Return whether losses and weights are equal to the bit."""
    return first[0] == second[0] and all(torch.equal(value, second[1][name]) for name, value in first[1].items())


@pytest.mark.parametrize("plan", [PLAN, SGD], ids=["adamw", "sgd"])
def test_state_in_files_is_trained_to_the_same_bits(tmp_path: Path, plan: str) -> None:
    plain, kept = parc.load(build(tmp_path / "a", ONE, plan), CPU), build(tmp_path / "b", ALL, plan)
    plain.save(tmp_path / "unbegun")
    expected = trained(plain)
    with parc.load(kept, CPU) as session:
        assert [path.name for path in (tmp_path / "b" / "kept").iterdir() if not path.name.startswith(".")] == ["rank0"]
        room = {word: dict(place._have) for word, place in session.offloaded._places.items()}  # type: ignore[union-attr]
        found = trained(session)
        slots = [slot for state in session.optimizer.state.values() for slot in state.values() if slot.dim()]
        assert len(slots) == len(session.state.parameters) * (2 if plan is PLAN else 1)
        assert all(map(mapped, [*session.state.parameters.values(), *slots]))
        # what was reserved before the first step was enough
        assert room == {word: dict(place._have) for word, place in session.offloaded._places.items()}  # type: ignore[union-attr]
        session.save(tmp_path / "saved")
        further = trained(session)
    assert same(found, expected)
    assert not list((tmp_path / "b" / "kept").iterdir())
    plain.restore(tmp_path / "saved")
    assert same(trained(plain), further)
    with parc.load(kept, CPU) as session:
        session.restore(tmp_path / "saved")
        assert same(trained(session), further)
        session.restore(tmp_path / "unbegun")  # has no state of the optimizer
        assert same(trained(session), expected)
        assert all(map(mapped, (slot for state in session.optimizer.state.values() for slot in state.values()
                                if slot.dim())))  # fmt: skip


def test_a_buffer_is_free_when_nothing_shares_its_storage(tmp_path: Path) -> None:
    files = MappedFiles(tmp_path, "activations", "here")
    files.reserve({24: 2, 6: 1})
    assert not list(tmp_path.iterdir())  # the file has no name
    values = torch.arange(6.0).view(2, 3)
    first, second = files.empty_like(values).copy_(values), files.empty_like(values.t().contiguous().t())
    assert second.stride() == (1, 2)
    view, address = first[1:], first.data_ptr()
    assert not files._free[24]
    del first
    assert not files._free[24] and torch.equal(files.load(view, torch.device("cpu")), values[1:])
    del view
    assert len(files._free[24]) == 1
    assert files.empty_like(values).data_ptr() == address  # and free again
    assert files.empty_like(torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    third = [files.empty_like(values) for _ in range(3)]  # more than was reserved
    assert len({value.data_ptr() for value in third}) == 3 and files._have[24] == 4
    assert files.empty_like(torch.zeros(0, 3)).shape == (0, 3)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_cannot_be_used_is_an_error_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build(tmp_path, ALL)
    other = tmp_path / "kept" / "rank0" / "optimizer"
    other.parent.mkdir(parents=True)
    other.write_text("of another program")
    with parc.load(made):
        with pytest.raises(RunError, match=rf"`kept` has .* rank 0: process {os.getpid()} on \S+ since 2") as held:
            parc.load(made)
        assert held.value.code is OFFLOAD_FOLDER
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            RunError, match=r"`kept` has too little space: this rank needs \S+ KiB for activations, and .* free"
        ):
            parc.load(made)
    parc.load(made).close()  # nothing is held by the one that failed
    assert other.read_text() == "of another program"
    shutil.rmtree(tmp_path / "kept")
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(RunError, match="`kept` cannot be written: "):
        parc.load(made)


def test_a_disk_that_is_full_later_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(tmp_path, ALL, PLAN.replace("S=8", "S=4..8 by 4"))
    small = {name: value[:, :4] for name, value in batch(0).items()}
    with parc.load(made, sizes={"S": 4}) as session:
        loss = session.step(small).loss
        before = {name: value.clone() for name, value in session.state.parameters.items()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(RunError, match="for activations"):
                session.step(batch(1))  # is longer
            assert session.step_number == 1
            assert all(torch.equal(value, session.state.parameters[name]) for name, value in before.items())
            assert session.step(small).loss < loss  # goes on in the room that it has
        session.step(batch(1))


def ranks_train(folder: str) -> dict[str, tuple[tuple[list[float], dict[str, torch.Tensor]], int]]:
    """Train both builds on one rank, save, and restore. Return losses, weights, and the number of tensors in files."""
    ends = {}
    for name in ("kept", "plain"):
        with parc.load(f"{folder}/{name}-build") as session:
            losses = [session.step().loss]
            session.save(f"{folder}/{name}-saved")
            session.restore(f"{folder}/{name}-saved")
            losses.append(session.step().loss)
            slots = [slot for state in session.optimizer.state.values() for slot in state.values()]
            in_files = sum(map(mapped, [*session.state.parameters.values(), *slots]))
            ends[name] = (losses, session.state_dict()), in_files
    return ends


def test_four_processes_train_llama_out_of_files(tmp_path: Path) -> None:
    text = (EXAMPLES / "llama-offload.parc").read_text().replace("S=128", "S=16")
    (tmp_path / "llama.py").write_text((EXAMPLES / "llama.py").read_text())
    for name, plan in {"kept": text, "plain": re.sub(r"\noffload.*", "", text)}.items():
        (tmp_path / f"{name}.parc").write_text(plan)
        defines = {"layers": "2", "width": "32", "place": "kept"}
        compilation = compile_once(read_plan(tmp_path / f"{name}.parc", defines), tmp_path)
        write_build(compilation.to_write(report_of(compilation)), tmp_path / f"{name}-build")
    parameters = len(read_build(tmp_path / "kept-build").types)
    for ends in run_ranks(ranks_train, 4, str(tmp_path)):
        assert same(ends["kept"][0], ends["plain"][0])
        assert (ends["kept"][1], ends["plain"][1]) == (3 * parameters, 0)
    (kept,), (plain,) = (read_build(tmp_path / f"{name}-build").report["memory"] for name in ("kept", "plain"))
    assert kept["offloaded"]["optimizer"] == plain["optimizer"] and kept["optimizer"] == 0
    assert kept["offloaded"]["parameters"] == plain["parameters"] and kept["parameters"] == 0
    assert kept["peak_bytes"] + sum(kept["offloaded"].values()) >= plain["peak_bytes"] > kept["peak_bytes"]
