"""Codes of messages about a model whose numbers cannot be compared with anything (P02xx)."""

from __future__ import annotations

from .code import MODEL, Code

NO_FUNCTION = Code(
    name="P0227",
    title="a result that is no function of the inputs",
    why="a build holds one graph. Other inputs of the model's code (Python's `random`, NumPy's, a counter that calls"
    " change, the clock) would be constants in it. parc ran the module twice with the same inputs, weights and torch"
    " seeds, and the results differ.",
    example=MODEL.format(body="import random\n\n        return x * random.random()"),
    instead=MODEL.format(body="return x * torch.rand(())"),
    language="python",
)
NOT_FINITE = Code(
    name="P0233",
    title="a model whose numbers are not finite",
    why="every build is tested on random inputs: normal random numbers, and any classes. If the model or the "
    "loss gives NaN or infinity for them, there is nothing to compare.",
    example=MODEL.format(body="return x.log()"),
    instead=MODEL.format(body="return x.clamp(min=1e-6).log()"),
    language="python",
)
AMPLIFIED = Code(
    name="P0259",
    title="a model that amplifies rounding",
    why="ranks add up numbers in another order than one device, so they round differently. Every build is "
    "tested to 1e-10 in float64, or to the change that one rounding of weights and inputs makes in the "
    "captured graph, up to 1e-6. If a model's results change more than that, no two runs of it agree.",
    example=MODEL.format(body="for _ in range(50):\n            x = 3.9 * x * (1 - x)\n        return x"),
    instead=MODEL.format(body="for _ in range(50):\n            x = 0.9 * x * (1 - x)\n        return x"),
    language="python",
)
NEAR_TIE = Code(
    name="P0266",
    title="a choice that rounding decides",
    why="a top-k is not a continuous function of its scores. If the last entry taken and the first one left "
    "differ only by rounding, ranks that add up in another order may take the other one. parc measures "
    "this distance in the captured graph and reports it. If it is too small and numbers differ, other "
    "random data are drawn; a model for which that does not help is refused.",
    example=MODEL.format(body="return torch.stack([x.sum(-1), x.flip(-1).sum(-1)], -1).topk(1).indices * x"),
    instead=MODEL.format(body="return torch.stack([x.sum(-1), x.square().sum(-1)], -1).topk(1).indices * x"),
    language="python",
)
OWN_GRADIENT = Code(
    name="P0262",
    title="gradients that are not those of the forward",
    why="a build derives gradients from the captured forward. The `backward` of an `autograd.Function` is "
    "lost there, so if it is not the derivative of its forward (a straight-through estimate, a gradient "
    "that is reversed or scaled), gradients differ from those of your module. A function that only saves "
    "memory or time is captured like any other code.",
    example=MODEL.format(body="return Round.apply(x)  # its backward returns the gradient as it is"),
    instead=MODEL.format(body="return x + (x.round() - x).detach()"),
    language="python",
)
