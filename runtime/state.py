"""Checkpoints in their simplest safe form: whole tensors by name in safetensors, facts in JSON, written at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..grammar.codes_build import BAD_STATE
from .faults import RunError

TENSORS, FACTS = "state.safetensors", "state.json"


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint; an older one at ``folder`` is replaced only once the new one is complete.

    Raises:
        RunError: ``folder`` holds something that is not a checkpoint, or cannot be written.
    """
    check_target(folder)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        fresh.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, fresh / TENSORS)
        (fresh / FACTS).write_text(json.dumps(facts, sort_keys=True), encoding="utf-8")
        if folder.exists():
            old = folder.with_name(f".{folder.name}.old.{os.getpid()}")
            folder.rename(old)
            fresh.rename(folder)
            shutil.rmtree(old)
        else:
            fresh.rename(folder)
    except (OSError, SafetensorError) as error:
        raise RunError(BAD_STATE, f"`{folder}` cannot be written: {error}") from None
    finally:
        if fresh.exists():
            shutil.rmtree(fresh)


def check_target(folder: Path) -> None:
    """See that a checkpoint may be written at ``folder``.

    Raises:
        RunError: it holds something else, which is left as it is.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / FACTS).is_file())):
        raise RunError(
            BAD_STATE, f"`{folder}` exists and is not a checkpoint; it is left as it is", "name another folder"
        )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's facts and the shapes and dtypes of its tensors; tensors are read one by one."""

    folder: Path
    facts: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def step(self) -> int:
        """How many steps were done."""
        return int(self.facts["step"])

    def tensors(self) -> Any:
        """The open file: ``get_tensor(name)``; use as a context."""
        return safe_open(self.folder / TENSORS, framework="pt")

    def check(self, parameters: Mapping[str, tuple[int, ...]]) -> None:
        """Hold the checkpoint against a model's parameters.

        Raises:
            RunError: tensors are missing, too many, or of other shapes; all are named.
        """
        have = {key.removeprefix("parameter."): s for key, s in self.shapes.items() if key.startswith("parameter.")}
        faults = [f"`{name}` is missing" for name in parameters if name not in have]
        faults += [f"`{name}` is not a parameter of the model" for name in have if name not in parameters]
        faults += [
            f"`{name}` is {list(have[name])} there and {list(shape)} in the model"
            for name, shape in parameters.items()
            if name in have and have[name] != shape
        ]
        if faults:
            shown = faults[:8] + ([f"and {len(faults) - 8} more"] if len(faults) > 8 else [])
            raise RunError(BAD_STATE, f"`{self.folder}` is a checkpoint of another model", notes=shown)


def read_checkpoint(folder: Path) -> Checkpoint:
    """What a checkpoint holds; no tensor is read yet.

    Raises:
        RunError: it is none, or its files cannot be read.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        with safe_open(folder / TENSORS, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no mapping
        int(facts["step"])
    except FileNotFoundError:
        raise RunError(BAD_STATE, f"`{folder}` is not a checkpoint: it has no {FACTS} or no {TENSORS}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as broken:
        raise RunError(BAD_STATE, f"`{folder}` cannot be read: {broken}") from None
    return Checkpoint(folder, facts, shapes)
