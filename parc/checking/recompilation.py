"""What a build's files say against what its plan compiles to: every program, line by line, and every fact of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from parc.checking.checks import report_of
from parc.compiler.build.directory import Build, json_text
from parc.compiler.program.faults import Fault
from parc.compiling.driver import Compiled, files_of, manifest_of, stored
from parc.report import LINES, unlined

_MOVING = ("files", "folder", "format", "model_lines")
"""Facts of where and how files lie, and lines in them: other code holds these."""
_MEASURED = ("checks", "numbers", "placed")


def differences(build: Build, compiled: Compiled) -> list[Fault]:
    """Where a build is not what its plan compiles to."""
    report = _as_read(report_of(compiled, stored(compiled)))
    return [
        *_file_faults(build, files_of(compiled)),
        *_key_faults("manifest.json", build.manifest, _as_read(manifest_of(compiled, build.path)), _MOVING),
        *_key_faults("report.json", build.report, report, _MEASURED),
    ]


def _file_faults(build: Build, expected: Mapping[str, str]) -> Iterator[Fault]:
    for name in build.manifest["files"]:
        if name not in expected and name != "report.json":
            yield Fault("recompilation", name, "the plan compiles to no such file")
    for name, text in expected.items():
        place = build.path / name
        if not place.is_file():
            yield Fault("recompilation", name, "it is missing")
            continue
        found = place.read_text(encoding="utf-8")
        for number, (have, wanted) in enumerate(zip_longest(_rows(found), _rows(text)), 1):
            if have != wanted:
                shown = [f"`{row.strip()}`" if row is not None else "nothing" for row in (have, wanted)]
                yield Fault("recompilation", f"{name}:{number}", f"is {shown[0]}, but the plan compiles to {shown[1]}")
                break


def _rows(text: str) -> list[str]:
    """Lines, without the numbers of the plan's and the model's: a build keeps its plan in another layout than it was
    written in, and comments move code that they do not change."""
    return [LINES.sub("", row) for row in text.splitlines()]


def _key_faults(file: str, found: Mapping[str, Any], expected: Mapping[str, Any], free: tuple[str, ...]) -> list[Fault]:
    faults = []
    for key in sorted((found.keys() | expected.keys()) - set(free)):
        have, wanted = (json_text(unlined(side[key])) if key in side else None for side in (found, expected))
        if have != wanted:
            shown = ["nothing" if text is None else _short(text) for text in (have, wanted)]
            faults.append(Fault("recompilation", file, f"`{key}` is {shown[0]}, but the plan says {shown[1]}"))
    return faults


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."


def _as_read(value: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json_text(value))
    return found
