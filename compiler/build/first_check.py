"""The first check of a build: the small programs on which its numbers were tested, and the result of one step of them,
beside which a run compares its own first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...grammar.bounded import parse_json
from ..program.binding import Binding
from .build import EVALUATION, Build, BuildError
from .json_schema import FIRST_CHECK_FORM, MANIFEST_FORM, FormError, hold_form

FIRST_CHECK = "first_check.json"
"""The file with the step's start and its expected result."""
_FOLDER = "first_check/"
"""The folder of the small programs, where they are not the build's own."""


@dataclass(frozen=True)
class FirstCheck:
    """The start of one step of small programs and its expected result: by tensor the sum of its squares, its product
    with fixed random signs, and a bound on the difference of its norm and of that product."""

    build: Build
    """The small programs, as a build: the whole build's own, those at smaller sizes, or its twin's."""
    on: str
    """The words that say how they are smaller."""
    seed: int
    """The seed of the random batch."""
    state: Mapping[str, float]
    """The state of steps at the start."""
    expected: Mapping[Binding, tuple[float, float, float]]


def is_of_first_check(name: str) -> bool:
    """Return whether a file of a build is of its first check."""
    return name == FIRST_CHECK or name.startswith(_FOLDER)


def first_check_texts(build: Build, check: FirstCheck) -> dict[str, str]:
    """Return the texts of a first check's files by name. Facts of the small build that are not the whole build's are in
    the first file."""
    from .directory import json_text

    small = check.build
    facts = {key: value for key, value in small.manifest.items() if build.manifest.get(key) != value}
    facts |= {"sizes": small.manifest["sizes"]}  # a run may choose others of a range
    lacking = sorted(build.manifest.keys() - small.manifest.keys())
    row = {"on": check.on, "seed": check.seed, "state": dict(check.state), "facts": facts, "lacking": lacking,
           "own": small.texts is build.texts,
           "expected": {str(key): list(numbers) for key, numbers in check.expected.items()}}  # fmt: skip
    texts = {FIRST_CHECK: json_text(row)}
    if not row["own"]:
        texts |= {f"{_FOLDER}{name}": text for name, text in small.texts.items() if _is_run(name)}
    return texts


def _is_run(name: str) -> bool:
    return not (is_of_first_check(name) or name == "plan.parc" or name.startswith(EVALUATION))


def read_first_check(build: Build) -> FirstCheck | None:
    """Return the first check of a build; None where it has none, as it was not tested.

    Raises:
        BuildError: its files are not of the form that parc writes.
    """
    if FIRST_CHECK not in build.texts:
        return None
    try:
        row: dict[str, Any] = parse_json(build.texts[FIRST_CHECK])
        hold_form(row, FIRST_CHECK_FORM)
        manifest = {key: value for key, value in build.manifest.items() if key not in row["lacking"]} | row["facts"]
        hold_form(manifest, MANIFEST_FORM)
        if row["own"]:
            small = replace(build if build.template is None else build.at(row["facts"]["sizes"]), evaluation=None)
            small = replace(small, manifest=manifest)
        else:
            texts = {name.removeprefix(_FOLDER): text for name, text in build.texts.items() if name.startswith(_FOLDER)}
            small = Build.of(build.path, texts, manifest, {})
        expected = {
            Binding.parse(text): (first, second, bound) for text, (first, second, bound) in row["expected"].items()
        }
    except (FormError, KeyError, ValueError, TypeError) as error:
        raise BuildError(f"`{build.path / FIRST_CHECK}` is not of the form that parc writes: {error}") from None
    return FirstCheck(small, row["on"], row["seed"], row["state"], expected)
