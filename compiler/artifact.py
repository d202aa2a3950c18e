"""The build directory: programs as text, the schedule, the report, and a manifest that hashes them all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .actions import Action, parse_schedule
from .program import Program
from .program_text import ProgramError, parse_program

FORMAT = 2
MANIFEST = "manifest.json"


class BuildError(Exception):
    """A directory is not a build, or not the one that was checked."""


@dataclass(frozen=True)
class Build:
    """A build as read: programs by action, the reference, the action list, and the manifest's facts."""

    path: Path
    manifest: Mapping[str, Any]
    programs: Mapping[str, Program]
    reference: Program
    actions: tuple[Action, ...]
    report: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The plan's folder, from which its names of files count."""
        return (self.path / str(self.manifest["folder"])).resolve()


def json_text(value: Any) -> str:
    """Canonical JSON: the same value is the same bytes."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_build(path: Path, files: Mapping[str, str], manifest: Mapping[str, Any]) -> None:
    """Write a build; an older one at ``path`` is replaced whole, and only once the new one is complete.

    Raises:
        BuildError: ``path`` holds something that is not a build.
    """
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / MANIFEST).is_file())):
        raise BuildError(f"`{path}` exists and is not a build; it is left as it is")
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    everything = {**files, MANIFEST: json_text({**manifest, "format": FORMAT, "files": hashes})}
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        for name, text in everything.items():
            place = fresh / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        if path.exists():
            old = path.with_name(f".{path.name}.old.{os.getpid()}")
            path.rename(old)
            fresh.rename(path)
            shutil.rmtree(old)
        else:
            fresh.rename(path)
    finally:
        if fresh.exists():
            shutil.rmtree(fresh)


def read_build(path: Path, *, altered: list[str] | None = None) -> Build:
    """Read a build, and hold every file against its hash. Programs are parsed; nothing is executed.

    Where a list ``altered`` is given, names of altered files go there, and their contents are read all the same.

    Raises:
        BuildError: no manifest, another format, a file that is missing or altered, a program that is none.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BuildError(f"`{path}` is not a build: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise BuildError(f"`{path / MANIFEST}` cannot be read: {error}") from None
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("files"), dict)
    ):
        raise BuildError(f"`{path / MANIFEST}` is not of format {FORMAT}")
    texts: dict[str, str] = {}
    for name, expected in manifest["files"].items():
        place = path / name
        if not place.resolve().is_relative_to(path.resolve()) or not place.is_file():
            raise BuildError(f"`{place}` is missing")
        data = place.read_bytes()
        if hashlib.sha256(data).hexdigest() != expected:
            if altered is None:
                raise BuildError(f"`{place}` was altered since it was built")
            altered.append(name)
        try:
            texts[name] = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BuildError(f"`{place}` is not text: {error}") from None
    try:
        programs = {
            program.action: program
            for name in sorted(texts)
            if name.startswith("programs/") and name != "programs/model.py"
            for program in [parse_program(texts[name], str(path / name))]
        }
        reference = parse_program(texts["programs/model.py"], str(path / "programs/model.py"))
        (actions,) = parse_schedule(texts["schedule.txt"]).values()
        report = json.loads(texts["report.json"])
    except (ProgramError, KeyError, ValueError) as error:
        raise BuildError(f"`{path}`: {error}") from None
    return Build(path, manifest, programs, reference, actions, report)
