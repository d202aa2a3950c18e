"""The folder of a build: programs as text, the schedule, the report, and a manifest with the hash of each file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ...grammar.bounded import parse_json, read_bounded, read_json, real_path
from ...grammar.nearest import listed, path_meant
from ..capture.callables import CallableError
from ..capture.model_code import changed_files
from ..layout.placement import parse_type
from ..program.actions import ACTIONS
from ..program.program import REFERENCE_FILE, Fault, is_registered
from ..program.text import ProgramError
from .build import EVALUATION, Build, BuildError, sources_of
from .folders import FolderError, FolderKind, check_place, current, reason_of, replacing
from .json_schema import MANIFEST_FORM, REPORT_FORM, Form, FormError, hold_form

FORMAT = 7
MOST_BUILD_BYTES = 128 << 20
"""The most bytes of a build: its files are held in memory, and grow with distinct layers, not with ranks."""
MANIFEST = "manifest.json"
_REPORT = "report.json"
_FILES = ("plan.parc", REFERENCE_FILE, "schedule.txt", _REPORT)
_HASH = re.compile(r"[0-9a-f]{64}")
LINES = re.compile(r" plan:\d+|(?<=\.py):\d+\b")
"""The line numbers of plans and of models in texts."""


def json_text(value: Any) -> str:
    """Return canonical JSON: the same bytes for the same value."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def unlined(value: Any) -> Any:
    """Return a value without line numbers: a build keeps its plan formatted anew."""
    if isinstance(value, Mapping):
        return {key: unlined(inner) for key, inner in value.items() if key != "line"}
    if isinstance(value, str):
        return LINES.sub("", value)
    return [unlined(inner) for inner in value] if isinstance(value, list) else value


def write_build(build: Build, path: Path) -> None:
    """Write a build; an older one at ``path`` is replaced whole, and only once the new one is complete.

    Raises:
        BuildError: parc may not replace what is at ``path``, or it cannot be written.
    """
    files = {**build.texts, _REPORT: json_text(build.report)}
    folder = os.path.relpath(build.folder, real_path(path))
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    everything = {**files, MANIFEST: json_text({**build.manifest, "folder": folder, "format": FORMAT, "files": hashes})}
    try:
        with replacing(path, BUILD) as fresh:
            for name, text in everything.items():
                place = fresh / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8")
    except FolderError as error:
        raise BuildError(str(error), error.help) from None
    except OSError as error:
        raise BuildError(f"`{path}` cannot be written: {reason_of(error)}", "name another folder with `-o`") from None


