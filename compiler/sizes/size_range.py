"""Size ranges: the sizes that a plan declares for one dim of the inputs, a fixed one or a range."""

from __future__ import annotations

from dataclasses import dataclass

BATCH = "B"
"""The name of the batch size, which is split into microbatches."""
LARGEST_SIZE = 1 << 40
"""The most entries of a dim and of an input: a trillion tokens, ten thousand times the largest step in use."""
MOST_CHOICES = 1 << 20
"""The most sizes of one range: lengths to a million, one by one."""


@dataclass(frozen=True, slots=True)
class SizeRange:
    """The sizes ``low``, ``low + step``, ... up to ``high``; a fixed size has ``low == high``."""

    low: int
    high: int
    step: int = 1

    @property
    def fixed(self) -> bool:
        return self.low == self.high

    @property
    def divisor(self) -> int:
        """The number that ranks must divide, so that they divide every size: a fixed size, or the step of a range."""
        return self.low if self.fixed else self.step

    @property
    def problem(self) -> str:
        """Return the reason why there are no such sizes, or "" if there are."""
        if self.low < 1:
            return f"a size of {self.low}: sizes are 1 or more"
        if self.step < 1:
            return f"a step of {self.step}: steps are 1 or more"
        if self.high < self.low:
            return f"the range ends at {self.high}, below its start {self.low}"
        if self.high % self.step or self.low % self.step:
            return f"the step {self.step} does not divide {self.low} and {self.high}"
        if self.high > LARGEST_SIZE:
            return f"a size of {self.high}: sizes go to {LARGEST_SIZE:,}"
        if (self.high - self.low) // self.step >= MOST_CHOICES:
            return f"the range has {(self.high - self.low) // self.step + 1:,} sizes, over {MOST_CHOICES:,}"
        return ""

    @property
    def values(self) -> range:
        return range(self.low, self.high + 1, self.step)

    def nearest(self, size: int) -> tuple[int, ...]:
        """Return the declared sizes next to any other size, below and above."""
        below = max((self.low, min(size, self.high) // self.step * self.step))
        return (below,) if not self.low < size < self.high else (below, below + self.step)

    def __str__(self) -> str:
        if self.fixed:
            return str(self.low)
        return f"{self.low}..{self.high}" + (f" by {self.step}" if self.step != 1 else "")
