"""The figures of a step beside its loss: work a second, use of the devices, memory, and waits."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from typing import Any, final

import torch

from ...compiler.analysis.flops import product_type, step_flops
from ...compiler.build.build import Build
from ...compiler.sizes.size_range import BATCH
from ..results import StepReport
from ..session import Session

_PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H20": 148e12,
    "A100": 312e12, "A800": 312e12, "A40": 150e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12, "MI250X": 383e12,
}  # fmt: skip
"""The operations a second of dense products in bfloat16 or float16, by a part of the device's name. Of two names that
fit, the longer one is meant. The makers' data sheets have these numbers, without sparsity."""


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the floating-point operations a second that a device can do in products of a type; None where that is not
    known.

    >>> peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16)
    989000000000000.0
    """
    fits = [part for part in _PEAKS if part in name]
    narrow = dtype in (torch.bfloat16, torch.float16)
    return _PEAKS[max(fits, key=len)] if fits and narrow else None


def work_per_step(build: Build) -> tuple[str, int]:
    """Return the unit and the count of a step's whole batch: ``tokens``, if the plan's first input holds whole numbers
    in two dims, else ``samples``."""
    sizes, line = build.manifest["sizes"], build.manifest["inputs"][0]
    if len(line["dims"]) == 2 and line["dtype"] in ("int32", "int64"):
        return "tokens", math.prod(int(sizes.get(dim, dim)) for dim in line["dims"])
    return "samples", int(sizes.get(BATCH, 1))


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank held in bytes: allocated on a GPU, or resident in the whole process on a
    CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@final
class Meter:
    """The figures of a session's steps. ``peak`` is what one device can do in a second, in floating-point operations;
    without it, it is looked up by the device's name, and there is no MFU where that is not known."""

    def __init__(self, session: Session, peak: float | None = None) -> None:
        self._device = session.device
        self.what, self.count = work_per_step(session.build)
        self.flops = step_flops(session.build.reference, session.build.microbatches)
        self._all_devices = self._peak(session.build, peak) * session.world

    def _peak(self, build: Build, peak: float | None) -> float:
        """Return the peak of one device, 0 where it is not known."""
        type_ = product_type(build.programs.values())
        if peak is None and self._device.type == "cuda" and type_ is not None:
            peak = peak_flops(torch.cuda.get_device_name(self._device), type_.dtype)
        return peak or 0.0

    def own(self, report: StepReport) -> list[int]:
        """Return this rank's row of numbers for ``figures``: bytes, and nanoseconds of a step, of its waits for data
        and of those for other ranks."""
        seconds = (report.seconds, report.waited_for_data, report.waited_for_ranks)
        return [peak_bytes(self._device), *(int(1e9 * part) for part in seconds)]

    def figures(self, report: StepReport, step_s: float, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the figures of a step that took so many seconds, from the rows of all ranks. Lists have a number for
        each rank. Waits are shares of its step; on a GPU, where a process does not wait for other ranks, there are
        none for those."""
        figures: dict[str, Any] = {
            "loss": report.loss, **report.metrics, "grad_norm": report.grad_norm, "lr": report.lr, "step_s": step_s,
            self.what: self.count, f"{self.what}_per_s": self.count / step_s,
            "model_flops_per_s": self.flops / step_s,
        }  # fmt: skip
        if report.loads:
            figures["loads"] = report.loads
        if self._all_devices:
            figures["mfu"] = self.flops / step_s / self._all_devices
        figures["peak_bytes"] = [row[0] for row in rows]
        figures["data_wait"] = [row[2] / max(1, row[1]) for row in rows]
        if self._device.type != "cuda":
            figures["rank_wait"] = [row[3] / max(1, row[1]) for row in rows]
        return figures
