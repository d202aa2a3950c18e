"""Folders and files of people where parc writes: nothing is lost, whatever the command, the place, the moment."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import parc
from parc.compiler.build.folders import FolderError, FolderKind, current, disk_of, replacing
from parc.compiler.build.output_files import write_whole
from parc.runtime.observe.writers import MetricsFile
from parc.runtime.ranks.faults import RunError
from parc.runtime.state import saving
from tests.foreign_folders import (
    FILE_WRITERS,
    FILES,
    FOLDERS,
    GO_ON,
    WRITERS,
    contents,
    faults,
    full,
    notes,
    put,
    ready,
)

KIND = FolderKind("a text", lambda folder: ("in/b.txt", "a.txt") if (folder / "a.txt").is_file() else None)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_command_loses_nothing_of_a_folder(tmp_path: Path, writer: str) -> None:
    wrong = {}
    for at, (name, row) in enumerate(FOLDERS.items()):
        (top := tmp_path / str(at)).mkdir()
        wrong[name] = faults(top, writer, row)
    (tmp_path / "full").mkdir()
    wrong["a full disk"] = full(tmp_path / "full", writer)
    assert not {name: said for name, said in wrong.items() if said}


@pytest.mark.parametrize("writer", FILE_WRITERS)
def test_a_command_loses_no_file(tmp_path: Path, writer: str) -> None:
    wrong = {}
    for at, (name, row) in enumerate(FILES.items()):
        (top := tmp_path / str(at)).mkdir()
        wrong[name] = faults(top, writer, row)
    if writer not in GO_ON:
        (tmp_path / "full").mkdir()
        wrong["a full disk"] = full(tmp_path / "full", writer)
    assert not {name: said for name, said in wrong.items() if said}


def replace(place: Path, text: str) -> None:
    with replacing(place, KIND) as fresh:
        put(fresh, a__txt=text, in___b__txt=text)


_CHANGES = ("rename", "unlink", "rmdir", "mkdir", "chmod")


def test_a_kill_at_any_change_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child is killed before its first change of the disk, its second, …; the next process finds everything."""
    place, at, code = tmp_path / "place", 0, 9
    while code:
        at += 1
        shutil.rmtree(place, ignore_errors=True)
        replace(place, "first")
        notes(place)
        put(place, in___mine__txt="mine")
        theirs = contents(place)
        child = os.fork()
        if child == 0:
            left = at

            def counted(change: Callable[..., Any]) -> Callable[..., Any]:
                def counting(*args: Any, **options: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if not left:
                        os._exit(9)
                    return change(*args, **options)

                return counting

            for name in _CHANGES:
                monkeypatch.setattr(os, name, counted(getattr(os, name)))
            replace(place, "second")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = (current(place) / "a.txt").read_text()
        assert text in ("first", "second") and (current(place) / "in" / "b.txt").read_text() == text
        replace(place, "third")
        kept = {path: what for path, what in theirs.items() if path not in ("a.txt", "in/b.txt")}
        now = contents(place)
        assert {path: now.get(path) for path in kept} == kept, at
        assert (place / "a.txt").read_text() == "third" and [path.name for path in tmp_path.iterdir()] == ["place"], at
    assert at > 15


def test_what_stands_in_the_place_of_a_new_file_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "place"
    replace(place, "first")
    with pytest.raises(FolderError, match=r"has `c.txt`, which parc did not write"), replacing(place, KIND) as fresh:
        put(fresh, a__txt="second", c__txt="second")
        put(place, c__txt="mine")
    assert (place / "a.txt").read_text() == "first" and (place / "c.txt").read_text() == "mine"
    (place / "c.txt").unlink()
    (place / "a.txt").rename(tmp_path / "elsewhere")
    (place / "a.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match=r"has `a.txt`, which parc did not write"):
        replace(place, "second")
    assert (tmp_path / "elsewhere").read_text() == "first" and (place / "a.txt").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "place"]


def test_a_mode_is_kept(tmp_path: Path) -> None:
    replace(tmp_path / "place", "first")
    (tmp_path / "place").chmod(0o2770)
    replace(tmp_path / "place", "second")
    assert (tmp_path / "place").stat().st_mode & 0o7777 == 0o2770


MOUNTED = """
import subprocess, sys
from pathlib import Path
from parc.compiler.build.folders import FolderError, NEW_FOLDER, check_place, disk_of
top = Path(sys.argv[1])
disk = top / "a disk"
for place in (disk, top / "read-only"):
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
(top / "read-only" / "empty").mkdir()
subprocess.run(["mount", "-o", "remount,ro", top / "read-only"], check=True)
assert disk_of(disk / "a" / "b") == disk, disk_of(disk / "a" / "b")
for place in (disk, top, top / "read-only" / "new", top / "read-only" / "empty", disk / "new"):
    try:
        check_place(place, NEW_FOLDER)
        print("may be written")
    except FolderError as error:
        print(error, error.help, sep="; ")
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0,
    reason="the system lets nobody mount",
)
def test_mount_points_are_refused(tmp_path: Path) -> None:
    words = ["unshare", "-rm", sys.executable, "-c", MOUNTED, str(tmp_path)]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout.replace(f"{tmp_path}/", "")
    assert said.splitlines() == [
        "`a disk` is a mount point, which cannot be replaced; name a folder in it, as `a disk/NAME`",
        f"`{tmp_path}` has a mount point, `a disk`, which cannot be replaced; name another folder",
        "`read-only/new` cannot be written: read-only file system: `read-only/.new.swap`; name another folder",
        "`read-only/empty` cannot be written: read-only file system: `read-only/.empty.swap`; a new folder is made"
        " beside it: name one in it, as `read-only/empty/NAME`",
        "may be written",
    ]
    assert disk_of(tmp_path / "disk") != tmp_path / "disk"


def test_a_file_is_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.parc"
    file.write_text("first")
    file.chmod(0o640)
    (tmp_path / "link").symlink_to(file)
    write_whole(tmp_path / "link", "second")
    assert file.read_text() == "second" and (tmp_path / "link").is_symlink() and file.stat().st_mode & 0o777 == 0o640

    def fails(number: int) -> Callable[..., None]:
        def failing(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return failing

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"No space left on device: '.*/a.parc'"):
        patch.setattr(os, "fsync", fails(errno.ENOSPC))
        write_whole(file, "third")
    assert file.read_text() == "second"
    with monkeypatch.context() as patch:  # a file that is mounted from elsewhere cannot be replaced
        patch.setattr(os, "replace", fails(errno.EBUSY))
        write_whole(file, "third")
    assert file.read_text() == "third" and sorted(path.name for path in tmp_path.iterdir()) == ["a.parc", "link"]
    write_whole(Path(os.devnull), "nobody reads it")


def test_a_pipe_is_written_to_and_one_that_nobody_reads_is_said(tmp_path: Path) -> None:
    """``open`` would wait for a reader for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (lambda: write_whole(pipe, "text"), lambda: MetricsFile(pipe, {})):
        with pytest.raises((OSError, RunError), match="it is a pipe that nobody reads"):
            write()
    with ThreadPoolExecutor(1) as readers:
        text = readers.submit(pipe.read_text)
        written = False
        while not written:  # until the reader is there
            with suppress(BrokenPipeError):
                write_whole(pipe, "text" * 50_000)
                written = True
        assert text.result(10) == "text" * 50_000


def test_a_disk_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder below the mount point of a disk that is gone is of another disk, whose space is not meant."""
    with parc.load(ready() / "build") as session:
        with monkeypatch.context() as patch:
            patch.setattr(saving, "disk_of", lambda _: tmp_path / "disk")
            session.save(tmp_path / "disk" / "saved")
        before = contents(tmp_path)
        session.save(tmp_path / "other")  # was never on that disk
        with pytest.raises(RunError, match=r"the disk at `.*` is no longer there") as fault:
            session.save(tmp_path / "disk" / "saved")
        assert fault.value.help == "mount it again, or name another folder"
    assert {path: text for path, text in contents(tmp_path).items() if not path.startswith("other")} == before


def test_a_checkpoint_of_a_newer_format_is_said(tmp_path: Path) -> None:
    with parc.load(ready() / "build") as session:
        session.save(tmp_path / "saved")
        facts = json.loads((tmp_path / "saved" / "state.json").read_text())
        (tmp_path / "saved" / "state.json").write_text(json.dumps({**facts, "format": 9}))
        with pytest.raises(
            RunError, match=r"is a checkpoint of format 9, and this parc reads format 1; go on with the parc"
        ):
            session.restore(tmp_path / "saved")
        with pytest.raises(RunError, match=r"format 9, and this parc reads format 1; it is left as it is"):
            session.save(tmp_path / "saved")
