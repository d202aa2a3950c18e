"""Files that commands write where a person says: over no file that parc did not write, and whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ...grammar.bounded import real_path

_HEAD_BYTES = 1 << 16
"""The bytes of a file in which its kind is looked for."""
_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors where a folder takes no new file, or a file is a mount point: the file itself may take bytes."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that parc writes; messages call it ``what``. Its first bytes match ``head``, those of no other
    tool's file."""

    what: str
    head: re.Pattern[bytes]


def check_file(path: Path, kind: FileKind) -> None:
    """Check that a file may be written: there is none yet, it is empty, parc wrote it, or it is a device or a pipe.

    Raises:
        FileExistsError: it is something else, which is left as it is.
        OSError: it is a folder, or cannot be read.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.is_file():
        return
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        try:
            head = file.read(_HEAD_BYTES)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            head = b"?"
    if head and not kind.head.match(head):
        raise FileExistsError(errno.EEXIST, f"it exists and is not {kind.what}; it is left as it is", str(path))


def open_output(path: Path, mode: Literal["ab", "wb"]) -> IO[bytes]:
    """Open a file to write, without a buffer. A pipe that nobody reads is refused, where ``open`` would wait for ever.

    Raises:
        OSError: it cannot be opened.
    """

    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if mode == "ab" else os.O_TRUNC)
    try:
        file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise BrokenPipeError(errno.EPIPE, "it is a pipe that nobody reads", str(path)) from None
    os.set_blocking(file, True)
    return os.fdopen(file, mode, buffering=0)


def write_whole(path: Path, text: str) -> None:
    """Write a file. An older one is replaced once all of the new one is on disk; its mode and links to it stay. In a
    folder that takes no new files it is written in place.

    Raises:
        OSError: it cannot be written; it names the file.
    """
    try:
        _write(path, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write(path: Path, data: bytes) -> None:
    real = real_path(path)
    if real.exists() and not real.is_file():  # a device, a pipe, or a folder
        with open_output(real, "wb") as pipe:
            while data:  # a pipe may take a part
                data = data[pipe.write(data) :]
        return
    fresh = real.with_name(f".parc-{os.getpid()}")
    try:
        with open(fresh, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if real.exists():
            shutil.copymode(real, fresh)
        os.replace(fresh, real)
    except OSError as error:
        if error.errno not in _IN_PLACE or not real.exists():
            raise
        real.write_bytes(data)
    finally:
        fresh.unlink(missing_ok=True)
