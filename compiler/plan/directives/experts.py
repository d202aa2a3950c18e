"""``experts``: experts of a layer split over ranks, to which tokens travel."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import ONE_OR_MORE, argument
from ..layouts import SplitWeights


@dataclass(frozen=True)
class Experts(SplitWeights):
    """Splits the experts of mixture-of-experts layers over an axis: every rank has the same number of them, and tokens
    go where their experts are (expert parallelism).

    `WHERE` names the modules that hold experts, as `model.layers.*.mlp.experts` of a model of transformers; their
    weights are stacked, [experts, ...]. A layer of your own loops over a list of experts, or `parc.register_experts`
    says how it routes; the weights of experts in a list are stacked under one name, as
    `layers.0.experts.*.up.weight`.

    The axis usually splits the batch too, as in `shard tokens [B/dp/ep, _]`: its ranks route different tokens. Where
    they have the same ones, as on an axis of tensor parallelism, each routes a slice of them, and results are gathered.

    `dropless`: no token is left out. Each rank packs its own tokens by expert, an `exchange` (an all-to-all with the
    counts of each pair of ranks) brings them to their experts and another one brings results back; backward does the
    same. A result is the model's own, whatever tokens choose.

    `load 1.25`: memory is estimated for a rank that gets 1.25 times the mean of the rows, and a run warns of more. Rows
    are never lost: the report gives the memory at the load, with which `budget` compares, and the most that can be.

    `capacity 1.25`: an expert takes at most 1.25 times the mean of the tokens that choose it in each sequence of a
    batch, those that come first; others go on without it, by the residual of the layer. Shapes are fixed, and the
    tokens left out are the same on any number of ranks. This is another model than the code says: it is held to the
    plain module with the same rule. Only modules with transformers' interface of experts can have a capacity.

    Every other weight of such a layer (the router, shared experts) is placed as in dense layers. Without a line every
    rank has all experts, and routes its own tokens.

    `balance bias 0.001`: after each step, the router's bias of every expert that got fewer tokens than the mean grows
    by so much, and that of every expert with more falls, as DeepSeek-V3 is trained. The bias is a buffer of the model
    beside its experts, of one number an expert. This is more than the model's own code does in a step. A model without
    such a buffer adds an auxiliary loss to its `loss` line instead.

    Metrics of a run have the tokens of every expert (`loads`), those of the busiest expert and rank over the mean
    (`imbalance`, `rank_imbalance`), and with a capacity the share of choices that were left out (`drop_rate`).
    """

    USAGE = "experts WHERE over AXIS dropless [load X] [balance bias X] | WHERE over AXIS capacity X [balance bias X]"
    LIMITS = (
        ("balance bias", (lambda value: value > 0, "more than 0")), ("load", ONE_OR_MORE),
        ("capacity", (lambda value: value > 0, "more than 0")),
    )  # fmt: skip

    capacity: float | None = argument(lambda given: given.number("capacity", None))
    """The most tokens of a sequence that an expert takes, over the mean; None where it takes all."""

    load: float = argument(lambda given: float(given.number("load", 1)))
    """The rows of the busiest rank over the mean, at which memory is estimated."""

    rate: float | None = argument(lambda given: given.number("balance bias", None))
    """The change of a bias in each step; None where nothing changes it."""
