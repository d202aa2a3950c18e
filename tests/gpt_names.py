"""The names in the capture of a small GPT: the model behind the plans of the language's tests."""

from __future__ import annotations

from parc.compiler.layout.mesh import Shape
from parc.compiler.resolve.names import ModelOperator, PlanNames, WeightUse

LAYERS, WIDTH, VOCAB = 2, 8, 50258


def gpt_names(vocab: int = VOCAB) -> PlanNames:
    """Return the names of a GPT of two blocks, tied embedding and head, fused qkv; batch 4, sequence 8."""
    shapes: dict[str, Shape] = {"embed.weight": (vocab, WIDTH), "norm.weight": (WIDTH,), "norm.bias": (WIDTH,)}
    uses = {"embed.weight": WeightUse("lookup", 0), "head.weight": WeightUse("linear", 0, 1)}
    modules = {"embed", "head", "norm", "blocks"}
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        modules |= {block, f"{block}.attn", f"{block}.mlp", f"{block}.drop"}
        sizes = {
            "attn.qkv": (3 * WIDTH, WIDTH),
            "attn.out": (WIDTH, WIDTH),
            "mlp.up": (4 * WIDTH, WIDTH),
            "mlp.down": (WIDTH, 4 * WIDTH),
        }
        for name, (out, contracted) in sizes.items():
            modules.add(f"{block}.{name}")
            shapes[f"{block}.{name}.weight"] = (out, contracted)
            shapes[f"{block}.{name}.bias"] = (out,)
            uses[f"{block}.{name}.weight"] = WeightUse("linear", 0, 1)
    inputs: dict[str, Shape] = {"tokens": (4, 8), "targets": (4, 8)}
    operators = {
        name.rpartition(".")[0]: (ModelOperator(frozenset({"linear", "products"}), False),)
        for name in uses
        if name != "embed.weight"
    }
    for layer in range(LAYERS):
        operators[f"blocks.{layer}.attn"] = (ModelOperator(frozenset({"attention"}), False),)
        operators[f"blocks.{layer}.mlp"] = (ModelOperator(frozenset({"gelu"}), True),)
    tied = {"head.weight": "embed.weight"}
    return PlanNames(shapes, inputs, frozenset(modules), uses, tied, operators=operators)
