"""Tiny models of transformers with random weights, one for each architecture that a family of plans serves."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import AutoModelForCausalLM

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"pad_token_id": 3}),
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "phi3": ("Phi3Config", {"pad_token_id": 3}),
    "olmo2": ("Olmo2Config", {"pad_token_id": 1}),
}


def decoder(name: str) -> nn.Module:
    """A decoder of two layers, four heads and two heads of keys and values."""
    config, more = DECODERS[name]
    made = getattr(transformers, config)(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(made)
    return model


def gpt2() -> nn.Module:
    """GPT-2 of two layers, its head tied to the embedding; its dropout stays."""
    made = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    model: nn.Module = AutoModelForCausalLM.from_config(made)
    return model
