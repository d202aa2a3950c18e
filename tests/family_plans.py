"""The plan of every shipped family with the models that it serves, for the tests and the table of families."""

from __future__ import annotations

PLAN = """
let       dp = 1, tp = 2
model     {model}
{inputs}
sizes     B=8, S=8
optimizer adamw lr 1e-3 eps 1e-5 clip 1.0
mesh      dp=$dp, tp=$tp
{lines}
schedule  microbatches 2
"""
TEXT = """
input     input_ids int64 [B, S]
input     targets int64 [B, S]
loss      cross_entropy(output.logits, targets)
shard     input_ids, targets [B/dp, _]
"""
PAIR = """
input     decoder_input_ids int64 [B, S]
shard     decoder_input_ids [B/dp, _]
"""
IMAGE = """
input     pixel_values float32 [B, 3, 16, 16]
input     labels int64 [B]
shard     pixel_values [B/dp, _, _, _]
shard     labels [B/dp]
"""
CONVOLUTIONS = """
loss      cross_entropy(output, labels)
column    blocks.*.conv1 over tp
row       blocks.*.conv2 over tp
"""
CLASSES = "loss      cross_entropy(output.logits, labels)"


def include(family: str) -> str:
    """Return the line that brings a family's placements."""
    return f'include   "parc:{family}" (tp=$tp)'


EXPERT_FAMILIES = {
    "Mixtral": "mixtral", "Olmoe": "mixtral", "GraniteMoe": "mixtral", "Qwen3Moe": "qwen3-moe",
    "DeepseekV3": "deepseek-v3", "GptOss": "gpt-oss",
}  # fmt: skip
"""The plans of mixtures of experts, by the models of ``tests/moe_families.py`` that they serve."""

EXPERT_PLAN = """
let       dp=1, pp=1, tp=1, ep=1, zero=0
model     "tests.moe_families:family" (name="{name}", num_hidden_layers=2)
input     input_ids int64 [B, S]
input     targets int64 [B, S]
sizes     B=8, S=4
loss      cross_entropy(output.logits, targets)
optimizer adamw lr 1e-3 eps 1e-5 clip 1.0
mesh      dp=$dp, pp=$pp, tp=$tp, ep=$ep
stage     balanced over pp
schedule  1f1b microbatches 2
shard     input_ids, targets [B/dp/ep, _]
include   "parc:{family}" (tp=$tp, ep=$ep)
zero      $zero over dp
"""

MODELS = {
    "gpt2": ('"tests.family_models:gpt2" (', TEXT, include("gpt2"), 6, 5),
    **{
        name: (f'"tests.family_models:decoder" (name="{name}"', TEXT, include(family), forward, backward)
        for name, family, forward, backward in (
            ("llama", "llama", 6, 5), ("mistral", "llama", 6, 5), ("qwen2", "llama", 6, 5), ("qwen3", "llama", 6, 5),
            ("phi3", "phi3", 6, 5), ("olmo2", "olmo2", 10, 9), ("gemma2", "gemma3", 6, 5), ("gemma3", "gemma3", 6, 5),
        )
    },
    "bert": ('"tests.family_models:bert" (', TEXT, include("bert"), 6, 5),
    "t5": ('"tests.family_models:t5" (', TEXT + PAIR, include("t5"), 13, 12),
    "vit": ('"tests.family_models:vit" (', IMAGE + CLASSES, include("vit"), 4, 4),
    "convolutions": ('"tests.family_models:ResNet" (', IMAGE, CONVOLUTIONS, 4, 2),
}  # fmt: skip
"""The models of each family: model, inputs, placements, and all-reduces over tp in a forward and in its backward. In
forward there are two for each layer (three in a decoder that reads an encoder), one for each embedding's lookup and one
for the loss. OLMo 2 has two more for each layer, which add up the squares of its norms of q and k. A convolution split
by its inputs has its result, and the values of the batch's mean."""


def plan_text(name: str, more: str = "") -> str:
    """Return the plan of a model made with ``more`` arguments; ``dp`` and ``tp`` are left to be given."""
    model, inputs, lines, *_ = MODELS[name]
    return PLAN.format(model=f"{model}{more})".replace("(, ", "("), inputs=inputs, lines=lines)


def expert_plan_text(name: str) -> str:
    """Return the plan of a mixture of experts; its axes and the level of ZeRO are left to be given."""
    return EXPERT_PLAN.format(name=name, family=EXPERT_FAMILIES[name])
