"""Checkpoints, opened and checked: tensors in safetensors files by the model's own names, facts in JSON, and an index
that says which file holds which part of which tensor."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...compiler.build.directory import MANIFEST
from ...compiler.build.folders import FolderError, FolderHeld, FolderKind, check_place, current, hold_folder, reason_of
from ...compiler.build.json_schema import FormError
from ...compiler.initial.files import OpenedFiles, held_type, opened_tensors, shown_faults
from ...compiler.layout.mesh import Shape
from ...compiler.padding.tensors import EntryRanges, EntryRun, crossings, packed
from ...compiler.program.stacked import part_name
from ...grammar.bounded import read_json, real_path
from ...grammar.codes import BAD_STATE, FOLDER_HELD
from ...grammar.nearest import path_meant
from ...grammar.syntax import size_text
from ..ranks.faults import RunError
from .index import (
    FACTS,
    INDEX_FILE,
    KEY,
    TENSOR_FILE,
    TENSORS,
    FileLayout,
    Index,
    extent,
    in_parts,
    numbered,
    read_facts,
    read_index,
    rectangle_text,
)
from .shards import ShardFault, check_shard

CHECKPOINT_FORMAT = 1
"""The format of checkpoints that this parc writes, and the newest one that it reads."""


def _checkpoint_files(folder: Path) -> tuple[str, ...] | None:
    """Return the names of a checkpoint's files, as its index tells; None for a folder without facts of a checkpoint.

    Raises:
        FolderError: a newer parc wrote it; or it has files of tensors that its index does not name, or no index.
    """
    try:
        facts = read_json(folder / FACTS)
    except (OSError, ValueError):
        return None
    if not isinstance(facts, dict) or type(facts.get("step")) is not int or not isinstance(facts.get("optimizer"), str):
        return None
    try:
        _check_format(folder, facts)
    except (RunError, TypeError) as newer:
        said = newer.message if isinstance(newer, RunError) else f"`{folder}`: {newer}"
        raise FolderError(f"{said}; it is left as it is", _KEEP) from None
    names: tuple[str, ...] = (TENSORS, FACTS)
    have = os.listdir(folder)
    tensors = [name for name in sorted(have) if TENSOR_FILE.fullmatch(name)]
    if "index" in facts and isinstance(facts.get("parc"), str) and not tensors and INDEX_FILE not in have:
        return (FACTS,)  # of a process that was killed while it removed the others
    if "index" in facts:
        try:
            names = (*read_index(folder, facts["index"]).files, INDEX_FILE, FACTS)
        except (OSError, ValueError, FormError) as fault:
            raise FolderError(f"`{folder}` is a checkpoint whose files parc does not know: {fault}", _KEEP) from None
    elif not _has_one_file(folder):
        return None
    if others := [name for name in tensors if name not in names]:
        raise FolderError(f"`{folder}` is a checkpoint, and its index does not name `{others[0]}` in it", _KEEP)
    return names


def _has_one_file(folder: Path) -> bool:
    """Return whether a folder has the one file of a checkpoint without index, whose tensors are named as a state's."""
    try:
        names = _of_one_file(folder).layouts
    except (SafetensorError, OSError):
        return False
    return all(name.startswith(("parameter.", "buffer.", "optimizer.", KEY)) for name in names)


_KEEP = "name another folder; or remove this one, if nobody needs it"
CHECKPOINT = FolderKind("a checkpoint", _checkpoint_files)


def check_target(folder: Path, kind: FolderKind = CHECKPOINT) -> None:
    """Check that a checkpoint, or another kind of folder, may be written at ``folder``.

    Raises:
        RunError: it holds something else, which is left as it is, or nothing can be written there.
    """
    try:
        check_place(folder, kind)
    except FolderError as error:
        raise RunError(BAD_STATE, str(error), error.help) from None


HELD_S = 10.0
"""The seconds to wait for the end of another run that saves to the same folder: one whose launcher was killed ends by
itself."""


