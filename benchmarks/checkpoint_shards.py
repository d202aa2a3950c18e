"""``make bench-checkpoints``: seconds and memory of saving and restoring the state of a model in parts.

Four gloo ranks of one thread hold the float32 parameters and the AdamW state of ``checkpoint_shards.parc``: 1.1 billion
parameters, 13 GB. (``python -m benchmarks.checkpoint_shards TURNS -D layers=2 -D width=1024`` takes a smaller model.)
parc's session, and ``torch.distributed.checkpoint`` with its ``FileSystem`` and its ``HuggingFace`` writer, save and
restore the same pieces, in turn, each in processes of its own. Memory is the anonymous memory of a process, sampled,
above what it was before the call, the largest of all ranks. All sides sync what they write.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import parc
from benchmarks.command import Table, command
from benchmarks.sides import BUILDS, built, kernel_bytes
from benchmarks.turns import ROOT, Side, run
from parc.compiler.layout.placement import Split, parse_type
from parc.runtime.state.opening import build_mesh, open_build

PLAN = ROOT / "benchmarks" / "checkpoint_shards.parc"
SIDES = ("parc", "torch FileSystem", "torch HuggingFace")
RANKS = 4


def anonymous_bytes() -> int:
    """Return the bytes of this process's anonymous memory, that of shared memory included."""
    return kernel_bytes("/proc/self/status", "RssAnon", "RssShmem")


@contextmanager
def watched(figures: dict[str, float]) -> Iterator[None]:
    """Measure the seconds of a block on all ranks, and the growth of this rank's anonymous memory in it."""
    ctypes.CDLL(None).malloc_trim(0)  # or the call would take memory that was freed before, and seem to need none
    before, most, over = anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not over.wait(0.002):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=sample)
    dist.barrier()
    start = time.perf_counter()
    watcher.start()
    yield
    dist.barrier()
    figures["seconds"] = time.perf_counter() - start
    over.set()
    watcher.join()
    figures["grown"] = max(most, anonymous_bytes()) - before


Calls = tuple[list[torch.Tensor], Callable[[], object], Callable[[], object]]
"""The tensors of a state, its save and its restore."""


def parc_calls(build: Path, folder: Path) -> Calls:
    """Return the state of a session as if it had done a step, and its save and restore."""
    session = parc.load(build)
    for parameter in session.state.parameters.values():
        slots = {slot: torch.rand_like(parameter) for slot in ("exp_avg", "exp_avg_sq")}
        session.optimizer.state[parameter] = {"step": torch.tensor(1.0), **slots}
    tensors = [value for slots in session.optimizer.state.values() for value in slots.values() if value.dim()]
    return (
        [*session.state.parameters.values(), *tensors],
        lambda: session.save(folder),
        lambda: session.restore(folder),
    )


def torch_calls(side: str, build: Path, folder: Path) -> Calls:
    """Return the same pieces as distributed tensors, and their save and load by torch."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    opened = open_build(build)
    mesh, ranks = build_mesh(opened), init_device_mesh("cpu", (RANKS,))
    state: dict[str, Any] = {}
    for name, text in opened.manifest["parameters"].items():
        type_ = parse_type(text, mesh)
        kind = type_.placement["dp"]
        place = [Shard(kind.dim) if isinstance(kind, Split) else Replicate()]
        for slot in ("parameter", "exp_avg", "exp_avg_sq"):
            piece = torch.rand(type_.local(mesh), dtype=type_.dtype)
            state[f"{slot}.{name}"] = DTensor.from_local(piece, ranks, place, run_check=False)
    if side == "torch FileSystem":
        writer, reader = dcp.FileSystemWriter(folder), dcp.FileSystemReader(folder)
    else:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        reader = dcp.HuggingFaceStorageReader(str(folder))
    return (
        [value.to_local() for value in state.values()],
        lambda: dcp.save(state, storage_writer=writer),
        lambda: dcp.load(state, storage_reader=reader),
    )


def worker(side: str, build: Path, folder: Path) -> dict[str, Any]:
    """Run one rank of a side: a save, zeros, and a restore that brings the numbers back. Return what each took, and the
    bytes that this rank holds."""
    tensors, save, restore = parc_calls(build, folder) if side == "parc" else torch_calls(side, build, folder)
    sums = [float(value.sum(dtype=torch.float64)) for value in tensors]
    figures: dict[str, dict[str, float]] = {"save": {}, "restore": {}}
    with watched(figures["save"]):
        save()
    for value in tensors:
        value.zero_()
    with watched(figures["restore"]):
        restore()
    assert [float(value.sum(dtype=torch.float64)) for value in tensors] == sums
    return {**figures, "held": sum(value.nbytes for value in tensors)}


def measured(side: str, build: Path) -> dict[str, Any]:
    """Run the ranks of one side. Return the seconds of the first, and the most memory and bytes of any."""
    folder = BUILDS / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    ranks = run(Side(worker, (side, build, folder), RANKS))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    figures = {call: {"seconds": ranks[0][call]["seconds"], "grown": max(rank[call]["grown"] for rank in ranks)}
               for call in ("save", "restore")}  # fmt: skip
    return {**figures, "held": max(rank["held"] for rank in ranks), "bytes": size}


def main(times: int = 3, *values: str) -> None:
    """Build with ``name=value`` words for the plan's ``let`` lines, run every side in turn, and print the table."""
    build = built(BUILDS / "checkpoint-shards", PLAN, **dict(value.split("=") for value in values))
    first = measured(SIDES[0], build)
    # That writer holds two copies of what it writes.
    needs, free = RANKS * (3 * first["held"] + (400 << 20)), kernel_bytes("/proc/meminfo", "MemAvailable")
    sides = SIDES if needs < free else SIDES[:-1]
    rows_of = {side: [] if side != SIDES[0] else [first] for side in sides}
    for turn in range(times):
        for side in sides if turn else sides[1:]:
            rows_of[side].append(measured(side, build))
    print(f"{RANKS} ranks hold {first['held'] / 2**20:.0f} MiB each; median seconds of {times} turns, most memory\n")
    table = Table("", "save, s", "grows by, MiB", "restore, s", "grows by, MiB", "on disk, MiB", names=17)
    for side, rows in rows_of.items():
        cells = []
        for call in ("save", "restore"):
            cells.append(f"{statistics.median(row[call]['seconds'] for row in rows):.2f}")
            cells.append(f"{max(row[call]['grown'] for row in rows) / 2**20:.0f}")
        table.row(side, *cells, f"{rows[0]['bytes'] / 2**20:.0f}")
    if sides != SIDES:
        print(f"{SIDES[-1]}: left out, it takes {needs / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free")


if __name__ == "__main__":
    command(main)
