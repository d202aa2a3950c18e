"""The agreement of a simulation with the captured graph: the largest errors, and where they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from .near_ties import NEAR, Margin

TOLERANCE = 1e-10
"""The largest relative error of numbers in float64 that counts as none."""


@dataclass(slots=True)
class Agreement:
    """The largest relative errors over all steps, and the tensor that each belongs to."""

    loss: float = 0.0
    gradient: float = 0.0
    norm: float = 0.0
    metric: float = 0.0
    parameter: float = 0.0
    """The error of updated parameters, and of the optimizer's state, beside its formula."""
    buffer: float = 0.0
    output: float = 0.0
    worst: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    not_finite: str = ""
    """The value of the captured graph itself that is not a finite number, and its step; "" if there is none. Nothing is
    compared with such a value."""
    amplified: str = ""
    """The value that one rounding moves further than can be tested, as the explanation of a large error; "" if there is
    none."""
    margin: Margin = field(default_factory=Margin)
    """The smallest distance between scores that a top-k tells apart, in the captured graph."""

    @property
    def tied(self) -> bool:
        """True where numbers differ, and rounding may have decided what is chosen."""
        return not self.largest <= TOLERANCE and self.margin.apart < NEAR

    @property
    def largest(self) -> float:
        """The largest of these errors."""
        return max(self.loss, self.gradient, self.norm, self.metric, self.parameter, self.buffer, self.output)

    def note(self, kind: str, error: float, where: str) -> None:
        """Keep an error if it is the largest of its kind; a number that is not finite is the largest of all."""
        error = error if error == error else float("inf")
        if error > getattr(self, kind):
            setattr(self, kind, error)
            self.worst[kind] = where