@contextmanager
def target_held(folder: Path, size: int) -> Iterator[None]:
    """Lock ``folder``, where this run will save ``size`` bytes at a time, against other runs. The process that gives
    checkpoints their names holds it, so a run that has lost its launcher does, too, for as long as it may save.

    Raises:
        RunError: another run saves there, it holds something else, or it cannot be written; nothing was trained yet.
    """
    check_target(folder)
    with ExitStack() as stack:
        try:
            _hold(folder, stack)
            free = shutil.disk_usage(real_path(folder).parent).free
        except FolderHeld as held:
            help_ = "name another folder with `--save`, or wait until that run ends"
            raise RunError(FOLDER_HELD, f"another run saves to `{folder}`: {held}", help_) from None
        except FolderError as error:
            raise RunError(BAD_STATE, str(error), error.help) from None
        except OSError as error:
            message = f"`{folder}` cannot be written: {reason_of(error)}"
            raise RunError(BAD_STATE, message, "name another folder") from None
        if free < size:
            lacking = f"a checkpoint is {size_text(size)}, and {size_text(free)} are free there"
            help_ = "free some space, or name a folder on another disk: an old one stays until the new one is complete"
            raise RunError(BAD_STATE, f"`{folder}` cannot be written: {lacking}", help_)
        yield


def _hold(folder: Path, stack: ExitStack) -> None:
    """Lock a folder until the stack ends.

    Raises:
        FolderHeld: another process holds it, also after a while.
        OSError: nothing can be written beside it.
    """
    who = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    until, waits = time.monotonic() + HELD_S, False
    while True:
        try:
            stack.enter_context(hold_folder(folder, who))
            return
        except FolderHeld as held:
            if time.monotonic() >= until:
                raise
            if not waits:
                print(f"another run saves to `{folder}`: {held}; waiting {HELD_S:g} s for its end", file=sys.stderr)
        waits = True
        time.sleep(0.1)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its facts and its index. Tensors are read one by one, and of each only the entries asked for."""

    folder: Path
    facts: Mapping[str, Any]
    index: Index

    @property
    def step(self) -> int:
        """The number of steps done."""
        return int(self.facts["step"])

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes of the tensors, with complex numbers as pairs."""
        return {name: layout.shape for name, layout in self.index.layouts.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype | None]:
        """The dtypes of the tensors; None for one that programs do not hold."""
        return self.index.dtypes

    @contextmanager
    def tensors(self) -> Iterator[CheckpointReader]:
        """Open the files for as long as the block lasts."""
        reader = CheckpointReader(self)
        try:
            yield reader
        finally:
            reader.close()

    def check_shards(self, numbers: Collection[int]) -> None:
        """Check some of the files, by their numbers, against what was written. A checkpoint of one file without index
        has no checksums.

        Raises:
            RunError: a file is missing or altered; all such are named.
        """
        faults: list[str] = []
        held = self.index.held_by(numbers)
        for number, shard in self.index.shards.items():
            if number in held:
                name, parts = self.index.files[number], held[number]
                expected = {key: (self.dtypes[key], extent(parts[key])) for key in parts}
                try:
                    faults += [f"{fault} of `{name}`" for fault in check_shard(self.folder / name, shard, expected)]
                except (ShardFault, OSError) as fault:
                    said = fault if isinstance(fault, ShardFault) else f"cannot be read: {fault.strerror}"
                    faults.append(f"`{name}` {said}; {_contents(parts)}")
        refuse_altered(self.folder, faults)

    def check(
        self, parameters: Mapping[str, tuple[int, ...]], buffers: Mapping[str, tuple[int, ...]], more: bool = False
    ) -> None:
        """Check that the checkpoint fits a model's parameters, and the buffers that its steps change. It may hold
        ``more`` than these.

        Raises:
            RunError: tensors are missing, too many, or of other shapes; the first of them are named.
        """
        faults = self._faults("parameter", parameters, more) + (
            self._faults("buffer", buffers, more) if buffers else []
        )
        refuse(self.folder, "is a checkpoint of another model", faults)

    def _faults(self, kind: str, expected: Mapping[str, tuple[int, ...]], more: bool) -> list[str]:
        have = {key.removeprefix(f"{kind}."): s for key, s in self.shapes.items() if key.startswith(f"{kind}.")}
        faults = [f"`{name}` is missing" for name in expected if name not in have]
        faults += [f"`{name}` is not a {kind} of the model" for name in have if name not in expected and not more]
        return faults + [
            f"`{name}` is {list(have[name])} there and {list(shape)} in the model"
            for name, shape in expected.items()
            if name in have and have[name] != shape
        ]


