"""The exchange of weights with other tools, as safetensors files by the model's own names: the export of a checkpoint's
weights, also of adapters of ``peft``, and the import of weights into a checkpoint.

Ranks, padding and stacks are left behind. A file is at most a shard's size, and no more than that is held in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ...compiler.build.build import Build
from ...compiler.build.folders import NEW_FOLDER, FolderError, fresh_folder, replacing
from ...compiler.capture.adapters import base_names, is_adapted
from ...compiler.capture.callables import source_place
from ...compiler.capture.complex.form import own_form
from ...compiler.initial.exported import CONFIG, VERSION, save_configs
from ...compiler.initial.files import Expected, Weights, WeightsError, open_weights, shown_faults, state_tensors
from ...compiler.layout.mesh import Shape
from ...compiler.program.optimizers import AVERAGE
from ...grammar.bounded import real_path
from ...grammar.codes import BAD_STATE, BAD_WEIGHTS, IMPORT_REFUSED, NO_AVERAGES
from ..ranks.faults import RunError
from .checkpoint import CHECKPOINT, Checkpoint, CheckpointReader, check_target
from .index import KEY, FileLayout, Index, part_shapes, shard_name, write_index
from .initial import Initial
from .opening import build_mesh, open_checkpoint, task_of
from .saving import checkpoint_facts, stored_of, writing_folder
from .shards import Piece, ShardFile, write_shard

SUFFIX = ".safetensors"
_OTHER_FORMS = (".pt", ".pth", ".bin", ".ckpt", ".npz", ".npy", ".h5", ".gguf", ".onnx", ".pkl", ".zip")
"""The suffixes of files of weights in forms that parc does not write."""
_AVERAGES = f"optimizer.{AVERAGE}."
"""The prefix of the names that averages have in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Files that were written, and how many tensors and bytes of weights they hold."""

    files: tuple[Path, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportForm:
    """The form in which weights are written. Floating-point tensors are cast to ``dtype`` if there is one; a file has
    at most ``shard_bytes``. With ``ema`` averages of trained weights are written in their place; with ``merge``
    adapters are merged into the layers that they wrap."""

    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    ema: bool = False
    merge: bool = False


def export_weights(
    build: Build, folder: Path, out: Path, form: ExportForm = ExportForm(), *,
    import_model: bool = False, note: Callable[[str], None] = lambda _: None,
) -> Exported:  # fmt: skip
    """Write the weights of a build's checkpoint to ``out``: to one file if its name ends in ``.safetensors``, else to a
    new folder of files, with an index if there are several, and with ``config.json`` if the model has a configuration
    of transformers. Of a model of ``peft`` a folder gets the adapters alone. Of tied tensors the first is written:
    transformers and ``safetensors.torch.load_model`` tie the others to it.

    The model's code is imported only where something is not in the files: a buffer that no step changes, or the files
    of ``peft``; ``note`` is told so. Where that code lies in the build's or the checkpoint's folder, which somebody
    else may have written, it is imported with ``import_model`` alone.

    Raises:
        RunError: the checkpoint is of another model, altered, or without averages; there are no adapters to merge; the
            model's code would be imported from these folders; or
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
    try:
        with writing_folder(out), checkpoint.tensors() as files:
            if one_file and os.path.lexists(out):
                raise FolderError(f"`{out}` exists; it is left as it is", "name a new file or a new folder")
            state = _State(build, checkpoint, files, form)
            if reason := state.module_reason(one_file):
                _hold_import(build, folder, reason, import_model, note)
            with _fresh_file(out) if one_file else replacing(out, NEW_FOLDER) as fresh:
                written = list(_write_form(state, build, fresh, form, one_file))
    except SafetensorError as error:
        raise RunError(BAD_STATE, f"`{out}` cannot be written: {error}", "name another place") from None
    files_written = (out,) if one_file else tuple(sorted(out.iterdir()))
    return Exported(files_written, sum(part.tensors for part in written), sum(part.bytes for part in written))


@contextmanager
def _fresh_file(out: Path) -> Iterator[Path]:
    """Enter a block that writes one file into an empty folder; then the file is at ``out``, where no other may be."""
    real = real_path(out.parent) / out.name
    real.parent.mkdir(parents=True, exist_ok=True)
    with fresh_folder(real) as fresh:
        yield fresh
        (file,) = fresh.glob(f"*{SUFFIX}")
        file.rename(real)


def _write_form(state: _State, build: Build, folder: Path, form: ExportForm, one_file: bool) -> Iterator[Exported]:
    """Write weights in a form into a folder, and yield what was written: the model, or each of its adapters."""
    if state.facts.get("configs") is None and not form.merge and not one_file and is_adapted(module := state.module):
        for adapter, tensors in _adapter_states(module, state):
            place = folder if adapter == "default" else folder / adapter
            place.mkdir(exist_ok=True)
            _write_adapter_config(module, adapter, place)
            yield _write_files(place, _narrowed(tensors.items(), form.dtype), None, "adapter_model")
        return
    weights = _merged_weights(state.module, state, build.manifest["aliases"]) if form.merge else state.items()
    yield _write_files(folder, _narrowed(weights, form.dtype), None if one_file else form.shard_bytes)
    if not one_file:
        _write_configs(state, folder, form.dtype)


