"""Updates and checkpoints: layouts of gradients, rates of one step, states that are restored whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import parc
from parc.compiler.build.folders import FolderError, FolderKind, current, replacing
from parc.grammar.codes import BAD_STATE, FOLDER_HELD
from parc.runtime.ranks.faults import RunError
from parc.runtime.state import checkpoint
from parc.runtime.state.checkpoint import target_held
from parc.runtime.state.opening import checkpoint_bytes, open_build
from parc.runtime.state.optimizer import make_optimizer, update
from tests.runtime.tiny import ONE, batch, build

ADAMW = {"name": "adamw", "lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "groups": [], "clip": None}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of one rank."""
    return build(tmp_path_factory.mktemp("restore"), ONE)


def test_a_gradient_may_lie_otherwise_in_memory_than_its_parameter() -> None:
    wanted = None
    for transposed in (False, True):
        parameters = {"w": torch.arange(12.0).reshape(3, 4) / 7}
        gradient = (torch.arange(12.0).reshape(3, 4) - 5) / 3
        given = gradient.t().contiguous().t() if transposed else gradient
        optimizer = make_optimizer(parameters, ADAMW)
        assert optimizer.defaults["fused"]
        update(optimizer, ADAMW, 1, parameters, {"w": given}, None, 0.1)
        assert torch.equal(given, gradient)
        wanted = parameters["w"] if wanted is None else wanted
        assert torch.equal(parameters["w"], wanted)


