"""The saving and restoring of a session's state: the shard that a rank writes of a checkpoint, and the parts that it
reads."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch

from ...compiler.build.build import Build
from ...compiler.build.folders import FolderError, disk_of, real_place, reason_of, replacing
from ...compiler.layout.mesh import Mesh, Shape
from ...compiler.layout.placement import parse_type
from ...compiler.padding.pads import pads_from
from ...compiler.padding.tensors import EntryRanges, ranges_of, runs_of
from ...compiler.program.optimizers import BESIDE, NUMBERS
from ...compiler.program.stacked import part_name
from ...grammar.bounded import real_path
from ...grammar.codes import BAD_STATE
from ..ranks.faults import RunError
from ..ranks.gather import everywhere, keepers_of, of_every_role, owners_of
from ..ranks.lockstep import RESTORE, Lockstep
from ..ranks.wire import sendable
from ..ranks.work import RankState
from .checkpoint import CHECKPOINT, CHECKPOINT_FORMAT, Checkpoint
from .index import (
    KEY,
    FileLayout,
    Index,
    StoredTensor,
    layout_parts,
    layouts_of,
    part_shapes,
    piece_parts,
    shard_name,
    write_index,
)
from .opening import buffers_of, build_mesh, constants_of, open_checkpoint
from .optimizer import slot_notes
from .shards import Piece, ShardFile, write_shard
from .step_state import check_residuals, read_residual, read_state, stored_residuals

sendable(ShardFile)
SAVE, CHECK_SAVE = "session.save", "session.check_save"
Slots = Mapping[str, Mapping[str, torch.Tensor | None]]
"""The slots of the optimizer's state of each parameter: its value if that is a number, None if it is a tensor like the
parameter."""


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A rank's part of a tensor of ``shape``: entry (i, j, …) of ``tensor`` is the whole tensor's at the i-th entry of
    the first dim's ``ranges``, the j-th of the second's, and so on.

    Complex numbers are pairs along a last dim of 2. Where nothing is padded the tensor is the one that is trained, not
    a copy.
    """

    tensor: torch.Tensor
    shape: Shape
    ranges: tuple[EntryRanges, ...]


def stored_of(build: Build) -> dict[str, StoredTensor]:
    """Return the tensors of a build's checkpoint by their names there, without the optimizer's state, which is laid out
    as the parameters are."""
    mesh, roles, pads = build_mesh(build), tuple(build.roles.values()), pads_from(build.manifest["padding"])
    constants = constants_of(build)
    parameters = {name: parse_type(text, mesh) for name, text in build.manifest["parameters"].items()}
    buffers = {name: constants[name] for name in buffers_of(build)}
    kinds = (("parameter", parameters, owners_of(roles, parameters)), ("buffer", buffers, keepers_of(roles, buffers)))
    stored = {
        f"{kind}.{name}": StoredTensor(type_, pads.get(name, ()), tuple(role.name for role in owners[name]))
        for kind, types, owners in kinds
        for name, type_ in types.items()
    }
    return stored | stored_residuals(roles, mesh, pads)


def checkpoint_facts(build: Build, done: Mapping[str, Any], state: Mapping[str, float]) -> dict[str, Any]:
    """Return the facts of a checkpoint beside its tensors: the progress ``done`` (steps, samples, places of loaders),
    the optimizer's name, the numbers of the loss scale, the build that wrote it, the format and parc's version."""
    parc = import_module(__name__.partition(".")[0])
    return {
        **done, "format": CHECKPOINT_FORMAT, "parc": parc.__version__,
        "optimizer": build.manifest["optimizer"]["name"], "state": dict(state), "build": str(real_path(build.path)),
    }  # fmt: skip


