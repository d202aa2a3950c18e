"""Llama as transformers has it, with random weights: nothing is downloaded, and nothing here speaks of parallelism."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM


def llama(
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 128,
    vocab: int = 256,
    length: int = 128,
    rope_theta: float = 500000.0,
) -> LlamaForCausalLM:
    """A causal language model: ``[B, S]`` int64 tokens to an output with ``logits`` of ``[B, S, vocab]``.

    Keys and values have ``kv_heads`` heads, each shared by ``heads / kv_heads`` query heads.
    """
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=length,
        rope_theta=rope_theta,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)