def _narrowed(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as files hold them, with floating-point numbers cast to ``dtype`` if there is one."""
    for name, value in tensors:
        narrow = dtype is not None and value.is_floating_point()
        yield name, (value.to(dtype) if narrow else value).contiguous()


def _hold_import(build: Build, checkpoint: Path, reason: str, allowed: bool, note: Callable[[str], None]) -> None:
    """Say which code is imported, and why.

    Raises:
        RunError: it lies in the folder of the build or of the checkpoint, and is not ``allowed``.
    """
    target = build.manifest["model"]["callable"]
    file = source_place(target, build.folder)
    where = f"`{target}`" if file is None else f"`{file}`"
    for folder, what in ((build.path, "build"), (checkpoint, "checkpoint")):
        real = real_path(folder)
        if not allowed and any(real in (place, *place.parents) for place in (build.folder, file) if place is not None):
            message = f"{reason}: that would import {where}, which is in the folder of the {what}"
            raise RunError(IMPORT_REFUSED, message, "read that file; then say `--import-model`")
    note(f"importing {where}: {reason}")


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in name.split(".")]


class _State(Mapping[str, torch.Tensor]):
    """The tensors of a model's state in a checkpoint by its own names, each read when it is asked for. Buffers that no
    step changes have their initial values."""

    def __init__(self, build: Build, checkpoint: Checkpoint, files: CheckpointReader, form: ExportForm) -> None:
        self._build, self._checkpoint, self._files, self._form = build, checkpoint, files, form
        self.facts: Mapping[str, Any] = build.manifest.get("exported", {})
        stored = part_shapes({name: type_.shape for name, type_ in build.types.items()})
        names = {*stored, *self.facts.get("more", ())} - {*self.facts.get("without", ())}
        self._names = sorted(names - build.manifest["aliases"].keys(), key=_in_order)

    def module_reason(self, one_file: bool) -> str:
        """Return why the model itself is needed, "" if it is not."""
        if "configs" not in self.facts:
            return "the build is of an older parc, which did not note what it holds"
        if self._form.merge:
            return "adapters are merged by the model"
        if self.facts["configs"] is None and not one_file:
            return "only the model itself writes its configuration"
        made = next((name for name in self._names if not self._keys(name)), "")
        return f"`{made}` is in no file, and the model's code makes it" if made else ""

    @cached_property
    def _initial(self) -> Initial:
        mesh = build_mesh(self._build)
        return Initial(self._build, task_of(self._build.manifest), mesh, mesh.coordinates(0), torch.device("cpu"))

    @property
    def module(self) -> Any:
        """The model on fake tensors. Its code is imported."""
        return self._initial.module

    def _keys(self, name: str) -> list[str]:
        """Return the names that a tensor has in the checkpoint, the one to be read first."""
        places = (*([f"{_AVERAGES}{name}"] if self._form.ema else []), f"parameter.{name}", f"buffer.{name}")
        return [key for key in places if key in self._checkpoint.shapes]

    def __getitem__(self, name: str) -> torch.Tensor:
        keys = self._keys(name)
        if not keys:
            return self._initial.own(name, None)
        return own_form(self._files.whole(keys[0]), name in self.facts.get("complex", ()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write_files(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], most: int | None, stem: str = "model"
) -> Exported:
    """Write tensors to safetensors files of at most ``most`` bytes, and the index of the files if there are several,
    with the names that transformers gives them."""
    parts, size, part_of = list[Path](), 0, dict[str, int]()
    for group in _files_of(tensors, most):
        part = folder / f"part-{len(parts)}"
        save_file(group, part, metadata={"format": "pt"})
        part.chmod(0o644)  # for others to read, as the folder
        part_of |= dict.fromkeys(group, len(parts))
        size += sum(tensor.nbytes for tensor in group.values())
        parts.append(part)
    count = len(parts)
    numbers = [f"-{at:05d}-of-{count:05d}" * (count > 1) for at in range(1, count + 1)]
    names = [f"{stem}{number}{SUFFIX}" for number in numbers]
    for part, name in zip(parts, names, strict=True):
        os.replace(part, folder / name)
    if count > 1:
        index = {
            "metadata": {"total_size": size}, "weight_map": {name: names[at] for name, at in sorted(part_of.items())},
        }  # fmt: skip
        (folder / f"{stem}{SUFFIX}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return Exported(tuple(folder / name for name in names), len(part_of), size)


def _files_of(tensors: Iterable[tuple[str, torch.Tensor]], most: int | None) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each file, of at most ``most`` bytes or of one tensor. They are
    released when the next file is asked for."""
    group, size = dict[str, torch.Tensor](), 0
    for name, tensor in tensors:
        if group and most is not None and size + tensor.nbytes > most:
            yield group
            group.clear()
            size = 0
        group[name] = tensor
        size += tensor.nbytes
    yield group


def _write_configs(state: _State, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the configuration of a model of transformers, as ``save_pretrained`` writes it."""
    configs: Mapping[str, Any] | None = state.facts.get("configs")
    if configs is None:
        module = state.module
        save_configs(module.get_base_model() if is_adapted(module) else module, folder, dtype)
        return
    for name, saved in configs.items():
        value = {**saved, **_transformers_version()}
        if dtype is not None and name == CONFIG:
            value["dtype"] = str(dtype).removeprefix("torch.")
        (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _transformers_version() -> dict[str, str]:
    try:
        return {VERSION: version("transformers")}
    except PackageNotFoundError:
        return {}


# ---- import


def import_weights(
    build: Build, source: Path, out: Path, rounded: bool = False, shard_bytes: int = 5 * 10**9
) -> tuple[int, int]:
    """Write the weights in the safetensors files of a folder, or in one such file, as a checkpoint of a build. It has
    no optimizer state: a run that goes on from it begins with its first step. No more than a file of at most
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
            with writing_folder(out), replacing(out, CHECKPOINT) as fresh:
                return _write_weights(fresh, build, _checkpoint_tensors(build, initial, weights, expected), shard_bytes)
        except WeightsError as error:
            raise RunError(
                BAD_WEIGHTS, str(error), "it could be read before: see whether another process replaces it"
            ) from None


def _checkpoint_tensors(
    build: Build, initial: Initial, weights: Weights, expected: list[Expected]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint by their names there, each read when it is asked for: those that the files lack
    have their initial values."""
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
    """Write tensors as a checkpoint before its first step. Return the numbers of tensors and bytes."""
    shards: list[ShardFile] = []
    layouts: dict[str, FileLayout] = {}
    dtypes: dict[str, torch.dtype | None] = {}
    total = 0
    for group in _files_of(tensors, shard_bytes):
        layouts |= {name: FileLayout.whole(value.shape, len(shards)) for name, value in group.items()}
        dtypes |= {name: value.dtype for name, value in group.items()}
        total += sum(value.nbytes for value in group.values())
        pieces = {name: Piece.whole(value) for name, value in group.items()}
        shards.append(write_shard(folder / shard_name(len(shards), 2), pieces))
        del pieces  # it would keep this file's tensors while the next are read
    index = Index([shard_name(number, 2) for number in range(len(shards))], dict(enumerate(shards)), layouts, dtypes)
    write_index(folder, index, checkpoint_facts(build, {"step": 0, "samples": 0}, {}))
    return len(layouts), total


# ---- adapters of ``peft`` in a trained model


def _adapter_states(module: Any, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the name of each adapter of a model, and its tensors by the names that ``peft`` gives them in files. No
    other tensor of ``state`` is read."""
    from peft import get_peft_model_state_dict

    for adapter in module.peft_config:
        yield adapter, get_peft_model_state_dict(module, state, adapter, save_embedding_layers=False)


def _write_adapter_config(module: Any, adapter: str, folder: Path) -> None:
    """Write an adapter's configuration, as ``save_pretrained`` of its model does."""
    config = module.peft_config[adapter]
    trained, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = trained


def _merged_weights(
    module: nn.Module, state: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model by the names that they have without adapters, which are merged into the layers that
    they wrap. No more than one layer is held at a time.

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
        path = next((path for path in _modules_around(name) if path in layers), None)
        base = bases[name]
        if path is None:
            if ".original_module." not in name or base not in copies:
                yield str(base), state[name]
        elif path not in done:
            done.add(path)
            _refuse_shared(path, aliases)
            for inner, value in _merged_layer(path, layers[path], state):
                yield str(bases[inner]), value


def _merged_layer(path: str, layer: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a wrapped layer, with its adapters merged into them."""
    names = [name for name in state if name.startswith(f"{path}.")]
    layer.load_state_dict({name.removeprefix(f"{path}."): state[name] for name in names}, assign=True)
    with torch.no_grad():
        layer.merge()  # type: ignore[operator]
    merged = layer.state_dict()
    yield from (
        (name, merged[key]) for name in names if (key := name.removeprefix(f"{path}.")).startswith("base_layer.")
    )
    layer.to_empty(device="meta")


def _refuse_shared(path: str, aliases: Mapping[str, str]) -> None:
    """Refuse to merge a layer whose weight is tied to another's.

    Raises:
        RunError: it is.
    """
    for name, other in aliases.items():
        if {path} & {*_modules_around(name), *_modules_around(other)}:
            message = f"`{name}` and `{other}` are one weight, but an adapter changes it only in `{path}`"
            raise RunError(BAD_STATE, message, "write the adapters, without `--merge`, or leave this layer without one")


def _modules_around(name: str) -> Iterable[str]:
    """Return the modules that a tensor is in, the innermost first."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))