@final
class StateFiles:
    """The files of one rank's state. ``stored`` are the parameters, the buffers that steps change and the residuals of
    compressed gradients, by their names in a checkpoint (``parameter.w``, ``buffer.b``, ``state.residual.w``);
    ``roles`` are the names of all ranks' roles."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], mesh: Mesh, together: Lockstep, roles: Sequence[str]
    ) -> None:
        self._stored, self._mesh, self._together, self._roles = stored, mesh, together, roles
        self._rank, self._world = together.rank, together.world
        self._at = mesh.coordinates(self._rank)
        self._disks: dict[Path, Path] = {}
        """The mount point of the disk that each folder was on when it was first checked or written."""

    @cached_property
    def _layouts(self) -> dict[str, FileLayout]:
        return layouts_of(self._stored, self._mesh, self._roles)

    def _pieces(self, state: RankState) -> dict[str, Piece]:
        """Return the pieces of tensors that this rank holds, by their names in a checkpoint."""
        have = {f"parameter.{name}": tensor for name, tensor in state.parameters.items()}
        have |= {f"buffer.{name}": tensor for name, tensor in state.buffers.items()}
        have |= {f"{KEY}{name}": tensor.unsqueeze(0) for name, tensor in state.steps.items()}
        return {
            key: Piece(have[key], runs_of(stored.type, stored.pads, self._mesh, self._at))
            for key, stored in self._stored.items()
            if key in have and self._roles[self._rank] in stored.owners
        }

    def local(self, state: RankState, aliases: Mapping[str, str], names: Collection[str]) -> dict[str, LocalPart]:
        """Return this rank's parts of the tensors ``names``; those that it holds nothing of are left out."""
        parts = {}
        shapes = part_shapes({key: stored.shape for key, stored in self._stored.items() if not key.startswith(KEY)})
        pieces = (piece_parts(key, piece) for key, piece in self._pieces(state).items() if not key.startswith(KEY))
        for key, piece in chain.from_iterable(pieces):
            part = piece.cut(piece.tensor.detach())
            if part.untyped_storage().nbytes() > part.nbytes:  # rows of a whole weight, which is not this rank's part
                part = part.clone()
            parts[key.partition(".")[2]] = LocalPart(part, shapes[key], tuple(map(ranges_of, piece.runs)))
        parts |= {alias: parts[name] for alias, name in aliases.items() if name in parts}
        return {name: parts[name] for name in names if name in parts}

    # ---- saving

    def save(self, folder: Path, state: RankState, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint together with all other ranks; an older one at ``folder`` is replaced by a complete one.

        Raises:
            RunError: on every rank: ``folder`` holds something that is not a checkpoint, or one rank cannot write.
        """
        self._together.meet(SAVE)
        with self._together.doing("a checkpoint", state):
            slots = {
                name: numbers
                for role in of_every_role(_slot_numbers(state.parameters, optimizer), self._roles)
                for name, numbers in role.items()
            }
        with ExitStack() as stack:

            def begin() -> str:
                if self._rank:
                    return ""
                with writing_folder(folder):
                    self._check_disk(folder)
                    return stack.enter_context(replacing(folder, CHECKPOINT)).name

            fresh = everywhere(self._together.agreed(SAVE, begin), self._world)[0]
            shard = self._together.agreed(
                SAVE, lambda: self._write(folder, fresh, self.written(state, optimizer, slots))
            )
            shards = everywhere(shard, self._world)

            def end() -> None:
                if not self._rank:
                    with writing_folder(folder):
                        write_index(real_path(folder).with_name(fresh), self.index(shards, slots), facts)
                        stack.close()

            self._together.agreed(SAVE, end)

    def check_shared(self, folder: Path) -> None:
        """Check that every rank sees a folder that the first one makes beside ``folder``.

        Raises:
            RunError: on every rank: one does not, or nothing can be made there.
        """
        with ExitStack() as stack:

            def probe() -> str:
                if self._rank:
                    return ""
                with writing_folder(folder):
                    self._check_disk(folder)
                    real = real_place(folder)
                    real.parent.mkdir(parents=True, exist_ok=True)
                    return Path(stack.enter_context(TemporaryDirectory(prefix=f".{real.name}.", dir=real.parent))).name

            name = everywhere(self._together.agreed(CHECK_SAVE, probe), self._world)[0]
            self._together.agreed(CHECK_SAVE, lambda: self._shared_folder(folder, name))

    def _check_disk(self, folder: Path) -> None:
        """Check that a folder is on the disk on which it was first: of a disk that is gone the mount point is left, an
        empty folder of another disk.

        Raises:
            FolderError: it is not.
        """
        real = real_place(folder)
        before, now = self._disks.setdefault(real, disk_of(real)), disk_of(real)
        if now != before:
            message = f"`{folder}` cannot be written: the disk at `{before}` is no longer there"
            raise FolderError(message, "mount it again, or name another folder")

    def _shared_folder(self, folder: Path, name: str) -> Path:
        """Return the folder of a name that the first rank made beside ``folder``.

        Raises:
            RunError: this rank does not see it.
        """
        place = real_path(folder).with_name(name)
        if not place.is_dir():
            message = f"in `{folder}` rank {self._rank} does not find the files that rank 0 makes"
            raise RunError(BAD_STATE, message, "name a folder on a file system that all hosts of the run share")
        return place

    def written(self, state: RankState, optimizer: torch.optim.Optimizer, slots: Slots) -> dict[str, Piece]:
        """Return the pieces that this rank writes. Numbers, which all ranks have, are written by the first rank."""
        pieces = {}
        for key, piece in self._pieces(state).items():
            if self._rank in self._layouts[key].files:
                pieces[key] = piece
                kind, _, name = key.partition(".")
                for slot, number in slots.get(name, {}).items() if kind == "parameter" else ():
                    if number is None:
                        tensor = optimizer.state[state.parameters[name]][slot]
                        pieces[f"optimizer.{slot}.{name}"] = Piece(tensor, piece.runs)
        if not self._rank:
            pieces |= {
                f"optimizer.{slot}.{part}": Piece(number, ())
                for name, numbers in slots.items()
                for part in part_shapes({name: self._stored[f"parameter.{name}"].shape})
                for slot, number in numbers.items()
                if number is not None
            }
        return dict(chain.from_iterable(piece_parts(key, piece) for key, piece in pieces.items()))

    def _write(self, folder: Path, fresh: str, pieces: Mapping[str, Piece]) -> ShardFile | None:
        place = self._shared_folder(folder, fresh)
        if not pieces:
            return None
        name = shard_name(self._rank, self._world)
        with writing_folder(folder, name):
            return write_shard(place / name, pieces)

    def index(self, shards: Sequence[ShardFile | None], slots: Slots) -> Index:
        """Return the index of a checkpoint from the shard that each rank has written, None for a rank without one."""
        layouts, dtypes = {}, {}
        for key, stored in self._stored.items():
            kind, _, name = key.partition(".")
            for part, layout in layout_parts(key, self._layouts[key]):
                layouts[part], dtypes[part] = layout, stored.type.dtype
                for slot, number in slots.get(name, {}).items() if kind == "parameter" else ():
                    full = f"optimizer.{slot}.{part.partition('.')[2]}"
                    layouts[full] = layout if number is None else FileLayout.whole(())
                    dtypes[full] = stored.type.dtype if number is None else number.dtype
        files = [shard_name(rank, self._world) for rank in range(self._world)]
        return Index(files, {rank: shard for rank, shard in enumerate(shards) if shard is not None}, layouts, dtypes)

    # ---- restoring

    def restore(
        self, folder: Path, build: Build, state: RankState, optimizer: torch.optim.Optimizer, keep_slots: bool
    ) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Read a checkpoint together with all other ranks, each of them its own parts. Return its facts, and notes on
        differences to this run. Ranks share the work of checking the files, and no state changes before that is done.

        Raises:
            RunError: on every rank: it is of another model or optimizer, or altered.
        """
        together = self._together

        def opened() -> tuple[tuple[Checkpoint, dict[str, list[str]]], list[int]]:
            checkpoint, slots = open_checkpoint(build, folder)
            return (checkpoint, slots), [zlib.crc32(repr((checkpoint.facts, checkpoint.index.shards)).encode())]

        (checkpoint, slots), rows = together.exchanged(RESTORE, opened)
        if other := next((rank for rank, row in enumerate(rows) if row != rows[0]), None):
            raise RunError(
                BAD_STATE, f"rank {other} reads another checkpoint than rank 0", "name one checkpoint on all ranks"
            )
        steps = together.agreed(RESTORE, lambda: read_state(checkpoint, state.steps))
        notes = together.agreed(RESTORE, lambda: check_residuals(checkpoint, self._stored))
        notes += slot_notes(checkpoint, build.manifest["optimizer"])
        mine = range(self._rank, len(checkpoint.index.files), self._world)
        together.agreed(RESTORE, lambda: checkpoint.check_shards(mine))
        try:
            with together.doing("the reading of a checkpoint", state):
                together.agreed(RESTORE, lambda: self.read(checkpoint, slots, state, optimizer, keep_slots))
        except RunError as error:
            note = "the session's state is in parts the old one"
            raise RunError(error.code, error.message, error.help, (*error.notes, note)) from None
        state.steps.update(steps)
        return checkpoint.facts, notes

    def read(
        self,
        checkpoint: Checkpoint,
        slots: Mapping[str, Sequence[str]],
        state: RankState,
        optimizer: torch.optim.Optimizer,
        keep_slots: bool,
    ) -> None:
        """Read this rank's parts into its state, tensor by tensor. ``slots`` are those of the optimizer's state that
        the checkpoint has of each parameter. With ``keep_slots`` the tensors of its other slots stay where they are,
        and get their initial values. Buffers that the checkpoint lacks stay as they are.

        Raises:
            RunError: a file can no longer be read.
        """
        with checkpoint.tensors() as files:
            for key, piece in self._pieces(state).items():
                kind, _, name = key.partition(".")
                if key.startswith(KEY):
                    ranks = checkpoint.shapes.get(key, (0,))[0], self._stored[key].shape[0]
                    read_residual(files, key, ranks, piece.tensor, piece.runs)
                    continue
                if kind == "buffer":
                    if key in checkpoint.shapes:
                        state.buffers[name] = torch.zeros_like(piece.tensor)
                        files.fill(key, state.buffers[name], piece.runs)
                    continue
                files.fill(key, piece.tensor, piece.runs)
                before = optimizer.state.pop(piece.tensor, {})
                for slot in slots.get(part_name(name, 0), ()):
                    full = f"optimizer.{slot}.{name}"
                    if slot in NUMBERS:
                        moment = files.whole(full).to(piece.tensor.device)
                    else:
                        moment = torch.zeros_like(piece.tensor) if before.get(slot) is None else before[slot]
                        files.fill(full, moment, piece.runs)
                    optimizer.state[piece.tensor][slot] = moment
                for slot, value in before.items() if keep_slots else ():  # as before the first step, in its place
                    if value is not None and slot not in optimizer.state[piece.tensor]:
                        first = piece.tensor if slot in BESIDE else torch.tensor(NUMBERS.get(slot, 0.0))
                        optimizer.state[piece.tensor][slot] = value.copy_(first)


def _slot_numbers(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Slots:
    """Return the slots of the optimizer's state of a rank's parameters, with the values of numbers."""
    return {
        name: {
            key: None if value.dim() > 0 and value.shape == parameter.shape else value.cpu().clone()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        for name, parameter in parameters.items()
    }


@contextmanager
def writing_folder(folder: Path, file: str = "") -> Iterator[None]:
    """Enter a block that writes a folder of a run, or a file in it.

    Raises:
        RunError: it cannot be written, or something else is in the folder's place.
    """
    try:
        yield
    except OSError as error:
        message = f"{f'`{file}` of ' * bool(file)}`{folder}` cannot be written: {reason_of(error)}"
        raise RunError(BAD_STATE, message, "name another folder, or free some space") from None
    except FolderError as error:
        raise RunError(BAD_STATE, str(error), error.help) from None
