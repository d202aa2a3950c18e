"""The files that a plan's globs name."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ...grammar.nearest import did_you_mean
from .samples import DataError


def matching_files(patterns: Sequence[str], root: Path) -> list[str]:
    """Return the files that the patterns match, each once, sorted, without empty ones. Patterns are globs relative to
    ``root`` (``**`` for any depth); ``{stdlib}`` stands for the folder of the running Python's standard library,
    without the packages installed below it.

    Raises:
        DataError: a pattern matches no file.
    """
    library = sysconfig.get_path("stdlib")
    matches: set[str] = set()
    for pattern in patterns:
        absolute = os.path.join(root, pattern.replace("{stdlib}", glob.escape(library)))
        files = {os.path.normpath(name) for name in glob.iglob(absolute, recursive=True) if os.path.isfile(name)}
        if "{stdlib}" in pattern:  # what else is installed there differs from machine to machine
            files = {name for name in files if not {"site-packages", "dist-packages"} & set(Path(name).parts)}
        if not files:
            whole = os.path.isabs(absolute if "{stdlib}" in pattern else pattern)
            where, otherwise = ("", "") if whole else (f" in {root}", ", from the plan's folder")
            help_ = _meant(pattern, root, _PATTERNS.format(otherwise))
            raise DataError(f'no file matches "{pattern}"{where}', help_, pattern)
        matches |= files
    return sorted(name for name in matches if os.path.getsize(name)) or sorted(matches)[:1]


def _meant(pattern: str, root: Path, otherwise: str) -> str:
    """Return the question "did you mean ...?" with names similar to the first part of a pattern that does not exist;
    ``otherwise`` without such names."""
    for part in Path(pattern).parts:
        if glob.has_magic(part) or not root.is_dir():
            break
        if not (root / part).exists():
            return did_you_mean(part, (entry.name for entry in root.iterdir()), otherwise)
        root /= part
    return otherwise


_PATTERNS = 'name files that are there{}: "texts/*.txt"; `**` goes into all folders below'
