"""Folders that are replaced whole: a reader finds the old one or the new one, also after a kill at any moment. Of the
old one only the files that parc wrote are removed; what else is in it moves to the new one."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...grammar.bounded import real_path


class FolderError(Exception):
    """The error of a path at which no folder can be put. ``help`` is advice."""

    def __init__(self, message: str, help: str = "name another folder") -> None:
        super().__init__(message)
        self.help = help


class FolderHeld(Exception):
    """The error of a folder that another process holds; the message says which one."""


@dataclass(frozen=True, slots=True)
class FolderKind:
    """A kind of folder that parc writes; messages call it ``what``. ``files`` returns the names of the files that parc
    wrote in a folder, as the folder's own record tells, with the record last; None for a folder without such a record.
    It raises FolderError for a record that does not tell them."""

    what: str
    files: Callable[[Path], tuple[str, ...] | None]


NEW_FOLDER = FolderKind("", lambda _: None)
"""The kind of a folder that replaces none."""
_UNFINISHED = ".unfinished"
"""The file by which a folder is known that is still written; the writer holds its lock."""
_HOLDER = "process "
"""The first word in a lock file."""
_ESCAPED = re.compile(rb"\\(\d{3})")
"""A byte of a path in the system's table of mounts."""


def current(path: Path) -> Path:
    """Return the folder that has the contents: ``path`` itself, or the one beside it where a process died between two
    renames."""
    old = _old(real_path(path))
    return old if not path.exists() and old.is_dir() else path


def check_place(path: Path, kind: FolderKind) -> Path:
    """Return the real path of a folder that parc may write, with links followed: there is none yet, or it is empty, or
    parc wrote it.

    Raises:
        FolderError: it is something else, which is left as it is; a disk is mounted there; or nothing can be written.
    """
    real = real_place(path)
    try:
        with _locked(_swap_lock(real)):
            for place in (real, _old(real)):
                if os.path.lexists(place):
                    _check_folder(place, path if place == real else place, kind)
    except FileNotFoundError:  # there is no folder for it yet
        return real
    except OSError as error:
        is_there = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and real.is_dir()
        help_ = f"a new folder is made beside it: name one in it, as `{path / 'NAME'}`" if is_there else ""
        message = f"`{path}` cannot be written: {reason_of(error)}: `{error.filename or real}`"
        raise FolderError(message, help_ or "name another folder") from None
    return real


def real_place(path: Path) -> Path:
    """Return the real path of a folder to be written.

    Raises:
        FolderError: it is the current folder or one above it, in which a person or a process still is; or links lead in
            a circle.
    """
    real, here = real_path(path), Path.cwd()
    if real.is_symlink():
        raise FolderError(f"`{path}` is a link that leads back to itself")
    if real == here or real in here.parents:
        raise FolderError(f"`{path}` is the current folder or one above it", "name a folder to be made in it")
    return real


def _check_folder(place: Path, named: Path, kind: FolderKind) -> None:
    """Check that what exists at ``place`` may be replaced by a folder. Messages call it ``named``.

    Raises:
        FolderError: it may not.
    """
    if mounted := [point for point in _mount_points() if place in (point, *point.parents)]:
        where = "is a mount point" if place in mounted else f"has a mount point, `{mounted[0]}`"
        help_ = f"name a folder in it, as `{named / 'NAME'}`" if place in mounted else "name another folder"
        raise FolderError(f"`{named}` {where}, which cannot be replaced", help_)
    if not place.is_dir() or place.is_symlink() or (any(place.iterdir()) and kind.files(place) is None):
        said = f"exists and is not {kind.what}" if kind.what else "exists"
        raise FolderError(
            f"`{named}` {said}; it is left as it is",
            "name another folder" if kind.what else "name a new file or a new folder",
        )
    if not place.stat().st_mode & 0o222 or not os.access(place, os.W_OK | os.X_OK):  # of root nothing is protected
        raise FolderError(f"`{named}` is write-protected; it is left as it is")


