"""The opening of a session from a build's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from .data.sizes import bound_build
from .opening import check_fits, open_build
from .processes import join_processes, launched
from .session import Session


def load(
    path: Path | str,
    device: torch.device | str | None = None,
    sizes: Mapping[str, int] | None = None,
    *,
    compile: bool = False,
    trace: bool = False,
) -> Session:
    """Open a session of a build. If torchrun started the process, and there is no process group yet, make one.

    ``sizes`` are those of the batches of the plan's data, if the plan declares ranges.

    Raises:
        RunError: the build, torch, the sizes or the number of processes does not fit, or there is no compiler.
    """
    build = bound_build(open_build(path), sizes or {})
    if launched() and not dist.is_initialized():
        check_fits(build, launched())
        device = join_processes(torch.device(device) if device is not None else None)
    return Session(build, device, compile=compile, trace=trace)
