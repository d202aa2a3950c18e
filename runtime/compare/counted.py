"""Random numbers of a plain module, drawn as its builds draw them."""

from __future__ import annotations

from collections import Counter
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...compiler.initial.counter import dropped, keep_mask, random, stream
from ...compiler.ops.own_ops import aten
from ...compiler.ops.rules import facts


@final
class CountedDropout(TorchDispatchMode):
    """A mode that draws every dropout mask, and all other random numbers, from the stream named by its module path and
    its place there.

    Below autograd, where torch's dropout and its attention with dropout fill their masks.
    """

    def __init__(self, seed: int, step: int, microbatch: int) -> None:
        super().__init__()
        self._seed, self._step, self._microbatch = seed, step, microbatch
        self._paths = [""]
        self._drawn: Counter[str] = Counter()

    def enter_module(self, path: str, *_: Any) -> None:
        """Note that the forward of the module at ``path`` begins: what draws now is named after it."""
        self._paths.append(path)

    def leave_module(self, *_: Any) -> None:
        """Note that the module's forward has ended."""
        self._paths.pop()

    def _next(self, like: Tensor) -> tuple[int, Tensor]:
        """Return the key of the next stream, and the index of every element."""
        module = self._paths[-1] or "model"
        name = f"{module}.{self._drawn[module]}"
        self._drawn[module] += 1
        index = torch.arange(like.numel(), device=like.device).reshape(like.shape)
        return stream(self._seed, name, self._step, self._microbatch), index

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keeps = (args[1] if len(args) > 1 else 0.5) if func is aten.bernoulli_.float else 1.0  # dispatch drops defaults
        if keeps not in (0.0, 1.0):
            return args[0].copy_(keep_mask(*self._next(args[0]), dropped(keeps)))
        if func is aten.native_dropout.default and args[2] is not False and 0 < args[1] < 1:
            keep = keep_mask(*self._next(args[0]), args[1])
            return args[0] * keep.to(args[0].dtype).mul_(1 / (1 - args[1])), keep
        result = func(*args, **(kwargs or {}))
        if func is aten.bernoulli.default:
            return result.copy_(random(*self._next(result), "uniform", result.dtype) < args[0])
        law = facts(func).law
        if law in ("uniform", "normal"):
            names = [argument.name for argument in func._schema.arguments]
            arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}  # dispatch drops defaults
            low, high = (
                arguments.get("from", arguments.get("mean", 0.0)),
                arguments.get("to", arguments.get("std", 1.0)),
            )
            drawn = random(*self._next(result), law, result.dtype)
            result.copy_(drawn * (high - low if law == "uniform" else high) + low)
        return result
