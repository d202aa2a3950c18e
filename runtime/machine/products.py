"""Products of float32 matrices on a CPU, by oneDNN where it is the faster of torch's two libraries.

torch multiplies such matrices with its BLAS, which is Intel's in its packages: on another maker's processor with
AVX-512 it reaches half of the peak. oneDNN, which torch ships for narrow types, reaches all of it. Both round once an
addition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...compiler.analysis import products
from ...compiler.torch_private import onednn_linear
from ..ranks.processes import check_device
from .kernels import KERNELS
from .registry import Kernel, KernelContext, code_for, runs

_PROBE = 256
"""The rows and columns of the measured product, which takes a fraction of a millisecond."""
_LEAST_SPEEDUP = 1.5
"""The least ratio of times at which oneDNN counts as faster, so that noise never decides."""


def kernels_for(device: torch.device) -> Mapping[str, Kernel]:
    """Return the kernels for a device as measured in this process, ``KERNELS`` among them.

    Raises:
        RunError: there is no such device here.
    """
    check_device(device)
    usable = device.type == "cpu" and onednn_linear() is not None
    return {**KERNELS, **code_for("onednn")} if usable and _is_faster(torch.get_num_threads()) else KERNELS


def agreed_kernels(device: torch.device, exchange: Callable[[Sequence[int]], list[list[int]]]) -> Mapping[str, Kernel]:
    """Return the kernels that all ranks use on their devices: those of oneDNN only if every rank measured it as faster,
    so that equal work has bitwise equal results.

    Raises:
        RunError: there is no such device here.
    """
    kernels = kernels_for(device)
    return kernels if all(row[0] for row in exchange([int(kernels is not KERNELS)])) else KERNELS


@cache
def _is_faster(threads: int) -> bool:
    """Return whether oneDNN is clearly faster with so many threads, measured once in a process."""
    linear: Any = onednn_linear()
    a, b = torch.ones(_PROBE, _PROBE), torch.ones(_PROBE, _PROBE)
    return _seconds(lambda: torch.mm(a, b)) > _LEAST_SPEEDUP * _seconds(lambda: linear(a, b))


def _seconds(function: Callable[[], object], times: int = 8) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _large(a: Tensor, b: Tensor) -> bool:
    return a.dtype == torch.float32 and a.shape[0] * a.shape[1] * b.shape[1] >= products.LARGE_PRODUCT


@runs("aten.mm.default", "onednn")
def _mm(ctx: KernelContext, a: Tensor, b: Tensor) -> Tensor:
    return _onednn_product(ctx, a, b, None) if _large(a, b) else torch.mm(a, b)


@runs("aten.addmm.default", "onednn")
def _addmm(ctx: KernelContext, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if bias.dim() != 1 or bias.shape[0] != b.shape[1] or not _large(a, b):
        return torch.addmm(bias, a, b)
    return _onednn_product(ctx, a, b, bias)


def _onednn_product(ctx: KernelContext, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    # a compiler sees one opaque operator
    result: Tensor = (_opaque if ctx.traced else _direct)(a, b.t(), bias)
    return result


def _direct(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    linear: Any = onednn_linear()
    return linear(a, weight, bias)  # type: ignore[no-any-return]


_opaque = torch.library.custom_op("parc_runtime::linear", _direct, mutates_args=())


@_opaque.register_fake
def _linear_fake(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], weight.shape[0])
