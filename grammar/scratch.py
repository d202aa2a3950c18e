"""Folders for temporary files. What a killed process leaves there is removed by the next one. Imports no torch."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from .codes import UNWRITTEN
from .diagnostics import Diagnostic, PlanError

_PROBE = bytes(1 << 16)
"""The bytes that a folder must take to be of use."""

_LEFT = ".left"
"""The end of the name of a folder that is about to be removed."""


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """Enter a block with a new folder for temporary files, ``parc-KIND-…``, which is removed at its end. Before, those
    are removed that killed processes of this user have left.

    Raises:
        PlanError: no temporary files can be written.
    """
    with _explained():
        temporary = Path(tempfile.gettempdir())
    remove_left(temporary)
    with _explained(temporary):
        folder = tempfile.TemporaryDirectory(prefix=f"parc-{kind}-")
    with folder as name, ExitStack() as held:
        place = Path(name)
        with _explained(place.parent):
            (place / "probe").write_bytes(_PROBE)
            (place / "probe").unlink()
            held.enter_context(line_held(place))
        yield place


@contextmanager
def _explained(place: Path | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlanError([no_room(error.strerror or str(error), place)]) from None


def no_room(reason: str, place: Path | None = None) -> Diagnostic:
    """Return the error of temporary files that cannot be written, in words."""
    where = f" in `{place}`" if place is not None else ""
    help_ = "set the variable TMPDIR to a folder that has room, as `TMPDIR=/var/tmp parc …`"
    message = f"temporary files cannot be written{where}: {reason[:1].lower()}{reason[1:]}"
    return Diagnostic(UNWRITTEN, message, help=help_)


# ---- the line: a pipe in the folder, which its maker holds open; the kernel closes it, however the maker ended


@cache
def line() -> str:
    """Return the name of the pipe. It has that of the kernel which knows who holds it: another host may share the
    folder."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not on Linux
        boot = ""
    return f"line.{os.uname().nodename}.{boot}"


@contextmanager
def line_held(folder: Path) -> Iterator[None]:
    """Hold the line of a folder in the block. It breaks when the block, or this process, ends."""
    fresh = folder / "line"
    os.mkfifo(fresh)
    reader = os.open(fresh, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody reads is one that nobody uses
    writer = os.open(fresh, os.O_WRONLY)
    os.rename(fresh, folder / line())  # it has this name only while it is held
    try:
        yield
    finally:
        os.close(writer)
        os.close(reader)


def watched_line(folder: Path) -> int:
    """Return an open file, from which a read returns when the line of a folder breaks; -1 if it is broken."""
    try:
        reader = os.open(folder / line(), os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:  # its holder has ended, and removed it
        return -1
    try:
        os.read(reader, 1)
    except BlockingIOError:
        os.set_blocking(reader, True)
        return reader
    os.close(reader)  # else the folder would be taken for one that this process still uses
    return -1


def remove_left(temporary: Path) -> None:
    """Remove the folders that killed processes have left."""
    for folder in temporary.glob("parc-*"):
        remove_if_left(folder)
        if folder.suffix == _LEFT:  # it is empty, where its remover ended between the line and the folder
            with suppress(OSError):
                folder.rmdir()


def remove_if_left(folder: Path) -> None:
    """Remove a folder if a process of this user has made it here, and nobody uses it any longer."""
    kinds = (folder, stat.S_ISDIR), (folder / line(), stat.S_ISFIFO)
    with suppress(OSError):
        states = [(place.lstat(), is_kind) for place, is_kind in kinds]
        mine = all(is_kind(state.st_mode) and state.st_uid == os.geteuid() for state, is_kind in states)
        if mine and not _is_used(folder / line()):
            _remove(folder.rename(f"{folder}{_LEFT}"))  # so that a process that just ends puts nothing more into it


def _remove(folder: Path) -> None:
    """Remove a folder, its line last, by which another process would know it if this one were killed."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != line():
            entry.unlink()
    shutil.rmtree(folder)


def _is_used(pipe: Path) -> bool:
    """Return whether any process reads a pipe."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True
