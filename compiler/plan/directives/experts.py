"""``experts``: experts of a layer split over ranks, to which tokens travel."""

from __future__ import annotations

from dataclasses import dataclass

from ..directive import ONE_OR_MORE, argument
from ..layouts import SplitWeights


@dataclass(frozen=True)
class Experts(SplitWeights):
    """Splits the experts of mixture-of-experts layers over an axis (expert parallelism): every rank holds the same
    number of experts, and tokens are sent to the ranks of their experts.

    `WHERE` names the modules that hold experts, such as `model.layers.*.mlp.experts` in a model of transformers, where
    the weights of all experts are stacked: [experts, ...]. A layer of your own loops over a list of experts, or
    `parc.register_experts` says how it routes. Weights of experts in a list are stacked under one name, as
    `layers.0.experts.*.up.weight`.

    The axis usually splits the batch too, as in `shard tokens [B/dp/ep, _]`: each of its ranks routes other tokens. If
    its ranks have the same tokens, as on an axis of tensor parallelism, each rank routes a slice of them, and the
    results are gathered.

    `dropless`: no token is left out. Each rank sorts its tokens by expert. An `exchange` (an all-to-all for which each
    pair of ranks says how much it sends) brings them to their experts, and another one brings the results back;
    backward does the same. The result is that of the model's own code, whatever experts the tokens choose.

    `load 1.25`: memory is estimated for a rank that gets 1.25 times the mean number of tokens, and a run warns if a
    rank gets more. No tokens are lost. The report gives the memory at this load, which `budget` looks at, and the
    memory of the worst case.

    `capacity 1.25`: of each sequence in a batch, an expert takes at most 1.25 times the mean number of tokens, those
    that come first. The other tokens go on without this expert, through the residual of the layer. So shapes are fixed,
    and the same tokens are left out on any number of ranks. This is not what the model's code says, so the build is
    compared with the plain module under the same rule. Only modules with the experts' interface of transformers can
    have a capacity.

    All other weights of such a layer (router, shared experts) are placed as in dense layers. Without an `experts` line
    every rank holds all experts, and routes its own tokens.

    `balance bias 0.001` trains as DeepSeek-V3 was: after each step, the router's bias of every expert that got fewer
    tokens than the mean grows by this number, and that of every expert with more shrinks by it. The bias is a buffer of
    the model, beside the experts, with one number for each expert. The model's own code does not do this. A model
    without such a buffer adds an auxiliary loss to its `loss` line instead.

    The metrics of a run have the tokens of every expert (`loads`), the busiest expert and the busiest rank over the
    mean (`imbalance`, `rank_imbalance`), and with a capacity the share of choices that were left out (`drop_rate`).
    """

    USAGE = "experts WHERE over AXIS dropless [load X] [balance bias X] | WHERE over AXIS capacity X [balance bias X]"
    LIMITS = (
        ("balance bias", (lambda value: value > 0, "more than 0")), ("load", ONE_OR_MORE),
        ("capacity", (lambda value: value > 0, "more than 0")),
    )  # fmt: skip
    TRAINING = (("balance bias", "moves a bias after each step"),)

    capacity: float | None = argument(lambda line: line.number("capacity", None))
    """The most tokens of a sequence that an expert takes, over the mean; None where it takes all."""

    load: float = argument(lambda line: float(line.number("load", 1)))
    """The rows of the busiest rank over the mean, at which memory is estimated."""

    rate: float | None = argument(lambda line: line.number("balance bias", None))
    """The change of a bias in each step; None where nothing changes it."""
