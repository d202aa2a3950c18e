"""A mixture of experts as transformers has it (Mixtral), with random weights; nothing here speaks of parallelism."""

from __future__ import annotations

from transformers import MixtralConfig, MixtralForCausalLM


def mixtral(
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 64,
    experts: int = 8,
    top: int = 2,
    vocab: int = 256,
    length: int = 128,
) -> MixtralForCausalLM:
    """Make a causal language model: ``[B, S]`` int64 tokens to an output with ``logits`` of ``[B, S, vocab]``.

    In each layer every token is computed by ``top`` of ``experts``, which a router chooses.
    """
    config = MixtralConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        num_local_experts=experts,
        num_experts_per_tok=top,
        vocab_size=vocab,
        max_position_embeddings=length,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return MixtralForCausalLM(config)
