"""``check``: the comparison of what several ranks hold alike, while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import ONE_OR_MORE, Directive, argument

DEFAULT = 1000


@dataclass(frozen=True)
class Check(Directive):
    """After every N-th step, and before every checkpoint, the ranks compare what several of them hold alike: weights,
    moments, averages, buffers, loss scale. Without this line they do so after every 1,000th step; with `never` they do
    not.

    Each rank sends a few hashes with a message that it sends anyway, so a check takes one reading of the state. Only if
    hashes differ, ranks send the tensors. A difference within rounding is a warning: a kernel that adds in another
    order each time makes such differences. It names the tensor, two ranks and the difference, and the run goes on. A
    larger difference, a NaN on one rank, or another count ends the run on all ranks (P0422). That step is not saved, so
    the last checkpoint is one of ranks that agree. In the metrics of a step with a check, `replicas_apart` is 0 if all
    ranks agree, else the largest difference over what is taken for rounding; `replicas_s` are the seconds of the check.

    After T steps since ranks last agreed, `16 sqrt(T) eps` of a tensor's largest entry is taken for rounding, and at
    most a sixteenth of it; `eps` is that of its type. For moments and buffers it is that of the narrowest type in which
    a step computes. Adam's kind moves an entry by about the learning rate, also if its gradient is nothing but
    rounding: so weights and averages may also differ by four times that rate.
    """

    USAGE = "check replicas every N | replicas never"
    LIMITS = (("replicas every", ONE_OR_MORE),)
    TRAINING = (("", "compares what steps change"),)

    every: int = argument(lambda line: int(line.number("replicas every", 0)))
    """The steps between two checks; 0 for none."""
