"""Time and memory of building Llama 3 8B, on 64 ranks and on 16,384 in turn: a build must not grow with the ranks."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = {"dp=8, tp=8 (64 ranks)": "8", "dp=2048, tp=8 (16384 ranks)": "2048"}


def measure(dp: str, out: Path) -> tuple[float, float, float]:
    """Wall and processor seconds of one build in a process of its own, and the most memory it held, in GB."""
    words = ["build", "examples/llama3-8b.parc", "-D", f"dp={dp}", "-D", "tp=8", "-o", str(out)]
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "parc", *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    if status:
        sys.exit(f"parc {' '.join(words)} failed")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6


def main(times: int) -> None:
    """Measure each case in turn and print medians and minima."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            for name, dp in CASES.items():
                found[name].append(measure(dp, Path(folder) / "build"))
    for name, rows in found.items():
        wall, cpu, memory = zip(*rows, strict=True)
        print(
            f"{name:<28} wall {statistics.median(wall):5.1f} s (min {min(wall):.1f})   "
            f"cpu {statistics.median(cpu):5.1f} s (min {min(cpu):.1f})   memory {max(memory):.2f} GB"
        )
    first, second = (min(row[1] for row in rows) for rows in found.values())
    print(f"16384 ranks cost {second / first:.2f} of 64 (least processor time)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