def _build_files(folder: Path) -> tuple[str, ...] | None:
    """Return the names of a build's files, as its manifest tells, whatever its format; None for a folder without a
    manifest of parc's."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        return None
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if (
        not isinstance(files, dict)
        or type(manifest.get("format")) is not int
        or not isinstance(manifest.get("parc"), str)
    ):
        return None
    if "plan.parc" not in files or not all(
        isinstance(hash_, str) and _HASH.fullmatch(hash_) for hash_ in files.values()
    ):
        return None
    inside = (name for name in files if not Path(name).is_absolute() and ".." not in Path(name).parts)
    return *(Path(name).as_posix() for name in inside), MANIFEST


BUILD = FolderKind("a build", _build_files)


def check_out(path: Path) -> None:
    """Check that a build may be written at ``path``.

    Raises:
        BuildError: it holds something that is not a build, which is left as it is, or nothing can be written there.
    """
    try:
        check_place(path, BUILD)
    except FolderError as error:
        raise BuildError(str(error), error.help) from None


def again(path: Path) -> str:
    """Return the advice to build the plan again, for a build that was changed or is not the one wanted."""
    return f"build the plan again: `parc build PLAN.parc -o {path}`"


Custom = Literal["imported", "refused", "named"]
"""The treatment of a person's own operators in the programs of a build, which the model's module registers: it is
imported, if it is the one that was built; or they are a fault; or programs are only looked at, and they are names."""


def read_build(path: Path, *, altered: list[str] | None = None, custom: Custom = "imported") -> Build:
    """Read a build; compare every file with its hash, and the manifest with programs and schedule. Programs are parsed,
    not executed. ``custom`` says what is done about custom operators in them.

    With a list ``altered``, names of altered files, and of files that the build does not have, go there; their contents
    are read all the same, and the manifest is left to ``Build.fact_faults``.

    Raises:
        BuildError: no manifest, another format, a file that is missing or altered, a program that cannot be read.
    """
    try:
        return _read_all(path, altered, custom)
    except BuildError as error:
        error.help = error.help or again(path)
        raise


def _read_all(named: Path, altered: list[str] | None, custom: Custom) -> Build:
    path = current(named)
    manifest = _read_manifest(path, named)
    texts = _read_files(path, manifest, altered)
    if custom != "named" and any(
        "\noperators(" in text for name, text in texts.items() if name.startswith(("programs/", EVALUATION))
    ):
        if custom == "refused":
            message = f"`{path}` uses custom operators, which only the model's own module declares"
            raise BuildError(message, f"`parc verify {path}` imports that module")
        _import_model(path, manifest)
    try:
        report = parse_json(texts.pop(_REPORT))
        build = Build.of(path, texts, manifest, report)
    except (ProgramError, KeyError, ValueError, TypeError) as error:
        raise BuildError(f"`{path}`{' was altered since it was built' if altered else ''}: {error}") from None
    unregistered = {op for program in build.every_program() for op in program.operators if not is_registered(op)}
    if unregistered and custom == "imported":
        raise BuildError(
            f"`{path}` uses the operator `{min(unregistered)}`, which the model's module does not register"
        )
    done = [(action, role.programs) for role in build.roles.values() for action in role.actions]
    lacking = {action.kind for action, programs in done if action.kind in ACTIONS and ACTIONS[action.kind].program
               and action.program_in(programs) not in programs}  # fmt: skip
    needed = {row.kind for row in ACTIONS.values() if row.program and not row.optional}
    if lacking := lacking | (needed - build.programs.keys()):
        raise BuildError(f"`{path}` has no program of {', '.join(sorted(lacking))}")
    for name, text in manifest["parameters"].items():
        try:
            parse_type(text, build.mesh).local(build.mesh)
        except (ValueError, KeyError) as error:
            raise BuildError(f"`{path / MANIFEST}`: `parameters.{name}` is no type: {error}") from None
    _hold(path / _REPORT, report, REPORT_FORM)
    if others := sorted(_roles_of(report) - build.roles.keys()):
        raise BuildError(f"`{path / _REPORT}` names a role `{others[0]}`, which the build has not")
    if altered is None and (faults := build.fact_faults()):
        raise misfit_error(path, faults)
    return build


def _roles_of(report: Mapping[str, Any]) -> set[str]:
    """Return the names of roles in a report."""
    rows = [*report["memory"], *report["communication"], *report["stages"]]
    rows += report["recompute"]["roles"] if "recompute" in report else []
    return {*report["roles"], *(row["role"] for row in rows)}


def misfit_error(path: Path, faults: Sequence[Fault]) -> BuildError:
    """Return the error of a manifest that contradicts other files of its build."""
    return BuildError(f"`{path / MANIFEST}` is not of its build: {faults[0].message}", again(path))


def _is_target(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path.suffix == ".parc" and path.is_file())


def _read_manifest(path: Path, named: Path) -> dict[str, Any]:
    """Read the manifest in ``path``. Messages name the folder as the person did, ``named``."""
    try:
        manifest: dict[str, Any] = read_json(path / MANIFEST)
    except NotADirectoryError:
        help_ = f"build it first: `parc build {named}`" if named.suffix == ".parc" else "name a build's folder"
        raise BuildError(f"`{named}` is a file, not the folder of a build", help_) from None
    except FileNotFoundError:
        message = f"`{named}` is not a build: it has no {MANIFEST}" if path.exists() else f"there is no build `{named}`"
        help_ = path_meant(named, _is_target, f"build it from a plan: `parc build PLAN.parc -o {named}`")
        raise BuildError(message, help_) from None
    except (OSError, ValueError) as error:
        raise BuildError(f"`{path / MANIFEST}` cannot be read: {error}") from None
    _check_format(named, path / MANIFEST, manifest)
    _hold(path / MANIFEST, manifest, MANIFEST_FORM)
    absent = [name for name in _FILES if name not in manifest["files"]]
    if absent:
        raise BuildError(f"`{path / MANIFEST}`: its `files` name no `{absent[0]}`")
    return manifest


def _check_format(named: Path, file: Path, manifest: Any) -> None:
    """Check that a manifest is of the format that this parc reads."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise BuildError(f"`{file}` is not of format {FORMAT}")
    have = manifest.get("format")
    if have == FORMAT:
        return
    if not isinstance(have, int) or isinstance(have, bool):
        raise BuildError(f"`{file}` is not of format {FORMAT}")
    message = f"`{named}` is a build of format {have}, and this parc reads format {FORMAT}"
    if have < FORMAT:
        raise BuildError(message, again(named))
    by = f" {manifest['parc']}" if isinstance(manifest.get("parc"), str) else ""
    raise BuildError(message, f"install the parc{by} that built it, or {again(named)}")


def _read_files(path: Path, manifest: Mapping[str, Any], altered: list[str] | None) -> dict[str, str]:
    """Return the text of every file, compared with its hash."""
    texts: dict[str, str] = {}
    for name, expected in manifest["files"].items():
        place = path / name
        if not real_path(place).is_relative_to(real_path(path)) or not place.is_file():
            raise BuildError(f"`{place}` is missing")
        try:
            data = read_bounded(place, MOST_BUILD_BYTES - sum(map(len, texts.values())))
        except OSError as error:
            raise BuildError(f"`{place}` cannot be read: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != expected:
            if altered is None:
                raise BuildError(f"`{place}` was altered since it was built")
            altered.append(name)
        try:
            texts[name] = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BuildError(f"`{place}` is not text: {error}") from None
    if altered is not None:
        there = sorted(str(place.relative_to(path)) for place in path.rglob("*") if not place.is_dir())
        altered += [f"{name} (not of the build)" for name in there if name not in texts and name != MANIFEST]
    return texts


def _hold(file: Path, value: Any, form: Form) -> None:
    try:
        hold_form(value, form)
    except FormError as error:
        raise BuildError(f"`{file}` is not of the form that parc writes: {error}") from None


def _import_model(path: Path, manifest: Mapping[str, Any]) -> None:
    """Import the module of the `model` line, for the operators that it registers.

    Raises:
        BuildError: it cannot be imported, or is not the code that was built.
    """
    target, folder = manifest["model"]["callable"], real_path(path / manifest["folder"])
    try:
        changed = changed_files(sources_of(manifest), folder, manifest["model_source"])
    except CallableError as error:
        message = f"`{path}` uses operators of the model's module, which cannot be imported: {error}"
        raise BuildError(message, error.help) from None
    if changed:
        raise BuildError(f"`{path}` uses operators of `{target}`, and {listed(changed)} changed since the build")
