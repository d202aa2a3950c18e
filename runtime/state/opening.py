"""The opening of a build for a run: its files, torch, the number of processes, the model's code and a checkpoint must
be those that it was built for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...compiler.build.build import Build, BuildError
from ...compiler.build.directory import MANIFEST, Custom, again, read_build
from ...compiler.capture.callables import CallableError
from ...compiler.capture.model_calls import TaskLines
from ...compiler.capture.model_code import changed_files
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType, parse_type
from ...compiler.padding.pads import pads_from, real_shape
from ...compiler.program.actions import FORWARD
from ...compiler.program.binding import BUFFERS
from ...compiler.program.optimizers import kept_slots
from ...compiler.program.step_values import LossTerm
from ...compiler.sizes.size_range import BATCH
from ...grammar.bounded import real_path
from ...grammar.codes import BAD_BUILD, BAD_STATE, MODEL_FAILED, OTHER_TORCH, WORLD_SIZE
from ...grammar.nearest import listed
from ..ranks.faults import RunError
from .checkpoint import Checkpoint, is_checkpoint, read_checkpoint
from .index import part_shapes
from .optimizer import restore_optimizer
from .step_state import stored_residuals


def build_mesh(build: Build) -> Mesh:
    """Return the build's mesh, with its axes in the order of its programs: the manifest's JSON has sorted keys."""
    return build.programs[FORWARD].mesh


def check_fits(build: Build, world: int, hosts: int = 1) -> None:
    """Check that a build fits this torch and a number of processes on so many hosts.

    Raises:
        RunError: one of them differs from the build's.
    """
    version = torch.__version__.split("+")[0]
    if build.manifest["torch"] != version:
        raise RunError(
            OTHER_TORCH, f"`{build.path}` was built with torch {build.manifest['torch']}; this is torch {version}",
            again(build.path),
        )  # fmt: skip
    mesh = build_mesh(build)
    if world != mesh.world:
        here = f"`parc run {build.path}`, or `torchrun --nproc-per-node {mesh.world} SCRIPT.py`"
        help_ = f"start {mesh.world}: {here if hosts == 1 else '`--nnodes` times `--nproc` is their number'}"
        raise RunError(WORLD_SIZE, f"{world} process{'es' * (world != 1)} for {mesh_text(mesh)}", help_)


def mesh_text(mesh: Mesh) -> str:
    """Return the mesh and its number of ranks as text."""
    if not mesh.axes:
        return "a mesh without axes, which has one rank"
    return f"a mesh of {mesh.declared}, which has {mesh.world} ranks"


def check_source_of(build: Build) -> None:
    """Check that the model's files are those that were built. Where one changed, none is imported.

    Raises:
        RunError: it changed, or it cannot be imported (why is in the notes).
    """
    try:
        changed = changed_files(task_of(build.manifest).sources, build.folder, build.manifest["model_source"])
    except CallableError as error:
        cause = error.__cause__
        notes = [f"{type(cause).__name__}: {cause}"] if cause is not None else []
        help_ = error.help or "a build is opened where its model's code and all that it imports are"
        raise RunError(MODEL_FAILED, str(error), help_, notes) from error
    if changed:
        raise RunError(BAD_BUILD, f"{listed(changed)} of the model's code changed since the build", again(build.path))


def task_of(manifest: Mapping[str, Any]) -> TaskLines:
    """Return the plan's lines about the model, its inputs and its loss, from a build's manifest."""
    model = manifest["model"]
    arguments, inputs = tuple(model["arguments"].items()), tuple(line["name"] for line in manifest["inputs"])
    places = tuple((line["name"], line["as"]) for line in manifest["inputs"] if "as" in line)
    batched = next((line["name"] for line in manifest["inputs"] if line["dims"][:1] == [BATCH]), "")
    terms = (LossTerm(**{**term, "operands": tuple(term["operands"])}) for term in manifest["loss"])
    return TaskLines(model["callable"], arguments, inputs, tuple(terms), places, batched)


def open_build(path: Path | str, custom: Custom = "imported") -> Build:
    """Open a build, with every file checked against its hash; ``custom`` is what ``read_build`` does about a person's
    own operators.

    Raises:
        RunError: it is no build, or was altered.
    """
    try:
        return read_build(Path(path), custom=custom)
    except BuildError as error:
        if is_checkpoint(Path(path)):
            help_ = f"name the build; `parc run BUILD --resume {path}` goes on from the checkpoint"
            raise RunError(BAD_BUILD, f"`{path}` is a checkpoint, not a build", help_) from None
        raise RunError(BAD_BUILD, str(error), error.help) from None


def constants_of(build: Build) -> dict[str, TensorType]:
    """Return the types of a model's buffers and constants by name."""
    return {name: value.type for name, value in build.programs[FORWARD].main.bound(*BUFFERS).items()}


