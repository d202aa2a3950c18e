"""The ends of scripts of a person's own, many times beside other load: ``python -m tests.exits --runs 300``.

A process that ends while threads of its process groups run sometimes aborts: each pair of ranks here ends in one of
four ways, as a real process, and the sum of those that did not end with code 0 is printed.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

from tests.runtime.tiny import DATA, build

LOOP = """
import sys, time, torch, parc, torch.distributed as dist
torch.set_num_threads(1)
def main():
    session = parc.load(sys.argv[1])
    for _ in range(3):
        session.step()
    session.state_dict()
    if session.rank == 0:
        time.sleep(0.4)  # the other rank ends first
    if "close" in sys.argv[2]:
        session.close()
    if "destroy" in sys.argv[2]:
        dist.destroy_process_group()
main()
"""
WAYS = ("destroy", "close, destroy", "close", "neither")


def free_ports() -> Iterator[int]:
    """Yield ports that no other run takes: the system hands out none below 32768, and each is yielded once."""
    for port in range(20_000, 32_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):  # nobody listens
                yield port


def ended(folder: Path, way: str, port: int) -> list[tuple[int, str]]:
    """Run the loop on two ranks that meet at the port. Return the exit code and the output of each."""
    ranks = []
    for rank in range(2):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "CUDA_VISIBLE_DEVICES": ""}
        env |= {name: str(value) for name, value in told.items()}
        command = [sys.executable, str(folder / "loop.py"), str(folder / "build"), way]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [process.communicate(timeout=600)[0] for process in ranks]
    return [(process.returncode, output) for process, output in zip(ranks, outputs, strict=True)]


def main() -> int:
    """Run the loops, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=3, help="pairs of ranks that run beside each other")
    args = parser.parse_args()
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.at_once) as pool:
        folder = Path(name)
        build(folder, DATA)
        (folder / "loop.py").write_text(LOOP)
        ways = [WAYS[run % len(WAYS)] for run in range(args.runs)]
        ports = islice(free_ports(), args.runs)
        for way, ranks in zip(ways, pool.map(partial(ended, folder), ways, ports), strict=True):
            if any(code for code, _ in ranks):
                wrong[way] += 1
                print(
                    f"{way}: exit codes {[code for code, _ in ranks]}", *(text[-2000:] for _, text in ranks), sep="\n"
                )
    print(f"{wrong.total()} of {args.runs} runs ended wrongly, {args.at_once} at once: {', '.join(WAYS)} in turn")
    return min(1, wrong.total())


if __name__ == "__main__":
    sys.exit(main())
