"""``make bench-checkpoints``: seconds and memory of saving and restoring the state of a model in parts.

Four gloo ranks of one thread hold the float32 parameters and the AdamW state of ``checkpoint_shards.parc``: 1.1 billion
parameters, 13 GB. (``python -m benchmarks.checkpoint_shards TURNS -D layers=2 -D width=1024`` takes a smaller model.)
parc's session, and ``torch.distributed.checkpoint`` with its ``FileSystem`` and its ``HuggingFace`` writer, save and
restore the same pieces, in turn, each in processes of its own. Memory is the anonymous memory of a process, sampled,
above what it was before the call, the largest of all ranks. All sides sync what they write.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.turns import LAUNCHED, ROOT

PLAN = ROOT / "benchmarks" / "checkpoint_shards.parc"
BUILD = ROOT / "build" / "bench" / "checkpoint-shards"
SIDES = ("parc", "torch FileSystem", "torch HuggingFace")
RANKS = 4


def anonymous_bytes() -> int:
    """Return the bytes of this process's anonymous memory, that of shared memory included."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[1]) << 10 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


def free_bytes() -> int:
    """Return the memory that processes can still have, what the system can free included."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")


@contextmanager
def watched(figures: dict[str, float]) -> Iterator[None]:
    """Measure the seconds of a block on all ranks, and the largest growth of anonymous memory in it."""
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
    grown = torch.tensor(max(most, anonymous_bytes()) - before)
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    figures["grown"] = float(grown)


def parc_calls(folder: Path) -> tuple[list[torch.Tensor], Callable[[], None], Callable[[], None]]:
    """Return the state of a session as if it had done a step, and its save and restore."""
    import parc

    session = parc.load(BUILD)
    for parameter in session.state.parameters.values():
        slots = {slot: torch.rand_like(parameter) for slot in ("exp_avg", "exp_avg_sq")}
        session.optimizer.state[parameter] = {"step": torch.tensor(1.0), **slots}
    tensors = [value for slots in session.optimizer.state.values() for value in slots.values() if value.dim()]
    return (
        [*session.state.parameters.values(), *tensors],
        lambda: session.save(folder),
        lambda: session.restore(folder),
    )


def torch_calls(side: str, folder: Path) -> tuple[list[torch.Tensor], Callable[[], None], Callable[[], None]]:
    """Return the same pieces as distributed tensors, and their save and load by torch."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    from parc.compiler.layout.placement import Split, parse_type
    from parc.runtime.ranks.processes import join_processes
    from parc.runtime.state.opening import build_mesh, open_build

    join_processes(torch.device("cpu"))
    build = open_build(BUILD)
    mesh, ranks = build_mesh(build), init_device_mesh("cpu", (RANKS,))
    state: dict[str, Any] = {}
    for name, text in build.manifest["parameters"].items():
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
        lambda: void(dcp.save(state, storage_writer=writer)),
        lambda: dcp.load(state, storage_reader=reader),
    )


def void(_: object) -> None:
    """Drop a value."""


def worker(side: str, folder: Path) -> None:
    """Run one rank of a side: a save, zeros, and a restore that brings the numbers back."""
    torch.set_num_threads(1)
    tensors, save, restore = parc_calls(folder) if side == "parc" else torch_calls(side, folder)
    held = torch.tensor(sum(value.numel() * value.element_size() for value in tensors))
    sums = [float(value.sum(dtype=torch.float64)) for value in tensors]
    figures: dict[str, dict[str, float]] = {"save": {}, "restore": {}}
    with watched(figures["save"]):
        save()
    for value in tensors:
        value.zero_()
    with watched(figures["restore"]):
        restore()
    assert [float(value.sum(dtype=torch.float64)) for value in tensors] == sums
    dist.all_reduce(held, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({**figures, "held": float(held)}), flush=True)
    dist.barrier()
    os._exit(0)  # as in benchmarks/peers.py


def measured(side: str) -> dict[str, Any]:
    """Run the ranks of one side, and return what was measured."""
    folder = ROOT / "build" / "bench" / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    script = ["-m", "benchmarks.checkpoint_shards", "--worker", side, str(folder)]
    command = [sys.executable, *ranks, *script]
    done = subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **LAUNCHED}, stdout=subprocess.PIPE)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return {**json.loads(done.stdout.decode().strip().splitlines()[-1]), "bytes": size}


def main(words: list[str]) -> None:
    """Build, run every side in turn, and print the table."""
    times = int(words.pop(0)) if words[:1] and words[0].isdigit() else 3
    command = [sys.executable, "-m", "parc", "build", str(PLAN), "-o", str(BUILD), *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    first = measured(SIDES[0])
    # That writer holds two copies of what it writes.
    needs = RANKS * (3 * first["held"] + (400 << 20))
    free = free_bytes()
    sides = SIDES if needs < free else SIDES[:-1]
    rows_of = {side: [measured(side)] if side != SIDES[0] else [first] for side in sides}
    for _ in range(times - 1):
        for side in sides:
            rows_of[side].append(measured(side))
    print(f"{RANKS} ranks hold {first['held'] / 2**20:.0f} MiB each; median seconds of {times} turns, most memory")
    print("| | save, s | grows by, MiB | restore, s | grows by, MiB | on disk, MiB |\n|---|---|---|---|---|---|")
    for side, rows in rows_of.items():
        cells = [
            cell
            for call in ("save", "restore")
            for cell in (
                f"{statistics.median(row[call]['seconds'] for row in rows):.2f}",
                f"{max(row[call]['grown'] for row in rows) / 2**20:.0f}",
            )
        ]
        print(f"| {side} | {' | '.join(cells)} | {rows[0]['bytes'] / 2**20:.0f} |")
    if sides != SIDES:
        print(f"{SIDES[-1]}: left out, it takes {needs / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]))
    main(sys.argv[1:])
