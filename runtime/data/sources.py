"""Opening the samples that a plan's ``data`` line names: text files, random ones, a person's callable."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...compiler.build.build import Build
from ...compiler.capture.callables import CallableError, check_arguments, load_callable
from ...grammar.codes_build import BAD_DATA
from ..faults import RunError
from .random_batch import class_bounds
from .samples import ByteText, CallableData, DataError, SampleSource, SyntheticData

NO_DATA = "the plan has no `data` line"
NO_DATA_HELP = (
    'add `data synthetic` for random samples that fit the model, or text such as `data bytes "{stdlib}/*.py"`'
)


def line_of(build: Build, verb: str = "data") -> str:
    """Return the place and the text of the first line of the build's plan that has a ``verb``, or "" if there is
    none."""
    try:
        lines = (build.path / "plan.parc").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    matching = ((number, text) for number, text in enumerate(lines, 1) if text.split()[:1] == [verb])
    return next((f"line {number} of the build's plan.parc: {' '.join(text.split())}" for number, text in matching), "")


def raised_at(error: BaseException | None) -> str:
    """Return the line of the person's own file that failed."""
    if error is None:
        return ""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/parc/runtime/" not in frame.filename]
    return f"raised at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def is_synthetic(line: Mapping[str, Any]) -> bool:
    """Return whether a ``data`` line, as the manifest has it, is for random samples: it names no files and no
    callable."""
    return not line["globs"] and line["callable"] is None


def make_data(build: Build) -> SampleSource:
    """Return the source of samples of a build's ``data`` line.

    Raises:
        RunError: there is none, or nothing can be read.
    """
    line, where = build.manifest["data"], line_of(build)
    if line is None:
        raise RunError(BAD_DATA, NO_DATA, NO_DATA_HELP)
    manifest = build.manifest
    if is_synthetic(line):
        bounds = {name: bound for name, (bound, _) in class_bounds(build.reference).items()}
        return SyntheticData(manifest["inputs"], manifest["sizes"], bounds, int(manifest["seed"]))
    try:
        operands = [name for term in manifest["loss"] for name in term["operands"]]
        return open_data(line, manifest["inputs"], operands, manifest["sizes"], build.folder)
    except (CallableError, DataError) as error:
        notes = [note for note in (where, raised_at(error.__cause__)) if note]
        message = f"the data's callable: {error}" if isinstance(error, CallableError) else str(error)
        raise RunError(BAD_DATA, message, error.help, notes) from error


def open_data(
    line: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    operands: Sequence[str],
    sizes: Mapping[str, int],
    folder: Path,
) -> SampleSource:
    """Return the samples of a ``data`` line of files or a callable, with their tensors by the plan's inputs; none is
    read.

    Raises:
        CallableError: the callable cannot be had, or takes other arguments.
        DataError: a glob matches no file, or the files are too short.
    """
    target, arguments = line["callable"], line["arguments"]
    if target is not None:
        function = load_callable(target, folder)
        check_arguments(function, target, arguments, 1)
        return CallableData(lambda index: function(index, **arguments))
    first = inputs[0]["dims"]
    text = ByteText(line["globs"], folder, int(sizes.get(first[-1], first[-1]) if first else 0))
    names = byte_inputs(inputs, operands)
    return lambda number: {names.get(name, name): value for name, value in text(number).items()}


def byte_inputs(inputs: Sequence[Mapping[str, Any]], operands: Sequence[str]) -> dict[str, str]:
    """Return the inputs that take bytes, and the bytes after them: by their names, or else by their use in the plan.

    >>> ids, labels = {"name": "input_ids", "dtype": "int64"}, {"name": "labels", "dtype": "int64"}
    >>> byte_inputs([labels, ids], ["output.logits", "labels"])
    {'targets': 'labels', 'tokens': 'input_ids'}
    """
    whole = [line["name"] for line in inputs if line["dtype"].startswith("int")]
    chosen = {name: name for name in ("tokens", "targets") if name in whole}
    for kind, choices in (("targets", [n for n in whole if n in operands]),
                          ("tokens", [n for n in whole if n not in operands])):  # fmt: skip
        free = [name for name in choices if name not in chosen.values()]
        if kind not in chosen and free:
            chosen[kind] = free[0]
    return chosen
