"""The parts of which sides are made: builds of plans, batches, and steps of eager models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.turns import ROOT

BUILDS = ROOT / "build" / "bench"
"""The folder of what benchmarks build."""
Batch = dict[str, torch.Tensor]


def built(out: Path, plan: Path | str, **values: object) -> Path:
    """Build a plan, which is a file or a text, with values for its ``let`` lines. Return ``out``, the folder of the
    build.

    Raises:
        SystemExit: the plan is refused; its message is printed.
    """
    if isinstance(plan, str):
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.parc").write_text(plan, encoding="utf-8")
        plan = Path(f"{out}.parc")
    defines = [word for name, value in values.items() for word in ("-D", f"{name}={value}")]
    command = [sys.executable, "-m", "parc", "build", str(plan), "-o", str(out), *defines]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr)
    return out


def report_in(build: Path) -> dict[str, Any]:
    """Return the report of a build."""
    report: dict[str, Any] = json.loads((build / "report.json").read_text(encoding="utf-8"))
    return report


def text_of(plan: Path) -> str:
    """Return the text of a plan with absolute paths, so that it may be written anywhere."""
    text = plan.read_text(encoding="utf-8")
    return re.sub(r'"(\.\.?/[^":]+)', lambda path: f'"{(plan.parent / path[1]).resolve()}', text)


def batch(samples: int, length: int, vocab: int) -> Batch:
    """Return the whole batch of a language model, the same on every rank."""
    words = torch.randint(0, vocab, (2, samples, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words[0], "targets": words[1]}


def share_of(whole: Batch) -> Batch:
    """Return the samples of this rank, where all have as many."""
    ranks = dist.get_world_size()
    return {name: tensor.chunk(ranks)[dist.get_rank()] for name, tensor in whole.items()}


def kernel_bytes(file: str, *names: str) -> int:
    """Return the sum of some sizes that the kernel tells of this process (``/proc/self/status``), or of the machine
    (``/proc/meminfo``)."""
    rows = (line.split() for line in Path(file).read_text(encoding="utf-8").splitlines())
    return sum(int(row[1]) << 10 for row in rows if row[0].rstrip(":") in names)


class Stopwatch:
    """A function whose calls are timed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self.function(*arguments)
        self.seconds += time.perf_counter() - start
        return result

    def lap(self) -> float:
        """Return the seconds inside the calls since the last lap."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@contextmanager
def without_onednn(off: bool) -> Iterator[None]:
    """Enter a block in which torch uses no products but its own, if ``off``. The warning about another library's TF32
    is silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=not off):
            yield


def adamw(model: nn.Module, lr: float = 3e-4) -> torch.optim.Optimizer:
    """Make torch's fused AdamW, as parc runs it, with a group for split parameters, which it does not mix with plain
    ones."""
    groups: dict[type, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=lr, weight_decay=0.1, fused=True)


def train_step(
    model: nn.Module, data: Batch, optimizer: Any, clip: float | None = None, autocast: bool = False
) -> Callable[[], float]:
    """Return a step of an eager language model, which returns the loss. The norm of the gradients is at most ``clip``;
    the forward may run under bfloat16's autocast."""
    parameters, device = list(model.parameters()), data["targets"].device.type

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(data["input_ids"]).logits.flatten(0, 1), data["targets"].flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        return float(loss.detach())

    return step
