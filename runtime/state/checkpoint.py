"""Checkpoints in their simplest safe form: whole tensors by name in safetensors, and facts in JSON, replaced at
once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...compiler.build.folders import FolderError, FolderHeld, check_place, current, hold_folder, replace_folder
from ...compiler.initial.files import held_type, shown_faults
from ...grammar.bounded import check_regular, read_json
from ...grammar.codes_build import BAD_STATE
from ...grammar.codes_run import FOLDER_HELD
from ...grammar.nearest import path_meant
from ...grammar.syntax import size_text
from ..faults import RunError

TENSORS, FACTS = "state.safetensors", "state.json"


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint; an older one at ``folder`` is replaced only once the new one is complete.

    Raises:
        RunError: ``folder`` holds something that is not a checkpoint, or cannot be written.
    """
    check_target(folder)

    def write(fresh: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, fresh / TENSORS)
        (fresh / FACTS).write_text(json.dumps(facts, sort_keys=True), encoding="utf-8")

    try:
        replace_folder(folder, write)
    except (OSError, SafetensorError) as error:
        raise RunError(BAD_STATE, f"`{folder}` cannot be written: {error}", "name another folder") from None


def check_target(folder: Path) -> None:
    """Check that a checkpoint may be written at ``folder``.

    Raises:
        RunError: it holds something else, which is left as it is, or is the current folder.
    """
    try:
        check_place(folder)
    except FolderError as error:
        raise RunError(BAD_STATE, str(error), "name a folder to be made in it") from None
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / FACTS).is_file())):
        raise RunError(
            BAD_STATE, f"`{folder}` exists and is not a checkpoint; it is left as it is", "name another folder"
        )


@contextmanager
def target_held(folder: Path, size: int, run: str = "") -> Iterator[None]:
    """Hold ``folder``, where a run will save ``size`` bytes at a time, for this run alone. The hosts of one run give it
    one name.

    Raises:
        RunError: another run saves there, it holds something else, or it cannot be written; nothing was trained yet.
    """
    check_target(folder)
    with ExitStack() as stack:
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            who = f"process {os.getpid()} on {socket.gethostname()} since {since}" + f", for {run}" * bool(run)
            stack.enter_context(hold_folder(folder, who))
            free = shutil.disk_usage(folder.resolve().parent).free
        except FolderHeld as held:
            if not run or not str(held).endswith(f", for {run}"):
                help_ = "name another folder with `--save`, or wait until that run ends"
                raise RunError(FOLDER_HELD, f"`{folder}` is where another run saves: {held}", help_) from None
        except OSError as error:
            raise RunError(BAD_STATE, f"`{folder}` cannot be written: {error}", "name another folder") from None
        else:
            if free < size:
                lacking = f"a checkpoint is {size_text(size)}, and {size_text(free)} are free there"
                help_ = (
                    "name a folder on another disk, or make room; an old checkpoint stays until the new one is complete"
                )
                raise RunError(BAD_STATE, f"`{folder}` cannot be written: {lacking}", help_)
        yield


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's facts, and the shapes and dtypes of its tensors, with complex ones in their ``real_form``. Tensors
    are read one by one."""

    folder: Path
    facts: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype | None]

    @property
    def step(self) -> int:
        """The number of steps done."""
        return int(self.facts["step"])

    def tensors(self) -> Any:
        """Open the file as a context: ``get_tensor(name)`` reads a tensor."""
        return safe_open(self.folder / TENSORS, framework="pt")

    def check(self, parameters: Mapping[str, tuple[int, ...]], buffers: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the checkpoint fits a model's parameters, and the buffers that its steps change.

        Raises:
            RunError: tensors are missing, too many, or of other shapes; all of them are named.
        """
        faults = self._faults("parameter", parameters) + (self._faults("buffer", buffers) if buffers else [])
        refuse(self.folder, "is a checkpoint of another model", faults)

    def _faults(self, kind: str, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
        have = {key.removeprefix(f"{kind}."): s for key, s in self.shapes.items() if key.startswith(f"{kind}.")}
        faults = [f"`{name}` is missing" for name in expected if name not in have]
        faults += [f"`{name}` is not a {kind} of the model" for name in have if name not in expected]
        return faults + [
            f"`{name}` is {list(have[name])} there and {list(shape)} in the model"
            for name, shape in expected.items()
            if name in have and have[name] != shape
        ]


def refuse(folder: Path, what: str, faults: Sequence[str]) -> None:
    """Raise the error of a checkpoint with these faults, if there are any.

    Raises:
        RunError: something is.
    """
    if faults:
        raise RunError(BAD_STATE, f"`{folder}` {what}", "name a checkpoint that this model wrote", shown_faults(faults))


def _is_checkpoint(path: Path) -> bool:
    return (path / FACTS).is_file() and not path.name.startswith(".")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint and read its facts; no tensor is read yet.

    Raises:
        RunError: it is none, or its files cannot be read.
    """
    named, folder = folder, current(folder)
    try:
        facts = read_json(folder / FACTS)
        with safe_open(check_regular(folder / TENSORS), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 no mapping
            types = {name: held_type(slice_.get_shape(), slice_.get_dtype()) for name, slice_ in slices.items()}
            shapes, dtypes = {n: type_[0] for n, type_ in types.items()}, {n: type_[1] for n, type_ in types.items()}
        step = facts["step"]
        if type(step) is not int or not 0 <= step < 2**53:
            raise ValueError(f"its {FACTS} has step {step!r}, which is no number of steps done")
    except FileNotFoundError:
        lacks = f"is not a checkpoint: it has no {FACTS} or no {TENSORS}" if folder.exists() else "does not exist"
        help_ = path_meant(named, _is_checkpoint, "name a folder that `parc run --save` or `session.save` wrote")
        raise RunError(BAD_STATE, f"`{named}` {lacks}", help_) from None
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as broken:
        file = f"{TENSORS} in " if isinstance(broken, SafetensorError) else ""
        message = f"{file}`{named}` cannot be read: {broken}"
        raise RunError(BAD_STATE, message, "go on from another checkpoint") from None
    return Checkpoint(folder, facts, shapes, dtypes)
