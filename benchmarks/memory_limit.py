"""``make bench-memory``: the largest model that trains inside a fixed limit of memory for each rank.

Llamas of one width and more and more layers train two steps on gloo ranks of one thread each: plain, under ZeRO 3, and
with their state in files. The limit counts what a rank takes beyond what Python and torch took before the model. It is
that of a memory cgroup (v2) of the rank's own where one can be made. Else it is ``RLIMIT_DATA``, which counts a
process's own writable pages and no files that it maps.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.turns import LAUNCHED, ROOT

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


@contextmanager
def limited(limit: int) -> Iterator[str]:
    """Limit what this process takes from now on, and yield what limits it."""
    group = GROUPS / f"parc-memory-limit-{os.getpid()}"
    try:
        if "memory" not in (GROUPS / "cgroup.subtree_control").read_text():
            raise OSError("no memory limits below the root of cgroup v2")
        group.mkdir()
        (group / "memory.max").write_text(str(resident_bytes("VmRSS") + limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        if group.is_dir():
            group.rmdir()
        resource.setrlimit(resource.RLIMIT_DATA, (resident_bytes("RssAnon") + limit,) * 2)
        yield "RLIMIT_DATA"
        return
    yield "memory.max of cgroup v2"


def resident_bytes(kind: str) -> int:
    """Return one of the sizes that the kernel tells of this process."""
    row = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(f"{kind}:"))
    return int(row.split()[1]) * 1024


def worker(build: Path, limit: int) -> None:
    """Train on one rank; the first prints the seconds of the last step, and what limits its memory."""
    import torch
    import torch.distributed as dist

    import parc
    from parc.runtime.ranks.processes import join_processes
    from parc.runtime.state.opening import check_source_of, open_build
    from parc.runtime.state.optimizer import make_optimizer

    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join_processes()
        dist.all_reduce(torch.zeros(1))  # starts gloo's threads
    check_source_of(open_build(build))  # imports the model's code
    make_optimizer({"w": torch.zeros(1)}, {**open_build(build).manifest["optimizer"], "groups": []})
    with limited(limit) as said:
        session = parc.load(build)
        for _ in range(STEPS):
            start = time.perf_counter()
            session.step()
        if session.rank == 0:
            print(f"{time.perf_counter() - start:.3f} {said}", flush=True)
    os._exit(0)  # as in benchmarks/peers.py


def built(way: Way, layers: int, folder: Path) -> tuple[Path, int, dict[str, int]]:
    """Return the build of a way for so many layers, without the checks that it has at any number; its parameters, and
    the bytes of a rank as estimated."""
    from parc.checking.reports import report_of
    from parc.compiler.build.directory import write_build
    from parc.compiler.plan.plan import read_plan
    from parc.compiling.driver import compile_plan

    plan = folder / f"{way.name.replace(', ', '-').replace(' ', '')}.parc"
    plan.write_text(PLAN.format(examples=ROOT / "examples") + OFFLOAD * way.offload)
    values = {"dp": way.ranks, "layers": layers, "level": way.level, "place": folder / "state"}
    defines = {name: str(value) for name, value in values.items() if way.offload or name != "place"}
    compiled = compile_plan(read_plan(plan, defines), folder)
    report = report_of(compiled)
    out = folder / f"{plan.stem}-{layers}"
    write_build(compiled.to_write(report), out)
    (memory,) = report["memory"]
    return out, report["parameters"], {"peak": memory["peak_bytes"], "files": sum(memory["offloaded"].values())}


def trains(way: Way, build: Path, limit: int, timeout_s: float) -> str:
    """Return what the first rank says if all ranks train; "" if one does not have the memory."""
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={way.ranks}"] if way.ranks > 1 else []
    command = [sys.executable, *ranks, "-m", "benchmarks.memory_limit", "--worker", str(build), str(limit)]
    environment = {**os.environ, **LAUNCHED}
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    memory = ("allocate memory", "MemoryError", "bad_alloc", "Cannot allocate", "can't start new thread", "Signal")
    if ended.returncode and not any(word in ended.stderr for word in memory) and ended.returncode > 0:
        raise RuntimeError(f"{build.name} ended otherwise than for want of memory:\n{ended.stderr[-2000:]}")
    return ended.stdout.strip() if not ended.returncode else ""


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number that fits, up to an eighth of it and to ``most``."""
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def main(limit: int, most: int, timeout_s: float, wanted: str) -> None:
    """Print a row for each way with ``wanted`` in its name, as it is found."""
    print(f"the most layers within {limit >> 20} MiB a rank; megabytes are a rank's, as estimated\n")
    print("| way | ranks | layers | parameters (M) | MB in memory | MB in files | s a step | limited by |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
    for way in (way for way in WAYS if wanted in way.name):
        rows: dict[int, str] = {0: f"| {way.name} | {way.ranks} | 0 | | | | | |"}
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as name:

            def fits(layers: int, way: Way = way, folder: Path = Path(name), rows: dict[int, str] = rows) -> bool:
                build, parameters, memory = built(way, layers, folder)
                if said := trains(way, build, limit, timeout_s):
                    seconds, _, by = said.partition(" ")
                    sizes = f"{memory['peak'] / 1e6:.0f} | {memory['files'] / 1e6:.0f}"
                    rows[layers] = (
                        f"| {way.name} | {way.ranks} | {layers} | {parameters / 1e6:.1f} | {sizes} | {seconds} | {by} |"
                    )
                return bool(said)

            print(rows[largest(fits, most)], flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wanted", nargs="?", default="", help="only the ways whose name has this in it")
    parser.add_argument("--limit", type=int, default=512, help="MiB a rank")
    parser.add_argument("--most", type=int, default=256, help="the most layers to try")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a model counts as too large")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    if args.worker:
        worker(Path(args.worker[0]), int(args.worker[1]))
    main(args.limit << 20, args.most, args.timeout, args.wanted)
