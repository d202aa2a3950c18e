"""Processor time of ``examples/gpt.parc`` and of torch exporting one linear layer, in turn; and the seconds per line of
a model whose layers do not repeat."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINEAR = "import torch; torch.export.export(torch.nn.Linear(4, 4), (torch.randn(2, 4),))"
_LINE = re.compile(r"^    \S.* = (?:aten|parc)\.", re.MULTILINE)


def cost(*words: str) -> float:
    """Return the processor seconds of a Python process and its children, which must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a package that is installed has its bytecode
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(words)} failed")
    return usage.ru_utime + usage.ru_stime


def beside_export(times: int, folder: Path) -> None:
    """Print the cost of a build, and that of importing torch and exporting one linear layer."""
    pairs = []
    cost("-m", "parc", "build", "examples/gpt.parc", "-o", str(folder / "gpt"))  # which writes the bytecode
    for _ in range(times):
        built = cost("-m", "parc", "build", "examples/gpt.parc", "-o", str(folder / "gpt"))
        exported = cost("-c", _LINEAR)
        pairs.append((built, exported))
        print(f"examples/gpt.parc {built:6.1f} s    one linear layer {exported:6.1f} s    {built / exported:5.2f}")
    ratios = [built / exported for built, exported in pairs]
    print(f"of {times}: median ratio {statistics.median(ratios):.2f}, minimum {min(ratios):.2f}")


def not_repeated(folder: Path) -> None:
    """Print the cost of DenseNet-121 by the parts of a build, and for each operator of its programs."""
    words = ["-m", "parc", "build", "benchmarks/dense.parc", "-o", str(folder / "dense"), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, check=True)
    programs = (folder / "dense" / "programs").glob("*.py")
    operators = sum(len(_LINE.findall(path.read_text())) for path in programs)
    seconds = json.loads(ended.stdout)["seconds"]
    print(f"DenseNet-121, whose layers do not repeat: {operators:,} lines of programs")
    for part in ("capture", "passes", "checks"):
        print(f"  {part:8} {seconds[part]:7.1f} s, {1000 * seconds[part] / operators:6.2f} ms a line")


def main(arguments: Sequence[str]) -> None:
    """Measure and print, ``arguments[0]`` times."""
    with tempfile.TemporaryDirectory() as folder:
        beside_export(int(arguments[0]) if arguments else 3, Path(folder))
        not_repeated(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