@pytest.mark.parametrize("norm", [0.5, 8.0])
def test_gradients_are_clipped_as_torch_clips_them(norm: float) -> None:
    line = {**ADAMW, "name": "sgd", "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "clip": 2.0}
    gradient = torch.full((4,), norm / 2)
    parameters = {"w": torch.zeros(4)}
    update(make_optimizer(parameters, line), line, 1, parameters, {"w": gradient.clone()}, torch.tensor(norm), 1.0)
    plain = torch.zeros(4, requires_grad=True)
    plain.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([plain], 2.0)
    assert torch.allclose(-parameters["w"], plain.grad, rtol=1e-6)


def test_a_given_rate_is_for_one_update(made: Path) -> None:
    with parc.load(made) as session:
        assert [session.step(batch(0), lr).lr for lr in (None, 5.0, None)] == [1e-2, 5.0, 1e-2]
        assert session.step(batch(0)).lr == 1e-2


def test_what_a_checkpoint_does_not_hold_does_not_stay(made: Path, tmp_path: Path) -> None:
    with parc.load(made) as session:
        session.save(tmp_path / "first")
        losses = [session.step(batch(step)).loss for step in range(4)]
        session.restore(tmp_path / "first")
        assert session.step_number == 0 and not session.optimizer.state
        assert [session.step(batch(step)).loss for step in range(4)] == losses


def _reshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["optimizer.exp_avg.embed.weight"] = torch.zeros(3, 3)


def _retyped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["optimizer.exp_avg.embed.weight"] = tensors["optimizer.exp_avg.embed.weight"].double()


def _dropped(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["optimizer.exp_avg_sq.embed.weight"]


def _before_the_first(tensors: dict[str, torch.Tensor]) -> None:
    tensors["optimizer.step.embed.weight"] = torch.tensor(-5.0)


def _not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["optimizer.step.embed.weight"] = torch.tensor(float("nan"))


def _foreign(tensors: dict[str, torch.Tensor]) -> None:
    tensors["optimizer.exp_avg.nothing"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_reshaped, r"`optimizer.exp_avg.embed.weight` is float32 \[3, 3\] there"),
        (_retyped, r"is float64 \[256, 16\] there, its parameter float32 \[256, 16\]"),
        (_dropped, r"`embed.weight` has .* alone"),
        (_before_the_first, r"`optimizer.step.embed.weight` is -5.0, which is no number of steps"),
        (_not_a_number, r"`optimizer.step.embed.weight` is nan, which is no number of steps"),
        (_foreign, "`optimizer.exp_avg.nothing` is no state of `adamw`"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    made: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    with parc.load(made) as session:
        session.step(batch(0))
        session.save(tmp_path / "saved")
        tensors = load_file(tmp_path / "saved" / "state.safetensors")
        change(tensors)
        tensors["parameter.embed.weight"] = torch.zeros(256, 16)
        save_file(tensors, tmp_path / "saved" / "state.safetensors")
        (tmp_path / "saved" / "state.json").write_text('{"step": 1, "optimizer": "adamw"}')  # as checkpoints once were
        before, state = session.state_dict(), dict(session.optimizer.state)
        with pytest.raises(RunError, match=message):
            session.restore(tmp_path / "saved")
        assert session.step_number == 1 and session.optimizer.state == state
        assert all(torch.equal(value, before[name]) for name, value in session.state_dict().items())


TEXTS = FolderKind("a text", lambda folder: ("a.txt",) if (folder / "a.txt").is_file() else None)


def replace(place: Path, text: str) -> None:
    with replacing(place, TEXTS) as fresh:
        (fresh / "a.txt").write_text(text)


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    replace(place, "first")
    place.rename(tmp_path / ".saved.old")
    assert (current(place) / "a.txt").read_text() == "first"
    with pytest.raises(ZeroDivisionError), replacing(place, TEXTS):
        raise ZeroDivisionError
    assert (place / "a.txt").read_text() == "first"
    replace(place, "second")
    assert (place / "a.txt").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_kill_at_any_rename_leaves_a_folder_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "saved"
    replace(place, "first")
    child = os.fork()
    if child == 0:
        rename = Path.rename

        def dies(self: Path, target: Path) -> Path:
            made = rename(self, target)
            os._exit(9 if self == place else 0)
            return made

        monkeypatch.setattr(Path, "rename", dies)
        replace(place, "second")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not place.exists() and (current(place) / "a.txt").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 3  # the old one, what the dead process had written, and its lock
    replace(place, "third")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"] and (place / "a.txt").read_text() == "third"


def test_many_processes_replace_one_folder_at_once(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    children = []
    for number in range(4):
        children.append(os.fork())
        if children[-1] == 0:
            code = 1
            try:
                for _ in range(25):
                    replace(place, str(number))
                code = 0
            finally:
                os._exit(code)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"] and (place / "a.txt").read_text() in "0123"


def test_a_folder_is_kept_to_one_holder_until_it_ends(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "HELD_S", 0.0)
    place, size = tmp_path / "below" / "saved", checkpoint_bytes(open_build(made))
    with target_held(place, size):
        with pytest.raises(RunError, match=rf"another run saves to `.*`: process {os.getpid()} on \S+ since 2") as held:
            target_held(place, size).__enter__()
        assert held.value.code is FOLDER_HELD
        replace(place, "by the holder")
    assert [path.name for path in place.parent.iterdir()] == ["saved"]
    monkeypatch.setattr(checkpoint, "HELD_S", 20.0)
    with ExitStack() as other:
        other.enter_context(target_held(tmp_path / "other", size))
        monkeypatch.setattr(time, "sleep", lambda _: other.close())  # the holder ends while the next one waits
        with target_held(tmp_path / "other", size):
            assert "; waiting 20 s for its end\n" in capsys.readouterr().err
        monkeypatch.undo()
    child = os.fork()
    if child == 0:
        target_held(tmp_path / "left", size).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with target_held(tmp_path / "left", size):  # what a killed process held is free
        pass
    for folder, asked, message in (
        (Path("/proc/nowhere/saved"), size, "cannot be written: "),
        (tmp_path / "saved", 1 << 60, r"a checkpoint is 1048576.0 TiB, and \S+ \S+ are free there"),
    ):
        with pytest.raises(RunError, match=message) as fault:
            target_held(folder, asked).__enter__()
        assert fault.value.code is BAD_STATE and fault.value.help
    with parc.load(made) as session:
        session.step(batch(0))
        session.save(tmp_path / "saved")
    assert size < (tmp_path / "saved" / "state.safetensors").stat().st_size < 1.1 * size + 20_000


@pytest.mark.parametrize("step", ["-5", "2.5", "true", '"3"', "1e400", "NaN", "null", str(10**30), "[1]"])
def test_a_number_of_steps_that_makes_no_sense_is_said(made: Path, tmp_path: Path, step: str) -> None:
    with parc.load(made) as session:
        session.save(tmp_path / "saved")
        (tmp_path / "saved" / "state.json").write_text(f'{{"optimizer": "adamw", "step": {step}}}')
        said = (
            "`NaN` is no number of JSON"
            if step == "NaN"
            else r"its state\.json has step .*, which is no number of steps done"
        )
        with pytest.raises(RunError, match=said) as fault:
            session.restore(tmp_path / "saved")
        assert fault.value.code is BAD_STATE


def test_links_are_followed_and_the_current_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    replace(tmp_path / "link", "there")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "a.txt").read_text() == "there"
    monkeypatch.chdir(tmp_path / "disk")
    for path in (".", "..", str(tmp_path / "disk")):
        with pytest.raises(FolderError, match="is the current folder or one above it"):
            replace(Path(path), "no")


def test_a_checkpoint_is_found_after_a_kill(made: Path, tmp_path: Path) -> None:
    with parc.load(made) as session:
        session.step(batch(0))
        session.save(tmp_path / "saved")
        (tmp_path / "saved").rename(tmp_path / ".saved.old")
        session.step(batch(1))
        session.restore(tmp_path / "saved")
        assert session.step_number == 1
        session.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "state.json").read_text())["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    with parc.load(made) as session, pytest.raises(RunError, match="nothere` does not exist"):
        session.restore(tmp_path / "nothere")


def test_a_checkpoint_that_is_removed_in_part_hinders_nobody(made: Path, tmp_path: Path) -> None:
    files = ("state.safetensors", "index.json", "state.json")  # in the order in which they are removed
    with parc.load(made) as session:
        session.save(tmp_path / "whole")
        for count in range(len(files) + 1):
            shutil.copytree(tmp_path / "whole", tmp_path / "saved", dirs_exist_ok=True)
            shutil.copytree(tmp_path / "whole", tmp_path / ".saved.old")
            for name in files[:count]:
                (tmp_path / ".saved.old" / name).unlink()
            session.save(tmp_path / "saved")
            assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "whole"]
        (tmp_path / "whole" / "state.safetensors").unlink()
        (tmp_path / "whole" / "index.json").unlink()
        (tmp_path / "whole" / "state.json").write_text('{"step": 1, "optimizer": "adam", "index": "of another tool"}')
        with pytest.raises(RunError, match="is a checkpoint whose files parc does not know"):
            session.save(tmp_path / "whole")
