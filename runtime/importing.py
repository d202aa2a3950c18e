"""Import: safetensors files of a model's weights become a checkpoint of a build, without a step done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from ..compiler.build.build import Build
from ..compiler.build.folders import replacing
from ..compiler.initial.files import Expected, Weights, WeightsError, open_weights, shown_faults, state_tensors
from ..compiler.layout.mesh import Shape
from ..grammar.codes_build import BAD_STATE, BAD_WEIGHTS
from .faults import RunError
from .opening import build_mesh, task_of
from .saving import checkpoint_facts, stored_of
from .state.checkpoint import check_target
from .state.index import Index, shard_name, write_index
from .state.initial import Initial
from .state.layouts import FileLayout
from .state.shards import Piece, ShardFile, write_shard
from .state.stacks import KEY, part_shapes


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
