"""``make bench-memory``: the largest model that trains inside a fixed limit of memory for each rank.

Llamas of one width and more and more layers train two steps on gloo ranks of one thread each: plain, under ZeRO 3, and
with their state in files. The limit counts what a rank takes beyond what Python and torch took before the model. It is
that of a memory cgroup (v2) of the rank's own where one can be made. Else it is ``RLIMIT_DATA``, which counts a
process's own writable pages and no files that it maps.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.command import Table, command
from benchmarks.sides import BUILDS, kernel_bytes
from benchmarks.turns import ROOT, Side, run

GROUPS = Path("/sys/fs/cgroup")
STEPS = 2
PLAN = """\
let       dp=1, layers=1, level=0, place=memory
model     "{examples}/llama.py:llama" (layers=$layers, width=512, heads=8, kv_heads=8, ffn=1408, vocab=512, length=64)
input     input_ids int64 [B, S]
input     targets int64 [B, S]
sizes     B=4, S=64
loss      cross_entropy(output.logits, targets)
data      synthetic
optimizer adamw lr 3e-4
seed      1
precision bf16
mesh      dp=$dp
shard     input_ids, targets [B/dp, _]
zero      $level over dp
"""
OFFLOAD = 'offload   optimizer, parameters, activations to "$place"\n'


@dataclass(frozen=True)
class Way:
    """A way to train: its name, its ranks and level of ZeRO, and whether its state lies in files."""

    name: str
    ranks: int
    level: int
    offload: bool


WAYS = (
    Way("plain", 1, 0, False),
    Way("zero 3", 4, 3, False),
    Way("offload", 1, 0, True),
    Way("zero 3, offload", 4, 3, True),
)
NO_MEMORY = ("allocate memory", "MemoryError", "bad_alloc", "Cannot allocate", "can't start new thread", "Signal")
"""Words in the errors of a rank that does not have the memory."""


@contextmanager
def limited(limit: int) -> Iterator[str]:
    """Limit what this process takes from now on, and yield what limits it."""
    group = GROUPS / f"parc-memory-limit-{os.getpid()}"
    try:
        if "memory" not in (GROUPS / "cgroup.subtree_control").read_text():
            raise OSError("no memory limits below the root of cgroup v2")
        group.mkdir()
        (group / "memory.max").write_text(str(kernel_bytes("/proc/self/status", "VmRSS") + limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        if group.is_dir():
            group.rmdir()
        resource.setrlimit(resource.RLIMIT_DATA, (kernel_bytes("/proc/self/status", "RssAnon") + limit,) * 2)
        yield "RLIMIT_DATA"
        return
    yield "memory.max of cgroup v2"


def train(build: Path, limit: int) -> tuple[float, str]:
    """Train on one rank. Return the seconds of the last step, and what limits its memory."""
    import torch
    import torch.distributed as dist

    import parc
    from parc.runtime.state.opening import check_source_of, open_build
    from parc.runtime.state.optimizer import make_optimizer

    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # starts gloo's threads
    check_source_of(open_build(build))  # imports the model's code
    make_optimizer({"w": torch.zeros(1)}, {**open_build(build).manifest["optimizer"], "groups": []})
    with limited(limit) as limiter:
        session = parc.load(build)
        for _ in range(STEPS):
            start = time.perf_counter()
            session.step()
        return time.perf_counter() - start, limiter


def trained(way: Way, layers: int, folder: Path, limit: int, timeout_s: float) -> tuple[str, ...] | None:
    """Return the cells of a row if a way trains so many layers; None if a rank does not have the memory. The build is
    without the checks that it has at any number."""
    from parc.checking.reports import report_of
    from parc.compiler.build.directory import write_build
    from parc.compiler.plan.plan import read_plan
    from parc.compiling.driver import compile_plan
    from parc.grammar.source import Source

    plan = Source("memory_limit.parc", PLAN.format(examples=ROOT / "examples") + OFFLOAD * way.offload)
    values = {"dp": way.ranks, "layers": layers, "level": way.level, "place": folder / "state"}
    defines = {name: str(value) for name, value in values.items() if way.offload or name != "place"}
    compiled = compile_plan(read_plan(plan, defines), folder)
    report, build = report_of(compiled), folder / str(layers)
    write_build(compiled.to_write(report), build)
    try:
        seconds, limiter = run(Side(train, (build, limit), way.ranks), timeout_s)[0]
    except subprocess.TimeoutExpired:
        return None
    except subprocess.CalledProcessError as failure:
        if failure.returncode > 0 and not any(words in failure.stderr for words in NO_MEMORY):
            raise
        return None
    (memory,) = report["memory"]
    sizes = report["parameters"], memory["peak_bytes"], sum(memory["offloaded"].values())
    parameters, peak, files = (size / 1e6 for size in sizes)
    return f"{parameters:.1f}", f"{peak:.0f}", f"{files:.0f}", f"{seconds:.3f}", limiter


def largest(cells_of: Callable[[int], tuple[str, ...] | None], most: int) -> tuple[int, tuple[str, ...]]:
    """Return the most layers that have cells, up to an eighth of them and to ``most``, with these: twice as many each
    time until some are too many, then halfway between."""
    good, bad = 0, most + 1
    best: tuple[str, ...] = ("",) * 5
    while bad - good > max(1, good // 8):
        layers = min(max(1, 2 * good), (good + bad) // 2)
        cells = cells_of(layers)
        if cells is None:
            bad = layers
        else:
            good, best = layers, cells
    return good, best


def main(wanted: str = "", *, limit: int = 512, most: int = 256, timeout: float = 300) -> None:
    """Print a row for each way with ``wanted`` in its name: the most layers, up to ``most``, that train within
    ``limit`` MiB a rank and ``timeout`` seconds."""
    print(f"the most layers within {limit} MiB a rank; megabytes are a rank's, as estimated\n")
    heads = ("ranks", "layers", "parameters (M)", "MB in memory", "MB in files", "s a step", "limited by")
    table = Table("way", *heads, names=16)
    BUILDS.mkdir(parents=True, exist_ok=True)
    for way in (way for way in WAYS if wanted in way.name):
        with tempfile.TemporaryDirectory(dir=BUILDS) as name:
            cells_of = partial(trained, way, folder=Path(name), limit=limit << 20, timeout_s=timeout)
            layers, cells = largest(cells_of, most)
            table.row(way.name, way.ranks, layers, *cells)


if __name__ == "__main__":
    command(main)
