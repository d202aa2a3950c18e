"""Writes that a trace does not see: those through ``x.data``, and parameters that a forward clamps in place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

WeightLimits = tuple[float | None, float | None]
"""The least and the largest number of a parameter's entries; None where there is no such limit."""

_DATA: Any = torch.Tensor.data
_GET_DATA, _SET_DATA = _DATA.__get__, _DATA.__set__
NO_LIMITS: WeightLimits = (None, None)
_DETACH = (torch.Tensor.detach, torch.detach)
CLAMPS = ("clamp", "clip", "clamp_min", "clamp_max")
"""The operators that clamp a tensor, which have forms in place."""
_IN_PLACE = {getattr(of, f"{name}_"): name for of in (torch, torch.Tensor) for name in CLAMPS}


def limits_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WeightLimits | None:
    """Return the limits of a call of ``clamp``, ``clip``, ``clamp_min`` or ``clamp_max``; None if they are tensors, or
    no numbers.

    >>> limits_of("clamp", ("x", -1), {"max": 2}), limits_of("clamp_max", ("x", 2), {})
    ((-1.0, 2.0), (None, 2.0))
    """
    words = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(name, ("min", "max"))
    said = {**dict(zip(words, args[1:], strict=False)), **kwargs}
    low, high = (said.get(word, default) for word, default in (("min", -math.inf), ("max", math.inf)))
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if not all(isinstance(limit, Real) and limit == limit for limit in (low, high)):
        return None
    return None if low == -math.inf else float(low), None if high == math.inf else float(high)


def clamped_again(limits: WeightLimits, by: WeightLimits) -> WeightLimits:
    """Return the limits of a tensor that is clamped to ``limits`` and then to those of another clamp.

    >>> clamped_again((0.5, None), (None, 2.0)), clamped_again((0.0, 1.0), (2.0, 3.0))
    ((0.5, 2.0), (2.0, 2.0))
    """
    low, high = -math.inf, math.inf
    for least, most in (limits, by):
        least, most = -math.inf if least is None else least, math.inf if most is None else most
        low, high = (min(max(limit, least), most) for limit in (low, high))  # as torch clamps where the least is more
    return None if low == -math.inf else low, None if high == math.inf else high


class HiddenWrites(TorchFunctionMode):
    """A mode that shows a trace what it does not see: ``x.data`` is ``x.detach()``, an assignment to the ``data`` of a
    buffer writes into it, and so does an instance norm with running statistics.

    A parameter that is clamped in place is left as it is, and its ``limits`` are noted by name: a run clamps what it
    stores before each step, and a second time changes nothing.
    """

    def __init__(self, model: nn.Module, limits: dict[str, WeightLimits]) -> None:
        super().__init__()
        self._model, self._limits = model, limits
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The results of ``x.data`` and ``x.detach()``, each with ``x``."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _GET_DATA or function in _DETACH:
            self._data.append((args[0].detach(), args[0]))
            return self._data[-1][0]
        if (
            function == _SET_DATA
            and args[0].shape == args[1].shape
            and any(b is args[0] for b in self._model.buffers())
        ):
            with torch.no_grad():
                return args[0].copy_(args[1])
        if function in _IN_PLACE and self._notes(_IN_PLACE[function], args, kwargs or {}):
            return args[0]
        if function is F.instance_norm:
            return _instance_norm(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _notes(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note the limits of a parameter that a call clamps. Return False for other calls."""
        written = next((x for data, x in self._data if data is args[0]), args[0])
        parameter = next((name for name, p in self._model.named_parameters() if p is written), None)
        limits = limits_of(name, args, kwargs)
        if parameter is None or limits is None:
            return False
        limits = clamped_again(self._limits.get(parameter, NO_LIMITS), limits)
        if limits != NO_LIMITS:
            self._limits[parameter] = limits
        return True


def _instance_norm(
    input: torch.Tensor, running_mean: torch.Tensor | None = None, running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, use_input_stats: bool = True,
    momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Return the instance norm of ``[n, c, ...]``, as torch's function of this name does. It writes running statistics
    ``[c]`` by operators that say so; without those of the input they normalize as a batch norm's do."""
    if running_mean is None or running_var is None:
        return F.instance_norm(input, None, None, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    with torch.no_grad():
        dims = list(range(2, input.dim()))
        running_mean.mul_(1 - momentum).add_(input.mean(dims).mean(0), alpha=momentum)
        running_var.mul_(1 - momentum).add_(input.var(dims).mean(0), alpha=momentum)
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)
