"""Export: the weights of a checkpoint as safetensors files by the model's own names, for whoever knows nothing of parc.

Ranks, padding and stacks are left behind. A file is at most a shard's size, and no more than that is held in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ...compiler.build.build import Build
from ...compiler.build.folders import replacing
from ...compiler.capture.adapters import base_names, is_adapted
from ...compiler.initial.files import Expected, Weights, WeightsError, open_weights, shown_faults, state_tensors
from ...compiler.layout.mesh import Shape
from ...compiler.program.optimizers import AVERAGE
from ...grammar.codes_build import BAD_STATE, BAD_WEIGHTS
from ...grammar.codes_run import NO_AVERAGES
from ..ranks.faults import RunError
from .checkpoint import Checkpoint, CheckpointReader, check_target
from .index import KEY, FileLayout, Index, part_shapes, shard_name, write_index
from .initial import Initial
from .opening import build_mesh, open_checkpoint, task_of
from .saving import checkpoint_facts, stored_of
from .shards import Piece, ShardFile, write_shard

# ---- adapters of the ``peft`` library in a trained model


def adapter_states(module: Any, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the name of each adapter of a model, and its tensors by the names that ``peft`` gives them in files. Only
    these are read of ``state``."""
    from peft import get_peft_model_state_dict

    for adapter in module.peft_config:
        yield adapter, get_peft_model_state_dict(module, state, adapter, save_embedding_layers=False)


def write_configuration(module: Any, adapter: str, folder: Path) -> None:
    """Write an adapter's configuration, as ``save_pretrained`` of its model does."""
    config = module.peft_config[adapter]
    trained, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = trained


def merged_weights(
    module: nn.Module, state: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model without adapters, by its own names, with what adapters add to their layers. No more
    than one layer is held at a time.

    Raises:
        RunError: no adapter wraps a layer, or one that does shares its weight with another layer.
    """
    bases = base_names(module)
    layers = {
        path: layer
        for path, layer in module.named_modules()
        if hasattr(layer, "merge") and hasattr(layer, "base_layer")
    }
    if not layers:
        raise RunError(BAD_STATE, "no adapter wraps a layer of the model", "write its weights without `--merge`")
    copies = {bases[name] for name in bases if ".modules_to_save." in name}
    done: set[str] = set()
    for name in state:
        path = next((path for path in _outer(name) if path in layers), None)
        base = bases[name]
        if path is None:
            if ".original_module." not in name or base not in copies:
                yield str(base), state[name]
        elif path not in done:
            done.add(path)
            _refuse_shared(path, aliases)
            for own, value in _merged_layer(path, layers[path], state):
                yield str(bases[own]), value


def _merged_layer(path: str, layer: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a wrapped layer, with what its adapters add."""
    names = [name for name in state if name.startswith(f"{path}.")]
    layer.load_state_dict({name.removeprefix(f"{path}."): state[name] for name in names}, assign=True)
    with torch.no_grad():
        layer.merge()  # type: ignore[operator]
    own = layer.state_dict()
    yield from ((name, own[key]) for name in names if (key := name.removeprefix(f"{path}.")).startswith("base_layer."))
    layer.to_empty(device="meta")


def _refuse_shared(path: str, aliases: Mapping[str, str]) -> None:
    for name, other in aliases.items():
        if {path} & {*_outer(name), *_outer(other)}:
            message = f"`{name}` and `{other}` are one weight, but an adapter changes it only in `{path}`"
            raise RunError(BAD_STATE, message, "write the adapters, without `--merge`, or leave this layer without one")


def _outer(name: str) -> Iterable[str]:
    """Return the modules in which a tensor lies, the innermost first."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))


def unadapted(module: Any) -> nn.Module:
    """Return the model that adapters wrap, or the module itself."""
    return module.get_base_model() if is_adapted(module) else module  # type: ignore[no-any-return]


# ---- import: safetensors files of a model's weights become a checkpoint of a build, without a step done.


def import_weights(
    build: Build, source: Path, out: Path, rounded: bool = False, shard_bytes: int = 5 * 10**9
) -> tuple[int, int]:
    """Write the weights in the safetensors files of a folder, or in one such file, as a checkpoint of a build. It has
    no state of an optimizer: a run that goes on from it begins with its first step. No more than a file of at most
    ``shard_bytes`` is held in memory. Return the numbers of tensors and bytes.

    Raises:
        RunError: the files cannot be read, or their tensors are not the model's: all that differ are named; or ``out``
            holds something else, or cannot be written.
    """
    mesh = build_mesh(build)
    initial = Initial(build, task_of(build.manifest), mesh, mesh.coordinates(0), torch.device("cpu"))
    expected = state_tensors(initial.module, build.manifest["aliases"])
    try:
        weights = open_weights(source, rounded)
    except WeightsError as error:
        raise RunError(BAD_WEIGHTS, str(error), "name a folder of safetensors files, or one such file") from None
    with closing(weights):
        if faults := weights.faults(expected):
            message, help_ = (
                f"the weights in `{source}` are not the model's",
                "import them under the build of their model",
            )
            raise RunError(BAD_WEIGHTS, message, help_, shown_faults(faults))
        check_target(out)
        try:
            with replacing(out) as fresh:
                return _write_weights(fresh, build, _tensors(build, initial, weights, expected), shard_bytes)
        except WeightsError as error:
            raise RunError(
                BAD_WEIGHTS, str(error), "it could be read before: see whether another process replaces it"
            ) from None
        except OSError as error:
            raise RunError(BAD_STATE, f"`{out}` cannot be written: {error}", "name another folder") from None


def _tensors(
    build: Build, initial: Initial, weights: Weights, expected: list[Expected]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint by their names there, each when it is asked for."""
    known = {name: tensor for tensor in expected for name in tensor.names}
    for key, stored in stored_of(build).items():
        shapes: dict[str, Shape] = {} if key.startswith(KEY) else part_shapes({key: stored.shape})
        for full in shapes:
            name = full.partition(".")[2]
            there = name in known and weights.has(known[name].names)
            value = weights.whole(known[name].names, stored.type.dtype) if there else initial.whole(name)
            yield full, value.to(stored.type.dtype)


def _write_weights(
    folder: Path, build: Build, tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int
) -> tuple[int, int]:
    shards: list[ShardFile] = []
    layouts: dict[str, FileLayout] = {}
    dtypes: dict[str, torch.dtype | None] = {}
    waiting: dict[str, Piece] = {}
    size = total = 0

    def put() -> None:
        shards.append(write_shard(folder / shard_name(len(shards), 2), waiting))
        waiting.clear()

    for name, value in tensors:
        if waiting and size + value.nbytes > shard_bytes:
            put()
            size = 0
        waiting[name] = Piece.whole(value)
        layouts[name], dtypes[name] = FileLayout.whole(value.shape, len(shards)), value.dtype
        size, total = size + value.nbytes, total + value.nbytes
    put()
    files = [shard_name(number, 2) for number in range(len(shards))]
    write_index(
        folder,
        Index(files, dict(enumerate(shards)), layouts, dtypes),
        checkpoint_facts(build, {"step": 0, "samples": 0}, {}),
    )
    return len(layouts), total


# ---- export


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
