"""Processes of a run: what the launcher tells each, its device, and its process group."""

from __future__ import annotations

import atexit
import ctypes
import errno
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from weakref import WeakSet

import torch
import torch.distributed as dist

from ...grammar.codes import NO_DEVICE
from ...grammar.scratch import no_room
from .faults import RunError

STORE = "PARC_STORE"
"""The environment variable with the store through which processes meet, if ``parc run`` started them: a file of their
one host, or `tcp://ADDRESS:PORT/PREFIX`."""
DEVICE = "PARC_DEVICE"
"""The environment variable with ``cpu`` or ``cuda``, if the user chose one."""
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}  # fmt: skip
"""Settings of glibc. A step allocates the sizes that the last one freed, so freed memory stays with the process, as in
the caching allocator of a GPU. Large pages save misses of the TLB in products."""
_MALLOPT = {("MALLOC_TRIM_THRESHOLD_", "trim_threshold"): (-1, -1), ("MALLOC_MMAP_MAX_", "mmap_max"): (-4, 0)}
"""The options of glibc's ``mallopt`` for the same in a process that runs already, with their values, by the variable
and the tunable that set them: -1 trims never."""
TIMEOUT_S = 300.0

_timeout: timedelta | None = None


def data_limit_s() -> float:
    """Return the most seconds to wait for a batch of this rank's data: other ranks wait for this rank, and it is to say
    why before they give up. Without other ranks there is no limit."""
    return 0.8 * _timeout.total_seconds() if _timeout is not None else math.inf


class Holder(Protocol):
    """An object that holds process groups."""

    def release(self) -> None:
        """Release the groups."""


HOLDERS: WeakSet[Holder] = WeakSet()
"""The holders of process groups: a group can end only when nothing refers to it."""


def keep_memory() -> None:
    """Set ``KEEP_MEMORY`` in this process, where its environment says nothing else. Large pages are not among it: a
    process gets them from its start on, or not. Nothing is set where the C library has no such options."""
    library = ctypes.CDLL(None)
    for (name, tunable), option in _MALLOPT.items() if hasattr(library, "mallopt") else ():
        if name not in os.environ and f".{tunable}=" not in os.environ.get("GLIBC_TUNABLES", ""):
            library.mallopt(*option)


def launched() -> int:
    """Return the number of processes in the run that torchrun or ``parc run`` started this process for; 0 where neither
    did."""
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return int(os.environ["WORLD_SIZE"])
    return 0


