"""Export: the weights of a checkpoint as safetensors files by the model's own names, for whoever knows nothing of parc.

Ranks, padding and stacks are left behind. A file is at most a shard's size, and no more than that is held in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..compiler.build.build import Build
from ..compiler.capture.model_calls import model_builder
from ..compiler.initial.recipes import record
from ..compiler.program.optimizers import AVERAGE
from ..grammar.codes_build import BAD_STATE
from ..grammar.codes_run import NO_AVERAGES
from .faults import RunError
from .opening import build_mesh, open_checkpoint, task_of
from .state.checkpoint import Checkpoint, CheckpointReader
from .state.initial import Initial

SUFFIX = ".safetensors"
_AVERAGES = f"optimizer.{AVERAGE}."
"""The beginning of the names that averages have in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that were written, and how many tensors and bytes of weights they hold."""

    files: tuple[Path, ...]
    tensors: int
    bytes: int


def export_weights(
    build: Build, folder: Path, out: Path, dtype: torch.dtype | None = None, shard_bytes: int = 5 * 10**9,
    ema: bool = False,
) -> Exported:  # fmt: skip
    """Write the weights of a build's checkpoint to ``out``: to one file if its name ends in ``.safetensors``, else to a
    new folder of files of at most ``shard_bytes``, with an index if there are several, and with ``config.json`` if the
    model has a configuration of transformers. Floating-point tensors get ``dtype`` if there is one. Of tied tensors
    the first is written: transformers and ``safetensors.torch.load_model`` tie the others to it. With ``ema`` trained
    weights are their averages.

    Raises:
        RunError: the checkpoint is of another model, altered, or without averages, or ``out`` exists or cannot be
            written.
    """
    checkpoint, _ = open_checkpoint(build, folder)
    if ema and not any(key.startswith(_AVERAGES) for key in checkpoint.shapes):
        help_ = "train with a line `ema 0.999` in the plan, or write the weights themselves, without `--ema`"
        raise RunError(NO_AVERAGES, f"`{folder}` has no averages of weights", help_)
    checkpoint.check_shards([*checkpoint.index.shards])
    one_file = out.suffix == SUFFIX
    if out.exists() and (one_file or not out.is_dir() or any(out.iterdir())):
        raise RunError(BAD_STATE, f"`{out}` exists; it is left as it is", "name a new file or a new folder")
    try:
        out.resolve().parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.resolve().parent))
    except OSError as error:
        raise RunError(BAD_STATE, f"`{out}` cannot be written: {error.strerror}", "name another place") from None
    try:
        with checkpoint.tensors() as files:
            tensors = _tensors(build, checkpoint, files, dtype, ema)
            held = _Shards(made, None if one_file else shard_bytes)
            held.write(tensors)
        if one_file:
            os.replace(made / held.names[0], out)
            return Exported((out,), len(held.places), held.bytes)
        _write_config(build, made, dtype)
        made.chmod(0o755)
        if out.exists():
            out.rmdir()
        os.replace(made, out)
        return Exported(tuple(sorted(out.iterdir())), len(held.places), held.bytes)
    except OSError as error:
        raise RunError(BAD_STATE, f"`{out}` cannot be written: {error}", "name another place") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _tensors(
    build: Build, checkpoint: Checkpoint, files: CheckpointReader, dtype: torch.dtype | None, ema: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the model's state by its own names, one after the other. Buffers that no step changes are as
    they were made."""
    mesh = build_mesh(build)
    initial = Initial(build, task_of(build.manifest), mesh, mesh.coordinates(0), torch.device("cpu"))
    for name in initial.kept:
        if name in build.manifest["aliases"]:
            continue
        places = (*([f"{_AVERAGES}{name}"] if ema else []), f"parameter.{name}", f"buffer.{name}")
        keys = [key for key in places if key in checkpoint.shapes]
        value = initial.own(name, files.whole(keys[0]) if keys else None)
        narrow = dtype is not None and value.is_floating_point()
        yield name, (value.to(dtype) if narrow else value).contiguous()


class _Shards:
    """Safetensors files of a bounded size in a folder, written one after the other."""

    def __init__(self, folder: Path, most: int | None) -> None:
        self.folder, self.most = folder, most
        self.names: list[str] = []
        self.places: dict[str, int] = {}
        self.bytes = 0

    def write(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write all tensors, and the index of the files if there are several."""
        waiting: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in tensors:
            if waiting and self.most is not None and size + tensor.nbytes > self.most:
                self._put(waiting)
                waiting, size = {}, 0
            waiting[name] = tensor
            size += tensor.nbytes
        self._put(waiting)
        count = len(self.names)
        final = [f"model-{at:05d}-of-{count:05d}{SUFFIX}" if count > 1 else f"model{SUFFIX}"
                 for at in range(1, count + 1)]  # fmt: skip
        for name, last in zip(self.names, final, strict=True):
            os.replace(self.folder / name, self.folder / last)
        self.names = final
        if count > 1:
            table = {name: final[at] for name, at in sorted(self.places.items())}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": table}
            (self.folder / f"model{SUFFIX}.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _put(self, tensors: dict[str, torch.Tensor]) -> None:
        name = f"part-{len(self.names)}"
        save_file(tensors, self.folder / name, metadata={"format": "pt"})
        self.places |= dict.fromkeys(tensors, len(self.names))
        self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        self.names.append(name)


def _write_config(build: Build, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the configuration of a model of transformers, as ``save_pretrained`` writes it."""
    lines = task_of(build.manifest)
    module = record(model_builder(lines, build.folder), int(build.manifest["seed"])).module
    config: Any = getattr(module, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config.architectures = [type(module).__name__]
    stored = dtype or next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    config.dtype = stored
    config.save_pretrained(folder)
    generation: Any = getattr(module, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(folder)
