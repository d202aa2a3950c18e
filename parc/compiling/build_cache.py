"""A cache of builds: what plans compile to, in compressed files by a hash of all that they are made of."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

import parc
from parc.compiler.build.build import Build
from parc.compiling.compiled import Compiled, files_of, manifest_of

_MOST = 4096
"""The builds that a folder keeps: beyond that, the half that was read longest ago is removed."""
_UNLIKE_BUILDS = "clock", "directives"
"""The folders of the compiler that make no programs: times, and the lines of a plan, whose text is hashed."""


@dataclass(frozen=True)
class BuildCache:
    """The builds that a folder keeps; None keeps nothing. Files are read as those of any build: nothing in them is
    executed, and one that cannot be read is made again."""

    folder: Path | None

    @classmethod
    def of_user(cls) -> BuildCache:
        """Return the cache of this user: the folder that ``PARC_CACHE`` names (empty: none), else ``~/.cache/parc``."""
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = os.environ.get("PARC_CACHE", f"{home}/parc")
        return cls(Path(folder).expanduser() if folder else None)

    def build(self, parts: Iterable[str], home: Path, compile_it: Callable[[], Compiled]) -> Build:
        """Return the build of a plan in the folder ``home``, compiled if the cache has none that is made of these
        ``parts`` by this compiler.

        Raises:
            PlanError: it is no plan.
        """
        if self.folder is None:
            return compile_it().build
        key = sha256("\0".join([compiler_hash(), parc.__version__, torch.__version__, *parts]).encode()).hexdigest()
        file = self.folder / f"{key[:32]}.gz"
        with suppress(OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
            files, manifest = json.loads(gzip.decompress(file.read_bytes()))
            build = Build.of(home, files, manifest, {})
            file.touch()
            return build
        compiled = compile_it()
        with suppress(OSError):  # a disk that is full, or a folder that may not be written: it is made again next time
            self._write(file, json.dumps([files_of(compiled), manifest_of(compiled)]))
        return compiled.build

    def _write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(f".{os.getpid()}")
        whole.write_bytes(gzip.compress(text.encode(), 1))
        whole.rename(file)
        builds = [*file.parent.glob("*.gz")]
        if len(builds) > _MOST:
            builds.sort(key=lambda one: one.stat().st_mtime)
            for old in builds[: len(builds) // 2]:
                old.unlink(missing_ok=True)


@cache
def compiler_hash() -> str:
    """Return a hash of the code that makes programs."""
    folders = (parc.__path__[0] + f"/{name}" for name in ("compiler", "passes", "grammar", "compiling"))
    files = (file for folder in folders for file in sorted(Path(folder).rglob("*.py")))
    return sha256(b"".join(file.read_bytes() for file in files if file.parent.name not in _UNLIKE_BUILDS)).hexdigest()
