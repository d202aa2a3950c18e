"""Temporary folders: what killed processes leave is removed, nothing else is, and a full disk is said in words."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest

from parc.cli import main
from parc.grammar.diagnostics import PlanError
from parc.grammar.scratch import line, line_held, remove_if_left, remove_left, scratch, watched_line
from parc.runtime.launch.lifeline import Lifeline
from parc.runtime.launch.voices import VOICES
from parc.runtime.ranks.faults import RunError
from parc.runtime.ranks.processes import STORE, join_processes
from tests.runtime.ranks import SERVER, run_ranks, start_server
from tests.runtime.tiny import DATA, build


def left(folder: Path) -> Path:
    """Return a folder whose maker has ended without removing it."""
    folder.mkdir()
    with line_held(folder):
        (folder / "said").write_text("step 1\n")
    return folder


def watch(folder: Path, ready: Path) -> None:
    """Be a rank that watches a line, and reads until it breaks."""
    reader = watched_line(folder)
    ready.touch()
    os.read(reader, 1)
    os.read(reader, 1)  # returns at once; the process ends, and only then lets go of the line


def test_only_what_killed_processes_of_this_user_have_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [left(tmp_path / f"parc-{kind}-1") for kind in ("run", "measure")]
    gone.append(tmp_path / "parc-run-4.left")
    gone[-1].mkdir()
    foreign = tmp_path / "parc-run-of-a-person"
    foreign.mkdir()
    (foreign / line()).write_text("no pipe")
    link = tmp_path / "parc-link"
    link.symlink_to(left(tmp_path / "elsewhere"))
    other_host = left(tmp_path / "parc-run-2")
    (other_host / line()).rename(other_host / "line.another-host.its-kernel")
    held = tmp_path / "parc-run-3"
    held.mkdir()
    with line_held(held):
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            remove_left(tmp_path)
        assert all(folder.exists() for folder in gone[:2]), "they are of another user"
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path))
            with scratch("run") as fresh:
                assert fresh.parent == tmp_path and not any(folder.exists() for folder in gone)
                remove_left(tmp_path)
                assert fresh.exists()
            assert not fresh.exists()
        assert {foreign, link, other_host, held, tmp_path / "elsewhere"} == {*tmp_path.iterdir()}


def test_a_rank_leaves_the_folder_to_those_that_still_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's store waits for the folder of its file for five minutes, with Python's lock: a rank could not end."""
    folder, ready = tmp_path / "run", tmp_path / "ready"
    folder.mkdir()
    monkeypatch.setenv(VOICES, str(folder))
    start_server()
    with line_held(folder):
        other = SERVER.Process(target=watch, args=(folder, ready), daemon=True)
        other.start()
        while not ready.exists():
            assert other.is_alive()
        rank = Lifeline()
        rank._line = watched_line(folder)
        os.kill(other.pid or 0, signal.SIGSTOP)
    rank._gone = True
    rank.remove_traces()
    assert folder.exists()
    os.kill(other.pid or 0, signal.SIGCONT)
    other.join(30)
    rank.remove_traces()
    assert not folder.exists()


def test_a_rank_that_begins_behind_the_end_of_its_launcher_uses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with line_held(folder):
        pass
    assert watched_line(folder) == -1
    remove_if_left(folder)
    assert not folder.exists()


def joined_without_room(place: str) -> str:
    """Return the error of a rank that can write no file."""
    os.environ.update({STORE: place, "WORLD_SIZE": "1"})
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    with pytest.raises(RunError) as error:
        join_processes(timeout_s=5)
    return str(error.value)


@pytest.mark.parametrize(("name", "reason"), [("store", "file too large"), ("gone/store", "no such file or directory")])
def test_ranks_that_cannot_write_where_they_meet_say_so_at_once(tmp_path: Path, name: str, reason: str) -> None:
    (said,) = run_ranks(joined_without_room, 1, str(tmp_path / name), wait_s=20)
    folder = (tmp_path / name).parent
    assert said == (
        f"[P0412] temporary files cannot be written in `{folder}`: {reason};"
        " set the variable TMPDIR to a folder that has room, as `TMPDIR=/var/tmp parc …`"
    )


def test_a_command_without_room_for_temporary_files_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = build(tmp_path, DATA)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert main(["run", str(made)]) == 1
    said = (
        f"error[P0412]: temporary files cannot be written in `{tmp_path / 'gone'}`: no such file or directory\nhelp: "
    )
    assert said in capsys.readouterr().err
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
    with pytest.raises(PlanError, match=r"temporary files cannot be written: no usable temporary directory found in"):
        scratch("run").__enter__()
