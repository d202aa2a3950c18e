"""Offloading: the host's memory, or memory-mapped files, in which a rank keeps the values that ``offload`` lines
name."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import final

import torch

from ...compiler.analysis.memory import offload_buffers
from ...compiler.build.build import Build
from ...compiler.build.folders import FolderError, FolderHeld, hold_folder
from ...compiler.program.optimizers import OPTIMIZERS, kept_slots, update_units
from ...compiler.program.program import CARRIERS
from ...compiler.program.roles import Role
from ...grammar.bounded import real_path
from ...grammar.codes import OFFLOAD_FOLDER
from ...grammar.syntax import size_text
from ..machine.registry import Kernel, KernelContext
from ..ranks.faults import RunError
from .optimizer import fill_slots, make_optimizer

_ALIGNMENT = 64
"""The alignment of buffers in bytes, for the widest vectors of processors."""


@final
class HostMemory:
    """The memory of the host. Where programs compute in it, values are not copied."""

    def reserve(self, room: Mapping[int, int]) -> None:
        """Reserve nothing: the host's allocator does."""

    def empty_like(self, value: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor in the host's memory."""
        return torch.empty_like(value, device="cpu")

    def load(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a value in the memory of a device."""
        return value.to(device)


@final
class MappedFiles:
    """Files of one rank in a folder, mapped into memory. They have no names, so they end with the process,
    however that ends. Their blocks are allocated at once: a disk that fills up later takes nothing from them."""

    def __init__(self, folder: Path, word: str, named: str) -> None:
        """Use ``folder``, which the plan's line names ``named``, for the values of a word such as ``optimizer``."""
        self._folder, self._word, self._named = folder, word, named
        self._free: dict[int, list[memoryview]] = {}
        self._have: Counter[int] = Counter()
        self._maps: list[tuple[int, mmap.mmap]] = []

    def reserve(self, room: Mapping[int, int]) -> None:
        """Reserve buffers: ``room`` has their number by size in bytes, those in use included. What is missing is a new
        file.

        Raises:
            RunError: there is no room for the file.
        """
        lacking = {size: count - self._have[size] for size, count in room.items() if count > self._have[size]}
        total = sum(_aligned(size) * count for size, count in lacking.items())
        if not total:
            return
        try:
            mapped = _mapped(self._folder, total)
        except OSError as error:
            free = shutil.disk_usage(self._folder).free
            needs = f"{size_text(total)} for {self._word}, and {size_text(free)} are free there"
            message = f"`{self._named}` has too little space: this rank needs {needs} ({error.strerror or error})"
            help_ = "free some space, or name a folder on another disk in the plan's `offload` line"
            raise RunError(OFFLOAD_FOLDER, message, help_) from None
        whole, at = memoryview(mapped), 0
        self._maps.append((torch.frombuffer(mapped, dtype=torch.uint8).data_ptr(), mapped))
        for size, count in lacking.items():
            for _ in range(count):
                self._free.setdefault(size, []).append(whole[at : at + size])
                at += _aligned(size)
            self._have[size] += count

    def empty_like(self, value: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor in one of the files. Its buffer is free again when no tensor shares its storage.

        Raises:
            RunError: all buffers of this size are in use, and there is no room for another.
        """
        size = value.numel() * value.element_size()
        if not size:
            return value
        if not self._free.get(size):
            self.reserve({size: self._have[size] + 1})
        buffer = self._free[size].pop()
        lease = memoryview(buffer)  # held by the tensor's storage, and released with it
        weakref.finalize(lease, self._free[size].append, buffer).atexit = False
        strides = torch.empty_like(value, device="meta").stride()
        return torch.frombuffer(lease, dtype=value.dtype).as_strided(value.shape, strides)

    def load(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a value in the memory of a device; on the host it stays in the file, whose pages are prefetched."""
        start, size = value.data_ptr(), value.numel() * value.element_size()
        for first, mapped in self._maps:
            if first <= start < first + len(mapped) and hasattr(mapped, "madvise"):
                page = (start - first) // mmap.PAGESIZE * mmap.PAGESIZE
                mapped.madvise(mmap.MADV_WILLNEED, page, start - first + size - page)
        return value.to(device)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # others have put something there, or removed it
        folder.rmdir()


def _mapped(folder: Path, size: int) -> mmap.mmap:
    """Return a new file of a size in a folder, mapped into memory, without a name."""
    with TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS: blocks are allocated when they are written
            for at in range(0, size, 1 << 24):
                file.write(bytes(min(1 << 24, size - at)))
            file.flush()
        return mmap.mmap(file.fileno(), size)


@final
class Offloaded:
    """The offloaded state of one rank, as a build's ``offload`` lines say. Without such lines nothing is offloaded."""

    def __init__(self, build: Build, role: Role, rank: int, device: torch.device) -> None:
        """Lock the rank's folders, and reserve their room.

        Raises:
            RunError: another run holds one, or it cannot be written or has no room.
        """
        self._role, self._device = role, device
        self._line, self._frozen = build.manifest["optimizer"], frozenset(build.manifest["frozen"])
        self._folders = ExitStack()
        self._places: dict[str, HostMemory | MappedFiles] = {}
        """The places where offloaded values wait until a program reads them, by the words of ``offload`` lines."""
        self._end = weakref.finalize(self, self._folders.close)
        try:
            for folder, words in _by_folder(build).items():
                locked = None if folder is None else self._lock(build.folder, folder, rank)
                for word in words:
                    self._places[word] = HostMemory() if locked is None else MappedFiles(locked, word, folder or "")
            self.reserve(build)
        except BaseException:
            self.close()
            raise

    def _lock(self, plans: Path, folder: str, rank: int) -> Path:
        """Lock the rank's folder inside that of an ``offload`` line for this run, and return it. What others have put
        there stays.

        Raises:
            RunError: another run holds it, or it cannot be written.
        """
        place, since = real_path(plans / folder) / f"rank{rank}", time.strftime("%Y-%m-%d %H:%M:%S")
        who = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        other = "name another folder in the plan's `offload` line"
        try:
            self._folders.enter_context(hold_folder(place, who))
            place.mkdir(exist_ok=True)
        except FolderHeld as held:
            message = f"`{folder}` has the state of another run's rank {rank}: {held}"
            raise RunError(OFFLOAD_FOLDER, message, f"{other}, or wait until that run ends") from None
        except (OSError, FolderError) as error:
            message = f"`{folder}` cannot be written: {getattr(error, 'strerror', None) or error}"
            raise RunError(OFFLOAD_FOLDER, message, other) from None
        self._folders.callback(_remove_if_empty, place)
        return place

    def reserve(self, build: Build) -> None:
        """Reserve the room that a build needs at its sizes.

        Raises:
            RunError: there is not so much.
        """
        moments = dict.fromkeys(build.types.keys() - self._frozen, len(kept_slots(self._line)))
        role = next(role for role in build.roles.values() if role.name == self._role.name)
        for word, room in offload_buffers(role.programs, role.actions, build.types, moments, self._places).items():
            self._places[word].reserve(room)

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """The kernels of the lines that offload and load values."""
        return {CARRIERS["away"]: self._store, CARRIERS["back"]: self._load} if self._places else {}

    def _store(self, context: KernelContext, value: torch.Tensor, word: str) -> torch.Tensor:
        return self._put(word, value)

    def _load(self, context: KernelContext, value: torch.Tensor, word: str) -> torch.Tensor:
        return self._places[word].load(value, context.device)

    def _put(self, word: str, value: torch.Tensor) -> torch.Tensor:
        place = self._places[word]
        if isinstance(place, HostMemory) and value.device.type == "cpu":
            return value
        return place.empty_like(value).copy_(value)

    def parameter(self, value: torch.Tensor) -> torch.Tensor:
        """Return a parameter in the place where it is kept."""
        return self._put("parameters", value) if "parameters" in self._places and value.dim() else value

    def make_optimizer(self, parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of the plan, with its state in the place where it is kept."""
        optimizer = make_optimizer(parameters, self._line)
        if self.holds_slots:
            for name, parameter in parameters.items():
                if name not in self._frozen and parameter.dim():
                    fill_slots(optimizer, self._line, name, parameter, self._zeros)
        return optimizer

    @property
    def holds_slots(self) -> bool:
        """True where the optimizer's state is allocated in its place before the first step, and stays there."""
        return "optimizer" in self._places.keys() - set(self.idle)

    def _zeros(self, value: torch.Tensor) -> torch.Tensor:
        return self._places["optimizer"].empty_like(value).zero_()

    def units(self, parameters: Mapping[str, torch.Tensor]) -> list[list[str]] | None:
        """Return the names of the trained parameters that are updated together, unit by unit; None where one call
        updates all of them in place: its kernel is fused, and nothing is offloaded."""
        if OPTIMIZERS[self._line["name"]].fused and not self._places.keys() & {"optimizer", "parameters"}:
            return None
        return update_units({name: value.nbytes for name, value in parameters.items() if name not in self._frozen})

    @property
    def idle(self) -> list[str]:
        """The words of the lines that change nothing, because programs compute in the memory that they offload to."""
        on_host = self._device.type == "cpu"
        return [word for word, place in self._places.items() if on_host and isinstance(place, HostMemory)]

    def close(self) -> None:
        """Unlock the folders and remove them. Tensors in their files stay readable."""
        self._end()


def _by_folder(build: Build) -> dict[str | None, list[str]]:
    """Return the words of a build's ``offload`` lines by their folder, None for the host's memory."""
    folders: dict[str | None, list[str]] = {}
    for word, folder in build.manifest.get("offload", {}).items():
        folders.setdefault(folder, []).append(word)
    return folders
