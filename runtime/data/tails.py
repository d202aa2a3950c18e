"""Batches of fewer samples than a step takes, completed by samples that are proved to change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import final

import torch

from ...compiler.build.build import Build
from ...compiler.ops.rules import facts
from ...compiler.program.program import Function, Ref
from ...compiler.program.step_values import biases_in
from ...compiler.sizes.size_range import BATCH
from ...grammar.codes_build import BAD_DATA
from ..faults import RunError
from .random_batch import class_bounds


@final
class Tails:
    """The completion of one build's batches; ``batched`` are its inputs with a batch dim."""

    def __init__(self, build: Build, batched: Mapping[str, bool]) -> None:
        self._reference, self._balanced = build.reference, bool(biases_in(build.manifest))
        self._lossless = build.purpose == "inference"
        self._names = [name for name, has in batched.items() if has]
        self._unbatched = frozenset(batched) - {*self._names}
        self._size = int(build.manifest["sizes"].get(BATCH, 1))

    @cached_property
    def _ignored(self) -> dict[str, int]:
        """The inputs that decide what the loss counts, with a number of which none is counted, if the loss allows it:
        for targets of a cross entropy that which it ignores, for others, as a mask, that with which they are compared,
        or 0."""
        bounds, found = class_bounds(self._reference), dict[str, int]()
        for function in self._reference.functions[:-1]:
            numbers = _compared(function)
            found = {name: numbers.get(name, 0) for name in self._names if name in function.bound("input")}
        for name, (bound, ignore) in bounds.items():
            if name in self._names and ignore is not None:
                found[name] = ignore
            elif not 0 <= found.get(name, 0) < bound:
                del found[name]  # it is a row or a class too, and there is none of this number
        return found

    @cached_property
    def fault(self) -> str:
        """The reason why samples that the loss is not to count would change it, "" where they do not."""
        from ...compiler.verify.padding import tail_fault  # proves in sympy, which most runs need not import

        if self._lossless:
            return "there are no targets to ignore; `session.predict(batch)` completes a whole batch, and cuts it again"
        if self._balanced:
            return "the biases that balance its experts move by the tokens of all samples"
        return tail_fault(self._reference, self._ignored, self._unbatched)

    def ignored_targets(self, count: int) -> Mapping[str, int]:
        """Return the inputs that decide what the loss counts, with the numbers of samples that are not counted: such
        samples complete a batch of ``count`` samples.

        Raises:
            RunError: they would change the loss.
        """
        if self.fault:
            message = f"the last batch of an epoch has {count} samples, and a step takes {self._size}"
            help_ = (
                f"`drop_last=True` leaves them out; a line `sizes B=LOW..{self._size} by STEP` allows smaller batches"
            )
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


def _compared(count: Function) -> dict[str, int]:
    """Return, for inputs that a count compares with a number, the number, as -100 in ``(targets != -100).sum()``."""
    origin, found = {value.name: name for name, value in count.bound("input").items()}, dict[str, int]()
    for line in count.lines:
        first, *others = line.args or (None,)
        name, row = origin.get(first.name, "") if isinstance(first, Ref) else "", facts(line.op)
        if name and (row.keeps_values or row.casts or row.moves == "shape"):
            origin.update((value.name, name) for value in line.made)
        elif (
            name and row.elementwise and others and isinstance(others[0], int) and line.made[0].type.dtype == torch.bool
        ):
            found.setdefault(name, others[0])
    return found