def _mount_points() -> list[Path]:
    """Return the places where disks, or folders of other disks, are mounted, as far as the system tells."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:  # not on Linux
        return []
    return [Path(os.fsdecode(_ESCAPED.sub(lambda code: bytes([int(code[1], 8)]), line.split()[4]))) for line in lines]


@contextmanager
def replacing(path: Path, kind: FolderKind) -> Iterator[Path]:
    """Replace the folder at ``path`` by an empty one beside it, which the block fills. The old one stays until all of
    the new one is on disk, and also if the block ends with an error. Then what parc did not write in it moves to the
    new one.

    Between the two renames the old folder has a name under which ``current`` finds it. Of several processes at once the
    last one's folder stays.

    Raises:
        FolderError: parc may not write there, or the block wrote a file in the place of one that parc did not write.
        OSError: something cannot be written.
    """
    real = check_place(path, kind)
    real.parent.mkdir(parents=True, exist_ok=True)
    with _locked(_swap_lock(real)):
        _settle_old(real, kind)
    with fresh_folder(real, kind) as fresh:
        yield fresh
        _sync(fresh)
        with _locked(_swap_lock(real)):
            _swap(fresh, real, path, kind)


@contextmanager
def fresh_folder(real: Path, kind: FolderKind = NEW_FOLDER) -> Iterator[Path]:
    """Make an empty folder beside ``real``, and remove it behind the block, unless it was renamed there. Such folders
    of processes that died are removed."""
    with _locked(_swap_lock(real)):
        _remove_left(real, kind)
    fresh = real.with_name(f"{_fresh_start(real)}{os.getpid()}")
    fresh.mkdir()
    try:
        with _locked(fresh / _UNFINISHED, f"{_HOLDER}{os.getpid()}"):
            yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # an error says why; the next process that writes here cleans up


@contextmanager
def hold_folder(path: Path, who: str) -> Iterator[None]:
    """Hold a folder for one process at a time, such as a run that saves there. ``who`` describes the holder to others,
    beginning with "process". Folders above it are made.

    Raises:
        FolderHeld: another process holds it.
        FolderError: it is no place for a folder.
        OSError: nothing can be written beside it.
    """
    real = real_place(path)
    real.parent.mkdir(parents=True, exist_ok=True)
    with _locked(real.with_name(f".{real.name}.lock"), who):
        yield


def disk_of(path: Path) -> Path:
    """Return the mount point of the disk that a real path is on."""
    points = [point for point in _mount_points() if point in (path, *path.parents)]
    return max(points, key=lambda point: len(point.parts), default=Path(path.anchor))


def reason_of(error: OSError) -> str:
    """Return why something cannot be read or written, in the words of the system."""
    return (error.strerror or str(error)).lower()


# ---- the old folder and the new one


def _swap(fresh: Path, real: Path, named: Path, kind: FolderKind) -> None:
    """Put a folder in the place of that at ``real``, which may be another one than at the beginning.

    Raises:
        FolderError: parc may not replace it, or a file of the new one is in the place of one that parc did not write.
    """
    old = _old(real)
    if real.exists():
        _check_folder(real, named, kind)
        for name in _others(real, kind.files(real) or ()):
            if os.path.lexists(fresh / name):
                message = f"`{named}` has `{name}`, which parc did not write and would replace; it is left as it is"
                raise FolderError(message, "move that file away, or name another folder")
        shutil.copymode(real, fresh)
    (fresh / _UNFINISHED).unlink(missing_ok=True)
    try:
        if real.exists():
            real.rename(old)
        fresh.rename(real)
        _sync_folder(real.parent)
    finally:
        if old.exists() and not real.exists():
            old.rename(real)
    if old.exists():
        _retire(old, real, kind)


def _retire(old: Path, real: Path, kind: FolderKind) -> None:
    """Move what parc did not write from an old folder to the new one, then remove the old one, its record last:
    whenever this ends, the next process knows it again.

    Raises:
        FolderError: the new one has something of that name.
    """
    names = kind.files(old) or ()
    for name in [*_others(old, names)]:
        if os.path.lexists(real / name):
            raise FolderError(f"`{old}` and `{real}` both have `{name}`", "move one of them away")
        (real / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).rename(real / name)
    _remove(old, names)


def _others(folder: Path, names: Collection[str], within: str = "") -> Iterator[str]:
    """Yield what is in a folder and is not one of the files ``names``, also a link or a folder by such a name. A folder
    without any of these files is one thing."""
    for entry in sorted(os.scandir(folder / within), key=lambda entry: entry.name):
        name = f"{within}{entry.name}"
        if entry.is_dir(follow_symlinks=False) and any(one.startswith(f"{name}/") for one in names):
            yield from _others(folder, names, f"{name}/")
        elif name not in names or not entry.is_file(follow_symlinks=False):
            yield name


def _remove(folder: Path, names: Sequence[str]) -> None:
    """Remove the files ``names`` of a folder, its empty folders, and the folder itself. The last file is its record,
    which stays for as long as anything else is there."""
    for name in names[:-1]:
        (folder / name).unlink(missing_ok=True)
    for place, _, _ in os.walk(folder, topdown=False):
        if Path(place) == folder and set(os.listdir(place)) <= {*names[-1:]}:
            for name in names[-1:]:
                (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # something is in it
            os.rmdir(place)


def _old(real: Path) -> Path:
    return real.with_name(f".{real.name}.old")


def _fresh_start(real: Path) -> str:
    return f".{real.name}.{socket.gethostname()}."


def _swap_lock(real: Path) -> Path:
    return real.with_name(f".{real.name}.swap")


def _settle_old(real: Path, kind: FolderKind) -> None:
    """Remove the old folder of a process that died, or restore it."""
    if (old := _old(real)).is_dir():
        if real.exists():
            _retire(old, real, kind)
        else:
            old.rename(real)


def _remove_left(real: Path, kind: FolderKind) -> None:
    """Remove the folders that processes that died have left: unfinished ones, and one that was about to be renamed."""
    start = _fresh_start(real)
    for entry in [*real.parent.iterdir()]:
        number = entry.name.removeprefix(start)
        if entry.name.startswith(start) and number.isdigit() and not entry.is_symlink() and not _lives(int(number)):
            if (entry / _UNFINISHED).is_file():
                with suppress(FolderHeld), _locked(entry / _UNFINISHED, f"{_HOLDER}{os.getpid()}"):
                    shutil.rmtree(entry)
            elif entry.is_dir():
                with suppress(FolderError):
                    _remove(entry, kind.files(entry) or ())


# ---- locks


@contextmanager
def _locked(file: Path, who: str = "") -> Iterator[None]:
    """Hold a lock file, which exists only while a process holds it. Without ``who`` this waits for other holders. With
    ``who`` it does not wait, and writes ``who`` into the file for others to read. On a file system without locks
    nothing is held.

    Raises:
        FolderHeld: another process holds it.
        FolderError: the file is none of parc's.
    """
    handle = -1
    while handle < 0:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _check_lock_file(file, handle)
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


def _check_lock_file(file: Path, handle: int) -> None:
    """Check that an open file is empty, or names a holder.

    Raises:
        FolderError: it is neither.
    """
    start = os.pread(handle, len(_HOLDER), 0) if stat.S_ISREG(os.fstat(handle).st_mode) else b"?"
    if start not in (b"", _HOLDER.encode()):
        message = f"`{file}` is no lock file of parc's, and is left as it is"
        raise FolderError(message, "move it away, or name another folder")


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
