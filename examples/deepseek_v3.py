"""DeepSeek-V3 as transformers has it, with random weights; nothing here speaks of parallelism."""

from __future__ import annotations

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def deepseek_v3(
    layers: int = 4,
    dense: int = 1,
    width: int = 64,
    heads: int = 4,
    ffn: int = 128,
    expert_ffn: int = 32,
    experts: int = 16,
    top: int = 4,
    groups: int = 4,
    top_groups: int = 2,
    q_rank: int = 32,
    kv_rank: int = 16,
    nope: int = 16,
    rope: int = 8,
    value: int = 16,
    vocab: int = 256,
    length: int = 128,
) -> DeepseekV3ForCausalLM:
    """Make a causal language model: ``[B, S]`` int64 tokens to an output with ``logits`` of ``[B, S, vocab]``.

    Attention is latent: queries, keys and values are made from ``q_rank`` and ``kv_rank`` numbers of each token. The
    first ``dense`` layers have an MLP; in the others every token is computed by one expert that all share, and by
    ``top`` of ``experts``, which lie in ``top_groups`` of ``groups``. The module that predicts a second token is not
    part of it.
    """
    config = DeepseekV3Config(
        num_hidden_layers=layers,
        first_k_dense_replace=dense,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=ffn,
        moe_intermediate_size=expert_ffn,
        n_routed_experts=experts,
        num_experts_per_tok=top,
        n_group=groups,
        topk_group=top_groups,
        q_lora_rank=q_rank,
        kv_lora_rank=kv_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        vocab_size=vocab,
        max_position_embeddings=length,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return DeepseekV3ForCausalLM(config)
