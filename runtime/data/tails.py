"""Batches of fewer samples than a step takes, completed by samples that are proved to change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import final

import torch

from ...compiler.build.build import Build
from ...compiler.program.loads import biases_in
from ...compiler.sizes.size_range import BATCH
from ...grammar.codes_build import BAD_DATA
from ..faults import RunError
from .random_batch import class_bounds


@final
class Tails:
    """The completion of one build's batches; ``batched`` are its inputs with a batch dim."""

    def __init__(self, build: Build, batched: Mapping[str, bool]) -> None:
        self._reference, self._balanced = build.reference, bool(biases_in(build.manifest))
        self._names = [name for name, has in batched.items() if has]
        self._size = int(build.manifest["sizes"].get(BATCH, 1))

    @cached_property
    def _ignored(self) -> dict[str, int]:
        """The inputs that are targets of the loss, with the number that says to ignore a target."""
        bounds = class_bounds(self._reference)
        return {name: bounds[name][1] or 0 for name in self._names if name in bounds and bounds[name][1] is not None}

    @cached_property
    def fault(self) -> str:
        """The reason why samples whose targets are ignored would change the loss, "" where they do not."""
        from ...compiler.verify.padding import tail_fault  # proves in sympy, which most runs need not import

        if self._balanced:
            return "the biases that balance its experts move by the tokens of all samples"
        return tail_fault(self._reference, self._ignored)

    def ignored_targets(self, count: int) -> Mapping[str, int]:
        """Return the inputs that are targets, with the number that is ignored: samples of such targets complete a batch
        of ``count`` samples.

        Raises:
            RunError: they would change the loss.
        """
        if self.fault:
            message = f"the last batch of an epoch has {count} samples, and a step takes {self._size}"
            help_ = "`drop_last=True` leaves them out"
            raise RunError(BAD_DATA, message, help_, [f"fewer would change its numbers: {self.fault}"])
        return self._ignored

    def completed(self, batch: Mapping[str, torch.Tensor], shares: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
        """Return a whole step's batch, or one rank's share of it. Copies of the first sample follow the given samples,
        with all of their targets ignored.

        Batches that are no tensors of a common number of samples are given back as they are.

        Raises:
            RunError: there are too many samples, or none, or too few for a loss that sees how many there are.
        """
        given = {name: value for name, value in batch.items() if name in self._names}
        if not given or any(not isinstance(value, torch.Tensor) or not value.dim() for value in given.values()):
            return batch
        size, *others = {self._size // shares.get(name, 1) for name in given}
        if others:  # what is divided differently has no common number of samples
            return batch
        counts = {value.shape[0] for value in given.values()}
        count = counts.pop()
        if counts or count == size:
            return batch
        if not 0 < count < size or self.fault:
            legal = f"{size}" if self.fault else f"1 to {size}"
            why = "B of the plan's `sizes` line"
            samples = f"{count} sample{'s' * (count != 1)}"
            help_ = f"give {legal} samples, or build the plan for another B"
            if self.fault and count < size:
                why = f"fewer would change its numbers: {self.fault}"
                help_ += f"; a line `sizes B=LOW..{self._size} by STEP` is for several"
            what, takes = ("this rank's part", "of a step it takes") if shares else ("the batch", "a step takes")
            raise RunError(BAD_DATA, f"{what} has {samples}; {takes} {legal}", help_, [why])
        missing = size - count
        return {**batch, **{name: self._longer(name, value, missing) for name, value in given.items()}}

    def _longer(self, name: str, value: torch.Tensor, missing: int) -> torch.Tensor:
        more = value[:1].expand(missing, *value.shape[1:])
        return torch.cat([value, torch.full_like(more, self._ignored[name]) if name in self._ignored else more])
