"""Builds: the texts of a build's folder, at sizes of its ranges, as programs and timelines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from .schedule import WORK, Action, of_one_step, read_schedule
from .text import Program, Refused, read_program

EVALUATION = "evaluation/"
"""The part of a build that evaluates its model."""
_MOST_FILES, _MOST_BYTES = 8192, 256 << 20
_PROGRAMS, _MODEL, _SCHEDULE, _MANIFEST = "programs/", "model.py", "schedule.txt", "manifest.json"
_BRACES = re.compile(r"\{([^{}\s]{1,200})\}")
_REAL = re.compile(r"1\.0([*/])\((.+)\)")
_TERM = re.compile(r"([+-]?)(\d*)\*?((?:[A-Za-z_]\w*(?:\*\*\d)?)?(?:\*[A-Za-z_]\w*(?:\*\*\d)?)*)(?:/([1-9]\d*))?")
_POWER = re.compile(r"([A-Za-z_]\w*)(?:\*\*(\d))?")

Texts = Mapping[str, str]
"""The texts of a build by their places in its folder: ``programs/stage0.F.py``."""


def read_texts(folder: Path) -> dict[str, str]:
    """Read the texts of a build's folder that a proof is about.

    Raises:
        Refused: a file is missing, is no plain file, or they are larger than a build.
    """
    texts: dict[str, str] = {}
    left = _MOST_BYTES

    def read(file: Path) -> None:
        nonlocal left
        left -= file.stat().st_size
        if left < 0 or len(texts) > _MOST_FILES or not file.is_file():
            raise Refused(f"{file} is no file of a build, or larger than one")
        texts[file.relative_to(folder).as_posix()] = file.read_text(encoding="utf-8")

    try:
        read(folder / _MANIFEST)
        for part in (folder, *filter(Path.is_dir, [folder / EVALUATION])):
            read(part / _SCHEDULE)
            for file in sorted((part / _PROGRAMS).iterdir()):
                read(file)
    except (OSError, ValueError) as error:
        raise Refused(f"{folder} is no build: {error}") from None
    return texts


@dataclass
class Build:
    """The programs of a build: of its training, or of its evaluation."""

    manifest: Mapping[str, Any]
    model: Program
    programs: dict[tuple[str, str], Program]
    """The programs by role or stage, and action."""
    roles: dict[str, list[Action]]
    """The timeline of each role."""

    def program(self, role: str, action: str) -> Program | None:
        """Return a role's program, or the one that all roles share."""
        return self.programs.get((role, action)) or self.programs.get(("stage0", action))

    @property
    def trains(self) -> bool:
        """True where a program makes gradients."""
        return any(action in WORK and action != "F" for _, action in self.programs)

    def work_of(self, stage: int) -> list[str]:
        """Return the kinds of work that a stage does, the last of the step last."""
        done = [action.kind for actions in self.roles.values() for action in of_one_step(actions)
                if action.stage == stage and action.kind in WORK]  # fmt: skip
        return [*dict.fromkeys(reversed(done))][::-1]

    def kinds(self, role: str) -> set[str]:
        """Return the kinds of programs that a role runs, and the update."""
        shared = {action for name, action in self.programs if name == role or action in ("COUNT", "SCALE", "RESCALE")}
        work = {action for _, action in self.programs if action in WORK}
        return shared | work | ({"STEP"} if work.difference("F") else set())


def read_build(texts: Texts, manifest: Mapping[str, Any], part: str = "", sizes: Mapping[str, int] = {}) -> Build:
    """Read the programs of a build, or of its ``evaluation/``, at sizes of its ranges.

    Raises:
        Refused: a text is missing, or holds what no build has.
    """
    if f"{part}{_SCHEDULE}" not in texts:
        raise Refused(f"has no {part}{_SCHEDULE}")
    programs: dict[tuple[str, str], Program] = {}
    model = None
    for place, text in texts.items():
        if not place.startswith(f"{part}{_PROGRAMS}"):
            continue
        name = place.removeprefix(f"{part}{_PROGRAMS}")
        program = read_program(name, at_sizes(text, sizes) if sizes else text)
        if name == _MODEL:
            model = program
        elif name != f"{program.role}.{program.action}.py":
            raise Refused(f"{name}: says that it is {program.role}.{program.action}")
        else:
            programs[program.role, program.action] = program
    if model is None or (model.role, model.action) != ("model", "reference") or not programs:
        raise Refused(f"has no {part}{_PROGRAMS}{_MODEL}, or nothing beside it")
    return Build(manifest, model, programs, read_schedule(texts[f"{part}{_SCHEDULE}"]))


def read_manifest(texts: Texts) -> Mapping[str, Any]:
    """Read the facts of a build.

    Raises:
        Refused: they are no JSON object.
    """
    try:
        manifest = json.loads(texts[_MANIFEST])
    except (LookupError, ValueError, RecursionError) as error:
        raise Refused(f"{_MANIFEST}: {error}") from None
    if not isinstance(manifest, dict):
        raise Refused(f"{_MANIFEST} is no object")
    return manifest


# ---- sizes with ranges: ``{B*S/2}`` in a text is a number that depends on them


def choices(manifest: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Yield the sizes at which a build is proved: none where no size has a range, else the largest, the smallest, and
    some between, at another part of each range.

    Raises:
        Refused: a range is none.
    """
    ranges = manifest.get("ranges", {})
    try:
        values = {name: range(low, high + 1, step) for name, (low, high, step) in ranges.items()}
        if any(not each or each[0] < 1 for each in values.values()):
            raise ValueError("a range has no sizes")
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused(f"{_MANIFEST}: its ranges are none: {error}") from None
    parts = [[0.0] * len(values), [(at + 1) / (len(values) + 1) for at in range(len(values))]] if values else []
    for part in ([1.0] * len(values), *parts):
        yield {
            name: each[round((len(each) - 1) * share)] for share, (name, each) in zip(part, values.items(), strict=True)
        }


def at_sizes(text: str, sizes: Mapping[str, int]) -> str:
    """Return a text with the numbers of these sizes in the place of its expressions.

    >>> at_sizes("f32[{B/2}, {S}] {1.0/(B*S)}", {"B": 4, "S": 8})
    'f32[2, 8] 0.03125'

    Raises:
        Refused: an expression is no polynomial of the sizes, or no whole number where it must be one.
    """
    numbers: dict[str, str] = {}

    def bound(match: re.Match[str]) -> str:
        if (known := numbers.get(match[1])) is None:
            known = numbers[match[1]] = _number(match[1], sizes)
        return known

    return _BRACES.sub(bound, text)


def _number(words: str, sizes: Mapping[str, int]) -> str:
    real = _REAL.fullmatch(words)
    text = words if real is None else real[2]
    value, at = Fraction(0), 0
    while at < len(text):
        match = _TERM.match(text, at)
        if match is None or match.end() == at:
            raise Refused(f"`{{{words}}}` is no expression of sizes")
        sign, number, names, below = match.groups()
        term = Fraction(int(f"{sign}{number or 1}"), int(below or 1))
        for name, power in _POWER.findall(names):
            if name not in sizes:
                raise Refused(f"`{{{words}}}` reads `{name}`, which has no range")
            term *= sizes[name] ** int(power or 1)
        value, at = value + term, match.end()
    if (real is None and value.denominator != 1) or not value:
        raise Refused(f"`{{{words}}}` is {value} at {sizes_text(sizes)}")
    return str(value) if real is None else repr(float(1 / value if real[1] == "/" else value))


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return sizes as words: ``B=4, S=64``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
