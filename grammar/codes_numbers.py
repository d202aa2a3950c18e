"""Codes of messages about a model whose numbers cannot be compared with anything (P02xx)."""

from __future__ import annotations

from .code import MODEL, Code

NO_FUNCTION = Code(
    name="P0227",
    title="a result that is no function of the inputs",
    why="one graph is built, and what the model's code takes from elsewhere (Python's `random`, NumPy's, a counter that"
    " calls move, the clock) would be a constant in it. parc ran the module twice, on the same inputs and weights and"
    " with the same seeds of torch, and its results differ.",
    example=MODEL.format(body="import random\n\n        return x * random.random()"),
    instead=MODEL.format(body="return x * torch.rand(())"),
    language="python",
)
NOT_FINITE = Code(
    name="P0233",
    title="a model whose numbers are not finite",
    why="every build is tested on random inputs, numbers of a normal distribution and any classes; a model or a loss"
    " that makes NaN or infinity of them agrees with nothing.",
    example=MODEL.format(body="return x.log()"),
    instead=MODEL.format(body="return x.clamp(min=1e-6).log()"),
    language="python",
)
AMPLIFIED = Code(
    name="P0259",
    title="a model that amplifies rounding",
    why="ranks add up in another order than one device, so they round otherwise. Every build is tested to 1e-10 in"
    " float64, or to what the captured graph itself makes of one rounding of its weights and inputs, up to 1e-6. A"
    " model that moves further has no numbers that could be compared, nor would two runs of it agree.",
    example=MODEL.format(body="for _ in range(50):\n            x = 3.9 * x * (1 - x)\n        return x"),
    instead=MODEL.format(body="for _ in range(50):\n            x = 0.9 * x * (1 - x)\n        return x"),
    language="python",
)
NEAR_TIE = Code(
    name="P0266",
    title="a choice that rounding decides",
    why="which entries a top-k takes is no continuous function of its scores: where the last one taken and the first"
    " one left differ by rounding alone, ranks that add up in another order may take another one than a single device."
    " The distance is measured in the captured graph, and reported; where it is too small and numbers differ, other"
    " random data are drawn, and a model for which that does not help is refused.",
    example=MODEL.format(body="return torch.stack([x.sum(-1), x.flip(-1).sum(-1)], -1).topk(1).indices * x"),
    instead=MODEL.format(body="return torch.stack([x.sum(-1), x.square().sum(-1)], -1).topk(1).indices * x"),
    language="python",
)
OWN_GRADIENT = Code(
    name="P0262",
    title="gradients that are not those of the forward",
    why="a build derives gradients from the captured forward. An `autograd.Function` whose `backward` is another"
    " function (a straight-through estimate, a gradient turned round or scaled) loses it there: gradients then differ"
    " from those of the module as it is written. One that only saves memory or time is captured as any other code.",
    example=MODEL.format(body="return Round.apply(x)  # its backward returns the gradient as it is"),
    instead=MODEL.format(body="return x + (x.round() - x).detach()"),
    language="python",
)