_FAULTS_SHOWN = 5


def refuse(folder: Path, what: str, faults: Sequence[str]) -> None:
    """Raise the error of a checkpoint with these faults, if there are any.

    Raises:
        RunError: there are.
    """
    if faults:
        notes = shown_faults(faults)
        more = [f"and {len(notes) - _FAULTS_SHOWN} more"] if len(notes) > _FAULTS_SHOWN else []
        help_ = "name a checkpoint that this model wrote"
        raise RunError(BAD_STATE, f"`{folder}` {what}", help_, [*notes[:_FAULTS_SHOWN], *more])


def refuse_altered(folder: Path, faults: Sequence[str]) -> None:
    """Raise the error of a checkpoint whose files have these faults, if there are any.

    Raises:
        RunError: there are.
    """
    if faults:
        help_ = "put its files back as they were written, or go on from another checkpoint"
        raise RunError(BAD_STATE, f"`{folder}` is not as it was written", help_, shown_faults(faults))


def _contents(parts: Mapping[str, Sequence[EntryRanges]]) -> str:
    """Return what a file holds as a few words: its first tensor, and how many more there are."""
    name, rectangle = next(iter(parts.items()))
    more = f" and parts of {len(parts) - 1} more tensors" if len(parts) > 1 else ""
    return f"it holds {rectangle_text(rectangle)} of `{name}`{more}"


class CheckpointReader:
    """The open files of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder, self._index = checkpoint.folder, checkpoint.index
        self._opened = OpenedFiles()

    def fill(self, name: str, target: torch.Tensor, runs: Sequence[Sequence[EntryRun]]) -> None:
        """Read the entries of a tensor that ``runs`` name into ``target``, a rank's piece of it. No others are read.

        Raises:
            RunError: a file cannot be read.
        """
        if in_parts(name):
            for number, at in numbered(runs[0]):
                self.fill(part_name(name, number), target[at], runs[1:])
            return
        layout = self._index.layouts[name]
        counts = [len(parts) for parts in layout.parts]
        shared_by_dim = [
            [(number, shared) for number, part in enumerate(parts) if (shared := _shared_entries(of_dim, part))]
            for of_dim, parts in zip(runs, layout.parts, strict=True)
        ]
        for chosen in itertools.product(*shared_by_dim):
            place = 0  # of the rectangle, row by row
            for count, (number, _) in zip(counts, chosen, strict=True):
                place = place * count + number
            file = self._folder / self._index.files[layout.files[place]]
            for block in itertools.product(*(shared for _, shared in chosen)):
                here = tuple(slice(at, at + size) for at, _, size in block)
                target[here] = self._read(file, name, [((there, there + size),) for _, there, size in block])

    def _read(self, file: Path, name: str, ranges: Sequence[EntryRanges]) -> torch.Tensor:
        try:
            return self._opened.read(file, name, ranges)
        except (SafetensorError, OSError) as error:
            message, help_ = f"`{file}` cannot be read: {error}", "go on from another checkpoint"
            raise RunError(BAD_STATE, message, help_) from None

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor; for a stack, whose parts share a number such as ``step``, that number.

        Raises:
            RunError: a file cannot be read.
        """
        name = part_name(name, 0)
        shape = self._index.layouts[name].shape
        tensor = torch.zeros(shape, dtype=self._index.dtypes[name])
        if tensor.numel():
            self.fill(name, tensor, [packed(((0, size),)) for size in shape])
        return tensor

    def close(self) -> None:
        self._opened.close()


