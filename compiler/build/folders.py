"""Folders that are replaced whole: a reader finds the old one or the new one, also after a kill at any moment."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FolderError(Exception):
    """The error of a path at which no folder can be put. ``help`` is advice."""

    def __init__(self, message: str, help: str = "name another folder") -> None:
        super().__init__(message)
        self.help = help


class FolderHeld(Exception):
    """The error of a folder that another process holds; the message says which one."""


def current(path: Path) -> Path:
    """Return the folder that has the contents: ``path`` itself, or the one beside it where a process died between two
    renames."""
    old = _old(path.resolve())
    return old if not path.exists() and old.is_dir() else path


def check_place(path: Path, mark: str = "", what: str = "") -> Path:
    """Return the real path of a folder that may be replaced, with links followed. With the name of a file ``mark``, the
    folder must be empty or have that file, by which it is ``what`` the message calls it.

    Raises:
        FolderError: it is something else, which is left as it is; or the current folder or one above it, in which a
            person or a process still is.
    """
    real, here = path.resolve(), Path.cwd()
    if real == here or real in here.parents:
        raise FolderError(f"`{path}` is the current folder or one above it", "name a folder to be made in it")
    if mark and path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / mark).is_file())):
        raise FolderError(f"`{path}` exists and is not {what}; it is left as it is")
    return real


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace the folder at ``path`` by an empty one beside it, which the block fills. The old one stays until all of
    the new one is on disk, and also if the block ends with an error.

    Between the two renames the old folder has a name under which ``current`` finds it. Of several processes at once the
    last one's folder stays.

    Raises:
        FolderError: it is no place for a folder.
        OSError: something cannot be written.
    """
    real = check_place(path)
    old, fresh = _old(real), real.with_name(f".{real.name}.{socket.gethostname()}.{os.getpid()}")
    real.parent.mkdir(parents=True, exist_ok=True)
    lock = real.with_name(f".{real.name}.swap")
    with _locked(lock):
        _clean(real)
    try:
        fresh.mkdir()
        yield fresh
        _sync(fresh)
        with _locked(lock):
            try:
                if real.exists():
                    real.rename(old)
                fresh.rename(real)
                _sync_folder(real.parent)
                if old.exists():
                    shutil.rmtree(old)
            finally:
                if old.exists() and not real.exists():
                    old.rename(real)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # an error says why; the next process that writes here cleans up


@contextmanager
def hold_folder(path: Path, who: str) -> Iterator[None]:
    """Hold a folder for one process at a time, such as a run that saves there. ``who`` describes the holder to others.
    Folders above it are made.

    Raises:
        FolderHeld: another process holds it.
        FolderError: it is no place for a folder.
        OSError: nothing can be written beside it.
    """
    real = check_place(path)
    real.parent.mkdir(parents=True, exist_ok=True)
    with _locked(real.with_name(f".{real.name}.lock"), who):
        yield


@contextmanager
def _locked(file: Path, who: str = "") -> Iterator[None]:
    """Hold a lock file, which exists only while a process holds it. Without ``who`` this waits for other holders. With
    ``who`` it does not wait, and writes ``who`` into the file for others to read. On a file system without locks
    nothing is held."""
    handle = -1
    while handle < 0:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle, wait=not who)
            if not _is_at(file, handle):  # its holder has just removed it
                os.close(handle)
                handle = -1
        except BaseException:  # of an interrupt too: a lock is held for as long as its file is open
            os.close(handle)
            raise
    try:
        os.truncate(handle, 0)
        os.write(handle, who.encode())
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


def _lock(handle: int, wait: bool) -> None:
    """Lock an open file, where the file system has locks.

    Raises:
        FolderHeld: another process holds it, and ``wait`` is false.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        held = os.read(handle, 4096).decode("utf-8", "replace").strip()
        raise FolderHeld(held or "another process") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def _is_at(file: Path, handle: int) -> bool:
    """Return whether an open file is the one at this path, which another process may remove or replace at any time."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except FileNotFoundError:
        return False


def _old(real: Path) -> Path:
    return real.with_name(f".{real.name}.old")


def _clean(real: Path) -> None:
    """Remove what processes that died here have left: half-written folders; and restore an old one of theirs."""
    old, start = _old(real), f".{real.name}.{socket.gethostname()}."
    if old.is_dir():
        if real.exists():
            shutil.rmtree(old)
        else:
            old.rename(real)
    for entry in real.parent.iterdir():
        number = entry.name.removeprefix(start)
        if entry.name.startswith(start) and number.isdigit() and not _lives(int(number)):
            shutil.rmtree(entry)


def _lives(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _sync(folder: Path) -> None:
    """Write everything below a folder to the disk: otherwise a rename may reach it before the contents do."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            with open(Path(place, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(place))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
