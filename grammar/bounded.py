"""Bounded reads of files from others: a device and a pipe have no end, a file may be huge, and links may lead in a
circle. No other module opens a file that parc did not write in the same process."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import stat
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

from .syntax import size_text

MOST_JSON = 32 << 20
"""The most bytes of a JSON file: twice what 100,000 tensors need."""
_MOST_PARSED = 256 << 20
"""The most bytes of parsed objects, estimated: small ones take twenty times the length of their text."""
_PARSED = {"{": 240, "[": 64, ",": 100}
"""The bytes of an object, a list, and an entry of one."""
_DEEPEST = 32
"""The deepest nesting of a JSON value. parc writes eight levels at most; code that walks over a value may recurse."""


def read_bounded(path: Path, most: int) -> bytes:
    """Read the bytes of a regular file.

    Raises:
        OSError: it cannot be opened, is a folder, a pipe or a device, or has more than ``most`` bytes.
    """
    with open(check_regular(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {size_text(most)}", str(path))
    return data


def read_packed_json(path: Path, most_packed: int, most: int) -> Any:
    """Read the value of a gzipped JSON file of at most ``most_packed`` bytes, and of ``most`` unpacked.

    Raises:
        OSError: it cannot be read, or it or what it holds is too large.
        ValueError: it is no whole gzip file, or no JSON.
    """
    try:
        with gzip.GzipFile(fileobj=BytesIO(read_bounded(path, most_packed))) as file:
            data = file.read(most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"it is no gzip file: {error}") from None
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it holds more than {size_text(most)}", str(path))
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_regular(path: Path) -> Path:
    """Return the path itself, if a regular file is there: opening a pipe would wait for its writer.

    Raises:
        OSError: there is none, or something else.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return path


def real_path(path: Path) -> Path:
    """Return an absolute path with links followed. Of links that lead back to themselves it is the first such link:
    ``Path.resolve`` raises an error of its own there, and whoever opens this path gets the usual one."""
    return Path(os.path.realpath(path))


def read_json(path: Path) -> Any:
    """Read the value of a JSON file.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError: it is no JSON, or nested too deeply.
    """
    return parse_json(read_bounded(path, MOST_JSON).decode("utf-8"))


def _refuse(name: str) -> None:
    raise ValueError(f"`{name}` is no number of JSON")


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _check_unicode(value: Any) -> None:
    """Check that all texts of a value can be written: JSON may escape half of a pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise ValueError("a text in it is half of a character") from None


def parse_json(text: str) -> Any:
    """Read the value of a JSON text.

    Raises:
        ValueError: it is none, nested too deeply, or has too many values, or a text in it is no Unicode.
    """
    if len(text) > MOST_JSON:
        raise ValueError(f"it is larger than {size_text(MOST_JSON)}")
    if sum(size * text.count(sign) for sign, size in _PARSED.items()) > _MOST_PARSED:
        raise ValueError("it has too many values")
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _SURROGATE.search(text):
        _check_unicode(value)
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        ]
        if not level:
            return value
    raise ValueError("it is nested too deeply")
