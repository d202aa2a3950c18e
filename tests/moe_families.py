"""Small mixtures of experts of transformers, one a family: 8 experts, of which each token chooses 2."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

_SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 16, "use_cache": False,
    "tie_word_embeddings": False, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 8, "head_dim": 8},
    "Olmoe": {"num_experts": 8},
    "DeepseekV3": {
        "n_routed_experts": 8, "moe_intermediate_size": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "num_hidden_layers": 2,
    },
    "GptOss": {
        "num_local_experts": 8, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "GraniteMoe": {"num_local_experts": 8},
    "Llama4": {"num_local_experts": 8, "head_dim": 8, "intermediate_size_mlp": 16, "moe_layers": [0]},
}  # fmt: skip
FAMILIES = tuple(_FAMILIES)


def family(name: str, **sizes: int) -> nn.Module:
    """Make the causal language model of a family; ``sizes`` are further words of its configuration."""
    text = "Text" * (name == "Llama4")
    config = getattr(transformers, f"{name}{text}Config")(**{**_SIZES, **_FAMILIES[name], **sizes})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def older(name: str) -> nn.Module:
    """Make the model of a family as older versions of transformers do, whose experts do not say that they have no
    norm."""
    model = family(name)
    for module in model.modules():
        if hasattr(module, "has_post_expert_norm"):
            del module.has_post_expert_norm
    return model
