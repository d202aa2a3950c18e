"""Bounded reads of files from others: a device and a pipe have no end, and a file may be huge."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from .syntax import size_text

MOST_JSON = 32 << 20
"""The most bytes of a JSON file: twice what 100,000 tensors need. The parsed objects take about 20 times its length."""
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


def read_json(path: Path) -> Any:
    """Read the value of a JSON file.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError: it is no JSON, or nested too deeply.
    """
    return parse_json(read_bounded(path, MOST_JSON).decode("utf-8"))


def _refuse(name: str) -> None:
    raise ValueError(f"`{name}` is no number of JSON")


def parse_json(text: str) -> Any:
    """Read the value of a JSON text.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    if len(text) > MOST_JSON:
        raise ValueError(f"it is larger than {size_text(MOST_JSON)}")
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
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
