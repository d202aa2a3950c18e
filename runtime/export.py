"""Export: the weights of a checkpoint as safetensors files by the model's own names, for whoever knows nothing of parc.

Ranks, padding and stacks are left behind. A file is at most a shard's size, and no more than that is held in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ..compiler.build.build import Build
from ..compiler.capture.adapters import is_adapted
from ..compiler.program.optimizers import AVERAGE
from ..grammar.codes_build import BAD_STATE
from ..grammar.codes_run import NO_AVERAGES
from .adapters import adapter_states, merged_weights, unadapted, write_configuration
from .faults import RunError
from .opening import build_mesh, open_checkpoint, task_of
from .state.checkpoint import Checkpoint, CheckpointReader
from .state.initial import Initial

SUFFIX = ".safetensors"
_OTHER_FORMS = (".pt", ".pth", ".bin", ".ckpt", ".npz", ".npy", ".h5", ".gguf", ".onnx", ".pkl", ".zip")
"""The ends of the names of files with weights in other forms than parc writes."""
_AVERAGES = f"optimizer.{AVERAGE}."
"""The beginning of the names that averages have in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that were written, and how many tensors and bytes of weights they hold."""

    files: tuple[Path, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportForm:
    """The form in which weights are written. Floating-point tensors get ``dtype`` if there is one; a file has at most
    ``shard_bytes``. With ``ema`` trained weights are their averages; with ``merge`` adapters are merged into the layers
    that they wrap."""

    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    ema: bool = False
    merge: bool = False


def export_weights(build: Build, folder: Path, out: Path, form: ExportForm = ExportForm()) -> Exported:
    """Write the weights of a build's checkpoint to ``out``: to one file if its name ends in ``.safetensors``, else to a
    new folder of files, with an index if there are several, and with ``config.json`` if the model has a configuration
    of transformers. Of a model of ``peft`` a folder gets the adapters alone. Of tied tensors the first is written:
    transformers and ``safetensors.torch.load_model`` tie the others to it.

    Raises:
        RunError: the checkpoint is of another model, altered, or without averages; there are no adapters to merge; or
            ``out`` exists, is named as a file of another form, or cannot be written.
    """
    checkpoint, _ = open_checkpoint(build, folder)
    if form.ema and not any(key.startswith(_AVERAGES) for key in checkpoint.shapes):
        help_ = "train with a line `ema 0.999` in the plan, or write the weights themselves, without `--ema`"
        raise RunError(NO_AVERAGES, f"`{folder}` has no averages of weights", help_)
    checkpoint.check_shards([*checkpoint.index.shards])
    one_file = out.suffix == SUFFIX
    if out.suffix in _OTHER_FORMS:
        stem = out.with_suffix("")
        help_ = f"`-o {stem}{SUFFIX}` writes one file, and `-o {stem}` a folder as `from_pretrained` reads it"
        raise RunError(
            BAD_STATE, f"weights are written as safetensors, and the name `{out}` says something else", help_
        )
    if out.exists() and (one_file or not out.is_dir() or any(out.iterdir())):
        raise RunError(BAD_STATE, f"`{out}` exists; it is left as it is", "name a new file or a new folder")
    try:
        out.resolve().parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.resolve().parent))
    except OSError as error:
        raise RunError(BAD_STATE, f"`{out}` cannot be written: {error.strerror}", "name another place") from None
    try:
        with checkpoint.tensors() as files:
            state = _State(build, checkpoint, files, form.ema)
            written = list(_write_form(state, build, made, form, one_file))
        tensors, size = sum(len(shards.places) for shards in written), sum(shards.bytes for shards in written)
        if one_file:
            os.replace(made / written[0].names[0], out)
            return Exported((out,), tensors, size)
        made.chmod(0o755)
        if out.exists():
            out.rmdir()
        os.replace(made, out)
        return Exported(tuple(sorted(out.iterdir())), tensors, size)
    except (OSError, SafetensorError) as error:
        raise RunError(BAD_STATE, f"`{out}` cannot be written: {error}", "name another place") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_form(state: _State, build: Build, made: Path, form: ExportForm, one_file: bool) -> Iterator[_Shards]:
    """Write the files of a form into a folder."""
    module = state.module
    if is_adapted(module) and not form.merge and not one_file:
        for adapter, own in adapter_states(module, state):
            place = made if adapter == "default" else made / adapter
            place.mkdir(exist_ok=True)
            write_configuration(module, adapter, place)
            yield _Shards(place, None, "adapter_model").write(_narrowed(own.items(), form.dtype))
        return
    tensors = merged_weights(module, state, build.manifest["aliases"]) if form.merge else state.items()
    yield _Shards(made, None if one_file else form.shard_bytes).write(_narrowed(tensors, form.dtype))
    if not one_file:
        _write_config(unadapted(module), made, form.dtype)


def _narrowed(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as files hold them, with floating-point numbers in a type if one is given."""
    for name, value in tensors:
        narrow = dtype is not None and value.is_floating_point()
        yield name, (value.to(dtype) if narrow else value).contiguous()


class _State(Mapping[str, torch.Tensor]):
    """The tensors of a model's state in a checkpoint by its own names, each read when it is asked for. Buffers that no
    step changes are as they were made."""

    def __init__(self, build: Build, checkpoint: Checkpoint, files: CheckpointReader, ema: bool) -> None:
        mesh = build_mesh(build)
        self._initial = Initial(build, task_of(build.manifest), mesh, mesh.coordinates(0), torch.device("cpu"))
        self._checkpoint, self._files, self._ema = checkpoint, files, ema
        self._names = [name for name in self._initial.kept if name not in build.manifest["aliases"]]

    @property
    def module(self) -> nn.Module:
        """The model on fake tensors."""
        return self._initial.module

    def __getitem__(self, name: str) -> torch.Tensor:
        places = (*([f"{_AVERAGES}{name}"] if self._ema else []), f"parameter.{name}", f"buffer.{name}")
        keys = [key for key in places if key in self._checkpoint.shapes]
        return self._initial.own(name, self._files.whole(keys[0]) if keys else None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Shards:
    """Safetensors files of a bounded size in a folder, written one after the other."""

    def __init__(self, folder: Path, most: int | None, stem: str = "model") -> None:
        self.folder, self.most, self.stem = folder, most, stem
        self.names: list[str] = []
        self.places: dict[str, int] = {}
        self.bytes = 0

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Self:
        """Write all tensors, and the index of the files if there are several. Return the files themselves."""
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
        numbers = [f"-{at:05d}-of-{count:05d}" * (count > 1) for at in range(1, count + 1)]
        final = [f"{self.stem}{number}{SUFFIX}" for number in numbers]
        for name, last in zip(self.names, final, strict=True):
            os.replace(self.folder / name, self.folder / last)
        self.names = final
        if count > 1:
            table = {name: final[at] for name, at in sorted(self.places.items())}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": table}
            (self.folder / f"{self.stem}{SUFFIX}.index.json").write_text(json.dumps(index, indent=2) + "\n")
        return self

    def _put(self, tensors: dict[str, torch.Tensor]) -> None:
        name = f"part-{len(self.names)}"
        save_file(tensors, self.folder / name, metadata={"format": "pt"})
        (self.folder / name).chmod(0o644)  # for others to read, as the folder
        self.places |= dict.fromkeys(tensors, len(self.names))
        self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        self.names.append(name)


def _write_config(module: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the configuration of a model of transformers, as ``save_pretrained`` writes it."""
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
