"""Codes of messages about promises of a plan that its build does not keep (P04xx)."""

from __future__ import annotations

from .code import shown

OVER_BUDGET = shown(
    name="P0401",
    title="a rank needs more memory than the budget",
    why="the memory of a rank is estimated from the programs: parameters, gradients, optimizer and what is alive at the"
    " peak; the largest of them are named.",
    example="budget memory 16GB      # a rank needs 24.1 GB",
    instead="schedule microbatches 4  # fewer samples at once, or split what is largest over another axis",
)
FORBIDDEN = shown(
    name="P0402",
    title="a forbidden collective",
    why="the line forbids what the programs do; the collective, what caused it and its bytes are named.",
    example="forbid all_gather in blocks.**",
    instead="column blocks.*.mlp.up over tp   # both sides of the value split alike",
)
NOT_EXPECTED = shown(
    name="P0403",
    title="another number of collectives than expected",
    why="`expect` counts the collectives of one microbatch in each module that it names; every one that is there is"
    " named.",
    example="expect 2 all_reduce in blocks.*",
    instead="expect 4 all_reduce in blocks.*   # two in forward, two in backward",
)