def default_device() -> torch.device:
    """Return the device that was chosen; else this process's GPU, if there is one, else the CPU.

    Raises:
        RunError: a GPU was chosen, and there is none; or another kind of device.
    """
    word = os.environ.get(DEVICE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", word):
        raise RunError(
            NO_DEVICE, f"`{DEVICE}` is `{word}`, and parc computes on `cpu` or `cuda`", "set it to one of these"
        )
    device = torch.device(word)
    check_device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def check_device(device: torch.device, processes: int = 1) -> None:
    """Check that this host has a device for each of so many processes of a run.

    Raises:
        RunError: they are GPUs, and torch finds none, or fewer.
    """
    if device.type != "cuda":
        return  # asks no driver
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < max(processes, (device.index or 0) + 1):
        fewer = f"torch finds {gpus} GPU{'s' * (gpus != 1)} here, and {processes} processes need one each"
        missing = f"torch finds no `{device}` here"
        help_ = '`--device cpu` runs on the CPU, and so does `parc.load(build, torch.device("cpu"))`'
        raise RunError(NO_DEVICE, fewer if gpus and processes > gpus else missing, help_)


def join_processes(device: torch.device | None = None, timeout_s: float = TIMEOUT_S) -> torch.device:
    """Make the process group of a launched process, gloo on CPUs and NCCL on GPUs. Return the device that it computes
    on.

    A GPU without a number is the process's own among its host's. A collective that waits longer than ``timeout_s``
    seconds for another rank fails.

    Raises:
        RunError: there is no such device, or no room for the file in which processes meet.
    """
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = device or torch.device(default_device().type)
    check_device(device, local + 1 if device.index is None else 1)
    if device.type == "cuda":
        torch.cuda.set_device(local if device.index is None else device.index)
        device = torch.device("cuda", torch.cuda.current_device())
    global _timeout
    _timeout = wait = timedelta(seconds=timeout_s)
    stores: Any = dist  # torch does not declare what it exports here
    place = os.environ.get(STORE, "")
    if place.startswith("tcp://"):
        at = urlsplit(place)
        server = stores.TCPStore(at.hostname, at.port, None, False, wait, wait_for_workers=False)
        store = stores.PrefixStore(at.path, server)
    elif place:
        store = _file_store(Path(place), world)
    else:
        store = next(iter(stores.rendezvous("env://", rank, world, timeout=wait)))[0]
    store.set_timeout(wait)
    # after an elastic restart the launcher's store still has the keys of the group before
    store = stores.PrefixStore(f"parc{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    except dist.DistStoreError as error:
        if str(error) in _NO_ROOM:
            raise _no_room(Path(place).parent, str(error)) from None
        raise
    return device


_NO_ROOM = {os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENOENT)}
"""torch's texts of a file that cannot be written."""


def _file_store(place: Path, world: int) -> Any:
    """Return the store in a file, which must have a folder: torch would wait for that for five minutes, and hold
    Python's lock, so that no other thread could end the process.

    Raises:
        RunError: it cannot be written.
    """
    stores: Any = dist  # torch does not declare what it exports there
    try:
        place.touch()
        return stores.FileStore(str(place), world)
    except (OSError, dist.DistStoreError) as error:
        raise _no_room(place.parent, getattr(error, "strerror", None) or str(error)) from None


def _no_room(folder: Path, reason: str) -> RunError:
    said = no_room(reason, folder)
    return RunError(said.code, said.message, said.help)


@dataclass(slots=True)
class _Taking:
    """The ranks that take part in what is done now: their process group, None for all; and the groups made for it."""

    group: Any = None
    groups: list[Any] | None = None


_taking = _Taking()


def all_ranks() -> Any:
    """Return the process group of all ranks that take part in what is done now; None for the group of all."""
    return _taking.group


def place() -> tuple[int, int]:
    """Return this process's rank, and the number of ranks that take part."""
    return (dist.get_rank(all_ranks()), dist.get_world_size(all_ranks())) if dist.is_initialized() else (0, 1)


def new_group(ranks: Sequence[int]) -> Any:
    """Make a process group of some ranks with the timeout of the group of all; torch's default is longer."""
    alone = all_ranks() is not None  # the other ranks make no groups now
    group = dist.new_group(list(ranks), timeout=_timeout, use_local_synchronization=alone)
    if _taking.groups is not None:
        _taking.groups.append(group)
    return group


@contextmanager
def first_ranks(count: int) -> Iterator[bool]:
    """Enter a block in which the first ``count`` ranks work as if there were no others. Return whether this rank is one
    of them; the others skip the block's work. Groups that are made in it end with it. Collective."""
    global _taking
    before, (rank, world) = _taking, place()
    group = new_group(range(count)) if count < world else None
    _taking = _Taking(group, [] if group is None else [group])
    try:
        yield rank < count
    finally:
        groups, _taking = _taking.groups or [], before
        for ended in reversed(groups):
            if ended is not None and ended != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(ended)


def leave() -> None:
    """End the process group, if there is one, and those made beside it, with their threads. A group ends when nothing
    refers to it, also after ``destroy_process_group``."""
    for holder in list(HOLDERS):
        holder.release()
    if dist.is_initialized():
        dist.destroy_process_group()
    _unbind()


def _unbind() -> None:
    """Let a module of torch release the group of all: imported while there is one, its functions have it as a default,
    and None says the same."""
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in () if module is None else vars(module).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


@atexit.register
def _leave_at_exit() -> None:
    """End groups, also those that a script has destroyed and parc still holds, while there is an interpreter. Gloo's
    threads may still have to free tensors, for which they take Python's lock; after the interpreter's end Python ends
    a thread that asks for it, and C++ aborts the process.

    Not after an error under NCCL, which would wait for ranks that are still inside a collective.
    """
    failed = getattr(sys, "last_value", None) is not None
    if not (failed and dist.is_initialized() and dist.get_backend() == "nccl"):
        leave()
