"""A build's files compared with what its plan compiles to: every program, line by line, and every fact of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from parc.checking.reports import report_of
from parc.compiler.build.build import Build
from parc.compiler.build.directory import json_text
from parc.compiler.program.program import Fault
from parc.compiling.compiled import Compiled
from parc.report import LINES, unlined

_MOVING = ("files", "folder", "format", "model_lines", "model_source")
"""The facts about the places of files, and about the code in them, which other checks compare."""
_MEASURED = ("checks", "numbers", "placed", "written")


def differences(build: Build, compiled: Compiled) -> list[Fault]:
    """Return the faults of a build that is not what its plan compiles to."""
    wanted = compiled.build
    return [
        *_text_faults(build.texts, wanted.texts),
        *_key_faults("manifest.json", build.manifest, _as_read(wanted.manifest), _MOVING),
        *_key_faults("report.json", build.report, _as_read(report_of(compiled)), _MEASURED),
    ]


def _text_faults(found: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[Fault]:
    for name in found.keys() - wanted.keys():
        yield Fault("recompilation", name, "the plan compiles to no such file")
    for name, text in wanted.items():
        if name not in found:
            yield Fault("recompilation", name, "it is missing")
            continue
        for number, rows in enumerate(zip_longest(_rows(found[name]), _rows(text)), 1):
            if rows[0] != rows[1]:
                have, want = (f"`{row.strip()}`" if row is not None else "nothing" for row in rows)
                yield Fault("recompilation", f"{name}:{number}", f"is {have}, but the plan compiles to {want}")
                break


def _rows(text: str) -> list[str]:
    """Return lines without the line numbers of the plan and the model. A build keeps its plan in another layout than it
    was written in, and comments move code without changing it."""
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
    parsed: dict[str, Any] = json.loads(json_text(value))
    return parsed
