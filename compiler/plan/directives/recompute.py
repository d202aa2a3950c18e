"""``recompute``: modules whose values backward makes again instead of keeping them."""

from __future__ import annotations

from dataclasses import dataclass

from ....grammar.syntax import Word
from ..directive import Directive, argument


@dataclass(frozen=True)
class Recompute(Directive):
    """Makes the values inside modules again in backward, from what the modules read, instead of keeping them
    (activation checkpointing). Gradients are the same to the bit: dropout draws the same numbers.

    `recompute blocks.*` keeps of every block only what it reads (full); `recompute blocks.[0..31:2]` does so in every
    second block (strided). `recompute blocks.*.mlp` makes again what is inside the MLPs, from what is kept around them.
    Of lines that name a module the last counts.

    `keep` names operators whose results are kept all the same: `products` (of matrices, and convolutions), `attention`,
    `random` (masks of dropout), `collectives`, or an operator by its own name, as `linear`. With `keep products,
    attention` only cheap operators run twice: norms, masks, what a module computes entry by entry. `keep products` has
    attention run again too, Megatron-LM's selective recomputation. `keep collectives` sends nothing twice: without it,
    the collectives inside run again where what they make is needed.

    A block is the largest unit: it keeps what it reads, also where that came from another stage. A recomputed block
    reads its weights once for both, so that with `zero 3` its backward gathers them once. Without a line backward makes
    again what costs next to nothing: views, casts, copies, operators on single entries.
    """

    USAGE = "recompute WHERE [keep OPS]"
    ONCE = False

    where: tuple[Word, ...] = argument(lambda given: given.words("where"))
    keep: tuple[Word, ...] = argument(lambda given: given.words("keep"))
