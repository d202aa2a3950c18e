"""Samples that are functions of their number: a person's, or random ones. They have no epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ...compiler.initial.counter import normal, stream, uniform
from ...compiler.sizes.size_range import BATCH
from .samples import DataError, asked


@final
class CallableData:
    """Samples from a user's function: ``function(number)`` returns a dict of tensors, the same at every call."""

    count: int | None = None

    def __init__(self, function: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._function = function

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return sample ``number``, as the function returns it.

        Raises:
            DataError: it failed (chained), or gave something else than a dict of tensors.
        """
        help_ = "the function that the plan names failed: call it with this number to see why"
        sample = asked(lambda: self._function(number), f"making sample {number}", help_)
        entries = sample.items() if isinstance(sample, Mapping) else [("", sample)]
        wrong = next((f"{f'`{name}`' if name else 'it'} is {type(value).__name__}" for name, value in entries
                      if not isinstance(value, Tensor)), "")  # fmt: skip
        if wrong or not isinstance(sample, Mapping):
            help_ = "return tensors by the names of inputs, a number as `torch.tensor(3)`"
            raise DataError(f"sample {number} is not a dict of tensors: {wrong or 'it is a tensor'}", help_)
        return dict(sample)


@final
class SyntheticData:
    """Random samples of the plan's inputs, functions of ``seed``, the sample's number and the input's name alone.

    ``bounds`` has how many rows or classes the whole numbers of an input may name; others are 0 or 1.
    """

    count: int | None = None

    def __init__(
        self, inputs: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], bounds: Mapping[str, int], seed: int
    ) -> None:
        self._inputs, self._sizes, self._bounds, self._seed = inputs, sizes, bounds, seed

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return sample ``number`` >= 0."""
        return {line["name"]: self._drawn(line, number) for line in self._inputs}

    def _drawn(self, line: Mapping[str, Any], number: int) -> Tensor:
        name, dtype = line["name"], getattr(torch, line["dtype"])
        shape = [int(self._sizes.get(dim, dim)) for dim in line["dims"][line["dims"][:1] == [BATCH] :]]
        index = torch.arange(math.prod(shape)).reshape(shape)
        key = stream(self._seed, f"synthetic {name}", number)
        if dtype.is_floating_point:
            return normal(key, index).to(dtype)
        return (uniform(key, index) * self._bounds.get(name, 2)).to(torch.int64).to(dtype)
