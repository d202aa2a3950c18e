"""Storages: the memory of one process's tensors, followed operator by operator."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Storages(TorchDispatchMode):
    """A mode that counts the bytes of all storages that operators make while it is on, until nothing holds them. What
    an operator gives back of its operands is no storage of its own, so files that are mapped into memory do not count.
    The room that an operator takes and gives back within is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __enter__(self) -> Storages:
        gc.freeze()  # garbage is looked for among newer objects alone: a process may have millions of older ones
        super().__enter__()
        return self

    @property
    def bytes(self) -> int:
        """The bytes alive now. Storages may have been resized, as FSDP2 does."""
        return sum(storage.nbytes() for ref in list(self._alive.values()) if (storage := ref()) is not None)

    def peak_of(self, step: Callable[[], object]) -> int:
        """Return the most bytes alive in a step, after two that make the optimizer's state."""
        for _ in range(2):
            step()
        self.begin()
        step()
        return self.peak

    def begin(self) -> None:
        """Let go of garbage, and begin the peak anew with what is alive."""
        gc.collect()
        self.peak = self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it runs operators on the tensors that it holds
        result = func(*args, **(kwargs or {}))
        operands = {id(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if id(storage) not in operands and id(storage) not in self._alive:
                self._alive[id(storage)] = weakref.ref(storage, self._forget(id(storage)))
        self.peak = max(self.peak, self.bytes)
        return result

    def _forget(self, key: int) -> Any:
        alive = self._alive
        return lambda _: alive.pop(key, None)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_iter(values):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta":
            yield value.untyped_storage()