def _shared_entries(runs: Sequence[EntryRun], part: EntryRanges) -> list[tuple[int, int, int]]:
    """Return the entries of a dim that both a rank's piece and a part of a layout hold: the place in the piece, that in
    the part, and the count."""
    if not runs or part[0][0] >= runs[-1].first + runs[-1].size or part[-1][1] <= runs[0].first:
        return []
    return crossings(runs, packed(part))


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder looks like one that a run saves to."""
    return (path / FACTS).is_file() and not path.name.startswith(".")


def saved_step(folder: Path) -> int | None:
    """Return the step of the checkpoint at a folder, None if there is none that can be read."""
    try:
        return read_checkpoint(folder).step
    except RunError:
        return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint: its facts and its index are read and checked, no tensor yet.

    Raises:
        RunError: it is not a checkpoint, or its files cannot be read.
    """
    named, folder = folder, current(folder)
    try:
        _check_format(named, read_json(folder / FACTS))  # a newer one may have another checksum
        facts = read_facts(folder)
        index = read_index(folder, facts["index"]) if "index" in facts else _of_one_file(folder)
        for name, number in (("step", facts["step"]), ("samples", facts.get("samples", 0))):
            if type(number) is not int or not 0 <= number < 2**53:
                done = f"no number of {name.removesuffix('s')}s done"
                raise ValueError(f"its {FACTS} has {name} {number!r}, which is {done}")
        for name, place in facts.get("loaders", {}).items():
            if not isinstance(place, list) or [type(number) for number in place] != [int, int] or min(place) < 0:
                raise ValueError(f"its {FACTS} has {place!r} as the place of the loader {name!r}")
    except (FileNotFoundError, NotADirectoryError):
        lacks = f"is not a checkpoint: it has no {FACTS} or no {TENSORS}" if folder.exists() else "does not exist"
        lacks = "is a build, not a checkpoint" if (folder / MANIFEST).is_file() else lacks
        lacks = "is a file, and a checkpoint is a folder" if folder.is_file() else lacks
        help_ = "name a folder that `parc run --save` or `session.save` wrote"
        marked = any((folder / name).is_file() for name in (FACTS, MANIFEST))
        if not marked and any(path.is_file() for path in (named, *named.glob("*")) if path.suffix == ".safetensors"):
            help_ = f"`parc import BUILD {named} -o DIR` makes a checkpoint of a model's weights"
        help_ = path_meant(named, is_checkpoint, help_)
        raise RunError(BAD_STATE, f"`{named}` {lacks}", help_) from None
    except (SafetensorError, FormError, ValueError, KeyError, TypeError, AttributeError, OSError) as broken:
        file = f"{TENSORS} in " if isinstance(broken, SafetensorError) else ""
        message = f"{file}`{named}` cannot be read: {broken}"
        raise RunError(BAD_STATE, message, "go on from another checkpoint") from None
    refuse_altered(folder, index.faults(folder))
    return Checkpoint(folder, facts, index)


def _check_format(named: Path, facts: Mapping[str, Any]) -> None:
    """Check that a checkpoint is of a format that this parc reads. Checkpoints without one are of format 1, too.

    Raises:
        RunError: it is of a newer format.
        TypeError: its format is no number, or it has no facts.
    """
    if not isinstance(facts, Mapping):
        raise TypeError(f"its {FACTS} is a {type(facts).__name__}, and no object of facts")
    have = facts.get("format", CHECKPOINT_FORMAT)
    if type(have) is not int:
        raise TypeError(f"its {FACTS} has the format {have!r}")
    if have > CHECKPOINT_FORMAT:
        message = f"`{named}` is a checkpoint of format {have}, and this parc reads format {CHECKPOINT_FORMAT}"
        by = f" {facts['parc']}" if isinstance(facts.get("parc"), str) else ""
        raise RunError(BAD_STATE, message, f"go on with the parc{by} that wrote it, or from another checkpoint")


def _of_one_file(folder: Path) -> Index:
    """Return the index of a checkpoint without one: whole tensors in one file."""
    with opened_tensors(folder / TENSORS) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 no mapping
        types = {name: held_type(slice_.get_shape(), slice_.get_dtype()) for name, slice_ in slices.items()}
    layouts = {name: FileLayout.whole(shape) for name, (shape, _) in types.items()}
    return Index([TENSORS], {}, layouts, {name: dtype for name, (_, dtype) in types.items()})