def buffers_of(build: Build) -> list[str]:
    """Return the buffers that a checkpoint may hold: those that steps change. A build for inference does not know them,
    so it may read any."""
    names = build.manifest["updates"]
    return [*names] if build.trains else [*build.programs[FORWARD].main.bound("buffer")]


def checkpoint_bytes(build: Build) -> int:
    """Return the size of a build's checkpoint in bytes: parameters, the optimizer's state of each, buffers that steps
    change."""
    mesh, line, constants = build_mesh(build), build.manifest["optimizer"], constants_of(build)
    parameters = [parse_type(text, mesh) for text in build.manifest["parameters"].values()] * (
        1 + len(kept_slots(line))
    )
    everything = [*parameters, *(constants[name] for name in build.manifest["updates"])]
    pads, roles = pads_from(build.manifest["padding"]), tuple(build.roles.values())
    everything += [stored.type for stored in stored_residuals(roles, mesh, pads).values()]
    return sum(math.prod(type_.shape) * type_.dtype.itemsize for type_ in everything)


def build_of(folder: Path, custom: Custom = "imported") -> Build:
    """Open the build whose run wrote a checkpoint: where it was, or beside the checkpoint.

    Raises:
        RunError: it is no checkpoint, does not say which build that was, or there is none now.
    """
    place, name = read_checkpoint(folder).facts.get("build"), f"name the build too: `parc export BUILD {folder} -o OUT`"
    if not isinstance(place, str):
        raise RunError(BAD_STATE, f"`{folder}` does not say which build wrote it", name)
    places = (Path(place), real_path(folder).parent / Path(place).name)
    path = next((path for path in places if (path / MANIFEST).is_file()), None)
    if path is None:
        raise RunError(BAD_STATE, f"`{folder}` was written by a run of the build `{place}`, which is not there", name)
    return open_build(path, custom)


def open_checkpoint(build: Build, path: Path) -> tuple[Checkpoint, dict[str, list[str]]]:
    """Open a checkpoint from which a build can go on. Return with it the slots of the optimizer's state that it holds
    for each parameter: none for a build that trains nothing, which reads weights alone.

    Raises:
        RunError: it cannot be read, or is of another model or optimizer; the first faults are named.
    """
    checkpoint, mesh, pads = read_checkpoint(path), build_mesh(build), pads_from(build.manifest["padding"])
    types = {name: parse_type(text, mesh) for name, text in build.manifest["parameters"].items()}
    types = {name: replace(type_, shape=real_shape(type_.shape, pads.get(name, ()))) for name, type_ in types.items()}
    constants = constants_of(build)
    shapes = part_shapes({name: type_.shape for name, type_ in types.items()})
    buffers = {name: constants[name].shape for name in buffers_of(build)
               if build.trains or f"buffer.{name}" in checkpoint.shapes}  # fmt: skip
    checkpoint.check(shapes, buffers, more=not build.trains)
    if not build.trains:
        return checkpoint, {}
    dtypes = {part: type_.dtype for name, type_ in types.items() for part in part_shapes({name: type_.shape})}
    forms = {name: (shape, dtypes[name]) for name, shape in shapes.items()}
    return checkpoint, restore_optimizer(checkpoint, build.manifest["optimizer"], forms)
