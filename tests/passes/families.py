"""Model families of transformers, small and with random weights, and how a plan splits each over ``tp``."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

_SIZES = {
    "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 48,
    "max_position_embeddings": 64, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

_LLAMA = """
column model.layers.*.self_attn.{q,k,v}_proj over tp
row    model.layers.*.self_attn.o_proj over tp
column model.layers.*.mlp.{gate,up}_proj over tp
row    model.layers.*.mlp.down_proj over tp
vocab  model.embed_tokens, lm_head over tp
"""
_PHI3 = """
column model.layers.*.self_attn.qkv_proj over tp rows (h/tp d + g/tp d + g/tp d)
row    model.layers.*.self_attn.o_proj over tp
column model.layers.*.mlp.gate_up_proj over tp rows (2 f/tp)
row    model.layers.*.mlp.down_proj over tp
vocab  model.embed_tokens, lm_head over tp
"""
_GPT2 = """
shard transformer.h.*.attn.c_attn.weight [_, (3 h/tp)]
shard transformer.h.*.attn.c_attn.bias [(3 h/tp)]
shard transformer.h.*.attn.c_proj.weight [_/tp, _]
shard transformer.h.*.mlp.c_fc.weight [_, _/tp]
shard transformer.h.*.mlp.c_fc.bias [_/tp]
shard transformer.h.*.mlp.c_proj.weight [_/tp, _]
vocab transformer.wte over tp
"""

LINES = dict.fromkeys(("Llama", "Qwen2", "Qwen3", "Mistral", "Olmo2", "Gemma2"), _LLAMA) | {
    "Phi3": _PHI3,
    "GPT2": _GPT2,
}
"""Family → its placement lines."""


def make(family: str, kv_heads: int, heads: int = 4) -> nn.Module:
    """A small causal language model of a family."""
    sizes: dict[str, Any] = {
        **_SIZES,
        "hidden_size": 8 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    name = f"{family}ForCausalLM"
    if family == "GPT2":
        name = "GPT2LMHeadModel"
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 48, "n_positions": 64, "use_cache": False,
                 "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    if family in ("Qwen3", "Gemma2"):
        sizes["head_dim"] = 8
    config = getattr(transformers, f"{family}Config")(**sizes)
    model: nn.Module = getattr(transformers, name)(config)
    return model
