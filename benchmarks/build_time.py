"""``make build-time``: what builds take.

First processor seconds: of ``examples/gpt.parc`` beside torch exporting one linear layer, in turn; of the smallest and
the largest example, with ``--base FOLDER`` in turn with another commit, whose checkout has a ``.venv``; and of each
line of a model whose layers do not repeat. Then time and memory of Llama 3 8B over layers and over ranks: a table, and
``build_time.svg``. ``python -m benchmarks.build_time TIMES`` builds each of those so many times, 0 for none.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import Table, command
from benchmarks.turns import ONE_THREAD, ROOT, beside

PICTURE = Path(__file__).with_suffix(".svg")
LAYERS = (2, 4, 8, 16, 32)
RANKS = (1, 8, 64, 512, 4096, 16384)
EXAMPLES = ("gpt", "llama3-405b")
SHAPE = (32, 64)  # layers and ranks of the one where the other varies
_LINEAR = "import torch; torch.export.export(torch.nn.Linear(4, 4), (torch.randn(2, 4),))"
_LINE = re.compile(r"^    \S.* = (?:aten|parc)\.", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    """The cost of a process: wall and processor seconds, those of the processor but for the kernel's, and the most
    memory it held, in GB."""

    wall: float
    cpu: float
    user: float
    memory: float


def cost(*words: str, environment: dict[str, str] | None = None, checkout: Path = ROOT) -> Cost:
    """Measure a Python process with its children, which must end well: of this checkout, or of another's ``.venv``."""
    python = sys.executable if checkout == ROOT else str(checkout / ".venv" / "bin" / "python")
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python, *words], cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=errors
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        if status:
            errors.seek(0)
            sys.exit(f"{' '.join(words)} failed in {checkout}:\n{errors.read()}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_utime, usage.ru_maxrss / 1e6)


def alone(checkout: Path = ROOT) -> dict[str, str]:
    """Return the environment of a build on one thread, of a package that is installed, which has its bytecode."""
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def beside_export(times: int, folder: Path) -> None:
    """Print the processor seconds of a build, and those of importing torch and exporting one linear layer."""
    environment = alone()
    build, ratios = ("-m", "parc", "build", "examples/gpt.parc", "-o", str(folder / "gpt")), []
    cost(*build, environment=environment)  # which writes the bytecode
    for _ in range(times):
        building, exporting = (cost(*words, environment=environment).cpu for words in (build, ("-c", _LINEAR)))
        ratios.append(building / exporting)
        print(f"examples/gpt.parc {building:6.1f} s    one linear layer {exporting:6.1f} s    {ratios[-1]:5.2f}")
    print(f"of {times}: median ratio {statistics.median(ratios):.2f}, minimum {min(ratios):.2f}")


def examples(times: int, folder: Path, base: Path) -> None:
    """Print the user's processor seconds of the examples, and their ratios to those of another checkout, which builds
    them in turn."""
    table = Table("user's seconds", "least", "median", "ratio (of medians)", names=24)
    for name in EXAMPLES:
        seconds: dict[Path, list[float]] = {base: [], ROOT: []}
        words = ("-m", "parc", "build", f"examples/{name}.parc", "-o", str(folder / name))
        for checkout in [*seconds] * times:
            seconds[checkout].append(cost(*words, environment=alone(checkout), checkout=checkout).user)
        for checkout, of_checkout in seconds.items():
            table.row(name if checkout == ROOT else f"{name}, base", *beside(of_checkout, seconds[base]))


def not_repeated(folder: Path) -> None:
    """Print the cost of DenseNet-121 by the parts of a build, and for each operator of its programs."""
    words = ["-m", "parc", "build", "benchmarks/dense.parc", "-o", str(folder / "dense"), "--json"]
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, env=alone(), capture_output=True, check=True)
    programs = (folder / "dense" / "programs").glob("*.py")
    operators = sum(len(_LINE.findall(path.read_text())) for path in programs)
    seconds = json.loads(ended.stdout)["seconds"]
    print(f"DenseNet-121, whose layers do not repeat: {operators:,} lines of programs")
    for part in ("capture", "passes", "checks"):
        print(f"  {part:8} {seconds[part]:7.1f} s, {1000 * seconds[part] / operators:6.2f} ms a line")


def measure(layers: int, ranks: int, out: Path) -> Cost:
    """Measure one build with every check. Up to 8 ranks are all of tensor parallelism."""
    tp = min(ranks, 8)
    words = ["-m", "parc", "build", "examples/llama3-8b.parc", "-o", str(out)]
    return cost(*words, "-D", f"layers={layers}", "-D", f"dp={ranks // tp}", "-D", f"tp={tp}")


def best(times: int) -> dict[tuple[int, int], Cost]:
    """Return the cheapest build of each case by processor time; the cases are built in turn."""
    cases = list(dict.fromkeys([*((layers, SHAPE[1]) for layers in LAYERS), *((SHAPE[0], ranks) for ranks in RANKS)]))
    cheapest: dict[tuple[int, int], Cost] = {}
    print("layers   ranks   wall s    cpu s   memory GB")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            for case in cases:
                cost = measure(*case, Path(folder) / "build")
                cheapest[case] = min(cheapest.get(case, cost), cost, key=lambda cost: cost.cpu)
                print(f"{case[0]:6} {case[1]:7} {cost.wall:8.1f} {cost.cpu:8.1f} {cost.memory:11.2f}", flush=True)
    return cheapest


def draw(costs: dict[tuple[int, int], Cost]) -> None:
    """Draw processor seconds over layers and over ranks, side by side on one scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    plt.rcParams.update({"svg.hashsalt": "parc", "svg.fonttype": "none", "font.size": 11})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(11, 4.4), layout="constrained")
    series = (
        (left, LAYERS, [costs[n, SHAPE[1]].cpu for n in LAYERS], "layers", f"{SHAPE[1]} ranks", "tab:blue"),
        (right, RANKS, [costs[SHAPE[0], n].cpu for n in RANKS], "ranks", f"{SHAPE[0]} layers", "tab:orange"),
    )
    for axes, places, seconds, name, fixed, color in series:
        axes.plot(places, seconds, marker="o", linewidth=2, color=color)
        for place, value in zip(places, seconds, strict=True):
            axes.annotate(f"{value:.1f}", (place, value), textcoords="offset points", xytext=(0, 8), ha="center")
        if name == "ranks":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(places, [f"{place:,}" for place in places])
        axes.set_xlabel(f"{name} ({fixed})")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    left.set_ylim(0, 1.25 * max(cost.cpu for cost in costs.values()))
    left.set_ylabel("processor time of one build (s)")
    figure.suptitle("Building Llama 3 8B, every check included: time follows the layers, not the ranks")
    figure.savefig(PICTURE, metadata={"Date": None})


def main(times: int = 1, *, base: str = "") -> None:
    """Measure, print and draw."""
    with tempfile.TemporaryDirectory() as folder:
        beside_export(3, Path(folder))
        examples(3, Path(folder), Path(base or ROOT).resolve())
        not_repeated(Path(folder))
    if not times:
        return
    costs = best(times)
    layer = (costs[SHAPE].cpu - costs[LAYERS[0], SHAPE[1]].cpu) / (SHAPE[0] - LAYERS[0])
    ranks = costs[SHAPE[0], RANKS[-1]].cpu / costs[SHAPE].cpu
    print(f"a layer costs {layer:.2f} s of processor time; {RANKS[-1]:,} ranks cost {ranks:.2f} of {SHAPE[1]}")
    draw(costs)
    print(f"the picture: {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    command(main)
